"""GRPO for a language model with a verifier, from top to bottom: settings, one step, the guard, the loop.

./train.sh                                       chess, with the embedded model on the embedded positions
STEPS=50 LR=1e-5 ./train.sh                      settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M LR=1e-5     or as arguments; --help lists them
TASK=examples/letters.py ./train.sh              another task

A step: make B questions, sample G answers to each (rollout.py), grade them (rewards.py), compare each with its group
(grpo.py), and take one step on the loss. Sizes: B prompts, G group, N = B·G rows, P prompt tokens, T completion tokens.
"""

import copy
import functools
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import grpo
from model import GPT
from nanorook import checkpoint, hardware, monitor, parallel, settings
from nanorook.settings import refuse, setting
from rollout import distribution, generate, microbatches

if __name__ == "__main__":
    settings.read_user()  # when imported, all settings have their defaults

# fmt: off
TASK                    = setting("TASK", "rewards.py", "the file that asks and grades; see the top of rewards.py")
task                    = settings.load_task(TASK)
MODEL                   = setting("MODEL", "", "the model to train: a Hugging Face folder or a hub id; empty: the task's own start model")
DATA                    = setting("DATA", "builtin", "chess: where positions come from: builtin, a file (own lines, RookWorld's, FEN, EPD, PGN), or hub:...")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and the report; a run in it goes on where it stopped")
FRESH                   = setting("FRESH", False, "delete the run in OUT_DIR and start over")
SEED                    = setting("SEED", 0, "decides questions and samples: step n draws the same in every run")
STEPS                   = setting("STEPS", 80, "rollout batches to learn from", low=1)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 16, "B, prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 8, "G, completions of each prompt", low=2)
EPOCHS                  = setting("EPOCHS", 1, "updates from one rollout batch", low=1)
OVERFIT                 = setting("OVERFIT", False, "the same questions at every step: can the loop learn at all?")
CONTROL                 = setting("CONTROL", False, "all advantages are zero: what a run does without a reward")

LR                      = setting("LR", 2e-4, "learning rate of AdamW; 1e-5 for a model of GPT-2's size", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero", one_of=grpo.SCHEDULES)
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "the gradient is scaled down to this norm; always on", low=1e-9)

LOSS                    = setting("LOSS", "dapo", "see grpo.policy_loss", one_of=grpo.LOSSES)
CREDIT                  = setting("CREDIT", "piece", "a token is paid for the pieces of the reward that judge it, or for the whole answer as in plain GRPO", one_of=("piece", "answer"))
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by a standard deviation, see grpo.advantages", one_of=("none", "group", "batch"))
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - this", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "... and above 1 + this", low=0)
KL_COEF                 = setting("KL_COEF", 0.01, "weight of the KL to the start model; 0 loads no reference", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_WARMUP_STEPS         = setting("KL_WARMUP_STEPS", 0, "steps over which KL_COEF rises from KL_WARMUP_FACTOR times its value", low=0)
KL_WARMUP_FACTOR        = setting("KL_WARMUP_FACTOR", 0.0, "where that rise begins", low=0, high=1)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "KL per token above which the run goes back to its last good state", low=0)
REF_UPDATE_EVERY        = setting("REF_UPDATE_EVERY", 0, "steps after which the policy becomes the reference; 0 is never", low=0)
REF_DEVICE              = setting("REF_DEVICE", "", "where the reference is kept; empty: DEVICE")

TEMPERATURE             = setting("TEMPERATURE", 1.0, "of sampling, and so of the distribution that is trained", low=1e-3)
TOP_K                   = setting("TOP_K", 0, "sample from the k likeliest tokens; 0 is all", low=0)
TOP_P                   = setting("TOP_P", 1.0, "sample from the smallest set of tokens with this probability", low=1e-6, high=1)

