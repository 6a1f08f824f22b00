"""What went wrong in earlier attempts at this, one test for each incident.

Each shows the failing configuration fail as it did then (or be refused), and the default survive the same input.
"""

import copy
import json
import math

import pytest
import torch

import data
import grpo
import settings
import train
from batch import Batch
from model import GPT, GPTConfig
from monitor import diagnose, parts_by_task
from rewards import grade
from tokenizer import Tokenizer

FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"
LABELS = (("f1b5", 60), ("d2d4", 40), ("f1c4", 30), ("b1c3", 20), ("c2c3", 5))
ANSWER = "M: f1b5 d2d4 f1c4 b1c3 c2c3 E: 0.6 0.4 0.3 0.2 0.05 B: f1b5"
PROMPT = f"P: {FEN}"
SMALL = dict(STEPS=3, BATCH_POSITIONS=2, GROUP_SIZE=4, MIX_ENV_RATIO=0.5, EVAL_POSITIONS=1, EVAL_EVERY=0)
SMALL |= dict(MAX_NEW_TOKENS=100, MAX_NEW_TOKENS_ENV=100, DTYPE="float32", WARMUP_STEPS=0, LR_SCHEDULE="constant")
DEFAULT = dict(loss="dapo", clip_low=0.2, clip_high=0.28, max_completion_tokens=144)  # as in train.py


@pytest.fixture(scope="module", autouse=True)
def few_positions():
    """Of the embedded positions, which take seconds to read, a thousand."""
    load, few = data.load, data.load("builtin")[:1000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda source: few if source == "builtin" else load(source))
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """train.py's settings, small and in fp32."""
    for name, value in {**SMALL, "OUT_DIR": str(tmp_path / "out"), "DTYPE": torch.float32}.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "TASKS", {"P: ": 100, "A: ": 100})
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start():
    return GPT.load("weights/tiny")


@pytest.fixture
def policy(start):
    return copy.deepcopy(start)


@pytest.fixture(scope="module")
def positions():
    return data.split(data.load("builtin"))[0]


def sampled(policy, positions, step=0):
    return train.rollout(policy, train.draw_prompts(positions, step, "expanded"), step)


def one_update(policy, batches, reference=None, **changes):
    optimizer = torch.optim.SGD(policy.parameters(), lr=changes.pop("lr", 1.0))
    return train.update(policy, reference, optimizer, batches, 0.0)


def run(monkeypatch, **changes):
    """train.main() in this process; its metrics and what it wrote."""
    for name, value in changes.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "finish", lambda: None)  # pytest has arguments of its own
    monkeypatch.setattr(train, "look", lambda *_: {"skill": (0.0, 0.0)})  # test_train.py looks
    monkeypatch.setattr(train, "plot", lambda folder: None)
    monkeypatch.setattr(train, "DTYPE", changes.get("DTYPE", "float32"))
    train.main()
    return [json.loads(line) for line in open(f"{train.OUT_DIR}/metrics.jsonl")]


# Gradient explosion: no clipping; ratio 99,990 x advantage 0.8 over 200 tokens; norm 54,648,652; weights destroyed


@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_explosion(policy, positions, sign):
    batches, _ = sampled(policy, positions)
    batch = batches[0]._replace(advantages=torch.full((4,), 0.8 * sign))

    def gradient(**clip):
        logprobs, _ = train.forward(policy, batch)
        far = logprobs.detach() - math.log(99990)  # the weights that sampled gave these tokens next to nothing
        loss = grpo.policy_loss(logprobs, far, batch.advantages, batch.mask, **{**DEFAULT, **clip})[0]
        policy.zero_grad()
        loss.backward()
        return torch.stack([p.grad.norm() for p in policy.parameters()]).norm().item()

    unclipped = gradient(clip_low=1e9, clip_high=1e9)
    assert unclipped > 1e4
    if sign > 0:
        assert gradient() == 0  # the clip stops a move that has already gone too far
    else:  # the way back is not clipped, by PPO's design; there the gradient's own norm is the limit
        assert gradient() == pytest.approx(unclipped)
        before = [p.detach().clone() for p in policy.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), train.MAX_GRAD_NORM)
        torch.optim.SGD(policy.parameters(), lr=1.0).step()
        moved = torch.stack([(p - b).norm() for p, b in zip(policy.parameters(), before)]).norm().item()
        assert norm > 1e4 and moved <= train.MAX_GRAD_NORM * (1 + 1e-4)


