"""The house: what lies where, which file imports which, and what no file does when it is imported."""

import ast
import re

import pytest

from toy import ROOT

FIVE = {"model", "rollout", "rewards", "grpo", "train"}
FOLDERS = ("nanorook", "rook", "architectures", "tools", "examples", "experiments")
OWN = FIVE | {*FOLDERS, "tests"}
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))]
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
LOADERS = {"import_module", "spec_from_file_location", "exec_module", "run_path", "run_module", "__import__"}

# What each file or folder may import. Inside: the five, and what they stand on.
ALLOWED = {
    "nanorook": {"nanorook"},
    "model.py": {"nanorook"},
    "rollout.py": {"nanorook", "grpo"},  # which has the distribution that is sampled from
    "grpo.py": set(),
    "rook": {"nanorook", "rook"},
    "rewards.py": {"nanorook", "rook"},
    "architectures": {"nanorook", "model", "architectures"},
    "train.py": {"nanorook", "model", "rollout", "grpo", "architectures"},
    # Around it: programs and tasks. Only those about chess know rewards.py and rook/.
    "examples": {"nanorook", "model", "architectures", "examples"},
    "examples/mates.py": {"nanorook", "rewards", "rook"},
    "tools": {"nanorook", "model", "rollout", "grpo", "train", "architectures", "tools"},
    "tools/chess_": OWN - {"examples", "experiments", "tests"},
    # Outside: records and what makes the documentation of them.
    "experiments": OWN - {"tests"},
}
EXCEPTIONS = {
    ("nanorook/task.py", "loads a module by spec_from_file_location, exec_module"),  # TASK=FILE
    ("nanorook/loggers.py", "loads a module by import_module"),  # the dashboard that REPORT_TO names
    ("train.py", "imports rewards"),  # the default of TASK
    ("tools/ask.py", "imports rewards"),  # likewise
}


def allowed(file):
    """The entry with the longest name that the file's path begins with."""
    return ALLOWED[max((name for name in ALLOWED if file.startswith(name)), key=len)]


def root_of(node):
    """The name that an expression such as train.task.LIMITS["x"] or vars(train)["x"] begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return ""
    return node.id


def changed_by(node):
    """The expressions that a statement or a call changes, apart from plain names."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        return node.args[:1]
    elif isinstance(node, ast.Call) and re.fullmatch(r"vars\(.*\)\.\w+", ast.unparse(node.func)):
        return [node.func.value]  # vars(train).update(...)
    else:
        targets = []
    parts = [part for target in targets for part in ast.walk(target)]
    places = [part for part in parts if isinstance(part, ast.Attribute | ast.Subscript)]
    return [place for place in places if not isinstance(place.ctx, ast.Load)]


def violations(file, text):
    """What a file does against the rules, hidden imports included: a module that is loaded by its name or path, and one
    whose name or path is a text by itself, as for a subprocess."""
    imported, own_names, loaded, found = set(), set(), set(), set()
    nodes = [*ast.walk(ast.parse(text))]
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(\w+/)*\w+\.py|[a-z]+\.\w+", str(node.value)):
            names = [(re.sub(r"[/.].*", "", node.value), "")]
            if names[0][0] not in FOLDERS and not node.value.endswith(".py"):
                continue
        else:
            continue
        for module, name in names:
            if module.split(".")[0] in OWN:
                imported.add(module.split(".")[0])
                own_names.add(name)
    own_names -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own_names -= {node.arg for node in nodes if isinstance(node, ast.arg)}  # a variable of a function with this name
    for node in nodes:
        name = getattr(node, "attr", getattr(node, "id", ""))
        if name in LOADERS or isinstance(node, ast.Name) and name in ("exec", "eval"):
            loaded.add(name)
        for target in changed_by(node):
            if root_of(target) in own_names:
                found.add(f"changes {ast.unparse(target)}")
    if loaded:
        found.add(f"loads a module by {', '.join(sorted(loaded, reverse=True))}")
    return found | {f"imports {name}" for name in imported - allowed(file)}


