import errno
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import toy
import train
from model import GPT
from nanorook import monitor, parallel
from nanorook.run import STEP, Run, catch_signals, continuation, finished, rewind


def save(out, *steps):
    for step in steps:
        run, model = Run(out), toy.model()
        run.step = step
        run.save(model, train.make_optimizers(model))


def flip(content, at):
    """One bit is another: in the pickle of a checkpoint, or in one of its tensors, where only the checksum knows."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class Harmful:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def steps(out):
    return [int(folder.name[5:]) for folder in sorted(Path(out).glob(STEP))]


@pytest.mark.parametrize("damage", [lambda c: flip(c, 999), lambda c: flip(c, len(c) // 2), lambda c: c[:-100]])
def test_damage_is_named_and_the_checkpoint_before_is_taken(damage, tmp_path, capsys):
    save(tmp_path, 1, 2)
    file, run = tmp_path / "step-000002" / "trainer.pt", Run(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert run.resume(9) and run.step == 1 and f"{file.parent} is damaged" in capsys.readouterr().out
    (tmp_path / "step-000001" / "trainer.pt").unlink()
    with pytest.raises(SystemExit, match="no checkpoint in .* can be read; start over with FRESH=1"):
        Run(tmp_path).resume(9)


def test_a_checkpoint_runs_no_code(tmp_path):
    save(tmp_path, 1, 2)
    harmful = Harmful()
    harmful.path = str(tmp_path / "made")
    torch.save(harmful, tmp_path / "step-000002" / "trainer.pt")
    run = Run(tmp_path)
    assert run.resume(9) and run.step == 1 and not (tmp_path / "made").exists()


def test_everything_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(b), rename(a, b)))
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    flushed = {Path(path).name for path in events[: events.index(folder)]}
    assert flushed >= {folder.name, *(file.name for file in folder.iterdir())}


def test_what_was_just_written_is_kept_beside_damaged_ones_that_are_newer(tmp_path):
    save(tmp_path, 20, 40, 60)
    save(tmp_path, 30)
    assert steps(tmp_path) == [30, 40, 60]


def test_a_finished_run_without_its_checkpoints_is_not_overwritten(tmp_path, toy_run):
    toy_run(STEPS=2)
    for folder in (tmp_path / "out").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(SystemExit, match="contains a finished run without its checkpoints; name another OUT_DIR, or"):
        toy_run(STEPS=3)
    toy_run(STEPS=3, FRESH=True)


def test_who_changes_what_made_a_run_go_back_starts_anew(tmp_path, toy_run, capsys):
    settings = dict(SAVE_EVERY=1, KL_DIVERGENCE_THRESHOLD=1e-9, EVAL_POSITIONS=1)
    with pytest.raises(SystemExit, match="go back for the third time; lower LR"):
        toy_run(STEPS=9, **settings)
    with pytest.raises(SystemExit, match="go back for the third time"):
        toy_run(STEPS=9, **settings)
    toy_run(STEPS=9, **settings | dict(KL_DIVERGENCE_THRESHOLD=9.0))
    assert "LR is no longer lowered for that" in capsys.readouterr().out


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    run = Run(tmp_path)
    run.acquire_lock()
    with pytest.raises(SystemExit, match="in use by another run"):
        Run(tmp_path).acquire_lock()
    run.lock.close()
    Run(tmp_path).acquire_lock()


def test_fresh_deletes_what_a_run_has_made_and_nothing_else(tmp_path):
    """A folder where no run has been is not even begun in: a `model` there is somebody's."""
    save(tmp_path / "model", 1)
    (tmp_path / ".unfinished/step-000002").mkdir(parents=True)  # left by a process that was killed
    with pytest.raises(
        SystemExit, match="contains .*, but no run.json that this program has written; name another folder"
    ):
        Run(tmp_path).acquire_lock()
    for name in ("settings.json", "thesis.tex", "report-2024.html", "report.html", "report-with-b.html", ".run.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "run.json").write_text('{"program": "nanorook", "command": "./train.sh"}')
    run = Run(tmp_path)
    run.acquire_lock()
    run.clear()
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "report-2024.html", ".lock"}
    run.lock.close()
    (tmp_path / ".run.json").touch()  # all that a run left which was killed as it wrote its first file
    Run(tmp_path).acquire_lock()


