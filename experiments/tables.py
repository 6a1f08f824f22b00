"""Rewrites the tables of README.md and docs/ from the figures that experiments/*.json record.

    python -m experiments.tables

A table stands below a comment that names its files and rows ("*": all of them):

    <!-- table
    letters.json: letters last T=0; letters last T=1
    variants-sums.json: *
    -->
"""

import functools
import json
import re

import rewards
from examples import adds, letters, ocaml, records, sums
from nanorook.settings import ROOT
from nanorook.tables import row_name
from tools import sweep

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = {}
for task in (rewards, letters, sums, ocaml, adds, records):
    NAMES |= task.NAMES
BLOCK = re.compile(r"(<!-- table\n(.*?)-->\n\n?)((?:\|[^\n]*\n)*)", re.DOTALL)


@functools.cache
def rows_of(file):
    """The rows of the table of a file, its heading first: a file has them as they are, or a record of tools.sweep."""
    record = json.loads((ROOT / "experiments" / file).read_text())
    if "rows" in record:
        return record["rows"]
    return sweep.gain_rows(record) if len(record["variants"]) == 1 else sweep.comparison_rows(record)


def in_words(row):
    return f"| {' | '.join([row_name(row[0], NAMES), *row[1:]])} |\n"


def table(request):
    result = []
    for file, names in re.findall("(.+?): (.+)", request):
        head, *rows = rows_of(file)
        by_name = {row[0]: row for row in rows}
        result += rows if names == "*" else [by_name[name] for name in names.split("; ")]
    return "".join(map(in_words, [head, ["---", *["---:"] * (len(head) - 1)], *result]))


def rewritten(text):
    """A page with the tables that its comments ask for."""
    return BLOCK.sub(lambda block: block[1] + table(block[2]), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
