"""tokenizer.py against transformers: token for token, from the same files."""

import json
import random

import chess
import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Tokenizer

from tasks import policy_completion, policy_prompt
from tokenizer import LoadError, Tokenizer


def chess_lines(count):
    """Lines of RookWorld's padded format from random games, with evaluations and mates."""
    rng, lines, board = random.Random(0), [], chess.Board()
    while len(lines) < count:
        legal = list(board.legal_moves)
        if not legal or len(board.move_stack) > 120:
            board = chess.Board()
            continue
        moves = [(m.uci(), rng.choice([30, -282, 0, 99999, -99996, rng.randrange(-900, 900)])) for m in legal[:5]]
        fen = board.fen()
        lines.append(policy_prompt(fen, "rookworld") + policy_completion(fen, moves, "rookworld"))
        board.push(rng.choice(legal))
    return lines


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(chess_lines(300), vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def only(folder, tmp_path, *names):
    for name in names:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("names", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_token_for_token_as_transformers(bpe_folder, tmp_path, names):
    tokenizer, reference = Tokenizer.load(only(bpe_folder, tmp_path, *names)), AutoTokenizer.from_pretrained(bpe_folder)
    texts = [*chess_lines(1000), "", " ", "\n\n  \t x", "it's é — 中文 🙂 1234567", "A: e2e4+0.001+0+0\r\n"]
    assert len(set(map(len, map(tokenizer.encode, texts)))) > 20
    for text in texts:
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos == reference.eos_token_id
    assert set(tokenizer.files) == set(names)


def test_bytes_are_tokens(tmp_path):
    tokenizer = Tokenizer.of_bytes()
    text = "P: é\n\0 中"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos == 256 and tokenizer.vocab_size == 257
    assert tokenizer.decode([*text.encode(), 256, 65]) == text  # nothing after the end token
    assert tokenizer.decode([0xFF, 65]) == tokenizer.decode([299, 65]) == "\ufffdA"
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")  # text cannot forge the end


def test_files_made_for_a_tokenizer_without_files_give_the_same_tokens(bpe_folder, tmp_path):
    original = Tokenizer.load(bpe_folder)
    made = Tokenizer(original.bpe._mergeable_ranks, original.eos).files
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for line in chess_lines(100):
        assert reference(line).input_ids == original.encode(line) == Tokenizer.load(tmp_path).encode(line)
    assert reference.eos_token_id == original.eos


def edited(change):
    def write(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return write


def swap_merges(content):
    content["model"]["merges"][:2] = reversed(content["model"]["merges"][:2])


BAD = {
    "no JSON": lambda f: (f / "tokenizer.json").write_text("{"),
    "binary": lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe\0"),
    "empty": lambda f: (f / "tokenizer.json").write_bytes(b""),
    "other kind": edited(lambda c: c["model"].update(type="WordPiece")),
    "no model": edited(lambda c: c.pop("model")),
    "vocab a list": edited(lambda c: c["model"].update(vocab=[1, 2])),
    "merges a number": edited(lambda c: c["model"].update(merges=3)),
    "a merge of three": edited(lambda c: c["model"]["merges"].append(["a", "b", "c"])),
    "a merge without id": edited(lambda c: c["model"]["merges"].append(["a", "\u0394"])),
    "a byte missing": edited(lambda c: c["model"]["vocab"].pop("a")),
    "no end token": edited(lambda c: (c["model"]["vocab"].pop("<|endoftext|>"), c.update(added_tokens=[]))),
    "an id that is text": edited(lambda c: c["model"]["vocab"].update(a="7")),
    "two tokens with one id": edited(lambda c: c["model"]["vocab"].update(a=c["model"]["vocab"]["b"])),
    "merges out of order": edited(swap_merges),
    "prefix space": edited(lambda c: c["pre_tokenizer"].update(add_prefix_space=True)),
    "a normalizer": edited(lambda c: c.update(normalizer={"type": "NFC"})),
    "no merges.txt": lambda f: ((f / "tokenizer.json").unlink(), (f / "vocab.json").write_text("{}")),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_files_are_refused_in_one_sentence(bpe_folder, tmp_path, name):
    folder = only(bpe_folder, tmp_path, "tokenizer.json")
    BAD[name](folder)
    with pytest.raises(LoadError) as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_without_files_and_without_network_the_reason_is_said(tmp_path, monkeypatch):
    def offline(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(LoadError, match="no tokenizer files.*no route to host"):
        Tokenizer.load(tmp_path)
