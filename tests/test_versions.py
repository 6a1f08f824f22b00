"""The Python and the packages that are promised, wherever they are named."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_one_oldest_python_is_named_everywhere():
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', PROJECT)[1]
    for file, mentions in (("README.md", 1), ("experiments/gpu/README.md", 1), ("tools/setup.sh", 3)):
        named = re.findall(r"Python (3\.\d+) or later|>=(3\.\d+)|\((3, \d+)\)", (ROOT / file).read_text())
        assert ["".join(found).replace(", ", ".") for found in named] == [oldest] * mentions, file


def test_each_package_is_pinned_once_for_all_pythons():
    for name, list_name in (("requirements.txt", "dependencies"), ("requirements-test.txt", "dev")):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        pinned = [re.fullmatch(r"([\w-]+)==[\d.]+", line)[1] for line in lines]
        listed = re.search(rf"^{list_name} = \[(.*?)\]", PROJECT, re.MULTILINE | re.DOTALL)[1]
        assert pinned == re.findall(r'"([\w-]+)', listed), name
