"""The 95 % intervals hold the truth in 95 of 100 repetitions, for new questions and new seeds."""

import math
from statistics import fmean

import numpy
import pytest

from nanorook import tables
from nanorook.statistics import (
    beyond_chance,
    differences,
    figure,
    gain,
    interval,
    is_share,
    linearised,
    over_seeds,
    score,
    shared_variance,
    student,
)

REPETITIONS, QUESTIONS = 500, 400


@pytest.mark.parametrize("n, factor", [(2, 12.71), (6, 2.571), (11, 2.228), (31, 2.042), (1001, 1.962)])
def test_intervals_are_students(n, factor):
    values = numpy.random.default_rng(n).random(n).tolist()
    half = factor * numpy.std(values, ddof=1) / numpy.sqrt(n)
    found = interval(values)
    assert found == (pytest.approx(numpy.mean(values)), pytest.approx(half, rel=0.01))
    assert figure([*values, None])[:2] == found == interval(linearised(values, [1] * n))
    assert interval([1.0]) == (1.0, math.inf)
    assert student(4) < student(3.5) < student(3) and student(9.01) == pytest.approx(student(9), rel=0.01)


def test_the_interval_of_a_ratio_holds_what_it_says():
    """Illegal moves in games of any length: the true share is within the interval in 95 of 100 experiments."""
    rng, held = numpy.random.default_rng(0), 0
    for _ in range(400):
        moves = rng.integers(1, 60, 80)
        illegal = rng.binomial(moves, 0.1)
        share, half = interval(linearised(illegal.tolist(), moves.tolist()))
        assert share == pytest.approx(illegal.sum() / moves.sum())
        held += abs(share - 0.1) <= half
    assert 360 <= held <= 395


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_and_all_of_200_are_not_certain(share):
    assert interval([share] * 200) == (share, pytest.approx(0.0188, abs=1e-4))  # Wilson's
    assert gain([share] * 200, [share] * 200) == (0, pytest.approx(0.0188, abs=1e-4), 199)
    assert interval([0.3] * 200)[1] < 1e-9  # no share


@pytest.mark.parametrize("share", [0.02, 0.95])
def test_the_interval_of_a_share_holds_what_it_says(share):
    """By each number of successes and its probability."""
    held = 0.0
    for right in range(QUESTIONS + 1):
        mean, half = interval([1.0] * right + [0.0] * (QUESTIONS - right)) if abs(right / 400 - share) < 0.1 else (9, 0)
        chance = math.comb(QUESTIONS, right) * share**right * (1 - share) ** (QUESTIONS - right)
        held += chance * (abs(mean - share) <= half)
    assert 0.93 < held < 0.97


def test_a_gain_is_that_of_the_same_questions():
    before, after = [0.0, 1.0, 5.0, 2.0], [1.0, 2.0, 6.5, 3.0]
    assert gain(before, after) == (*interval([1.0, 1.0, 1.5, 1.0]), 3)
    mean, half, _ = gain(before, [*after, 9.0])  # other questions were asked: that of independent means
    assert mean == fmean([*after, 9.0]) - 2 and half == math.hypot(interval(before)[1], interval([*after, 9.0])[1])
    some = differences([None, 1.0, 5.0, None], [1.0, 2.0, None, None])  # the mean of those known
    assert fmean(some) == pytest.approx(1.5 - 3.0) and differences([None], [1.0]) is None
    few = [None] * 98  # two questions have the metric, not 100
    assert gain([*few, 0.0, 0.0], [*few, 1.0, 1.0]) == (*interval([1.0, 1.0]), 1)
    before, after = [*few, 1.0, 2.0], [*few[1:], 2.0, 3.0, 4.0]
    mean, half, freedom = gain(before, after)  # other ones have it now, so the questions are not paired
    assert (mean, freedom) == (1.5, 1) and half == math.hypot(interval([1.0, 2.0])[1], interval([2.0, 3.0, 4.0])[1])


def test_an_error_is_no_share_although_it_may_be_below_1():
    assert is_share("chess legal T=0", [0.0, None, 0.5, 1.0]) and not is_share("chess length T=0", [0.5, 2.0])
    assert not is_share("chess move_error T=0", [0.0, 0.64])


def test_what_seeds_share():
    rng = numpy.random.default_rng(0)
    values = rng.normal(size=(3, 50)) + rng.normal(size=50)
    pairs = [numpy.cov(values[i], values[j])[0, 1] * 49 / 50**2 for i, j in ((0, 1), (0, 2), (1, 2))]
    names = [list(range(50))] * 3
    assert shared_variance(names, values) == pytest.approx(numpy.mean(pairs))
    turned = [numpy.roll(range(50), i) for i in range(3)]  # by name, not by place
    assert shared_variance(turned, [numpy.roll(v, i) for i, v in enumerate(values)]) == pytest.approx(numpy.mean(pairs))
    assert shared_variance([range(50), range(50, 100), range(100, 150)], values) == 0
    assert shared_variance(names[:1], values[:1]) == 0
    twice = [numpy.repeat(some, 2) for some in ([*range(50)], [*range(50, 100)], [*range(100, 150)])]
    assert shared_variance(twice, numpy.repeat(values, 2, axis=1)) < 1e-9  # a seed's own questions are not shared
    assert over_seeds([(0.5, 0.1)]) == (0.5, math.inf, math.inf)
    assert over_seeds([(1.0, 0.01)] * 3) == (1.0, 0.01, math.inf)


