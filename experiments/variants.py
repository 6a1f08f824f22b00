"""What each choice is worth: a task of examples/ with one setting changed, a few seeds of each.

    python -m experiments.variants runs/variants --seeds 5 --only default EPOCHS=8
    python -m experiments.variants runs/variants --task sums --seeds 3                  rewards, CREDIT and LOSS

Every run is train.py in OUT/NAME/seed-N, with so few steps that variants still differ. Runs that the task's file beside
this program has are not made again. The table for docs/choices.md is printed.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.seeds import read, record, run
from nanorook import tables
from nanorook.settings import number
from nanorook.statistics import over_seeds, with_interval

FAST = {"LR": 3e-3}  # large steps, so that there is something to clip
FAR = {"KL_DIVERGENCE_THRESHOLD": 100.0}  # what is learnt here is far from the start, and no run shall go back
LETTERS = {
    "default": {},
    **{f"LOSS={loss}": {"LOSS": loss} for loss in ("grpo", "dr_grpo", "cispo")},
    "CREDIT=answer": {"CREDIT": "answer"},
    "SCALE_REWARDS=std": {"SCALE_REWARDS": "std"},
    **{f"EPOCHS={epochs}": {"EPOCHS": epochs} for epochs in (2, 4, 8)},
    **{
        f"EPOCHS=8 LR=3e-3 LOSS={loss}": {"EPOCHS": 8, "LOSS": loss} | FAST
        for loss in ("dapo", "grpo", "dr_grpo", "cispo")
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
PAID = {  # what the words of a sum are paid for; a result alone is one piece, so CREDIT is the same there
    "steps, by pieces": {"SUMS_REWARD": "steps", "CREDIT": "piece"},
    "steps, whole answer": {"SUMS_REWARD": "steps", "CREDIT": "answer"},
    "result alone": {"SUMS_REWARD": "result"},
}
SUMS = {
    **{  # with one update from a batch cispo is dapo
        f"{paid}, {loss}": changes | {"LOSS": loss}
        for loss in ("dapo", "grpo", "dr_grpo")
        for paid, changes in PAID.items()
    },
    **{
        f"steps, by pieces, {loss}, EPOCHS=4": {"LOSS": loss, "EPOCHS": 4}
        for loss in ("dapo", "grpo", "dr_grpo", "cispo")
    },
    "result alone, dapo, EPOCHS=4": PAID["result alone"] | {"EPOCHS": 4},
}


class Table(NamedTuple):
    shared: dict  # settings of all its runs, beside the task's own
    variants: dict  # name -> what is changed
    skill: dict  # column -> (metric on held-out questions, in percent, whether greedy)

    def columns(self):
        """Also the entropy in the last step, nats a token, and the share of tokens whose gradient the clip changed."""
        return [*self.skill, "entropy", "clipped"]


TABLES = {
    "letters": Table(
        {"STEPS": 30, "EVAL_POSITIONS": 400},
        LETTERS,
        {"greedy": ("letters last", True), "sampled": ("letters last", False)},
    ),
    "sums": Table(
        {"STEPS": 60, "EVAL_POSITIONS": 400},
        SUMS,
        {
            f"{name}, {'greedy' if greedy else 'sampled'}": (f"sums {name}", greedy)
            for name in ("result", "working")
            for greedy in (True, False)
        },
    ),
}


def measure(task, settings, folder):
    """What the file keeps of one run; None where it was refused after its start."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = run(folder, [f"TASK=examples/{task}.py", *(f"{name}={value}" for name, value in settings.items())])
    except SystemExit as sentence:
        if not (folder / "metrics.jsonl").exists():
            raise
        return print(sentence)
    last, rows = [*found["skill"].values()][-1], list(map(json.loads, open(folder / "metrics.jsonl")))
    at = {True: "T=0", False: f"T={settings.get('TEMPERATURE', 1.0):g}"}
    skill = {column: last[f"{metric} {at[greedy]}"][0] for column, (metric, greedy) in TABLES[task].skill.items()}
    clipped = fmean(row["clip_low"] + row["clip_high"] for row in rows)
    return skill | {"entropy": rows[-1]["entropy"], "clipped": clipped}


def show(table, runs):
    """Means over the seeds with their 95 % intervals."""
    rows = [["", *table.columns()]]
    for name, found in runs.items():
        cells, sound = [], [run for run in found.values() if run]
        for column in table.columns():
            values = [run[column] * (1 if column == "entropy" else 100) for run in sound]
            form = ".2f" if column == "entropy" else ".1f"
            cells.append(with_interval(*over_seeds([(value, 0.0) for value in values]), form) if values else "")
        note = f" ({len(sound)} of {len(found)} runs)" if len(sound) < len(found) else ""  # the others were refused
        rows.append([name + note, *cells])
    return tables.table(rows, markdown=True)


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path, help="folder for the runs")
    p.add_argument("--task", default="letters", choices=TABLES)
    p.add_argument("--seeds", type=number(int, 1), default=5)
    p.add_argument("--only", nargs="+", metavar="NAME")
    p.add_argument("--file", type=Path, help="default: experiments/variants-TASK.json")
    a = p.parse_args()
    table, file = TABLES[a.task], a.file or Path(__file__).with_name(f"variants-{a.task}.json")
    only = a.only or list(table.variants)
    if unknown := set(only) - set(table.variants):
        p.error(f"{a.task} has no variant {', '.join(unknown)}; it has {', '.join(table.variants)}.")
    about = {"shared": table.shared, "variants": table.variants}
    known = read(file) if file.exists() else {"about": about, "runs": {}}
    if known["about"] != about:
        p.error(f"{file} was made with other settings; delete it, or name another file.")
    for seed in range(a.seeds):
        for name in only:
            found = known["runs"].setdefault(name, {})
            if str(seed) not in found:
                settings = table.shared | table.variants[name] | {"SEED": seed}
                found[str(seed)] = measure(a.task, settings, a.out / re.sub(r"\W+", "-", name) / f"seed-{seed}")
                record(file, known)
    print(show(table, {name: known["runs"][name] for name in only}))


if __name__ == "__main__":
    main()
