"""GRPO as pure functions on tensors: credit, advantages, the policy losses, KL, entropy.

Rows are completions: N = B·G of them, the G of a group next to each other. T is the number of completion tokens,
V the size of the vocabulary. A reward is the sum of K named pieces, such as form and correctness, each of which judges
some of the answer's words, see credit(). `values` (N, K) are what the pieces gave. With K = 1, credit is that of plain
GRPO; README lists the settings that restore the paper's other choices. importance_weights() are always on.
A `mask` (N, T) is true on completion tokens, the end token included. Values outside it never count, not even NaN.
Every loss is a sum divided by a `normalizer` of the whole batch, so microbatches may be cut in any way.
"""

import math
from bisect import bisect_right

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LOSSES = {"grpo": "answers", "dapo": "tokens", "dr_grpo": "limit", "cispo": "tokens"}  # what each is a mean over
LOSS_SUMS = ("ratio_gap", "clip_low", "clip_high")  # what policy_loss sums over tokens, for metrics
SCALES = ("none", "std", "mean")
KL_ESTIMATORS = ("k1", "k2", "k3")
SCHEDULES = ("constant", "linear", "cosine")

# Upper bound of log-ratios before exp. e^20 = 5e8 is far outside any trust region, yet a sum of such ratios over a
# batch, and its square in a gradient norm, still fit into fp32. Beyond the bound the gradient is zero.
MAX_LOG_RATIO = 20.0
MAX_IMPORTANCE = 2.0  # upper bound of p_train / p_rollout, see importance_weights


# ---- Credit and advantages ---------------------------------------------------------------------------------


def credit(pieces, char_ends, T):
    """values (N, K): what each of K pieces of the reward gave each answer; piece_mask (N, T, K): 1 on tokens it judges.

    `pieces`: for each answer its own (name, value, span, span, ...), where a span is a (start, end) of characters.
    `char_ends`: for each answer the number of characters up to the end of each token. A token belongs to the span that
    its last character is in. A piece without spans judges all tokens, the end token included, which is in no span. So
    does a piece that an answer lacks, whose value is then 0."""
    all_names = [name for own in pieces for name, *_ in own]
    names = list(dict.fromkeys(all_names))  # each once, in a fixed order
    N, K = len(pieces), len(names)
    values = np.zeros((N, K), dtype=np.float32)
    piece_mask = np.ones((N, T, K), dtype=np.float32)
    for n, own in enumerate(pieces):
        for name, value, *spans in own:
            k = names.index(name)
            values[n, k] = value
            piece_mask[n, :, k] = 0 if spans else 1
            for start, end in spans:
                first = bisect_right(char_ends[n], start)  # the first token that ends after `start`
                after = bisect_right(char_ends[n], end)
                piece_mask[n, first:after, k] = 1
    return torch.from_numpy(values), torch.from_numpy(piece_mask)


def advantages(values, group_size, scale="none", best_of=1):
    """Advantages (N, K): the values (N, K) of K pieces of N rewards, compared within groups of G.

    By default an advantage is a value minus its group's mean, and exactly 0 where all values of a group are alike.
    (RLOO, which subtracts the mean of the other answers, is the same times G/(G-1).) scale="std" also divides by the
    group's standard deviation (see deviation()), as the first paper on GRPO does (Shao et al., 2024, DeepSeekMath).
    That favours questions whose answers score alike (Liu et al., 2025, Dr. GRPO). scale="mean" and best_of=k give what
    is rare more weight, see weights_by_rank().

    The N answers are those of one Rollout, so of one kind of question and one process: a statistic of more than a group
    would have to be summed over rollouts and processes first, as train.update() does for the normalizer.
    """
    if scale not in SCALES:
        raise ValueError(f"{scale!r} is no way to scale rewards; there are {', '.join(SCALES)}.")
    groups = values.unflatten(0, (-1, group_size))  # (B, G, K)
    if scale != "mean" and best_of == 1:
        result = groups - groups.mean(1, keepdim=True)
    else:
        weights = weights_by_rank(group_size, scale, best_of)
        result = advantages_by_rank(groups, weights)
    if scale == "std":
        result = result / (deviation(groups) + 1e-4)
    highest = groups.amax(1, keepdim=True)  # (B, 1, K)
    lowest = groups.amin(1, keepdim=True)  # (B, 1, K)
    alike = highest - lowest <= 1e-6  # there, what is left after subtracting the mean is a rounding error
    return result.masked_fill(alike, 0).flatten(0, 1)


