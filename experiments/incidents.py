"""The incident gallery: each failure that a run is protected from, really run next to the default, as one picture.

    python -m experiments.incidents OUT [--only NAME ...]              about eight minutes of one core

Every run is train.main() in this process, with the embedded model and small batches. What no setting brings back is a
patch of a few lines. OUT gets NAME.png and incidents.json, which has all that the curves show.
"""

import argparse
import dataclasses
import functools
import math
import re
from pathlib import Path

import torch
import torch.nn.functional as F

import grpo
import rewards
import rollout
import train
from experiments import seeds
from experiments.variants import run_here
from model import GPT
from nanorook import monitor

SMALL = dict(BATCH_POSITIONS=8, GROUP_SIZE=4, LR=1e-4, WARMUP_STEPS=0, LR_SCHEDULE="constant", DTYPE="float32")
SMALL |= dict(EVAL_EVERY=0, SAVE_EVERY=1000)
SHORT = [
    (rewards, "MIX_ENV_RATIO", 0.0),
    (rewards, "MIX_FIRST_RATIO", 0.0),
    (rewards, "LIMITS", {"policy": 80, "environment": 80}),
]
SHORT += [(train, "evaluate", lambda *_: {})]
PLAIN = dict(CREDIT="answer", KL_COEF=0.0)  # rewards of whole answers are all that has a gradient
SGD = dict(LR=3e-3)
UNLIMITED = dict(MAX_GRAD_NORM=1e30, CLIP_RANGE=1.0, CLIP_RANGE_HIGH=1e30, KL_DIVERGENCE_THRESHOLD=1e30)

load, grade, generate, policy_loss = GPT.load, rewards.grade, rollout.generate, grpo.policy_loss
items = functools.cache(lambda source, load=rewards.load: load(source, None))  # read once for all runs

# ---- The old bugs ------------------------------------------------------------------------------------------


def far(logprobs, old_logprobs, *args, **kwargs):
    """The ratio is taken against weights that gave every token a hundred-thousandth of its chance."""
    return policy_loss(logprobs, old_logprobs - math.log(1e5), *args, **kwargs)


def sgd(model):
    """Without Adam, which divides a gradient by its own size."""
    return torch.optim.SGD(model.parameters(), lr=train.LR)


def endless(model, *args):
    """The sampler watches for another end token than the model's, so every completion runs to its limit."""
    model.config = dataclasses.replace(model.config, eos_token_id=-1)  # of the sampler alone
    return generate(model, *args)


def capped(question, text, hit_limit):
    """What hits its limit is worth 0.05 at most."""
    found = grade(question, text)
    return found._replace(pieces=(("capped", min(found.reward, 0.05)),)) if hit_limit else found


def cliff(*args):
    """1 for the engine's best move, -1 for anything else."""
    found = grade(*args)
    return found._replace(pieces=(("best", 1.0 if found.metrics.get("best") else -1.0),))


def blind(question, text, hit_limit):
    """A verifier that looks for an answer at the beginning of the text and does not see how, or whether, it ends."""
    answer = re.match(r"M: .*? B: [a-h][1-8][a-h][1-8]", text)
    return grade(question, answer[0] if answer else text)


def dropout(source):
    """GPT-2's 0.1 on what a layer adds, in the policy while it learns; its sampler and its reference have none."""
    model = load(source)
    for block in model.h:
        for layer in (block.attn.c_proj, block.mlp["c_proj"]):
            layer.register_forward_hook(lambda layer, x, y: F.dropout(y, 0.1))
    return model


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
    """A start model that often misses the end of its answer: its end token has a fifth of its logit."""
    model = load(source)
    with torch.no_grad():
        model.wte.weight[model.tokenizer.eos] *= 0.2
    return model


# The gallery: name -> title, steps, what the panels show, and the runs: settings that differ from SMALL, and patches.
# The first run fails, the last one is the default.

