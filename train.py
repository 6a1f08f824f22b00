"""GRPO for a chess language model, from top to bottom: settings, set-up, one step, the guard, the loop.

./train.sh                              the embedded model on the embedded positions
STEPS=50 LR=3e-5 ./train.sh             settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M DATA=games.pgn LR=3e-5      or as arguments
"""

import copy
import functools
import json
import math
import random
import sys
import time
from pathlib import Path

import torch

import checkpoint
import data
import grpo
import parallel
import tasks
from batch import Batch, microbatches
from credit import credit
from engine import LiveLabels
from machine import fastest_dtype, prepare
from model import GPT, is_gain
from monitor import begin, diagnose, measured, parts_by_task, peak_memory, progress_line, show
from parallel import RANK, WORLD, collect, gather, total, total_gradients
from rollout import distribution, pad_prompts
from settings import INSTEAD, finish, refuse, setting, values
from skill import ask, look, mean_parts, sample_and_grade, table
from tokenizer import LoadError
from tools.curves import plot
from tools.report import write as write_report

# fmt: off
OVERFIT                 = setting("OVERFIT", False, "learn one batch of prompts again and again, with defaults of its own: can the loop learn at all?")
if OVERFIT:  # many answers to few prompts, and nothing that holds the policy back
    INSTEAD |= dict(STEPS=100, BATCH_POSITIONS=4, GROUP_SIZE=32, LR=1e-3, LR_SCHEDULE="constant", GAINS_LR_FACTOR=24.0, LAST_GAINS_LR_FACTOR=24.0, KL_COEF=0.0, TEMPERATURE=1.0)
