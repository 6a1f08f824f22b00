"""Batched sampling with a KV cache: questions in, answers with their logprobs out.

A group's prompt is prefilled once, stored once and read once for all its rows (model.shared_attention). On CUDA
one decoding step is captured as a graph and replayed for every token. The result is a Batch, what the loss needs, and
the same rows as text for the verifier.
"""

import functools
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanorook.settings import fail
from nanorook.task import prompt_ids

CHECK_EVERY = 8  # tokens between two checks whether all rows have ended, each of which is a GPU sync
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


def sample(model, questions, group_size, limits, temperature=1.0, noise=None, max_rows=None):
    """Samples `group_size` answers to each question: yields (Batch, its Answers), each of one kind of question and of
    at most `max_rows` rows, or one group. A kind's questions keep their order.

    `limits`: {kind: most tokens of an answer}. `noise` (questions, group_size, most of limits), uniform numbers, is all
    that decides what is drawn; an answer does not depend on what is sampled beside it.
    """
    for kind in dict.fromkeys(question.kind for question in questions):
        of_kind = [i for i, question in enumerate(questions) if question.kind == kind]
        size = max(1, max_rows // group_size) if max_rows else len(of_kind)
        for chosen in (of_kind[i : i + size] for i in range(0, len(of_kind), size)):
            some = [questions[i] for i in chosen]
            prompts = [prompt_ids(question.prompt, model.tokenizer) for question in some]
            most_new = [min(limits[kind], model.config.n_positions - len(prompt)) for prompt in prompts]
            if min(most_new) < 1:
                fail(f"a prompt of {max(map(len, prompts))} tokens leaves no room for an answer in the model's "
                     f"{model.config.n_positions} positions; use shorter prompts.")  # fmt: skip
            uniform = None if noise is None else noise[chosen, :, : max(most_new)].flatten(0, 1)  # (N, T)
            batch = generate(model, prompts, group_size, most_new, temperature, uniform, end_tokens(model, some[0]))
            lengths, hit_limit = batch.completion_mask.sum(1).tolist(), batch.hit_limit.tolist()
            texts = [detokenize(model.tokenizer, row[:n]) for row, n in zip(batch.tokens.tolist(), lengths)]
            asked = [question for question in some for _ in range(group_size)]
            yield batch, [Answer(q, text, ends, cut) for q, (text, ends), cut in zip(asked, texts, hit_limit)]


def end_tokens(model, question):
    """{token: the place in an answer from which it ends it} of the tokens that end an answer to a question."""
    stop, tokenizer = question.stop.encode(), model.tokenizer
    stops = [token for token, text in tokenizer.token_bytes.items() if stop and stop in text]
    if stop and not stops:
        fail(f"no token of the model holds {question.stop!r}, the stop of {question.kind} questions, so it would "
             "end no answer; use another stop, or none.")  # fmt: skip
    return dict.fromkeys(stops, question.stop_after) | dict.fromkeys(tokenizer.ends, 0)


def detokenize(tokenizer, tokens):
    """(text, ends) up to an end token: `ends` has for each token the number of characters up to its end. Ids without
    a token (a padded vocabulary has some) and bytes that are not UTF-8 become U+FFFD."""
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.ends), len(tokens))
    parts = [tokenizer.token_bytes.get(token, b"\xff") for token in tokens[:end]]
    ends = [len(prefix.decode("utf-8", "replace")) for prefix in accumulate(parts)]
    return b"".join(parts).decode("utf-8", "replace"), ends


@torch.no_grad()
def generate(model, prompts, group_size, limits, temperature=1.0, noise=None, end_tokens=None):
    """The Batch of `group_size` completions of each of `prompts` (lists of token ids); temperature 0 is greedy.

    `limits` are the most new tokens for each prompt. All randomness is in `noise`, uniform numbers (N, max(limits)),
    drawn here if there are none. `end_tokens`: {token: the place in a row from which it ends it}; none: config.json's.
    """
    device, eos = model.wte.weight.device, model.config.eos_token_id
    prompt_tokens, lengths = pad_prompts(prompts, device)
    N, T, on_cuda = len(prompts) * group_size, max(limits), device.type == "cuda"
    end_tokens = {token: place for token, place in (end_tokens or {eos: 0}).items() if token >= 0}  # -1: no end token
    end_from = torch.full((model.config.vocab_size,), T)
    end_from[[*end_tokens]] = torch.tensor([*end_tokens.values()], dtype=torch.long)
    rows = Rows(
        newest=prompt_tokens.gather(1, lengths[:, None] - 1).repeat_interleave(group_size, 0),
        alive=torch.ones(N, dtype=torch.bool, device=device),
        tokens=torch.zeros(N, T, dtype=torch.long, device=device),
        logprobs=torch.zeros(N, T, device=device),
        noise=torch.rand(N, T, device=device) if noise is None else noise.to(device),
        limits=torch.tensor(limits, device=device).repeat_interleave(group_size),
        end_from=end_from.to(device),
    )
    prefix = model.prefill(prompt_tokens, lengths)
    dtype = model.dtype if on_cuda else torch.float32  # on a CPU small products are faster in fp32
    prefix.keys = [k.to(dtype).contiguous() for k in prefix.keys]
    prefix.values = [v.to(dtype).contiguous() for v in prefix.values]
    cache = Cache(prefix, group_size, T if on_cuda else 0)
    step = functools.partial(decode_step, model, prefix, cache, rows, temperature)
    decode_captured(step, rows) if on_cuda else decode_eagerly(step, rows, cache)

    places = torch.arange(T, device=device)
    ended = places >= rows.end_from[rows.tokens]  # (N, T)
    mask = (ended.cumsum(1) - ended.long() == 0) & (places < rows.limits[:, None])  # up to the first end
    longest = int(mask.any(0).sum())
    ended, mask, tokens, logprobs = (x[:, :longest] for x in (ended, mask, rows.tokens, rows.logprobs))
    hit_limit = ~(ended & mask).any(1)
    return Batch(prompt_tokens, lengths, tokens.where(mask, max(eos, 0)), mask, logprobs.where(mask, 0), hit_limit)


