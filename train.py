"""GRPO for a language model with a verifier, from top to bottom: settings, one step, evaluation, the loop.

./train.sh                                       chess, with the embedded model on the embedded positions
STEPS=50 LR=1e-5 ./train.sh                      settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M LR=1e-5     or as arguments; --help lists them
TASK=examples/letters.py ./train.sh              another task

A step: make B questions, sample G answers to each (rollout.py), grade them (rewards.py), compare each with its group
(grpo.py), and take one step on the loss. Sizes: B prompts, G group, N = B·G rows, P prompt tokens, T completion tokens.

Off by default: division by the group's standard deviation (SCALE_REWARDS). Not here: a value model, a replay of old
answers, a second engine for sampling. Added to plain GRPO: each piece of a reward is credited to the words it judges;
the end token is trained; microbatches do not change the loss; the first step checks that sampler, policy and reference
agree; a run that breaks goes back to its last good state; CONTROL=shuffle is the same run without information.
"""

import copy
import functools
import json
import math
import random
import sys
import time
from collections import Counter
from statistics import fmean

import torch
from tqdm import tqdm

import grpo
from model import GPT
from nanorook import hardware, monitor, parallel, settings
from nanorook import task as task_file
from nanorook.run import Run, catch_signals, continuation, restore, write
from nanorook.settings import fail, heading, setting
from nanorook.task import check_grades, graded, make_questions
from rollout import microbatches, sample

if __name__ == "__main__":
    settings.read_user()  # as a program only: imported, train.py keeps the defaults

# fmt: off
TASK                    = setting("TASK", "rewards.py", "the file that asks and grades; docs/tasks.md says what it provides")
heading(f"The task {TASK}")
task                    = task_file.load(TASK)

heading("The run")
MODEL                   = setting("MODEL", "", "the model to train: a Hugging Face folder or a hub id; empty: the task's own start model")
DATA                    = setting("DATA", "builtin", "chess: where positions come from: builtin, or a file (own lines, RookWorld's, FEN, EPD, PGN)")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and the report; a run in it goes on where it stopped")
FRESH                   = setting("FRESH", False, "delete the run in OUT_DIR and start over")
SEED                    = setting("SEED", 0, "decides questions and samples: runs with one SEED have the same random numbers at each step", low=0, high=2**32 - 1)
STEPS                   = setting("STEPS", 50, "rollout batches to learn from", low=1)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 48, "B, prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 16, "G, completions of each prompt", low=2)
EPOCHS                  = setting("EPOCHS", 1, "updates from one rollout batch", low=1)
OVERFIT                 = setting("OVERFIT", False, "the same questions at every step: can the loop learn at all?")
CONTROL                 = setting("CONTROL", "none", "the same run without a reward: zero advantages, or those of other answers, see nanorook.task.shuffled", one_of=("none", "zero", "shuffle"))

heading("The update")
LR                      = setting("LR", 2e-4, "learning rate of AdamW; 1e-5 for a model of GPT-2's size", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero", one_of=grpo.SCHEDULES)
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "the gradient is scaled down to this norm; always on", low=1e-9)

heading("The loss")
LOSS                    = setting("LOSS", "dapo", "see grpo.policy_loss", one_of=grpo.LOSSES)
CREDIT                  = setting("CREDIT", "piece", "a token is paid for the pieces of the reward that judge it, or for the whole answer as in plain GRPO", one_of=("piece", "answer"))
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by the deviation of their group, or rare successes by their share, see grpo.advantages", one_of=("none", "std", "mean"))
BEST_OF                 = setting("BEST_OF", 1, "k: an answer is worth the best of k answers, below GROUP_SIZE, see grpo.advantages", low=1, high=GROUP_SIZE - 1)
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - this; with EPOCHS=1 never, as all ratios are 1", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "... and above 1 + this", low=0)
KL_COEF                 = setting("KL_COEF", 0.1, "weight of the KL to the start model; 0 loads no reference and measures no KL", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "KL per token above which the run goes back to its last good state", low=0)

heading("Sampling")
TEMPERATURE             = setting("TEMPERATURE", 1.0, "of sampling, and so of the distribution that is trained", low=1e-3)

heading("Evaluation, checkpoints, logs")
EVAL_EVERY              = setting("EVAL_EVERY", 40, "steps between evaluations on held-out questions; 0: only before and after", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "held-out questions of an evaluation", low=1)
SAVE_EVERY              = setting("SAVE_EVERY", 20, "steps between checkpoints", low=1)
RECOVERY_LR_FACTOR      = setting("RECOVERY_LR_FACTOR", 0.5, "the learning rate is multiplied by this after going back", low=0, high=1)
MAX_CONSECUTIVE_NANS    = setting("MAX_CONSECUTIVE_NANS", 3, "steps in a row with a skipped update after which the run goes back", low=1)

