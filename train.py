"""GRPO for a language model with a verifier, in the order in which it runs: settings, the loop, and what the loop calls.
start() and finish(), which run once, stand at the end.

./train.sh                                       chess, with the embedded model on the embedded positions
STEPS=50 LR=1e-5 ./train.sh                      settings from the environment
./train.sh MODEL=jrahn/RookWorld-LM-124M         or as arguments; --help lists them
TASK=examples/letters.py ./train.sh              another task

A step: make B questions, sample G answers to each (rollout.py), grade them (rewards.py), compare each with its group
(grpo.py), and update the weights.

Sizes: B prompts, G answers to each (its group), N = B·G rows, P prompt tokens, T completion tokens, K pieces of a
reward, V tokens in the vocabulary. B, N, P, T and K are counted over a step, one kind of question or one microbatch,
whichever the tensor belongs to. A completion is tokens, an answer is the same as text; "row" means either.

Beyond plain GRPO: each piece of a reward is credited to the words it judges; the policy loss weighs each token by what
the sampler's rounding has changed (grpo.importance_weights); microbatches do not change the loss; the first step checks
that sampler, policy and reference agree; a run that breaks goes back to its last good state. Left out: a value model, a
replay buffer, a separate inference engine.
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

from nanorook import settings

if __name__ == "__main__":
    settings.read_user()  # before the first setting; when imported, train.py keeps the defaults

import architectures
import grpo
from nanorook import hardware, loggers, lora, monitor, parallel, report, sizes
from nanorook.run import Run, catch_signals, continuation, explain, processes_of, restore, write
from nanorook.settings import fail, fail_if, heading, setting
from nanorook.task import (
    draw_questions,
    draw_with_checks,
    grade_answers,
    load_items,
    load_task,
    names_of,
    prompt_ids,
    shuffled,
    start_folder,
)
from nanorook.verdict import card, in_lines, verdict
from rollout import distinct_rows, microbatches, sample

# A task's DEFAULTS, and those for the size of the model in nanorook/sizes.py, replace the defaults below. --help shows
# the task's, and a run prints those for its model at its start.
# fmt: off
TASK                    = setting("TASK", "rewards.py", "the task: a file that makes questions and grades answers; docs/tasks.md says what it has to provide")
heading(f"The task {TASK}")
task                    = load_task(TASK)
settings.take_defaults(task.DEFAULTS)  # they replace the defaults of the settings that follow

heading("The run")
MODEL                   = setting("MODEL", "", "the model to train: a Hugging Face folder or a hub id; models above 50M parameters get defaults for their size (nanorook/sizes.py), which a run prints at its start; empty: the task's own start model")
SIZE_DEFAULTS           = sizes.defaults(MODEL, task, architectures.count_parameters)  # none for a small model
settings.take_defaults(task.DEFAULTS | SIZE_DEFAULTS)  # the task may have named the MODEL, so its size is known only now
DATA                    = setting("DATA", "builtin", "source of the task's items; for chess: builtin, or a file of positions (FEN, EPD, PGN, RookWorld's lines or those of tools.chess_label)")
OUT_DIR                 = setting("OUT_DIR", "out", "folder for checkpoints, metrics.jsonl and the report, relative to the current folder; a run that is found there is resumed")
FRESH                   = setting("FRESH", False, "delete the run in OUT_DIR and start over")
SEED                    = setting("SEED", 0, "determines questions and samples: runs with the same SEED use the same random numbers at each step", low=0, high=2**32 - 1)
STEPS                   = setting("STEPS", 60, "number of rollout batches to learn from", low=1, high=999_999)
BATCH_POSITIONS         = setting("BATCH_POSITIONS", 76, "B, the number of prompts in a step", low=1)
GROUP_SIZE              = setting("GROUP_SIZE", 16, "G, the number of completions for each prompt", low=2)
TEMPERATURE             = setting("TEMPERATURE", 1.0, "the temperature of sampling, and so of the distribution that is trained", low=1e-3)
EPOCHS                  = setting("EPOCHS", 1, "number of updates from each rollout batch", low=1)
OVERFIT                 = setting("OVERFIT", False, "use the same questions at every step, to check that the loop can learn at all")
CONTROL                 = setting("CONTROL", "none", "zero or shuffle make a control run, whose rewards carry no information: advantages are zero, or rewards are shuffled within groups, see nanorook.task.shuffled", one_of=("none", "zero", "shuffle"))

heading("The update")
LORA_RANK               = setting("LORA_RANK", 0, "freeze the model and train LoRA adapters of this rank; set LR about ten times as high, see nanorook/lora.py; 0: train all weights", low=0, high=2**12)
LR                      = setting("LR", 2e-4, "learning rate of AdamW", low=0)
LR_SCHEDULE             = setting("LR_SCHEDULE", "linear", "after the warm-up: constant, or falling to zero linearly or along a cosine", one_of=grpo.SCHEDULES)
WARMUP_STEPS            = setting("WARMUP_STEPS", 5, "steps over which the learning rate rises", low=0)
MAX_GRAD_NORM           = setting("MAX_GRAD_NORM", 1.0, "a gradient with a larger norm is scaled down to this one; cannot be switched off", low=1e-9)

heading("The loss")
LOSS                    = setting("LOSS", "dapo", "which policy loss, see grpo.policy_loss", one_of=grpo.LOSSES)
CREDIT                  = setting("CREDIT", "piece", "what a token is credited with; piece: the components of the reward that judge it; answer: the whole reward, as in plain GRPO", one_of=("piece", "answer"))
SCALE_REWARDS           = setting("SCALE_REWARDS", "none", "divide advantages by their group's standard deviation (std), give rare successes more weight (mean), or neither (none), see grpo.advantages", one_of=grpo.SCALES)
BEST_OF                 = setting("BEST_OF", 1, "k, below GROUP_SIZE: reward the best of k answers instead of each one; against that, the KL weighs at least k times as much, see grpo.weights_by_rank", low=1, high=GROUP_SIZE - 1)
BEST_OF_SCHEDULE        = setting("BEST_OF_SCHEDULE", "constant", "with BEST_OF above 1, whether k stays, or falls to 1 during the run", one_of=grpo.SCHEDULES)
CLIP_RANGE              = setting("CLIP_RANGE", 0.2, "the ratio is clipped below 1 - CLIP_RANGE; no effect with LOSS=cispo, or with EPOCHS=1, where all ratios are 1", low=0, high=1)
CLIP_RANGE_HIGH         = setting("CLIP_RANGE_HIGH", 0.28, "the ratio is clipped above 1 + CLIP_RANGE_HIGH; no effect with EPOCHS=1", low=0, high=1e30)
KL_COEF                 = setting("KL_COEF", 0.1, "weight of the KL to the start model, times the task's KL_WEIGHTS for each kind of question; 0 loads no reference and measures no KL, so KL_DIVERGENCE_THRESHOLD has no effect", low=0)
KL_ESTIMATOR            = setting("KL_ESTIMATOR", "k2", "how the KL is estimated, see grpo.kl", one_of=grpo.KL_ESTIMATORS)
KL_DIVERGENCE_THRESHOLD = setting("KL_DIVERGENCE_THRESHOLD", 1.0, "if the KL per token exceeds this for any kind of question, the run goes back to its last good state", low=0)

heading("Evaluation, checkpoints, logs")
EVAL_EVERY              = setting("EVAL_EVERY", 40, "steps between evaluations on held-out questions; 0: only before and after the run", low=0)
EVAL_POSITIONS          = setting("EVAL_POSITIONS", 256, "number of held-out questions in an evaluation", low=1)
EVAL_SAMPLES            = setting("EVAL_SAMPLES", 0, "answers to each question of an evaluation, for pass@k with k = 1, 4, 16, 64 up to this number; 0: no pass@k", low=0)
REPORT_TO               = setting("REPORT_TO", "none", "also send metrics, and to wandb and trackio answers, to this dashboard, whose package has to be installed", one_of=("none", "wandb", "trackio", "tensorboard"))
SAVE_EVERY              = setting("SAVE_EVERY", 20, "steps between checkpoints", low=1)

heading("The machine")
DEVICE                  = setting("DEVICE", "auto", "where to train: cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU")
DTYPE                   = setting("DTYPE", "auto", "data type of the matrix products; trained weights stay float32; auto: the faster one", one_of=("auto", "float32", "bfloat16"))
COMPILE                 = setting("COMPILE", "auto", "use torch.compile for the training forward pass; auto: on CUDA, if there are a C compiler and Python.h", one_of=("auto", "0", "1"))
MICROBATCH_TOKENS       = setting("MICROBATCH_TOKENS", 0, "the most tokens in one forward pass of the update, unless a single group has more; it limits memory and changes no result beyond rounding; 0: 4096 on a CPU; on CUDA as many as fit into free memory, up to 32768", low=0)
NPROC                   = setting("NPROC", "auto", "number of processes on this machine; use one for each GPU; auto: two on a CPU of two or more cores for a model below 50M parameters, unless OMP_NUM_THREADS is set; else one")
# fmt: on

SNAPSHOT_EVERY = 10  # steps between copies of a healthy state, to which a run that breaks goes back
MAX_SKIPPED_IN_A_ROW = 3  # steps in a row with a skipped update, after which the run goes back
RECOVERY_LR_FACTOR = 0.5  # LR is multiplied by this when the run goes back, as the same LR would fail again
EVAL_ROWS = 128  # completions that an evaluation samples at once; on a GPU, those of a step if they are more


# ---- The loop ----------------------------------------------------------------------------------------------


def main():
    run, model, reference, optimizers, items, eval_questions = start()
    is_lead = parallel.rank() == 0
    # The weights in training are fp32; model.dtype is that of the matrix products. In fp32 the sampler shares the
    # weights, so that syncing changes nothing; in bf16 it has casts of them.
    sampler = model.inference_copy(model.dtype)
    past = []  # metrics of the steps so far
    if is_lead:
        past = monitor.open_log(run, model, eval_questions, names_of(task))
    if is_lead and REPORT_TO != "none":
        run.dashboard = loggers.connect(REPORT_TO, run)
    if not run.skill:  # a new run
        evaluate_and_record(run, model, eval_questions, "before")
    eval_steps = range(EVAL_EVERY, STEPS, EVAL_EVERY) if EVAL_EVERY else []  # between "before" and "after"
    signals = catch_signals()  # a list that grows when SIGINT or SIGTERM arrives
    stop_signals = []  # of any process
    while run.step < STEPS and not stop_signals:
        step = run.step
        time_started = time.perf_counter()

        # Questions, and answers to them by the weights as they are now: a Rollout for each kind of question and stop
        questions, noise = my_questions(items, step, model.config)
        sampler.sync_from(model)
        rollouts = list(sample(sampler, questions, GROUP_SIZE, task.LIMITS, TEMPERATURE, noise))
        time_sampled = time.perf_counter()

        # Rewards, and advantages within each group
        for rollout in rollouts:
            rollout.answers = grade_answers(task, rollout.answers)
            add_advantages(rollout, step)
        answers = parallel.gather([answer for rollout in rollouts for answer in rollout.answers])  # of all processes
        metrics = monitor.describe_answers(answers, GROUP_SIZE)
        if step == 0:
            fail_if(monitor.check_answers(metrics, task.LIMITS))
        time_graded = time.perf_counter()

        # Loss, gradient, guard, optimizer. The snapshot is of the weights that sampled, see "going back" below
        snapshot = run.snapshot(model, optimizers) if step % SNAPSHOT_EVERY == 0 else None
        factor = grpo.schedule(step, STEPS, WARMUP_STEPS, LR_SCHEDULE) * run.lr_factor
        set_learning_rates(optimizers, factor)
        # The most tokens of a microbatch are MICROBATCH_TOKENS, or what start() found to fit
        metrics |= update(model, reference, optimizers, rollouts, most_tokens=run.microbatch, check=step == 0)
        time_updated = time.perf_counter()

        # What happened
        run.step += 1
        metrics |= {"step": run.step, "lr": LR * factor, "length": metrics["tokens"] / len(answers)}
        metrics["seconds"] = {
            "sampling": time_sampled - time_started,
            "grading": time_graded - time_sampled,
            "update": time_updated - time_graded,
        }
        if is_lead:
            past = log_step(run, past, metrics, eval_steps)

        # Going back restores weights and moments but not run.step, so the run goes on with new questions. The KL was
        # measured with the weights that sampled, so it judges the updates before this one.
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if metrics["skipped"] else 0
        kl, _ = monitor.highest(metrics, "kl")  # the highest of any kind; NaN, which exceeds nothing, without a KL
        if metrics["broken"] or kl > KL_DIVERGENCE_THRESHOLD or run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            run.go_back(model, optimizers, RECOVERY_LR_FACTOR)
        elif snapshot and not metrics["skipped"]:
            run.good = snapshot  # the weights that sampled, whose KL, loss and gradient turned out to be sound

        # Evaluation, checkpoint
        if run.step in eval_steps:
            evaluate_and_record(run, model, eval_questions, f"step {run.step}")
        stop_signals = parallel.gather(signals)  # with those that came during the evaluation
        # At STEPS, too, as the run may be killed during the last evaluation, after which finish() saves once more
        is_time_to_save = run.step % SAVE_EVERY == 0 or run.step in eval_steps or run.step == STEPS
        if is_lead and (is_time_to_save or stop_signals):
            run.save(model, optimizers)
    finish(run, model, optimizers, eval_questions, stop_signals)


# ---- Questions ---------------------------------------------------------------------------------------------


def my_questions(items, step, config):
    """This process's share of the step's questions, and the noise for their answers."""
    rng = random.Random(f"{SEED}/{0 if OVERFIT else step}")
    questions = draw_questions(task, items, BATCH_POSITIONS, rng, config)
    seed = random.Random(f"{SEED}/{step}/noise").getrandbits(60)  # a number made from the text, as torch takes no text
    noise = sampling_noise(len(questions), GROUP_SIZE, seed)
    return questions[my_share()], noise[my_share()]


def my_share():
    """This process's slice of a list: every W-th element of W processes, starting at its rank."""
    return slice(parallel.rank(), None, parallel.world())


