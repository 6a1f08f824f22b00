"""rollout.py against the uncached forward, the softmax and the training forward; tokens to text."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import train
from model import GPT, GPTConfig
from rollout import distribution, draw, generate

NEW, G = 30, 4
FILTERS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 15, 1.0), (1.3, 0, 0.8), (0.7, 15, 0.9)]
BF16 = torch.bfloat16, 0.7, 0, 1.0


PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 17)]


def uniform(rows, columns=NEW):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    """Weights so large that predictions differ from place to place; its end token is one that half of the rows meet."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, 128, 32, 2, 4, eos_token_id=-1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4).add_(torch.randn_like(p), alpha=0.02)
    tokens = generate(model, PROMPTS, 1, NEW, temperature=0).tokens
    assert tokens.shape == (len(PROMPTS), NEW)  # nothing ends without an end token
    met = torch.cat([row.unique() for row in tokens]).bincount()
    model.config.eos_token_id = int((met - len(PROMPTS) // 2).abs().argmin())
    return model


# Invariant 2: decoding with the cache
@torch.no_grad()
def uncached(model, prompt):
    new = []
    while len(new) < NEW and model.config.eos_token_id not in new:
        new.append(int(model(torch.tensor([prompt + new]))[0, -1].argmax()))
    return new


def test_greedy_decoding_equals_the_full_forward(model, monkeypatch):
    sizes, trunk = [], model.trunk
    monkeypatch.setattr(model, "trunk", lambda tokens, *rest: sizes.append(len(tokens)) or trunk(tokens, *rest))
    out = generate(model, PROMPTS, 2, NEW, temperature=0)
    assert sizes[0] == len(PROMPTS)  # a prompt is prefilled once for its group
    assert sizes[1] == 2 * len(PROMPTS) and sizes[-1] < sizes[1]  # rows that have ended leave the batch
    monkeypatch.undo()
    expected = [tokens for prompt in PROMPTS for tokens in [uncached(model, prompt)] * 2]
    assert [row[mask].tolist() for row, mask in zip(out.tokens, out.completion_mask)] == expected
    assert out.hit_limit.tolist() == [tokens[-1] != model.config.eos_token_id for tokens in expected]
    assert len(set(map(len, expected))) > 3 and out.hit_limit.any() and not out.hit_limit.all()
    assert not out.rollout_logprobs.any()  # greedy has no doubt


def test_a_row_does_not_depend_on_its_neighbours(model):
    """Sampled with its own random numbers, each group is what it is alone; other prompts are longer and end later."""
    noise = uniform(G * len(PROMPTS))
    together = generate(model, PROMPTS, G, NEW, noise=noise)
    ends = together.completion_mask.sum(1)
    assert ends.min() < 10 and ends.max() == NEW
    for i in (0, 5, 15):
        rows = slice(G * i, G * i + G)
        alone = generate(model, [PROMPTS[i]], G, NEW, noise=noise[rows])
        T = alone.tokens.shape[1]
        assert torch.equal(together.tokens[rows, :T], alone.tokens) and (ends[rows] <= T).all()
        torch.testing.assert_close(together.rollout_logprobs[rows, :T], alone.rollout_logprobs, atol=1e-4, rtol=0)


def test_impossible_requests_are_refused(model):
    with pytest.raises(ValueError, match="128 positions"):
        generate(model, [[1] * 100], 1, 29)
    assert generate(model, [[1] * 100], 1, 28).tokens.shape[1] <= 28
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[]], 1, 5)


