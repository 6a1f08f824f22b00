"""Defaults by the size of the model: a learning rate that suits five million parameters destroys a hundred million.

A user's value comes first; then, for a MODEL above 50M parameters, the one in TABLE; then the task's; then train.py's.
A task that was made for such models says LARGE = True, and its DEFAULTS then come before the table.
"""

import sys

from nanorook import settings
from nanorook.folder import parameters

TABLE = {  # parameters above which a row holds, adding to those before it; each is what runs on one GPU have used
    # RookWorld-LM-124M on an RTX 4090, of 24 GB: TEMPERATURE 0.7 to 0.8, and LR 1e-6 to 3e-6 where a run was unstable.
    50e6: dict(LR=1e-5, BATCH_POSITIONS=8, GROUP_SIZE=8, TEMPERATURE=0.7),
    # Qwen2.5-0.5B-Instruct on GSM8K, by CISPO; no other size has been tried in between.
    300e6: dict(TEMPERATURE=1.0),
}


def defaults(model, task):
    """{setting: default} by the size of `model`, a folder or a hub id; none for the start model of the task, for which
    its DEFAULTS are, and none for --help, which needs no network."""
    if not model or {"-h", "--help"} & {*sys.argv}:
        return {}
    size = parameters(model)
    found = {name: value for least, row in TABLE.items() if size > least for name, value in row.items()}
    own = task.DEFAULTS if getattr(task, "LARGE", False) else {}
    return {name: value for name, value in found.items() if name not in own}


def in_words(sized):
    """The line of a program's start that tells its settings, and which of them are from defaults()."""
    told = settings.in_words("LR", "SEED", "STEPS", "BATCH_POSITIONS", "GROUP_SIZE", "TEMPERATURE")
    given = {name for source in ("arguments", "environment", "run") for name in settings.GIVEN[source]}
    chosen = ", ".join(name for name in sized if name not in given)
    return told + f" (by the size of the model: {chosen})" * bool(chosen)
