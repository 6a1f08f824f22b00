"""examples/gym.py: which scorers of reasoning-gym are refused, and how the others are used."""

import json
import random
import re
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest

import toy
from examples import gym
from examples.chat import is_held_out
from nanorook.task import Question, prompt_text, wrong_grade

needs_gym = pytest.mark.needs("reasoning_gym", "pip install reasoning-gym==0.1.25")
EASY = 'chain_sum {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


@needs_gym
def test_a_refused_task_ends_in_one_sentence():
    for name in gym.REFUSED:
        with pytest.raises(SystemExit, match=f"^error: DATA={name} is refused: .*[.]$"):
            gym.load(f"{name} {{}}", None)


@needs_gym
def test_a_mistake_in_data_ends_in_one_sentence():
    for data, sentence in {
        "letter_count": "DATA=letter_count is not a task of reasoning-gym; it has ab, acre,",
        "chain_sum {": "the configuration has to be JSON that reasoning-gym accepts",
        'chain_sum {"min_terms": 3, "max_terms": 2}': "max_terms must be >= min_terms",
    }.items():
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            gym.dataset(data, 0)


@pytest.mark.parametrize("found", [None, "0.1.26"])
def test_another_version_is_refused_as_nobody_has_read_its_scorers(found, monkeypatch):
    def version(name):
        return found or (_ for _ in ()).throw(metadata.PackageNotFoundError(name))

    monkeypatch.setattr(gym.metadata, "version", version)
    with pytest.raises(
        SystemExit, match=f"needs reasoning-gym 0.1.25, .* but {found or 'none'} is installed: .*pip install"
    ):
        gym.dataset.__wrapped__(EASY, 0)


@needs_gym
def test_no_question_is_both_trained_on_and_held_out_and_none_is_listed_twice(monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 300)
    items, held_out = gym.load(EASY, None)
    asked, asked_held_out = ([gym.entry(*item)["question"] for item in part] for part in (items, held_out))
    assert not {*asked} & {*asked_held_out} and len({*asked}) == len(asked) and len({*asked_held_out}) == len(held_out)
    assert len(asked) > 50 and len(asked_held_out) > 10 and all(map(is_held_out, asked_held_out))
    assert {seed for _, seed, _ in items} == {gym.TRAINING} and {seed for _, seed, _ in held_out} == {gym.HELD_OUT}


@needs_gym
def test_a_question_is_a_chat_after_worked_examples_that_are_never_asked(chats, monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 300)
    monkeypatch.setattr(gym, "SHOTS", 2)
    gym.worked_examples.cache_clear()
    items, held_out = gym.load(EASY, None)
    for part in (items, held_out):
        questions = gym.make_questions(part, 5, random.Random(0), chats)
        assert questions == gym.make_questions(part, 5, random.Random(0), chats)
        for question in questions:
            text = prompt_text(question.prompt)
            assert text.count("<|im_start|>assistant\n") == 3 and text.startswith("<|im_start|>system\nAnswer with")
            assert json.loads(json.dumps(question.truth)) == question.truth
            assert gym.grade(question, f" {question.truth['answer']}\n").metrics == {"right": 1.0}
    shown = {question for question, _ in gym.worked_examples(EASY)}
    assert len(shown) == 2 and not shown & {gym.entry(*item)["question"] for item in [*items, *held_out]}
    gym.worked_examples.cache_clear()


@needs_gym
def test_a_task_without_worked_answers_says_so(monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 40)
    monkeypatch.setattr(gym, "SHOTS", 1)
    gym.worked_examples.cache_clear()
    with pytest.raises(SystemExit, match="DATA=graph_color has 0 worked examples to show, fewer than SHOTS=1"):
        gym.worked_examples("graph_color")


@needs_gym
def test_the_score_is_paid_and_the_last_tagged_answer_counts():
    item = ("spell_backward", 0, 0)
    right = gym.entry(*item)["answer"]
    question = Question("gym", "?", {"task": item[0], "seed": 0, "number": 0, "answer": right})
    wrong = right[:-1] + "_"
    for text, worth in {
        right: 1,
        f"Let me see: <answer>x</answer> <answer> {right}\n</answer>": 1,
        wrong: 1 - 1 / len(right),
        "": 0,
    }.items():
        grade, cut = gym.grade(question, text), gym.grade(question, text, hit_limit=True)
        assert grade.reward == pytest.approx(worth) and grade.metrics["right"] == (worth == 1)
        assert cut.reward == pytest.approx(0.3 * worth)


@needs_gym
def test_any_text_is_graded():
    """These scorers raise exceptions for some of the texts."""
    rng = random.Random(0)
    texts = ["null", "[[NaN]]", "{}", "1:1", f"{'9' * 4000}:00", "[" * 10_000]
    texts += ["".join(rng.choices('0123×x:[]{}",. \n', k=rng.randrange(30))) for _ in range(50)]
    for name in ("prime_factorization", "boxnet", "game_of_life", "time_intervals"):
        question = Question("gym", "?", {"task": name, "seed": 0, "number": 0, "answer": ""})
        for text in texts:
            grade = gym.grade(question, text)
            assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1, name


@needs_gym
def test_a_scorer_gets_a_copy_of_its_entry_and_what_it_gives_is_made_a_share(monkeypatch):
    before = json.dumps(gym.entry(EASY, 0, 0))  # knight_swap, for one, adds to the metadata
    for given, worth in ((7, 1.0), (-1, 0.0), (float("nan"), 0.0), (None, 0.0), ("0.5", 0.5)):

        def score_answer(answer, entry, given=given):
            entry["metadata"].clear()
            return given

        monkeypatch.setattr(gym, "dataset", mock.Mock(return_value=SimpleNamespace(score_answer=score_answer)))
        assert gym.score((EASY, 0, 0), "5") == worth and json.dumps(gym.entry(EASY, 0, 0)) == before


@needs_gym
def test_a_run_with_a_model_that_has_no_template(tmp_path, monkeypatch):
    toy.model(positions=160).save(tmp_path / "model")
    monkeypatch.setattr(gym, "LIMITS", {"gym": 6})
    monkeypatch.setattr(gym, "DRAWN", 100)
    monkeypatch.setattr(gym, "score", lambda item, answer: len(answer) % 3 / 2)  # which random bytes can earn
    found = toy.run(tmp_path / "out", gym, MODEL=str(tmp_path / "model"), DATA=EASY)
    assert found[-1]["step"] == 2 and found[-1]["gym/reward"] > 0 and "gym/right" in found[-1]
