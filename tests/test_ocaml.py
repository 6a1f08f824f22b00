import os
import random
from pathlib import Path

import pytest

from examples import ocaml, ocaml_verifier
from examples.ocaml_verifier import judge, toplevel
from nanorook.task import graded
from rollout import Answer

needs_ocaml = pytest.mark.needs("ocaml")
ITEM = ("the larger of {} and {}", "ab", ("plus {}", "one"), ("times {}", "two"))
TYPE_BOMB = "let d = fun x -> (x, x) in " + "let d = fun x -> d (d x) in " * 8 + "d a; 0"


def grade(text, hit_limit=False, item=ITEM):
    return ocaml.grade(ocaml.ask(item), text, hit_limit)


def run(body, tests=((3, 4), (-1, 0))):
    return judge(ocaml.HEAD + body, tests)


@pytest.fixture(autouse=True)
def fresh_process():
    """No verdict of an earlier test is remembered, and no test is judged by a process that an earlier one has hurt."""
    judge.cache_clear()
    ocaml_verifier.stop()


def test_held_out_questions_are_other_compositions_of_the_same_words():
    items, held_out = ocaml.load("", None)
    assert not set(items) & set(held_out) and len(held_out) == 400
    assert ocaml.ask(ITEM).prompt == "(* the larger of a and b, plus one, times two *) let f a b ="
    assert ocaml.ask(ITEM).truth == [2 * (max(a, b) + 1) for a, b in ocaml.TESTS]


@needs_ocaml
def test_the_right_function_of_every_question_earns_all():
    items = random.Random(0).sample(ocaml.load("", None)[1], 100)
    assert {grade(ocaml.write(item, lambda options: options[0]), item=item).reward for item in items} == {1.0}


STAGES = {
    " (max a b + 1) * 2": 1.0,
    " let c = if a > b then a else b in (* any that does it *) 2 * c + 2": 1.0,
    " max a b + 1 * 2": 0.2,  # it forgot parentheses
    " abs (max a b + 1) * 2": 0.2 + 0.4 * 5 / 6,
    " (max a b +. 1) * 2": 0.1,
    " max a": 0.1,
    " (max a b + 1 * 2": 0.0,
    "": 0.0,
}


@needs_ocaml
@pytest.mark.parametrize("text", STAGES)
def test_each_stage_pays(text):
    assert grade(text).reward == pytest.approx(STAGES[text])
    assert grade(text, hit_limit=True).reward == pytest.approx(STAGES[text] * ocaml.RUNAWAY)
    assert graded(ocaml, [Answer(ocaml.ask(ITEM), text, [], False)])[0].grade == grade(text)  # it keeps the contract


RAN_AWAY = ["let rec g x = g x in g a", "while true do () done; 7", "let rec g x = try g x with _ -> g x in g a"]
RAN_AWAY += ["let rec g l = g (a :: a :: l) in g []"]  # takes memory as long as it may
RAN_AWAY += [
    "let rec l = a :: l in if l = l then 7 else 8",
    TYPE_BOMB,
    "(" * 10**6,
]  # in code of C, in the type checker
SYNTAX = ["Stdlib.exit 0", 'Sys.command "true"', '1;;\n#use "/etc/passwd";;', "1;; let max _ _ = 7"]
SYNTAX += ['let open struct external exit : int -> int = "caml_sys_exit" end in exit 0', "1 and max _ _ = 7"]
HOSTILE = dict.fromkeys(RAN_AWAY, "ran away") | dict.fromkeys([*SYNTAX, "(* \0 \ud800 é"], "syntax")
HOSTILE |= dict.fromkeys(["exit 0", 'print_endline "run\\n8 9"; 0', "raise a"], "type")
HOSTILE |= {"let ( = ) _ _ = true in 0": (0, 0), "let max _ _ = 7 in let f _ _ = max a b in f a b": (7, 7)}
HOSTILE |= dict.fromkeys(["a / 0", "assert (a < a); 7", "let rec g x = 1 + g x in g a"], (None, None))  # a full stack


@needs_ocaml
@pytest.mark.parametrize("body, stage", HOSTILE.items(), ids=range(len(HOSTILE)))
def test_what_is_hostile_earns_no_test_and_harms_no_other_function(body, stage):
    verdict = run(body)
    assert verdict.ran_away == (stage == "ran away")
    assert stage != "type" or verdict[:2] == (True, False)
    assert stage != "syntax" or verdict[:2] == (False, False)
    assert verdict.results == (stage if isinstance(stage, tuple) else ())
    assert run("max a b - (a * b)").results == (-8, 0)


@needs_ocaml
def test_the_process_is_in_a_cage():
    process = toplevel()
    assert os.getsid(process.pid) != os.getsid(0)  # Ctrl-C, after which a step is finished, does not reach it
    about = Path("/proc") / str(process.pid)
    limits = (about / "limits").read_text()
    for name in ("Max file size", "Max processes", "Max core file size"):
        assert f"{name:26}0  " in limits
    assert f"{'Max address space':26}{2**30} " in limits
    assert os.readlink(about / "cwd").endswith("(deleted)")
    if ocaml_verifier.without_network():
        assert os.readlink(about / "ns/net") != os.readlink("/proc/self/ns/net")


@needs_ocaml
def test_one_process_judges_many_functions_and_gives_way_before_it_grows(monkeypatch):
    monkeypatch.setattr(ocaml_verifier, "FUNCTIONS", 5)
    processes = []
    for i in range(10):
        processes.append(toplevel().pid)
        assert [run(f"a + {i}").results for _ in "ab"] == [(3 + i, i - 1)] * 2  # the second time it is remembered
    assert [processes.count(pid) for pid in dict.fromkeys(processes)] == [5, 5]


def test_without_ocaml_a_sentence_names_the_package(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="apt install ocaml"):
        run("a")
