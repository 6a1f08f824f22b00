"""The same run on several seeds beside its controls, runs without a reward: what it adds on held-out questions.

    python -m experiments.seeds OUT EVAL_POSITIONS=1000             chess: five runs and a control, an hour of two cores
    python -m experiments.seeds OUT --task examples/letters.py --seeds 3 --controls 3 EVAL_EVERY=10         two minutes

Each run is train.py in OUT/seed-N, each control (CONTROL=1: all advantages are zero) in OUT/control-N. OUT/seeds.json
has their figures, and what is in it is not run again; OUT/seeds.png shows those that --curves names. A control of the
default settings does not move, so one is enough; settings with a gradient of their own need as many as there are seeds.
An interval is that of the mean over the seeds, each of which draws its own training questions and answers, also those
of the evaluation. They share their held-out questions, EVAL_POSITIONS in number.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from nanorook import statistics, tables
from nanorook.run import write
from nanorook.settings import fail, number

ROOT = Path(__file__).parent.parent
PAWNS = ("cp_loss", "eval_mae")  # metrics that are no shares, though their means may be below 1


def read(file):
    return json.loads(file.read_text())


def record(file, content):
    """Pairs of numbers are kept on one line."""
    text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", json.dumps(content, indent=1))
    write(file, text + "\n")


def with_interval(values, form=".1f"):
    """The mean and, of several values, the half-width of its 95 % interval."""
    return statistics.with_interval(*statistics.interval(values), form)


def run(folder, arguments):
    """What seeds.json keeps of a run of train.py, which is made first unless it is there."""
    if not (folder / "model").exists():
        with open(f"{folder}.log", "a") as log:
            command = [sys.executable, "train.py", *arguments, f"OUT_DIR={folder}"]
            if subprocess.run(command, cwd=ROOT, stdout=log).returncode:
                fail(f"the run in {folder} ended without a model; what it said is above and in {folder}.log.")
    about, settings, skill = (read(folder / f"{name}.json") for name in ("run", "settings", "skill"))
    skill = {name: {k: [round(x, 5) for x in figure[:2]] for k, figure in of.items()} for name, of in skill.items()}
    steps = {"before": 0, "after": settings["STEPS"]}
    return {"about": about, "skill": {str(steps.get(name, name.split(" ")[-1])): skill[name] for name in skill}}


def means(runs, name):
    """(of each run the figure's means, one for each evaluation, whether they are shares and so in percent)"""
    found = [[skill[name][0] for skill in run["skill"].values()] for run in runs]
    share = name.split(" ")[1] not in PAWNS and max(abs(mean) for run in found for mean in run) <= 1
    return [[100 * mean for mean in run] if share else run for run in found], share


def table(runs, controls):
    rows, n = [["", "before", "after", "gain", "gain of the control"]], len(runs)
    for name in list(runs[0]["skill"].values())[-1]:
        if all(name in skill for run in runs + controls for skill in run["skill"].values()):
            found, share = means(runs + controls, name)
            form = ".1f" if share else ".2f"
            gains = [run[-1] - run[0] for run in found]
            gains = [with_interval(some, f"+{form}") if some else "" for some in (gains[:n], gains[n:])]
            ends = [f"{fmean(run[end] for run in found[:n]):{form}}" for end in (0, -1)]
            rows.append([name, *ends, *gains])
    return tables.table(rows, markdown=True)


def pyplot():
    """To draw into files. Only ./test.sh installs it."""
    try:
        import matplotlib
    except ImportError:
        fail("a picture needs matplotlib: .venv/bin/python -m pip install matplotlib.")
    matplotlib.use("Agg")  # no window
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(runs, controls, names, path):
    """A line for each run, and their mean; controls are grey."""
    size = 4.2 * len(names), 3.4
    figure, axes = pyplot().subplots(1, len(names), figsize=size, constrained_layout=True, squeeze=False)
    for axis, name in zip(axes[0], names):
        drawn = [(controls, "0.5", "without a reward")] if controls else []
        for some, colour, label in (*drawn, (runs, "C0", "GRPO")):
            steps = [int(step) for step in some[0]["skill"]]
            curves, share = means(some, name)
            for curve in curves:
                axis.plot(steps, curve, color=colour, alpha=0.3)
            axis.plot(steps, [fmean(values) for values in zip(*curves)], color=colour, label=label)
        title, unit = name.replace("T=0", "greedy").replace("T=", "at temperature "), ", %" if share else ""
        axis.set(title=title, xlabel="step", ylabel=f"held-out{unit}")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser("python -m experiments.seeds", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--task", default="rewards.py")
    p.add_argument("--seeds", type=number(int, 1), default=5)
    p.add_argument("--controls", type=number(int, 0), default=1)
    p.add_argument("--curves", nargs="+", metavar="NAME", help="also draw figures, such as 'policy legal T=0'")
    p.add_argument("settings", nargs="*", metavar="NAME=value")
    a = p.parse_intermixed_args()
    if names := [name for name in a.curves or [] if " " not in name]:
        p.error(f"--curves: {names[0]!r} is no figure; put -- before the settings that follow.")
    out = a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "seeds.json"
    known = read(file) if file.exists() else {"task": a.task, "settings": a.settings, "runs": {}}
    if (known["task"], known["settings"]) != (a.task, a.settings):
        p.error(f"{file} is of {known['task']} with {known['settings']}; name another folder.")
    record(file, known)  # before the first run: from now on the folder is of these settings
    if a.curves:
        pyplot()  # refuses where there is none
    found = {"seed": [], "control": []}
    for kind, count in (("seed", a.seeds), ("control", a.controls)):
        for seed in range(count):
            if (name := f"{kind}-{seed}") not in known["runs"]:
                arguments = [f"TASK={a.task}", f"SEED={seed}", f"CONTROL={int(kind == 'control')}", *a.settings]
                known["runs"][name] = run(out / name, arguments)
                record(file, known)
            found[kind].append(known["runs"][name])
            if lacking := set(a.curves or []) - set([*known["runs"][name]["skill"].values()][-1]):
                p.error(f"--curves: the runs have no figure {min(lacking)!r}.")
    runs, controls = found.values()
    print(table(runs, controls), flush=True)
    if a.curves:
        draw(runs, controls, a.curves, out / "seeds.png")


if __name__ == "__main__":
    main()
