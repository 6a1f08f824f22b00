"""experiments/gpu.sh with a Python that only says what it is asked for."""

import os
import subprocess

import torch

from tools import bench
from toy import ROOT, program


def test_what_is_done_is_not_done_again_and_a_failure_is_named(tmp_path):
    says = 'case "$*" in -c*) ;; *) echo "$@";; esac; case "$*" in *MODEL=none*) exit 1;; esac'
    python = program(tmp_path / "python", says)
    command = [str(ROOT / "experiments/gpu.sh"), str(tmp_path)]

    def run(**models):
        env = os.environ | {"PYTHON": python} | models
        return subprocess.run(command, env=env, capture_output=True, text=True)

    first = run(QWEN="none")
    assert first.returncode == 1 and "error: gsm8k failed, see " in first.stderr and "MODEL=none" in first.stderr
    assert {file.stem for file in tmp_path.glob("*.done")} == {"tests", "bench", "bench-plain"}
    asked = (tmp_path / "bench.log").read_text().split()
    assert asked[:2] == ["-m", "tools.bench"] and {*asked[2:]} <= {*bench.workloads(torch.device("cuda"))}
    (tmp_path / "bench.log").write_text("kept\n")
    again = run(QWEN="some")
    assert again.returncode == 0 and "kept" in again.stdout and "TASK=examples/gsm8k.py MODEL=some" in again.stdout
