"""Checkpoints are whole or not there, and a run that is killed at any moment ends as one that never was."""

import errno
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

import toy
import train
from model import GPT
from nanorook import checkpoint, monitor

ROOT = Path(__file__).parent.parent


def save(out, *steps):
    for step in steps:
        checkpoint.save(out, toy.model(), {"step": step, "best": (0.5, 1)})


def load(out):
    """(name of the folder, trainer state, what was printed)"""
    messages = []
    folder, trainer = checkpoint.load(out, messages.append)
    return folder.name, trainer, messages


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "sums.json"])
def test_damage_is_named_and_the_one_before_is_taken(tmp_path, file):
    save(tmp_path, 1, 2)
    damaged = tmp_path / "step-000002" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    name, trainer, messages = load(tmp_path)
    assert name == "step-000001" and trainer["step"] == 1
    assert len(messages) == 1 and "step-000002 is damaged" in messages[0]
    (tmp_path / "step-000001" / file).unlink()
    with pytest.raises(SystemExit, match="no checkpoint in .* is whole; start over with FRESH=1"):
        load(tmp_path)


FULL = OSError(errno.ENOSPC, "No space left"), RuntimeError("unexpected pos"), SafetensorError("No space left")
WRITERS = zip((os, torch, GPT), ("rename", "save", "save"), FULL)  # each with the error that it raises


@pytest.mark.parametrize("owner, name, error", WRITERS)
def test_a_full_disk_leaves_the_one_before_whole(tmp_path, monkeypatch, owner, name, error):
    (tmp_path / ".unfinished/step-000001").mkdir(parents=True)  # left by a process that was killed
    (tmp_path / ".unfinished/step-000001/sums.json").write_text("{}")
    save(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="step-000002 could not be written"):
        patch.setattr(owner, name, Mock(side_effect=error))
        save(tmp_path, 2)
    assert load(tmp_path)[0] == "step-000001" and not (tmp_path / ".unfinished").exists()


def test_everything_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    events, rename = [], os.rename
    monkeypatch.setattr(checkpoint, "flush", lambda path: events.append(path.name))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(b), rename(a, b)))
    save(tmp_path, 1)
    files = {file.name for file in (tmp_path / "step-000001").iterdir()}
    named = events.index(tmp_path / "step-000001")
    assert files | {"step-000001"} <= {*events[:named]} and tmp_path.name in events[named:]


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    held = checkpoint.lock(tmp_path)
    with pytest.raises(SystemExit, match="in use by another run"):
        checkpoint.lock(tmp_path)
    held.close()
    checkpoint.lock(tmp_path).close()


def test_what_was_just_written_is_kept_beside_damaged_ones_that_are_newer(tmp_path):
    save(tmp_path, 20, 40, 60)
    for step in (40, 60):
        (tmp_path / f"step-0000{step}/trainer.pt").write_bytes(b"")
    save(tmp_path, 30)
    assert load(tmp_path)[1]["step"] == 30


def test_fresh_deletes_what_a_run_has_made_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".unfinished/step-000002").mkdir(parents=True)  # left by a process that was killed
    for name in ("metrics.jsonl", "thesis.tex"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match="holds thesis.tex"):
        checkpoint.clear(tmp_path)
    assert len(checkpoint.folders(tmp_path)) == 1
    (tmp_path / "thesis.tex").unlink()
    checkpoint.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rewind_keeps_each_step_once_and_ends_at_a_damaged_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step in (2, 5):
        file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "y"')
        assert [row["step"] for row in checkpoint.rewind(file, step)] == [1, 2, 3][:step]
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3][:step]


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(os, "_exit", Mock())
    received = checkpoint.catch_signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGINT] and not os._exit.called  # the step goes on
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit.assert_called_once_with(128 + signal.SIGTERM)


class Killed(BaseException):
    """As SIGKILL: no handler of errors sees it."""


RUN = dict(STEPS=4, SAVE_EVERY=2, EVAL_EVERY=3, REF_UPDATE_EVERY=2, EPOCHS=2, LR=0.01, LR_SCHEDULE="cosine")
# The moments at which a run is killed: the nth call of a function, counted from the start of the run.
MOMENTS = [(train, "evaluate", 1), (train, "evaluate", 2), (train, "rollout", 1), (train, "update", 4)]
MOMENTS += [(monitor, "open_log", 1), (monitor, "show", 1), (torch, "save", 2)]
MOMENTS += [(checkpoint, "flush", n) for n in (1, 3, 9, 12)] + [(os, "rename", n) for n in (2, 3, 4)]
MOMENTS += [(os, "symlink", 2), (os, "replace", 2)]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory, toy_model):
    out = tmp_path_factory.mktemp("whole")
    toy.run(out, MODEL=toy_model, **RUN)
    return toy.left_by(out)


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
    assert toy.left_by(tmp_path / "out") == never_killed


def test_a_stopped_run_goes_on_between_failures(tmp_path, monkeypatch, toy_run, capsys):
    """SIGTERM in steps in which updates fail too: the way back, the factor of LR and the counters are kept as well."""
    rollout, stops = train.rollout, []

    def failing(model, questions, step):
        if step + 1 in stops[:1]:
            os.kill(os.getpid(), signal.SIGTERM)
        bad = math.nan if step in (3, 5, 6) else 1
        return [(b._replace(advantages=b.advantages * bad), samples) for b, samples in rollout(model, questions, step)]

    monkeypatch.setattr(train, "rollout", failing)
    monkeypatch.setattr(train, "SNAPSHOT_EVERY", 2)
    run = dict(STEPS=8, MAX_CONSECUTIVE_NANS=2, SAVE_EVERY=100, LR_SCHEDULE="constant")
    rows = toy_run("whole", **run)
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert rows[7]["lr"] == rows[4]["lr"] / 2  # it went back
    stops += [4, 6, 7]
    while stops:
        with pytest.raises(SystemExit, match="143"):
            toy_run(**run)
        assert f"stopped after step {stops.pop(0)}; the same command goes on" in capsys.readouterr().out
        gc.collect()
    toy_run(**run)
    assert toy.left_by(tmp_path / "out") == toy.left_by(tmp_path / "whole")


@pytest.mark.slow
def test_killed_by_the_system(tmp_path, toy_model):
    """SIGKILL at random moments; then to the end, and nothing is lost."""
    settings = {**toy.SETTINGS, "MODEL": toy_model, **RUN, "STEPS": 100}
    command = [sys.executable, "train.py", *(f"{name}={value}" for name, value in settings.items())]
    rng = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen([*command, f"OUT_DIR={tmp_path}/killed"], cwd=ROOT)
        time.sleep(rng.uniform(3, 6))
        process.kill()
        if process.wait() != -signal.SIGKILL:  # it was faster
            break
    ended = (tmp_path / "killed/report.html").exists()  # the last that a run writes; it may be killed even then
    for out in ["whole"] + ["killed"] * (not ended):
        subprocess.run([*command, f"OUT_DIR={tmp_path}/{out}"], cwd=ROOT, check=True)
    assert toy.left_by(tmp_path / "killed") == toy.left_by(tmp_path / "whole")
