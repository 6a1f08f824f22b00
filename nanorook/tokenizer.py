"""Byte-level BPE for GPT-2's family: the tokenizer files of a Hugging Face folder, run by tiktoken."""

import json
from pathlib import Path

import tiktoken

from nanorook.settings import fail

TOKENIZER_FILES = "tokenizer.json vocab.json merges.txt".split()
TOKENIZER_FILES += "tokenizer_config.json special_tokens_map.json added_tokens.json".split()
END = "<|endoftext|>"
# GPT-2 splits a text into words before it merges, so that no token spans two of them (Radford et al., 2019).
GPT2_WORDS = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_names():
    """GPT-2's printable character for each byte: its own if visible, else the next free one above 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


class Tokenizer:
    """Text to token ids and back. `eos` is the id of <|endoftext|>; encoding a text never gives it."""

    def __init__(self, ranks, eos, words, files=None):
        """`ranks` maps each token's bytes to its id; lower ids merge first. `words`: split text as GPT-2 does before
        merging. `files` (name -> bytes) are those that it was read from, to be saved unchanged."""
        self.eos = eos
        self.token_bytes = {i: token for token, i in ranks.items()}
        self.vocab_size = max(eos, *ranks.values()) + 1
        pattern = GPT2_WORDS if words else r"[\s\S]+"
        bpe = tiktoken.Encoding("nanorook", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: eos})
        self.encode = bpe.encode_ordinary  # text -> token ids
        self.files = files or tokenizer_files(ranks, eos, words)

    @classmethod
    def load(cls, folder):
        """From tokenizer.json, or from vocab.json and merges.txt; a folder without any gets GPT-2's own."""
        folder = Path(folder)
        if not folder.is_dir():
            fail(f"{folder}: there is no such folder.")
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
        if not {"tokenizer.json", "vocab.json"} & files.keys():
            return cls.gpt2()
        try:
            words = True
            if "tokenizer.json" in files:
                content = json.loads(files["tokenizer.json"])
                model, split = content["model"], content["pre_tokenizer"] or {}
                if model["type"] != "BPE" or split.get("type") != "ByteLevel":
                    raise ValueError("it is of another kind")
                if content.get("normalizer") or split.get("add_prefix_space"):
                    raise ValueError("a normalizer or add_prefix_space would change every prompt")
                words, merges = bool(split.get("use_regex", True)), model["merges"]
                vocab = model["vocab"] | {t["content"]: t["id"] for t in content.get("added_tokens") or []}
            else:
                vocab = json.loads(files["vocab.json"])
                lines = files["merges.txt"].decode().splitlines()
                merges = [line for line in lines if line and not line.startswith("#version")]
            merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in merges]
            byte = {name: b for b, name in byte_names().items()}
            ranks = {bytes(byte[c] for c in token): vocab[token] for token in {*byte, *merged}}
            ids = [vocab[token] for token in merged]
            if len({vocab[END], *ranks.values()}) <= len(ranks):
                raise ValueError("each token needs an id of its own")
            if ids != sorted(ids):
                raise ValueError("tiktoken relies on ids in the order of the merges, and these are not")
            return cls(ranks, vocab[END], words, files)
        except Exception as error:  # what is wrong with a file may show anywhere
            fail(f"{folder}: expected a byte-level BPE as GPT-2's, with {END}; {type(error).__name__}: {error}")

    @classmethod
    def of_bytes(cls, pairs=()):
        """A token for each byte (0 to 255), then one for each of some pairs of bytes; the last one ends a text."""
        ranks = {bytes([b]): b for b in range(256)} | {pair.encode(): 256 + i for i, pair in enumerate(pairs)}
        return cls(ranks, len(ranks), words=False)

    @classmethod
    def gpt2(cls):
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken downloads it once; what it raises depends on the network
            fail(f"The model folder has no tokenizer files, and GPT-2's could not be fetched ({error}).")
        return cls({gpt2.decode_single_token_bytes(i): i for i in range(gpt2.eot_token)}, gpt2.eot_token, words=True)


def tokenizer_files(ranks, eos, words):
    """tokenizer.json and tokenizer_config.json for transformers, for a tokenizer that came without files."""
    names, merges = byte_names(), []
    vocab = {"".join(names[b] for b in token): i for token, i in ranks.items()}
    for token in sorted(ranks, key=ranks.get):
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
