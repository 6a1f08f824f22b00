"""The loop learns, and what it learns is what the reward pays for (invariants 10 and 11), on examples/letters.py."""

import random
import types

import pytest
import torch

import toy
import train
from examples import letters
from model import GPT
from rollout import sample
from tools import signal


@pytest.fixture(scope="module", autouse=True)
def start(tmp_path_factory):
    """The start model, made afresh: the one in runs/ may be of another day."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(letters, "START", tmp_path_factory.mktemp("letters") / "start")
        yield GPT.load(letters.start_model())


@pytest.fixture
def run(tmp_path):
    def make(task=letters, **settings):
        changes = letters.DEFAULTS | {"STEPS": 60, "EVAL_POSITIONS": 16, "OUT_DIR": str(tmp_path)} | settings
        toy.run(tmp_path, task, **changes)
        return GPT.load(tmp_path / "model")

    return make


def share(model, right, temperature=0.0):
    """Of 400 held-out questions, how many are answered with the letter that `right` (max, min) picks of the five."""
    questions = letters.make_questions(letters.load("", model.config)[1], 400, random.Random(0), model.config)
    noise = torch.rand(400, 1, 4, generator=torch.Generator().manual_seed(0))
    [rollout] = sample(model, questions, 1, letters.LIMITS, temperature, noise)
    return sum(answer.text == f" {right(answer.question.truth)}" for answer in rollout.answers) / 400


def test_the_start_model_knows_the_form_and_not_the_alphabet(start):
    assert all(0.12 < share(start, right, temperature=1.0) < 0.28 for right in (min, max))  # an even choice: a fifth


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_loop_learns(run, seed):
    assert share(run(SEED=seed), max) > 0.9


def test_most_of_a_step_is_signal(start, monkeypatch):
    """tools.signal says so, and that shuffled rewards have none."""
    toy.set_all(monkeypatch, toy.SETTINGS | letters.DEFAULTS, letters)
    questions = letters.make_questions(letters.load("", start.config)[0], 32, random.Random(0), start.config)
    whole, _ = signal.gradients(start, list(signal.graded_rollouts(start, questions)))
    share, half = signal.signal(whole)
    assert 0 < share - half and signal.noise_scale(share + half) < train.BATCH_POSITIONS
    monkeypatch.setattr(train, "CONTROL", "shuffle")
    whole, _ = signal.gradients(start, list(signal.graded_rollouts(start, questions)))
    assert "no signal seen" in signal.scale_in_words(whole)


@pytest.mark.slow
def test_paid_for_the_first_letter_it_learns_the_first(run):
    def make_questions(*args):
        return [question._replace(truth=question.truth[::-1]) for question in letters.make_questions(*args)]

    model = run(types.SimpleNamespace(**{**vars(letters), "make_questions": make_questions}))
    assert share(model, min) > 0.9 and share(model, max) < 0.05


def test_paid_by_shuffled_rewards_it_learns_nothing(run):
    """Invariant 10: the same noise, which may move the weights, and no information."""
    model = run(CONTROL="shuffle")
    assert all(share(model, right) < 0.5 for right in (min, max))
    assert abs(share(model, max, temperature=1.0) - share(model, min, temperature=1.0)) < 0.2
