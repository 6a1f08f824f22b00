"""Each incident: the failing configuration fails as it did then, or is refused; the default survives the same input."""

import copy
import importlib
import math
import random
import types
from collections import Counter
from dataclasses import replace

import pytest
import torch

import grpo
import rewards
import rollout as rollout_file
import toy
import train
from model import GPT
from nanorook import monitor, parallel, settings
from nanorook.run import STEP, Run
from rollout import generate
from rook.positions import Position
from train import add_advantages

FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"
MOVES = (("f1b5", 60), ("d2d4", 40), ("f1c4", 30), ("b1c3", 20), ("c2c3", 5))
ANSWER = "M: f1b5 d2d4 f1c4 b1c3 c2c3 E: 0.6 0.4 0.3 0.2 0.05 B: f1b5"
pytestmark = pytest.mark.usefixtures("toy_settings")
QUESTION = rewards.policy_question(Position(FEN, (), MOVES), "rookworld")
DEFAULT = dict(loss="dapo", clip_low=0.2, clip_high=0.28)


def sampled(policy, count=4):
    return toy.rollouts(policy, toy.questions(count))


def distance(one, other):
    return torch.stack([(a - b).norm() for a, b in zip(one.parameters(), other.parameters())]).norm().item()


def test_gradient_explosion():
    """No clipping; ratio 99,990 x advantage 0.8 over 200 tokens; norm 54,648,652; weights destroyed."""
    policy = toy.model()
    rollout = sampled(policy)[0]

    def gradient(**clip):
        logprobs, _ = train.forward(policy, rollout, train.TEMPERATURE)
        far = logprobs.detach() - math.log(99990)  # the weights that sampled gave these tokens next to nothing
        advantages, mask = torch.full(rollout.completions.shape, 0.8), rollout.completion_mask
        policy.zero_grad()
        grpo.policy_loss(logprobs, far, advantages, mask, **DEFAULT | clip, normalizer=mask.sum())[0].backward()
        return torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()

    assert gradient(clip_high=1e9) > 1e4
    assert gradient() == 0  # the clip stops a move that has already gone too far


def test_no_step_is_longer_than_the_clip_allows():
    policy, start = toy.model(), toy.model()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)  # a step is the gradient
    rollouts = sampled(policy)
    for rollout in rollouts:
        rollout.advantages *= 1e6
    metrics = train.update(policy, None, [optimizer], rollouts, 10**6)
    assert metrics["grad_norm"] > 100 and distance(policy, start) == pytest.approx(train.MAX_GRAD_NORM, rel=1e-3)


def test_zero_gradient_collapse(toy_run, monkeypatch):
    """A hard cap (0.05) gave every sample one reward: no variance, no gradient."""
    grade = toy.grade

    def run(out, worth):
        def changed(*args):
            reward = worth(0.1 + grade(*args).reward)
            return toy.Grade((("all", reward),), {})

        monkeypatch.setattr(toy, "grade", changed)
        return toy_run(out)

    for row in run("capped", lambda reward: min(reward, 0.05)):
        assert row["frac_zero_std"] == 1 and row["grad_norm"] == 0 and "remove the cap" in row["advice"]
    for row in run("scaled", lambda reward: reward * 0.3):
        assert row["frac_zero_std"] < 0.5 and row["grad_norm"] > 0


def test_filibuster(monkeypatch):
    """Completions ran to the limit without an end token. Of four equal answers two have one."""

    def advantages():
        grades = [rewards.grade(QUESTION, ANSWER, hit_limit) for hit_limit in (False, False, True, True)]
        return grpo.advantages(torch.tensor([[grade.reward] for grade in grades]), 4)[:, 0]

    assert (advantages()[:2] > 0.1).all() and (advantages()[2:] < -0.1).all()
    monkeypatch.setattr(rewards, "runaway", lambda pieces: ("runaway", 0.0))
    assert (advantages() == 0).all()  # nothing else tells them apart


def test_cliff_rewards():
    """-1 for anything malformed, all rewards -1, NaN."""
    cliff = torch.full((5, 1), -1.0)
    assert ((cliff - cliff.mean()) / cliff.std()).isnan().all()  # 0 / 0
    assert (grpo.advantages(cliff, 5, "std") == 0).all()
    texts = ["", "M: e2e4", "M: f1b5 E: 0.6 B: x", ANSWER.replace("B: f1b5", "B: a1a8"), ANSWER]
    graded = torch.tensor([[rewards.grade(QUESTION, text).reward] for text in texts])
    assert graded.min() == pytest.approx(-0.3) and graded.max() == 1
    assert (graded[:, 0].diff() >= 0).all() and len(graded.unique()) == 4  # better text, better reward, no cliff


