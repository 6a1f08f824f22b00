"""Checkpoints: each appears whole or not at all, and is checked before it is trusted.

OUT_DIR/step-000050/ is a Hugging Face folder with trainer.pt (what training needs to go on) and sums.json (SHA-256 of
every file); OUT_DIR/latest is a link to the newest.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal

import torch

from folder import read_pickle
from model import GPT
from settings import compare

WHOLE = {"config.json", "model.safetensors", "trainer.pt"}  # what every checkpoint has


class CheckpointError(Exception):
    """The message is meant for the user."""


def lock(out, fresh=False):
    """A hold on OUT_DIR, which ends with this process, however that ends; a fresh run finds it empty."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = open(out / ".lock", "w")
    except OSError as error:
        raise CheckpointError(f"OUT_DIR={out} cannot be written to ({error.strerror}); name another folder.")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CheckpointError(f"OUT_DIR={out} is in use by another run; wait for its end, or name another folder.")
    if fresh:
        clear(out)
    return handle


def save(out, model, trainer, keep):
    """Write OUT_DIR/step-N and point `latest` to it; of the older ones `keep` - 1 stay, and trainer["best"]."""
    folder = out / f"step-{trainer['step']:06d}"
    part = out / f".{folder.name}"
    try:
        flush(out)  # it may have vanished, and must not come back half empty
        shutil.rmtree(part, ignore_errors=True)
        model.save(part)
        torch.save(trainer, part / "trainer.pt")
        sums = {file.name: digest(file) for file in part.iterdir()}
        (part / "sums.json").write_text(json.dumps(sums, indent=2))
        for file in [*part.iterdir(), part]:
            flush(file)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
        (out / ".latest").unlink(missing_ok=True)
        (out / ".latest").symlink_to(folder.name)
        os.replace(out / ".latest", out / "latest")
        flush(out)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"{folder} could not be written ({error.strerror}); the checkpoint before it is whole.")
    for old in folders(out)[keep:]:
        if old.name != f"step-{trainer['best'][1]:06d}":
            shutil.rmtree(old)


def load(out, say):
    """(folder, trainer state) of the newest checkpoint that is whole; None where there is none at all."""
    found = folders(out)
    for folder in found:
        try:
            sums = json.loads((folder / "sums.json").read_text())
            for name in {*sums, *WHOLE}:
                if digest(folder / name) != sums.get(name):
                    raise ValueError(f"{name} has changed")
            return folder, read_pickle(folder / "trainer.pt")
        except Exception as error:  # an unpickler may raise anything at all
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            say(f"{folder} is damaged ({reason}), so the checkpoint before it is taken.")
    if found:
        raise CheckpointError(f"no checkpoint in {out} is whole; start over with FRESH=1.")
    return None


def resume(out, model, optimizer, reference, state, say):
    """What the newest checkpoint in `out` knows, loaded into its places; the state of the run, `state` if it is new."""
    if not (found := load(out, say)):
        return state
    folder, state = found
    compare(state["settings"], say)
    model.load_state_dict(GPT.load(folder).state_dict())
    for saved in (state["optimizer"], state["good"][1]):
        saved["param_groups"] = optimizer.state_dict()["param_groups"]  # the settings of today count
    optimizer.load_state_dict(state["optimizer"])
    if "reference" in state:
        reference.load_state_dict(state["reference"])
    say(f"{out} holds this run's first {state['step']} steps; it goes on from there. FRESH=1 starts over.")
    return state


def folders(out):
    """The checkpoints, newest first."""
    found = [folder for folder in out.glob("step-*") if folder.name[5:].isdecimal()]
    return sorted(found, key=lambda folder: int(folder.name[5:]), reverse=True)


MADE = "settings.json run.json metrics.jsonl samples.jsonl skill.json curves.png report.html".split()
MADE += ["latest", ".lock", "model", "tensorboard", "wandb"]


def clear(out):
    """Delete what a run has made, and refuse to where there is anything else."""
    made = [*(out / name for name in MADE), *out.glob("step-*"), *out.glob(".step-*")]
    strange = [path.name for path in out.iterdir() if path not in made]
    if strange:
        raise CheckpointError(f"OUT_DIR={out} holds {strange[0]}, which no run has made; so FRESH=1 deletes nothing.")
    for path in made:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink(missing_ok=True)


def digest(file):
    with open(file, "rb") as content:
        sum = hashlib.sha256()
        while block := content.read(1 << 20):
            sum.update(block)
        return sum.hexdigest()


def flush(path):
    """To the disk itself, so that a power cut finds it."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rewind(file, step):
    """Of a file of JSON lines, only those up to `step`; a killed run may have written more, and half a line."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["step"] <= step:
                rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            break
    part = file.with_name(f".{file.name}")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(part, file)
    return rows


def leave_after_this_step():
    """A list that SIGINT and SIGTERM append to; a second one ends the process at once."""
    stopping = []

    def heard(number, frame):
        if stopping:
            os._exit(128 + number)
        stopping.append(number)
        print("finishing this step; once more leaves at once", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    return stopping
