"""The smallest task, learnt in half a minute: which of five letters is last in the alphabet?

    TASK=examples/letters.py ./train.sh             k f q b t =  ->   t

The start model is made here too. It answers in the right form, with any one of the five letters: whatever it knows
about the alphabet after the run, it has learnt from the reward. A task of your own provides the same names as this
file; nanorook/task.py says what each is for.
"""

import random
import re
from itertools import combinations
from string import ascii_lowercase

from examples.start import make_start_model
from nanorook.settings import ROOT, fail
from nanorook.task import Grade, Question

# Other defaults for settings of train.py; a user still changes them as NAME=value.
DEFAULTS = dict(STEPS=150, BATCH_POSITIONS=16, GROUP_SIZE=8, LR=1e-3, EVAL_POSITIONS=400)
DEFAULTS |= dict(EVAL_EVERY=0, SAVE_EVERY=50, OUT_DIR="runs/letters", DTYPE="float32", COMPILE="0")
LIMITS = {"letters": 4}  # tokens of an answer: a space, a letter, the end token, and one to spare
NAMES = {"letters last": "right letters", "letters listed": "one of the five letters"}
START = ROOT / "runs" / "letters-start"


def load(source, config):
    """(training items, held-out items): an item is five letters, and no five are in both lists in any order."""
    items = list(combinations(ascii_lowercase, 5))
    random.Random(0).shuffle(items)
    return items[1000:], items[:1000]


def make_questions(items, count, rng, config):
    questions = []
    for letters in rng.sample(items, count):
        shown = rng.sample(letters, 5)  # in another order each time
        questions.append(question(" ".join(shown), config))
    return questions


def question(text, config):
    letters = text.removesuffix("=").split()
    if len(letters) != 5 or not set(letters) <= set(ascii_lowercase) or len(set(letters)) < 5:
        fail(f"{text!r} is not five different letters with spaces between them, such as 'k f q b t'.")
    return Question("letters", f"{' '.join(letters)} =", "".join(sorted(letters, reverse=True)))


def grade(question, text, hit_limit=False):
    """A little for the form, more the later the letter is in the alphabet, half of all for the last one.

    A graded reward teaches from the first step on: nearly all groups of answers have better and worse ones.
    """
    form = re.fullmatch(" [a-z]", text) is not None
    place = question.truth.find(text[1:]) if form else -1  # -1: none of the five
    letter = (1, 2) if form else (0, len(text))  # the characters that the pieces below judge
    pieces = (
        ("structure", 0.1 * form),
        ("place", 0.4 * (4 - place) / 4 if place >= 0 else 0.0, letter),
        ("last", 0.5 * (place == 0), letter),
    )
    metrics = {"structure": float(form), "listed": float(place >= 0), "last": float(place == 0)}
    return Grade(pieces, metrics)


def start_model():
    """The folder of a tiny model that answers with a random one of the five, made in seconds if need be."""
    items, _ = load("", None)

    def write(rng):
        question = make_questions(items, 1, rng, None)[0]
        return question.prompt, f" {rng.choice(question.truth)}"

    return make_start_model(START, write, positions=16)