EVAL_EVERY              = setting("EVAL_EVERY", 40, "steps between evaluations on held-out questions; 0: only before and after", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "held-out questions of an evaluation", low=1)
SAVE_EVERY              = setting("SAVE_EVERY", 20, "steps between checkpoints", low=1)
RECOVERY_LR_FACTOR      = setting("RECOVERY_LR_FACTOR", 0.5, "the learning rate is multiplied by this after going back", low=0, high=1)
MAX_CONSECUTIVE_NANS    = setting("MAX_CONSECUTIVE_NANS", 3, "skipped updates in a row after which the run goes back", low=1)
REPORT_TO               = setting("REPORT_TO", "none", "also log to", one_of=("none", "wandb", "tensorboard"))
RUN_NAME                = setting("RUN_NAME", "", "name of the run in that log")

DEVICE                  = setting("DEVICE", "auto", "where to train: cpu, cuda, cuda:1, ...; auto: cuda if there is one")
DTYPE                   = setting("DTYPE", "auto", "of the matrix products; weights stay float32; auto: the faster one", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", "auto", "torch.compile the training forward; auto: on CUDA", one_of=("auto", "0", "1"))
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 0, "tokens that go through the model at once; bounds memory, changes nothing else; 0: 65536 on CUDA, 4096 on CPU", low=0)
NPROC                   = setting("NPROC", 1, "processes on this machine; one for each GPU", low=1)
# fmt: on

SNAPSHOT_EVERY = 10  # steps between copies of a healthy state, to which a run that breaks goes back
EVAL_ROWS = 128  # completions that an evaluation samples at once
TOO_LARGE = "out of memory with the answers to a single question: lower GROUP_SIZE, or the limit of new tokens."


# ---------------------------------------------------------------------------------------------------------------------
# One step: answers and their rewards


class Sample(NamedTuple):
    question: tuple  # the task's Question
    text: str
    ends: list  # for each token the number of characters up to its end
    hit_limit: bool
    grade: tuple  # the task's Grade


def sample(model, questions, group_size, temperature, noise, step=math.inf):
    """Samples and grades `group_size` answers to each question, one kind at a time, as kinds differ in length:
    [(Batch, its Samples), ...]. `noise` (questions, group_size, T) decides what is drawn."""

    def part(indices):
        return sample_kind(model, [questions[i] for i in indices], group_size, temperature, noise[indices], step)

    kinds = dict.fromkeys(question.kind for question in questions)
    groups = [[i for i, question in enumerate(questions) if question.kind == kind] for kind in kinds]
    return [result for indices in groups for result in in_halves(part, indices)]