def test_no_step_is_longer_than_the_clip_allows(policy, positions, monkeypatch):
    batches, _ = sampled(policy, positions)
    loud = [b._replace(rewards=b.rewards * 1e6) for b in batches]
    for most in (1.0, 0.01):
        monkeypatch.setattr(train, "MAX_GRAD_NORM", most)
        weights = copy.deepcopy(policy)
        metrics = one_update(weights, loud)  # SGD at a learning rate of 1: the step is the clipped gradient
        pairs = zip(weights.parameters(), policy.parameters())
        moved = torch.stack([(a - b).norm() for a, b in pairs]).norm().item()
        assert metrics["grad_norm"] > 100 and moved == pytest.approx(most, rel=1e-3)


# Zero-gradient collapse: a hard cap (0.05) gave every sample one reward: no variance, no gradient


def test_zero_gradient_collapse(policy, positions, monkeypatch):
    monkeypatch.setattr(train, "ENTROPY_COEF", 0.0)  # what rewards alone can teach
    batches, _ = sampled(policy, positions)
    runaway = [b._replace(rewards=b.rewards.abs() + 0.1) for b in batches]  # say that all ran to the limit
    capped = one_update(copy.deepcopy(policy), [b._replace(rewards=b.rewards.clamp(max=0.05)) for b in runaway])
    assert capped["frac_zero_std"] == 1 and capped["grad_norm"] == 0
    assert diagnose({**capped, "structure": 1, "runaway": 0}, [], 1, 1)[1].startswith("most groups have one reward")
    scaled = one_update(copy.deepcopy(policy), [b._replace(rewards=b.rewards * 0.3) for b in runaway])
    assert scaled["frac_zero_std"] == 0 and scaled["grad_norm"] > 0


# Filibuster: completions ran to the limit without an end token


def test_filibuster(policy, monkeypatch):
    monkeypatch.setattr(train, "ENTROPY_COEF", 0.0)
    tokenizer = policy.tokenizer
    with torch.no_grad():
        policy.wte.weight[tokenizer.eos] = 0  # it has no wish to stop
    prompt = train.tasks.policy_prompt(FEN, "expanded")
    texts = [ANSWER, ANSWER, ANSWER + " ", ANSWER + " "]  # two stop, two would go on for ever
    rows = [tokenizer.encode(text) for text in texts]
    T = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.eos] * (T - len(row)) for row in rows])
    mask = torch.ones(4, T, dtype=torch.bool)
    last = torch.tensor([True, True, False, False])

    def chance_to_stop():
        prompts = train.pad_prompts([tokenizer.encode(prompt)], "cpu")
        batch = Batch(*prompts, tokens, mask, torch.zeros(4, T), torch.zeros(4, 1), torch.zeros(4, T).long())
        with torch.no_grad():
            logprobs = train.forward(policy, batch)[0]
        return batch._replace(rollout_logprobs=logprobs), logprobs[last, -1].mean().item()

    for multiplier, learns in ((1.0, False), (train.RUNAWAY_PENALTY_MULTIPLIER, True)):
        grades = [grade(prompt, t, LABELS, not stops, runaway_multiplier=multiplier) for t, stops in zip(texts, last)]
        batch, before = chance_to_stop()
        metrics = one_update(policy, [batch._replace(rewards=torch.tensor([[g.reward] for g in grades]))], lr=0.05)
        assert (chance_to_stop()[1] > before + 1e-3) == learns == (metrics["grad_norm"] > 0)
        assert parts_by_task([(prompt, t, g) for t, g in zip(texts, grades)])["runaway"] == 0.5  # counted either way


# Cliff rewards: -1 for anything malformed, all rewards -1, NaN


def test_cliff_rewards():
    said = ["", "M: e2e4", "M: f1b5 E: 0.6 B: x", ANSWER.replace("B: f1b5", "B: a1a8"), ANSWER]
    cliff = torch.tensor([-1.0] * 5)
    assert ((cliff - cliff.mean()) / cliff.std()).isnan().all()  # 0 / 0
    assert (grpo.advantages(cliff, 5, "group") == 0).all()
    graded = torch.tensor([grade(PROMPT, text, LABELS, False).reward for text in said])
    assert graded.min() == pytest.approx(-0.3) and graded.max() == 1
    assert (graded.diff() >= 0).all() and len(graded.unique()) == 4  # better text, better reward, no cliff
    assert grpo.advantages(graded, 5)[2] > grpo.advantages(graded, 5)[1]


# Random weights: the model was never loaded; random text; every parse failed


def test_random_weights(positions, start):
    torch.manual_seed(0)
    random = GPT(GPTConfig(257, 384, 32, 1, 2, eos_token_id=256, chess_format="expanded"))
    random.tokenizer = Tokenizer.of_bytes()
    with pytest.raises(SystemExit, match="only 0% of the first completions have the structure"):
        train.first_look(random, None, *sampled(random, positions))
    train.first_look(start, None, *sampled(start, positions))


