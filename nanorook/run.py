"""The state of a run: how it begins, is resumed, goes back, is saved and ends.

OUT_DIR/step-000040/ is a Hugging Face folder (with LORA_RANK, one of adapters) with trainer.pt, which has everything
that one step leaves to the next. It appears whole or not at all; the two newest are kept, and the one with the best
evaluation.
"""

import copy
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import time
import traceback
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import torch

from nanorook import lora, parallel, settings
from nanorook.settings import fail
from nanorook.task import raised_by

STEP = "step-[0-9][0-9][0-9][0-9][0-9][0-9]"  # a checkpoint's name
# What a run makes in OUT_DIR
MADE = "run.json settings.json metrics.jsonl samples.jsonl skill.json model adapters wandb tensorboard".split()
MADE += ["report.html", "report-with-*.html"]
MADE += [STEP, ".unfinished", ".model-*", ".adapters-*", *(f".{name}" for name in MADE)]
# What the user may have changed because the run went back, so that it may go back again
STEADIER = "LR", "KL_COEF", "KL_DIVERGENCE_THRESHOLD", "EPOCHS", "MAX_GRAD_NORM"
MARK = b'{"program": "nanorook"'  # how run.json begins, which a run writes first, and which FRESH=1 deletes last


class Run:
    cleared = False  # whether FRESH=1 has deleted the run before

    def __init__(self, out):
        self.out = Path(out)
        self.step = 0  # steps made so far
        self.device = ""  # cpu or cuda, for which the following two were chosen
        self.dtype = ""  # of the matrix products, chosen once: a second measurement might choose another one
        self.microbatch = 0  # the most tokens in one, likewise
        self.start_hash = ""  # of the start model's weights
        self.optimizers = []  # the names of their classes
        self.evaluation_seconds = 0.0  # that the last evaluation took
        self.skill = {}  # {"before", "step 40", "after": {name: figure}}, see statistics.figure
        self.best = (-math.inf, 0)  # the highest reward of an evaluation, and its step
        self.lr_factor = 1.0  # lowered each time the run goes back
        self.skipped_in_a_row = 0
        self.rollbacks = 0
        self.changes = []  # of settings when it was resumed: [step, name, old value, new value]
        self.good = None  # the last state known to be healthy, see snapshot()
        self.record = ""  # its name in the dashboard of REPORT_TO
        self.kept = [name for name in vars(self) if name != "out"]  # all names above, which a checkpoint has
        self.dashboard = None  # a function, see loggers.connect()

    def acquire_lock(self):
        """Locks OUT_DIR until this process ends, however it ends. A folder with files that are named like those of a
        run is refused unless its run.json says that this program has made it."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.out / ".lock", "a")  # not "w", as it may be somebody's
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"OUT_DIR={self.out} is in use by another run; wait for it to end, or name another folder.")
        found = self.found()
        whole, part = self.out / "run.json", self.out / ".run.json"
        a_run = whole.is_file() and whole.read_bytes().startswith(MARK)
        only_begun = found == [part] and MARK.startswith(part.read_bytes()[: len(MARK)])  # it was killed as it wrote it
        if found and not a_run and not only_begun:
            fail(f"OUT_DIR={self.out} contains {found[0].name}, but no run.json that this program has written; name "
                 "another folder.")  # fmt: skip

    def forbid_model_inside(self, source):
        """The start model is read again when a run is resumed, so the run must not overwrite it, nor the model that its
        adapters belong to."""
        while Path(source).exists():
            if Path(source).resolve().is_relative_to(self.out.resolve()):
                fail(f"the start model, {source}, lies in OUT_DIR={self.out}, where the run overwrites models; name "
                     "another OUT_DIR.")  # fmt: skip
            adapters = lora.read_config(Path(source))
            if not adapters:
                break
            source = adapters.base

    def check_start_model(self, model, source):
        """The model that the run began with is the reference of its KL; its folder may have changed since."""
        found = hash_of(model, settings.values()["LORA_RANK"])
        if self.start_hash not in ("", found):
            fail(f"the weights in {source} are not those that the run in {self.out} began with; put them back, name "
                 "another OUT_DIR, or start over with FRESH=1.")  # fmt: skip
        self.start_hash = found

    def check_optimizers(self, optimizers):
        """Moments of one kind of optimizer mean nothing to another."""
        found = [type(optimizer).__name__ for optimizer in optimizers]
        if self.optimizers not in ([], found):
            fail("make_optimizers returns other optimizers than the run was started with "
                 f"({' '.join(self.optimizers)}); start over with FRESH=1.")  # fmt: skip
        self.optimizers = found

    def found(self):
        """Files with names that a run uses; if there is no run here, they belong to somebody else."""
        return sorted(path for path in self.out.iterdir() if any(map(path.match, MADE)))

    def clear(self):
        Run.cleared = True
        for path in sorted(self.found(), key=lambda path: path.name == "run.json"):  # last: see acquire_lock()
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def resume(self, steps):
        """Restores the newest checkpoint that can be read; returns the states of (model, optimizers), or None."""
        folders = sorted(self.out.glob(STEP), reverse=True)
        for folder in folders:
            try:
                saved = read_tensors(folder / "trainer.pt")
                break
            except Exception as error:  # a damaged pickle may raise anything
                parallel.log(f"{folder} is damaged ({type(error).__name__}), so the previous checkpoint is tried.")
        else:
            if folders:
                fail(f"no checkpoint in {self.out} can be read; start over with FRESH=1.")
            if finished(self.out):
                fail(f"{self.out} contains a finished run without its checkpoints; name another OUT_DIR, or start over "
                     "with FRESH=1.")  # fmt: skip
            return None
        if not saved.keys() >= {*self.kept}:
            fail(f"the run in {self.out} was started by an older version of this program; start over with FRESH=1.")
        vars(self).update({name: saved[name] for name in self.kept})
        for name, was, value in settings.changed_since(saved["settings"]):
            parallel.log(f"{name} was {was} and is now {value}")
            self.changes.append([self.step, name, was, value])
            if name in STEADIER and self.rollbacks:
                self.rollbacks, self.lr_factor = 0, 1.0
                parallel.log("The run had gone back before. With this change, LR is no longer lowered for that, and "
                             "the run may go back twice more.")  # fmt: skip
        if saved["settings"]["MICROBATCH_TOKENS"]:
            self.microbatch = 0  # it was given, not chosen
        if self.step > steps or (self.step == steps and finished(self.out)):
            fail(f"{self.out} contains a run of {self.step} steps, so none is left with STEPS={steps}; raise STEPS, "
                 "name another OUT_DIR, or start over with FRESH=1.")  # fmt: skip
        parallel.log(f"{self.out} contains {self.step} steps of this run, which is resumed. FRESH=1 starts over.")
        if "after" in self.skill and self.step < steps:
            self.skill[f"step {self.step}"] = self.skill.pop("after")
            old = saved["settings"]
            fell = ["LR"] if old["LR_SCHEDULE"] != "constant" and old["STEPS"] > old["WARMUP_STEPS"] else []
            fell += ["BEST_OF"] if old["BEST_OF_SCHEDULE"] != "constant" and old["BEST_OF"] > 1 else []
            for name in fell:
                parallel.log(f"{name}_SCHEDULE ended at step {self.step}, where the run was planned to end. "
                             f"It now follows a run of {steps} steps, so {name} goes up again here.")  # fmt: skip
        return saved["model"], saved["optimizer"]

    def snapshot(self, model, optimizers):
        """Everything that go_back() restores, in host memory."""
        return to_host({"weights": lora.trained_state(model), "moments": moments_of(optimizers)})

    def go_back(self, model, optimizers, lr_factor):
        """Restores the last good weights and moments, but not the step. The learning rate is lowered, because the run
        would fail again with the same one."""
        self.rollbacks += 1
        if self.rollbacks == 3:
            fail("the run would have to go back for the third time; lower LR to less than "
                 f"{self.lr_factor:g} of its value, by which it was already multiplied, or follow the last advice "
                 "above.")  # fmt: skip
        restore(model, optimizers, **copy.deepcopy(self.good))
        self.lr_factor *= lr_factor
        self.skipped_in_a_row = 0
        parallel.log(f"back to the last good state, with LR multiplied by {self.lr_factor:g}")

    def save(self, model, optimizers):
        """Writes OUT_DIR/step-N; the folder gets its name once all is on the disk, so it survives a power cut."""
        folder = self.out / f"step-{self.step:06d}"
        unfinished = self.out / ".unfinished" / folder.name
        trainer = {name: getattr(self, name) for name in self.kept} | {"settings": settings.values()}
        trainer |= {"model": lora.trained_state(model), "optimizer": moments_of(optimizers)}
        shutil.rmtree(unfinished.parent, ignore_errors=True)  # left by a process that was killed
        if model.lora:
            lora.save(model, unfinished)
        else:
            model.save(unfinished)
        write_tensors(unfinished / "trainer.pt", trainer)
        for path in [*unfinished.iterdir(), unfinished]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(unfinished, folder)
        older = [path for path in sorted(self.out.glob(STEP)) if path < folder]
        for path in older[:-1]:  # the newest of them stays
            if path.name != f"step-{self.best[1]:06d}":
                shutil.rmtree(path)

    def close(self, finished):
        """Records whether the run has made all its steps, and gives OUT_DIR free."""
        if finished:
            file = self.out / "run.json"
            about = json.loads(file.read_text()) | {"finished": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            write(file, json.dumps(about))
        self.lock.close()


def hash_of(model, lora_rank):
    """The hash that identifies a start model; with LORA_RANK that of the weights in bf16, whatever DTYPE is today."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        if lora_rank:
            tensor = tensor.to(torch.bfloat16).view(torch.int16)
        sha.update(tensor.numpy())
    return sha.hexdigest()


