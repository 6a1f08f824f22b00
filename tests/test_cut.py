import random
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import toy
from model import GPT, GPTConfig
from nanorook.tokenizer import Tokenizer
from rook import positions
from tools import chess_cut as cut
from tools import chess_texts as texts


@pytest.fixture
def run(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cut", *map(str, arguments)])
        cut.main()

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, gpt2_folder):
    torch.manual_seed(0)
    extra = {"chess_format": "rookworld", "pad_token_id": 50256}
    model = GPT(GPTConfig(n_positions=320, n_embd=32, n_layer=1, n_head=2, extra=extra))
    model.tokenizer = Tokenizer.load(gpt2_folder)
    folder = tmp_path_factory.mktemp("whole") / "model"
    model.save(folder)
    return folder


def test_texts_have_the_same_tokens_and_the_model_the_same_logits(run, whole, tmp_path, capsys):
    run(whole, tmp_path / "small")
    assert capsys.readouterr().out == f"{tmp_path / 'small'}: 2,052 of 50,257 tokens are left.\n"
    old, new, rng = GPT.load(whole), GPT.load(tmp_path / "small"), random.Random(0)
    theirs, tokenizer = (kind.from_pretrained(tmp_path / "small") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert new.config.vocab_size == 2052 and new.config.eos_token_id == new.tokenizer.eos == tokenizer.eos_token_id
    assert theirs.config.pad_token_id == new.tokenizer.eos
    ids = {token: i for i, token in new.tokenizer.token_bytes.items()}
    kept = [i for i, token in old.tokenizer.token_bytes.items() if token in ids]
    order = [ids[old.tokenizer.token_bytes[i]] for i in kept]
    assert len(kept) == 2052
    for position in rng.sample(positions.load("builtin"), 30):
        for write in texts.policy_text, texts.environment_text, texts.legal_text:
            text = "".join(write(position, rng, "rookworld"))
            before, after = old.tokenizer.encode(text), new.tokenizer.encode(text)
            assert [ids[old.tokenizer.token_bytes[i]] for i in before] == after == tokenizer.encode(text)
    with torch.no_grad():
        logits = new(torch.tensor([after]))
        torch.testing.assert_close(logits[..., order], old(torch.tensor([before]))[..., kept])
        torch.testing.assert_close(logits, theirs(torch.tensor([after])).logits)


def test_what_cannot_be_cut_is_refused(run, whole, tmp_path, bpe_folder):
    with pytest.raises(SystemExit, match="weights/tiny is not a GPT-2 in RookWorld's format"):
        run(toy.ROOT / "weights/tiny", tmp_path / "small")
    with pytest.raises(SystemExit, match=f"{whole} is not an empty folder; name another one"):
        run(whole, whole)
    unlike = GPT.load(whole)
    unlike.tokenizer = Tokenizer.load(bpe_folder)
    unlike.config.vocab_size, unlike.config.eos_token_id = unlike.tokenizer.vocab_size, unlike.tokenizer.eos
    unlike.wte.weight.data = unlike.wte.weight.data[: unlike.tokenizer.vocab_size]
    unlike.save(tmp_path / "unlike")
    with pytest.raises(SystemExit, match="unlike has a tokenizer unlike GPT-2's"):
        run(tmp_path / "unlike", tmp_path / "small")
    assert not (tmp_path / "small").exists() and GPT.load(whole).config.vocab_size == 50257
