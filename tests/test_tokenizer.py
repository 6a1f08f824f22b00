import json
import random
from unittest.mock import Mock

import chess
import pytest
from transformers import AutoTokenizer

from nanorook.tokenizer import Tokenizer
from rollout import detokenize

ODD_TEXTS = ["", "\n\n  \t x", "it's é — 中文 🙂 1234567", "A: e2e4+0.001+0+0\r\n", "a9h0ha1b2\0"]


@pytest.mark.parametrize("names", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_same_ids_as_transformers(bpe_folder, chess_lines, tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(bpe_folder)
    for text in (*chess_lines, *ODD_TEXTS):
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids and detokenize(tokenizer, ids)[0] == text
    assert tokenizer.eos == reference.eos_token_id and set(tokenizer.files) == set(names)


@pytest.mark.parametrize("pairs", [(), chess.SQUARE_NAMES])
def test_files_written_for_a_tokenizer_give_the_same_ids(chess_lines, tmp_path, pairs):
    original = Tokenizer.of_bytes(pairs)
    for name, content in original.files.items():
        (tmp_path / name).write_bytes(content)
    reference, loaded, rng = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path), random.Random(1)
    texts = [*chess_lines[:50], *ODD_TEXTS, "M: e2e4 g8f6 E: 0.3", "é e2 中 a1 🙂"]
    texts += ["".join(rng.choices("aceh188. 9i+\né", k=rng.randrange(40))) for _ in range(500)]
    for text in texts:
        ids = original.encode(text)
        assert reference(text).input_ids == ids == loaded.encode(text)
        for said in (ids, [*ids, loaded.eos], [*ids, loaded.eos, 65]):  # what follows the end token is no text
            found, ends = detokenize(loaded, said)  # and where each token ends in it
            assert found == text and ends == sorted(ends) and (ends[-1] if ends else 0) == len(text)
        assert not text.isascii() or ends == [len(detokenize(loaded, ids[: i + 1])[0]) for i in range(len(ids))]
    assert reference.eos_token_id == original.eos == loaded.eos and loaded.vocab_size == original.vocab_size
    assert loaded.files == original.files


def test_bytes_and_squares_are_tokens():
    tokenizer, text = Tokenizer.of_bytes(), "P: é\n\0 中"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos == 256 and tokenizer.vocab_size == 257
    assert detokenize(tokenizer, [*text.encode(), 256, 65])[0] == text  # nothing after the end token
    assert detokenize(tokenizer, [65, 0xC3, 300, 66]) == ("A\ufffd\ufffdB", [1, 2, 3, 4])  # bytes that are no text
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")  # a text cannot contain the end token
    tokenizer = Tokenizer.of_bytes(chess.SQUARE_NAMES)
    assert tokenizer.eos == 320 and tokenizer.vocab_size == 321
    assert tokenizer.encode("".join(chess.SQUARE_NAMES)) == list(range(256, 320))  # in python-chess's order
    assert tokenizer.encode("B: a7a8qb1a") == [*b"B: ", 256 + chess.A7, 256 + chess.A8, *b"q", 256 + chess.B1, *b"a"]


BAD = {
    "of another kind": lambda c: c["model"].update(type="WordPiece"),
    "would change every prompt": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "order of the merges": lambda c: c["model"]["merges"].append(c["model"]["merges"].pop(0)),
    "KeyError: 'Δ": lambda c: c["model"]["merges"].append(["a", "\u0394"]),
    "KeyError: '<": lambda c: (c["model"]["vocab"].pop("<|endoftext|>"), c.update(added_tokens=[])),
    "an id of its own": lambda c: c["model"]["vocab"].update({"a": 1, "b": 1}),
    "TypeError": lambda c: c["model"].update(merges=3),
}


@pytest.mark.parametrize("reason", BAD)
def test_wrong_files_are_refused_in_one_sentence(bpe_folder, tmp_path, monkeypatch, reason):
    monkeypatch.setattr("tiktoken.get_encoding", Mock(side_effect=ConnectionError("no route to host")))
    with pytest.raises(SystemExit, match="no tokenizer files.*no route to host"):
        Tokenizer.load(tmp_path)
    content = json.loads((bpe_folder / "tokenizer.json").read_text())
    BAD[reason](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=f"{tmp_path}: expected a byte-level BPE as GPT-2's, with .*; .*{reason}"):
        Tokenizer.load(tmp_path)
