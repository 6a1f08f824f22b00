"""Writes the tables of README.md and docs/ anew from the figures that experiments/*.json record.

    python -m experiments.tables

A table stands below a comment that names its files and rows ("*": all of them):

    <!-- table
    letters.json: letters last T=0; letters last T=1
    variants-sums.json: *
    -->
"""

import re
from pathlib import Path

from experiments import seeds, variants

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- table\n(.*?)-->\n\n?)((?:\|.*\n)*)", re.DOTALL)


def rows_of(file, names):
    """The lines of a Markdown table: its head, the line below it, and the rows with these names."""
    found = seeds.read(ROOT / "experiments" / file)
    if "runs" in found and "task" in found:
        runs, controls = ([run for name, run in found["runs"].items() if name.startswith(kind)]
                          for kind in ("seed", "control"))  # fmt: skip
        text = seeds.table(runs, controls, found["shared"].values())
    else:
        task = re.search(r"variants-(\w+)\.json", file)[1]
        text = variants.show(variants.TABLES[task], found["runs"])
    head, rule, *rows = text.splitlines()
    by_name = {row.split("|")[1].strip(): row for row in rows}
    if names != ["*"]:
        rows = [by_name[name] for name in names]
    return head, rule, rows


def in_words(row):
    return re.sub(r" T=(\S+)", lambda t: ", greedy" if t[1] == "0" else ", sampled", row, count=1)


def table(request):
    result = []
    for line in request.strip().splitlines():
        file, names = line.split(": ", 1)
        head, rule, rows = rows_of(file, names.split("; "))
        result += [*([] if result else [head, rule]), *map(in_words, rows)]
    return "\n".join(result) + "\n"


def rewritten(text):
    """A page with the tables that its comments ask for."""
    return BLOCK.sub(lambda block: block[1] + table(block[2]), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
