"""How programs start and end at a shell."""

import shutil
import subprocess
import sys

import pytest

from toy import ROOT, program


@pytest.mark.parametrize("script", ["train.sh", "test.sh"])
@pytest.mark.parametrize("text", [f'exec {sys.executable} -S "$@"', "exit 1"])
def test_an_interpreter_without_torch_is_refused(script, text, tmp_path):
    python = program(tmp_path / "python", text)
    done = run(ROOT, [f"./{script}"], {"PYTHON": python})
    assert done.returncode == 1 and done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"error: PYTHON={python} is not a Python that has torch")


@pytest.fixture
def project(tmp_path):
    """What train.sh needs of a project, whose environment has no Python yet."""
    folder = tmp_path / "project"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / "nanorook").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("train.sh", "nanorook/setup.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder, command, env, **options):
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, **options)


def test_training_stays_in_the_folder_where_it_is_called(project, tmp_path):
    shutil.copy(ROOT / "requirements.txt", project / ".venv")  # as if it were installed
    code = '[ "$1" = -c ] || echo "$PWD" "$@"'  # -c asks whether there is torch
    python = program(project / ".venv/bin/python", code)
    shutil.copy(python, tmp_path / "bin/python")
    for given in ({}, {"PYTHON": "./python"}):
        done = run(tmp_path / "bin", ["../project/train.sh", "DATA=mine.pgn"], given, check=True)
        assert done.stdout == f"{tmp_path}/bin {project}/train.py DATA=mine.pgn\n"


def test_an_environment_whose_python_is_gone_is_made_again(project, tmp_path):
    shutil.copy(ROOT / "requirements.txt", project / ".venv")
    (project / ".venv/bin/python").symlink_to("/gone/python3")
    program(tmp_path / "bin/uv", "echo uv $@; exit 3")
    done = run(project, ["./train.sh"], {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    assert done.stdout.startswith("uv venv") and not (project / ".venv").exists() and done.returncode


def test_an_old_python3_does_not_matter_if_the_environment_has_a_newer_one(project, tmp_path):
    for name in ("dirname", "cmp", "rm", "cp"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    program(tmp_path / "bin/python3", "exit 1")
    command, env = ["/bin/bash", "train.sh"], {"PATH": f"{tmp_path}/bin"}
    refused = run(project, command, env)
    assert refused.returncode == 1 and "error: Python 3.11 or later is needed; " in refused.stderr
    (project / ".venv/bin").mkdir(parents=True)
    program(project / ".venv/bin/python", 'echo "$@"')
    done = run(project, command, env)
    assert done.returncode == 0 and "requirements.txt" in done.stdout and done.stdout.endswith("train.py\n")


def test_ctrl_c_and_a_reader_that_has_gone_end_a_program_without_a_traceback():
    def end(code):
        command = [sys.executable, "-c", f"import tools; {code}"]
        with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
            process.stdout.readline()
            process.stdout.close()  # as `| head -1` does
            return process.stderr.read()

    hear = "import signal; signal.signal(2, signal.default_int_handler)"  # a shell's background jobs ignore it
    assert end(f"{hear}; print(1, flush=True); signal.raise_signal(2); 1 / 0") == ""
    assert end("[print(i) for i in range(10**6)]") == "" and end("[print(i, flush=True) for i in range(10**6)]") == ""
    assert "ZeroDivisionError" in end("print(1 / 0)")
