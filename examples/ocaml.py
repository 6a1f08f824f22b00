"""Small functions, judged by OCaml itself: does it parse, does it have the right type, which tests does it pass?

    TASK=examples/ocaml.py ./train.sh       (* the larger of b and a, plus one, times two *) let f a b =
                                            -> (max b a + 1) * 2

A program is an answer that a machine can verify: the compiler says whether it parses and has the right type, and tests
say what it does. The start model is fluent and careless: it writes each word of a question as OCaml, but just as often
with a wrong operator, order or type, or with parentheses forgotten or left open. ocaml_problems.py asks models that
people have for OCaml as people write it.
"""

import operator
import random
from itertools import permutations, product

from examples.ocaml_toplevel import Problem, judge
from examples.start import make_start_model
from nanorook.settings import ROOT
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=50, BATCH_POSITIONS=16, GROUP_SIZE=16, LR=1e-3, EVAL_POSITIONS=400)
DEFAULTS |= dict(EVAL_EVERY=0, SAVE_EVERY=50, OUT_DIR="runs/ocaml", DTYPE="float32", COMPILE="0")
LIMITS = {"ocaml": 40}  # tokens of an answer, which are bytes; the longest that the start model was shown has 24
NAMES = {"ocaml right": "right programs", "ocaml typed": "programs of the right type"}
START = ROOT / "runs" / "ocaml-start"
WEIGHTS = {"parse": 0.1, "type": 0.1, "tests": 0.4, "all": 0.4}

HEAD = "let f a b ="  # what the answer continues
TESTS = ((5, 3), (2, 7), (-4, 1), (6, -2), (4, 4), (-3, -8))
CALLS = tuple(f"f ({a}) ({b})" for a, b in TESTS)
# As the verifier sees each question; grade() adds what the tests expect.
PROBLEM = Problem("", "", "", HEAD, "f", "int -> int -> int", CALLS, expected=(), shown=())
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
    return [ask(item) for item in rng.sample(items, count)]


def ask(item):
    """The Question; its truth is what the function returns for each of TESTS."""
    first, order, *rest = item
    words = ", ".join([first.format(*order), *(word.format(number) for word, number in rest)])
    truth = [FIRST[first][0](*(pair if order == "ab" else pair[::-1])) for pair in TESTS]
    for word, number in rest:
        truth = [NEXT[word][0](value, NUMBERS[number]) for value in truth]
    return Question("ocaml", f"(* {words} *) {HEAD}", truth)


def write(item, choose):
    """An answer; `choose` takes one of the ways to write each of its words."""
    first, order, *rest = item
    code = choose(FIRST[first][1:]).format(*order)
    for word, number in rest:
        code = choose(NEXT[word][1:]).format(code, NUMBERS[number])
    return " " + code


def grade(question, text, hit_limit=False):
    """Partial credit: what does not parse has no type, and what does not have the right type is not run."""
    verdict = judge(PROBLEM._replace(expected=tuple(map(str, question.truth))), text)
    pieces = [("parse", WEIGHTS["parse"] * verdict.parses), ("type", WEIGHTS["type"] * verdict.typed)]
    pieces += [(f"tests {i}", WEIGHTS["tests"] / len(TESTS) * ok) for i, ok in enumerate(verdict.passed)]
    pieces += [("all", WEIGHTS["all"] * verdict.right)]
    if hit_limit or verdict.ran_away:
        pieces.append(runaway(pieces))
    metrics = {"structure": verdict.parses, "typed": verdict.typed, "tests": sum(verdict.passed) / len(TESTS)}
    metrics["right"] = verdict.right
    return Grade(tuple(pieces), {name: float(value) for name, value in metrics.items()})


def start_model():
    items, _ = load("", None)

    def example(rng):
        item = rng.choice(items)
        return ask(item).prompt, write(item, rng.choice)

    return make_start_model(START, example, positions=112)
