"""GPT-2 for reading: the forward pass, Hugging Face folders in and out, the tokenizer.

There is no dropout, whatever config.json says: with it the policy and its reference are two different functions, and
KL is large before the first update. One forward serves training, prefill and decoding, so that sampling and training
follow one numerical path. Names and sizes are GPT-2's own (Radford et al., 2019), as in transformers' GPT2LMHeadModel.
"""

import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from folder import fetch, read_config, read_weights
from machine import pack, packed_product, packs
from tokenizer import LoadError, Tokenizer, has_tokenizer

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D keeps (in, out), nn.Linear (out, in)


@dataclass
class GPTConfig:
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int = 50256
    chess_format: str = "rookworld"  # how this model writes chess, see tasks.py; model.py only carries it along


@dataclass
class Prompt:
    """What the rows of a group share: keys and values of their prompt, without its last token.

    The last prompt token is the first one that each row feeds by itself, so that its output predicts the row's first
    new token and nothing else has to be kept from prefill.
    """

    keys: list  # one (B, H, P, D) for each layer
    values: list
    lengths: torch.Tensor  # (B,) tokens before the last one
    bias: torch.Tensor | None  # (B, 1, 1, P), 0 on a prompt's tokens, -inf on its padding; None: nothing to add

    def select(self, groups):
        """The prompts of some groups only."""
        keys, values = [k[groups] for k in self.keys], [v[groups] for v in self.values]
        return Prompt(keys, values, self.lengths[groups], None if self.bias is None else self.bias[groups])

    def to(self, dtype):
        """In `dtype`, and lying as decoding's products read it at every step."""
        keys = [k.to(dtype).mT.contiguous().mT for k in self.keys]
        values = [v.to(dtype).contiguous() for v in self.values]
        return Prompt(keys, values, self.lengths, self.bias if self.bias.is_cuda or self.bias.any() else None)


