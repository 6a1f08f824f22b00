import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import grpo
from experiments import tables
from rook.positions import Position
from toy import ROOT, program

FILES = [ROOT / "README.md", ROOT / "data" / "README.md", ROOT / "weights" / "tiny" / "README.md"]
FILES += sorted((ROOT / "docs").glob("*.md"))

TESTS = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
PACKAGES = "nanorook", "rook", "architectures", "tools", "examples", "experiments"
SOURCES = [file for part in (".", *PACKAGES) for file in (ROOT / part).glob("*.py")]
SETTINGS = {*re.findall(r'\bsetting\(\s*"(\w+)"', "".join(file.read_text() for file in SOURCES))}
SETTINGS |= {"PYTHON", "OMP_NUM_THREADS", "WANDB_MODE", "QWEN", "CODER"}  # of setup.sh, torch, wandb, gpu.sh
MODULES = {*PACKAGES, *(file.stem for file in ROOT.glob("*.py"))}
SHORT = {"GPT": "model.GPT", "task": "nanorook.task.Task", "model": "model.GPT"}  # what the pages call by a short name
SHORT |= {name: f"nanorook.task.{name}" for name in ("Question", "Grade")}


def exists(name):
    """Whether a dotted name is that of a module, or of a function or class in one."""
    first, _, rest = name.partition(".")
    for path in (name, f"{SHORT.get(first, first)}.{rest}"):
        try:
            return pkgutil.resolve_name(path) is not None
        except (AttributeError, ImportError):
            pass
    return False


def anchors(file):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", tables.PAGES, ids=lambda file: file.name)
def test_each_table_is_what_the_recorded_figures_give(file):
    text = file.read_text()
    assert tables.rewritten(text) == text, "python -m experiments.tables writes them anew"


def test_a_table_and_the_line_below_it_come_from_records():
    """Rows are chosen and named, a file lacks what its record lacks, and what follows stays as it is."""
    page = "# A\n\n<!-- table\nadds.json: adds right T=0 as [Sums](#a)\nadds-prompts.json: *\nmade by adds.json\n-->\n"
    page = tables.rewritten(f"{page}\n| wrong |\n\nMade by hand.\n")
    head, _, sums, *prompts, _, made, _, text = page.splitlines()[8:]
    assert sums.startswith("| [Sums](#a) | 0.0 |") and prompts
    assert all(row.count("|") == head.count("|") and row.endswith("| – | – | – |") for row in prompts)
    settings = "TASK=examples/adds.py EVAL_POSITIONS=100 EVAL_SAMPLES=16 --seeds 4 --controls 3"
    assert made.startswith(f"Made by `python -m tools.sweep OUT {settings}` on 2 cores of AMD EPYC, bfloat16, 2026-")
    assert text == "Made by hand." and tables.rewritten(page) == page


def test_each_record_is_shown_by_a_page():
    shown = "".join(file.read_text() for file in tables.PAGES)
    assert all(f"\n{file.name}: " in shown for file in (ROOT / "experiments").glob("*.json"))


