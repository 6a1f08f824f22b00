"""tools/doctor.py: a healthy batch passes every check, and each incident of docs/incidents.md is named."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo
import toy
import train
from model import GPT
from rollout import Batch
from tools import doctor

ROOT = Path(__file__).parent.parent
CHECKS = ["weights", "computing", "questions", "long completions", "short completions", "rewards", "logprobs", "KL"]
CHECKS += ["advantages", "gradient", "update", "learning"]


@pytest.fixture
def setting(monkeypatch):
    task = SimpleNamespace(**{**vars(toy), "LIMITS": {"short": 19, "long": 19}})  # few answers are cut off
    monkeypatch.setattr(train, "task", task)
    return lambda **values: [monkeypatch.setattr(train, name, value) for name, value in values.items()]


@pytest.fixture
def examine(setting):
    """The checks by name: of train.py with changed functions, of another policy, reference, ..."""

    def run(policy=None, reference=None, parameters=None, questions=None, **settings):
        setting(**{**dict(BATCH_POSITIONS=8, GROUP_SIZE=4, COMPILE="0", LR=1e-3, DEVICE="cpu"), **settings})
        policy, reference = policy or healthy(), reference or train.make_reference(healthy(), "cpu", torch.float32)
        optimizer = torch.optim.AdamW(parameters or policy.parameters(), lr=train.LR, weight_decay=0)
        return {
            found.name: found for found in doctor.examine(policy, reference, optimizer, questions or toy.questions(8))
        }

    return run


def healthy(seed=0):
    model = toy.model(seed)
    with torch.no_grad():
        model.h[0].attn.c_attn.bias.add_(0.01)  # a trained model has biases
    return model


def said(found, name, *words):
    """`name` is the first check that is wrong, and it says all of the words."""
    assert next(check.name for check in found.values() if check.sentence) == name
    assert all(word in found[name].sentence for word in words), found[name].sentence


def handed_over(monkeypatch, setting, change_batch=None, change_grade=None):
    """Completions of the healthy model, changed before they are trained on."""
    original = train.rollout

    def rollout(model, questions, step):
        results = []
        for batch, samples in original(healthy(), questions, step):
            samples = [s._replace(grade=change_grade(s.grade)) if change_grade else s for s in samples]
            batch = train.with_advantages(batch, samples, torch.tensor(1.0))
            results.append((change_batch(batch) if change_batch else batch, samples))
        return results

    monkeypatch.setattr(train, "rollout", rollout)


def paid(change):
    def graded(grade):
        return grade._replace(reward=change(grade.reward), pieces=(("all", change(grade.reward), None),))

    return graded


def dropout(model):
    model.h[0].mlp["c_proj"].register_forward_hook(lambda layer, x, y: torch.nn.functional.dropout(y, 0.3))
    torch.manual_seed(0)
    return model


def test_a_healthy_batch_passes_every_check(examine):
    found = examine()
    assert sorted(found) == sorted(CHECKS) and not any(check.sentence for check in found.values()), found
    assert found["computing"].figures["error"] < 1e-5 and found["logprobs"].figures["gap"] < 1e-5
    assert found["KL"].figures["per token"] < 1e-7 and found["learning"].figures["gain"] > 0


def test_bf16_passes_too(examine):
    policy = healthy().use(torch.bfloat16)
    found = examine(policy, train.make_reference(healthy(), "cpu", torch.bfloat16))
    assert len(found) == len(CHECKS) and not any(found[name].sentence for name in ("computing", "logprobs", "KL"))


def test_weights_that_cannot_be_trained(examine):
    random = GPT(toy.model().config)
    random.tokenizer = toy.model().tokenizer
    said(examine(random), "weights", "never loaded or trained")
    broken = healthy()
    broken.wpe.weight.data[3, 2] = math.nan
    assert list(found := examine(broken)) == ["weights"] and "NaN" in found["weights"].sentence


def test_a_machine_that_multiplies_wrongly(examine, monkeypatch):
    linear = torch.nn.functional.linear
    wrong = lambda x, *rest: linear(x, *rest) * (1.02 if x.dtype == torch.float32 else 1)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    said(examine(), "computing", "products in float32 are wrong")


def test_a_stub_in_the_place_of_the_truth(examine):
    same = [question._replace(truth=7) for question in toy.questions(8)]
    said(examine(questions=same), "questions", "that of a stub")
    said(examine(questions=[*toy.questions(7), same[0]._replace(truth=None)]), "questions", "Only 7 of 8")


@pytest.mark.parametrize(
    "change, name, words",
    [
        (lambda b: b._replace(tokens=b.tokens.where(b.tokens > 250, b.tokens + 1)), "completions", "not the text"),
        (lambda b: b._replace(completion_mask=b.completion_mask & (b.tokens != 256)), "completions", "goes untrained"),
        (lambda b: Batch(*b[:2], *(x if x is None else x[::2] for x in b[2:])), "completions", "GROUP_SIZE=4"),
        (lambda b: b._replace(rollout_logprobs=b.rollout_logprobs - 11.5), "logprobs", "other weights or token ids"),
    ],
)
def test_a_batch_that_is_not_what_was_sampled(examine, monkeypatch, setting, change, name, words):
    handed_over(monkeypatch, setting, change)
    found = examine()
    wrong = next(check for check in found.values() if check.sentence)
    assert name in wrong.name and words in wrong.sentence, wrong


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: math.nan, "NaN"),
        (lambda r: r - 9, "instead of a cliff"),
        (lambda r: 1e6 * r, "scale them"),
        (lambda r: 0.05, "not by a cap"),
        (lambda r: float(r > 0.3), "grade in steps"),
        (lambda r: min(r, 0.3), "not by a cap"),
    ],
)
def test_rewards_that_teach_nothing_or_too_much(examine, monkeypatch, setting, change, words):
    handed_over(monkeypatch, setting, change_grade=paid(change))
    said(examine(), "rewards", words)


def test_pieces_that_do_not_add_up(examine, monkeypatch, setting):
    handed_over(monkeypatch, setting, change_grade=lambda grade: grade._replace(reward=grade.reward + 0.1))
    said(examine(), "rewards", "have to add up")


def test_near_constant_rewards_that_are_divided_by_their_deviation(examine, monkeypatch, setting):
    handed_over(monkeypatch, setting, change_grade=paid(lambda r: 0.5 + 1e-4 * r))
    said(examine(SCALE_REWARDS="group"), "advantages", "SCALE_REWARDS=group", "noise into signal")


def test_dropout_on_one_side(examine, monkeypatch, setting):
    said(examine(dropout(healthy())), "computing", "remove dropout")
    reference = dropout(train.make_reference(healthy(), "cpu", torch.float32))
    said(examine(reference=reference), "KL", "look for dropout", "do not raise the threshold")


def test_a_temperature_that_one_side_leaves_out(examine, monkeypatch, setting):
    def forward(model, batch):
        logits = model.score(batch.prompts, batch.prompt_lengths, batch.tokens)
        return grpo.logprobs_and_entropy(logits, batch.tokens)

    with monkeypatch.context() as patch:
        patch.setattr(train, "forward", forward)
        said(examine(TEMPERATURE=0.7), "logprobs", "Training leaves out TEMPERATURE=0.7")
    sample = train.sample
    monkeypatch.setattr(train, "sample", lambda m, q, g, temperature, *rest: sample(m, q, g, 1.0, *rest))
    said(examine(TEMPERATURE=0.7), "logprobs", "Sampling leaves out TEMPERATURE=0.7")


def test_another_reference_and_the_gradient_it_makes(examine):
    found = examine(reference=train.make_reference(healthy(1), "cpu", torch.float32), KL_COEF=1e4)
    said(found, "KL", "not the start model")
    assert "few tokens decide" in found["gradient"].sentence
    assert found["gradient"].figures["at the optimizer"] <= 1.001


def test_a_reference_that_shares_the_policys_weights(examine):
    policy = healthy()
    said(examine(policy, policy.cast(torch.float32)), "update", "The reference moved with the policy")


def test_no_clipping(examine, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: torch.tensor(0.5))
    said(examine(MAX_GRAD_NORM=1e-6), "gradient", "reaches the optimizer, above MAX_GRAD_NORM=1e-06")


def test_nan_in_the_forward(examine, monkeypatch):
    forward = train.forward
    monkeypatch.setattr(train, "forward", lambda *a: tuple(x * math.nan for x in forward(*a)))
    found = examine()
    said(found, "logprobs", "NaN or infinity from finite weights")
    assert "no update was made" in found["gradient"].sentence


def test_learning_rates_and_signs(examine, monkeypatch):
    said(examine(LR=0.5), "learning", "One update moved the policy", "lower LR=0.5")
    said(examine(LR=0.0), "update", "did not move")
    said(examine(parameters=copy.deepcopy(healthy()).parameters()), "update", "whether the optimizer holds them")
    loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *a, **k: (-(result := loss(*a, **k))[0], result[1]))
    said(examine(), "learning", "look for a wrong sign")


def run(*arguments):
    command = [sys.executable, "-m", "tools.doctor", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command():
    result = run("BATCH_POSITIONS=4", "GROUP_SIZE=4", "DTYPE=float32")
    assert result.returncode == 0 and result.stdout.endswith("all 12 checks are ok\n"), result.stdout + result.stderr
    result = run("BATCH_POSITIONS=2", "GROUP_SIZE=2", "DTYPE=float32", "MIX_ENV_RATIO=0", "MAX_NEW_TOKENS=20")
    assert result.returncode == 1 and "run into the limit of 20 tokens" in result.stdout
    for argument, words in (("MODEL=nowhere", "nowhere"), ("GROUP_SIZ=4", "did you mean GROUP_SIZE?")):
        result = run(argument)
        assert result.returncode == 1 and words in result.stderr and result.stderr.count("\n") == 1
    assert "GROUP_SIZE " in run("--help").stdout