FAR, PLAIN_SGD, ENDLESS = (grpo, "policy_loss", far), (train, "make_optimizer", sgd), (rollout, "generate", endless)
CAPPED, CLIFF, BLIND = ((rewards, "grade", bug) for bug in (capped, cliff, blind))
DROPOUT, NEVER_LOADED, NOISY, RELUCTANT = ((GPT, "load", bug) for bug in (dropout, never_loaded, noisy, reluctant))
INCIDENTS = {
    "explosion": ("Gradient explosion", 8, ("grad_norm", "reward", "kl"), {
        "no limits": (SGD | UNLIMITED, [FAR, PLAIN_SGD]),
        "no limits, AdamW": (UNLIMITED, [FAR]),
        "default limits": (SGD, [FAR, PLAIN_SGD]),
    }),
    "collapse": ("Zero-gradient collapse", 8, ("frac_zero_std", "grad_norm", "reward"), {
        "hard cap": (PLAIN, [ENDLESS, CAPPED]),
        "default penalty": (PLAIN, [ENDLESS]),
    }),
    "cliff": ("Cliff rewards", 10, ("frac_zero_std", "grad_norm", "structure"), {
        "best move or nothing": (PLAIN, [NOISY, CLIFF]),
        "default rewards": (PLAIN, [NOISY]),
    }),
    "dropout": ("KL explosion", 6, ("kl", "logprob_gap", "reward"), {
        "dropout 0.1": ({}, [DROPOUT]),
        "default": ({}, []),
    }),
    "random": ("Random weights", 6, ("reward", "structure", "frac_zero_std"), {
        "never loaded": ({}, [NEVER_LOADED]),
        "default": ({}, []),
    }),
    "filibuster": ("Filibuster", 24, ("hit_limit", "length", "reward"), {
        "truncation not seen": (PLAIN, [RELUCTANT, BLIND]),
        "default settings": ({}, [RELUCTANT]),
        "default penalty": (PLAIN, [RELUCTANT]),
    }),
}  # fmt: skip


def run(steps, settings, patches):
    """(the metrics of each step, what the program said against it). Its refusals to start are overruled."""
    words = []

    def overruled(message):
        words.append(message)
        if message.startswith("the run failed"):
            raise SystemExit(message)

    patches = [*SHORT, *patches, (train, "refuse", overruled), (rewards, "load", lambda source, config: items(source))]
    return run_here(rewards, SMALL | settings | {"STEPS": steps}, patches)[0], words


def record(name):
    """What incidents.json keeps of an incident."""
    title, steps, panels, runs = INCIDENTS[name]
    found = {}
    for label, (settings, patches) in runs.items():
        rows, words = run(steps, settings, patches)
        curves = {panel: [float(f"{row.get(panel, math.nan):.5g}") for row in rows] for panel in panels}
        bugs = [f"{bug.__name__}: {bug.__doc__}" for *_, bug in patches]
        found[label] = {"settings": settings, "patches": bugs, "words": words, "curves": curves}
    return {"title": title, "shared": SMALL, "runs": found}


def draw(incident, path):
    panels = next(iter(incident["runs"].values()))["curves"]
    figure, axes = seeds.pyplot().subplots(1, len(panels), figsize=(12, 3.4), constrained_layout=True)
    for axis, panel in zip(axes, panels):
        curves = {label: run["curves"][panel] for label, run in incident["runs"].items()}
        for (label, curve), style in zip(curves.items(), ["C3-o", *["C1--s"] * (len(curves) - 2), "C0-o"]):
            axis.plot(range(1, len(curve) + 1), curve, style, markersize=3, label=label)
        values = [value for curve in curves.values() for value in curve]
        if min(values) > 0 and max(values) > 100 * min(values):
            axis.set_yscale("log")
        axis.set(title=panel, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(incident["title"])
    figure.savefig(path, dpi=110)
    seeds.pyplot().close(figure)


def main():
    p = argparse.ArgumentParser("python -m experiments.incidents", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--only", nargs="+", choices=INCIDENTS, default=list(INCIDENTS), metavar="NAME")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    found = {"about": monitor.describe("python -m experiments.incidents", "cpu", torch.float32)}
    for name in a.only:
        found[name] = record(name)
        seeds.record(a.out / "incidents.json", found)
        draw(found[name], a.out / f"{name}.png")


if __name__ == "__main__":
    main()
