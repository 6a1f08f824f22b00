"""The same budget with one thing changed: what each choice of the default run is worth.

    python -m experiments.variants OUT [--steps 40] [--seeds 1] [--only NAME ...]

Each variant is a run of ./train.sh in OUT/NAME, compared with its start on 500 held-out positions by tools.evaluate;
what is there is not made again. The table shows what changed, in percentage points; OUT/variants.json has the figures,
OUT/variants.png those of DRAWN.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.seeds import about, run
from tools import replace

VARIANTS = {
    "default": {},
    # an answer is paid as a whole, and all weights learn; they want a smaller rate, and this one is a guess
    "plain-grpo": {"CREDIT": "answer", "TRAIN": "all", "LR": "1e-4"},
    # what holds it
    "no-price": {"ENTROPY_COEF": "0"},
    "no-kl": {"KL_COEF": "0", "LAST_GAINS_LR_FACTOR": "24"},  # nothing would hold gains that learn faster
    # the loss
    "grpo": {"LOSS": "grpo"},
    "dr-grpo": {"LOSS": "dr_grpo"},
    "cispo": {"LOSS": "cispo"},
    "gspo": {"LOSS": "gspo"},
    "std": {"SCALE_REWARDS": "group"},
    "epochs-2": {"EPOCHS": "2"},
    "epochs-4": {"EPOCHS": "4"},
    # what is sampled
    "temperature-0.7": {"TEMPERATURE": "0.7"},
    "temperature-1": {"TEMPERATURE": "1"},
    "groups-of-2": {"BATCH_POSITIONS": "64", "GROUP_SIZE": "2"},
    "groups-of-8": {"BATCH_POSITIONS": "16", "GROUP_SIZE": "8"},
    "policy-only": {"MIX_ENV_RATIO": "0"},
    "environment-only": {"MIX_ENV_RATIO": "1"},
}
RATES = {"LR": "3e-4", "GAINS_LR_FACTOR": "24", "LAST_GAINS_LR_FACTOR": "400"}  # the defaults when these runs were made
SHARE = {"epochs-2": 0.65, "epochs-4": 0.4}  # of the steps, as more updates take longer: the budget is time
ROWS = {
    "legal move": ("T=1", "policy", "legal"),
    "legal candidates": ("T=1", "policy", "candidates_legal"),
    "policy reward": ("T=1", "policy", "worth"),
    "next state": ("T=1", "environment", "next_state"),
    "environment reward": ("T=1", "environment", "worth"),
    "legal move, greedy": ("T=0", "policy", "legal"),
    "next state, greedy": ("T=0", "environment", "next_state"),
    "the same, illegal moves": ("T=0", "environment illegal", "next_state"),
    "error of evaluations, greedy (centipawns)": ("T=0", "policy", "eval_mae"),
}
DRAWN = "legal move", "next state", "legal move, greedy", "next state, greedy"
SAMPLE = "--temperature", "1", "--limit", "500", "--judged", "0", "--self-play", "0"  # whatever it was trained with


def cell(changes):
    """The mean change over the seeds, starred where it is more than noise in each of them."""
    mean = sum(mean for mean, _, _ in changes) / len(changes)
    return f"{100 * mean:+.1f}" + " *" * all(low > 0 or high < 0 for _, low, high in changes)


def draw(found, path):
    """A dot and its 95 % interval, in points, for each seed of each variant."""
    figure, axes = plt.subplots(1, len(DRAWN), figsize=(13, 1 + len(found) / 4), sharey=True, constrained_layout=True)
    for axis, row in zip(axes, DRAWN):
        for place, rows in enumerate(found.values()):
            for mean, low, high in rows[row]:
                axis.plot([100 * low, 100 * high], [place, place], color="C0")
                axis.plot(100 * mean, place, "o", color="C0")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(title=row, xlabel="change, points")
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(found)), found)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    a = p.parse_args()
    found, made = {}, {}
    for name in a.only:
        steps, folder = round(a.steps * SHARE.get(name, 1)), a.out.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"STEPS": str(steps), "EVAL_EVERY": "0", "EVAL_POSITIONS": "8", **RATES, **VARIANTS[name]}
        change = [run(folder, seed, settings, *SAMPLE)[0]["difference"] for seed in range(a.seeds)]
        found[name] = {row: [c[t][section][figure] for c in change] for row, (t, section, figure) in ROWS.items()}
        made[name] = {"settings": settings, "runs": [about(folder, seed) for seed in range(a.seeds)]}
        replace(a.out / "variants.json", json.dumps({"made": made, "found": found}, indent=1) + "\n")
    draw(found, a.out / "variants.png")
    print("| variant | " + " | ".join(ROWS) + " |\n| --- |" + " ---: |" * len(ROWS))
    for name, rows in found.items():
        print(f"| {name} | " + " | ".join(map(cell, rows.values())) + " |")


if __name__ == "__main__":
    main()