# The sampled distribution, and invariant 3: the training forward's logprobs are those recorded while sampling
@pytest.mark.parametrize("temperature, top_k, top_p", FILTERS)
def test_samples_follow_the_softmax(model, temperature, top_k, top_p):
    """20,000 samples of one token: a chi-square test against the distribution that transformers' warpers make."""
    n, prompt = 20_000, PROMPTS[3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[:, -1]
    top_k_warpers = [TopKLogitsWarper(top_k)] if top_k else []
    for warper in [TemperatureLogitsWarper(temperature), *top_k_warpers, TopPLogitsWarper(top_p)]:
        logits = warper(None, logits)
    expected = logits.softmax(-1)[0].double() * n
    out = generate(model, [prompt], n, 1, temperature, top_k, top_p, uniform(n, 1))
    counts = torch.bincount(out.tokens[:, 0], minlength=300).double()
    likely = expected >= 5
    observed, wanted = (torch.cat([x[likely], x[~likely].sum()[None]]) for x in (counts, expected))
    statistic = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum().item()
    df = int((wanted > 0).sum()) - 1
    limit = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3  # Wilson-Hilferty: one in a thousand
    assert df >= 5 and statistic < limit and counts[expected == 0].sum() == 0
    recorded = logits.log_softmax(-1)[0][out.tokens[:, 0]]  # the filters are part of the recorded distribution
    torch.testing.assert_close(out.rollout_logprobs[:, 0], recorded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype, temperature, top_k, top_p", [(torch.float32, *x) for x in FILTERS] + [BF16])
def test_recorded_logprobs_are_those_of_the_training_forward(model, dtype, temperature, top_k, top_p, toy_settings):
    """In fp32 within 1e-4. The bound in bf16, with weights this large: 0.05 on average, 0.5 for any token."""
    toy_settings(TEMPERATURE=temperature, TOP_K=top_k, TOP_P=top_p)
    noise = uniform(G * len(PROMPTS))
    out = generate(model.cast(dtype), PROMPTS, G, NEW, temperature, top_k, top_p, noise)
    eos, mask = model.config.eos_token_id, out.completion_mask
    with torch.no_grad():
        logprobs, entropy = train.forward(model.use(dtype), out)
    gap = (logprobs - out.rollout_logprobs)[mask].abs()
    largest, mean = (1e-4, 1e-4) if dtype == torch.float32 else (0.5, 0.05)
    assert gap.max() < largest and gap.mean() < mean and entropy[mask].isfinite().all()
    last = out.tokens.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    assert ((last == eos) == ~out.hit_limit).all()  # the end token is inside the mask: what is masked is not learnt
    assert out.hit_limit.any() and not out.hit_limit.all() and (out.rollout_logprobs[~mask] == 0).all()


def test_a_sampled_token_stays_in_the_filters_after_an_update():
    """An update may move it out of the nucleus; a logprob of minus infinity would end the run."""
    logits, unlikely = torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([0])
    assert distribution(logits, top_k=2)[0, 0] == distribution(logits, top_p=0.5)[0, 0] == -math.inf
    kept = distribution(logits, top_k=2, top_p=0.5, keep=unlikely)
    assert kept[0, 0].isfinite() and kept.exp().sum().item() == pytest.approx(1)


def test_no_number_draws_a_token_without_probability():
    logp = distribution(torch.randn(300, 40, generator=torch.Generator().manual_seed(0)), top_k=5)
    numbers = torch.tensor([0.0, 1.0, 1 - 2**-24]).repeat(100)
    assert logp.gather(1, draw(logp, numbers)[:, None]).isfinite().all()
    assert draw(torch.full((2, 40), torch.nan), numbers[:2]).max() < 40  # the guard finds NaN later


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_decode_as_the_cpu_does(model):
    cpu = generate(model, PROMPTS, 2, NEW, temperature=0)
    gpu = generate(model.cuda(), PROMPTS, 2, NEW, temperature=0).to("cpu")
    assert torch.equal(cpu.tokens, gpu.tokens) and torch.equal(cpu.completion_mask, gpu.completion_mask)
    twin, noise = model.cast(torch.bfloat16), uniform(G * len(PROMPTS), 70).cuda()
    captured, plain = (generate(twin, PROMPTS, G, 70, noise=noise, graph=graph) for graph in (True, False))
    assert torch.equal(captured.tokens, plain.tokens)
