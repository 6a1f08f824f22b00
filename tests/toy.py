"""A task that takes milliseconds: two kinds of questions, which a model of random weights answers with random bytes."""

import dataclasses
import gc
import json
import random
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from model import GPT, GPTConfig
from nanorook.task import Grade, Question
from nanorook.tokenizer import Tokenizer
from rollout import Rollout

ROOT = Path(__file__).parent.parent
DEFAULTS = {}
LIMITS = {"short": 4, "long": 7}
CLOCK = ("seconds", "tokens_per_second")  # differ between two equal runs
SETTINGS = dict(STEPS=2, BATCH_POSITIONS=4, GROUP_SIZE=4, EVAL_POSITIONS=4, WARMUP_STEPS=0, LR=1e-3, NPROC=1)
SETTINGS |= dict(DTYPE="float32", DEVICE="cpu", COMPILE="0", TASK=__file__)


def start_model():
    """MODEL names the folder that conftest.py has made."""


def load(source, config):
    first = 0 if source == "builtin" else 200
    return list(range(first, first + 100)), list(range(first + 100, first + 120))


def make_questions(items, count, rng, config):
    some = rng.sample(items, count)
    return [Question(rng.choice(list(LIMITS)), "." * (item % 3) + f"{item}?", item) for item in some]


def grade(question, text, hit_limit=False):
    """Even characters are good, and the first one should be low."""
    pieces = [("even", sum(ord(c) % 2 == 0 for c in text) / 7)]
    pieces += [("first", (ord(text[0]) % 8) / 16, (0, 1))] if text else []
    return Grade(tuple(pieces), {"characters": float(len(text))})


def model(seed=0, positions=24):
    """Small random weights; one token in six is the end token."""
    torch.manual_seed(seed)
    result = GPT(GPTConfig(257, positions, 32, 1, 2, eos_token_id=256))
    with torch.no_grad():
        for p in result.parameters():
            p.mul_(4 if p.ndim == 2 else 1)
        end = result.wte.weight[256]
        result.ln_f.bias.copy_(4 * end / end.square().sum())
    result.tokenizer = Tokenizer.of_bytes()
    return result


def hf_model(kind, **config):
    """transformers' model of this kind. Weights are so large that predictions differ from place to place; biases and
    norms count, too."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import, and few tests need it

    torch.manual_seed(0)
    result = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32).eval()
    with torch.no_grad():
        for p in result.parameters():
            p.mul_(6 if p.ndim == 2 else 1).add_(torch.randn_like(p), alpha=0.05)
    return result


def save_hf(model, folder):
    """With a tokenizer of bytes."""
    model.save_pretrained(folder)
    for name, content in Tokenizer.of_bytes().files.items():
        (folder / name).write_bytes(content)
    return folder


def questions(count=4):
    return make_questions(load("builtin", None)[0], count, random.Random(0), None)


def rollouts(policy, questions):
    """What a step has before its update: graded answers with their advantages."""
    import train

    noise = train.sampling_noise(len(questions), train.GROUP_SIZE, 0)
    result = list(train.sample(policy, questions, train.GROUP_SIZE, LIMITS, train.TEMPERATURE, noise=noise))
    for rollout in result:
        rollout.answers = train.grade_answers(train.task, rollout.answers)
        train.add_advantages(rollout)
    return result


def advantages(answers, T, credit, step=0):
    """The advantages (G, T) of the tokens of one group's answers."""
    import train

    rollout = Rollout(torch.zeros(1, 1), None, torch.zeros(len(answers), T), None, None, None, answers)
    with mock.patch.object(train, "CREDIT", credit):
        train.add_advantages(rollout, step)
    return rollout.advantages


def set_all(patch, values, task=sys.modules[__name__]):
    import train  # not above: train.py imports this file
    from nanorook.settings import SETTINGS as known

    patch.setattr(train, "task", task)
    for name, value in values.items():
        patch.setattr(train, name, value)
        if name in known:  # others are constants
            patch.setitem(known, name, (*known[name][:2], value))


def to_cpu(rollout):
    tensors = {name: x for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(rollout, **{name: x.to("cpu") for name, x in tensors.items()})


NO_REPORT = "nanorook.report.write", mock.Mock(return_value="no report")  # which takes a part of a second
BROKEN_OFF = set()  # the folders of runs that have not ended


def begin(out):
    """A run that was broken off holds its folder until its frames are collected, which takes a part of a second."""
    if str(out) in BROKEN_OFF:
        gc.collect()
    BROKEN_OFF.add(str(out))


def run(out, task=sys.modules[__name__], **changes):
    """train.main() in this process, with these settings; its rows() without the clock."""
    import train

    begin(out)
    with pytest.MonkeyPatch.context() as patch:
        set_all(patch, {**SETTINGS, "OUT_DIR": str(out), **changes}, task)
        patch.setattr(*NO_REPORT)
        patch.setattr(sys, "argv", ["train.py"])
        train.main()
    BROKEN_OFF.remove(str(out))
    return rows(out)


def main(out, **changes):
    """train.py as a user starts it, but in this process; the sentence that it ends with."""
    from nanorook import settings

    arguments = [f"{name}={value}" for name, value in {**SETTINGS, "OUT_DIR": out, **changes}.items()]
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
        patch.setattr(*NO_REPORT)
        patch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            begin(out)
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            BROKEN_OFF.remove(str(out))
        except SystemExit as end:
            return end.code


def rows(out):
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in CLOCK} for line in lines]


def left_by(out):
    """All that a run leaves and that does not tell the time."""
    files = ["samples.jsonl", "skill.json", "model/model.safetensors"]
    return rows(out), [(out / file).read_bytes() for file in files]


def same(rows, others):
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys() and row.pop("state") == other.pop("state")
        assert row.pop("advice") == other.pop("advice") and row == pytest.approx(other, rel=1e-3, abs=1e-5)
    return True


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
