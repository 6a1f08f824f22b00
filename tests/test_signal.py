import re
from statistics import fmean

import pytest
import torch

import grpo
import toy
import train
from nanorook import lora
from tools import signal


def rows(vectors):
    return torch.cat([vectors, vectors.square().sum(1, keepdim=True)], 1)


def draws(scale, heavy=1, n=64, d=400):
    """The interval in each of 200 trials. Noise has `scale` times the signal's square, in one question much more."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(2, 0.1, d)
    noise = spread * (scale**0.5 / spread.norm()) * torch.randn(200, n, d, generator=generator)
    noise[:, 3] *= heavy
    return [signal.signal(rows(part + torch.eye(d)[7])) for part in noise]


@pytest.mark.parametrize("scale", [0.5, 30.0])
def test_the_interval_covers_the_noise_scale(scale):
    found, true = draws(scale), 1 / (1 + scale)
    assert signal.noise_scale(true) == pytest.approx(scale)
    assert 0.9 < fmean(abs(share - true) <= half for share, half in found)
    assert fmean(share for share, _ in found) == pytest.approx(true, rel=0.05)  # no bias
    assert fmean(half for _, half in found) < true  # and is narrow enough to say something


def test_noise_alone_and_one_heavy_answer_are_no_signal():
    for heavy in (1, 10, 100):
        assert fmean(share > half for share, half in draws(1e6, heavy)) < 0.05
    noise = torch.randn(64, 400, generator=torch.Generator().manual_seed(0))
    assert signal.scale_in_words(rows(noise)).startswith("no signal seen with these 64 questions: more than ")
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", signal.scale_in_words(rows(1 + noise / 10)))
    assert signal.scale_in_words(rows(torch.zeros(9, 4))) == "no gradient at all"
    noise[1:] = 0
    assert signal.scale_in_words(rows(noise)).startswith("no signal seen with these 64 questions")


def halves(gradients):
    """The rows of two gradients (n, 2, d) of each question."""
    return torch.cat([gradients.mean(1), gradients.square().sum(2).mean(1, keepdim=True)], 1)


@pytest.mark.parametrize("own, answers", [(1.0, 1.0), (1.0, 30.0), (30.0, 1.0)])
def test_the_interval_covers_the_share_of_noise_between_questions(own, answers):
    """In each of 200 trials the noise of a question and that of its answers have these times the signal's square."""
    generator, n, d = torch.Generator().manual_seed(0), 64, 400
    spread = torch.linspace(2, 0.1, d) / torch.linspace(2, 0.1, d).norm()
    found = []
    for _ in range(200):
        question, answer = (spread * torch.randn(n, k, d, generator=generator) for k in (1, 2))
        found.append(signal.between(halves(torch.eye(d)[7] + own**0.5 * question + answers**0.5 * answer)))
    true = own / (own + answers)
    assert 0.9 < fmean(abs(share - true) <= half for share, half in found)
    assert fmean(share for share, _ in found) == pytest.approx(true, abs=0.01)  # no bias
    assert fmean(half for _, half in found) < 0.15


def groups(own, chance, G, n=20000, each=1, d=3):
    """The gradients (n, each, d) of plain GRPO. An answer's reward is its score's part in a direction, which for each
    question differs from the true one, (1, 0, 0), by `own`; and chance."""
    generator = torch.Generator().manual_seed(G)
    scores = torch.randn(n, each, G, d, generator=generator)
    directions = torch.eye(d)[0] + own * torch.randn(n, 1, 1, d, generator=generator)
    rewards = (scores * directions).sum(3) + chance * torch.randn(n, each, G, generator=generator)
    return (grpo.advantages(rewards.view(-1, 1), G).view(n, each, G, 1) * scores).sum(2)


