"""GPT-2 124M, the size of RookWorld-LM: one whole step on a CPU, with random weights."""

import json
from itertools import count
from types import SimpleNamespace

import chess
import pytest
import torch

import rewards
import train
from model import GPT, GPTConfig
from nanorook import settings
from nanorook.positions import Position
from nanorook.tokenizer import Tokenizer


def test_a_large_model_is_told_its_learning_rate(toy_run, monkeypatch, capsys):
    toy_run(STEPS=1)
    assert "LR=1e-5" not in capsys.readouterr().out
    numel = torch.nn.Parameter.numel
    monkeypatch.setattr(torch.nn.Parameter, "numel", lambda self: 10_000 * numel(self))
    toy_run("large", STEPS=1, LR=3e-5)
    assert "LR=1e-5 CLIP_RANGE=0.1 TEMPERATURE=0.7 is what worked for 124M" in capsys.readouterr().out
    toy_run("fine", STEPS=1, LR=1e-5)
    assert "is what worked" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_124_million_weights(tmp_path, monkeypatch, capsys):
    """./train.sh MODEL=jrahn/RookWorld-LM-124M: its sizes and its padded format, a KL of 0, an update, a checkpoint."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "start")
    known, number = dict(settings.SETTINGS), count()

    def grade(question, text, hit_limit, step):
        """Random text claims no structure, and earns something that differs from answer to answer."""
        reward = next(number) % 3 / 2
        return rewards.Grade(reward, (("number", reward, None),), {})

    limits = {"policy": 8, "environment": 8}
    items = [Position(chess.STARTING_FEN, (), (("e2e4", 20),))]
    task = SimpleNamespace(LIMITS=limits, load=lambda *_: (items, items), ask=rewards.ask, grade=grade)
    values = dict(MODEL=str(tmp_path / "start"), OUT_DIR=str(tmp_path / "out"), STEPS=1, BATCH_POSITIONS=1)
    values |= dict(GROUP_SIZE=2, EVAL_POSITIONS=1, WARMUP_STEPS=0, DTYPE="float32", DEVICE="cpu", LR=1e-5)
    for name, value in values.items():
        monkeypatch.setattr(train, name, value)
        settings.SETTINGS[name] = (*known[name][:2], value)
    monkeypatch.setattr(train, "task", task)
    monkeypatch.setattr(train, "finish_run", lambda model, out: None)
    monkeypatch.setattr("sys.argv", ["train.py"])
    try:
        train.main()
    finally:
        settings.SETTINGS.update(known)
    assert "124.4M parameters" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert abs(row["kl"]) < 1e-6 and row["logprob_gap"] < 1e-4 and row["grad_norm"] > 0 and not row["skipped"]
    trained = GPT.load(tmp_path / "out" / "latest")
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), trained.parameters())]
    assert 0 < max(moved) < 1.1e-5  # AdamW's first step is LR at most

    from transformers import GPT2LMHeadModel

    ids = torch.tensor([trained.tokenizer.encode("P: 8/8/8/8/8/8/8/K1k5 w - - 0 1")])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "latest")(ids).logits
    torch.testing.assert_close(theirs, trained(ids), atol=1e-4, rtol=0)