def test_the_lines_for_transformers_print_what_they_say(monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    lines, printed = re.search(r"((?:    [^#\s].*\n)+)    # (M: .*)", readme).groups()
    monkeypatch.chdir(ROOT)
    exec(textwrap.dedent(lines), {})
    assert capsys.readouterr().out == f"{printed}\n"


def test_the_two_lines_of_a_reward_pay_and_are_a_metric():
    """Applied where the text says: the line of `moves` is replaced, and the other goes below the one of `legal`."""
    readme, source = ((ROOT / name).read_text() for name in ("README.md", "rewards.py"))
    weights, rung = re.search(r'( +"moves": .*\n)( +rungs\["takes"\].*\n)', readme).groups()
    source, replaced = re.subn(r' +"moves": \{.*\n', weights, source)
    source, added = re.subn(r'( +rungs = \{"legal".*\n)', rf"\g<1>{rung}", source)
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


def commands():
    """The README's, without those that download something, play games, or train a model of 135M parameters."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"(?m)^ {4}((?:\./train\.sh|[A-Z]\w+=\S+ |\.venv/bin/python |python -m ).*)", text)
    downloads = r"MODEL=[\w-]+/[\w.-]+(?!\S)"
    left_out = rf"pip install|chess_games|adds\.py|{downloads}"
    return [line for line in dict.fromkeys(lines) if not re.search(left_out, line)]


@pytest.fixture(scope="module")
def fresh_copy(tmp_path_factory, few_positions):
    """The project as somebody has cloned it, with everything installed, and the files that the README assumes."""
    copy = tmp_path_factory.mktemp("readme") / "nanorook"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "out", "wandb", "__pycache__"))
    (copy / ".venv/bin").mkdir(parents=True)
    program(copy / ".venv/bin/python", f'exec {sys.executable} "$@"')
    shutil.copy(ROOT / "requirements.txt", copy / ".venv")
    shutil.copy(few_positions, copy / "few.txt")
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_each_command_of_the_readme_works(line, fresh_copy):
    """In the order of the page, as later ones use what earlier ones have made, and with less to do."""
    less = {"STEPS": "1", "EVAL_POSITIONS": "2", "BATCH_POSITIONS": "2", "GROUP_SIZE": "2", "FRESH": "1"}
    if line.startswith("./train.sh") and "DATA=" not in line:
        less["DATA"] = "few.txt"
    line = re.sub(rf" (?:{'|'.join(less)})=\w+", "", line)  # an argument would come before the environment
    path = f"{fresh_copy}/.venv/bin:{os.environ['PATH']}"  # for `python`
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"} | less | {"PATH": path}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(["bash", "-c", line], cwd=fresh_copy, env=env, timeout=900, **pipes)
    assert done.returncode == 0, done.stdout


def test_the_readme_has_the_commands_that_this_file_runs():
    text = "\n".join(commands())
    assert text.count("./train.sh") >= 2 and "tools.ask" in text and "tools.evaluate" in text
    assert "RookWorld-LM" not in text and "Qwen" not in text and "games out" not in text


def test_the_lines_of_a_loss_are_a_loss():
    """Put where the text says. While the policy is the one that sampled, all losses have the same gradient; after an
    update this one has no ratio."""
    readme, source = ((ROOT / name).read_text() for name in ("README.md", "grpo.py"))
    entry, name = re.search(r'`(("\w+"): "tokens")`', readme).groups()
    branch = re.search(r"( {4}elif loss == .*\n(?: {8}.*\n)+)", readme)[1]
    source, named = re.subn(r"(\nLOSSES = \{.*)\}", rf"\g<1>, {entry}}}", source)
    source, added = re.subn(r"( {4}else:\n {8}raise ValueError\(f.{loss)", rf"{branch}\g<1>", source)
    assert (named, added) == (1, 1)
    changed = types.ModuleType("changed")
    exec(source, vars(changed))

    def gradient(loss, moved):
        logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
        mask, advantages = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1.0], [-0.5]])
        given = dict(loss=loss, clip_low=0.2, clip_high=0.2, normalizer=3)
        changed.policy_loss(logprobs, logprobs.detach() - moved, advantages, mask, **given)[0].backward()
        return logprobs.grad

    assert torch.equal(gradient("dapo", 0.0), gradient(eval(name), 0.0)) and gradient("dapo", 0.0).any()
    assert torch.equal(gradient(eval(name), 0.0), gradient(eval(name), 0.1))
    assert not torch.equal(gradient("dapo", 0.1), gradient(eval(name), 0.1))


def test_grpo_in_seven_lines_is_what_grpo_py_computes():
    code = re.search(r"## GRPO in seven lines.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    torch.manual_seed(0)
    logprobs, old_logprobs, ref_logprobs = (-3 * torch.rand(4, 5) for _ in range(3))
    given = dict(logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, mask=torch.rand(4, 5) > 0.3)
    given |= dict(torch=torch, clip_low=0.2, clip_high=0.28, kl_coef=0.1)
    exec(code, given)
    advantages = grpo.advantages(given["rewards"][:, None], 4)
    assert advantages[:, 0].tolist() == given["advantages"].tolist() == [-0.375, -0.375, 0.625, 0.125]
    mask = given["mask"]
    normalizer = grpo.loss_normalizer(mask, "dapo", 5)
    settings = dict(loss="dapo", clip_low=0.2, clip_high=0.28, normalizer=normalizer)
    loss, _ = grpo.policy_loss(logprobs, old_logprobs, advantages, mask, **settings)
    kl = grpo.aggregate(grpo.kl(logprobs, ref_logprobs, mask, "k2"), mask, "dapo", normalizer)
    torch.testing.assert_close(given["loss"], loss + 0.1 * kl)


each_page = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


@each_page
def test_each_file_and_setting_that_is_named_exists(file):
    text = file.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        assert target.exists() and (not anchor or anchor in anchors(target)), link
    folders = "tests|tools|experiments|examples|architectures|nanorook|rook"
    for path in re.findall(rf"(?<![\w/])(?:{folders})/[\w./]+\.(?:py|sh|json)\b", text):
        assert (ROOT / path).exists(), path
    elsewhere = {"NAME", "THP_MEM_ALLOC_ENABLE", "MALLOC_MMAP_THRESHOLD_"}  # any setting; torch's and glibc's
    assert {*re.findall(r"`([A-Z][A-Z_]+)=", text)} <= SETTINGS | elsewhere


@each_page
def test_each_function_and_command_that_is_named_exists(file):
    text = file.read_text()
    for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)\b[^`]*`", text):
        if name.partition(".")[0] in {*MODULES, *SHORT} and not re.search(r"\.(?:py|sh|safetensors|NAME)$", name):
            assert exists(name), name
    for line in text.replace("\\\n", " ").splitlines():
        program = re.search(r"(?:-m |`)((?:tools|rook|examples|experiments)\.[a-z_]+)([^`]*)", line)
        if program:
            options = re.findall(r" (--[\w-]+)", program[2].partition("#")[0])
            defined = (ROOT / f"{program[1].replace('.', '/')}.py").read_text()
            assert not [option for option in options if f'"{option}"' not in defined], line
        if program or re.search(r"train\.(?:sh|py)\b", line):
            assert {*re.findall(r"\b([A-Z][A-Z_]+)=", line)} <= SETTINGS, line


@each_page
def test_each_test_that_is_named_exists(file):
    for test in re.findall(r"\b(test_\w+)(?!\w*\.py)\b", file.read_text()):
        assert f"def {test}(" in TESTS, test
