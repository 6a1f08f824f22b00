"""The incident gallery: each failure that a run is protected from, really run next to the default, as one picture.

    python -m experiments.incidents OUT [--only NAME ...] [--steps N]          # about eight minutes of one core
    python -m experiments.incidents OUT --redraw experiments/incidents.json    # pictures and tables, nothing is run

Every run is train.main() in this process, with small batches. What no setting brings back is a patch of a few lines.
OUT gets incidents.json, which has all that the curves show, and NAME.png; the tables of docs/incidents.md are printed.
"""

import argparse
import contextlib
import functools
import io
import json
import math
import re
import tempfile
from pathlib import Path
from unittest import mock

import matplotlib
import torch
import torch.nn.functional as F

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

import checkpoint
import data
import grpo
import rewards
import skill
import train
from model import GPT
from monitor import describe
from tools.plots import short

SMALL = dict(BATCH_POSITIONS=8, GROUP_SIZE=4, MIX_ENV_RATIO=0.0, MAX_NEW_TOKENS=80, DTYPE="float32", SEED=0)
SMALL |= dict(TEMPERATURE=1.0, ENTROPY_COEF=-0.035, LR=3e-4, GAINS_LR_FACTOR=24.0, LAST_GAINS_LR_FACTOR=400.0)
SMALL |= dict(WARMUP_STEPS=0, LR_SCHEDULE="constant", EVAL_EVERY=0, EVAL_POSITIONS=1, SAVE_EVERY=1000)
FEW, SGD = dict(BATCH_POSITIONS=4), dict(BATCH_POSITIONS=4, LR=3e-3)
PLAIN = dict(CREDIT="answer", KL_COEF=0.0, ENTROPY_COEF=0.0)  # only the answers' rewards have a gradient
UNLIMITED = dict(MAX_GRAD_NORM=1e30, CLIP_RANGE=1.0, CLIP_RANGE_HIGH=1e30, KL_DIVERGENCE_THRESHOLD=1e30)

load, positions, build = GPT.load, functools.cache(data.load), train.build
grade, generate, policy_loss = rewards.grade, skill.generate, grpo.policy_loss

# ---------------------------------------------------------------------------------------------------------------------
# The old bugs


def far(logprobs, old_logprobs, *args, **kwargs):
    """The ratio is taken against weights that gave every token a hundred-thousandth of its chance."""
    return policy_loss(logprobs, old_logprobs - math.log(1e5), *args, **kwargs)


def sgd(model):
    """Without Adam, which divides a gradient by its own size."""
    return torch.optim.SGD([{"params": [p for p in model.parameters() if p.requires_grad], "factor": 1}], lr=train.LR)


def deaf(model, prompts, group_size, limit, temperature, top_k, top_p, eos, *chance):
    """The sampler watches for another end token than the model's, so every completion runs to its limit."""
    return generate(model, prompts, group_size, limit, temperature, top_k, top_p, -1, *chance)


def capped(prompt, completion, labels, truncated, **kwargs):
    """What hits its limit is worth 0.05 at most."""
    reward, parts = grade(prompt, completion, labels, truncated, **kwargs | {"runaway_multiplier": 1.0})
    return rewards.Grade(min(reward, 0.05) if truncated else reward, parts)


def cliff(*args, **kwargs):
    """1 for the engine's best move, -1 for anything else."""
    parts = grade(*args, **kwargs).parts
    return rewards.Grade(1.0 if parts.get("best") else -1.0, parts)


def blind(prompt, completion, labels, truncated, **kwargs):
    """A verifier that looks for an answer at the beginning of the text and does not see how, or whether, it ends."""
    found = re.match(r"M: .*? B: [a-h][1-8][a-h][1-8]", completion)
    reward = grade(prompt, found[0] if found else completion, labels, False).reward
    return rewards.Grade(reward, grade(prompt, completion, labels, truncated).parts)


