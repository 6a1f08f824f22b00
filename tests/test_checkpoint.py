"""checkpoint.py: whole or not at all, and never trusted unchecked."""

import copy
import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import checkpoint
from checkpoint import CheckpointError
from model import GPT

TRAINER = {"optimizer": {"state": {}}, "settings": {"SEED": 0}, "best": (0.5, 1), "good": (1, 2.5)}


def save(out, model, *steps, keep=10):
    out.mkdir(exist_ok=True)
    for step in steps:
        checkpoint.save(out, model, {**TRAINER, "step": step}, keep)


def load(out):
    said = []
    folder, trainer = checkpoint.load(out, said.append)
    return folder.name, trainer, said


def test_what_is_saved_comes_back(byte_model, tmp_path):
    save(tmp_path, byte_model, 1, 2)
    name, trainer, said = load(tmp_path)
    assert name == "step-000002" and trainer == {**TRAINER, "step": 2} and not said
    for a, b in zip(GPT.load(tmp_path / "latest").parameters(), byte_model.parameters()):
        assert torch.equal(a, b)
    assert checkpoint.load(tmp_path / "empty", print) is None


def test_only_some_are_kept_and_the_best_is_one_of_them(byte_model, tmp_path):
    save(tmp_path, byte_model, *range(1, 6), keep=2)
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-000005", "step-000004", "step-000001"]


def test_a_run_goes_on_with_the_settings_of_today(byte_model, tmp_path):
    def optimizer(decay):
        return torch.optim.AdamW(byte_model.parameters(), weight_decay=decay)

    before, after = optimizer(0.1), optimizer(0.2)
    byte_model(torch.tensor([[1, 2, 3]])).sum().backward()
    before.step()
    good = copy.deepcopy((byte_model.state_dict(), before.state_dict()))
    state = {**TRAINER, "optimizer": before.state_dict(), "good": good, "step": 1}
    checkpoint.save(tmp_path, byte_model, state, 1)
    state = checkpoint.resume(tmp_path, byte_model, after, None, {}, lambda _: None)
    for groups in (after.param_groups, state["good"][1]["param_groups"]):
        assert [group["weight_decay"] for group in groups] == [0.2]
    weight = byte_model.wte.weight
    assert torch.equal(after.state[weight]["exp_avg"], before.state[weight]["exp_avg"]) and weight.grad.any()


def test_a_reference_that_has_moved_comes_back_whole(byte_model, tmp_path):
    moved, start = (copy.deepcopy(byte_model) for _ in range(2))
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1.1)
    moved, start = moved.cast(torch.bfloat16), start.cast(torch.bfloat16)
    optimizer = torch.optim.AdamW(byte_model.parameters())
    good = byte_model.state_dict(), optimizer.state_dict()
    state = {**TRAINER, "optimizer": good[1], "good": good, "step": 1, "reference": moved.state_dict()}
    checkpoint.save(tmp_path, byte_model, state, 1)
    tokens = torch.tensor([[1, 2, 3]])
    assert not torch.equal(start(tokens), moved(tokens))
    checkpoint.resume(tmp_path, byte_model, optimizer, start, {}, lambda _: None)
    assert torch.equal(start(tokens), moved(tokens))


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "sums.json", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
def test_damage_is_named_and_the_one_before_is_taken(byte_model, tmp_path, file, damage):
    save(tmp_path, byte_model, 1, 2)
    path = tmp_path / "step-000002" / file
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    name, trainer, said = load(tmp_path)
    assert name == "step-000001" and trainer["step"] == 1
    assert len(said) == 1 and "step-000002 is damaged" in said[0]


def test_nothing_whole_is_an_error_and_not_a_fresh_start(byte_model, tmp_path):
    save(tmp_path, byte_model, 1)
    (tmp_path / "step-000001" / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="FRESH=1"):
        load(tmp_path)