def test_random_weights(toy_run, monkeypatch):
    """The model was never loaded; random text; every parse failed."""
    grade = toy.grade
    monkeypatch.setattr(toy, "grade", lambda *args: grade(*args)._replace(metrics={"structure": 0.0}))
    with pytest.raises(SystemExit, match="only 0% of the first (short|long) answers are well-formed"):
        toy_run()


def test_a_broken_kind_is_not_hidden_by_the_others(toy_run, monkeypatch):
    """With a limit of 10 tokens every environment answer was cut off and malformed, and the run was green."""
    grade = toy.grade

    def changed(question, *args):
        good = question.kind == "short" or question.truth >= readable
        return grade(question, *args)._replace(metrics={"structure": float(good)})

    monkeypatch.setattr(toy, "grade", changed)
    readable = math.inf
    with pytest.raises(
        SystemExit, match="only 0% of the first long .*, and .*% are cut off.* the task's LIMITS {'short"
    ):
        toy_run("refused", BATCH_POSITIONS=8)
    readable = 50  # half of them
    row = toy_run(BATCH_POSITIONS=8, STEPS=1)[0]
    assert row["short/structure"] == 1 and 0.2 < row["long/structure"] < 0.8 and "structure" not in row


def far_in_one_kind(monkeypatch):
    """A reference that finds each token of long answers a little less likely, by 2 nats, than the policy."""
    forward = train.forward

    def changed(model, part, temperature):
        logprobs, entropy = forward(model, part, temperature)
        away = part.kind == "long" and not model.wte.weight.requires_grad
        return logprobs - 2 * away, entropy

    monkeypatch.setattr(train, "forward", changed)


def test_the_kl_of_a_kind_is_not_hidden_by_the_others(toy_run, monkeypatch, capsys):
    """The mean over all tokens was below the threshold where one kind of question was far above it."""
    far_in_one_kind(monkeypatch)
    monkeypatch.setattr(monitor, "check_agreement", lambda *_: "")
    row = toy_run(STEPS=1, BATCH_POSITIONS=8, KL_DIVERGENCE_THRESHOLD=1.9)[0]
    assert row["short/kl"] == 0 and row["long/kl"] == pytest.approx(2) and 0.5 < row["kl"] < 1.8
    assert row["state"] == "red" and "far from the reference in long answers" in row["advice"]
    assert "back to the last good state" in capsys.readouterr().out


def test_the_first_kl_and_gap_of_a_kind_are_not_hidden_by_the_others():
    healthy = {"kl": 0.0, "logprob_gap": 1e-4, "a/structure": 1.0}
    healthy |= {f"{kind}/{name}": 0.0 for kind in "ab" for name in ("kl", "logprob_gap")}
    assert not monitor.check_agreement(healthy, torch.float32)
    for wrong in 2e-3, math.nan:
        said = monitor.check_agreement(healthy | {"b/logprob_gap": wrong}, torch.float32)
        assert said.startswith("sampling and training disagree by") and "of the b answers" in said
        said = monitor.check_agreement(healthy | {"b/kl": wrong}, torch.float32)
        assert said.startswith("KL to the reference is") and "in b answers" in said and "not the start model" in said


def with_tokens_made_again(*args):
    rollout = generate(*args)
    return replace(rollout, completions=rollout.completions.roll(1, 1))


def not_finite(rollout, *rest):
    add_advantages(rollout, *rest)
    rollout.rollout_logprobs = math.nan * rollout.completions


