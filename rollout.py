"""Batched sampling with a KV cache: questions in, answers with their logprobs out.

A group's prompt is prefilled once, stored once and read once for all its rows (model.shared_attention). On CUDA
one decoding step is captured as a graph and replayed for every token. The result is a Rollout: tensors for the loss,
and the same rows as text for the verifier.
"""

import functools
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from grpo import distribution
from nanorook.settings import fail
from nanorook.task import prompt_ids, prompt_text

CHECK_EVERY = 8  # tokens between checks for the end of all rows; each check is a GPU sync
GROW_BY = 16  # tokens by which the cache grows on a CPU; attention reads all of it


class Answer(NamedTuple):
    """A row of a Rollout as text."""

    question: tuple  # nanorook.task.Question
    text: str  # without the tokenizer's end token; a token with the question's `stop` is part of it
    char_ends: list  # for each token the number of characters up to its end
    hit_limit: bool  # the answer was cut off at its limit
    grade: Any = None  # nanorook.task.Grade, which the task's grade() returns


@dataclass
class Rollout:
    """What was sampled for questions of one kind and stop: N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    prompt_lengths: torch.Tensor  # (B,)
    completions: torch.Tensor  # (N, T) padded with the end token
    completion_mask: torch.Tensor  # (N, T) True on a row's own tokens, its end token included
    rollout_logprobs: torch.Tensor  # (N, T) under grpo.distribution, as in the loss; 0 outside the mask, and if greedy
    hit_limit: torch.Tensor  # (N,) True for rows that were cut off at their limit
    answers: list = field(default_factory=list)  # the N rows as text

    # What the step adds to it
    advantages: torch.Tensor | None = None  # (N, T)

    # Set on its parts, which are Rollouts too: by microbatches(), then by the update
    has_gradient: bool = True  # False if all advantages are 0, and no KL is trained
    old_logprobs: torch.Tensor | None = None  # (N, T) of the weights that sampled, by the training forward
    ref_logprobs: torch.Tensor | None = None  # (N, T) of the reference

    @property
    def kind(self):
        return self.answers[0].question.kind

    @property
    def group_size(self):
        return len(self.completions) // len(self.prompts)

    def select(self, groups, P, T):
        """Some of the groups, cut to P prompt tokens and T completion tokens."""
        G = self.group_size
        answers = []
        for b in groups:
            answers += self.answers[b * G : (b + 1) * G]
        device = self.prompts.device
        groups = torch.as_tensor(groups, device=device)
        first_rows = groups[:, None] * G  # (number of groups, 1)
        rows = (first_rows + torch.arange(G, device=device)).flatten()
        return replace(
            self,
            prompts=self.prompts[groups, :P],
            prompt_lengths=self.prompt_lengths[groups],
            completions=self.completions[rows, :T],
            completion_mask=self.completion_mask[rows, :T],
            rollout_logprobs=self.rollout_logprobs[rows, :T],
            hit_limit=self.hit_limit[rows],
            answers=answers,
            advantages=None if self.advantages is None else self.advantages[rows, :T],
        )


def sample(model, questions, group_size, limits, temperature=1.0, noise=None, max_rows=None):
    """Samples `group_size` answers to each question. Yields Rollouts, kind by kind and each in the order of the
    questions; a Rollout has whole groups, and at most `max_rows` rows unless one group has more.

    `limits`: {kind: most tokens of an answer}. `noise`: uniform numbers (questions, group_size, the largest limit),
    which alone determine what is drawn: an answer does not depend on what is sampled beside it."""
    at_once = max(1, max_rows // group_size) if max_rows else len(questions)
    alike = {}  # {(kind, stop, stop_after): indices of questions}
    for i, question in enumerate(questions):
        key = question.kind, question.stop, question.stop_after
        alike.setdefault(key, []).append(i)
    for indices in alike.values():
        for first in range(0, len(indices), at_once):
            some = indices[first : first + at_once]
            some_questions = [questions[i] for i in some]
            some_noise = None if noise is None else noise[some]  # (B, G, T)
            yield sample_alike(model, some_questions, group_size, limits, temperature, some_noise)


def room_after(question, prompt, config):
    """The number of positions that a question's prompt, here as token ids, leaves for an answer; if there is none, the
    program ends."""
    room = config.n_positions - len(prompt)
    if room < 1:
        fail(f"the prompt {prompt_text(question.prompt)!r:.60} has {len(prompt)} tokens, which leaves no room for an "
             f"answer in the model's {config.n_positions} positions; shorten it, or leave it out.")  # fmt: skip
    return room


def sample_alike(model, questions, group_size, limits, temperature, noise):
    """The Rollout of questions that have the same kind and stop."""
    first = questions[0]  # the others have its kind, stop and stop_after
    prompts = [prompt_ids(question.prompt, model.tokenizer) for question in questions]
    rooms = [room_after(question, prompt, model.config) for question, prompt in zip(questions, prompts)]
    most_new = [min(limits[first.kind], room) for room in rooms]
    if noise is not None:
        noise = noise[:, :, : max(most_new)].flatten(0, 1)  # (N, T)
    stop_tokens = stop_tokens_of(model.tokenizer, first.kind, first.stop, first.stop_after)
    rollout = generate(model, prompts, group_size, most_new, temperature, noise, stop_tokens)

    lengths = rollout.completion_mask.sum(1).tolist()
    hit_limit = rollout.hit_limit.tolist()
    for n, tokens in enumerate(rollout.completions.tolist()):
        text, char_ends = detokenize(model.tokenizer, tokens[: lengths[n]])
        question = questions[n // group_size]
        rollout.answers.append(Answer(question, text, char_ends, hit_limit[n]))
    return rollout


@functools.cache
def stop_tokens_of(tokenizer, kind, stop, stop_after):
    """The tokens that end an answer, which are the tokenizer's end tokens and those that contain the question's `stop`:
    {token: the first t at which it does}; t counts the answer's tokens from 0."""
    stops = []
    if stop:
        stops = [token for token, text in tokenizer.token_bytes.items() if stop.encode() in text]
        if not stops:
            fail(f"no token of the model contains {stop!r}, the stop of {kind} questions, so it would end no answer; "
                 "use another stop, or none.")  # fmt: skip
    return dict.fromkeys(stops, stop_after) | dict.fromkeys(tokenizer.ends, 0)