def sampling_noise(count, group_size, seed):
    """Uniform numbers (count, G, T), which alone decide what is sampled: not how many processes there are, or whether
    the run was interrupted. Each process draws the numbers of all questions, and uses those of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, group_size, max(task.LIMITS.values()), generator=generator)


# ---- Advantages --------------------------------------------------------------------------------------------


def add_advantages(rollout, step=0):
    """Adds the advantage of each token (N, T)."""
    answers = rollout.answers
    if CREDIT == "piece":
        pieces = [answer.grade.pieces for answer in answers]
    else:
        pieces = [[("reward", answer.grade.reward)] for answer in answers]
    char_ends = [answer.char_ends for answer in answers]
    values, piece_mask = grpo.credit(pieces, char_ends, rollout.completions.shape[1])  # (N, K), (N, T, K)
    if CONTROL == "shuffle":  # each answer gets the values of a random one in its group
        values = values[shuffled(answers, rollout.group_size, f"{SEED}/{step}/")]
    by_piece = grpo.advantages(values, rollout.group_size, SCALE_REWARDS, best_of_at(step))  # (N, K)
    advantages = (by_piece[:, None] * piece_mask).sum(2)  # (N, T): summed over the pieces that judge a token
    if CONTROL == "zero":
        advantages = torch.zeros_like(advantages)
    rollout.advantages = advantages.to(rollout.completions.device)


def best_of_at(step):
    """k, which BEST_OF_SCHEDULE may lower during the run."""
    k = BEST_OF * grpo.schedule(step, STEPS, 0, BEST_OF_SCHEDULE)
    return max(1, math.ceil(k - 1e-9))  # rounded up, as it falls to 1 and not to 0; 1e-9 absorbs rounding errors


# ---- The update --------------------------------------------------------------------------------------------


def set_learning_rates(optimizers, factor):
    """Sets the rate of each optimizer to `factor` times its `initial_lr`, the rate that it was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]


