"""tools/evaluate.py: the figures are those of the grades, and the command says what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import data
import tasks
from rewards import grade
from rollout import Rollout
from tokenizer import Tokenizer
from tools import evaluate

ROOT = Path(__file__).parent.parent


def test_intervals_are_the_usual_ones():
    values = [0.0, 1.0, 1.0, 0.0, 0.25, 1.0]
    mean, half = evaluate.interval(values)
    assert mean == pytest.approx(numpy.mean(values))
    assert half == pytest.approx(1.96 * numpy.std(values, ddof=1) / numpy.sqrt(len(values)))
    assert evaluate.interval([1.0]) == (1.0, 0.0)


def test_skill_is_the_mean_of_what_the_completions_earn(byte_model, monkeypatch):
    """A sampler that answers perfectly at temperature 0 and says nonsense otherwise."""
    byte_model.tokenizer = tokenizer = Tokenizer.of_bytes()
    positions = [p for p in data.load("builtin")[:400] if tasks.held_out(p.fen)]
    samples = evaluate.ask(positions, 100, "expanded")
    answers = {}
    for position in positions:
        prompt = tasks.policy_prompt(position.fen, "expanded")
        answers[prompt] = tasks.policy_completion(position.fen, position.moves, "expanded")
    for sample in samples:
        if sample.prompt.startswith("A: "):
            answers[sample.prompt] = tasks.environment_completion(*sample.labels, "expanded")

    def perfect(model, prompts, group_size, limit, temperature, *rest):
        texts = [answers[tokenizer.decode(p)] if temperature == 0 else "nonsense" for p in prompts]
        rows = [tokenizer.encode(text) + [tokenizer.eos] for text in texts]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [tokenizer.eos] * (width - len(row)) for row in rows])
        return Rollout(tokens, tokens >= 0, torch.zeros(tokens.shape), torch.zeros(len(rows), dtype=torch.bool))

    monkeypatch.setattr(evaluate, "generate", perfect)
    result = evaluate.skill(byte_model, samples)
    assert len(samples) == 2 * len(positions) > 40
    for name in ("policy reward", "policy legal", "policy best", "environment reward", "environment next_state"):
        assert result[f"{name} T=0"] == (1.0, 0.0)
    assert result["policy reward T=1"][0] == result["environment reward T=1"][0] == pytest.approx(-0.3)
    assert result["policy structure T=1"][0] == 0
    assert len(evaluate.table({"a": result, "b": result}).splitlines()) == 1 + len(result)


def test_parts_are_averaged_over_those_that_have_them():
    fen = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
    labels = (("a1a8", 99999), ("a1a7", 500))
    good = grade(tasks.policy_prompt(fen, "rookworld"), "M: a1a8 a1a7 E: 999.99 5.0 B: a1a8", labels, False)
    bad = grade(tasks.policy_prompt(fen, "rookworld"), "what", labels, False)
    means = evaluate.mean_parts([good, bad])
    assert means["structure"] == means["legal"] == 0.5 and means["cp_loss"] == 0.0


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
