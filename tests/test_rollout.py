import math

import pytest
import torch
from transformers import TemperatureLogitsWarper

import toy
import train
from model import GPT, GPTConfig
from nanorook.task import Question
from nanorook.tokenizer import Tokenizer
from rollout import Rollout, distinct_rows, draw, generate, microbatches, sample

NEW, G = 30, 4
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 17)]
LIMITS = [NEW] * len(PROMPTS)


def uniform(rows, columns=NEW):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    """Weights so large that predictions differ from place to place."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, 128, 32, 2, 4, eos_token_id=-1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4).add_(torch.randn_like(p), alpha=0.02)
    give_end_token(model)
    return model


def give_end_token(model):
    """One that half of the rows meet."""
    model.config.eos_token_id = -1
    tokens = generate(model, PROMPTS, 1, LIMITS, temperature=0).completions
    assert tokens.shape == (len(PROMPTS), NEW)  # nothing ends without an end token
    met = torch.cat([row.unique() for row in tokens]).bincount()
    model.config.eos_token_id = int((met - len(PROMPTS) // 2).abs().argmin())


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
    out = generate(model, PROMPTS, 2, LIMITS, temperature=0)
    assert sizes[0] == len(PROMPTS)  # a prompt is prefilled once for its group
    assert {*sizes[1:]} == {2 * len(PROMPTS)}
    monkeypatch.undo()
    expected = [tokens for prompt in PROMPTS for tokens in [uncached(model, prompt)] * 2]
    assert [row[mask].tolist() for row, mask in zip(out.completions, out.completion_mask)] == expected
    assert out.hit_limit.tolist() == [tokens[-1] != model.config.eos_token_id for tokens in expected]
    assert len(set(map(len, expected))) > 3 and out.hit_limit.any() and not out.hit_limit.all()
    assert not out.rollout_logprobs.any()  # a greedy choice has probability 1


def test_a_row_does_not_depend_on_its_neighbours(model):
    """Sampled with its own random numbers, each group is what it is alone; other prompts are longer and end later, and
    have limits of their own."""
    noise, limits = uniform(G * len(PROMPTS)), [NEW, 7, 12] * 5 + [NEW]
    together = generate(model, PROMPTS, G, limits, noise=noise)
    ends = together.completion_mask.sum(1)
    assert ends.min() < 10 and ends.max() == NEW and (ends <= torch.tensor(limits).repeat_interleave(G)).all()
    for i in (0, 4, 5, 15):
        rows = slice(G * i, G * i + G)
        alone = generate(model, [PROMPTS[i]], G, limits[i : i + 1], noise=noise[rows])
        T = alone.completions.shape[1]
        assert torch.equal(together.completions[rows, :T], alone.completions) and (ends[rows] <= T).all()
        assert torch.equal(together.hit_limit[rows], alone.hit_limit)
        torch.testing.assert_close(together.rollout_logprobs[rows, :T], alone.rollout_logprobs, atol=1e-4, rtol=0)


def test_the_room_for_an_answer_is_that_of_its_own_prompt():
    """A prompt that leaves 3 of the 24 positions does not cut its neighbours' answers, of which 7 tokens are allowed.
    Their logprobs are also those of the training forward, in which the long prompt's rows have places beyond the
    last position."""
    policy = toy.model()
    policy.config.eos_token_id, policy.tokenizer.ends = -1, (-1,)  # nothing ends early
    asked = [Question("long", "." * length, None) for length in (2, 21, 9)]
    noise = uniform(3 * G, 7).view(3, G, 7)
    rollout, *more = sample(policy, asked, G, {"long": 7}, noise=noise)
    assert rollout.completion_mask.sum(1).tolist() == [7] * G + [3] * G + [7] * G and not more
    for i, question in enumerate(asked):
        [alone] = sample(policy, [question], G, {"long": 7}, noise=noise[i : i + 1])
        texts = [answer.text for answer in alone.answers]
        assert texts == [answer.text for answer in rollout.answers[i * G : i * G + G]]
    with torch.no_grad():
        logprobs, _ = train.forward(policy, rollout, train.TEMPERATURE)
    assert (logprobs - rollout.rollout_logprobs)[rollout.completion_mask].abs().max() < 1e-4
    with pytest.raises(SystemExit, match="has 24 tokens, which leaves no room for an answer in the model's 24 pos"):
        list(sample(policy, [Question("long", "." * 24, None)], G, {"long": 7}))


def test_parts_of_few_rows_give_the_same_answers(model):
    """Kinds follow each other, a kind's questions keep their order, and `noise` goes with its question."""
    model.tokenizer = Tokenizer.of_bytes()
    asked = [Question(kind, "." * i + "?", i) for i, kind in enumerate(["a", "b"] * 4)]
    noise, limits = uniform(8 * G).view(8, G, NEW), {"a": NEW, "b": 5}

    def texts(rows):
        rollouts = list(sample(model, asked, G, limits, noise=noise, max_rows=rows))
        answers = [answer for rollout in rollouts for answer in rollout.answers]
        return len(rollouts), [(answer.question.truth, answer.text, answer.hit_limit) for answer in answers]

    (count, whole), *others = texts(None), texts(2 * G), texts(1)
    assert [truth for truth, *_ in whole] == [i for i in (0, 2, 4, 6, 1, 3, 5, 7) for _ in range(G)]
    assert count == 2 and others == [(4, whole), (8, whole)]


