"""The grammar of GSM8K in miniature: a question in words, the working step by step, and the result after ####.

    TASK=examples/sums.py ./train.sh                 7 nuts, gets 2, eats 4?   ->   7+2=9, 9-4=5 #### 5

The start model is fluent and careless. It knows how an answer is written, what the words mean and how to
calculate; but it reads a number as it is, as one less or as one more, all equally often, and leaves a step out of every
eighth answer. Two careless steps may cancel out (7+3=10, 10-5=5): the result is right and the working is not.
"""

import random
import re
from itertools import accumulate, product

from examples.start import make_start_model
from nanorook.settings import ROOT, fail, setting
from nanorook.task import Grade, Question

DEFAULTS = dict(STEPS=200, BATCH_POSITIONS=16, GROUP_SIZE=8, LR=1e-3, KL_COEF=0.03, EVAL_POSITIONS=400)
DEFAULTS |= dict(EVAL_EVERY=0, SAVE_EVERY=50, OUT_DIR="runs/sums", DTYPE="float32", COMPILE="0")
SUMS_REWARD = setting("SUMS_REWARD", "steps", "reward the result alone, or its steps as well", ("result", "steps"))
LIMITS = {"sums": 36}  # tokens of an answer, which are bytes; the longest right one has 27 and the end token
NAMES = {"sums result": "right results", "sums working": "right workings"}
START = ROOT / "runs" / "sums-start"
WORDS = {"+": ("gets", "wins"), "-": ("eats", "uses")}
SIGNS = {word: sign for sign, words in WORDS.items() for word in words}
STEP = r"-?\d{1,3}[+-]\d=-?\d{1,3}"


def add(total, event):
    sign, number = event
    return total + number if sign == "+" else total - number


def write_step(total, event):
    sign, number = event
    return f"{total}{sign}{number}={add(total, event)}"


def load(source, config):
    """(training items, held-out items): (7, ("+", 2), ("-", 4)) and such, with all totals from 0 to 9."""
    events = list(product("+-", range(1, 9)))
    items = [item for n in (2, 3) for item in product(range(1, 10), *[events] * n)]
    items = [item for item in items if all(0 <= total <= 9 for total in accumulate(item, add))]
    random.Random(0).shuffle(items)
    return items[1000:], items[:1000]


def make_questions(items, count, rng, config):
    questions = []
    for first, *events in rng.sample(items, count):
        told = "".join(f", {rng.choice(WORDS[sign])} {number}" for sign, number in events)
        questions.append(question(f"{first} nuts{told}?", config))
    return questions


def question(text, config):
    """The Question for a text, such as one that a user types at tools.ask."""
    if not re.fullmatch(rf"[1-9] nuts(, ({'|'.join(SIGNS)}) [1-8])+\?", text):
        fail(f"{text!r:.80} is not written like '7 nuts, gets 2, eats 4?'.")
    events = re.findall(r"(\w+) (\d)", text)
    return Question("sums", text, [int(text[0]), *((SIGNS[word], int(number)) for word, number in events)])


def grade(question, text, hit_limit=False):
    """SUMS_REWARD=result: 1 for the right number after ####, as is usual on GSM8K. SUMS_REWARD=steps: most of it is for
    the steps, each judged on its own: does it go on from what was written, with the question's next number?"""
    total, *events = question.truth
    form = re.fullmatch(rf" {STEP}(, {STEP})* #### -?\d{{1,3}}", text) is not None and not hit_limit
    right = form and text.endswith(f" #### {list(accumulate(question.truth, add))[-1]}")
    written = list(re.finditer(STEP, text))
    pieces = [("structure", 0.1 * form)]
    working = 0  # sound steps
    for i, (event, found) in enumerate(zip(events, written), 1):
        sound = found[0] == write_step(total, event)
        pieces.append((f"step {i}", 0.7 * sound / len(events), found.span()))
        working += sound
        _, outcome = found[0].split("=")
        total = int(outcome)
    pieces = [*pieces, ("result", 0.2 * right)] if SUMS_REWARD == "steps" else [("result", 1.0 * right)]
    working = right and working == len(written) == len(events)
    metrics = {"structure": form, "result": right, "working": working}
    return Grade(tuple(pieces), {name: float(value) for name, value in metrics.items()})


def start_model():
    """The folder of a tiny model that is fluent and careless, made in a minute if need be."""
    items, _ = load("", None)

    def write(rng):
        question = make_questions(items, 1, rng, None)[0]
        total, *events = question.truth
        if rng.random() < 1 / 8:
            events.remove(rng.choice(events))
        steps = []
        for sign, number in events:
            event = sign, number + rng.choice((-1, 0, 1))
            steps.append(write_step(total, event))
            total = add(total, event)
        return question.prompt, f" {', '.join(steps)} #### {total}"

    return make_start_model(START, write, steps=800, batch=32, positions=72)
