"""Several processes take the steps that one takes; where one of them runs out of memory, or dies, all end."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import toy
import train
from model import GPT
from nanorook import hardware, parallel
from nanorook.run import STEP

RUNS = {
    # A number of questions that is no multiple of the processes
    "epochs": dict(EPOCHS=2, LOSS="grpo", SCALE_REWARDS="std", KL_COEF=0.5, CREDIT="answer", BATCH_POSITIONS=5),
    "shuffled": dict(CONTROL="shuffle", BEST_OF=2, LORA_RANK=4, EVAL_POSITIONS=5),
    "little signal": dict(STEPS=4, KL_COEF=0.0, EPOCHS=2),
    "one question": dict(STEPS=1, BATCH_POSITIONS=1, EVAL_POSITIONS=1),  # which the other process does not have
}


def run(patch, out, name, model):
    """A run with SGD: Adam makes a whole step of a gradient that is zero up to rounding, as a key's bias has."""
    patch(train, "make_optimizers", lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)])
    if name == "little signal":  # about one group of a step has any: then one process has none
        honest = toy.grade
        patch(toy, "grade", lambda q, *rest: honest(q, *rest) if q.truth % 4 == 0 else toy.Grade((), {}))
    return toy.run(Path(out, name), MODEL=model, LR=0.1, **RUNS[name])


def out_of_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory")


def program(out, model, processes):
    parallel.start(torch.device("cpu"), int(processes))
    parallel.start, parallel.finish = lambda device, processes: device, lambda: None
    for name in RUNS:
        with pytest.MonkeyPatch.context() as patch:
            run(patch.setattr, out, name, model)
    if parallel.rank() == 1:
        GPT.score = out_of_memory
    sys.exit(toy.main(Path(out, "out of memory"), MODEL=model))


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(toy.ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(request, tmp_path_factory, toy_model):
    """The folder of the runs of several processes, what they printed, and the sentences that they ended with."""
    out = tmp_path_factory.mktemp("several")
    command = [sys.executable, __file__, str(out), toy_model, str(request.param)]
    done = subprocess.run(command, cwd=toy.ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert len(list(out.glob("*/model"))) == len(RUNS) and done.returncode == 1, done.stderr[-3000:]
    return out, done.stdout, done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_several_processes_take_the_steps_of_one(name, several, tmp_path, monkeypatch, toy_run, toy_model):
    out, printed, _ = several
    processes = json.loads((out / name / "run.json").read_text())["processes"]
    assert processes > 1 and f"{processes} process(es) of 1 thread(s) each, microbatches" in printed
    one = run(monkeypatch.setattr, tmp_path, name, toy_model)
    assert toy.same(one, toy.rows(out / name))  # also the metrics of answers, which are of all processes
    assert name != "little signal" or {row["frac_zero_std"] for row in one} >= {0.75}
    skills = [json.loads((folder / name / "skill.json").read_text()) for folder in (tmp_path, out)]
    for row, (*figure, values) in skills[0]["after"].items():  # the values in the order of the questions
        assert skills[1]["after"][row] == [*(pytest.approx(x, abs=1e-4) for x in figure), pytest.approx(values)]
    start, *weights = (GPT.load(f).state_dict() for f in (toy_model, tmp_path / name / "model", out / name / "model"))
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, atol=1e-5, rtol=0)
    assert max((weights[0][key] - start[key]).abs().max() for key in start) > 1e-3


def test_where_one_runs_out_of_memory_all_end(several):
    for sentence in (
        "out of memory: in the update, set MICROBATCH_TOKENS below the number printed at the start",
        "another process of this run has ended",
    ):
        assert re.search(
            f"^error: {sentence}.*[;,] the same command starts the run from the beginning.$", several[2], re.MULTILINE
        )
    assert "Traceback" not in several[2]


def test_nobody_waits_for_ever_for_a_process_that_has_not_joined(monkeypatch, capsys):
    monkeypatch.setattr(parallel, "JOIN_WITHIN", timedelta(seconds=1))
    monkeypatch.setattr(parallel, "OTHERS", [(None, io.BytesIO(b"the disk is full"))])  # what that one has written
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(parallel.free_port()))
    with pytest.raises(SystemExit, match="^error: the processes of this run have not all started within 1 seconds"):
        parallel.join("gloo")
    assert capsys.readouterr().err == "the disk is full"