@pytest.mark.parametrize("stop_after", [0, 2])
def test_a_stop_ends_an_answer_and_is_trained(stop_after):
    """A question may name a text that ends an answer, as the end token does, from its first token on or from a later
    one: it is no cut-off, and has a gradient."""
    policy, noise, limits = toy.model(), uniform(32, 7).view(4, 8, 7), {"short": 7, "long": 7}
    asked = toy.questions(1) * 4
    [plain] = sample(policy, asked, 8, limits, noise=noise)
    stop = int(plain.completions[(plain.completions < 128) & plain.completion_mask].mode().values)
    asked = [question._replace(stop=chr(stop), stop_after=stop_after) for question in asked]
    [rollout] = sample(policy, asked, 8, limits, noise=noise)
    mask, answers = rollout.completion_mask, rollout.answers
    logprobs, entropy = train.forward(policy, rollout, train.TEMPERATURE)
    logprobs = logprobs.detach().requires_grad_()
    rollout.advantages, rollout.old_logprobs = torch.ones_like(logprobs), logprobs.detach()
    train.loss_and_sums(logprobs, entropy, rollout, mask.sum())[0].backward()
    stopped = (plain.completions == stop) & plain.completion_mask
    rows, columns = stopped[:, stop_after:].nonzero().T
    assert len(rows) > 2 and stopped[:, :2].any()
    for i in rows.unique().tolist():
        at = int(columns[rows == i].min()) + stop_after
        assert mask[i].sum() == at + 1 and answers[i].text.endswith(chr(stop)) and not answers[i].hit_limit
        assert torch.equal(rollout.completions[i, : at + 1], plain.completions[i, : at + 1])
        assert logprobs.grad[i, at] < 0 and not logprobs.grad[i, at + 1 :].any()
    others = sorted({*range(32)} - {*rows.tolist()})  # which end as they would without a stop
    assert torch.equal(mask[others].sum(1), plain.completion_mask[others].sum(1))


def test_a_stop_that_no_token_holds_is_refused():
    with pytest.raises(SystemExit, match="no token of the model contains 'ab', the stop of .* questions"):
        list(sample(toy.model(), [toy.questions(1)[0]._replace(stop="ab")], 1, toy.LIMITS))


