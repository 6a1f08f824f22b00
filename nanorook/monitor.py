"""What a run reports: its state and what to do about it, the progress line, figures of its answers, and logs."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from zlib import crc32

import torch

from nanorook import parallel
from nanorook.run import rewind, write
from nanorook.settings import GIVEN, SETTINGS, values
from nanorook.statistics import figure, is_share
from nanorook.task import as_sum, earned, kinds_of, prompt_text


def diagnose(m, past, kl_threshold, max_grad_norm):
    """The state of a step with metrics `m` after the steps `past`: that of its worst kind of question."""
    kl, far = highest(m, "kl")
    gap, apart = highest(m, "logprob_gap")
    rules = [
        ("red", m["broken"], "an update made some weights infinite or NaN: lower LR"),
        ("red", m["skipped"] > 0, "the loss or gradient was infinite or NaN, so the update was skipped: lower LR"),
        ("red", kl > kl_threshold, f"the policy is far from the reference in {far} answers: raise KL_COEF or lower LR"),
        ("yellow", m["grad_norm"] > 10 * max_grad_norm, "gradients are far above MAX_GRAD_NORM: lower LR"),
        ("yellow", m["clip_low"] + m["clip_high"] > 0.3, "much of the update is clipped: lower LR or EPOCHS"),
        ("yellow", gap > 0.05, f"sampling and training disagree about {apart} answers: use DTYPE=float32"),
    ]
    for kind in sorted(kinds_of(m), key=lambda kind: m[f"{kind}/reward"]):  # the worst first
        names = "reward", "reward_max", "frac_zero_std", "hit_limit", "structure"
        reward, best, alike, cut_off, structure = (m.get(f"{kind}/{name}", math.nan) for name in names)
        early = next((row for row in past if f"{kind}/hit_limit" in row), {})  # of the first step, if it had the kind
        ended = early.get(f"{kind}/hit_limit", 1) < 0.2
        older, newer = ([row.get(f"{kind}/reward", reward) for row in part] for part in (past[-40:-20], past[-20:]))
        falls = len(past) >= 40 and fmean(older) - fmean(newer) > max(0.05, stdev(older))
        rules += [
            ("yellow", best - reward < 1e-6 and reward < 0.8,
             f"every {kind} answer gets the reward {reward:.4g}: remove the cap if the task's grade has one, or give "
             "partial credit"),
            ("red", cut_off > 0.8 and ended, f"most {kind} answers no longer end before their limit: lower LR"),
            ("red" if cut_off > 0.8 else "yellow", cut_off > 0.2,
             f"{cut_off:.0%} of the {kind} answers are cut off: raise MAX_NEW_TOKENS, or the task's LIMITS"),
            ("red", structure < 0.2, f"most {kind} answers are malformed: lower LR, and read samples.jsonl"),
            ("red", best <= 0, f"no {kind} answer gets a reward: ask easier questions, or give partial credit"),
            ("yellow", alike > 0.5 and reward < 0.8,
             f"in most {kind} groups all answers get the same reward: raise TEMPERATURE or GROUP_SIZE"),
            ("yellow", structure < 0.8, f"many {kind} answers are malformed: wait, as form is usually learnt first"),
            ("yellow", falls, f"the {kind} reward is falling: lower LR or raise KL_COEF"),
        ]  # fmt: skip
    found = [{"state": state, "advice": advice} for state, wrong, advice in rules if wrong]
    return min(found, key=lambda rule: rule["state"], default={"state": "green", "advice": ""})  # red before yellow


def check_answers(metrics, limits):
    """A sentence if too few of a run's first answers to a kind of question are well-formed; otherwise empty."""
    structure, kind = lowest(metrics, "structure")
    if structure < 0.2:
        cut_off = metrics[f"{kind}/hit_limit"]
        return (f"only {structure:.0%} of the first {kind} answers are well-formed, and {cut_off:.0%} are cut off: if "
                f"that is most of them, raise MAX_NEW_TOKENS, or the task's LIMITS {limits}; otherwise the model does "
                "not know the format, so check its weights and config.json, or teach it the format first.")  # fmt: skip
    return ""


def check_agreement(metrics, dtype):
    """A sentence if sampler, policy and reference disagree about the answers to a kind of question before the first
    update; otherwise empty."""
    exact = dtype == torch.float32
    gap, kind = highest(metrics, "logprob_gap")
    if not gap < (1e-3 if exact else 0.05):  # also where it is NaN
        return (f"sampling and training disagree by {gap:.4f} nats per token of the {kind} answers before any update, "
                "probably because the sampler does not draw from grpo.distribution.")  # fmt: skip
    kl, kind = highest(metrics, "kl")
    if kind and not kl < (1e-5 if exact else 1e-3):  # in bf16, code with and without gradients may round differently
        return (f"KL to the reference is {kl:.5f} in {kind} answers before any update, so the reference is not the "
                "start model: check train.make_reference.")  # fmt: skip
    return ""