@pytest.mark.parametrize("own, chance, helps", [(0.3, 4, "more answers"), (0.7, 5, "either"), (3, 0, "more questions")])
def test_the_split_names_the_remedy_and_the_best_group(toy_settings, own, chance, helps):
    """Drawn anew in steps of as many tokens but other groups, gradients have the least noise with the best one."""
    toy_settings(GROUP_SIZE=16)
    share, best, found = signal.noise_in_words(halves(groups(own, chance, 8, each=2)), 9.0, 3.0)
    assert found == helps and "seen" not in share
    best, noise = int(best.split(" ")[0]), {}
    for G in (2, 3, 5, 8, 16, 32, 64, best):
        error = groups(own, chance, G)[:, 0] / (G - 1) - torch.eye(3)[0]
        noise[G] = error.square().sum(1).mean().item() * (9 + G * 3)  # at equal cost
    assert noise[best] < 1.1 * min(noise.values())


def test_where_no_noise_between_questions_is_seen_more_answers_help(toy_settings):
    toy_settings(GROUP_SIZE=16)
    share, best, helps = signal.noise_in_words(halves(groups(0, 5, 8, 64, each=2)), 9.0, 3.0)
    assert re.fullmatch(r"none seen, at most \d+%", share) and re.fullmatch(r"at least \d+", best)
    assert helps in ("more answers", "either")


def test_two_questions_of_a_kind_are_too_few_and_groups_without_halves_are_not_split(toy_settings, capsys):
    vectors = torch.randn(9, 2, 40, generator=torch.Generator().manual_seed(0)) + 1
    kinds = ["many"] * 7 + ["few"] * 2
    signal.report(halves(vectors), halves(vectors), kinds, torch.ones(9, 2))
    printed = capsys.readouterr().out
    assert re.search(r"^few .*too few questions$", printed, re.M)
    assert re.search(r"^few +none seen, at most 100% +at least 2 +either$", printed, re.M)
    signal.report(halves(vectors), None, kinds, torch.ones(9, 2))
    assert "noise of a step" not in capsys.readouterr().out


def test_gradients_are_those_of_a_step(toy_settings, monkeypatch):
    """Summed over the questions they are the step's; half groups are rewarded as groups of their own."""
    model = toy.model()
    whole, halves = signal.gradients(model, list(signal.graded_rollouts(model, toy.questions(6))))
    rollouts = list(signal.graded_rollouts(model, toy.questions(6)))
    gradient, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: gradient.extend(p.grad for p in model.parameters()))
    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e9)
    tokens = train.update(model, None, [optimizer], rollouts, 10**6)["tokens"]
    step = signal.projection(model)(gradient)[:-1] * tokens
    assert torch.allclose(whole.sum(0)[:-1], step, atol=1e-4 * step.norm().item())
    # The mean of two squares is at least the square of the mean
    assert (halves[:, -1] > 0.9 * halves[:, :-1].square().sum(1)).all() and halves[:, -1].any()


def test_adapters_have_their_own_gradient_and_trained_ones_are_merged(toy_settings, toy_model, tmp_path):
    toy_settings(MODEL=toy_model, LORA_RANK=2)
    model, _, questions = signal.model_and_questions(4)
    lora.add(model, 2, 0, toy_model)
    whole, _ = signal.gradients(model, list(signal.graded_rollouts(model, questions)))
    assert whole[:, -1].any()
    lora.save(model, tmp_path)
    toy_settings(MODEL=str(tmp_path))
    assert signal.model_and_questions(4)[0].lora is None


ROWS = "all +4 ", "noise of a step +between", "short ", "long "


def test_the_rows_of_the_table(toy_settings, toy_model, monkeypatch, capsys):
    toy_settings(MODEL=toy_model)
    monkeypatch.setattr(signal, "QUESTIONS", 8)
    monkeypatch.setattr("sys.argv", ["signal"])
    signal.main()
    printed = capsys.readouterr().out
    assert all(re.search(f"^{row}", printed, re.M) for row in ROWS), printed
