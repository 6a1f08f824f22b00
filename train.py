"""GRPO for a chess language model, from top to bottom: settings, set-up, one step, the guard, the loop.

./train.sh                              the embedded model on the embedded positions
STEPS=50 LR=3e-5 ./train.sh             settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M DATA=games.pgn      or as arguments
"""

import copy
import json
import math
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import data
import grpo
import tasks
from model import GPT, fastest_dtype
from monitor import diagnose, progress_line, reporter, show
from rollout import distribution, pad_prompts
from settings import finish, setting, values
from skill import ask, mean_parts, sample_and_grade, skill, table
from tokenizer import LoadError
from tools.curves import plot

# fmt: off
MODEL                   = setting("MODEL", "weights/tiny", "the model to train: a Hugging Face folder or a hub id")
DATA                    = setting("DATA", "builtin", "where positions come from: builtin, a file (own lines, RookWorld's, FEN, EPD, PGN), or hub:...")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and curves.png")
SEED                    = setting("SEED", 0, "decides positions and samples: step n draws the same in every run")
DEVICE                  = setting("DEVICE", "cuda" if torch.cuda.is_available() else "cpu", "where to train")
DTYPE                   = setting("DTYPE", "auto", "of the matrix products; weights stay float32", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", torch.cuda.is_available(), "torch.compile the training forward")
STEPS                   = setting("STEPS", 100, "rollout batches to learn from", low=0)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 16, "B, prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 8, "G, completions for each prompt", low=2)
MIX_ENV_RATIO           = setting("MIX_ENV_RATIO", 0.25, "share of prompts that are environment tasks (A:); the rest is policy (P:)", low=0, high=1)
EPOCHS                  = setting("EPOCHS", 1, "updates from one rollout batch", low=1)
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 65536 if torch.cuda.is_available() else 4096, "tokens that go through the model at once; bounds memory, changes nothing else", low=1)
LR                      = setting("LR", 1e-4, "learning rate of AdamW", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero", one_of=("constant", "linear", "cosine"))
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
WEIGHT_DECAY            = setting("WEIGHT_DECAY", 0.0, "of AdamW, on matrices only", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "the gradient is scaled down to this norm; always on", low=1e-9)
LOSS                    = setting("LOSS", "dapo", "see grpo.policy_loss", one_of=grpo.LOSSES)
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by a standard deviation, see grpo.advantages", one_of=("none", "group", "batch"))
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - this", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "... and above 1 + this", low=0)
KL_COEF                 = setting("KL_COEF", 0.005, "weight of the KL to the start model; 0 loads no reference", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_TARGET               = setting("KL_TARGET", 0.0, "KL per token that KL_COEF is adapted to; 0 keeps it fixed", low=0)
KL_WARMUP_STEPS         = setting("KL_WARMUP_STEPS", 0, "steps over which KL_COEF rises from its KL_WARMUP_FACTOR-th part", low=0)
KL_WARMUP_FACTOR        = setting("KL_WARMUP_FACTOR", 0.0, "where that rise begins", low=0, high=1)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "KL per token above which the run goes back to its last good state", low=0)
REF_UPDATE_EVERY        = setting("REF_UPDATE_EVERY", 0, "steps after which the policy becomes the reference; 0 is never", low=0)
REF_DEVICE              = setting("REF_DEVICE", DEVICE, "where the reference is kept")
ENTROPY_COEF            = setting("ENTROPY_COEF", 0.0, "weight of a bonus for entropy", low=0)
TEMPERATURE             = setting("TEMPERATURE", 1.0, "of sampling, and so of the distribution that is trained", low=1e-3)
TOP_K                   = setting("TOP_K", 0, "sample from the k likeliest tokens; 0 is all", low=0)
TOP_P                   = setting("TOP_P", 1.0, "sample from the smallest set of tokens that holds this probability", low=1e-6, high=1)
MAX_NEW_TOKENS          = setting("MAX_NEW_TOKENS", 144, "limit of a policy completion", low=1)
MAX_NEW_TOKENS_ENV      = setting("MAX_NEW_TOKENS_ENV", 144, "limit of an environment completion", low=1)
RUNAWAY_PENALTY_MULTIPLIER = setting("RUNAWAY_PENALTY_MULTIPLIER", 0.3, "a positive reward is multiplied by this when a completion hits its limit", low=0, high=1)
REWARD_WARMUP_STEPS     = setting("REWARD_WARMUP_STEPS", 0, "steps over which the reward's weight moves from structure to content", low=0)
EVAL_EVERY              = setting("EVAL_EVERY", 50, "steps between looks at held-out skill; 0 looks only before and after", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "held-out positions of each task", low=1)
SAVE_EVERY              = setting("SAVE_EVERY", 50, "steps between checkpoints", low=1)
KEEP_CHECKPOINTS        = setting("KEEP_CHECKPOINTS", 2, "how many checkpoints stay on disk", low=1)
RECOVERY_LR_FACTOR      = setting("RECOVERY_LR_FACTOR", 0.5, "the learning rate is multiplied by this after going back", low=0, high=1)
MAX_CONSECUTIVE_NANS    = setting("MAX_CONSECUTIVE_NANS", 3, "skipped updates in a row after which the run goes back", low=1)
REPORT_TO               = setting("REPORT_TO", "none", "also log to", one_of=("none", "wandb", "tensorboard"))
RUN_NAME                = setting("RUN_NAME", "", "name of the run in that log")
OVERFIT                 = setting("OVERFIT", False, "learn one batch of prompts again and again: can the loop learn at all?")
# fmt: on

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
TASKS = "P: ", "A: "  # rolled out one kind at a time, as their lengths differ


class Batch(NamedTuple):
    """Completions of one task; N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T)
    mask: torch.Tensor  # (N, T) completion tokens, the end token included
    rollout_logprobs: torch.Tensor  # (N, T)
    rewards: torch.Tensor  # (N,)

    def select(self, groups):
        """Some of the groups, without the columns that none of them uses."""
        rows = (groups[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=groups.device)).flatten()
        T = int(self.mask[rows].any(0).sum())
        rest = [x[rows, :T] for x in (self.tokens, self.mask, self.rollout_logprobs)]
        return Batch(self.prompts[groups], self.lengths[groups], *rest, self.rewards[rows])


# ---------------------------------------------------------------------------------------------------------------------
# One step


def draw_prompts(positions, count, step, chess_format):
    """The prompts of a step, a pure function of SEED and step: policy tasks and a share of environment tasks."""
    rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
    environment = round(count * MIX_ENV_RATIO)
    drawn = rng.sample(positions, count)
    return [
        tasks.environment_sample(p, rng, chess_format) if i < environment else tasks.policy_sample(p, chess_format)
        for i, p in enumerate(drawn)
    ]


def rollout(model, samples, seed, warmup):
    """Sample and grade G completions for each of one task's prompts: a Batch, their texts, their grades."""
    limit = MAX_NEW_TOKENS if samples[0].prompt.startswith("P: ") else MAX_NEW_TOKENS_ENV
    generator = torch.Generator(DEVICE).manual_seed(random.Random(seed).getrandbits(60))
    out, texts, grades = sample_and_grade(
        model.cast(DTYPE), samples, GROUP_SIZE, limit, TEMPERATURE, generator, TOP_K, TOP_P,
        runaway_multiplier=RUNAWAY_PENALTY_MULTIPLIER, warmup=warmup,
    )  # fmt: skip
    prompts, lengths = pad_prompts([model.tokenizer.encode(sample.prompt) for sample in samples], DEVICE)
    rewards = torch.tensor([g.reward for g in grades], device=DEVICE)
    return Batch(prompts, lengths, out.tokens, out.mask, out.logprobs, rewards), texts, grades


def microbatches(batch, advantages):
    """Whole groups, the long ones together, so many that their tokens stay below MICROBATCH_TOKENS."""
    longest = batch.mask.sum(1).view(-1, GROUP_SIZE).amax(1)  # (B,)
    cut = []
    for group in longest.argsort().tolist() + [None]:
        width = 0 if group is None else GROUP_SIZE * int(longest[group]) + batch.prompts.shape[1]
        if cut and (group is None or (len(cut) + 1) * width > MICROBATCH_TOKENS):
            groups = torch.tensor(cut, device=DEVICE)
            yield batch.select(groups), advantages.view(-1, GROUP_SIZE)[groups].flatten()
            cut = []
        cut.append(group)


def forward(model, batch):
    """Logprobs and entropies (N, T) of a batch's completions under the distribution that was sampled."""
    logits = model.score(batch.prompts, batch.lengths, batch.tokens)  # (N, T, V)
    if TOP_K or TOP_P < 1:
        return grpo.logprobs_and_entropy(distribution(logits, TEMPERATURE, TOP_K, TOP_P, batch.tokens), batch.tokens)
    return grpo.logprobs_and_entropy(logits, batch.tokens, TEMPERATURE)


@torch.no_grad()
def refer(reference, batch):
    """The reference's logprobs of a batch's completions."""
    return forward(reference, Batch(*(x.to(REF_DEVICE) for x in batch)))[0].to(DEVICE)


def update(model, reference, optimizer, batches, kl_coef):
    """EPOCHS updates from one step's batches; metrics, with `skipped` where an update was not made."""
    rewards = gather(torch.cat([batch.rewards for batch in batches]))
    advantages = grpo.advantages(rewards, GROUP_SIZE, SCALE_REWARDS)
    advantages = advantages.view(WORLD, -1)[RANK].split([len(batch.rewards) for batch in batches])
    parts = [part for pair in zip(batches, advantages) for part in microbatches(*pair)]
    most = max(MAX_NEW_TOKENS, MAX_NEW_TOKENS_ENV)
    normalizer = over_ranks(sum(grpo.loss_normalizer(part.mask, LOSS, most) for part, _ in parts).float())
    sums = dict.fromkeys(("kl", "entropy", "gap", "tokens", "rows"), 0.0)
    olds, refs, stats, losses, norms, skipped = [], [], [], [], [], 0
    for epoch in range(EPOCHS):
        losses.append(0.0)
        for i, (part, advantage) in enumerate(parts):
            logprobs, entropy = forward(model, part)
            if epoch == 0:  # these weights have sampled: what they say now is what the ratio is taken against
                olds.append(logprobs.detach())
                sums["gap"] += ((olds[i] - part.rollout_logprobs).abs() * part.mask).sum().item()
                sums["entropy"] += (entropy.detach() * part.mask).sum().item()
                sums["tokens"] += part.mask.sum().item()
                sums["rows"] += len(part.mask)
                if reference is not None:
                    refs.append(refer(reference, part))
                    sums["kl"] += grpo.kl(olds[i], refs[i], part.mask, "k3").sum().item()
            loss, stat = grpo.policy_loss(
                logprobs, olds[i], advantage, part.mask, loss=LOSS, clip_low=CLIP_RANGE, clip_high=CLIP_RANGE_HIGH,
                max_completion_tokens=most, normalizer=normalizer,
                weights=grpo.importance_weights(olds[i], part.rollout_logprobs, cap=2.0),
            )  # fmt: skip
            if reference is not None:
                kl = grpo.kl(logprobs, refs[i], part.mask, KL_ESTIMATOR)
                loss = loss + kl_coef * grpo.aggregate(kl, part.mask, LOSS, normalizer)
            if ENTROPY_COEF:
                loss = loss - ENTROPY_COEF * grpo.aggregate(entropy, part.mask, LOSS, normalizer)
            loss.backward()
            losses[-1] += loss.item()
            stats.append(stat)
        # The guard: nothing that is not finite reaches the weights, and no step is longer than MAX_GRAD_NORM allows.
        for p in model.parameters():
            over_ranks(p.grad)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        losses[-1] = over_ranks(torch.tensor(losses[-1])).item()
        if math.isfinite(norms[-1]) and math.isfinite(losses[-1]):
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    sums = {name: over_ranks(torch.tensor(value)).item() for name, value in sums.items()}
    stats = grpo.merge_stats(stats)
    metrics = {
        "loss": sum(losses) / EPOCHS,
        "grad_norm": max(norms, key=lambda norm: (math.isnan(norm), norm)),
        "skipped": skipped,
        "frac_zero_std": grpo.zero_variance(rewards, GROUP_SIZE).float().mean().item(),
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "entropy": sums["entropy"] / sums["tokens"],
        "logprob_gap": sums["gap"] / sums["tokens"],
        "length": sums["tokens"] / sums["rows"],
        "tokens": sums["tokens"],
        "ratio_mean": (stats["ratio_sum"] / stats["tokens"]).item(),
        "ratio_min": stats["ratio_min"].item(),
        "ratio_max": stats["ratio_max"].item(),
        "clip_low": (stats["clip_low"] / stats["tokens"]).item(),
        "clip_high": (stats["clip_high"] / stats["tokens"]).item(),
    }
    if reference is not None:
        metrics |= {"kl": sums["kl"] / sums["tokens"], "kl_sequence": sums["kl"] / sums["rows"]}
    return metrics


def over_ranks(tensor):
    """The tensor's sum over all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(tensor):
    """The tensors of all processes, one after the other."""
    if WORLD == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The guard


def first_look(model, reference, batches, grades):
    """Before step 1 policy, sampler and reference are one function, and the model speaks the language; or no run."""
    gap = kl = tokens = 0.0
    for part, _ in [part for batch in batches for part in microbatches(batch, batch.rewards)]:
        with torch.no_grad():
            logprobs = forward(model, part)[0]
            gap += ((logprobs - part.rollout_logprobs).abs() * part.mask).sum().item()
            tokens += part.mask.sum().item()
            if reference is not None:
                kl += grpo.kl(logprobs, refer(reference, part), part.mask, "k3").sum().item()
    if not gap / tokens < (1e-3 if DTYPE == torch.float32 else 0.05):
        stop(
            f"sampling and training disagree by {gap / tokens:.4f} nats a token before any update: NaN weights, or a bug."
        )
    if not kl / tokens < 1e-5:
        stop(f"KL to the reference is {kl / tokens:.5f} before any update, so the reference is not the start model.")
    structure = mean_parts(grades)["structure"]
    if structure < 0.2:
        stop(
            f"only {structure:.0%} of the first completions have the structure of an answer, so MODEL={MODEL} does not "
            "speak this format: check its weights and chess_format in its config.json, or pretrain it first."
        )


def stop(message):
    sys.exit(f"error: {message}")


def peak_memory():
    """In GB: of the GPU, or of this process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# ---------------------------------------------------------------------------------------------------------------------
# Set-up and loop


def look(model, tests):
    """Held-out skill, greedy and as sampled in training."""
    return skill(model.cast(DTYPE), tests, (0.0, TEMPERATURE), max(MAX_NEW_TOKENS, MAX_NEW_TOKENS_ENV))


def learning_rate(step):
    if step < WARMUP_STEPS:
        return LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return LR * {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[LR_SCHEDULE]


def save(model, optimizer, step, trainer):
    """OUT_DIR/step-N: a Hugging Face folder and what the trainer needs to go on; it appears whole or not at all."""
    folder = Path(OUT_DIR, f"step-{step:06d}")
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save(temporary)
    trainer = {"optimizer": optimizer.state_dict(), "step": step, "settings": values(), **trainer}
    torch.save(trainer, temporary / "trainer.pt")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)
    for old in sorted(Path(OUT_DIR).glob("step-*"))[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)


def main():
    global DTYPE
    finish()
    if WORLD > 1:
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    if BATCH_POSITIONS % WORLD:
        stop(f"BATCH_POSITIONS={BATCH_POSITIONS} cannot be divided among NPROC={WORLD} processes.")
    if KL_TARGET and not KL_COEF:
        stop("KL_TARGET adapts KL_COEF, which is 0; set KL_COEF above 0.")
    DTYPE = fastest_dtype(DEVICE) if DTYPE == "auto" else getattr(torch, DTYPE)
    torch.manual_seed(SEED)
    torch.set_flush_denormal(True)  # sharp attention is full of denormal numbers, which make a CPU half as fast
    say = print if RANK == 0 else lambda *a, **k: None

    model = GPT.load(MODEL).to(DEVICE).use(DTYPE)
    reference = copy.deepcopy(model).cast(DTYPE).to(REF_DEVICE) if KL_COEF else None
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    if COMPILE:  # what training calls; decoding has its own captured graphs
        for each in filter(None, (model, reference)):
            each.score = torch.compile(each.score, dynamic=True)

    positions, held_out = data.split(data.load(DATA))
    if len(positions) < BATCH_POSITIONS:
        stop(f"DATA={DATA} has {len(positions)} positions to train on, fewer than BATCH_POSITIONS={BATCH_POSITIONS}.")
    chess_format = model.config.chess_format
    tests = ask(held_out, EVAL_POSITIONS, chess_format)
    out = Path(OUT_DIR)
    if any(out.glob("step-*")):
        stop(f"OUT_DIR={out} holds another run; name another folder, or delete that one.")
    if RANK == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "settings.json").write_text(json.dumps(values(), indent=2))
    log = open(out / "metrics.jsonl", "w") if RANK == 0 else None
    report = reporter(REPORT_TO if RANK == 0 else "none", RUN_NAME, OUT_DIR, values())
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{MODEL}: {parameters / 1e6:.1f}M parameters, {chess_format} format, {len(positions)} positions to train on, "
        f"{DEVICE} in {DTYPE}, {WORLD} process(es)")  # fmt: skip

    columns = {}
    if RANK == 0:
        columns["before"] = look(model, tests)
    past, kl_coef, lr_factor, in_a_row, rollbacks = [], KL_COEF, 1.0, 0, 0
    good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    started = time.time()
    for step in range(STEPS):
        seconds, clock = {}, time.time()

        # Prompts, completions, rewards
        samples = draw_prompts(positions, BATCH_POSITIONS, step, chess_format)[RANK::WORLD]
        warmup = min(1.0, step / REWARD_WARMUP_STEPS) if REWARD_WARMUP_STEPS else 1.0
        batches, texts, grades, parts = [], [], [], {}
        for prefix in TASKS:
            chosen = [sample for sample in samples if sample.prompt.startswith(prefix)]
            if chosen:
                batch, said, graded = rollout(model, chosen, f"{SEED}/{step}/{RANK}/{prefix}", warmup)
                batches.append(batch)
                texts += zip([sample.prompt for sample in chosen for _ in range(GROUP_SIZE)], said, graded)
                grades += graded
                parts |= {prefix[0] + "/" + name: value for name, value in mean_parts(graded).items()}
        if step == 0:
            first_look(model, reference, batches, grades)
        seconds["rollout"], clock = time.time() - clock, time.time()

        # Advantages, loss, gradients, guard, optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step) * lr_factor
        warm_kl = kl_coef * grpo.kl_warmup(step, KL_WARMUP_STEPS, KL_WARMUP_FACTOR)
        metrics = update(model, reference, optimizer, batches, warm_kl)
        seconds["update"] = time.time() - clock
        if KL_TARGET:
            kl_coef = grpo.adapt_kl_coef(kl_coef, metrics["kl"], KL_TARGET)

        # What happened
        both = mean_parts(grades)
        metrics |= parts | {
            "step": step + 1,
            "lr": learning_rate(step) * lr_factor,
            "kl_coef": warm_kl,
            "reward_max": max(g.reward for g in grades),
            "structure": both["structure"],
            "runaway": both["runaway"],
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "tokens_per_second": metrics["tokens"] / sum(seconds.values()),
            "peak_memory_gb": peak_memory(),
        }
        metrics["state"], metrics["advice"] = diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
        past.append(metrics)
        if RANK == 0:
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            report({name: value for name, value in metrics.items() if isinstance(value, (int, float))}, step + 1)
            print(progress_line(metrics, STEPS, (time.time() - started) / (step + 1) * (STEPS - step - 1)), flush=True)

        # The way back: after updates that could not be made, or too far from the reference
        in_a_row = in_a_row + 1 if metrics["skipped"] else 0
        if in_a_row >= MAX_CONSECUTIVE_NANS or metrics.get("kl", 0) > KL_DIVERGENCE_THRESHOLD:
            rollbacks += 1
            if rollbacks == 3:
                stop(f"the run failed a third time; {metrics['advice']}.")
            model.load_state_dict(good[0])
            optimizer.load_state_dict(copy.deepcopy(good[1]))
            lr_factor, in_a_row = lr_factor * RECOVERY_LR_FACTOR, 0
            say(f"back to the last good state, with the learning rate times {lr_factor:g}: {metrics['advice']}")
        elif not metrics["skipped"] and (step + 1) % 10 == 0:
            good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        if reference is not None and REF_UPDATE_EVERY and (step + 1) % REF_UPDATE_EVERY == 0:
            reference.load_state_dict(model.state_dict())
        if RANK == 0 and EVAL_EVERY and (step + 1) % EVAL_EVERY == 0 and step + 1 < STEPS:
            columns[f"step {step + 1}"] = look(model, tests)
            print(table(columns))
            show(texts)
        if RANK == 0 and ((step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS):
            save(model, optimizer, step + 1, {"kl_coef": kl_coef, "lr_factor": lr_factor})
    if RANK == 0:
        columns["after"] = look(model, tests)
        print(table(columns))
        (out / "skill.json").write_text(json.dumps(columns, indent=2))
        model.save(out / "model")
        plot(out)
        print(f"{out}/model is the trained model, {out}/curves.png how it went.")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        stop(str(error))
