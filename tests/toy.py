"""A task that takes milliseconds: two kinds of questions, which a model of random weights answers with random bytes."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import GPT, GPTConfig
from nanorook.tokenizer import Tokenizer
from rewards import Grade, Question

ROOT = Path(__file__).parent.parent
DEFAULTS = {}
LIMITS = {"short": 4, "long": 7}
CLOCK = ("seconds", "tokens_per_second", "peak_memory_gb")  # differ between two equal runs
SETTINGS = dict(STEPS=2, BATCH_POSITIONS=4, GROUP_SIZE=4, EVAL_POSITIONS=4, WARMUP_STEPS=0, LR=1e-3, NPROC=1)
SETTINGS |= dict(DTYPE="float32", DEVICE="cpu", COMPILE="0", TASK=__file__)


def load(source, config):
    first = 0 if source == "builtin" else 200
    return list(range(first, first + 100)), list(range(first + 100, first + 120))


def make_questions(items, count, rng, config):
    return [
        Question(rng.choice(list(LIMITS)), "." * (item % 3) + f"{item}?", item) for item in rng.sample(items, count)
    ]


def grade(question, text, hit_limit=False, step=math.inf):
    """Even characters are good, and the first one should be low."""
    pieces = [("even", sum(ord(c) % 2 == 0 for c in text) / 7)]
    pieces += [("first", (ord(text[0]) % 8) / 16, (0, 1))] if text else []
    reward = sum(value for _, value, *_ in pieces)
    return Grade(reward, tuple(pieces), {"characters": float(len(text))})


def model(seed=0):
    """Small random weights; one token in six is the end token."""
    torch.manual_seed(seed)
    result = GPT(GPTConfig(257, 24, 32, 1, 2, eos_token_id=256))
    with torch.no_grad():
        for p in result.parameters():
            p.mul_(4) if p.ndim == 2 else p
        end = result.wte.weight[256]
        result.ln_f.bias.copy_(4 * end / end.square().sum())
    result.tokenizer = Tokenizer.of_bytes()
    return result


def questions(count=4, seed=0):
    return make_questions(load("builtin", None)[0], count, random.Random(seed), None)


def set_all(patch, values):
    """Settings of train.py, whose task becomes this file."""
    import train  # not above: train.py imports this file
    from nanorook.settings import SETTINGS as known

    patch.setattr(train, "task", sys.modules[__name__])
    for name, value in values.items():
        patch.setattr(train, name, value)
        patch.setitem(known, name, (*known[name][:2], value))


def finish_run(model, out):
    model.save(out / "model")
    (out / "report.html").touch()


def run(out, **changes):
    """train.main() in this process, with these settings; its rows() without the clock."""
    import train

    with pytest.MonkeyPatch.context() as patch:
        set_all(patch, {**SETTINGS, "OUT_DIR": str(out), **changes})
        patch.setattr(train, "finish_run", finish_run)
        patch.setattr(sys, "argv", ["train.py"])
        train.main()
    return rows(out)


def rows(out):
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in CLOCK} for line in lines]


def left_by(out):
    """All that a run leaves and that does not tell the time."""
    files = ["samples.jsonl", "skill.json", "model/model.safetensors"]
    return rows(out), [(out / file).read_bytes() for file in files]


def user_runs(*arguments, **environment):
    """`python ...` as a user types it, until its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def same(rows, others):
    """Whether two runs measured the same, up to rounding."""
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys() and row.pop("state") == other.pop("state")
        assert row.pop("advice") == other.pop("advice") and row == pytest.approx(other, rel=1e-3, abs=1e-5)
    return True
