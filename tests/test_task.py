import inspect
import math
import pickle
import random
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


def marking(items, *args):
    return [question._replace(truth=items[0].append(1)) for question in HONEST(list(range(len(items))), *args)]


def asking_less(question, text, hit_limit):
    return Grade((("all", len(question.truth)),), {"left": float(bool(question.truth.pop()))})


WRONG = {  # what of the toy task is replaced, by what, and what is said
    "too few": ("make_questions", lambda *args: HONEST(*args)[:3], "returned 3 questions, but 4 were requested"),
    "no Question": ("make_questions", lambda items, n, *rest: ["1?"] * n, "returned '1.': expected a Question"),
    "empty prompt": ("make_questions", asking(prompt=""), "expected a Question whose kind and stop"),
    "no stop": ("make_questions", asking(stop=None), "expected a Question whose kind and stop are"),
    "no whole stop_after": ("make_questions", asking(stop_after=None), "stop_after a whole number"),
    "kind": ("make_questions", asking(kind="shrot"), "LIMITS have no entry for questions of the kind 'shrot'"),
    "truth": ("make_questions", asking(truth={1}), "truth of .* has to be serialisable as JSON .*set"),
    "no held-out": ("load", lambda *args: (list(range(9)), []), "has 9 items to train on and 0 held out"),
    "long prompt": ("make_questions", asking(prompt="." * 24), "24 tokens, which leaves no room .* 24 positions"),
    "another Grade": ("grade", lambda *args: (0.5, ()), "it returned .0.5, .... not a Grade"),
    "no number": ("grade", with_pieces(("all", "1")), "piece .'all', '1'. has to be"),
    "not finite": ("grade", with_pieces(("all", math.nan)), "piece .'all', nan. has to be"),
    "same names": ("grade", with_pieces(("a", 1), ("a", 2)), "piece .'a', 2. has to be .a unique name"),
    "span a number": ("grade", with_pieces(("all", 1, 3)), "judges 3, which is not a .start, end. within the text"),
    "span outside": ("grade", with_pieces(("all", 1, (0, 99))), "judges .0, 99., which is not a"),
    "metric not finite": ("grade", with_pieces(right=math.nan), "metric 'right' is nan; it has to be a finite"),
    "metric's name": (
        "grade",
        with_pieces(**{"two words": 1.0}),
        "metric 'two words' needs a name of one word without",
    ),
    "metric reward": ("grade", with_pieces(reward=1.0), "'reward' needs .* other than reward, reward_max, frac_zero"),
    "metric of logs": (
        "grade",
        with_pieces(**{"earned/a": 1.0}),
        "metric 'earned/a' needs a name of one word with",
    ),
    "metric a number": ("grade", lambda *args: Grade((), {3: 1.0}), "metric 3 needs a name of one word"),
    "generator": ("make_questions", lambda *args: (q for q in HONEST(*args)), "returned no list of questions, but 4"),
    "no questions": ("make_questions", lambda *args: None, "returned no list of questions, but 4 were requested"),
    "kind a list": (
        "make_questions",
        asking(kind=["short"]),
        "expected a Question whose kind and stop are",
    ),
    "changes items": ("make_questions", marking, "make_questions changes its items, so a resumed"),
    "changes truth": ("grade", asking_less, "grade changes the truth of its question"),
    "load generator": (
        "load",
        lambda *args: (x for x in ([1], [2])),
        "load returned <generator .*; it has to return two",
    ),
    "load one list": ("load", lambda *args: list(range(99)), r"load returned \[0, 1, .*; it has to return two lists"),
    "load nothing": (
        "load",
        lambda *args: None,
        "load returned None; it has to return two lists",
    ),
    "load a set": ("load", lambda *args: {(1,), (2,)}, "load returned {.*; it has to return two lists"),
    "load sets": ("load", lambda *args: ({1}, {2}), r"load returned .\{1\}, \{2\}.; it has to return two lists"),
    "items no data": ("load", lambda *args: ([lambda: 0] * 9, [0] * 9), "items have to be data that pickle can copy"),
    "no start": (
        "start_model",
        lambda: None,
        "start_model returned None; it has to return the folder or the hub id of a model",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_sentence(mistake, toy_run, monkeypatch):
    name, value, sentence = WRONG[mistake]
    monkeypatch.setattr(toy, name, value)
    if mistake == "changes items":
        monkeypatch.setattr(toy, "load", lambda *args: ([[]] * 9, [[]] * 9))
    if mistake == "changes truth":
        monkeypatch.setattr(toy, "make_questions", asking(truth=[1] * 99))
    with pytest.raises(SystemExit, match=sentence) as end:
        toy_run(**{"MODEL": ""} if mistake == "no start" else {})
    assert "\n" not in str(end.value)


def test_whether_its_limit_cut_an_answer_off_reaches_its_grade():
    cuts = SimpleNamespace(grade=lambda question, text, cut: Grade((("cut", float(cut)),), {}))
    answers = task.grade_answers(cuts, [Answer(toy.questions(1)[0], "", [], cut) for cut in (False, True)])
    assert [answer.grade.reward for answer in answers] == [0, 1]


BAD_FILES = {  # what is said, and how the task's source is changed
    "has no DEFAULTS; nanorook/task.py says what": ("DEFAULTS = {}", ""),
    "has no grade; nanorook/task.py says what": ("def grade", "def grades"),
    "DEFAULTS has to be a dict": ("DEFAULTS = {}", "DEFAULTS = [1]"),
    "LIMITS has to be a dict": ('LIMITS = {"short": 4, "long": 7}', 'LIMITS = ["short"]'),
    "LIMITS has 3: 4; a kind must be one word": ('"short": 4', "3: 4"),
    "grade has to be a function of .question, text, hit_limit.: too many": ("text, hit_limit=False", "text"),
    "load has to be a function of .source, config.: 3 is not a callable": ("def grade", "load = 3\n\n\ndef grade"),
    "KL_WEIGHTS=.'other': 1. has to be a dict": ("LIMITS = {", 'KL_WEIGHTS = {"other": 1}\nLIMITS = {'),
    "KL_WEIGHTS=.'short': -1. has to be a dict": ("LIMITS = {", 'KL_WEIGHTS = {"short": -1}\nLIMITS = {'),
    "KL_WEIGHTS=0.5 has to be a dict": ("LIMITS = {", "KL_WEIGHTS = 0.5\nLIMITS = {"),
    "LIMITS has 'two words': 4; a kind must be one word, its limit at least 1 token": ('"short": 4', '"two words": 4'),
    "LIMITS has 'short': 0; a kind must be one word": ('"short": 4', '"short": 0'),
}


@pytest.mark.parametrize("sentence", BAD_FILES)
def test_a_wrong_file_is_one_sentence(sentence, tmp_path):
    file = tmp_path / "my.task.py"
    file.write_text(inspect.getsource(toy).replace(*BAD_FILES[sentence]))
    with pytest.raises(SystemExit, match=sentence):
        task.load_task(file)


def test_a_file_may_have_any_name_and_its_defaults_count(tmp_path, monkeypatch):
    monkeypatch.setitem(settings.GIVEN, "defaults", {})
    monkeypatch.setattr(settings, "SETTINGS", {})
    (tmp_path / "v1.2").mkdir()
    for name in ("my.task.py", "random.py", "rewards.py", "v1.2/a.py"):  # also one that is called like another module
        file = tmp_path / name
        file.write_text(inspect.getsource(toy).replace("DEFAULTS = {}", 'DEFAULTS = {"LR": 3.0}'))
        loaded = task.load_task(file)
        assert loaded.__file__ == str(file) and loaded.LIMITS == toy.LIMITS and task.load_task(file) is loaded
        pickle.dumps(loaded.load)  # by the name of its module
    settings.take_defaults(loaded.DEFAULTS)
    assert settings.setting("LR", 1.0, "") == 3.0
    (tmp_path / "task.txt").touch()
    for name, sentence in (("nothing.py", "no such Python file"), ("task.txt", "no such Python file")):
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            task.load_task(tmp_path / name)
    monkeypatch.chdir(tmp_path)  # which has a rewards.py: the project's own files are found nevertheless
    assert task.load_task("rewards.py") is sys.modules["rewards"]


def test_a_reward_is_the_sum_of_its_pieces_in_any_order():
    pieces = [("a", 0.1), ("b", 0.2, (0, 1)), ("c", 0.3), ("d", -0.6)]
    assert Grade(tuple(pieces), {}).reward == Grade(tuple(pieces[::-1]), {}).reward == 0


def test_every_grade_is_checked_not_only_the_first(toy_run, monkeypatch):
    calls, honest = [], toy.grade

    def grade(*args):
        calls.append(1)
        return honest(*args)._replace(pieces=(("all", math.nan if len(calls) > 8 + 16 + 3 else 0.5),))

    monkeypatch.setattr(toy, "grade", grade)  # an evaluation has 8 answers, a step 16: of the second step
    with pytest.raises(SystemExit, match="the piece .'all', nan. has to be"):
        toy_run(STEPS=3)


def test_a_task_that_draws_from_the_global_random_module_resumes_to_the_same(toy_run, monkeypatch, tmp_path):
    load, grade = toy.load, toy.grade

    def shuffled(*args):
        found = load(*args)
        random.shuffle(found[0])
        return found

    def make_questions(items, count, rng, config):
        random.shuffle(items)
        return HONEST(items[:50], count, random, config)

    for name, function in (("load", shuffled), ("make_questions", make_questions)):
        monkeypatch.setattr(toy, name, function)
    monkeypatch.setattr(toy, "grade", lambda *args: grade(*args)._replace(pieces=(("all", random.random()),)))
    settings = dict(LR_SCHEDULE="constant", EVAL_EVERY=0, EVAL_POSITIONS=1)
    toy_run("whole", STEPS=3, **settings)
    random.seed(7)
    toy_run(STEPS=1, **settings)
    random.seed(8)
    toy_run(STEPS=3, **settings)
    assert toy.left_by(tmp_path / "out")[0] == toy.left_by(tmp_path / "whole")[0]


@pytest.mark.parametrize("mistake", ["open('/nowhere')", "{}['label']", "float('a')"])
def test_an_error_in_the_tasks_own_code_is_told_as_the_tasks(mistake, tmp_path, toy_model, capsys):
    source = inspect.getsource(toy).replace("    some = rng", f"    {mistake}\n    some = rng")
    (tmp_path / "mine.py").write_text(source)
    said = toy.main(tmp_path / "out", MODEL=toy_model, TASK=tmp_path / "mine.py")
    again = "the same command starts the run from the beginning."
    assert said == f"error: this error came from the task, {tmp_path}/mine.py; {again}"
    assert f'File "{tmp_path}/mine.py", line' in capsys.readouterr().err
