"""What each choice is worth: examples/letters.py with one thing changed, a few seeds each.

    python -m experiments.variants [FILE.json] [--seeds 5] [--only NAME ...]            about 15 minutes of one core

Every run is train.main() in this process: 30 steps, in which the default gets most of the way. Runs that the file has
are not made again. The table for docs/choices.md is printed.
"""

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch

import train
from examples import letters
from experiments.seeds import STUDENT, read, with_interval, write
from nanorook import checkpoint, monitor

SHARED = letters.DEFAULTS | {"STEPS": 30}
FAST = {"LR": 3e-3}  # large steps, so that there is something to clip
FAR = {"KL_DIVERGENCE_THRESHOLD": 100.0}  # what is learnt here is far from the start, and no run shall go back
VARIANTS = {
    "default": {},
    **{f"LOSS={loss}": {"LOSS": loss} for loss in ("grpo", "dr_grpo", "cispo", "gspo")},
    "CREDIT=answer": {"CREDIT": "answer"},
    **{f"SCALE_REWARDS={scale}": {"SCALE_REWARDS": scale} for scale in ("group", "batch")},
    **{f"EPOCHS={epochs}": {"EPOCHS": epochs} for epochs in (2, 4, 8)},
    **{
        f"EPOCHS=8 LR=3e-3 LOSS={loss}": {"EPOCHS": 8, "LOSS": loss} | FAST
        for loss in ("dapo", "grpo", "dr_grpo", "cispo", "gspo")
    },
    "EPOCHS=8 LR=3e-3 CLIP_RANGE_HIGH=0.2": {"EPOCHS": 8, "CLIP_RANGE_HIGH": 0.2} | FAST,
    "EPOCHS=8 LR=3e-3 no clip": {"EPOCHS": 8, "CLIP_RANGE": 1.0, "CLIP_RANGE_HIGH": 1e9} | FAST,
    **{
        f"KL_COEF={coef:g} KL_ESTIMATOR={kind}": {"KL_COEF": coef, "KL_ESTIMATOR": kind} | FAR
        for coef in (0.01, 0.1)
        for kind in ("k1", "k2", "k3")
    },
    **{
        f"{prompts} × {group}": {"BATCH_POSITIONS": prompts, "GROUP_SIZE": group}
        for prompts, group in ((64, 2), (32, 4), (8, 16), (4, 32))
    },
    **{f"TEMPERATURE={t:g}": {"TEMPERATURE": t} for t in (0.5, 0.7, 1.3)},
    **{f"LR={lr:g}": {"LR": lr} for lr in (1e-4, 3e-4, 3e-3, 1e-2)},
}
COLUMNS = {  # of the table, in percent but for the entropy
    "greedy": "the last letter, greedy, on 400 held-out questions",
    "sampled": "... and sampled at temperature 1",
    "entropy": "of its answers in the last step, nats a token",
    "clipped": "share of the tokens whose gradient the clip changed",
}


def run_here(task, settings, patches=(), quiet=True):
    """(the metrics of each step, the trained model) of train.main() in this process, in a folder that is deleted.

    patches: (object, name, value) for what no setting changes. A run that was refused after its start has no model.
    """
    models = []
    changes = {**settings, "task": task, "TASK": task.__file__, "finish_run": lambda model, out: models.append(model)}
    fixed = [(checkpoint, "save", lambda *_: None), (checkpoint, "catch_signals", list)]
    fixed += [(train.settings, "finish", lambda: None), (train.monitor, "show", lambda _: None)]
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        for patch in [*fixed, *((train, *change) for change in (changes | {"OUT_DIR": out}).items()), *patches]:
            stack.enter_context(mock.patch.object(*patch))
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            train.main()
        except SystemExit as refusal:
            if not Path(out, "metrics.jsonl").exists():
                raise
            print(refusal)
        return [json.loads(line) for line in open(f"{out}/metrics.jsonl")], models[0] if models else None


def measure(settings):
    """What the file keeps of one run; None where it was refused."""
    rows, model = run_here(letters, SHARED | {"EVAL_POSITIONS": 1} | settings)
    if model is None:
        return None
    eval_questions = letters.make_questions(letters.load("", model.config)[1], 400, random.Random(0), model.config)
    with mock.patch.object(train, "TEMPERATURE", 1.0), mock.patch.object(train, "task", letters):
        skill = train.evaluate(model, eval_questions, os.devnull, 0)  # at temperature 1, whatever it was trained at
    return {
        "greedy": skill["letters last T=0"][0],
        "sampled": skill["letters last T=1"][0],
        "entropy": rows[-1]["entropy"],
        "clipped": statistics.fmean(row["clip_low"] + row["clip_high"] for row in rows),
    }


def table(runs):
    """Means over the seeds with their 95 % intervals."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, found in runs.items():
        cells, sound = [], [run for run in found.values() if run]
        for column in COLUMNS:
            values = [run[column] * (1 if column == "entropy" else 100) for run in sound]
            form = ".2f" if column == "entropy" else ".1f"
            cells.append(with_interval(values, form) if values else "")
        note = f" ({len(sound)} of {len(found)} runs)" if len(sound) < len(found) else ""  # the others were refused
        lines.append(f"| {name}{note} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_suffix(".json"))
    p.add_argument("--seeds", type=int, default=5, choices=STUDENT)
    p.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    a = p.parse_args()
    torch.set_num_threads(1)  # more are slower for matrices of this size
    known = read(a.file) if a.file.exists() else {"runs": {}}
    about = {"columns": COLUMNS, "shared": SHARED, "variants": VARIANTS}
    if known.get("about", about) != about:
        p.error(f"{a.file} was made with other settings; delete it, or name another file.")
    known |= {"about": about, "made": monitor.describe("python -m experiments.variants", "cpu", torch.float32)}
    for seed in range(a.seeds):
        for name in a.only:
            found = known["runs"].setdefault(name, {})
            if str(seed) not in found:
                found[str(seed)] = measure(VARIANTS[name] | {"SEED": seed})
                write(a.file, known)
    print(table({name: known["runs"][name] for name in a.only}))


if __name__ == "__main__":
    main()