def deviation(groups):
    """The root of the summed variances of each group's pieces, (B, 1, 1) from (B, G, K). With one piece it is the
    standard deviation of the rewards; with several, the variance of their sum may be 0."""
    variance = groups.var(1).sum(1)  # (B,)
    return variance.sqrt()[:, None, None]


# ---- Logprobs and entropy ----------------------------------------------------------------------------------


def distribution(logits, temperature):
    """Logprobs (..., V) of the next token, for sampler, policy and reference alike. To sample in another way, change
    this function alone. If it cuts tokens off, as top-p does, give them a low but finite logprob, and set KL_COEF=0:
    an updated policy, and more so the reference, would cut off some tokens that have been sampled."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays as it is
    return (logits / temperature).log_softmax(-1)


def logprobs_of_logits(logits, tokens, temperature):
    """Logprobs of the tokens and entropies of the distribution, both (N, T), from logits (N, T, V). The entropy has no
    gradient: it is a metric. (To train it, use -(logp.exp() * logp.clamp(min=-1e4)).sum(-1), as the gradient of entr
    is NaN where p is 0, add it in train.loss_and_sums(), and set `all_have_gradient` in train.update().)"""
    logp = distribution(logits, temperature)  # (N, T, V)
    p = logp.detach().exp()  # (N, T, V)
    entropy = torch.special.entr(p).sum(-1)  # (N, T); entr(p) = -p log p, and 0 at p = 0
    logprobs = logp.gather(-1, tokens[..., None])[..., 0]  # (N, T)
    return logprobs, entropy


def logprobs_and_entropy(hidden, tokens, head, V, temperature, most_logits):
    """Logprobs and entropies (N, T), as logprobs_of_logits() makes them, but from hidden states (N, T, C), of which
    `head` makes the logits.

    Logits are the largest tensors of all. If there are at most `most_logits` numbers, they are made once and kept, and
    only their fp32 copies are made a few rows at a time, and made again in the backward pass. If there are more, this
    holds for the logits themselves as well."""
    at_once = tokens.numel() * V <= most_logits
    inputs = head(hidden) if at_once else hidden  # (N, T, V) or (N, T, C)

    def of_rows(some_inputs, some_tokens):
        logits = some_inputs if at_once else head(some_inputs)
        return logprobs_of_logits(logits, some_tokens, temperature)

    if hidden.is_cuda:
        logits_in_a_part = most_logits // 2  # as hardware.bytes_of_logits() expects
    elif at_once:
        logits_in_a_part = 2**22  # small enough for a CPU's caches
    else:
        logits_in_a_part = 2**25  # more, as each part adds to the head's gradient
    logits_in_a_row = max(1, tokens.shape[1] * V)
    rows = max(1, logits_in_a_part // logits_in_a_row)
    logprobs, entropies = [], []
    for some_inputs, some_tokens in zip(inputs.split(rows), tokens.split(rows)):
        logp, entropy = checkpoint(of_rows, some_inputs, some_tokens, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(logp)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


# ---- The policy loss ---------------------------------------------------------------------------------------


def policy_loss(logprobs, old_logprobs, advantages, mask, *, loss, clip_low, clip_high, normalizer, importance=None):
    """The loss to minimise, and metrics: sums over tokens, so that those of microbatches add up.

    `advantages` are (N, T), one for each token, or (N, 1), one for each answer. `logprobs` (N, T), with gradient, are
    those of the policy in training; `old_logprobs` are those of the weights that sampled, by the same forward pass.
    `normalizer` is loss_normalizer() of the whole batch; `importance` (N, T) comes from importance_weights().
    `clip_low` and `clip_high` are CLIP_RANGE and CLIP_RANGE_HIGH.

    grpo     PPO's clipped objective (Schulman et al., 2017), mean over each completion, then over completions
             (Shao et al., 2024): a token of a long completion weighs less
    dapo     the same, mean over all tokens of the batch, as DAPO's code does (Yu et al., 2025; the paper's formula
             takes it within each group); its "clip-higher" is clip_high > clip_low
    dr_grpo  the same, divided by N · the longest completion allowed: no bias by length (Liu et al., 2025)
    cispo    the ratio is capped at 1 + clip_high and becomes a constant weight of the policy gradient, so that no
             token loses its gradient; mean over all tokens (MiniMax-M1, 2025)

    With one update per batch, the policy is the one that sampled: all ratios are 1, nothing is clipped, and each loss
    has the gradient of -A·log p, times `importance`. They differ only in how they average over tokens.
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)  # (N, T)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    too_low = ratio < 1 - clip_low
    too_high = ratio > 1 + clip_high
    if loss == "cispo":
        capped_ratio = ratio.detach().clamp(max=1 + clip_high)
        objective = capped_ratio * advantages * logprobs
        clipped_low = torch.zeros_like(mask)
        clipped_high = too_high & (advantages != 0)
    elif loss in ("grpo", "dapo", "dr_grpo"):
        clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
        objective = torch.min(ratio * advantages, clipped_ratio * advantages)
        clipped_low = too_low & (advantages < 0)
        clipped_high = too_high & (advantages > 0)
    else:
        raise ValueError(f"{loss!r} is not a policy loss; there are {', '.join(LOSSES)}.")
    if importance is not None:
        objective = objective * torch.where(mask, importance, 0)

    sums = {
        "ratio_gap": torch.where(mask, ratio.detach() - 1, 0).abs().sum(),
        "clip_low": (clipped_low & mask).sum().float(),  # tokens whose gradient the clip has changed
        "clip_high": (clipped_high & mask).sum().float(),
    }
    return aggregate(-objective, mask, loss, normalizer), sums


