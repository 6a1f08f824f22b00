"""A task: what is asked, what is true, what an answer is worth. TASK=FILE.py names the file.

`Task` is what such a file provides. The functions below it call the task and check what it returns, so that a mistake
ends with a clear message. docs/tasks.md leads from an idea to a table of results; examples/letters.py is a small task.
"""

import copy
import importlib.util
import inspect
import json
import math
import pickle
import random
import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from nanorook import parallel
from nanorook.settings import ROOT, fail
from nanorook.tokenizer import Special

# Metrics that each kind of question has anyway
TAKEN = "reward", "reward_max", "frac_zero_std", "hit_limit", "kl", "logprob_gap"
RUNAWAY = 0.3  # what the reward of an answer without an end is multiplied by


class Question(NamedTuple):
    kind: str  # a name in LIMITS; questions of one kind are sampled together
    prompt: str | tuple  # a text, or pieces, each a text or a tokenizer's Special token, as examples.chat makes them
    truth: Any  # what grade() needs; it must fit into JSON, as it is written to samples.jsonl
    stop: str = ""  # a token that contains this text ends an answer, too, and is part of its text
    stop_after: int = 0  # `stop` is ignored in this many of the first tokens, as an answer may begin with a space


class Grade(NamedTuple):
    # (name, value, (start, end), ...): what a piece of the reward is worth, and the characters of the answer that it
    # judges; without a span it judges the whole answer. It is compared with the piece of the same name in the group's
    # other answers. An answer that lacks it counts as 0 on all of its tokens, so give a failed piece 0 and its span.
    # Names are unique within an answer.
    pieces: tuple
    # name -> float, averaged over answers and logged. "structure": whether the answer has the right form. Less of an
    # _error is better; of any other metric whose values are between 0 and 1, more.
    metrics: dict

    @property
    def reward(self):
        return round(math.fsum(value for _, value, *_ in self.pieces), 9)  # the same sum in any order of the pieces


class Task(Protocol):
    """What a task file provides."""

    DEFAULTS: dict  # {setting: default} where they differ from train.py's
    LIMITS: dict  # {kind of question: the most tokens that an answer may have, including its end token}

    def start_model(self) -> str:
        """The folder or hub id of the model that training starts from; a folder is made first if necessary."""

    def load(self, source: str, config) -> tuple[list, list]:
        """What questions are about: (training items, held-out items). `source` is the setting DATA; `config` is the
        model's, whose `extra` holds other entries of its config.json, such as the text format."""

    def make_questions(self, items: list, count: int, rng: Random, config) -> list[Question]:
        """`count` questions about some of the items, the same for the same rng."""

    def grade(self, question: Question, text: str, hit_limit: bool) -> Grade:
        """What an answer is worth, 1 if it is perfect. `text` is without the end token; `hit_limit`: it was cut off."""

    # Optional: KL_WEIGHTS = {kind of question: what KL_COEF is multiplied by for its answers}; 1 for other kinds.
    # Optional: NAMES = {"kind metric": what people call it}, the main one first: {"mates mate": "mates found"}.
    # Optional: LARGE = True, if DEFAULTS were chosen for a model above 50M parameters, see nanorook/sizes.py.
    # Optional: def question(text, config) -> Question, for a question that a user types in tools.ask.
    # Optional: def answers(question) -> list of texts: the answers that count, each once and with the ending that the
    # question's stop needs; [] if they cannot be listed. tools.evaluate then computes their probabilities, too.
    # Optional: def show(question, text) -> str, shown in a report beside the answer or on a terminal instead of it, for
    # any text. If it begins with "<" it is HTML, for reports only; its docstring is then the legend of the pictures.


def prompt_text(prompt):
    """A prompt as people read it, with special tokens by name."""
    return "".join(prompt)


def prompt_ids(prompt, tokenizer):
    """A prompt's token ids, as transformers makes them. Only a Special piece becomes a special token, whatever the
    texts contain. A plain text gets the tokens that the tokenizer puts before each text; a prompt in pieces does not,
    as a chat template writes its own."""
    if not isinstance(prompt, tuple | list | Special):
        return [*tokenizer.beginning, *tokenizer.encode(prompt)]
    pieces = [prompt] if isinstance(prompt, Special) else prompt
    ids = []
    for piece in pieces:
        ids += [tokenizer.special_id(piece)] if isinstance(piece, Special) else tokenizer.encode(piece)
    return ids


