"""Batched sampling with a KV cache: questions in, answers with their logprobs out.

A group's prompt is prefilled once, stored once and read once for all its rows (model.shared_attention). On CUDA
one decoding step is captured as a graph and replayed for every token. The result is a Batch for the loss, and the
same rows as text for the verifier.
"""

import functools
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanorook.settings import fail
from nanorook.task import prompt_ids

CHECK_EVERY = 8  # tokens between checks for the end of all rows; each check is a GPU sync
GROW_BY = 16  # tokens by which the cache grows on a CPU; attention reads all of it


class Batch(NamedTuple):
    """Answers to questions of one kind: N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    prompt_lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T) padded with the end token
    completion_mask: torch.Tensor  # (N, T) True on a row's own tokens, its end token included
    rollout_logprobs: torch.Tensor  # (N, T) under the distribution sampled from; 0 outside the mask, and if greedy
    hit_limit: torch.Tensor  # (N,) True for rows that were cut off at their limit
    advantages: torch.Tensor | None = None  # (N, T)
    kl_weights: torch.Tensor | None = None  # (N,) the task's KL_WEIGHTS
    kinds: torch.Tensor | None = None  # (N,) the place of a question's kind in the task's LIMITS
    old_logprobs: torch.Tensor | None = None  # (N, T) of the weights that sampled, by the training forward
    ref_logprobs: torch.Tensor | None = None  # (N, T) of the reference

    def select(self, groups, P, T):
        """Some of the groups, cut to P prompt tokens and T completion tokens."""
        G = len(self.tokens) // len(self.prompts)
        groups = torch.as_tensor(groups, device=self.prompts.device)
        rows = (groups[:, None] * G + torch.arange(G, device=groups.device)).flatten()
        prompts, lengths, *per_row = self
        per_row = [x if x is None else x[rows, :T] if x.ndim == 2 else x[rows] for x in per_row]
        return Batch(prompts[groups, :P], lengths[groups], *per_row)


class Answer(NamedTuple):
    """A row of a Batch as text."""

    question: tuple  # the task's Question
    text: str  # without the end token
    ends: list  # for each token the number of characters up to its end
    hit_limit: bool
    grade: Any = None  # the task's Grade


def sample(model, questions, group_size, limits, temperature=1.0, noise=None, max_rows=None):
    """Samples `group_size` answers to each question. Yields (Batch, its Answers), kind by kind and each in order; a
    batch has whole groups, and at most `max_rows` rows unless one group has more. `limits`: {kind: most tokens of an
    answer}. `noise`: uniform numbers (questions, group_size, the largest limit), which alone determine what is drawn:
    an answer does not depend on what is sampled beside it."""
    alike = {}  # {(kind, stop, stop_after): indices of questions}
    for i, question in enumerate(questions):
        alike.setdefault((question.kind, question.stop, question.stop_after), []).append(i)
    size = max(1, max_rows // group_size) if max_rows else len(questions)  # questions in a batch
    parts = [(key, indices[i : i + size]) for key, indices in alike.items() for i in range(0, len(indices), size)]
    for (kind, stop, stop_after), indices in parts:
        prompts = [prompt_ids(questions[i].prompt, model.tokenizer) for i in indices]
        most_new = [min(limits[kind], model.config.n_positions - len(prompt)) for prompt in prompts]
        if min(most_new) < 1:
            fail(f"a prompt of {max(map(len, prompts))} tokens leaves no room for an answer in the model's "
                 f"{model.config.n_positions} positions; use shorter prompts.")  # fmt: skip
        row_noise = None if noise is None else noise[indices, :, : max(most_new)].flatten(0, 1)  # (N, T)
        stop_tokens = end_tokens(model.tokenizer, kind, stop, stop_after)
        batch = generate(model, prompts, group_size, most_new, temperature, row_noise, stop_tokens)
        asked = [questions[i] for i in indices for _ in range(group_size)]
        rows = zip(asked, batch.tokens.tolist(), batch.completion_mask.sum(1).tolist(), batch.hit_limit.tolist())
        yield batch, [Answer(q, *detokenize(model.tokenizer, row[:length]), cut) for q, row, length, cut in rows]


@functools.cache
def end_tokens(tokenizer, kind, stop, stop_after):
    """The tokens that end an answer: {token: the first t at which it does}; t counts the answer's tokens from 0."""
    stops = [token for token, text in tokenizer.token_bytes.items() if stop and stop.encode() in text]
    if stop and not stops:
        fail(f"no token of the model contains {stop!r}, the stop of {kind} questions, so it would end no answer; use "
             "another stop, or none.")  # fmt: skip
    return dict.fromkeys(stops, stop_after) | dict.fromkeys(tokenizer.ends, 0)


