import re
from statistics import fmean

import pytest
import torch

import toy
import train
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
    assert signal.describe(rows(noise)).startswith("no signal seen with these 64 questions: more than ")
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", signal.describe(rows(1 + noise / 10)))
    assert signal.describe(rows(torch.zeros(9, 4))) == "no gradient at all"


def test_gradients_are_those_of_a_step(toy_settings, monkeypatch):
    """Summed over the questions they are the step's; the pieces' sum up to them; groups of two are paid as such."""
    model = toy.model()
    found = signal.gradients(model, None, list(signal.ask(model, toy.questions(12), 1.0)), (4, 2), 1.0)
    assert {*found} == {"as set", "CREDIT=answer", "even alone", "first alone", "GROUP_SIZE=2"}
    parts = signal.ask(model, toy.questions(12), 1.0)
    batches = [train.add_advantages(*part, train.GROUP_SIZE, train.CREDIT) for part in parts]
    gradient, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: gradient.extend(p.grad for p in model.parameters()))
    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e9)
    tokens = train.update(model, None, [optimizer], batches, 10**6)["tokens"]
    step = signal.projection(model)(gradient)[:-1] * tokens
    assert torch.allclose(found["as set"].sum(0)[:-1], step, atol=1e-4 * step.norm().item())
    pieces = found["even alone"] + found["first alone"]
    assert torch.allclose(pieces[:, :-1], found["as set"][:, :-1], atol=1e-4 * step.norm().item())
    halves = found["GROUP_SIZE=2"]  # the mean of two squares is at least the square of the mean
    assert (halves[:, -1] > 0.9 * halves[:, :-1].square().sum(1)).all() and halves[:, -1].any()


ROWS = "all +4 ", "short ", "long ", "all, TEMPERATURE=0.7 ", "long, even alone "


def test_the_rows_of_the_table(toy_settings, toy_model, monkeypatch, capsys):
    toy_settings(MODEL=toy_model)
    monkeypatch.setattr(signal, "QUESTIONS", 8)
    monkeypatch.setattr("sys.argv", ["signal"])
    signal.main()
    printed = capsys.readouterr().out
    assert all(re.search(f"^{row}", printed, re.M) for row in ROWS), printed


@pytest.mark.slow
def test_as_a_user_starts_it(toy_model):
    arguments = [f"{name}={value}" for name, value in (toy.SETTINGS | {"MODEL": toy_model, "QUESTIONS": 8}).items()]
    ended = toy.user_runs("-m", "tools.signal", *arguments)
    assert all(re.search(f"^{row}", ended.stdout, re.M) for row in ROWS), ended.stderr