def detokenize(tokenizer, tokens):
    """(text, char_ends) of the tokens before an end token; the second gives for each token the number of characters up
    to its end. Ids without a token (a padded vocabulary has some) and bytes that are not UTF-8 become U+FFFD."""
    parts = []
    for token in tokens:
        if token in tokenizer.ends:
            break
        parts.append(tokenizer.token_bytes.get(token, b"\xff"))
    char_ends = [len(prefix.decode("utf-8", "replace")) for prefix in accumulate(parts)]
    return b"".join(parts).decode("utf-8", "replace"), char_ends


@torch.no_grad()
def generate(model, prompts, group_size, most_new, temperature=1.0, noise=None, stop_tokens=None):
    """The Rollout of `group_size` completions for each of `prompts` (lists of token ids), without texts; temperature 0
    is greedy. `most_new`: the most new tokens for each prompt. All randomness is in `noise`, uniform numbers
    (N, max(most_new)), drawn here if not given. `stop_tokens`: as stop_tokens_of() returns them; if not given,
    the end token of the model's config."""
    device = model.wte.weight.device
    T = max(most_new)
    on_cuda = device.type == "cuda"
    prompts, lengths = pad_prompts(prompts, device)
    prefix = model.prefill(prompts, lengths)
    # Attention takes the dtype of these keys. On a CPU its small products are faster in fp32, so with DTYPE=bfloat16
    # sampler and training round differently there.
    dtype = model.dtype if on_cuda else torch.float32
    prefix.layers = [[x.to(dtype).contiguous() for x in layer] for layer in prefix.layers]
    rows = new_rows(model, prefix.last_tokens, group_size, most_new, noise, stop_tokens)
    cache = empty_cache(prefix, group_size)
    grow_by = T if on_cuda else GROW_BY  # a graph needs all slots from the start; a CPU is faster with few at first
    for t in range(T):
        if t % grow_by == 0:
            cache = with_more_slots(cache, min(grow_by, T - t))
            step = functools.partial(decode_step, model, prefix, cache, rows, temperature)
        step()
        if t == 0 and on_cuda:  # the first step has loaded the libraries, which must not happen in a capture
            step = captured(step, device)
        if (t + 1) % CHECK_EVERY == 0 and not rows.alive.any():  # GPU sync
            break

    # A row that has ended was decoded on, as all rows have one shape. The mask takes out what it drew after its end.
    token_index = torch.arange(T, device=device)
    is_end = token_index >= rows.end_from[rows.tokens]  # (N, T)
    ends_before = is_end.cumsum(1) - is_end.long()  # (N, T)
    is_below_limit = token_index < rows.most_new[:, None]  # (N, T)
    mask = (ends_before == 0) & is_below_limit  # up to the first end, or to the limit
    hit_limit = ~(is_end & mask).any(1)  # (N,)
    padding = max(0, model.config.eos_token_id)  # -1 in tools.bench, whose answers never end
    longest = int(mask.any(0).sum())  # GPU sync
    return Rollout(
        prompts=prompts,
        prompt_lengths=lengths,
        completions=rows.tokens.where(mask, padding)[:, :longest],
        completion_mask=mask[:, :longest],
        rollout_logprobs=rows.logprobs.where(mask, 0)[:, :longest],
        hit_limit=hit_limit,
    )


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


