"""Checkpoints are whole or not there, and a run that is killed at any moment ends as one that never was."""

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import toy
import train
from model import GPT
from nanorook import checkpoint, monitor, parallel
from nanorook.checkpoint import CheckpointError

ROOT = Path(__file__).parent.parent
TRAINER = {"optimizer": {"state": {}}, "settings": {"SEED": 0}, "best": (0.5, 1), "good": (1, 2.5)}


@pytest.fixture(scope="module")
def small():
    return toy.model()


def save(out, model, *steps, keep=10):
    out.mkdir(exist_ok=True)
    for step in steps:
        checkpoint.save(out, model, {**TRAINER, "step": step}, keep)


def load(out):
    """(name of the folder, trainer state, what was printed)"""
    messages = []
    folder, trainer = checkpoint.load(out, messages.append)
    return folder.name, trainer, messages


def test_what_is_saved_comes_back(small, tmp_path):
    save(tmp_path, small, 1, 2)
    name, trainer, messages = load(tmp_path)
    assert name == "step-000002" and trainer == {**TRAINER, "step": 2} and not messages
    assert all(map(torch.equal, GPT.load(tmp_path / "latest").parameters(), small.parameters()))
    assert checkpoint.load(tmp_path / "empty", print) is None


def test_only_some_are_kept_and_the_best_is_one_of_them(small, tmp_path):
    save(tmp_path, small, *range(1, 6), keep=2)
    (tmp_path / "step-final").mkdir()  # of another name: not a checkpoint
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-000005", "step-000004", "step-000001"]


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "sums.json", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted", "without a sum"])
def test_damage_is_named_and_the_one_before_is_taken(small, tmp_path, file, damage):
    save(tmp_path, small, 1, 2)
    path, sums = tmp_path / "step-000002" / file, tmp_path / "step-000002" / "sums.json"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "deleted":
        path.unlink()
    else:
        listed = {} if file == "sums.json" else json.loads(sums.read_text())
        sums.write_text(json.dumps({name: digest for name, digest in listed.items() if name != file}))
    name, trainer, messages = load(tmp_path)
    assert name == "step-000001" and trainer["step"] == 1
    assert len(messages) == 1 and "step-000002 is damaged" in messages[0]


def test_nothing_whole_is_an_error_and_not_a_fresh_start(small, tmp_path):
    save(tmp_path, small, 1)
    (tmp_path / "step-000001" / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="FRESH=1"):
        load(tmp_path)


class Code:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('executed').touch()",)


def test_code_in_a_checkpoint_is_not_executed(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, small, 1, 2)
    folder = tmp_path / "step-000002"
    torch.save({"step": 2, "code": Code()}, folder / "trainer.pt")
    sums = {file.name: checkpoint.digest(file) for file in folder.iterdir() if file.name != "sums.json"}
    (folder / "sums.json").write_text(json.dumps(sums))  # as a stranger would make them
    name, _, messages = load(tmp_path)
    assert name == "step-000001" and "damaged" in messages[0] and "\n" not in messages[0]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("owner, name", [(torch, "save"), (os, "fsync"), (os, "rename")])
def test_a_full_disk_leaves_the_one_before_whole(small, tmp_path, monkeypatch, owner, name):
    save(tmp_path, small, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(CheckpointError, match="step-000002 could not be written .No space left"):
            save(tmp_path, small, 2)
    assert load(tmp_path)[0] == "step-000001" and not list(tmp_path.glob(".step*"))


def test_a_folder_that_vanished_or_cannot_be_written_to(small, tmp_path):
    out = tmp_path / "out"
    save(out, small, 1)
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="step-000002 could not be written .No such file"):
        checkpoint.save(out, small, {**TRAINER, "step": 2}, 2)
    assert not out.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        checkpoint.lock(tmp_path / "file" / "out")


def test_everything_is_flushed_before_it_gets_its_name(small, tmp_path, monkeypatch):
    events, rename = [], os.rename
    monkeypatch.setattr(checkpoint, "flush", lambda path: events.append(path.name))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"now {b.name}"), rename(a, b)))
    save(tmp_path, small, 1)
    files = {file.name for file in (tmp_path / "step-000001").iterdir()}
    named = events.index("now step-000001")
    assert files | {".step-000001"} <= {*events[:named]} and tmp_path.name in events[named:]


def test_the_lock_is_held_by_the_living_alone(tmp_path):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = checkpoint.lock(tmp_path)
        os.write(writing, b"locked")
        signal.pause()
        held.close()
    os.read(reading, 6)
    with pytest.raises(CheckpointError, match="in use by another run"):
        checkpoint.lock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    checkpoint.lock(tmp_path).close()


