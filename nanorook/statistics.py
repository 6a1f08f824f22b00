"""Means with 95 % intervals: of the values of questions, and of two evaluations question by question."""

import math
from statistics import fmean, stdev

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # half-widths of 95 % for 2, 3, ... values


def interval(values):
    """The mean and the half-width of its 95 % interval by Student's distribution, infinite where there is one value."""
    n = len(values)
    factor = math.inf if n == 1 else STUDENT[n - 2] if n < 11 else 1.96 + 2.5 / (n - 1)
    return fmean(values), factor if n == 1 else factor * stdev(values) / math.sqrt(n)


def known(values):
    return [value for value in values if value is not None]


def spread(values, counts=None):
    """Numbers for all questions with the mean of the known values, or with the ratio of the sums of values and counts,
    and, to first order, its variance (Cochran, Sampling Techniques, 1977, chapter 6)."""
    if counts is None and None not in values:
        return values
    counts = counts or [value is not None for value in values]
    ratio, average = sum(known(values)) / sum(counts), fmean(counts)
    return [ratio + ((value or 0) - ratio * count) / average for value, count in zip(values, counts)]


def gain(before, after):
    """The mean of after - before and the half-width of its 95 % interval, question by question."""
    return interval([b - a for a, b in zip(spread(before), spread(after), strict=True)])


def figure(values):
    """(mean, half-width of its interval, values) of questions of which some have no value."""
    return *interval(known(values)), values


def with_interval(mean, half, form=".3f"):
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}" if half < math.inf else f"{mean:{form}}"