# The function that has the bug, and what stands in its place
BUGS = {
    "dropout": (train, "compiled_score", lambda _: lambda *args: torch.nn.functional.dropout(GPT.score(*args), 0.1)),
    "another temperature": (rollout_file, "generate", lambda *args: generate(*args[:4], 0.7, *args[5:])),
    "tokens made again": (rollout_file, "generate", with_tokens_made_again),
    "not finite": (train, "add_advantages", not_finite),
    "another reference": (train, "make_reference", lambda *args: toy.model(seed=1)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_kl_explosion(bug, toy_run, monkeypatch, tmp_path):
    """KL 15-19 at step 0, and the threshold raised to 50 to get past it."""
    message = "reference is not the start model" if "reference" in bug else "sampling and training disagree"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=message):
        patch.setattr(*BUGS[bug])
        toy_run("refused")
    assert not list((tmp_path / "refused").glob(STEP))


def test_before_the_first_update_all_sides_agree(toy_run):
    row = toy_run(TEMPERATURE=0.7, STEPS=1)[0]  # the temperature is part of the distribution on both sides
    assert row["kl"] == 0 and row["logprob_gap"] < 1e-4 and row["ratio_gap"] == 0


def test_sides_that_disagree_end_the_run_before_any_weight_has_changed():
    policy, start = toy.model(), toy.model()
    rollouts = sampled(policy)
    for rollout in rollouts:
        rollout.rollout_logprobs -= 0.1
    with pytest.raises(SystemExit, match="sampling and training disagree by 0.1"):
        train.update(policy, None, train.make_optimizers(policy), rollouts, 10**6, check=True)
    assert distance(policy, start) == 0
    train.update(policy, None, train.make_optimizers(policy), rollouts, 10**6)  # as at any later step
    assert distance(policy, start) > 0


def inject(patch, stage, steps):
    runs, acquire, adamw = [], Run.acquire_lock, torch.optim.AdamW.step

    def bad(value, at):
        return value * math.nan if at == stage and runs[-1].step in steps else value

    def comparing(rollout, *rest):
        add_advantages(rollout, *rest)
        rollout.advantages = bad(rollout.advantages, "reward")
        rollout.rollout_logprobs = bad(rollout.rollout_logprobs, "sampling")

    def gradient(parameters):
        first = next(iter(parameters))
        first.grad = bad(first.grad, "gradient")

    def score(model, *args):
        return bad(GPT.score(model, *args), "logits" if model.wte.weight.requires_grad else "reference")

    def optimizer(self, *args):
        for moments in self.state.values():
            moments["exp_avg"] = bad(moments["exp_avg"], "optimizer")
        return adamw(self, *args)

    patch(Run, "acquire_lock", lambda run: runs.append(run) or acquire(run))
    patch(train, "add_advantages", comparing)
    patch(train, "compiled_score", lambda _: score)
    patch(parallel, "sum_gradients", gradient)
    patch(torch.optim.AdamW, "step", optimizer)


@pytest.mark.parametrize("stage", ["sampling", "reward", "logits", "reference", "gradient", "optimizer"])
def test_recovery_from_nan(stage, toy_run, monkeypatch, tmp_path, capsys):
    """UnboundLocalError in the NaN path."""
    inject(monkeypatch.setattr, stage, {1})
    before, update = [], train.update
    monkeypatch.setattr(train, "update", lambda *a, **k: before.append(copy.deepcopy(a[0])) or update(*a, **k))
    rows = toy_run(STEPS=3)
    assert [row["skipped"] for row in rows] == [0, int(stage != "optimizer"), 0]
    assert [row["broken"] for row in rows] == [False, stage == "optimizer", False]
    assert rows[1]["state"] == "red" != rows[2]["state"]
    assert ("back to the last good state" in capsys.readouterr().out) == (stage == "optimizer")
    assert all(tensor.isfinite().all() for tensor in GPT.load(tmp_path / "out" / "model").parameters())
    good = before[1 if stage != "optimizer" else 0]  # the weights before the step: no update was made, or taken back
    assert distance(before[2], good) == 0


def test_a_loss_that_is_not_finite_is_enough_to_skip_an_update(toy_run, monkeypatch):
    """k1's gradient does not depend on the reference, so here it is finite."""
    inject(monkeypatch.setattr, "reference", {1})
    assert [row["skipped"] for row in toy_run(STEPS=3, KL_ESTIMATOR="k1")] == [0, 1, 0]


def test_recovery_gives_up_with_words(toy_run, monkeypatch, capsys):
    inject(monkeypatch.setattr, "gradient", range(1, 100))
    with pytest.raises(SystemExit, match="go back for the third time; lower LR"):
        toy_run(STEPS=12, MAX_SKIPPED_IN_A_ROW=2)
    printed = capsys.readouterr().out
    assert "LR multiplied by 0.5" in printed and "LR multiplied by 0.25" in printed
    assert printed.count("● red") == 6  # two skipped steps before each way back


@pytest.mark.parametrize("where, steps", [("optimizer", {2}), ("gradient", {2, 3})])
def test_recovery_leads_to_the_last_good_state_and_not_to_the_start(where, steps, toy_run, monkeypatch):
    inject(monkeypatch.setattr, where, steps)
    monkeypatch.setattr(train, "SNAPSHOT_EVERY", 1)
    before, update = [], train.update
    monkeypatch.setattr(train, "update", lambda *a, **k: before.append(copy.deepcopy(a[0])) or update(*a, **k))
    toy_run(STEPS=5, MAX_SKIPPED_IN_A_ROW=2)
    back = before[max(steps) + 1]  # before[2] led to an update that was broken or could not be made
    assert distance(back, before[1]) == 0 < distance(back, before[0])


def test_recovery_from_a_policy_that_has_left_its_reference(toy_run, monkeypatch, capsys):
    monkeypatch.setattr(train, "SNAPSHOT_EVERY", 1)  # even then a state that is too far away is not kept
    rows = toy_run(LR=0.05, LR_SCHEDULE="constant", STEPS=4, KL_DIVERGENCE_THRESHOLD=0.02, RECOVERY_LR_FACTOR=0.25)
    assert "back to the last good state, with LR multiplied by 0.25" in capsys.readouterr().out
    assert rows[1]["kl"] > 0.02 and rows[1]["state"] == "red" and "far from the reference" in rows[1]["advice"]
    assert rows[2]["kl"] == 0 and rows[2]["lr"] == pytest.approx(0.0125)  # the start, once more


def test_std_normalisation():
    """Dividing advantages by the group's std hurt with near-constant rewards."""
    noise, signal = [0.4, 0.4, 0.4, 0.401], [-0.3, 1.0, 0.2, 0.5]
    values = torch.tensor([*noise, *signal])[:, None]
    noise, signal = grpo.advantages(values, 4, "std").view(2, 4).abs().amax(1)
    assert noise > signal  # divided by their spread, a thousandth weighs more than the best against the worst
    noise, signal = grpo.advantages(values, 4, train.SCALE_REWARDS).view(2, 4).abs().amax(1)
    assert train.SCALE_REWARDS == "none" and noise < signal / 500


def test_end_token_is_trained():
    """Padding was the end token, so the mask dropped it and nothing learnt to stop."""
    policy = toy.model()
    rollout = sampled(policy, 8)[0]
    ends = (rollout.completions == 256) & rollout.completion_mask
    assert ends.sum() >= 4 and (ends.sum(1) == (~rollout.hit_limit)).all()  # one of its own in each row that has ended

    def gradient_at_ends(mask):
        logprobs = train.forward(policy, rollout, train.TEMPERATURE)[0].detach().requires_grad_(True)
        ones, normalizer = torch.ones(len(mask), 1), mask.sum()
        grpo.policy_loss(logprobs, logprobs.detach(), ones, mask, **DEFAULT, normalizer=normalizer)[0].backward()
        return logprobs.grad[ends]

    assert (gradient_at_ends(rollout.completions != 256) == 0).all()  # the incident
    assert (gradient_at_ends(rollout.completion_mask) < 0).all()


def test_truncated_outputs(toy_run, monkeypatch):
    """Too few new tokens for the format."""
    monkeypatch.setattr(toy, "LIMITS", {"short": 1, "long": 1})
    row = toy_run(STEPS=1)[0]
    assert row["hit_limit"] > 0.8 and row["length"] == 1
    assert "answers are cut off: raise MAX_NEW_TOKENS" in row["advice"]  # not called malformed text


WAYS = [dict(LOSS="grpo", CREDIT="answer"), dict(LOSS="dr_grpo", DTYPE="bfloat16"), dict(LOSS="dapo", KL_COEF=0.0)]
WAYS += [dict(LOSS="cispo", SCALE_REWARDS="std", EPOCHS=2), dict(KL_ESTIMATOR="k3", KL_COEF=0.5)]


@pytest.mark.parametrize("changes", WAYS, ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()))
def test_without_a_reward_nothing_moves(changes, toy_run, toy_model, tmp_path):
    """With all advantages zero the weights end as they began, bit for bit."""
    toy_run(LR=0.1, CONTROL="zero", **changes)
    start, end = (GPT.load(folder).state_dict() for folder in (toy_model, tmp_path / "out" / "model"))
    assert all(torch.equal(start[name].view(torch.int32), end[name].view(torch.int32)) for name in start)