heading("The machine")
DEVICE                  = setting("DEVICE", "auto", "where to train: cpu, cuda, cuda:1, ...; auto: cuda if there is one")
DTYPE                   = setting("DTYPE", "auto", "of the matrix products; weights stay float32; auto: the faster one", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", "auto", "torch.compile the training forward; auto: on CUDA", one_of=("auto", "0", "1"))
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 0, "most tokens in one forward of the update; bounds memory, changes nothing else; 0: 32768 on CUDA, 4096 on CPU", low=0)
NPROC                   = setting("NPROC", 1, "processes on this machine; one for each GPU", low=1)
# fmt: on

SNAPSHOT_EVERY = 10  # steps between copies of a healthy state, to which a run that breaks goes back
EVAL_ROWS = 128  # completions that an evaluation samples at once


# ---- One step ----------------------------------------------------------------------------------------------


def add_advantages(batch, answers, seed=""):
    """The batch with advantages: each reward, or each of its pieces (see CREDIT), minus the mean of its group."""
    T = batch.tokens.shape[1]
    if CREDIT == "piece":
        values, judged = grpo.credit([a.grade.pieces for a in answers], [a.ends for a in answers], T)
    else:
        values, judged = torch.tensor([[a.grade.reward] for a in answers]), torch.ones(1, T, 1)
    if CONTROL == "shuffle":
        values = values[task_file.shuffled(answers, GROUP_SIZE, seed)]
    advantages = grpo.advantages(values, GROUP_SIZE, SCALE_REWARDS, BEST_OF) * (CONTROL != "zero")
    return batch._replace(advantages=grpo.token_advantages(advantages, judged).to(batch.tokens.device))  # (N, T)


def forward(model, batch):
    """Logprobs and entropies (N, T) of a batch's completions under the distribution that was sampled."""
    logits = compiled_score()(model, batch.prompts, batch.prompt_lengths, batch.tokens)  # (N, T, V)
    return grpo.logprobs_and_entropy(logits, batch.tokens, TEMPERATURE)


@functools.cache
def compiled_score():
    """GPT.score, compiled for policy and reference alike: compiled code rounds differently, and KL must start at 0."""
    wanted = hardware.compiles(COMPILE, hardware.choose_device(DEVICE))
    return torch.compile(GPT.score, dynamic=True) if wanted else GPT.score


def objective(logprobs, batch, normalizer):
    """A batch's part of the loss, and sums over its tokens of what is measured."""
    mask, old_logprobs = batch.completion_mask, batch.old_logprobs
    loss, sums = grpo.policy_loss(
        logprobs, old_logprobs, batch.advantages, mask, loss=LOSS, clip_low=CLIP_RANGE, clip_high=CLIP_RANGE_HIGH,
        normalizer=normalizer, weights=grpo.importance_weights(old_logprobs, batch.rollout_logprobs),
    )  # fmt: skip
    if batch.ref_logprobs is not None:
        kl = grpo.kl(logprobs, batch.ref_logprobs, mask, KL_ESTIMATOR)
        loss = loss + KL_COEF * grpo.aggregate(kl, mask, LOSS, normalizer)
        # k2 whatever KL_ESTIMATOR is: one token can blow up k3's mean
        sums["kl"] = grpo.kl(logprobs.detach(), batch.ref_logprobs, mask, "k2").sum()
    sums["loss"] = loss.detach()
    sums["logprob_gap"] = torch.where(mask, logprobs.detach() - batch.rollout_logprobs, 0).abs().sum()
    return loss, sums


def microbatch_tokens(model):
    return MICROBATCH_TOKENS or (32768 if model.wte.weight.is_cuda else 4096)


def by_signal(batch):
    """Without a KL, groups whose advantages are all zero have no gradient: apart, as metrics need only their forward."""
    signal = (batch.advantages != 0).view(len(batch.prompts), -1).any(1) | (KL_COEF > 0)  # (B,)
    P, T = batch.prompts.shape[1], batch.tokens.shape[1]
    return [batch.select(groups.nonzero()[:, 0], P, T) for groups in (signal, ~signal) if groups.any()]


