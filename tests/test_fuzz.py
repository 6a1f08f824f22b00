"""experiments/fuzz.py: broken input is accepted or refused in words, and a loader that does neither is caught."""

import random
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from experiments import fuzz
from experiments.broken import mutate

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {name: target for name, *target in fuzz.targets(tmp_path_factory.mktemp("fuzz"))}


def test_every_target_takes_whatever_comes(targets, tmp_path, monkeypatch):
    warnings.simplefilter("ignore")
    monkeypatch.setattr(fuzz.data, "PROVEN", 5000)  # put back afterwards
    assert len(targets) == 21
    for name, target in targets.items():
        row = fuzz.fuzz(name, *target, 500 if name.startswith("grade") else 60, 1, tmp_path)
        assert row["cases"] >= 60 and row["accepted"] + row["refused"] == row["cases"]
        assert row["refused"] > row["cases"] / 4 or name == "generation_config.json"
    assert not list(tmp_path.iterdir())


def test_mutants_are_what_they_should_be(targets):
    """Case n is the same every time, nearly all differ from the real input, and formats are broken within, too."""
    for name in ("config.json", "trainer.pt", "gzip", "model.safetensors", "PGN"):
        wholes = targets[name][0]
        made = [mutate(wholes[0], wholes, random.Random(f"x{n}")) for n in range(60)]
        assert made == [mutate(wholes[0], wholes, random.Random(f"x{n}")) for n in range(60)]
        assert sum(content != wholes[0] for content in made) > 50 and len({*made}) > 45
        if name != "PGN":
            assert sum(content[:2] == wholes[0][:2] or content[8:9] == b"{" for content in made) > 30


def wrong(how):
    def load(path):
        if b"7" in Path(path).read_bytes():
            how()
        raise fuzz.data.DataError("in words")

    return load


@pytest.mark.parametrize(
    "how, said",
    [
        (lambda: {}["key"], "KeyError"),
        (lambda: time.sleep(0.3), "TimeoutError"),
        (lambda: exec("raise fuzz.data.DataError('')", {"fuzz": fuzz}), "AssertionError: refused without a word"),
    ],
)
def test_a_loader_that_misbehaves_is_caught_and_its_input_kept(targets, tmp_path, monkeypatch, how, said):
    wholes, strategy, accept = targets["FEN"]
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(fuzz.data, "load", wrong(how))
        with pytest.raises(fuzz.Failure, match=rf"FEN: {said}.*; the input is kept in {tmp_path}/FEN"):
            fuzz.fuzz(
                "FEN", [b"8/8", b"x"], strategy, lambda content: b"x" == content or accept(content), 400, 0, tmp_path
            )
    assert b"7" in (tmp_path / "FEN").read_bytes()


def test_memory_that_grows_is_caught(targets, tmp_path, monkeypatch):
    held = []
    wholes, strategy, _ = targets["FEN"]
    monkeypatch.setattr(fuzz, "GROWTH", 20)
    with pytest.raises(fuzz.Failure, match="memory grew by"):
        fuzz.fuzz("FEN", wholes, strategy, lambda content: held.append(bytearray(10**6)) or True, 40, 0, tmp_path)


def test_a_reward_out_of_range_is_caught(targets, tmp_path, monkeypatch):
    grade = fuzz.grade
    monkeypatch.setattr(fuzz, "grade", lambda *args, **kwargs: grade(*args, **kwargs)._replace(reward=1.01))
    with pytest.raises(fuzz.Failure, match="grade P: AssertionError"):
        fuzz.fuzz("grade P", *targets["grade P"], 20, 0, tmp_path)


@pytest.mark.slow
def test_the_program(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "experiments.fuzz", "--keep", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("--only", "FEN", "grade A", "--count", "40")
    assert done.returncode == 0 and re.search(r"\| FEN \| 40 \| \d+ \| \d+ \|", done.stdout), done.stderr
    assert re.search(r"\| grade A \| 200 \|", done.stdout)
    (tmp_path / "PGN").write_text('[Event "?"]\n\n1. e4 *')
    assert run("--replay", str(tmp_path / "PGN")).stdout.startswith("PGN: accepted")
    refused = run("--only", "what")
    assert refused.returncode == 1 and refused.stderr.startswith("error: there is no target what")
