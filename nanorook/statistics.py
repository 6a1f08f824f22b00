"""Means with 95 % intervals: of the values of questions, of two evaluations question by question, and over seeds."""

import math
from statistics import NormalDist, fmean, variance

import numpy as np

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 95 %, for 1, 2, ... degrees of freedom
# Rare successes or changes are seen only a few times. If by chance they are seen less often, the variance also looks
# smaller. Adding 2 to the sum of squares corrects this (Agresti & Coull, 1998; differences: Bonett & Price, 2012).
RARE = 2


def are_shares(values):
    """Whether the values are zeros and ones, or differences of them."""
    return {*values} <= {-1, 0, 1}


def student(freedom):
    """The factor for a 95 % interval: right to 0.2 % at the entries of STUDENT, and a little too large between them."""
    if freedom > 9:
        return 1.96 + 2.4 / freedom + 3 / freedom**2
    return float(np.interp(1 / freedom, [1 / n for n in range(9, 0, -1)], STUDENT[::-1]))


def interval(values):
    """The mean and the half-width of its 95 % interval by Student's distribution, infinite for a single value."""
    mean, n = fmean(values), len(values)
    if n == 1:
        return mean, math.inf
    square, shares = sum((value - mean) ** 2 for value in values), are_shares(values)
    if shares and square == 0:  # 0 of 200, or 200 of 200: the other end of Wilson's interval (1927)
        return mean, 1.96**2 / (n + 1.96**2)
    return mean, student(n - 1) * math.sqrt((square + RARE * shares) / (n - 1) / n)


def known(values):
    return [value for value in values if value is not None]


def is_share(name, values):
    """Whether a figure is a share, of which more is better: its values are between 0 and 1, and it is no error."""
    metric = name.split(" ")[1]
    return not metric.endswith("_error") and all(0 <= value <= 1 for value in known(values))


def figure(values):
    """(mean, half-width of its interval, values) of questions, some of which may have no value."""
    return *interval(known(values)), values


def linearised(values, counts=None):
    """A number for each question, so that the mean is that of the known values, or the ratio of the sums of values and
    counts, and the variance is right to first order (Cochran, Sampling Techniques, 1977, chapter 6)."""
    if counts is None and None not in values:
        return values
    counts = counts or [value is not None for value in values]
    ratio, average = sum(known(values)) / sum(counts), fmean(counts)
    return [ratio + ((value or 0) - ratio * count) / average for value, count in zip(values, counts)]


def differences(before, after):
    """after - before of each question; None if different questions were asked, or none has a value."""
    if len(before) != len(after) or not known(before) or not known(after):
        return None
    return [b - a for a, b in zip(linearised(before), linearised(after))]


def gain(before, after):
    """The mean of after - before, its half-width and the degrees of freedom of that, question by question if both were
    asked the same ones and the same ones have a value."""
    paired = [value is None for value in before] == [value is None for value in after]
    before, after = known(before), known(after)
    freedom = max(1, min(len(before), len(after)) - 1)
    if paired:
        return *interval([b - a for a, b in zip(before, after)]), freedom
    (a, a_half), (b, b_half) = interval(before), interval(after)
    return b - a, math.hypot(a_half, b_half), freedom


def beyond_chance(gains):
    """The names in {name: (mean, half-width of its 95 % interval, its degrees of freedom)} whose mean is not zero. Of
    many rows a few exclude zero by chance, so the error rate of 5 % is for all rows together (Holm, 1979, A Simple
    Sequentially Rejective Multiple Test Procedure)."""
    scores = {name: score(*gain) for name, gain in gains.items()}
    ordered, found = sorted(gains, key=scores.get, reverse=True), []
    for i, name in enumerate(ordered):
        if not scores[name] > NormalDist().inv_cdf(1 - 0.025 / (len(ordered) - i)):
            break
        found.append(name)
    return found


def score(mean, half, freedom):
    """How many standard deviations of a normal distribution are as improbable as this mean (Wallace, 1959, Bounds on
    Normal Approximations to Student's and the Chi-Square Distributions): for few values, much fewer than its own."""
    if half == 0:
        return math.inf if mean else 0.0
    t = student(freedom) * abs(mean) / half
    if freedom == math.inf:
        return t
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t**2 / freedom))


def shared_variance(questions, values):
    """What the means of seeds share because they asked some of the same questions: the covariance of the means of two
    seeds, averaged over all pairs. Takes for each seed the names of its questions and its values."""
    n, deviations = len(values), np.concatenate([(np.asarray(v) - np.mean(v)) / len(v) for v in values])
    _, question = np.unique(np.concatenate(questions), return_inverse=True)
    seed = np.repeat(range(n), [len(v) for v in values])
    within = np.bincount(n * question + seed, deviations) ** 2  # of one seed, which may ask a question twice
    products = (np.bincount(question, deviations) ** 2).sum() - within.sum()  # of different seeds
    rare = RARE * are_shares(np.unique(np.concatenate(values))) / len(values[0]) ** 2
    inflated = 1 + rare * n / max(1e-12, (deviations**2).sum())
    return max(0.0, inflated * float(products) / max(1, n * (n - 1)))


def over_seeds(figures, shared=0.0):
    """The mean over seeds, the half-width of its 95 % interval for other seeds and other questions, and the interval's
    degrees of freedom. figures: (mean, half-width, ...) of each seed; `shared` is their shared_variance, 0 if each
    asked its own questions."""
    # If a seed's mean has the variance V, and two seeds' means the covariance C (here `shared`), the mean over n seeds
    # has the variance (V + (n - 1) C) / n = (V - C) / n + C, and V - C is, on average, the variance between the seeds.
    n, means = len(figures), [mean for mean, *_ in figures]
    if n == 1:
        return means[0], math.inf, math.inf
    between = variance(means) / n
    if between < 1e-12:  # all are equal, as at 100 %: the seeds show no variance, but the questions of one seed may
        return means[0], max(half for _, half, *_ in figures), math.inf
    # `shared` is known from hundreds of questions and `between` from n seeds: Welch-Satterthwaite. By chance, `between`
    # may come out far too small, as if nearly all the variance were known. It is at least what those questions cause
    # that a seed does not share with the others.
    own_questions = max(0.0, fmean((half / 1.96) ** 2 for _, half, *_ in figures) - shared) / n
    freedom = (n - 1) * (1 + shared / max(between, own_questions)) ** 2
    return fmean(means), student(freedom) * math.sqrt(between + shared), freedom


def with_interval(mean, half, form=".3f"):
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}" if half < math.inf else f"{mean:{form}}"
