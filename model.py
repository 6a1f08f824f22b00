"""GPT-2: the forward pass, with a cache and with prompts that a group shares; Hugging Face folders, read and written.

There is no dropout, whatever config.json says: with it, policy and reference would be different functions, and their KL
would be large before the first update. Training, prefill and decoding run the same layers, so sampling and training
compute the same logprobs. Names and sizes are those of transformers' GPT2LMHeadModel (Radford et al., 2019).

Another architecture is a subclass of GPT in a file of its own: examples/llama.py.

Sizes: B prompts, G rows in a group, N = B·G rows, P prompt and T completion tokens, C = H·D channels in H heads.
"""

import functools
import json
import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanorook import folder as files
from nanorook.settings import fail
from nanorook.tokenizer import Tokenizer

recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random

# Entries of config.json that `extra` does not keep: write_config() sets or omits them. Without tie_word_embeddings,
# transformers ties GPT-2's head.
REWRITTEN = ("architectures", "model_type", "activation_function", "attn_pdrop", "embd_pdrop", "resid_pdrop")
REWRITTEN += ("bos_token_id", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings")
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
class Prefix:
    """The part of a prompt that the rows of its group share: the keys and values of every token but the last. Each row
    feeds that last token to the model itself, to predict its first new token. Here P counts only the shared tokens."""

    layers: list  # for each layer its keys and values, both (B, H, P, D)
    lengths: torch.Tensor  # (B,) tokens before the last one
    bias: torch.Tensor  # (B, 1, 1, P) added to scores: 0 on a prompt's tokens, -inf on its padding


class Linear(nn.Linear):
    """The product is computed in `dtype`, whatever the dtypes of the weights and the input."""

    dtype = torch.float32

    def reset_parameters(self):
        pass  # GPT initialises all weights

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), bias)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, layer, attend):
        (N, S, C), H = x.shape, self.n_head
        q, k, v = self.c_attn(x).view(N, S, 3, H, C // H).permute(2, 0, 3, 1, 4)  # (N, H, S, D)
        return self.c_proj(attend(layer, q, k, v).transpose(1, 2).reshape(N, S, C))


def causal_attention(layer, q, k, v):
    """Attention of each token (N, H, S, D) to itself and those before it; keys may have fewer heads, see grouped()."""
    # On a CPU this kernel's backward takes longer in bf16 than in fp32.
    wide = q.dtype if q.is_cuda else torch.promote_types(q.dtype, torch.float32)
    q_k_v = (x.to(wide) for x in (q, k, v))
    return F.scaled_dot_product_attention(*q_k_v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1]).to(q.dtype)


