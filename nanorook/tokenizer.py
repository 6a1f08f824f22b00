"""Byte-level BPE for GPT-2's family: the tokenizer files of a Hugging Face folder, run by tiktoken."""

import json
from itertools import accumulate
from pathlib import Path

import tiktoken

from nanorook.settings import refuse

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt")
END = "<|endoftext|>"
# GPT-2 splits a text into words before it merges, so that no token spans two of them (Radford et al., 2019).
GPT2_WORDS = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
WHOLE_TEXT = r"[\s\S]+"


def read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds something else")
        return content
    except FileNotFoundError:
        refuse(f"{path.parent}: there is no {path.name}; a model is a folder as transformers saves it.")
    except (ValueError, OSError, RecursionError) as error:
        refuse(f"{path}: not readable as a JSON object ({error}).")


def byte_names():
    """GPT-2's printable character for each byte: its own if visible, else the next free one above 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


class Tokenizer:
    """Text to token ids and back. `eos` is the id of <|endoftext|>; encoding a text never gives it."""

    def __init__(self, ranks, eos, files=None, words=True):
        """`ranks` maps each token's bytes to its id; lower ids merge first. `files`: those of the folder it was
        read from (name -> bytes), to be saved unchanged. `words`: split text as GPT-2 does before merging."""
        self.eos = eos
        self.token_bytes = {i: token for token, i in ranks.items()}
        self.vocab_size = max(eos, *ranks.values()) + 1
        pattern = GPT2_WORDS if words else WHOLE_TEXT
        self.bpe = tiktoken.Encoding("nanorook", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: eos})
        self.files = files or tokenizer_files(ranks, eos, words)

    @classmethod
    def load(cls, folder):
        """From tokenizer.json, or from vocab.json and merges.txt; a folder without any gets GPT-2's own."""
        folder, words = Path(folder), True
        if not folder.is_dir():
            refuse(f"{folder}: there is no such folder.")
        if not (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists():
            return cls.gpt2()
        try:
            if (folder / "tokenizer.json").exists():
                content = read_json(folder / "tokenizer.json")
                model, split = content["model"], content["pre_tokenizer"] or {}
                if model["type"] != "BPE" or split.get("type") != "ByteLevel":
                    raise ValueError("it is of another kind")
                if content.get("normalizer") or split.get("add_prefix_space"):
                    raise ValueError("a normalizer or add_prefix_space would change every prompt")
                words = bool(split.get("use_regex", True))
                vocab, merges = model["vocab"], model["merges"]
                vocab = {**vocab, **{t["content"]: t["id"] for t in content.get("added_tokens") or []}}
            else:
                vocab = read_json(folder / "vocab.json")
                lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
                merges = [line for line in lines if line and not line.startswith("#version")]
            merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in merges]
            byte = {name: b for b, name in byte_names().items()}
            ranks = {bytes(byte[c] for c in token): vocab[token] for token in {*byte, *merged}}
            eos, ids = vocab[END], [vocab[token] for token in merged]
            known = [eos, *ranks.values()]
            if not all(type(i) is int and 0 <= i < 2**31 for i in known) or len({*known}) < len(known):
                raise ValueError("each token needs a whole number of its own as id")
            if any(a >= b for a, b in zip(ids, ids[1:])):
                raise ValueError("tiktoken relies on ids in the order of the merges, and these are not")
        except Exception as error:  # what is wrong with a file may show anywhere
            refuse(f"{folder}: expected a byte-level BPE as GPT-2's, with {END}; {type(error).__name__}: {error}")
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
        return cls(ranks, eos, files, words)

    @classmethod
    def of_bytes(cls):
        """No merges: a token is a byte, and 256 ends a text."""
        return cls({bytes([b]): b for b in range(256)}, 256, words=False)

    @classmethod
    def squares(cls):
        """A token for each byte (0 to 255) and for each square of the board (256 to 319: a1, b1, ..., h8), so
        that a move is two tokens; 320 ends a text."""
        squares = [file + rank for rank in "12345678" for file in "abcdefgh"]
        ranks = {bytes([b]): b for b in range(256)} | {square.encode(): 256 + i for i, square in enumerate(squares)}
        return cls(ranks, 320, words=False)

    @classmethod
    def gpt2(cls):
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken downloads it once; what it raises depends on the network
            refuse(f"The model folder has no tokenizer files, and GPT-2's could not be fetched ({error}).")
        return cls({gpt2.decode_single_token_bytes(i): i for i in range(gpt2.eot_token)}, gpt2.eot_token)

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.read(ids)[0]

    def read(self, ids):
        """(text, ends): the text up to the end token, and for each of its tokens the number of characters up to its
        end. Ids without a token (a padded vocabulary has some) and bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        ids = ids[: ids.index(self.eos)] if self.eos in ids else ids
        parts = [self.token_bytes.get(i, b"\xff") for i in ids]
        text = b"".join(parts).decode("utf-8", "replace")
        if text.isascii():
            return text, list(accumulate(map(len, parts)))
        return text, [len(b"".join(parts[: t + 1]).decode("utf-8", "replace")) for t in range(len(parts))]


def tokenizer_files(ranks, eos, words):
    """tokenizer.json and tokenizer_config.json for transformers, for a tokenizer that came without files."""
    names = byte_names()
    vocab = {"".join(names[b] for b in token): i for token, i in sorted(ranks.items(), key=lambda item: item[1])}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:  # its merge joins the two parts that remain when all earlier merges are done
            parts = [token[i : i + 1] for i in range(len(token))]
            while len(parts) > 2:
                pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
                i = pairs.index(min(pairs))
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            merges.append((rank, ["".join(names[b] for b in part) for part in parts]))
    end = {"id": eos, "content": END, "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    content = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**vocab, END: eos}, "merges": [m for _, m in sorted(merges)]},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {name: END for name in ("bos_token", "eos_token", "unk_token")}
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False, indent=1).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }
