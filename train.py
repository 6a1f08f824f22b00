"""GRPO for a language model with a verifier, from top to bottom: settings, one step, evaluation, the loop.

./train.sh                                       chess, with the embedded model on the embedded positions
STEPS=50 LR=1e-5 ./train.sh                      settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M         or as arguments; --help lists them
TASK=examples/letters.py ./train.sh              another task

A step: make B questions, sample G answers to each (rollout.py), grade them (rewards.py), compare each with its group
(grpo.py), and update the weights. Sizes: B prompts, G group, N = B·G rows, P prompt tokens, T completion tokens.

Beyond plain GRPO: each piece of a reward is credited to the words it judges; the end token is trained; microbatches
do not change the loss; the first step checks that sampler, policy and reference agree; a run that breaks goes back to
its last good state. Left out: a value model, a replay buffer, a separate inference engine.
"""

import copy
import functools
import json
import math
import random
import sys
import time

import torch
from tqdm import tqdm

import grpo
from model import GPT
from nanorook import hardware, loggers, monitor, parallel, settings, sizes
from nanorook.run import Run, catch_signals, continuation, explain, processes_of, restore, write
from nanorook.settings import fail, heading, setting
from nanorook.task import first_questions, graded, load, load_items, make_questions, prompt_ids, shuffled, start_model
from rollout import microbatches, once, sample

if __name__ == "__main__":
    settings.read_user()  # only as a program: when imported, train.py keeps the defaults

# fmt: off
TASK                    = setting("TASK", "rewards.py", "the task: a file that asks questions and grades answers; docs/tasks.md says what it has to provide")
heading(f"The task {TASK}")
task                    = load(TASK)
settings.take_defaults(task.DEFAULTS)  # they replace the defaults of the settings that follow

heading("The run")
MODEL                   = setting("MODEL", "", "the model to train: a Hugging Face folder or a hub id; models above 50M parameters get defaults for their size (nanorook/sizes.py); empty: the task's own start model")
SIZE_DEFAULTS           = sizes.defaults(MODEL, task)  # none for a small model
settings.take_defaults(task.DEFAULTS | SIZE_DEFAULTS)  # again, with those for the model's size
DATA                    = setting("DATA", "builtin", "source of the task's items; for chess: builtin, or a file of positions (FEN, EPD, PGN, RookWorld's lines or those of rook.label)")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and the report, relative to the current folder; a run that is found there is resumed")
FRESH                   = setting("FRESH", False, "delete the run in OUT_DIR and start over")
SEED                    = setting("SEED", 0, "determines questions and samples: runs with the same SEED use the same random numbers at each step", low=0, high=2**32 - 1)
STEPS                   = setting("STEPS", 60, "number of rollout batches to learn from", low=1, high=999_999)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 76, "B, the number of prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 16, "G, the number of completions for each prompt", low=2)
TEMPERATURE             = setting("TEMPERATURE", 1.0, "the temperature of sampling, and so of the distribution that is trained", low=1e-3)
EPOCHS                  = setting("EPOCHS", 1, "number of updates from each rollout batch", low=1)
OVERFIT                 = setting("OVERFIT", False, "ask the same questions at every step: can the loop learn at all?")
CONTROL                 = setting("CONTROL", "none", "makes a control run, whose rewards carry no information: zero advantages, or rewards shuffled within groups, see nanorook.task.shuffled", one_of=("none", "zero", "shuffle"))

heading("The update")
LR                      = setting("LR", 2e-4, "learning rate of AdamW", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero", one_of=grpo.SCHEDULES)
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "the gradient is scaled down to this norm; always on", low=1e-9)