def finished(out):
    """Whether the run in this folder has made all its steps. A run that was stopped also leaves a `model`."""
    file = Path(out, "run.json")
    return file.exists() and "finished" in json.loads(file.read_text())


def processes_of(out):
    """The number of processes of the run in this folder, 0 if there is none."""
    try:
        number = json.loads(Path(out, "run.json").read_text())["processes"]
    except (OSError, ValueError, LookupError, TypeError):  # also where the file is another program's
        return 0
    return number if isinstance(number, int) else 0


def continuation(out, fresh):
    """What the same command does after a run was interrupted, as the end of a sentence."""
    newest = None if fresh and not Run.cleared else max(Path(out).glob(STEP), default=None)
    command = "the same command" + " without FRESH=1" * fresh
    return f"{command} resumes from {newest}." if newest else "the same command starts the run from the beginning."


def explain(error, task, next_step):
    """Ends a run with a message about an error that nothing else has handled; a bug keeps its traceback."""
    if raised_by(task, error):
        traceback.print_exception(error)
        fail(f"this error came from the task, {task.__file__}; {next_step}")
    if isinstance(error, OSError):
        fail(f"a file could not be read or written ({error}); {next_step}")
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # on CUDA, on a CPU
        fail("out of memory: in the update, set MICROBATCH_TOKENS below the number printed at the start; in "
             f"sampling, lower BATCH_POSITIONS or GROUP_SIZE; with that change, {next_step}")  # fmt: skip
    if not parallel.another_has_ended(error):
        raise error
    parallel.show_errors()
    fail(f"another process of this run has ended, see above; {next_step}")


