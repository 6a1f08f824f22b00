"""Rewrites the tables of README.md and docs/ from the figures that experiments/*.json record.

    python -m experiments.tables

A table stands below a comment that names its files and rows ("*": all of them); a row may be called by another name.
"made by" asks for a line below the table that says how a record was made.

    <!-- table
    letters.json: letters last T=0; letters last T=1 as sampled answers
    variants-sums.json: *
    made by letters.json
    -->
"""

import functools
import json
import re
from datetime import datetime

import rewards
from examples import adds, letters, ocaml, records, sums
from nanorook.settings import ROOT
from nanorook.tables import row_name
from tools import sweep

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = {  # of figures that only the pages show; a task names its main ones
    "mates check": "moves that give check",
    "mates legal": "legal moves where there is a mate",
    "moves legal_in_check": "legal moves in check",
    "policy reward": "reward of whole answers",
    "environment next_state_legal": "right positions after legal moves",
    "environment next_state_illegal": "right positions after illegal moves",
}
for task in (rewards, letters, sums, ocaml, adds, records):
    NAMES |= task.NAMES
MADE = r"\nMade by `python -m tools.sweep OUT[^\n]*\n"
BLOCK = re.compile(rf"(<!-- table\n(.*?)-->\n\n?)((?:\|[^\n]*\n)*)(?:{MADE})*\n*", re.DOTALL)
LEFT_OUT = r" (?:SEED|CONTROL|OUT_DIR|SAVE_EVERY|COMPILE|DTYPE)=\S+"  # what tools.sweep or the machine decides


@functools.cache
def record_of(file):
    return json.loads((ROOT / "experiments" / file).read_text())


def rows_of(file):
    """The rows of the table of a file, its heading first: a file has them as they are, or a record of tools.sweep."""
    record = record_of(file)
    if "rows" in record:
        return record["rows"]
    return sweep.gain_rows(record) if len(record["variants"]) == 1 else sweep.comparison_rows(record)


def in_words(row):
    return f"| {' | '.join(row)} |\n"


def table(request):
    """The rows in the order of the request; its first file has the heading, and a dash stands for what a file lacks."""
    result, first_head = [], None
    for file, names in re.findall("(.+?): (.+)", request):
        head, *rows = rows_of(file)
        first_head = first_head or head
        by_name = {row[0]: row for row in rows}
        for wanted in [row[0] for row in rows] if names == "*" else names.split("; "):
            name, _, label = wanted.partition(" as ")
            missing = ["–"] * (len(first_head) - len(head))
            result.append([label or row_name(name, NAMES), *by_name[name][1:], *missing])
    return "".join(map(in_words, [first_head, ["---", *["---:"] * (len(first_head) - 1)], *result]))


def made(request):
    """A line for each record that the request names: its command, its runs, and where and when they were made."""
    lines = ""
    for file in re.findall("^made by (.+)$", request, re.MULTILINE):
        record = record_of(file)
        about, (variant,) = record["about"], record["variants"].values()
        seeds = f"--seeds {len(variant['runs'])}"
        if len(variant["controls"]) != len(variant["runs"]):
            seeds += f" --controls {len(variant['controls'])}"
        settings = re.sub(LEFT_OUT, "", about["command"]).removeprefix("./train.sh")
        command = f"python -m tools.sweep OUT{settings} {seeds}"
        started, finished = (datetime.fromisoformat(about[end]) for end in ("started", "finished"))
        seconds = (finished - started).total_seconds()
        time = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
        where = f"on {about['machine']}, {about['dtype']}, {about['started'][:10]}, {time} a run"
        lines += f"\nMade by `{command}` {where}, commit {about['commit']}.\n"
    return lines


def rewritten(text):
    """A page with the tables that its comments ask for."""
    text = BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}{made(block[2])}\n", text)
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
