"""OCaml as a verifier: does a program parse, does its function have the type, and what does that return?

What a model writes is a stranger's code. Two walls stand between it and everything else:

- **The inner wall is an allow-list.** Before a program is compiled, ocaml_verifier.ml walks its syntax tree and refuses
  all that is not named there. What is left has no effects and nothing that can be changed: constants, variables, functions,
  `let`, `if`, `match` without guards, tuples, lists, and the pure functions of a prelude. A program that is refused gets the
  Verdict of one that does not parse, so it earns what other nonsense earns.
- **The outer wall is for a program that gets through the inner one all the same**, by a bug of the compiler for example. Each
  grade has a process of its own, forked from a prepared one, without root's rights, in namespaces of its own: no network,
  no other process, and of the file system only OCaml, which it cannot write to. Few system calls are left to it. Memory,
  files, processes, output and time have bounds.

A program that broke through the inner wall could thus still give itself any grade. It could not give one to another:
when its code begins to run, its process has left the pipes to Python and holds one pipe only, which says what became of
this very program. It can neither signal nor trace the process that it was forked from, and ends with its grade.

The outer wall needs bubblewrap and a kernel that lets a user make namespaces. Where either is missing, a warning says so.
"""

import errno
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from nanorook.settings import fail

SOURCE = Path(__file__).with_suffix(".ml")
OCAML = "-noinit -nopervasives -w -a -I +compiler-libs -I +unix unix.cma".split()
BOUNDS = f"--as={2**30} --stack={2**23} --fsize=0 --nofile=32 --core=0".split()  # see 0.25 in the .ml for the time
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs".split()
WALL = "bwrap --unshare-all --as-pid-1 --new-session --cap-drop ALL".split()

SYSTEM_CALLS = {  # the machine's number for seccomp; what OCaml needs there: read, write, open, mmap, fork, wait, ...
    "x86_64": (0xC000003E, "0 1 2 3 4 5 6 8 9 10 11 12 13 14 15 17 21 22 23 25 28 32 33 38 39 57 59 60 61 62 63 79 89 97 "
                           "99 131 158 202 217 218 228 231 257 262 267 269 270 273 292 293 318 334 439", 56, 302),
    "aarch64": (0xC00000B7, "17 23 24 48 56 57 59 61 62 63 64 67 72 78 79 80 93 94 96 98 99 103 113 129 132 134 135 139 "
                            "160 172 179 214 215 216 221 222 226 233 260 278 291 293 439", 220, 261),
}  # fmt: skip


class Verdict(NamedTuple):
    parses: bool = False  # and the inner wall lets it through
    typed: bool = False
    ran_away: bool = False
    results: tuple = ()  # of the calls, None where the function raised an exception


@lru_cache(2**16)  # many answers of a step are the same
def judge(program, signature, calls):
    """The Verdict on the definitions of a program, one of them of the function in signature, "f : int -> int".

    calls has the arguments of each call, as in ocaml([[3], [4]])."""
    parts = [part.encode(errors="replace") for part in (program, signature, calls)]
    request = ";".join(str(len(part)) for part in parts).encode() + b"\n" + b"".join(parts)
    answer = ask(request)
    if answer is None:
        answer = ask(request)  # of a new process
    if answer is None:
        fail("OCaml, which judges the answers of this task, died twice; is there memory left? Run the command again.")
    stage, _, shown = answer.partition(b"\n")
    try:
        results = json.loads(shown.decode(errors="replace")) if stage == b"run" else []
    except (ValueError, RecursionError):
        results = None
    ran_away = stage not in (b"syntax", b"type", b"run") or not isinstance(results, list)
    return Verdict(stage in (b"type", b"run"), stage == b"run", ran_away, () if ran_away else tuple(results))


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
        return process.stdout.read(int(process.stdout.readline()))
    except BaseException as error:
        stop()  # else an answer that was not read would be taken for that to the next request
        if isinstance(error, (BrokenPipeError, ValueError)):  # there is no line to read
            return None
        raise


@cache
def toplevel():
    """The process of OCaml that judges."""
    process = start(SOURCE, wall_stands())
    if process.stdout.readline() != b"ready\n":
        fail("OCaml was found but cannot judge; this takes version 4.13 or 4.14 with its compiler-libs.")
    return process


def stop():
    """Ends the process; the next program gets a new one."""
    if toplevel.cache_info().currsize:
        toplevel().kill()
        toplevel().communicate()
        toplevel.cache_clear()


@cache
def wall_stands():
    """Whether the outer wall can be built on this machine."""
    if not shutil.which("ocaml"):
        fail("OCaml was not found, which judges the answers of this task: `apt install ocaml`.")
    why = "bubblewrap is not installed"
    if shutil.which("bwrap"):
        output, errors = start(SOURCE, True, stderr=subprocess.PIPE).communicate(b"")
        if output == b"ready\n":
            return True
        why = (errors.decode(errors="replace").strip() or "no reason was given").splitlines()[-1]
    message = f"warning: OCaml runs without its outer wall ({why}); what keeps programs from your files is the inner one."
    print(message, file=sys.stderr, flush=True)
    return False


def start(source, walled, stderr=subprocess.DEVNULL):
    """Runs a file of OCaml in the toplevel with its bounds, and where `walled` within the outer wall."""
    programs = {name: shutil.which(name) for name in ("prlimit", "ocamlrun", "ocaml")}
    with open(source, "rb") as code, tempfile.TemporaryFile() as calls:
        command, file = [], f"/dev/fd/{code.fileno()}"
        if walled:
            calls.write(system_call_filter())
            calls.seek(0)
            linked = subprocess.run(["ldd", programs["prlimit"], programs["ocamlrun"]], capture_output=True, text=True)
            library = subprocess.run(["ocamlc", "-where"], capture_output=True, text=True).stdout.strip()
            file = "/judge.ml"
            command = [*WALL, "--seccomp", str(calls.fileno()), "--ro-bind-data", str(code.fileno()), file]
            for path in sorted({*programs.values(), *re.findall(r"(/\S+) \(", linked.stdout), library}):
                command += ["--ro-bind", path, path]
            command += ["--remount-ro", "/"]
        command += [programs["prlimit"], *BOUNDS, *["--nproc=2"] * walled]  # the prepared process and that of a grade
        command += [programs["ocamlrun"], programs["ocaml"], *OCAML, file]
        if os.geteuid() == 0:
            command = [*NOBODY, *command]
        return subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, pass_fds=[code.fileno(), calls.fileno()], start_new_session=True,
        )


def system_call_filter():
    """A program for seccomp: all system calls fail but those of SYSTEM_CALLS, so none traces a process, for example, or
    opens a socket. To make a process is allowed, but not in new namespaces; to set limits, but only one's own."""
    machine, allowed, clone, prlimit = SYSTEM_CALLS[platform.machine()]
    allow, fail = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.ENOSYS)
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), fail, (0x20, 0, 0, 0)]  # loads the machine, then the call
    for number in allowed.split():
        program += [(0x15, 0, 1, int(number)), allow]
    for number, forbidden in ((clone, 0x7E020000), (prlimit, 0xFFFFFFFF)):  # bits of the first argument
        program += [(0x15, 0, 4, number), (0x20, 0, 0, 16), (0x45, 1, 0, forbidden), allow, fail]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, fail])
