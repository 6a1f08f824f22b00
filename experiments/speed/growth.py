"""Draws how cost grows: python -m experiments.speed.growth bench.json docs/growth.png (the JSON is tools.bench's)."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

if len(sys.argv) != 3:
    sys.exit("usage: python -m experiments.speed.growth bench.json plot.png")
rows = json.loads(Path(sys.argv[1]).read_text()).get("growth")
if not rows:
    sys.exit(f"error: {sys.argv[1]} has no growth; make it with python -m tools.bench growth --json {sys.argv[1]}.")
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
for axis, (what, title) in zip(axes, {"group": "G, group", "prompts": "B, prompts", "new": "T, new tokens"}.items()):
    chosen = [row for row in rows if row["what"] == what]
    values = [row["value"] for row in chosen]
    for half in ("rollout", "update"):
        axis.plot(values, [row[half] for row in chosen], "o-", label=half)
    whole = chosen[-1]["rollout"] + chosen[-1]["update"]
    predicted = [whole * row["gflop"] / chosen[-1]["gflop"] for row in chosen]
    axis.plot(values, [row["rollout"] + row["update"] for row in chosen], "o-", label="both")
    axis.plot(values, predicted, "k--", linewidth=1, label="both, if FLOPs alone decided (scaled to the last point)")
    axis.set(xscale="log", ylim=(0, None), xlabel=title)
    axis.set_xticks(values, map(str, values))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set_ylabel("ms for a completion")
axes[0].legend(fontsize=7)
figure.savefig(sys.argv[2], dpi=110)
