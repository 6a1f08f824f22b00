"""examples/gym.py: which scorers of reasoning-gym are refused, and how the others are used."""

import ast
import builtins
import inspect
import json
import random
import re
import textwrap
import types
from importlib import metadata
from types import SimpleNamespace

import pytest

import toy
from examples import gym
from examples.chat import is_held_out
from nanorook.task import Question, prompt_text, wrong_grade
from nanorook.tokenizer import Tokenizer

needs_gym = pytest.mark.needs("reasoning_gym", "pip install reasoning-gym==0.1.25")
EASY = 'chain_sum {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


@pytest.fixture(scope="module")
def chats():
    return SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/smollm2"))


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


@needs_gym
@pytest.mark.parametrize("name", ["countdown", "n_queens", "codeio", "composite", "coin_flip", "game_of_life_halting"])
def test_a_refused_task_ends_in_one_sentence(name):
    with pytest.raises(SystemExit, match=f"^error: DATA={name} is refused: .*[.]$"):
        gym.load(f"{name} {{}}", None)


@needs_gym
def test_a_mistake_in_data_ends_in_one_sentence():
    for data, sentence in {
        "letter_count": "DATA=letter_count is not a task of reasoning-gym; it has ab, acre,",
        "chain_sum {": "the configuration has to be JSON that reasoning-gym accepts",
        'chain_sum {"terms": 2}': "unexpected keyword argument 'terms'",
        'chain_sum {"min_terms": 3, "max_terms": 2}': "max_terms must be >= min_terms",
        'chain_sum {"seed": 5}': "multiple values for keyword argument 'seed'",
        "chain_sum 5": "the configuration has to be JSON that reasoning-gym accepts",
    }.items():
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            gym.dataset(data, 0)


@pytest.mark.parametrize("found", [None, "0.1.26"])
def test_another_version_is_refused_as_nobody_has_read_its_scorers(found, monkeypatch):
    def version(name):
        return found or (_ for _ in ()).throw(metadata.PackageNotFoundError(name))

    monkeypatch.setattr(gym.metadata, "version", version)
    with pytest.raises(SystemExit, match=f"needs reasoning-gym 0.1.25, .* found {found or 'none'}: .*pip install"):
        gym.dataset.__wrapped__(EASY, 0)


@needs_gym
def test_no_question_is_both_trained_on_and_held_out_and_none_is_listed_twice(monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 300)
    items, held_out = gym.load(EASY, None)
    asked, asked_held_out = ([gym.entry(*item)["question"] for item in part] for part in (items, held_out))
    assert not {*asked} & {*asked_held_out} and len({*asked}) == len(asked) and len({*asked_held_out}) == len(held_out)
    assert len(asked) > 50 and len(asked_held_out) > 10 and all(map(is_held_out, asked_held_out))
    assert {seed for _, seed, _ in items} == {gym.TRAINING} and {seed for _, seed, _ in held_out} == {gym.HELD_OUT}


@needs_gym
def test_a_question_is_a_chat_after_worked_examples_that_are_never_asked(chats, monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 300)
    monkeypatch.setattr(gym, "SHOTS", 2)
    gym.worked_examples.cache_clear()
    items, held_out = gym.load(EASY, None)
    for part in (items, held_out):
        questions = gym.make_questions(part, 5, random.Random(0), chats)
        assert questions == gym.make_questions(part, 5, random.Random(0), chats)
        for question in questions:
            text = prompt_text(question.prompt)
            assert text.count("<|im_start|>assistant\n") == 3 and text.startswith("<|im_start|>system\nAnswer with")
            assert json.loads(json.dumps(question.truth)) == question.truth
            assert gym.grade(question, f" {question.truth['answer']}\n").metrics == {"right": 1.0}
    shown = {question for question, _ in gym.worked_examples(EASY)}
    assert len(shown) == 2 and not shown & {gym.entry(*item)["question"] for item in [*items, *held_out]}
    gym.worked_examples.cache_clear()


@needs_gym
def test_a_task_without_worked_answers_says_so(monkeypatch):
    monkeypatch.setattr(gym, "DRAWN", 40)
    monkeypatch.setattr(gym, "SHOTS", 1)
    gym.worked_examples.cache_clear()
    with pytest.raises(SystemExit, match="DATA=graph_color has 0 worked examples to show, fewer than SHOTS=1"):
        gym.worked_examples("graph_color")


@needs_gym
def test_the_score_is_paid_and_the_last_tagged_answer_counts():
    item = ("spell_backward", 0, 0)
    right = gym.entry(*item)["answer"]
    question = Question("gym", "?", {"task": item[0], "seed": 0, "number": 0, "answer": right})
    wrong = right[:-1] + "_"
    for text, worth in {
        right: 1,
        f"Let me see: <answer>x</answer> <answer> {right}\n</answer>": 1,
        wrong: 1 - 1 / len(right),
        "": 0,
    }.items():
        grade, cut = gym.grade(question, text), gym.grade(question, text, hit_limit=True)
        assert grade.reward == pytest.approx(worth) and grade.metrics["right"] == (worth == 1)
        assert cut.reward == pytest.approx(0.3 * worth)


@needs_gym
@pytest.mark.parametrize("name", ["prime_factorization", "boxnet", "game_of_life", "time_intervals"])
def test_any_text_is_graded(name):
    """These scorers raise exceptions for some of the texts."""
    item = (name, 0, 0)
    question = Question("gym", "?", {"task": name, "seed": 0, "number": 0, "answer": ""})
    rng = random.Random(0)
    texts = ["null", "[[NaN]]", "{}", "1:1", f"{'9' * 4000}:00", "[" * 10_000, str(gym.entry(*item)["answer"])]
    for text in [*texts, *("".join(rng.choices('0123×x:[]{}",. \n', k=rng.randrange(30))) for _ in range(100))]:
        grade = gym.grade(question, text)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


@needs_gym
def test_a_scorer_that_changes_its_entry_changes_a_copy(monkeypatch):
    before = json.dumps(gym.entry(EASY, 0, 0))  # knight_swap, for one, adds to the metadata
    scorer = SimpleNamespace(score_answer=lambda answer, entry: entry["metadata"].clear() or 1.0)
    monkeypatch.setattr(gym, "dataset", lambda *_: scorer)
    assert gym.score((EASY, 0, 0), "5") == 1 and json.dumps(gym.entry(EASY, 0, 0)) == before


@needs_gym
def test_a_score_that_is_no_share_is_made_one(monkeypatch):
    for given, worth in ((7, 1.0), (-1, 0.0), (float("nan"), 0.0), (None, 0.0), ("0.5", 0.5)):
        monkeypatch.setattr(gym, "dataset", lambda *_, given=given: SimpleNamespace(score_answer=lambda *_: given))
        monkeypatch.setattr(gym, "entry", lambda *_: {})
        assert gym.score((EASY, 0, 0), "5") == worth


@needs_gym
def test_a_run_with_a_model_that_has_no_template(tmp_path, monkeypatch):
    toy.model(positions=160).save(tmp_path / "model")
    monkeypatch.setattr(gym, "LIMITS", {"gym": 6})
    monkeypatch.setattr(gym, "DRAWN", 100)
    monkeypatch.setattr(gym, "score", lambda item, answer: len(answer) % 3 / 2)  # which random bytes can earn
    found = toy.run(tmp_path / "out", gym, MODEL=str(tmp_path / "model"), DATA=EASY)
    assert found[-1]["step"] == 2 and found[-1]["gym/reward"] > 0 and "gym/right" in found[-1]
