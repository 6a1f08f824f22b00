"""Llama 3, SmolLM2, Qwen2, Qwen2.5 and Qwen3: another architecture in one file.

MODEL=Qwen/Qwen2.5-0.5B-Instruct ./train.sh      a hub id or a folder; config.json's model_type chooses this class

It brings its own blocks, its own way through them (`trunk`), and the names that its folders use; sampling, shared
prompts, training, the reference and checkpoints are GPT's. Unlike in GPT-2, attention turns queries and keys by their
positions (RoPE; Su et al., 2021), several heads share the keys and values of one (Ainslie et al., 2023), which makes
the cache that much smaller, norms subtract no mean (RMSNorm; Zhang & Sennrich, 2019), and the MLP has a gate (SwiGLU;
Shazeer, 2020). Not supported: mixture of experts, sliding windows, quantised weights, other ways of scaling RoPE.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from model import GPT, Embedding, Linear
from nanorook.folder import HEADS, LAYERS, SIZE, SMALL, check_numbers, check_supported, read_json
from nanorook.settings import fail


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.n_embd, c.n_head * c.head_dim, bias=c.qkv_bias)
        self.k_proj, self.v_proj = (Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=c.qkv_bias) for _ in "kv")
        self.o_proj = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.o_bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, c.epsilon) if c.qk_norm else nn.Identity() for _ in "qk")

    def forward(self, x, layer, attend):
        q, k, v = (f(x).unflatten(2, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (norm(x.float()).to(x.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        heads = attend(layer, *(x.transpose(1, 2) for x in (q, k, v)))  # (N, H, S, D)
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
    # Llama 3.1 is made for longer texts than it was first trained on. Channels that turn less than `low` times within
    # the original length are slowed down by a factor; those that turn more than `high` times are not; others partly.
    low, turns = rope["low_freq_factor"], rope["original_max_position_embeddings"] * angles / (2 * math.pi)
    kept = ((turns - low) / (rope["high_freq_factor"] - low)).clamp(0, 1)
    return angles * (kept + (1 - kept) / rope["factor"])


def rotate(x, cos, sin):
    """x (N, H, S, D), whose channels i and i + D/2 are a pair, turned by angles (N, 1, S, D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


NAMES = {"model.embed_tokens.": "wte.", "model.layers.": "h.", "model.norm.": "norm.", "lm_head.weight": "lm_head"}


def renamed(weights, names):
    """The tensors, with prefixes of their names replaced."""
    for old, new in names.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: p for name, p in weights.items()}
    return weights


class Llama(GPT):
    def __init__(self, c):
        nn.Module.__init__(self)  # not GPT's modules
        self.config = c
        self.wte = Embedding(c.vocab_size, c.n_embd)
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
        content = read_json(file := folder / "config.json")
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}  # transformers 5, or before
        layers = content.get("layer_types") or []
        if not isinstance(rope, dict) or not isinstance(layers, list):
            fail(f"{file}: rope_parameters (or rope_scaling) has to be an object, and layer_types a list.")
        rope = {"rope_theta": content.get("rope_theta", 10000.0), "rope_type": rope.get("type", "default")} | rope
        only = {"hidden_act": ("silu",), "mlp_bias": (False,), "use_sliding_window": (False,)}
        only |= {"quantization_config": (None,), "rope_type": ("default", "llama3"), "partial_rotary_factor": (1.0,)}
        check_supported(file, content | rope, only)
        for layer in layers:
            check_supported(file, {"layer_types": layer}, {"layer_types": ("full_attention",)})

        bounds = {"rope_theta": (float, 1, 1e12)}
        if rope["rope_type"] == "llama3":
            bounds |= dict.fromkeys(("low_freq_factor", "high_freq_factor"), (float, 0, 1e6))
            bounds |= {"factor": (float, 1, 1e6), "original_max_position_embeddings": SIZE}
        check_numbers(file, rope, bounds)
        if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            fail(f"{file}: high_freq_factor has to be larger than low_freq_factor.")
        values = {"attention_bias": False, "tie_word_embeddings": False} | content
        kind, bias, head_dim = values["model_type"], values["attention_bias"], values.get("head_dim")
        sizes = "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"
        bounds = dict.fromkeys(sizes, SIZE) | {"num_hidden_layers": LAYERS, "rms_norm_eps": SMALL}
        bounds |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), HEADS)
        bounds |= dict.fromkeys(("attention_bias", "tie_word_embeddings"), (bool, 0, 1))
        check_numbers(file, values, bounds | ({} if head_dim is None else {"head_dim": HEADS}))

        width, heads, kv_heads = (values[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        if head_dim is None and width % heads:
            fail(f"{file}: hidden_size {width} is not a multiple of num_attention_heads {heads}.")
        head_dim = head_dim or width // heads
        if heads % kv_heads or head_dim % 2:
            fail(f"{file}: num_attention_heads {heads} has to be a multiple of num_key_value_heads {kv_heads}, and the "
                 f"size of a head, {head_dim}, an even number.")  # fmt: skip
        return SimpleNamespace(
            vocab_size=content["vocab_size"],
            n_positions=content["max_position_embeddings"],
            n_embd=width,
            n_layer=content["num_hidden_layers"],
            n_head=heads,
            n_kv_head=kv_heads,
            head_dim=head_dim,
            n_inner=content["intermediate_size"],
            epsilon=content["rms_norm_eps"],
            rope=rope,
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            qk_norm=kind == "qwen3",
            tied=values["tie_word_embeddings"],
            eos_token_id=content.get("eos_token_id"),
            extra=content,  # all of it, for the task and for save()
        )

    def write_config(self):
        return {name: value for name, value in self.config.extra.items() if name != "dtype"}

    def from_file(self, weights):
        tied = {"lm_head.weight": "lm_head.weight"} if self.config.tied else {}  # GPT.load compares it
        return renamed({name: p for name, p in weights.items() if "rotary_emb" not in name}, NAMES | tied)

    def to_file(self, weights):
        return renamed(weights, {new: old for old, new in NAMES.items()})
