import re
import textwrap
import types

import pytest

import train
from rook.positions import Position
from toy import ROOT

FILES = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TESTS = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))


def anchors(file):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_docs_stay_few():
    assert len(list((ROOT / "docs").glob("*.md"))) <= 7


def test_the_lines_for_transformers_print_what_they_say(monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    lines, printed = re.search(r"((?:    [^#\s].*\n)+)    # (M: .*)", readme).groups()
    monkeypatch.chdir(ROOT)
    exec(textwrap.dedent(lines), {})
    assert capsys.readouterr().out == f"{printed}\n"


def test_the_two_lines_of_a_reward_pay_and_are_a_metric():
    """Put where the text says: in place of the line of `moves`, and beneath the one of `top5`."""
    readme, source = ((ROOT / name).read_text() for name in ("README.md", "rewards.py"))
    weights, rung = re.search(r'( +"moves": .*\n)( +rungs\["takes"\].*\n)', readme).groups()
    source, replaced = re.subn(r' +"moves": \{.*\n', weights, source)
    source, added = re.subn(r'( +rungs \|= \{"top5".*\n)', rf"\g<1>{rung}", source)
    assert (replaced, added) == (1, 1)
    changed = types.ModuleType("changed")
    changed.__file__ = str(ROOT / "rewards.py")
    exec(source, vars(changed))
    assert sum(changed.FIRST_WEIGHTS["moves"].values()) == pytest.approx(1)
    position = Position("4k3/8/8/3p4/4P3/8/8/4K3 w - - 0 1", (), (("e4d5", 100), ("e4e5", 0)))
    question = changed.first_question("moves", position, "expanded")
    paid = {move: changed.grade(question, f"{move} ") for move in ("e4d5", "e4e5")}
    assert [grade.metrics["takes"] for grade in paid.values()] == [1.0, 0.0]
    assert paid["e4d5"].reward == 1.0 and paid["e4d5"].reward - paid["e4e5"].reward == pytest.approx(0.65)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_each_file_and_setting_that_is_named_exists(file):
    text = file.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        assert target.exists() and (not anchor or anchor in anchors(target)), link
    for name in re.findall(r"(?:-m |`)((?:tools|experiments|rook)\.[a-z_]+)", text):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name
    folders = "tests|tools|experiments|examples|nanorook|rook"
    for path in re.findall(rf"(?<![\w/])(?:{folders})/[\w./]+\.(?:py|sh|json)\b", text):
        assert (ROOT / path).exists(), path
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in TESTS, test
    elsewhere = {"PYTHON", "SUMS_REWARD", "QUESTIONS"}  # of setup.sh, examples/sums.py and tools.signal
    settings = {*train.settings.values(), *elsewhere}
    for line in re.findall(r".*train\.(?:sh|py)\b.*", text):
        assert {*re.findall(r"\b([A-Z][A-Z_]+)=", line)} <= settings, line
    if file.parent == ROOT:
        table = text.partition("## The settings that matter")[2].partition("\n## ")[0]
        named = re.findall(r"`([A-Z_]+)(?:=1)?`", " ".join(re.findall(r"\n\|([^|]*)\|", table)))
        assert len(named) > 12 and {*named} <= settings
