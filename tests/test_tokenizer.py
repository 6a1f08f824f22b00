"""nanorook/tokenizer.py against transformers: the same ids from the same files."""

import json
import random
import time

import chess
import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Tokenizer

from nanorook.positions import expand_board
from nanorook.tokenizer import LoadError, Tokenizer

ODD_TEXTS = ["", " ", "\n\n  \t x", "it's é — 中文 🙂 1234567", "A: e2e4+0.001+0+0\r\n", "a9h0ha1b2\0"]


def chess_lines(count):
    """Lines in RookWorld's padded format from random games, with evaluations and mates."""
    rng, lines, board = random.Random(0), [], chess.Board()
    while len(lines) < count:
        legal = list(board.legal_moves)
        if not legal or len(board.move_stack) > 120:
            board = chess.Board()
            continue
        moves, scores = [m.uci() for m in legal[:5]], (30, -282, 0, 99999, -99996, rng.randrange(-900, 900))
        evals = " ".join(str(rng.choice(scores) / 100) for _ in moves)
        lines.append(f"P: {board.fen():90}M: {' '.join(moves):30}E: {evals:40}B: {moves[0]}")
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


def copy(folder, tmp_path, *names):
    for name in names:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("names", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_same_ids_as_transformers(bpe_folder, tmp_path, names):
    tokenizer, reference = Tokenizer.load(copy(bpe_folder, tmp_path, *names)), AutoTokenizer.from_pretrained(bpe_folder)
    texts = [*chess_lines(1000), *ODD_TEXTS]
    assert len(set(map(len, map(tokenizer.encode, texts)))) > 20
    for text in texts:
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos == reference.eos_token_id
    assert set(tokenizer.files) == set(names)


@pytest.mark.parametrize("kind", ["trained", "of_bytes", "squares"])
def test_files_written_for_a_tokenizer_give_the_same_ids(bpe_folder, tmp_path, kind):
    if kind == "trained":
        original = Tokenizer.load(bpe_folder)
        files = Tokenizer(original.bpe._mergeable_ranks, original.eos).files
    else:
        original = getattr(Tokenizer, kind)()
        files = original.files
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    reference, loaded, rng = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path), random.Random(1)
    texts = [*chess_lines(100), *map(expand_board, chess_lines(100)), *ODD_TEXTS]
    texts += ["".join(rng.choices("aceh188. 9i+\né", k=rng.randrange(40))) for _ in range(500)]
    for text in texts:
        ids = original.encode(text)
        assert reference(text).input_ids == ids == loaded.encode(text)
        assert loaded.decode(ids) == text
    assert reference.eos_token_id == original.eos == loaded.eos and loaded.vocab_size == original.vocab_size
    assert loaded.files == files


def test_bytes_are_tokens():
    tokenizer = Tokenizer.of_bytes()
    text = "P: é\n\0 中"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.eos == 256 and tokenizer.vocab_size == 257
    assert tokenizer.decode([*text.encode(), 256, 65]) == text  # nothing after the end token
    assert tokenizer.decode([0xFF, 65]) == tokenizer.decode([299, 65]) == "\ufffdA"
    assert tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")  # a text cannot contain the end token


def test_squares_are_tokens():
    tokenizer = Tokenizer.squares()
    assert tokenizer.eos == 320 and tokenizer.vocab_size == 321
    assert tokenizer.encode("".join(chess.SQUARE_NAMES)) == list(range(256, 320))  # in python-chess's order
    assert tokenizer.encode("B: a7a8q") == [*b"B: ", 256 + chess.A7, 256 + chess.A8, ord("q")]
    assert tokenizer.encode("ab1") == [ord("a"), 256 + chess.B1]


def test_texts_that_are_not_split_are_encoded_fast():
    """Their pattern gives tiktoken the whole text as one piece."""
    start = time.process_time()
    Tokenizer.squares().encode("a1 " * 100_000)
    assert time.process_time() - start < 2


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
    "a list": lambda f: (f / "tokenizer.json").write_text("[1]"),
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
    folder = copy(bpe_folder, tmp_path, "tokenizer.json")
    BAD[name](folder)
    with pytest.raises(LoadError) as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_without_files_and_without_network_the_reason_is_given(tmp_path, monkeypatch):
    def offline(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(LoadError, match="no tokenizer files.*no route to host"):
        Tokenizer.load(tmp_path)
