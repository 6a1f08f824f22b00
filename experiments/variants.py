"""The same budget with one thing changed: what each choice of the default run is worth.

python -m experiments.variants OUT [--steps 60] [--seeds 1] [--only NAME ...]

Each variant is a run of ./train.sh in OUT/NAME-SEED; a run that is there is not made again. The table compares held-out
skill after the run with that before it, over the seeds; OUT/variants.json has the figures.
"""

import argparse
import json
from pathlib import Path

from experiments.seeds import train

VARIANTS = {  # the learning rates are the best found for each
    "default": {},
    "answer": {"CREDIT": "answer"},
    "all-weights": {"TRAIN": "all", "LR": "2e-4"},
    "plain-grpo": {"CREDIT": "answer", "TRAIN": "all", "LR": "2e-4"},
    "groups-of-8": {"BATCH_POSITIONS": "16", "GROUP_SIZE": "8"},
    "slow-gains": {"GAINS_LR_FACTOR": "1", "LAST_GAINS_LR_FACTOR": "1"},
    "no-price": {"ENTROPY_COEF": "0"},
    "no-kl": {"KL_COEF": "0"},
}
ROWS = {
    "legal move": "policy legal T=1",
    "legal candidates": "policy candidates_legal T=1",
    "policy reward": "policy reward T=1",
    "next state": "environment next_state T=1",
    "environment reward": "environment reward T=1",
    "legal move, greedy": "policy legal T=0",
}


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    a = p.parse_args()
    found = {}
    for name in a.only:
        for seed in range(a.seeds):
            folder = a.out.resolve() / f"{name}-{seed}"
            train(folder, seed, {"STEPS": str(a.steps), "EVAL_EVERY": "0", "EVAL_POSITIONS": "512", **VARIANTS[name]})
            skill = json.loads((folder / "skill.json").read_text())
            for row, key in ROWS.items():
                (before, _), (after, half) = skill["before"][key], skill["after"][key]
                found.setdefault(name, {}).setdefault(row, []).append((before, after, half))
    (a.out / "variants.json").write_text(json.dumps({"steps": a.steps, "seeds": a.seeds, "found": found}, indent=2))
    print("| variant | " + " | ".join(ROWS) + " |\n| --- |" + " ---: |" * len(ROWS))
    for name, rows in found.items():
        gains = [sum(after - before for before, after, _ in seeds) / len(seeds) for seeds in rows.values()]
        print(f"| {name} | " + " | ".join(f"{gain:+.3f}" for gain in gains) + " |")


if __name__ == "__main__":
    main()
