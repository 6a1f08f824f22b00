"""Nothing is lost: a run that is killed, at any moment and in any way, ends as one that never was."""

import contextlib
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


def wait_for(file, process):
    while not (file.exists() and file.stat().st_size) and process.poll() is None:
        time.sleep(0.1)
    return process


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
    """Killed twenty times at random moments, saving included, or asked to leave five times; a run that has got to its
    end is compared, and the next one begins."""
    rng, out, kills, code = random.Random(int(how)), tmp_path / "0", 20 if how == signal.SIGKILL else 5, 1
    while kills or code:
        process = start(out, STEPS=10)
        if kills:
            time.sleep(rng.uniform(2, 5.5))
            process.send_signal(how)
        code, said, wrong = finish(process)
        kills -= code != 0
        assert code in (0, -how, 128 + how) and (code != 128 + how or "goes on from there" in said), wrong
        if code == 0:
            rows, files = what_is_left(out)
            assert [row["step"] for row in rows] == list(range(1, 11))
            assert (rows, files) == never_killed
            out = out.with_name(str(int(out.name) + 1))


@pytest.mark.slow
def test_a_stopped_run_says_so_and_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "out"
    process = wait_for(out / "metrics.jsonl", start(out, STEPS=50, NPROC=2, SAVE_EVERY=50))
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


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run(tmp_path):
    out = tmp_path / "out"
    process = wait_for(out / "latest", start(out, STEPS=50, NPROC=2))
    other = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(other, signal.SIGKILL)
    code, said, wrong = finish(process)
    assert code == 1 and wrong.splitlines()[-1].startswith("error: another process of this run has ended"), wrong
    steps = len((out / "metrics.jsonl").read_text().splitlines())
    assert finish(start(out, STEPS=steps))[0] == 0


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
        pytest.param("sleep 20", marks=pytest.mark.slow),
        "while read x; do echo uciok; echo bestmove e9e9; done",
    ],
)
def test_an_engine_that_dies_hangs_or_talks_nonsense(tmp_path, monkeypatch, text):
    monkeypatch.setenv("STOCKFISH_PATH", stub(tmp_path, text))
    monkeypatch.setattr(engine.Engine, "SILENCE", 0.1)
    live, started = engine.LiveLabels(), time.monotonic()
    for _ in range(3):
        assert all(not s.labels for s in live(unlabelled()) if s.prompt.startswith("P"))
    assert live.failures == live.PATIENCE  # counted, and then left alone
    assert time.monotonic() - started < 20 * live.PATIENCE / 2  # nobody waits for an engine that hangs


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


# ---------------------------------------------------------------------------------------------------------------------
# In this process


@pytest.fixture
def small(monkeypatch):
    """train.py with SMALL settings, and further ones, on few positions."""
    few, handlers = data.load("builtin")[:200], [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train.torch.set_num_threads(1)
    monkeypatch.setattr(data, "load", lambda source: few)
    for name in ("finish", "plot", "write_report"):  # pytest has arguments of its own; pictures are for other tests
        monkeypatch.setattr(train, name, lambda *_: None)
    monkeypatch.setattr(train, "look", lambda *_: {"skill": (0.0, 0.0)})
    monkeypatch.setattr(train, "TASKS", {"P: ": 60, "A: ": 60})

    def set(**settings):
        for name, value in {**SMALL, **settings}.items():
            monkeypatch.setattr(train, name, value)

    yield set
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGTERM, handlers[1])


@pytest.mark.slow
def test_all_that_a_step_leaves_to_the_next_is_in_the_checkpoint(tmp_path, monkeypatch, small):
    """Stopped between failures, so that the way back is resumed as well: last good state, factor of LR, counters."""
    rollout, left = train.rollout, []
    for stops in ((), (4, 6, 7)):
        for stop in (*stops, None):

            def broken(model, samples, step, stop=stop):
                if step + 1 == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                batches, graded = rollout(model, samples, step)
                if step in (3, 5, 6):
                    batches = [b._replace(rewards=b.rewards * float("nan")) for b in batches]
                return batches, graded

            monkeypatch.setattr(train, "rollout", broken)
            monkeypatch.setattr(train, "SNAPSHOT_EVERY", 2)
            monkeypatch.setattr(train, "first_look", lambda *_: None)
            small(STEPS=8, OUT_DIR=str(tmp_path / f"out{len(stops)}"), MAX_CONSECUTIVE_NANS=2, EVAL_EVERY=0)
            with pytest.raises(SystemExit, match="143") if stop else contextlib.nullcontext():
                train.main()
        out = tmp_path / f"out{len(stops)}"
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            for name in ("seconds", "tokens_per_second", "peak_memory_gb"):
                del row[name]
        left.append((rows, (out / "model" / "model.safetensors").read_bytes()))
    assert [row["skipped"] for row in left[0][0]] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert left[0][0][7]["lr"] < left[0][0][4]["lr"] / 1.9  # it went back
    assert left[1] == left[0]


def look_at(weights):
    batches, graded = train.rollout(weights, train.draw_prompts(data.load("builtin")[:100], 0, "expanded"), 0)
    train.first_look(weights, None, batches, graded)
    return batches


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_or_rewards_that_are_not_finite(small, value):
    small(DTYPE=train.torch.float32)
    model = GPT.load(ROOT / "weights" / "tiny")
    batches = look_at(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = train.torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    wrong = [b._replace(rewards=b.rewards * value) for b in batches]
    assert train.update(model, None, optimizer, wrong, 0.0)["skipped"] == 1
    assert all(map(train.torch.equal, before, model.parameters()))
    with train.torch.no_grad():
        model.h[2].attn.c_attn.weight[0, 0] = value
    with pytest.raises(SystemExit, match="NaN in the weights"):
        look_at(model)


def test_the_reference_is_asked_where_it_is(monkeypatch):
    """Whatever device the batch is on: it goes to REF_DEVICE, and the answer comes back."""
    batch = train.Batch(*(train.torch.zeros(2, 3) for _ in train.Batch._fields))
    asked = []
    monkeypatch.setattr(train, "REF_DEVICE", "meta")
    monkeypatch.setattr(train, "forward", lambda reference, b: asked.append(b) or (train.torch.ones(2, 3), None))
    assert train.refer("reference", batch).device.type == "cpu"
    assert all(tensor.device.type == "meta" for tensor in asked[0])


def test_nothing_is_fetched_unless_the_hub_is_named(monkeypatch, tmp_path):
    def fetched(name, *_, **__):
        raise AssertionError(f"reached for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    monkeypatch.setattr("tiktoken.get_encoding", fetched)
    assert GPT.load(ROOT / "weights" / "tiny").tokenizer and data.load("builtin")
    for source in ("nowhere", "./a/b", "../a/b", "/a/b", str(tmp_path / "none"), "a/b/c", "https://a.b/c"):
        with pytest.raises(ValueError, match="it is no hub id"):
            GPT.load(source)
        with pytest.raises(ValueError, match="cannot be read"):
            data.load(source)
    with pytest.raises(ValueError, match="reached for owner/name"):
        GPT.load("owner/name")
    with pytest.raises(ValueError, match="reached for owner/name|pyarrow"):
        data.load("hub:owner/name")