def detokenize(tokenizer, tokens):
    """(text, ends) of the tokens before an end token: `ends` gives for each token the number of characters up to its
    end. Ids without a token (a padded vocabulary has some) and bytes that are not UTF-8 become U+FFFD."""
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.ends), len(tokens))
    parts = [tokenizer.token_bytes.get(token, b"\xff") for token in tokens[:end]]
    ends = [len(prefix.decode("utf-8", "replace")) for prefix in accumulate(parts)]
    return b"".join(parts).decode("utf-8", "replace"), ends


@torch.no_grad()
def generate(model, prompts, group_size, most_new, temperature=1.0, noise=None, stop_tokens=None):
    """The Batch of `group_size` completions for each of `prompts` (lists of token ids); temperature 0 is greedy.
    `most_new`: the most new tokens for each prompt. All randomness is in `noise`, uniform numbers (N, max(most_new)),
    drawn here if not given. `stop_tokens`: as end_tokens() returns them; if not given, config.json's."""
    device, eos = model.wte.weight.device, model.config.eos_token_id  # eos is -1 if the model has none
    prompt_tokens, lengths = pad_prompts(prompts, device)
    N, T, on_cuda = len(prompts) * group_size, max(most_new), device.type == "cuda"
    stop_tokens = {token: t for token, t in (stop_tokens or {eos: 0}).items() if token >= 0}
    end_from = torch.full((model.config.vocab_size,), T)  # T means never: t is always below it
    end_from[[*stop_tokens]] = torch.tensor([*stop_tokens.values()], dtype=torch.long)
    rows = Rows(
        t=torch.zeros(1, dtype=torch.long, device=device),
        newest=prompt_tokens.gather(1, lengths[:, None] - 1).repeat_interleave(group_size, 0),
        alive=torch.ones(N, dtype=torch.bool, device=device),
        tokens=torch.zeros(N, T, dtype=torch.long, device=device),
        logprobs=torch.zeros(N, T, device=device),
        noise=torch.rand(N, T, device=device) if noise is None else noise.to(device),
        most_new=torch.tensor(most_new, device=device).repeat_interleave(group_size),
        end_from=end_from.to(device),
    )
    prefix = model.prefill(prompt_tokens, lengths)
    dtype = model.dtype if on_cuda else torch.float32  # on a CPU small products are faster in fp32
    prefix.layers = [[x.to(dtype).contiguous() for x in layer] for layer in prefix.layers]
    # (B, H, G, slots, D) for each layer. A graph needs all slots from the start; a CPU is faster with few at first.
    cache = [[x.new_zeros(*x.shape[:2], group_size, 0, x.shape[3]) for x in layer] for layer in prefix.layers]
    grow_by = T if on_cuda else GROW_BY
    for t in range(T):
        if t % grow_by == 0:
            cache = [[F.pad(x, (0, 0, 0, min(grow_by, T - t))) for x in layer] for layer in cache]
            step = functools.partial(decode_step, model, prefix, cache, rows, temperature)
        step()
        if t == 0 and on_cuda:  # the first step has loaded the libraries, which must not happen in a capture
            step = captured(step, device)
        if (t + 1) % CHECK_EVERY == 0 and not rows.alive.any():  # GPU sync
            break

    t = torch.arange(T, device=device)
    ended = t >= rows.end_from[rows.tokens]  # (N, T)
    mask = (ended.cumsum(1) - ended.long() == 0) & (t < rows.most_new[:, None])  # up to the first end
    hit_limit = ~(ended & mask).any(1)
    tokens, logprobs = rows.tokens.where(mask, max(eos, 0)), rows.logprobs.where(mask, 0)
    longest = int(mask.any(0).sum())  # GPU sync
    return Batch(prompt_tokens, lengths, tokens[:, :longest], mask[:, :longest], logprobs[:, :longest], hit_limit)


