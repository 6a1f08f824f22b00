"""The embedded model: small, open to transformers, fluent."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from model import GPT
from skill import ask, skill
from tasks import policy_prompt

FOLDER = Path(__file__).parent.parent / "weights" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return GPT.load(FOLDER)


def test_it_is_small_and_opens_in_transformers(tiny):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12e6
    assert 3e6 < sum(p.numel() for p in tiny.parameters()) < 6e6
    assert tiny.config.n_positions >= 384 and tiny.config.chess_format == "expanded"
    assert tiny.config.vocab_size == 257 and tiny.tokenizer.eos == tiny.config.eos_token_id == 256
    prompt = policy_prompt("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1", "expanded")
    ids = AutoTokenizer.from_pretrained(FOLDER)(prompt, return_tensors="pt").input_ids
    assert ids[0].tolist() == tiny.tokenizer.encode(prompt)
    hf = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(tiny(ids), hf(ids).logits, atol=1e-4, rtol=0)


def test_it_is_fluent(tiny):
    held_out = data.split(data.load("builtin"))[1]
    figures = skill(tiny, ask(held_out, 150, "expanded"), (1.0,))[0]
    assert figures["policy structure T=1"][0] >= 0.95  # 97 % on all held-out positions, less what 150 leave to chance
    assert figures["policy legal T=1"][0] >= 0.1
    assert figures["environment structure T=1"][0] >= 0.9