@pytest.mark.parametrize("owner, name", [(torch, "save"), (os, "fsync"), (os, "rename")])
def test_a_full_disk_leaves_the_one_before_whole(byte_model, tmp_path, monkeypatch, owner, name):
    save(tmp_path, byte_model, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(CheckpointError, match="step-000002 could not be written .No space left"):
            save(tmp_path, byte_model, 2)
    assert load(tmp_path)[0] == "step-000001" and not list(tmp_path.glob(".step*"))


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        checkpoint.lock(tmp_path / "file" / "out")


def test_the_lock_is_held_by_the_living_alone(tmp_path):
    code = f"import checkpoint, pathlib, time; held = checkpoint.lock(pathlib.Path({str(tmp_path)!r}))"
    code += "; print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    other.stdout.readline()
    with pytest.raises(CheckpointError, match="in use by another run"):
        checkpoint.lock(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait()
    checkpoint.lock(tmp_path).close()


def test_clear_deletes_what_a_run_made_and_nothing_else(byte_model, tmp_path):
    save(tmp_path, byte_model, 1, 2)
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="holds thesis.tex"):
        checkpoint.clear(tmp_path)
    assert len(checkpoint.folders(tmp_path)) == 2
    (tmp_path / "thesis.tex").unlink()
    checkpoint.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rewind_keeps_each_step_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "x": NaN}\n{"step": 2}\n{"step": 3}\n{"step": 4, "y"')
    assert [row["step"] for row in checkpoint.rewind(file, 2)] == [1, 2]
    assert len(file.read_text().splitlines()) == 2 and file.read_text().endswith("}\n")
    assert checkpoint.rewind(tmp_path / "none", 2) == []


def test_lines_that_are_damaged_end_what_is_kept(tmp_path):
    for bad in (b"\xff\xfe{}", b"[" * 100_000, b"5", b"null", b'{"other": 1}', b'{"step": "2"}'):
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
        assert checkpoint.rewind(file, 3) == [{"step": 1}]


class Killed(BaseException):
    """As SIGKILL: no handler of errors sees it."""


@pytest.mark.parametrize(
    "owner, name, nth",
    [(GPT, "save", 1), (torch, "save", 1), (os, "rename", 1), (os, "rename", 2), (os, "symlink", 1), (os, "replace", 1)]
    + [(checkpoint, "flush", n) for n in range(1, 8)],
)
def test_killed_at_any_moment_of_saving_latest_names_a_whole_one(byte_model, tmp_path, monkeypatch, owner, name, nth):
    save(tmp_path, byte_model, 1)
    function, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            raise Killed
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            save(tmp_path, byte_model, 2)
    latest = (tmp_path / "latest").resolve()
    newest, trainer, said = load(tmp_path)
    assert not said and trainer["step"] == int(newest[-1])
    assert latest.name in ("step-000001", newest) and GPT.load(latest)
    save(tmp_path, byte_model, 3)  # what lies about is in nobody's way
    assert load(tmp_path)[0] == "step-000003" == (tmp_path / "latest").resolve().name


def test_everything_is_flushed_before_it_gets_its_name(byte_model, tmp_path, monkeypatch):
    flushed, rename = [], os.rename
    monkeypatch.setattr(checkpoint, "flush", lambda path: flushed.append(path.name))
    monkeypatch.setattr(os, "rename", lambda a, b: (flushed.append(f"now {b.name}"), rename(a, b)))
    save(tmp_path, byte_model, 1)
    files = {file.name for file in (tmp_path / "step-000001").iterdir()}
    named = flushed.index("now step-000001")
    assert files | {".step-000001"} <= {*flushed[:named]} and tmp_path.name in flushed[named:]


def test_an_out_dir_that_vanished_is_said(byte_model, tmp_path):
    out = tmp_path / "out"
    save(out, byte_model, 1)
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="step-000002 could not be written .No such file"):
        checkpoint.save(out, byte_model, {**TRAINER, "step": 2}, 2)
    assert not out.exists()


def seal(folder):
    """Checksums that fit, as a stranger would make them."""
    sums = {file.name: checkpoint.digest(file) for file in folder.iterdir() if file.name != "sums.json"}
    (folder / "sums.json").write_text(json.dumps(sums))


class Code:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('executed').touch()",)


def test_code_in_a_checkpoint_is_not_executed(byte_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, byte_model, 1, 2)
    torch.save({"step": 2, "code": Code()}, tmp_path / "step-000002" / "trainer.pt")
    seal(tmp_path / "step-000002")
    name, _, said = load(tmp_path)
    assert name == "step-000001" and "damaged" in said[0] and said[0].count("\n") == 0
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("missing", ["trainer.pt", "model.safetensors", "config.json"])
def test_a_file_without_a_checksum_is_not_trusted(byte_model, tmp_path, missing):
    save(tmp_path, byte_model, 1, 2)
    sums = tmp_path / "step-000002" / "sums.json"
    sums.write_text(json.dumps({k: v for k, v in json.loads(sums.read_text()).items() if k != missing}))
    assert load(tmp_path)[0] == "step-000001"


def test_a_folder_of_another_name_is_no_checkpoint(byte_model, tmp_path):
    save(tmp_path, byte_model, 1)
    (tmp_path / "step-final").mkdir()
    assert load(tmp_path)[0] == "step-000001"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(first):
    pid = os.fork()
    if pid == 0:
        stopping = checkpoint.leave_after_this_step()
        os.kill(os.getpid(), first)
        if stopping == [first]:  # the step goes on
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
