"""Batched sampling with a KV cache: prompts in, completions with their logprobs out.

A group's prompt is prefilled once, stored once and read once for all its rows (model.attend_shared). On a CPU rows
that have ended leave the batch. On CUDA one decoding step is captured as a graph and replayed for every token.
The result is a Batch: what the loss needs, and how it is cut into microbatches.
"""

from typing import NamedTuple

import torch

CHECK_EVERY = 8  # tokens between two checks of which rows have ended; on CUDA each makes the host wait
GROW_BY = 16  # tokens by which a CPU's cache grows


class Batch(NamedTuple):
    """Completions of one kind of question: N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    prompt_lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T) the end token after a row's end
    completion_mask: torch.Tensor  # (N, T) True on a row's own tokens, its end token included
    rollout_logprobs: torch.Tensor  # (N, T) under the distribution that was sampled; 0 outside the mask
    hit_limit: torch.Tensor  # (N,) True where a row has no end token
    advantages: torch.Tensor | None = None  # (N, T)
    old_logprobs: torch.Tensor | None = None  # (N, T) of the weights that sampled, by the training forward
    ref_logprobs: torch.Tensor | None = None  # (N, T) of the reference

    def select(self, groups, P, T):
        """Some of the groups, with P prompt tokens and T completion tokens."""
        B = len(self.prompts)
        groups = torch.as_tensor(groups, device=self.prompts.device)
        fields = [self.prompts[groups, :P], self.prompt_lengths[groups]]
        for x in self[2:]:
            x = None if x is None else x.view(B, -1, *x.shape[1:])[groups].flatten(0, 1)
            fields.append(x if x is None or x.ndim == 1 else x[:, :T])
        return Batch(*fields)

    def to(self, device):
        return Batch(*(None if x is None else x.to(device) for x in self))


class Cache(NamedTuple):
    """Keys and values of the completions while decoding, one (B, H, G, T, D) for each layer, written in place."""

    keys: list
    values: list

    @classmethod
    def empty(cls, config, B, G, T, device, dtype):
        shape = B, config.n_head, G, T, config.n_embd // config.n_head
        return cls(*([torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)] for _ in "kv"))

    def grow(self, tokens):
        """A cache with room for more tokens. On a CPU it grows as needed: attention reads all of it, and would have to
        copy a part."""
        B, H, G, _, D = self.keys[0].shape
        empty = self.keys[0].new_zeros(B, H, G, tokens, D)  # 0 and not any memory: it may hold NaN
        return Cache(*([torch.cat([x, empty], 3) for x in half] for half in self))

    def select(self, groups, members):
        """Some groups only, and of each group the rows `members` (groups, rows)."""
        groups = groups[:, None]  # indexed, an entry is (B, G, H, T, D)
        return Cache(*([x[groups, :, members].transpose(1, 2).contiguous() for x in half] for half in self))


def microbatches(batch, most_tokens):
    """Cuts a batch into parts of whole groups, long ones together, with at most `most_tokens` each, padding counted."""
    B = len(batch.prompts)
    G = len(batch.tokens) // B
    longest = batch.completion_mask.sum(1).view(B, G).amax(1)  # (B,)
    sizes = torch.stack([batch.prompt_lengths, longest], 1).tolist()  # the one time that the host waits

    def fits(groups):
        return len(groups) * (max(sizes[b][0] for b in groups) + G * max(sizes[b][1] for b in groups)) <= most_tokens

    cuts = [[]]
    for group in sorted(range(B), key=lambda b: sizes[b][1]):
        if cuts[-1] and not fits([*cuts[-1], group]):
            cuts.append([])
        cuts[-1].append(group)
    if len(cuts) > 1 and len(cuts[-1]) == 1 and len(cuts[-2]) > 2 and fits([cuts[-2][-1], *cuts[-1]]):
        cuts[-1].append(cuts[-2].pop())  # torch.compile makes graphs of its own for a batch of one
    return [batch.select(cut, *(max(sizes[b][i] for b in cut) for i in (0, 1))) for cut in cuts]


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
    """Log-probabilities (…, V) of the sampled distribution: temperature first, then the k likeliest, then the nucleus.

    In training `keep` (…) names the sampled tokens: the filters leave them in, wherever an update has moved them.
    """
    logits = unfiltered = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:  # Holtzman et al., 2020: the smallest set of likeliest tokens with a probability of at least top_p
        ordered, index = logits.softmax(-1).sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    if keep is not None:
        logits = logits.scatter(-1, keep[..., None], unfiltered.gather(-1, keep[..., None]))
    return logits.log_softmax(-1)


def draw(logprobs, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first token at which the
    cumulated probability exceeds it."""
    cumulated = logprobs.exp().cumsum_(-1)
    goal = uniform[:, None] * (1 - 1e-6) * cumulated[:, -1:]  # the factor: rounding must not pass the last token
    return torch.searchsorted(cumulated, goal, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)  # clamp: NaN


