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
    done = subprocess.run([f"./{script}"], cwd=ROOT, env={"PYTHON": python}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"error: PYTHON={python} is not a Python that has torch")


def test_training_stays_in_the_folder_where_it_is_called(tmp_path):
    (tmp_path / "here").mkdir()
    for name in ("train.sh", "nanorook/setup.sh", "requirements.txt", ".venv/bin/python", ".venv/requirements.txt"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
    for name in ("train.sh", "nanorook/setup.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    shutil.copy(ROOT / "requirements.txt", tmp_path / "project/.venv")  # as if it were installed
    code = '[ "$1" = -c ] || echo "$PWD" "$@"'  # -c asks whether there is torch
    python = program(tmp_path / "project/.venv/bin/python", code)
    shutil.copy(python, tmp_path / "here/python")
    for given in ({}, {"PYTHON": "./python"}):
        command = ["../project/train.sh", "DATA=mine.pgn"]
        done = subprocess.run(command, cwd=tmp_path / "here", env=given, capture_output=True, text=True, check=True)
        assert done.stdout == f"{tmp_path}/here {tmp_path}/project/train.py DATA=mine.pgn\n"


def test_an_environment_whose_python_is_gone_is_made_again(tmp_path):
    for name in ("train.sh", "nanorook/setup.sh", "requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "requirements.txt", tmp_path / ".venv")
    (tmp_path / ".venv/bin/python").symlink_to("/gone/python3")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/python3", '[ "$1" = -c ] || { echo python3 "$@"; exit 3; }')  # -c asks for its version
    done = subprocess.run(
        ["./train.sh"], cwd=tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout.startswith("python3 -m venv") and not (tmp_path / ".venv").exists() and done.returncode


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


def test_an_old_python3_does_not_matter_if_the_environment_has_a_newer_one(tmp_path):
    for name in ("train.sh", "nanorook/setup.sh", "requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in ("dirname", "cmp", "rm", "cp"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    program(tmp_path / "bin/python3", "exit 1")

    def run():
        env = {"PATH": f"{tmp_path}/bin"}
        return subprocess.run(["/bin/bash", "train.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)

    refused = run()
    assert refused.returncode == 1 and "error: Python 3.11 or later is needed; " in refused.stderr
    (tmp_path / ".venv/bin").mkdir(parents=True)
    program(tmp_path / ".venv/bin/python", 'echo "$@"')
    done = run()
    assert done.returncode == 0 and "requirements.txt" in done.stdout and done.stdout.endswith("train.py\n")