@pytest.mark.parametrize("wanted, threads, number", [("auto", 2, 2), ("auto", 8, 2), ("auto", 1, 1), ("3", 1, 3)])
def test_a_small_model_has_two_processes_on_the_cores_of_a_cpu(wanted, threads, number, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu, gpu, chosen = torch.device("cpu"), torch.device("cuda"), wanted == "3"
    assert hardware.processes(wanted, cpu, large=False) == number
    assert hardware.processes(wanted, cpu, large=True) == (3 if chosen else 1)
    assert hardware.processes(wanted, cpu, large=True, before=5) == (3 if chosen else 5)
    assert hardware.processes(wanted, gpu, large=False, before=5) == (3 if chosen else 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert hardware.processes(wanted, cpu, large=False) == (3 if chosen else 1)


@pytest.mark.parametrize("wrong", ["0", "two", "-1"])
def test_a_number_of_processes_that_is_none_is_refused(wrong):
    with pytest.raises(SystemExit, match=f"^error: NPROC={wrong} is neither auto nor a whole number of at least 1.$"):
        hardware.processes(wrong, torch.device("cpu"), large=False)


def test_a_run_that_is_resumed_has_as_many_processes_as_before(tmp_path, monkeypatch, toy_run):
    started = []
    monkeypatch.setattr(parallel, "start", lambda device, processes: started.append(processes) or device)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    toy_run(STEPS=1, NPROC="auto")
    file = tmp_path / "out" / "run.json"
    assert json.loads(file.read_text())["processes"] == 1  # as start() has started no other
    for known in ({"processes": 3}, {"processes": "many"}, {}):
        file.write_text(json.dumps({"program": "nanorook"} | known))
        toy_run(STEPS=len(started) + 1, NPROC="auto")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    toy_run(STEPS=1, NPROC="auto", FRESH=True)
    assert started == [2, 3, 2, 2, 1]


def test_machines_that_see_different_checkpoints_do_not_start(monkeypatch, toy_run):
    monkeypatch.setattr(parallel, "gather", lambda items: [*items, 5])  # another one is at step 5
    with pytest.raises(SystemExit, match="must be a folder that all machines share"):
        toy_run()


def test_processes_that_ask_other_questions_do_not_start(monkeypatch, toy_run):
    another = lambda items: [*items, "['0?']"] if "?" in str(items) else items  # noqa: E731
    monkeypatch.setattr(parallel, "gather", another)
    with pytest.raises(SystemExit, match="asked different questions in another process; do not let it draw from a set"):
        toy_run()


def test_a_rank_alone_is_another_programs(monkeypatch):
    joined = []
    monkeypatch.setattr(parallel, "launch", lambda processes: joined.append(processes))
    monkeypatch.setattr(parallel, "join", joined.append)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "5")
    parallel.start(torch.device("cpu"), 1)
    assert joined == []
    parallel.start(torch.device("cpu"), 2)
    assert joined == [2]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    parallel.start(torch.device("cpu"), 2)
    assert joined == [2, "gloo"]


def other_of(process):
    """The process that this one has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


PROGRAM = """
import os, time, torch
from nanorook import parallel
if "RANK" not in os.environ:
    parallel.launch(2)
    print("ready", flush=True)
    time.sleep(100)
parallel.start(torch.device("cpu"), 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_the_one_that_started_it(number):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=ENVIRONMENT, stdout=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    other = Path(f"/proc/{other_of(process)}/status")
    process.send_signal(number)
    assert process.wait(30) == (128 + number if number == signal.SIGTERM else -number)
    until = time.time() + 60
    while other.exists() and "State:\tZ" not in other.read_text():
        assert time.time() < until
        time.sleep(0.2)


def start(out, model, launcher=(), **changes):
    settings = {**toy.SETTINGS, "MODEL": model, "OUT_DIR": out, "NPROC": 2, **changes}
    command = [sys.executable, *launcher, "train.py", *(f"{name}={value}" for name, value in settings.items())]
    return subprocess.Popen(command, cwd=toy.ROOT, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_and_another_number_of_them_goes_on(tmp_path, toy_model, capsys):
    out = tmp_path / "out"
    process = start(out, toy_model, STEPS=100_000, SAVE_EVERY=5)
    while not list(out.glob(STEP)) and process.poll() is None:
        time.sleep(0.1)
    os.kill(other_of(process), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: another process of this run has ended"), errors
    steps = len(toy.rows(out)) + 1
    assert toy.main(out, MODEL=toy_model, STEPS=steps, NPROC=1) is None
    assert [row["step"] for row in toy.rows(out)] == list(range(1, steps + 1))
    assert "NPROC was 2 and is now 1" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_that_torchrun_has_started(tmp_path, toy_model, toy_run):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    process = start(tmp_path / "two", toy_model, torchrun, NPROC="auto")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "2 process(es)" in printed, errors
    assert toy.same(toy_run("one")[:1], toy.rows(tmp_path / "two")[:1])


if __name__ == "__main__":
    program(*sys.argv[1:])