def update(model, reference, optimizer, batches):
    """Makes EPOCHS updates from one step's batches. Of the metrics, loss, logprob_gap, entropy and kl are of the weights
    before them, ratio_gap, clip_low and clip_high of the last epoch; grad_norm is a mean."""
    parts = [p for batch in batches for some in by_signal(batch) for p in microbatches(some, microbatch_tokens(model))]
    longest = max(task.LIMITS.values())
    normalizer = sum(grpo.loss_normalizer(part.completion_mask, LOSS, longest) for part in parts)
    normalizer = parallel.total(normalizer.float())
    measured, skipped = [], 0
    for epoch in range(EPOCHS):
        sums = Counter()  # whose update() adds
        for i, part in enumerate(parts):
            with torch.set_grad_enabled(KL_COEF > 0 or bool(part.advantages.any())):  # see by_signal
                logprobs, entropy = forward(model, part)  # (N, T)
            if epoch == 0:  # these are the weights that sampled
                with torch.no_grad():
                    ref = forward(reference, part)[0] if reference else None
                part = parts[i] = part._replace(old_logprobs=logprobs.detach(), ref_logprobs=ref)
            loss, found = objective(logprobs, part, normalizer)
            if loss.requires_grad:
                loss.backward()
            sums.update(found, entropy=torch.where(part.completion_mask, entropy, 0).sum())
        sums = {name: parallel.total(value) for name, value in sums.items()}

        # The guard: the gradient is scaled down to MAX_GRAD_NORM, and no update is made unless loss and gradient are finite.
        parallel.sum_gradients(model.parameters())
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        measured.append(dict(zip(sums, torch.stack([*sums.values()]).tolist())))  # here the host waits
        if not math.isfinite(measured[-1]["grad_norm"] + measured[-1]["loss"]):
            skipped += 1
        elif measured[-1]["grad_norm"] > 0:  # AdamW would go on without a gradient, by its momentum
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    first, last, tokens = measured[0], measured[-1], measured[0]["tokens"]
    return {
        "loss": first["loss"],
        "grad_norm": fmean(sums["grad_norm"] for sums in measured),
        "tokens": int(tokens),
        "skipped": skipped,
        "broken": not torch.stack([p.isfinite().all() for p in model.parameters()]).all(),
        **{name: first[name] / tokens for name in ("logprob_gap", "entropy", "kl") if name in first},
        **{name: last[name] / tokens for name in ("ratio_gap", "clip_low", "clip_high")},
    }


def check_start(metrics, dtype):
    """Refuses a run whose model does not write answers, or whose sampler, policy and reference differed before the
    first update."""
    if metrics.get("structure", 1.0) < 0.2:
        fail(f"only {metrics['structure']:.0%} of the first answers have the structure of one, and {metrics['hit_limit']:.0%} "
             f"hit their limit: if most do, raise the task's LIMITS {task.LIMITS}; else the model does not speak this "
             "format, so check its weights and config.json, or pretrain it.")  # fmt: skip
    gap, kl, exact = metrics["logprob_gap"], metrics.get("kl", 0.0), dtype == torch.float32
    if not gap < (1e-3 if exact else 0.05):  # also where it is NaN
        fail(f"sampling and training disagree by {gap:.4f} nats a token before any update, which only a bug or "
             "weights that are not finite can cause.")  # fmt: skip
    if not kl < (1e-5 if exact else 1e-3):  # in bf16 code with and without gradients may round differently
        fail(f"KL to the reference is {kl:.5f} before any update, so the reference is not the start model.")


# ---- Evaluation --------------------------------------------------------------------------------------------


def uniform_numbers(count, group_size, seed):
    """(count, G, T): they decide what is drawn. Made for all questions at once, however many processes share them."""
    return torch.rand(count, group_size, max(task.LIMITS.values()), generator=torch.Generator().manual_seed(seed))


def evaluate(model, questions, file, step):
    """{"policy legal T=0": [the value for each question], ...}, see monitor.figures, greedy and as sampled in training,
    by all processes together; `file` gets each kind's first answers at TEMPERATURE. SEED decides what is drawn."""
    figures, mine = {}, slice(parallel.rank(), None, parallel.world())
    noise, model = uniform_numbers(len(questions), 1, SEED)[mine], model.inference_copy(model.dtype)
    for temperature in (0.0, TEMPERATURE):
        parts = sample(model, questions[mine], 1, task.LIMITS, temperature, noise, EVAL_ROWS)
        parts = tqdm(parts, "evaluation", leave=False, disable=parallel.rank() > 0 or None)
        answers = parallel.gather([answer for _, part in parts for answer in graded(task, part)])
        check_grades(answers)
        figures |= {f"{name} T={temperature:g}": value for name, value in monitor.figures(answers).items()}
    if parallel.rank() == 0:
        monitor.show(answers)
        with open(file, "a") as log:
            for kind in task.LIMITS:
                for a in [a for a in answers if a.question.kind == kind][:16]:
                    row = {"step": step, "completion": a.text, "reward": a.grade.reward}
                    log.write(json.dumps(row | a.question._asdict() | a.grade._asdict()) + "\n")
    return dict(sorted(figures.items(), key=lambda item: item[0].split(" ")[0]))