class Rows(NamedTuple):
    """The rows being decoded. A step changes the first five tensors in place, so that a graph can capture it."""

    t: torch.Tensor  # (1,) the number of the token that is drawn next, from 0
    newest: torch.Tensor  # (N, 1) the last token so far, the model's next input
    alive: torch.Tensor  # (N,) whether the row has not ended yet
    tokens: torch.Tensor  # (N, T)
    logprobs: torch.Tensor  # (N, T)
    noise: torch.Tensor  # (N, T) uniform numbers
    most_new: torch.Tensor  # (N,) the most tokens of each row
    end_from: torch.Tensor  # (V,) the first t at which a token ends a row


def decode_step(model, prefix, cache, rows, temperature):
    """Draws token number t of each row."""
    logits = model.decode(rows.newest, prefix, cache, rows.t)  # (N, V)
    if temperature == 0:
        token = logits.argmax(-1)  # (N,)
    else:
        logp = (logits.float() / temperature).log_softmax(-1)
        token = draw(logp, rows.noise.index_select(1, rows.t)[:, 0])
        rows.logprobs.index_copy_(1, rows.t, logp.gather(1, token[:, None]))
    rows.tokens.index_copy_(1, rows.t, token[:, None])
    rows.alive.logical_and_((rows.t < rows.end_from[token]) & (rows.t + 1 < rows.most_new))
    rows.newest.copy_(token[:, None])
    rows.t.add_(1)


def captured(step, device):
    """The hundred kernels of a step as one CUDA graph, which is launched once for each token."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        step()
    return graph.replay


def pad_prompts(prompts, device):
    """Token lists of any lengths -> tokens (B, P) padded on the right, lengths (B,)."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device), lengths


def draw(logprobs, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first token at which the
    cumulative probability exceeds it."""
    cumulative = logprobs.exp().cumsum_(-1)
    target = uniform[:, None] * (1 - 1e-6) * cumulative[:, -1:]  # the factor keeps it below the last sum
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)  # for NaN it is V


def microbatches(batch, most_tokens, has_kl):
    """[(part, has_gradient), ...]: whole groups of a batch, shortest first, in parts of at most `most_tokens`, padding
    included but no answer twice; a larger group is a part of its own. With a KL every group has a gradient, otherwise
    only those whose advantages are not all 0; the others are run for metrics."""
    B, G = len(batch.prompts), len(batch.tokens) // len(batch.prompts)
    T = batch.completion_mask.sum(1).view(B, G).amax(1)  # (B,) of each group's longest answer
    idle = (batch.advantages == 0).view(B, -1).all(1) & (not has_kl)  # (B,) groups that have no gradient
    P, T, idle = torch.stack([batch.prompt_lengths, T, idle.long()]).tolist()  # GPU sync
    R = [len(once(group, 1)[0]) for group in batch.tokens.split(G)]  # different answers of each group
    parts = [[]]  # the last group of a part has its longest answer
    for b in sorted(range(B), key=lambda b: (idle[b], T[b], R[b])):
        larger = [*parts[-1], b]
        tokens = len(larger) * (max(P[i] for i in larger) + max(R[i] for i in larger) * T[b])
        if len(larger) > 1 and (tokens > most_tokens or idle[b] != idle[larger[0]]):
            parts.append([])
        parts[-1].append(b)
    return [(batch.select(part, max(P[b] for b in part), T[part[-1]]), not idle[part[0]]) for part in parts]


def once(tokens, B):
    """Equal answers are computed once: each group's without repetitions (B·R, T), and each row's place among them."""
    if tokens.is_cuda:  # numbers of rows that vary would cost syncs and compilations
        return tokens, slice(None)
    groups = [group.unique(dim=0, return_inverse=True) for group in tokens.unflatten(0, (B, -1))]
    different = pad_sequence([answers for answers, _ in groups], batch_first=True)  # (B, R, T)
    return different.flatten(0, 1), torch.cat([b * different.shape[1] + place for b, (_, place) in enumerate(groups)])