heading("The loss")
LOSS                    = setting("LOSS", "dapo", "which policy loss, see grpo.policy_loss", one_of=grpo.LOSSES)
CREDIT                  = setting("CREDIT", "piece", "a token is paid for the pieces of the reward that judge it, or for the whole answer as in plain GRPO", one_of=("piece", "answer"))
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by their group's standard deviation (std), or pay rare successes more (mean), see grpo.advantages", one_of=("none", "std", "mean"))
BEST_OF                 = setting("BEST_OF", 1, "k, below GROUP_SIZE: pay for the best of k answers, see grpo.advantages", low=1, high=GROUP_SIZE - 1)
BEST_OF_SCHEDULE        = setting("BEST_OF_SCHEDULE", "constant", "whether k stays, or falls to 1 during the run", one_of=grpo.SCHEDULES)
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - this; no effect with LOSS=cispo, or with EPOCHS=1, where all ratios are 1", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "the ratio is clipped above 1 + this", low=0)
KL_COEF                 = setting("KL_COEF", 0.1, "weight of the KL to the start model; 0 loads no reference and measures no KL", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "how the KL is estimated, see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "KL per token above which the run goes back to its last good state", low=0)

heading("Evaluation, checkpoints, logs")
EVAL_EVERY              = setting("EVAL_EVERY", 40, "steps between evaluations on held-out questions; 0: only before and after the run", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "number of held-out questions in an evaluation", low=1)
EVAL_SAMPLES            = setting("EVAL_SAMPLES", 0, "answers to each question of an evaluation, for pass@1, 4, 16, 64; 0: no pass@k", low=0)
REPORT_TO               = setting("REPORT_TO", "none", "also send figures and answers to this dashboard, whose package has to be installed", one_of=("none", "wandb", "trackio", "tensorboard"))
SAVE_EVERY              = setting("SAVE_EVERY", 20, "steps between checkpoints", low=1)
RECOVERY_LR_FACTOR      = setting("RECOVERY_LR_FACTOR", 0.5, "the learning rate is multiplied by this each time the run goes back", low=0, high=1)
MAX_CONSECUTIVE_NANS    = setting("MAX_CONSECUTIVE_NANS", 3, "steps in a row with a skipped update, after which the run goes back", low=1)

heading("The machine")
DEVICE                  = setting("DEVICE", "auto", "where to train: cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU")
DTYPE                   = setting("DTYPE", "auto", "data type of the matrix products; weights stay float32; auto: the faster one", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", "auto", "use torch.compile for the training forward pass; auto: on CUDA, if there are a C compiler and Python.h", one_of=("auto", "0", "1"))
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 0, "the most tokens in one forward pass of the update, unless one group has more; limits memory and changes nothing else; 0: 4096 on a CPU; on CUDA as many as fit into free memory, up to 32768", low=0)
NPROC                   = setting("NPROC", "auto", "number of processes on this machine; use one for each GPU; auto: two on a CPU of two or more cores for a model below 50M parameters, unless OMP_NUM_THREADS is set; else one")
# fmt: on

SNAPSHOT_EVERY = 10  # steps between copies of a healthy state, to which a run that breaks goes back
EVAL_ROWS = 128  # completions that an evaluation samples at once; on a GPU, those of a step if they are more


# ---- One step ----------------------------------------------------------------------------------------------


def add_advantages(batch, answers, group_size, credit, step=0):
    """The batch with the advantage of each token (N, T), and with the weight of each row's KL (N,). `step` determines the
    permutations of CONTROL=shuffle and the k of BEST_OF_SCHEDULE."""
    pieces = [a.grade.pieces if credit == "piece" else [("reward", a.grade.reward)] for a in answers]
    values, piece_mask = grpo.credit(pieces, [a.ends for a in answers], batch.tokens.shape[1])
    if CONTROL == "shuffle":  # each answer gets those of a random one in its group
        values = values[shuffled(answers, group_size, f"{SEED}/{step}/")]
    best_of = math.ceil(round(BEST_OF * grpo.schedule(step, STEPS, 0, BEST_OF_SCHEDULE), 9))
    by_piece = grpo.advantages(values, group_size, SCALE_REWARDS, best_of)  # (N, K)
    advantages = (by_piece[:, None] * piece_mask).sum(2)  # (N, T): summed over the pieces that judge a token
    if CONTROL == "zero":
        advantages = torch.zeros_like(advantages)
    kl_weights = torch.tensor([getattr(task, "KL_WEIGHTS", {}).get(a.question.kind, 1.0) for a in answers])
    device = batch.tokens.device
    return batch._replace(advantages=advantages.to(device), kl_weights=kl_weights.to(device))


def forward(model, batch, temperature):
    """Logprobs and entropies (N, T) of a batch's completions, under the distribution that they were sampled from."""
    tokens, places = once(batch.tokens, len(batch.prompts))  # (B·R, T), (N,)
    states = compiled_score()(model, batch.prompts, batch.prompt_lengths, tokens)  # (B·R, T, C)
    found = grpo.logprobs_and_entropy(states, tokens, temperature, model.head, model.config.vocab_size)
    return [values[places] for values in found]


@functools.cache
def compiled_score():
    """GPT.score, compiled for policy and reference alike: compiled code rounds differently, and KL must start at 0."""
    wanted = hardware.compiles(COMPILE, hardware.choose_device(DEVICE))
    return torch.compile(GPT.score, dynamic=True) if wanted else GPT.score


def loss_and_sums(logprobs, batch, normalizer, kl_coef):
    """What a batch adds to the loss, and sums over its tokens for the metrics."""
    mask, old_logprobs = batch.completion_mask, batch.old_logprobs
    loss, sums = grpo.policy_loss(
        logprobs, old_logprobs, batch.advantages, mask, loss=LOSS, clip_low=CLIP_RANGE, clip_high=CLIP_RANGE_HIGH,
        normalizer=normalizer, weights=grpo.importance_weights(old_logprobs, batch.rollout_logprobs),
    )  # fmt: skip
    if batch.ref_logprobs is not None:
        kl = batch.kl_weights[:, None] * grpo.kl(logprobs, batch.ref_logprobs, mask, KL_ESTIMATOR)
        loss = loss + kl_coef * grpo.aggregate(kl, mask, LOSS, normalizer)
        sums["kl"] = grpo.kl(logprobs.detach(), batch.ref_logprobs, mask, "k2").sum()  # one token can blow up k3's mean
    sums["loss"] = loss.detach()
    sums["logprob_gap"] = torch.where(mask, logprobs.detach() - batch.rollout_logprobs, 0).abs().sum()
    return loss, sums


def plan_memory(model, questions):
    """The most tokens of a microbatch. If a group or MICROBATCH_TOKENS needs too much memory, blocks are recomputed."""
    longest_sequence = max(len(prompt_ids(q.prompt, model.tokenizer)) + task.LIMITS[q.kind] for q in questions)
    must_fit = max(MICROBATCH_TOKENS, GROUP_SIZE * max(task.LIMITS.values()))  # a whole group, as it is never split
    model.recompute = hardware.must_recompute(model, must_fit, longest_sequence)
    return MICROBATCH_TOKENS or hardware.microbatch_tokens(model, longest_sequence)


def update(model, reference, optimizers, batches, most_tokens):
    """Makes EPOCHS updates from the answers of a step; returns metrics."""
    parts = [part for batch in batches for part in microbatches(batch, most_tokens, KL_COEF > 0)]
    limit = max(task.LIMITS.values())
    device = model.wte.weight.device
    normalizer = torch.zeros((), dtype=torch.long, device=device)  # also of a process that has no question
    for part, _ in parts:
        normalizer += grpo.loss_normalizer(part.completion_mask, LOSS, limit)
    normalizer = parallel.total(normalizer)
    epochs, skipped = [], 0
    for epoch in range(EPOCHS):
        sums = {}  # over the tokens of all parts
        for i, (part, has_gradient) in enumerate(parts):
            with torch.set_grad_enabled(has_gradient):
                logprobs, entropy = forward(model, part, TEMPERATURE)  # (N, T)
            if epoch == 0:  # the weights are still those that sampled; all epochs are compared with them
                with torch.no_grad():
                    ref_logprobs = forward(reference, part, TEMPERATURE)[0] if reference else None
                part = part._replace(old_logprobs=logprobs.detach(), ref_logprobs=ref_logprobs)
                parts[i] = part, has_gradient
            loss, part_sums = loss_and_sums(logprobs, part, normalizer, KL_COEF)
            if has_gradient:
                loss.backward()
            part_sums["entropy"] = torch.where(part.completion_mask, entropy, 0).sum()
            sums = {name: sums.get(name, 0) + value for name, value in part_sums.items()}
        sums = parallel.total_by_name(sums, device)

        # The guard: the norm of the gradient is at most MAX_GRAD_NORM, and anything not finite makes no update.
        parallel.sum_gradients(model.parameters())
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        sums = dict(zip(sums, torch.stack([*sums.values()]).tolist()))  # one GPU sync for all of them
        epochs.append(sums)
        if not (math.isfinite(sums["loss"]) and math.isfinite(sums["grad_norm"])):
            skipped += 1
        elif sums["grad_norm"] > 0:  # without a gradient AdamW would still move by its momentum
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad(set_to_none=True)
    broken = not torch.stack([p.isfinite().all() for p in model.parameters()]).all()
    # The first epoch measures the weights that sampled; the last one shows how far the updates moved from them.
    first, last, tokens = epochs[0], epochs[-1], int(epochs[0]["tokens"])
    metrics = {"loss": first["loss"], "tokens": tokens, "skipped": skipped, "broken": broken}
    metrics |= {name: first[name] / tokens for name in ("logprob_gap", "entropy", "kl") if name in first}
    metrics |= {name: last[name] / tokens for name in ("ratio_gap", "clip_low", "clip_high")}
    return metrics | {"grad_norm": sum(sums["grad_norm"] for sums in epochs) / EPOCHS}


# ---- Evaluation --------------------------------------------------------------------------------------------


def uniform_numbers(count, group_size, seed):
    """(count, G, T): they determine what is sampled. Each process draws all of them and uses those of its questions."""
    return torch.rand(count, group_size, max(task.LIMITS.values()), generator=torch.Generator().manual_seed(seed))


def answer(model, questions, temperature, group_size=1):
    """Graded answers, `group_size` to each question, in the order of the questions; SEED determines the samples."""
    mine = slice(parallel.rank(), None, parallel.world())
    noise = uniform_numbers(len(questions), group_size, SEED)[mine]
    rows = max(EVAL_ROWS, BATCH_POSITIONS * GROUP_SIZE * model.wte.weight.is_cuda)
    parts = sample(model, questions[mine], group_size, task.LIMITS, temperature, noise, rows)
    parts = tqdm(parts, "evaluation", leave=False, disable=parallel.rank() > 0 or None)  # None: without a terminal
    found = {}  # the answers to each question, which may have been asked twice
    for a in parallel.gather([a for _, part in parts for a in graded(task, part)]):
        found.setdefault((a.question.kind, a.question.prompt), []).append(a)
    return [found[q.kind, q.prompt].pop(0) for q in questions for _ in range(group_size)]


def evaluate(model, questions, samples=0):
    """(figures, sampled answers). The figures are of greedy answers, of answers at TEMPERATURE and, if `samples` are
    given, of pass@k: {"policy legal T=0": (mean, half-width of its 95 % interval, values of the questions), ...}"""
    model, skill = model.inference_copy(model.dtype), {}
    for temperature in (0.0, TEMPERATURE):  # in this order: the answers at TEMPERATURE are returned
        answers = answer(model, questions, temperature)
        skill |= {f"{name} T={temperature:g}": figure for name, figure in monitor.intervals(answers).items()}
    if samples:
        skill |= monitor.pass_rates(answer(model, questions, TEMPERATURE, samples), samples)
    return dict(sorted(skill.items(), key=lambda item: item[0].split(" ")[0])), answers  # sorted by kind


def evaluate_and_record(run, model, questions, title):
    """Adds a column to the run's table of held-out skill, and records some answers."""
    started = time.perf_counter()
    parallel.log(f"evaluating {len(questions)} held-out questions, greedy and at temperature {TEMPERATURE:g}")
    run.skill[title], answers = evaluate(model, questions, EVAL_SAMPLES)
    rewards = [figure[0] for name, figure in run.skill[title].items() if name.endswith(f" reward T={TEMPERATURE:g}")]
    run.best = max(run.best, (sum(rewards), run.step))  # the sum over kinds
    if parallel.rank() == 0:
        monitor.show(task, answers)
        monitor.write_samples(run.out / "samples.jsonl", run.step, answers)
        write(run.out / "skill.json", json.dumps(run.skill))
        if run.report:
            run.report(run.step, loggers.skill_numbers(run.skill[title]), loggers.answer_rows(answers))
    run.evaluation_seconds = time.perf_counter() - started


# ---- Start and loop ----------------------------------------------------------------------------------------


def make_optimizers(model):
    """A list of optimizers that share no parameters. `lr` is the highest rate; the schedule multiplies it."""
    return [torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def make_reference(model):
    return copy.deepcopy(model).inference_copy(model.dtype)  # without deepcopy it would share the policy's weights


def start():
    """Everything that the loop works with, for a new run or for one that is resumed."""
    settings.finish()
    hardware.flush_denormals()
    device, large = hardware.choose_device(DEVICE), bool(SIZE_DEFAULTS) or getattr(task, "LARGE", False)
    before = 0 if FRESH else processes_of(OUT_DIR)
    device = parallel.start(device, hardware.processes(NPROC, device, large, before))
    lead = parallel.rank() == 0
    run = Run(OUT_DIR)
    if lead:
        loggers.require(REPORT_TO)
        run.acquire_lock()
        source = MODEL or start_model(task)
        run.forbid_model_inside(source)
    source = parallel.gather([source] if lead else [])[0]  # from the lead to all
    resumed = None if FRESH else run.resume(STEPS)
    if len(set(parallel.gather([run.step]))) > 1:
        fail(f"the processes see different checkpoints: OUT_DIR={OUT_DIR} must be a folder that all machines share.")
    if DTYPE == "auto":
        run.dtype = run.dtype or parallel.gather([str(hardware.fastest_dtype(device)).removeprefix("torch.")])[0]
    dtype = getattr(torch, run.dtype if DTYPE == "auto" else DTYPE)
    model = GPT.load(source)
    run.check_start_model(model, source)
    model = model.to(device).set_compute_dtype(dtype)
    reference = make_reference(model) if KL_COEF else None
    optimizers = make_optimizers(model)
    if resumed:
        restore(model, optimizers, *resumed)
    run.good = run.good or run.snapshot(model, optimizers)

    items, held_out = load_items(task, DATA, model.config)
    if len(items) < BATCH_POSITIONS or not held_out:
        fail(f"DATA={DATA} has {len(items)} items to train on and {len(held_out)} held out, but at least "
             f"BATCH_POSITIONS={BATCH_POSITIONS} and 1 are needed; provide more.")  # fmt: skip
    if EVAL_POSITIONS > len(held_out):
        parallel.log(f"EVAL_POSITIONS={EVAL_POSITIONS}, but only {len(held_out)} items are held out; all are used.")
    first_questions(task, items, BATCH_POSITIONS, random.Random(SEED), model.config)  # only to find the task's mistakes
    questions = first_questions(task, held_out, min(EVAL_POSITIONS, len(held_out)), random.Random(SEED), model.config)
    planned = min(parallel.gather([plan_memory(model, questions)]))
    run.microbatch = MICROBATCH_TOKENS or run.microbatch or planned  # a resumed run's own: free memory may have changed
    parallel.log(monitor.introduction(model, source, TASK, items, held_out, run.microbatch))
    parallel.log(sizes.in_words(SIZE_DEFAULTS))
    if lead and FRESH:  # only once model and data are known to be good
        run.clear()
    return run, model, reference, optimizers, items, questions


def main():
    run, model, reference, optimizers, items, eval_questions = start()
    lead, mine = parallel.rank() == 0, slice(parallel.rank(), None, parallel.world())
    sampler = model.inference_copy(model.dtype)
    past = monitor.open_log(run, model, eval_questions) if lead else []
    run.report = loggers.connect(REPORT_TO, run) if lead and REPORT_TO != "none" else None
    if not run.skill:
        evaluate_and_record(run, model, eval_questions, "before")
    eval_steps = range(EVAL_EVERY, STEPS, EVAL_EVERY) if EVAL_EVERY else []  # between "before" and "after"
    signals, stopping = catch_signals(), []  # `signals` receives those that arrive from now on
    while run.step < STEPS and not stopping:
        # Questions and answers
        step, clock = run.step, [time.perf_counter()]
        rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
        questions = make_questions(task, items, BATCH_POSITIONS, rng, model.config)
        noise = uniform_numbers(len(questions), GROUP_SIZE, random.Random(f"{SEED}/{step}/noise").getrandbits(60))
        sampler.sync_from(model)
        rollouts = list(sample(sampler, questions[mine], GROUP_SIZE, task.LIMITS, TEMPERATURE, noise[mine]))
        clock.append(time.perf_counter())

        # Rewards and advantages
        rollouts = [(batch, graded(task, rows)) for batch, rows in rollouts]
        batches = [add_advantages(batch, rows, GROUP_SIZE, CREDIT, step) for batch, rows in rollouts]
        answers = parallel.gather([answer for _, rows in rollouts for answer in rows])  # of all processes
        clock.append(time.perf_counter())

        # Loss, gradient, guard, optimizer
        factor = grpo.schedule(step, STEPS, WARMUP_STEPS, LR_SCHEDULE) * run.lr_factor
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])  # the rate that make_optimizers gave it
        snapshot = run.snapshot(model, optimizers) if step % SNAPSHOT_EVERY == 0 else None
        metrics = monitor.describe_answers(answers, GROUP_SIZE)
        metrics |= update(model, reference, optimizers, batches, run.microbatch)
        clock.append(time.perf_counter())
        if step == 0 and (wrong := monitor.check_start(metrics, model.dtype, task.LIMITS)):
            fail(wrong)  # update() has compared sampler, policy and reference before it changed any weights

        # What happened
        run.step += 1
        metrics |= {"step": run.step, "lr": LR * factor, "length": metrics["tokens"] / len(answers)}
        metrics["seconds"] = {name: b - a for name, a, b in zip(("sampling", "grading", "update"), clock, clock[1:])}
        if lead:
            metrics |= monitor.diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
            past = monitor.log_step(run.out / "metrics.jsonl", past, metrics)
            if run.report:
                run.report(run.step, loggers.step_numbers(metrics))
            evaluations_left = sum(later >= run.step for later in eval_steps) + 1  # and "after"
            parallel.log(monitor.progress_line(past, STEPS, evaluations_left * run.evaluation_seconds))

        # Going back: after updates that could not be made, or that went too far from the reference
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if metrics["skipped"] else 0
        too_far = metrics.get("kl", 0) > KL_DIVERGENCE_THRESHOLD
        if metrics["broken"] or too_far or run.skipped_in_a_row >= MAX_CONSECUTIVE_NANS:
            run.go_back(model, optimizers, RECOVERY_LR_FACTOR)
        elif snapshot and not metrics["skipped"]:
            run.good = snapshot  # the state before this update: its answers and their KL were sound

        # Evaluation, checkpoint
        if run.step in eval_steps:
            evaluate_and_record(run, model, eval_questions, f"step {run.step}")
        stopping = parallel.gather(signals)  # those that came during the evaluation, too
        if lead and (run.step in eval_steps or stopping or run.step % SAVE_EVERY == 0 or run.step == STEPS):
            run.save(model, optimizers)
    finish(run, model, optimizers, eval_questions, stopping)


def finish(run, model, optimizers, eval_questions, stopping):
    """The last evaluation, the trained model, the verdict; a run that a signal has stopped is not evaluated again."""
    if stopping and run.step < STEPS:
        run.leave(model, signal=stopping[0])  # ends the program
    if "after" not in run.skill:
        evaluate_and_record(run, model, eval_questions, "after")
    if parallel.rank() == 0:
        run.save(model, optimizers)
    run.leave(model)
    parallel.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the loop; in it, a signal saves a checkpoint first
        sys.exit(130)
    except (OSError, RuntimeError) as error:
        explain(error, task, continuation(OUT_DIR, FRESH))