BASE = dict(STEPS=2, EPOCHS=2, LR=0.02, LR_SCHEDULE="constant", KL_COEF=0.1)
CHANGES = dict(
    DATA="other", SEED=1, STEPS=3, BATCH_POSITIONS=3, GROUP_SIZE=3, EPOCHS=1, OVERFIT=1, CONTROL="shuffle", LR=0.01,
    LR_SCHEDULE="cosine", WARMUP_STEPS=2, MAX_GRAD_NORM=0.01, LOSS="grpo", CREDIT="answer", SCALE_REWARDS="std",
    BEST_OF=2, CLIP_RANGE=0.01, CLIP_RANGE_HIGH=0.01, KL_COEF=0, KL_ESTIMATOR="k3",
    KL_DIVERGENCE_THRESHOLD=1e-9, TEMPERATURE=0.5, EVAL_EVERY=1, EVAL_POSITIONS=3, SAVE_EVERY=1, DTYPE="bfloat16",
)  # fmt: skip


@pytest.mark.slow
def test_no_setting_is_silent(toy_run, tmp_path):
    """A collector built with defaults ignored the group size that was asked for. Here each change has to show."""

    def left(out, **changes):
        toy_run(out, **BASE | changes)
        return *toy.left_by(tmp_path / out), sorted(folder.name for folder in (tmp_path / out).glob(STEP))

    plain = left("plain")
    row = plain[0][1]
    assert row["clip_low"] > 0 and row["clip_high"] > 0 and row["kl"] < 1  # else some have nothing to do
    toy.model(seed=1).save(tmp_path / "other")
    changes = [{name: value} for name, value in CHANGES.items()] + [{"MODEL": str(tmp_path / "other")}]
    for change in changes:
        rows, files, folders = left("-".join(change), **change)
        if {*change} & {"EVAL_EVERY", "EVAL_POSITIONS", "SAVE_EVERY"}:
            assert (files, folders) != plain[1:], change
        else:
            assert files[-1] != plain[1][-1], change  # the trained weights are others
    falling = left("falling", BEST_OF=3, BEST_OF_SCHEDULE="linear")
    assert falling[1][-1] != left("staying", BEST_OF=3)[1][-1]


