"""The tables and pictures of docs/what-rl-does.md: exact policies before and after the runs of experiments/study.sh.

    python -m experiments.study runs/study TASK=examples/mates.py DATA=data/test.txt.gz

The folder has runs of tools.sweep and models of tools.exact_gradient, all or some of RUNS. A policy is computed once
and kept in FOLDER/policies, under a hash of the weights and the questions.
"""

import argparse
import hashlib
import re
from pathlib import Path

import matplotlib
import numpy as np

from nanorook import settings

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import architectures
import train
from nanorook import hardware
from nanorook.run import finished, hash_of
from nanorook.settings import ROOT, fail
from nanorook.statistics import with_interval
from nanorook.task import start_folder
from tools import compare, exact
from tools.sweep import as_lines

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "nanorook"}  # texts stay texts, and ids the same
from matplotlib import pyplot  # noqa: E402

KIND = "mates"
RUNS = {  # folders: their name for people
    "plain/seed-*": "plain",
    "paper/seed-*": "as in the paper",
    "mean/seed-*": "divided by the mean",
    "best-of-4/seed-*": "best of 4",
    "exact-plain/seed-*": "exact gradient, plain",
    "exact-best-of-4/seed-*": "exact gradient, best of 4",
    "exact-4-to-1/seed-*": "exact gradient, best of 4 to 1",
    "exact-log/seed-*": "exact gradient, log",
    "exact-anchored/seed-*": "exact gradient, anchored",
    "g8-best-of-4/seed-*": "groups of 8, best of 4",
    "q8-plain/seed-*": "groups of 8, 64 questions, plain",
    "q8-best-of-4/seed-*": "groups of 8, 64 questions, best of 4",
    "g64-plain/seed-*": "groups of 64, plain",
    "g64-best-of-4/seed-*": "groups of 64, best of 4",
    "default/seed-*": "the default",
    "plain/control-*": "shuffled control of plain",
    "default/control-*": "shuffled control of the default",
}
COLOURS = {"start": "#000000"} | dict(zip(RUNS.values(), matplotlib.colormaps["tab20"].colors))
TRIES = 2 ** np.arange(11)  # the k of the curves of pass@k
SHOWN = "likeliest pass@1 pass@4 pass@16 pass@64 pass@256 other".split()
CHANGES = {
    "α of the nearest sharpened start": "α",
    "explained by sharpening, all": "explained by it",
    "explained by sharpening, median": "median position",
    "right answer became likelier": "mate likelier",
    "a wrong answer gained over 0.1": "a wrong move gained",
    "wrong favourite became likelier": "wrong favourite likelier",
}


def models_in(folder):
    """{name for people: folders of models}, in the order of RUNS."""
    found = {}
    for folders, name in RUNS.items():
        if models := [run / "model" for run in sorted(folder.glob(folders)) if is_trained(run)]:
            found[name] = models
    return found


def is_trained(run):
    """Whether a run has ended. One that was stopped has a model, too; that of tools.exact_gradient has no run.json."""
    return (run / "model").exists() and (finished(run) or not (run / "run.json").exists())


def policy_of(model, questions, folder, device):
    """The compare.Policy of a model folder, kept in a file of this folder."""
    model = architectures.load(model)
    asked = [(q.question.prompt, q.texts, q.rewards) for q in questions]
    made_from = repr([hash_of(model, lora_rank=0), train.TEMPERATURE, asked])
    kept = folder / f"{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.npz"
    if not kept.exists():
        found = compare.policy(model.to(device), questions)
        folder.mkdir(exist_ok=True)
        unfinished = kept.with_name(f".{kept.name}")
        np.savez_compressed(unfinished, **found._asdict())
        unfinished.replace(kept)
    with np.load(kept) as arrays:
        return compare.Policy(**arrays)


def skill_rows(start, models):
    """The start's skills in percent, and what each setting gains, in points, position by position."""
    before = {name: values for name, values in start.skills().items() if name in SHOWN}
    rows = [["", *before], ["start, %", *(f"{100 * values.mean():.1f}" for values in before.values())]]
    for title, policies in models.items():
        after = [policy.skills() for policy in policies]
        gains = [compare.over_models([one[name] - before[name] for one in after]) for name in before]
        rows.append([title, *(with_interval(100 * mean, 100 * half, "+.1f") for mean, half in gains)])
    return rows


def run_and_control_rows(start, runs, controls):
    """Before and after the runs of a setting, with the gain of their controls: the table of a single sweep."""
    before, after = start.skills(), [policy.skills() for policy in runs]
    rows = [["", "before", "after", "gain", "gain of the shuffled control"]]
    for name, values in before.items():
        if name == "other" or name not in SHOWN:
            continue
        title = "mates found, likeliest" if name == "likeliest" else f"mates found {name}"  # as tools.evaluate calls it
        row = [title, f"{100 * values.mean():.1f}"]
        row.append(f"{100 * np.mean([one[name].mean() for one in after]):.1f}")
        for policies in (after, [policy.skills() for policy in controls]):
            mean, half = compare.over_models([one[name] - values for one in policies])
            row.append(with_interval(100 * mean, 100 * half, "+.1f"))
        rows.append(row)
    return rows


