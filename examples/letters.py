"""A task of another kind, small enough to be learnt in half a minute: which of five letters is last in the alphabet?

    TASK=examples/letters.py ./train.sh             k f q b t =  ->   t

The start model is made here too. It answers in the right form, with any one of the five letters: what it knows of the
alphabet after the run, the reward has taught it. A task of your own provides the same names as this file; the top of
rewards.py says what each is for.
"""

import math
import random
import re
from itertools import combinations
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from nanorook.tokenizer import Tokenizer

# Other defaults for settings of train.py; a user still changes them as NAME=value.
DEFAULTS = dict(STEPS=150, BATCH_POSITIONS=16, GROUP_SIZE=8, LR=1e-3, KL_COEF=0.0, EVAL_POSITIONS=400)
DEFAULTS |= dict(EVAL_EVERY=0, SAVE_EVERY=50, OUT_DIR="runs/letters", DTYPE="float32", COMPILE="0")
LIMITS = {"letters": 4}  # tokens of an answer: a space, a letter, the end token, and one to spare
START = Path(__file__).parent.parent / "runs" / "letters-start"


class Question(NamedTuple):
    kind: str  # this task has one kind only
    prompt: str  # "k f q b t ="
    truth: str  # "tqkfb", best first


class Grade(NamedTuple):
    reward: float  # the sum of the pieces' values
    pieces: tuple  # (name, value, (start, end) of characters that it judges, ...); no span: the whole answer
    metrics: dict  # name -> float, logged and shown before and after


def load(source, config):
    """(training items, held-out items): an item is five letters, and no five are in both lists in any order."""
    items = list(combinations(ascii_lowercase, 5))
    random.Random(0).shuffle(items)
    return items[1000:], items[:1000]


def make_questions(items, count, rng, config):
    questions = []
    for letters in rng.sample(items, count):
        shown = rng.sample(letters, 5)  # in another order each time
        questions.append(Question("letters", f"{' '.join(shown)} =", "".join(sorted(letters, reverse=True))))
    return questions


def grade(question, text, hit_limit=False, step=math.inf):
    """A little for the form, more the later the letter is in the alphabet, half of all for the last one.

    A graded reward teaches from the first step on: nearly all groups of answers have better and worse ones.
    """
    form = re.fullmatch(" [a-z]", text) is not None
    place = question.truth.find(text[1:]) if form else -1  # -1: none of the five
    pieces = (
        ("structure", 0.1 * form),
        ("place", 0.4 * (4 - place) / 4 if place >= 0 else 0.0, (1, 2)),
        ("last", 0.5 * (place == 0), (1, 2)),
    )
    metrics = {"structure": float(form), "listed": float(place >= 0), "last": float(place == 0)}
    return Grade(sum(value for _, value, *_ in pieces), pieces, metrics)


def start_model():
    """The folder of a tiny GPT-2 over bytes that answers with a random one of the five, made in seconds if need be."""
    if not START.exists():
        print(f"making the start model, {START} ...", flush=True)
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=257, n_positions=16, n_embd=64, n_layer=2, n_head=4, eos_token_id=256))
        model.tokenizer = Tokenizer.of_bytes()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4 if p.ndim == 2 else 1)  # GPT-2's initial weights are for wider models
        (items, _), rng = load("", model.config), random.Random(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99), weight_decay=0.0)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=500)
        for _ in range(500):
            texts = [f"{q.prompt} {rng.choice(q.truth)}" for q in make_questions(items, 32, rng, model.config)]
            tokens = torch.tensor([model.tokenizer.encode(text) + [model.tokenizer.eos] for text in texts])  # (32, 14)
            targets = F.one_hot(tokens[:, -3:], 257).float()  # (32, 3, 257): the space, the letter, the end token
            targets[:, 1] = F.one_hot(tokens[:, 0:10:2], 257).float().mean(1)  # each of the five is as likely
            F.cross_entropy(model(tokens[:, :-1])[:, -3:].flatten(0, 1), targets.flatten(0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
        model.save(START)  # whole or not at all
    return str(START)