# KL explosion: KL 15-19 at step 0, and the threshold raised to 50 to get past it


def test_kl_explosion_by_dropout(policy, start, positions):
    batches, graded = sampled(policy, positions)
    train.first_look(policy.train(), start, batches, graded)  # training mode changes nothing
    for block in policy.h:
        block.mlp["c_proj"].register_forward_hook(lambda layer, x, y: torch.nn.functional.dropout(y, 0.1))
    torch.manual_seed(0)
    with pytest.raises(SystemExit, match="sampling and training disagree"):
        train.first_look(policy, start, batches, graded)


def test_kl_explosion_by_another_temperature(policy, start, positions, monkeypatch):
    monkeypatch.setattr(train, "TEMPERATURE", 0.7)
    batches, graded = sampled(policy, positions)
    train.first_look(policy, start, batches, graded)  # the temperature is part of the distribution on both sides
    monkeypatch.setattr(train, "TEMPERATURE", 1.0)
    with pytest.raises(SystemExit, match="sampling and training disagree"):
        train.first_look(policy, start, batches, graded)


def test_kl_explosion_by_another_reference(policy, start, positions):
    batches, graded = sampled(policy, positions)
    other = copy.deepcopy(start)
    with torch.no_grad():
        other.h[0].attn.c_attn.weight.mul_(1.05)
    with pytest.raises(SystemExit, match="reference is not the start model"):
        train.first_look(policy, other, batches, graded)
    metrics = one_update(policy, batches, start)
    assert abs(metrics["kl"]) < 1e-7 and metrics["ratio_min"] == metrics["ratio_max"] == 1  # policy = reference


def test_kl_explosion_by_a_compiled_policy(positions, monkeypatch):
    """What torch.compile makes of the policy rounds otherwise, so its reference has to be compiled like it."""
    monkeypatch.setattr(torch, "compile", lambda score, dynamic: lambda *batch: score(*batch) * 1.01)
    monkeypatch.setattr(train, "COMPILE", True)
    monkeypatch.setattr(train, "DTYPE", "bfloat16")  # in fp32 sampling and training may not differ by so much
    policy, reference, _ = train.build()
    batches, graded = sampled(policy, positions)
    train.first_look(policy, reference, batches, graded)
    del reference.score  # as it was before it was compiled
    with pytest.raises(SystemExit, match="reference is not the start model"):
        train.first_look(policy, reference, batches, graded)


@pytest.mark.slow
def test_a_compiled_policy_is_its_reference_and_compiles_no_more(positions, monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 384, 32, 1, 2, eos_token_id=256, chess_format="expanded"))
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "random")
    changes = dict(MODEL=str(tmp_path / "random"), DTYPE="bfloat16", COMPILE=True, MICROBATCH_TOKENS=65536)
    changes |= dict(BATCH_POSITIONS=60, TASKS={"P: ": 40, "A: ": 48})  # what is smaller is compiled apart on CPU
    for name, value in changes.items():
        monkeypatch.setattr(train, name, value)
    policy, reference, optimizer = train.build()
    batches, graphs = sampled(policy, positions)[0], []
    with torch.no_grad():
        for batch in batches:
            assert torch.equal(train.forward(policy, batch)[0], train.forward(reference, batch)[0])
    for step, count in enumerate((76, 68, 84, 60)):
        assert not train.update(policy, reference, optimizer, batches, 0.05)["skipped"]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        monkeypatch.setattr(train, "BATCH_POSITIONS", count)
        batches = sampled(policy, positions, step)[0]
    assert graphs[0] == graphs[-1] > 0


def test_kl_explosion_by_tokens_made_again_from_text(policy, start, positions):
    batches, graded = sampled(policy, positions)
    shifted = [b._replace(tokens=b.tokens.roll(1, 1)) for b in batches]  # as when a leading space is lost
    with pytest.raises(SystemExit, match="sampling and training disagree"):
        train.first_look(policy, start, shifted, graded)


# Recovery crash: UnboundLocalError in the NaN path. NaN is injected at every stage, in the second step of a run.


