"""What a run says of itself: its state with what to do about it, the progress line, sample completions."""

import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

import grpo
from checkpoint import rewind
from parallel import RANK
from settings import values
from skill import mean_parts


def diagnose(m, past, kl_threshold, max_grad_norm):
    """(state, what is the matter and what to do) of a step with metrics `m` after the steps `past`."""
    falling = len(past) >= 40 and mean(past[-20:], "reward") < mean(past[-40:-20], "reward") - 0.05
    for state, wrong, advice in (
        ("red", m["broken"], "an update has left weights that are not finite: lower LR"),
        ("red", m["skipped"] > 0, "a loss or gradient was not finite and its update was skipped: lower LR"),
        ("red", m.get("kl", 0) > kl_threshold, "the policy has left the reference: raise KL_COEF or lower LR"),
        ("red", m["runaway"] > 0.8, "most completions are cut off at their limit: raise MAX_NEW_TOKENS"),
        ("red", m["structure"] < 0.2, "completions are malformed: lower LR, and look at the samples"),
        ("red", m["reward_max"] < 0, "every reward is negative: nothing can be learnt from this batch"),
        ("yellow", m["frac_zero_std"] > 0.5, "most groups have one reward only: raise TEMPERATURE or GROUP_SIZE"),
        ("yellow", m["grad_norm"] > 10 * max_grad_norm, "gradients are far above the clip: lower LR"),
        ("yellow", m["clip_low"] + m["clip_high"] > 0.3, "the clip stops much of the update: lower LR or EPOCHS"),
        ("yellow", m["runaway"] > 0.2, "many completions hit their limit: raise MAX_NEW_TOKENS"),
        ("yellow", m["structure"] < 0.8, "many completions are malformed: the reward will teach form first"),
        ("yellow", m["logprob_gap"] > 0.05, "sampling and training disagree: use DTYPE=float32"),
        ("yellow", falling, "the reward falls: lower LR or raise KL_COEF"),
    ):
        if wrong:
            return state, advice
    return "green", ""


def measured(rewards, group_size, losses, norms, seen, stats):
    """The numbers of an update; `seen` sums tokens, sampling gap, entropy and KL over the batch."""
    tokens, gap, entropy, kl = seen.tolist()
    return {
        "loss": losses.mean().item(),
        "grad_norm": max(norms, key=lambda norm: (math.isnan(norm), norm)),
        "frac_zero_std": grpo.zero_variance(rewards, group_size).float().mean().item(),
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "reward_max": rewards.max().item(),
        "entropy": entropy / tokens,
        "logprob_gap": gap / tokens,
        "kl": kl / tokens,
        "kl_sequence": kl / len(rewards),
        "length": tokens / len(rewards),
        "tokens": tokens,
        "ratio_mean": stats["ratio_sum"] / stats["tokens"],
        "ratio_min": stats["ratio_min"],
        "ratio_max": stats["ratio_max"],
        "clip_low": stats["clip_low"] / stats["tokens"],
        "clip_high": stats["clip_high"] / stats["tokens"],
    }


def parts_by_task(graded):
    """The mean of each part of the grades in (prompt, text, grade), as P/legal or A/next_state; two for both tasks."""
    result = {}
    for task in ("P", "A"):
        grades = [grade for prompt, _, grade in graded if prompt.startswith(task)]
        values = mean_parts(grades) | ({"reward": mean([g._asdict() for g in grades], "reward")} if grades else {})
        result |= {f"{task}/{name}": value for name, value in values.items()}
    both = mean_parts([grade for _, _, grade in graded])
    return result | {name: both[name] for name in ("structure", "runaway")}


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def progress_line(m, steps, seconds_left):
    legal = f"legal {m['P/legal']:.0%} " if "P/legal" in m else ""
    kl = f"kl {m['kl']:.4f} " if "kl" in m else ""
    state = f"● {m['state']}"
    if sys.stdout.isatty():
        state = {"green": "\033[32m", "yellow": "\033[33m", "red": "\033[31m"}[m["state"]] + state + "\033[0m"
    return (
        f"step {m['step']}/{steps} reward {m['reward']:.3f} {legal}{kl}grad {m['grad_norm']:.2f} "
        f"clip {m['clip_low'] + m['clip_high']:.1%} zero-std {m['frac_zero_std']:.0%} "
        f"{m['tokens_per_second'] / 1000:.1f}k tok/s eta {seconds_left / 60:.0f}m {state}"
        + (f" ({m['advice']})" if m["advice"] else "")
    )


def show(samples):
    """The worst and the best of some (prompt, completion, grade), each with what it was paid for."""
    ordered = sorted(samples, key=lambda sample: sample[2].reward)
    for prompt, text, g in (ordered[0], ordered[-1]):
        paid = " ".join(f"{n.removeprefix('earned/')} {v:.2f}" for n, v in g.parts.items() if "earned" in n and v)
        print(f"  {prompt.strip()}\n  -> {text.strip()}\n     {g.reward:.3f} = {paid}")


def peak_memory(device):
    """In GB: of the GPU, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in KB


def describe(command, device, dtype):
    """What was run, on what, from what; for run.json and the like."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True)
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "command": shlex.join([*command.split(), *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": git.stdout.decode().strip() or "unknown",
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores of {cpu}",
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def begin(out, state, device, dtype, kind, name):
    """The files of a run, cut back to where it stands: (its steps so far, a function that writes the next one)."""
    if RANK:
        return [], lambda metrics: None
    report = reporter(kind, name, out, values())
    past = rewind(out / "metrics.jsonl", state["step"])
    rewind(out / "samples.jsonl", state["step"] if state["skill"] else -1)
    (out / "settings.json").write_text(json.dumps(values(), indent=2))
    (out / "run.json").write_text(json.dumps(describe("./train.sh", device, dtype), indent=2))
    log = open(out / "metrics.jsonl", "a")

    def write(metrics):
        log.write(json.dumps(metrics) + "\n")
        log.flush()
        report({name: value for name, value in metrics.items() if isinstance(value, (int, float))}, metrics["step"])

    return past, write


def reporter(kind, name, folder, settings):
    """A function of (metrics, step) that also logs to wandb or tensorboard, whichever is asked for."""
    try:
        if kind == "wandb":
            import wandb

            return wandb.init(project="nanorook", name=name or None, dir=folder, config=settings).log
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(Path(folder, "tensorboard", name))
            return lambda metrics, step: [writer.add_scalar(key, value, step) for key, value in metrics.items()]
    except ImportError:
        sys.exit(f"error: REPORT_TO={kind} needs a package that is not there: pip install {kind}.")
    return lambda metrics, step: None