def sample_kind(model, questions, group_size, temperature, noise, step):
    prompts = [model.tokenizer.encode(question.prompt) for question in questions]
    limit = min(task.LIMITS[questions[0].kind], model.config.n_positions - max(map(len, prompts)))
    if limit < 1:
        refuse(f"the model's {model.config.n_positions} positions leave no room after its longest prompt; use shorter ones.")
    uniform = noise.flatten(0, 1)[:, :limit].to(model.wte.weight.device)  # (N, T)
    batch = generate(model, prompts, group_size, limit, temperature, TOP_K, TOP_P, uniform)
    samples = []
    for i, (ids, hit_limit) in enumerate(zip(batch.tokens.tolist(), batch.hit_limit.tolist())):
        question, (text, ends) = questions[i // group_size], model.tokenizer.read(ids)
        samples.append(Sample(question, text, ends, hit_limit, task.grade(question, text, hit_limit, step)))
    return batch, samples


def rollout(model, questions, step):
    """This process's share of a step: [(Batch with advantages, its Samples), ...].

    Each prompt has random numbers of its own, so its completions are the same with any number of processes.
    """
    generator = torch.Generator().manual_seed(random.Random(f"{SEED}/{step}/noise").getrandbits(60))
    noise = torch.rand(len(questions), GROUP_SIZE, max(task.LIMITS.values()), generator=generator)
    mine = slice(parallel.rank(), None, parallel.world())
    results = sample(model.cast(model.dtype), questions[mine], GROUP_SIZE, TEMPERATURE, noise[mine], step)
    rewards = parallel.gather([s.grade.reward for _, samples in results for s in samples])
    deviation = torch.tensor(rewards).std()
    return [(with_advantages(batch, samples, deviation), samples) for batch, samples in results]


def with_advantages(batch, samples, deviation):
    """Compares each answer, or each piece of its reward, with the same of the other answers to its question."""
    T = batch.tokens.shape[1]
    if CREDIT == "piece":
        values, judged = grpo.credit([s.grade.pieces for s in samples], [s.ends for s in samples], T)
    else:
        values, judged = torch.tensor([[s.grade.reward] for s in samples]), torch.ones(1, T, 1)
    advantages = grpo.token_advantages(grpo.advantages(values, GROUP_SIZE, SCALE_REWARDS, deviation), judged)  # (N, T)
    if CONTROL:
        advantages = torch.zeros_like(advantages)
    return batch._replace(advantages=advantages.to(batch.tokens.device))


def in_halves(work, items):
    """[work(items)]; where memory does not suffice, the results of work() on each half."""
    try:
        return [work(items)]
    except torch.OutOfMemoryError:
        if len(items) == 1:
            refuse(TOO_LARGE)
    torch.cuda.empty_cache()  # outside of the except block, which keeps the failed tensors alive
    half = len(items) // 2
    return in_halves(work, items[:half]) + in_halves(work, items[half:])


# ---------------------------------------------------------------------------------------------------------------------
# One step: the loss and the update


def forward(model, batch):
    """Logprobs and entropies (N, T) of a batch's completions under the distribution that was sampled."""
    logits = score()(model, batch.prompts, batch.prompt_lengths, batch.tokens)  # (N, T, V)
    if TOP_K or TOP_P < 1:
        return grpo.logprobs_and_entropy(distribution(logits, TEMPERATURE, TOP_K, TOP_P, batch.tokens), batch.tokens)
    return grpo.logprobs_and_entropy(logits, batch.tokens, TEMPERATURE)


@functools.cache
def score():
    """GPT.score, compiled for policy and reference alike: compiled code rounds differently, and KL must start at 0."""
    return torch.compile(GPT.score, dynamic=True) if hardware.compiles(COMPILE, hardware.choose(DEVICE)) else GPT.score


@torch.no_grad()
def reference_logprobs(reference, batch):
    return forward(reference, batch.to(reference.wte.weight.device))[0].to(batch.tokens.device)


def accumulate(model, reference, parts, normalizer, kl_coef):
    """The gradient of a step's loss: (parts, now with the logprobs that the next epoch needs; sums and extremes).

    No process waits for another in here, so a process that runs out of memory can start again by itself.
    """
    done, stats = [], []
    for part in parts:
        mask = part.completion_mask
        logprobs, entropy = forward(model, part)  # (N, T)
        if part.old_logprobs is None:  # the first epoch: these are the weights that sampled
            ref = reference_logprobs(reference, part) if reference is not None else None
            part = part._replace(old_logprobs=logprobs.detach(), ref_logprobs=ref)
        loss, stat = grpo.policy_loss(
            logprobs, part.old_logprobs, part.advantages, mask, loss=LOSS, clip_low=CLIP_RANGE,
            clip_high=CLIP_RANGE_HIGH, normalizer=normalizer,
            weights=grpo.importance_weights(part.old_logprobs, part.rollout_logprobs, cap=2.0),
        )  # fmt: skip
        if reference is not None:
            kl = grpo.kl(logprobs, part.ref_logprobs, mask, KL_ESTIMATOR)
            loss = loss + kl_coef * grpo.aggregate(kl, mask, LOSS, normalizer)
            # k2 whatever KL_ESTIMATOR is: one token can blow up k3's mean
            stat["kl"] = grpo.kl(logprobs.detach(), part.ref_logprobs, mask, "k2").sum()
        loss.backward()
        stat["gap"] = torch.where(mask, logprobs.detach() - part.rollout_logprobs, 0).abs().sum()
        stat |= {"loss": loss.detach(), "entropy": torch.where(mask, entropy, 0).sum()}
        done.append(part)
        stats.append(stat)
    return done, grpo.merge_stats(stats)


def microbatch_tokens(model):
    return MICROBATCH_TOKENS or (65536 if model.wte.weight.is_cuda else 4096)


def accumulate_in_memory(model, reference, parts, *args):
    """accumulate(), again with smaller microbatches each time that memory does not suffice."""
    while True:
        try:
            return accumulate(model, reference, parts, *args)
        except torch.OutOfMemoryError:
            sizes = [part.prompts.numel() + part.tokens.numel() for part in parts if len(part.prompts) > 1]
            if not sizes:
                refuse(TOO_LARGE)
        # outside of the except block, which keeps the failed tensors alive
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        print(f"out of memory; once more with MICROBATCH_TOKENS={max(sizes) // 2}", flush=True)
        parts = [smaller for part in parts for smaller in microbatches(part, max(sizes) // 2)]


def update(model, reference, optimizer, batches, kl_coef):
    """EPOCHS updates from one step's batches; what was measured, `skipped` where an update was not made."""
    parts = [part for batch in batches for part in microbatches(batch, microbatch_tokens(model))]
    longest = max(task.LIMITS.values())
    normalizer = sum(grpo.loss_normalizer(part.completion_mask, LOSS, longest) for part in parts)
    normalizer = parallel.total(normalizer.float())
    measured, norms, skipped = [], [], 0
    for _ in range(EPOCHS):
        parts, stats = accumulate_in_memory(model, reference, parts, normalizer, kl_coef)
        measured.append({name: parallel.total(value, grpo.reduction(name)) for name, value in stats.items()})

        # The guard: nothing that is not finite reaches the weights, and no step is longer than MAX_GRAD_NORM allows.
        parallel.sum_gradients(model.parameters())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
        if torch.stack([norms[-1], measured[-1]["loss"]]).isfinite().all():
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    broken = ~torch.stack([p.detach().isfinite().all() for p in model.parameters()]).all()
    return describe_update(measured, norms) | {"skipped": skipped, "broken": bool(broken)}


def describe_update(measured, norms):
    """The metrics of a step's updates, as numbers. Gap, entropy and KL are those before the first of them."""
    first, whole = measured[0], grpo.merge_stats(measured)
    names = list(first)
    numbers = torch.stack([*first.values(), *(whole[name] for name in names), *norms]).tolist()  # the host waits once
    first, whole = dict(zip(names, numbers)), dict(zip(names, numbers[len(names) :]))
    norms = numbers[2 * len(names) :]
    per_token = {name: first[name] / first["tokens"] for name in ("gap", "entropy", "kl") if name in first}
    return {
        "loss": whole["loss"] / len(measured),
        "grad_norm": max(norms, key=lambda norm: (math.isnan(norm), norm)),
        "tokens": int(first["tokens"]),
        "logprob_gap": per_token.pop("gap"),
        **per_token,
        **{f"ratio_{what}": whole[f"ratio_{what}"] for what in ("min", "max")},
        **{name: whole[name] / whole["tokens"] for name in ("clip_low", "clip_high")},
    }


def check_start(metrics, dtype):
    """Refuses a run whose sampler, policy and reference were not one function before the first update."""
    gap, kl = metrics["logprob_gap"], metrics.get("kl", 0.0)
    if not gap < (1e-3 if dtype == torch.float32 else 0.05):
        refuse(f"sampling and training disagree by {gap:.4f} nats a token before any update, which only a bug or "
               "weights that are not finite can cause.")  # fmt: skip
    if not kl < (1e-5 if dtype == torch.float32 else 1e-3):  # in bf16 another device or kernel rounds differently
        refuse(f"KL to the reference is {kl:.5f} before any update, so the reference is not the start model.")


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate(model, questions, file, step):
    """{"policy legal T=0": (mean, half-width of its 95 % interval), ...}, greedy and as sampled in training, by all
    processes together; `file` gets the first sampled answers of each kind. SEED decides what is drawn."""
    figures, model, lead = {}, model.cast(model.dtype), parallel.rank() == 0
    noise = torch.rand(len(questions), 1, max(task.LIMITS.values()), generator=torch.Generator().manual_seed(SEED))
    mine = range(parallel.rank(), len(questions), parallel.world())
    chunks = [list(mine[i : i + EVAL_ROWS]) for i in range(0, len(mine), EVAL_ROWS)]
    bar = tqdm(total=2 * len(chunks), desc="evaluation", leave=False, disable=None if lead else True)
    for temperature in (0.0, TEMPERATURE):
        found = []
        for indices in chunks:
            asked = [questions[i] for i in indices]
            found += [s for _, samples in sample(model, asked, 1, temperature, noise[indices]) for s in samples]
            bar.update()
        found = parallel.gather(found)
        figures |= {f"{name} T={temperature:g}": value for name, value in monitor.intervals(found).items()}
    bar.close()
    if lead:
        with open(file, "a") as log:
            for kind in dict.fromkeys(s.question.kind for s in found):
                for s in [s for s in found if s.question.kind == kind][:16]:
                    row = {"step": step, "completion": s.text, **s.question._asdict(), **s.grade._asdict()}
                    log.write(json.dumps(row) + "\n")
    return dict(sorted(figures.items(), key=lambda item: item[0].split(" ")[0]))


# ---------------------------------------------------------------------------------------------------------------------
# Set-up and loop


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def make_reference(model, device, dtype):
    return copy.deepcopy(model).to(hardware.choose(REF_DEVICE) if REF_DEVICE else device).cast(dtype)


def main():
    settings.finish()
    device = parallel.start(hardware.choose(DEVICE), NPROC)
    lead, world = parallel.rank() == 0, parallel.world()
    log = functools.partial(print, flush=True) if lead else lambda *_: None
    if BATCH_POSITIONS % world:
        refuse(f"BATCH_POSITIONS={BATCH_POSITIONS} cannot be divided among {world} processes; use a multiple of {world}.")

    # Where the run stands: at its beginning, or where it was stopped. `state` is what one step leaves to the next.
    out = Path(OUT_DIR)
    if lead:
        lock = checkpoint.lock(out)
        if FRESH and MODEL and Path(MODEL).resolve().is_relative_to(out.resolve()):
            refuse(f"FRESH=1 would delete MODEL={MODEL}, which lies in OUT_DIR={out}; name another OUT_DIR.")
        source = MODEL or task.start_model()
    source = parallel.from_lead(source if lead else None)
    found = None if FRESH else checkpoint.load(out, log)
    state = dict(step=0, lr_factor=1.0, skipped_in_a_row=0, rollbacks=0, skill={}, best=(-math.inf, 0))
    if found:
        state = found[1]
        settings.compare(state["settings"], log)
        ended = "after" in state["skill"] and (out / "model").exists() and (out / "report.html").exists()
        if ended and state["step"] >= STEPS:
            refuse(f"{out} holds a finished run of {state['step']} steps; name another OUT_DIR, raise STEPS to go on, "
                   "or start over with FRESH=1.")  # fmt: skip
        if "after" in state["skill"] and state["step"] < STEPS:  # a finished run that goes on
            state["skill"][f"step {state['step']}"] = state["skill"].pop("after")
        log(f"{out} holds this run's first {state['step']} steps; it goes on from there. FRESH=1 starts over.")
    if len(set(parallel.gather([state["step"]]))) > 1:
        refuse(f"not all processes see the same checkpoints: OUT_DIR={out} has to be a folder that all machines share.")
    if DTYPE == "auto":  # decided once: another process, or a resumed run, might measure otherwise
        state["dtype"] = state.get("dtype") or parallel.from_lead(str(hardware.fastest_dtype(device)).split(".")[1])
    dtype = getattr(torch, state["dtype"] if DTYPE == "auto" else DTYPE)

    model = GPT.load(found[0] if found else source).to(device).use(dtype)
    optimizer = make_optimizer(model)
    reference = None
    if KL_COEF:
        base = GPT.load(source) if found else model
        if "reference" in state:  # the policy of an earlier step, see REF_UPDATE_EVERY
            base.load_state_dict(state["reference"])
        reference = make_reference(base, device, dtype)
    if found:
        for saved in (state["optimizer"], state["good"][1]):
            saved["param_groups"] = optimizer.state_dict()["param_groups"]  # today's settings count
        optimizer.load_state_dict(state.pop("optimizer"))
    else:
        state["good"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    items, held_out = task.load(DATA, model.config)
    if len(items) < BATCH_POSITIONS:
        refuse(f"DATA={DATA} has {len(items)} items to train on, fewer than BATCH_POSITIONS={BATCH_POSITIONS}.")
    eval_questions = task.make_questions(held_out, min(EVAL_POSITIONS, len(held_out)), random.Random(0), model.config)
    parameters = sum(p.numel() for p in model.parameters())
    log(f"{source}: {parameters / 1e6:.1f}M parameters, {TASK}: {len(items)} items to train on, {len(held_out)} held out, "
        f"{STEPS} steps of {BATCH_POSITIONS} × {GROUP_SIZE} answers, {device} in {str(dtype)[6:]}, {world} process(es)")  # fmt: skip
    if parameters > 5e7 and LR > 1e-5:
        log(f"LR={LR:g} is high for a model of this size; LR=1e-5 CLIP_RANGE=0.1 TEMPERATURE=0.7 suit one of 124M.")
    if lead:
        if FRESH:  # not before model and data are known to be good
            checkpoint.clear(out)
        about = monitor.describe("./train.sh", device, dtype)
        past, write = monitor.open_log(out, state["step"] if state["skill"] else -1, about, REPORT_TO, RUN_NAME)
    if "before" not in state["skill"]:
        state["skill"]["before"] = evaluate(model, eval_questions, out / "samples.jsonl", 0)

    signals = checkpoint.catch_signals()
    started, first_step = time.time(), state["step"]
    for step in range(first_step, STEPS):
        # Questions, answers, rewards, advantages
        clock = time.time()
        rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
        results = rollout(model, task.make_questions(items, BATCH_POSITIONS, rng, model.config), step)
        batches, samples = [batch for batch, _ in results], parallel.gather([s for _, some in results for s in some])
        metrics = describe_rewards(samples)
        if step == 0 and metrics.get("structure", 1.0) < 0.2:
            refuse(f"only {metrics['structure']:.0%} of the first completions have the structure of an answer, so the model "
                   f"{source} does not speak this format: check its weights and config.json, or pretrain it first.")  # fmt: skip
        rollout_seconds, clock = time.time() - clock, time.time()

        # Loss, gradient, guard, optimizer
        lr = LR * grpo.schedule(step, STEPS, WARMUP_STEPS, LR_SCHEDULE) * state["lr_factor"]
        for group in optimizer.param_groups:
            group["lr"] = lr
        kl_coef = KL_COEF * grpo.kl_warmup(step, KL_WARMUP_STEPS, KL_WARMUP_FACTOR)
        snapshot = None if step % SNAPSHOT_EVERY else copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        metrics |= update(model, reference, optimizer, batches, kl_coef)
        if step == 0:
            check_start(metrics, dtype)
        update_seconds = time.time() - clock

        # What happened
        metrics |= {
            "step": step + 1,
            "lr": lr,
            "kl_coef": kl_coef,
            "length": metrics["tokens"] / len(samples),
            "seconds": {"rollout": round(rollout_seconds, 3), "update": round(update_seconds, 3)},
            "tokens_per_second": metrics["tokens"] / (rollout_seconds + update_seconds),
            "peak_memory_gb": hardware.peak_memory(device),
        }
        if lead:
            metrics["state"], metrics["advice"] = monitor.diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
            past = [*past[-39:], metrics]  # as many as diagnose looks at
            write(metrics)
            log(monitor.progress_line(metrics, STEPS, (time.time() - started) / (step + 1 - first_step) * (STEPS - step - 1)))

        # Going back: after updates that could not be made, or that went too far from the reference
        state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if metrics["skipped"] else 0
        too_far = metrics.get("kl", 0) > KL_DIVERGENCE_THRESHOLD
        if metrics["broken"] or too_far or state["skipped_in_a_row"] >= MAX_CONSECUTIVE_NANS:
            state["rollbacks"] += 1
            if state["rollbacks"] == 3:
                refuse("the run failed for the third time; lower LR, or see the last line's advice.")
            model.load_state_dict(state["good"][0])
            optimizer.load_state_dict(copy.deepcopy(state["good"][1]))
            state |= {"lr_factor": state["lr_factor"] * RECOVERY_LR_FACTOR, "skipped_in_a_row": 0}
            log(f"back to the last good state, with LR times {state['lr_factor']:g}")
        elif snapshot and not metrics["skipped"]:
            state["good"] = snapshot  # taken before this update; this step's completions and their KL were sound
        if reference is not None and REF_UPDATE_EVERY and (step + 1) % REF_UPDATE_EVERY == 0:
            reference = make_reference(model, device, dtype)

        # Evaluation, checkpoint
        state["step"], last = step + 1, step + 1 == STEPS
        stopping = bool(parallel.gather(signals))
        evaluated = last or bool(EVAL_EVERY) and (step + 1) % EVAL_EVERY == 0
        if evaluated:
            skill = evaluate(model, eval_questions, out / "samples.jsonl", step + 1)
            state["skill"]["after" if last else f"step {step + 1}"] = skill
            rewards = [mean for name, (mean, _) in skill.items() if name.endswith(f" reward T={TEMPERATURE:g}")]
            state["best"] = max(state["best"], (sum(rewards), step + 1))
            if lead:
                (out / "skill.json").write_text(json.dumps(state["skill"], indent=2))
                monitor.show(samples)
                log(monitor.table(state["skill"]))
        if lead and ((step + 1) % SAVE_EVERY == 0 or evaluated or stopping):
            whole = state | {"optimizer": optimizer.state_dict(), "settings": settings.values()}
            if reference is not None and REF_UPDATE_EVERY:
                whole["reference"] = reference.state_dict()
            checkpoint.save(out, model, whole)
        if stopping and not last:
            log(f"stopped after step {step + 1}; the same command goes on from there.")
            sys.exit(128 + (signals or [0])[0])
    if lead:
        finish_run(model, out)
        lock.close()
    parallel.finish()


def describe_rewards(samples):
    """The metrics of all the answers of a step, of which those of a group lie next to each other."""
    rewards = torch.tensor([s.grade.reward for s in samples])
    constant = grpo.constant(rewards.view(-1, GROUP_SIZE))
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "reward_max": rewards.max().item(),
        "frac_zero_std": constant.float().mean().item(),
        "hit_limit": sum(s.hit_limit for s in samples) / len(samples),
    } | monitor.by_kind(samples)


def finish_run(model, out):
    from tools import report

    model.save(out / "model")
    print(f"{out}/model       the trained model, a folder that transformers opens")
    print(f"{report.write(out)}  how the run went")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the loop, which saves first
        sys.exit(130)
    except RuntimeError as error:
        refuse(parallel.explain(error))
