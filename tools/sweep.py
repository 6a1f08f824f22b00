"""The same run with several seeds, beside control runs on shuffled rewards: what it gains on held-out questions.

    python -m experiments.seeds OUT EVAL_POSITIONS=1000                                  chess: five runs, five controls
    python -m experiments.seeds OUT --task examples/letters.py --seeds 3 EVAL_EVERY=10   three minutes on two cores

Each run is made by train.py in OUT/seed-N, and each control in OUT/control-N (CONTROL=shuffle, see
nanorook.task.shuffled). OUT/seeds.json records their figures; runs that are in it are not made again. OUT/seeds.png
shows the figures that --curves names. Each seed draws its own training and held-out questions, and a control has those
of its seed. Before and after are compared question by question. Intervals hold for other seeds and other questions,
even where seeds ask some of the same questions because a task has few (see nanorook.statistics.over_seeds).
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from nanorook import settings, tables
from nanorook.run import finished, write
from nanorook.settings import ROOT, fail, number
from nanorook.statistics import differences, gain, is_share, over_seeds, shared_variance, with_interval

CHOSEN = {"TASK", "SEED", "CONTROL", "OUT_DIR", "FRESH"}  # settings that the experiment chooses for each run


def read(file):
    return json.loads(file.read_text())


def record(file, content):
    """Pairs of numbers are kept on one line."""
    text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", json.dumps(content, indent=1))
    write(file, text + "\n")


def rounded(figures):
    return {name: [round(x, 5) for x in figure[:2]] for name, figure in figures.items()}


def shared_settings(task, given):
    """The settings of all runs, from the command, the environment or by default. Wrong ones end the program."""
    sys.argv[1:] = given
    settings.read_user()
    if own := CHOSEN.intersection(settings.GIVEN["arguments"] | settings.GIVEN["environment"]):
        fail(f"{min(own)} is decided for each run by --task, --seeds, --controls and OUT; remove it, also from the "
             "environment.")  # fmt: skip
    settings.GIVEN["arguments"]["TASK"] = task
    runpy.run_path(str(ROOT / "train.py"))  # its settings and the task's, no run
    settings.finish("python -m experiments.seeds OUT")
    return [f"{name}={value}" for name, value in settings.values().items() if name not in CHOSEN]


def run(folder, arguments):
    """What seeds.json records of a run of train.py, which is made first unless it is already there. Its settings are
    those in the arguments, not those of the environment."""
    if not finished(folder):
        with open(f"{folder}.log", "a") as log:
            command = [sys.executable, "train.py", *arguments, f"OUT_DIR={folder}"]
            others = {name: value for name, value in os.environ.items() if name not in settings.OWN}
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, env=others)  # run() would kill it at Ctrl-C
            follow(process, folder)
            if not finished(folder):  # whatever its verdict, which its exit code tells
                fail(f"the run in {folder} did not finish; what it said is above and in {folder}.log.")
    about, made_with, skill = (read(folder / f"{name}.json") for name in ("run", "settings", "skill"))
    for name, value in (argument.split("=", 1) for argument in arguments):
        if str(made_with.get(name, value)) != value:
            fail(f"the run in {folder} was made with {name}={made_with[name]}, not {value}; delete it, or name another "
                 "OUT.")  # fmt: skip
    (first, *_, last), steps = skill.values(), {"before": 0, "after": made_with["STEPS"]}
    gains = rounded({name: gain(first[name][2], last[name][2]) for name in last if name in first})
    skill = {str(steps.get(title, title.split(" ")[-1])): rounded(figures) for title, figures in skill.items()}
    return {"about": {k: about[k] for k in about if k != "questions"}, "skill": skill, "gain": gains}


def follow(process, folder):
    """Waits for a run; every ten seconds its last step is printed, on a terminal in one line."""
    start, end = ("\r\x1b[K", "") if sys.stdout.isatty() else ("", "\n")
    while True:
        steps = [line for line in Path(f"{folder}.log").read_text().splitlines() if re.match(r"step \d", line)]
        print(f"{start}{folder.name}: {(steps or ['starting'])[-1]:.100}", end=end, flush=True)
        try:
            process.wait(10)
            break
        except subprocess.TimeoutExpired:
            pass
    print(start, end="", flush=True)


def shared(folders):
    """{figure: the shared_variance of its gain}, from the values of each question in these runs' folders."""
    found = {}
    for folder in folders:
        asked, skill = read(folder / "run.json")["questions"], read(folder / "skill.json")
        for name in skill["after"]:
            values = differences(skill["before"].get(name, ([],))[-1], skill["after"][name][-1])
            found.setdefault(name, []).append(values and (asked[name.split(" ")[0]], values))
    return {name: shared_variance(*zip(*pairs)) for name, pairs in found.items() if all(pairs)}


