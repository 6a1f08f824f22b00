"""A model's policy without sampling: the probability of every answer that a task lists.

A task whose answers can be listed has `answers(question)`, see nanorook/task.py. Each answer is scored as the sampler
would have to draw it, token by token. The last token is not one but all of those that end the same answer: where a
space ends it, every token that begins with a space does. What is left of 1 is "other": answers that are not listed, and
listed ones spelled in other tokens than the tokenizer's own.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from grpo import distribution
from nanorook.settings import fail, fail_if
from nanorook.statistics import figure, is_share
from nanorook.task import Question, prompt_ids, prompt_text, wrong_grade
from rollout import pad_prompts, room_after, stop_tokens_of

TRIES = 1, 4, 16, 64, 256, 1024  # the k of pass@k
MOST_TOKENS = 4096  # of the answers in one forward pass
MOST_LOGITS = 2**26  # in one forward pass, unless one question has more


class Listed(NamedTuple):
    """A question, its answers and what they are worth."""

    question: Question
    texts: list
    grades: list

    @property
    def kind(self):
        return self.question.kind

    @property
    def rewards(self):
        return np.array([grade.reward for grade in self.grades])


def listed(task, questions):
    """The questions whose answers the task lists."""
    found = []
    for question in questions:
        texts = task.answers(question) if hasattr(task, "answers") else []
        if len({*texts}) < len(texts):
            fail(f"the task's answers to {prompt_text(question.prompt)!r:.60} contain one twice; list each once.")
        if texts:
            grades = [task.grade(question, text, False) for text in texts]
            for text, grade in zip(texts, grades):
                wrong = wrong_grade(grade, text)
                fail_if(wrong and f"the task's grade for the listed answer {text!r:.60}: {wrong}")
            found.append(Listed(question, texts, grades))
    return found


@functools.cache
def same_end(tokenizer, kind, stop, stop_after, token, t):
    """The tokens that end an answer as `token` does in place t: those that also end it there and begin with its text.
    Empty if `token` ends none."""
    stops = stop_tokens_of(tokenizer, kind, stop, stop_after).items()
    ends = [end for end, first in stops if first <= t and end not in tokenizer.ends]
    if token not in ends:
        return ()
    text = tokenizer.token_bytes[token]
    return tuple(end for end in ends if tokenizer.token_bytes[end].startswith(text))


def spell(tokenizer, question, text, limit):
    """An answer as it is sampled: its tokens, and all that may be in the place of the last one. None if it never is
    sampled, as it would have ended earlier or is cut off."""
    tokens = tokenizer.encode(text)
    kind, stop, stop_after = question.kind, question.stop, question.stop_after
    ends = [same_end(tokenizer, kind, stop, stop_after, token, t) for t, token in enumerate(tokens)]
    if not tokens or not ends[-1]:  # no stop ends it, so an end token has to follow
        tokens, ends = [*tokens, *tokenizer.ends[:1]], [*ends, tokenizer.ends]
    if len(tokens) > limit or any(ends[:-1]) or not ends[-1]:
        return None
    return tokens, ends[-1]


class Part(NamedTuple):
    """Questions that are computed together: N = B·R rows, R for each question."""

    places: list  # of the B questions among all
    prompts: torch.Tensor  # (B, P) padded on the right
    lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T) of the answers
    last: torch.Tensor  # (N,) the place of an answer's last token
    ends: torch.Tensor  # (E, V) sets of tokens, True for those in it
    which: torch.Tensor  # (N,) the set of tokens that may be in an answer's last place
    real: torch.Tensor  # (B, R) False for padding, and for answers that are never sampled


def parts(model, limits, questions):
    """Yields Parts of Listed questions, those with equally many answers together, which fit into memory."""
    V = model.config.vocab_size
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].texts))
    some = []
    for i in order:
        R, T = len(questions[i].texts), limits[questions[i].kind]
        tokens = (len(some) + 1) * R * T
        if some and (tokens > MOST_TOKENS or tokens * V > MOST_LOGITS):
            yield part_of(model, limits, questions, some)
            some = []
        some.append(i)
    if some:
        yield part_of(model, limits, questions, some)


def part_of(model, limits, questions, places):
    device, tokenizer = model.wte.weight.device, model.tokenizer
    R = len(questions[places[-1]].texts)  # the most of any, as parts() sorts by it
    absent = [0], (0,)  # a row that does not count
    rows, real = [], torch.zeros(len(places), R, dtype=torch.bool)
    prompts = [prompt_ids(questions[place].question.prompt, tokenizer) for place in places]
    for b, (place, prompt) in enumerate(zip(places, prompts)):
        question, texts, _ = questions[place]
        limit = min(limits[question.kind], room_after(question, prompt, model.config))
        spelled = [spell(tokenizer, question, text, limit) for text in texts]
        real[b, : len(texts)] = torch.tensor([row is not None for row in spelled])
        rows += [row or absent for row in spelled] + [absent] * (R - len(texts))
    sets = list(dict.fromkeys(ends for _, ends in rows))
    ends = torch.zeros(len(sets), model.config.vocab_size, dtype=torch.bool)
    for i, allowed in enumerate(sets):
        ends[i, list(allowed)] = True
    prompts, lengths = pad_prompts(prompts, device)
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    last = torch.tensor([len(ids) - 1 for ids, _ in rows])
    which = torch.tensor([sets.index(allowed) for _, allowed in rows])
    rest = (x.to(device) for x in (tokens, last, ends, which, real))
    return Part(places, prompts, lengths, *rest)


def logprobs(model, part, temperature):
    """The log-probability (B, R) of each answer; without meaning where part.real is False."""
    logits = model.head(model.score(part.prompts, part.lengths, part.tokens))  # (N, T, V)
    logp = distribution(logits, temperature)
    by_token = logp.gather(-1, part.tokens[..., None])[..., 0]  # (N, T)
    t = torch.arange(part.tokens.shape[1], device=part.tokens.device)
    before = torch.where(t < part.last[:, None], by_token, 0).sum(1)  # (N,)
    at_last = logp[torch.arange(len(logp), device=t.device), part.last]  # (N, V)
    end = at_last.masked_fill(~part.ends[part.which], -math.inf).logsumexp(1)  # (N,)
    return (before + end).view(part.real.shape)


@torch.no_grad()
def policy(model, limits, questions, temperature):
    """For each Listed question the probabilities of its answers, computed in fp32."""
    model = model.inference_copy(torch.float32)
    found = {}
    for part in parts(model, limits, questions):
        probabilities = logprobs(model, part, temperature).double().exp().where(part.real, 0).cpu().numpy()
        for place, row in zip(part.places, probabilities):
            found[place] = row[: len(questions[place].texts)]
    return [found[place] for place in range(len(questions))]


def pass_at_k(chance, k):
    """The chance that one of k answers is right, if each is with this chance."""
    return -np.expm1(k * np.log1p(-np.minimum(chance, 1 - 1e-12)))


def figures(model, task, questions, temperature):
    """{"mates mate pass@4 exact": (mean, half-width of its 95 % interval, values of the questions), ...}: pass@k of
    metrics that are 0 or 1, and the reward, of which unlisted answers may earn more; for questions with listed answers
    alone. A metric that all listed answers have says no more than `other`."""
    found = {}
    questions = listed(task, questions)
    if not questions:
        return found
    policies = policy(model, task.LIMITS, questions, temperature)
    for kind in dict.fromkeys(question.kind for question in questions):
        some = [(q, p) for q, p in zip(questions, policies) if q.kind == kind]
        values = {}  # of all listed answers
        for metrics in (grade.metrics for question, _ in some for grade in question.grades):
            for name, value in metrics.items():
                values.setdefault(name, set()).add(float(value))
        for name in (name for name, seen in values.items() if seen == {0, 1} and is_share(f"{kind} {name}", seen)):
            chances = [chance_of(name, question, p) for question, p in some]
            for k in TRIES:
                rates = [None if chance is None else float(pass_at_k(chance, k)) for chance in chances]
                found[f"{kind} {name} pass@{k} exact"] = figure(rates)
        found[f"{kind} reward exact, at least"] = figure([float(p @ question.rewards) for question, p in some])
        found[f"{kind} other exact"] = figure([float(1 - p.sum()) for _, p in some])
    return found


def chance_of(metric, question, probabilities):
    """The probability that an answer has the metric; None if no answer to the question has it."""
    if not any(metric in grade.metrics for grade in question.grades):
        return None
    return probabilities @ np.array([float(grade.metrics.get(metric, 0.0)) for grade in question.grades])
