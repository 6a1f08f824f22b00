"""examples/ocaml_problems.py: which problems can be used, and what an answer to one earns."""

import csv
import gzip
import json
import re
import time
from types import SimpleNamespace

import pytest

import toy
from examples import ocaml_problems
from examples.ocaml_problems import Problem, ask, grade
from examples.ocaml_toplevel import judge, prepare
from nanorook.task import grade_answers, prompt_text
from nanorook.tokenizer import Special, Tokenizer
from rollout import Answer

pytestmark = [pytest.mark.needs("ocaml"), pytest.mark.needs("bwrap")]
BYTES = SimpleNamespace(tokenizer=Tokenizer.of_bytes())
ROWS = {row["id"]: row for row in map(json.loads, ocaml_problems.PROBLEMS.read_text().splitlines())}


@pytest.fixture(scope="module")
def problems():
    items, held_out = ocaml_problems.load("builtin", None)
    assert (len(items), len(held_out)) == (20, 10) and not {p.text for p in items} & {p.text for p in held_out}
    return {problem.id: problem for problem in items + held_out}


def earned(problem, text):
    return grade(ask(problem, BYTES), text).reward


def assertions(*lines):
    return "let () =\n" + "\n".join(f"  assert ({line});" for line in lines) + "\n;;"


SQUARES = """(** The sum of the squares.
 * >>> squares [1; 2]
 * 5
 *)
let squares (l : int list) : int ="""
SQUARES_TESTS = ("squares [1; 2] = 5", "squares [] = 0", "squares [3] = 9", "squares [2; 2] = 8", "squares [10] = 100")
SQUARES_TESTS += ("squares [-1; 4] = 17",)
RIGHT = "  List.fold_left (fun sum x -> sum + (x * x)) 0 l"


@pytest.fixture(scope="module")
def squares():
    return prepare("squares", SQUARES, assertions(*SQUARES_TESTS))


def test_each_problem_has_eight_assertions_and_its_reference_solution_earns_all(problems):
    assert len(problems) == len(ROWS) == 30
    for problem in problems.values():
        assert len(problem.calls) >= 8 and sum(problem.shown) == 2, problem.id
        assert all(value in problem.text for value, shown in zip(problem.expected, problem.shown) if shown), problem.id
        body = ROWS[problem.id]["solution"]
        definition = f"```ocaml\n{problem.definitions}{problem.signature}\n{body}\n```"
        assert earned(problem, body) == earned(problem, definition) == 1, problem.id


LEFT_OUT = {  # tests of squares, and why they cannot be used
    ("squares [1] = 1", "squares [2] = squares [-2]"): "calls the function on both sides",
    ("squares [1] = 1", "squares [] < 3"): "compares in another way",
    ("squares [1] = 1", "1 + 1 = 2"): "does not call the function",
    ("squares [1] = 1", "(try squares [] = 1 with _ -> true)"): "catches exceptions",
    ("squares [1] = 1", "squares [2] = nan"): "does not have the type",
    ("squares [1] = 1", "squares 2 = 4"): "does not have the type",
    ("squares [1] = 1", "float (squares [2]) = nan"): "cannot be printed in full",
    ("squares [1] = 1", "Fun.const (squares [2]) = succ"): "cannot be printed in full",
    ("squares [1] = 1", "squares [2] = failwith \"\""): "cannot be printed in full",
    ("squares [1] = 1", "abs_float (float (squares [2]) -. 4.) < 0.1"): "compares in another way",
    ("squares [1] = 1", "let x = squares [2] in x = 4"): "neither f ... = value nor a call",
    ("squares [1] = 1", "squares [-1] = 1"): "a constant would pass",
    ("squares [1] = 1", "squares [2] = 4)"): "do not parse",
}  # fmt: skip


def test_tests_that_could_be_passed_without_an_answer_are_left_out():
    for lines, why in LEFT_OUT.items():
        assert why in prepare("squares", SQUARES, assertions(*lines)), lines


def test_what_an_assertion_evaluates_and_expects():
    tests = assertions("squares [1] = 1 && 4 = squares [2]", "not (List.mem 3 [squares []])", "squares [3] = 3 * 3")
    problem = prepare("squares", SQUARES, tests)
    assert problem.calls == ("squares [1]", "squares [2]", "List.mem 3 [squares []]", "squares [3]")
    assert problem.expected == ("1", "4", "false", "9")


def test_a_signature_without_types_takes_that_of_a_solution_that_passes():
    text, tests = "(** The last element. *)\nlet rec last =", assertions("last [1; 2] = Some 2", "last [] = None")
    solution = "function [] -> None | [ x ] -> Some x | _ :: rest -> last rest"
    problem = prepare("last", text, tests, solution)
    assert problem.type == "'a list -> 'a option" and earned(problem, solution) == 1
    assert earned(problem, "function [] -> None | (x : int) :: rest -> Some x") == pytest.approx(0.1)  # not any list
    for wrong in ("function [] -> None | x :: _ -> Some x", "function [] -> exit 0 | x :: _ -> Some x"):
        assert "solution does not pass" in prepare("last", text, tests, wrong)
    assert "says the type" in prepare("last", text, tests)


