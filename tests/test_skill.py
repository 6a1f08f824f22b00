"""skill.py: the figures are those of the grades."""

import numpy
import pytest
import skill
import tasks
import torch
from tokenizer import Tokenizer

import data
from rewards import grade
from rollout import Rollout


def test_intervals_are_the_usual_ones():
    values = [0.0, 1.0, 1.0, 0.0, 0.25, 1.0]
    mean, half = skill.interval(values)
    assert mean == pytest.approx(numpy.mean(values))
    assert half == pytest.approx(1.96 * numpy.std(values, ddof=1) / numpy.sqrt(len(values)))
    assert skill.interval([1.0]) == (1.0, 0.0)
    assert skill.interval(values, [1] * 6) == skill.interval(values)


def test_the_interval_of_a_ratio_holds_what_it_says():
    """Illegal moves in games of any length: the true share is within the interval in 95 of 100 experiments."""
    rng, held = numpy.random.default_rng(0), 0
    for _ in range(400):
        moves = rng.integers(1, 60, 80)
        illegal = rng.binomial(moves, 0.1)
        share, half = skill.interval(illegal.tolist(), moves.tolist())
        assert share == pytest.approx(illegal.sum() / moves.sum())
        held += abs(share - 0.1) <= half
    assert 360 <= held <= 395


def test_positions_without_labels_are_asked_and_finished_games_are_not():
    playable = tasks.Position("6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1", (), ())
    mated = tasks.Position("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1", (), ())
    prompts = [sample.prompt[:3] for sample in skill.ask([playable, mated], 2, "expanded")]
    assert prompts == ["P: ", "A: ", "A: "]


def test_skill_is_the_mean_of_what_the_completions_earn(byte_model, monkeypatch):
    """A sampler that answers perfectly at temperature 0 and says nonsense otherwise."""
    byte_model.tokenizer = tokenizer = Tokenizer.of_bytes()
    positions = [p for p in data.load("builtin")[:400] if tasks.held_out(p.fen)]
    samples = skill.ask(positions, 100, "expanded")
    answers = {}
    for position in positions:
        prompt = tasks.policy_prompt(position.fen, "expanded")
        answers[prompt] = tasks.policy_completion(position.fen, position.moves, "expanded")
    for sample in samples:
        if sample.prompt.startswith("A: "):
            answers[sample.prompt] = tasks.environment_completion(*sample.labels, "expanded")

    def perfect(model, prompts, group_size, limit, temperature, *rest):
        texts = [answers[tokenizer.decode(p)] if temperature == 0 else "nonsense" for p in prompts]
        rows = [tokenizer.encode(text) + [tokenizer.eos] for text in texts]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [tokenizer.eos] * (width - len(row)) for row in rows])
        return Rollout(tokens, tokens >= 0, torch.zeros(tokens.shape), torch.zeros(len(rows), dtype=torch.bool))

    monkeypatch.setattr(skill, "generate", perfect)
    result, said = skill.skill(byte_model, samples)
    assert len(samples) == 2 * len(positions) > 40
    for name in ("policy reward", "policy legal", "policy best", "environment reward", "environment next_state"):
        assert result[f"{name} T=0"] == (1.0, 0.0)
    assert result["policy reward T=1"][0] == result["environment reward T=1"][0] == pytest.approx(-0.3)
    assert result["policy structure T=1"][0] == 0
    assert len(skill.table({"a": result, "b": result}).splitlines()) == 1 + len(result)


def test_parts_are_averaged_over_those_that_have_them():
    fen = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
    labels = (("a1a8", 99999), ("a1a7", 500))
    good = grade(tasks.policy_prompt(fen, "rookworld"), "M: a1a8 a1a7 E: 999.99 5.0 B: a1a8", labels, False)
    bad = grade(tasks.policy_prompt(fen, "rookworld"), "what", labels, False)
    means = skill.mean_parts([good, bad])
    assert means["structure"] == means["legal"] == 0.5 and means["cp_loss"] == 0.0
