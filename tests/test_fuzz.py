"""experiments/fuzz.py: broken input is accepted or refused in words, and a loader that does neither is caught."""

import gzip
import json
import mmap
import random
import re
import sys
import time
import warnings
from pathlib import Path

import pytest

from experiments import fuzz
from experiments.broken import mutate, parts, unzipped, zipped


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {name: target for name, *target in fuzz.targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.slow
def test_every_target_takes_whatever_comes(targets, tmp_path, monkeypatch):
    warnings.simplefilter("ignore")
    monkeypatch.setattr(fuzz.data, "PROVEN", 5000)  # put back afterwards
    assert len(targets) == 21
    for name, target in targets.items():
        row = fuzz.fuzz(name, *target, 200 if name.startswith("grade") else 24, 1, tmp_path)
        assert row["cases"] >= 24 and row["accepted"] + row["refused"] == row["cases"]
        assert row["refused"] > row["cases"] / 4 or name == "generation_config.json"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, read",
    [
        ("config.json", json.loads),
        ("gzip", gzip.decompress),
        ("trainer.pt", unzipped),
        ("model.safetensors", lambda content: json.loads(parts(content)[0])),
    ],
)
def test_mutants_are_broken_within_as_well(targets, name, read):
    """Case n is the same every time, nearly all differ, and of many the format is sound."""
    wholes, sound = targets[name][0], 0
    made = [mutate(wholes[0], wholes, random.Random(f"x{n}")) for n in range(60)]
    assert made == [mutate(wholes[0], wholes, random.Random(f"x{n}")) for n in range(60)]
    assert sum(content != wholes[0] for content in made) > 50 and len({*made}) > 45
    for content in made:
        try:
            sound += content != wholes[0] and read(content) is not None
        except Exception:  # not even that
            pass
    assert 20 < sound < 60


def found(targets, name):
    """Inputs that broke something once."""
    real = targets[name][0][0]
    if name == "config.json":
        for change in ({"n_layer": 2**23}, {"n_embd": 2**31 - 2}, {"n_embd": 2**23, "vocab_size": 2**31 - 1}):
            yield json.dumps({**json.loads(real), **change}).encode()
    elif name in ("pytorch_model.bin", "trainer.pt sealed"):  # takes from an empty stack, has a long name
        members = unzipped(real)
        for pickled in (b"\x80\x02R.", b"\x80\x02c" + b"m" * 20000 + b"\nn\n."):
            yield zipped({file: pickled if file.endswith("data.pkl") else body for file, body in members.items()})
        yield b"\x80\x02c" + b"m" * 20000 + b"\nn\n."
        yield b"PK" + real[500:]
    elif name == "sums.json":
        yield from (b"[" * 20000, b"[]", b"{}", b"\xff")
    elif name == "RookWorld":
        yield re.sub(rb"E: \S+", b"E: " + b"9" * 400, real)
    elif name == "own lines":
        yield re.sub(rb":-?\d+", b":" + b"9" * 400, real)
    elif name == "PGN":
        yield b"1. e4 $" + b"9" * 5000 + b" e5 *"


@pytest.mark.parametrize(
    "name", "config.json/pytorch_model.bin/trainer.pt sealed/sums.json/RookWorld/own lines/PGN".split("/")
)
def test_what_was_found_once_is_refused_in_words(targets, tmp_path, name):
    inputs = list(found(targets, name))
    for content in inputs:
        accepted, seconds = fuzz.judge(name, content, targets[name][2], tmp_path)
        assert not accepted, content[:99]
    assert inputs and not list(tmp_path.iterdir())


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

    def leaks(content):
        held.append(mmap.mmap(-1, 2 * 10**6))  # pages of its own: malloc may have some left from the tests before
        return held[-1].write(b"x" * 2 * 10**6) > 0

    wholes, strategy, _ = targets["FEN"]
    monkeypatch.setattr(fuzz, "GROWTH", 20)
    with pytest.raises(fuzz.Failure, match="memory grew by"):
        fuzz.fuzz("FEN", wholes, strategy, leaks, 40, 0, tmp_path)


def test_a_reward_out_of_range_is_caught(targets, tmp_path, monkeypatch):
    grade = fuzz.grade
    monkeypatch.setattr(fuzz, "grade", lambda *args, **kwargs: grade(*args, **kwargs)._replace(reward=1.01))
    with pytest.raises(fuzz.Failure, match="grade P: AssertionError"):
        fuzz.fuzz("grade P", *targets["grade P"], 20, 0, tmp_path)


def test_the_program(targets, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fuzz", "--keep", str(tmp_path), *arguments])
        fuzz.main()
        return capsys.readouterr().out

    monkeypatch.setattr(fuzz, "targets", lambda folder: [(name, *target) for name, target in targets.items()])
    monkeypatch.setattr(fuzz.resource, "setrlimit", lambda *_: None)  # it would hold for all tests after this one
    said = run("--only", "FEN", "grade A", "--count", "40")
    assert re.search(r"\| FEN \| 40 \| \d+ \| \d+ \|.*\n\| grade A \| 200 \|", said)
    (tmp_path / "PGN").write_text('[Event "?"]\n\n1. e4 *')
    assert run("--replay", str(tmp_path / "PGN")).startswith("PGN: accepted")
    with pytest.raises(SystemExit, match="error: there is no target what; the targets are grade P, grade A, own lines"):
        run("--only", "what")
    monkeypatch.setattr(fuzz.data, "load", wrong(lambda: {}["key"]))
    with pytest.raises(SystemExit, match="error: FEN: KeyError: 'key'; the input is kept in .*/FEN"):
        run("--only", "FEN", "--seed", "3", "--count", "40")
