"""nanorook/monitor.py: figures and their intervals, the state of a step, other logs."""

import sys
from unittest.mock import MagicMock

import numpy
import pytest

import toy
from nanorook import monitor
from train import Sample

HEALTHY = dict(broken=False, skipped=0, kl=0, hit_limit=0, reward_max=1, frac_zero_std=0, grad_norm=1, reward=0.5)
HEALTHY |= dict(clip_low=0, clip_high=0, logprob_gap=0, structure=1.0)


def test_metrics_are_means_over_the_answers_of_a_kind():
    questions, texts = [*[toy.Question("a", "", 0)] * 2, toy.Question("b", "", 0)], ["00", "1", "0"]
    samples = [Sample(q, t, [], t == "1", toy.grade(q, t)) for q, t in zip(questions, texts)]
    metrics = monitor.by_kind(samples)
    assert metrics["a/characters"] == 1.5 and metrics["b/characters"] == 1
    assert metrics["a/earned/even"] == pytest.approx(1 / 7) and metrics["a/earned/first"] == pytest.approx(1 / 32)
    assert metrics["a/reward"] == pytest.approx(metrics["a/earned/even"] + metrics["a/earned/first"])


def test_intervals_are_the_usual_ones():
    values = [0.0, 1.0, 1.0, 0.0, 0.25, 1.0]
    mean, half = monitor.interval(values)
    assert mean == pytest.approx(numpy.mean(values))
    assert half == pytest.approx(1.96 * numpy.std(values, ddof=1) / numpy.sqrt(len(values)))
    assert monitor.interval([1.0]) == (1.0, 0.0) and monitor.interval(values, [1] * 6) == monitor.interval(values)


def test_a_table_has_the_rows_of_all_its_columns():
    """A start model that never finds one of the engine's moves has no loss of a move."""
    lines = monitor.table({"before": {"legal": (0.5, 0.1)}, "after": {"legal": (0.75, 0.1), "loss": (0.25, 0.125)}})
    assert [line.split() for line in lines.splitlines()[1:]] == [
        ["legal", "0.500", "±", "0.100", "0.750", "±", "0.100"],
        ["loss", "0.250", "±", "0.125"],
    ]


def test_the_interval_of_a_ratio_holds_what_it_says():
    """Illegal moves in games of any length: the true share is within the interval in 95 of 100 experiments."""
    rng, held = numpy.random.default_rng(0), 0
    for _ in range(400):
        moves = rng.integers(1, 60, 80)
        share, half = monitor.interval(rng.binomial(moves, 0.1).tolist(), moves.tolist())
        held += abs(share - 0.1) <= half
    assert 360 <= held <= 395


@pytest.mark.parametrize(
    "change, state",
    [
        ({}, "green"),
        *[(change, "red") for change in ({"broken": True}, {"skipped": 1}, {"kl": 1.5}, {"structure": 0.1})],
        *[(change, "yellow") for change in ({"frac_zero_std": 0.6}, {"clip_low": 0.4}, {"logprob_gap": 0.1})],
        ({"reward": 0.1}, "yellow"),  # it falls
        ({"frac_zero_std": 0.6, "reward": 0.9}, "green"),  # most questions are solved
    ],
)
def test_a_step_is_diagnosed(change, state):
    past = [HEALTHY] * 20 + [HEALTHY | change] * 20
    found = monitor.diagnose(HEALTHY | change, past, kl_threshold=1.0, max_grad_norm=1.0)
    assert found[0] == state and bool(found[1]) == (state != "green")


PACKAGES = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}


@pytest.mark.parametrize("kind", PACKAGES)
def test_metrics_go_to_other_logs_or_the_missing_package_is_named(kind, monkeypatch, tmp_path):
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, PACKAGES[kind], fake)
    _, write = monitor.open_log(tmp_path, -1, {}, kind, "my run")
    write({"step": 3, "reward": 0.5, "state": "green"})
    if kind == "wandb":
        assert fake.init.call_args.kwargs["name"] == "my run"
        fake.init.return_value.log.assert_called_once_with({"step": 3, "reward": 0.5}, 3)
    else:
        fake.SummaryWriter.return_value.add_scalar.assert_any_call("reward", 0.5, 3)
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(SystemExit, match=f"pip install {kind}"):
        monitor.reporter(kind, "", tmp_path)
