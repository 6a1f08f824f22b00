import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import toy
import train
from model import GPT
from nanorook.task import Grade
from tools import doctor

NAMES = "weights,computing,questions,long completions,short completions,long rewards,short rewards,start,first step"
NAMES += ",update,learning"


@pytest.fixture
def examine(monkeypatch):
    """The checks by name: of train.py with changed functions, of another policy, reference, ..."""

    def run(policy=None, reference=None, parameters=None, questions=None, **settings):
        task = SimpleNamespace(**{**vars(toy), "LIMITS": {"short": 19, "long": 19}})  # few answers are cut off
        usual = dict(task=task, BATCH_POSITIONS=8, GROUP_SIZE=4, COMPILE="0", LR=1e-3, DEVICE="cpu")
        for name, value in (usual | settings).items():
            monkeypatch.setattr(train, name, value)
        policy, reference = policy or toy.model(), reference or train.make_reference(toy.model())
        optimizer = torch.optim.AdamW(parameters or policy.parameters(), lr=train.LR, weight_decay=0)
        checks = doctor.run_checks(policy, reference, [optimizer], questions or toy.questions(8))
        return {check.name: check for check in checks}

    return run


def said(found, name, words):
    wrong = next(check for check in found.values() if check.sentence)
    assert name in wrong.name and words in wrong.sentence, wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_rollout_passes_every_check(examine, dtype):
    found = examine(toy.model().set_compute_dtype(dtype), train.make_reference(toy.model().set_compute_dtype(dtype)))
    assert sorted(found) == sorted(NAMES.split(","))
    assert dtype == torch.bfloat16 or not any(check.sentence for check in found.values()), found
    assert not any(found[name].sentence for name in ("computing", "start"))


def test_weights_that_cannot_be_trained_and_a_machine_that_multiplies_wrongly(examine, monkeypatch):
    random, broken = GPT(toy.model().config), toy.model()
    random.tokenizer = broken.tokenizer
    said(examine(random), "weights", "those of an untrained model")
    for p in broken.parameters():
        p.data.zero_()
    assert list(found := examine(broken)) == ["weights"] and "untrained" in found["weights"].sentence
    linear = torch.nn.functional.linear
    wrong = lambda x, *rest: linear(x, *rest) * (1.02 if x.dtype == torch.float32 else 1)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    said(examine(), "computing", "float32 is off by")


def test_weights_halfway_between_two_numbers_of_bf16():
    """fp16 has three more bits than bf16, so an eighth of its numbers lie halfway between two of bf16."""
    model = toy.model()
    assert not doctor.weights(model.set_compute_dtype(torch.bfloat16)).sentence
    for p in model.parameters():
        p.data = p.data.half().float()
    found = doctor.weights(model)
    assert found.sentence.startswith("1") and "% of the weights lie halfway" in found.sentence
    assert not doctor.weights(model.set_compute_dtype(torch.float32)).sentence


def test_a_cap_on_rewards_is_not_a_likely_answer(examine, monkeypatch):
    def least(question, text, *_):
        return Grade((("capped", min(0.2, len(text) / 10)),), {"structure": 1.0})

    monkeypatch.setattr(toy, "grade", least)
    said(examine(), "rewards", "capped at 0.2: penalise by a factor")
    likely = [SimpleNamespace(question=toy.questions(1)[0], text="abc", grade=least(None, "abc"))] * 8
    assert not doctor.rewards(SimpleNamespace(answers=likely, advantages=torch.zeros(8, 3))).sentence
    asked, nothing = toy.questions(1)[0], Grade((("all", 0.0),), {"structure": 1.0})
    unpaid = [SimpleNamespace(question=asked, text=str(i), grade=nothing) for i in range(8)]
    unpaid = SimpleNamespace(answers=unpaid, advantages=torch.zeros(8, 3))
    assert not doctor.rewards(unpaid).sentence  # another check says so


