"""The class of a model folder, chosen by the model_type of its config.json.

To add an architecture, write a subclass of GPT in a file of this folder and give it a line in CLASSES.
"""

import torch

from architectures.llama import Llama
from model import GPT
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


def load(source):
    """The model in a Hugging Face folder or on the hub."""
    folder = fetch(source)
    return class_of(folder).load(folder)


def count_parameters(source):
    """The number of parameters of a model, from its config.json alone: no weights are read or downloaded."""
    folder = fetch(source, ["config.json"])
    kind = class_of(folder)
    with torch.device("meta"):  # no memory
        model = kind(kind.read_config(folder))
    return sum(p.numel() for p in model.parameters())