SOMEBODYS = [{"settings.json": '{"editor.fontSize": 12}'}, {"run.json": '{"command": "make"}'}]


@pytest.mark.parametrize("files", SOMEBODYS)
def test_files_that_no_run_has_made_are_left_alone(files, tmp_path, toy_run):
    """Files of other programs with the names that a run uses, also a lock."""
    (tmp_path / "out/model").mkdir(parents=True)
    files = files | {"metrics.jsonl": '{"step": 1, "seconds": {}}', "model/model.safetensors": "mine", ".lock": "4711"}
    for name, text in files.items():
        (tmp_path / "out" / name).write_text(text)
    for fresh in False, True:
        with pytest.raises(SystemExit, match="but no run.json that this program has written; name another folder"):
            toy_run(FRESH=fresh)
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "out")): path.read_text() for path in found} == files


def test_rewind_keeps_each_step_once_and_ends_at_a_damaged_line(tmp_path, capsys):
    file, row = tmp_path / "metrics.jsonl", '{"step": 1, "seconds": {}}\n{"step": 2, "seconds": {}}\n'
    for damaged in '{"step": 3, "y"', "\0", "[1]", "null", "{}", '{"step": "x", "seconds": {}}', '{"step": 3}':
        for step in (1, 5):
            file.write_text(row + damaged + "\n" + row)
            assert [row["step"] for row in rewind(file, step, "seconds")] == [1, 2][:step]
            assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2][:step]
        assert capsys.readouterr().out == f"{file}: line 3 is damaged, so the log is cut off before it.\n"


def test_a_run_goes_on_only_with_the_start_model_that_it_began_with(tmp_path, toy_run):
    """Else its KL would be to another reference; the folder of MODEL may have been made anew."""
    folder = tmp_path / "start"
    toy.model().save(folder)
    toy_run(MODEL=str(folder), STEPS=1)
    toy.model(1).save(folder)
    with pytest.raises(SystemExit, match="start are not those that the run in .*out began with; put them back, name"):
        toy_run(MODEL=str(folder), STEPS=2)
    toy.model().save(folder)
    assert len(toy_run(MODEL=str(folder), STEPS=2)) == 2


@pytest.mark.parametrize("recorded, kept", [({}, [0]), ({"step 40": {}}, [0, 40]), ({"after": {}}, [0, 40])])
def test_an_evaluation_that_was_not_recorded_leaves_no_samples(recorded, kept, tmp_path):
    run, model = Run(tmp_path), toy.model()
    run.step, run.skill = 40, {"before": {}} | recorded
    for name in ("metrics", "samples"):
        rows = (json.dumps({"step": step, "seconds": {}}) for step in (0, 40, 41))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "skill.json").write_text('{"before": {}, "step 60": {}}')  # of steps that a killed attempt made
    assert [row["step"] for row in monitor.open_log(run, model, [], {})] == [0, 40]
    assert json.loads((tmp_path / "skill.json").read_text()) == run.skill
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == kept


def test_more_steps_of_a_finished_run_say_what_becomes_of_its_learning_rate(toy_run, capsys):
    toy_run(STEPS=1)
    toy_run(STEPS=2)
    assert "STEPS was 1 and is now 2" in (said := capsys.readouterr().out)
    assert "LR_SCHEDULE ended at step 1, where the run was planned to end. It now follows a run of 2 steps" in said
    assert "BEST_OF_SCHEDULE" not in said
    for steps in (2, 4):
        toy_run("best", STEPS=steps, BEST_OF=3, BEST_OF_SCHEDULE="linear", LR_SCHEDULE="constant")
    assert "BEST_OF_SCHEDULE ended at step 2" in (said := capsys.readouterr().out) and "LR_SCHEDULE ended" not in said
    toy_run("rising", STEPS=2, WARMUP_STEPS=9)
    assert "The learning rate rises for 9 steps, so a run of 2 ends before it reaches LR" in capsys.readouterr().out
    toy_run("rising", STEPS=3, WARMUP_STEPS=9)
    assert "SCHEDULE ended" not in capsys.readouterr().out


