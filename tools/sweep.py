"""Variants × seeds × controls: trains all of these runs, and prints what they gain on held-out questions.

    python -m tools.sweep runs/sums TASK=examples/sums.py EVAL_SAMPLES=16          three seeds and three controls
    python -m tools.sweep runs/losses TASK=examples/sums.py --seeds 5 --controls 0 \\
        --vary default LOSS=grpo "fast: EPOCHS=8 LR=3e-3" --show "sums result T=0" "sums result T=1" entropy

Settings that all runs share are arguments, as for train.py; a variant is what --vary adds to them, and has a name. A
control is the same run on shuffled rewards (CONTROL=shuffle). Runs are made in OUT/VARIANT/seed-N and
OUT/VARIANT/control-N, one after another, and the same command resumes the one that was stopped, makes those that are
missing, and reads the others.

The table of a single variant has a row for each figure: its mean before and after the runs, the gain, and the gain of
the controls. With several variants it has a row for each of them, and the figures after the runs as columns; besides
held-out figures, --show takes entropy (of the last step, in nats per token), frac_zero_std and clipped (the share of
tokens whose gradient the clip changed). Intervals are 95 %, for other seeds and, in the table of a single variant, for
other questions. OUT/sweep.json records what the tables need, a run in each line.
"""

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from nanorook.run import finished, write
from nanorook.settings import PATHS, ROOT, fail, number, one_spelling
from nanorook.statistics import differences, gain, is_share, over_seeds, shared_variance, with_interval
from nanorook.tables import table
from nanorook.verdict import objects, read

DECIDED = "SEED", "CONTROL", "OUT_DIR"  # by this program, for each run
KINDS = {"runs": ("seed", "none"), "controls": ("control", "shuffle")}  # of runs: how folders are named, and CONTROL


# ---- Runs ----------------------------------------------------------------------------------------------------


def make(folder, arguments, first):
    """Makes a run of train.py, unless it has been made. In what the arguments leave open, it must not differ from the
    `first` run of its variant."""
    if not finished(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"OUT={folder.parent.parent} is no folder that runs can be written to ({error}).")
        print(f"{folder}, with its output in {folder}.log", flush=True)
        with open(f"{folder}.log", "a") as log:
            command = [sys.executable, "train.py", *arguments, f"OUT_DIR={folder}"]
            subprocess.Popen(command, cwd=ROOT, stdout=log).wait()  # run() would kill it at Ctrl-C
        if not finished(folder):  # whatever its verdict, which its exit code tells
            fail(f"the run in {folder} did not finish; its error is above, and its output in {folder}.log.")
    (made_with, about), (expected, about_first) = (objects(some, "settings", "run") for some in (folder, first))
    hashes = {some["start_hash"] for some in (about, about_first) if "start_hash" in some}
    if len(hashes) > 1:
        fail(f"the runs in {folder} and {first} began with different models, so they cannot be compared; delete one of "
             "them, or name another OUT.")  # fmt: skip
    given = dict(argument.split("=", 1) for argument in arguments)
    expected |= {name: one_spelling(name, value) if name in PATHS else value for name, value in given.items()}
    for name in made_with.keys() | expected.keys():
        value, wanted = made_with.get(name), expected.get(name)
        if name != "OUT_DIR" and comparable(value) != comparable(wanted):
            fail(f"the run in {folder} was made with {name}={value}, not {wanted}; delete it, or name another OUT.")


def comparable(value):
    """The same for a setting's value and for a text that means it, such as 0.03 and 3e-2."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


# ---- Figures -------------------------------------------------------------------------------------------------


def figures_of(folder):
    """{name: [after, before, gain, half-width of the gain]} of a finished run; metrics of steps have only the first."""
    (skill,) = objects(folder, "skill")
    first, last = [*skill.values()][0], [*skill.values()][-1]
    steps = read(folder / "metrics.jsonl")
    found = {}
    for name in last:
        if name in first:
            mean, half, _ = gain(first[name][2], last[name][2])
            found[name] = [round(x, 5) for x in (last[name][0], first[name][0], mean, half)]
    found["entropy"] = [round(steps[-1]["entropy"], 5)]
    found["frac_zero_std"] = [round(steps[-1]["frac_zero_std"], 5)]
    found["clipped"] = [round(fmean(step["clip_low"] + step["clip_high"] for step in steps), 5)]
    return found


def shared_by(folders):
    """{figure: the shared_variance of its gain} of the runs in these folders."""
    found = {}
    for folder in folders:
        about, skill = objects(folder, "run", "skill")
        first, last = [*skill.values()][0], [*skill.values()][-1]
        for name in last:
            values = differences(first[name][2], last[name][2]) if name in first else None
            found.setdefault(name, []).append(values and (about["questions"][name.split(" ")[0]], values))
    return {name: shared_variance(*zip(*pairs)) for name, pairs in found.items() if all(pairs)}


def record_of(folders):
    """What the tables need of runs {variant: {"runs": [folder, ...], "controls": [...]}}. All lists are in the order of
    `figures`; None where a run lacks one."""
    every = {folder: figures_of(folder) for kinds in folders.values() for some in kinds.values() for folder in some}
    names = list(dict.fromkeys(name for figures in every.values() for name in figures))
    variants = {}
    for variant, kinds in folders.items():
        variants[variant] = {}
        for kind, some in kinds.items():
            shared = shared_by(some)
            variants[variant][kind] = [[every[folder].get(name) for name in names] for folder in some]
            variants[variant][f"shared by {kind}"] = [shared.get(name, 0.0) for name in names]
    (about,) = objects(next(iter(every)), "run")
    about = {name: value for name, value in about.items() if name != "questions"}
    return {"about": about, "figures": names, "variants": variants}


def as_lines(record):
    """JSON with a run in each line."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    inner = r"\[[^\[\]]*\]"  # a list without lists, and then a list of such lists
    for pattern in (inner, rf"\[\s*(?:(?:{inner}|null),?\s*)+\]"):
        text = re.sub(pattern, lambda found: re.sub(r"\s*\n\s*", "", found[0]).replace(",", ", "), text)
        text = re.sub(r", +", ", ", text)
    return text + "\n"


