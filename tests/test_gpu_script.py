"""experiments/gpu.sh on a CPU with tiny settings: it fails with a sentence, continues, and skips what is done."""

import os
import subprocess
import sys

import pytest

from toy import ROOT


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_a_failure_is_named(tmp_path, toy_model):
    command = [str(ROOT / "experiments/gpu.sh"), str(tmp_path)]
    env = os.environ | dict(TINY="1", PYTHON=sys.executable, QWEN=str(tmp_path / "none"))
    first = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert first.returncode == 1 and "error: gsm8k failed, see " in first.stderr
    assert "there is no such folder" in first.stderr
    assert {file.name for file in tmp_path.glob("*.done")} == {"bench.done", "bench-plain.done"}
    written = (tmp_path / "bench.log").stat().st_mtime_ns
    again = subprocess.run(command, env=env | {"QWEN": ""}, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("W3 whole step") == 2 and (tmp_path / "bench.log").stat().st_mtime_ns == written
