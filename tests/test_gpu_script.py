"""experiments/gpu/run.sh from labels to tables, on CPU with tiny settings: killed on the way, resumed, then skipped."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from nanorook import positions
from test_tokenizer import chess_lines
from tools.evaluate import ENVIRONMENT, POLICY

ROOT = Path(__file__).parent.parent
PRETRAINING = [f"{stage}-{model}" for model in ("tiny", "gpt2") for stage in ("pretrain", "decay")]
PAIRS = [f"{stage}-{model}" for stage in ("before", "grpo", "after") for model in ("tiny", "gpt2")]
STAGES = ["label", *PRETRAINING, *PAIRS, "bench"]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """TINY settings, and a small byte-level BPE in the place of GPT-2's."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(chess_lines(300), vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    kept = {n: v for n, v in os.environ.items() if n not in ("POSITIONS", "OUT", "MINUTES")}
    tiny = {"TINY": "1", "MINUTES": "200", "PYTHON": sys.executable, "GPT2_TOKENIZER": str(folder)}
    return kept | tiny | {"OMP_NUM_THREADS": "1"}


def script(env, *arguments, **more):
    command = [ROOT / "experiments/gpu/run.sh", *arguments]
    return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=600)


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.needs("stockfish")
def test_from_labels_to_tables_through_two_kills(env, tmp_path):
    out = tmp_path / "gpu"
    env = env | {"OUT": str(out)}
    with open(tmp_path / "said", "w") as said:
        first = subprocess.Popen([ROOT / "experiments/gpu/run.sh"], env=env, stdout=said, start_new_session=True)
        wait_for(out / "tiny" / "trainer.pt", first)  # in the middle of pretraining
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        second = subprocess.Popen([ROOT / "experiments/gpu/run.sh"], env=env, stdout=said)
        wait_for(out / "gpt2" / "trainer.pt", second)
        second.terminate()
        assert second.wait(timeout=120) == 1
    third = script(env)
    assert third.returncode == 0, third.stderr
    for stage in STAGES:
        assert (out / f"{stage}.done").read_text().strip() == "finished", stage
    assert third.stdout.count("finished before") == 3  # label and pretraining of tiny, by the first two calls
    assert "resumed" in (out / "pretrain-tiny.log").read_text()
    assert "goes on from there" in (out / "pretrain-gpt2.log").read_text()  # it was asked to stop, and saved
    assert "resumed" in (out / "pretrain-gpt2.log").read_text()
    for model in ("tiny", "gpt2"):  # in about the last sixth of all steps the learning rate falls
        seen = [json.loads(line)["step"] for line in (out / model / "skill.jsonl").read_text().splitlines()]
        assert max(seen) == 6 * int((out / f"{model}.decay").read_text())

    for model in ("tiny", "gpt2"):
        before = json.loads((out / f"before-{model}.json").read_text())
        after = json.loads((out / f"after-{model}.json").read_text())
        assert len(before["models"]) == 1 and len(after["models"]) == 2
        for skill in (*before["models"].values(), *after["models"].values(), after["difference"]):
            for temperature in ("T=0", "T=1"):
                assert {"policy", "environment", "self-play"} <= set(skill[temperature])
                assert set(POLICY) <= set(skill[temperature]["policy"])
                assert set(ENVIRONMENT) <= set(skill[temperature]["environment"])
        metrics = [json.loads(line) for line in (out / f"grpo-{model}" / "metrics.jsonl").read_text().splitlines()]
        assert [m["step"] for m in metrics] == [1, 2] and not any(m["skipped"] for m in metrics)
    formats = [json.loads((out / m / "config.json").read_text())["chess_format"] for m in ("tiny", "gpt2")]
    assert formats[0] != formats[1] == "rookworld"
    assert json.loads((out / "bench.json").read_text())["workloads"]["W4"]["ours"]
    summary = (out / "summary.md").read_text()
    assert summary.count("GRPO: 2 steps, ") == 2 and summary.count("| policy: legal move | ") == 2
    assert "## W4 whole step" in summary
    assert re.findall(r"^- (\S+): finished, \d+ s$", summary, re.M) == STAGES

    logs = {log: log.stat().st_mtime_ns for log in out.glob("*.log")}
    fourth = script(env)
    assert fourth.returncode == 0 and fourth.stdout.count("finished before") == len(STAGES)
    assert logs == {log: log.stat().st_mtime_ns for log in out.glob("*.log")}


@pytest.mark.slow
@pytest.mark.needs("stockfish")
def test_labels_cut_by_their_limit_are_used(env, tmp_path):
    """What Stockfish had labelled stays; half a unit, as a kill leaves it, does not."""
    (tmp_path / "slow").write_text('#!/bin/sh\n[ "$1" = -m ] && exec sleep 60\nexec "$REAL" "$@"\n')
    (tmp_path / "slow").chmod(0o755)
    few = positions.split(positions.load("builtin"))[0][:3]
    lines = [positions.write_position(position) + "\n" for position in few]
    partial = '{"nodes": 1}\n' + lines[0] + "# unit 0\n# unit 1\n" + lines[1] + "# unit 2\n" + lines[2][:-3]
    (tmp_path / "positions.txt.gz.partial").write_text(partial)
    run = script(env, "label", OUT=str(tmp_path), MINUTES="0.5", PYTHON=str(tmp_path / "slow"), REAL=sys.executable)
    assert run.returncode == 0 and "label: cut by its time limit" in run.stdout, run.stderr
    assert gzip.decompress((tmp_path / "positions.txt.gz").read_bytes()).decode() == lines[0] + lines[1]
    assert "label: cut by its time limit before" in script(env, "label", OUT=str(tmp_path)).stdout


@pytest.mark.parametrize(
    "arguments, change, said",
    [
        (["lable"], {}, "lable is no stage"),
        ([], {"PYTHON": "echo torch"}, "has no PyTorch"),
        ([], {"PYTHON": '[ "$3" = torch ] || echo rapidfuzz'}, "lacks rapidfuzz: install"),
        (["label"], {"STOCKFISH_PATH": "/nowhere/stockfish"}, "STOCKFISH_PATH is /nowhere/stockfish"),
        (["label"], {"GPT2_TOKENIZER": "."}, "GPT-2's tokenizer: "),
        (["label"], {"TINY": "", "CUDA_VISIBLE_DEVICES": ""}, "TINY=1 rehearses"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(env, tmp_path, arguments, change, said):
    if "PYTHON" in change:  # an interpreter that answers when it is asked which packages it lacks
        (tmp_path / "python").write_text(f"#!/bin/sh\n{change['PYTHON']}\n")
        (tmp_path / "python").chmod(0o755)
        change = {"PYTHON": str(tmp_path / "python")}
    if "GPT2_TOKENIZER" in change:
        (tmp_path / "vocab.json").write_text("{")
        change = {"GPT2_TOKENIZER": str(tmp_path)}
    run = script(env, *arguments, OUT=str(tmp_path / "out"), **change)
    assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
