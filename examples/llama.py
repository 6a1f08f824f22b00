"""Llama 3, SmolLM2, Qwen2, Qwen2.5 and Qwen3: another architecture in one file.

MODEL=Qwen/Qwen2.5-0.5B-Instruct ./train.sh      a hub id or a folder; config.json's model_type chooses this file

It brings its own blocks, its own way through them (`trunk`), and its folders' names for sizes and tensors; sampling,
shared prompts, training, the reference and checkpoints are GPT's. Other than in GPT-2, tokens meet their positions in
attention (rotary positions; Su et al., 2021), several heads share the keys and values of one (Ainslie et al., 2023),
which makes the cache as many times smaller, layers are normalised without a mean (RMSNorm; Zhang & Sennrich, 2019),
and a gate multiplies the hidden layer (SwiGLU; Shazeer, 2020).

Not supported: mixture of experts, sliding windows, quantised weights, other ways of scaling rotary positions.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from model import GPT, Linear
from nanorook.folder import check_supported, read_json
from nanorook.settings import fail


@dataclass
class LlamaConfig:
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv_head: int  # heads of keys and values
    n_inner: int
    epsilon: float
    head_dim: int  # in Qwen3 not n_embd / n_head
    rope: dict  # rope_theta, and what Llama 3's scaling needs
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied: bool  # the head is the embedding
    eos_token_id: int
    extra: dict  # all of config.json, for the task and for save()


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.n_embd, c.n_head * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.o_bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, c.epsilon) if c.qk_norm else nn.Identity() for _ in "qk")

    def forward(self, x, layer, attend):
        q, k, v = (f(x).unflatten(2, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q.float()).to(q.dtype), self.k_norm(k.float()).to(k.dtype)
        heads = attend(layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (N, H, S, D)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.n_embd, c.epsilon)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.n_embd, c.epsilon)
        self.mlp = nn.ModuleDict({name: Linear(c.n_embd, c.n_inner, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = Linear(c.n_inner, c.n_embd, bias=False)

    def forward(self, x, layer, attend):
        x = x + self.self_attn(self.input_layernorm(x), layer, attend)
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


def frequencies(rope, D, device):
    """Angles (D/2,) by which the pairs of a head's channels turn from one position to the next."""
    angles = rope["rope_theta"] ** (-torch.arange(0, D, 2, device=device) / D)
    if rope["rope_type"] == "default":
        return angles
    # Llama 3.1, for texts longer than those it was first trained on: channels that made less than `low` turns in one of
    # those turn slower by a factor, those that made more than `high` do not; between them it is a blend.
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * angles / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return angles * (kept + (1 - kept) / rope["factor"])


def rotate(x, cos, sin):
    """x (N, H, S, D), whose channels i and i + D/2 are a pair, turned by angles (N, 1, S, D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


NAMES = {"model.embed_tokens.": "wte.", "model.layers.": "h.", "model.norm.": "norm.", "lm_head.weight": "lm_head"}


def renamed(weights, names):
    """The tensors with other beginnings of their names."""
    for old, new in names.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: p for name, p in weights.items()}
    return weights


class Llama(GPT):
    def __init__(self, c):
        nn.Module.__init__(self)  # not GPT's modules
        self.config = c
        self.wte = nn.Embedding(c.vocab_size, c.n_embd, _weight=torch.empty(c.vocab_size, c.n_embd))
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.epsilon)
        self.lm_head = None if c.tied else nn.Parameter(torch.empty(c.vocab_size, c.n_embd))
        self.register_buffer("unembedding", None, persistent=False)

    @property
    def head_weight(self):
        return self.wte.weight if self.lm_head is None else self.lm_head

    def trunk(self, tokens, positions, attend):
        c = self.config
        angles = positions[..., None] * frequencies(c.rope, c.head_dim, tokens.device)  # ((N,) S, D/2)
        turn = angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)  # the same for all heads
        rotated = lambda layer, q, k, v: attend(layer, rotate(q, *turn), rotate(k, *turn), v)  # noqa: E731
        return self.norm(self.blocks(self.wte(tokens), rotated))

    @staticmethod
    def read_config(folder):
        content, file = read_json(folder / "config.json"), folder / "config.json"
        rope = {"rope_theta": content.get("rope_theta", 10000.0)} | (content.get("rope_scaling") or {})
        rope = content.get("rope_parameters") or rope  # as newer versions of transformers write it
        rope = {"rope_type": rope.get("type", "default")} | rope
        only = {"hidden_act": ("silu",), "mlp_bias": (False,), "use_sliding_window": (False,)}
        only |= {"quantization_config": (None,), "rope_type": ("default", "llama3"), "partial_rotary_factor": (1.0,)}
        check_supported(file, content | rope, only)
        if other := {*content.get("layer_types", ())} - {"full_attention"}:
            fail(f"{file}: layer_types has {other.pop()!r}, but only 'full_attention' is supported.")
        kind, bias = content["model_type"], content.get("attention_bias", False)
        try:
            V, C, H = (content[name] for name in ("vocab_size", "hidden_size", "num_attention_heads"))
            rest = (content[name] for name in ("num_key_value_heads", "intermediate_size", "rms_norm_eps"))
            return LlamaConfig(
                V, content["max_position_embeddings"], C, content["num_hidden_layers"], H, *rest,
                content.get("head_dim") or C // H, rope, bias or kind == "qwen2", bias, kind == "qwen3",
                content.get("tie_word_embeddings", False), content.get("eos_token_id"), content,
            )  # fmt: skip
        except KeyError as error:
            fail(f"{file}: {error} is missing.")

    def write_config(self):
        return {name: value for name, value in self.config.extra.items() if name != "dtype"}

    def from_file(self, weights):
        weights = {name: p for name, p in weights.items() if not name.endswith("rotary_emb.inv_freq")}  # old versions
        return renamed(weights, {old: new for old, new in NAMES.items() if not (self.config.tied and new == "lm_head")})

    def to_file(self, weights):
        return renamed(weights, {new: old for old, new in NAMES.items()})
