"""Completions on their way from the rollout to the loss, and how they are cut into microbatches."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """Completions of one task; N = B·G rows, those of a group next to each other."""

    prompts: torch.Tensor  # (B, P) padded on the right
    lengths: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (N, T)
    mask: torch.Tensor  # (N, T) completion tokens, the end token included
    rollout_logprobs: torch.Tensor  # (N, T)
    rewards: torch.Tensor  # (N, K) of the whole answer and, with CREDIT=word, of the words at K - 1 places
    places: torch.Tensor  # (N, T) which of the K a token belongs to
    advantages: torch.Tensor | None = None  # (N, T) once all rewards of the step are known

    def select(self, groups):
        """Some of the groups, without the columns that none of them uses."""
        B, P = len(self.prompts), int(self.lengths[groups].max())
        T = int(self.mask.view(B, -1, self.mask.shape[1])[groups].any(1).any(0).sum())

        def rows(x):  # of the chosen groups
            return x.view(B, -1, *x.shape[1:])[groups].flatten(0, 1)

        tokens, mask, logprobs, places = (
            rows(x)[:, :T] for x in (self.tokens, self.mask, self.rollout_logprobs, self.places)
        )
        advantages = None if self.advantages is None else rows(self.advantages)[:, :T]
        prompts, lengths = self.prompts[groups, :P], self.lengths[groups]
        return Batch(prompts, lengths, tokens, mask, logprobs, rows(self.rewards), places, advantages)

    def to(self, device):
        return Batch(*(None if x is None else x.to(device) for x in self))


def microbatches(batch, most_tokens):
    """Whole groups, the long ones together, so many that their tokens, padding counted, stay below `most_tokens`."""
    B, P = batch.prompts.shape
    G = len(batch.tokens) // B
    longest = batch.mask.sum(1).view(B, G).amax(1)  # (B,)
    cut = []
    for group in longest.argsort(stable=True).tolist():
        if cut and (len(cut) + 1) * (G * int(longest[group]) + P) > most_tokens:
            yield batch.select(torch.tensor(cut, device=longest.device))
            cut = []
        cut.append(group)
    yield batch.select(torch.tensor(cut, device=longest.device))
