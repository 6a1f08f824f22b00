"""examples/ocaml.py and the verifier of programs: what an answer says is not believed, and it reaches nothing."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import toy
from examples import ocaml, ocaml_toplevel, ocaml_wall
from examples.ocaml_problems import passed_by_value
from examples.ocaml_toplevel import Verdict, frames_of, judge, prepare, toplevel
from examples.ocaml_wall import BOUNDS
from nanorook.task import grade_answers
from rollout import Answer

pytestmark = [pytest.mark.needs("ocaml"), pytest.mark.needs("bwrap")]
SQUARES = "let squares (l : int list) : int ="
SQUARES_TESTS = ("squares [1; 2] = 5", "squares [] = 0", "squares [3] = 9", "squares [2; 2] = 8", "squares [10] = 100")
SQUARES_TESTS += ("squares [-1; 4] = 17",)
RIGHT = "  List.fold_left (fun sum x -> sum + (x * x)) 0 l"


def assertions(*lines):
    return "let () =\n" + "\n".join(f"  assert ({line});" for line in lines) + "\n;;"


@pytest.fixture(scope="module")
def squares():
    return prepare("squares", "(** >>> squares [1; 2]\n * 5 *)\n" + SQUARES, assertions(*SQUARES_TESTS))


@pytest.fixture(autouse=True)
def no_verdict_is_remembered():
    judge.cache_clear()


def passed(problem, answer):
    """The share of the assertions that an answer passes; None if it has no right type."""
    verdict = judge(problem, answer)
    return sum(verdict.passed) / len(problem.calls) if verdict.typed else None


def a_right_answer_is_right(problem):
    judge.cache_clear()
    return judge(problem, RIGHT) == Verdict(True, True, False, (True,) * 6)


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


@pytest.fixture
def changed_toplevel(tmp_path, monkeypatch):
    """changed_toplevel(old, new) is the half in OCaml with a text replaced, until the test is over."""

    def change(old, new):
        source = ocaml_toplevel.SOURCE.read_text()
        assert source.count(old) == 1
        (tmp_path / "changed.ml").write_text(source.replace(old, new))
        monkeypatch.setattr(ocaml_toplevel, "SOURCE", tmp_path / "changed.ml")
        ocaml_toplevel.stop()

    yield change
    ocaml_toplevel.stop()


# The small task

ITEM = ("the larger of {} and {}", "ab", ("plus {}", "one"), ("times {}", "two"))
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


def test_held_out_questions_are_about_other_functions_in_the_same_words():
    items, held_out = ocaml.load("", None)
    assert not set(items) & set(held_out) and len(held_out) == 400
    taught, asked = ({tuple(ocaml.ask(item).truth) for item in some} for some in (items, held_out))
    assert not taught & asked  # no function that a training question asks for in other words
    assert ocaml.ask(ITEM).prompt == "(* the larger of a and b, plus one, times two *) let f a b ="
    assert ocaml.ask(ITEM).truth == [2 * (max(a, b) + 1) for a, b in ocaml.TESTS]


def test_the_right_function_earns_all_and_each_stage_less():
    for item in random.Random(0).sample(ocaml.load("", None)[1], 40):
        right = ocaml.write(item, lambda options: options[0])
        assert ocaml.grade(ocaml.ask(item), right).reward == 1.0
    for text, reward in STAGES.items():
        for hit_limit, factor in ((False, 1), (True, 0.3)):
            (checked,) = grade_answers(ocaml, [Answer(ocaml.ask(ITEM), text, [], hit_limit)])  # it keeps the contract
            assert checked.grade.reward == pytest.approx(reward * factor), text


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
LATE = "a loop that ignores its signal"


def share_of_tests(problem, answer):
    """What an answer earns of the reward for tests; None if it has no right type."""
    verdict = judge(problem, answer)
    shares = passed_by_value(problem, verdict)
    return sum(shares) / len(shares) if verdict.typed else None


@pytest.mark.parametrize("name", [name for name in HACKS if name != LATE])
def test_a_hack_earns_what_it_has_computed_and_the_next_right_answer_everything(name, squares, canary):
    hack, wanted, _ = HACKS[name]
    process = toplevel()[0]
    earned = share_of_tests(squares, hack.replace("CANARY", str(canary)))
    assert earned == (None if wanted is None else pytest.approx(wanted))
    assert a_right_answer_is_right(squares) and toplevel()[0] is process


def test_an_answer_that_ignores_the_end_of_its_time_is_ended(squares, changed_toplevel):
    changed_toplevel("wait_for pipe 90", "wait_for pipe 20")
    assert judge(squares, HACKS[LATE][0]).ran_away and a_right_answer_is_right(squares)


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
    bounds = [bound for bound in BOUNDS if "fsize" not in bound and "nproc" not in bound]
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
    sentence = f"have {len(HACKS)} answers to one problem that try to cheat, of which {len(free)} pass"
    assert sentence in " ".join(page.split())
    table = page.partition("| hack |")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| ([^|-]+) \| ([^|]+ \| [^|]+) \|$", table, re.MULTILINE))
    assert len(told) >= 5
    for name, shown in told.items():
        _, ours, usual = HACKS[name]
        shares = [f"{ours:.0%}", "not run" if usual is None else f"{usual:.0%}"]
        assert shown == " | ".join(reversed(shares)).replace("%", " %"), name


HONEST = """print_string "5\\n=5"; flush stdout; prerr_endline "x";
Format.(set_margin 2; set_max_indent 1; printf "@[%d@]@." 5);
ignore (Sys.opaque_identity (Array.make 100000 0)); Gc.full_major ();
(try Random.self_init () with _ -> ()); (* there is no /dev/urandom *)
(try ignore (open_in "/etc/passwd") with _ -> ());
at_exit (fun () -> print_endline "bye");"""


def test_side_effects_do_not_change_what_a_right_answer_earns(squares):
    for effect in HONEST.splitlines():
        assert passed(squares, f"{effect}\n{RIGHT}") == 1, effect


def test_no_request_with_an_answer_has_an_expected_value_in_it(monkeypatch):
    requests = []
    ask = ocaml_toplevel.ask
    monkeypatch.setattr(ocaml_toplevel, "ask", lambda *parts: requests.append(parts) or ask(*parts))
    tests = assertions("squares [111] = 12321", "squares [-111; 1] = 12322", "squares [] = 0")
    problem = prepare("squares", SQUARES, tests)
    assert judge(problem, RIGHT).right
    first, second = map(repr, requests)
    assert "12321" in first and "List.fold_left" not in first and "squares [-111; 1]" in second
    assert "List.fold_left" in second and "1232" not in second


def test_left_sides_mean_what_they_meant_to_the_author_of_the_tests():
    text = "(** The digits of n. *)\nlet digits (n : int) : string ="
    problem = prepare("digits", text, assertions("int_of_string (digits 12) = 12", "String.length (digits 345) = 3"))
    assert passed(problem, "string_of_int n") == 1
    shadowed = 'let last = ref 0 let digits n = last := n; "" let int_of_string _ = !last '
    shadowed += "module String = struct let length _ = 3 end"
    assert passed(problem, shadowed) == 0


def test_a_value_of_any_type_is_printed_in_full_or_not_at_all():
    text = "(** Counts. *)\ntype t = A of float | B of { x : t list }\nlet count (n : int) : t array ="
    tests = assertions("count 1 = [| A 0.; B { x = [A 0.1] } |]", "count 0 = [||]", "count 2 = [| A 1e300 |]")
    problem = prepare("count", text, tests)
    right = "match n with 0 -> [||] | 1 -> [| A (-0.); B { x = [ A 0.1 ] } |] | _ -> [| A 1e300 |]"
    assert passed(problem, right) == 1
    for wrong in ("0.10000000000000002", "nan", "infinity"):
        assert passed(problem, right.replace("0.1 ", f"{wrong} ")) == 2 / 3
    cyclic = right.replace("[ A 0.1 ]", "(let rec l = A 0.1 :: l in l)")
    long = right.replace("[ A 0.1 ]", "List.init 50000 (fun _ -> A 0.1)")
    deep = right.replace("[ A 0.1 ]", "(let r = ref [] in for _ = 1 to 100000 do r := [ B { x = !r } ] done; !r)")
    assert [passed(problem, text) for text in (cyclic, long, deep)] == [2 / 3] * 3


def test_frames_are_read_up_to_the_first_that_is_not_well_formed():
    assert frames_of(b"2\n=50\n3\n\xff\n\n") == ["=5", "", "\ufffd\n\n"]
    for broken in (b"2\n=", b"x", b"-1\n", b"99999999\n", b"3", b"\n"):
        assert frames_of(b"1\na" + broken) == ["a", "malformed"]


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


@pytest.mark.parametrize("seed, count", [(0, 50), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_programs_made_at_random_leave_no_trace_and_change_no_other_grade(seed, count, squares, canary):
    rng, process, typed = random.Random(seed), toplevel()[0], []
    for _ in range(count):
        text = f"List.length {made(rng, rng.randrange(4))}".replace("CANARY", str(canary))
        typed.append(judge(squares, text).typed)
        assert a_right_answer_is_right(squares), text
    assert toplevel()[0] is process and sum(typed) > count / 2


# The wall

PROBES = {  # what a program tries, and what it gets: a value, or ! for an exception
    'close_out (open_out "CANARY, too"); 7': "!",
    'close_out (open_out "/judge.cmo"); 7': "!",
    'Unix.mkdir "/x" 0o777; 7': "!",
    'close_in (open_in "/etc/passwd"); 7': "!",
    'close_in (open_in "/proc/1/mem"); 7': "!",
    "read_line () |> String.length": "!",
    "if Unix.getuid () = 0 then 8 else 7": "=7",
    "Unix.fork ()": "!",
    'Unix.execv "/bin/sh" [|"sh"|]': "!",
    "ignore Unix.(socket PF_INET SOCK_STREAM 0); 7": "!",
    "ignore Unix.(socketpair PF_UNIX SOCK_STREAM 0); 7": "!",
    'Sys.command "echo dead > CANARY"': "=127",  # there is no shell, and no process for it
    "Unix.kill 1 9; 7": "=7",  # without effect
    "Unix.kill 1 19; 7": "=7",
    "Unix.kill (-1) 9; 7": "!",  # there is nobody else
    "Bytes.length (Bytes.create 4000000000)": "!",
}


def test_what_a_program_tries_behind_the_wall(squares, canary):
    cases = "".join(f"| {i} -> {tried}\n" for i, tried in enumerate(PROBES)).replace("CANARY", str(canary))
    calls = [f"f {i}" for i in range(len(PROBES))]
    answer = f"let f = function\n{cases}| _ -> 0"
    stages = ocaml_toplevel.run("answer", "", "let f (n : int) : int =", "f", "int -> int", answer, *calls)
    assert dict(zip(PROBES, stages[2:-1], strict=True)) == PROBES and stages[-1] == "end"
    assert a_right_answer_is_right(squares)


def processes(pid):
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in processes(int(child)))]


def test_behind_the_wall_is_nothing(squares):
    assert a_right_answer_is_right(squares)
    while len(found := processes(toplevel()[0].pid)) < 3:
        time.sleep(0.01)
    bubblewrap, _, waiting = found  # and between them the process that was prepared
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
        [sys.executable, "-c", code, *calls], input=ocaml_wall.system_call_filter(), capture_output=True
    )
    got = dict(zip(CALLS_OF_THE_SYSTEM, map(int, run.stdout.split()), strict=True))
    assert got == {name: 0 if passes else errno.ENOSYS for name, (_, _, passes) in CALLS_OF_THE_SYSTEM.items()}


def test_a_process_that_died_is_replaced_and_named_if_the_next_one_dies(squares, changed_toplevel):
    toplevel()[0].kill()
    toplevel()[0].wait()
    assert a_right_answer_is_right(squares)
    changed_toplevel('print_endline "ready";', 'print_endline "ready"; exit 0;')
    with pytest.raises(SystemExit, match="error: OCaml, which judges the answers, stopped twice"):
        judge(squares, "7")


def test_an_answer_that_was_not_read_is_not_taken_for_the_next_one(squares):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        judge(squares, HACKS["an endless loop"][0])
    signal.signal(signal.SIGALRM, before)
    assert a_right_answer_is_right(squares)


@pytest.mark.parametrize("program, package", ocaml_wall.PACKAGES.items())
def test_a_program_that_is_missing_is_named_with_its_package(program, package, tmp_path, monkeypatch):
    for other in {*ocaml_wall.PACKAGES} - {program}:
        (tmp_path / other).symlink_to(shutil.which(other))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=f"{program} was not found: `apt install {package}`"):
        ocaml_wall.start(ocaml_toplevel.SOURCE, 0)


def test_an_ocaml_of_another_version_and_a_wall_that_cannot_be_built_are_named(tmp_path, monkeypatch):
    (tmp_path / "wrong.ml").write_text("let x = Parsetree.A_node_of_another_version")
    with pytest.raises(SystemExit, match="OCaml was found but cannot judge; this needs version 4.13 or 4.14"):
        ocaml_wall.start(tmp_path / "wrong.ml", 0)
    monkeypatch.setattr(ocaml_wall, "WALL", ["false"])
    with pytest.raises(SystemExit, match="the wall without which no program of a model is run"):
        ocaml_wall.start(ocaml_toplevel.SOURCE, 0)
