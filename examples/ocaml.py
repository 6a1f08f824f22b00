"""Small functions, judged by OCaml itself: does it parse, does it have the right type, which tests does it pass?

    TASK=examples/ocaml.py ./train.sh       (* the larger of b and a, plus one, times two *) let f a b =
                                            -> (max b a + 1) * 2

A program is an answer that a machine can verify: the compiler says whether it parses and has the right type, and tests
say what it does. ocaml_verifier.py keeps what is judged in a cage. The start model is fluent and careless: it
writes each word of a question as OCaml, but just as often with a wrong operator, order or type, or with parentheses
forgotten or left open.

    TASK=examples/ocaml.py MODEL=Qwen/Qwen2.5-Coder-1.5B-Instruct LR=1e-5 DTYPE=auto COMPILE=auto ./train.sh

A model with a chat template is asked the same in a chat, and answers with its code in a fence.
"""

import operator
import random
import re
from itertools import permutations, product

from examples.chat import chat, chat_template
from examples.ocaml_verifier import Verdict, judge, ocaml
from examples.start import make_start_model
from nanorook.settings import ROOT
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=50, BATCH_POSITIONS=16, GROUP_SIZE=16, LR=1e-3, EVAL_POSITIONS=400)
DEFAULTS |= dict(EVAL_EVERY=0, SAVE_EVERY=50, OUT_DIR="runs/ocaml", DTYPE="float32", COMPILE="0")
# In tokens: those of the start model are bytes, of which the longest answer that it was shown has 24.
LIMITS = {"ocaml": 40, "coder": 200}
NAMES = {"ocaml right": "right programs", "ocaml typed": "programs of the right type"}
START = ROOT / "runs" / "ocaml-start"
WEIGHTS = {"parse": 0.1, "type": 0.1, "tests": 0.4, "all": 0.4}

HEAD, SIGNATURE = "let f a b =", "f : int -> int -> int"  # what the answer continues, and the type of the whole
ASKED = """Write a function in OCaml, of type int -> int -> int: f a b is {}, worked out from left to right.
Answer with its code alone, in this form:
```ocaml
let f a b = ...
```"""
FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)  # whatever language it names: the verifier sees what it holds
TESTS = ((5, 3), (2, 7), (-4, 1), (6, -2), (4, 4), (-3, -8))
CALLS = ocaml([list(pair) for pair in TESTS])
FIRST = {  # the words of a question, what they mean, the right OCaml, and what a careless writer writes as often
    "the larger of {} and {}": (max, "max {} {}", "min {} {}"),
    "the smaller of {} and {}": (min, "min {} {}", "{} < {}"),
    "the sum of {} and {}": (operator.add, "{} + {}", "{} +. {}"),
    "the difference of {} and {}": (operator.sub, "{} - {}", "{1} - {0}"),
    "the product of {} and {}": (operator.mul, "{} * {}", "{} + {}"),
    "the distance of {} and {}": (lambda a, b: abs(a - b), "abs ({} - {})", "abs {} - {}"),
}
NEXT = {  # the same, for an operation on the result so far and a number
    "plus {}": (operator.add, "{} + {}", "{} - {}"),
    "minus {}": (operator.sub, "{} - {}", "{} -. {}"),
    "times {}": (operator.mul, "({}) * {}", "{} * {}", "({} * {}"),
}
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


def load(source, config):
    """(training items, held-out items): an item is (first words, "ab" or "ba", (next words, number), ...). Some ask for
    the same function in other words, such as "the sum of b and a" for "the sum of a and b"; these are in one list."""
    rests = [rest for count in (1, 2) for rest in permutations(product(NEXT, NUMBERS), count)]
    functions, items, held_out = {}, [], []  # functions: what one returns on TESTS -> the items that ask for it
    for first, order, rest in product(FIRST, ("ab", "ba"), rests):
        item = (first, order, *rest)
        functions.setdefault(tuple(ask(item).truth), []).append(item)
    for same in random.Random(0).sample([*functions.values()], len(functions)):
        (held_out if len(held_out) + len(same) <= 400 else items).extend(same)
    return items, held_out


def make_questions(items, count, rng, config):
    return [ask(item, config) for item in rng.sample(items, count)]


def ask(item, config=None):
    """The Question, for a coder in a chat; its truth is what the function returns for each of TESTS."""
    first, order, *rest = item
    words = ", ".join([first.format(*order), *(word.format(number) for word, number in rest)])
    truth = [FIRST[first][0](*(pair if order == "ab" else pair[::-1])) for pair in TESTS]
    for word, number in rest:
        truth = [NEXT[word][0](value, NUMBERS[number]) for value in truth]
    if config and chat_template(config):
        return Question("coder", chat(config, [{"role": "user", "content": ASKED.format(words)}]), truth)
    return Question("ocaml", f"(* {words} *) {HEAD}", truth)


def write(item, choose):
    """An answer; `choose` takes one of the ways to write each of its words."""
    first, order, *rest = item
    code = choose(FIRST[first][1:]).format(*order)
    for word, number in rest:
        code = choose(NEXT[word][1:]).format(code, NUMBERS[number])
    return " " + code


def grade(question, text, hit_limit=False):
    """Partial credit: what does not parse has no type, and what does not have the right type is not run. What a
    coder says around its code is not judged, unless it has written none."""
    if question.kind == "coder":
        *_, fence = [None, *FENCE.finditer(text)]  # the last one, as it may have thought in others
        verdict = judge(fence[1], SIGNATURE, CALLS) if fence else Verdict()
        spans = [fence.span()] if fence else []
    else:
        verdict, spans = judge(HEAD + text, SIGNATURE, CALLS), []
    passed = [result == wanted for result, wanted in zip(verdict.results, question.truth)]
    right = bool(passed) and all(passed)
    pieces = [("parse", WEIGHTS["parse"] * verdict.parses), ("type", WEIGHTS["type"] * verdict.typed)]
    pieces += [(f"tests {i}", WEIGHTS["tests"] / len(TESTS) * ok) for i, ok in enumerate(passed)]
    pieces += [("all", WEIGHTS["all"] * right)]
    pieces = [(*piece, *spans) for piece in pieces]
    if hit_limit or verdict.ran_away:
        pieces.append(runaway(pieces))
    metrics = {"structure": verdict.parses, "typed": verdict.typed, "tests": sum(passed) / len(TESTS), "right": right}
    return Grade(tuple(pieces), {name: float(value) for name, value in metrics.items()})


def start_model():
    items, _ = load("", None)

    def example(rng):
        item = rng.choice(items)
        return ask(item).prompt, write(item, rng.choice)

    return make_start_model(START, example, positions=112)
