"""Sentences become JSON: SmolLM2-135M-Instruct (Allal et al., 2025) learns to answer with a record and nothing else.

    TASK=examples/records.py ./train.sh
    Lena, who is 31, lives in Oslo.   ->   {"name": "Lena", "age": 31, "city": "Oslo"}

The start model knows JSON, but it may put a code fence around it, name the keys as it likes, take the wrong one of two
names, or talk. The verifier is a parser and a comparison. Names and cities of the held-out questions are in no training
question. SHOTS and MAX_NEW_TOKENS let you ask it in the usual way, with worked examples and room for other words:

    python -m tools.evaluate MODEL TASK=examples/records.py SHOTS=4 MAX_NEW_TOKENS=64
"""

import json
import random
import re

from examples.chat import prompt
from examples.start import smollm2 as start_model  # noqa: F401, a part of the task
from nanorook.settings import setting
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=10, BATCH_POSITIONS=8, GROUP_SIZE=8, LR=1e-5, WARMUP_STEPS=2, KL_COEF=0.2)
DEFAULTS |= dict(TEMPERATURE=1.0, EVAL_POSITIONS=200, EVAL_EVERY=0, SAVE_EVERY=100)
DEFAULTS |= dict(MICROBATCH_TOKENS=1024, OUT_DIR="runs/records")
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
# With a line for each key a record has 29 tokens and the end token; on one line it has 23.
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 32, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"records": MAX_NEW_TOKENS}
NAMES = {"records right": "right records", "records json": "JSON and nothing else"}
FIRST_NAMES = """Lena Omar Ruth Igor Nina Hugo Mary Ivan Rosa Paul Emma Noah Anna Karl Lucy Adam Vera Felix Clara Simon
Alice Peter Sofia Oscar Julia David Laura Jonas Maria Frank Diana Bruno Helen Tomas Irene Henry""".split()
CITIES = """Oslo Lima Paris Turin Rome Cairo Delhi Dublin Vienna Madrid Berlin London Tokyo Moscow Athens Lisbon Warsaw
Sydney Boston Dallas Denver Geneva Milan Naples""".split()
SENTENCES = (
    "{name}, who is {age}, lives in {city}.",
    "At {age}, {name} moved from {other_city} to {city}.",
    "{name} ({age}) was born in {other_city} and lives in {city}.",
    "{name} is {age} and works for {other} in {city}.",
    "{other}'s friend {name}, aged {age}, has a flat in {city}.",
)
EXAMPLES = (("Marc", "Judy", "Cork", "Bonn", 44), ("Edna", "Joel", "Graz", "Bari", 71))
EXAMPLES += (("Kurt", "Lisa", "York", "Nice", 25), ("Olga", "Fred", "Bern", "Kiel", 39))
SHOTS = setting("SHOTS", 0, "worked examples before the question", low=0, high=len(EXAMPLES))
ASKED = "Answer with a JSON object alone that has the keys name, age and city."


def load(source, config):
    """(training items, held-out items): two names, two cities and an age; the first name and city are asked for."""
    rng = random.Random(0)

    def people(names, cities, count):
        return [(*rng.sample(names, 2), *rng.sample(cities, 2), rng.randrange(18, 90)) for _ in range(count)]

    return people(FIRST_NAMES[12:], CITIES[8:], 4000), people(FIRST_NAMES[:12], CITIES[:8], 1000)


def make_questions(items, count, rng, config):
    shown = []
    for sentence, example in zip(SENTENCES[1:], EXAMPLES[:SHOTS]):
        text, record = tell(sentence, *example)
        shown.append((text, json.dumps(record)))
    questions = []
    for item in rng.sample(items, count):
        text, record = tell(rng.choice(SENTENCES), *item)
        questions.append(Question("records", prompt(config, text, examples=shown), record))
    return questions


def tell(sentence, name, other, city, other_city, age):
    """(what is asked, the record)"""
    told = sentence.format(name=name, other=other, city=city, other_city=other_city, age=age)
    return f"{told}\n{ASKED}", {"name": name, "age": age, "city": city}


def grade(question, text, hit_limit=False):
    """A fifth each for JSON and nothing else, for the three keys, and for each right value, in a fence or not. A number
    at which the limit cut the answer off is not right: 3 may be the beginning of 31."""
    try:
        record = json.loads(text, object_pairs_hook=tuple)  # so that no key is lost, not even one that comes twice
    except (ValueError, RecursionError):
        record = None
    is_json = isinstance(record, tuple)
    keys = is_json and sorted(key for key, _ in record) == sorted(question.truth)  # in any order
    pieces = [("json", 0.2 * is_json), ("keys", 0.2 * keys)]
    for key, value in question.truth.items():
        found = re.search(rf'"{key}"\s*:\s*("[^"]*"|[0-9]+)(?=\s*[,}}]|\s*$)', text)
        right = found is not None and found[1] == json.dumps(value) and (not is_json or (key, value) in record)
        if hit_limit and right and isinstance(value, int):
            right = found.end() < len(text)
        pieces.append((key, 0.2 * right, *([found.span(1)] if found else [])))
    right = keys and all(value for _, value, *_ in pieces)
    if hit_limit:
        pieces.append(runaway(pieces))
    return Grade(tuple(pieces), {"json": float(is_json), "right": float(right)})