def load_task(file) -> Task:
    """The module of a task file, by its absolute path or its path in the project's folder."""
    module = module_of(file) or fail(f"TASK={file}: there is no such Python file.")
    for name in ("DEFAULTS", "LIMITS", "start_model", "load", "make_questions", "grade"):
        if not hasattr(module, name):
            fail(f"TASK={file} has no {name}; nanorook/task.py says what a task file provides.")
        if name in ("DEFAULTS", "LIMITS"):
            if not isinstance(getattr(module, name), dict):
                fail(f"TASK={file}: {name} has to be a dict, as nanorook/task.py says.")
            continue
        parameters = [*inspect.signature(getattr(Task, name)).parameters][1:]  # without self
        try:
            inspect.signature(getattr(module, name)).bind(*parameters)
        except TypeError as error:
            fail(f"TASK={file}: {name} has to be a function of ({', '.join(parameters)}): {error}.")
    for kind, limit in module.LIMITS.items():
        if type(kind) is not str or not re.fullmatch(r"\w+", kind) or type(limit) is not int or limit < 1:
            fail(f"TASK={file}: LIMITS has {kind!r}: {limit!r}; a kind must be one word, its limit at least 1 token.")
    names = names_of(module)
    if not isinstance(names, dict) or not all(isinstance(text, str) for pair in names.items() for text in pair):
        fail(f"TASK={file}: NAMES={names!r} has to be a dict of texts, as nanorook/task.py says.")
    weights = getattr(module, "KL_WEIGHTS", {})
    if not isinstance(weights, dict) or not all(
        kind in module.LIMITS and isinstance(weight, int | float) and 0 <= weight < math.inf
        for kind, weight in weights.items()
    ):
        fail(
            f"TASK={file}: KL_WEIGHTS={weights!r} has to be a dict from kinds in LIMITS to finite weights of at "
            "least 0."
        )
    return module


def module_of(file):
    """The module of a Python file, by its absolute path or its path in the project's folder, or None."""
    path = (ROOT / file).resolve()
    if not path.is_file() or path.suffix != ".py":
        return None
    for module in list(sys.modules.values()):  # a program may have imported it already
        known = getattr(module, "__file__", None) or ""
        if known.endswith(path.name) and Path(known).resolve() == path:
            return module
    name = path.stem if path.parent == ROOT else f"{path.parent.name}_{path.stem}".replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(task):
    """What people call the task's figures, the main one first."""
    return getattr(task, "NAMES", {})


def start_folder(task):
    source = task.start_model()
    if not source or not isinstance(source, str | Path):
        fail(f"the task's start_model returned {source!r}; it has to return the folder or the hub id of a model.")
    return str(source)


# A resumed run calls the task again and must get the same results. So the global random module is seeded for each call,
# and the task receives its own copy of the list, which it may shuffle.


def load_items(task, source, config):
    """The task's (training items, held-out items)."""
    random.seed(0)
    match found := task.load(source, config):
        case [list() | tuple() as items, list() | tuple() as held_out]:
            return items, held_out
    fail(f"the task's load returned {found!r:.80}; it has to return two lists, (training items, held-out items).")


def draw_questions(task, items, count, rng, config):
    """The task's questions, checked against the contract."""
    random.seed(copy.copy(rng).random())
    questions = task.make_questions(list(items), count, rng, config)
    found = len(questions) if isinstance(questions, list | tuple) else "no list of"
    if found != count:
        fail(f"the task's make_questions returned {found} questions, but {count} were requested.")
    return check_questions(task, questions)


def draw_with_checks(task, items, count, rng, config):
    """As draw_questions, with checks that would slow down later steps: items are unchanged, truths fit into JSON, and
    all processes ask the same."""
    try:
        before = pickle.dumps(items)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fail(f"the task's items have to be data that pickle can copy ({error}).")
    questions = draw_questions(task, items, count, rng, config)
    if pickle.dumps(items) != before:
        fail("the task's make_questions changes its items, so a resumed run would ask different ones: modify a copy.")
    for question in questions:
        try:
            json.dumps(question.truth)
        except (TypeError, ValueError) as error:
            fail(f"the truth of {prompt_text(question.prompt)!r:.60} has to be serialisable as JSON ({error}).")
    prompts = str([question.prompt for question in questions])
    if len({*parallel.gather([prompts])}) > 1:
        fail("the task's make_questions asked different questions in another process; do not let it draw from a set.")
    return questions


