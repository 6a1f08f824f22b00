"""experiments/gpu/run.sh from labels to tables, on CPU with tiny settings: killed on the way, resumed, then skipped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from toy import ROOT

STAGES = "label pretrain-tiny decay-tiny pretrain-gpt2 before-tiny before-gpt2 grpo-tiny after-tiny".split()
STAGES.append("bench")


def test_a_stage_that_needs_a_model_says_so(bpe_folder, tmp_path):
    env = os.environ | dict(OUT=str(tmp_path / "gpu"), TINY="1", PYTHON=sys.executable, GPT2_TOKENIZER=str(bpe_folder))
    command = [str(ROOT / "experiments/gpu/run.sh"), "grpo-ocaml"]
    found = subprocess.run(command, env=env | {"POSITIONS": "builtin"}, capture_output=True, text=True)
    assert found.returncode and "grpo-ocaml needs CODER" in found.stderr


@pytest.mark.slow
@pytest.mark.needs("stockfish")
def test_from_labels_to_tables_through_a_kill(bpe_folder, tmp_path):
    out, command = tmp_path / "gpu", str(ROOT / "experiments/gpu/run.sh")
    env = {name: value for name, value in os.environ.items() if name != "POSITIONS"} | {"OMP_NUM_THREADS": "1"}
    env |= dict(OUT=str(out), TINY="1", MINUTES="200", PYTHON=sys.executable, GPT2_TOKENIZER=str(bpe_folder))
    first = subprocess.Popen([command, "label", "pretrain-tiny"], env=env, start_new_session=True)
    while not (out / "tiny" / "trainer.pt").exists():  # until the middle of pretraining
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run([command, *STAGES], env=env, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stderr
    for stage in STAGES:
        assert (out / f"{stage}.done").read_text().strip() == "finished", stage
    assert second.stdout.count("finished before") == 1  # label
    assert "resumed" in (out / "pretrain-tiny.log").read_text()
    # in about the last eleventh of all steps the learning rate falls
    seen = [json.loads(line)["step"] for line in (out / "tiny" / "skill.jsonl").read_text().splitlines()]
    assert max(seen) == 11 * int((out / "tiny.decay").read_text())
    summary = (out / "summary.md").read_text()
    assert "\nCost: 2 steps, " in summary and "\n    W3 whole step" in summary
    assert re.search(r"^\| policy legal T=0 +\| .* \| +[+-]\S+ ± .* \|", summary, re.M), summary
    env |= {"OUT": str(tmp_path / "other"), "POSITIONS": str(out / "positions.txt.gz")}
    shutil.copytree(out / "tiny", tmp_path / "other" / "tiny")
    measured = subprocess.run([command, "before-tiny"], env=env, capture_output=True, text=True)
    assert measured.returncode == 0 and "before-tiny: finished" in measured.stdout, measured.stderr
    assert re.findall(r"^## (\S+): finished, \d+ s$", summary, re.M) == STAGES