def inject(monkeypatch, stage, steps):
    """At the steps named, NaN in a stage of the road."""
    now = {"step": -1}
    rollout, policy_loss, step_of, score = train.rollout, grpo.policy_loss, torch.optim.AdamW.step, GPT.score

    def counted(model, samples, step):
        now["step"] = step
        batches, graded = rollout(model, samples, step)
        if stage == "reward" and step in steps:
            batches = [b._replace(rewards=b.rewards * math.nan) for b in batches]
        return batches, graded

    def broken_loss(*args, **kwargs):
        loss, stats = policy_loss(*args, **kwargs)
        return (loss * math.nan if stage == "loss" and now["step"] in steps else loss), stats

    def broken_logits(*args):
        logits = score(*args)
        return logits * math.nan if stage == "logits" and now["step"] in steps else logits

    def broken_optimizer(self, *args):
        if stage == "optimizer" and now["step"] in steps and self.state:
            next(iter(self.state.values()))["exp_avg"].fill_(math.nan)
        return step_of(self, *args)

    def broken_gradient(parameters):
        if stage == "gradient" and now["step"] in steps:
            next(p.grad for p in parameters if p.grad is not None)[0] = math.nan

    monkeypatch.setattr(train, "rollout", counted)
    monkeypatch.setattr(grpo, "policy_loss", broken_loss)
    monkeypatch.setattr(GPT, "score", broken_logits)
    monkeypatch.setattr(torch.optim.AdamW, "step", broken_optimizer)
    monkeypatch.setattr(train, "total_gradients", broken_gradient)


@pytest.mark.parametrize(
    "stage", ["logits", "optimizer", *(pytest.param(x, marks=pytest.mark.slow) for x in ("reward", "loss", "gradient"))]
)
def test_recovery_from_nan(stage, monkeypatch, capsys):
    inject(monkeypatch, stage, {1})
    rows = run(monkeypatch, MIX_ENV_RATIO=0)
    assert [row["skipped"] for row in rows] == [0, int(stage != "optimizer"), 0]
    assert [row["broken"] for row in rows] == [False, stage == "optimizer", False]
    assert rows[1]["state"] == "red" and rows[2]["state"] != "red"
    assert ("back to the last good state" in capsys.readouterr().out) == (stage == "optimizer")
    trained = GPT.load(f"{train.OUT_DIR}/model").state_dict()
    assert all(tensor.isfinite().all() for tensor in trained.values())


def test_recovery_goes_back_and_gives_up_with_words(monkeypatch, capsys):
    inject(monkeypatch, "loss", range(1, 100))
    with pytest.raises(SystemExit, match="failed a third time; a loss or gradient was not finite .* lower LR"):
        run(monkeypatch, STEPS=12, MAX_CONSECUTIVE_NANS=1, MIX_ENV_RATIO=0)
    said = capsys.readouterr().out
    assert "LR times 0.5" in said and "LR times 0.25" in said
    assert said.count("● red") == 3


def test_recovery_from_a_policy_that_has_left_its_reference(monkeypatch, capsys):
    rows = run(monkeypatch, LR=0.003, STEPS=4, KL_DIVERGENCE_THRESHOLD=0.02, MIX_ENV_RATIO=0)
    said = capsys.readouterr().out
    gone = next(i for i, row in enumerate(rows) if row["kl"] > 0.02)
    assert "back to the last good state" in said and rows[gone]["state"] == "red"
    if gone + 1 < len(rows):
        assert rows[gone + 1]["kl"] < rows[gone]["kl"] and rows[gone + 1]["lr"] == pytest.approx(0.0015)


# Std normalisation: dividing advantages by the group's std hurt with near-constant rewards


def test_std_normalisation():
    rewards = torch.tensor(
        [0.4, 0.4, 0.4, 0.401, -0.3, 1.0, 0.2, 0.5]
    )  # a group of noise, and one with something to say
    noise, signal = grpo.advantages(rewards, 4, "group").view(2, 4).abs().amax(1)
    assert noise > signal  # divided by their spread, a thousandth weighs more than the best against the worst
    noise, signal = grpo.advantages(rewards, 4, train.SCALE_REWARDS).view(2, 4).abs().amax(1)
    assert noise < signal / 500


# End token untrained: padding was the end token, so the mask dropped it and nothing learnt to stop


def test_end_token_is_trained(policy, positions):
    batches, _ = sampled(policy, positions)
    batch = batches[0]._replace(advantages=torch.ones(4))
    ends = (batch.tokens == policy.tokenizer.eos) & batch.mask
    assert (ends.sum(1) == 1).sum() >= 3  # most have ended, each with one end token of their own

    def gradient_at_ends(mask):
        logprobs = train.forward(policy, batch)[0].detach().requires_grad_(True)
        grpo.policy_loss(logprobs, logprobs.detach(), batch.advantages, mask, **DEFAULT)[0].backward()
        return logprobs.grad[ends]

    assert (gradient_at_ends(batch.tokens != policy.tokenizer.eos) == 0).all()  # the incident
    assert (gradient_at_ends(batch.mask) < 0).all()