def loss_normalizer(mask, loss, max_completion_tokens):
    """The divisor of a sum over these rows. Like gradients, it adds up over microbatches, kinds and processes."""
    rows = torch.full((), len(mask), device=mask.device)  # torch.tensor would be a GPU sync
    if LOSSES[loss] == "answers":
        return rows
    if LOSSES[loss] == "limit":
        return rows * max_completion_tokens
    return mask.sum()


def aggregate(per_token, mask, loss, normalizer):
    """Reduces values (N, T) to one number, as `loss` does; also for the KL term."""
    per_row = torch.where(mask.bool(), per_token, 0).sum(1)  # (N,)
    if LOSSES[loss] == "answers":
        per_row = per_row / mask.sum(1).clamp(min=1)
    return per_row.sum() / normalizer


def importance_weights(old_logprobs, rollout_logprobs):
    """Truncated importance sampling (Yao et al., 2025): p_train / p_rollout of each token, a constant, for a sampler
    that rounds differently from the training forward. Both are of the weights that sampled."""
    return (old_logprobs - rollout_logprobs).detach().exp().clamp(max=MAX_IMPORTANCE)


# ---- KL ----------------------------------------------------------------------------------------------------


def kl(logprobs, ref_logprobs, mask, estimator):
    """Estimates (N, T) of KL(policy ‖ reference) on sampled tokens, zero outside the mask (Schulman, 2020).

    As estimates, k1 and k3 are unbiased, and k2 is close if p is near q. In a loss they are three different things
    (Tang & Munos, 2025), for tokens sampled from the policy p, where q is the reference:
    k1  log(p/q)            gradient ∇log p: zero on average. It restrains nothing and only adds noise.
    k2  ½ log(p/q)²         gradient log(p/q) ∇log p: on average exactly that of the next token's KL(p ‖ q), for tokens
                            sampled from p as it is. The right one.
    k3  q/p - 1 - log(q/p)  gradient (1 - q/p) ∇log p: that of KL(q ‖ p), huge where p << q. GRPO's own. (Newer
                            TRL multiplies it by the ratio, as DeepSeek-V3.2 does: its gradient is then k2's.)
    """
    log_ratio = torch.where(mask.bool(), logprobs - ref_logprobs, 0)  # log(p/q)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-log_ratio) + log_ratio  # expm1: near p = q, a difference of numbers close to 1 is noise
    raise ValueError(f"{estimator!r} is not a KL estimator; there are {', '.join(KL_ESTIMATORS)}.")


# ---- Schedules ---------------------------------------------------------------------------------------------