class Linear(nn.Linear):
    """The product is made in `dtype`, whatever the weights and the input are; with `gelu`, its GELU."""

    dtype = torch.float32
    packed = None  # the weight in oneDNN's own order, see GPT.packing

    def reset_parameters(self):
        pass  # GPT initialises

    def forward(self, x, gelu=False):
        x = x.to(self.dtype)
        if self.packed is not None:
            return packed_product(x, self.packed, self.bias.to(self.dtype), "gelu" if gelu else "none")
        y = F.linear(x, self.weight.to(self.dtype), self.bias.to(self.dtype))
        return F.gelu(y, approximate="tanh") if gelu else y  # gelu_new


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, bias, prompt, cache, at):
        N, S, C = x.shape
        if prompt is None:
            q, k, v = self.project(x, N).squeeze(3)  # (N, H, S, D)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if q.is_cuda else attend(q, k, v, bias)
            return self.c_proj(y.transpose(1, 2).reshape(N, S, C)), (k, v)
        B = len(prompt[0])
        q, k, v = own = self.project(x, B)  # (B, H, G, S, D)
        if cache is None:
            shared = (t[:, :, None].expand(-1, -1, N // B, -1, -1) for t in prompt[:2])
            y = attend(q, *(torch.cat(pair, 3) for pair in zip(shared, (k, v))), bias)  # to P + S keys
        else:  # decoding: S = 1, this token's place in the cache is `at`
            for store, new in zip(cache, (k, v)):
                if store.is_cuda:  # a captured step finds the place by itself
                    store.index_copy_(3, at, new.to(store.dtype))
                else:  # in half the time
                    store.narrow(3, int(at), 1).copy_(new)
            y = attend_shared(q.to(store.dtype, memory_format=torch.contiguous_format), *cache, bias, *prompt)
        return self.c_proj(y.permute(0, 2, 3, 1, 4).reshape(N, S, C)), own[1:]

    def project(self, x, B):
        """Queries, keys and values of the rows of B groups: (3, B, H, G, S, D)."""
        (N, S, C), H = x.shape, self.n_head
        return self.c_attn(x).view(B, N // B, S, 3, H, C // H).permute(3, 0, 4, 1, 2, 5)


def attend(q, k, v, bias):
    """Queries (…, S, D) to keys (…, K, D), written out: on CPU in bf16 1.5 times as fast as the fused kernel."""
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)  # (…, S, K)
    scores += bias.to(scores.dtype)
    return scores.softmax(-1) @ v


def attend_shared(q, k, v, bias, prompt_k, prompt_v, prompt_bias):
    """A token of each row (B, H, G, 1, D) to its own row's keys (B, H, G, K, D) and its group's prompt (B, H, P, D).

    The G rows of a group are G queries to one prompt, one matrix product: decoding reads more than it computes, so a
    prompt is read once for its group, never copied for each row.
    """
    q = q * q.shape[-1] ** -0.5
    to_prompt = q[:, :, :, 0] @ prompt_k.transpose(-1, -2)  # (B, H, G, P)
    if prompt_bias is not None:
        to_prompt += prompt_bias.to(to_prompt.dtype)
    to_own = q @ k.transpose(-1, -2)  # (B, H, G, 1, K)
    to_own += bias.to(to_own.dtype)
    weights = torch.cat([to_prompt[:, :, :, None], to_own], -1).softmax(-1)
    to_prompt, to_own = weights.split([prompt_k.shape[2], k.shape[3]], -1)
    return (to_prompt[:, :, :, 0] @ prompt_v)[:, :, :, None] + to_own @ v


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict(
            {"c_fc": Linear(config.n_embd, 4 * config.n_embd), "c_proj": Linear(4 * config.n_embd, config.n_embd)}
        )

    def forward(self, x, *context):
        y, own = self.attn(self.ln_1(x), *context)
        x = x + y
        return x + self.mlp["c_proj"](self.mlp["c_fc"](self.ln_2(x), gelu=True)), own


class GPT(nn.Module):
    dtype = torch.float32  # of the matrix products, see use()
    packed = None  # the unembedding in oneDNN's own order, see packing()

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, _weight=torch.empty(config.vocab_size, config.n_embd))
        self.wpe = nn.Embedding(
            config.n_positions, config.n_embd, _weight=torch.empty(config.n_positions, config.n_embd)
        )
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, p in self.named_parameters():  # GPT-2's initialisation
            if p.is_meta:
                continue  # to be loaded; and drawing there would import half of torch, for two seconds
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif ".ln_" not in name and not name.startswith("ln_"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02)

    def forward(self, tokens, prompt=None, cache=None, at=None):
        """Logits (N, S, V) of the token after each of `tokens` (N, S).

        model(tokens)                        plain causal attention
        model(tokens, prompt)                training: rows that continue their group's shared prompt, N = B·G
        model(tokens, prompt, cache, at)     decoding: S = 1; `at` (1,) is the token's place in the cache
        """
        return self.head(self.trunk(tokens, prompt, cache, at)[0])

    def head(self, x):
        x = x.to(self.dtype)
        return F.linear(x, self.unembedding().to(self.dtype)) if self.packed is None else packed_product(x, self.packed)

    def unembedding(self):
        return self.wte.weight  # tied; a cast twin has one of its own

    def use(self, dtype):
        """Matrix products in `dtype` from now on; weights, residuals and layer norms stay as they are."""
        for layer in self.modules():
            if isinstance(layer, Linear | GPT):
                layer.dtype = dtype
        return self

    def cast(self, dtype):
        """A twin for sampling, without gradients: it computes what use(dtype) computes, from matrices that are cast
        once and not at every token. Everything else it shares."""
        with torch.device("meta"):
            twin = GPT(self.config)
        twin.load_state_dict(self.state_dict(), assign=True)
        for layer in twin.modules():
            if isinstance(layer, Linear):
                layer.to(dtype)
        unembedding = self.wte.weight.detach().to(dtype)
        twin.unembedding = lambda: unembedding

        def recast(*_):  # after other weights have been loaded
            unembedding.copy_(twin.wte.weight)

        twin.register_load_state_dict_post_hook(recast)
        if "tokenizer" in self.__dict__:
            twin.tokenizer = self.tokenizer
        return twin.use(dtype).requires_grad_(False)

    @contextmanager
    def packing(self):
        """For decoding on a CPU in bf16: matrices that lie as oneDNN reads them, not packed at each token, and GELU as
        part of a product. Elsewhere nothing changes."""
        here = packs(self.wte.weight.device, self.dtype)
        layers = [layer for layer in self.modules() if here and isinstance(layer, Linear | GPT)]
        for layer in layers:
            weight = self.unembedding() if layer is self else layer.weight
            layer.packed = pack(weight.to(self.dtype))
        try:
            yield
        finally:
            for layer in layers:
                layer.packed = None

    def trunk(self, tokens, prompt=None, cache=None, at=None, keys_only=False):
        """Hidden states (N, S, C) and each layer's keys and values of `tokens`; or these alone, and no states."""
        (N, S), device = tokens.shape, tokens.device
        positions = torch.arange(S, device=device) if at is None else at  # (S,)
        own = torch.arange(S if cache is None else cache.keys[0].shape[3], device=device)
        bias = torch.zeros(S, len(own), device=device).masked_fill_(own > positions[:, None], -math.inf)
        if prompt is not None:
            B = len(prompt.lengths)
            positions = prompt.lengths.repeat_interleave(N // B)[:, None] + positions  # (N, S)
            if cache is None:  # (B, 1, 1, S, P + S)
                bias = torch.cat([prompt.bias[:, None].expand(B, 1, 1, S, -1), bias.expand(B, 1, 1, S, S)], -1)
        x = self.wte(tokens) + self.wpe(positions)
        keys, values = [], []
        for i, block in enumerate(self.h):
            shared = (prompt.keys[i], prompt.values[i], prompt.bias) if prompt is not None else None
            stored = (cache.keys[i], cache.values[i]) if cache is not None else None
            if keys_only and block is self.h[-1]:  # nobody reads the rest of it
                x, (_, k, v) = None, block.attn.project(block.ln_1(x), N).squeeze(3)
            else:
                x, (k, v) = block(x, bias, shared, stored, at)
            keys.append(k)
            values.append(v)
        return x if keys_only else self.ln_f(x), keys, values

    def prefill(self, tokens, lengths):
        """The shared part of B prompts: tokens (B, P) padded on the right, lengths (B,) with the last token counted.

        Gradients flow through it. Padding follows a prompt, so causal attention keeps it out of the prompt's own keys.
        """
        _, keys, values = self.trunk(tokens[:, :-1], keys_only=True)
        padding = torch.arange(tokens.shape[1] - 1, device=tokens.device) >= lengths[:, None] - 1  # (B, P - 1)
        bias = torch.zeros(padding.shape, device=tokens.device).masked_fill_(padding, -math.inf)[:, None, None]
        return Prompt(keys, values, lengths - 1, bias)

    def score(self, tokens, lengths, completions):
        """Logits (N, T, V) for each token of `completions` (N, T), whose groups share the prompts `tokens` (B, P)."""
        last = tokens.gather(1, lengths[:, None] - 1).repeat_interleave(len(completions) // len(tokens), 0)  # (N, 1)
        return self(torch.cat([last, completions[:, :-1]], 1), self.prefill(tokens, lengths))

    @classmethod
    def load(cls, source):
        """The model in a Hugging Face folder or on the hub; every tensor is accounted for, none stays random."""
        folder = fetch(source)
        config, weights = read_config(folder, GPTConfig), read_weights(folder)
        if config.n_layer > len(weights):  # a stranger's millions of layers would take hours to build
            raise LoadError(f"{folder}: config.json asks for {config.n_layer} layers, the weights have fewer tensors.")
        with torch.device("meta"):  # no memory and no random numbers: each parameter comes from the file or is missing
            model = cls(config)
        wanted, found = model.state_dict(), {}
        for name, tensor in weights.items():
            name = name.removeprefix("transformer.")
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue  # causal masks that old versions of transformers stored
            turned = tensor.t() if name.endswith(TRANSPOSED) and tensor.ndim == 2 else tensor
            found[name] = turned.float().contiguous()
        head = found.pop("lm_head.weight", None)
        if head is not None and not ("wte.weight" in found and torch.equal(head, found["wte.weight"])):
            raise LoadError(f"{folder}: lm_head.weight differs from wte.weight, but GPT-2's head is tied to it.")
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                raise LoadError(f"{folder}: the weights have no tensor {name}, which config.json asks for.")
            if name not in wanted:
                raise LoadError(f"{folder}: the weights have a tensor {name} that config.json has no place for.")
            if wanted[name].shape != found[name].shape:
                shapes = tuple(found[name].shape), tuple(wanted[name].shape)
                raise LoadError(f"{folder}: tensor {name} has shape {shapes[0]}, but config.json asks for {shapes[1]}.")
        model.load_state_dict(found, assign=True)
        model.requires_grad_(True)
        if has_tokenizer(folder):
            model.tokenizer = Tokenizer.load(folder)
            if model.tokenizer.vocab_size > model.config.vocab_size:
                raise LoadError(f"{folder}: the tokenizer has more tokens than the model's vocab_size.")
            model.config.eos_token_id = model.tokenizer.eos
        return model

    @cached_property
    def tokenizer(self):
        return Tokenizer.gpt2()  # a folder without tokenizer files is taken for GPT-2's own

    def save(self, path, dtype=torch.float32):
        """A folder that transformers and vLLM open. A new one appears whole or not at all; in an old one each file is
        replaced whole, and other files are kept."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            weights = {
                f"transformer.{name}": (p.t() if name.endswith(TRANSPOSED) else p).to("cpu", dtype).contiguous()
                for name, p in self.state_dict().items()
            }
            save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
            config = {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "activation_function": "gelu_new",
                **{name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
                "bos_token_id": self.config.eos_token_id,
                "torch_dtype": str(dtype).removeprefix("torch."),
                **asdict(self.config),
            }
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if "tokenizer" in self.__dict__:  # known, so worth keeping; GPT-2's default would need the network
                for name, content in self.tokenizer.files.items():
                    (temporary / name).write_bytes(content)
            for file in temporary.iterdir():
                file.chmod(0o644)  # safetensors writes for the owner alone
            if path.exists():
                for file in temporary.iterdir():
                    os.replace(file, path / file.name)
            else:
                temporary.chmod(0o755)  # mkdtemp's folders are private
                os.rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def is_gain(name):
    return "ln_" in name and name.endswith(".weight")