def test_what_a_killed_process_has_left_is_deleted_and_nothing_else(small, tmp_path):
    save(tmp_path, small, 1)
    left = [tmp_path / name for name in ("..step-000002-x1y2", ".step-000002", ".model-z3")]
    for folder in left:
        folder.mkdir()
    save(tmp_path, small, 2)
    assert not any(folder.exists() for folder in left)
    for name in ("metrics.jsonl", ".metrics.jsonl", ".latest", "thesis.tex"):
        (tmp_path / name).write_text("{}")
    left[0].mkdir()
    with pytest.raises(CheckpointError, match="holds thesis.tex"):
        checkpoint.clear(tmp_path)
    assert len(checkpoint.folders(tmp_path)) == 2
    (tmp_path / "thesis.tex").unlink()
    checkpoint.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rewind_keeps_each_step_once_and_ends_at_a_damaged_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "x": NaN}\n{"step": 2}\n{"step": 3}\n{"step": 4, "y"')
    assert [row["step"] for row in checkpoint.rewind(file, 2)] == [1, 2]
    assert len(file.read_text().splitlines()) == 2 and file.read_text().endswith("}\n")
    assert checkpoint.rewind(tmp_path / "none", 2) == []
    for bad in (b"\xff\xfe{}", b"[" * 100_000, b"5", b"null", b'{"other": 1}', b'{"step": "2"}'):
        file.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
        assert checkpoint.rewind(file, 3) == [{"step": 1}]


def test_a_second_signal_ends_the_process_at_once():
    pid = os.fork()
    if pid == 0:
        received = checkpoint.catch_signals()
        os.kill(os.getpid(), signal.SIGINT)
        if received == [signal.SIGINT]:  # the step goes on
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


class Killed(BaseException):
    """As SIGKILL: no handler of errors sees it."""


RUN = dict(STEPS=4, SAVE_EVERY=2, EVAL_EVERY=3, REF_UPDATE_EVERY=2, EPOCHS=2, LR=0.01, LR_SCHEDULE="cosine")
# The moments at which a run is killed: the nth call of a function, counted from the start of the run.
MOMENTS = [(train, "evaluate", 1), (train, "evaluate", 2), (train, "rollout", 1), (train, "update", 4)]
MOMENTS += [(monitor, "open_log", 1), (monitor, "show", 1), (parallel, "finish", 1), (torch, "save", 2)]
MOMENTS += [(checkpoint, "flush", n) for n in (1, 3, 9, 12)] + [(os, "rename", n) for n in (2, 3, 4)]
MOMENTS += [(os, "symlink", 2), (os, "replace", 2)]


def all_of(out):
    """All that a run leaves and that does not tell the time."""
    files = ["samples.jsonl", "skill.json", "model/model.safetensors"]
    return toy.rows(out), [(out / file).read_bytes() for file in files]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory, toy_model):
    out = tmp_path_factory.mktemp("whole")
    toy.run(out, MODEL=toy_model, **RUN)
    return all_of(out)


@pytest.mark.parametrize("owner, name, nth", MOMENTS)
def test_killed_at_any_moment_a_run_ends_the_same(owner, name, nth, tmp_path, monkeypatch, toy_run, never_killed):
    function, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            raise Killed
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            toy_run(**RUN)
    gc.collect()  # a process that was killed holds no lock
    latest = tmp_path / "out" / "latest"
    assert not latest.is_symlink() or GPT.load(latest)  # `latest` never names half a checkpoint
    toy_run(**RUN)
    assert all_of(tmp_path / "out") == never_killed


def test_a_stopped_run_saves_and_goes_on_between_failures(tmp_path, monkeypatch, toy_run, capsys):
    """SIGTERM in steps in which updates fail too: the way back, the factor of LR and the counters are kept as well."""
    rollout, results = train.rollout, []
    for stops in ((), (4, 6, 7)):
        for stop in (*stops, None):

            def broken(model, questions, step, stop=stop):
                if step + 1 == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                parts = rollout(model, questions, step)
                bad = step in (3, 5, 6)
                return [(b._replace(advantages=b.advantages * float("nan")) if bad else b, s) for b, s in parts]

            monkeypatch.setattr(train, "rollout", broken)
            monkeypatch.setattr(train, "SNAPSHOT_EVERY", 2)
            run = dict(STEPS=8, MAX_CONSECUTIVE_NANS=2, SAVE_EVERY=100, LR_SCHEDULE="constant")
            if stop:
                with pytest.raises(SystemExit, match="143"):
                    toy_run(f"out{len(stops)}", **run)
                assert f"stopped after step {stop}; the same command goes on from there." in capsys.readouterr().out
                gc.collect()
            else:
                toy_run(f"out{len(stops)}", **run)
        results.append(all_of(tmp_path / f"out{len(stops)}"))
    rows = results[0][0]
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert rows[7]["lr"] == rows[4]["lr"] / 2  # it went back
    assert results[1] == results[0]


@pytest.mark.slow
def test_killed_by_the_system(tmp_path, toy_model):
    """SIGKILL at random moments; then to the end, and nothing is lost."""
    settings = {**toy.SETTINGS, "MODEL": toy_model, **RUN, "STEPS": 100}
    command = [sys.executable, "train.py", *(f"{name}={value}" for name, value in settings.items())]
    rng = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen([*command, f"OUT_DIR={tmp_path}/killed"], cwd=ROOT)
        time.sleep(rng.uniform(3, 8))
        process.kill()
        process.wait()
    for out in ("killed", "whole"):
        subprocess.run([*command, f"OUT_DIR={tmp_path}/{out}"], cwd=ROOT, check=True)
    assert all_of(tmp_path / "killed") == all_of(tmp_path / "whole")