def update(model, reference, optimizers, rollouts, most_tokens, check=False):
    """Makes EPOCHS updates from the answers of a step; returns metrics. Each update sums the gradients of all
    microbatches, the `parts`, of at most `most_tokens` tokens. With `check`, the run ends if sampler, policy and
    reference disagree, before any weight has changed."""
    all_have_gradient = KL_COEF > 0  # the KL's; without it, a group whose advantages are 0 has none
    parts = [part for rollout in rollouts for part in microbatches(rollout, most_tokens, all_have_gradient)]
    device, limit = model.wte.weight.device, max(task.LIMITS.values())
    normalizer = torch.zeros((), dtype=torch.long, device=device)  # stays 0 in a process that has no question
    for part in parts:
        normalizer += grpo.loss_normalizer(part.completion_mask, LOSS, limit)
    normalizer = parallel.total(normalizer)
    weights = [p for p in model.parameters() if p.requires_grad]  # all, or with LORA_RANK those of the adapters
    epochs, skipped = [], 0
    for epoch in range(EPOCHS):
        sums = empty_sums(device, has_kl=reference is not None)
        for part in parts:
            part_sums = add_gradient(model, reference, part, normalizer, is_first_epoch=epoch == 0)
            for name, value in part_sums.items():
                sums[name] = sums[name] + value
        summed = parallel.total(torch.stack([*sums.values()]))  # over all processes, in one call
        parallel.sum_gradients(weights)
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        numbers = torch.cat([summed, grad_norm[None]]).tolist()  # one GPU sync for all of them
        totals = dict(zip([*sums, "grad_norm"], numbers))
        epochs.append(totals)
        if check and epoch == 0:
            disagree = monitor.check_agreement(per_token(totals), model.dtype)
            fail_if(disagree and f"{disagree} python -m tools.doctor, with the same settings, checks each stage.")

        # The guard: grad_norm is the norm before the gradient was scaled down to MAX_GRAD_NORM. If it or the loss is
        # not finite, there is no update.
        if not (math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])):
            skipped += 1
        elif totals["grad_norm"] > 0:  # without a gradient AdamW would still move by its momentum
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad(set_to_none=True)
    is_finite = torch.stack([p.isfinite().all() for p in weights]).all()
    return describe_epochs(epochs) | {"skipped": skipped, "broken": not is_finite}