def change_rows(start, models):
    """What became of the start's policy, with a row for each setting."""
    rows = [["in %, except α", *CHANGES.values()]]
    for title, policies in models.items():
        cells = dict(compare.change_rows(start, policies))
        rows.append([title, *(cells.get(name, "–") for name in CHANGES)])
    return rows


def draw_pass_at_k(start, models, file):
    """The curves of pass@k, each the mean over a setting's seeds."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    curves = {"start": [start]} | models
    for name, policies in curves.items():
        rates = [[100 * exact.pass_at_k(p.whole_chance, k).mean() for k in TRIES] for p in policies]
        axes.plot(TRIES, np.mean(rates, 0), label=name, color=COLOURS[name], ls="--" if name == "start" else "-")
    axes.axvline(train.GROUP_SIZE, color="#bbb", lw=1)
    axes.set(xscale="log", xlabel="k", ylabel="pass@k, %", xticks=TRIES[::2], xticklabels=map(str, TRIES[::2]))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    save(figure, file)


def draw_policies(start, models, file):
    """For each position the probability of a mate before (across) and after (up), seeds averaged."""
    size = 3.4 * len(models), 3.6
    figure, several = pyplot.subplots(1, len(models), figsize=size, sharey=True, squeeze=False)
    for axes, (name, policies) in zip(several[0], models.items()):
        axes.plot([1e-4, 1], [1e-4, 1], color="#888", lw=1, ls="--")
        after = np.mean([p.chance for p in policies], 0)
        axes.scatter(start.chance, after, s=4, alpha=0.35, color="#0072b2", lw=0, rasterized=True)
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1), title=name, xlabel="mate, before")
    several[0, 0].set_ylabel("mate, after")
    save(figure, file)


def draw_front(rows, file):
    """What each setting of skill_rows gains in pass@1 (across) and pass@16 (up), with intervals."""
    head, _, *rows = rows
    figure, axes = pyplot.subplots(figsize=(5.5, 4))
    axes.axhline(0, color="#bbb", lw=1)
    axes.axvline(0, color="#bbb", lw=1)
    for title, *cells in rows:
        name, _, seeds = title.rpartition(", ")
        (across, half_across), (up, half_up) = (
            map(float, cells[head.index(f"pass@{k}") - 1].split(" ± ")) for k in (1, 16)
        )
        marker = "s" if name.startswith("exact") else "^" if name.startswith("groups") else "o"
        axes.errorbar(
            across, up, half_up, half_across, fmt=marker, ms=4, lw=0.7, color=COLOURS[name], label=f"{name}, {seeds}"
        )
    axes.set(xlabel="gain in pass@1, points", ylabel="gain in pass@16, points")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, file)


def save(figure, file):
    figure.savefig(file, bbox_inches="tight", dpi=150, metadata={"Date": None})
    pyplot.close(figure)


def main():
    p = argparse.ArgumentParser("python -m experiments.study", description=__doc__.split("\n")[0])
    p.add_argument("folder", type=Path, help="the folder of tools.sweep")
    p.add_argument("settings", nargs="*", metavar="NAME=value", help="settings of the runs; DATA names the positions")
    a = p.parse_args()
    settings.finish("python -m experiments.study", a.settings)
    device, _ = hardware.prepare(train.DEVICE, "float32")
    found = models_in(a.folder) or fail(f"{a.folder} has no runs such as plain/seed-0.")
    source = train.MODEL or start_folder(train.task)
    questions = compare.listed_questions(architectures.load(source).config)
    questions = [question for question in questions if question.kind == KIND]
    start = policy_of(source, questions, a.folder / "policies", device)
    models = {}
    for name, some in found.items():
        models[name] = [policy_of(model, questions, a.folder / "policies", device) for model in some]
    titled = {}
    for name, policies in models.items():
        if "default" in name:  # another task, which has a table of its own
            continue
        seeds = f"{len(policies)} seeds" if len(policies) > 1 else "one seed"
        titled[f"{name}, {seeds}"] = policies
    tables = {"exact-skill": skill_rows(start, titled), "exact-change": change_rows(start, titled)}
    for file, name in (("mates-test", "plain"), ("chess-exact", "the default")):
        controls = f"shuffled control of {name}"
        if models.keys() >= {name, controls}:
            tables[file] = run_and_control_rows(start, models[name], models[controls])
    for file, rows in tables.items():
        (ROOT / "experiments" / f"{file}.json").write_text(as_lines({"rows": rows}))
    pictured = {name: some for name, some in models.items() if not re.search("groups|exact|default", name)}
    draw_pass_at_k(start, pictured, ROOT / "docs" / "pass-at-k.svg")
    compared = {name: pictured[name] for name in ("plain", "best of 4") if name in pictured}
    if compared:
        draw_policies(start, compared, ROOT / "docs" / "policies.svg")
    draw_front(tables["exact-skill"], ROOT / "docs" / "front.svg")


if __name__ == "__main__":
    main()