class Rows(NamedTuple):
    """The rows that are decoded. A step changes the first four tensors in place, so that a graph can capture it."""

    newest: torch.Tensor  # (N, 1) the token that the model is given next
    alive: torch.Tensor  # (N,) whether the row has not ended yet
    tokens: torch.Tensor  # (N, T)
    logprobs: torch.Tensor  # (N, T)
    noise: torch.Tensor  # (N, T) uniform numbers
    limits: torch.Tensor  # (N,)
    end_from: torch.Tensor  # (V,) the place in a row from which a token ends it


def decode_step(model, prefix, cache, rows, temperature, t):
    """Draws token number t of each row. On CUDA t is a tensor (1,), so that one captured step serves for all tokens."""
    logits = model.decode(rows.newest, prefix, cache, t)  # (N, V)
    place = t if torch.is_tensor(t) else torch.tensor([t])
    if temperature == 0:
        token = logits.argmax(-1)  # (N,)
    else:
        logp = (logits.float() / temperature).log_softmax(-1)
        token = draw(logp, rows.noise.index_select(1, place)[:, 0])
        rows.logprobs.index_copy_(1, place, logp.gather(1, token[:, None]))
    rows.tokens.index_copy_(1, place, token[:, None])
    rows.alive.logical_and_((place < rows.end_from[token]) & (place + 1 < rows.limits))
    rows.newest.copy_(token[:, None])


def decode_eagerly(step, rows, cache):
    T = rows.tokens.shape[1]
    for t in range(T):
        if t % GROW_BY == 0:
            cache.grow(min(GROW_BY, T - t))
        step(t)
        if (t + 1) % CHECK_EVERY == 0 and not rows.alive.any():
            break


def decode_captured(step, rows):
    """The hundred kernels of a step are captured once, as a CUDA graph, and launched as one for each token."""
    T, device = rows.tokens.shape[1], rows.tokens.device
    counter = torch.zeros(1, dtype=torch.long, device=device)

    def next_step():
        step(counter)
        counter.add_(1)

    next_step()  # the first one loads the libraries, which must not happen in a capture
    if T == 1:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        next_step()
    for t in range(1, T):
        if t % CHECK_EVERY == 0 and not rows.alive.any():  # GPU sync
            break
        graph.replay()


class Cache:
    """Keys and values of the completions while decoding, one (B, H, G, K, D) for each layer, written in place."""

    def __init__(self, prefix, G, K):
        self.keys = [k.new_zeros(*k.shape[:2], G, K, k.shape[3]) for k in prefix.keys]
        self.values = [torch.zeros_like(k) for k in self.keys]

    def grow(self, tokens):
        """Makes room for more tokens. On a CPU it grows as needed: attention reads the whole cache, and cutting a part
        out of a larger one would copy it."""
        self.keys, self.values = ([F.pad(x, (0, 0, 0, tokens)) for x in layers] for layers in (self.keys, self.values))


def pad_prompts(prompts, device):
    """Token lists of any lengths -> tokens (B, P) padded on the right, lengths (B,)."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device), lengths


def draw(logprobs, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first token at which the
    cumulated probability exceeds it."""
    cumulated = logprobs.exp().cumsum_(-1)
    goal = uniform[:, None] * (1 - 1e-6) * cumulated[:, -1:]  # the factor keeps it below the last sum
    return torch.searchsorted(cumulated, goal, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)  # of NaN it is V


def microbatches(batch, most_tokens):
    """Cuts a batch into parts of one group or of several with at most `most_tokens`, padding counted, by length."""
    B = len(batch.prompts)
    G = len(batch.tokens) // B
    longest = batch.completion_mask.sum(1).view(B, G).amax(1)  # (B,)
    sizes = torch.stack([batch.prompt_lengths, longest], 1).tolist()  # of each group's P and T; GPU sync

    def fits(groups):
        return len(groups) * (max(sizes[b][0] for b in groups) + G * max(sizes[b][1] for b in groups)) <= most_tokens

    cuts = [[]]
    for group in sorted(range(B), key=lambda b: sizes[b][1]):
        if cuts[-1] and not fits([*cuts[-1], group]):
            cuts.append([])
        cuts[-1].append(group)
    return [batch.select(cut, max(sizes[b][0] for b in cut), max(sizes[b][1] for b in cut)) for cut in cuts]


def split_by_signal(batch, has_kl):
    """[(groups with a gradient, True), (groups without, False)]. A KL gives one to each group, else only advantages do;
    groups without need only their forward pass, for the metrics."""
    gradient = (batch.advantages != 0).view(len(batch.prompts), -1).any(1) | has_kl  # (B,)
    shape = batch.prompts.shape[1], batch.tokens.shape[1]
    return [(batch.select((gradient == has).nonzero()[:, 0], *shape), has) for has in (True, False) if has in gradient]