def dropout():
    """GPT-2's 0.1 on what a layer adds, in the policy while it learns; its sampler and its reference have none."""
    model, reference, optimizer = build()
    for block in model.h:
        for layer in (block.attn.c_proj, block.mlp["c_proj"]):
            layer.register_forward_hook(lambda layer, x, y: F.dropout(y, 0.1))
    return model, reference, optimizer


def never_loaded(source):
    """The weights stay as they were initialised."""
    model = load(source)
    torch.manual_seed(0)
    model.load_state_dict(GPT(model.config).state_dict())
    return model


def noisy(source):
    """A poor start model: half as much noise as weight is added to every layer."""
    model = load(source)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.h.parameters():
            p.add_(torch.randn_like(p) * p.std(), alpha=0.5)
    return model


def reluctant(source):
    """A start model that ends an answer half of the time: its end token has a fifth of its logit."""
    model = load(source)
    with torch.no_grad():
        model.wte.weight[model.tokenizer.eos] *= 0.2
    return model


# ---------------------------------------------------------------------------------------------------------------------
# The gallery: name -> title, steps, what the panels show, and the runs: settings that differ from SMALL, and patches

FAR, SGD_STEP, DEAF = (grpo, "policy_loss", far), (train, "optimizer_for", sgd), (skill, "generate", deaf)
NOISY, RELUCTANT = (GPT, "load", noisy), (GPT, "load", reluctant)
INCIDENTS = {
    "explosion": ("Gradient explosion", 8, ("grad_norm", "reward", "kl"), {
        "no limits": (SGD | UNLIMITED, [FAR, SGD_STEP]),
        "no limits, AdamW": (FEW | UNLIMITED, [FAR]),
        "default limits": (SGD, [FAR, SGD_STEP]),
    }),
    "collapse": ("Zero-gradient collapse", 8, ("frac_zero_std", "grad_norm", "reward"), {
        "hard cap": (PLAIN, [DEAF, (skill, "grade", capped)]),
        "hard cap, CREDIT=word": (PLAIN | {"CREDIT": "word"}, [DEAF, (skill, "grade", capped)]),
        "default penalty": (PLAIN, [DEAF]),
    }),
    "cliff": ("Cliff rewards", 10, ("frac_zero_std", "grad_norm", "structure"), {
        "best move or nothing": (PLAIN, [NOISY, (skill, "grade", cliff)]),
        "default rewards": (PLAIN, [NOISY]),
    }),
    "dropout": ("KL explosion", 6, ("kl", "kl_sequence", "logprob_gap"), {
        "dropout 0.1": (FEW, [(train, "build", dropout)]),
        "default": (FEW, []),
    }),
    "random": ("Random weights", 6, ("reward", "structure", "frac_zero_std"), {
        "never loaded": (FEW, [(GPT, "load", never_loaded)]),
        "default": (FEW, []),
    }),
    "filibuster": ("Filibuster", 24, ("runaway", "length", "reward"), {
        "truncation not seen": (PLAIN, [RELUCTANT, (skill, "grade", blind)]),
        "default settings": ({}, [RELUCTANT]),
        "default penalty": (PLAIN, [RELUCTANT]),
    }),
}  # fmt: skip
LABELS = {
    "grad_norm": "gradient norm before clipping", "reward": "reward", "kl": "KL per token",
    "kl_sequence": "KL per completion", "frac_zero_std": "zero-variance share", "structure": "well-formed share",
    "runaway": "truncated share", "length": "length (tokens)", "logprob_gap": "sampling gap (nats a token)",
}  # fmt: skip


