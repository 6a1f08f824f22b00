import json
import random
import shutil

import chess
import pytest
import torch
from transformers import AutoTokenizer

import toy
from nanorook.task import prompt_ids
from nanorook.tokenizer import Special, Tokenizer
from rollout import detokenize, sample

PUBLISHED = toy.ROOT / "tests/published"
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ODD_TEXTS = ["", "\n\n  \t x", "it's é — 中文 🙂 1234567", "A: e2e4+0.001+0+0\r\n", "a9h0ha1b2\0"]
SCRIPTS = """Hello, it's 2026! Größe, naïve | Привет, мир — как дела? | Γειά σου κόσμε | שלום עולם | مرحبا بالعالم ١٢٣ |
नमस्ते दुनिया क्षत्रिय | สวัสดีชาวโลก | 你好，世界！一二三 | こんにちは世界 ｶﾞ | 안녕하세요 각 | Xin chào thế giới |
தமிழ் తెలుగు | ქართული հայերեն አማርኛ | བོད་ཡིག ខ្មែរ | 👩\u200d👩\u200d👧🏽🇩🇪 | e\u0301 A\u030a \u212b ñ | ½ Ⅷ² ① 12345   678|
don'T 'S 'RE a'll |  x  ==  1.0e-3\r\n\r\n\t\t7  \n 8 \u00a0\u2003 9"""


