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
BLOCK = re.compile(r"(<!-- table\n(.*?)-->\n\n?)((?:\|[^\n]*\n)*)", re.DOTALL)


def rows_of(file, names):
    """The cells of a Markdown table: its head, the line below it, and the rows with these names."""
    found = seeds.read(ROOT / "experiments" / file)
    if "runs" in found and "task" in found:
        runs, controls = ([run for name, run in found["runs"].items() if name.startswith(kind)]
                          for kind in ("seed", "control"))  # fmt: skip
        text = seeds.table(runs, controls, found["shared"].values())
    else:
        text = variants.show(found["runs"])
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    by_name = {row[0]: row for row in rows}
    return [head, ["---", *["---:"] * (len(rule) - 1)], *(rows if names == ["*"] else map(by_name.get, names))]


def in_words(row):
    name = re.sub(r" T=(\S+)", lambda t: ", greedy" if t[1] == "0" else ", sampled", row[0])
    return f"| {' | '.join([name, *row[1:]])} |\n"


def table(request):
    parts = [rows_of(file, names.split("; ")) for file, names in re.findall("(.+?): (.+)", request)]
    return "".join(map(in_words, [*parts[0][:2], *(row for part in parts for row in part[2:])]))


def rewritten(text):
    """A page with the tables that its comments ask for."""
    return BLOCK.sub(lambda block: block[1] + table(block[2]), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
