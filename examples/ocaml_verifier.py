"""OCaml as a verifier: does a function parse, does it have its type, and what does it return?

What a model writes is a stranger's code. Three walls stand between it and everything else:

- It can name what the prelude in ocaml_verifier.ml names. All else that OCaml has, such as files and `exit`, is in
  modules, whose names begin with a capital letter, or comes in by `external`: a text with either does not parse here.
- Results leave OCaml as values and are compared in Python. Nothing that a function prints or redefines reaches them.
- The process has bounds on CPU time, memory, files and processes, an empty folder that cannot be written to, and no
  network where the kernel allows that. A function that breaks out of a bound ends the process: it has run away.

One process judges one function after the other: to start it takes 80 ms, a function 1 ms.
"""

import os
import re
import resource
import shutil
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from nanorook.settings import fail

OUTSIDE = re.compile(r"[A-Z]|external")
OCAML = "ocaml -noinit -nopervasives -w -a -I +compiler-libs -I +unix unix.cma".split()
OCAML.append(str(Path(__file__).with_suffix(".ml")))
BOUNDS = {  # besides the 0.25 seconds of CPU time for each function, see limit_cpu in ocaml_verifier.ml
    resource.RLIMIT_AS: 2**30,  # bytes of memory
    resource.RLIMIT_FSIZE: 0,  # bytes in a file
    resource.RLIMIT_NPROC: 0,  # processes that it may start
    resource.RLIMIT_CORE: 0,
}
FUNCTIONS = 2000  # that a process judges; a new one follows, as it keeps 13 kB of each


class Verdict(NamedTuple):
    parses: bool = False
    typed: bool = False
    ran_away: bool = False
    results: tuple = ()  # of the tests, None where the function raised an exception


@lru_cache(2**16)  # many answers of a step are the same
def judge(text, tests):
    """The Verdict on `let f : TYPE = ...`; tests ((3, 4), ...) are the arguments that it is called with."""
    if OUTSIDE.search(text):
        return Verdict()
    process, code = toplevel(), text.encode(errors="replace")
    request = ";".join(" ".join(map(str, numbers)) for numbers in [[len(code)], *tests])
    process.stdin.write(request.encode() + b"\n" + code)
    process.stdin.flush()
    stage = process.stdout.readline()  # "syntax", "type", "run", or nothing where the process has ended
    words = process.stdout.readline().split() if stage == b"run\n" else []
    ran_away = not (words or stage in (b"syntax\n", b"type\n"))
    if ran_away or judge.cache_info().misses % FUNCTIONS == 0:
        stop()
    results = tuple(None if word == b"exception" else int(word) for word in words)
    return Verdict(stage in (b"type\n", b"run\n"), stage == b"run\n", ran_away, results)


@cache
def toplevel():
    """The process of OCaml that judges."""
    if not shutil.which("ocaml"):
        fail("OCaml was not found, which judges the answers of this task: `apt install ocaml`.")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:  # deleted at once: no file can be made in it
        command, env = [*without_network(), *OCAML], {"PATH": os.environ["PATH"]}
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)  # without our Ctrl-C
        ready = process.stdout.readline()
    if ready != b"ready\n":
        fail(f"OCaml was found but cannot judge; this command says why: {' '.join(OCAML)}")
    for bound, value in BOUNDS.items():
        resource.prlimit(process.pid, bound, (value, value))
    return process


def stop():
    """Ends the process; the next function gets a new one."""
    if toplevel.cache_info().currsize:
        toplevel().kill()
        toplevel().communicate()
        toplevel.cache_clear()


@cache
def without_network():
    """What stands before a command to run it without a network; nothing where the kernel does not allow it."""
    command = ["unshare", "--net", "--map-root-user"]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else []