@torch.no_grad()
def generate(model, prompts, group_size, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, noise=None, graph=True):
    """Samples `group_size` completions of each of `prompts` (lists of token ids); temperature 0 is greedy.

    All randomness is in `noise`, uniform numbers (N, max_new_tokens), drawn here if there are none. `graph=False`: no
    CUDA graph, so that hooks on the model run at every token.
    """
    device, eos = model.wte.weight.device, model.config.eos_token_id
    prompt_tokens, lengths = pad_prompts(prompts, device)
    B, N, T = len(prompts), len(prompts) * group_size, max_new_tokens
    if prompt_tokens.shape[1] + T > model.config.n_positions:
        raise ValueError(
            f"a prompt of {prompt_tokens.shape[1]} tokens and {T} new ones exceed the model's "
            f"{model.config.n_positions} positions; shorten the prompts or lower the limit of new tokens."
        )
    if noise is None:
        noise = torch.rand(N, T, device=device)
    prompt = model.prefill(prompt_tokens, lengths)
    dtype = model.dtype if device.type == "cuda" else torch.float32  # on a CPU small products are faster in fp32
    prompt.keys, prompt.values = ([x.to(dtype).contiguous() for x in half] for half in (prompt.keys, prompt.values))
    room = T if device.type == "cuda" else 0  # a captured graph needs fixed shapes
    cache = Cache.empty(model.config, B, group_size, room, device, dtype)

    tokens = torch.full((N, T), max(eos, 0), device=device)
    logprobs = torch.zeros(N, T, device=device)
    # Row i of the batch is row rows[i] of the result. A step changes tensors in place, so it can be captured.
    rows = torch.arange(N, device=device)
    newest = prompt_tokens.gather(1, lengths[:, None] - 1).repeat_interleave(group_size, 0)  # (N, 1)
    alive = torch.ones(N, dtype=torch.bool, device=device)

    def step(t):
        logits = model.decode(newest, prompt, cache, t)  # (N, V)
        at = t if torch.is_tensor(t) else torch.tensor([t])
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            logp = distribution(logits, temperature, top_k, top_p)
            token = draw(logp, noise[rows, at])
            logprobs.index_put_((rows, at), logp.gather(1, token[:, None])[:, 0])
        tokens.index_put_((rows, at), token)
        alive.logical_and_(token != eos)
        newest.copy_(token[:, None])

    if device.type == "cuda":
        counter = torch.zeros(1, dtype=torch.long, device=device)

        def next_step():
            step(counter)
            counter.add_(1)

        next_step()  # the first one loads the libraries, which must not happen in a capture
        replay = capture(next_step, device) if graph and T > 1 else next_step
        for t in range(1, T):
            if t % CHECK_EVERY == 0 and not alive.any():
                break
            replay()
    else:
        for t in range(T):
            if t % GROW_BY == 0:
                cache = cache.grow(min(GROW_BY, T - t))
            step(t)
            if (t + 1) % CHECK_EVERY == 0:
                living = alive.view(len(prompt.lengths), -1)  # (B, G)
                groups, width = living.any(1).nonzero()[:, 0], int(living.sum(1).max())
                if width == 0:
                    break
                if len(groups) * width <= 0.75 * len(rows):  # keep groups and rows that go on, as a rectangle
                    members = living[groups].int().argsort(dim=1, descending=True, stable=True)[:, :width]
                    keep = (groups[:, None] * living.shape[1] + members).flatten()
                    cache, prompt = cache.select(groups, members), prompt.select(groups)
                    rows, newest, alive = rows[keep], newest[keep], alive[keep]

    ended = tokens == eos
    mask = ended.cumsum(1) - ended.long() == 0  # up to the first end token
    T = int(mask.any(0).sum())
    tokens, mask, logprobs = tokens[:, :T].masked_fill(~mask[:, :T], max(eos, 0)), mask[:, :T], logprobs[:, :T]
    return Batch(prompt_tokens, lengths, tokens, mask, logprobs.masked_fill(~mask, 0), ~ended.any(1))


def capture(step, device):
    """One decoding step as a CUDA graph: its hundred kernels are launched as one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        step()
    return graph.replay