@pytest.mark.parametrize("names", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_same_ids_as_transformers(bpe_folder, chess_lines, tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(bpe_folder)
    for text in (*chess_lines, *ODD_TEXTS):
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids and detokenize(tokenizer, ids)[0] == text
    assert tokenizer.eos == reference.eos_token_id and set(tokenizer.files) == set(names)


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_same_ids_as_transformers_in_many_scripts(name):
    tokenizer, reference = Tokenizer.load(PUBLISHED / name), AutoTokenizer.from_pretrained(PUBLISHED / name)
    for text in (SCRIPTS, SCRIPTS[::-1], *SCRIPTS.split("|"), *ODD_TEXTS):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("pairs", [(), chess.SQUARE_NAMES])
def test_files_written_for_a_tokenizer_give_the_same_ids(chess_lines, tmp_path, pairs):
    original = Tokenizer.of_bytes(pairs)
    for name, content in original.files.items():
        (tmp_path / name).write_bytes(content)
    reference, loaded, rng = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path), random.Random(1)
    texts = [*chess_lines[:20], *ODD_TEXTS, "M: e2e4 g8f6 E: 0.3", "é e2 中 a1 🙂"]
    texts += ["".join(rng.choices("aceh188. 9i+\né", k=rng.randrange(40))) for _ in range(100)]
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
    assert detokenize(tokenizer, [65, 0xC3, 300, 66]) == ("A\ufffd\ufffdB", [1, 2, 3, 4])  # bytes that are no text
    tokenizer = Tokenizer.of_bytes(chess.SQUARE_NAMES)
    assert tokenizer.eos == 320 and tokenizer.vocab_size == 321
    assert tokenizer.encode("".join(chess.SQUARE_NAMES)) == list(range(256, 320))  # in python-chess's order
    assert tokenizer.encode("B: a7a8qb1a") == [*b"B: ", 256 + chess.A7, 256 + chess.A8, *b"q", 256 + chess.B1, *b"a"]


def test_no_text_becomes_a_special_token_and_a_byte_without_a_token_is_left_out():
    assert Tokenizer.of_bytes().encode("<|endoftext|>") == list(b"<|endoftext|>")
    tokenizer = Tokenizer.load(PUBLISHED / "smollm2")
    ids = tokenizer.encode("a<|im_end|>\x04b")
    assert not {*ids} & {*tokenizer.special.values()} and detokenize(tokenizer, ids)[0] == "a<|im_end|>b"
    assert tokenizer.token_bytes[tokenizer.special_id("<|im_start|>")] == b"<|im_start|>"
    with pytest.raises(SystemExit, match="the model's tokenizer has no token <think>"):
        tokenizer.special_id("<think>")


def folder_with(tmp_path, **changes):
    """SmolLM2's tokenizer.json with these entries."""
    content = json.loads((PUBLISHED / "smollm2/tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)


def template(*names):
    """A post_processor that writes special tokens around a text, "A", such as Llama 3's."""
    written = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in names]
    tokens = {name: {"id": name, "ids": [SPECIAL.index(name)], "tokens": [name]} for name in names if name != "A"}
    pair = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {"type": "TemplateProcessing", "single": written, "pair": pair, "special_tokens": tokens}


SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BEGINNINGS = {  # a post_processor, what it puts before a text, and what after it
    "none": (None, [], []),
    "ByteLevel": (LEVEL, [], []),
    "two tokens": (template(SPECIAL[0], SPECIAL[1], "A"), [0, 1], []),
    "Llama 3": ({"type": "Sequence", "processors": [LEVEL, template(SPECIAL[0], "A")]}, [0], []),
    "an end": (template(SPECIAL[1], "A", SPECIAL[2]), [1], [2]),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_plain_prompt_begins_as_in_transformers_and_a_chat_as_its_template_says(name, tmp_path):
    """A prompt has no end, whatever the tokenizer puts there: an answer follows."""
    processor, before, after = BEGINNINGS[name]
    tokenizer, reference = folder_with(tmp_path, post_processor=processor)
    for text in ("", "What is 2 + 3?", " <x> \n"):
        ids = tokenizer.encode(text)
        assert [*prompt_ids(text, tokenizer), *after] == [*before, *ids, *after] == reference(text).input_ids
        chat = reference(SPECIAL[1] + text, add_special_tokens=False).input_ids
        assert prompt_ids((Special(SPECIAL[1]), text), tokenizer) == [1, *ids] == chat
        assert prompt_ids((text,), tokenizer) == ids  # of a template without special tokens


@pytest.mark.parametrize("sides", [(False, False), (True, False), (False, True), (True, True)])
def test_a_special_token_takes_the_white_space_next_to_it_if_its_folder_says_so(sides, tmp_path):
    first, token, other, *rest = json.loads((PUBLISHED / "smollm2/tokenizer.json").read_text())["added_tokens"]
    stripping = token | {"lstrip": sides[0], "rstrip": sides[1]}
    tokenizer, reference = folder_with(tmp_path, added_tokens=[first, stripping, other, *rest])
    name, end = Special(token["content"]), Special(other["content"])
    for prompt in (
        (name, "\n user \u00a0\u3000", name, " ", name, "\x1c  \t", end, " x\n", name),
        (" a ", end, "  \n b", name, end, "\r\n", name, "c "),
    ):
        assert prompt_ids(prompt, tokenizer) == reference("".join(prompt), add_special_tokens=False).input_ids


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
    assert [tokenizer.token_bytes[end].decode() for end in tokenizer.ends] == ends
    assert tokenizer.eos == tokenizer.ends[0]
    assert "generation_config.json" in tokenizer.files  # it is saved with the model


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


BAD = {
    "TypeError|AttributeError": lambda c: c["model"].update(type="Unigram", vocab=[["a", 0.0]]),
    "KeyError: '▁'": lambda c: c["model"]["vocab"].update({"▁": 999}),  # as Llama 2's
    "the tokens of .* are not its bytes": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "Exception": lambda c: c["model"]["merges"].append(["a", "\u0394"]),
    "no eos_token_id is given, and there is no token <": lambda c: (
        c["model"]["vocab"].pop("<|endoftext|>"),
        c.update(added_tokens=[]),
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_wrong_files_are_refused_in_one_sentence(bpe_folder, tmp_path, reason):
    content = json.loads((bpe_folder / "tokenizer.json").read_text())
    BAD[reason](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused = f"{tmp_path}: expected a byte-level BPE such as GPT-2's or Qwen's; .*"
    with pytest.raises(SystemExit, match=f"{refused}({reason})") as end:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(end.value)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 77777]}')
    shutil.copyfile(bpe_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(SystemExit, match=refused + r"eos_token_id is \(0, 77777\), but not all of these"):
        Tokenizer.load(tmp_path)


def test_only_a_gpt2_may_lack_a_tokenizer_which_is_then_gpt2s(tmp_path, gpt2_folder, monkeypatch):
    asked_for = []
    monkeypatch.setattr("nanorook.tokenizer.fetch", lambda source, _: asked_for.append(source) or gpt2_folder)
    assert Tokenizer.load(tmp_path).vocab_size == 50257 and asked_for == ["openai-community/gpt2"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SystemExit, match="ValueError: there is neither a tokenizer.json nor a vocab.json"):
        Tokenizer.load(tmp_path)
