"""What each choice is worth: a task of examples/ with one thing changed, a few seeds each.

    python -m experiments.variants [FILE.json] [--seeds 5] [--only NAME ...]            about 15 minutes of one core
    python -m experiments.variants --task sums --seeds 3                                rewards, CREDIT and LOSS

Every run is train.main() in this process, with so few steps that variants still differ. Runs that the file has are
not made again. The table for docs/choices.md is printed.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import train
from examples import letters, sums
from experiments.seeds import read, record, with_interval
from nanorook import monitor, tables
from nanorook.run import Run

FAST = {"LR": 3e-3}  # large steps, so that there is something to clip
FAR = {"KL_DIVERGENCE_THRESHOLD": 100.0}  # what is learnt here is far from the start, and no run shall go back
LETTERS = {
    "default": {},
    **{f"LOSS={loss}": {"LOSS": loss} for loss in ("grpo", "dr_grpo", "cispo", "gspo")},
    "CREDIT=answer": {"CREDIT": "answer"},
    "SCALE_REWARDS=group": {"SCALE_REWARDS": "group"},
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
PAID = {  # what the words of a sum are paid for; a result alone is one piece, so CREDIT is the same there
    "steps, by pieces": {"SUMS_REWARD": "steps", "CREDIT": "piece"},
    "steps, whole answer": {"SUMS_REWARD": "steps", "CREDIT": "answer"},
    "result alone": {"SUMS_REWARD": "result"},
}
SUMS = {
    **{  # with one update from a batch cispo is dapo, and gspo is grpo
        f"{paid}, {loss}": changes | {"LOSS": loss}
        for loss in ("dapo", "grpo", "dr_grpo")
        for paid, changes in PAID.items()
    },
    **{
        f"steps, by pieces, {loss}, EPOCHS=4": {"LOSS": loss, "EPOCHS": 4}
        for loss in ("dapo", "grpo", "dr_grpo", "cispo", "gspo")
    },
    "result alone, dapo, EPOCHS=4": PAID["result alone"] | {"EPOCHS": 4},
}


class Table(NamedTuple):
    task: Any
    shared: dict  # settings of all its runs
    variants: dict  # name -> what is changed
    skill: dict  # column -> metric on 400 held-out questions, in percent

    def columns(self):
        """Also the entropy in the last step, nats a token, and the share of tokens whose gradient the clip changed."""
        return [*self.skill, "entropy", "clipped"]

    def about(self):
        return {"columns": self.skill, "shared": self.shared, "variants": self.variants}


SKILL = {
    f"{name}, {how}": f"sums {name} T={t}"
    for name in ("result", "working")
    for t, how in enumerate(("greedy", "sampled"))
}
TABLES = {
    "letters": Table(
        letters,
        letters.DEFAULTS | {"STEPS": 30},
        LETTERS,
        {"greedy": "letters last T=0", "sampled": "letters last T=1"},
    ),
    "sums": Table(sums, sums.DEFAULTS | {"STEPS": 60}, SUMS, SKILL),
}


def run_here(task, settings, patches=()):
    """(the metrics of each step, the trained model) of train.main() in this process, in a folder that is deleted.

    patches: (object, name, value) for what no setting changes. A run that was refused after its start has no model.
    """
    models = []
    changes = {**settings, "task": task, "TASK": task.__file__, "catch_signals": list}
    own = [(task, name, changes.pop(name)) for name in settings if hasattr(task, name)]  # settings of the task's file
    fixed = [(Run, "save", lambda *_: None), (Run, "finish", lambda run, model: models.append(model))]
    fixed += [(train.settings, "finish", lambda: None), (train.monitor, "show", lambda *_: None)]
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        for patch in [*fixed, *own, *((train, *change) for change in (changes | {"OUT_DIR": out}).items()), *patches]:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            train.main()
        except SystemExit as refusal:
            if not Path(out, "metrics.jsonl").exists():
                raise
            print(refusal)
        return [json.loads(line) for line in open(f"{out}/metrics.jsonl")], models[0] if models else None


def measure(table, settings):
    """What the file keeps of one run; None where it was refused."""
    rows, model = run_here(table.task, table.shared | {"EVAL_POSITIONS": 1} | settings)
    if model is None:
        return None
    items, task = table.task.load("", model.config)[1], table.task
    eval_questions = task.make_questions(items, 400, random.Random(0), model.config)
    with mock.patch.object(train, "TEMPERATURE", 1.0), mock.patch.object(train, "task", task):
        skill, _ = train.evaluate(model, eval_questions)  # at temperature 1, whatever it was trained at
    return {column: skill[metric][0] for column, metric in table.skill.items()} | {
        "entropy": rows[-1]["entropy"],
        "clipped": statistics.fmean(row["clip_low"] + row["clip_high"] for row in rows),
    }


def show(table, runs):
    """Means over the seeds with their 95 % intervals."""
    rows = [["", *table.columns()]]
    for name, found in runs.items():
        cells, sound = [], [run for run in found.values() if run]
        for column in table.columns():
            values = [run[column] * (1 if column == "entropy" else 100) for run in sound]
            form = ".2f" if column == "entropy" else ".1f"
            cells.append(with_interval(values, form) if values else "")
        note = f" ({len(sound)} of {len(found)} runs)" if len(sound) < len(found) else ""  # the others were refused
        rows.append([name + note, *cells])
    return tables.table(rows, markdown=True)


def main():
    p = argparse.ArgumentParser("python -m experiments.variants", description=__doc__.split("\n")[0])
    p.add_argument("file", type=Path, nargs="?", help="experiments/variants.json for letters, variants-TASK.json else")
    p.add_argument("--task", default="letters", choices=TABLES)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--only", nargs="+", metavar="NAME")
    a = p.parse_args()
    table = TABLES[a.task]
    file = a.file or Path(__file__).with_name("variants.json" if a.task == "letters" else f"variants-{a.task}.json")
    only = a.only or list(table.variants)
    if unknown := set(only) - set(table.variants):
        p.error(f"{a.task} has no variant {', '.join(unknown)}; it has {', '.join(table.variants)}.")
    torch.set_num_threads(1)  # more are slower for matrices of this size
    known = read(file) if file.exists() else {"runs": {}}
    if known.get("about", table.about()) != table.about():
        p.error(f"{file} was made with other settings; delete it, or name another file.")
    made = monitor.describe("python -m experiments.variants", "cpu", torch.float32)
    known |= {"about": table.about(), "made": made}
    for seed in range(a.seeds):
        for name in only:
            found = known["runs"].setdefault(name, {})
            if str(seed) not in found:
                found[str(seed)] = measure(table, table.variants[name] | {"SEED": seed})
                record(file, known)
    print(show(table, {name: known["runs"][name] for name in only}))


if __name__ == "__main__":
    main()
