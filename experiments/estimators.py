"""What SCALE_REWARDS and BEST_OF are worth: tasks with their own settings, whose advantages are computed in five ways.

    python -m experiments.estimators runs/estimators --only letters ocaml sums sums-result

Each run is made by train.py in OUT/TASK-ESTIMATOR-SEED. Runs that estimators.json beside this program records are not
made again. It prints the table for docs/choices.md, of all that is recorded. In it, "start" is the model before these
runs, with the entropy and the groups without a signal of the first step.
"""

import argparse
from pathlib import Path

from experiments.seeds import record, run, shared_settings
from experiments.variants import recorded, rows
from nanorook import tables, verdict
from nanorook.settings import number

ESTIMATORS = {  # see grpo.advantages
    "none": {},
    "std": {"SCALE_REWARDS": "std"},
    "mean": {"SCALE_REWARDS": "mean"},
    "best of 4": {"BEST_OF": 4},
    "best of 4 to 1": {"BEST_OF": 4, "BEST_OF_SCHEDULE": "linear"},
}
SHARED = {"EVAL_SAMPLES": 16, "KL_DIVERGENCE_THRESHOLD": 100.0}  # no run goes back for being far from its start
CHESS = {"EVAL_POSITIONS": 800, "EVAL_EVERY": 0}
TASKS = {  # name: [what the task teaches, the form that its answers should keep, settings]
    "letters": ["letters last", "letters listed", {"TASK": "examples/letters.py"}],
    "sums": ["sums result", "sums structure", {"TASK": "examples/sums.py"}],
    "sums-result": ["sums result", "sums structure", {"TASK": "examples/sums.py", "SUMS_REWARD": "result"}],
    "ocaml": ["ocaml right", "ocaml typed", {"TASK": "examples/ocaml.py"}],
    "mates": ["mates mate", "moves legal", {"TASK": "examples/mates.py", "STEPS": 120} | CHESS],
    "chess": ["mates mate", "moves legal", {"TASK": "rewards.py"} | CHESS],
}


def measure(taught, form, settings, folder):
    """(figures before one run, figures after it)"""
    found = run(folder, [f"{name}={value}" for name, value in settings.items()])
    (before, *_, after), steps = found["skill"].values(), verdict.read(folder / "metrics.jsonl")
    columns = {"greedy": f"{taught} T=0", "sampled": f"{taught} T=1", "form": f"{form} T=0"}
    columns |= {f"pass@{k}": f"{taught} pass@{k}" for k in (4, 16)}
    return [
        {column: skill[name][0] for column, name in columns.items()}
        | {"entropy": step["entropy"], "without signal": step["frac_zero_std"]}
        for skill, step in ((before, steps[0]), (after, steps[-1]))
    ]


def main():
    p = argparse.ArgumentParser("python -m experiments.estimators", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path, help="folder for the runs")
    p.add_argument("--only", nargs="+", default=[*TASKS], choices=TASKS, metavar="TASK", help="tasks to make runs of")
    p.add_argument("--seeds", type=number(int, 1), default=3)
    a = p.parse_args()
    file, out = Path(__file__).with_suffix(".json"), a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = recorded(file, {"shared": SHARED, "tasks": TASKS, "estimators": ESTIMATORS}, p)
    runs = known["runs"]
    for task in a.only:
        shared_settings(TASKS[task][2]["TASK"], [])  # whose names run() takes out of the environment
    for seed in range(a.seeds):
        for task in a.only:
            taught, form, settings = TASKS[task]
            start = runs.setdefault(f"{task}, start", {})
            for name, estimator in ESTIMATORS.items():
                found = runs.setdefault(f"{task}, {name}", {})
                if str(seed) not in found:
                    given = settings | estimator | SHARED | {"SEED": seed}
                    folder = out / f"{task}-{name}-{seed}".replace(" ", "-")
                    start[str(seed)], found[str(seed)] = measure(taught, form, given, folder)
                    record(file, known)
    print(tables.table(rows(runs), markdown=True))


if __name__ == "__main__":
    main()