def shared_attention(q, k, v, bias, prompt_k, prompt_v, prompt_bias):
    """Attention of queries (N, H·R, S, D) to their row's keys (B, H, G, K, D) and their group's prompt (B, H, P, D).

    The G·R·S queries to one prompt are one matrix product: the prompt is read once for its group, not copied for each
    row. Decoding is bound by memory bandwidth, and in training the copies would take longer than short answers do. R
    query heads share the keys of one head (Ainslie et al., 2023); R = 1 in GPT-2.
    """
    B, H, G, K, D = k.shape
    queries = grouped(q, B, H).to(k.dtype) * D**-0.5  # (B, H, G, R·S, D)
    to_prompt = queries.flatten(2, 3) @ prompt_k.transpose(-1, -2)  # (B, H, G·R·S, P)
    to_prompt += prompt_bias.to(to_prompt.dtype)
    to_own = queries @ k.transpose(-1, -2)  # (B, H, G, R·S, K)
    to_own += bias.to(to_own.dtype).expand(q.shape[1] // H, -1, -1).flatten(0, 1)  # (R·S, K)
    weights = torch.cat([to_prompt.unflatten(2, (G, -1)), to_own], -1).softmax(-1)
    to_prompt, to_own = weights.split([prompt_k.shape[2], K], -1)
    heads = (to_prompt.flatten(2, 3) @ prompt_v).unflatten(2, (G, -1)) + to_own @ v  # (B, H, G, R·S, D)
    return heads.transpose(1, 2).reshape(q.shape)


def grouped(x, B, H):
    """Rows (N, H·R, S, D) as the G rows of B groups (B, H, G, R·S, D)."""
    x = x.unflatten(0, (B, -1)).unflatten(2, (H, -1)).transpose(1, 2)  # (B, H, G, R, S, D)
    return x.flatten(3, 4).contiguous()  # once; otherwise every matmul copies


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.ln_1 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict({"c_fc": Linear(C, 4 * C), "c_proj": Linear(4 * C, C)})

    def forward(self, x, layer, attend):
        x = x + self.attn(self.ln_1(x), layer, attend)
        y = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")  # gelu_new
        return x + self.mlp["c_proj"](y)


def transposed(weights):
    return {name: p.t() if name.endswith(TRANSPOSED) and p.ndim == 2 else p for name, p in weights.items()}


class GPT(nn.Module):
    dtype = torch.float32  # of the matrix products, see set_compute_dtype()
    recompute = False  # True: blocks are recomputed in the backward pass, so nothing of size rows × keys is kept
    tokenizer = None  # load() sets it

    def __init__(self, config):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        self.wte = nn.Embedding(V, C, _weight=torch.empty(V, C))
        self.wpe = nn.Embedding(config.n_positions, C, _weight=torch.empty(config.n_positions, C))
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.register_buffer("unembedding", None, persistent=False)  # inference copies only, see head()
        for name, p in self.named_parameters():  # GPT-2's initialisation
            if p.is_meta:
                continue  # load() fills it; normal_ on meta tensors would import much of torch, which takes two seconds
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif ".ln_" not in name and not name.startswith("ln_"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02)

    # Four ways through the trunk. They differ in what a token attends to: `attend(layer, q, k, v)` returns the outputs
    # of the heads, which have q's shape, (N, H, S, D).

    def forward(self, tokens):
        """Logits (N, S, V) of the token after each of `tokens` (N, S): plain causal attention."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.trunk(tokens, positions, causal_attention))

    def prefill(self, tokens, lengths):
        """Keys and values of B prompts without their last tokens: tokens (B, P) padded on the right, lengths (B,).
        Gradients flow through it. Padding follows a prompt, so causal attention keeps it out of the prompt's keys."""
        tokens, layers = tokens[:, :-1], {}

        def attend(layer, q, k, v):
            layers[layer] = k, v
            return causal_attention(layer, q, k, v)

        positions = torch.arange(tokens.shape[1], device=tokens.device)
        self.trunk(tokens, positions, attend)
        bias = torch.where(positions < lengths[:, None] - 1, 0.0, -math.inf)[:, None, None]  # (B, 1, 1, P - 1)
        return Prefix([*layers.values()], lengths - 1, bias)

    def score(self, tokens, lengths, completions):
        """Training: hidden states (N, T, C), from which head() makes the logits of each token of `completions` (N, T),
        whose groups share the prompts `tokens` (B, P)."""
        (N, T), B, device = completions.shape, len(tokens), tokens.device
        prefix = self.prefill(tokens, lengths)
        bias = torch.full((T, T), -math.inf, device=device).triu_(1)  # keys that follow their query are not seen

        def attend(layer, q, k, v):
            own = (grouped(x, B, x.shape[1]) for x in (k, v))
            return shared_attention(q, *own, bias, *prefix.layers[layer], prefix.bias)

        last = tokens.gather(1, lengths[:, None] - 1).repeat_interleave(N // B, 0)  # (N, 1)
        inputs = torch.cat([last, completions[:, :-1]], 1)
        return self.trunk(inputs, self.position_ids(prefix, N, torch.arange(T, device=device)), attend)

    def decode(self, tokens, prefix, cache, t):
        """Logits (N, V) after the newest token of each row, `tokens` (N, 1). Its keys and values go into slot t, a
        tensor (1,), of the cache, which has those of each layer as grouped() lays them out."""
        B, slots = len(prefix.lengths), torch.arange(cache[0][0].shape[3], device=tokens.device)
        bias = torch.where(slots[None] <= t, 0.0, -math.inf)  # what is not written yet must not be seen

        def attend(layer, q, *own):
            for cached, new in zip(cache[layer], own):
                cached.index_copy_(3, t, grouped(new, B, new.shape[1]).to(cached.dtype))
            return shared_attention(q, *cache[layer], bias, *prefix.layers[layer], prefix.bias)

        return self.head(self.trunk(tokens, self.position_ids(prefix, len(tokens), t), attend))[:, 0]

    def position_ids(self, prefix, N, t):
        """Positions (N, T) of inputs `t`, counted from a prompt's last token. A row beyond n_positions has ended."""
        lengths = prefix.lengths.repeat_interleave(N // len(prefix.lengths))[:, None]
        return (lengths + t).clamp(max=self.config.n_positions - 1)

    def trunk(self, tokens, positions, attend):  # (N, S, C)
        return self.ln_f(self.blocks(self.wte(tokens) + self.wpe(positions), attend))

    def blocks(self, x, attend):
        for layer, block in enumerate(self.h):
            x = recomputed(block, x, layer, attend) if self.recompute else block(x, layer, attend)
        return x

    head_weight = property(lambda self: self.wte.weight)  # (V, C)

    def head(self, x):
        weight = self.head_weight if self.unembedding is None else self.unembedding
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def set_compute_dtype(self, dtype):
        """Matrix products are in `dtype` from now on; weights, residuals and layer norms stay as they are."""
        for layer in self.modules():
            if isinstance(layer, Linear | GPT):
                layer.dtype = dtype
        return self

    def inference_copy(self, dtype):
        """A copy without gradients, for sampling or as a reference: it computes the same in `dtype`, from matrices
        that are cast once and not at every token. It shares all other weights with this model."""
        with torch.device("meta"):
            twin = type(self)(self.config)
        twin.load_state_dict(self.state_dict(), assign=True)
        for layer in twin.modules():
            if isinstance(layer, Linear):
                layer.to(dtype)
        twin.unembedding = self.head_weight.detach().to(dtype)
        twin.tokenizer = self.tokenizer
        return twin.set_compute_dtype(dtype).requires_grad_(False)

    @torch.no_grad()
    def sync_from(self, model):
        """Copies the weights of `model`, which have changed since this copy was made."""
        self.load_state_dict(model.state_dict())
        self.unembedding.copy_(model.head_weight)

    # config.json and the names of tensors, in and out; a subclass with another folder format overrides these four.

    @staticmethod
    def read_config(folder):
        file, defaults = folder / "config.json", asdict(GPTConfig())
        content = files.read_json(file)
        del defaults["extra"]
        values = {name: content.get(name, default) for name, default in defaults.items()}
        bounds = dict.fromkeys(("vocab_size", "n_positions", "n_embd"), files.SIZE)
        bounds |= {"n_layer": files.LAYERS, "n_head": files.HEADS, "layer_norm_epsilon": files.SMALL}
        files.check_numbers(file, values, bounds | {"eos_token_id": (int, 0, 2**24)})
        supported = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)}
        supported |= dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (False,))
        files.check_supported(file, content, supported | {"n_inner": (None, 4 * values["n_embd"])})
        if values["n_embd"] % values["n_head"]:
            fail(f"{file}: n_embd {values['n_embd']} is not a multiple of n_head {values['n_head']}.")
        extra = {name: value for name, value in content.items() if name not in values and name not in REWRITTEN}
        return GPTConfig(**values, extra=extra)

    def write_config(self):
        """A model that is no longer GPT-2 says so, so that transformers does not load it as GPT-2."""
        content, name, kind = self.config.extra | asdict(self.config), "GPT2LMHeadModel", "gpt2"
        if type(self) is not GPT or len(self.state_dict()) != 12 * self.config.n_layer + 4:
            name, kind = type(self).__name__, "nanorook" if type(self) is GPT else type(self).__name__.lower()
        content |= dict(architectures=[name], model_type=kind, activation_function="gelu_new")
        content |= dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=self.config.eos_token_id)
        del content["extra"]
        return content

    def from_file(self, weights):
        """The tensors under the names of this file, without the causal masks that old versions stored."""
        kept = {name: p for name, p in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
        found = {name.removeprefix("transformer."): p for name, p in transposed(kept).items()}
        if len(found) < len(kept):
            twice = next(name for name in kept if f"transformer.{name}" in kept)
            fail(f"the weights have {twice} twice, with the prefix transformer. and without; remove one of them.")
        return found

    def to_file(self, weights):
        return {f"transformer.{name}": p for name, p in transposed(weights).items()}

    @classmethod
    def load(cls, source):
        """The model in a Hugging Face folder or on the hub; every tensor is accounted for, none stays random."""
        folder = files.fetch(source)
        cls = files.architecture(folder) if cls is GPT else cls
        config = cls.read_config(folder)
        with torch.device("meta"):  # no memory and no random numbers: each parameter comes from the file or is missing
            model = cls(config)
        weights = files.check_weights(folder, model.from_file(files.read_weights(folder)))
        found = {name: tensor.float().contiguous() for name, tensor in weights.items()}
        head = found.pop("lm_head.weight", None)
        if head is not None and not ("wte.weight" in found and torch.equal(head, found["wte.weight"])):
            fail(f"{folder}: lm_head.weight differs from the embeddings, but this model's head is tied to them.")
        try:
            model.load_state_dict(found, assign=True)  # each tensor, and no other
        except RuntimeError as error:  # "Error(s) in loading state_dict for GPT: ..."
            fail(f"{folder}: the weights do not match config.json: {' '.join(str(error).split()[6:]):.300}")
        model.requires_grad_(True)
        model.tokenizer = config.tokenizer = Tokenizer.load(folder)  # a task finds it in the config
        if model.tokenizer.vocab_size > config.vocab_size:
            fail(f"{folder}: the tokenizer has more tokens than the model's vocab_size.")
        config.eos_token_id = model.tokenizer.eos
        return model

    def save(self, path, dtype=torch.float32):
        """Writes a folder that transformers and vLLM can open."""
        weights = {name: p.to("cpu", dtype).contiguous() for name, p in self.to_file(self.state_dict()).items()}
        config = self.write_config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
        made = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
        made |= {"model.safetensors": to_bytes(weights, metadata={"format": "pt"})}
        files.write(path, made | (self.tokenizer.files if self.tokenizer else {}))
