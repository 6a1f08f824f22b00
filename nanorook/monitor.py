"""What a run says about itself: its state and what to do about it, the progress line, tables, logs."""

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

import torch

from nanorook.run import rewind
from nanorook.settings import GIVEN, SETTINGS, values
from nanorook.task import as_sum, earned


def diagnose(m, past, kl_threshold, max_grad_norm):
    """The state of a step with metrics `m` after the steps `past`: what is wrong, and what to do."""
    structure, malformed = worst(m, "structure", min)
    cut_off, too_long = worst(m, "hit_limit", max)
    highest, unpaid = worst(m, "reward_max", min)
    unsolved = {name: value for name, value in m.items() if m.get(f"{name.split('/')[0]}/reward", 1) < 0.8}
    alike, same = worst(unsolved, "frac_zero_std", max)
    fall, falling = worst({k: how_far_it_fell(past, k) for k in m if k.endswith("/reward")}, "reward", max)
    for state, wrong, advice in (
        ("red", m["broken"], "an update left weights that are not finite: lower LR"),
        ("red", m["skipped"] > 0, "a loss or gradient was not finite and its update was skipped: lower LR"),
        ("red", m.get("kl", 0) > kl_threshold, "the policy is far from the reference: raise KL_COEF or lower LR"),
        ("red", cut_off > 0.8, f"most {too_long} answers are cut off: raise their limit of new tokens"),
        ("red", structure < 0.2, f"most {malformed} answers are malformed: lower LR, and look at the samples"),
        ("red", highest < 0, f"every {unpaid} reward is negative: nothing can be learnt from these answers"),
        ("yellow", alike > 0.5, f"most {same} groups have one reward only: raise TEMPERATURE or GROUP_SIZE"),
        ("yellow", m["grad_norm"] > 10 * max_grad_norm, "gradients are far above the clip: lower LR"),
        ("yellow", m["clip_low"] + m["clip_high"] > 0.3, "the clip stops much of the update: lower LR or EPOCHS"),
        ("yellow", cut_off > 0.2, f"many {too_long} answers are cut off: raise their limit of new tokens"),
        ("yellow", structure < 0.8, f"many {malformed} answers are malformed: the reward will teach form first"),
        ("yellow", m["logprob_gap"] > 0.05, "sampling and training disagree: use DTYPE=float32"),
        ("yellow", fall > 0.05, f"the {falling} reward falls: lower LR or raise KL_COEF"),
    ):
        if wrong:
            return {"state": state, "advice": advice}
    return {"state": "green", "advice": ""}


def worst(m, name, pick):
    """(value, kind) of a metric where it is worst, by `pick` min or max: a mean over kinds would hide a broken kind.
    Where no kind has the metric the value is NaN, of which no comparison is true."""
    kinds = ((value, key.split("/")[0]) for key, value in m.items() if key.split("/")[1:] == [name])
    return pick(kinds, default=(math.nan, ""))


def how_far_it_fell(past, name):
    """A metric's mean over the last 20 steps against the 20 before, as far as chance does not explain it."""
    older, newer = ([row[name] for row in part if name in row] for part in (past[-40:-20], past[-20:]))
    if len(past) < 40 or not older or not newer:
        return 0.0
    (before, half), (after, other_half) = interval(older), interval(newer)
    return before - after if before - after > half + other_half else 0.0


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # half-widths of 95 % for 2, 3, ... values


def interval(values, counts=None):
    """The mean and the half-width of its 95 % interval by Student's distribution, infinite where there is one value.
    With `counts` it is the ratio of two sums, such as illegal moves over moves; a count of 0 is no value. Its
    variance is that of values - ratio · counts (Cochran, Sampling Techniques, 1977, chapter 6)."""
    counts = [1] * len(values) if counts is None else counts
    ratio, n = sum(values) / sum(counts), sum(count > 0 for count in counts)
    if n == 1:
        return ratio, math.inf
    variance = sum((v - ratio * c) ** 2 for v, c in zip(values, counts)) / (n - 1)
    factor = STUDENT[n - 2] if n < 11 else 1.96 + 2.5 / (n - 1)
    return ratio, factor * math.sqrt(variance * n) / sum(counts)


def with_interval(mean, half, form=".3f"):
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}" if half < math.inf else f"{mean:{form}}"


def figures(answers):
    """{"policy legal": [its value in each answer], ...}: reward and metrics of each kind of question."""
    values = {}
    for answer in answers:
        for name, value in ({"reward": answer.grade.reward} | answer.grade.metrics).items():
            values.setdefault(f"{answer.question.kind} {name}", []).append(value)
    return values


def intervals(answers):
    return {name: interval(values) for name, values in figures(answers).items()}


def describe_answers(answers, group_size):
    """The metrics of all the answers of a step, of which those of a group lie next to each other: over all kinds
    ("reward"), of each ("policy/reward", "policy/legal"), and what pieces of the reward gave: "policy/earned/legal"."""
    result = describe_rewards(answers, group_size) | {"reward_std": stdev(answer.grade.reward for answer in answers)}
    for kind in dict.fromkeys(answer.question.kind for answer in answers):
        some = [answer for answer in answers if answer.question.kind == kind]
        result |= {f"{kind}/{name}": value for name, value in describe_rewards(some, group_size).items()}
        pieces = earned(piece for answer in some for piece in answer.grade.pieces)
        result |= {f"{kind}/earned/{name}": value / len(some) for name, value in pieces.items()}
    return result | {name.replace(" ", "/"): fmean(values) for name, values in figures(answers).items()}


def describe_rewards(answers, group_size):
    rewards = [answer.grade.reward for answer in answers]
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    return {
        "reward": fmean(rewards),
        "reward_max": max(rewards),
        "frac_zero_std": fmean(max(group) - min(group) <= 1e-6 for group in groups),
        "hit_limit": fmean(answer.hit_limit for answer in answers),
    }


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


def show(answers):
    """The worst and the best of some answers, each with what its reward is made of."""
    ordered = sorted(answers, key=lambda answer: answer.grade.reward)
    for which, answer in (("worst", ordered[0]), ("best", ordered[-1])):
        prompt, text = printable(answer.question.prompt.strip()), printable(answer.text.strip())
        print(f"  {which} of {len(ordered)}: {prompt}\n  -> {text}")
        print(f"     {answer.grade.reward:.4g} = {as_sum(answer.grade.pieces) or 0}")


def table(columns):
    """{title: skill} side by side, one row for each name."""
    lines = [f"{'held-out skill':38}" + "".join(f"{title[-17:]:>18}" for title in columns)]
    for name in dict.fromkeys(name for skill in columns.values() for name in skill):
        cells = [with_interval(*skill[name]) if name in skill else "" for skill in columns.values()]
        lines.append(f"{name:38}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


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


def open_log(run, model):
    """Cuts the files of a run back to where it stands; the metrics of its steps so far."""
    step = run.step if run.skill else -1
    evaluated = {"after", f"step {step}"} & run.skill.keys()  # else it was killed while this evaluation was written
    about = describe("./train.sh", model.wte.weight.device, model.dtype)
    (run.out / "settings.json").write_text(json.dumps(values(), indent=2))
    (run.out / "run.json").write_text(json.dumps(about, indent=2))
    rewind(run.out / "samples.jsonl", step if evaluated else step - 1)
    return rewind(run.out / "metrics.jsonl", step, "seconds")