def describe_epochs(epochs):
    """The metrics of an update, from the sums of each of its epochs."""
    metrics = {"loss": epochs[0]["loss"], "tokens": int(epochs[0]["tokens"])}
    for name, value in per_token(epochs[0]).items():  # the first epoch measures the weights that sampled
        if name.endswith(("logprob_gap", "kl", "entropy")):
            metrics[name] = value
    # The last epoch's ratios show how far the earlier updates moved the policy from the weights that sampled
    for name, value in per_token(epochs[-1]).items():
        if name in grpo.LOSS_SUMS:
            metrics[name] = value
    metrics["grad_norm"] = sum(totals["grad_norm"] for totals in epochs) / len(epochs)
    return metrics


def add_gradient(model, reference, part, normalizer, is_first_epoch):
    """Forward and backward pass of a microbatch: adds its gradient to the model's; returns sums over its tokens."""
    with torch.set_grad_enabled(part.has_gradient):
        logprobs, entropy = forward(model, part, TEMPERATURE)  # (N, T)
    if is_first_epoch:
        # The weights are still those that sampled. Old logprobs come from this forward pass and not from the sampler,
        # whose rounding differs, so the ratio of new to old probabilities is exactly 1 here; importance_weights()
        # corrects for the sampler. Later epochs keep them, and the reference's.
        part.old_logprobs = logprobs.detach()
        if reference:
            with torch.no_grad():
                part.ref_logprobs, _ = forward(reference, part, TEMPERATURE)
    loss, sums = loss_and_sums(logprobs, entropy, part, normalizer)
    if part.has_gradient:
        loss.backward()
    return sums


