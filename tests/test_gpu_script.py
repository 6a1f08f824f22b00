"""experiments/gpu/run.sh from labels to tables, on CPU with tiny settings: killed on the way, resumed, then skipped."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from nanorook import positions
from toy import ROOT, program

STAGES = "label pretrain-tiny decay-tiny pretrain-gpt2 before-tiny before-gpt2 grpo-tiny after-tiny bench".split()


@pytest.fixture(scope="module")
def script(bpe_folder):
    """script("label", OUT=...) is run.sh to its end, with TINY settings and a small byte-level BPE for GPT-2's."""
    kept = {n: v for n, v in os.environ.items() if n not in ("POSITIONS", "OUT", "MINUTES")}
    tiny = {"TINY": "1", "MINUTES": "200", "PYTHON": sys.executable, "GPT2_TOKENIZER": str(bpe_folder)}

    def run(*arguments, start=subprocess.run, **env):
        command, env = [ROOT / "experiments/gpu/run.sh", *arguments], kept | tiny | {"OMP_NUM_THREADS": "1"} | env
        more = dict(capture_output=True, timeout=600) if start == subprocess.run else dict(start_new_session=True)
        return start(command, env=env, text=True, **more)

    return run


@pytest.mark.slow
@pytest.mark.needs("stockfish")
def test_from_labels_to_tables_through_a_kill(script, tmp_path):
    """Without the stages of GPT-2 that differ from the embedded shape's in nothing but the folder."""
    out = tmp_path / "gpu"
    first = script("label", "pretrain-tiny", start=subprocess.Popen, OUT=str(out))
    while not (out / "tiny" / "trainer.pt").exists():  # until the middle of pretraining
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = script(*STAGES, OUT=str(out))
    assert second.returncode == 0, second.stderr
    for stage in STAGES:
        assert (out / f"{stage}.done").read_text().strip() == "finished", stage
    assert second.stdout.count("finished before") == 1  # label
    assert "resumed" in (out / "pretrain-tiny.log").read_text()
    # in about the last eleventh of all steps the learning rate falls
    seen = [json.loads(line)["step"] for line in (out / "tiny" / "skill.jsonl").read_text().splitlines()]
    assert max(seen) == 11 * int((out / "tiny.decay").read_text())

    before, after = (json.loads((out / f"{when}-tiny.json").read_text()) for when in ("before", "after"))
    assert len(before["models"]) == 1 and len(after["models"]) == 2 and set(after["difference"]) == {"T=0", "T=1"}
    assert json.loads((out / "gpt2" / "config.json").read_text())["chess_format"] == "rookworld"
    summary = (out / "summary.md").read_text()
    assert "GRPO: 2 steps, " in summary and "| policy: legal move | " in summary and "## W4 whole step" in summary
    assert re.findall(r"^- (\S+): finished, \d+ s$", summary, re.M) == STAGES


@pytest.mark.slow
@pytest.mark.needs("stockfish")
def test_labels_cut_by_their_limit_are_used(script, tmp_path):
    """What Stockfish had labelled stays; half a line, as a kill leaves it, does not."""
    slow = program(tmp_path / "slow", '[ "$1" = -m ] && exec sleep 60\nexec "$REAL" "$@"')
    few = positions.split(positions.load("builtin"))[0][:3]
    lines = [positions.write_position(position) + "\n" for position in few]
    partial = '{"nodes": 1}\n' + lines[0].strip() + "\t" + lines[1] + "\n" + lines[2][:-3]
    (tmp_path / "positions.txt.gz.partial").write_text(partial)
    run = script("label", OUT=str(tmp_path), MINUTES="0.5", PYTHON=slow, REAL=sys.executable)
    assert run.returncode == 0 and "label: cut by its time limit" in run.stdout, run.stderr
    assert gzip.decompress((tmp_path / "positions.txt.gz").read_bytes()).decode() == lines[0] + lines[1]
    assert "label: cut by its time limit before" in script("label", OUT=str(tmp_path)).stdout


def test_of_a_run_that_was_cut_the_newest_checkpoint_is_measured(script, tmp_path):
    python = program(tmp_path / "python", '[ "$1" != -m ] || echo "$@"')
    for step in ("step-000050", "step-000100"):
        (tmp_path / "grpo-tiny" / step).mkdir(parents=True)
    (tmp_path / "summary.md").touch()
    run = script("after-tiny", OUT=str(tmp_path), PYTHON=python)
    assert run.returncode == 0 and "/grpo-tiny/step-000100 " in (tmp_path / "after-tiny.log").read_text(), run.stderr