# The sampled distribution, and invariant 3: the training forward's logprobs are those recorded while sampling
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_samples_follow_the_softmax(model, temperature):
    """Evenly spread numbers draw each token as often as the distribution says that transformers' warper makes."""
    n, prompt = 20_000, PROMPTS[3]
    with torch.no_grad():
        logits = TemperatureLogitsWarper(temperature)(None, model(torch.tensor([prompt]))[:, -1])
    noise = (torch.arange(n)[:, None] + 0.5) / n
    out = generate(model, [prompt], n, [1], temperature, noise)
    counts = torch.bincount(out.completions[:, 0], minlength=300)
    assert (counts - n * logits.softmax(-1)[0]).abs().max() < 2 and (counts > 5).sum() > 5
    recorded = logits.log_softmax(-1)[0][out.completions[:, 0]]  # the temperature is part of the distribution
    torch.testing.assert_close(out.rollout_logprobs[:, 0], recorded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype, temperature", [(torch.float32, 1.0), (torch.float32, 0.7), (torch.bfloat16, 0.7)])
def test_recorded_logprobs_are_those_of_the_training_forward(model, dtype, temperature, toy_settings):
    """In fp32 within 1e-4. The bound in bf16, with weights this large: 0.05 on average, 0.5 for any token."""
    toy_settings(TEMPERATURE=temperature)
    noise = uniform(G * len(PROMPTS))
    out = generate(model.inference_copy(dtype), PROMPTS, G, LIMITS, temperature, noise)
    eos, mask = model.config.eos_token_id, out.completion_mask
    with torch.no_grad():
        logprobs, entropy = train.forward(model.set_compute_dtype(dtype), out, train.TEMPERATURE)
    gap = (logprobs - out.rollout_logprobs)[mask].abs()
    largest, mean = (1e-4, 1e-4) if dtype == torch.float32 else (0.5, 0.05)
    assert gap.max() < largest and gap.mean() < mean and entropy[mask].isfinite().all()
    last = out.completions.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    assert ((last == eos) == ~out.hit_limit).all()  # the end token is inside the mask: what is masked is not learnt
    assert out.hit_limit.any() and not out.hit_limit.all() and (out.rollout_logprobs[~mask] == 0).all()


def test_equal_answers_are_computed_once(monkeypatch):
    """Their logprobs, entropies and gradients are those of all rows computed by themselves; microbatches know it."""
    tokens = torch.tensor([[65, 66], [65, 67], [65, 66], [65, 66], [68, 69], [68, 69], [68, 69], [68, 69]])
    distinct, index = distinct_rows(tokens, 2)
    assert distinct.tolist() == [[65, 66], [65, 67], [68, 69], [0, 0]]  # as many of each group
    assert index.tolist() == [0, 1, 0, 0, 2, 2, 2, 2]
    prompts, lengths, cut = torch.tensor([[7, 8, 9], [9, 7, 0]]), torch.tensor([3, 2]), torch.ones(8, dtype=torch.bool)
    rollout = Rollout(prompts, lengths, tokens, tokens >= 0, torch.zeros(8, 2), cut, advantages=uniform(8, 2))
    found, rows, score = [], [], GPT.score
    monkeypatch.setattr(GPT, "score", lambda *args: rows.append(len(args[3])) or score(*args))
    for way in distinct_rows, lambda tokens, B: (tokens, slice(None)):
        monkeypatch.setattr(train, "distinct_rows", way)
        policy = toy.model()
        [part] = microbatches(rollout, 2 * (3 + 2 * 2), True)  # both groups, with two answers each
        logprobs, entropy = train.forward(policy, part, 0.7)
        (logprobs * part.advantages).sum().backward()
        found.append([part.completions, logprobs, entropy, *(p.grad for p in policy.parameters())])
    assert rows == [4, 8]
    torch.testing.assert_close(*found)


def test_no_number_draws_a_token_without_probability():
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    logp = logits.masked_fill(logits < 1, -math.inf).log_softmax(-1)
    numbers = torch.tensor([0.0, 1.0, 1 - 2**-24]).repeat(100)
    assert logp.gather(1, draw(logp, numbers)[:, None]).isfinite().all()
    assert draw(torch.full((2, 40), torch.nan), numbers[:2]).max() < 40  # the guard finds NaN later


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_decode_as_the_cpu_does(model):
    cpu = generate(model, PROMPTS, 2, LIMITS, temperature=0)
    gpu = toy.to_cpu(generate(model.cuda(), PROMPTS, 2, LIMITS, temperature=0))
    assert torch.equal(cpu.completions, gpu.completions) and torch.equal(cpu.completion_mask, gpu.completion_mask)
