"""What each choice is worth: a task of examples/ with one or a few settings changed, several seeds each.

    python -m experiments.variants runs/variants --seeds 5 --only default EPOCHS=8
    python -m experiments.variants runs/variants --task sums --seeds 3               # rewards, CREDIT, LOSS and EPOCHS

Each run is made by train.py in OUT/NAME/seed-N, with so few steps that variants still differ. Runs that are recorded in
the task's file beside this program are not made again. It prints the table for docs/choices.md.
"""

import argparse
import re
from itertools import product
from pathlib import Path
from statistics import fmean

from experiments.seeds import read, record, run, shared_settings
from nanorook import tables, verdict
from nanorook.settings import number
from nanorook.statistics import over_seeds, with_interval

FAST = {"EPOCHS": 8, "LR": 3e-3}  # large steps, so that there is something to clip
FAR = {"KL_DIVERGENCE_THRESHOLD": 100.0}  # what is learnt here is far from the start, and no run should go back
LOSSES = "dapo", "grpo", "dr_grpo", "cispo"

LETTERS = {"default": {}} | {f"LOSS={loss}": {"LOSS": loss} for loss in LOSSES[1:]}
LETTERS |= {"CREDIT=answer": {"CREDIT": "answer"}, "SCALE_REWARDS=std": {"SCALE_REWARDS": "std"}}
LETTERS |= {f"EPOCHS={epochs}": {"EPOCHS": epochs} for epochs in (2, 4, 8)}
LETTERS |= {f"EPOCHS=8 LR=3e-3 LOSS={loss}": {"LOSS": loss} | FAST for loss in LOSSES}
LETTERS["EPOCHS=8 LR=3e-3 CLIP_RANGE_HIGH=0.2"] = {"CLIP_RANGE_HIGH": 0.2} | FAST
LETTERS["EPOCHS=8 LR=3e-3 no clip"] = {"CLIP_RANGE": 1.0, "CLIP_RANGE_HIGH": 1e9} | FAST
for coef, kind in product((0.01, 0.1), ("k1", "k2", "k3")):
    LETTERS[f"KL_COEF={coef:g} KL_ESTIMATOR={kind}"] = {"KL_COEF": coef, "KL_ESTIMATOR": kind} | FAR
for prompts, group in ((64, 2), (32, 4), (8, 16), (4, 32)):
    LETTERS[f"{prompts} × {group}"] = {"BATCH_POSITIONS": prompts, "GROUP_SIZE": group}
LETTERS |= {f"TEMPERATURE={t:g}": {"TEMPERATURE": t} for t in (0.5, 0.7, 1.3)}
LETTERS |= {f"LR={lr:g}": {"LR": lr} for lr in (1e-4, 3e-4, 3e-3, 1e-2)}

PAID = {  # what an answer is paid for; the result alone is one piece, so CREDIT makes no difference there
    "steps, by pieces": {"SUMS_REWARD": "steps", "CREDIT": "piece"},
    "steps, whole answer": {"SUMS_REWARD": "steps", "CREDIT": "answer"},
    "result alone": {"SUMS_REWARD": "result"},
}
SUMS = {f"{paid}, {loss}": PAID[paid] | {"LOSS": loss} for loss in LOSSES[:3] for paid in PAID}  # cispo is dapo here
SUMS |= {f"steps, by pieces, {loss}, EPOCHS=4": {"LOSS": loss, "EPOCHS": 4} for loss in LOSSES}
SUMS["result alone, dapo, EPOCHS=4"] = PAID["result alone"] | {"EPOCHS": 4}

VARIANTS = {"letters": LETTERS, "sums": SUMS}  # of a task: {name: the settings that it changes}
BASE = {"EVAL_POSITIONS": 400, "KL_COEF": 0.0}  # unless a variant has a KL
SHARED = {task: {"STEPS": steps} | BASE for task, steps in (("letters", 30), ("sums", 60))}
COLUMNS = {"letters": {"": "letters last"}, "sums": {"result, ": "sums result", "working, ": "sums working"}}


def measure(task, settings, folder):
    """What the file records of one run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    found = run(folder, [f"TASK=examples/{task}.py", *(f"{name}={value}" for name, value in settings.items())])
    last, rows = [*found["skill"].values()][-1], verdict.read(folder / "metrics.jsonl")
    columns = product(COLUMNS[task].items(), (("greedy", 0), ("sampled", settings.get("TEMPERATURE", 1.0))))
    skill = {f"{name}{way}": last[f"{metric} T={t:g}"][0] for (name, metric), (way, t) in columns}
    clipped = fmean(row["clip_low"] + row["clip_high"] for row in rows)
    return skill | {"entropy": rows[-1]["entropy"], "clipped": clipped}


def rows(runs):
    """The rows of the table, its heading first: means over the seeds with their 95 % intervals. "entropy" is that of
    the last step in nats per token, "clipped" the share of tokens whose gradient the clip changed; all but the entropy
    are in percent."""
    columns = next(list(run) for found in runs.values() for run in found.values())
    result = [["", *columns]]
    for name, found in runs.items():
        result.append([name])
        for column in columns:
            scale, form = (1, ".2f") if column == "entropy" else (100, ".1f")
            mean, half, _ = over_seeds([(scale * run[column], 0.0) for run in found.values()])
            result[-1].append(with_interval(mean, half, form))
    return result


def recorded(file, about, parser):
    """{"about": ..., "runs": ...}: what the file has, which must have been made with these settings."""
    known = read(file) if file.exists() else {"about": about, "runs": {}}
    if known["about"] != about:
        parser.error(f"{file} was made with other settings; delete it to begin again.")
    return known


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path, help="folder for the runs")
    p.add_argument("--task", default="letters", choices=VARIANTS)
    p.add_argument("--seeds", type=number(int, 1), default=5)
    p.add_argument("--only", nargs="+", metavar="NAME")
    a = p.parse_args()
    variants, file = VARIANTS[a.task], Path(__file__).with_name(f"variants-{a.task}.json")
    only = a.only or list(variants)
    if unknown := set(only) - set(variants):
        p.error(f"{a.task} has no variant {', '.join(unknown)}; it has {', '.join(variants)}.")
    known = recorded(file, {"shared": SHARED[a.task], "variants": variants}, p)
    shared_settings(f"examples/{a.task}.py", [])  # whose names run() takes out of the environment
    for seed in range(a.seeds):
        for name in only:
            found = known["runs"].setdefault(name, {})
            if str(seed) not in found:
                settings = SHARED[a.task] | variants[name] | {"SEED": seed}
                found[str(seed)] = measure(a.task, settings, a.out / re.sub(r"\W+", "-", name) / f"seed-{seed}")
                record(file, known)
    print(tables.table(rows({name: known["runs"][name] for name in only}), markdown=True))


if __name__ == "__main__":
    main()