def three_rows():
    text = "(** {}.\n * >>> {} 2\n * {}\n*)\nlet {} (n : int) : int ="
    rows = []
    for name, value in (("one", 3), ("two", 4), ("three", 5)):
        tests = assertions(f"{name} 1 = 1", f"{name} 0 = 9")
        rows.append(dict(id=name, problem=text.format(name, name, value, name), tests=tests, solution="  0"))
    return [row | dict(difficulty="easy") for row in rows]


def test_a_file_in_the_published_format_is_read_and_one_line_tells_what_is_left_out(tmp_path, capsys):
    rows = [*three_rows(), dict(id="odd", problem="(* no signature *)", tests=assertions("f 1 = 2"))]
    rows.append(dict(id="cut", problem="let f (x : int) : int =", tests="let () = assert (f 1"))
    for file in (tmp_path / "rows.csv", tmp_path / "rows.jsonl.gz"):
        with (gzip.open if file.suffix == ".gz" else open)(file, "wt", newline="") as lines:
            if ".csv" in file.name:
                writer = csv.DictWriter(lines, ["id", "problem", "tests", "solution", "difficulty"])
                writer.writeheader()
                writer.writerows(rows)
            else:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
        items, held_out = ocaml_problems.load(str(file), None)
        assert (len(items), len(held_out)) == (2, 1) and {p.id for p in items + held_out} == {"one", "two", "three"}
        said = capsys.readouterr().out
        assert "2 of 5 problems are left out; the first one is odd: its problem does not end with" in said
        assert said.count("\n") == 1


def test_a_file_without_enough_problems_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("id,problem\n1,2\n")
    with pytest.raises(SystemExit, match="has 0 problems that can be used"):
        ocaml_problems.load(str(tmp_path / "a.csv"), None)


def test_a_file_of_three_rows_trains(tmp_path, monkeypatch):
    toy.model(positions=160).save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in three_rows()))
    monkeypatch.setattr(ocaml_problems, "LIMITS", {"ocaml": 8})
    honest = ocaml_problems.judge
    # Random bytes are no OCaml, so every second length is said to parse.
    judge = lambda problem, text: honest(problem, text)._replace(parses=len(text) % 2 == 0)  # noqa: E731
    monkeypatch.setattr(ocaml_problems, "judge", judge)
    settings = dict(MODEL=str(tmp_path / "model"), DATA=str(tmp_path / "rows.jsonl"), BATCH_POSITIONS=2)
    rows = toy.run(tmp_path / "out", ocaml_problems, **settings)
    assert rows[-1]["step"] == 2 and rows[-1]["ocaml/parses"] > 0 and "ocaml/right" in rows[-1]


