"""What a run says about itself: its state and what to do about it, the progress line, figures of answers, logs."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from zlib import crc32

import torch

from nanorook.run import rewind
from nanorook.settings import GIVEN, SETTINGS, values
from nanorook.statistics import figure, known
from nanorook.task import as_sum, earned, prompt_text


def diagnose(m, past, kl_threshold, max_grad_norm):
    """The state of a step with metrics `m` after the steps `past`: what is wrong, and what to do."""
    rewards = [row["reward"] for row in past]
    falling = len(past) >= 40 and fmean(rewards[-20:]) < fmean(rewards[-40:-20]) - 0.05
    alike = m["frac_zero_std"] > 0.5 and m["reward"] < 0.8  # above it most questions are solved
    for state, wrong, advice in (
        ("red", m["broken"], "an update left weights that are not finite: lower LR"),
        ("red", m["skipped"] > 0, "a loss or gradient was not finite and its update was skipped: lower LR"),
        ("red", m.get("kl", 0) > kl_threshold, "the policy is far from the reference: raise KL_COEF or lower LR"),
        ("red", m["hit_limit"] > 0.8, "most completions are cut off: raise the limit of new tokens"),
        ("red", m.get("structure", 1) < 0.2, "completions are malformed: lower LR, and look at the samples"),
        ("red", m["reward_max"] < 0, "every reward is negative: nothing can be learnt from this batch"),
        ("yellow", alike, "most groups have one reward only: raise TEMPERATURE or GROUP_SIZE"),
        ("yellow", m["grad_norm"] > 10 * max_grad_norm, "gradients are far above the clip: lower LR"),
        ("yellow", m["clip_low"] + m["clip_high"] > 0.3, "the clip stops much of the update: lower LR or EPOCHS"),
        ("yellow", m["hit_limit"] > 0.2, "many completions are cut off: raise the limit of new tokens"),
        ("yellow", m.get("structure", 1) < 0.8, "many completions are malformed: the reward will teach form first"),
        ("yellow", m["logprob_gap"] > 0.05, "sampling and training disagree: use DTYPE=float32"),
        ("yellow", falling, "the reward falls: lower LR or raise KL_COEF"),
    ):
        if wrong:
            return {"state": state, "advice": advice}
    return {"state": "green", "advice": ""}


def figures(answers):
    """{"policy legal": [its value in each answer of the kind, or None], ...}: reward and metrics of each kind."""
    kinds = {}
    for answer in answers:
        values = {"reward": answer.grade.reward} | answer.grade.metrics
        kinds.setdefault(answer.question.kind, []).append({name: float(value) for name, value in values.items()})
    return {f"{kind} {name}": [row.get(name) for row in rows]
            for kind, rows in kinds.items() for name in {name: 0 for row in rows for name in row}}  # fmt: skip


def intervals(answers):
    """{"policy legal": (mean, half-width of its 95 % interval, the values of figures()), ...}"""
    return {name: figure(values) for name, values in figures(answers).items()}


def pass_at_k(values, n, k):
    """For each question the chance that one of k answers is right where its n answers have these values and 1 is right,
    without bias (Chen et al., 2021, Evaluating Large Language Models Trained on Code); None where none has a value."""
    groups = [values[i : i + n] for i in range(0, len(values), n)]
    return [None if {*g} == {None} else 1 - math.comb(n - g.count(1), k) / math.comb(n, k) for g in groups]


def pass_rates(answers, n):
    """{"mates mate pass@4": as in intervals(), ...} of metrics that are shares, from `n` answers to each question."""
    found = {name: values for name, values in figures(answers).items() if all(0 <= v <= 1 for v in known(values))}
    return {f"{name} pass@{k}": figure(pass_at_k(tried, n, k)) for name, tried in found.items()
            for k in (1, 4, 16, 64) if k <= n and not name.endswith(" reward")}  # fmt: skip


def describe_answers(answers, group_size):
    """The metrics of all the answers of a step, of which those of a group lie next to each other: "policy/legal", what
    pieces of the reward gave ("policy/earned/legal"), and "structure" over all kinds."""
    rewards = [answer.grade.reward for answer in answers]
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    result = {
        "reward": fmean(rewards),
        "reward_std": stdev(rewards),
        "reward_max": max(rewards),
        "frac_zero_std": fmean(max(group) - min(group) <= 1e-6 for group in groups),
        "hit_limit": fmean(answer.hit_limit for answer in answers),
    }
    found = {name: [v for v in values if v is not None] for name, values in figures(answers).items()}
    for kind, count in Counter(answer.question.kind for answer in answers).items():
        pieces = [piece for answer in answers if answer.question.kind == kind for piece in answer.grade.pieces]
        result |= {f"{kind}/earned/{name}": value / count for name, value in earned(pieces).items()}
    if structure := sum((values for name, values in found.items() if name.endswith(" structure")), []):
        result["structure"] = fmean(structure)
    return result | {name.replace(" ", "/"): fmean(values) for name, values in found.items()}


def progress_line(past, steps, evaluation_seconds):
    """The last of the steps `past`; the evaluations still to come will take `evaluation_seconds` in all."""
    m, seconds = past[-1], fmean(sum(row["seconds"].values()) for row in past)
    left = timedelta(seconds=round(seconds * (steps - m["step"]) + evaluation_seconds))
    kinds = [f"{name.split('/')[0]} {value:.2f}" for name, value in m.items() if name.split("/")[1:] == ["reward"]]
    rewards = f"reward {m['reward']:.3f}" + f" ({', '.join(kinds)})" * (len(kinds) > 1)
    kl, state = f" kl {m['kl']:.4f}" if "kl" in m else "", f"● {m['state']}"
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


def show_answer(task, answer, title=""):
    """Prints an answer, as the task shows it if that is text, and what its reward is made of if it has a grade."""
    text = task.show(answer.question, answer.text) if hasattr(task, "show") else ""
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


def open_log(run, model, questions):
    """Cuts the files of a run back to where it stands; the metrics of its steps so far. The held-out questions are
    named in run.json in the order of figures(), for comparisons with other runs."""
    step = run.step if run.skill else -1
    evaluated = {"after", f"step {step}"} & run.skill.keys()  # else it was killed while this evaluation was written
    about = describe("./train.sh", model.wte.weight.device, model.dtype) | {"questions": {}}
    for question in questions:
        about["questions"].setdefault(question.kind, []).append(crc32(prompt_text(question.prompt).encode()))
    (run.out / "settings.json").write_text(json.dumps(values(), indent=2))
    (run.out / "run.json").write_text(json.dumps(about))
    rewind(run.out / "samples.jsonl", step if evaluated else step - 1)
    return rewind(run.out / "metrics.jsonl", step)