def run(steps, settings, patches):
    """(the metrics of each step, what the program had to say against it). A refusal is written down and overruled."""
    words, first_look, settings = [], train.first_look, SMALL | settings | {"STEPS": steps}

    def overruled(*args):
        try:
            first_look(*args)
        except SystemExit as refusal:
            words.append(f"refused: {refusal}")

    quiet = {"finish": lambda: None, "look": lambda *_: {}, "plot": lambda _: None, "write_report": lambda _: None}
    limits = {"TASKS": dict.fromkeys(train.TASKS, settings["MAX_NEW_TOKENS"])}
    patches = [*patches, (data, "load", positions), (checkpoint, "leave_after_this_step", list)]
    patches += [(checkpoint, "save", lambda *_: None), (GPT, "save", lambda *_: None)]  # nobody reads them
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        changes = settings | limits | quiet | {"first_look": overruled, "OUT_DIR": out}
        for patch in [*patches, *((train, *change) for change in changes.items())]:
            stack.enter_context(mock.patch.object(*patch))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                train.main()
        except SystemExit as end:
            words.append(f"stopped: {end}")
        return [json.loads(line) for line in open(f"{out}/metrics.jsonl")], words


def record(name, steps):
    """What incidents.json keeps of an incident."""
    title, usual, panels, runs = INCIDENTS[name]
    about = {"title": title, "shared": SMALL} | describe("python -m experiments.incidents", "cpu", torch.float32)
    about["command"] = f"python -m experiments.incidents OUT --only {name}"  # wherever OUT was
    found = {}
    for label, (settings, patches) in runs.items():
        rows, words = run(steps or usual, settings, patches)
        curves = {panel: [float(f"{row[panel]:.5g}") for row in rows] for panel in panels}
        bugs = {f"{where.__name__}.{what}": f"{bug.__name__}: {bug.__doc__}" for where, what, bug in patches}
        found[label] = {"settings": settings, "patches": bugs, "words": words, "curves": curves}
    return about | {"runs": found}


def draw(incident, path):
    panels = next(iter(incident["runs"].values()))["curves"]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.4), constrained_layout=True)
    for axis, panel in zip(axes, panels):
        curves = {label: run["curves"][panel] for label, run in incident["runs"].items()}
        for (label, curve), style in zip(curves.items(), ["C3-o", *["C1--s"] * (len(curves) - 2), "C0-o"]):
            axis.plot(range(1, len(curve) + 1), curve, style, markersize=3, label=label)
        values = [value for curve in curves.values() for value in curve]
        if min(values) > 0 and max(values) > 100 * min(values):
            axis.set_yscale("log")
        axis.set(title=LABELS[panel], xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(incident["title"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(incident):
    """The first step → the last, and the range of all where these are not its ends."""
    panels = next(iter(incident["runs"].values()))["curves"]
    lines = [f"| | {' | '.join(LABELS[panel] for panel in panels)} |", "| --- |" + " ---: |" * len(panels)]
    for label, run in incident["runs"].items():
        cells = []
        for curve in run["curves"].values():
            ends, extremes = {curve[0], curve[-1]}, {min(curve), max(curve)}
            between = "" if extremes == ends else f" ({short(min(curve))} to {short(max(curve))})"
            cells.append(f"{short(curve[0])} → {short(curve[-1])}{between}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser("python -m experiments.incidents", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--only", nargs="+", choices=INCIDENTS, default=list(INCIDENTS), metavar="NAME")
    p.add_argument("--steps", type=int, help="of every run, instead of each incident's own number")
    p.add_argument("--redraw", type=Path, metavar="FILE", help="an incidents.json: nothing is run")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    file = a.out / "incidents.json"
    if a.redraw and not a.redraw.is_file():
        p.error(f"{a.redraw} is not there; without --redraw the gallery is run.")
    known = a.redraw or file
    found = json.loads(known.read_text()) if known.exists() else {}
    for name in a.only:
        if not a.redraw:
            found[name] = record(name, a.steps)
            file.write_text(json.dumps(found, indent=1) + "\n")
        draw(found[name], a.out / f"{name}.png")
        print(f"{found[name]['title']}\n\n{table(found[name])}\n", flush=True)


if __name__ == "__main__":
    main()