def contention():
    """How much longer than its own time a program takes at the moment, because others want the cores."""
    start, own = time.monotonic(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    return (time.monotonic() - start) / 0.2


@pytest.mark.slow
def test_two_hundred_and_fifty_six_different_answers_take_seconds(problems):
    judge.cache_clear()
    answers = [(p, f"{ROWS[p.id]['solution']}\n(* {i} *)") for i in range(9) for p in problems.values()][:256]
    before, start = contention(), time.monotonic()
    assert all(earned(problem, text) == 1 for problem, text in answers)
    seconds = time.monotonic() - start
    assert seconds < 10 * max(1, before, contention())
    start = time.monotonic()
    assert all(earned(problem, text) == 1 for problem, text in answers)
    assert time.monotonic() - start < 1  # equal answers are judged once


# Grades

LADDER = {  # answers to squares and what they earn: 0.14 for each of the five values that are not shown
    RIGHT: 1.0,
    f"let squares l =\n{RIGHT}": 1.0,
    "let square x = x * x\nlet rec squares = function [] -> 0 | x :: rest -> square x + squares rest": 1.0,
    "let r = ref 0 in\nfor i = 0 to List.length l - 1 do r := !r + (List.nth l i * List.nth l i) done;\n!r": 1.0,
    'print_endline "sum"; List.fold_left (fun sum x -> sum + (x * x)) 0 l': 1.0,
    "let exception Sum of int in try raise (Sum (List.fold_left (fun s x -> s + x * x) 0 l)) with Sum n -> n": 1.0,
    "List.fold_left (fun sum x -> sum + x) 0 l": 0.3 + 0.14,
    'match l with [] -> 0 | [ x ] -> x * x | _ -> failwith "not yet"': 0.3 + 3 * 0.14,
    "0": 0.3 + 0.14,
    "if l = [1; 2] then 5 else 7": 0.3,  # it has copied the example
    'failwith "todo"': 0.3,
    "assert false": 0.3,
    "List.fold_left (fun sum x -> sum +. (x *. x)) 0. l": 0.1,
    "let squares (l : float list) = 0": 0.1,
    "let other l = 0": 0.0,
    "List.fold_left (": 0.0,
    "": 0.0,
    "(* nothing *)": 0.0,
}  # fmt: skip


def test_each_rung_pays_and_an_answer_without_an_end_is_multiplied(squares):
    question = ask(squares, BYTES)
    for text, reward in LADDER.items():
        for hit_limit, factor in ((False, 1), (True, 0.3)):
            got = grade_answers(ocaml_problems, [Answer(question, text, [], hit_limit)])[0].grade  # keeps the contract
            assert got.reward == pytest.approx(reward * factor), text
        assert grade(question, text).metrics["right"] == (reward == 1), text


def test_six_of_seven_equal_values_do_not_pay_a_constant():
    text = "(** Whether n is 3. *)\nlet three (n : int) : bool ="
    lines = [f"three {n} = false" for n in (0, 1, 2, 4, 5, 6)]
    problem = prepare("three", text, assertions(*lines, "three 3"))
    assert earned(problem, "false") == earned(problem, "true") == pytest.approx(0.3 + 0.35)
    assert earned(problem, "n = 3") == 1


def test_style_costs_a_tenth_at_most_and_each_piece_judges_its_characters(squares):
    fence = f"```ocaml\n{RIGHT}\n```"
    for text, reward in (
        (fence, 1.0),
        (f"Here:\n{fence}\n", 1.0),
        (f"{fence}\nThis works.", 0.95),
        (f"```\n0\n```\n{fence}", 0.95),
        (f"```\n0\n```\n```\n1\n```{fence} Done.", 0.9),
        (f"{fence}\n```\nlet\n```\nDone.", 0.0),  # the last one counts, and it earns nothing that could be taken away
    ):
        got = grade_answers(ocaml_problems, [Answer(ask(squares, BYTES), text, [], False)])[0].grade
        assert got.reward == pytest.approx(reward), text
        pieces = {name: [text[a:b] for a, b in spans] for name, _, *spans in got.pieces}
        code = re.findall(r"```[^`]*```", text)
        assert pieces["parse"] == pieces["type"] == pieces["tests 0"] == code[-1:] and pieces["fences"] == code[:-1]
        after = text.rpartition("```")[2]
        assert pieces["words"] == [after] * bool(after.strip())


def test_a_model_with_a_chat_template_is_asked_in_a_chat_and_another_one_is_not(squares, chats):
    question = ask(squares, chats)
    assert isinstance(question.prompt[0], Special) and SQUARES in prompt_text(question.prompt)
    assert "the body" in prompt_text(question.prompt) and "the whole definition" in prompt_text(question.prompt)
    assert ask(squares, BYTES).prompt == SQUARES
    assert json.loads(json.dumps(question.truth)) and Problem(*question.truth) == squares


def test_a_type_of_the_same_name_with_other_constructors_is_another_type(problems):
    problem, body = problems["tree_insert"], ROWS["tree_insert"]["solution"]
    again = "type tree = {}\nlet rec insert x t =\n" + body
    for same in ("Leaf | Node of tree * int * tree", "Leaf\n  | Node of tree * int*tree (* the same *)"):
        assert earned(problem, again.format(same)) == 1
    for other in ("Node of tree * int * tree | Leaf", "Leaf | Node of tree * int * tree | Other"):
        assert earned(problem, again.format(other)) == pytest.approx(0.1)


# Mutants of the reference solutions

CHANGES = {
    "operator": [(r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "), (r" < ", " <= ")]
    + [(" > ", " >= "), (" >= ", " > "), (" <= ", " < "), (r" = (?=[^\n]*(?:then|->))", " <> "), (" <> ", " = ")]
    + [(" && ", " || ")],
    "constant": [(r"\b0\b", "1"), (r"\b1\b", "2"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"), ('""', '"?"')],
    "branch": [("if (.*?) then", r"if not (\1) then"), ("when (.*?) ->", r"when not (\1) ->")],
    "base case": [(r"(\[\]|Leaf) -> .*", r"\1 -> raise Exit"), ("-> None", "-> raise Exit")],
    "type": [(r"\b\d+\b", r"\g<0>."), (r"\bSome\b", "Ok")],
    "bracket": [(r"\)", ""), (r"\(", "(("), (r"\]", "")],
}  # fmt: skip
EQUIVALENT = {  # mutants that do the same: the problem and the line that was changed
    ("running_maximum", "let best = if x >= best then x else best in"),
    ("primes_below", "let j = ref (i + i) in"),  # slower
    ("primes_below", "let composite = Array.make (max n 1) false in"),
}


def mutants(solution):
    for kind, changes in CHANGES.items():
        for old, new in changes:
            for found in [*re.finditer(old, solution)][:2]:
                yield kind, solution[: found.start()] + found.expand(new) + solution[found.end() :]


@pytest.mark.slow
def test_mutants_of_the_reference_solutions_earn_less(problems):
    kinds, equivalent = [], set()
    for problem in problems.values():
        solution = ROWS[problem.id]["solution"]
        for kind, mutant in mutants(solution):
            kinds.append(kind)
            if earned(problem, mutant) == 1:
                changed = [line.strip() for line in mutant.split("\n") if line not in solution.split("\n")]
                equivalent.add((problem.id, *changed))
    assert equivalent == EQUIVALENT
    assert len(kinds) >= 100 and set(kinds) == set(CHANGES)
