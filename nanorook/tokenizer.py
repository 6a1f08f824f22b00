"""Byte-level BPE, as in GPT-2, Llama 3 and Qwen: the tokenizer files of a Hugging Face folder, run by tiktoken."""

import json
import unicodedata
from pathlib import Path

import regex
import tiktoken

from nanorook.settings import fail

TOKENIZER_FILES = "tokenizer.json vocab.json merges.txt tokenizer_config.json special_tokens_map.json".split()
TOKENIZER_FILES += "added_tokens.json chat_template.jinja generation_config.json".split()
END = "<|endoftext|>"
# GPT-2 splits a text into words before it merges, so that no token spans two of them (Radford et al., 2019).
GPT2_WORDS = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Special(str):
    """A special token, by its name. Any other string is text, even if it contains such a name."""


def byte_names():
    """GPT-2's printable character for each byte: its own if visible, otherwise the next free one above 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


class Tokenizer:
    """Text to token ids and back. Encoding a text never produces a special token."""

    def __init__(self, ranks, special, ends, splits, normal_form=None, files=None, beginning=()):
        """`ranks` maps each token's bytes to its id; lower ids merge first. `special` maps the names of all other
        tokens to theirs. `ends` are the ids that end an answer. `splits` are patterns that split a text one after
        another, before merging. `files` (name -> bytes) are those that it was read from, to be saved unchanged.
        `beginning` are the ids that come before a prompt of plain text."""
        self.special, self.ends, self.normal_form, self.beginning = special, ends, normal_form, beginning
        self.token_bytes = {i: token for token, i in ranks.items()} | {i: name.encode() for name, i in special.items()}
        self.vocab_size = max(self.token_bytes) + 1
        *first, last = splits or [r"[\s\S]+"]
        self.first_splits = [regex.compile(pattern) for pattern in first]
        # A vocabulary may lack bytes, as SmolLM2's does. These get ids above all others, which encode() drops.
        lacking = {bytes([b]): self.vocab_size + b for b in range(256) if bytes([b]) not in ranks}
        self.bpe = tiktoken.Encoding("nanorook", pat_str=last, mergeable_ranks=ranks | lacking, special_tokens={})
        plain = not (normal_form or first or lacking)
        self.encode = self.bpe.encode_ordinary if plain else self.encode_parts  # text -> token ids
        self.files = files or tokenizer_files(ranks, self.eos, words=bool(splits))

    @property
    def eos(self):
        """The id that ends a training text and serves as padding."""
        return self.ends[0]

    def encode_parts(self, text):
        parts = [unicodedata.normalize(self.normal_form, text) if self.normal_form else text]
        for pattern in self.first_splits:
            parts = [match for part in parts for match in pattern.findall(part)]
        return [i for part in parts for i in self.bpe.encode_ordinary(part) if i < self.vocab_size]

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
            settings = json.loads(files.get("tokenizer_config.json", b"{}"))
            if not {"tokenizer.json", "vocab.json"} & files.keys():
                if json.loads(config).get("model_type", "gpt2") not in ("gpt2", "nanorook"):
                    raise ValueError("there is neither a tokenizer.json nor a vocab.json")
                return cls.gpt2()
            if "tokenizer.json" in files:
                content = json.loads(files["tokenizer.json"])
            else:
                merges = [m for m in files["merges.txt"].decode().splitlines() if m and not m.startswith("#version")]
                content = {"model": {"vocab": json.loads(files["vocab.json"]), "merges": merges}}
                content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
            model, normal_form = content["model"], (content.get("normalizer") or {}).get("type")
            if model.get("type", "BPE") != "BPE" or normal_form not in (None, "NFC", "NFD", "NFKC", "NFKD"):
                raise ValueError(f"{model.get('type')} with the normalizer {normal_form} is not supported")
            splits, vocab = read_splits(content["pre_tokenizer"]), model["vocab"]
            merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
            byte = {name: b for b, name in byte_names().items() if name in vocab}
            ranks = {bytes(byte[c] for c in token): vocab[token] for token in {*byte, *merged}}
            special = {END: vocab[END]} if END in vocab else {}
            added = content.get("added_tokens") or []
            special |= {token["content"]: token["id"] for token in added}
            for token in (*added, *settings.get("added_tokens_decoder", {}).values()):
                if token.get("lstrip") or token.get("rstrip"):
                    raise ValueError(f"{token['content']} takes the white space next to it, which is not supported")
            known, ids = {*special.values(), *ranks.values()}, [vocab[token] for token in merged]
            if len(known) < len(special) + len(ranks):
                raise ValueError("each token needs an id of its own")
            if ids != sorted(ids):
                raise ValueError("tiktoken relies on ids in the order of the merges, and these are in another order")
            ends = find_ends(files, config, special)
            if not ends or any(type(end) is not int for end in ends) or not known.issuperset(ends):
                raise ValueError(f"eos_token_id is {ends}, but not all of these are ids of its tokens")
            joined = (token for token in ranks if len(token) > 1 and not {*b"0123456789"}.isdisjoint(token))
            if len(ranks) > 5000 and all(regex.fullmatch(p, "11") for p in splits) and not any(joined):
                # The training texts had digits split off, which a conversion, for example from GGUF, has lost.
                if b"smollm" not in config.lower():
                    raise ValueError("nothing splits digits, but no token joins them; use the original tokenizer.json")
                parts = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
                content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
                splits = read_splits(content["pre_tokenizer"])
                files["tokenizer.json"] = json.dumps(content, ensure_ascii=False).encode()
            beginning = find_beginning(content.get("post_processor"))
            if "tokenizer.json" not in files and settings.get("add_bos_token"):  # elsewhere transformers ignores it
                beginning = (special[token_name(settings.get("bos_token") or END)],)
            if not known.issuperset(beginning):
                raise ValueError(f"its post_processor adds {beginning}, but not all of these are ids of its tokens")
            return cls(ranks, special, ends, splits, normal_form, files, beginning)
        except Exception as error:  # a damaged file may fail anywhere
            fail(f"{folder}: expected a byte-level BPE such as GPT-2's or Qwen's; {type(error).__name__}: {error}")

    @classmethod
    def of_bytes(cls, pairs=()):
        """A token for each byte (0 to 255), one for each of `pairs` of bytes, and last the one that ends a text."""
        ranks = {bytes([b]): b for b in range(256)} | {pair.encode(): 256 + i for i, pair in enumerate(pairs)}
        return cls(ranks, {END: len(ranks)}, (len(ranks),), splits=[])

    @classmethod
    def gpt2(cls):
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken downloads it once; what it raises depends on the network
            fail(f"there are no tokenizer files, and GPT-2's could not be downloaded ({error}); provide a folder that "
                 "has tokenizer.json, or vocab.json and merges.txt.")  # fmt: skip
        ranks = {gpt2.decode_single_token_bytes(i): i for i in range(gpt2.eot_token)}
        return cls(ranks, {END: gpt2.eot_token}, (gpt2.eot_token,), [GPT2_WORDS])


def read_splits(pre_tokenizer):
    """The patterns by which a pre_tokenizer splits a text, one after another."""
    splits = []
    *parts, level = pre_tokenizer["pretokenizers"] if "pretokenizers" in (pre_tokenizer or ()) else [pre_tokenizer]
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                pass
            case {"type": "Digits", "individual_digits": individual}:
                pattern = r"\p{N}" if individual else r"\p{N}+"
            case _:
                raise ValueError(f"its pre_tokenizer {json.dumps(part):.60} is not supported")
        splits.append(rf"{pattern}|(?:(?!{pattern})[\s\S])+")  # what lies between two matches is a part, too
    if not level or level["type"] != "ByteLevel" or level["add_prefix_space"]:
        raise ValueError(f"its pre_tokenizer ends with {json.dumps(level):.60}, not with a ByteLevel without prefix")
    return splits + [GPT2_WORDS] * level.get("use_regex", True)


def find_ends(files, config, special):
    """The ids that end an answer, from the first of the folder's files that names them."""
    for content in (files.get("generation_config.json", b"{}"), config):
        if (ids := json.loads(content).get("eos_token_id")) is not None:
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


def find_beginning(post_processor):
    """The ids that a post_processor puts before a text. What it puts after one is left out: an answer follows there."""
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return ()
        case {"type": "TemplateProcessing", "single": parts, "special_tokens": special}:
            names = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in parts]
            before = names[: names.index(None)]  # where the text stands
            return tuple(i for name in before for i in special[name]["ids"])
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [_, int(i)]}:
            return (i,)
        case {"type": "Sequence", "processors": parts}:
            found = [part for part in parts if part["type"] != "ByteLevel"]
            if len(found) < 2:
                return find_beginning(found[0] if found else None)
    raise ValueError(f"its post_processor {json.dumps(post_processor):.60} is not supported")


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
