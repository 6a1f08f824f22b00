"""Settings by name: from NAME=value arguments, else from the environment, else the default.

Each `setting(...)` line at the top of a program is at once the definition, the documentation and the value.
"""

import difflib
import math
import os
import sys

KNOWN = {}  # name -> (default, meaning, value)
INSTEAD = {}  # name -> default, where a setting before it has changed that


def refuse(message):
    sys.exit(f"error: {message}")


def arguments():
    """The NAME=value arguments; a program that is only imported by another finds none it knows."""
    return dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a and not a.startswith("-"))


def setting(name, default, meaning, one_of=None, low=None, high=None):
    default = INSTEAD.get(name, default)
    text = arguments().get(name, os.environ.get(name))
    value = default if text is None else read(name, text, type(default))
    if one_of is not None and value not in one_of:
        refuse(f"{name}={value} is none of {', '.join(one_of)}.")
    if isinstance(value, float) and not math.isfinite(value):
        refuse(f"{name}={value} is no finite number.")
    if low is not None and value < low or high is not None and value > high:
        limits = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        refuse(f"{name}={value} is out of range; it has to be {limits}.")
    if one_of is not None:
        meaning += f" ({', '.join(one_of)})"
    KNOWN[name] = default, meaning, value
    return value


def read(name, text, kind):
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            refuse(f"{name}={text} is neither 0 nor 1.")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        refuse(f"{name}={text} is not {wanted}.")


def finish():
    """After the last setting: print --help, refuse unknown arguments and near-misses in the environment."""
    if any(a in ("-h", "--help") for a in sys.argv[1:]):
        for name, (default, meaning, _) in KNOWN.items():
            print(f"{name:26} {str(int(default) if isinstance(default, bool) else default):14} {meaning}")
        sys.exit()
    for argument in sys.argv[1:]:
        name, equals, _ = argument.partition("=")
        if not equals or name not in KNOWN:
            near = difflib.get_close_matches(name.upper(), KNOWN, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else "--help lists the settings."
            refuse(f"{argument} is no setting in the form NAME=value; {hint}")
    for name in os.environ:
        near = difflib.get_close_matches(name, KNOWN, 1, 0.85)
        if near and name not in KNOWN:
            refuse(f"The environment has {name}, which is no setting; did you mean {near[0]}?")


def values():
    return {name: value for name, (_, _, value) in KNOWN.items()}


def compare(old, say):
    """Settings that a stopped run goes on with: those that would make it another run are refused, others listed."""
    for name, value in values().items():
        if name in old and old[name] != value and name not in ("OUT_DIR", "FRESH"):
            if name in ("MODEL", "DATA", "SEED", "TRAIN"):
                refuse(f"this run was started with {name}={old[name]}; use that again, or start over with FRESH=1.")
            say(f"{name} was {old[name]} and is now {value}")