def test_what_a_run_that_broke_off_says_is_true_with_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "cleared", False)
    assert continuation(tmp_path, True) == "the same command starts the run from the beginning."
    save(tmp_path, 7)
    assert continuation(tmp_path, False) == f"the same command resumes from {tmp_path}/step-000007."
    assert (
        continuation(tmp_path, True) == "the same command starts the run from the beginning."
    )  # FRESH=1 has not deleted the run yet
    monkeypatch.setattr(Run, "cleared", True)
    assert continuation(tmp_path, True).startswith("the same command without FRESH=1 resumes from")


@pytest.mark.parametrize("kind, share", [(torch.optim.SGD, False), (torch.optim.AdamW, True)])
def test_other_optimizers_do_not_continue_a_run(kind, share, toy_run, monkeypatch):
    toy_run(STEPS=1)
    parts = lambda model: [[p] for p in model.parameters()] if share else [model.parameters()]  # noqa: E731
    monkeypatch.setattr(train, "make_optimizers", lambda model: [kind(part, lr=0.1) for part in parts(model)])
    with pytest.raises(SystemExit, match=r"other optimizers than the run was started with \(AdamW\); start over"):
        toy_run(STEPS=2)


def test_going_back_twice_finds_the_same_state(tmp_path):
    model, run = toy.model(), Run(tmp_path)
    optimizers = train.make_optimizers(model)

    def step():
        model.zero_grad()
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        optimizers[0].step()

    step()
    next(iter(optimizers[0].state.values()))["rounds"] = 3  # a state may also hold numbers
    run.good = run.snapshot(model, optimizers)
    kept = state(model, optimizers[0])
    for _ in range(2):
        step()
        run.go_back(model, optimizers, 0.5)
        assert torch.equal(state(model, optimizers[0]), kept)


def state(model, optimizer):
    """Weights and moments, one after the other."""
    moments = [x for values in optimizer.state.values() for x in values.values() if torch.is_tensor(x)]
    return torch.cat([x.detach().flatten() for x in (*model.parameters(), *moments)])


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(os, "_exit", Mock())
    other, errors = Mock(), Mock()
    monkeypatch.setattr(parallel, "OTHERS", [(other, errors)])
    received = catch_signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGINT] and not os._exit.called and not other.kill.called  # it may finish its step
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit.assert_called_once_with(128 + signal.SIGTERM)
    other.kill.assert_called_once_with()


RUN = dict(STEPS=4, SAVE_EVERY=2, EVAL_EVERY=3, EPOCHS=2, LR=0.01, LR_SCHEDULE="cosine", CONTROL="shuffle")
# The moments at which a run is killed: before the nth call of a function, counted from the start of the run.
MOMENTS = [(train, "evaluate", (1, 2)), (train, "sample", (2,)), (train, "update", (4,)), (os, "replace", (2,))]
MOMENTS += [(monitor, "progress_line", (1,)), (torch, "save", (2,)), (os, "fsync", (3, 12)), (os, "rename", (2, 3, 4))]


def test_killed_at_any_moment_a_run_ends_the_same(tmp_path, toy_run):
    """A copy of the folder at some moment is what a process leaves that is killed then."""
    whole, copies = tmp_path / "whole", []

    def copying(function, name, wanted):
        calls = itertools.count(1)

        def copy_and_call(*args, **kwargs):
            call = next(calls)
            if call in wanted:
                copies.append(f"{name}-{call}")
                shutil.copytree(whole, tmp_path / copies[-1])
            return function(*args, **kwargs)

        return copy_and_call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wanted in MOMENTS:
            patch.setattr(owner, name, copying(getattr(owner, name), name, wanted))
        toy_run("whole", **RUN)
    assert len(copies) == sum(len(wanted) for *_, wanted in MOMENTS)
    for killed in copies:
        toy_run(killed, **RUN)
        assert toy.left_by(tmp_path / killed) == toy.left_by(whole), killed