def made_up(rng, seeds, share, shares_questions, paired):
    """Values of QUESTIONS for each seed. Most questions are answered alike by all seeds, as greedy answers are: in
    experiments/mates.json the variance between five seeds is a sixth of what independent answers would have."""

    def chances(mean):
        easy = rng.random(QUESTIONS if shares_questions else (seeds, QUESTIONS), numpy.float32) < mean
        return numpy.broadcast_to(0.1 * mean + 0.9 * easy, (seeds, QUESTIONS))

    chance = chances(share)
    if paired:  # the start model is the same for all seeds; what a seed gains differs by 1 % from another
        start = chances(0.2)
        before = rng.random((1, QUESTIONS) if shares_questions else start.shape, numpy.float32) < start
        after = rng.random(chance.shape, numpy.float32) < chance + rng.normal(0, 0.01, (seeds, 1))
        return after.astype(float) - before
    return (rng.random(chance.shape, numpy.float32) < chance).astype(float)


CASES = [(3, 0.02, False, True), (3, 0.95, False, False), (3, 0.45, True, False), (5, 0.45, True, True)]


@pytest.mark.parametrize("seeds, share, paired, shares_questions", CASES)
def test_intervals_over_seeds_hold_for_other_seeds_and_questions(seeds, share, paired, shares_questions):
    rng, held, without = numpy.random.default_rng(1), 0, 0
    names, truth = [numpy.arange(QUESTIONS)] * seeds, share - 0.2 * paired
    for _ in range(REPETITIONS):
        values = made_up(rng, seeds, share, shares_questions, paired)
        figures = [interval(of_seed) for of_seed in values.tolist()]
        shared = shared_variance(names, values) if shares_questions else 0.0
        (mean, half, _), (_, narrow, _) = over_seeds(figures, shared), over_seeds(figures)
        held += abs(mean - truth) <= half
        without += abs(mean - truth) <= narrow
    assert 0.93 * REPETITIONS <= held <= 0.97 * REPETITIONS
    assert without == held or without < 0.85 * REPETITIONS  # the mistake that was made


def test_they_also_hold_where_three_seeds_share_a_few_questions(share=0.45, pool=4000):
    """Each seed draws 400 of 4,000 questions, so that two seeds share a tenth of theirs. By chance, three means are
    often closer to each other than different questions allow."""
    rng, held, times = numpy.random.default_rng(1), 0, 500
    for _ in range(times):
        chance = 0.1 * share + 0.9 * (rng.random(pool) < share)
        names = [rng.choice(pool, QUESTIONS, replace=False) for _ in range(3)]
        values = [(rng.random(QUESTIONS) < chance[asked]).astype(float) for asked in names]
        figures = [interval(of_seed.tolist()) for of_seed in values]
        mean, half, _ = over_seeds(figures, shared_variance(names, values))
        held += abs(mean - share) <= half
    assert 0.945 * times <= held <= 0.985 * times


def test_a_table_has_the_rows_of_all_its_columns_and_marks_what_is_more_than_noise():
    before = {"legal": figure([0, 1, 0, 1]), "loss": figure([0, 1, 2, 3])}
    after = {"legal": figure([1, 1, 1, 1]), "loss": figure([2, 3, 4, 5]), "rare": figure([1.0])}
    rows = tables.skill_rows({"before": before, "after": after}, {})
    assert rows[1][3].startswith("+0.500 ± ") and rows[1][3].endswith("  ") and rows[2][3] == "+2.000 ± 0.000 *"
    assert rows[3] == ["rare", "", "1.000", ""]  # of one value alone there is no interval
    assert tables.skill_rows({"before": before}, {})[1] == ["legal", rows[1][1]]
    small = [["", "n"], ["left", "1"], ["l", "12345"]]
    assert tables.table(small) == "          n\nleft      1\nl     12345"
    assert tables.table(small, markdown=True).splitlines() == [
        "|      |     n |", "| ---- | ----: |", "| left |     1 |", "| l    | 12345 |",
    ]  # fmt: skip


def test_a_score_is_as_improbable_as_the_mean():
    """Quantiles of Student's distribution from tables; the approximation may only be a little too low."""
    for freedom, t, z in (4, 7.173, 3.090), (4, 4.604, 2.576), (2, 9.925, 2.576), (9, 4.297, 3.090), (30, 3.385, 3.090):
        found = score(t, student(freedom), freedom)
        assert 0.97 * z < found < 1.005 * z, (freedom, found)
    assert score(0.2, 0.1, math.inf) == pytest.approx(3.92)
    assert score(0.0, 0.1, 4) == score(0.0, 0.0, 4) == 0 and score(0.1, 0.0, 4) == math.inf
    assert score(0.5, math.inf, math.inf) == 0  # a single seed


@pytest.mark.parametrize("seeds", [3, 5])
def test_few_tables_in_which_nothing_changed_have_a_star(seeds):
    """Tables of 14 rows: with the degrees of freedom, and without, which was a mistake."""
    rng, stars, without = numpy.random.default_rng(0), 0, 0
    for _ in range(500):
        gains = {i: over_seeds([(mean, 0.1) for mean in rng.normal(size=seeds).tolist()]) for i in range(14)}
        stars += beyond_chance(gains) != []
        without += beyond_chance({name: (*figure[:2], math.inf) for name, figure in gains.items()}) != []
    assert 0.01 * 500 <= stars <= 0.07 * 500 and without > 0.15 * 500
