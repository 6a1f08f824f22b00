"""Model folders made by others: found or downloaded, config checked, weights read without running code."""

import os
import pickletools
import re
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanorook.tokenizer import TOKENIZER_FILES, LoadError, read_json

# Entries of config.json that do not go into `extra`: GPT.save writes them itself, and always ties the head.
REWRITTEN = ("architectures", "model_type", "activation_function", "attn_pdrop", "embd_pdrop", "resid_pdrop")
REWRITTEN += ("bos_token_id", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings")


def fetch(source):
    """The folder of a model: `source` itself, or the hub's files in the local cache."""
    if os.path.isdir(source):
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or str(source).startswith("."):
        raise LoadError(f"{source}: there is no such folder, and it is no hub id (owner/name).")
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES]
    try:
        folder = Path(snapshot_download(source, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(source, allow_patterns=[*patterns, "pytorch_model.bin"]))
    except Exception as error:  # offline, unknown, private, full disk: each raises another class
        reason = str(error).strip().split("\n")[0]
        raise LoadError(f"{source}: no such folder here, and the hub did not give it: {type(error).__name__} {reason}")
    return folder


def read_pickle(path):
    """What torch.save has written, read without running code.

    To refuse an unknown name, torch takes time that grows with the square of its length (hours for a
    megabyte), so long names are refused first.
    """
    with open(path, "rb") as file:
        streams = [file] * 5  # before 2020, torch wrote five pickles one after the other, then the tensors
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            streams = [archive.open(name) for name in archive.namelist() if name.endswith("data.pkl")]
        else:
            file.seek(0)
        for stream in streams:
            if any(isinstance(value, str | bytes) and len(value) > 1000 for _, value, _ in pickletools.genops(stream)):
                raise ValueError("a name in it has more than 1000 characters")
    return torch.load(path, map_location="cpu", weights_only=True)


def read_weights(folder):
    """All tensors by name, from one safetensors file, from several, or from pytorch_model.bin."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise LoadError(f"{index}: its weight_map does not map tensors to files.")
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name:
                raise LoadError(f"{index}: {name!r} points out of the folder.")
    elif (folder / "pytorch_model.bin").exists():
        names = ["pytorch_model.bin"]
    else:
        raise LoadError(f"{folder}: there are no weights (model.safetensors or pytorch_model.bin).")
    weights = {}
    for name in names:
        try:
            if name.endswith(".bin"):
                tensors = read_pickle(folder / name)
            else:
                tensors = load_file(folder / name)
        except FileNotFoundError:
            raise LoadError(f"{folder}: {name} is missing, though the index names it.")
        except Exception as error:  # an unpickler may raise anything
            reason = str(error).strip().split("\n")[0]
            raise LoadError(f"{folder}/{name}: damaged or not a file of weights ({type(error).__name__}: {reason})")
        if not isinstance(tensors, dict) or not all(torch.is_tensor(t) for t in tensors.values()):
            raise LoadError(f"{folder}/{name}: a dictionary of tensors is expected.")
        weights.update(tensors)
    return weights


def read_config(folder, kind):
    """config.json as a `kind`: a dataclass with a default for each size, and `extra` for other entries."""
    file, content, defaults = folder / "config.json", read_json(folder / "config.json"), asdict(kind())
    del defaults["extra"]
    values = {name: content.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        if type(value) is not type(defaults[name]) or not 0 <= value < 2**24:
            raise LoadError(f"{file}: {name} is {value!r}, which no GPT-2 has.")
    supported = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "n_inner": (None, 4 * values["n_embd"]),
    }
    for name, allowed in supported.items():
        value = content.get(name, None if name == "model_type" else allowed[0])
        if value not in allowed:
            raise LoadError(f"{file}: {name} is {value!r}, but only {' or '.join(map(repr, allowed))} is supported.")
    extra = {name: value for name, value in content.items() if name not in values and name not in REWRITTEN}
    config = kind(**values, extra=extra)
    if min(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head) < 1:
        raise LoadError(f"{file}: a size is 0; every size of a GPT-2 is at least 1.")
    if config.n_embd % config.n_head:
        raise LoadError(f"{file}: n_embd {config.n_embd} is no multiple of n_head {config.n_head}.")
    return config
