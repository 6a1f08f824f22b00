"""Batched sampling with a KV cache: prompts in, completions with their logprobs out.

A group's prompt is prefilled once, stored once and read once for the whole group at each step (model.attend_shared).
Rows that have ended leave the batch. The host looks at the device only every LOOK steps.
"""

import math
from typing import NamedTuple

import torch

LOOK = 8  # steps between two looks at who has finished
SPAN = 16  # tokens by which the cache grows; on CUDA each size is a captured graph of its own


class Rollout(NamedTuple):
    tokens: torch.Tensor  # (N, T) rows b·G … b·G + G-1 continue prompt b; the end token after a row's end
    mask: torch.Tensor  # (N, T) True on a row's own tokens, its end token included
    logprobs: torch.Tensor  # (N, T) under the distribution that was sampled, 0 where the mask is False
    truncated: torch.Tensor  # (N,) True where a row reached the limit without an end token


class Cache:
    """Keys and values of the rows' own tokens while decoding, one (B, H, G, K, D) for each layer, written in place.

    K grows in steps, as a view into all T tokens would be copied at each product. What grows moves to a spare piece of
    memory and leaves its own as the next one's spare: touching new memory costs more than to copy does.
    """

    def __init__(self, config, groups, group_size, limit, device, dtype):
        shape = groups, config.n_head, group_size, 0, config.n_embd // config.n_head
        room = groups * group_size * limit * config.n_embd
        *layers, self.spare = (torch.empty(room, device=device, dtype=dtype) for _ in range(2 * config.n_layer + 1))
        self.keys, self.values = ([x[:0].view(shape) for x in half] for half in (layers[::2], layers[1::2]))

    def move(self, shape, fill):
        for stored in (self.keys, self.values):
            for i, old in enumerate(stored):
                stored[i] = self.spare[: math.prod(shape)].view(shape)
                fill(stored[i], old)
                self.spare = old.as_strided(self.spare.shape, (1,))

    def grow(self, span):
        """To room for `span` tokens."""
        B, H, G, K, D = self.keys[0].shape

        def fill(new, old):
            new[..., :K, :] = old
            new[..., K:, :] = 0  # what no row sees yet has weight 0, and 0 times what lay there before may be NaN

        self.move((B, H, G, span, D), fill)

    def select(self, groups, members):
        """Some groups only, and of each the rows `members` (groups, width)."""
        kept, (_, H, _, K, D) = groups.nonzero(), self.keys[0].shape  # (groups, 1)
        shape = len(members), H, members.shape[1], K, D
        self.move(shape, lambda new, old: new.copy_(old[kept, :, members].transpose(1, 2)))  # indexed: (B, G, H, K, D)


def pad_prompts(prompts, device):
    """Token lists of any lengths -> tokens (B, P) padded on the right, lengths (B,)."""
    lengths = torch.tensor([len(p) for p in prompts])
    if not len(prompts) or lengths.min() < 1:
        raise ValueError("every prompt needs at least one token.")
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), lengths.to(device)


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, keep=None):
    """Log-probabilities (…, V) of what is sampled: temperature first, then the k likeliest, then the nucleus.

    In training `keep` (…) names the sampled tokens: the filters leave them in, wherever an update has moved them.
    """
    logits = unfiltered = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:  # Holtzman et al., 2020: the smallest set of likeliest tokens that holds top_p
        ordered, index = logits.softmax(-1).sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    if keep is not None:
        logits = logits.scatter(-1, keep[..., None], unfiltered.gather(-1, keep[..., None]))
    return logits.log_softmax(-1)


