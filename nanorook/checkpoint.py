"""Checkpoints: each appears whole or not at all, and is verified before it is used.

OUT_DIR/step-000040/ is a Hugging Face folder with trainer.pt (what training needs to go on) and sums.json (SHA-256 of
every file); OUT_DIR/latest is a link to the newest.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal

import torch
from safetensors import SafetensorError

from nanorook.settings import refuse

STEP = "step-[0-9][0-9][0-9][0-9][0-9][0-9]"  # a checkpoint's name
# What a run leaves in OUT_DIR
MADE = "run.json settings.json metrics.jsonl samples.jsonl skill.json report.html model tensorboard wandb".split()
MADE += f"{STEP} latest .lock .unfinished .latest .model-* .metrics.jsonl .samples.jsonl".split()


def lock(out):
    """Holds OUT_DIR until this process ends, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = open(out / ".lock", "w")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"OUT_DIR={out} is in use by another run; wait for its end, or name another folder.")
    except OSError as error:
        refuse(f"OUT_DIR={out} cannot be written to ({error.strerror}); name another folder.")
    return handle


def clear(out):
    """Deletes what a run has made; refuses if there is anything else."""
    for path in out.iterdir():
        if not any(map(path.match, MADE)):
            refuse(f"OUT_DIR={out} holds {path.name}, which no run has made: FRESH=1 deletes nothing.")
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def save(out, model, trainer):
    """Writes OUT_DIR/step-N and points `latest` to it; keeps the one before it and the one with the best evaluation."""
    folder = out / f"step-{trainer['step']:06d}"
    unfinished = out / ".unfinished"
    part = unfinished / folder.name
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
        model.save(part)
        torch.save(trainer, part / "trainer.pt")
        (part / "sums.json").write_text(json.dumps({file.name: digest(file) for file in part.iterdir()}, indent=2))
        for file in [*part.iterdir(), part]:
            flush(file)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
        (out / ".latest").unlink(missing_ok=True)
        (out / ".latest").symlink_to(folder.name)
        os.replace(out / ".latest", out / "latest")
        flush(out)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own on a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        reason = str(error).splitlines()[0]
        refuse(f"{folder} could not be written ({reason}); the checkpoint before it is whole.")
    for old in [old for old in folders(out) if old <= folder][2:]:  # later ones are damaged, and are written again
        if old.name != f"step-{trainer['best'][1]:06d}":
            shutil.rmtree(old)


def load(out, log):
    """(folder, trainer state) of the newest checkpoint that is whole; None where there is no checkpoint at all."""
    for folder in folders(out):
        try:
            for name, digest_then in json.loads((folder / "sums.json").read_text()).items():
                if digest(folder / name) != digest_then:
                    raise ValueError(f"{name} has changed")
            return folder, torch.load(folder / "trainer.pt", "cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log(f"{folder} is damaged ({reason}), so the checkpoint before it is used.")
    if folders(out):
        refuse(f"no checkpoint in {out} is whole; start over with FRESH=1.")
    return None


def folders(out):
    """The checkpoints, newest first."""
    return sorted(out.glob(STEP), reverse=True)


def digest(file):
    sha = hashlib.sha256()
    with open(file, "rb") as content:
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
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    rows = [row for row in rows if row["step"] <= step]
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
