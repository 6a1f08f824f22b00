"""Batched sampling with a KV cache: questions in, answers with their logprobs out.

A group's prompt is prefilled once, stored once and read once for all its rows (model.shared_attention). On a CPU rows
that have ended leave the batch. On CUDA one decoding step is captured as a graph and replayed for every token.
The result is a Batch, what the loss needs, and the same rows as text for the verifier.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanorook.settings import fail

CHECK_EVERY = 8  # tokens between two checks of which rows have ended; on CUDA each makes the host wait
GROW_BY = 16  # tokens by which a CPU's cache grows


class Batch(NamedTuple):
    """Answers to questions of one kind: N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    prompt_lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T) the end token after a row's end
    completion_mask: torch.Tensor  # (N, T) True on a row's own tokens, its end token included
    rollout_logprobs: torch.Tensor  # (N, T) under the distribution that was sampled; 0 outside the mask
    hit_limit: torch.Tensor  # (N,) True where its limit cut a row off
    advantages: torch.Tensor | None = None  # (N, T)
    old_logprobs: torch.Tensor | None = None  # (N, T) of the weights that sampled, by the training forward
    ref_logprobs: torch.Tensor | None = None  # (N, T) of the reference

    def select(self, groups, P, T):
        """Some of the groups, with P prompt tokens and T completion tokens."""
        G = len(self.tokens) // len(self.prompts)
        groups = torch.as_tensor(groups, device=self.prompts.device)
        rows = (groups[:, None] * G + torch.arange(G, device=groups.device)).flatten()
        prompts, lengths, *per_row = self
        per_row = [x if x is None else x[rows] if x.ndim == 1 else x[rows, :T] for x in per_row]
        return Batch(prompts[groups, :P], lengths[groups], *per_row)


class Answer(NamedTuple):
    """A row of a Batch as text."""

    question: tuple  # the task's Question
    text: str  # without the end token
    ends: list  # for each token the number of characters up to its end
    hit_limit: bool
    grade: Any = None  # the task's Grade