# Truncated outputs: too few new tokens for the format


def test_truncated_outputs(policy, positions, monkeypatch):
    monkeypatch.setattr(train, "TASKS", {"P: ": 40, "A: ": 40})  # cuts off before `B:`
    cut = parts_by_task(sampled(policy, positions)[1])
    assert cut["runaway"] == 1 and cut["structure"] == 0
    harmless = dict(skipped=0, broken=False, reward_max=1, frac_zero_std=0, grad_norm=0, clip_low=0, clip_high=0)
    harmless |= dict(logprob_gap=0)
    assert "raise MAX_NEW_TOKENS" in diagnose({**harmless, **cut}, [], 1, 1)[1]  # not called malformed text
    monkeypatch.setattr(train, "TASKS", {"P: ": 144, "A: ": 144})
    whole = parts_by_task(sampled(policy, positions)[1])
    assert whole["runaway"] < 0.2 and whole["structure"] > 0.8


# Silent settings: a collector built with defaults ignored the group size that was asked for

CHANGES = dict(
    MODEL="other", DATA="own", SEED=1, STEPS=2, BATCH_POSITIONS=3, GROUP_SIZE=3, MIX_ENV_RATIO=0.0, EPOCHS=2, LR=1e-3,
    LR_SCHEDULE="linear", WARMUP_STEPS=2, WEIGHT_DECAY=10.0, MAX_GRAD_NORM=1e-3, LOSS="grpo", SCALE_REWARDS="group",
    KL_COEF=0.0, KL_ESTIMATOR="k3", KL_TARGET=1e-3, KL_WARMUP_STEPS=3, KL_DIVERGENCE_THRESHOLD=1e-9,
    REF_UPDATE_EVERY=1, ENTROPY_COEF=1.0, TEMPERATURE=0.5, TOP_K=2, TOP_P=0.5, MAX_NEW_TOKENS=60,
    MAX_NEW_TOKENS_ENV=60, REWARD_WARMUP_STEPS=10, OVERFIT=True, DTYPE="bfloat16", CREDIT="answer", TRAIN="all",
    GAINS_LR_FACTOR=2.0,
    LAST_GAINS_LR_FACTOR=2.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """What the runs with one changed setting are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SMALL, "OUT_DIR": str(tmp_path_factory.mktemp("plain") / "out")}.items():
            patch.setattr(train, name, value)
        patch.setattr(train, "TASKS", {"P: ": 100, "A: ": 100})
        return what_it_did(run(patch))


def what_it_did(rows):
    """Everything a run wrote about itself but the clock and the memory."""
    for row in rows:
        for name in ("seconds", "tokens_per_second", "peak_memory_gb"):
            del row[name]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_no_setting_is_silent(name, plain_run, monkeypatch, tmp_path, start):
    value = CHANGES[name]
    if name == "MODEL":
        other, value = copy.deepcopy(start), str(tmp_path / "other")
        with torch.no_grad():
            other.wte.weight.mul_(1.01)
        other.save(value)
    if name == "DATA":
        value = str(tmp_path / "own.txt")
        fens = [p.fen for p in data.load("builtin")[500:700]]
        open(value, "w").write("\n".join(fens) + "\n")
    if name.startswith("MAX_NEW_TOKENS"):
        monkeypatch.setitem(train.TASKS, "P: " if name == "MAX_NEW_TOKENS" else "A: ", value)
    assert getattr(train, name) != value
    assert what_it_did(run(monkeypatch, **{name: value})) != plain_run


def test_every_setting_is_known_to_do_something():
    """A new setting joins CHANGES, or this list with the test that sees its effect."""
    elsewhere = {
        "OUT_DIR", "FRESH", "SAVE_EVERY", "KEEP_CHECKPOINTS", "EVAL_EVERY", "EVAL_POSITIONS",  # test_train.py
        "DEVICE", "COMPILE", "REF_DEVICE", "MICROBATCH_TOKENS", "REPORT_TO", "RUN_NAME",  # tests/test_train.py
        "CLIP_RANGE", "CLIP_RANGE_HIGH",  # tests/test_grpo.py: a ratio is 1 in the only update of a step
        "KL_WARMUP_FACTOR",  # nothing without KL_WARMUP_STEPS
        "RUNAWAY_PENALTY_MULTIPLIER", "RECOVERY_LR_FACTOR", "MAX_CONSECUTIVE_NANS",  # above
    }  # fmt: skip
    assert {*CHANGES} | elsewhere == {*settings.KNOWN} and not {*CHANGES} & elsewhere
