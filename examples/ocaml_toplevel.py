"""OCaml's toplevel as a verifier of whole programs: an answer cannot grade itself.

A problem has assertions such as `assert (f [1; 2] = 3)`. The process that runs an answer is given the left sides alone,
f [1; 2], and prints their values; the right sides are printed by a process that never sees an answer, and the two texts
are compared here. So an answer may redefine `=`, print what it likes, end early, or overwrite the memory of its
process: it still has to know each value, and the only way to know one is to compute it.

- An answer may use the whole language. It becomes the body of a functor whose result is the function with the type that
  the problem names. So it is parsed and typed before any of it runs, and a left side sees nothing of it but that
  function: the names that it redefines and the types that it declares again stay inside.
- Each answer has a process of its own, forked from a prepared one behind the wall of ocaml_wall.py: it reaches no
  network, no file but OCaml's own, and no other process, and its time, memory and output are bounded.
- What an answer prints goes straight to this process. No other process of OCaml has it in its memory, so no later
  answer can read there what an earlier one has computed.
"""

import os
import re
import select
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from examples.ocaml_wall import start
from nanorook.settings import fail

SOURCE = Path(__file__).with_suffix(".ml")
MOST = 2**20  # bytes of what the process of a request writes; the rest is thrown away


class Problem(NamedTuple):
    id: str
    text: str  # as the model reads it
    definitions: str  # what precedes the signature
    signature: str  # let f (x : int) : int =
    name: str
    type: str
    calls: tuple  # the left sides of the assertions
    expected: tuple  # the values of the right sides, as the toplevel prints them
    shown: tuple  # whether the text shows the assertion as an example


class Verdict(NamedTuple):
    parses: bool = False
    typed: bool = False
    ran_away: bool = False  # it did not end by itself
    passed: tuple = ()  # for each assertion

    @property
    def right(self):
        return bool(self.passed) and all(self.passed)


def prepare(id, text, tests, solution=""):
    """A Problem, or the reason why it cannot be one."""
    text = text.rstrip()
    fields = run("problem", text, tests, solution, *re.findall(r">>>(.*)", text))
    if fields[:1] != ["problem"]:
        return fields[1] if fields[:1] == ["left out"] else "it cannot be checked in time"
    definitions, signature, name, type, annotated, *cases = fields[1:]
    calls, expected, shown = (tuple(cases[i::3]) for i in range(3))
    problem = Problem(id, text, definitions, signature, name, type, calls, expected, tuple(s == "true" for s in shown))
    if len(set(paid(problem))) < 2:
        return "the assertions that it does not show as examples all expect the same value, so a constant would pass"
    if annotated == "false" and not judge(problem, solution).right:
        return "its signature does not say all types, and its solution does not pass"
    return problem


def paid(problem):
    """The expected values of the assertions that the text does not show."""
    return [value for value, shown in zip(problem.expected, problem.shown) if not shown]


@lru_cache(2**16)  # many answers of a step are the same
def judge(problem, answer):
    """The Verdict on an answer: a definition of the problem's function, or the text that continues its signature."""
    about = problem.definitions, problem.signature, problem.name, problem.type
    stages = run("answer", *about, answer, *problem.calls)
    ran_away = stages[-1:] == ["ran away"]
    parses, typed = stages[:1] == ["parses"], stages[:2] == ["parses", "typed"]
    values = stages[2:-1]
    passed = ()
    if stages[-1:] == ["end"] and len(values) == len(problem.expected):
        passed = tuple(value == f"={expected}" for value, expected in zip(values, problem.expected))
    return Verdict(parses, typed, ran_away, passed)


def run(*parts):
    """The frames that the process of a request wrote; the last one is "ran away" if it had to be ended."""
    written, ended = ask(*parts) or ask(*parts) or (None, None)  # of a new process, if the first one has died
    if written is None:
        fail("OCaml, which judges the answers, stopped twice, perhaps for lack of memory: free some and try again.")
    return frames_of(written) + ["ran away"] * (not ended)


def ask(*parts):
    """(what the process of a request wrote, whether it ended by itself); None where the process that forks has died."""
    process, reading, writing = toplevel()
    parts = [part.encode(errors="replace") for part in (str(writing), *parts)]
    written, status = b"", b""
    try:
        process.stdin.write(";".join(str(len(part)) for part in parts).encode() + b"\n" + b"".join(parts))
        process.stdin.flush()
        while not status:
            ready = select.select([reading, process.stdout], [], [])[0]
            if reading in ready:
                written += os.read(reading, 2**16)[: MOST - len(written)]
            else:
                status = process.stdout.readline()
                if not status:
                    raise BrokenPipeError
        while select.select([reading], [], [], 0)[0]:  # what came after the last look and before the end
            written += os.read(reading, 2**16)[: MOST - len(written)]
        return written, status == b"ended\n"
    except BrokenPipeError:
        stop()
        return None
    except BaseException:
        stop()  # else what was not read would be taken for the answer to the next request
        raise


def frames_of(written):
    """The texts of a sequence of frames, each its length, a new line and its text. What follows the last one that is
    well-formed is called malformed."""
    frames = []
    while written:
        found = re.match(rb"(\d{1,7})\n", written)
        length = int(found[1]) if found else 0
        if not found or len(written) < found.end() + length:
            return [*frames, "malformed"]
        frames.append(written[found.end() : found.end() + length].decode(errors="replace"))
        written = written[found.end() + length :]
    return frames


@cache
def toplevel():
    """The process of OCaml that forks for each request, and both ends of a pipe from there to here."""
    reading, writing = os.pipe()
    return start(SOURCE, writing), reading, writing


def stop():
    """Ends the process and all that it started; the next request gets a new one."""
    if toplevel.cache_info().currsize:
        process, *pipe = toplevel()
        process.kill()
        process.communicate()
        for file in pipe:
            os.close(file)
        toplevel.cache_clear()
