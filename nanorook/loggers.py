"""Dashboards: REPORT_TO=wandb, trackio or tensorboard sends a run there. No other run needs these packages.

Each gets the metrics of every step and held-out skill with the ends of its intervals; wandb and trackio also get the
settings and some graded answers. A resumed run continues its record: in wandb by its id, which needs wandb's server
(offline, each start makes a folder with that id), in trackio by its name, and in tensorboard by the folder
OUT_DIR/tensorboard. trackio writes twice a second and has no way to wait for it, so a killed run may lose there what it
reported in its last half second.
"""

import atexit
import importlib
import importlib.util
import math
import secrets
import sys

from nanorook import settings
from nanorook.monitor import printable
from nanorook.settings import fail
from nanorook.task import as_sum, prompt_text

PROJECT = "nanorook"
ANSWERS = 8  # of each kind that are sent after an evaluation
COLUMNS = ["kind", "question", "answer", "reward", "made of"]


def require(where):
    """Ends the program before the run begins if the package is not installed."""
    if where != "none" and not getattr(importlib.util.find_spec(where), "origin", None):  # a folder has none
        fail(f"REPORT_TO={where} needs a package that is not installed: {sys.executable} -m pip install {where}")


def step_numbers(metrics):
    """Each kind of question is a group of charts; what concerns all kinds is in `train` and `seconds`."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    numbers = {name if "/" in name else f"train/{name}": value for name, value in numbers.items()}
    return numbers | {f"seconds/{name}": value for name, value in metrics["seconds"].items()}


def skill_numbers(skill):
    numbers = {}
    for name, (mean, half, _) in skill.items():
        measure, _, temperature = name.partition(" T=")
        name = f"held-out {'greedy' if temperature == '0' else 'sampled'}/{measure}"
        ends = {f"{name}, low": mean - half, f"{name}, high": mean + half} if half < math.inf else {}
        numbers |= {name: mean} | ends
    return numbers


def answer_rows(answers):
    """COLUMNS of the first answers of each kind."""
    rows = {}
    for a in answers:
        row = [a.question.kind, prompt_text(a.question.prompt), a.text, a.grade.reward, as_sum(a.grade.pieces)]
        rows.setdefault(a.question.kind, []).append([printable(x) if isinstance(x, str) else x for x in row])
    return [row for kind in rows.values() for row in kind[:ANSWERS]]


def connect(where, run):
    """A function (step, numbers, rows of answers) that sends them; `run.record` is the name of this run's record."""
    if where == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # Drops what a killed run wrote beyond its checkpoint, or all of it if there was none.
        writer = SummaryWriter(run.out / where, purge_step=run.step + 1 if run.skill else 0)

        def send(step, numbers, rows=()):
            for name, value in numbers.items():
                writer.add_scalar(name.replace(" ", "_").replace(",", ""), value, step)
            writer.flush()

        return send
    package = importlib.import_module(where)
    run.record = run.record or secrets.token_hex(4)
    own = {"id": run.record, "dir": run.out} if where == "wandb" else {}
    name = f"{run.out.resolve().name}-{run.record}"
    try:
        package.init(project=PROJECT, name=name, config=settings.values(), resume="allow", **own)
    except Exception as error:  # no account, no network: wandb's own errors
        hint = " WANDB_MODE=offline needs no account." if where == "wandb" else ""
        fail(f"REPORT_TO={where} could not start logging ({error}).{hint}")
    atexit.register(package.finish)

    def send(step, numbers, rows=()):
        shown = {"answers": package.Table(columns=COLUMNS, data=[list(row) for row in rows])} if rows else {}
        package.log(numbers | shown, step=step)

    return send