def sample(model, questions, group_size, limits, temperature=1.0, noise=None, rows=None):
    """Samples `group_size` answers to each question: yields (Batch, its Answers), each of one kind of question and of
    at most `rows` rows, or one group. A kind's questions keep their order.

    `limits`: {kind: most tokens of an answer}. `noise` (questions, group_size, most of limits), uniform numbers, is all
    that decides what is drawn; an answer does not depend on what is sampled beside it.
    """
    for kind in dict.fromkeys(question.kind for question in questions):
        places = [i for i, question in enumerate(questions) if question.kind == kind]
        at_once = max(1, rows // group_size) if rows else len(places)
        for part in (places[i : i + at_once] for i in range(0, len(places), at_once)):
            asked = [questions[i] for i in part]
            prompts = [model.tokenizer.encode(question.prompt) for question in asked]
            room = [min(limits[kind], model.config.n_positions - len(prompt)) for prompt in prompts]
            if min(room) < 1:
                fail(f"a prompt of {max(map(len, prompts))} tokens leaves no room for an answer in the model's "
                     f"{model.config.n_positions} positions; use shorter prompts.")  # fmt: skip
            uniform = None if noise is None else noise[part, :, : max(room)].flatten(0, 1)  # (N, T)
            stop = asked[0].stop.encode()
            stops = [i for i, token in model.tokenizer.token_bytes.items() if stop and stop in token]
            batch = generate(model, prompts, group_size, room, temperature, uniform, stops)
            lengths = batch.completion_mask.sum(1).tolist()
            pairs = [detokenize(model.tokenizer, row[:length]) for row, length in zip(batch.tokens.tolist(), lengths)]
            owners = [question for question in asked for _ in range(group_size)]
            yield batch, [Answer(q, *pair, cut) for q, pair, cut in zip(owners, pairs, batch.hit_limit.tolist())]


def detokenize(tokenizer, tokens):
    """(text, ends) up to the end token: `ends` has for each token the number of characters up to its end. Ids without
    a token (a padded vocabulary has some) and bytes that are not UTF-8 become U+FFFD."""
    tokens = tokens[: tokens.index(tokenizer.eos)] if tokenizer.eos in tokens else tokens
    parts = [tokenizer.token_bytes.get(token, b"\xff") for token in tokens]
    ends = [len(prefix.decode("utf-8", "replace")) for prefix in accumulate(parts)]
    return b"".join(parts).decode("utf-8", "replace"), ends


@torch.no_grad()
def generate(model, prompts, group_size, limits, temperature=1.0, noise=None, stops=()):
    """The Batch of `group_size` completions of each of `prompts` (lists of token ids); temperature 0 is greedy.

    `limits` are the most new tokens for each prompt. All randomness is in `noise`, uniform numbers (N, max(limits)),
    drawn here if there are none. A row ends with the end token or one of `stops`.
    """
    device, eos = model.wte.weight.device, model.config.eos_token_id
    prompt_tokens, lengths = pad_prompts(prompts, device)
    B, N, T = len(prompts), len(prompts) * group_size, max(limits)
    limits = torch.tensor(limits, device=device).repeat_interleave(group_size)  # (N,)
    stops = torch.tensor([eos, *stops], device=device)
    noise = torch.rand(N, T, device=device) if noise is None else noise.to(device)
    prefix = model.prefill(prompt_tokens, lengths)
    dtype = model.dtype if device.type == "cuda" else torch.float32  # on a CPU small products are faster in fp32
    prefix.keys = [k.to(dtype).contiguous() for k in prefix.keys]
    prefix.values = [v.to(dtype).contiguous() for v in prefix.values]
    room = T if device.type == "cuda" else 0  # a captured graph needs fixed shapes
    cache = Cache.empty(model.config, B, group_size, room, device, dtype)

    tokens = torch.full((N, T), max(eos, 0), device=device)  # eos is -1 where no row is to end early
    logprobs = torch.zeros(N, T, device=device)
    # Row i of what is decoded is row rows[i] of the result. A step changes tensors in place, so it can be captured.
    rows = torch.arange(N, device=device)
    newest = prompt_tokens.gather(1, lengths[:, None] - 1).repeat_interleave(group_size, 0)  # (N, 1)
    alive = torch.ones(N, dtype=torch.bool, device=device)

    def step(t):
        logits = model.decode(newest, prefix, cache, t)  # (N, V)
        at = t if torch.is_tensor(t) else torch.tensor([t])
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            logp = (logits.float() / temperature).log_softmax(-1)
            token = draw(logp, noise[rows, at])
            logprobs.index_put_((rows, at), logp.gather(1, token[:, None])[:, 0])
        tokens.index_put_((rows, at), token)
        alive.logical_and_((token[:, None] != stops).all(1) & (at + 1 < limits[rows]))
        newest.copy_(token[:, None])

    if device.type == "cuda":
        counter = torch.zeros(1, dtype=torch.long, device=device)

        def next_step():
            step(counter)
            counter.add_(1)

        next_step()  # the first one loads the libraries, which must not happen in a capture
        if T > 1:  # the hundred kernels of a step are launched as one
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(captured):
                next_step()
            next_step = captured.replay
        for t in range(1, T):
            if t % CHECK_EVERY == 0 and not alive.any():
                break
            next_step()
    else:
        for t in range(T):
            if t % GROW_BY == 0:
                cache = cache.grow(min(GROW_BY, T - t))
            step(t)
            if (t + 1) % CHECK_EVERY == 0:
                if not alive.any():
                    break
                if (keep := rows_to_keep(alive.view(len(prefix.lengths), -1))) is not None:
                    groups, members = keep
                    going_on = (groups[:, None] * (len(rows) // len(prefix.lengths)) + members).flatten()
                    rows, newest, alive = rows[going_on], newest[going_on], alive[going_on]
                    cache, prefix = cache.select(groups, members), prefix.select(groups)

    ended = (tokens[:, :, None] == stops).any(2)
    mask = (ended.cumsum(1) - ended.long() == 0) & (torch.arange(T, device=device) < limits[:, None])
    longest = int(mask.any(0).sum())
    mask, tokens, logprobs = mask[:, :longest], tokens[:, :longest], logprobs[:, :longest]
    hit_limit = ~(ended[:, :longest] & mask).any(1)
    return Batch(prompt_tokens, lengths, tokens.where(mask, max(eos, 0)), mask, logprobs.where(mask, 0), hit_limit)


def rows_to_keep(alive):
    """Which rows `alive` (B, G) go on, as a rectangle: (groups (b,), of each its rows (b, g)), b·g rows of B·G; None
    where too few have ended to be worth the copy."""
    groups, width = alive.any(1).nonzero()[:, 0], int(alive.sum(1).max())
    if len(groups) * width > 0.75 * alive.numel():
        return None
    return groups, alive[groups].int().argsort(dim=1, descending=True, stable=True)[:, :width]


class Cache(NamedTuple):
    """Keys and values of the completions while decoding, one (B, H, G, K, D) for each layer, written in place."""

    keys: list
    values: list

    @classmethod
    def empty(cls, config, B, G, K, device, dtype):
        shape = B, config.n_head, G, K, config.n_embd // config.n_head
        keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        return cls(keys, [torch.zeros_like(k) for k in keys])

    def grow(self, tokens):
        """A cache with room for more tokens. On a CPU it grows as needed: attention reads the whole cache, and cutting
        a part out of a larger one would copy it."""
        return Cache(*([F.pad(x, (0, 0, 0, tokens)) for x in layers] for layers in self))

    def select(self, groups, members):
        """Some groups only, and of each group the rows `members` (groups, rows)."""
        at = groups[:, None], slice(None), members  # indexed by it, an entry is (B, G, H, K, D)
        return Cache(*([x[at].transpose(1, 2).contiguous() for x in layers] for layers in self))


def pad_prompts(prompts, device):
    """Token lists of any lengths -> tokens (B, P) padded on the right, lengths (B,)."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device), lengths


def draw(logprobs, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first token at which the
    cumulated probability exceeds it."""
    cumulated = logprobs.exp().cumsum_(-1)
    goal = uniform[:, None] * (1 - 1e-6) * cumulated[:, -1:]  # the factor keeps it below the last sum
    return torch.searchsorted(cumulated, goal, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)  # clamp: NaN


def microbatches(batch, most_tokens):
    """Cuts a batch into parts of one group or of several with at most `most_tokens`, padding counted, by length."""
    B = len(batch.prompts)
    G = len(batch.tokens) // B
    longest = batch.completion_mask.sum(1).view(B, G).amax(1)  # (B,)
    sizes = torch.stack([batch.prompt_lengths, longest], 1).tolist()  # here the host waits

    def fits(groups):
        return len(groups) * (max(sizes[b][0] for b in groups) + G * max(sizes[b][1] for b in groups)) <= most_tokens

    cuts = [[]]
    for group in sorted(range(B), key=lambda b: sizes[b][1]):
        if cuts[-1] and not fits([*cuts[-1], group]):
            cuts.append([])
        cuts[-1].append(group)
    return [batch.select(cut, *(max(sizes[b][i] for b in cut) for i in (0, 1))) for cut in cuts]
