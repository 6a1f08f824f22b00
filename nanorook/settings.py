"""Settings, each from the first place that names it: arguments, environment, a run (for tools), task, the program.

A line `LR = setting("LR", 1e-4, "learning rate", low=0)` is definition, documentation and bounds in one, and the code
then uses LR. Only a program that is run calls `read_user`, before its first setting; imported, it keeps the defaults.
"""

import argparse
import difflib
import json
import math
import os
import sys
from pathlib import Path

SETTINGS = {}  # name -> (default, meaning, value)
OWN = {}  # name -> the program's own default
GIVEN = {"arguments": {}, "environment": {}, "run": {}, "defaults": {}}  # what settings are read from
HEADINGS = {}  # number of settings before it -> heading in --help
LARGEST = sys.float_info.max
HELP = "-h", "--help"
ROOT = Path(__file__).parent.parent
PATHS = "MODEL", "DATA", "TASK"  # what a run is made from

# What may be another value when a run is resumed. All else belongs to the run: what it learns from, and by which rule.
# That includes every setting of the task's own, and settings that a later version adds.
MAY_CHANGE = "OUT_DIR FRESH STEPS BATCH_POSITIONS GROUP_SIZE EPOCHS OVERFIT LR LR_SCHEDULE WARMUP_STEPS".split()
MAY_CHANGE += "MAX_GRAD_NORM CLIP_RANGE CLIP_RANGE_HIGH KL_COEF KL_DIVERGENCE_THRESHOLD EVAL_EVERY".split()
MAY_CHANGE += "EVAL_POSITIONS EVAL_SAMPLES REPORT_TO SAVE_EVERY".split()
MAY_CHANGE += "DEVICE DTYPE COMPILE MICROBATCH_TOKENS NPROC".split()


def fail(message):
    """Ends the program with one line; if the message quotes a longer error, only its first line is shown."""
    sys.exit(f"error: {message}".splitlines()[0])


def fail_if(message):
    """Ends the program if a check has found something to say."""
    if message:
        fail(message)


def read_user():
    """From now on settings take their values from the arguments and the environment."""
    GIVEN["arguments"] = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a and not a.startswith("-"))
    GIVEN["environment"] = dict(os.environ)


def read_run():
    """As read_user, but settings that are not given are those of a run, if a model named by the arguments, or by MODEL
    in the environment, is its OUT_DIR/model or OUT_DIR/step-N; the first one counts. MODEL is that run's start model
    unless it is given."""
    read_user()
    for word in [*sys.argv[1:], GIVEN["environment"].get("MODEL", "")]:
        folder = Path(word.removeprefix("MODEL="))
        file = folder.resolve().parent / "settings.json"
        if word and os.path.isdir(folder) and file.is_file():
            try:
                found = json.loads(file.read_text()).items()
            except (ValueError, AttributeError):  # another program's file
                continue
            GIVEN["run"] = {name: as_text(value) for name, value in found}
            GIVEN["run"].pop("DEVICE", None)  # which this machine may not have
            break


def take_defaults(defaults):
    """From now on these, which a task provides, are the defaults of the settings that they name."""
    GIVEN["defaults"] = defaults


def heading(title):
    """The settings that follow are listed under this heading in --help."""
    HEADINGS[len(SETTINGS)] = title


def setting(name, default, meaning, one_of=None, low=-LARGEST, high=LARGEST):
    kind = type(default)
    OWN[name] = as_text(default)
    default = as_text(GIVEN["defaults"].get(name, default))
    sources = GIVEN["arguments"], GIVEN["environment"], GIVEN["run"]
    text = next((source[name] for source in sources if name in source), default)
    if kind is bool:
        kind, low, high = int, 0, 1
    try:
        value = text if kind is str else number(kind, low, high)(text)
    except argparse.ArgumentTypeError as error:
        fail(f"{name}={error}")
    if one_of is not None and value not in one_of:
        fail(f"{name}={value} is not one of {', '.join(one_of)}.")
    if name == "OUT_DIR" and not value:
        fail("OUT_DIR= names no folder; leave it out, or name one.")
    task_is_given = name == "TASK" and any(name in source for source in sources)
    # The default TASK is the project's, even where the user's folder has a file of that name
    if name in ("MODEL", "DATA", "OUT_DIR") or task_is_given:
        value = one_spelling(name, value)
    SETTINGS[name] = default, meaning + (f" ({', '.join(one_of)})" if one_of else ""), value
    return value


def withdraw(module):
    """Takes back the settings of a task that another task builds on, where they would have no effect: they are refused
    as if they had never been defined."""
    for name in SETTINGS.keys() & vars(module):
        del SETTINGS[name]


