"""GPT-2: the forward pass, with a cache and with prompts that a group shares; Hugging Face folders, read and written.

There is no dropout, whatever config.json says: with it, policy and reference would be different functions, and their KL
would be large before the first update. Training, prefill and decoding run the same layers, so sampling and training
compute the same logprobs, up to rounding. Names and sizes are those of transformers' GPT2LMHeadModel (Radford et al.,
2019).

A prompt is split before its last token, see Prefix: all tokens but the last are shared by the rows of a group, and the
last one is the first input of each row, as the model's output there predicts the first token of the answer.

Another architecture is a subclass of GPT in a file of its own, such as architectures/llama.py: it makes its modules
(`wte`, its blocks `h`, the buffer `unembedding`), brings `trunk` and `head_weight`, and reads and writes its folders
with the four methods at the end of GPT. Sampling, shared prompts, training and checkpoints are inherited.

Sizes: B prompts, G rows in a group, N = B·G rows, P prompt and T completion tokens, C = H·D channels in H heads. In
attention: S queries of a row, K keys of its own; where R query heads share the keys of one head, H counts key heads.
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
from nanorook import lora
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
    """What the rows of a group share of their prompt: the keys and values of all its tokens but the last."""

    layers: list  # for each layer its keys and values, both (B, H, P - 1, D)
    last_tokens: torch.Tensor  # (B, 1) which each row feeds to the model itself, to predict its first new token
    shared_lengths: torch.Tensor  # (B,) tokens of each prompt, without its last one
    bias: torch.Tensor  # (B, 1, 1, P - 1) added to attention scores: 0 on the shared tokens, -inf on what follows them


class Linear(nn.Linear):
    """The product is computed in `dtype`, whatever the dtypes of the weights and the input."""

    dtype = torch.float32

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.adapter = None  # what LoRA adds to the product, see nanorook/lora.py

    def reset_parameters(self):
        pass  # GPT initialises all weights

    def forward(self, x):
        x = x.to(self.dtype)
        weight = self.weight.to(self.dtype)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        y = F.linear(x, weight, bias)
        return y if self.adapter is None else y + self.adapter(x)


class Embedding(nn.Embedding):
    """The residual stream is at least fp32, even where frozen weights are bf16."""

    def reset_parameters(self):
        pass  # GPT initialises all weights

    def forward(self, tokens):
        x = super().forward(tokens)
        return x.to(torch.promote_types(x.dtype, torch.float32))


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x, layer, attend):
        N, S, C = x.shape
        D = C // self.n_head
        qkv = self.c_attn(x).view(N, S, 3, self.n_head, D)  # (N, S, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (N, H, S, D)
        heads = attend(layer, q, k, v)  # (N, H, S, D)
        concatenated = heads.transpose(1, 2).reshape(N, S, C)
        return self.c_proj(concatenated)


def causal_attention(layer, q, k, v):
    """Attention of each token (N, H, S, D) to itself and those before it; keys may have fewer heads, see grouped()."""
    dtype = q.dtype
    fewer_keys = k.shape[1] < q.shape[1]
    if not q.is_cuda:  # on a CPU this kernel's backward takes longer in bf16 than in fp32
        wide = torch.promote_types(dtype, torch.float32)
        q = q.to(wide)
        k = k.to(wide)
        v = v.to(wide)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=fewer_keys)
    return heads.to(dtype)


def shared_attention(q, k, v, bias, prompt_k, prompt_v, prompt_bias):
    """Attention of queries (N, H·R, S, D) to their row's keys (B, H, G, K, D) and their prompt's (B, H, P - 1, D).

    The G·R·S queries to one prompt are one matrix product: the prompt is read once for its group, not copied for each
    row. Decoding is bound by memory bandwidth, and in training the copies would take longer than short answers do. R
    query heads share the keys of one head (Ainslie et al., 2023); R = 1 in GPT-2.
    """
    B, H, G, K, D = k.shape
    R = q.shape[1] // H
    queries = grouped(q, B, H).to(k.dtype) * D**-0.5  # (B, H, G, R·S, D)

    prompt_scores = queries.flatten(2, 3) @ prompt_k.transpose(-1, -2)  # (B, H, G·R·S, P - 1)
    prompt_scores += prompt_bias.to(prompt_scores.dtype)
    prompt_scores = prompt_scores.unflatten(2, (G, -1))  # (B, H, G, R·S, P - 1)
    own_scores = queries @ k.transpose(-1, -2)  # (B, H, G, R·S, K)
    bias = bias.to(own_scores.dtype).expand(R, -1, -1)  # (R, S, K)
    own_scores += bias.flatten(0, 1)  # (R·S, K)

    weights = torch.cat([prompt_scores, own_scores], -1).softmax(-1)  # over prompt and own keys together
    prompt_weights, own_weights = weights.split([prompt_k.shape[2], K], -1)
    from_prompt = prompt_weights.flatten(2, 3) @ prompt_v  # (B, H, G·R·S, D)
    heads = from_prompt.unflatten(2, (G, -1)) + own_weights @ v  # (B, H, G, R·S, D)
    return heads.transpose(1, 2).reshape(q.shape)


def grouped(x, B, H):
    """Rows (N, H·R, S, D) as the G rows of B groups (B, H, G, R·S, D)."""
    x = x.unflatten(0, (B, -1))  # (B, G, H·R, S, D)
    x = x.unflatten(2, (H, -1)).transpose(1, 2)  # (B, H, G, R, S, D)
    return x.flatten(3, 4).contiguous()  # one copy here; otherwise every product would make its own


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.ln_1 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict()
        self.mlp["c_fc"] = Linear(C, 4 * C)
        self.mlp["c_proj"] = Linear(4 * C, C)

    def forward(self, x, layer, attend):
        x = x + self.attn(self.ln_1(x), layer, attend)
        hidden = self.mlp["c_fc"](self.ln_2(x))  # (N, S, 4·C)
        hidden = F.gelu(hidden, approximate="tanh")  # gelu_new
        return x + self.mlp["c_proj"](hidden)


def transposed(weights):
    """The tensors, with GPT-2's Conv1D matrices turned into those of nn.Linear, or back."""
    result = {}
    for name, p in weights.items():
        is_conv1d = name.endswith(TRANSPOSED) and p.ndim == 2
        result[name] = p.t() if is_conv1d else p
    return result