def moments_of(optimizers):
    return [optimizer.state_dict()["state"] for optimizer in optimizers]


def restore(model, optimizers, weights, moments):
    lora.load_trained_state(model, weights)
    for optimizer, state in zip(optimizers, moments):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def to_host(state):
    """A copy, in host memory, of tensors in dicts and lists. On a GPU it would take memory from microbatches."""
    if torch.is_tensor(state):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, list):
        return [to_host(value) for value in state]
    return {key: to_host(value) for key, value in state.items()} if isinstance(state, dict) else state


def write_tensors(path, content):
    torch.save(content, data := BytesIO())  # writing to a file, it would not report a full disk
    path.write_bytes(data.getbuffer())


def read_tensors(path):
    if damaged := ZipFile(path).testzip():  # torch.load does not verify the checksums
        raise ValueError(damaged)
    return torch.load(path, "cpu", weights_only=True)


def write(path, text):
    """Writes the whole file or nothing."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    os.replace(part, path)


def rewind(file, step, *needed):
    """Cuts a file of JSON lines back to `step` and returns them; a killed run may have written more, or half a line."""
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], 1):
        try:
            row = json.loads(line)
            [row[name] for name in needed]
            if row["step"] > step:
                break
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            print(f"{file}: line {number} is damaged, so the log is cut off before it.", flush=True)
            break
    write(file, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def catch_signals():
    """A list that SIGINT and SIGTERM append to; the second one ends the process at once."""
    received = []

    def handler(number, frame):
        if received:
            parallel.kill_others()
            os._exit(128 + number)
        received.append(number)
        print("finishing this step or evaluation, then saving; press Ctrl-C again to quit at once", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    return received
