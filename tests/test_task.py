import inspect
import math
import random
import sys
from types import SimpleNamespace

import pytest

import toy
from nanorook import settings, task
from nanorook.task import Grade
from rollout import Answer

HONEST = toy.make_questions


def asking(**changes):
    return lambda *args: [question._replace(**changes) for question in HONEST(*args)]


def marking(items, *args):
    return [question._replace(truth=items[0].append(1)) for question in HONEST(list(range(len(items))), *args)]


def asking_less(question, text, hit_limit):
    return Grade((("all", len(question.truth)),), {"left": float(bool(question.truth.pop()))})


WRONG = {  # what the toy task has instead, and what is said
    "returned 3 questions, but 4 were requested": dict(make_questions=lambda *args: HONEST(*args)[:3]),
    "returned no list of questions, but 4": dict(make_questions=lambda *args: (q for q in HONEST(*args))),
    "returned '1.': expected a Question": dict(make_questions=lambda items, n, *rest: ["1?"] * n),
    "expected a Question whose prompt is not empty": dict(make_questions=asking(prompt="")),
    "no entry for questions of the kind 'shrot'": dict(make_questions=asking(kind="shrot")),
    "24 tokens leaves no room .* 24 positions": dict(make_questions=asking(prompt="." * 24)),
    "changes its items, so a resumed": dict(make_questions=marking, load=lambda *args: ([[]] * 9, [[]] * 9)),
    "has 9 items to train on and 0 held out": dict(load=lambda *args: (list(range(9)), [])),
    r"load returned \[0, 1, .*; it has to return two lists": dict(load=lambda *args: list(range(99))),
    "changes the truth of its question": dict(grade=asking_less, make_questions=asking(truth=[1] * 99)),
    "it returned .0.5, .... not a Grade": dict(grade=lambda *args: (0.5, ())),
    "start_model returned None": dict(start_model=lambda: None),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_mistake_is_one_sentence(sentence, toy_run, monkeypatch):
    for name, value in WRONG[sentence].items():
        monkeypatch.setattr(toy, name, value)
    with pytest.raises(SystemExit, match=sentence) as end:
        toy_run(**{"MODEL": ""} if "start_model" in sentence else {})
    assert "\n" not in str(end.value)


def test_a_grade_is_checked():
    assert not task.wrong_grade(Grade((("a", 1), ("b", 0.5, (0, 2), (2, 2))), {"right": 1}), "ab")
    for pieces, metrics, sentence in [
        ([("all", math.nan)], {}, "the piece 'all' is nan"),
        ([("a", 1), ("a", 2)], {}, "under a name of its own"),
        ([("all", 1, (0, 3))], {}, "judges (0, 3), which is not within the text"),
        ([], {"right": math.nan}, "the metric 'right' is nan"),
        ([], {"two words": 1.0}, "the metric 'two words' needs a name of one word"),
        ([], {"earned/a": 1.0}, "the metric 'earned/a' needs a name of one word"),
        ([], {"reward": 1.0}, "other than reward"),
    ]:
        assert sentence in task.wrong_grade(Grade(tuple(pieces), metrics), "ab")


def test_whether_its_limit_cut_an_answer_off_reaches_its_grade():
    cuts = SimpleNamespace(grade=lambda question, text, cut: Grade((("cut", float(cut)),), {}))
    answers = task.grade_answers(cuts, [Answer(toy.questions(1)[0], "", [], cut) for cut in (False, True)])
    assert [answer.grade.reward for answer in answers] == [0, 1]


BAD_FILES = {  # what is said, and how the task's source is changed
    "has no grade; nanorook/task.py says what": ("def grade", "def grades"),
    "KL_WEIGHTS has 'other', which is no kind of question": ("LIMITS = {", 'KL_WEIGHTS = {"other": 1}\nLIMITS = {'),
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
    settings.take_defaults(loaded.DEFAULTS)
    assert settings.setting("LR", 1.0, "") == 3.0
    with pytest.raises(SystemExit, match="no such Python file"):
        task.load_task(tmp_path / "nothing.py")
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
    with pytest.raises(SystemExit, match="the piece 'all' is nan"):
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
    toy_run("whole", **settings)
    random.seed(7)
    toy_run(STEPS=1, **settings)
    random.seed(8)
    toy_run(**settings)
    assert toy.left_by(tmp_path / "out")[0] == toy.left_by(tmp_path / "whole")[0]


def test_an_error_of_a_file_in_the_tasks_own_code_keeps_its_traceback(tmp_path, toy_model):
    source = inspect.getsource(toy).replace("    some = rng", "    open('/nowhere')\n    some = rng")
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        toy.main(tmp_path / "out", MODEL=toy_model, TASK=tmp_path / "mine.py")