def forward(model, part, temperature):
    """Logprobs and entropies (N, T) of a part's completions, under the distribution that they were sampled from. On a
    CPU, equal answers of a group are computed once, as U rows for each prompt; on CUDA, a varying number of rows would
    cost syncs and compilations."""
    if part.completions.is_cuda:
        return logprobs_of(model, part, part.completions, temperature)
    distinct, index = distinct_rows(part.completions, len(part.prompts))  # (B·U, T), (N,)
    logprobs, entropy = logprobs_of(model, part, distinct, temperature)  # (B·U, T)
    return logprobs[index], entropy[index]


def logprobs_of(model, part, completions, temperature):
    """Logprobs and entropies of completions (B·U, T), U to each of the part's prompts."""
    score = compiled_score(type(model))
    hidden = score(model, part.prompts, part.prompt_lengths, completions)  # (B·U, T, C); the head is applied below
    V, most_logits = model.config.vocab_size, model.most_logits
    return grpo.logprobs_and_entropy(hidden, completions, model.head, V, temperature, most_logits)


@functools.cache
def compiled_score(architecture):
    """The score() of a model's class, compiled once, for policy and reference alike: compiled code rounds differently,
    and the KL must start at 0."""
    wanted = hardware.compiles(COMPILE, hardware.choose_device(DEVICE))
    return torch.compile(architecture.score, dynamic=True) if wanted else architecture.score


