"""examples/ocaml_problems.py and its verifier: right answers earn all, and what an answer says is not believed."""

import csv
import gzip
import json
import os
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import toy
from examples import ocaml_problems, ocaml_toplevel
from examples.ocaml_problems import Problem, ask, grade
from examples.ocaml_toplevel import Verdict, frames_of, judge, prepare, toplevel
from examples.ocaml_verifier import BOUNDS, no_wall
from examples.start import make_start_model
from nanorook.task import grade_answers, prompt_text
from nanorook.tokenizer import Special, Tokenizer
from rollout import Answer

pytestmark = [pytest.mark.needs("ocaml"), pytest.mark.needs("bwrap")]
BYTES = SimpleNamespace(tokenizer=Tokenizer.of_bytes())
ROWS = {row["id"]: row for row in map(json.loads, ocaml_problems.PROBLEMS.read_text().splitlines())}


@pytest.fixture(scope="module", autouse=True)
def wall():
    if why := no_wall():
        pytest.skip(f"the outer wall cannot be built here: {why}")


@pytest.fixture(scope="module")
def problems(wall):
    items, held_out = ocaml_problems.load("builtin", None)
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
def squares(wall):
    return prepare("squares", SQUARES, assertions(*SQUARES_TESTS))


def a_right_answer_is_right(problem):
    judge.cache_clear()
    return judge(problem, RIGHT) == Verdict(True, True, False, (True,) * 6)


# Problems


def test_ten_of_thirty_problems_are_held_out_and_each_has_eight_assertions(problems):
    items, held_out = ocaml_problems.load("builtin", None)
    assert (len(items), len(held_out)) == (20, 10) and len(problems) == len(ROWS) == 30
    assert not {p.text for p in items} & {p.text for p in held_out}
    for problem in problems.values():
        assert len(problem.calls) >= 8 and sum(problem.shown) == 2, problem.id
        assert all(value in problem.text for value, shown in zip(problem.expected, problem.shown) if shown), problem.id


def test_every_reference_solution_earns_all_as_a_body_and_as_a_definition(problems):
    for problem in problems.values():
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