# ---- Tables --------------------------------------------------------------------------------------------------


def scale_of(name, values):
    """(factor, format): shares are shown in percent."""
    held_out = " " in name
    share = is_share(name, values) if held_out else name != "entropy" and all(0 <= value <= 1 for value in values)
    return (100, ".1f") if share else (1, ".2f")


def gain_rows(record):
    """The rows for a single variant, the heading first."""
    (variant,) = record["variants"].values()
    runs, controls = variant["runs"], variant.get("controls", [])
    rows = [["", "before", "after", "gain"] + ["gain of the shuffled control"] * bool(controls)]
    for i, name in enumerate(record["figures"]):
        figures = [run[i] for run in runs + controls]
        if None in figures or len(figures[0]) == 1:  # not asked before and after
            continue
        factor, form = scale_of(name, [abs(value) for figure in figures for value in figure[:2]])
        after, before = (fmean(figure[end] for figure in figures[: len(runs)]) for end in (0, 1))
        row = [name, f"{factor * before:{form}}", f"{factor * after:{form}}"]
        for kind, some in (("runs", runs), ("controls", controls)):
            if some:
                mean, half, _ = over_seeds([run[i][2:] for run in some], variant[f"shared by {kind}"][i])
                row.append(with_interval(factor * mean, factor * half, f"+{form}"))
        rows.append(row)
    return rows


def comparison_rows(record, shown=()):
    """The rows for several variants, the heading first: means over the seeds after the runs."""
    names = shown or record["figures"]
    rows = [["", *names]]
    all_runs = [run for variant in record["variants"].values() for run in variant["runs"] + variant.get("controls", [])]
    for title, variant in record["variants"].items():
        for kind in ("runs", "controls"):
            if not variant.get(kind):
                continue
            row = [title + ", shuffled" * (kind == "controls")]
            for name in names:
                i = record["figures"].index(name)
                values = [run[i] for run in variant[kind]]
                if None in values:
                    row.append("")
                    continue
                factor, form = scale_of(name, [abs(run[i][0]) for run in all_runs if run[i] is not None])
                mean, half, _ = over_seeds([(factor * value[0], 0.0) for value in values])
                row.append(with_interval(mean, half or math.inf, form))  # seeds that are all equal show no variance
            rows.append(row)
    return rows


def main():
    p = argparse.ArgumentParser("python -m tools.sweep", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path, help="folder for the runs and sweep.json")
    p.add_argument("settings", nargs="*", metavar="NAME=value", help="settings of all runs, as train.py takes them")
    p.add_argument(
        "--vary",
        nargs="+",
        metavar="VARIANT",
        default=["default"],
        help='the variants to compare, such as default LOSS=grpo "fast: LR=1e-3"',
    )
    p.add_argument("--seeds", type=number(int, 1), default=3, help="runs of each variant")
    p.add_argument("--controls", type=number(int, 0), help="control runs of each variant (default: as many as seeds)")
    p.add_argument("--show", nargs="+", metavar="FIGURE", help="the columns where several variants are compared")
    a = p.parse_intermixed_args()
    variants = {}  # {name: its settings}, of texts such as "LOSS=grpo" or "fast: EPOCHS=8 LR=3e-3"
    for text in a.vary:
        name, _, settings = text.rpartition(": ")
        variants[name or settings] = [] if settings == "default" else settings.split()
    for argument in [*a.settings, *(word for words in variants.values() for word in words)]:
        name, equals, _ = argument.partition("=")
        if not equals or name in DECIDED:
            p.error(f"{argument} is not in the form NAME=value, or it is a setting that OUT, --seeds and --controls "
                    "decide; leave it out.")  # fmt: skip
    for settings in variants.values():  # a misspelt one ends here, before any run
        command = [sys.executable, "train.py", *a.settings, *settings, "--help"]
        if subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL).wait():
            sys.exit(1)
    out = a.out.resolve()
    counts = {"runs": a.seeds, "controls": a.seeds if a.controls is None else a.controls}
    folders = {variant: {kind: [] for kind in KINDS} for variant in variants}
    for seed in range(max(counts.values())):  # of all variants before the next, so that a part is of use, too
        for (variant, settings), kind in itertools.product(variants.items(), KINDS):
            if seed >= counts[kind]:
                continue
            name, control = KINDS[kind]
            folder = out / re.sub(r"[^\w.=]+", "-", variant) / f"{name}-{seed}"
            made = folders[variant]
            first = [*made["runs"], *made["controls"], folder][0]
            make(folder, [*a.settings, *settings, f"SEED={seed}", f"CONTROL={control}"], first)
            made[kind].append(folder)
            record = record_of(folders)
            write(out / "sweep.json", as_lines(record))
    if unknown := [name for name in a.show or [] if name not in record["figures"]]:
        p.error(f"--show: the runs have no figure {unknown[0]!r}, but {', '.join(record['figures'])}.")
    rows = gain_rows(record) if len(variants) == 1 else comparison_rows(record, a.show)
    print(table(rows, markdown=True), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the current run ends when it has saved its step, and the same command continues from there.")