def test_a_truth_that_is_a_stub_or_missing(examine, monkeypatch):
    """Where a question lacks labels, grade() asks the engine, and its metrics say if that knew."""
    same = [question._replace(truth=7) for question in toy.questions(8)]
    said(examine(questions=same), "questions", "have the same reference answer")
    one_lacks_it = [*toy.questions(7), same[0]._replace(truth=None)]
    said(examine(questions=one_lacks_it), "questions", "1 have no reference answer")
    yes_or_no = [question._replace(truth=i % 2 == 0) for i, question in enumerate(toy.questions(8))]
    assert not examine(questions=yes_or_no)["questions"].sentence
    questions, grade = [question._replace(truth=None) for question in toy.questions(8)], toy.grade
    monkeypatch.setattr(toy, "grade", lambda *args: grade(*args)._replace(metrics={"unlabelled": 0.0}))
    assert not examine(questions=questions)["questions"].sentence


SPOILED = {
    "not the text": lambda r: replace(r, completions=r.completions.where(r.completions > 250, r.completions + 1)),
    "so it is not trained": lambda r: replace(r, completion_mask=r.completion_mask & (r.completions != 256)),
    "GROUP_SIZE=4": lambda r: toy.some_rows(r, [*range(0, len(r.answers), 2)]),
    "training disagree by": lambda r: replace(r, rollout_logprobs=r.rollout_logprobs - 11.5),
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_rollout_that_is_not_what_was_sampled(examine, monkeypatch, words):
    add = train.add_advantages

    def spoiled(rollout, *rest):
        add(rollout, *rest)
        vars(rollout).update(vars(SPOILED[words](rollout)))

    monkeypatch.setattr(train, "add_advantages", spoiled)
    said(examine(), "start" if "disagree" in words else "completions", words)


WORTHS = {
    "scale them": lambda r: 1e6 * r,
    "not by a cap": lambda r: 0.05,
    "use none": lambda r: 0.5 + 1e-4 * r,  # divided by a tiny deviation
    "No short answer gets a reward": lambda r: r - 9,
}


@pytest.mark.parametrize("words", WORTHS)
def test_rewards_that_teach_nothing_or_too_much(examine, monkeypatch, words):
    honest = toy.grade
    monkeypatch.setattr(toy, "grade", lambda *args: toy.Grade((("all", WORTHS[words](honest(*args).reward)),), {}))
    said(examine(SCALE_REWARDS="std"), "first step" if "No short" in words else "rewards", words)


def test_sides_that_differ(examine, monkeypatch):
    said(examine(reference=train.make_reference(toy.model(1)), KL_COEF=1e4), "start", "not the start model")
    sample = doctor.sample
    monkeypatch.setattr(doctor, "sample", lambda m, q, g, n, _, *rest: sample(m, q, g, n, 1.0, *rest))
    said(examine(TEMPERATURE=0.7), "start", "training disagree by")


def test_learning_rates_and_signs(examine, monkeypatch):
    said(examine(LR=0.5), "learning", "lower LR=0.5")
    policy = toy.model()
    said(examine(policy, policy.inference_copy(torch.float32)), "update", "The reference moved with the policy")
    said(examine(LR=0.0), "update", "did not move")
    said(examine(parameters=copy.deepcopy(toy.model()).parameters()), "update", "whether the optimizer has all of them")
    assert "update" in (text := examine(CONTROL="zero")) and "learning" not in text
    loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *a, **k: (-(result := loss(*a, **k))[0], result[1]))
    said(examine(CONTROL="none"), "learning", "look for a wrong sign")


def test_a_kind_whose_questions_stop_at_different_texts_is_one_kind(examine, monkeypatch):
    questions = [q._replace(kind="long", stop="e" * (n > 3)) for n, q in enumerate(toy.questions(8))]
    add, paid = train.add_advantages, iter([1, 0])  # of the two rollouts only the first is paid

    def scaled(rollout, *rest):
        add(rollout, *rest)
        rollout.advantages *= next(paid)

    monkeypatch.setattr(train, "add_advantages", scaled)
    assert "learning" in examine(questions=questions)


@pytest.mark.slow
def test_the_command():
    result = toy.user_runs("-m", "tools.doctor", "BATCH_POSITIONS=4", "GROUP_SIZE=4", "DTYPE=float32")
    assert result.returncode == 0 and "all checks are ok" in result.stdout, result.stdout + result.stderr
