"""Which scorers of reasoning-gym could run an answer: a walk through all that they call."""

import ast
import builtins
import inspect
import json
import textwrap
import types
from importlib import metadata

import pytest

from examples import gym

needs_gym = pytest.mark.needs("reasoning_gym", "pip install reasoning-gym==0.1.25")

# What a scorer may do with an answer. Functions, by module and name:
SAFE = {f"builtins.{name}" for name in """abs all any bool chr dict enumerate float int isinstance len list map max min
    next object ord print range set sorted str sum tuple zip""".split()}  # fmt: skip
SAFE |= {"copy.deepcopy", "datetime.date", "decimal.Decimal", "json.dumps", "json.loads", "math.exp", "math.prod"}
SAFE |= {"numpy.absolute", "numpy.allclose", "numpy.array", "numpy.float32", "numpy.loadtxt", "numpy.round"}
SAFE |= {"random.Random", "re.findall", "re.match", "re.search", "re.split"}
# Methods of texts, lists, dicts, sets, decimals, dates and matches; the last line has those of sokoban's board.
SAFE |= {f".{name}" for name in """__new__ __repr__ add adjusted append capitalize endswith format get group groups
    index intersection is_zero items join keys lower pop quantize randint remove replace rstrip split splitlines
    startswith strip title update upper values weekday
    _Game _is_solved get_curr_state load_puzzle_matrix""".split()}  # fmt: skip
# These evaluate what they have written themselves: the question, and the right answer.
OWN_TEXT = {"bitwise_arithmetic", "number_sorting"}


def names(function, owner):
    """What a function uses, as pairs (name, object), and for methods of its own class also that class. An attribute of
    an unknown object is a method of each class in sight that has it, or else (".name", None)."""
    sight = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    package = function.__module__.split(".")[0]
    classes = [one for one in sight.values() if inspect.isclass(one) and one.__module__.split(".")[0] == package]
    nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((f"import {alias.name}", None, None) for alias in node.names)
        elif isinstance(node, ast.Name) and node.id not in local:
            yield node.id, sight.get(node.id), None
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else None
            known = owner if base in ("self", "cls") else sight.get(base) if base not in local else None
            found = getattr(known, node.attr, None) if isinstance(known, type | types.ModuleType) else None
            methods = [(one, getattr(one, node.attr)) for one in classes if node.attr in vars(one)]
            if found is not None:
                yield node.attr, found, known
            elif methods:
                yield from ((node.attr, method, one) for one, method in methods)
            elif id(node) in called:
                yield f".{node.attr}", None, None


def unsafe(scorer, owner):
    """What is not SAFE of all that a scorer uses, directly or through functions and classes of its package."""
    todo, seen, found = [("score_answer", scorer, owner)], set(), set()
    while todo:
        name, used, owner = todo.pop()
        used = getattr(used, "fget", None) or getattr(used, "__func__", used)
        used = inspect.unwrap(used) if inspect.isfunction(used) else used
        module = (getattr(used, "__module__", None) or "").split(".")[0]
        if used is None and name.startswith((".", "import ")):
            found.add(name)
        elif not callable(used) or used in seen or isinstance(used, type) and issubclass(used, BaseException):
            continue
        elif module in ("typing", "enum"):  # annotations and constants
            continue
        elif module != scorer.__module__.split(".")[0]:
            found.add(f"{module}.{used.__name__}")  # a method of a builtin type has no module: ".strip"
        elif inspect.isclass(used):
            todo += [(name, method, used) for name, method in vars(used).items()]
        elif inspect.isfunction(used) and used.__code__.co_filename != "<string>":  # as a dataclass makes them
            todo += names(used, owner)
        if callable(used):
            seen.add(used)
    return found - SAFE


def helper(text):
    return eval(text)


class Reader:
    def read(self, text):
        return __import__(text)


class Direct:
    def score_answer(self, answer, entry):
        return eval(answer)


class ThroughAFunction:
    def score_answer(self, answer, entry):
        return float(max(map(helper, answer.split())))


class ThroughAMethod:
    def score_answer(self, answer, entry):
        return self.mark(answer)

    def mark(self, answer):
        reader = Reader()
        return reader.read(answer)


class Harmless:
    def score_answer(self, answer, entry):
        return 1.0 if answer.strip().lower() == entry["answer"] else self.share(answer)

    @staticmethod
    def share(answer):
        return json.loads(answer)["share"]


def test_the_walk_finds_what_is_called_directly_in_a_function_and_in_a_method():
    found = {one: unsafe(one.score_answer, one) for one in (Direct, ThroughAFunction, ThroughAMethod, Harmless)}
    assert found == {
        Direct: {"builtins.eval"},
        ThroughAFunction: {"builtins.eval"},
        ThroughAMethod: {"builtins.__import__"},
        Harmless: set(),
    }


@needs_gym
def test_each_scorer_that_could_run_an_answer_is_refused_by_name():
    from reasoning_gym.factory import DATASETS

    assert metadata.version("reasoning-gym") == gym.VERSION and len(DATASETS) == 106
    found = {name: unsafe(dataset.score_answer, dataset) for name, (dataset, _) in DATASETS.items()}
    assert {name for name, used in found.items() if used} - OWN_TEXT <= {*gym.REFUSED} <= {*DATASETS}
    running = {name for name, used in found.items() if used & {"builtins.eval", "builtins.exec", "sympy.parse_expr"}}
    assert running - OWN_TEXT == {name for name, why in gym.REFUSED.items() if why in (gym.RUNS, gym.PARSES)}
