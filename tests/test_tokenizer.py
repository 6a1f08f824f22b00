import json
import random
import shutil
import unicodedata
from unittest.mock import Mock

import chess
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import toy
from nanorook.task import prompt_ids
from nanorook.tokenizer import Special, Tokenizer
from rollout import detokenize, sample

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


PUBLISHED = toy.ROOT / "tests/published"
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SCRIPTS = """Hello, it's 2026! Größe, naïve | Привет, мир — как дела? | Γειά σου κόσμε | שלום עולם | مرحبا بالعالم ١٢٣ |
नमस्ते दुनिया क्षत्रिय | สวัสดีชาวโลก | 你好，世界！一二三 | こんにちは世界 ｶﾞ | 안녕하세요 각 | Xin chào thế giới |
தமிழ் తెలుగు | ქართული հայերեն አማርኛ | བོད་ཡིག ខ្មែរ | 👩\u200d👩\u200d👧🏽🇩🇪 | e\u0301 A\u030a \u212b ñ | ½ Ⅷ² ① 12345   678|
don'T 'S 'RE a'll |  x  ==  1.0e-3\r\n\r\n\t\t7  \n 8 \u00a0\u2003 9"""


def published(name, folder):
    """The files of a kind of tokenizer, with few merges."""
    shutil.copytree(PUBLISHED / ("smollm2" if name == "smollm2" else "qwen3"), folder, dirs_exist_ok=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    if name == "llama3":
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": LLAMA3}
        content["model"]["ignore_merges"], content["normalizer"] = True, None
    if name == "gpt2":
        content |= {"pre_tokenizer": LEVEL, "normalizer": None}
        del content["model"]["type"]  # as in the file that GPT-2 is published with
    if name == "two splits":
        spaces = {"type": "Split", "pattern": {"Regex": r"\s+|e(?=\p{L})"}, "behavior": "Isolated", "invert": False}
        parts = [spaces, {"type": "Digits", "individual_digits": False}, LEVEL]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


# Of Unicode 3.2: each of the three libraries has its own, newer table, which decides on what a letter is. SmolLM2's
# vocabulary lacks some control characters, without which `tokenizers` merges what stands on both sides of them.
KNOWN = st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters="\x04\x06\x13\x14\x16\x1d").filter(
    lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn"
)
TEXTS = st.text(KNOWN) | st.text(st.sampled_from("ab 'sStTlL01\n\r\t.!é中\u0301🙂"), max_size=60)


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3", "smollm2", "two splits"])
def test_same_ids_as_the_tokenizers_library(name, examples, tmp_path):
    tokenizer, reference = published(name, tmp_path)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def same(text):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert detokenize(tokenizer, ids)[0] == (unicodedata.normalize("NFC", text) if tokenizer.normal_form else text)

    same()
    for text in (SCRIPTS, SCRIPTS[::-1], *SCRIPTS.split("|"), *ODD_TEXTS):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.vocab_size == reference.get_vocab_size()


def test_no_text_becomes_a_special_token_and_a_byte_without_a_token_is_left_out(tmp_path):
    tokenizer, _ = published("smollm2", tmp_path)
    ids = tokenizer.encode("a<|im_end|>\x04b")
    assert not {*ids} & {*tokenizer.special.values()} and detokenize(tokenizer, ids)[0] == "a<|im_end|>b"
    assert tokenizer.token_bytes[tokenizer.special_id("<|im_start|>")] == b"<|im_start|>"
    with pytest.raises(SystemExit, match="the model's tokenizer has no token <think>"):
        tokenizer.special_id("<think>")


def template(*names):
    """A post_processor that writes special tokens around a text, "A", such as Llama 3's."""
    written = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in names]
    tokens = {name: {"id": name, "ids": [SPECIAL.index(name)], "tokens": [name]} for name in names if name != "A"}
    pair = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {"type": "TemplateProcessing", "single": written, "pair": pair, "special_tokens": tokens}


SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROBERTA = {"type": "RobertaProcessing", "cls": [SPECIAL[1], 1], "sep": [SPECIAL[2], 2]}
BEGINNINGS = {  # a post_processor, what it puts before a text, and what after it
    "none": (None, [], []),
    "ByteLevel": (LEVEL, [], []),
    "an empty template": (template("A"), [], []),
    "a template": (template(SPECIAL[1], "A"), [1], []),
    "two tokens": (template(SPECIAL[0], SPECIAL[1], "A"), [0, 1], []),
    "Llama 3": ({"type": "Sequence", "processors": [LEVEL, template(SPECIAL[0], "A")]}, [0], []),
    "an end": (template(SPECIAL[1], "A", SPECIAL[2]), [1], [2]),
    "RoBERTa": (ROBERTA | {"trim_offsets": True, "add_prefix_space": False}, [1], [2]),
    "BERT": (ROBERTA | {"type": "BertProcessing"}, [1], [2]),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_plain_prompt_begins_as_in_transformers_and_a_chat_as_its_template_says(name, tmp_path):
    """A prompt has no end, whatever the tokenizer puts there: an answer follows."""
    processor, before, after = BEGINNINGS[name]
    content = json.loads((PUBLISHED / "smollm2/tokenizer.json").read_text()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "What is 2 + 3?", " <x> \n"):
        ids = tokenizer.encode(text)
        assert [*prompt_ids(text, tokenizer), *after] == [*before, *ids, *after] == reference(text).input_ids
        chat = reference(SPECIAL[1] + text, add_special_tokens=False).input_ids
        assert prompt_ids((Special(SPECIAL[1]), text), tokenizer) == [1, *ids] == chat
        assert prompt_ids((text,), tokenizer) == ids  # of a template without special tokens


def test_a_post_processor_that_is_not_known_is_refused(tmp_path):
    content = json.loads((PUBLISHED / "smollm2/tokenizer.json").read_text())
    for processor, reason in (
        ({"type": "Other"}, "its post_processor .*Other.* is not supported"),
        ({"type": "Sequence", "processors": [template("A"), template("A")]}, "is not supported"),
        (template("A") | {"single": []}, "ValueError"),
        (ROBERTA | {"cls": ["<s>", 77777]}, r"adds \(77777,\), but not all of these are ids"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": processor}))
        with pytest.raises(SystemExit, match=reason):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("added", [True, False])
def test_gpt2s_older_files_name_a_beginning_in_tokenizer_config(bpe_folder, tmp_path, added):
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(bpe_folder / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": added}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (
        prompt_ids("a b", tokenizer)
        == reference("a b").input_ids
        == [*[tokenizer.eos] * added, *tokenizer.encode("a b")]
    )


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
def test_a_special_token_that_takes_white_space_is_refused(where, side, tmp_path):
    shutil.copytree(PUBLISHED / "smollm2", tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / where).read_text())
    if where == "tokenizer.json":
        content["added_tokens"][1][side] = True
    else:
        content["added_tokens_decoder"] = {"1": {"content": "<|im_start|>", side: True}}
    (tmp_path / where).write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="takes the white space next to it, which is not supported"):
        Tokenizer.load(tmp_path)


ENDS = {  # the files that say what ends an answer, and what does
    "nothing does": ({}, {}, ["<|endoftext|>"]),
    "tokenizer_config.json": ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, {}, ["<|im_end|>"]),
    "config.json": ({"config.json": {"eos_token_id": 1}}, {}, ["<|im_start|>"]),
    "generation_config.json": (
        {"config.json": {"eos_token_id": 1}},
        {"eos_token_id": [2, 0]},
        ["<|im_end|>", "<|endoftext|>"],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_an_answer_is_what_the_folder_says(name, tmp_path):
    files, generation, ends = ENDS[name]
    shutil.copyfile(PUBLISHED / "smollm2/tokenizer.json", tmp_path / "tokenizer.json")
    for file, content in (files | {"generation_config.json": generation}).items():
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes[end].decode() for end in tokenizer.ends] == ends and tokenizer.eos == tokenizer.ends[
        0
    ]
    assert "generation_config.json" in tokenizer.files  # it is saved with the model
    for end in tokenizer.ends:
        assert detokenize(tokenizer, [*tokenizer.encode("so"), end, 20]) == (
            "so",
            detokenize(tokenizer, tokenizer.encode("so"))[1],
        )


def test_an_answer_ends_with_any_of_the_end_tokens():
    policy, (asked, *_) = toy.model(), toy.questions()
    noise = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(0))
    [free] = sample(policy, [asked], 16, {asked.kind: 16}, noise=noise)
    rows = [row[mask].tolist() for row, mask in zip(free.completions, free.completion_mask)]
    other = max(rows, key=len)[-3]  # the longest answer is to end two tokens earlier
    policy = toy.model()  # whose end tokens nobody has asked for yet
    policy.tokenizer.ends = (256, other)
    [rollout] = sample(policy, [asked], 16, {asked.kind: 16}, noise=noise)
    for row, new, mask, answer in zip(rows, rollout.completions, rollout.completion_mask, rollout.answers):
        expected = row[: row.index(other) + 1] if other in row else row
        assert new[mask].tolist() == expected and answer.hit_limit == (expected[-1] not in (256, other))
        assert len(answer.char_ends) == len(expected) - (not answer.hit_limit)


