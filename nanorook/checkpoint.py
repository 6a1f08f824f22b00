"""Checkpoints: each appears whole or not at all, and is verified before it is used.

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

from nanorook.folder import read_pickle

REQUIRED = {"config.json", "model.safetensors", "trainer.pt"}  # files of every checkpoint


class CheckpointError(Exception):
    """The message is meant for the user."""


def lock(out, fresh=False):
    """Holds OUT_DIR until this process ends, however it ends; with `fresh` an earlier run in it is deleted."""
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


def save(out, model, trainer, keep=2):
    """Writes OUT_DIR/step-N and points `latest` to it; of older ones `keep` - 1 stay, and that of trainer["best"]."""
    folder = out / f"step-{trainer['step']:06d}"
    part = out / f".{folder.name}"
    try:
        flush(out)  # fails if OUT_DIR was deleted meanwhile
        for stale in unfinished(out):
            shutil.rmtree(stale, ignore_errors=True)
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
    """(folder, trainer state) of the newest checkpoint that is whole; None where there is no checkpoint at all."""
    found = folders(out)
    for folder in found:
        try:
            sums = json.loads((folder / "sums.json").read_text())
            for name in {*sums, *REQUIRED}:
                if digest(folder / name) != sums.get(name):
                    raise ValueError(f"{name} has changed")
            return folder, read_pickle(folder / "trainer.pt")
        except Exception as error:  # a damaged pickle may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            say(f"{folder} is damaged ({reason}), so the checkpoint before it is used.")
    if found:
        raise CheckpointError(f"no checkpoint in {out} is whole; start over with FRESH=1.")
    return None


def folders(out):
    """The checkpoints, newest first."""
    found = [folder for folder in out.glob("step-*") if folder.name[5:].isdecimal()]
    return sorted(found, key=lambda folder: int(folder.name[5:]), reverse=True)


def unfinished(out):
    """What a process that was killed while it saved has left: checkpoints, and the folders in which models are made."""
    return [path for pattern in (".step-*", "..step-*", ".model-*") for path in out.glob(pattern)]


MADE = "settings.json run.json metrics.jsonl samples.jsonl skill.json report.html".split()
MADE += ["latest", ".lock", "model", "tensorboard", "wandb"]


def clear(out):
    """Deletes what a run has made; refuses if there is anything else."""
    made = [out / f"{dot}{name}" for name in MADE for dot in ("", ".")]  # with a dot: a file that was being replaced
    made += [*out.glob("step-*"), *unfinished(out)]
    strange = [path.name for path in out.iterdir() if path not in made]
    if strange:
        raise CheckpointError(f"OUT_DIR={out} holds {strange[0]}, which no run has made, so FRESH=1 deletes nothing.")
    for path in made:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink(missing_ok=True)


def digest(file):
    with open(file, "rb") as content:
        sha = hashlib.sha256()
        while block := content.read(1 << 20):
            sha.update(block)
        return sha.hexdigest()


def flush(path):
    """To the disk itself, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rewind(file, step):
    """Cuts a file of JSON lines back to `step` and returns them; a killed run may have written more, or half a line."""
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


def catch_signals():
    """A list that SIGINT and SIGTERM append to; the second one ends the process at once."""
    received = []

    def handler(number, frame):
        if received:
            os._exit(128 + number)
        received.append(number)
        print("finishing this step and saving; a second Ctrl-C quits at once", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    return received