class GPT(nn.Module):
    dtype = torch.float32  # of the matrix products, see set_compute_dtype()
    recompute = False  # True: blocks are recomputed in the backward pass, so nothing of size rows × keys is kept
    most_logits = 2**28  # in training; more are made in parts
    tokenizer = None  # load() sets it
    lora = None  # rank and base of its adapters, if it has any: see nanorook/lora.py

    def __init__(self, config):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        self.wte = Embedding(V, C)
        self.wpe = Embedding(config.n_positions, C)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(C, eps=config.layer_norm_epsilon)
        self.register_buffer("unembedding", None, persistent=False)  # inference copies only: head_weight in their dtype
        if not self.wte.weight.is_meta:  # load() fills tensors on the meta device
            self.initialise()

    def initialise(self):
        """GPT-2's initial weights."""
        smaller = 0.02 / math.sqrt(2 * self.config.n_layer)  # of matrices that add to the residual stream
        for name, p in self.named_parameters():
            is_norm = ".ln_" in name or name.startswith("ln_")
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif not is_norm:
                nn.init.normal_(p, std=smaller if "c_proj" in name else 0.02)

    # Four ways through the trunk. They differ in what a token attends to: `attend(layer, q, k, v)` returns the outputs
    # of the heads, which have q's shape, (N, H, S, D).

    def forward(self, tokens):
        """Logits (N, S, V) of the token after each of `tokens` (N, S): plain causal attention. A step does not use it:
        it samples with prefill() and decode(), and trains with score()."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.trunk(tokens, positions, causal_attention)  # (N, S, C)
        return self.head(hidden)

    def prefill(self, prompts, lengths):
        """The Prefix of B prompts: `prompts` (B, P) padded on the right, their lengths (B,). Gradients flow through it.
        Padding follows a prompt, so causal attention keeps it out of the prompt's keys."""
        tokens = prompts[:, :-1]  # (B, P - 1); a prompt shorter than P still has its last token here; the bias hides it
        last_tokens = prompts.gather(1, lengths[:, None] - 1)  # (B, 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        layers = {}

        def attend_and_keep(layer, q, k, v):
            layers[layer] = k, v
            return causal_attention(layer, q, k, v)

        self.trunk(tokens, positions, attend_and_keep)
        is_shared = positions < lengths[:, None] - 1  # (B, P - 1)
        bias = torch.where(is_shared, 0.0, -math.inf)[:, None, None]  # (B, 1, 1, P - 1)
        return Prefix([*layers.values()], last_tokens, lengths - 1, bias)

    def score(self, prompts, lengths, completions):
        """Training: hidden states (N, T, C), from which head() makes the logits of each token of `completions` (N, T),
        whose groups share the prompts (B, P)."""
        B = len(prompts)
        N, T = completions.shape
        device = prompts.device
        prefix = self.prefill(prompts, lengths)
        bias = torch.full((T, T), -math.inf, device=device).triu_(1)  # keys that follow their query are not seen

        def attend_to_prompt_and_row(layer, q, k, v):
            own_k = grouped(k, B, k.shape[1])  # (B, H, G, T, D)
            own_v = grouped(v, B, v.shape[1])
            prompt_k, prompt_v = prefix.layers[layer]
            return shared_attention(q, own_k, own_v, bias, prompt_k, prompt_v, prefix.bias)

        first_inputs = prefix.last_tokens.repeat_interleave(N // B, 0)  # (N, 1)
        inputs = torch.cat([first_inputs, completions[:, :-1]], 1)  # (N, T)
        positions = self.position_ids(prefix, N, torch.arange(T, device=device))
        return self.trunk(inputs, positions, attend_to_prompt_and_row)

    def decode(self, tokens, prefix, cache, t):
        """Logits (N, V) after the newest token of each row, `tokens` (N, 1). Its keys and values go into slot t, a
        tensor (1,), of the cache, which has those of each layer as grouped() lays them out."""
        B = len(prefix.shared_lengths)
        count = cache[0][0].shape[3]
        slots = torch.arange(count, device=tokens.device)
        is_written = slots[None] <= t  # (1, slots)
        bias = torch.where(is_written, 0.0, -math.inf)  # slots that are not written yet must not be seen

        def attend_to_prompt_and_cache(layer, q, k, v):
            own_k, own_v = cache[layer]  # (B, H, G, slots, D)
            new_k = grouped(k, B, k.shape[1])  # (B, H, G, 1, D)
            own_k.index_copy_(3, t, new_k.to(own_k.dtype))
            new_v = grouped(v, B, v.shape[1])
            own_v.index_copy_(3, t, new_v.to(own_v.dtype))
            prompt_k, prompt_v = prefix.layers[layer]
            return shared_attention(q, own_k, own_v, bias, prompt_k, prompt_v, prefix.bias)

        positions = self.position_ids(prefix, len(tokens), t)
        hidden = self.trunk(tokens, positions, attend_to_prompt_and_cache)  # (N, 1, C)
        return self.head(hidden)[:, 0]

    def position_ids(self, prefix, N, t):
        """Positions (N, T) of the inputs `t` of each row, of which number 0 is its prompt's last token. A row beyond
        n_positions has ended."""
        rows_of_a_prompt = N // len(prefix.shared_lengths)
        # The prompt's last token follows the shared ones, so their number is its position, counted from 0
        first = prefix.shared_lengths.repeat_interleave(rows_of_a_prompt)[:, None]  # (N, 1)
        return (first + t).clamp(max=self.config.n_positions - 1)

    def trunk(self, tokens, positions, attend):
        """Hidden states (N, S, C) of `tokens` (N, S), which stand at `positions` (S,) or (N, S)."""
        x = self.wte(tokens) + self.wpe(positions)
        return self.ln_f(self.blocks(x, attend))

    def blocks(self, x, attend):
        for layer, block in enumerate(self.h):
            if self.recompute:
                x = recomputed(block, x, layer, attend)
            else:
                x = block(x, layer, attend)
        return x

    @property
    def head_weight(self):
        return self.wte.weight  # (V, C): GPT-2's head is tied to its embeddings

    def head(self, x):
        """Logits (N, S, V) from hidden states (N, S, C)."""
        weight = self.head_weight if self.unembedding is None else self.unembedding
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def set_compute_dtype(self, dtype):
        """Matrix products are in `dtype` from now on; weights, residuals and layer norms stay as they are."""
        for module in self.modules():
            if isinstance(module, Linear | GPT):
                module.dtype = dtype
        return self

    def inference_copy(self, dtype):
        """A copy without gradients, for sampling or as a reference: it computes the same in `dtype`, from matrices
        that are cast once and not at every token. It shares with this model all weights that need no cast: in fp32,
        all of them."""
        with torch.device("meta"):
            copy = type(self)(self.config)
            if self.lora:
                lora.add_empty(copy, self.lora)
        copy.load_state_dict(self.state_dict(), assign=True)  # the same tensors, not copies of them
        for module in copy.modules():
            if isinstance(module, Linear):
                module.to(dtype)
        copy.unembedding = self.head_weight.detach().to(dtype)
        copy.tokenizer = self.tokenizer
        return copy.set_compute_dtype(dtype).requires_grad_(False)

    @torch.no_grad()
    def sync_from(self, model):
        """Copies the weights of `model`, which have changed since this copy was made."""
        lora.load_trained_state(self, lora.trained_state(model))  # all weights, or with LORA_RANK the adapters
        if not self.lora:  # adapters leave the head as it is
            self.unembedding.copy_(model.head_weight)

    # config.json and the names of tensors, in and out; a subclass with another folder format overrides these four.

    @staticmethod
    def read_config(folder):
        file = folder / "config.json"
        content = files.read_json(file)
        defaults = asdict(GPTConfig())
        del defaults["extra"]
        values = {name: content.get(name, default) for name, default in defaults.items()}
        bounds = {
            "vocab_size": files.SIZE,
            "n_positions": files.SIZE,
            "n_embd": files.SIZE,
            "n_layer": files.LAYERS,
            "n_head": files.HEADS,
            "layer_norm_epsilon": files.SMALL,
            "eos_token_id": (int, 0, 2**24),
        }
        files.check_numbers(file, values, bounds)
        supported = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "n_inner": (None, 4 * values["n_embd"]),
        }
        files.check_supported(file, content, supported)
        if values["n_embd"] % values["n_head"]:
            fail(f"{file}: n_embd {values['n_embd']} is not a multiple of n_head {values['n_head']}.")
        known = {*values, *REWRITTEN}
        extra = {name: value for name, value in content.items() if name not in known}
        return GPTConfig(**values, extra=extra)

    def write_config(self):
        """A model that is no longer GPT-2 says so, so that transformers does not load it as GPT-2."""
        has_gpt2s_tensors = len(self.state_dict()) == 12 * self.config.n_layer + 4
        if type(self) is not GPT:
            name = type(self).__name__
            model_type = name.lower()
        elif has_gpt2s_tensors:
            name, model_type = "GPT2LMHeadModel", "gpt2"
        else:
            name, model_type = "GPT", "nanorook"
        content = self.config.extra | asdict(self.config)
        del content["extra"]
        content |= dict(architectures=[name], model_type=model_type, activation_function="gelu_new")
        content |= dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        content["bos_token_id"] = self.config.eos_token_id
        return content

    def from_file(self, weights):
        """The tensors under the names of this file, without the causal masks that old versions stored."""
        result = {}
        for name, p in transposed(weights).items():
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            short = name.removeprefix("transformer.")
            if short in result:
                fail(f"the weights have {short} twice, with the prefix transformer. and without; remove one of them.")
            result[short] = p
        return result

    def to_file(self, weights):
        return {f"transformer.{name}": p for name, p in transposed(weights).items()}

    @classmethod
    def load(cls, source, dtype=torch.float32):
        """The model in a Hugging Face folder or on the hub whose architecture is this class, see architectures.load.
        Every tensor is accounted for, none stays random. `dtype` is that of matrices; norms and biases are fp32."""
        folder = files.fetch(source)
        config = cls.read_config(folder)
        with torch.device("meta"):  # no memory and no random numbers: each parameter comes from the file or is missing
            model = cls(config)
        weights = model.from_file(files.read_weights(folder))
        weights = files.check_weights(folder, weights)
        tensors = {}
        for name, p in weights.items():
            is_matrix = p.ndim == 2
            tensors[name] = p.to(dtype if is_matrix else torch.float32).contiguous()
        head = tensors.pop("lm_head.weight", None)
        if head is not None:
            embeddings = tensors.get("wte.weight")
            if embeddings is None or not torch.equal(head, embeddings):
                fail(f"{folder}: lm_head.weight differs from the embeddings, but this model's head is tied to "
                     "them; use a model with a tied head.")  # fmt: skip
        try:
            model.load_state_dict(tensors, assign=True)  # each tensor, and no other
        except RuntimeError as error:  # "Error(s) in loading state_dict for GPT: ..."
            reason = " ".join(str(error).split()[6:])
            fail(f"{folder}: the weights do not match config.json: {reason:.300}")
        model.requires_grad_(True)
        model.tokenizer = config.tokenizer = Tokenizer.load(folder)  # a task finds it in the config
        if model.tokenizer.vocab_size > config.vocab_size:
            fail(f"{folder}: the tokenizer has more tokens than the model's vocab_size; take the one that "
                 "belongs to these weights.")  # fmt: skip
        config.eos_token_id = model.tokenizer.eos
        return model

    def save(self, path, dtype=torch.float32):
        """Writes a folder that transformers and vLLM can open."""
        weights = self.to_file(self.state_dict())
        weights = {name: p.to("cpu", dtype).contiguous() for name, p in weights.items()}
        config = self.write_config()
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        content = {
            "config.json": (json.dumps(config, indent=2) + "\n").encode(),
            "model.safetensors": to_bytes(weights, metadata={"format": "pt"}),
        }
        if self.tokenizer:
            content |= self.tokenizer.files
        files.write(path, content)
