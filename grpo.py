"""GRPO as pure functions on tensors: credit, advantages, the policy losses, KL, entropy.

Rows are completions: N = B·G of them, the G of a group next to each other; T completion tokens, V vocabulary.
A `mask` (N, T) is true on completion tokens, the end token included. Values outside it never count, not even NaN.
Every loss is a sum divided by a `normalizer` of the whole batch, so microbatches may be cut in any way.
"""

import math
from bisect import bisect_right

import numpy as np
import torch
from torch.autograd.function import once_differentiable

LOSSES = ("grpo", "dapo", "dr_grpo", "cispo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3")
SCHEDULES = ("constant", "linear", "cosine")

# Log-ratios are clamped here before exp. e^20 = 5e8 is far outside any trust region, yet a sum of such ratios over a
# batch, and its square in a gradient norm, still fit into fp32. Beyond the bound the gradient is zero.
MAX_LOG_RATIO = 20.0


# ---------------------------------------------------------------------------------------------------------------------
# Credit and advantages


def credit(answers, ends, tokens):
    """What each piece of a reward gave each answer, values (N, K), and the tokens it judges, judged (N, T, K).

    answers: for each answer its pieces (name, value, span, span, ...), a span being the (start, end) of characters;
    ends: for each answer the character at which each of its tokens ends; tokens: T. A token belongs to the span that
    its last character is in. A piece without spans judges the whole answer, and so does one that an answer lacks: its
    value is 0 there.
    """
    names = {name: k for k, name in enumerate(dict.fromkeys(name for pieces in answers for name, *_ in pieces))}
    values = np.zeros((len(answers), len(names)), dtype=np.float32)
    judged = np.ones((len(answers), tokens, len(names)), dtype=np.float32)
    for n, pieces in enumerate(answers):
        for name, value, *spans in pieces:
            values[n, names[name]] = value
            judged[n, :, names[name]] = not spans
            for start, end in spans:
                judged[n, bisect_right(ends[n], start) : bisect_right(ends[n], end), names[name]] = 1
    return torch.from_numpy(values), torch.from_numpy(judged)


def advantages(values, group_size, scale="none", deviation=None):
    """Values (N, K) of the pieces of N rewards against the mean of their group -> advantages (N, K).

    scale="group" divides by the standard deviation of the group's rewards (Shao et al., 2024, DeepSeekMath), or by the
    root of the pieces' summed variances, as pieces may cancel out where they differ; "none" does not, as that favours
    prompts on which all completions score nearly the same (Liu et al., 2025, Dr. GRPO); "batch" divides by `deviation`,
    that of all rewards of the step.
    """
    groups = values.view(-1, group_size, values.shape[1])  # (B, G, K)
    result = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        result = result / (groups.var(1).sum(1).sqrt()[:, None, None] + 1e-4)
    elif scale == "batch":
        result = result / (deviation + 1e-4)
    return result.masked_fill(constant(groups)[:, None], 0).flatten(0, 1)


def constant(groups):
    """Groups (B, G, ...) whose values are all equal -> (B, ...). They teach nothing, and rounding of their mean must
    not, once it is divided by a deviation of nearly zero. Of whole rewards, logs call their share frac_zero_std."""
    return groups.amax(1) - groups.amin(1) <= 1e-6


def token_advantages(advantages, judged):
    """Advantages (N, K) of the pieces and the tokens (N, T, K) they judge -> the advantage (N, T) of each token."""
    return (advantages[:, None] * judged).sum(2)


# ---------------------------------------------------------------------------------------------------------------------
# The policy loss


def policy_loss(
    logprobs,  # (N, T) of the policy in training, with gradient
    old_logprobs,  # (N, T) of the policy that sampled
    advantages,  # (N,), or (N, T) where each token has its own
    mask,  # (N, T)
    *,
    loss,
    clip_low,
    clip_high,
    normalizer,  # from loss_normalizer, of the whole batch
    weights=None,  # (N, T) from importance_weights
):
    """The loss to minimise, and stats for merge_stats.

    grpo     PPO's clipped objective (Schulman et al., 2017), mean over each completion, then over completions
             (Shao et al., 2024): a token of a long completion weighs less
    dapo     the same, mean over all tokens of the batch (Yu et al., 2025); its "clip-higher" is clip_high > clip_low
    dr_grpo  the same, divided by N · the longest completion allowed: no bias by length (Liu et al., 2025)
    cispo    the ratio is capped at 1 + clip_high and becomes a constant weight of the policy gradient, so that no
             token loses its gradient; mean over all tokens (MiniMax-M1, 2025)
    gspo     one ratio for each completion, the geometric mean of its tokens' ratios (Zheng et al., 2025)
    """
    mask, advantages = mask.bool(), advantages.view(len(mask), -1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)  # (N, T)
    if loss == "gspo":
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths(mask)  # (N, 1)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    if loss == "cispo":
        objective = ratio.detach().clamp(max=1 + clip_high) * advantages * logprobs
        clipped_low, clipped_high = torch.zeros_like(mask), too_high & (advantages != 0)
    else:
        objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
        clipped_low, clipped_high = too_low & (advantages < 0), too_high & (advantages > 0)
    if weights is not None:
        objective = objective * torch.where(mask, weights, 0)

    ratio = ratio.detach()
    stats = {  # in gspo a completion's ratio counts once for each of its tokens
        "tokens": mask.sum().float(),
        "ratio_min": torch.where(mask, ratio, torch.inf).amin(),
        "ratio_max": torch.where(mask, ratio, -torch.inf).amax(),
        "clip_low": (clipped_low & mask).sum().float(),  # tokens whose gradient the clip has changed
        "clip_high": (clipped_high & mask).sum().float(),
    }
    return aggregate(-objective, mask, loss, normalizer), stats


