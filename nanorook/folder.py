"""Model folders: how they are found or downloaded, checked, read without running code, and written."""

import copy
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanorook.settings import fail
from nanorook.tokenizer import TOKENIZER_FILES

# Types and bounds of numbers in config.json, for check_numbers(). All layers are created before a missing tensor is
# noticed, so they must not take all of the memory.
SIZE, LAYERS, HEADS, SMALL = (int, 1, 2**24), (int, 1, 2**10), (int, 1, 2**12), (float, 0, 1)

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
WANTED = "config.json", "model*.safetensors*", "adapter_*", *TOKENIZER_FILES  # what is downloaded from the hub


def fetch(source, wanted=WANTED):
    """The folder of a model: `source` itself, or the hub's files in the local cache."""
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        fail(f"{source}: there is no such folder; a model on the hub is named owner/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        return Path(snapshot_download(source, allow_patterns=[*wanted]))
    except Exception as error:  # offline, unknown, private, full disk: each raises a different class
        if isinstance(error, GatedRepoError):
            fail(f"{source} is gated: accept its terms on the hub, then set HF_TOKEN to your access token.")
        fail(f"{source}: there is no such folder, and the hub could not provide it: {type(error).__name__} {error}")


def read_weights(folder):
    """All tensors by name, from model.safetensors or the files that an index names, as in transformers. Other files in
    the folder may belong to another model."""
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists() and not (folder / names[0]).exists():
        try:
            names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
        except Exception as error:  # damage may show anywhere
            fail(f"{index}: damaged, or not an index of weights: {type(error).__name__} {error}")
    weights = {}
    for name in names:
        weights |= load_weights(folder / name)
    return weights


def load_weights(file):
    if not file.exists():
        fail(f"{file.parent}: there is no {file.name}; convert other formats with transformers' from_pretrained and "
             "save_pretrained.")  # fmt: skip
    try:
        return load_file(file)
    except Exception as error:  # of safetensors, or of the disk
        fail(f"{file}: damaged or not a file of weights: {type(error).__name__} {error}")


def check_weights(folder, weights):
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATS or not tensor.isfinite().all():
            fail(f"{folder}: {name} ({tensor.dtype}) has to hold finite floating-point numbers of 16 bits or more.")
    return weights


def read_json(file):
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        return copy.deepcopy(content)  # copies of the model contain it, so excessive nesting has to show here
    except (ValueError, TypeError, OSError, RecursionError) as error:
        fail(f"{file}: cannot be read as a JSON object ({error}); name a model folder as transformers saves it.")


def check_supported(file, content, supported):
    """`supported`: {entry of config.json: its allowed values, of which the first is the default}."""
    for name, allowed in supported.items():
        value = content.get(name, allowed[0])
        if value not in allowed:
            fail(f"{file}: {name} is {value!r}, but only {' or '.join(map(repr, allowed))} is supported.")


def check_numbers(file, content, bounds):
    """`bounds`: {entry of config.json: (its type, the least and the largest value)}. No entry may be missing."""
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    for name, (kind, least, most) in bounds.items():
        if name not in content:
            fail(f"{file}: {name!r} is missing.")
        value = content[name]
        right_type = type(value) is kind or kind is float and type(value) is int  # JSON has 10000 for 10000.0
        if not right_type or not least <= value <= most:
            between = f" from {least} to {most}" if kind is not bool else ""
            fail(f"{file}: {name} is {value!r:.80}, but it has to be {kinds[kind]}{between}.")


def write(path, files):
    """Writes files {name: bytes} to a folder. A new folder appears whole or not at all; in an existing one each file is
    replaced as a whole, and other files are kept."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        if path.exists():
            for file in temporary.iterdir():
                os.replace(file, path / file.name)
        else:
            temporary.chmod(0o755)  # mkdtemp's folders are private
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
