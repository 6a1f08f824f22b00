import os
import sys

import pytest

from nanorook import settings
from nanorook.settings import setting


@pytest.fixture
def program(monkeypatch):
    """A program with five settings, started with arguments and an environment; their values."""
    for name in ("SETTINGS", "HEADINGS"):
        monkeypatch.setattr(settings, name, {})
    for name in settings.GIVEN:
        monkeypatch.setitem(settings.GIVEN, name, {})

    def start(*arguments, **environment):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        monkeypatch.setattr(os, "environ", {"LESS": "x", "SHELL": "bash", **environment})
        settings.read_user()
        settings.heading("the run")
        setting("STEPS", 100, "how long", low=0)
        settings.heading("a task without settings")
        settings.heading("learning")
        setting("LR", 1e-4, "how fast", low=0)
        setting("LOSS", "dapo", "which", one_of=("grpo", "dapo"))
        setting("OVERFIT", False, "on one batch")
        setting("MODEL", "", "a folder")
        setting("GROUP_SIZE", 4, "answers")
        settings.finish()
        return settings.values()

    return start


def test_arguments_come_before_the_environment_before_the_tasks_defaults(program):
    settings.GIVEN["defaults"] = {"STEPS": 7, "LR": 7.0, "LOSS": "grpo"}
    values = program("LR=0.5", "MODEL=a=b", LR="6", STEPS="5", OVERFIT="true")
    assert values == {"STEPS": 5, "LR": 0.5, "LOSS": "grpo", "OVERFIT": True, "MODEL": "a=b", "GROUP_SIZE": 4}


WRONG = {
    "STEPS=abc": "STEPS=abc is not a whole number",
    "STEPS=-1": "STEPS=-1 is not a whole number of at least 0",
    "STEPS=1" + "0" * 400: "is not a whole number of at least 0",
    "LR=nan": "LR=nan is not a number of at least 0",
    "LOSS=ppo": "is not one of grpo, dapo",
    "OVERFIT=maybe": "neither 0 nor 1",
    "STEPS": "STEPS is not a setting in the form NAME=value; did you mean STEPS=100?",
    "MODELS=x": "did you mean MODEL=x?",
}


@pytest.mark.parametrize("argument", WRONG)
def test_what_cannot_be_used_is_an_error(program, argument):
    with pytest.raises(SystemExit) as end:
        program(argument)
    assert end.value.code.startswith("error: ") and WRONG[argument] in end.value.code and "\n" not in end.value.code


def test_a_variable_that_may_be_another_programs_is_a_warning(program, capsys):
    assert program(MODELS="/srv/models", GROUP_SIZES="8", LOSSES="mse", STEPS="5")["STEPS"] == 5
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the environment has {name}S, which is not a setting; did you mean {name}?"
        for name in ("MODEL", "GROUP_SIZE")
    ]


def test_a_tasks_default_keeps_the_settings_type_and_names_a_setting(program, monkeypatch):
    monkeypatch.setitem(settings.GIVEN, "defaults", {"LR": 1})
    assert program("LR=0.5")["LR"] == 0.5
    monkeypatch.setitem(settings.GIVEN, "defaults", {"STEP": 7})
    with pytest.raises(SystemExit, match="DEFAULTS name STEP, which is not a setting"):
        program()
