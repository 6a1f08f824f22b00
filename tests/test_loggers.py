"""REPORT_TO with the real packages, without a network."""

import importlib.util
import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest

import toy
from nanorook import loggers

ANSWERS = [["q", "what | ?", "a\nb", 0.5, "0.5 all"]]
SKILL = {"held-out greedy/q right": 0.5, "held-out greedy/q right, low": 0.4, "held-out greedy/q right, high": 0.6}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Reports some steps of a run, as if from a process of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:  # it reads this when imported
        monkeypatch.delitem(sys.modules, module)

    def write(where, first, last):
        skill = {"before": {}} if first else {}  # of a checkpoint
        ends, run = [], SimpleNamespace(out=tmp_path, step=first, record="abcd1234", skill=skill)
        with monkeypatch.context() as patch:
            patch.setattr(loggers, "atexit", SimpleNamespace(register=ends.append))
            report = loggers.connect(where, run)
        report(first, SKILL, ANSWERS)
        for step in range(first + 1, last + 1):
            report(step, {"train/kl": step / 10, "q/reward": step / 4})
        [end() for end in ends]

    return write


@pytest.mark.slow
@pytest.mark.needs("tensorboard", "pip install tensorboard")
def test_tensorboard_continues_where_the_checkpoint_was(record, tmp_path):
    record("tensorboard", 0, 1)
    record("tensorboard", 0, 3)  # the one before was killed without a checkpoint
    record("tensorboard", 2, 4)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("q/reward")] == [1, 2, 3, 4]
    low = events.Scalars("held-out_greedy/q_right_low")
    assert [event.step for event in low] == [0, 2] and low[0].value == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.needs("trackio", "pip install trackio")
def test_trackio_continues_the_run_of_its_name(record, tmp_path):
    record("trackio", 0, 2)
    record("trackio", 2, 4)
    with sqlite3.connect(tmp_path / "trackio" / "nanorook.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, *_ in rows} == {f"{tmp_path.name}-abcd1234"}
    assert [step for _, step, metrics in rows if "q/reward" in json.loads(metrics)] == [1, 2, 3, 4]
    assert b"a\\nb" in b" ".join(metrics for *_, metrics in rows)


@pytest.mark.slow
@pytest.mark.needs("wandb", "pip install wandb")
def test_wandb_keeps_its_id(record, tmp_path):
    record("wandb", 0, 2)
    [folder] = (tmp_path / "wandb").glob("offline-run-*-abcd1234")  # online, the same id continues it
    assert b"q/reward" in (folder / "run-abcd1234.wandb").read_bytes()
    [table] = folder.rglob("answers_0_*.table.json")
    assert json.loads(table.read_text())["data"] == ANSWERS


def test_a_run_reports_each_step_and_evaluation(toy_run, tmp_path, monkeypatch):
    seen, names = [], []

    def connect(where, run):
        run.record = run.record or "mine"
        names.append((where, run.record))
        return lambda step, numbers, rows=(): seen.append((step, numbers, rows))

    monkeypatch.setattr(loggers, "connect", connect)
    monkeypatch.setattr(loggers, "require", lambda where: None)
    toy_run(REPORT_TO="trackio", STEPS=1, EVAL_POSITIONS=8)
    toy_run(REPORT_TO="trackio", STEPS=2, EVAL_POSITIONS=8)
    assert names == [("trackio", "mine")] * 2  # the second one knew it from the checkpoint
    assert [step for step, *_ in seen] == [0, 1, 1, 2, 2]
    (_, before, rows), (_, step, none) = seen[:2]
    assert not none and {"train/kl", "seconds/update", "short/reward", "short/earned/even"} <= {*step}
    low, mean, high = (before[f"held-out sampled/long reward{end}"] for end in (", low", "", ", high"))
    assert low < mean < high
    assert "long" in {row[0] for row in rows} and len(rows[0]) == len(loggers.COLUMNS)
    skill = json.loads((tmp_path / "out" / "skill.json").read_text())
    assert before["held-out greedy/long reward"] == skill["before"]["long reward T=0"][0]


def test_a_package_that_is_missing_is_named_before_anything_is_deleted(toy_run, tmp_path, monkeypatch):
    toy_run(STEPS=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="REPORT_TO=wandb needs a package that is not installed: .* pip install wandb"):
        toy_run(REPORT_TO="wandb", FRESH=True)
    assert len(toy.rows(tmp_path / "out")) == 1