def loss_normalizer(mask, loss, max_completion_tokens):
    """What a sum over these rows is divided by. It adds up: over microbatches, tasks and processes.

    With several processes, sum it over them, and their gradients too.
    """
    rows = torch.full((), len(mask), device=mask.device)  # torch.tensor would make the host wait for the copy
    if loss in ("grpo", "gspo"):
        return rows
    return rows * max_completion_tokens if loss == "dr_grpo" else mask.sum()


def aggregate(per_token, mask, loss, normalizer):
    """Values (N, T) to one number in the way of `loss`; for the KL term next to a policy loss, too."""
    per_row = torch.where(mask.bool(), per_token, 0).sum(1)  # (N,)
    if loss in ("grpo", "gspo"):
        per_row = per_row / lengths(mask)[:, 0]
    return per_row.sum() / normalizer


def lengths(mask):  # (N, 1)
    return mask.sum(1, keepdim=True).clamp(min=1)


def merge_stats(parts):
    """The stats of microbatches as those of the whole: exact, as they are sums, minima and maxima."""
    return {name: getattr(torch, reduction(name))(torch.stack([part[name] for part in parts])) for name in parts[0]}


def reduction(name):
    return {"_min": "min", "_max": "max"}.get(name[-4:], "sum")


def importance_weights(train_logprobs, rollout_logprobs, cap):
    """Truncated importance sampling (Yao et al., 2025): min(p_train / p_rollout, cap) for each token, a constant.

    For a rollout in another precision or engine than the training forward. train_logprobs are those of the weights
    that sampled: they are also policy_loss's old_logprobs, so that its ratio holds the change by updates alone.
    """
    return (train_logprobs - rollout_logprobs).detach().exp().clamp(max=cap)


# ---------------------------------------------------------------------------------------------------------------------
# KL


def kl(logprobs, ref_logprobs, mask, estimator):
    """Estimates (N, T) of KL(policy ‖ reference) on sampled tokens, zero outside the mask (Schulman, 2020).

    `.sum() / mask.sum()` is the KL per token, `.sum(1).mean()` per sequence. All three are right as numbers to look
    at, k1 without bias but noisy and of either sign, k2 with a little bias, k3 without bias and never negative. In a
    loss they are three different things (Tang & Munos, 2025), for tokens sampled from the policy:

    k1  log(p/q)            gradient ∇log p: zero on average. It holds nothing back and only adds noise.
    k2  ½ log(p/q)²         gradient log(p/q) ∇log p: on average exactly that of KL(p ‖ q). The right one.
    k3  q/p - 1 - log(q/p)  gradient (1 - q/p) ∇log p: on average that of KL(q ‖ p), the other direction, and huge
                            where p << q. GRPO's own. (TRL by default multiplies it by the ratio, as DeepSeek-V3.2
                            does; then its gradient on policy is k2's.)
    """
    log_ratio = torch.where(mask.bool(), logprobs - ref_logprobs, 0)  # log(p/q)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-log_ratio) + log_ratio  # expm1: near p = q the difference of two numbers close to 1 is noise


def kl_warmup(step, steps, factor):
    """What the coefficient is multiplied by at `step` (from 0): a line from `factor` to 1 over the first `steps`."""
    return factor + (1 - factor) * min(1, step / steps) if steps else 1.0


def schedule(step, steps, warmup, kind):
    """What the learning rate is multiplied by at `step` (from 0): up to 1 over the warm-up, then level or down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]


# ---------------------------------------------------------------------------------------------------------------------
# Logprobs and entropy


def logprobs_and_entropy(logits, tokens, temperature=1.0):
    """Logits (N, T, V), tokens (N, T) -> the tokens' logprobs and the distribution's entropy, both (N, T) in fp32.

    The distribution is the sampled one, softmax(logits / temperature). The entropy has no gradient: it is a metric.
    """
    return LogprobsAndEntropy.apply(logits, tokens, temperature)


class LogprobsAndEntropy(torch.autograd.Function):
    """Autograd would keep several fp32 tensors of the logits' size, the largest of all with GPT-2's vocabulary. Here
    they exist for a few rows at a time, and backward computes them again from the logits."""

    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(tokens.shape, device=logits.device, dtype=wide)
        entropy = torch.empty_like(logprobs)
        for rows in chunks(logits):
            logp = (logits[rows].to(wide) / temperature).log_softmax(-1)
            logprobs[rows] = logp.gather(-1, tokens[rows, ..., None]).squeeze(-1)
            entropy[rows] = torch.special.entr(logp.exp_()).sum(-1)  # entr(p) = -p log p, and 0 at p = 0
        ctx.save_for_backward(logits, tokens)
        ctx.temperature, ctx.wide = temperature, wide
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        logits, tokens = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in chunks(logits):  # d logp / d logits = onehot - p
            part = -(logits[rows].to(ctx.wide) / ctx.temperature).softmax(-1)
            part.scatter_add_(-1, tokens[rows, ..., None], torch.ones_like(part[..., :1]))
            gradient[rows] = part * (upstream[rows, ..., None] / ctx.temperature)
        return gradient, None, None


def chunks(logits):
    """Slices of the first dimension: small ones for a CPU's caches, on CUDA as few launches as memory allows."""
    elements = 2**28 if logits.is_cuda else 2**22
    step = max(1, elements * len(logits) // max(1, logits.numel()))
    return [slice(i, i + step) for i in range(0, len(logits), step)]
