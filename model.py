"""GPT-2: the forward pass, with prompts that a group shares and a cache; a Hugging Face folder in and out.

There is no dropout, whatever config.json says: with it policy and reference are two different functions, and KL is
large before the first update. Training, prefill and decoding run the same layers, so that sampling and training
compute the same logprobs. Names and sizes are those of transformers' GPT2LMHeadModel (Radford et al., 2019).

Sizes: B prompts, G rows in a group, N = B·G rows, P prompt tokens, T completion tokens, V vocabulary;
C = H·D channels in H heads.
"""

import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from nanorook.folder import fetch, read_config, read_weights
from nanorook.settings import refuse
from nanorook.tokenizer import Tokenizer

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
    extra: dict = field(default_factory=dict)  # other entries of config.json, kept for the task and for save()


@dataclass
class Prompt:
    """The part of the prompts that a group's rows share: keys and values of all tokens but the last.

    The last prompt token is the first token that each row feeds to the model: its output predicts the row's first new
    token, so nothing but keys and values has to be kept.
    """

    keys: list  # one (B, H, P, D) for each layer
    values: list
    lengths: torch.Tensor  # (B,) tokens before the last one
    bias: torch.Tensor  # (B, 1, 1, P) added to scores: 0 on a prompt's tokens, -inf on its padding

    def select(self, groups):
        """The prompts of some groups only."""
        keys, values = [k[groups] for k in self.keys], [v[groups] for v in self.values]
        return Prompt(keys, values, self.lengths[groups], self.bias[groups])


class Linear(nn.Linear):
    """The product is computed in `dtype`, whatever the weights and the input are."""

    dtype = torch.float32

    def reset_parameters(self):
        pass  # GPT initialises

    def forward(self, x):
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), self.bias.to(self.dtype))


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, bias, prompt, cache, at):
        (N, S, C), H = x.shape, self.n_head
        B = N if prompt is None else len(prompt[0])  # without a shared prompt each row is a group of its own
        q, k, v = self.c_attn(x).view(B, N // B, S, 3, H, C // H).permute(3, 0, 4, 1, 2, 5)  # (B, H, G, S, D)
        if prompt is None:
            y = attend(q, k, v, bias)
        elif cache is None:  # training: each row's keys follow a copy of its prompt's
            shared = (x[:, :, None].expand(-1, -1, N // B, -1, -1) for x in prompt[:2])
            y = attend(q, *(torch.cat(pair, 3) for pair in zip(shared, (k, v))), bias)
        else:  # decoding: S = 1
            for stored, new in zip(cache, (k, v)):
                stored[:, :, :, at] = new.to(stored.dtype)
            y = attend_shared(q.to(cache[0].dtype), *cache, bias, *prompt)
        return self.c_proj(y.permute(0, 2, 3, 1, 4).reshape(N, S, C)), (k, v)


def attend(q, k, v, bias):
    """Queries (…, S, D) to keys (…, K, D). On a CPU in bf16 this is 1.5 times as fast as the fused kernel."""
    if q.is_cuda and bias.ndim == 2:  # plain causal attention, G = 1
        return F.scaled_dot_product_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], is_causal=True)[:, :, None]
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)  # (…, S, K)
    scores += bias.to(scores.dtype)
    return scores.softmax(-1) @ v


def attend_shared(q, k, v, bias, prompt_k, prompt_v, prompt_bias):
    """One token of each row (B, H, G, 1, D) to its row's keys (B, H, G, K, D) and its group's prompt (B, H, P, D).

    The G rows are G queries to one prompt, one matrix product: decoding is bound by reading memory, so a prompt is
    read once for its group and not copied for each row.
    """
    q = q * q.shape[-1] ** -0.5
    to_prompt = q[:, :, :, 0] @ prompt_k.transpose(-1, -2)  # (B, H, G, P)
    to_prompt += prompt_bias.to(to_prompt.dtype)
    to_own = q @ k.transpose(-1, -2)  # (B, H, G, 1, K)
    to_own += bias.to(to_own.dtype)
    weights = torch.cat([to_prompt[:, :, :, None], to_own], -1).softmax(-1)
    to_prompt, to_own = weights.split([prompt_k.shape[2], k.shape[3]], -1)
    return (to_prompt[:, :, :, 0] @ prompt_v)[:, :, :, None] + to_own @ v


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.ln_1 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict({"c_fc": Linear(C, 4 * C), "c_proj": Linear(4 * C, C)})

    def forward(self, x, *context):
        y, keys_and_values = self.attn(self.ln_1(x), *context)
        x = x + y
        y = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")  # gelu_new
        return x + self.mlp["c_proj"](y), keys_and_values


