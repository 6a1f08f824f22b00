"""GPT-2 124M, the size of RookWorld-LM: one whole step on a CPU, with random weights."""

from itertools import count
from types import SimpleNamespace

import chess
import pytest
import torch
from transformers import GPT2LMHeadModel

import rewards
from experiments.variants import run_here
from model import GPT, GPTConfig
from nanorook.positions import Position
from nanorook.tokenizer import Tokenizer


def test_a_large_model_is_told_its_learning_rate(toy_run, monkeypatch, capsys):
    numel = torch.nn.Parameter.numel
    monkeypatch.setattr(torch.nn.Parameter, "numel", lambda self: 10_000 * numel(self))
    toy_run("large", STEPS=1, LR=3e-5)
    assert "LR=1e-5 CLIP_RANGE=0.1 TEMPERATURE=0.7" in capsys.readouterr().out
    toy_run("fine", STEPS=1, LR=1e-5)
    assert "CLIP_RANGE=0.1" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_124_million_weights(tmp_path, capsys):
    """./train.sh MODEL=jrahn/RookWorld-LM-124M: its sizes and its padded format, a KL of 0, an update, a folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "start")
    number = count()

    def grade(question, text, hit_limit, step):
        """Random text claims no structure, and earns something that differs from answer to answer."""
        reward = next(number) % 3 / 2
        return rewards.Grade(reward, (("number", reward),), {})

    items = [Position(chess.STARTING_FEN, (), (("e2e4", 20),))]
    task = SimpleNamespace(LIMITS={"policy": 8, "environment": 8}, load=lambda *_: (items, items))
    task.make_questions = rewards.make_questions
    task.grade, task.__file__ = grade, "rewards.py"
    changes = dict(MODEL=str(tmp_path / "start"), STEPS=1, BATCH_POSITIONS=1, GROUP_SIZE=2, EVAL_POSITIONS=1)
    changes |= dict(WARMUP_STEPS=0, DTYPE="float32", DEVICE="cpu", LR=1e-5)
    [row], trained = run_here(task, changes, quiet=False)
    assert "124.4M parameters" in capsys.readouterr().out
    assert abs(row["kl"]) < 1e-6 and row["logprob_gap"] < 1e-4 and row["grad_norm"] > 0 and not row["skipped"]
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), trained.parameters())]
    assert 0 < max(moved) < 1.1e-5  # AdamW's first step is LR at most

    trained.save(tmp_path / "trained")
    ids = torch.tensor([trained.tokenizer.encode("P: 8/8/8/8/8/8/8/K1k5 w - - 0 1")])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "trained")(ids).logits
    torch.testing.assert_close(theirs, GPT.load(tmp_path / "trained")(ids), atol=1e-4, rtol=0)
