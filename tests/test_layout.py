"""The house: what lies where, which file imports which, and what no file does when it is imported."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIVE = {"model", "rollout", "rewards", "grpo", "train"}
OWN = FIVE | {"nanorook", "tools", "experiments", "examples", "tests"}
FOLDERS = ("nanorook", "tools", "examples", "experiments")
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))]
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def allowed(file):
    """What of this repository a file may import."""
    folder, name = file.split("/")[0], Path(file).stem
    if folder in ("model.py", "rollout.py", "rewards.py", "grpo.py", "nanorook"):
        return {"nanorook"}
    if folder == "examples":
        return {"nanorook", "model"}
    own = {"nanorook", "experiments", "examples"} if folder == "experiments" else {"nanorook"}
    own |= set() if file == "train.py" else {"tools"}
    return own | (FIVE if folder == "experiments" or name in ("doctor", "bench") else FIVE - {"train"})


def test_the_five_are_all_that_is_at_the_root():
    assert {file.stem for file in ROOT.glob("*.py")} == FIVE


@pytest.mark.parametrize("file", TEXTS)
def test_each_file_keeps_to_the_rules(file):
    """Imports go one way (what train.py imports of the tools, at its end, is in a function), environment and arguments
    are read in functions alone, and no operator of torch is private."""
    found, text = set(), TEXTS[file]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (file, node.module, node.col_offset) != ("train.py", "tools", 4):
            found.add(node.module)
    assert OWN & {name.split(".")[0] for name in found} <= allowed(file)
    assert not re.search(r"^\S.*(os\.environ|os\.getenv|sys\.argv|settings\.read_user)", text, re.MULTILINE)
    assert not re.search(r"torch\.(ops|_C)\b", text)
