"""batch.py: however a step is cut into microbatches, it is the same step."""

import copy

import pytest
import torch

import data
import train
from batch import Batch, microbatches
from model import GPT


def made_up(B, G, T, seed=0):
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, T + 1, (B * G,), generator=g)
    mask = torch.arange(T) < ends[:, None]
    tokens = torch.randint(0, 256, (B * G, T), generator=g)
    prompts, lengths = torch.randint(0, 256, (B, 20), generator=g), torch.randint(5, 21, (B,), generator=g)
    logprobs, rewards = torch.rand(B * G, T, generator=g), torch.rand(B * G, 1, generator=g)
    return Batch(prompts, lengths, tokens, mask, logprobs, rewards, places=tokens % 7)


@pytest.mark.parametrize("most", [1, 150, 400, 10**6])
def test_each_completion_is_in_one_microbatch_whole(most):
    batch = made_up(7, 4, 30)
    parts = list(microbatches(batch, most))
    assert len(parts) == {1: 7, 10**6: 1}.get(most, len(parts)) and (most == 1 or 1 <= len(parts) <= 7)
    seen = []
    for part in parts:
        B, T = len(part.prompts), part.tokens.shape[1]
        assert T == part.mask.sum(1).max() and part.prompts.shape[1] == part.lengths.max()
        assert B == 1 or part.tokens.numel() + part.prompts.numel() <= most
        seen += [tuple(row[m].tolist()) for row, m in zip(part.tokens, part.mask)]
        for row in part.rewards:  # rows keep what is theirs
            at = (batch.rewards[:, 0] == row).nonzero().item()
            mine = part.tokens[(part.rewards[:, 0] == row).nonzero().item()]
            assert torch.equal(batch.tokens[at, : batch.mask[at].sum()], mine[: batch.mask[at].sum()])
        assert torch.equal(part.places, part.tokens % 7)
    assert sorted(seen) == sorted(tuple(row[m].tolist()) for row, m in zip(batch.tokens, batch.mask))
    longest = [part.mask.sum(1).max() for part in parts]
    assert longest == sorted(longest)


@pytest.mark.parametrize("loss", ["dapo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("grpo", "dr_grpo"))])
def test_the_step_does_not_depend_on_the_cut(loss, monkeypatch):
    changes = dict(BATCH_POSITIONS=3, GROUP_SIZE=3, MIX_ENV_RATIO=0.34, DTYPE=torch.float32, LOSS=loss, EPOCHS=2)
    for name, value in changes.items():
        monkeypatch.setattr(train, name, value)
    start = GPT.load("weights/tiny")
    batches, _ = train.rollout(start, train.draw_prompts(data.load("builtin")[:200], 0, "expanded"), 0)
    results = []
    for most in (1, 10**6):
        monkeypatch.setattr(train, "MICROBATCH_TOKENS", most)
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        metrics = train.update(model, start, optimizer, batches, 0.1)
        results.append((metrics, list(model.parameters())))
    (one, ones), (many, manys) = results
    assert one["grad_norm"] > 1e-3 and abs(one["kl"]) < 1e-7
    for name in one:
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    for a, b in zip(ones, manys):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