def one_spelling(name, path):
    """The same text for the same file, however a user spells it, as a run that is resumed compares the two. Tools read
    a run's settings again, and they start in the project's folder. So the path is absolute, unless it is in that folder
    and the user is there, too. A task is looked for in both."""
    here = name != "TASK" or os.path.exists(path)
    file = Path(os.path.abspath(path if here else ROOT / path))
    if not path or not os.path.exists(file) and name != "OUT_DIR":  # built in, or on the hub
        return path
    inside = file.is_relative_to(ROOT) and (name == "TASK" or Path.cwd().samefile(ROOT))
    return str(file.relative_to(ROOT) if inside else file)


def as_text(value):
    return str(int(value) if isinstance(value, bool) else value)


def number(kind, low, high=LARGEST):
    """A function that turns a text into a number within bounds; it is also a type for argparse."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            bounds = f"of at least {low}" if high == LARGEST else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' * (kind is int)}number {bounds}.")
        return value

    return parse


def output_file(text):
    """A type for argparse: the path of a file to write, which is checked before the work and not after it."""
    if Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: it is a folder, or in one that does not exist.")
    return text


def new_file(text):
    """As output_file, for one that must not replace what took hours to make."""
    if Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} already exists: delete it to make it again.")
    return output_file(text)


def help_is_wanted():
    return bool({*HELP} & {*sys.argv[1:]})


def finish(program="./train.sh", arguments=None):
    """To be called after the last setting: refuses unknown arguments, prints --help, warns of misspelt variables."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument in HELP:
            continue
        name, equals, value = argument.partition("=")
        if not equals or name not in SETTINGS:
            near = difflib.get_close_matches(name.upper(), SETTINGS, 1, 0.6)
            hint = f"did you mean {near[0]}={value or SETTINGS[near[0]][0]}?" if near else "--help lists the settings."
            fail(f"{argument} is not a setting in the form NAME=value; {hint}")
    if help_is_wanted():
        print(f"usage: {program} [NAME=value ...]      or in the environment: NAME=value {program}\n{listed()}")
        sys.exit()
    for name, value in GIVEN["defaults"].items():
        if name not in SETTINGS or SETTINGS[name][0] != as_text(value):  # or it was defined before the task was loaded
            fail(f"the task's DEFAULTS name {name}, which is not a setting that train.py defines after TASK.")
    for name in GIVEN["environment"]:
        near = difflib.get_close_matches(name, SETTINGS, 1, 0.85)
        if near and name not in SETTINGS:  # it may be another program's
            message = f"the environment has {name}, which is not a setting; did you mean {near[0]}?"
            print(f"warning: {message}", file=sys.stderr)


def models_and_settings(words, program):
    """([models], [settings]) among the words of a command line, the settings checked. A model's path may contain =."""
    given = [word for word in words if "=" in word and not os.path.exists(word)]
    finish(program, given)
    return [word for word in words if word not in given], given


def listed():
    """All settings, for --help."""
    lines = []
    for i, (name, (default, meaning, _)) in enumerate(SETTINGS.items()):
        lines += [f"\n{HEADINGS[i]}"] if i in HEADINGS else []
        lines.append(f"  {name:26} {default:14} {meaning}")
    return "\n".join(lines)


def values():
    return {name: value for name, (_, _, value) in SETTINGS.items()}


def in_words(*always):
    """These settings, and all others that differ from the program's own defaults, as NAME=value."""
    changed = [name for name, value in values().items() if as_text(value) != OWN[name] and name not in always]
    return " ".join(f"{name}={values()[name]}" for name in (*always, *changed))


def same_file(name, path, other):
    """Whether a setting names the same file in two ways; a relative path starts at the project's folder, as
    one_spelling() writes it."""
    if name not in PATHS or not path or not other:
        return False
    path, other = ROOT / path, ROOT / other
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def changed_since(old):
    """[(name, old value, new value), ...] of the settings that differ from those of the run that is resumed. A change
    that makes it another run is refused."""
    changed = [
        (name, old[name], value)
        for name, value in values().items()
        if name in old and old[name] != value and not same_file(name, old[name], value)
    ]
    for name, was, _ in changed:
        if name not in MAY_CHANGE:
            was = f"{name}={was}" if was != "" else f"no {name}"
            fail(f"the run in OUT_DIR was started with {was}; use that again, name another OUT_DIR, or start over with "
                 "FRESH=1.")  # fmt: skip
    return [change for change in changed if change[0] not in ("OUT_DIR", "FRESH")]