def evaluate_and_record(run, model, questions, title):
    """One more column in the run's table of held-out skill; the seconds that it took."""
    clock = time.time()
    parallel.log(f"evaluating {len(questions)} held-out questions, greedy and at temperature {TEMPERATURE:g}")
    skill = run.skill[title] = evaluate(model, questions, run.out / "samples.jsonl", run.step)
    rewards = [fmean(values) for name, values in skill.items() if name.endswith(f" reward T={TEMPERATURE:g}")]
    run.best = max(run.best, (sum(rewards), run.step))
    if parallel.rank() == 0:
        write(run.out / "skill.json", json.dumps(run.skill))
    return time.time() - clock


# ---- Start and loop ----------------------------------------------------------------------------------------


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def make_reference(model):
    return copy.deepcopy(model).inference_copy(model.dtype)  # frozen


def start():
    """What the loop works with, at its beginning or where it was stopped: (run, model, reference, optimizer, training
    items, held-out questions)."""
    device = parallel.start(hardware.choose_device(DEVICE), NPROC)
    lead, world = parallel.rank() == 0, parallel.world()
    if BATCH_POSITIONS % world:
        fail(f"BATCH_POSITIONS={BATCH_POSITIONS} cannot be divided among {world} processes; use a multiple of "
             f"{world}.")  # fmt: skip
    run = Run(OUT_DIR)
    if lead:
        run.acquire_lock()
        source = MODEL or task.start_model()
        run.forbid_model_inside(source)
    source = parallel.gather([source] if lead else [])[0]
    resumed = None if FRESH else run.resume(STEPS)
    if len(set(parallel.gather([run.step]))) > 1:
        fail(f"the processes see other checkpoints: OUT_DIR={OUT_DIR} has to be a folder that all machines share.")
    if DTYPE == "auto":
        run.dtype = run.dtype or parallel.gather([str(hardware.fastest_dtype(device)).removeprefix("torch.")])[0]
    dtype = getattr(torch, run.dtype if DTYPE == "auto" else DTYPE)
    model = GPT.load(source).to(device).set_compute_dtype(dtype)
    reference = make_reference(model) if KL_COEF else None
    optimizer = make_optimizer(model)
    if resumed:
        restore(model, optimizer, *resumed)
    run.good = run.good or run.snapshot(model, optimizer)

    items, held_out = task.load(DATA, model.config)
    if len(items) < BATCH_POSITIONS or not held_out:
        fail(f"DATA={DATA} has {len(items)} items to train on, where BATCH_POSITIONS={BATCH_POSITIONS}, and "
             f"{len(held_out)} held out; give more of them.")  # fmt: skip
    make_questions(task, items, BATCH_POSITIONS, random.Random(SEED), model.config)  # a mistake shows at once
    questions = make_questions(task, held_out, min(EVAL_POSITIONS, len(held_out)), random.Random(SEED), model.config)
    parameters = sum(p.numel() for p in model.parameters())
    parallel.log(f"{source}: {parameters / 1e6:.1f}M parameters, {TASK}: {len(items)} items to train on, {len(held_out)} held out, "
        f"{STEPS} steps of {BATCH_POSITIONS} × {GROUP_SIZE} answers, {device} in {str(dtype)[6:]}, {world} process(es)")  # fmt: skip
    if parameters > 5e7 and LR > 1e-5:
        parallel.log(f"LR={LR:g} is high for a model of this size; LR=1e-5 TEMPERATURE=0.7 suit one of 124M.")
    if lead and FRESH:  # not before model and data are known to be good
        run.clear()
    return run, model, reference, optimizer, items, questions


