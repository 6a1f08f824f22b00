"""The house: what lies where, which file imports which, and what no file does when it is imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIVE = {"model", "rollout", "rewards", "grpo", "train"}
OWN = FIVE | {"nanorook", "tools", "experiments", "examples", "tests"}
FOLDERS = ("nanorook", "tools", "examples", "experiments")
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))]
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}

each_file = pytest.mark.parametrize("file", TREES)


def allowed(file):
    """What of this repository a file may import."""
    folder, name = file.split("/")[0], Path(file).stem
    if folder in ("model.py", "rollout.py", "rewards.py", "grpo.py", "nanorook"):
        return {"nanorook"}
    if folder == "examples":
        return {"nanorook", "model"}
    own = {
        "nanorook",
        *([] if folder == "train.py" else ["tools"]),
        *(["experiments", "examples"] if folder == "experiments" else []),
    }
    return own | (FIVE if folder == "experiments" or name in ("doctor", "bench") else FIVE - {"train"})


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(node):
    """The nodes that run when a module is imported: not the bodies of functions, nor what only a program does."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    yield node
    body = getattr(node, "body", None) if isinstance(node, ast.FunctionDef | ast.Lambda) else None
    skipped = body if isinstance(body, list) else [body]
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from at_import(child)


def test_the_five_are_all_that_is_at_the_root():
    assert {file.stem for file in ROOT.glob("*.py")} == FIVE


@each_file
def test_imports_go_one_way(file):
    found = {name for name in imports(ast.walk(TREES[file])) if name.split(".")[0] in OWN}
    if file == "train.py":  # the one import against the direction is in a function
        assert "tools.report" not in imports(at_import(TREES[file]))
        found -= {"tools.report"}
    assert {name.split(".")[0] for name in found} <= allowed(file)


@each_file
def test_the_environment_and_the_arguments_are_read_by_programs_alone(file):
    for node in at_import(TREES[file]):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("os.environ", "os.getenv", "sys.argv"), f"line {node.lineno}"


@each_file
def test_no_private_operators_of_torch(file):
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("torch.ops", "torch._C"), f"line {node.lineno}"