MODEL                   = setting("MODEL", "weights/tiny", "the model to train: a Hugging Face folder or a hub id")
DATA                    = setting("DATA", "builtin", "where positions come from: builtin, a file (own lines, RookWorld's, FEN, EPD, PGN), or hub:...")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and the report; a run in it goes on where it stopped")
FRESH                   = setting("FRESH", False, "delete the run in OUT_DIR and start over")
SEED                    = setting("SEED", 0, "decides positions and samples: step n draws the same in every run")
DEVICE                  = setting("DEVICE", "cuda" if torch.cuda.is_available() else "cpu", "where to train")
DTYPE                   = setting("DTYPE", "auto", "of the matrix products; weights stay float32", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", torch.cuda.is_available(), "torch.compile the training forward")
STEPS                   = setting("STEPS", 100, "rollout batches to learn from", low=1)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 32, "B, prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 4, "G, completions for each prompt", low=2)
MIX_ENV_RATIO           = setting("MIX_ENV_RATIO", 0.3, "share of prompts that are environment tasks (A:); the rest is policy (P:)", low=0, high=1)
EPOCHS                  = setting("EPOCHS", 1, "updates from one rollout batch", low=1)
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 65536 if torch.cuda.is_available() else 4096, "tokens that go through the model at once; bounds memory, changes nothing else", low=1)
TRAIN                   = setting("TRAIN", "mlp", "which weights learn: those of the feed-forward layers and the norms' gains, or all", one_of=("mlp", "all"))
LR                      = setting("LR", 1e-4, "learning rate of AdamW", low=0)
GAINS_LR_FACTOR         = setting("GAINS_LR_FACTOR", 72.0, "the norms' gains learn with so many times LR: they are near 1, other weights near 0.1", low=0)
LAST_GAINS_LR_FACTOR    = setting("LAST_GAINS_LR_FACTOR", 1200.0, "... and those of the last norm, which scale the logits, with so many", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero", one_of=grpo.SCHEDULES)
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
WEIGHT_DECAY            = setting("WEIGHT_DECAY", 0.0, "of AdamW, on matrices only", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "the gradient is scaled down to this norm; always on", low=1e-9)
LOSS                    = setting("LOSS", "dapo", "see grpo.policy_loss", one_of=grpo.LOSSES)
CREDIT                  = setting("CREDIT", "word", "what a token is paid for: its word, or the whole answer as in plain GRPO; see credit.py", one_of=("word", "answer"))
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by a standard deviation, see grpo.advantages", one_of=("none", "group", "batch"))
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - this", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "... and above 1 + this", low=0)
KL_COEF                 = setting("KL_COEF", 0.05, "weight of the KL to the start model; 0 loads no reference", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_TARGET               = setting("KL_TARGET", 0.0, "KL per token that KL_COEF is adapted to; 0 keeps it fixed", low=0)
KL_WARMUP_STEPS         = setting("KL_WARMUP_STEPS", 0, "steps over which KL_COEF rises from its KL_WARMUP_FACTOR-th part", low=0)
KL_WARMUP_FACTOR        = setting("KL_WARMUP_FACTOR", 0.0, "where that rise begins", low=0, high=1)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "KL per token above which the run goes back to its last good state", low=0)
REF_UPDATE_EVERY        = setting("REF_UPDATE_EVERY", 0, "steps after which the policy becomes the reference; 0 is never", low=0)
REF_DEVICE              = setting("REF_DEVICE", DEVICE, "where the reference is kept")
ENTROPY_COEF            = setting("ENTROPY_COEF", round(-0.8 * KL_COEF, 6) + 0.0, "weight of a bonus for entropy; below 0 it is a price, see docs/learning.md")
TEMPERATURE             = setting("TEMPERATURE", 1.2, "of sampling, and so of the distribution that is trained", low=1e-3)
TOP_K                   = setting("TOP_K", 0, "sample from the k likeliest tokens; 0 is all", low=0)
TOP_P                   = setting("TOP_P", 1.0, "sample from the smallest set of tokens that holds this probability", low=1e-6, high=1)
MAX_NEW_TOKENS          = setting("MAX_NEW_TOKENS", 144, "limit of a policy completion", low=1)
MAX_NEW_TOKENS_ENV      = setting("MAX_NEW_TOKENS_ENV", 144, "limit of an environment completion", low=1)
RUNAWAY_PENALTY_MULTIPLIER = setting("RUNAWAY_PENALTY_MULTIPLIER", 0.3, "a positive reward is multiplied by this when a completion hits its limit", low=0, high=1)
REWARD_WARMUP_STEPS     = setting("REWARD_WARMUP_STEPS", 0, "steps over which the reward's weight moves from structure to content", low=0)
EVAL_EVERY              = setting("EVAL_EVERY", 50, "steps between looks at held-out skill; 0 looks only before and after", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "held-out positions of each task", low=1)
SAVE_EVERY              = setting("SAVE_EVERY", 20, "steps between checkpoints", low=1)
KEEP_CHECKPOINTS        = setting("KEEP_CHECKPOINTS", 2, "how many checkpoints stay on disk", low=1)
RECOVERY_LR_FACTOR      = setting("RECOVERY_LR_FACTOR", 0.5, "the learning rate is multiplied by this after going back", low=0, high=1)
MAX_CONSECUTIVE_NANS    = setting("MAX_CONSECUTIVE_NANS", 3, "skipped updates in a row after which the run goes back", low=1)
REPORT_TO               = setting("REPORT_TO", "none", "also log to", one_of=("none", "wandb", "tensorboard"))
RUN_NAME                = setting("RUN_NAME", "", "name of the run in that log")
# fmt: on

TASKS = {"P: ": MAX_NEW_TOKENS, "A: ": MAX_NEW_TOKENS_ENV}  # rolled out one kind at a time, as their lengths differ
ILLEGAL = 1 / 3  # of the moves that environment tasks ask about: of what is rarer, a model learns that it never happens
SNAPSHOT_EVERY = 10  # steps between copies of a healthy state, to which a run that breaks goes back


# ---------------------------------------------------------------------------------------------------------------------
# One step


def draw_prompts(positions, step, chess_format):
    """The prompts of a step, a pure function of SEED and step: some environment tasks, the rest policy tasks."""
    rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
    drawn, environment = rng.sample(positions, BATCH_POSITIONS), round(BATCH_POSITIONS * MIX_ENV_RATIO)
    return [
        tasks.environment_sample(p, rng, chess_format, ILLEGAL) if i < environment else tasks.policy_sample(p, chess_format)
        for i, p in enumerate(drawn)
    ]


def rollout(model, samples, step):
    """Sample and grade G completions for each prompt: a Batch for each task, and (prompt, text, grade) of each row."""
    model = model.cast(DTYPE)
    chance = torch.Generator().manual_seed(random.Random(f"{SEED}/{step}/chance").getrandbits(60))
    # A prompt's completions depend on its own numbers alone, so they are the same with any number of processes.
    noise = torch.rand(BATCH_POSITIONS, GROUP_SIZE, max(TASKS.values()), generator=chance)
    batches, graded = [], []
    for prefix, limit in TASKS.items():
        mine = [i for i in range(RANK, BATCH_POSITIONS, WORLD) if samples[i].prompt.startswith(prefix)]
        if not mine:
            continue
        chosen = [samples[i] for i in mine]
        out, texts, grades = sample_and_grade(
            model, chosen, GROUP_SIZE, limit, TEMPERATURE, None, TOP_K, TOP_P, noise[mine].flatten(0, 1).to(DEVICE),
            runaway_multiplier=RUNAWAY_PENALTY_MULTIPLIER,
            warmup=min(1.0, step / REWARD_WARMUP_STEPS) if REWARD_WARMUP_STEPS else 1.0,
        )  # fmt: skip
        prompts = pad_prompts([model.tokenizer.encode(sample.prompt) for sample in chosen], DEVICE)
        rewards, places = credit(chosen, texts, grades, out.tokens, model.tokenizer, CREDIT)
        batches.append(Batch(*prompts, out.tokens, out.mask, out.logprobs, rewards.to(DEVICE), places.to(DEVICE)))
        graded += zip([sample.prompt for sample in chosen for _ in range(GROUP_SIZE)], texts, grades)
    return batches, collect(graded)


def forward(model, batch):
    """Logprobs and entropies (N, T) of a batch's completions under the distribution that was sampled."""
    logits = model.score(batch.prompts, batch.lengths, batch.tokens)  # (N, T, V)
    if TOP_K or TOP_P < 1:
        return grpo.logprobs_and_entropy(distribution(logits, TEMPERATURE, TOP_K, TOP_P, batch.tokens), batch.tokens)
    return grpo.logprobs_and_entropy(logits, batch.tokens, TEMPERATURE)


@torch.no_grad()
def refer(reference, batch):
    """The reference's logprobs of a batch's completions."""
    return forward(reference, batch.to(REF_DEVICE))[0].to(DEVICE)


def compare_groups(batches):
    """(all processes' rewards (N, K), the batches with the advantage of each token)."""
    rewards = gather(torch.cat([batch.rewards for batch in batches]))
    advantages = grpo.advantages(rewards, GROUP_SIZE, SCALE_REWARDS).chunk(WORLD)[RANK]
    shares = advantages.split([len(batch.rewards) for batch in batches])
    return rewards, [b._replace(advantages=share.gather(1, b.places)) for b, share in zip(batches, shares)]


def update(model, reference, optimizer, batches, kl_coef):
    """EPOCHS updates from one step's batches; metrics, with `skipped` where an update was not made."""
    rewards, batches = compare_groups(batches)
    parts = [part for batch in batches for part in microbatches(batch, MICROBATCH_TOKENS)]
    longest = max(TASKS.values())
    normalizer = total(sum(grpo.loss_normalizer(part.mask, LOSS, longest) for part in parts).float())
    olds, refs, seen, stats, losses, norms = [], [], [], [], [], []
    skipped = 0
    for epoch in range(EPOCHS):
        losses.append(torch.zeros((), device=DEVICE))
        for i, part in enumerate(parts):
            logprobs, entropy = forward(model, part)
            if epoch == 0:  # these weights have sampled: what they say now is what the ratio is taken against
                olds.append(logprobs.detach())
                refs.append(refer(reference, part) if reference is not None else olds[i])
                gap, kl = (olds[i] - part.rollout_logprobs).abs(), grpo.kl(olds[i], refs[i], part.mask, "k3")
                seen.append(torch.stack([x[part.mask].sum() for x in (part.mask, gap, entropy.detach(), kl)]))
            loss, stat = grpo.policy_loss(
                logprobs, olds[i], part.advantages, part.mask, loss=LOSS, clip_low=CLIP_RANGE,
                clip_high=CLIP_RANGE_HIGH, max_completion_tokens=longest, normalizer=normalizer,
                weights=grpo.importance_weights(olds[i], part.rollout_logprobs, cap=2.0),
            )  # fmt: skip
            if reference is not None:
                kl = grpo.kl(logprobs, refs[i], part.mask, KL_ESTIMATOR)
                loss = loss + kl_coef * grpo.aggregate(kl, part.mask, LOSS, normalizer)
            if ENTROPY_COEF:
                loss = loss - ENTROPY_COEF * grpo.aggregate(entropy, part.mask, LOSS, normalizer)
            loss.backward()
            losses[-1] += loss.detach()
            stats.append(stat)
        # The guard: nothing that is not finite reaches the weights, and no step is longer than MAX_GRAD_NORM allows.
        total_gradients(model.parameters())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        if math.isfinite(norms[-1]) and math.isfinite(total(losses[-1])):
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    stats = {name: total(value, grpo.REDUCE[name]).item() for name, value in grpo.merge_stats(stats).items()}
    metrics = measured(rewards[:, 0], GROUP_SIZE, torch.stack(losses), norms, total(torch.stack(seen).sum(0)), stats)
    if reference is None:
        del metrics["kl"], metrics["kl_sequence"]  # of the policy to itself
    broken = not all(p.isfinite().all() for p in model.parameters())  # an optimizer's state can be what is not finite
    return metrics | {"skipped": skipped, "broken": broken}


@torch.no_grad()
def first_look(model, reference, batches, graded):
    """Before step 1 policy, sampler and reference are one function, and the model speaks the language; or no run."""
    gap = kl = tokens = 0.0
    for part in [part for batch in batches for part in microbatches(batch, MICROBATCH_TOKENS)]:
        logprobs = forward(model, part)[0]
        gap += (logprobs - part.rollout_logprobs)[part.mask].abs().sum().item()
        tokens += part.mask.sum().item()
        if reference is not None:
            kl += grpo.kl(logprobs, refer(reference, part), part.mask, "k3").sum().item()
    if not gap / tokens < (1e-3 if DTYPE == torch.float32 else 0.05):
        refuse(f"sampling and training disagree by {gap / tokens:.4f} nats a token before any update, where only a bug "
               "or NaN in the weights can be the reason.")  # fmt: skip
    if not kl / tokens < 1e-5:
        refuse(f"KL to the reference is {kl / tokens:.5f} before any update, so the reference is not the start model.")
    structure = mean_parts([grade for _, _, grade in graded])["structure"]
    if structure < 0.2:
        refuse(f"only {structure:.0%} of the first completions have the structure of an answer, so MODEL={MODEL} does not "
               "speak this format: check its weights and chess_format in its config.json, or pretrain it first.")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Set-up and loop


def build():
    """The model, its reference (None without KL), the optimizer."""
    global DTYPE
    prepare()
    DTYPE = fastest_dtype(DEVICE) if DTYPE == "auto" else getattr(torch, DTYPE)
    model = GPT.load(MODEL).to(DEVICE).use(DTYPE)
    for name, p in model.named_parameters():
        p.requires_grad_(TRAIN == "all" or ".mlp." in name or is_gain(name))
    reference = copy.deepcopy(model).to(REF_DEVICE).cast(DTYPE) if KL_COEF else None
    if COMPILE:  # what training calls, of both, as compiled they round otherwise; decoding has its own captured graphs
        for each in filter(None, (model, reference)):
            each.score = torch.compile(each.score, dynamic=True)
    return model, reference, optimizer_for(model)


def optimizer_for(model):
    factors = 1, 1, GAINS_LR_FACTOR, LAST_GAINS_LR_FACTOR  # biases, matrices, the norms' gains, those of the last norm
    groups = [{"params": [], "lr": LR * factor, "factor": factor, "weight_decay": 0.0} for factor in factors]
    groups[1]["weight_decay"] = WEIGHT_DECAY
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[3 if name == "ln_f.weight" else 2 if is_gain(name) else p.ndim - 1]["params"].append(p)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def main():
    global MICROBATCH_TOKENS
    finish()
    if BATCH_POSITIONS % WORLD:
        refuse(f"BATCH_POSITIONS={BATCH_POSITIONS} cannot be divided among {WORLD} processes; set NPROC=1.")
    if KL_TARGET and not KL_COEF:
        refuse("KL_TARGET adapts KL_COEF, which is 0; set KL_COEF above 0.")
    parallel.start(DEVICE)
    model, reference, optimizer = build()
    chess_format = model.config.chess_format
    positions, held_out = data.split(data.load(DATA))
    if len(positions) < BATCH_POSITIONS:
        refuse(f"DATA={DATA} has {len(positions)} positions to train on, fewer than BATCH_POSITIONS={BATCH_POSITIONS}.")
    label = LiveLabels()
    tests = label(ask(held_out, EVAL_POSITIONS, chess_format))
    out, lead = Path(OUT_DIR), RANK == 0
    see = functools.partial(look, model, tests, TEMPERATURE, max(TASKS.values()), out / "samples.jsonl", DTYPE)

    # Where the run stands: at its beginning, or where it was stopped. `state` is what a step leaves to the next one.
    say = functools.partial(print, flush=True) if lead else lambda *_: None
    state = dict(step=0, kl_coef=KL_COEF, lr_factor=1.0, in_a_row=0, rollbacks=0, skill={}, best=(-1.0, 0))
    state["good"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if lead:
        hold = checkpoint.lock(out, FRESH)
    parallel.wait()
    state = checkpoint.resume(out, model, optimizer, reference, state, say)
    past, write = begin(out, state, DEVICE, DTYPE, REPORT_TO, RUN_NAME)
    say(f"{MODEL}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {chess_format} format, "
        f"{len(positions)} positions to train on, {DEVICE} in {DTYPE}, {WORLD} process(es)")  # fmt: skip
    if "before" not in state["skill"]:
        state["skill"]["before"] = see(0)

    stopping = checkpoint.leave_after_this_step()
    started, first = time.time(), state["step"]
    for step in range(first, STEPS):
        # Prompts, completions, rewards
        clock = time.time()
        batches, graded = rollout(model, label(draw_prompts(positions, step, chess_format)), step)
        if step == 0:
            first_look(model, reference, batches, graded)
        rollout_seconds, clock = time.time() - clock, time.time()

        # Advantages, loss, gradients, guard, optimizer
        lr = LR * grpo.schedule(step, STEPS, WARMUP_STEPS, LR_SCHEDULE) * state["lr_factor"]
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        kl_coef = state["kl_coef"] * grpo.kl_warmup(step, KL_WARMUP_STEPS, KL_WARMUP_FACTOR)
        snapshot = None if step % SNAPSHOT_EVERY else copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        try:
            metrics = update(model, reference, optimizer, batches, kl_coef)
        except torch.OutOfMemoryError:  # in the first epoch, if at all: no step has been made yet
            optimizer.zero_grad(set_to_none=True)
            MICROBATCH_TOKENS //= 2
            say(f"out of memory; once more with MICROBATCH_TOKENS={MICROBATCH_TOKENS}")
            metrics = update(model, reference, optimizer, batches, kl_coef)
        update_seconds = time.time() - clock
        if KL_TARGET:
            state["kl_coef"] = grpo.adapt_kl_coef(state["kl_coef"], metrics["kl"], KL_TARGET)

        # What happened
        metrics |= parts_by_task(graded) | {
            "step": step + 1,
            "lr": lr,
            "kl_coef": kl_coef,
            "engine_failures": label.failures,
            "seconds": {"rollout": round(rollout_seconds, 3), "update": round(update_seconds, 3)},
            "tokens_per_second": metrics["tokens"] / (rollout_seconds + update_seconds),
            "peak_memory_gb": peak_memory(DEVICE),
        }
        metrics["state"], metrics["advice"] = diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
        past = [*past[-39:], metrics]  # as many as diagnose looks at
        write(metrics)
        say(progress_line(metrics, STEPS, (time.time() - started) / (step + 1 - first) * (STEPS - step - 1)))

        # The way back: after updates that could not be made, or too far from the reference
        state["in_a_row"] = state["in_a_row"] + 1 if metrics["skipped"] else 0
        gone = metrics.get("kl", 0) > KL_DIVERGENCE_THRESHOLD
        if metrics["broken"] or gone or state["in_a_row"] >= MAX_CONSECUTIVE_NANS:
            state["rollbacks"] += 1
            if state["rollbacks"] == 3:
                refuse(f"the run failed a third time; {metrics['advice']}.")
            model.load_state_dict(state["good"][0])
            optimizer.load_state_dict(copy.deepcopy(state["good"][1]))
            state |= {"lr_factor": state["lr_factor"] * RECOVERY_LR_FACTOR, "in_a_row": 0}
            say(f"back to the last good state, with LR times {state['lr_factor']:g}: {metrics['advice']}")
        elif snapshot and not metrics["skipped"]:
            state["good"] = snapshot  # its completions and their KL have just been seen to be sound
        if reference is not None and REF_UPDATE_EVERY and (step + 1) % REF_UPDATE_EVERY == 0:
            reference.load_state_dict(model.state_dict())

        # Held-out skill, a checkpoint, the end
        state["step"], last = step + 1, step + 1 == STEPS
        leaving = total(torch.tensor(float(len(stopping)))) > 0
        if last or EVAL_EVERY and (step + 1) % EVAL_EVERY == 0:
            seen = state["skill"]["after" if last else f"step {step + 1}"] = see(step + 1)
            reward = sum(mean for name, (mean, _) in seen.items() if name.endswith(f" reward T={TEMPERATURE:g}"))
            state["best"] = max(state["best"], (reward, step + 1))
            if lead:
                (out / "skill.json").write_text(json.dumps(state["skill"], indent=2))
                show(graded)
                print(table(state["skill"]), flush=True)
        if lead and ((step + 1) % SAVE_EVERY == 0 or last or leaving):
            moved = {"reference": reference.state_dict()} if reference is not None and REF_UPDATE_EVERY else {}
            whole = state | moved | {"optimizer": optimizer.state_dict(), "settings": values()}
            checkpoint.save(out, model, whole, KEEP_CHECKPOINTS)
        if leaving and not last:
            say(f"stopped after step {step + 1}; the same command goes on from there.")
            sys.exit(128 + (stopping or [0])[0])
    if lead:
        model.save(out / "model")
        plot(out)
        print(f"{out}/model is the trained model, {write_report(out)} shows how it went.")
        hold.close()
    parallel.finish()


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError, checkpoint.CheckpointError) as error:
        refuse(str(error))
    except RuntimeError as error:
        refuse(parallel.lost(error))