@pytest.mark.parametrize("lines", LEFT_OUT, ids=lambda lines: lines[1])
def test_tests_that_could_be_passed_without_an_answer_are_left_out(lines):
    assert LEFT_OUT[lines] in prepare("squares", SQUARES, assertions(*lines))


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


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", "", "has to be a file of problems"),
    ("a.csv", "id,problem\n1,2\n", "has 0 problems that can be used"),
    ("a.jsonl", "[1]\n", "each line has to be a JSON object"),
    ("a.jsonl", "{", "cannot be read"),
    ("a.jsonl.gz", "{", "cannot be read"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_named(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=said):
        ocaml_problems.load(str(tmp_path / name), None)
    with pytest.raises(SystemExit, match="cannot be read|has to be"):
        ocaml_problems.load(str(tmp_path / f"none-{name}"), None)


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


@pytest.mark.parametrize("text", LADDER, ids=lambda text: text[:40])
def test_each_rung_pays_and_an_answer_without_an_end_is_multiplied(text, squares):
    question = ask(squares, BYTES)
    for hit_limit, factor in ((False, 1), (True, 0.3)):
        got = grade_answers(ocaml_problems, [Answer(question, text, [], hit_limit)])[0].grade  # it keeps the contract
        assert got.reward == pytest.approx(LADDER[text] * factor)
    assert grade(question, text).metrics["right"] == (LADDER[text] == 1)


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


def test_a_model_with_a_chat_template_is_asked_in_a_chat_and_another_one_is_not(squares):
    config = SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/smollm2"))
    question = ask(squares, config)
    assert isinstance(question.prompt[0], Special) and SQUARES in prompt_text(question.prompt)
    assert "the body" in prompt_text(question.prompt) and "the whole definition" in prompt_text(question.prompt)
    assert ask(squares, BYTES).prompt == SQUARES
    assert json.loads(json.dumps(question.truth)) and Problem(*question.truth) == squares


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


# What an answer says is not believed. Each hack is a whole answer to squares, what it earns of the tests, of which each
# value is a fifth, and what share of all assertions the usual verifier counts, which compiles the answer and the tests
# together and reads what the program prints; None where that verifier is not run, as it would do harm.

FORGED = "".join(f"{len(text)}\n{text}" for text in ("parses", "typed", *["=5"] * 6, "end"))
EVERY_FILE = "for file = 1 to 31 do try ignore (Unix.write_substring (Obj.magic file) s 0 n) with _ -> () done"
FOOLING = {  # earn no test, and pass all with the usual verifier
    "= is always true": "let squares _ = 7 let ( = ) _ _ = true",
    "= of a module that is opened": "open struct let ( = ) _ _ = true end let squares _ = 7",
    "compare and Stdlib": (
        "module Stdlib = struct let compare _ _ = 0 let ( = ) _ _ = true end "
        "include Stdlib let squares _ = 7"
    ),
    "the counter of passes": "let squares _ = 5 let incr r = r := 6",
    "the counter begins at six": "let squares _ = 7 let ref _ = ref 6",
    "the counter is read as six": "let squares _ = 7 let ( ! ) _ = 6",
    "Printf says six": 'let squares _ = 7 module Printf = struct let printf _ _ = print_string "passed 6" end',
    "exit 0": "let squares _ = 7 let () = exit 0",
    "exit 0 in the function": "let squares _ = exit 0",
    "the end by a primitive": "external stop : int -> 'a = \"caml_sys_exit\" let squares _ = stop 0",
    "at_exit": 'let squares _ = 7 let () = at_exit (fun () -> print_string "passed 6")',
    "prints the result and ends": 'let squares _ = print_string "passed 6"; exit 0',
    "frames on the standard output": f"let squares _ = print_string {json.dumps(FORGED)}; exit 0",
    "frames in every file": f"let s = {json.dumps(FORGED)} let n = {len(FORGED)} let squares _ = {EVERY_FILE}; exit 0",
    "closes every file": (
        "let () = for file = 0 to 31 do try Unix.close (Obj.magic file) with _ -> () done "
        "let squares _ = 7"
    ),
}  # fmt: skip
USELESS = {  # earn no test, and pass none with the usual verifier
    "an end in every file": f'let s = "x" let n = 1 let squares _ = {EVERY_FILE}; 7',
    "Obj.magic of a text": 'let squares : int list -> int = Obj.magic (fun _ -> "5")',
    "Obj.magic that reads memory": "let squares _ : int = List.length (Obj.magic 1000)",
    "Obj.magic that writes memory": "let squares _ = Obj.set_field (Obj.magic 4096) 0 (Obj.repr 0); 7",
    "the toplevel's printer": (
        'let () = Toploop.print_out_value := (fun ppf _ -> Format.pp_print_string ppf "5") '
        "let squares _ = 7"
    ),
    "the toplevel's phrases": "let () = Toploop.print_out_phrase := (fun _ _ -> ()) let squares _ = 7",
    "the toplevel's depth": "let () = Toploop.max_printer_depth := 0 let squares _ = 7",
    "the toplevel's names": 'let () = Toploop.setvalue "squares" (Obj.repr (fun _ -> 5)) let squares _ = 7',
    "an exception of the printer": "let squares : int list -> int = Obj.magic (fun _ -> lazy (raise Exit))",
    "an exception each time": "let squares _ = raise Exit",
    "an exception at once": "let squares _ = 7 let () = raise Exit",
    "a stack overflow": "let rec squares l = 1 + squares l",
    "reads /proc": 'let squares _ = String.length (really_input_string (open_in "/proc/self/maps") 7)',
    "a socket": "let squares _ = ignore Unix.(socket PF_INET SOCK_STREAM 0); 7",
    "a stub": 'let squares _ = failwith "not implemented"',
}  # fmt: skip
HARMFUL = {  # earn no test; the usual verifier is not run, as they would do harm or never end
    "memory without end": "let squares _ = let r = ref [ 1 ] in while true do r := !r @ !r done; 7",
    "an endless loop": "let rec squares l = squares l",
    "a loop that ignores its signal": "let () = Sys.(set_signal sigprof Signal_ignore) let rec squares l = squares l",
    "prints without end": 'let squares _ = while true do print_string "xxxxxxxxxxxxxxxx" done; 7',
    "a gigabyte of output": (
        "let squares _ = 7 let () = for _ = 1 to 1000 do print_string (String.make 1000000 ' ') "
        "done"
    ),
    "frames without end": (
        "let squares _ = let s = String.make 60000 'x' and n = 60000 in "
        f"while true do {EVERY_FILE} done; 7"
    ),
    "a format that floods": 'let squares _ = Format.(set_margin 2; for _ = 1 to 100000 do print_string "x" done); 7',
    "forks": "let squares _ = while true do try ignore (Unix.fork ()) with _ -> () done; 7",
    "kills": "let () = List.iter (fun p -> try Unix.kill p 9 with _ -> ()) [ 1; -1 ] let squares _ = 7",
    "stops itself": "let () = Unix.kill (Unix.getpid ()) Sys.sigkill let squares _ = 7",
    "a shell": 'let squares _ = Sys.command "echo dead > CANARY"',
    "writes a file": 'let () = let f = open_out "CANARY" in output_string f "dead"; close_out f let squares _ = 7',
    "removes a file": 'let () = Sys.remove "CANARY" let squares _ = 7',
    "reads the tests": "let squares _ = String.length (really_input_string (open_in Sys.argv.(0)) 7)",
}  # fmt: skip
HACKS = {name: (hack, 0, 1) for name, hack in FOOLING.items()}
HACKS |= {name: (hack, 0, 0) for name, hack in USELESS.items()}
HACKS |= {name: (hack, 0, None) for name, hack in HARMFUL.items()}
HACKS |= {  # None: its type is wrong
    "a type of the same name": ("type int = Five let squares (_ : Int.t list) = Five", None, 0),
    "a directive": ('let squares _ = 7;;\n#use "CANARY";;', None, 0),
    "a list of its own": ("type 'a list = [] | (::) of 'a * 'a list let squares (_ : int list) = 0", None, 1 / 6),
    "copies the example": ("let squares l = if l = [ 1; 2 ] then 5 else 7", 0, 1 / 6),
    "a constant": ("let squares _ = 0", 1 / 5, 1 / 6),
}  # fmt: skip
SLOW = ("a loop that ignores its signal",)


@pytest.fixture
def canary():
    """A file that everybody can change, and that must not be changed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        file = Path(folder) / "canary"
        file.write_text("alive")
        file.chmod(0o666)
        yield file
        assert {path.name: path.read_text() for path in Path(folder).iterdir()} == {"canary": "alive"}


def share_of_tests(problem, text):
    """The share of the tests that an answer earns; None if it has no right type."""
    judge.cache_clear()
    pieces = {name: value for name, value, *_ in grade(ask(problem, BYTES), text).pieces if name != "runaway"}
    return sum(value for name, value in pieces.items() if name.startswith("tests")) / 0.7 if pieces["type"] else None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in HACKS])
def test_a_hack_earns_what_it_has_computed_and_the_next_right_answer_everything(name, squares, canary):
    hack, wanted, _ = HACKS[name]
    hack = hack.replace("CANARY", str(canary))
    assert share_of_tests(squares, hack) == (None if wanted is None else pytest.approx(wanted))
    assert a_right_answer_is_right(squares)


def usual_verifier(answer, folder):
    """The share of assertions that pass if the answer and the tests are compiled together: the program counts and
    prints them, and one that prints no number and ends well has passed all."""
    harness = "let passed = ref 0\nlet check f = try if f () then incr passed with _ -> ()\n"
    harness += "".join(f"let () = check (fun () -> {line})\n" for line in SQUARES_TESTS)
    (folder / "all.ml").write_text(f'{answer}\n{harness}let () = Printf.printf "passed %d" !passed\n')
    command = ["ocamlc", "-w", "-a", "unix.cma", "all.ml", "-o", "all"]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode:
        return 0
    wall = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    bounds = [bound for bound in BOUNDS if "fsize" not in bound]
    command = [*wall, "prlimit", *bounds, "--cpu=5", "ocamlrun", str(folder / "all")]
    ran = subprocess.run(command, capture_output=True, timeout=60)
    found = re.findall(rb"passed (\d+)", ran.stdout)
    return min(1, int(found[-1]) / len(SQUARES_TESTS)) if found else float(ran.returncode == 0)


@pytest.mark.slow
def test_the_usual_verifier_lets_through_what_the_table_says(tmp_path):
    for name, (hack, _, wanted) in HACKS.items():
        assert wanted is None or usual_verifier(hack, tmp_path) == pytest.approx(wanted), name


def test_the_documentation_counts_the_hacks():
    page = (toy.ROOT / "docs" / "incidents.md").read_text()
    free = [name for name, (_, ours, usual) in HACKS.items() if usual == 1 and not ours]
    assert f"have {len(HACKS)} such answers to one problem, of which {len(free)} pass" in " ".join(page.split())
    table = page.partition("| hack |")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| ([^|-]+) \| ([^|]+ \| [^|]+) \|$", table, re.MULTILINE))
    assert len(told) >= 5
    for name, shown in told.items():
        _, ours, usual = HACKS[name]
        shares = ["refused" if ours is None else f"{ours:.0%}", "not run" if usual is None else f"{usual:.0%}"]
        assert shown == " | ".join(reversed(shares)).replace("%", " %"), name


HONEST = (  # side effects that a right answer may have
    'print_string "5\\n=5"; flush stdout; prerr_endline "x";',
    'Format.(set_margin 2; set_max_indent 1; printf "@[%d@]@." 5);',
    "ignore (Sys.opaque_identity (Array.make 100000 0)); Gc.full_major ();",
    "Random.self_init (); ignore (Random.int 5);",
    '(try ignore (open_in "/etc/passwd") with _ -> ());',
    'at_exit (fun () -> print_endline "bye");',
)


@pytest.mark.parametrize("effect", HONEST)
def test_side_effects_do_not_change_what_a_right_answer_earns(effect, squares):
    if "self_init" in effect:
        effect = "(try Random.self_init () with _ -> ());"  # there is no /dev/urandom
    assert earned(squares, f"{effect}\n{RIGHT}") == 1


def test_no_request_with_an_answer_has_an_expected_value_in_it(monkeypatch):
    requests = []
    monkeypatch.setattr(
        ocaml_toplevel, "ask", lambda *parts, ask=ocaml_toplevel.ask: requests.append(parts) or ask(*parts)
    )
    tests = assertions("squares [111] = 12321", "squares [-111; 1] = 12322", "squares [] = 0")
    problem = prepare("squares", SQUARES, tests)
    assert judge(problem, RIGHT).right
    first, second = map(repr, requests)
    assert "12321" in first and "List.fold_left" not in first and "squares [-111; 1]" in second
    assert "List.fold_left" in second and "1232" not in second


def test_left_sides_mean_what_they_meant_to_the_author_of_the_tests():
    text = "(** The digits of n. *)\nlet digits (n : int) : string ="
    problem = prepare("digits", text, assertions("int_of_string (digits 12) = 12", "String.length (digits 345) = 3"))
    assert earned(problem, "string_of_int n") == 1
    shadowed = 'let last = ref 0 let digits n = last := n; "" let int_of_string _ = !last '
    shadowed += "module String = struct let length _ = 3 end"
    assert earned(problem, shadowed) == pytest.approx(0.3)


def test_a_type_of_the_same_name_with_other_constructors_is_another_type(problems):
    problem, body = problems["tree_insert"], ROWS["tree_insert"]["solution"]
    again = "type tree = {}\nlet rec insert x t =\n" + body
    for same in ("Leaf | Node of tree * int * tree", "Leaf\n  | Node of tree * int*tree (* the same *)"):
        assert earned(problem, again.format(same)) == 1
    for other in ("Node of tree * int * tree | Leaf", "Leaf | Node of tree * int * tree | Other"):
        assert earned(problem, again.format(other)) == pytest.approx(0.1)


def test_a_value_of_any_type_is_printed_in_full_or_not_at_all():
    text = "(** Counts. *)\ntype t = A of float | B of { x : t list }\nlet count (n : int) : t array ="
    tests = assertions("count 1 = [| A 0.; B { x = [A 0.1] } |]", "count 0 = [||]", "count 2 = [| A 1e300 |]")
    problem = prepare("count", text, tests)
    right = "match n with 0 -> [||] | 1 -> [| A (-0.); B { x = [ A 0.1 ] } |] | _ -> [| A 1e300 |]"
    assert earned(problem, right) == 1
    for wrong in ("0.10000000000000002", "nan", "infinity"):
        assert earned(problem, right.replace("0.1 ", f"{wrong} ")) == pytest.approx(0.3 + 0.7 * 2 / 3)
    cyclic = right.replace("[ A 0.1 ]", "(let rec l = A 0.1 :: l in l)")
    long = right.replace("[ A 0.1 ]", "List.init 50000 (fun _ -> A 0.1)")
    deep = right.replace("[ A 0.1 ]", "(let r = ref [] in for _ = 1 to 100000 do r := [ B { x = !r } ] done; !r)")
    assert [earned(problem, text) for text in (cyclic, long, deep)] == pytest.approx([0.3 + 0.7 * 2 / 3] * 3)


def test_frames_are_read_up_to_the_first_that_is_not_well_formed():
    assert frames_of(b"2\n=50\n3\n\xff\n\n") == ["=5", "", "\ufffd\n\n"]
    for broken in (b"2\n=", b"x", b"-1\n", b"99999999\n", b"3", b"\n"):
        assert frames_of(b"1\na" + broken) == ["a", "malformed"]


def test_the_process_that_forks_is_the_same_after_each_answer_and_is_replaced_when_it_dies(squares):
    process = toplevel()[0]
    for name in ("frames in every file", "a stack overflow", "kills", "stops itself", "forks"):
        share_of_tests(squares, HACKS[name][0])
        assert toplevel()[0] is process, name
    process.kill()
    process.wait()
    assert a_right_answer_is_right(squares) and toplevel()[0] is not process


def test_without_the_outer_wall_one_sentence_says_so_and_nothing_is_run(monkeypatch):
    ocaml_toplevel.stop()
    monkeypatch.setattr(ocaml_toplevel, "no_wall", lambda: "the kernel says no")
    with pytest.raises(SystemExit, match="cannot be built .the kernel says no.: install bubblewrap"):
        prepare("squares", SQUARES, assertions(*SQUARES_TESTS))
    assert not toplevel.cache_info().currsize


# Programs made at random

LEAVES = ["l", "[]", "[1; 2]", "List.rev l", "(List.map succ l)", "(try List.tl l with _ -> [])"]
NODES = ["({} @ {})", "(let r = ref {} in r := {}; !r)", "(match {} with [] -> {} | x :: rest -> x :: rest)"]
NODES += ["(if {} = {} then l else [3])", "(try raise Exit with Exit -> {} | Not_found -> {})"]
NODES += ["(let a = Array.of_list {} in for i = 0 to 2 do ignore i done; Array.to_list a @ {})"]
NODES += ["(let h = Hashtbl.create 1 in Hashtbl.add h 0 {}; Hashtbl.find h 0 @ {})", "(List.filter ((<) 0) {} @ {})"]
POISON = ["exit 0", 'print_string "=5"', "Obj.magic 5", 'Sys.remove "CANARY"', "Unix.kill (-1) 9", "raise Exit"]
POISON += ["Toploop.print_out_value := (fun _ _ -> ())", "ignore (Unix.fork ())", "Gc.compact ()", 'failwith "x"']
POISON += ['at_exit (fun () -> print_string "5")', 'ignore (Sys.command "echo dead > CANARY")', "assert false"]


def made(rng, depth):
    """An expression of type int list, made at random."""
    if depth == 0:
        return rng.choice(LEAVES)
    found = rng.choice(NODES).format(made(rng, depth - 1), made(rng, rng.randrange(depth)))
    return f"({rng.choice(POISON)}; {found})" if rng.random() < 0.15 else found


def grade_made(count, problem, canary):
    rng, process, verdicts = random.Random(0), toplevel()[0], []
    for _ in range(count):
        text = f"List.length {made(rng, rng.randrange(4))}".replace("CANARY", str(canary))
        judge.cache_clear()
        verdicts.append(judge(problem, text))
        assert a_right_answer_is_right(problem), text
    assert toplevel()[0] is process and canary.read_text() == "alive"
    return verdicts


def test_programs_made_at_random_leave_no_trace_and_change_no_other_grade(squares, canary):
    verdicts = grade_made(30, squares, canary)
    assert sum(verdict.typed for verdict in verdicts) > 15 and not all(verdict.passed for verdict in verdicts)


@pytest.mark.slow
def test_two_thousand_programs_made_at_random_leave_no_trace(squares, canary):
    grade_made(2000, squares, canary)


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


@pytest.mark.slow
def test_a_file_of_three_rows_trains(tmp_path):
    with open(tmp_path / "rows.csv", "w", newline="") as lines:
        writer = csv.DictWriter(lines, three_rows()[0])
        writer.writeheader()
        writer.writerows(three_rows())

    def write(rng):
        return rng.choice(three_rows())["problem"], rng.choice((" n", " 9 - n", " 9 - (8 * n)"))

    start = make_start_model(tmp_path / "start", write, steps=100, batch=8, width=32, layers=1, positions=128)
    settings = dict(TASK=ocaml_problems.__file__, MODEL=start, DATA=tmp_path / "rows.csv", OUT_DIR=tmp_path / "out")
    settings |= dict(STEPS=2, BATCH_POSITIONS=2, GROUP_SIZE=4, MAX_NEW_TOKENS=24, DTYPE="float32", COMPILE=0)
    done = toy.user_runs("train.py", *(f"{name}={value}" for name, value in settings.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(toy.rows(tmp_path / "out")) == 2 and "2 items to train on" in done.stdout
