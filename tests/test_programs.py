"""How programs start and end at a shell."""

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
    assert error.startswith(f"error: PYTHON={python} is no Python that has torch")


@pytest.mark.parametrize("package", ["tools", "experiments"])
def test_ctrl_c_and_a_reader_that_has_gone_end_a_program_without_a_traceback(package):
    def end(code):
        command = [sys.executable, "-c", f"import {package}; {code}"]
        with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
            process.stdout.readline()
            process.stdout.close()  # as `| head -1` does
            return process.stderr.read()

    assert end("import signal; print(1, flush=True); signal.raise_signal(signal.SIGINT)") == ""
    assert end("[print(i) for i in range(10**6)]") == "" and end("[print(i, flush=True) for i in range(10**6)]") == ""
    assert "ZeroDivisionError" in end("print(1 / 0)")
