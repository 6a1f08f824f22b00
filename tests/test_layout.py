"""The house: what lies where, which file imports which, and what no file does when it is imported."""

import ast
import re
import sys
from pathlib import Path

import pytest

import rewards
import toy
import train
from nanorook import monitor
from toy import ROOT

FIVE = {"model", "rollout", "rewards", "grpo", "train"}
OWN = FIVE | {"nanorook", "rook", "tools", "experiments", "examples", "tests"}
FOLDERS = ("nanorook", "rook", "tools", "examples", "experiments")
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))]
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def allowed(file):
    """What of this repository a file may import."""
    folder, name = file.split("/")[0], Path(file).stem
    if folder in ("model.py", "rollout.py", "rewards.py", "grpo.py", "nanorook"):
        return {"nanorook"} | {"rewards.py": {"rook"}}.get(folder, set())
    if folder == "examples":
        own = {"start": {"model"}, "llama": {"model"}, "mates": {"rewards", "rook"}}
        return {"nanorook", "examples"} | own.get(name, set())
    if folder == "rook":
        return {"nanorook", "rook"} | (FIVE if name not in ("positions", "stockfish", "board") else set())
    if folder == "experiments":
        return FIVE | {"nanorook", "rook", "tools", "experiments", "examples"}
    return {"nanorook"} | FIVE - {"rewards"} | ({"tools"} if folder == "tools" else set())  # tools, train.py


def test_the_root_has_the_five_one_oldest_python_and_each_package_pinned_once():
    assert {file.stem for file in ROOT.glob("*.py")} == FIVE
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r"Python (3\.\d+) or later", project)[1]
    for file, mentions in (("README.md", 1), ("experiments/gpu/README.md", 1), ("nanorook/setup.sh", 3)):
        named = re.findall(r"Python (3\.\d+) or later|>=(3\.\d+)|\((3, \d+)\)", (ROOT / file).read_text())
        assert ["".join(found).replace(", ", ".") for found in named] == [oldest] * mentions, file
    for name, list_name in (("requirements.txt", "train"), ("requirements-test.txt", "test")):
        listed = re.search(rf"^{list_name} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[1]
        pinned = [line.rpartition("==")[0] for line in (ROOT / name).read_text().splitlines() if line[:1] != "#"]
        assert pinned == re.findall(r'"([\w-]+)', listed), name


@pytest.mark.parametrize("file", TEXTS)
def test_each_file_keeps_to_the_rules(file):
    """Imports go one way, only functions read environment and arguments, and no operator of torch is private."""
    found, text = set(), TEXTS[file]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    assert OWN & {name.split(".")[0] for name in found} <= allowed(file)
    assert not re.search(r"^\S.*(os\.environ|os\.getenv|sys\.argv|settings\.read_user)", text, re.MULTILINE)
    assert not re.search(r"torch\.(ops|_C)\b", text)


def test_what_is_for_any_task_knows_no_chess():
    words = re.compile(r"\bchess|\bfen\b|stockfish|\bboards?\b", re.IGNORECASE)
    files = [file for folder in ("nanorook", "tools") for file in (ROOT / folder).iterdir() if file.is_file()]
    assert len(files) > 20 and not [file for file in files if words.search(file.read_text())]


@pytest.mark.slow
def test_a_step_is_read_in_nine_files(tmp_path, monkeypatch, few_positions):
    """Whole functions and methods that the second step of a run of chess calls, counted by syntax tree; and how many
    calls lie between the loop and the model."""
    texts, ran, calls = {str(ROOT / file): text for file, text in TEXTS.items()}, set(), {}

    def watch(frame, *_):
        code = frame.f_code
        if code.co_filename in texts:
            ran.add((code.co_filename, code.co_firstlineno))
            if code.co_name in ("score", "decode"):
                callers = [frame]
                while callers[-1].f_code.co_name != "main":
                    callers.append(callers[-1].f_back)
                calls[code.co_name] = sum(caller.f_code.co_filename in texts for caller in callers) - 1

    def progress_line(past, *args, original=monitor.progress_line):
        sys.settrace(watch if len(past) == 1 else None)
        return original(past, *args)

    monkeypatch.setattr(monitor, "progress_line", progress_line)
    monkeypatch.setattr(train, "evaluate_and_record", lambda *_: None)
    small = dict(STEPS=2, BATCH_POSITIONS=10, GROUP_SIZE=2, EVAL_EVERY=0, KL_COEF=0.01, DATA=few_positions)
    toy.run(tmp_path, rewards, MODEL="weights/tiny", **small)
    lines = {}
    for file, text in texts.items():
        tree = ast.parse(text)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (node for body in [tree, *classes] for node in body.body if isinstance(node, ast.FunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if any(ran_file == file and first <= line <= node.end_lineno for ran_file, line in ran):
                lines[file, node.name, first] = node.end_lineno - first + 1
    assert len({file for file, *_ in lines}) <= 9 and sum(lines.values()) <= 950
    assert calls == {"decode": 4, "score": 3}