def lowest(m, name):
    """(value, kind) of a metric for the kind of question where it is lowest: a mean over kinds would hide a broken one.
    If no kind has the metric, the value is NaN, for which every comparison is false."""
    return min(value_of_each_kind(m, name), default=(math.nan, ""))


def highest(m, name):
    """As lowest(), where it is highest, or NaN."""
    return max(value_of_each_kind(m, name), key=lambda item: (math.isnan(item[0]), item[0]), default=(math.nan, ""))


def value_of_each_kind(m, name):
    """[(value, kind), ...] of a metric that each kind of question has."""
    return [(value, key.split("/")[0]) for key, value in m.items() if key.split("/")[1:] == [name]]


def by_kind(answers):
    kinds = dict.fromkeys(answer.question.kind for answer in answers)
    return {kind: [answer for answer in answers if answer.question.kind == kind] for kind in kinds}


def values_by_name(answers):
    """{"mates legal": [its value in each answer of the kind, or None], ...}: reward and metrics of each kind."""
    result = {}
    for kind, some in by_kind(answers).items():
        rows = [{"reward": answer.grade.reward} | answer.grade.metrics for answer in some]
        for name in dict.fromkeys(name for row in rows for name in row):
            result[f"{kind} {name}"] = [float(row[name]) if name in row else None for row in rows]
    return result


def figures(answers):
    """{"mates legal": (mean, half-width of its 95 % interval, the values of values_by_name()), ...}"""
    return {name: figure(values) for name, values in values_by_name(answers).items()}


def pass_at_k(values, n, k):
    """For each question an unbiased estimate of the chance that one of k answers is right, from n answers, whose value
    is 1 if right (Chen et al., 2021, Evaluating Large Language Models Trained on Code); None if none has a value."""
    groups = [values[i : i + n] for i in range(0, len(values), n)]
    return [None if {*g} == {None} else 1 - math.comb(n - g.count(1), k) / math.comb(n, k) for g in groups]


def pass_rates(answers, n):
    """{"mates mate pass@4": as in figures(), ...} for metrics that are shares, from `n` answers to each question."""
    found = {name: values for name, values in values_by_name(answers).items() if is_share(name, values)}
    return {f"{name} pass@{k}": figure(pass_at_k(tried, n, k)) for name, tried in found.items()
            for k in (1, 4, 16, 64) if k <= n and not name.endswith(" reward")}  # fmt: skip


def describe_answers(answers, group_size):
    """The metrics of a step's answers, which come group by group: over all kinds ("reward"), of each kind
    ("mates/reward", "mates/legal"), and what each piece of the reward paid ("mates/earned/legal")."""
    result = {"reward_std": stdev(answer.grade.reward for answer in answers)}
    for prefix, some in [("", answers), *((f"{kind}/", some) for kind, some in by_kind(answers).items())]:
        rewards = [answer.grade.reward for answer in some]
        groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
        result[f"{prefix}reward"] = fmean(rewards)
        result[f"{prefix}reward_max"] = max(rewards)
        result[f"{prefix}frac_zero_std"] = fmean(max(group) - min(group) <= 1e-6 for group in groups)
        result[f"{prefix}hit_limit"] = fmean(answer.hit_limit for answer in some)
        if prefix:
            pieces = earned(piece for answer in some for piece in answer.grade.pieces)
            result |= {f"{prefix}earned/{name}": value / len(some) for name, value in pieces.items()}
            values = [item for answer in some for item in answer.grade.metrics.items()]
            result |= {f"{prefix}{name}": fmean(v for n, v in values if n == name) for name in dict(values)}
    return result


def write_metrics(file, past, metrics):
    """Adds a step to metrics.jsonl; returns the steps that diagnose() looks back on, including the first one."""
    metrics["tokens_per_second"] = metrics["tokens"] / sum(metrics["seconds"].values())
    with open(file, "a") as log:
        log.write(json.dumps(metrics) + "\n")
    return [*past[:1], *past[1:][-39:], metrics]


def progress_line(past, steps, evaluation_seconds):
    """A line about the last of the steps `past`; the remaining evaluations will take `evaluation_seconds` in all."""
    m = past[-1]
    seconds = fmean(sum(row["seconds"].values()) for row in past[-40:])
    left = timedelta(seconds=round(seconds * (steps - m["step"]) + evaluation_seconds))
    kinds = [f"{kind} {m[f'{kind}/reward']:.2f}" for kind in kinds_of(m)]
    rewards = f"reward {m['reward']:.3f}" + f" ({', '.join(kinds)})" * (len(kinds) > 1)
    kl = f" kl {m['kl']:.4f}" if "kl" in m else ""
    state = f"● {m['state']}"
    line = f"step {m['step']}/{steps} {rewards}{kl} zero-std {m['frac_zero_std']:.0%} {left} left {state}"
    return line + (f"\n  {m['advice']}" if m["advice"] else "")


