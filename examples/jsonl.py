"""A file of questions and a function: the shortest way from questions of your own to a model that is trained on them.

    TASK=examples/jsonl.py DATA=questions.jsonl ./train.sh

Each line of the file is {"question": "What is 47 + 38?", "answer": 85}; QUESTION and ANSWER name other keys. In a .csv
file they name columns. One question in five is held out, by a hash of its text, so it stays held out when the file
grows. The function `reward` below says what an answer is worth: replace it by your own. docs/tasks.md begins with this
file.
"""

import re
from decimal import Decimal

from examples.chat import is_held_out, prompt
from examples.rows import read_rows
from examples.start import smollm2 as start_model  # noqa: F401, a part of the task
from nanorook.settings import fail, setting
from nanorook.task import Grade, Question, runaway

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def reward(text, answer):
    """What a text earns, from 0 (wrong) to 1 (right). `answer` is the reference answer of the file."""
    if re.fullmatch("/.+/", answer, re.DOTALL):  # a regular expression, which the text has to contain
        return 1.0 if re.search(answer[1:-1], text) else 0.0
    if re.fullmatch(NUMBER, answer):  # a number: the last one that the text names has to be equal to it
        numbers = [Decimal(number.replace(",", "")) for number in re.findall(NUMBER, text)]
        right = numbers[-1:] == [Decimal(answer.replace(",", ""))]
        return 1.0 if right else 0.1 if numbers else 0.0
    if text.strip().lower() == answer.lower():  # any other text: the same one, and nothing else
        return 1.0
    return 0.2 if answer.lower() in text.lower() else 0.0


DEFAULTS = dict(STEPS=20, BATCH_POSITIONS=8, GROUP_SIZE=16, LR=5e-5, WARMUP_STEPS=2, KL_COEF=0.03)
DEFAULTS |= dict(TEMPERATURE=1.0, EVAL_POSITIONS=200, EVAL_EVERY=0, SAVE_EVERY=100)
DEFAULTS |= dict(MICROBATCH_TOKENS=1024, OUT_DIR="runs/jsonl")
DEFAULTS |= dict(KL_DIVERGENCE_THRESHOLD=10.0)  # a short answer can be far from what a chat model would say
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
QUESTION = setting("QUESTION", "question", "the key of a line's question in the file that DATA names")
ANSWER = setting("ANSWER", "answer", "the key of its reference answer")
SYSTEM = setting("SYSTEM", "", "a system prompt, which may show the form of an answer")
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 64, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"jsonl": MAX_NEW_TOKENS}
NAMES = {"jsonl right": "right answers"}


def load(source, config):
    """(training items, held-out items), each the (question, answer) of a line."""
    if source == "builtin":
        fail("name a file of questions: DATA=questions.jsonl, with a question and an answer on each line.")
    items = read(source)
    held_out = [item for item in items if is_held_out(item[0])]
    return [item for item in items if not is_held_out(item[0])], held_out


def read(file):
    items = []
    for number, row in enumerate(read_rows(file), 1):
        question, answer = row.get(QUESTION), row.get(ANSWER)
        if not isinstance(question, str) or not isinstance(answer, str | int | float) or not str(answer).strip():
            fail(f"{file}, row {number}: {QUESTION} has to be a text, and {ANSWER} a text or a number.")
        if isinstance(answer, float):
            answer = format(Decimal(repr(answer)), "f")  # not 5e-05, which a model would not write
        answer = str(answer).strip()
        try:
            reward("", answer)
        except re.error as error:
            fail(
                f"{file}, row {number}: the answer stands between slashes, so it has to be a regular expression: "
                f"{error}."
            )
        items.append((question, answer))
    return items


def make_questions(items, count, rng, config):
    chosen = rng.sample(items, count)
    return [Question("jsonl", prompt(config, question, SYSTEM), answer) for question, answer in chosen]


def grade(question, text, hit_limit=False):
    worth = reward(text, question.truth)
    pieces = [("reward", worth)]
    if hit_limit:
        pieces.append(runaway(pieces))
    return Grade(tuple(pieces), {"right": float(worth == 1 and not hit_limit)})  # a number may be cut off
