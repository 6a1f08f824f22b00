"""tools/evaluate.py: the command prints what it found, and says what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent


def run(*arguments):
    command = [sys.executable, "-m", "tools.evaluate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_the_command_prints_a_column_for_each_model(byte_model, tmp_path):
    byte_model.tokenizer = Tokenizer.of_bytes()
    byte_model.save(tmp_path / "one")
    byte_model.save(tmp_path / "two")
    result = run(tmp_path / "one", tmp_path / "two", "--limit", "3", "--json", tmp_path / "out.json")
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    one, two = figures.values()
    assert one == two and one["policy structure T=0"] == [0.0, 0.0]
    assert list(figures) == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert result.stdout.splitlines()[0].count("/") >= 2


def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
