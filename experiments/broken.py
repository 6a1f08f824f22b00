"""Broken input, for experiments/fuzz.py: real input mutated, and input that hypothesis makes up.

Both know the formats: a gzip file, a zip archive, a JSON document or a safetensors header is as often broken within,
and sound outside, as it is in its bytes.
"""

import contextlib
import copy
import gzip
import io
import json
import math
import pickle
import re
import struct
import zipfile

from hypothesis import strategies as st

WORDS = "nan NaN Infinity -inf 1e999 -1e999 1e-999 -0 -0.0 00 0x10 1_000 ٣ ½ ² é 中文 🙂 ǅﬀİß null true [] {} \" ' \\ ;"
NASTY = [
    word.encode()
    for word in [*WORDS.split(), "..", "../../x", "<|endoftext|>", "\u202e", "\u2028", "a\u0301", "\u00a0"]
]
NASTY += [b"\0", b"\r\n", b"\n", b"\x85", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" " * 5000, b"[" * 20000]
NASTY += [
    b"9" * 400,
    b"9" * 5000,
    b"-" + b"1" * 320 + b".5",
    b'{"a":' * 5000,
    b"{(" * 3000,
    b"e2e4 " * 3000,
    b"8/" * 3000,
]
VALUES = [None, True, False, 0, -1, -0.0, 1, 2, 7, 2**23, 2**31 - 1, 2**63, 10**30, 1e-320, 1e308, math.inf, -math.inf]
VALUES += [math.nan, "", "x", "../x", "/etc/passwd", "\0", "\ud800", "🙂" * 50, "9" * 500]
VALUES += [[], {}, [[]], [0, 0], [None] * 300, {"": {}}, {"a": [1, "b"]}]


# ---------------------------------------------------------------------------------------------------------------------
# Mutation: everything is drawn from `rng`


def mutate(content, others, rng):
    if rng.random() < 0.7:
        if content[:2] == b"\x1f\x8b":
            return gzip.compress(mutate(gzip.decompress(content), others, rng), 1)
        if content[:2] == b"PK":
            return mutate_zip(content, others, rng)
        if content[8:9] == b"{":  # safetensors
            header, tensors = parts(content)
            return whole(mutate_json(header, rng), tensors)
        if content[:1] == b"{":
            with contextlib.suppress(ValueError, RecursionError):
                return mutate_json(content, rng)
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        content = edit(content, others, rng)
    return content