@pytest.mark.parametrize("made_from", ["SmolLM2 135M", "Starling"])
def test_a_lost_split_of_digits_is_put_back_or_refused(made_from, tmp_path):
    """Only a large vocabulary shows that its texts were split there, so this one gets thousands of pairs of bytes."""
    shutil.copytree(PUBLISHED / "smollm2", tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab, letters = (
        content["model"]["vocab"],
        [chr(c) for c in (*range(65, 91), *range(97, 123), *range(0x120, 0x140))],
    )
    for pair in (f"{a} {b}" for a in letters for b in letters):
        content["model"]["merges"] += [pair] * (pair.replace(" ", "") not in vocab)
        vocab.setdefault(pair.replace(" ", ""), len(vocab))
    reference = tokenizers.Tokenizer.from_str(json.dumps(content))
    content["pre_tokenizer"] = content["pre_tokenizer"]["pretokenizers"][1]  # as conversions from GGUF do
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"_model_name_or_path": made_from}))
    if made_from == "Starling":
        with pytest.raises(SystemExit, match="nothing splits digits, but no token joins them; use the original"):
            Tokenizer.load(tmp_path)
        return
    tokenizer, text = Tokenizer.load(tmp_path), "x =  12\n\n3"
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert (
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids != reference.encode(text).ids
    )
    assert tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode()).encode(
        text
    ).ids == tokenizer.encode(text)


BAD = {
    "Unigram with the normalizer None is not supported": lambda c: c["model"].update(type="Unigram"),
    "BPE with the normalizer Prepend is not": lambda c: c.update(normalizer={"type": "Prepend", "prepend": "▁"}),
    "its pre_tokenizer ends with null, not": lambda c: c.update(pre_tokenizer=None),  # as Llama 2's
    "ends with .*Metaspace": lambda c: c.update(pre_tokenizer={"type": "Metaspace", "replacement": "▁"}),
    "pre_tokenizer .*Punctuation.* is not supported": lambda c: c.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, LEVEL]}
    ),
    "not with a ByteLevel without prefix": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "order of the merges": lambda c: c["model"]["merges"].append(c["model"]["merges"].pop(0)),
    "KeyError: 'Δ": lambda c: c["model"]["merges"].append(["a", "\u0394"]),
    "no eos_token_id is given, and there is no token <": lambda c: (
        c["model"]["vocab"].pop("<|endoftext|>"),
        c.update(added_tokens=[]),
    ),
    "an id of its own": lambda c: c["model"]["vocab"].update({"a": 1, "b": 1}),
    "TypeError": lambda c: c["model"].update(merges=3),
}


@pytest.mark.parametrize("reason", BAD)
def test_wrong_files_are_refused_in_one_sentence(bpe_folder, tmp_path, monkeypatch, reason):
    monkeypatch.setattr("tiktoken.get_encoding", Mock(side_effect=ConnectionError("no route to host")))
    with pytest.raises(SystemExit, match="no tokenizer files.*no route to host"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # GPT-2's would be wrong for it
    with pytest.raises(SystemExit, match="ValueError: there is neither a tokenizer.json nor a vocab.json"):
        Tokenizer.load(tmp_path)
    content = json.loads((bpe_folder / "tokenizer.json").read_text())
    BAD[reason](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused = f"{tmp_path}: expected a byte-level BPE such as GPT-2's or Qwen's; .*"
    with pytest.raises(SystemExit, match=refused + reason) as end:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(end.value)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 77777]}')
    shutil.copyfile(bpe_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(SystemExit, match=refused + r"eos_token_id is \(0, 77777\), but not all of these"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(SystemExit, match=refused + "IsADirectoryError"):
        Tokenizer.load(tmp_path)