def means(runs, name):
    """(of each run the means of a figure, wherever it was asked; whether they are shares, and so in percent)"""
    found = [[skill[name][0] for skill in run["skill"].values() if name in skill] for run in runs]
    share = is_share(name, [abs(mean) for run in found for mean in run])
    return [[100 * mean for mean in run] if share else run for run in found], share


def rows(runs, controls, shared):
    """The rows of the table, its heading first. `shared` has what shared() returns, for runs and for controls."""
    result = [["", "before", "after", "gain"] + ["gain of the shuffled control"] * bool(controls)]
    for name in list(runs[0]["skill"].values())[-1]:
        if all(name in run["gain"] for run in runs + controls):  # asked before and after
            found, share = means(runs + controls, name)
            form, scale = (".1f", 100) if share else (".2f", 1)
            cells = [f"{fmean(run[end] for run in found[: len(runs)]):{form}}" for end in (0, -1)]
            for some, common in zip((runs, controls), shared):
                if some:
                    figure = over_seeds([run["gain"][name] for run in some], common.get(name, 0.0))[:2]
                    cells.append(with_interval(*(scale * x for x in figure), f"+{form}"))
            result.append([name, *cells])
    return result


def draw(runs, controls, names, path):
    """A line for each run, and their mean; controls are grey."""
    from matplotlib.figure import Figure  # which only ./test.sh installs

    figure = Figure(figsize=(4.2 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names):
        drawn = [(controls, "0.5", "shuffled rewards")] if controls else []
        for some, colour, label in (*drawn, (runs, "C0", "GRPO")):
            steps = [int(step) for step, skill in some[0]["skill"].items() if name in skill]
            curves, share = means(some, name)
            for curve in curves:
                axis.plot(steps, curve, color=colour, alpha=0.3)
            axis.plot(steps, [fmean(values) for values in zip(*curves)], color=colour, label=label)
        title, unit = re.sub("T=0$", "greedy", name).replace("T=", "at temperature "), ", %" if share else ""
        axis.set(title=title, xlabel="step", ylabel=f"held-out{unit}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser("python -m experiments.seeds", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--task", default="rewards.py")
    p.add_argument("--seeds", type=number(int, 1), default=5)
    p.add_argument("--controls", type=number(int, 0), help="number of control runs (default: as many as seeds)")
    p.add_argument("--curves", nargs="+", metavar="NAME", help="also draw figures, such as 'policy legal T=0'")
    p.add_argument("settings", nargs="*", metavar="NAME=value")
    a = p.parse_intermixed_args()
    if names := [name for name in a.curves or [] if " " not in name]:
        p.error(f"--curves: {names[0]!r} is not a figure; put -- before the settings that follow.")
    out, given = a.out.resolve(), shared_settings(a.task, a.settings)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "seeds.json"
    new = {"task": a.task, "settings": given, "runs": {}, "shared": {"seed": {}, "control": {}}}
    try:
        recorded = read(file) if file.exists() else new
    except ValueError as error:
        fail(f"{file} is damaged ({error}): name another folder, or delete the file.")
    if other := {recorded["task"], *recorded["settings"]} ^ {a.task, *given}:
        p.error(f"{file} was made with other settings ({', '.join(sorted(other))}); name another folder.")
    record(file, recorded)  # before the first run: from now on the folder belongs to these settings
    found = {"seed": [], "control": []}
    for kind, count, control in (
        ("seed", a.seeds, "none"),
        ("control", a.seeds if a.controls is None else a.controls, "shuffle"),
    ):
        for seed in range(count):
            if (name := f"{kind}-{seed}") not in recorded["runs"]:
                if gone := [name for name in recorded["runs"] if not finished(out / name)]:
                    fail(f"{file} records {gone[0]}, whose folder is gone, so no run can be added; name another OUT.")
                arguments = [f"TASK={a.task}", f"SEED={seed}", f"CONTROL={control}", *given]
                recorded["runs"][name] = run(out / name, arguments)
                recorded["shared"][kind] = shared(out / f"{kind}-{n}" for n in range(seed + 1))
                record(file, recorded)
            found[kind].append(recorded["runs"][name])
            if lacking := set(a.curves or []) - set([*recorded["runs"][name]["skill"].values()][-1]):
                p.error(f"--curves: the runs have no figure {min(lacking)!r}.")
    runs, controls = found.values()
    print(tables.table(rows(runs, controls, recorded["shared"].values()), markdown=True), flush=True)
    if a.curves:
        draw(runs, controls, a.curves, out / "seeds.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the current run ends when it has saved its step, and the same command continues from there.")
    except OSError as error:
        fail(f"a file cannot be read or written: {error}.")
