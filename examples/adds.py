"""The first hour with a real model: SmolLM2-135M-Instruct (Allal et al., 2025) learns to add on a CPU.

    TASK=examples/adds.py ./train.sh        What is 47 + 38?   ->   47 + 38 = 85

The start model talks about a sum and seldom finishes it. Besides one example in the system prompt, only the reward
tells it how to answer; what it knows of addition from its training shows once it writes the sum down. SHOTS and
MAX_NEW_TOKENS let you ask it in the usual way, with worked examples and room to think:

    python -m tools.evaluate MODEL TASK=examples/adds.py SHOTS=8 MAX_NEW_TOKENS=64
"""

import random
import re
from itertools import combinations_with_replacement

from examples.chat import prompt
from examples.start import smollm2 as start_model  # noqa: F401, a part of the task
from nanorook.settings import fail, setting
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=20, BATCH_POSITIONS=8, GROUP_SIZE=16, LR=5e-5, WARMUP_STEPS=2, KL_COEF=0.03)
DEFAULTS |= dict(TEMPERATURE=1.0, EVAL_POSITIONS=200, EVAL_EVERY=0, SAVE_EVERY=100)
DEFAULTS |= dict(MICROBATCH_TOKENS=1024, OUT_DIR="runs/adds")
DEFAULTS |= dict(KL_DIVERGENCE_THRESHOLD=10.0)  # the wanted form is far from what the model would say: a KL of about 1
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
# Digits are tokens of their own: "47 + 38 = 85." has 11 tokens and the end token.
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 16, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"adds": MAX_NEW_TOKENS}
NAMES = {"adds right": "right sums", "adds alone": "nothing but the sum"}
SYSTEM = "You are a calculator. Example: 12 + 34 = 46."
EXAMPLES = ((23, 41), (58, 67), (36, 90), (14, 79), (85, 85), (31, 48), (17, 66), (59, 72))
SHOTS = setting("SHOTS", 0, "worked examples before the question", low=0, high=len(EXAMPLES))


def load(source, config):
    """(training items, held-out items): pairs of numbers; no pair is in both lists, not even in the other order."""
    shown = (12, 34), *EXAMPLES
    items = [pair for pair in combinations_with_replacement(range(10, 100), 2) if pair not in shown]
    random.Random(0).shuffle(items)
    return items[1000:], items[:1000]


def make_questions(items, count, rng, config):
    return [ask(*rng.sample(pair, 2), config) for pair in rng.sample(items, count)]


def question(text, config):
    """The question that a user types at tools.ask."""
    if not (found := re.fullmatch(r"([1-9]\d) ?\+ ?([1-9]\d)", text)):
        fail(f"{text!r:.80} is not a sum of two two-digit numbers, such as 47 + 38.")
    return ask(int(found[1]), int(found[2]), config)


def ask(a, b, config):
    shown = [(f"What is {c} + {d}?", f"{c} + {d} = {c + d}") for c, d in EXAMPLES[:SHOTS]]
    return Question("adds", prompt(config, f"What is {a} + {b}?", SYSTEM, shown), [a, b])


def grade(question, text, hit_limit=False):
    """The answer is the last number, whatever is said before it; each right digit of it pays, from the last one on. A
    little is for writing the sum down, and more for writing nothing else."""
    a, b = question.truth
    equation = rf"{a} \+ {b} = [0-9]+"
    written = re.search(equation, text) is not None
    alone = re.fullmatch(rf"{equation}\.?", text) is not None and not hit_limit
    numbers = list(re.finditer(r"[0-9]+", text))
    number, span = (numbers[-1][0], [numbers[-1].span()]) if numbers else ("", [])
    truth = str(a + b)
    right = number == truth
    digits = sum(x == y for x, y in zip(reversed(number), reversed(truth))) / max(len(truth), len(number))
    pieces = [("written", 0.1 * written), ("alone", 0.2 * alone)]
    pieces += [("digits", 0.3 * digits, *span), ("right", 0.4 * right, *span)]
    if hit_limit:
        pieces.append(runaway(pieces))
    return Grade(tuple(pieces), {"alone": float(alone), "right": float(right)})