class GPT(nn.Module):
    dtype = torch.float32  # of the matrix products, see use()
    tokenizer = None  # load() sets it

    def __init__(self, config):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        self.wte = nn.Embedding(V, C, _weight=torch.empty(V, C))
        self.wpe = nn.Embedding(config.n_positions, C, _weight=torch.empty(config.n_positions, C))
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.register_buffer("unembedding", None, persistent=False)  # of a cast() twin; else the head is tied to wte
        for name, p in self.named_parameters():  # GPT-2's initialisation
            if p.is_meta:
                continue  # load() fills it; and drawing there would import half of torch, for two seconds
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif ".ln_" not in name and not name.startswith("ln_"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02)

    def forward(self, tokens):
        """Logits (N, S, V) of the token after each of `tokens` (N, S): plain causal attention."""
        S = tokens.shape[1]
        return self.head(self.trunk(tokens, torch.arange(S, device=tokens.device), causal_bias(S, tokens.device))[0])

    def score(self, tokens, lengths, completions):
        """Training: logits (N, T, V) of each token of `completions` (N, T), whose groups share the prompts
        `tokens` (B, P)."""
        (N, T), B, device = completions.shape, len(tokens), tokens.device
        prompt = self.prefill(tokens, lengths)
        last = tokens.gather(1, lengths[:, None] - 1).repeat_interleave(N // B, 0)  # (N, 1)
        own = causal_bias(T, device).expand(B, 1, 1, T, T)
        bias = torch.cat([prompt.bias[:, None].expand(B, 1, 1, T, -1), own], -1)  # (B, 1, 1, T, P + T)
        positions = prompt.lengths.repeat_interleave(N // B)[:, None] + torch.arange(T, device=device)  # (N, T)
        return self.head(self.trunk(torch.cat([last, completions[:, :-1]], 1), positions, bias, prompt)[0])

    def prefill(self, tokens, lengths):
        """Keys and values of B prompts without their last tokens: tokens (B, P) padded on the right, lengths (B,).

        Gradients flow through it. Padding follows a prompt, so causal attention keeps it out of the prompt's own keys.
        """
        tokens = tokens[:, :-1]
        P, device = tokens.shape[1], tokens.device
        _, keys, values = self.trunk(tokens, torch.arange(P, device=device), causal_bias(P, device))
        padding = torch.arange(P, device=device) >= lengths[:, None] - 1  # (B, P)
        bias = torch.zeros(padding.shape, device=device).masked_fill_(padding, -math.inf)[:, None, None]
        return Prompt([k[:, :, 0] for k in keys], [v[:, :, 0] for v in values], lengths - 1, bias)

    def decode(self, tokens, prompt, cache, t):
        """Logits (N, V) after the newest token of each row, `tokens` (N, 1), which becomes number t of the cache.

        On CUDA t is a tensor (1,), so that a captured graph can be replayed for every token; else it is an int.
        """
        room = torch.arange(cache.keys[0].shape[3], device=tokens.device)
        bias = torch.where(room <= t, 0.0, -math.inf)  # what is not written yet must not be seen
        at = t if torch.is_tensor(t) else slice(t, t + 1)
        positions = prompt.lengths.repeat_interleave(len(tokens) // len(prompt.lengths))[:, None] + t  # (N, 1)
        return self.head(self.trunk(tokens, positions, bias, prompt, cache, at)[0])[:, 0]

    def trunk(self, tokens, positions, bias, prompt=None, cache=None, at=None):
        """Hidden states (N, S, C) of `tokens`, and each layer's keys and values."""
        x = self.wte(tokens) + self.wpe(positions)
        keys, values = [], []
        for i, block in enumerate(self.h):
            shared = None if prompt is None else (prompt.keys[i], prompt.values[i], prompt.bias)
            stored = None if cache is None else (cache.keys[i], cache.values[i])
            x, (k, v) = block(x, bias, shared, stored, at)
            keys.append(k)
            values.append(v)
        return self.ln_f(x), keys, values

    def head(self, x):
        weight = self.wte.weight if self.unembedding is None else self.unembedding
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def use(self, dtype):
        """Matrix products are in `dtype` from now on; weights, residuals and layer norms stay as they are."""
        for layer in self.modules():
            if isinstance(layer, Linear | GPT):
                layer.dtype = dtype
        return self

    def cast(self, dtype):
        """A twin without gradients, for sampling or as a reference: it computes what use(dtype) computes, from matrices
        that are cast once and not at every token. All other weights it shares with this model."""
        with torch.device("meta"):
            twin = GPT(self.config)
        twin.load_state_dict(self.state_dict(), assign=True)
        for layer in twin.modules():
            if isinstance(layer, Linear):
                layer.to(dtype)
        twin.unembedding = self.wte.weight.detach().to(dtype)
        twin.tokenizer = self.tokenizer
        return twin.use(dtype).requires_grad_(False)

    @classmethod
    def load(cls, source):
        """The model in a Hugging Face folder or on the hub; every tensor is accounted for, none stays random."""
        folder = fetch(source)
        config, weights = read_config(folder, GPTConfig), read_weights(folder)
        if config.n_layer > len(weights):  # a damaged config's millions of layers would take hours to build
            refuse(f"{folder}: config.json asks for {config.n_layer} layers, the weights have fewer tensors.")
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
            refuse(f"{folder}: lm_head.weight differs from wte.weight, but GPT-2's head is tied to it.")
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                refuse(f"{folder}: the weights have no tensor {name}, which config.json asks for.")
            if name not in wanted:
                refuse(f"{folder}: the weights have a tensor {name} that config.json has no place for.")
            if wanted[name].shape != found[name].shape:
                shapes = tuple(found[name].shape), tuple(wanted[name].shape)
                refuse(f"{folder}: tensor {name} has shape {shapes[0]}, but config.json asks for {shapes[1]}.")
        model.load_state_dict(found, assign=True)
        model.requires_grad_(True)
        model.tokenizer = Tokenizer.load(folder)  # GPT-2's own where the folder has no tokenizer files
        if model.tokenizer.vocab_size > config.vocab_size:
            refuse(f"{folder}: the tokenizer has more tokens than the model's vocab_size.")
        config.eos_token_id = model.tokenizer.eos
        return model

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
            config = asdict(self.config)
            config = {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "activation_function": "gelu_new",
                **{name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
                "bos_token_id": self.config.eos_token_id,
                "torch_dtype": str(dtype).removeprefix("torch."),
                **config.pop("extra"),
                **config,
            }
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name, content in (self.tokenizer.files if self.tokenizer else {}).items():
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


def causal_bias(S, device):
    """(S, S), added to scores: -inf where a key follows its query."""
    return torch.full((S, S), -math.inf, device=device).triu_(1)
