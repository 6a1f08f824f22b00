"""OCaml as a verifier: does a program parse, does its function have the right type, and what does it return?

What a model writes is a stranger's code. Two walls stand between it and everything else:

- The inner wall is an allow-list. Before a program is compiled, ocaml_verifier.ml walks its syntax tree and refuses
  whatever it does not name. What remains has no effects, and nothing in it can change: constants, variables, `fun`,
  `let`, `if`, `match` without guards, tuples, lists, and the functions of a prelude. The Verdict on a program that is
  refused is the one on text that does not parse, so it earns nothing.
- The outer wall is for a program that gets through the inner one all the same, by a bug of the compiler for example.
  Each program that is type-checked or run has a process of its own, forked from a prepared one; text that the inner
  wall has refused is only parsed. The process has no root privileges and sees no network, no process outside and no
  file but those of OCaml, all read-only. Most system calls fail; memory, time, processes, files and output have bounds.
  The wall needs bubblewrap and a kernel that lets a user make namespaces; without them, a warning says so, and what
  remains of it is the process, its bounds, and, if root runs this, the limited rights of the user "nobody".

A program that breaks the inner wall can give itself any grade. It cannot give one to another program, or reach anything
else that the outer wall encloses: the pipes to Python are closed before it is type-checked, and what its own pipe holds
counts for this one program alone. It cannot signal or trace the process that it was forked from, and it is killed after
its grade.
"""

import errno
import json
import os
import platform
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from nanorook.settings import fail

SOURCE = Path(__file__).with_suffix(".ml")
OCAML = "-nopervasives -w -a -I +compiler-libs -I +unix".split()  # for the compiler and the toplevel alike
BOUNDS = f"--as={2**30} --stack={2**23} --fsize=0 --nofile=32 --core=0".split()  # the CPU time is set in the .ml
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs".split()
WALL = "bwrap --unshare-all --as-pid-1 --die-with-parent --cap-drop ALL".split()
WAITS = 100  # of 0.1 seconds for a program; they are counted, so that a machine that sleeps does not make it late
SYSTEM_CALLS = {  # for each machine: its number in seccomp, the calls that OCaml needs, and then clone and prlimit64
    "x86_64": (
        0xC000003E,
        "0 1 2 3 4 5 6 8 9 10 11 12 13 14 15 17 21 22 23 25 28 32 33 38 39 57 59 60 61 62 63 79 89 97 99 131 158 202 "
        "217 218 228 231 257 262 267 269 270 273 292 293 318 334 439",
        56,
        302,
    ),
    "aarch64": (
        0xC00000B7,
        "17 23 24 48 56 57 59 61 62 63 64 67 72 78 79 80 93 94 96 98 99 103 113 129 132 134 135 139 160 172 179 214 "
        "215 216 221 222 226 233 260 278 291 293 439",
        220,
        261,
    ),
}


class Verdict(NamedTuple):
    parses: bool = False  # and the inner wall lets it through
    typed: bool = False
    ran_away: bool = False
    results: tuple = ()  # of the calls, None where the function raised an exception


@lru_cache(2**16)  # many answers of a step are the same
def judge(program, signature, calls):
    """The Verdict on a program, which has to define the function that signature names with its type, "f : int -> int".

    calls has the arguments of each call, as in ocaml([[3], [4]])."""
    check_calls(signature, calls)
    answer = ask_twice(program, signature, calls)
    stage, _, shown = answer.partition(b"\n")
    try:
        results = json.loads(shown.decode(errors="replace")) if stage == b"run" else []
    except (ValueError, RecursionError):
        results = None
    ran_away = stage not in (b"syntax", b"type", b"run") or not isinstance(results, list)
    return Verdict(stage in (b"type", b"run"), stage == b"run", ran_away, () if ran_away else tuple(results))


@cache
def check_calls(signature, calls):
    """Says what the author of a task did wrong, as a number of the wrong type would be read as an address, for example.
    There is no program in this request, so none can pretend that the task is wrong."""
    stage, _, call = ask_twice("", signature, calls).partition(b"\n")
    if stage == b"calls":
        call = call.decode(errors="replace")
        fail(f"the task calls {signature} with {call}, which are not arguments of these types.")
    if stage not in (b"type", b"run"):  # "run" if the name is one of the prelude's
        fail(f"the task's signature {signature!r} or its calls {calls!r:.80} are not OCaml, as judge() needs them.")


def ask_twice(program, signature, calls):
    """What became of a program, if need be asked of a new process."""
    definition = f"let {signature} = {signature.partition(':')[0]}"  # comes last, so that the type is not the program's
    parts = [part.encode(errors="replace") for part in (program, definition, calls)]
    request = ";".join(str(len(part)) for part in parts).encode() + b"\n" + b"".join(parts)
    answer = ask(request)
    if answer is None:
        answer = ask(request)  # of a new process
    if answer is None:
        fail("OCaml, which judges the answers, stopped twice, perhaps for lack of memory: free some and try again.")
    return answer


def ocaml(value):
    """A number, a string, or a list or tuple of them as OCaml writes it."""
    if isinstance(value, list):
        return f"[{'; '.join(map(ocaml, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(ocaml, value))})"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03}" for byte in value.encode()) + '"'
    return str(value).lower()  # True, False and exponents of ten