def test_the_root_has_the_five_one_oldest_python_and_each_package_pinned_once():
    assert {file.stem for file in ROOT.glob("*.py")} == FIVE
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r"Python (3\.\d+) or later", project)[1]
    for file, mentions in (("README.md", 1), ("nanorook/setup.sh", 2)):
        named = re.findall(r"Python (3\.\d+) or later|\((3, \d+)\)", (ROOT / file).read_text())
        assert ["".join(found).replace(", ", ".") for found in named] == [oldest] * mentions, file
    for name, list_name in (("requirements.txt", "train"), ("requirements-test.txt", "test")):
        listed = re.search(rf"^{list_name} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[1]
        pinned = [line.rpartition("==")[0] for line in (ROOT / name).read_text().splitlines() if line[:1] != "#"]
        assert pinned == re.findall(r'"([\w-]+)', listed), name


@pytest.mark.parametrize("file", TEXTS)
def test_each_file_keeps_to_the_rules(file):
    """Imports go one way, none is hidden, no file changes another's globals, only functions read environment and
    arguments, and no operator of torch is private."""
    text = TEXTS[file]
    assert {(file, what) for what in violations(file, text)} <= EXCEPTIONS
    assert not re.search(r"^\S.*(os\.environ|os\.getenv|sys\.argv|settings\.read_user)", text, re.MULTILINE)
    assert not re.search(r"torch\.(ops|_C)\b", text)


def test_each_exception_is_one():
    assert {(file, what) for file, what in EXCEPTIONS if what in violations(file, TEXTS[file])} == EXCEPTIONS


@pytest.mark.parametrize(
    "file, text, what",
    [
        ("nanorook/folder.py", 'CLASSES = {"gpt2": ("model.py", "GPT")}', "imports model"),
        ("nanorook/folder.py", 'CLASSES = {"llama": ("examples/llama.py", "Llama")}', "imports examples"),
        ("nanorook/run.py", 'subprocess.run([sys.executable, "-m", "tools.report", out])', "imports tools"),
        ("nanorook/sizes.py", "def defaults():\n    from model import GPT", "imports model"),
        ("nanorook/any.py", 'importlib.import_module("rewards")', "loads a module by import_module"),
        ("rook/pretrain.py", "import rewards", "imports rewards"),
        ("rook/pretrain.py", "import train", "imports train"),
        ("examples/mates.py", "from nanorook.settings import SETTINGS\ndel SETTINGS[name]", "changes SETTINGS[name]"),
        ("examples/sums.py", "import train", "imports train"),
        ("experiments/seeds.py", "runpy.run_path(program)", "loads a module by run_path"),
        (
            "experiments/seeds.py",
            "from nanorook import settings\nsettings.GIVEN['x'] = 1",
            "changes settings.GIVEN['x']",
        ),
        ("experiments/imitate.py", "import train\ntrain.task, train.LR, x = 1, 2, 3", "changes train.LR"),
        ("experiments/every.py", "import train\nvars(train.task).update(mix)", "changes vars(train.task)"),
        ("tools/signal.py", 'import train\ntrain.COMPILE = "0"', "changes train.COMPILE"),
        ("tools/signal.py", 'import train\nsetattr(train, "COMPILE", "0")', "changes train"),
        ("tools/evaluate.py", "from rook import positions", "imports rook"),
    ],
)
def test_what_is_against_the_rules_is_found(file, text, what):
    assert what in violations(file, text)


def test_what_is_for_any_task_knows_no_chess():
    words = re.compile(r"\bchess|\bfen\b|stockfish|\bboards?\b", re.IGNORECASE)
    files = [file for folder in ("nanorook", "tools", "architectures") for file in (ROOT / folder).iterdir()]
    files = [file for file in files if file.is_file() and not file.name.startswith("chess_")]
    assert len(files) > 20 and not [file for file in files if words.search(file.read_text())]