@torch.no_grad()
def generate(
    model,
    prompts,
    group_size,
    max_new_tokens,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    eos=None,
    generator=None,
    noise=None,
):
    """Sample `group_size` completions for each of `prompts` (lists of token ids); temperature 0 is greedy.

    All chance is in `noise`, uniform numbers (N, max_new_tokens); those of `generator` where none are given.
    """
    device = model.wte.weight.device
    eos = model.config.eos_token_id if eos is None else eos
    prompt_tokens, lengths = pad_prompts(prompts, device)
    B, N, T = len(prompts), len(prompts) * group_size, max_new_tokens
    if prompt_tokens.shape[1] + T > model.config.n_positions:
        raise ValueError(
            f"a prompt of {prompt_tokens.shape[1]} tokens and {T} new ones exceed the model's "
            f"{model.config.n_positions} positions; shorten the prompts or lower the limit of new tokens."
        )
    dtype = torch.float32 if device.type == "cpu" else model.dtype  # on CPU small products are faster in fp32
    cache = Cache(model.config, B, group_size, T, device, dtype)
    if noise is None:
        noise = torch.rand(N, T, device=device, generator=generator)
    tokens = torch.full((N, T), max(eos, 0), device=device)
    logprobs = torch.zeros(N, T, device=device)

    # The batch: row i of it is row rows[i] of the result. Everything a step changes, it changes in place, so that a
    # captured step can be replayed.
    rows = torch.arange(N, device=device)
    current = prompt_tokens.gather(1, lengths[:, None] - 1).repeat_interleave(group_size, 0)  # (N, 1)
    alive = torch.ones(N, dtype=torch.bool, device=device)
    at = torch.zeros(1, dtype=torch.long, device=device)

    def step():
        logits = model(current, prompt, cache, at)[:, 0]  # (N, V)
        if temperature == 0:
            token = logits.argmax(-1)
            logprob = torch.zeros_like(token, dtype=torch.float32)  # greedy is certain: log 1
        else:
            logp = distribution(logits, temperature, top_k, top_p)
            token = draw(logp, noise[rows, at])
            logprob = logp.gather(1, token[:, None])[:, 0]
        tokens.index_put_((rows, at), token)
        logprobs.index_put_((rows, at), logprob)
        alive.logical_and_(token != eos)
        current.copy_(token[:, None])
        at.add_(1)

    replay = None
    with model.packing():
        prompt = model.prefill(prompt_tokens, lengths).to(dtype)
        for t in range(T):
            if t % SPAN == 0:
                cache.grow(min(T, t + SPAN))
                replay = None
            if device.type == "cuda" and t > 0:  # the first step runs as it is: it warms the libraries up
                replay = replay or capture(step)
                replay()
            else:
                step()
            if (t + 1) % LOOK == 0 or t + 1 == T:
                living = alive.view(B, -1)  # (B, G)
                groups, width = living.any(1), int(living.sum(1).max())
                if width == 0:
                    break
                if int(groups.sum()) * width <= 0.75 * len(rows):  # leave only groups and rows that go on, rectangular
                    members = living[groups].int().argsort(dim=1, descending=True, stable=True)[:, :width]
                    keep = (groups.nonzero() * living.shape[1] + members).flatten()
                    cache.select(groups, members)
                    prompt, B, replay = prompt.select(groups), len(members), None
                    rows, current, alive = rows[keep], current[keep], alive[keep]

    ended = tokens == eos
    mask = ended.cumsum(1) - ended.long() == 0  # up to the first end token
    T = int(mask.any(0).sum())
    tokens, mask, logprobs = tokens[:, :T].masked_fill(~mask[:, :T], max(eos, 0)), mask[:, :T], logprobs[:, :T]
    return Rollout(tokens, mask, logprobs.masked_fill(~mask, 0), ~ended.any(1))


def draw(logp, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first place where the
    cumulated probability exceeds it."""
    reached = logp.exp().cumsum_(-1)  # with a large vocabulary each pass over it counts
    goal = uniform[:, None] * (1 - 1e-6) * reached[:, -1:]  # the factor: never past the last token
    return torch.searchsorted(reached, goal, right=True)[:, 0].clamp(max=logp.shape[1] - 1)  # nor where all is NaN


def capture(step):
    """One decoding step as a CUDA graph: its hundred kernels are launched as one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
