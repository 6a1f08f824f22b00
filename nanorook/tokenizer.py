"""Byte-level BPE, as in GPT-2, Llama 3 and Qwen: the tokenizer of a Hugging Face folder, run by their own library."""

import json
from pathlib import Path

import tokenizers

from nanorook.folder import TOKENIZER_FILES, fetch
from nanorook.settings import fail

END = "<|endoftext|>"
# All white space of Unicode up to U+3000. Python also counts four separators of files and records.
WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")
SAMPLE = "Hello, it's 2026!\n"  # a text that any byte-level BPE keeps as it is


class Special(str):
    """A special token, by its name. Any other string is text, even if it contains such a name."""


def byte_names():
    """GPT-2's printable character for each byte: its own if visible, otherwise the next free one above 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


class Tokenizer:
    """Text to token ids and back. Encoding a text never produces a special token."""

    def __init__(self, files, config=b"{}"):
        """`files` (name -> bytes) are the TOKENIZER_FILES of a model's folder; they are saved with the model unchanged.
        `config` is its config.json."""
        self.files = files
        if "tokenizer.json" in files:
            content = json.loads(files["tokenizer.json"])
        else:
            content = older_format(files["vocab.json"], files["merges.txt"])
        vocab, added = content["model"]["vocab"], content.get("added_tokens") or []

        # Special tokens by name, and those of them that take the white space next to them in a prompt
        self.special = {END: vocab[END]} if END in vocab else {}
        self.special |= {token["content"]: token["id"] for token in added}
        self.lstrip = {token["content"] for token in added if token.get("lstrip")}
        self.rstrip = {token["content"] for token in added if token.get("rstrip")}

        byte = {name: b for b, name in byte_names().items()}
        self.token_bytes = {i: name.encode() for name, i in self.special.items()}
        for name, i in vocab.items():
            if name not in self.special:
                self.token_bytes[i] = bytes(byte[c] for c in name)
        self.vocab_size = max(self.token_bytes) + 1

        # Without added tokens the library reads their names in a text as text.
        self.bpe = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        if b"".join(self.token_bytes[i] for i in self.encode(SAMPLE)) != SAMPLE.encode():
            raise ValueError(f"the tokens of {SAMPLE!r} are not its bytes")

        # The ids that come before a prompt of plain text. What comes after a text is left out: an answer follows there.
        encoding = self.bpe.encode("a")
        self.beginning = encoding.ids[: encoding.special_tokens_mask.index(0)]
        self.ends = find_ends(files, config, self.special)  # the ids that end an answer
        if not self.ends or any(type(end) is not int or end not in self.token_bytes for end in self.ends):
            raise ValueError(f"eos_token_id is {self.ends}, but not all of these are ids of its tokens")

    @property
    def eos(self):
        """The id that ends a training text and serves as padding."""
        return self.ends[0]

    def encode(self, text):
        return self.bpe.encode(text, add_special_tokens=False).ids

    def special_id(self, name):
        return self.special[name] if name in self.special else fail(f"the model's tokenizer has no token {name}.")

    @classmethod
    def load(cls, folder):
        """From tokenizer.json, or from vocab.json and merges.txt; a GPT-2 without either gets GPT-2's own."""
        folder = Path(folder)
        if not folder.is_dir():
            fail(f"{folder}: there is no such folder.")
        try:
            files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
            config = (folder / "config.json").read_bytes() if (folder / "config.json").exists() else b"{}"
            if {"tokenizer.json", "vocab.json"} & files.keys():
                return cls(files, config)
            if json.loads(config).get("model_type", "gpt2") not in ("gpt2", "nanorook"):
                raise ValueError("there is neither a tokenizer.json nor a vocab.json")
        except Exception as error:  # a damaged file may fail anywhere
            fail(f"{folder}: expected a byte-level BPE such as GPT-2's or Qwen's; {type(error).__name__}: {error}")
        return cls.gpt2()

    @classmethod
    def of_bytes(cls, pairs=()):
        """A token for each byte (0 to 255), one for each of `pairs` of bytes, and last the one that ends a text."""
        return cls.of_tokens([bytes([b]) for b in range(256)] + [pair.encode() for pair in pairs], words=False)

    @classmethod
    def of_tokens(cls, tokens, words):
        """`tokens` are bytes, in the order in which they are merged; one more ends a text. `words`: a text is first
        split into words, as in GPT-2, so that no token spans two of them (Radford et al., 2019)."""
        return cls(tokenizer_files({token: i for i, token in enumerate(tokens)}, words))

    @classmethod
    def gpt2(cls):
        return cls.load(fetch("openai-community/gpt2", TOKENIZER_FILES))


def older_format(vocab, merges):
    """What tokenizer.json says of a GPT-2, from the two files that came before it."""
    lines = [line for line in merges.decode().splitlines() if line and not line.startswith("#version")]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"model": {"type": "BPE", "vocab": json.loads(vocab), "merges": lines}, "pre_tokenizer": level}


def find_ends(files, config, special):
    """The ids that end an answer, from the first of the folder's files that names them."""
    for content in (files.get("generation_config.json", b"{}"), config):
        ids = json.loads(content).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    name = token_name(json.loads(files.get("tokenizer_config.json", b"{}")).get("eos_token") or END)
    if name not in special:
        raise ValueError(f"no eos_token_id is given, and there is no token {name}")
    return (special[name],)


def token_name(token):
    """The name of a token in tokenizer_config.json, which may be written with its properties."""
    name = token["content"] if isinstance(token, dict) else token
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.60} in tokenizer_config.json is not the name of a token")
    return name


def tokenizer_files(ranks, words):
    """tokenizer.json and tokenizer_config.json of a tokenizer that came without files. `ranks` maps each token's bytes
    to its id; lower ids merge first."""
    names, merges, eos = byte_names(), [], len(ranks)
    vocab = {"".join(names[b] for b in token): i for token, i in ranks.items()}
    for token in ranks:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # a token's merge joins the two parts that remain when all earlier merges are done
            pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append(["".join(names[b] for b in part) for part in parts])
    end = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    end |= {"id": eos, "content": END, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    content = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level}
    content["model"] = {"type": "BPE", "vocab": {**vocab, END: eos}, "merges": merges}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {name: END for name in ("bos_token", "eos_token", "unk_token")}
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False, indent=1).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }
