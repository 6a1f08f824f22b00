"""rollout.py against transformers.generate, against the softmax, and against the training forward."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from machine import packs
from rollout import distribution, draw, generate, pad_prompts

EOS = 256


def random_prompts(lengths):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=g).tolist() for n in lengths]


PROMPTS = random_prompts(range(1, 33))


def common_token(model, prompts, new):
    """A token that greedy decoding meets early in many rows, to serve as their end."""
    tokens = generate(model, prompts, 1, new, temperature=0, eos=-1).tokens
    assert tokens.shape == (len(prompts), new)
    counts = torch.zeros(model.config.vocab_size)
    for row in tokens:
        counts[row.unique()] += 1
    return int(counts.argmax())


def uncached(model, prompt, new, eos):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new:
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def test_greedy_equals_transformers_and_the_uncached_forward(hf_model, model, monkeypatch):
    new, G = 40, 2
    eos = common_token(model, PROMPTS, new)
    batch_sizes, trunk = [], model.trunk
    monkeypatch.setattr(
        model, "trunk", lambda tokens, *a, **k: batch_sizes.append(len(tokens)) or trunk(tokens, *a, **k)
    )
    out = generate(model, PROMPTS, G, new, temperature=0, eos=eos)
    assert batch_sizes[0] == len(PROMPTS)  # a prompt is prefilled once for its group
    assert batch_sizes[1] == G * len(PROMPTS) and batch_sizes[-1] < batch_sizes[1]  # finished rows are gone
    lengths = set()
    for i, prompt in enumerate(PROMPTS):
        expected = hf_model.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=eos
        )[0, len(prompt) :].tolist()
        assert expected == uncached(model, prompt, new, eos)
        for row in range(G * i, G * i + G):
            assert out.tokens[row][out.mask[row]].tolist() == expected
            assert bool(out.truncated[row]) == (expected[-1] != eos)
        lengths.add(len(expected))
    assert len(lengths) > 3 and out.truncated.any() and not out.truncated.all()


def test_a_row_does_not_depend_on_its_neighbours(model):
    new = 30
    eos = common_token(model, PROMPTS, new)
    together = generate(model, PROMPTS, 1, new, temperature=0, eos=eos)
    for i in (0, 5, 17, 31):
        alone = generate(model, [PROMPTS[i]], 1, new, temperature=0, eos=eos)
        assert together.tokens[i][together.mask[i]].tolist() == alone.tokens[0][alone.mask[0]].tolist()


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 0, 1.0), (0.7, 10, 1.0), (0.7, 0, 0.8), (1.3, 20, 0.9)])
def test_samples_follow_the_softmax(hf_model, model, temperature, top_k, top_p):
    """20,000 samples of one token: a chi-square test against the distribution that transformers' warpers make."""
    n, prompt = 20_000, random_prompts([12])[0]
    with torch.no_grad():
        logits = hf_model(torch.tensor([prompt])).logits[:, -1]
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    expected = logits.softmax(-1)[0].double() * n
    generator = torch.Generator().manual_seed(0)
    out = generate(model, [prompt], n, 1, temperature, top_k, top_p, eos=EOS, generator=generator)
    counts = torch.bincount(out.tokens[:, 0], minlength=300).double()
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum().item()
    df = len(wanted) - 1
    limit = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3  # Wilson-Hilferty: one in a thousand
    assert df >= 5 and statistic < limit
    torch.testing.assert_close(
        out.logprobs[:, 0], logits.log_softmax(-1)[0][out.tokens[:, 0]], atol=1e-4, rtol=0
    )  # the filters are part of the recorded distribution


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 15, 0.9)])
def test_recorded_logprobs_are_those_of_the_training_forward(model, temperature, top_k, top_p):
    eos = common_token(model, PROMPTS, 40)
    generator = torch.Generator().manual_seed(0)
    out = generate(model, PROMPTS, 4, 40, temperature, top_k, top_p, eos=eos, generator=generator)
    logits = model.train().score(*pad_prompts(PROMPTS, "cpu"), out.tokens)
    again = distribution(logits, temperature, top_k, top_p).gather(-1, out.tokens[..., None])[..., 0]
    torch.testing.assert_close(out.logprobs[out.mask], again[out.mask], atol=1e-4, rtol=0)
    assert (out.logprobs[~out.mask] == 0).all() and (out.tokens[~out.mask] == eos).all()
    ends = out.mask.sum(1) - 1
    assert ((out.tokens.gather(1, ends[:, None])[:, 0] == eos) == ~out.truncated).all()  # the end token is inside
    assert out.truncated.any() and not out.truncated.all()


def test_bfloat16_sampling_agrees_with_bfloat16_training(model):
    """The stated bound for bf16: a mean gap below 0.05 and no token beyond 0.5, with weights this large."""
    generator = torch.Generator().manual_seed(0)
    out = generate(model.cast(torch.bfloat16), PROMPTS, 4, 20, eos=-1, generator=generator)
    logits = model.use(torch.bfloat16).score(*pad_prompts(PROMPTS, "cpu"), out.tokens)
    again = distribution(logits).gather(-1, out.tokens[..., None])
    gap = (again[..., 0] - out.logprobs).abs()
    assert gap.mean() < 0.05 and gap.max() < 0.5


@pytest.mark.skipif(not packs("cpu", torch.bfloat16), reason="this CPU has no bf16 products of oneDNN")
def test_packed_matrices_multiply_as_the_others_do(model):
    tokens = torch.randint(0, model.config.vocab_size, (4, 30), generator=torch.Generator().manual_seed(0))
    exact, twin = model(tokens), model.cast(torch.bfloat16)
    plain = twin(tokens).float()
    with twin.packing():
        assert twin.packed is not None and twin.h[0].attn.c_attn.packed is not None
        ours = twin(tokens).float()
    assert torch.equal(plain, twin(tokens).float())  # and are gone afterwards
    error, known = ((x - exact).abs() for x in (ours, plain))
    assert 0 < error.mean() < 1.1 * known.mean() and error.max() < 2 * known.max()  # no further from fp32 than bf16 is


def test_a_token_is_drawn_where_the_cumulated_probability_passes_the_number():
    g = torch.Generator().manual_seed(0)
    logp = distribution(torch.randn(500, 40, generator=g), 1.0, top_k=5)  # most tokens cannot be drawn
    uniform = torch.rand(500, generator=g)
    uniform[:3] = torch.tensor([0.0, 1.0, 1 - 2**-24])
    drawn = draw(logp, uniform)
    for p, u, token in zip(logp.exp().double(), uniform.tolist(), drawn.tolist()):
        assert p[token] > 0 and p[:token].sum() - 2e-6 <= u <= p[: token + 1].sum() + 2e-6
    assert draw(torch.full((2, 40), torch.nan), uniform[:2]).max() < 40  # the guard finds NaN later


def test_the_generator_decides(model):
    def tokens(seed):
        return generate(model, PROMPTS[:4], 3, 10, eos=EOS, generator=torch.Generator().manual_seed(seed)).tokens

    assert torch.equal(tokens(1), tokens(1)) and not torch.equal(tokens(1), tokens(2))


def test_greedy_has_no_doubt_and_ends_at_once_when_told(model):
    out = generate(model, PROMPTS[:3], 2, 5, temperature=0, eos=EOS)
    assert (out.logprobs == 0).all()
    first = int(generate(model, [PROMPTS[0]], 1, 1, temperature=0, eos=-1).tokens)
    ended = generate(model, [PROMPTS[0]], 3, 5, temperature=0, eos=first)
    assert ended.tokens.tolist() == [[first]] * 3 and ended.mask.all() and not ended.truncated.any()


def test_impossible_requests_are_refused(model):
    with pytest.raises(ValueError, match="128 positions"):
        generate(model, random_prompts([100]), 1, 29, eos=EOS)
    assert generate(model, random_prompts([100]), 1, 28, eos=EOS).tokens.shape[1] <= 28
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[]], 1, 5, eos=EOS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_decode_as_the_cpu_does(model):
    new = 40
    eos = common_token(model, PROMPTS, new)
    cpu = generate(model, PROMPTS, 2, new, temperature=0, eos=eos)
    gpu = generate(model.cuda(), PROMPTS, 2, new, temperature=0, eos=eos)
    assert torch.equal(cpu.tokens, gpu.tokens.cpu()) and torch.equal(cpu.mask, gpu.mask.cpu())
    twin, seed = model.cast(torch.bfloat16), torch.Generator("cuda").manual_seed
    a, b = (generate(twin, PROMPTS, 4, 70, eos=eos, generator=seed(1)) for _ in range(2))
    logits = model.use(torch.bfloat16).score(*pad_prompts(PROMPTS, "cuda"), a.tokens)
    assert torch.equal(a.tokens, b.tokens) and len(a.tokens.unique(dim=0)) > len(PROMPTS)
    again = distribution(logits).gather(-1, a.tokens[..., None])[..., 0]
    assert (again - a.logprobs)[a.mask].abs().mean() < 0.05