@pytest.mark.parametrize("write, last", [(7, [1]), (22, [3])])  # of the second checkpoint's model, and of out/model
def test_a_full_disk_is_reported_and_the_checkpoint_before_is_whole(write, last, tmp_path, toy_model):
    write_bytes, calls = Path.write_bytes, itertools.count(1)

    def failing(*args):
        if next(calls) == write:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(*args)

    settings = dict(MODEL=toy_model, STEPS=3, SAVE_EVERY=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", failing)
        sentence = toy.main(tmp_path, **settings)
    assert "No space left on device" in sentence
    assert sentence.endswith(f"; the same command resumes from {tmp_path}/step-{last[0]:06d}.")
    assert steps(tmp_path)[-1:] == last and not (tmp_path / "model").exists()
    assert toy.main(tmp_path, **settings) is None
    assert [row["step"] for row in toy.rows(tmp_path)] == [1, 2, 3] and GPT.load(tmp_path / "model")


def test_a_signal_that_comes_during_an_evaluation_ends_the_run_before_its_next_step(monkeypatch, toy_run, capsys):
    evaluate, titles = train.evaluate_and_record, []

    def interrupted(run, model, questions, title):
        titles.append(title)
        if title == "step 1":
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(run, model, questions, title)

    monkeypatch.setattr(train, "evaluate_and_record", interrupted)
    monkeypatch.setattr(train.parallel, "gather", list)  # with several processes it is a new list as well
    with pytest.raises(SystemExit, match="143"):
        toy_run(STEPS=3, EVAL_EVERY=1)
    assert titles == ["before", "step 1"] and "stopped after step 1; the same" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stopped_run_goes_on_between_failures(tmp_path, monkeypatch, toy_run, capsys):
    """SIGTERM in steps in which updates fail too: the way back, the factor of LR and the counters are kept as well."""
    add, acquire, runs, stops, kills = train.add_advantages, Run.acquire_lock, [], [], []

    def failing(rollout, *rest):
        step = runs[-1].step
        add(rollout, *rest)
        if step + 1 in stops[:1] and step not in kills:
            kills.append(step)  # once, however many rollouts a step has
            os.kill(os.getpid(), signal.SIGTERM)
        if step in (3, 5, 6):
            rollout.advantages *= math.nan

    monkeypatch.setattr(Run, "acquire_lock", lambda run: runs.clear() or runs.append(run) or acquire(run))
    monkeypatch.setattr(train, "add_advantages", failing)
    monkeypatch.setattr(train, "SNAPSHOT_EVERY", 2)
    run = dict(STEPS=8, MAX_SKIPPED_IN_A_ROW=2, SAVE_EVERY=100, LR_SCHEDULE="constant")
    rows = toy_run("whole", **run)
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert rows[7]["lr"] == rows[4]["lr"] / 2  # it went back
    stops += [4, 6, 7]
    while stops:
        toy.NO_REPORT[1].reset_mock()
        with pytest.raises(SystemExit, match="143"):
            toy_run(**run)
        toy.NO_REPORT[1].assert_called_once_with((tmp_path / "out").resolve())
        said = capsys.readouterr().out
        assert (
            f"stopped after step {stops.pop(0)}; the same command resumes" in said
            and "● yellow  The model was evaluated only" in said
        )
        assert (tmp_path / "out/model/config.json").exists() and not finished(tmp_path / "out")
    toy_run(**run)
    assert toy.left_by(tmp_path / "out") == toy.left_by(tmp_path / "whole") and finished(tmp_path / "out")


@pytest.mark.slow
def test_killed_by_the_system(tmp_path, toy_model):
    settings = {**toy.SETTINGS, "MODEL": toy_model, **RUN, "STEPS": 30, "LR": 3e-4}  # 0.01 fails before the end
    arguments = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "train.py", *arguments, f"OUT_DIR={tmp_path}/killed"]
    log = tmp_path / "killed/metrics.jsonl"
    with subprocess.Popen(command, cwd=toy.ROOT) as process:
        while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 4):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    for out in ("killed", "whole"):
        assert toy.main(tmp_path / out, **settings) is None
    assert toy.left_by(tmp_path / "killed") == toy.left_by(tmp_path / "whole")