def ask(request):
    """What became of a program; None where the process that judges has died."""
    process = toplevel()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        in_time = any(select.select([process.stdout], [], [], 0.1)[0] for _ in range(WAITS))
        answer = process.stdout.read(int(process.stdout.readline())) if in_time else b""
        if not answer:
            stop()  # it may not have read all of the request
        return answer
    except BaseException as error:
        stop()  # else an answer that was not read would be taken for the one to the next request
        if isinstance(error, (BrokenPipeError, ValueError)):  # no line could be read
            return None
        raise


@cache
def toplevel():
    """The process of OCaml that judges."""
    process = start(SOURCE, wall_stands())
    if process.stdout.readline() != b"ready\n":
        fail(f"OCaml does not start: free some memory, and let all users read {tempfile.gettempdir()}.")
    return process


def stop():
    """Ends the process and all that it started; the next program gets a new one."""
    if toplevel.cache_info().currsize:
        end(toplevel())
        toplevel.cache_clear()


def end(process):
    with suppress(ProcessLookupError):  # it has died before
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


@cache
def wall_stands():
    """Whether this machine can build the outer wall."""
    why = no_wall()
    if why:
        warning = f"warning: OCaml runs without its outer wall, which cannot be built here: {why}"
        print(warning, file=sys.stderr, flush=True)
    return not why


def no_wall():
    """Why this machine cannot build the outer wall; empty if it can."""
    if not all(map(shutil.which, ("ocaml", "ocamlc"))):
        fail("OCaml, which judges the answers of this task, was not found: `apt install ocaml`.")
    if not all(map(shutil.which, ("prlimit", "setpriv"))):
        fail("prlimit and setpriv, which confine the answers, were not found; this task needs Linux with util-linux.")
    if not all(map(shutil.which, ("bwrap", "ldd"))):
        return "bubblewrap or ldd is not installed"
    if platform.machine() not in SYSTEM_CALLS:
        return f"the system calls of {platform.machine()} are not listed"
    process = start(SOURCE, walled=True, stderr=subprocess.PIPE)
    ready = process.stdout.readline() == b"ready\n"
    why = end(process)[1].decode(errors="replace").strip().rpartition("\n")[2]
    return "" if ready else why or "OCaml ends at once"


@cache
def compiled(source):
    """A folder with the bytecode of a file, which is removed when this process ends. The toplevel would need twice
    the memory if it compiled the file itself, and each fork copies the table of its pages."""
    folder = tempfile.TemporaryDirectory()
    os.chmod(folder.name, 0o755)  # so that the user "nobody" can read it
    command = ["ocamlc", "-c", *OCAML, "-o", f"{folder.name}/judge.cmo", source]
    if subprocess.run(command, capture_output=True, umask=0o022).returncode:
        fail("OCaml was found but cannot judge; this needs version 4.13 or 4.14 with its compiler-libs.")
    return folder


def start(source, walled, stderr=subprocess.DEVNULL, kept=()):
    """The toplevel of OCaml, which runs a file within bounds and, if `walled`, behind the outer wall. It can use the
    standard files and those with the numbers `kept`."""
    file = f"{compiled(source).name}/judge.cmo"
    ocamlrun, ocaml, prlimit = programs = [shutil.which(name) for name in ("ocamlrun", "ocaml", "prlimit")]
    with open(file, "rb") as code, tempfile.TemporaryFile() as seccomp:
        command = list(without_rights())
        if walled:
            seccomp.write(system_call_filter())
            seccomp.seek(0)
            libraries = re.findall(r"(/\S+) \(", output_of("ldd", ocamlrun, prlimit))
            command += [*WALL, "--seccomp", str(seccomp.fileno())]
            for path in [*programs, *libraries, output_of("ocamlc", "-where").strip()]:
                command += ["--ro-bind", path, path]
            command += ["--ro-bind-data", str(code.fileno()), "/judge.cmo", "--remount-ro", "/"]
            file = "/judge.cmo"
        command += [prlimit, *BOUNDS, *["--nproc=2"] * walled]  # its own process and a grade's
        command += [ocamlrun, ocaml, "-noinit", *OCAML, "unix.cma", file]
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        options |= dict(cwd="/", env={"PATH": os.environ["PATH"]}, start_new_session=True)  # without our Ctrl-C
        return subprocess.Popen(command, pass_fds=[code.fileno(), seccomp.fileno(), *kept], **options)


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def without_rights():
    """What precedes a command to run it without root privileges."""
    dropped = os.geteuid() == 0 and subprocess.run([*NOBODY, "true"], capture_output=True).returncode == 0
    return NOBODY if dropped else []


def system_call_filter():
    """A program for seccomp. All system calls fail except those that OCaml needs: none traces a process or opens a
    socket. Clone fails with flags for new namespaces, prlimit for another process."""
    machine, needed, clone, prlimit = SYSTEM_CALLS[platform.machine()]
    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06  # each instruction: code, jump if true, jump if false, operand
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.ENOSYS)
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), refuse, (load, 0, 0, 0)]  # loads the machine, then the call
    for number in map(int, needed.split()):
        program += [(equal, 0, 1, number), allow]
    for number, bits in ((clone, 0x7E020000), (prlimit, 0xFFFFFFFF)):  # that have to be 0 in the first argument
        program += [(equal, 0, 4, number), (load, 0, 0, 16), (any_bit, 0, 1, bits), refuse, allow]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, refuse])
