"""The class of a model folder, chosen by the model_type of its config.json.

To add an architecture, write a subclass of GPT in a file of this folder and give it a line in CLASSES.
"""

import torch

from architectures.llama import Llama
from model import GPT
from nanorook import lora
from nanorook.folder import fetch, read_json
from nanorook.settings import fail

CLASSES = {
    "gpt2": GPT,
    "nanorook": GPT,  # a GPT whose layers were changed, so that it is no longer GPT-2
    "llama": Llama,  # SmolLM2, too
    "qwen2": Llama,  # Qwen2.5, too
    "qwen3": Llama,
}


def class_of(folder):
    name = read_json(folder / "config.json").get("model_type", "gpt2")
    if not isinstance(name, str) or name not in CLASSES:
        fail(f"{folder}/config.json: model_type is {name!r}, but only {', '.join(CLASSES)} are known; add a file and a "
             "line of your own to architectures/.")  # fmt: skip
    return CLASSES[name]


def load(source, dtype=torch.float32):
    """The model in a Hugging Face folder or on the hub, with matrices in `dtype`. A folder of LoRA adapters gives the
    model that it names, with these adapters; if that is a folder of adapters, too, the first ones are merged."""
    folder = fetch(source)
    adapters = lora.read_config(folder)
    if adapters:
        return lora.load(load_merged(adapters.base, dtype), adapters, folder)
    return class_of(folder).load(folder, dtype)


def load_merged(source, dtype=torch.float32):
    """The same as a model to train: without adapters, as those of a folder of adapters are merged, in fp32."""
    has_adapters = lora.read_config(fetch(source))
    return lora.merged(load(source, torch.float32 if has_adapters else dtype), dtype)


def without_weights(source):
    """A model that takes no memory, on the meta device, from its config.json alone: no weights are downloaded."""
    folder = fetch(source, ["config.json", lora.CONFIG])
    adapters = lora.read_config(folder)
    if adapters:
        return without_weights(adapters.base)
    kind = class_of(folder)
    with torch.device("meta"):
        return kind(kind.read_config(folder))


def count_parameters(source):
    return sum(p.numel() for p in without_weights(source).parameters())
