"""What a run says about itself: its state and what to do about it, the progress line, tables, logs."""

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
from statistics import fmean

import torch

from nanorook.checkpoint import rewind
from nanorook.settings import GIVEN, SETTINGS, refuse, values


def diagnose(m, past, kl_threshold, max_grad_norm):
    """(state, what is wrong and what to do) of a step with metrics `m` after the steps `past`."""
    rewards = [row["reward"] for row in past]
    falling = len(past) >= 40 and fmean(rewards[-20:]) < fmean(rewards[-40:-20]) - 0.05
    alike = m["frac_zero_std"] > 0.5 and m["reward"] < 0.8  # above it most questions are solved
    structure = m.get("structure", 1.0)
    for state, wrong, advice in (
        ("red", m["broken"], "an update left weights that are not finite: lower LR"),
        ("red", m["skipped"] > 0, "a loss or gradient was not finite and its update was skipped: lower LR"),
        ("red", m.get("kl", 0) > kl_threshold, "the policy is far from the reference: raise KL_COEF or lower LR"),
        ("red", m["hit_limit"] > 0.8, "most completions are cut off: raise the limit of new tokens"),
        ("red", structure < 0.2, "completions are malformed: lower LR, and look at the samples"),
        ("red", m["reward_max"] < 0, "every reward is negative: nothing can be learnt from this batch"),
        ("yellow", alike, "most groups have one reward only: raise TEMPERATURE or GROUP_SIZE"),
        ("yellow", m["grad_norm"] > 10 * max_grad_norm, "gradients are far above the clip: lower LR"),
        ("yellow", m["clip_low"] + m["clip_high"] > 0.3, "the clip stops much of the update: lower LR or EPOCHS"),
        ("yellow", m["hit_limit"] > 0.2, "many completions are cut off: raise the limit of new tokens"),
        ("yellow", structure < 0.8, "many completions are malformed: the reward will teach form first"),
        ("yellow", m["logprob_gap"] > 0.05, "sampling and training disagree: use DTYPE=float32"),
        ("yellow", falling, "the reward falls: lower LR or raise KL_COEF"),
    ):
        if wrong:
            return state, advice
    return "green", ""


def interval(values, counts=None):
    """The mean and the half-width of its 95 % interval.

    With `counts` it is the ratio of two sums, such as illegal moves over moves in some games. Its variance is that of
    the residuals values - ratio · counts (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    counts = [1] * len(values) if counts is None else counts
    ratio = sum(values) / sum(counts)
    variance = sum((v - ratio * c) ** 2 for v, c in zip(values, counts)) / max(1, len(values) - 1)
    return ratio, 1.96 * math.sqrt(variance * len(values)) / sum(counts)


def intervals(samples):
    """{"policy legal": interval, ...}: reward and metrics of each kind of question."""
    values = {}
    for sample in samples:
        for name, value in ({"reward": sample.grade.reward} | sample.grade.metrics).items():
            values.setdefault(f"{sample.question.kind} {name}", []).append(value)
    return {name: interval(v) for name, v in values.items()}


def earned(sample):
    """What each piece of the reward gives; "candidates 3" is one of several pieces of this name."""
    found = Counter()
    for name, value, *_ in sample.grade.pieces:
        found[name.split(" ")[0]] += value
    return found


def by_kind(samples):
    """Means of rewards, metrics and pieces ("earned/...") for each kind of question; and of structure, over all."""
    result = {name.replace(" ", "/", 1): mean for name, (mean, _) in intervals(samples).items()}
    count = Counter(sample.question.kind for sample in samples)
    for sample in samples:
        for name, value in earned(sample).items():
            name = f"{sample.question.kind}/earned/{name}"
            result[name] = result.get(name, 0.0) + value / count[sample.question.kind]
    structure = [sample.grade.metrics["structure"] for sample in samples if "structure" in sample.grade.metrics]
    return result | ({"structure": fmean(structure)} if structure else {})


def progress_line(m, steps, seconds_left):
    rewards = [f"{name.split('/')[0]} {value:.3f}" for name, value in m.items() if name.split("/")[1:] == ["reward"]]
    kl = f"kl {m['kl']:.4f} " if "kl" in m else ""
    state = f"● {m['state']}"
    if sys.stdout.isatty():
        state = {"green": "\033[32m", "yellow": "\033[33m", "red": "\033[31m"}[m["state"]] + state + "\033[0m"
    return (
        f"step {m['step']}/{steps} reward {m['reward']:.3f} ({', '.join(rewards)}) {kl}grad {m['grad_norm']:.2f} "
        f"clip {m['clip_low'] + m['clip_high']:.1%} zero-std {m['frac_zero_std']:.0%} "
        f"{m['tokens_per_second'] / 1000:.1f}k tok/s {timedelta(seconds=round(seconds_left))} left {state}"
        + (f" ({m['advice']})" if m["advice"] else "")
    )


def show(samples):
    """The worst and the best of some samples, each with what its reward is made of."""
    ordered = sorted(samples, key=lambda sample: sample.grade.reward)
    for sample in (ordered[0], ordered[-1]):
        pieces = " + ".join(f"{value:.2f} {name}" for name, value in earned(sample).items() if value)
        print(f"  {sample.question.prompt.strip()}\n  -> {sample.text.strip()}")
        print(f"     {sample.grade.reward:.3f} = {pieces}")


def table(columns):
    """{title: skill} side by side, one row for each name."""
    lines = [f"{'held-out skill':38}" + "".join(f"{title[-17:]:>18}" for title in columns)]
    for name in dict.fromkeys(name for skill in columns.values() for name in skill):
        cells = ["{:.3f} ± {:.3f}".format(*skill[name]) if name in skill else "" for skill in columns.values()]
        lines.append(f"{name:38}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def describe(command, device, dtype):
    """What was run, on what machine, from which commit; for run.json and for recorded figures."""
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=Path(__file__).parent, capture_output=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    cuda = torch.device(device).type == "cuda"
    given = [f"{name}={GIVEN['environment'][name]}" for name in SETTINGS if name in GIVEN["environment"]]
    return {
        "command": shlex.join([*command.split(), *given, *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": git.stdout.decode().strip() or "unknown",
        "machine": torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} cores of {cpu}",
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def open_log(out, step, about, kind, name):
    """Cuts the files of a run back to `step`; (the metrics of its steps so far, a function that writes the next)."""
    report = reporter(kind, name, out)
    past = rewind(out / "metrics.jsonl", step)
    rewind(out / "samples.jsonl", step)
    (out / "settings.json").write_text(json.dumps(values(), indent=2))
    (out / "run.json").write_text(json.dumps(about, indent=2))
    log = open(out / "metrics.jsonl", "a")

    def write(metrics):
        log.write(json.dumps(metrics) + "\n")
        log.flush()
        report({name: value for name, value in metrics.items() if isinstance(value, (int, float))}, metrics["step"])

    return past, write


def reporter(kind, name, folder):
    """A function of (metrics, step) that logs to wandb or tensorboard too, if that is asked for."""
    try:
        if kind == "wandb":
            import wandb

            return wandb.init(project="nanorook", name=name or None, dir=folder, config=values()).log
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(Path(folder, "tensorboard", name))
            return lambda metrics, step: [writer.add_scalar(key, value, step) for key, value in metrics.items()]
    except ImportError:
        refuse(f"REPORT_TO={kind} needs a package that is not installed: pip install {kind}.")
    return lambda metrics, step: None