def loss_and_sums(logprobs, entropy, part, normalizer):
    """What a part adds to the loss, and sums over its tokens for the metrics."""
    mask, old_logprobs = part.completion_mask, part.old_logprobs
    loss, sums = grpo.policy_loss(
        logprobs,
        old_logprobs,
        part.advantages,
        mask,
        loss=LOSS,
        clip_low=CLIP_RANGE,
        clip_high=CLIP_RANGE_HIGH,
        normalizer=normalizer,
        importance=grpo.importance_weights(old_logprobs, part.rollout_logprobs),
    )
    measured = {
        "tokens": mask.sum().float(),
        "logprob_gap": torch.where(mask, logprobs.detach() - part.rollout_logprobs, 0).abs().sum(),
    }
    if part.ref_logprobs is not None:
        kl_weight = getattr(task, "KL_WEIGHTS", {}).get(part.kind, 1.0)
        # Without importance weights: the sampler's rounding matters little to a penalty this small
        kl = kl_weight * grpo.kl(logprobs, part.ref_logprobs, mask, KL_ESTIMATOR)  # (N, T)
        loss = loss + KL_COEF * grpo.aggregate(kl, mask, LOSS, normalizer)
        # What is measured, and judged by KL_DIVERGENCE_THRESHOLD, has no weights and is k2, whatever KL_ESTIMATOR is: a
        # single token can blow up k3's mean.
        measured["kl"] = grpo.kl(logprobs.detach(), part.ref_logprobs, mask, "k2").sum()
    sums |= measured | {f"{part.kind}/{name}": value for name, value in measured.items()}
    sums["entropy"] = torch.where(mask, entropy, 0).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def empty_sums(device, has_kl):
    """Zeros for everything that is summed over tokens: with several processes, each has to have the same sums, also of
    kinds of questions that it was not given."""
    of_kinds = ["tokens", "logprob_gap"] + ["kl"] * has_kl
    names = ["loss", "entropy", *grpo.LOSS_SUMS, *of_kinds]
    names += [f"{kind}/{name}" for kind in task.LIMITS for name in of_kinds]
    return {name: torch.zeros((), device=device) for name in names}


def per_token(totals):
    """Means over the tokens of all answers, or of the kind of question that a name begins with."""
    means = {}
    for name, total in totals.items():
        kind, _, metric = name.rpartition("/")
        tokens = totals[f"{kind}/tokens" if kind else "tokens"]
        if tokens and metric not in ("tokens", "loss", "grad_norm"):
            means[name] = total / tokens
    return means


# ---- After the update --------------------------------------------------------------------------------------


def log_step(run, past, metrics, eval_steps):
    """Writes the metrics of a step and prints its line; returns the steps to look back on, this one included."""
    metrics |= monitor.diagnose(metrics, past, KL_DIVERGENCE_THRESHOLD, MAX_GRAD_NORM)
    past = monitor.write_metrics(run.out / "metrics.jsonl", past, metrics)
    if run.dashboard:
        run.dashboard(run.step, loggers.step_numbers(metrics))
    evaluations_left = sum(later >= run.step for later in eval_steps) + 1  # and "after"
    parallel.log(monitor.progress_line(past, STEPS, evaluations_left * run.evaluation_seconds))
    return past


def evaluate_and_record(run, model, questions, title):
    """Adds a column to the run's table of held-out skill, and records some answers."""
    started = time.perf_counter()
    parallel.log(f"evaluating {len(questions)} held-out questions, greedy and at temperature {TEMPERATURE:g}")
    skill, answers = evaluate(model, questions, EVAL_SAMPLES)
    run.skill[title] = skill
    rewards = [mean for name, (mean, *_) in skill.items() if name.endswith(f" reward T={TEMPERATURE:g}")]
    run.best = max(run.best, (sum(rewards), run.step))  # the sum over kinds
    if parallel.rank() == 0:
        monitor.show(task, answers)
        monitor.write_samples(run.out / "samples.jsonl", run.step, answers)
        write(run.out / "skill.json", json.dumps(run.skill))
        if run.dashboard:
            run.dashboard(run.step, loggers.skill_numbers(skill), loggers.answer_rows(answers))
    run.evaluation_seconds = time.perf_counter() - started


def evaluate(model, questions, samples=0):
    """(figures, sampled answers). The figures are of greedy answers, of answers at TEMPERATURE and, if `samples` are
    given, of pass@k: {"moves legal T=0": (mean, half-width of its 95 % interval, values of the questions), ...}"""
    model = model.inference_copy(model.dtype)
    skill = {}
    for temperature in (0.0, TEMPERATURE):  # in this order: the answers at TEMPERATURE are returned
        answers = answer_questions(model, questions, temperature)
        skill |= {f"{name} T={temperature:g}": figure for name, figure in monitor.figures(answers).items()}
    if samples:
        tries = answer_questions(model, questions, TEMPERATURE, samples)
        skill |= monitor.pass_rates(tries, samples)
    by_kind = sorted(skill, key=lambda name: name.split(" ")[0])
    return {name: skill[name] for name in by_kind}, answers