def printable(text):
    """What a model wrote, for a terminal: control characters, which could move its cursor, as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def show(task, answers):
    """Prints the worst and the best of some answers."""
    ordered = sorted(answers, key=lambda answer: answer.grade.reward)
    for which, answer in (("worst", ordered[0]), ("best", ordered[-1])):
        print(f"  {which} of {len(ordered)}: {printable(prompt_text(answer.question.prompt).strip())}")
        show_answer(task, answer)


def write_samples(file, step, answers):
    """Adds the first 16 answers of each kind of question to samples.jsonl, with their grades."""
    with open(file, "a") as log:
        for a in (a for some in by_kind(answers).values() for a in some[:16]):
            question = a.question._replace(prompt=prompt_text(a.question.prompt))
            row = {"step": step, "completion": a.text, "reward": a.grade.reward}
            log.write(json.dumps(row | question._asdict() | a.grade._asdict()) + "\n")


def show_answer(task, answer, title=""):
    """Prints an answer. If it has a grade, it is shown as the task shows it, if that is text, and with its reward."""
    text = task.show(answer.question, answer.text) if answer.grade and hasattr(task, "show") else ""
    text = text if text and not text.startswith("<") else answer.text.strip()
    print(f"  {title}-> {printable(text)}" + " ... (cut off)" * answer.hit_limit)
    if answer.grade:
        print(f"  {'':{len(title)}}   {answer.grade.reward:.4g} = {as_sum(answer.grade.pieces) or 0}")


def describe(command, device, dtype):
    """What was run, on what machine, from which commit; for run.json and for recorded figures."""
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=Path(__file__).parent, capture_output=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    given = [f"{name}={GIVEN['environment'][name]}" for name in SETTINGS if name in GIVEN["environment"]]
    return {
        "command": shlex.join([*command.split(), *given, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": git.stdout.decode().strip() or "unknown",
        "machine": gpu or f"{os.cpu_count()} cores of {cpu}",
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def introduction(model, source, task, items, held_out, microbatch):
    """What a run trains, on what and where; `items` and `held_out` are counts."""
    parameters, dtype = sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch.")
    ends = " or ".join(model.tokenizer.token_bytes[end].decode(errors="replace") for end in model.tokenizer.ends)
    if model.lora:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        ends += f"\nLoRA of rank {model.lora.rank}: {trained / 1e6:.1f}M parameters are trained, the others are frozen"
    again = ", blocks recomputed in the backward pass" * model.recompute
    steps, warmup = values()["STEPS"], values()["WARMUP_STEPS"]
    early = (f"\nThe learning rate rises for {warmup} steps, so a run of {steps} ends before it reaches LR: lower "
             "WARMUP_STEPS, or raise STEPS.")  # fmt: skip
    return (
        f"{source}: {parameters / 1e6:.1f}M parameters, answers end with {ends}\n"
        f"{task}: {items} items to train on, {held_out} held out\n"
        f"{model.wte.weight.device} in {dtype}, {parallel.in_words()}, microbatches of {microbatch} tokens{again}"
        f"{early * (steps < warmup)}"
    )


def open_log(run, model, questions, names):
    """Cuts the files of a run back to its current step; returns the metrics of its steps so far. run.json, the first
    file of a run, has the settings that were changed on the way, the task's NAMES of figures, the start model's hash
    and, for comparisons with other runs, the held-out questions in the order of values_by_name()."""
    step = run.step if run.skill else -1
    evaluated = {"after", f"step {step}"} & run.skill.keys()  # if not, samples of this step are from a killed attempt
    about = {"program": "nanorook"}  # by which the run is known to be one, see run.MARK
    about |= describe("./train.sh", model.wte.weight.device, model.dtype)
    about |= {"changes": run.changes, "processes": parallel.world(), "names": names, "questions": {}}
    about["start_hash"] = run.start_hash
    for question in questions:
        about["questions"].setdefault(question.kind, []).append(crc32(prompt_text(question.prompt).encode()))
    write(run.out / "run.json", json.dumps(about))
    write(run.out / "settings.json", json.dumps(values(), indent=2))
    if run.skill:
        write(run.out / "skill.json", json.dumps(run.skill))  # with the names and steps of the checkpoint
    rewind(run.out / "samples.jsonl", step if evaluated else step - 1)
    return rewind(run.out / "metrics.jsonl", step, "seconds")
