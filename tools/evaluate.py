"""Evaluates a model on the held-out questions of a task, or compares two models question by question.

python -m tools.evaluate out                              the table that a run has measured
python -m tools.evaluate out/model                        a run's model and its start model, with the run's settings
python -m tools.evaluate out/model other EVAL_SAMPLES=64  two models; also pass@1, 4, 16, 64
python -m tools.evaluate out/model --training             on training questions instead
python -m tools.evaluate MODEL TASK=examples/sums.py      any model; settings as train.py takes them

EVAL_POSITIONS held-out questions are answered greedily and at TEMPERATURE; intervals are 95 %. If a model is a run's
OUT_DIR/model or OUT_DIR/step-N, the task, its data and settings are those of the run (of the first such model);
NAME=value takes precedence.

pass@k is the share of questions that one of k answers gets right, for each metric that is a share. A run that raises
pass@1 and lowers pass@64 has sharpened what the model already did sometimes (Yue et al., 2025).

If the task lists the answers to a question, rows with "exact" are computed from the probabilities of these, up to
pass@1024 (tools/exact.py). "other" is the probability of all others, which may earn a reward as well.
"""

import argparse
import json
import random
from pathlib import Path

from nanorook import settings

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import architectures
import train
from nanorook import hardware, lora
from nanorook.run import hash_of
from nanorook.settings import fail
from nanorook.tables import skill_rows, table
from nanorook.task import draw_questions, load_items, load_task, names_of, start_folder
from nanorook.verdict import objects
from tools import exact


def show_recorded(out):
    """Prints the table that the run in this folder has recorded."""
    file, about = out / "skill.json", out / "run.json"
    try:
        names = json.loads(about.read_text()).get("names", {}) if about.is_file() else {}
        shown = table(skill_rows(json.loads(file.read_text()), names))
    except Exception as error:  # damage may show anywhere
        fail(f"{file} is damaged ({type(error).__name__}: {error}); for a new table, name {out}/model.")
    print(shown)


def main():
    p = argparse.ArgumentParser("python -m tools.evaluate", description=__doc__.split("\n")[0])
    p.formatter_class, p.epilog = argparse.RawDescriptionHelpFormatter, settings.listed()
    p.add_argument(
        "model",
        nargs="+",
        help="a run's OUT_DIR, for the table it has recorded; or a model folder or hub id, or two to compare; and "
        "settings, NAME=value",
    )
    p.add_argument("--training", action="store_true", help="evaluate on training questions, not on held-out ones")
    a = p.parse_intermixed_args()
    models, given = settings.models_and_settings(a.model, "python -m tools.evaluate")
    if len(models) == 1 and (file := Path(models[0], "skill.json")).is_file():
        if more := [*given, *["--training"] * a.training]:
            fail(
                f"{models[0]} is a run, whose table is shown as it was recorded; to evaluate with {more[0]}, name "
                f"{models[0]}/model."
            )
        return show_recorded(file.parent)
    start_hash = ""  # of the model that a run began with, if that is to be compared
    if len(models) == 1 and settings.GIVEN["run"]:
        (about,) = objects(Path(models[0]).resolve().parent, "run")
        if not any("MODEL" in settings.GIVEN[source] for source in ("arguments", "environment")):
            start_hash = about.get("start_hash", "")
        own = settings.GIVEN["run"].get("TASK")  # of the run, which began with its start model even if TASK is given
        models.insert(0, train.MODEL or start_folder(load_task(own) if own else train.task))
    if len(models) not in (1, 2):
        p.error("give one model, or two to compare.")
    split = "training" if a.training else "held-out"
    device, dtype = hardware.prepare(train.DEVICE, train.DTYPE)
    columns = {}
    for title, name in zip("AB", models):
        model = architectures.load(name)
        if title == "A" and start_hash:
            found = hash_of(lora.merged(model), int(settings.GIVEN["run"].get("LORA_RANK", 0)))
            if found != start_hash:
                fail(
                    f"{name} is not the model that the run of {models[1]} began with; put it back, or name two models."
                )
        model = model.to(device).set_compute_dtype(dtype)
        items, held_out = load_items(train.task, train.DATA, model.config)
        asked = items if a.training else held_out
        count = min(train.EVAL_POSITIONS, len(asked)) or fail(f"DATA={train.DATA} has no {split} items.")
        questions = draw_questions(train.task, asked, count, random.Random(train.SEED), model.config)
        columns[title], _ = train.evaluate(model, questions, train.EVAL_SAMPLES)
        columns[title] |= exact.figures(model, train.task, questions, train.TEMPERATURE)
    print(f"{count} {split} questions of {train.TASK}: {', '.join(map(' is '.join, zip('AB', models)))}\n")
    rows = skill_rows(columns, names_of(train.task))
    rows[0][0] = split
    print(table(rows))


if __name__ == "__main__":
    main()
