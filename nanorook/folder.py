"""Model folders made by others: found or downloaded, config checked, weights read without running code."""

import json
import re
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file

from nanorook.settings import fail
from nanorook.tokenizer import TOKENIZER_FILES

# Entries of config.json that do not go into `extra`: GPT.save writes them itself, and always ties the head.
REWRITTEN = ("architectures", "model_type", "activation_function", "attn_pdrop", "embd_pdrop", "resid_pdrop")
REWRITTEN += ("bos_token_id", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings")


def fetch(source):
    """The folder of a model: `source` itself, or the hub's files in the local cache."""
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        fail(f"{source}: there is no such folder; a model on the hub is named owner/name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["config.json", "model*.safetensors", *TOKENIZER_FILES]))
    except Exception as error:  # offline, unknown, private, full disk: each raises another class
        fail(f"{source}: no such folder here, and the hub did not give it: {type(error).__name__} {error}")


def read_weights(folder):
    """All tensors by name, from one file of safetensors or several."""
    files, weights = sorted(folder.glob("model*.safetensors")), {}
    if not files:
        fail(f"{folder}: there is no model.safetensors; transformers' from_pretrained and save_pretrained make one "
             "of other formats.")  # fmt: skip
    for file in files:
        try:
            weights |= load_file(file)
        except Exception as error:  # of safetensors, or of the disk
            fail(f"{file}: damaged or not a file of weights: {type(error).__name__} {error}")
    return weights


def read_config(folder, kind):
    """config.json as a `kind`: a dataclass with a default for each size, and `extra` for other entries."""
    file, defaults = folder / "config.json", asdict(kind())
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        fail(f"{file}: expected a JSON object, in a folder as transformers saves it ({error}).")
    del defaults["extra"]
    values = {name: content.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        least = 0 if name in ("eos_token_id", "layer_norm_epsilon") else 1
        if type(value) is not type(defaults[name]) or not least <= value < 2**24:
            fail(f"{file}: {name} is {value!r}, which no GPT-2 has.")
    supported = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "n_inner": (None, 4 * values["n_embd"]),
    }
    for name, allowed in supported.items():
        value = content.get(name, allowed[0])
        if value not in allowed:
            fail(f"{file}: {name} is {value!r}, but only {' or '.join(map(repr, allowed))} is supported.")
    extra = {name: value for name, value in content.items() if name not in values and name not in REWRITTEN}
    config = kind(**values, extra=extra)
    if config.n_embd % config.n_head:
        fail(f"{file}: n_embd {config.n_embd} is no multiple of n_head {config.n_head}.")
    return config
