"""Means with 95 % intervals: of the values of questions, and of two evaluations question by question."""

import math

import numpy as np

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 95 %, for 1, 2, ... degrees of freedom


# Of a rare success, or of a change that is rare, a few are seen, and where they happen to be fewer the variance looks
# smaller, too. Two more in the sum of squares mend that (Agresti & Coull, 1998; of differences Bonett & Price, 2012).
RARE = 2


def are_shares(values):
    """Zeros and ones, or the differences of such."""
    return {*values} <= {-1, 0, 1}


def student(freedom):
    """Between the entries of the table it is a little too large, never too small."""
    if freedom > 9:
        return 1.96 + 2.5 / freedom
    return float(np.interp(1 / freedom, [1 / n for n in range(9, 0, -1)], STUDENT[::-1]))


def interval(values, counts=None):
    """The mean and the half-width of its 95 % interval by Student's distribution, infinite where there is one value.
    With `counts` it is the ratio of two sums, such as illegal moves over moves; a count of 0 is no value. Its
    variance is that of values - ratio · counts (Cochran, Sampling Techniques, 1977, chapter 6)."""
    counts = [1] * len(values) if counts is None else counts
    ratio, n = sum(values) / sum(counts), sum(count > 0 for count in counts)
    if n == 1:
        return ratio, math.inf
    square, shares = sum((v - ratio * c) ** 2 for v, c in zip(values, counts)), are_shares([*values, *counts])
    if shares and square == 0:  # 0 of 200, or 200 of 200: the other end of Wilson's interval (1927)
        return ratio, 1.96**2 / (n + 1.96**2)
    return ratio, student(n - 1) * math.sqrt((square + RARE * shares) * n / (n - 1)) / sum(counts)


def known(values):
    return [value for value in values if value is not None]


def spread(values, counts=None):
    """Numbers for all questions with the mean of the known values, or with the ratio of the sums of values and counts,
    and, to first order, its variance (Cochran, 1977, chapter 6)."""
    if counts is None and None not in values:
        return values
    counts = counts or [value is not None for value in values]
    ratio, average = sum(known(values)) / sum(counts), sum(counts) / len(counts)
    return [ratio + ((value or 0) - ratio * count) / average for value, count in zip(values, counts)]


def differences(before, after):
    """after - before of each question; None where not the same ones were asked, or none has a value."""
    if len(before) != len(after) or not known(before) or not known(after):
        return None
    return [b - a for a, b in zip(spread(before), spread(after))]


def gain(before, after):
    """The mean of after - before and the half-width of its 95 % interval, question by question."""
    if (values := differences(before, after)) is None:
        (a, a_half), (b, b_half) = interval(known(before)), interval(known(after))
        return b - a, math.hypot(a_half, b_half)
    return interval(values)


def with_interval(mean, half, form=".3f"):
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}" if half < math.inf else f"{mean:{form}}"