def schedule(step, steps, warmup, kind):
    """What a setting is multiplied by at `step` (from 0): it rises to 1 over the warm-up, then stays or falls to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)  # from 0 to 1
    if kind == "linear":
        return 1 - progress
    if kind == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1.0


# ---- Advantages by rank, for SCALE_REWARDS=mean and BEST_OF --------------------------------------------------


def weights_by_rank(G, scale, best_of):
    """The weights (G - 1,) of the differences between neighbours, where a group's answers are sorted by their rewards.

    A reward is the lowest one plus the differences between neighbours on the way up to it. Here each difference is
    multiplied by a weight first, and an advantage is such a sum minus the group's mean. With weights of 1 it is the
    reward minus the mean. c is the number of answers above a difference: if the rewards are 0, 0 and 1, the differences
    are 0 and 1, with c = 2 and c = 1. The fewer answers stand above a difference, the more another answer above it
    raises the best of several, so the larger its weight:

    scale   best_of  weight                                 the advantages then follow the gradient of
    "none"  k        w(k) = C(G-1-c, k-1) / C(G-1, k-1)     E[best of k], times 1/k - 1/G
    "mean"  1        w(j) / (1 - j/G), summed over          ∫ log P(reward > x) dx, which is Σ E[best of j] / j up to a
                     j = 1, 2, 3, ... < G; equals G / c     constant, as log P = -Σ (1 - P)^j / j; without j >= G
    "mean"  k        the same, summed over                  ∫ log P(best of k > x) dx / k, likewise
                     j = k, 2k, 3k, ... < G

    The first row uses the rewards s of Walder & Karkhanis (2025), times G/k, but subtracts the group's mean instead of
    their baselines; that leaves the factor 1/k - 1/G, and the KL weighs more by its inverse. With rewards of 0 and 1,
    the second divides by the group's mean, which is MaxRL (arXiv 2602.02710); the integral is for any rewards.
    """
    if scale == "mean":
        multiples = range(best_of, G, best_of)  # k, 2k, 3k, ... < G
        factors = {j: 1 / (1 - j / G) for j in multiples}
    else:
        factors = {best_of: 1}
    weights = []
    for c in range(G - 1, 0, -1):  # from the lowest difference to the highest
        weight = 0
        for j, factor in factors.items():
            # An answer that climbs over the difference raises the best of j only if the j - 1 others are below it.
            choices = math.comb(G - 1, j - 1)  # of the j - 1 others
            choices_below = math.comb(G - 1 - c, j - 1)
            weight += choices_below / choices * factor
        weights.append(weight)
    return weights


def advantages_by_rank(groups, weights):
    """The advantages (B, G, K) of groups (B, G, K), from weights_by_rank().

    The order is that of whole rewards. Each difference between neighbours is divided among the pieces as the two
    answers differ in them, so an answer's pieces add up to its advantage in the group of whole rewards.
    Answers with equal rewards form a block, and their mean takes their place in that order. They differ only in how the
    reward is split among the pieces, and that difference is weighted by the mean of the weights inside the block. The
    result is the mean over all orders in which the answers of a block could stand: an answer stands directly above
    each difference inside the block equally often, and differences further down cancel on average.

    Where each piece judges the whole answer, this is the exact gradient that weights_by_rank() names. Where a
    piece judges words of its own, it is credit assignment, and those words may be paid against the piece's own
    order: the best answer can get less in it than answers that have nothing there, because the second best had more.
    """
    rewards, order = groups.sum(2).sort(1)  # (B, G)
    order = order[..., None].expand_as(groups)  # (B, G, K)
    ordered = groups.gather(1, order)  # (B, G, K)
    is_higher = rewards.diff(dim=1) > 1e-6  # (B, G - 1): than the answer before
    begins = F.pad(is_higher, (1, 0), value=True)  # (B, G): whether an answer is its block's first one
    block = begins.cumsum(1) - 1  # (B, G): the number of each answer's block

    def sum_of_block(x):
        index = block[..., None].expand_as(x)
        sums = torch.zeros_like(x).scatter_add(1, index, x)  # the sum of block i in row i
        return sums.gather(1, index)

    means = sum_of_block(ordered) / sum_of_block(torch.ones_like(ordered))  # (B, G, K)
    differences = means.diff(dim=1, prepend=means[:, :1])  # (B, G, K): to the answer before, 0 for the lowest
    weights = [0.0, *weights]  # there is no difference below the lowest
    weights = torch.tensor(weights, dtype=groups.dtype)[:, None]  # (G, 1)
    between_blocks = (weights * differences).cumsum(1)  # (B, G, K)

    inside = (~begins)[..., None].to(groups.dtype)  # (B, G, 1): 1 where the difference lies inside a block
    weight_inside = sum_of_block(weights * inside) / sum_of_block(inside).clamp(min=1)  # (B, G, 1): the mean
    weighted = between_blocks + weight_inside * (ordered - means)  # (B, G, K)
    weighted = torch.empty_like(weighted).scatter(1, order, weighted)  # back in the order of the answers
    return weighted - weighted.mean(1, keepdim=True)