def new_rows(model, last_prompt_tokens, group_size, most_new, noise, stop_tokens):
    """Rows without a token yet, G for each of the B prompts."""
    device = last_prompt_tokens.device
    N, T = len(most_new) * group_size, max(most_new)
    stop_tokens = stop_tokens or {model.config.eos_token_id: 0}
    end_from = torch.full((model.config.vocab_size,), T)  # T means never: t is always below it
    for token, first in stop_tokens.items():
        if token >= 0:  # -1 in tools.bench, whose answers never end
            end_from[token] = first
    return Rows(
        t=torch.zeros(1, dtype=torch.long, device=device),
        newest=last_prompt_tokens.repeat_interleave(group_size, 0),
        alive=torch.ones(N, dtype=torch.bool, device=device),
        tokens=torch.zeros(N, T, dtype=torch.long, device=device),
        logprobs=torch.zeros(N, T, device=device),
        noise=torch.rand(N, T, device=device) if noise is None else noise.to(device),
        most_new=torch.tensor(most_new, device=device).repeat_interleave(group_size),
        end_from=end_from.to(device),
    )


def empty_cache(prefix, group_size):
    """Keys and values (B, H, G, slots, D) of each layer, for the rows of B groups; no slots yet."""
    cache = []
    for layer in prefix.layers:
        B, H, _, D = layer[0].shape
        cache.append([x.new_zeros(B, H, group_size, 0, D) for x in layer])
    return cache


def with_more_slots(cache, count):
    """The cache with `count` empty slots after those it has."""
    padding = (0, 0, 0, count)  # F.pad begins with the last dimension: nothing around D, `count` after the slots
    return [[F.pad(x, padding) for x in layer] for layer in cache]


def decode_step(model, prefix, cache, rows, temperature):
    """Draws token number t of each row."""
    logits = model.decode(rows.newest, prefix, cache, rows.t)  # (N, V)
    if temperature == 0:
        token = logits.argmax(-1)  # (N,)
    else:
        logp = distribution(logits, temperature)  # (N, V)
        uniform = rows.noise.index_select(1, rows.t)[:, 0]  # (N,)
        token = draw(logp, uniform)  # (N,)
        token_logp = logp.gather(1, token[:, None])  # (N, 1)
        rows.logprobs.index_copy_(1, rows.t, token_logp.float())
    rows.tokens.index_copy_(1, rows.t, token[:, None])
    goes_on = rows.t < rows.end_from[token]  # (N,) the token does not end its row
    has_room = rows.t + 1 < rows.most_new  # (N,)
    rows.alive.logical_and_(goes_on & has_room)
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
    padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    return padded.to(device), lengths


