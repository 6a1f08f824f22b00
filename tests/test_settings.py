"""nanorook/settings.py: where values come from, and what cannot be used is said in one sentence."""

import os
import sys

import pytest

from nanorook import settings
from nanorook.settings import setting


@pytest.fixture
def program(monkeypatch):
    """A program with five settings, started with arguments and an environment; their values."""
    monkeypatch.setattr(settings, "SETTINGS", {})
    for name in settings.GIVEN:
        monkeypatch.setitem(settings.GIVEN, name, {})

    def start(*arguments, **environment):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        monkeypatch.setattr(os, "environ", {"LESS": "x", "SHELL": "bash", **environment})
        settings.read_user()
        setting("STEPS", 100, "how long", low=0)
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


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        (["STEPS=abc"], {}, "STEPS=abc is not a whole number"),
        (["STEPS=-1"], {}, "STEPS=-1 is out of range; it has to be a number of at least 0"),
        (["LR=nan"], {}, "LR=nan is out of range"),
        (["LR=inf"], {}, "LR=inf is out of range"),
        (["LOSS=ppo"], {}, "is not one of grpo, dapo"),
        (["OVERFIT=maybe"], {}, "neither 0 nor 1"),
        (["STEPS"], {}, "did you mean STEPS?"),
        (["MODELS=x"], {}, "did you mean MODEL?"),
        ([], {"GROUP_SIZES": "5"}, "the environment has GROUP_SIZES, which is not a setting; did you mean GROUP_SIZE?"),
    ],
)
def test_what_cannot_be_used_is_an_error(program, arguments, environment, message):
    with pytest.raises(SystemExit) as error:
        program(*arguments, **environment)
    assert error.value.code.startswith("error: ") and message in error.value.code and "\n" not in error.value.code


def test_a_variable_that_may_be_another_programs_is_a_warning(program, capsys):
    assert program(MODELS="/srv/models", LOSSES="mse", STEPS="5")["STEPS"] == 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: the environment has MODELS,")


def test_help_shows_names_defaults_and_meanings(program, capsys):
    with pytest.raises(SystemExit):
        program("--help", "STEPS=5")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["STEPS", "100"], ["LR", "0.0001"]]
    assert "how long" in lines[0] and "(grpo, dapo)" in lines[2] and lines[3].split()[1] == "0"


def test_a_task_is_any_file_and_brings_its_own_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "SETTINGS", {})
    monkeypatch.setitem(settings.GIVEN, "defaults", {})
    (tmp_path / "my_task.py").write_text("from nanorook.settings import refuse\nDEFAULTS = {'LR': 0.25}\n")
    task = settings.load_task(tmp_path / "my_task.py")
    assert setting("LR", 1.0, "") == 0.25 and settings.load_task(tmp_path / "my_task.py") is task
    assert settings.load_task("rewards.py") is sys.modules["rewards"]
    with pytest.raises(SystemExit, match="there is no such file"):
        settings.load_task(tmp_path / "none.py")
    (tmp_path / "random.py").write_text("import random")
    with pytest.raises(SystemExit, match="another Python module is called random; rename the file"):
        settings.load_task(tmp_path / "random.py")


def test_a_tasks_default_keeps_the_settings_type_and_names_a_setting(program, monkeypatch):
    monkeypatch.setitem(settings.GIVEN, "defaults", {"LR": 1})
    assert program("LR=0.5")["LR"] == 0.5
    monkeypatch.setitem(settings.GIVEN, "defaults", {"STEP": 7})
    with pytest.raises(SystemExit, match="DEFAULTS name STEP, which is not a setting"):
        program()