def answer_questions(model, questions, temperature, group_size=1):
    """Graded answers, `group_size` to each question, in the order of the questions; SEED determines the samples."""
    noise = sampling_noise(len(questions), group_size, SEED)[my_share()]
    most_rows = EVAL_ROWS
    if model.wte.weight.is_cuda:
        most_rows = max(EVAL_ROWS, BATCH_POSITIONS * GROUP_SIZE)
    rollouts = sample(model, questions[my_share()], group_size, task.LIMITS, temperature, noise, most_rows)
    rollouts = tqdm(rollouts, "evaluation", leave=False, disable=parallel.rank() > 0 or None)  # None: not in a file
    graded = [answer for rollout in rollouts for answer in grade_answers(task, rollout.answers)]
    by_question = {}  # answers come process by process and kind by kind; a question may have been asked twice
    for answer in parallel.gather(graded):
        by_question.setdefault((answer.question.kind, answer.question.prompt), []).append(answer)
    return [by_question[q.kind, q.prompt].pop(0) for q in questions for _ in range(group_size)]


# ---- Start and end -----------------------------------------------------------------------------------------


def start():
    """Everything that the loop works with, for a new run or for one that is resumed."""
    settings.finish()  # refuses arguments that are no settings, and prints --help
    hardware.flush_denormals()
    device = join_processes()
    run, source, saved = open_run()
    if run.device != device.type:  # of a new run, or of one that was begun on another device, where other choices hold
        run.device, run.dtype, run.microbatch = device.type, "", 0
    model, reference, optimizers = load_models(run, source, device, saved)
    items, held_out, questions = load_questions(model.config)
    planned = min(parallel.gather([plan_memory(model, questions)]))  # also sets model.most_logits and model.recompute
    if reference:  # computed in the same way as the policy, so that both are rounded alike
        reference.most_logits, reference.recompute = model.most_logits, model.recompute
    # The setting; without it what a resumed run began with, as free memory may have changed since; else what fits now
    run.microbatch = MICROBATCH_TOKENS or run.microbatch or planned
    parallel.log(monitor.introduction(model, source, TASK, len(items), held_out, run.microbatch))
    parallel.log(sizes.in_words(SIZE_DEFAULTS))
    if parallel.rank() == 0 and FRESH:  # only once model and data are known to be good
        run.clear()
    return run, model, reference, optimizers, items, questions


def join_processes():
    """Starts the other processes, if there are to be any; returns the device of this one."""
    device = hardware.choose_device(DEVICE)
    is_large = bool(SIZE_DEFAULTS) or getattr(task, "LARGE", False)
    before = 0 if FRESH else processes_of(OUT_DIR)
    return parallel.start(device, hardware.processes(NPROC, device, is_large, before))


def open_run():
    """The run in OUT_DIR, the source of its start model, and (weights, moments) of the checkpoint that it resumes."""
    is_lead = parallel.rank() == 0
    run = Run(OUT_DIR)
    if is_lead:
        loggers.require(REPORT_TO)
        run.acquire_lock()
        source = MODEL or start_folder(task)
        run.forbid_model_inside(source)
    source = parallel.gather([source] if is_lead else [])[0]  # from the lead to all
    saved = None if FRESH else run.resume(STEPS)
    if len(set(parallel.gather([run.step]))) > 1:
        fail(f"the processes see different checkpoints: OUT_DIR={OUT_DIR} must be a folder that all machines share.")
    return run, source, saved


