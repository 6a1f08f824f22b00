"""Settings by name: from NAME=value arguments, else from the environment, else the task's default, else the default.

A line `LR = setting("LR", 1e-4, "learning rate", low=0)` is definition, documentation and bounds in one. Only the
program that was started calls `read_user`, before its first setting; in a module that is imported they are defaults.
"""

import difflib
import importlib.util
import math
import os
import sys
from pathlib import Path

SETTINGS = {}  # name -> (default, meaning, value)
GIVEN = {"arguments": {}, "environment": {}, "defaults": {}}  # what settings are read from
COMMON_WORDS = ("MODEL", "DATA", "TASK", "SEED", "DEVICE", "LOSS")  # MODELS or DATASET may be another program's


def refuse(message):
    sys.exit(f"error: {message}")


def read_user():
    """From now on settings take their values from the arguments and the environment."""
    GIVEN["arguments"] = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a and not a.startswith("-"))
    GIVEN["environment"] = dict(os.environ)


def load_task(file):
    """The module of a task file; its DEFAULTS replace those of the settings that follow."""
    path = Path(file).resolve()
    if not path.is_file():
        refuse(f"TASK={file}: there is no such file.")
    other = importlib.util.find_spec(path.stem)
    if other and other.origin and Path(other.origin).resolve() != path:
        refuse(f"TASK={file}: another Python module is called {path.stem}; rename the file.")
    module = sys.modules.get(path.stem)
    if not module:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    GIVEN["defaults"] = module.DEFAULTS
    return module


def setting(name, default, meaning, one_of=None, low=-math.inf, high=math.inf):
    kind, default = type(default), GIVEN["defaults"].get(name, default)
    text = GIVEN["arguments"].get(name, GIVEN["environment"].get(name))
    value = default if text is None else parse(name, text, kind)
    if one_of is not None and value not in one_of:
        refuse(f"{name}={value} is not one of {', '.join(one_of)}.")
    if not isinstance(value, str) and not (low <= value <= high and math.isfinite(value)):
        bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        refuse(f"{name}={value} is out of range; it has to be a number {bounds}.")
    SETTINGS[name] = default, meaning + (f" ({', '.join(one_of)})" if one_of else ""), value
    return value


def parse(name, text, kind):
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            refuse(f"{name}={text} is neither 0 nor 1.")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError:
        refuse(f"{name}={text} is not {'a whole number' if kind is int else 'a number'}.")


def finish():
    """Call it after the last setting: prints --help, refuses unknown arguments and mistyped environment variables."""
    if any(a in ("-h", "--help") for a in sys.argv[1:]):
        for name, (default, meaning, _) in SETTINGS.items():
            print(f"{name:26} {str(int(default) if isinstance(default, bool) else default):14} {meaning}")
        sys.exit()
    for argument in sys.argv[1:]:
        name, equals, _ = argument.partition("=")
        if not equals or name not in SETTINGS:
            near = difflib.get_close_matches(name.upper(), SETTINGS, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else "--help lists the settings."
            refuse(f"{argument} is not a setting in the form NAME=value; {hint}")
    for name in GIVEN["defaults"]:
        if name not in SETTINGS:
            refuse(f"the task's DEFAULTS name {name}, which is not a setting.")
    for name in GIVEN["environment"]:
        near = difflib.get_close_matches(name, SETTINGS, 1, 0.85)
        if near and name not in SETTINGS:
            message = f"the environment has {name}, which is not a setting; did you mean {near[0]}?"
            if near[0] not in COMMON_WORDS:
                refuse(message)
            print(f"warning: {message}", file=sys.stderr)


def values():
    return {name: value for name, (_, _, value) in SETTINGS.items()}


def compare(old, log):
    """Settings of a run that is resumed: what would make it another run is refused, other changes are listed."""
    for name, value in values().items():
        if name in old and old[name] != value and name not in ("OUT_DIR", "FRESH"):
            if name in ("MODEL", "DATA", "TASK", "SEED"):
                refuse(f"this run was started with {name}={old[name]}; use that again, or name another OUT_DIR.")
            log(f"{name} was {old[name]} and is now {value}")
