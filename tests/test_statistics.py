import math
import random

import numpy
import pytest

from nanorook import statistics, tables
from nanorook.statistics import figure, interval, spread


@pytest.mark.parametrize("n, factor", [(2, 12.71), (6, 2.571), (11, 2.228), (31, 2.042), (1001, 1.962)])
def test_intervals_are_students(n, factor):
    values = numpy.random.default_rng(n).random(n).tolist()
    half = factor * numpy.std(values, ddof=1) / numpy.sqrt(n)
    assert interval(values) == (pytest.approx(numpy.mean(values)), pytest.approx(half, rel=0.01))
    assert figure([*values, None])[:2] == interval(values)
    assert interval([1.0]) == (1.0, math.inf)


def test_the_interval_of_a_ratio_holds_what_it_says():
    """Illegal moves in games of any length: the true share is within the interval in 95 of 100 experiments."""
    rng, held = numpy.random.default_rng(0), 0
    for _ in range(400):
        moves = rng.integers(1, 60, 80)
        illegal = rng.binomial(moves, 0.1)
        share, half = interval(spread(illegal.tolist(), moves.tolist()))
        assert share == pytest.approx(illegal.sum() / moves.sum())
        held += abs(share - 0.1) <= half
    assert 360 <= held <= 395


def test_a_gain_is_taken_question_by_question():
    rng = random.Random(1)
    hard = [rng.random() for _ in range(1000)]  # what both models share: some questions are easier than others
    first, last = (figure([h + 0.1 * rng.random() + more for h in hard]) for more in (0, 0.02))
    mean, half = tables.change(first, last)
    assert (mean, half) == pytest.approx(interval([b - a for a, b in zip(first[2], last[2])]))
    assert 0 < half < mean < first[1] + last[1]
    assert tables.change(first[:2], last) == (pytest.approx(mean), math.hypot(first[1], last[1]))  # an earlier run
    known = figure([1, None, 0, 1, None])
    assert known[0] == pytest.approx(2 / 3) and statistics.gain(known[2], [1, 0, 0, 1, 1])[0] == pytest.approx(-1 / 15)
    assert tables.change(figure([1, None]), figure([0, None])) == (-1, math.inf)


def test_a_table_has_the_rows_of_all_its_columns_and_marks_what_is_more_than_noise():
    before = {"legal": figure([0, 1, 0, 1]), "loss": figure([0, 1, 2, 3])}
    after = {"legal": figure([1, 1, 1, 1]), "loss": figure([2, 3, 4, 5]), "rare": figure([1.0])}
    rows = tables.skill_rows({"before": before, "after": after})
    assert rows[1][3].startswith("+0.500 ± ") and rows[1][3].endswith("  ") and rows[2][3] == "+2.000 ± 0.000 *"
    assert rows[3] == ["rare", "", "1.000", ""]  # of one value alone there is no interval
    assert tables.skill_rows({"before": before})[1] == ["legal", rows[1][1]]
    small = [["", "n"], ["left", "1"], ["l", "12345"]]
    assert tables.table(small) == "          n\nleft      1\nl     12345"
    assert tables.table(small, markdown=True).splitlines() == [
        "|      |     n |", "| ---- | ----: |", "| left |     1 |", "| l    | 12345 |",
    ]  # fmt: skip
