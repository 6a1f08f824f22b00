"""The same run on several seeds: what it changes on held-out positions, and its curves.

    python -m experiments.seeds OUT                        # the default run, seeds 0, 1 and 2: about an hour on 2 cores
    python -m experiments.seeds OUT --seeds 5 LR=3e-4      # other settings than the defaults

Each seed is a run of ./train.sh in OUT/seed-N, compared with its start by tools.evaluate; what is there is not made
again. OUT/seeds.json has the figures, OUT/seeds.png the curves. The interval is that of the mean over the seeds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

from tools import replace
from tools.evaluate import PLAIN
from tools.plots import points_of, smooth

ROOT = Path(__file__).parent.parent
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # 95 %, for n seeds
SECTIONS = "policy", "environment", "self-play"
CURVES = {"P/legal": "legal best move", "A/next_state": "exact next state", "reward": "reward"}


def train(folder, seed, settings):
    """A run of ./train.sh in `folder`, unless it is there."""
    env = {**os.environ, **settings, "SEED": str(seed), "OUT_DIR": str(folder), "PYTHON": sys.executable}
    if not (folder / "model").exists():
        subprocess.run(["./train.sh"], cwd=ROOT, env=env, check=True)


def run(out, seed, settings, *options):
    """(the figures of tools.evaluate before and after, the metrics of every step)."""
    folder, figures = out / f"seed-{seed}", out / f"seed-{seed}.json"
    train(folder, seed, settings)
    if not figures.exists():
        start = settings.get("MODEL", "weights/tiny")
        temperature = json.loads((folder / "settings.json").read_text())["TEMPERATURE"]  # what it was trained at
        options = "--temperature", str(temperature), "--json", str(figures), *options
        command = ["-m", "tools.evaluate", start, str(folder / "model"), *options]
        with open(out / f"seed-{seed}.md", "w") as tables:
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=tables)
    return json.loads(figures.read_text()), [json.loads(line) for line in open(folder / "metrics.jsonl")]


def about(out, seed):
    """Where a run was made, and from what."""
    known = json.loads((out / f"seed-{seed}" / "run.json").read_text())
    return {name: known[name] for name in ("started", "commit", "machine", "versions")}


def summary(results):
    """{temperature: {"section name": (before, gain of each seed, mean gain, half-width, seeds beyond noise)}}."""
    found = {}
    for temperature, sections in results[0]["difference"].items():
        rows = found[temperature] = {}
        for section in SECTIONS:
            for name, first in sections[section].items():
                changes = [result["difference"][temperature][section][name] for result in results]
                if first is None or None in changes:
                    continue
                before = next(iter(results[0]["models"].values()))[temperature][section][name][0]
                gains = [mean for mean, _, _ in changes]
                half = STUDENT[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5
                sure = sum(low > 0 or high < 0 for _, low, high in changes)
                rows[f"{section} {name}"] = before, gains, statistics.fmean(gains), half, sure
    return found


def table(rows):
    count = len(next(iter(rows.values()))[1])
    lines = [f"| | before | {' | '.join(f'seed {i}' for i in range(count))} | mean | seeds beyond noise |"]
    lines += ["| --- |" + " ---: |" * (count + 3)]
    for name, (before, gains, mean, half, sure) in rows.items():
        scale, form = (1, ".2f") if name.split()[-1] in PLAIN else (100, ".1f")
        cells = [f"{scale * before:{form}}", *(f"{scale * gain:+{form}}" for gain in gains)]
        lines.append(f"| {name} | {' | '.join(cells)} | {scale * mean:+{form}} ± {scale * half:{form}} | {sure} |")
    return "\n".join(lines)


def draw(runs, path):
    """Mean over the seeds, and the band from the lowest to the highest."""
    figure, axes = plt.subplots(1, len(CURVES), figsize=(12, 3.6), constrained_layout=True)
    for axis, (name, title) in zip(axes, CURVES.items()):
        curves = [smooth(points_of(rows, name)) for rows in runs]
        lines, steps = [[value for _, value in curve] for curve in curves], [step for step, _ in curves[0]]
        axis.fill_between(steps, [min(x) for x in zip(*lines)], [max(x) for x in zip(*lines)], alpha=0.25)
        axis.plot(steps, [statistics.fmean(x) for x in zip(*lines)])
        axis.set(title=f"{title}, means over ten steps", xlabel="step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser("python -m experiments.seeds", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--seeds", type=int, default=3, choices=STUDENT)
    p.add_argument("settings", nargs="*", metavar="NAME=value")
    a = p.parse_intermixed_args()
    out, settings = a.out.resolve(), dict(setting.split("=", 1) for setting in a.settings)
    out.mkdir(parents=True, exist_ok=True)
    results, runs = zip(*(run(out, seed, settings) for seed in range(a.seeds)))
    found, made = summary(results), [about(out, seed) for seed in range(a.seeds)]
    replace(out / "seeds.json", json.dumps({"settings": settings, "runs": made, "found": found}, indent=1) + "\n")
    draw(runs, out / "seeds.png")
    for temperature, rows in found.items():
        print(f"{'greedy' if temperature == 'T=0' else temperature}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
