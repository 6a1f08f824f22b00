"""What runs of chess gain on all held-out questions: every position asked in every kind of the task, and every mate.

    python -m experiments.seeds OUT --seeds 5 EVAL_EVERY=0    makes the runs, also with --task examples/mates.py
    python -m experiments.every_question OUT                  asks the start model and OUT/seed-N, 7 minutes for each

Answers are greedy and at temperature 1, whatever the runs' TEMPERATURE; --tries 64 adds pass@1, 4, 16 and 64 of mates.
The evaluation of a run asks for few whole answers and next states. A star marks the rows that changed beyond chance,
corrected for their number (Holm). Three seeds are too few for that: in simulations in which nothing changed, up to a
fifth of such tables had a star. Intervals hold for other seeds and other questions; those of a single run only for
other questions. OUT/every_question.json records the table, and OUT/asked.json the value of each question;
models that are in it are not asked again.
"""

import argparse
import random
from pathlib import Path
from statistics import fmean

import train
from experiments.seeds import read, record
from model import GPT
from nanorook import hardware, tables
from nanorook.run import finished
from nanorook.settings import number
from nanorook.statistics import beyond_chance, differences, gain, known, over_seeds, shared_variance, with_interval
from nanorook.task import draw_questions, load_items, start_folder

ASKED = {"MODEL": "", "DATA": "builtin"}  # settings of all runs, and of this program
KINDS = {  # task: {the kinds of all questions: the settings with which they are}
    "rewards.py": {
        "moves and mates": {"MIX_ENV_RATIO": 0, "MIX_FIRST_RATIO": 1},
        "policy": {"MIX_ENV_RATIO": 0, "MIX_FIRST_RATIO": 0},
        "environment": {"MIX_ENV_RATIO": 1, "MIX_FIRST_RATIO": 0},
    },
    "examples/mates.py": {"moves and mates": {}},
}
FIGURES = {
    "moves and mates": ("mates mate", "mates legal", "moves legal", "moves legal_in_check"),
    "policy": ("policy reward",),
    "environment": ("environment next_state_legal", "environment next_state_illegal"),
}
ROWS = {
    task: [f"{figure} T={heat}" for kinds in asked for figure in FIGURES[kinds] for heat in (0, 1)]
    for task, asked in KINDS.items()
}


def wanted(task, tries):
    return ROWS[task] + [f"mates mate pass@{k}" for k in (1, 4, 16, 64) if k <= tries]


def ask(source, task, tries=0):
    """{row: the values of its questions} of a model, with `tries` answers to each mate for pass@k. Changes the task's
    settings."""
    device, dtype = hardware.prepare(train.DEVICE, train.DTYPE)
    model, found = GPT.load(source).to(device).set_compute_dtype(dtype), {}
    _, held_out = load_items(train.task, train.DATA, model.config)
    mates = sum(kind == "mates" for kind, _ in held_out)
    for kinds, mix in KINDS[task].items():
        vars(train.task).update(mix)
        count = len(held_out) - mates * (kinds != "moves and mates")
        questions = draw_questions(train.task, held_out, count, random.Random(0), model.config)
        found |= {name: values for name, (_, _, values) in train.evaluate(model, questions)[0].items()}
        if tries and kinds == "moves and mates":
            skill, _ = train.evaluate(model, [q for q in questions if q.kind == "mates"], tries)
            found |= {name: values for name, (_, _, values) in skill.items() if "pass@" in name}
    for heat in (0, 1) if "environment" in KINDS[task] else ():
        state, illegal = (found[f"environment next_state{what} T={heat}"] for what in ("", "_illegal"))
        found[f"environment next_state_legal T={heat}"] = [x if i is None else None for x, i in zip(state, illegal)]
    return {name: found[name] for name in wanted(task, tries)}


def rows(start, runs):
    """The rows of the table, its heading first, of the answers of the start model and of the runs."""
    gains = {}
    for name in start:
        values = [differences(start[name], run[name]) for run in runs]
        shared = shared_variance([range(len(start[name]))] * len(runs), values)  # all were asked the same questions
        each = [gain(start[name], run[name]) for run in runs]
        gains[name] = over_seeds(each, shared) if len(runs) > 1 else each[0]
    changed, result = beyond_chance(gains), [["", "before", "after", "gain"]]
    for name in start:
        before, after = (100 * fmean(fmean(known(run[name])) for run in some) for some in ([start], runs))
        star = " *" if name in changed else ""
        gained = with_interval(*(100 * x for x in gains[name][:2]), "+.1f") + star
        result.append([name, f"{before:.1f}", f"{after:.1f}", gained])
    return result


def main():
    p = argparse.ArgumentParser("python -m experiments.every_question", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path, help="the folder of experiments.seeds")
    p.add_argument("--tries", type=number(int, 0), default=0, help="answers to each mate, for pass@k (default: none)")
    a = p.parse_args()
    out = a.out
    made = [folder for folder in sorted(out.glob("seed-*")) if finished(folder)]
    if not made:
        p.error(f"{out} has no finished run seed-N; make some with experiments.seeds.")
    task = read(made[0] / "settings.json")["TASK"]
    for folder in made:
        if task not in KINDS or not (ASKED | {"TASK": task}).items() <= read(folder / "settings.json").items():
            p.error(f"{folder} was trained with another TASK, MODEL or DATA; this table is about chess or mates, with "
                    "the embedded model and data.")  # fmt: skip
    train.task = load_task(task)
    file = out / "asked.json"
    found, names = read(file) if file.exists() else {}, wanted(task, a.tries)
    models = {"start": start_folder(train.task)}
    models |= {folder.name: str(folder / "model") for folder in made}
    for model, source in models.items():
        if not {*names} <= found.get(model, {}).keys():
            print(f"asking {source}", flush=True)
            found[model] = ask(source, task, a.tries)
            record(file, found)
    start, *runs = ({name: found[model][name] for name in names} for model in models)
    table = rows(start, runs)
    record(out / "every_question.json", {"rows": table})
    print(tables.table(table, markdown=True))


if __name__ == "__main__":
    main()
