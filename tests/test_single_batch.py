"""tools/single_batch.py: a healthy batch is ok on every station, and each incident of test_stability.py is named."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo
import skill
import train
from model import GPT
from tools import single_batch

ROOT = Path(__file__).parent.parent
SMALL = dict(BATCH_POSITIONS=3, GROUP_SIZE=3, MIX_ENV_RATIO=0.3, DTYPE=torch.float32, COMPILE=False, DEVICE="cpu")


@pytest.fixture(autouse=True, scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(train, name, value)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        yield
        torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def start(quick):
    return GPT.load(ROOT / "weights" / "tiny")


@pytest.fixture
def policy(start):
    return copy.deepcopy(start)


@pytest.fixture(scope="module")
def samples(start):
    return train.draw_prompts(train.data.split(train.data.load("builtin"))[0], 0, start.config.chess_format)


@pytest.fixture(scope="module")
def sampled(start, samples):
    return train.rollout(start, samples, 0)


@pytest.fixture
def examine(start, samples):
    """The stations up to `last`, by name."""

    def run(last, policy=None, reference=None, samples=samples, parameters=None):
        policy = policy or copy.deepcopy(start)
        optimizer = torch.optim.AdamW(parameters or policy.parameters(), lr=train.LR, weight_decay=0)
        stations = {}
        for look in single_batch.examine(policy, reference or start.cast(train.DTYPE), optimizer, samples):
            stations[look.name] = look
            if look.name == last:
                break
        return stations

    return run


def said(stations, name, *words):
    """`name` is the first station where something is wrong, and it says all of the words."""
    assert next(look.name for look in stations.values() if not look.ok) == name
    sentence = stations[name].sentence
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".") and "{" not in sentence


def hand_over(monkeypatch, sampled, change):
    """The policy completions of the start model, changed before they are trained on."""
    batches, graded = sampled
    monkeypatch.setattr(train, "rollout", lambda *_: ([change(batches[0])], graded))


def paid(change):
    return lambda batch: batch._replace(rewards=change(batch.rewards))


def dropout(model, p=0.1):
    for block in model.h:
        block.mlp["c_proj"].register_forward_hook(lambda layer, x, y: torch.nn.functional.dropout(y, p))
    torch.manual_seed(0)
    return model


def far(start):
    other = copy.deepcopy(start)
    with torch.no_grad():
        other.h[0].attn.c_attn.weight.mul_(1.5)
    return other


def test_a_healthy_batch_is_ok_on_every_station(examine, policy, start):
    stations = examine("after", policy)
    assert list(stations) == [
        "weights", "prompts", "policy completions", "environment completions", "rewards", "logprobs", "ratios", "KL",
        "advantages", "gradient", "update", "after",
    ]  # fmt: skip
    assert all(look.ok and look.sentence == "" for look in stations.values()), stations
    figures = {name: look.figures for name, look in stations.items()}
    assert figures["weights"]["parameters"] == sum(p.numel() for p in start.parameters())
    assert figures["policy completions"]["completions"] == 6 and figures["environment completions"]["completions"] == 3
    assert figures["logprobs"]["gap_max"] < 1e-4 and figures["KL"]["per_token"] < 1e-7
    by_layer = [figures["gradient"][name] for name in ("wte", "wpe", "ln_f", *(f"h.{i}" for i in range(6)))]
    assert min(by_layer) > 0 and math.hypot(*by_layer) == pytest.approx(figures["gradient"]["norm"], rel=1e-4)
    moved = torch.stack([(a - b).norm() for a, b in zip(policy.parameters(), start.parameters())]).norm().item()
    assert figures["update"]["change"] == pytest.approx(moved, rel=1e-4) and moved > 0
    assert figures["after"]["gain"] > 0  # better completions have become likelier
    assert single_batch.weights(policy)["fingerprint"] != figures["weights"]["fingerprint"]
    assert single_batch.weights(start)["fingerprint"] == figures["weights"]["fingerprint"]


# Random weights, and broken ones


def test_random_weights(examine, start):
    torch.manual_seed(0)
    random = GPT(start.config)
    random.tokenizer = start.tokenizer
    said(examine("weights", random), "weights", "random weights never loaded")


@pytest.mark.slow
def test_random_weights_that_hide(examine, policy):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.copy_(torch.randn_like(p) * 0.02)  # biases too
    said(examine("policy completions", policy), "policy completions", "random text", "never loaded")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(examine, policy, value):
    with torch.no_grad():
        policy.h[3].mlp["c_fc"].weight[5, 7] = value
    stations = examine("after", policy)
    said(stations, "weights", "1 tensors hold NaN")
    assert list(stations) == ["weights"]  # the road ends here
    json.dumps(stations["weights"].figures, allow_nan=False)


# Silent settings: labels of a stub, a group size that does not reach the sampler


@pytest.mark.parametrize(
    "labels, words",
    [((("e2e4", 30), ("d2d4", 25)), ["All 2 labelled positions", "stub"]), ((), ["Only 0 of 2", "install Stockfish"])],
)
def test_labels(examine, samples, labels, words):
    samples = [s._replace(labels=labels) if s.prompt.startswith("P") else s for s in samples]
    said(examine("prompts", samples=samples), "prompts", *words)


def test_a_group_size_that_is_ignored(examine, monkeypatch, samples):
    def stubborn(model, samples, group_size, limit, temperature, generator, top_k, top_p, noise, **grading):
        noise = noise[: 2 * len(samples)]
        return sample(model, samples, 2, limit, temperature, generator, top_k, top_p, noise, **grading)

    sample = train.sample_and_grade
    monkeypatch.setattr(train, "sample_and_grade", stubborn)
    monkeypatch.setattr(train, "BATCH_POSITIONS", 1)
    stations = examine("after", samples=samples[-1:])
    said(stations, "policy completions", "1 prompts got 2 completions", "GROUP_SIZE=3 does not reach")
    assert list(stations)[-1] == "policy completions"  # the road ends here


# Truncated outputs, filibuster, the end token untrained, tokens made again from text


@pytest.mark.parametrize("name, prefix, setting", [("policy", "P: ", ""), ("environment", "A: ", "_ENV")])
def test_truncated_outputs(examine, monkeypatch, name, prefix, setting, samples):
    monkeypatch.setattr(train, "TASKS", {**train.TASKS, prefix: 30})
    samples = [sample for sample in samples if sample.prompt.startswith(prefix)]
    monkeypatch.setattr(train, "BATCH_POSITIONS", len(samples))
    stations = examine(f"{name} completions", samples=samples)
    said(stations, f"{name} completions", "100% are cut off at 30 tokens", f"raise MAX_NEW_TOKENS{setting}.")


def test_filibuster(examine, policy, monkeypatch):
    monkeypatch.setattr(train, "TASKS", {"P: ": 80, "A: ": 1})
    with torch.no_grad():
        policy.wte.weight[policy.tokenizer.eos] = 0  # it has no wish to stop
    stations = examine("policy completions", policy)
    said(stations, "policy completions", "run on to the limit of 80 tokens, where 69", "RUNAWAY_PENALTY_MULTIPLIER")


def test_end_token_out_of_the_mask(examine, monkeypatch, sampled, start):
    for change in (lambda b: b.mask & (b.tokens != start.tokenizer.eos), lambda b: torch.ones_like(b.mask)):
        hand_over(monkeypatch, sampled, lambda b, change=change: b._replace(mask=change(b)))
        stations = examine("policy completions")
        said(stations, "policy completions", "does not end with their one end token", "from lengths")


def test_tokens_made_again_from_text(examine, monkeypatch, sampled):
    hand_over(monkeypatch, sampled, lambda b: b._replace(tokens=b.tokens.where(b.tokens > 200, b.tokens ^ 1)))
    said(examine("policy completions"), "policy completions", "The tokens of 6 are not the text that was graded")


# Zero-gradient collapse, cliff rewards, std normalisation


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: r * 0 + torch.linspace(-0.3, 0.5, len(r))[:, None].clamp(max=0), ["67% are capped", "factor"]),
        (lambda r: r * 0 + 0.05, ["Every reward is 0.05", "no variance"]),
        (lambda r: (r >= r[:, 0].max()).float(), ["binary, 0 or 1"]),
        (lambda r: r * 0 - 1, ["Every reward is negative, the best is -1", "cliff"]),
        (lambda r: r.where(r >= r[:, 0].max(), torch.tensor(-1.0)), ["They go from -1 to"]),
        (lambda r: r * math.nan, ["NaN"]),
        (lambda r: r * 0 + 1, ["Every completion is perfect"]),
    ],
    ids=["capped", "constant", "binary", "negative", "cliff", "nan", "perfect"],
)
def test_rewards(examine, monkeypatch, sampled, change, words):
    hand_over(monkeypatch, sampled, paid(change))
    said(examine("rewards"), "rewards", *words)


@pytest.mark.slow
def test_what_follows_from_rewards_without_variance(examine, monkeypatch, sampled):
    monkeypatch.setattr(train, "ENTROPY_COEF", 0.0)  # its gradient needs no rewards
    hand_over(monkeypatch, sampled, paid(lambda r: r * 0 - 0.3))
    stations = examine("update")
    said(stations, "rewards", "negative")
    assert "100% of groups have zero variance" in stations["advantages"].sentence
    assert "It is 0" in stations["gradient"].sentence and "did not move" in stations["update"].sentence


def test_std_normalisation(examine, monkeypatch, sampled):
    hand_over(monkeypatch, sampled, paid(lambda r: 0.5 + 1e-3 * r))
    assert examine("advantages")["advantages"].ok
    monkeypatch.setattr(train, "SCALE_REWARDS", "group")
    said(examine("advantages"), "advantages", "SCALE_REWARDS=group", "near-constant", "use none")


@pytest.mark.slow
def test_a_grader_that_caps(examine, monkeypatch):
    """The whole way from the grader on."""
    grade = skill.grade

    def capped(*args, **kwargs):
        g = grade(*args, **kwargs)
        return g._replace(reward=min(g.reward, 0.05))

    monkeypatch.setattr(skill, "grade", capped)
    monkeypatch.setattr(train, "TEMPERATURE", 1.0)
    stations = examine("rewards")
    said(stations, "rewards", "0.05", "by a factor, not by a cap")
    assert stations["rewards"].figures["max"] == pytest.approx(0.05)


# KL explosion: dropout, the temperature of one side, another reference


def test_dropout_in_the_policy(examine, monkeypatch, sampled, policy):
    hand_over(monkeypatch, sampled, lambda batch: batch)  # the twin that samples has none
    stations = examine("KL", dropout(policy))
    said(stations, "logprobs", "dropout")
    assert "equal weights: look for dropout" in stations["KL"].sentence


def test_dropout_in_the_reference(examine, monkeypatch, sampled, policy):
    hand_over(monkeypatch, sampled, lambda batch: batch)
    said(examine("KL", reference=dropout(policy)), "KL", "look for dropout", "do not raise the threshold")


def test_temperature_left_out_of_training(examine, monkeypatch, samples):
    def forward(model, batch):
        return grpo.logprobs_and_entropy(model.score(batch.prompts, batch.lengths, batch.tokens), batch.tokens)

    monkeypatch.setattr(train, "TEMPERATURE", 0.7)
    monkeypatch.setattr(train, "forward", forward)
    monkeypatch.setattr(train, "BATCH_POSITIONS", 1)
    said(examine("logprobs", samples=samples[-1:]), "logprobs", "Training leaves out TEMPERATURE=0.7")


def test_temperature_left_out_of_sampling(examine, start, monkeypatch, samples):
    monkeypatch.setattr(train, "BATCH_POSITIONS", 1)
    monkeypatch.setattr(train, "TEMPERATURE", 1.0)
    hand_over(monkeypatch, train.rollout(start, samples[-1:], 0), lambda batch: batch)
    monkeypatch.setattr(train, "TEMPERATURE", 0.7)
    said(examine("logprobs", samples=samples[-1:]), "logprobs", "Sampling leaves out TEMPERATURE=0.7")


def test_another_reference_and_the_gradient_it_makes(examine, start, monkeypatch, sampled):
    hand_over(monkeypatch, sampled, lambda batch: batch)
    monkeypatch.setattr(train, "KL_COEF", 1000.0)
    stations = examine("gradient", reference=far(start))
    said(stations, "KL", "1 tensors are not the policy's", "not the start model")
    assert "is clipped to 1: the weights are safe" in stations["gradient"].sentence
    assert stations["gradient"].figures["norm"] > 10 and stations["gradient"].figures["arrived"] <= 1.001


@pytest.mark.slow
def test_a_reference_that_shares_the_policys_weights(examine, policy):
    stations = examine("update", policy, reference=policy.cast(torch.float32))
    said(stations, "update", "The reference moved with the policy")


@pytest.mark.slow
def test_what_train_refuses_to_start_with_is_named(examine, start, samples, monkeypatch):
    monkeypatch.setattr(train, "DTYPE", torch.bfloat16)
    assert all(look.ok for look in examine("after", copy.deepcopy(start).use(torch.bfloat16)).values())
    policy = dropout(copy.deepcopy(start).use(torch.bfloat16), 0.3)
    with pytest.raises(SystemExit):
        train.first_look(policy, start.cast(torch.bfloat16), *train.rollout(policy, samples, 0))
    assert not examine("logprobs", policy)["logprobs"].ok


# Gradient explosion, NaN on the way, an update that is wrong


def test_far_ratios(examine, monkeypatch, sampled):
    shift = math.log(99990)
    hand_over(monkeypatch, sampled, lambda b: b._replace(rollout_logprobs=b.rollout_logprobs - shift * b.mask))
    stations = examine("update")
    said(stations, "logprobs", "other weights or token ids")
    assert "to 9.999e+04 before any update" in stations["ratios"].sentence
    assert stations["gradient"].figures["arrived"] <= 1.001 and stations["update"].ok  # capped, clipped


def test_gradient_explosion(examine, monkeypatch, sampled):
    hand_over(monkeypatch, sampled, paid(lambda r: 1e6 * r))
    stations = examine("gradient")
    said(stations, "rewards", "scale them back")
    assert "is clipped to 1: the weights are safe" in stations["gradient"].sentence


@pytest.mark.slow
def test_no_clipping(examine, monkeypatch, sampled):
    hand_over(monkeypatch, sampled, paid(lambda r: 1e6 * r))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: torch.tensor(0.5))
    assert "reaches the optimizer, above MAX_GRAD_NORM=1" in examine("gradient")["gradient"].sentence


@pytest.mark.slow
def test_nan_in_the_forward(examine, monkeypatch, sampled):
    score = GPT.score
    hand_over(monkeypatch, sampled, lambda batch: batch)
    monkeypatch.setattr(GPT, "score", lambda *args: score(*args) * math.nan)
    stations = examine("update")
    said(stations, "logprobs", "NaN or infinity from finite weights")
    assert "no update was made" in stations["gradient"].sentence and not stations["update"].figures["broken"]
    json.dumps([look.figures for look in stations.values()], allow_nan=False)


@pytest.mark.slow
def test_learning_rate(examine, monkeypatch):
    monkeypatch.setattr(train, "LR", 0.01)
    said(examine("after"), "after", "One update moved the policy by a KL of", "lower LR=0.01")
    monkeypatch.setattr(train, "LR", 0.0)
    said(examine("update"), "update", "did not move", "LR=0")


@pytest.mark.slow
def test_an_optimizer_of_other_weights(examine, start):
    others = copy.deepcopy(start).parameters()
    said(examine("update", parameters=others), "update", "whether the optimizer holds them")


@pytest.mark.slow
def test_wrong_sign(examine, monkeypatch, sampled):
    policy_loss = grpo.policy_loss

    def ascent(*args, **kwargs):
        loss, stats = policy_loss(*args, **kwargs)
        return -loss, stats

    hand_over(monkeypatch, sampled, lambda batch: batch)
    monkeypatch.setattr(grpo, "policy_loss", ascent)
    said(examine("after"), "after", "became less likely: look for a wrong sign")


# The program


def run(*arguments):
    command = [sys.executable, "-m", "tools.single_batch", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_the_command(tmp_path):
    small = "BATCH_POSITIONS=2", "GROUP_SIZE=2", "MIX_ENV_RATIO=0", "MAX_NEW_TOKENS=30", "DTYPE=float32"
    result = run(*small, "--json", tmp_path / "out.json")
    assert result.returncode == 1 and result.stderr == ""
    assert "are cut off at 30 tokens" in result.stdout and "\nwrong: policy completions" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["settings"]["MAX_NEW_TOKENS"] == 30
    wrong = [look["name"] for look in written["stations"] if not look["ok"]]
    assert wrong[0] == "policy completions" and result.stdout.count("WRONG") == len(wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.slow
def test_the_command_where_all_is_well():
    result = run("BATCH_POSITIONS=4", "GROUP_SIZE=4", "DTYPE=float32")
    assert result.returncode == 0 and result.stdout.endswith("all 12 stations are ok\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["MODEL=nowhere"], "nowhere"),
        (["DATA=nowhere.pgn"], "nowhere.pgn"),
        (["GROUP_SIZ=4"], "did you mean GROUP_SIZE?"),
        (["--jsn", "x"], "--jsn is no setting"),
        (["--json", "nowhere/out.json"], "its folder does not exist"),
        (["BATCH_POSITIONS=100000"], "fewer than BATCH_POSITIONS"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(arguments, words):
    result = run(*arguments)
    assert result.returncode == 1 and result.stdout == "" and words in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_help_shows_its_usage_and_the_settings():
    result = run("--help")
    assert result.returncode == 0 and "--json FILE" in result.stdout and "\nGROUP_SIZE " in result.stdout