def check_questions(task, questions):
    for question in questions:
        kind, prompt, _, stop, stop_after = question if isinstance(question, Question) else (None,) * 5
        pieces = prompt if isinstance(prompt, tuple) else (prompt,)
        texts = all(isinstance(text, str) for text in (kind, *pieces, stop))
        if not (texts and any(pieces) and isinstance(stop_after, int)):
            fail(f"the task returned {question!r:.80}: expected a Question whose kind and stop are strings, stop_after "
                 "a whole number, and prompt a string or a tuple of strings that is not empty.")  # fmt: skip
        try:
            "".join([kind, *pieces, stop]).encode()
        except UnicodeEncodeError:
            fail(f"the task returned {question!r:.80}: it contains half of a character (a lone surrogate), which is "
                 "not valid text; remove it.")  # fmt: skip
        if kind not in task.LIMITS:
            fail(f"the task's LIMITS have no entry for questions of the kind {kind!r}.")
    return questions


def grade_answers(task, answers):
    """The answers with their grades, each checked against the contract."""
    truths = {id(answer.question): answer.question.truth for answer in answers}
    result = []
    before = repr(truths)
    for answer in answers:
        random.seed(answer.text)
        grade = task.grade(answer.question, answer.text, answer.hit_limit)
        if wrong := wrong_grade(grade, answer.text):
            prompt = prompt_text(answer.question.prompt)
            fail(f"the task's grade for the answer {answer.text!r:.60} to {prompt!r:.60}: {wrong}")
        result.append(answer._replace(grade=grade))
    if repr(truths) != before:
        fail("the task's grade changes the truth of its question, and with it the reward of the next answer: "
             "modify a copy.")  # fmt: skip
    return result


def shuffled(answers, group_size, seed):
    """CONTROL=shuffle: for each answer the index of the one in its group whose values it is paid, all pieces together.
    A piece still judges the answer's own tokens. A uniformly random permutation keeps the rewards and noise of a run
    and leaves no gradient on average, so whatever the control gains, it has not learnt from the rewards. An answer may
    keep its values: if none could, what each is paid would be negatively correlated with what it earned. The prompt and
    `seed` decide the permutation, so it does not depend on which process has the group."""
    seeds = [f"{seed}{prompt_text(answer.question.prompt)}" for answer in answers[::group_size]]
    orders = [Random(seed).sample(range(group_size), group_size) for seed in seeds]
    return [group * group_size + place for group, order in enumerate(orders) for place in order]


def raised_by(task, error):
    """Whether the task's own code raised it, or called what did."""
    return any(frame.f_globals is vars(task) for frame, _ in traceback.walk_tb(error.__traceback__))


def wrong_grade(grade, text):
    """The rule that a grade breaks, as a sentence; empty if it breaks none."""
    if not (isinstance(grade, Grade) and isinstance(grade.pieces, (tuple, list)) and isinstance(grade.metrics, dict)):
        return f"it returned {grade!r:.80}, not a Grade of pieces and metrics."
    names = set()
    for piece in grade.pieces:
        match piece:
            case (str(name), int() | float() as value, *spans) if math.isfinite(value) and name not in names:
                names.add(name)
            case _:
                return f"the piece {piece!r} has to be (a unique name, a finite number, (start, end), ...)."
        for span in spans:
            match span:
                case (int(start), int(end)) if 0 <= start <= end <= len(text):
                    continue
            return f"the piece {name!r} judges {span!r}, which is not a (start, end) within the text."
    for name, value in grade.metrics.items():
        if type(name) is not str or not name or " " in name or "/" in name or name in TAKEN:
            return f"the metric {name!r} needs a name of one word without /, other than {', '.join(TAKEN)}."
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"the metric {name!r} is {value!r}; it has to be a finite number."
    return ""


def runaway(pieces):
    """The piece that multiplies the reward by RUNAWAY. A factor keeps the order of rewards, where a cap would make them
    all equal."""
    return "runaway", (RUNAWAY - 1) * sum(value for _, value, *_ in pieces)


def earned(pieces):
    """What a reward is made of; pieces such as "candidates 3" are added up under their first word."""
    found = Counter()
    for name, value, *_ in pieces:
        found[name.split(" ")[0]] += value
    return found


def as_sum(pieces):
    return " + ".join(f"{value:.4g} {name}" for name, value in earned(pieces).items() if value).replace("+ -", "- ")


def kinds_of(row):
    """The kinds of questions in a step's metrics. A piece of the reward may also be called "reward"."""
    return [name.split("/")[0] for name in row if name.split("/")[1:] == ["reward"]]
