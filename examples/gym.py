"""Tasks of the package reasoning-gym (Stojanovski et al., 2025), which makes questions and grades their answers.

    python -m pip install reasoning-gym==0.1.25
    TASK=examples/gym.py DATA='lcm {"max_value": 20}' SHOTS=4 MAX_NEW_TOKENS=16 ./train.sh

DATA names a task and, after a space, what differs from its own configuration. A small model finds most tasks too hard
as they are. So look for an easier configuration first, one that the model solves now and then; SHOTS puts worked
examples before each question. docs/tasks.md has a table of eleven:

    python -m tools.evaluate runs/smollm2 TASK=examples/gym.py DATA='lcm {"max_value": 20}' SHOTS=4 EVAL_SAMPLES=16

The answer is the whole text, or what stands between <answer> and </answer> if the text has such a pair.
"""

import copy
import functools
import json
import math
import re
from importlib import metadata

from examples.chat import is_held_out, prompt
from examples.start import smollm2 as start_model  # noqa: F401, a part of the task
from nanorook import parallel
from nanorook.settings import fail, setting
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=20, BATCH_POSITIONS=8, GROUP_SIZE=16, LR=5e-5, WARMUP_STEPS=2, KL_COEF=0.03)
DEFAULTS |= dict(TEMPERATURE=1.0, EVAL_POSITIONS=200, EVAL_EVERY=0, SAVE_EVERY=100)
DEFAULTS |= dict(MICROBATCH_TOKENS=1024, OUT_DIR="runs/gym", DATA="letter_counting")
DEFAULTS |= dict(KL_DIVERGENCE_THRESHOLD=10.0)  # a short answer can be far from what a chat model would say
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
SYSTEM = setting("SYSTEM", "Answer with the result alone.", "the system prompt")
MOST_SHOTS = 16
SHOTS = setting("SHOTS", 0, "worked examples before the question", low=0, high=MOST_SHOTS)
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 32, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"gym": MAX_NEW_TOKENS}
NAMES = {"gym right": "right answers"}

VERSION = "0.1.25"  # whose scorers have all been read for the list below
RUNS = "its scorer would run the answer as a Python program"  # by eval
PARSES = "its scorer would run parts of the answer as a Python program"  # by sympy's parse_expr, which calls eval
REFUSED = {
    # A stranger's text must not be run in this process.
    "binary_matrix": RUNS,
    "n_queens": RUNS,
    "spiral_matrix": RUNS,
    "string_insertion": RUNS,
    "countdown": PARSES,
    "intermediate_integration": PARSES,
    "polynomial_multiplication": PARSES,
    "puzzle24": PARSES,
    "simple_integration": PARSES,
    "codeio": "it makes its questions by running programs that a language model wrote",
    "composite": "its scorer passes the answer on to other tasks, which may be among those refused",
    # A few characters of an answer must not occupy this process for hours, or all of its memory.
    "coin_flip": "the answer 1e999999999 would occupy its scorer for hours",  # Fraction writes all digits down
    "propositional_logic": "its scorer lists 2^n cases for an answer with n names",
    "rubiks_cube": "its scorer writes the answer R999999999 down as so many moves",
    "rush_hour": "its scorer shifts a bit mask by as many places as the answer says",
    # A wrong answer must not earn what a right one does.
    "complex_arithmetic": "its scorer gives full marks for the answer nan",
    "game_of_life_halting": "its scorer gives full marks for any answer that is not empty",
}
TRAINING, HELD_OUT = 0, 1_000_000  # seeds; the package adds a question's number to them, so these two never meet
DRAWN = 2000  # questions from each seed, some of them several times if a task has few


@functools.cache
def dataset(data, seed):
    """The package's generator and scorer for a setting such as 'chain_sum {"max_terms": 2}'."""
    name, _, configuration = data.partition(" ")
    try:
        found = metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        fail(f"examples/gym.py needs reasoning-gym {VERSION}, whose scorers have been checked, but {found or 'none'} "
             f"is installed: python -m pip install reasoning-gym=={VERSION}")  # fmt: skip
    import reasoning_gym  # which takes seconds

    if name in REFUSED:
        fail(f"DATA={name} is refused: {REFUSED[name]}.")
    if name not in reasoning_gym.factory.DATASETS:
        known = ", ".join(sorted({*reasoning_gym.factory.DATASETS} - {*REFUSED}))
        fail(f"DATA={name} is not a task of reasoning-gym; it has {known}.")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(configuration or "{}"), seed=seed, size=DRAWN)
    except (AssertionError, ValueError, TypeError) as error:
        fail(f"DATA={data}: the configuration has to be JSON that reasoning-gym accepts: {error}.")


@functools.lru_cache(maxsize=10_000)
def entry(data, seed, number):
    """A question with its answer and what the scorer needs; the same in each process."""
    try:
        return dataset(data, seed)[number]
    except Exception as error:  # of a configuration that the package accepts and cannot draw from
        fail(f"DATA={data}: reasoning-gym cannot make a question with this configuration: {error}.")


def load(source, config):
    """(training items, held-out items) from different seeds, each item (task, seed, number). The hash of a question
    decides as well, so that none is in both lists, and no list has a question twice."""
    parallel.log(f"drawing questions: {source}")
    training, held_out = draw(source, TRAINING), draw(source, HELD_OUT)
    return training[MOST_SHOTS:], held_out  # the worked examples are among the first ones


def draw(source, seed):
    items = {}
    for number in range(DRAWN):
        question = entry(source, seed, number)["question"]
        if is_held_out(question) == (seed == HELD_OUT):
            items.setdefault(question, (source, seed, number))
    return [*items.values()]


@functools.cache
def worked_examples(source):
    """SHOTS pairs (question, answer) from the training seed."""
    found = []
    for item in draw(source, TRAINING)[:MOST_SHOTS] if SHOTS else []:
        question, answer = entry(*item)["question"], entry(*item)["answer"]
        if isinstance(answer, str) and score(item, answer) == 1:
            found.append((question, answer))
    if len(found) < SHOTS:
        fail(f"DATA={source} has {len(found)} worked examples to show, fewer than SHOTS={SHOTS}.")
    return found[:SHOTS]


def make_questions(items, count, rng, config):
    questions = []
    for item in rng.sample(items, count):
        source, seed, number = item
        asked = prompt(config, entry(*item)["question"], SYSTEM, worked_examples(source))
        truth = {"task": source, "seed": seed, "number": number, "answer": entry(*item)["answer"]}
        questions.append(Question("gym", asked, truth))
    return questions


def score(item, answer):
    """What the package gives for an answer, from 0 to 1. Some scorers fail on some answers, which are wrong then, and
    some change the entry, so each gets its own copy."""
    source, seed, _ = item
    try:
        found = float(dataset(source, seed).score_answer(answer, copy.deepcopy(entry(*item))))
    except Exception:  # whatever a scorer raises
        return 0.0
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


def grade(question, text, hit_limit=False):
    """The score is what the package pays; many tasks give some of it for a wrong answer in the right form."""
    truth = question.truth
    tagged = list(re.finditer(r"<answer>(.*?)</answer>", text, re.DOTALL))
    answer = tagged[-1][1] if tagged else text
    worth = score((truth["task"], truth["seed"], truth["number"]), answer.strip())
    pieces = [("score", worth)]
    if hit_limit:
        pieces.append(runaway(pieces))
    return Grade(tuple(pieces), {"right": float(worth == 1)})
