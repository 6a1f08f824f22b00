"""Whole steps of a GPT-2 of 124M parameters in RookWorld's format, with a user's settings: seconds, tokens, memory.

    python -m experiments.large                             the default
    python -m experiments.large TASK=examples/mates.py      settings as train.py takes them
    python -m experiments.large STEPS=10 MODEL=jrahn/RookWorld-LM-124M

Without MODEL the weights are random, which a run rightly refuses after its first answers. So the steps are made here,
by the functions of train.py, with the settings that RookWorld-LM-124M gets. Every answer has the most tokens that it
may have, and its advantages are random numbers, since random answers all earn the same. The last line is a table's row.
"""

# ruff: noqa: E402  train.py takes its settings when it is imported, so the model has to be there before

import gzip
import json
import random
import time
from pathlib import Path
from statistics import median

import torch

from model import GPT, GPTConfig
from nanorook import settings
from nanorook.tokenizer import END, Tokenizer, byte_names

ROOT = Path(__file__).parent.parent


def write_tokenizer(folder):
    """GPT-2's own tokenizer files, made of its merges (OpenAI, 2019, MIT License), which tiktoken would download."""
    merges = gzip.open(ROOT / "tests/gpt2/merges.txt.gz").read()
    merged = [line.replace(" ", "") for line in merges.decode().splitlines()[1:]]
    tokens = [*byte_names().values(), *merged, END]
    (folder / "merges.txt").write_bytes(merges)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    return folder


def random_model(folder):
    """The folder of a GPT-2 of 124M parameters, with its vocabulary and random weights; made first if need be."""
    if not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        model = GPT(GPTConfig())
        model.tokenizer = Tokenizer.load(write_tokenizer(folder))
        model.save(folder / "model")
    return str(folder / "model")


def read_settings(folder=ROOT / "runs" / "large"):
    settings.read_user()
    given = settings.GIVEN["environment"] | settings.GIVEN["arguments"]
    settings.GIVEN["arguments"] |= {"MODEL": given.get("MODEL") or random_model(folder)}
    settings.GIVEN["environment"] = {"STEPS": "2", "OUT_DIR": str(folder / "out")} | settings.GIVEN["environment"]


if __name__ == "__main__":
    read_settings()  # before train's first setting

import train
from nanorook import hardware
from nanorook.task import graded, make_questions
from rollout import sample
from tools.bench import clock, peak_memory


def now(device):
    """Seconds; on a CPU those that this process has worked, which other programs do not make longer."""
    return clock(device) if device.type == "cuda" else time.process_time()


def step(number, sampler, model, reference, optimizers, items, most_tokens):
    """A step of train.main: its metrics, and the seconds of sampling and grading, and of the update."""
    B, G, device = train.BATCH_POSITIONS, train.GROUP_SIZE, model.wte.weight.device
    questions = make_questions(train.task, items, B, random.Random(f"{train.SEED}/{number}"), model.config)
    questions = [question._replace(stop="") for question in questions]
    noise, times = train.uniform_numbers(B, G, number), [now(device)]
    sampler.sync_from(model)
    rollouts = list(sample(sampler, questions, G, train.task.LIMITS, train.TEMPERATURE, noise))
    batches = [train.add_advantages(batch, graded(train.task, part), G, train.CREDIT) for batch, part in rollouts]
    times.append(now(device))
    batches = [batch._replace(advantages=torch.randn_like(batch.advantages)) for batch in batches]
    metrics = train.update(model, reference, optimizers, batches, most_tokens)
    times.append(now(device))
    return metrics, times[1] - times[0], times[2] - times[1]


def main():
    settings.finish("python -m experiments.large")
    hardware.flush_denormals()
    began = now(hardware.choose_device(train.DEVICE))
    run, model, reference, optimizers, items, _ = train.start()
    device, sampler = model.wte.weight.device, model.inference_copy(model.dtype)
    started, seconds = now(device) - began, []
    for number in range(train.STEPS):
        m, *parts = step(number, sampler, model, reference, optimizers, items, run.microbatch)
        seconds.append(sum(parts))
        print(f"step {number + 1}: {m['tokens']:,} tokens, sampling {parts[0]:.1f} s, update {parts[1]:.1f} s, "
              f"gradient norm {m['grad_norm']:.2g}, {peak_memory(device):.1f} GB at most", flush=True)  # fmt: skip
    machine = f"CPU, {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        gigabytes = torch.cuda.get_device_properties(device).total_memory / 2**30
        machine = f"{torch.cuda.get_device_name(device)}, {gigabytes:.0f} GB"
    row = [train.TASK, machine, f"{started:.0f} s", f"{m['tokens']:,}", f"{seconds[0]:.1f} s"]  # the first one compiles
    row += [f"{median(seconds[1:] or seconds):.1f} s", f"{peak_memory(device):.1f} GB"]
    print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