def edit(content, others, rng):
    """One change of some bytes."""
    size = len(content)
    a = rng.randrange(size + 1)
    b = min(size, a + int(rng.paretovariate(0.7)))
    how = rng.randrange(10)
    if how == 0 and size:  # a bit
        at = min(a, size - 1)
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if how == 1:
        return content[:a] + rng.randbytes(rng.randrange(1, 9)) + content[b:]
    if how == 2:
        return content[:a] + content[b:]
    if how == 3:
        return content[:a] + content[a:b] * rng.choice([2, 2, 3, 50, 1 + 20000 // max(1, b - a)]) + content[b:]
    if how == 4:
        return content[:a] + rng.choice(NASTY) + content[rng.choice([a, b]) :]
    if how == 5:
        other = rng.choice(others)
        c = rng.randrange(len(other) + 1)
        return content[:a] + other[c : c + rng.choice([8, 80, 10**6])]
    if how == 6:
        return content[:a]
    if how in (7, 8):  # a number or a word becomes another one
        found = list(re.finditer(rb"-?\d+" if how == 7 else rb"[^\s+;:,]+", content[a : a + 2000]))
        if not found:
            return content
        old = rng.choice(found)
        new = rng.choice([*NASTY, *(f[0] for f in found)])
        return content[: a + old.start()] + new + content[a + old.end() :]
    return content[a:] + content[:a]


def mutate_json(content, rng):
    """Another value in some places of a document, or none, or one from elsewhere in it, or a place too many."""
    document = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = list(walk(document))
        if not places:
            break
        home, key = rng.choice(places)
        how = rng.random()
        if how < 0.6:
            home[key] = copy.deepcopy(rng.choice(VALUES))
        elif how < 0.75:
            del home[key]
        elif how < 0.9:
            there, other = rng.choice(places)
            home[key] = json.loads(json.dumps(there[other]))
        elif isinstance(home, dict):
            home[rng.choice(["x", "", str(key) + "x", "h.0.attn.bias"])] = home[key]
        else:
            home.insert(rng.randrange(len(home) + 1), home[key])
    return json.dumps(document).encode()


def walk(node, most=400):
    """(container, key) of the values in a document; of a long list or object only some, for speed."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    for key, value in items[: most // 2] + items[most // 2 :][-most // 2 :]:
        yield node, key
        yield from walk(value, 20)


def mutate_zip(content, others, rng):
    """One member changed or named otherwise, and the archive's own checksums made again."""
    members = unzipped(content)
    pickles = [name for name in members if name.endswith("data.pkl")]
    name = rng.choice([*members, *pickles * len(members)])
    if rng.random() < 0.2:
        members[name + rng.choice(["x", "/../x"])] = members.pop(name)
    else:
        members[name] = edit(members[name], others, rng)
    return zipped(members)


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, body in members.items():
            archive.writestr(zipfile.ZipInfo(name), body)
    return content.getvalue()


def parts(content):
    """(header, tensors) of a safetensors file; `whole` puts them together again."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return content[8:end], content[end:]


def whole(header, tensors):
    return struct.pack("<Q", len(header)) + header + tensors


# ---------------------------------------------------------------------------------------------------------------------
# Generation: hypothesis strategies

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def said(texts):
    """Words of the answers' grammar, pieces of answers and any text."""
    pieces = [b"M:", b"E:", b"B:", b"+", b" ", b"e2e4", b"0.3", b"1", b"0", b"8/8", *NASTY, *texts]
    words = st.lists(st.sampled_from(pieces) | st.text(max_size=8).map(str.encode), max_size=12)
    return words.map(b" ".join) | words.map(b"".join)


def lines(*kinds):
    """Lines of some grammars, which chess may still refuse, and any text between them."""
    line = st.one_of(*(st.from_regex(kind, fullmatch=True) for kind in kinds), st.text(max_size=30))
    return st.lists(line, min_size=1, max_size=4).map(lambda rows: "\n".join(rows).encode("utf-8", "surrogatepass"))


def gzipped(contents):
    """Sound archives of some contents with strange ends, and what only begins like one."""
    sound = st.tuples(st.sampled_from(contents), st.binary(max_size=40)).map(
        lambda pair: gzip.compress(b"".join(pair), 1)
    )
    return sound | st.binary(max_size=60).map(lambda rest: b"\x1f\x8b\x08" + rest)


def json_like(content):
    """A document with other values in some places."""

    def change(new):
        document = json.loads(content)
        places = list(walk(document))
        for at, value in new.items():
            home, key = places[at]
            home[key] = value
        return json.dumps(document).encode()

    count = sum(1 for _ in walk(json.loads(content)))
    changed = st.dictionaries(st.integers(0, count - 1), ANY_JSON, min_size=1, max_size=3).map(change)
    return changed | ANY_JSON.map(lambda value: json.dumps(value).encode())


def tensors_like(content):
    """A safetensors file with a header of made-up tensors."""
    header, tensors = parts(content)
    offset = st.integers(0, len(tensors)) | st.integers()
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from("F32 F16 BF16 F64 I8 U8 I64 BOOL F8_E4M3 F8_E8M0 F4 C64 X".split()),
            "shape": st.lists(st.integers(0, 300) | st.integers(), max_size=4),
            "data_offsets": st.lists(offset, min_size=2, max_size=2),
        }
    )
    names = st.sampled_from([*json.loads(header), "x", "__metadata__"])
    headers = st.dictionaries(names, entry | ANY_JSON, max_size=4)
    return headers.map(lambda new: whole(json.dumps(new).encode(), tensors))


def pickles_like(content):
    """A torch archive with the pickle of any plain value, or with any opcodes."""
    members = unzipped(content)
    name = next(name for name in members if name.endswith("data.pkl"))
    opcodes = st.sampled_from([bytes([b]) for b in b"()]}0.NKMXcRQqhrst\x80\x85\x86\x87abuo\x81\x93"])
    bodies = ANY_JSON.map(lambda value: pickle.dumps(value, 2))
    bodies |= st.lists(opcodes, max_size=30).map(lambda codes: b"\x80\x02" + b"".join(codes))
    return bodies.map(lambda body: zipped({**members, name: body}))
