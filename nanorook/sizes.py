"""Defaults by the size of the model: a learning rate that suits five million parameters destroys a hundred million.

A user's value comes first; then, for a MODEL above 50M parameters, the one in TABLE; then the task's; then train.py's.
A task that was made for such models sets LARGE = True, and its DEFAULTS then take precedence over the table.
"""

from nanorook import settings

TABLE = {  # parameters above which a row applies, on top of those before it; the values are from runs of other programs
    # RookWorld-LM-124M on an RTX 4090 (24 GB): TEMPERATURE 0.7 to 0.8, and LR 1e-6 to 3e-6 where a run was unstable.
    50e6: dict(LR=1e-5, BATCH_POSITIONS=8, GROUP_SIZE=8, TEMPERATURE=0.7),
    # Qwen2.5-0.5B-Instruct on GSM8K, with CISPO; no size in between has been tried.
    300e6: dict(TEMPERATURE=1.0),
}


def defaults(model, task, count_parameters):
    """{setting: default} by the size of `model`, a folder or a hub id; none for the start model of the task, which its
    DEFAULTS suit, and none for --help, which works offline."""
    if not model or settings.help_is_wanted():
        return {}
    size = count_parameters(model)
    found = {name: value for least, row in TABLE.items() if size > least for name, value in row.items()}
    own = task.DEFAULTS if getattr(task, "LARGE", False) else {}
    return {name: value for name, value in found.items() if name not in own}


def in_words(sized):
    """The line in which a program shows its settings, and which of them come from defaults()."""
    told = settings.in_words("LR", "SEED", "STEPS", "BATCH_POSITIONS", "GROUP_SIZE", "TEMPERATURE")
    given = {name for source in ("arguments", "environment", "run") for name in settings.GIVEN[source]}
    chosen = ", ".join(name for name in sized if name not in given)
    return told + f" (by the size of the model: {chosen})" * bool(chosen)
