"""LoRA (Hu et al., 2021): the model stays as it is, and each matrix of its blocks learns an update of low rank.

LORA_RANK=16 ./train.sh MODEL=Qwen/Qwen2.5-0.5B-Instruct

A matrix W becomes W + s·B·A, where A (r, in) and B (out, r) are narrow. B starts at zero, so a run begins with the
start model, bit for bit. Embeddings, norms, biases and the head get no update. Everything frozen is kept once, in the
dtype of the matrix products: policy, reference and sampler share it. So only A and B have gradients and moments, and
only they are synchronised, restored and saved.

The sampler adds the updates to the outputs, as the training forward does. Merging them into its matrices would save two
small products, but it would take another copy of the model, and a bf16 matrix rounds small updates away. Only the
model that is written at the end is merged, in fp32.

Adapters are saved in PEFT's format, which vLLM reads as well.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import nn

from nanorook import folder as files
from nanorook.settings import fail

# s is ALPHA / r. With a fixed ALPHA the best learning rate hardly depends on the rank, and is about ten times that of
# all weights (Schulman et al., 2025, LoRA Without Regret).
ALPHA = 32
PREFIX = "base_model.model."  # of the names of tensors in PEFT's files
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass
class Lora:
    """What the adapters of a model have in common."""

    rank: int
    base: str  # the folder or hub id of the frozen model
    alpha: float = ALPHA


class Adapter(nn.Module):
    """The update of one matrix."""

    def __init__(self, linear, lora):
        super().__init__()
        self.A = nn.Parameter(torch.empty(lora.rank, linear.in_features))
        self.B = nn.Parameter(torch.empty(linear.out_features, lora.rank))
        self.scale = lora.alpha / lora.rank

    def forward(self, x):
        """What the update adds to the output (N, S, out) for inputs (N, S, in), in the dtype of x."""
        narrow = F.linear(x, self.A.to(x.dtype)) * self.scale  # (N, S, r)
        return F.linear(narrow, self.B.to(x.dtype))

    def update(self):
        """The update itself (out, in), in fp32."""
        return self.scale * self.B.detach().float() @ self.A.detach().float()


def matrices(model):
    """{name: layer} of all matrices of attention and MLP."""
    return {name: layer for name, layer in model.named_modules() if name[:2] == "h." and isinstance(layer, nn.Linear)}


def add_empty(model, lora):
    """Freezes the model and adds adapters without values, which the caller fills."""
    model.requires_grad_(False)
    model.lora = lora
    for layer in matrices(model).values():
        layer.adapter = Adapter(layer, lora)


def add(model, rank, seed, base):
    """Adds adapters that change nothing yet, and freezes all else; `seed` determines A."""
    device, generator = model.wte.weight.device, torch.Generator().manual_seed(seed)
    is_folder = Path(base).is_dir()  # whose name must hold wherever the adapters are opened
    add_empty(model, Lora(rank, str(Path(base).resolve()) if is_folder else base))
    for layer in matrices(model).values():
        adapter = layer.adapter.to(device)
        bound = 1 / math.sqrt(layer.in_features)
        A = torch.rand(adapter.A.shape, generator=generator) * 2 * bound - bound  # the same on every device
        adapter.A.data.copy_(A)
        adapter.B.data.zero_()


def trained_state(model):
    """{name: tensor} of what training changes: the adapters if the model has any, otherwise all weights."""
    weights = model.state_dict()
    return {name: p for name, p in weights.items() if model.lora is None or ".adapter." in name}


@torch.no_grad()
def load_trained_state(model, weights):
    """Gives the model what trained_state() has taken from one like it."""
    if model.lora is None:
        model.load_state_dict(weights)
        return
    for name, p in trained_state(model).items():
        p.copy_(weights[name])


def merged(model, dtype=torch.float32):
    """The same model without adapters, on the CPU: matrices, embeddings and head in `dtype`, updates included."""
    if model.lora is None:
        return model
    weights = {name: p.cpu() for name, p in model.state_dict().items() if ".adapter." not in name}
    for name, layer in matrices(model).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + layer.adapter.update().cpu()
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict({name: p.to(dtype) if p.ndim == 2 else p for name, p in weights.items()}, assign=True)
    plain.tokenizer = model.tokenizer
    return plain.set_compute_dtype(model.dtype).requires_grad_(True)


# ---- Files in PEFT's format --------------------------------------------------------------------------------


def save(model, path):
    """Writes the adapters to a folder that PEFT and vLLM can open beside the frozen model."""
    weights = {}
    for name, layer in matrices(model).items():
        weights[f"{name}.lora_A.weight"] = layer.adapter.A.detach()
        weights[f"{name}.lora_B.weight"] = layer.adapter.B.detach()
    weights = {PREFIX + name: p.to("cpu", copy=True) for name, p in model.to_file(weights).items()}
    probe = torch.empty(2, 3)
    [stored] = model.to_file({f"{next(iter(matrices(model)))}.weight": probe}).values()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.lora.base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in matrices(model)}),
        "fan_in_fan_out": stored.shape != probe.shape,  # GPT-2's files have transposed matrices
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    content = {
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        WEIGHTS: to_bytes(weights, metadata={"format": "pt"}),
    }
    if model.tokenizer:
        content |= model.tokenizer.files
    files.write(path, content)


def read_config(folder):
    """The Lora of a folder of adapters, or None if it is another kind of folder."""
    file = folder / CONFIG
    if not file.exists() or (folder / "config.json").exists():
        return None
    content = files.read_json(file)
    supported = {"peft_type": ("LORA",), "bias": ("none",)}
    supported |= dict.fromkeys(("use_dora", "use_rslora", "lora_bias"), (False,))
    absent = None, {}, []
    supported |= dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication"), absent)
    files.check_supported(file, content, supported)
    files.check_numbers(file, content, {"r": (int, 1, 2**16), "lora_alpha": (float, 0, 1e6)})
    base = content.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        fail(f"{file}: base_model_name_or_path has to name the frozen model.")
    return Lora(content["r"], base, content["lora_alpha"])


def load(model, lora, folder):
    """Adds the adapters of a folder to their frozen model; a matrix that they leave out stays as it is."""
    weights = files.load_weights(folder / WEIGHTS)
    weights = files.check_weights(folder, {name.removeprefix(PREFIX): p.float() for name, p in weights.items()})
    weights = model.from_file(weights)
    add_empty(model, lora)
    for name, layer in matrices(model).items():
        A, B = layer.adapter.A.data, layer.adapter.B.data
        found_A = weights.pop(f"{name}.lora_A.weight", torch.zeros_like(A))
        found_B = weights.pop(f"{name}.lora_B.weight", torch.zeros_like(B))
        if found_A.shape != A.shape or found_B.shape != B.shape:
            fail(f"{folder}: the adapter of {name} does not fit {lora.base}: is that the model it was trained with?")
        A.copy_(found_A)
        B.copy_(found_B)
    if weights:
        fail(f"{folder}: {next(iter(weights))} is not an adapter of a matrix in the blocks of {lora.base}; merge these "
             "adapters with PEFT's merge_and_unload.")  # fmt: skip
    return model
