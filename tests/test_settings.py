"""settings.py through the program that uses it: what is wrong is said in one sentence, before anything is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
from settings import INSTEAD, finish, setting, values
STEPS = setting("STEPS", 100, "how long", low=0)
LR = setting("LR", 1e-4, "how fast", low=0)
LOSS = setting("LOSS", "dapo", "which", one_of=("grpo", "dapo"))
OVERFIT = setting("OVERFIT", False, "on one batch")
if OVERFIT:
    INSTEAD["RUN_NAME"] = "one"
RUN_NAME = setting("RUN_NAME", "", "a name")
finish()
print(values())
"""


def run(*arguments, **environment):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LESS": "x", "SHELL": "bash", **environment}
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], env=env, capture_output=True, text=True)


def test_arguments_come_before_the_environment_before_defaults():
    result = run("LR=0.5", "RUN_NAME=a=b", LR="7", STEPS="5", OVERFIT="1")
    assert eval(result.stdout) == {"STEPS": 5, "LR": 0.5, "LOSS": "dapo", "OVERFIT": True, "RUN_NAME": "a=b"}
    assert eval(run().stdout)["RUN_NAME"] == "" and eval(run("OVERFIT=1").stdout)["RUN_NAME"] == "one"


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        (["STEPS=abc"], {}, "STEPS=abc is not a whole number"),
        ([], {"STEPS": "1.5"}, "STEPS=1.5 is not a whole number"),
        (["STEPS=-1"], {}, "STEPS=-1 is out of range"),
        (["LR=nan"], {}, "LR=nan is no finite number"),
        (["LR="], {}, "LR= is not a number"),
        (["LOSS=ppo"], {}, "none of grpo, dapo"),
        (["OVERFIT=maybe"], {}, "neither 0 nor 1"),
        (["STEP=5"], {}, "did you mean STEPS?"),
        (["--steps"], {}, "--steps is no setting"),
        (["STEPS"], {}, "did you mean STEPS?"),
        (["nonsense=1"], {}, "--help lists the settings"),
        ([], {"STEP": "5"}, "The environment has STEP, which is no setting; did you mean STEPS?"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, environment, said):
    result = run(*arguments, **environment)
    assert result.returncode == 1 and result.stdout == ""
    assert said in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_help_shows_names_defaults_and_meanings():
    lines = run("--help").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["STEPS", "LR", "LOSS", "OVERFIT", "RUN_NAME"]
    assert "100" in lines[0] and "how long" in lines[0] and "(grpo, dapo)" in lines[2] and lines[3].split()[1] == "0"
