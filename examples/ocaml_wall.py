"""A wall around OCaml: whatever a program does, it reaches nothing outside its process.

What a model writes is a stranger's code. OCaml's toplevel, which compiles and runs it, has no root privileges and sees
no network, no process outside and no file but those of OCaml, all read-only. Most system calls fail; memory, processes,
files and output have bounds, and ocaml_toplevel.ml bounds the time. The wall needs bubblewrap and a kernel that lets a
user make namespaces. Without it nothing is run.
"""

import errno
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile

from nanorook.settings import fail

PACKAGES = {
    "ocaml": "ocaml-nox",
    "ocamlc": "ocaml-nox",
    "bwrap": "bubblewrap",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
}
OCAML = "-nopervasives -w -a -I +compiler-libs -I +unix".split()  # for the compiler and the toplevel alike
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs".split()
WALL = "bwrap --unshare-all --as-pid-1 --die-with-parent --cap-drop ALL".split()
# --nproc: the process itself and the one that it forks for an answer
BOUNDS = f"--as={2**30} --stack={2**23} --fsize=0 --nofile=32 --core=0 --nproc=2".split()
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


def start(source, kept):
    """A process of OCaml's toplevel behind the wall, which runs a file whose first line says "ready". It can use the
    standard files and the one with the number `kept`."""
    for program, package in PACKAGES.items():
        if not shutil.which(program):
            fail(f"this task runs a model's programs in OCaml and behind a wall; {program} was not found: "
                 f"`apt install {package}`.")  # fmt: skip
    if platform.machine() not in SYSTEM_CALLS:
        fail(f"this task runs a model's programs behind a wall, which {platform.machine()} has not; use a machine with "
             f"one of {', '.join(SYSTEM_CALLS)}.")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as seccomp:
        # A toplevel that compiled the file itself would need twice the memory, and each fork copies the table of pages.
        compiled = f"{folder}/judge.cmo"
        if subprocess.run(["ocamlc", "-c", *OCAML, "-o", compiled, source], capture_output=True).returncode:
            fail("OCaml was found but cannot judge; this needs version 4.13 or 4.14 with its compiler-libs.")
        seccomp.write(system_call_filter())
        seccomp.seek(0)
        ocamlrun, ocaml, prlimit = programs = [shutil.which(name) for name in ("ocamlrun", "ocaml", "prlimit")]
        libraries = re.findall(r"(/\S+) \(", output_of("ldd", ocamlrun, prlimit))
        command = [*NOBODY] if os.geteuid() == 0 else []
        command += [*WALL, "--seccomp", str(seccomp.fileno())]
        for path in [*programs, *libraries, output_of("ocamlc", "-where").strip()]:
            command += ["--ro-bind", path, path]
        with open(compiled, "rb") as code:
            command += ["--ro-bind-data", str(code.fileno()), "/judge.cmo", "--remount-ro", "/"]
            command += [prlimit, *BOUNDS, ocamlrun, ocaml, "-noinit", *OCAML, "unix.cma", "/judge.cmo"]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            options |= dict(cwd="/", env={"PATH": os.environ["PATH"]}, start_new_session=True)  # without our Ctrl-C
            process = subprocess.Popen(command, pass_fds=[code.fileno(), seccomp.fileno(), kept], **options)
        if process.stdout.readline() != b"ready\n":
            fail("OCaml does not start behind the wall without which no program of a model is run: free some memory, "
                 "and use a machine where a user can run `bwrap --unshare-all --ro-bind / / true`.")  # fmt: skip
    return process


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
