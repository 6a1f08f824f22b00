"""A task: what is asked, what is true, what an answer is worth. TASK=FILE.py names the file; rewards.py is chess.

`Task` is what such a file provides; `load`, `make_questions` and `check_grades` hold it against that, so that a mistake
ends in a sentence. docs/tasks.md is the road from an idea to a table; examples/letters.py is a small one.
"""

import importlib.util
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from nanorook.settings import GIVEN, fail

ROOT = Path(__file__).parent.parent


class Question(NamedTuple):
    kind: str  # a name in LIMITS; questions of one kind are sampled together
    prompt: str
    truth: Any  # what grade() needs; only what JSON can hold, as it is written to samples.jsonl
    stop: str = ""  # an answer ends with a token that holds this text, too; the same for all questions of a kind


class Grade(NamedTuple):
    # (name, value, (start, end), ...): what a piece of the reward is worth, and the characters of the answer that it
    # judges; without a span it judges the whole answer. Names differ within an answer.
    pieces: tuple
    metrics: dict  # name -> float, averaged over answers and logged; "structure": whether the answer can be read

    @property
    def reward(self):
        return round(math.fsum(value for _, value, *_ in self.pieces), 9)  # the same sum in any order of the pieces


class Task(Protocol):
    """What a task file provides."""

    DEFAULTS: dict  # {setting: default} where the task needs others than train.py has
    LIMITS: dict  # {kind of question: the most tokens that an answer may have, its end token counted}

    def start_model(self) -> str:
        """The folder of the model that training starts from, made first if need be."""

    def load(self, source: str, config) -> tuple[list, list]:
        """What questions are about: (training items, held-out items). `source` is the setting DATA; `config` is the
        model's, whose `extra` holds what its folder says of the text format."""

    def make_questions(self, items: list, count: int, rng: Random, config) -> list[Question]:
        """`count` questions about some of the items, the same for the same rng."""

    def grade(self, question: Question, text: str, hit_limit: bool) -> Grade:
        """What an answer is worth, 1 where it is perfect. `text` lacks the end token; `hit_limit`: it was cut off."""

    # Optional: def question(text, config) -> Question, for a question that a user types at tools.ask.


def load(file) -> Task:
    """The module of a task file, by its path from here or from the project's folder; its DEFAULTS replace those of the
    settings that follow."""
    paths = (path.resolve() for path in (Path(file), ROOT / file) if path.is_file() and path.suffix == ".py")
    path = next(paths, None) or fail(f"TASK={file}: there is no such Python file.")
    for module in list(sys.modules.values()):  # a program may have imported it already
        if getattr(module, "__file__", None) and Path(module.__file__).resolve() == path:
            break
    else:
        name = path.stem if path.parent == ROOT else "task_" + path.stem
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    for name in ("DEFAULTS", "LIMITS", "start_model", "load", "make_questions", "grade"):
        if not hasattr(module, name):
            fail(f"TASK={file} has no {name}; nanorook/task.py says what a task file provides.")
    for kind, limit in module.LIMITS.items():
        if not re.fullmatch(r"\w+", kind) or type(limit) is not int or limit < 1:
            fail(f"TASK={file}: LIMITS has {kind!r}: {limit!r}; a kind is one word, its limit at least 1 token.")
    GIVEN["defaults"] = module.DEFAULTS
    return module


def make_questions(task, items, count, rng, config):
    """The task's questions, held against the contract."""
    questions = task.make_questions(items, count, rng, config)
    if len(questions) != count:
        fail(f"the task's make_questions returned {len(questions)} questions where {count} were asked for.")
    return checked(task, questions)


def checked(task, questions):
    for question in questions:
        texts = {type(question.prompt), type(question.stop)} if isinstance(question, Question) else ()
        if texts != {str} or not question.prompt:
            fail(f"the task returned {question!r:.80}, which is no Question with a prompt and a `stop` of text.")
        if question.kind not in task.LIMITS:
            fail(f"the task's LIMITS have no entry for questions of the kind {question.kind!r}.")
        try:
            json.dumps(question.truth)
        except (TypeError, ValueError) as error:
            fail(f"the truth of {question.prompt!r:.60} has to be what JSON can hold ({error}).")
    return questions


def graded(task, answers):
    return [a._replace(grade=task.grade(a.question, a.text, a.hit_limit)) for a in answers]


def shuffled(answers, group_size, seed):
    """CONTROL=shuffle: for each answer the place of the one in its group whose values it is paid, all pieces together;
    the tokens that a piece judges stay its own. A uniformly random permutation leaves a control the rewards and the
    noise of its run, and on average no gradient: whatever it gains, no reward has taught. An answer may keep its own
    values; if none did, each would be paid against what it earned. The prompt and `seed` decide, so that it does not
    matter which process has the group."""
    orders = [Random(seed + a.question.prompt).sample(range(group_size), group_size) for a in answers[::group_size]]
    return [group * group_size + place for group, order in enumerate(orders) for place in order]


def check_grades(answers):
    """Holds grades against the contract: an evaluation's, of which the first comes before the first step."""
    for answer in answers:
        if wrong := wrong_grade(answer.grade, answer.text):
            fail(f"the task's grade, of the answer {answer.text!r:.60} to {answer.question.prompt!r:.60}: {wrong}")


def wrong_grade(grade, text):
    """The rule that a grade breaks, as a sentence; empty where it breaks none."""
    if not (isinstance(grade, Grade) and isinstance(grade.pieces, (tuple, list)) and isinstance(grade.metrics, dict)):
        return f"it returned {grade!r:.80}, not a Grade of pieces and metrics."
    names = set()
    for piece in grade.pieces:
        match piece:
            case (str(name), int() | float() as value, *spans) if math.isfinite(value) and name not in names:
                names.add(name)
            case _:
                return f"the piece {piece!r} has to be (a name of its own, a finite number, (start, end), ...)."
        for span in spans:
            match span:
                case (start, end) if type(start) is type(end) is int and 0 <= start <= end <= len(text):
                    pass
                case _:
                    return f"the piece {name!r} judges {span!r}, which is no (start, end) within the text."
    for name, value in grade.metrics.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or " " in str(name) or name == "reward":
            return f"the metric {name!r} is {value!r}; it has to be one word, not `reward`, with a number."
    return ""


def earned(pieces):
    """What a reward is made of; "candidates 3" is one of several pieces of this name."""
    found = Counter()
    for name, value, *_ in pieces:
        found[name.split(" ")[0]] += value
    return found


def as_sum(pieces):
    return " + ".join(f"{value:.4g} {name}" for name, value in earned(pieces).items() if value).replace("+ -", "- ")
