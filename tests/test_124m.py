"""GPT-2 124M, the size of RookWorld-LM: one whole step on a CPU, with random weights."""

from itertools import count

import pytest
import torch
from transformers import GPT2LMHeadModel

import toy
from model import GPT, GPTConfig
from nanorook.run import Run
from nanorook.tokenizer import Tokenizer


@pytest.mark.slow
def test_a_step_of_124_million_weights(toy_run, monkeypatch, tmp_path, capsys):
    """MODEL=jrahn/RookWorld-LM-124M: its sizes, the advice for its learning rate, a KL of 0, an update, a folder."""
    torch.manual_seed(0)
    model, number = GPT(GPTConfig()), count()
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "start")

    monkeypatch.setattr(toy, "grade", lambda *_: toy.Grade((("number", next(number) % 3 / 2),), {}))
    monkeypatch.setattr(Run, "save", lambda *_: None)  # it would take gigabytes
    changes = dict(MODEL=str(tmp_path / "start"), STEPS=1, BATCH_POSITIONS=1, GROUP_SIZE=2, EVAL_POSITIONS=1)
    [row] = toy_run(**changes, LR=3e-5)
    said, trained = capsys.readouterr().out, GPT.load(tmp_path / "out" / "model")
    assert "124.4M parameters" in said and "LR=1e-5 TEMPERATURE=0.7" in said
    assert abs(row["kl"]) < 1e-6 and row["logprob_gap"] < 1e-4 and row["grad_norm"] > 0 and not row["skipped"]
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), trained.parameters())]
    assert 0 < max(moved) < 3.3e-5  # AdamW's first step is LR at most
    ids = torch.tensor([trained.tokenizer.encode("P: 8/8/8/8/8/8/8/K1k5 w - - 0 1")])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "model")(ids).logits
    torch.testing.assert_close(theirs, trained(ids), atol=1e-4, rtol=0)
