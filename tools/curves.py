"""The curves of a run as one picture: python -m tools.curves OUT_DIR writes OUT_DIR/curves.png from metrics.jsonl."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

from tools.plots import points_of, smooth

PANELS = (
    ("reward", ("reward", "P/legal", "P/best", "A/next_state")),
    ("KL per token to the reference", ("kl",)),
    ("gradient norm before clipping", ("grad_norm",)),
    ("entropy per token (nats)", ("entropy",)),
    ("shares", ("frac_zero_std", "clip_low", "clip_high", "runaway")),
    ("completion length (tokens)", ("length",)),
)


def plot(folder):
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, PANELS):
        for name in names:
            points = points_of(rows, name)
            if points:
                (line,) = axis.plot(*zip(*smooth(points)), label=name)
                axis.plot(*zip(*points), color=line.get_color(), alpha=0.2, linewidth=0.7)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend()
    figure.savefig(Path(folder, "curves.png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "metrics.jsonl").is_file():
        sys.exit("usage: python -m tools.curves OUT_DIR, the folder of a run with its metrics.jsonl")
    plot(sys.argv[1])
