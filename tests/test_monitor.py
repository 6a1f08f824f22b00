import math

import numpy
import pytest

import toy
from nanorook import monitor
from nanorook.task import Grade
from rollout import Answer

HEALTHY = dict(broken=False, skipped=0, kl=0, frac_zero_std=0, grad_norm=1, reward=0.5)
HEALTHY |= dict(clip_low=0, clip_high=0, logprob_gap=0)
KIND = dict(hit_limit=0, reward_max=1, frac_zero_std=0, reward=0.5, structure=1.0)
HEALTHY |= {f"{kind}/{name}": value for kind in "ab" for name, value in KIND.items()}


def test_metrics_are_means_over_the_answers_of_a_kind():
    questions, texts = [*[toy.Question("a", "", 0)] * 2, toy.Question("b", "", 0)], ["00", "1", "0"]
    answers = [Answer(q, t, [], t == "1", toy.grade(q, t)) for q, t in zip(questions, texts)]
    metrics = monitor.describe_answers(answers, 1)
    assert metrics["a/characters"] == 1.5 and metrics["b/characters"] == 1
    assert metrics["a/earned/even"] == pytest.approx(1 / 7) and metrics["a/earned/first"] == pytest.approx(1 / 32)
    assert metrics["a/reward"] == pytest.approx(metrics["a/earned/even"] + metrics["a/earned/first"])


@pytest.mark.parametrize("n, factor", [(2, 12.71), (6, 2.571), (11, 2.228), (31, 2.042), (1001, 1.962)])
def test_intervals_are_students(n, factor):
    values = numpy.random.default_rng(n).random(n).tolist()
    half = factor * numpy.std(values, ddof=1) / numpy.sqrt(n)
    found = monitor.interval(values)
    assert found == (pytest.approx(numpy.mean(values)), pytest.approx(half, rel=0.01))
    assert monitor.interval(values, [1] * n) == found == monitor.interval([*values, 0.0], [1] * n + [0])
    assert monitor.interval([1.0]) == (1.0, math.inf)


def test_the_interval_of_a_ratio_holds_what_it_says():
    """Illegal moves in games of any length: the true share is within the interval in 95 of 100 experiments."""
    rng, held = numpy.random.default_rng(0), 0
    for _ in range(400):
        moves = rng.integers(1, 60, 80)
        share, half = monitor.interval(rng.binomial(moves, 0.1).tolist(), moves.tolist())
        held += abs(share - 0.1) <= half
    assert 360 <= held <= 395


STATES = {
    "red": [{"broken": True}, {"skipped": 1}, {"kl": 1.5}, {"b/structure": 0.1}, {"b/hit_limit": 0.9}]
    + [{"b/reward_max": -1}],
    "yellow": [{"b/frac_zero_std": 0.6}, {"clip_low": 0.4}, {"logprob_gap": 0.1}, {"b/reward": 0.1}]  # it falls
    + [{"b/hit_limit": 0.3}, {"b/structure": 0.5}, {"grad_norm": 11}],
    "green": [{}, {"b/frac_zero_std": 0.6, "b/reward": 0.9}],  # most questions are solved
}


@pytest.mark.parametrize("state", STATES)
def test_a_step_is_diagnosed(state):
    for change in STATES[state]:
        past = [HEALTHY] * 20 + [HEALTHY | change] * 20
        found = monitor.diagnose(HEALTHY | change, past, kl_threshold=1.0, max_grad_norm=1.0)
        assert found["state"] == state and bool(found["advice"]) == (state != "green"), change
        assert (" b " in found["advice"]) == any(name.startswith("b/") for name in change if state != "green"), found


def test_a_step_is_one_line_and_a_table_has_the_rows_of_all_its_columns():
    row = HEALTHY | {"a/reward": 0.25, "b/reward": 0.75, "seconds": {"rollout": 3.0, "update": 1.0}, "advice": "x"}
    line = monitor.progress_line([row | {"step": step, "state": "red"} for step in (6, 7, 8)], 80, 22.4)
    assert (
        line == "step 8/80 reward 0.500 (a 0.25, b 0.75) kl 0.0000 zero-std 0% 0:05:10 left ● red\n  x"
    )  # evaluations counted
    lines = monitor.table({"before": {"legal": (0.5, 0.1)}, "after": {"legal": (0.75, 0.1), "loss": (0.25, math.inf)}})
    words = [" ".join(line.split()) for line in lines.splitlines()[1:]]
    assert words == ["legal 0.500 ± 0.100 0.750 ± 0.100", "loss 0.250"]  # of one value alone there is no interval


def test_the_worst_and_the_best_answer_are_shown_with_parts_that_add_up(capsys):
    grades = [(("form", 0.0375), ("legal 1", 0.025), ("legal 2", 0.0125)), (("form", 0.0375), ("runaway", -0.3)), ()]
    texts, question = ["fine", "\x1b]0;title\x07 \r\x9b2J\u202e\ud800", "x"], toy.Question("a", "why?\n", 0)
    monitor.show([Answer(question, text, [], False, Grade(pieces, {})) for text, pieces in zip(texts, grades)])
    worst = r"worst of 3: why?|-> \x1b]0;title\x07 \r\x9b2J\u202e\ud800|-0.2625 = 0.0375 form - 0.3 runaway"
    best = "best of 3: why?|-> fine|0.075 = 0.0375 form + 0.0375 legal"
    assert "|".join(map(str.strip, capsys.readouterr().out.splitlines())) == f"{worst}|{best}"