def test_settings_of_the_machine_reach_what_they_name(toy_run, monkeypatch):
    seen = {}
    monkeypatch.setattr(parallel, "start", lambda device, n: seen.update(start=(str(device), n)) or device)
    monkeypatch.setattr(torch, "compile", lambda score, dynamic: seen.update(compiled=True) or score)
    toy_run(STEPS=1, NPROC=3, COMPILE="1")
    assert seen == {"start": ("cpu", 3), "compiled": True}


def test_settings_of_chess_reach_what_they_name(monkeypatch):
    monkeypatch.setitem(settings.GIVEN, "arguments", {})

    def chess(**changes):
        settings.GIVEN["arguments"] = {name: str(value) for name, value in changes.items()}
        importlib.reload(rewards)
        config = types.SimpleNamespace(extra={"chess_format": "expanded"})
        items = [(pool, Position(FEN, (), MOVES)) for pool in ("mates", "ordinary")] * 20
        return Counter(question.kind for question in rewards.make_questions(items, 20, random.Random(0), config))

    kinds = chess(MIX_ENV_RATIO=0.4, MIX_FIRST_RATIO=0.5, MAX_NEW_TOKENS=7, MATES_KL=0.5)
    assert kinds == {"environment": 8, "policy": 6, "moves": 3, "mates": 3} and rewards.KL_WEIGHTS == {"mates": 0.5}
    assert rewards.LIMITS == {"policy": 7, "environment": 7, "moves": 6, "mates": 6}
    assert len(chess()) == 4


def test_every_setting_is_known_to_do_something(monkeypatch):
    """A new setting joins CHANGES, or this list with the test that sees its effect."""
    monkeypatch.setitem(settings.GIVEN, "arguments", {})
    importlib.reload(rewards)  # examples/mates.py has withdrawn its settings, and other tasks have one of the same name
    elsewhere = {
        "TASK", "MODEL", "NPROC", "COMPILE", "DEVICE",
        "LORA_RANK",  # in test_lora.py
        "MICROBATCH_TOKENS",  # test_a_resumed_run_keeps_its_microbatches
        "MIX_ENV_RATIO", "MAX_NEW_TOKENS", "MIX_FIRST_RATIO", "MATES_KL",
        "OUT_DIR", "FRESH",  # in test_train.py
        "BEST_OF_SCHEDULE",  # in test_no_setting_is_silent
        "REPORT_TO", "EVAL_SAMPLES",  # in test_loggers.py and test_evaluate.py
    }  # fmt: skip
    known = {name for name in settings.SETTINGS if hasattr(train, name) or hasattr(rewards, name)}
    assert {*CHANGES} | elsewhere == known and not {*CHANGES} & elsewhere
    for name in known:  # each variable has the value of the setting of its own name
        assert settings.values()[name] == getattr(train, name, getattr(rewards, name, None)), name