def main():
    settings.finish()
    hardware.flush_denormals()
    run, model, reference, optimizer, items, eval_questions = start()
    lead, world, sampler = parallel.rank() == 0, parallel.world(), model.inference_copy(model.dtype)
    past = monitor.open_log(run, model, eval_questions) if lead else []
    evaluation_seconds = 0.0 if run.skill else evaluate_and_record(run, model, eval_questions, "before")
    signals = catch_signals()
    while run.step < STEPS:
        # Questions and answers
        step, clock = run.step, [time.time()]
        rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
        questions = make_questions(task, items, BATCH_POSITIONS, rng, model.config)
        noise = uniform_numbers(len(questions), GROUP_SIZE, random.Random(f"{SEED}/{step}/noise").getrandbits(60))
        sampler.sync_from(model)
        mine = slice(parallel.rank(), None, world)
        rollouts = list(sample(sampler, questions[mine], GROUP_SIZE, task.LIMITS, TEMPERATURE, noise[mine]))
        clock.append(time.time())

        # Rewards and advantages
        rollouts = [(batch, graded(task, part)) for batch, part in rollouts]
        answers = parallel.gather([answer for _, part in rollouts for answer in part])
        batches = [add_advantages(batch, part, f"{SEED}/{step}/") for batch, part in rollouts]
        clock.append(time.time())

        # Loss, gradient, guard, optimizer
        lr = LR * grpo.schedule(step, STEPS, WARMUP_STEPS, LR_SCHEDULE) * run.lr_factor
        for group in optimizer.param_groups:
            group["lr"] = lr
        snapshot = None if step % SNAPSHOT_EVERY else run.snapshot(model, optimizer)
        metrics = monitor.describe_answers(answers, GROUP_SIZE) | update(model, reference, optimizer, batches)
        clock.append(time.time())
        if step == 0:  # of what update() measured before its first change
            check_grades(answers)
            check_start(metrics, model.dtype)

        # What happened
        run.step += 1
        seconds = dict(zip(("sampling", "grading", "update"), (b - a for a, b in zip(clock, clock[1:]))))
        metrics |= {"step": run.step, "lr": lr, "length": metrics["tokens"] / len(answers)}
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["tokens"] / sum(seconds.values())}
        if lead:
            metrics |= monitor.diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
            past = [*past[-39:], metrics]  # as many as diagnose looks at
            with open(run.out / "metrics.jsonl", "a") as log:
                log.write(json.dumps(metrics) + "\n")
            to_come = ((STEPS - 1) // EVAL_EVERY - step // EVAL_EVERY if EVAL_EVERY else 0) + 1  # evaluations
            parallel.log(monitor.progress_line(past, STEPS, to_come * evaluation_seconds))

        # Going back: after updates that could not be made, or that went too far from the reference
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if metrics["skipped"] else 0
        too_far = metrics.get("kl", 0) > KL_DIVERGENCE_THRESHOLD
        if metrics["broken"] or too_far or run.skipped_in_a_row >= MAX_CONSECUTIVE_NANS:
            run.go_back(model, optimizer, RECOVERY_LR_FACTOR)
        elif snapshot and not metrics["skipped"]:
            run.good = snapshot  # taken before this update; this step's answers and their KL were sound

        # Evaluation, checkpoint
        stopping = parallel.gather(signals)
        due = EVAL_EVERY > 0 and run.step % EVAL_EVERY == 0 and run.step < STEPS
        if due:
            evaluation_seconds = evaluate_and_record(run, model, eval_questions, f"step {run.step}")
        if lead and (due or stopping or run.step % SAVE_EVERY == 0 or run.step == STEPS):
            run.save(model, optimizer)
        if stopping and run.step < STEPS:
            parallel.log(f"stopped after step {run.step}; {continuation(OUT_DIR, FRESH)}")
            sys.exit(128 + stopping[0])

    if "after" not in run.skill:
        evaluate_and_record(run, model, eval_questions, "after")
    if lead:
        run.save(model, optimizer)
        parallel.log(monitor.table(run.skill))
        run.finish(model)
    parallel.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the loop; in it, a signal saves a checkpoint first
        sys.exit(130)
    except OSError as error:
        fail(f"a file could not be read or written ({error}); {continuation(OUT_DIR, FRESH)}")
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # on CUDA, on a CPU
            fail(f"out of memory: lower MICROBATCH_TOKENS={MICROBATCH_TOKENS or '32768 (on a CPU 4096)'}, GROUP_SIZE={GROUP_SIZE} or "
                 f"the limits of new tokens {task.LIMITS}; {continuation(OUT_DIR, FRESH)}")  # fmt: skip
        if not parallel.another_has_ended(error):
            raise
        fail(f"another process of this run has ended, see above; {continuation(OUT_DIR, FRESH)}")