def load_models(run, source, device, saved):
    """The model in training, the reference and the optimizers."""
    if DTYPE == "auto" and not run.dtype:
        fastest = str(hardware.fastest_dtype(device)).removeprefix("torch.")
        run.dtype = parallel.gather([fastest])[0]
    dtype = getattr(torch, run.dtype if DTYPE == "auto" else DTYPE)
    check_memory(source, device, dtype)
    kept_as = dtype if LORA_RANK else torch.float32
    model = architectures.load_merged(source, kept_as)  # `source` may be a folder of adapters
    run.check_start_model(model, source)
    model = model.to(device).set_compute_dtype(dtype)
    reference = make_reference(model) if KL_COEF else None  # before a checkpoint is restored: it is the start model
    if LORA_RANK:
        lora.add(model, LORA_RANK, SEED, source)
    optimizers = make_optimizers(model)
    run.check_optimizers(optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    if saved:
        restore(model, optimizers, *saved)
    run.good = run.good or run.snapshot(model, optimizers)
    return model, reference, optimizers


def check_memory(source, device, dtype):
    """Ends the run before a weight is loaded, or downloaded, if the model cannot be trained on this device."""
    model = architectures.without_weights(source).set_compute_dtype(dtype)
    if LORA_RANK:
        lora.add_empty(model, lora.Lora(LORA_RANK, source))
    # Kinds are sampled one after the other. With several, how many rows have the longest limit is not known yet
    rows = GROUP_SIZE if len(task.LIMITS) > 1 else BATCH_POSITIONS * GROUP_SIZE // parallel.world()
    fail_if(hardware.what_is_missing(model, device, KL_COEF > 0, GROUP_SIZE, rows, max(task.LIMITS.values())))


def load_questions(config):
    """The items that training questions are drawn from, the number held out, and the questions of evaluations."""
    items, held_out = load_items(task, DATA, config)
    if len(items) < BATCH_POSITIONS or not held_out:
        fail(f"DATA={DATA} has {len(items)} items to train on and {len(held_out)} held out, but at least "
             f"BATCH_POSITIONS={BATCH_POSITIONS} and 1 are needed; provide more, or lower BATCH_POSITIONS.")  # fmt: skip
    if EVAL_POSITIONS > len(held_out):
        parallel.log(f"EVAL_POSITIONS={EVAL_POSITIONS}, but only {len(held_out)} items are held out; all are used.")
    draw_with_checks(task, items, BATCH_POSITIONS, random.Random(SEED), config)  # only to find the task's mistakes
    count = min(EVAL_POSITIONS, len(held_out))
    questions = draw_with_checks(task, held_out, count, random.Random(SEED), config)
    return items, len(held_out), questions


def make_reference(model):
    """The start model, made before any weight has changed and before adapters are added."""
    if not LORA_RANK:
        model = copy.deepcopy(model)  # otherwise the reference would share the policy's weights
    return model.inference_copy(model.dtype)  # with LORA_RANK the weights are frozen, and shared


def make_optimizers(model):
    """A list of optimizers that share no parameters; with LORA_RANK, the adapters' matrices are the only ones. `lr` is the
    highest rate; the schedule multiplies it. Checkpoints and going back restore what an optimizer keeps in its `state`,
    so nothing else that changes may be in its groups; a run is not resumed with optimizers of other classes."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.AdamW(weights, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def plan_memory(model, questions):
    """The most tokens of a microbatch. If these, or a group, need too much memory, blocks are recomputed. Logits are made
    in parts that fit."""
    lengths = [len(prompt_ids(q.prompt, model.tokenizer)) + task.LIMITS[q.kind] for q in questions]
    model.most_logits = hardware.most_logits(model)
    group = GROUP_SIZE * max(task.LIMITS.values())  # which is never split
    chosen = MICROBATCH_TOKENS or (hardware.CPU_MICROBATCH if model.wte.weight.device.type == "cpu" else 0)
    model.recompute = hardware.must_recompute(model, max(chosen, group), max(lengths))
    return chosen or hardware.microbatch_tokens(model, max(lengths))  # on CUDA it depends on what is recomputed


def finish(run, model, optimizers, eval_questions, stop_signals):
    """The last evaluation, the trained model with its card, the verdict and the report. A run that a signal has stopped
    is not evaluated again. A red verdict fails the program, so that a script notices; a report that fails does not."""
    is_lead = parallel.rank() == 0
    stopped = bool(stop_signals) and run.step < STEPS
    if not stopped:
        if "after" not in run.skill:  # it is, if the run was killed after the save below
            evaluate_and_record(run, model, eval_questions, "after")
        if is_lead:
            run.save(model, optimizers)
    if is_lead:
        lora.merged(model).save(run.out / "model")
        if LORA_RANK:
            lora.save(model, run.out / "adapters")
        outcome = verdict(run.out)
        write(run.out / "model" / "README.md", card(run.out, outcome))
        print("\n" + in_lines(outcome), flush=True)
        try:
            print(report.write(run.out.resolve()), flush=True)
        except (SystemExit, Exception) as error:  # whatever a task's `show` raises
            print(f"{error}\nThe report could not be written.", flush=True)
        run.close(finished=not stopped)
    if stopped:
        parallel.log(f"stopped after step {run.step}; {continuation(OUT_DIR, FRESH)}")
        sys.exit(128 + stop_signals[0])
    if is_lead and outcome[0].startswith("● red"):
        sys.exit(1)
    parallel.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the loop; in it, a signal saves a checkpoint first
        sys.exit(130)
    except Exception as error:
        explain(error, task, continuation(OUT_DIR, FRESH))
