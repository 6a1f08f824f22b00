"""Nothing is lost: a run that is killed, at any moment and in any way, ends as one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import data
import engine
import tasks
import train
from model import GPT
from skill import ask

ROOT = Path(__file__).parent.parent
SMALL = dict(BATCH_POSITIONS=2, GROUP_SIZE=2, MIX_ENV_RATIO=0.5, EVAL_POSITIONS=1, EVAL_EVERY=5, SAVE_EVERY=1)
SMALL |= dict(MAX_NEW_TOKENS=90, MAX_NEW_TOKENS_ENV=90, DTYPE="float32", KL_TARGET=0.001, REF_UPDATE_EVERY=4, LR=0.001)


def start(out, **settings):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OUT_DIR": str(out)}
    env |= {name: str(value) for name, value in {**SMALL, **settings}.items()}
    return subprocess.Popen([sys.executable, "train.py"], cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True)


def finish(process):
    said, wrong = process.communicate(timeout=300)
    return process.returncode, said, wrong


def what_is_left(out):
    """Everything that does not tell the time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("seconds", "tokens_per_second", "peak_memory_gb"):
            del row[name]
    files = [out / "model" / "model.safetensors", out / "samples.jsonl", out / "skill.json"]
    return rows, [file.read_bytes() for file in files]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    code, _, wrong = finish(start(out, STEPS=10))
    assert code == 0, wrong
    return what_is_left(out)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_soak(tmp_path, never_killed, how):
    """Killed twenty times at random moments, saving included; half as many times politely."""
    rng, kills = random.Random(int(how)), 20 if how == signal.SIGKILL else 5
    while kills:
        process = start(tmp_path / "out", STEPS=10)
        time.sleep(rng.uniform(3, 9))
        process.send_signal(how)
        code, said, wrong = finish(process)
        kills -= 1
        if how == signal.SIGTERM and "finishing this step" in said:
            assert code in (0, 128 + how) and ("goes on from there" in said or code == 0), wrong
    code, said, wrong = finish(start(tmp_path / "out", STEPS=10))
    assert code == 0, wrong
    rows, files = what_is_left(tmp_path / "out")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert (rows, files) == never_killed


@pytest.mark.slow
def test_a_stopped_run_says_so_and_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "out"
    process = start(out, STEPS=50)
    while not (out / "latest").exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, said, wrong = finish(process)
    assert code == 128 + signal.SIGTERM and "goes on from there" in said, wrong
    done = len((out / "metrics.jsonl").read_text().splitlines())
    code, said, wrong = finish(start(out, STEPS=done + 1, GROUP_SIZE=3))
    assert code == 0 and f"this run's first {done} steps" in said and "GROUP_SIZE was 2 and is now 3" in said, wrong
    assert len((out / "metrics.jsonl").read_text().splitlines()) == done + 1
    code, said, wrong = finish(start(out, STEPS=done + 2, SEED=1))
    assert code == 1 and wrong.startswith("error: this run was started with SEED=0") and wrong.count("\n") == 1
    code, said, wrong = finish(start(out, STEPS=1, SEED=1, FRESH=1))
    assert code == 0 and json.loads((out / "settings.json").read_text())["SEED"] == 1, wrong


# ---------------------------------------------------------------------------------------------------------------------
# A Stockfish that fails


def stub(tmp_path, text):
    path = tmp_path / "engine.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def unlabelled():
    return ask([p._replace(moves=()) for p in data.load("builtin")[:3]], 3, "expanded")


def test_live_labels_are_those_of_stockfish():
    live = engine.LiveLabels()
    samples = unlabelled()
    labelled = live(samples)
    other = engine.Engine(engine.find_stockfish())
    for before, after in zip(samples, labelled):
        if before.prompt.startswith("A"):
            assert after == before
        else:
            board = tasks.chess.Board(tasks.contract(before.prompt[3:].strip()))
            other.send("ucinewgame")
            assert not before.labels and after.labels == other.search(board, engine.NODES)
    other.close()
    assert live.failures == 0 and len({s.labels for s in labelled if s.prompt.startswith("P")}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        pytest.param("sleep 60", marks=pytest.mark.slow),
        "while read x; do echo uciok; echo bestmove e9e9; done",
    ],
)
def test_an_engine_that_dies_hangs_or_talks_nonsense(tmp_path, monkeypatch, text):
    monkeypatch.setenv("STOCKFISH_PATH", stub(tmp_path, text))
    monkeypatch.setattr(engine.Engine, "SILENCE", 0.1)
    live = engine.LiveLabels()
    for _ in range(3):
        assert all(not s.labels for s in live(unlabelled()) if s.prompt.startswith("P"))
    assert live.failures == live.PATIENCE  # counted, and then left alone


def test_an_engine_that_dies_once_is_started_again(tmp_path, monkeypatch):
    live = engine.LiveLabels()
    wanted = live(unlabelled())
    live.engine.process.kill()
    live.engine.process.wait()
    assert live(unlabelled()) == wanted and live.failures == 1


def test_without_an_engine_the_rules_alone_are_graded(monkeypatch):
    monkeypatch.delenv("STOCKFISH_PATH", raising=False)
    monkeypatch.setattr(engine.shutil, "which", lambda *a, **k: None)
    live = engine.LiveLabels()
    assert live.path is None and live(unlabelled()) == unlabelled()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.slow
def test_out_of_memory_halves_the_microbatch_once(tmp_path, monkeypatch, capsys):
    update, calls = train.update, []

    def short_of_memory(*args):
        calls.append(train.MICROBATCH_TOKENS)
        if len(calls) == 1:
            raise train.torch.OutOfMemoryError("CUDA out of memory")
        return update(*args)

    for name, value in {**SMALL, "STEPS": 2, "OUT_DIR": str(tmp_path / "out"), "MICROBATCH_TOKENS": 4096}.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "finish", lambda: None)
    monkeypatch.setattr(train, "update", short_of_memory)
    train.main()
    assert calls == [4096, 2048, 2048]
    assert "once more with MICROBATCH_TOKENS=2048" in capsys.readouterr().out
    assert GPT.load(tmp_path / "out" / "model")


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    out = tmp_path / "out"
    assert finish(start(out, STEPS=2))[0] == 0
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OUT_DIR": str(out), "STEPS": "4"}
    env |= {name: str(value) for name, value in SMALL.items()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and "2 process(es)" in done.stdout
    assert all(row["tokens"] > 0 and row["skipped"] == 0 for row in rows)
