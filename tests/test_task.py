import inspect
import math
import re
import sys
from types import SimpleNamespace

import pytest

import toy
from nanorook import settings, task
from nanorook.task import Grade
from rollout import Answer

HONEST = toy.make_questions


def with_pieces(*pieces, **metrics):
    return lambda *args: Grade(pieces, metrics)


def asking(**changes):
    return lambda *args: [question._replace(**changes) for question in HONEST(*args)]


WRONG = {  # what of the toy task is replaced, by what, and what is said
    "too few": ("make_questions", lambda *args: HONEST(*args)[:3], "returned 3 questions where 4 were asked for"),
    "no Question": ("make_questions", lambda items, n, *rest: ["1?"] * n, "returned '1.', which is no Question"),
    "empty prompt": ("make_questions", asking(prompt=""), "which is no Question with a prompt"),
    "no stop": ("make_questions", asking(stop=None), "which is no Question with a prompt and a `stop` of text"),
    "kind": ("make_questions", asking(kind="shrot"), "LIMITS have no entry for questions of the kind 'shrot'"),
    "truth": ("make_questions", asking(truth={1}), "truth of .* has to be what JSON can hold .*set"),
    "no held-out": ("load", lambda *args: (list(range(9)), []), "has 9 items to train on, .* and 0 held out"),
    "long prompt": ("make_questions", asking(prompt="." * 24), "24 tokens leaves no room .* 24 positions"),
    "another Grade": ("grade", lambda *args: (0.5, ()), "it returned .0.5, .... not a Grade"),
    "no number": ("grade", with_pieces(("all", "1")), "piece .'all', '1'. has to be"),
    "not finite": ("grade", with_pieces(("all", math.nan)), "piece .'all', nan. has to be"),
    "same names": ("grade", with_pieces(("a", 1), ("a", 2)), "piece .'a', 2. has to be .a name of its own"),
    "span a number": ("grade", with_pieces(("all", 1, 3)), "judges 3, which is no .start, end. within the text"),
    "span outside": ("grade", with_pieces(("all", 1, (0, 99))), "judges .0, 99., which is no"),
    "metric not finite": ("grade", with_pieces(right=math.nan), "metric 'right' is nan; it has to be one word"),
    "metric's name": ("grade", with_pieces(**{"two words": 1.0}), "metric 'two words' is 1.0; it has to be one word"),
    "metric reward": ("grade", with_pieces(reward=1.0), "metric 'reward' is 1.0; it has to be one word, not `reward`"),
    "limits too small": ("grade", with_pieces(structure=0.0), "raise the task's LIMITS {'short': 1"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_sentence(mistake, toy_run, monkeypatch):
    name, value, sentence = WRONG[mistake]
    monkeypatch.setattr(toy, name, value)
    if mistake == "limits too small":
        monkeypatch.setattr(toy, "LIMITS", {"short": 1, "long": 1})
    with pytest.raises(SystemExit, match=sentence) as end:
        toy_run()
    assert "\n" not in str(end.value)


def test_whether_its_limit_cut_an_answer_off_reaches_its_grade():
    cuts = SimpleNamespace(grade=lambda question, text, cut: Grade((("cut", float(cut)),), {}))
    answers = task.graded(cuts, [Answer(None, "", [], cut) for cut in (False, True)])
    assert [answer.grade.reward for answer in answers] == [0, 1]


BAD_FILES = {  # what is said, and how the task's source is changed
    "has no DEFAULTS; nanorook/task.py says what": ("DEFAULTS = {}", ""),
    "has no grade; nanorook/task.py says what": ("def grade", "def grades"),
    "LIMITS has 'two words': 4; a kind is one word, its limit at least 1 token": ('"short": 4', '"two words": 4'),
    "LIMITS has 'short': 0; a kind is one word": ('"short": 4', '"short": 0'),
}


@pytest.mark.parametrize("sentence", BAD_FILES)
def test_a_wrong_file_is_one_sentence(sentence, tmp_path):
    file = tmp_path / "my.task.py"
    file.write_text(inspect.getsource(toy).replace(*BAD_FILES[sentence]))
    with pytest.raises(SystemExit, match=sentence):
        task.load(file)


def test_a_file_may_have_any_name_and_its_defaults_count(tmp_path, monkeypatch):
    monkeypatch.setitem(settings.GIVEN, "defaults", {})
    monkeypatch.setattr(settings, "SETTINGS", {})
    for name in ("my.task.py", "random.py", "rewards.py"):  # also one that is called like another module
        file = tmp_path / name
        file.write_text(inspect.getsource(toy).replace("DEFAULTS = {}", 'DEFAULTS = {"LR": 3.0}'))
        loaded = task.load(file)
        assert loaded.__file__ == str(file) and loaded.LIMITS == toy.LIMITS and task.load(file) is loaded
    assert settings.setting("LR", 1.0, "") == 3.0
    (tmp_path / "task.txt").touch()
    for name, sentence in (("nothing.py", "no such Python file"), ("task.txt", "no such Python file")):
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            task.load(tmp_path / name)
    monkeypatch.chdir(tmp_path / "..")  # from another folder the project's own tasks are found
    assert task.load("rewards.py") is sys.modules["rewards"]


def test_a_reward_is_the_sum_of_its_pieces_in_any_order():
    pieces = [("a", 0.1), ("b", 0.2, (0, 1)), ("c", 0.3), ("d", -0.6)]
    assert Grade(tuple(pieces), {}).reward == Grade(tuple(pieces[::-1]), {}).reward == 0