def draw(logprobs, uniform):
    """A token (N,) from each row of log-probabilities (N, V), by a uniform number (N,): the first token at which the
    cumulative probability exceeds it."""
    cumulative = logprobs.exp().cumsum_(-1)  # (N, V)
    total = cumulative[:, -1:]  # (N, 1), about 1
    target = uniform[:, None] * (1 - 1e-6) * total  # (N, 1); the factor keeps it below the total
    token = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token.clamp(max=logprobs.shape[1] - 1)  # for NaN it is V


def microbatches(rollout, most_tokens, all_have_gradient):
    """The rollout in parts, Rollouts of some of its groups: those with a gradient first, then by their longest answer.
    A part has at most `most_tokens`, padding included (on a CPU, equal answers of a group count once); a larger group
    is a part of its own. Unless `all_have_gradient`, groups whose advantages are all 0 have none; these are run for
    metrics, in parts of their own."""
    B, G = len(rollout.prompts), rollout.group_size
    longest = rollout.completion_mask.sum(1).view(B, G).amax(1)  # (B,) tokens of each group's longest answer
    has_advantage = (rollout.advantages != 0).view(B, -1).any(1)  # (B,)
    is_trained = (has_advantage | all_have_gradient).long()  # (B,)
    per_group = torch.stack([rollout.prompt_lengths, longest, is_trained])  # (3, B)
    # One GPU sync for all three, which are now lists with an entry for each group
    prompt_tokens, answer_tokens, has_gradient = per_group.tolist()
    if rollout.completions.is_cuda:
        distinct_counts = [G] * B  # all are computed
    else:
        distinct_counts = [len(distinct_rows(group, 1)[0]) for group in rollout.completions.split(G)]

    def padded_lengths(groups):
        P = max(prompt_tokens[b] for b in groups)
        T = max(answer_tokens[b] for b in groups)
        return P, T

    def padded_tokens(groups):
        P, T = padded_lengths(groups)
        U = max(distinct_counts[b] for b in groups)
        return len(groups) * (P + U * T)

    def fits(b, groups):
        """Whether group b can join the groups of a part."""
        is_alike = has_gradient[b] == has_gradient[groups[0]]
        return is_alike and padded_tokens([*groups, b]) <= most_tokens

    order = sorted(range(B), key=lambda b: (not has_gradient[b], answer_tokens[b], distinct_counts[b]))
    groups_of_parts = []
    for b in order:
        if groups_of_parts and fits(b, groups_of_parts[-1]):
            groups_of_parts[-1].append(b)
        else:
            groups_of_parts.append([b])

    parts = []
    for groups in groups_of_parts:
        P, T = padded_lengths(groups)
        part = rollout.select(groups, P, T)
        part.has_gradient = bool(has_gradient[groups[0]])
        parts.append(part)
    return parts


def distinct_rows(completions, B):
    """Equal answers of a group are computed once: completions (N, T) -> the distinct ones of each group (B·U, T),
    padded to the U of the group that has most, and for each of the N rows its index among them (N,)."""
    distinct, inverse = [], []
    for group in completions.unflatten(0, (B, -1)):  # (G, T)
        distinct_of_group, inverse_of_group = group.unique(dim=0, return_inverse=True)  # (up to U, T), (G,)
        distinct.append(distinct_of_group)
        inverse.append(inverse_of_group)
    distinct = pad_sequence(distinct, batch_first=True)  # (B, U, T)
    U = distinct.shape[1]
    index = [b * U + inverse_of_group for b, inverse_of_group in enumerate(inverse)]
    return distinct.flatten(0, 1), torch.cat(index)
