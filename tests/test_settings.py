import os
import sys

import pytest

from nanorook import settings
from nanorook.settings import setting


@pytest.fixture
def program(monkeypatch):
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


def test_arguments_come_before_the_environment_before_the_tasks_defaults(program, capsys):
    settings.GIVEN["defaults"] = {"STEPS": 7, "LR": 7, "LOSS": "grpo"}
    values = program("LR=0.5", "MODEL=a=b", LR="6", STEPS="5", OVERFIT="1", MODELS="/srv/models")
    assert values == {"STEPS": 5, "LR": 0.5, "LOSS": "grpo", "OVERFIT": True, "MODEL": "a=b", "GROUP_SIZE": 4}
    assert capsys.readouterr().err.startswith("warning: the environment has MODELS, which is not a setting; did you")
    settings.GIVEN["defaults"] = {"STEPS": 2.7}
    with pytest.raises(SystemExit, match="STEPS=2.7 is not a whole number"):
        program()
    settings.GIVEN["defaults"] = {"STEP": 7}
    with pytest.raises(SystemExit, match="DEFAULTS name STEP, which is not a setting"):
        program()
    settings.GIVEN["defaults"] = {}
    program()
    settings.GIVEN["defaults"] = {"LR": 3}  # too late
    with pytest.raises(SystemExit, match="DEFAULTS name LR, which is not a setting that train.py defines after TASK"):
        settings.finish()


def test_a_file_has_one_spelling_that_is_right_in_the_projects_folder(program, tmp_path, monkeypatch):
    """A run is resumed with the same task and model, however they are spelt, and tools read them in that folder."""

    def spellings(name, *texts):
        setting(name, "default", "a path")  # otherwise program() would refuse the argument
        return {program(f"{name}={text}") and setting(name, "default", "a path") for text in texts}

    letters, tiny = settings.ROOT / "examples" / "letters.py", settings.ROOT / "weights" / "tiny"
    tasks = "examples/letters.py", "./examples/letters.py", "examples/../examples/letters.py", letters
    assert spellings("TASK", *tasks) == {"examples/letters.py"}
    assert spellings("MODEL", "weights/tiny", "./weights/tiny/", tiny, f"{tiny}/") == {"weights/tiny"}
    assert spellings("OUT_DIR", "new") == {"new"}
    monkeypatch.chdir(tmp_path)
    for name in ("start", "mine.pgn", "mine.py"):
        (tmp_path / name).touch()
    assert spellings("TASK", *tasks) == {"examples/letters.py"}  # not here, so it is in the project's folder
    assert spellings("TASK", "mine.py") == {f"{tmp_path}/mine.py"}
    assert spellings("MODEL", "start", "./start", tmp_path / "start") == {f"{tmp_path}/start"}
    assert spellings("MODEL", tiny, f"{tiny}/") == {str(tiny)} and spellings("MODEL", "a/hub-id") == {"a/hub-id"}
    assert spellings("DATA", "mine.pgn") == {f"{tmp_path}/mine.pgn"} and spellings("OUT_DIR", "o") == {f"{tmp_path}/o"}
    with pytest.raises(SystemExit, match="^error: OUT_DIR= names no folder; leave it out, or name one.$"):
        spellings("OUT_DIR", "")


WRONG = {
    "STEPS=-1": "STEPS=-1 is not a whole number of at least 0",
    "STEPS=1" + "0" * 400: "is not a whole number of at least 0",
    "LR=nan": "LR=nan is not a number of at least 0",
    "LOSS=ppo": "is not one of grpo, dapo",
    "OVERFIT=maybe": "is not a whole number from 0 to 1",
    "STEPS": "STEPS is not a setting in the form NAME=value; did you mean STEPS=100?",
    "MODELS=x": "did you mean MODEL=x?",
}


@pytest.mark.parametrize("argument", WRONG)
def test_what_cannot_be_used_is_an_error(program, argument):
    with pytest.raises(SystemExit) as end:
        program(argument)
    assert end.value.code.startswith("error: ") and WRONG[argument] in end.value.code and "\n" not in end.value.code


def test_a_file_named_from_another_folder_is_the_same():
    tiny = settings.ROOT / "weights" / "tiny"
    assert settings.same_file("MODEL", "weights/tiny", str(tiny))
    assert not settings.same_file("MODEL", "weights/tiny", str(settings.ROOT / "data"))
    assert not settings.same_file("MODEL", "a/hub-id", "another/hub-id")
    assert not settings.same_file("DATA", "x" * 300, "y" * 300)  # no name of a file
    assert not settings.same_file("OUT_DIR", "weights/tiny", str(tiny))


def test_help_shows_names_defaults_and_meanings(program, capsys):
    with pytest.raises(SystemExit):
        program("--help")
    assert "STEPS 100 how long LR 0.0001 how fast LOSS dapo which" in " ".join(capsys.readouterr().out.split())
