"""grpo.py against TRL's own code, torch.distributions, exact expectations and examples computed by hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.distributions import Categorical, kl_divergence

import grpo
import toy
import train
from rollout import Batch, generate

N, T, GROUP, LIMIT = 8, 12, 4, 20


def made_up():
    """Random rows with ragged masks and ratios on both sides of any clip."""
    g = torch.Generator().manual_seed(0)
    logprobs, weights = torch.rand(2, N, T, generator=g, dtype=torch.float64)
    away, ref_away = torch.randn(2, N, T, generator=g, dtype=torch.float64)
    advantages, lengths = torch.randn(N, generator=g, dtype=torch.float64), torch.randint(1, T + 1, (N, 1), generator=g)
    mask = torch.arange(T) < lengths
    assert (advantages > 0).any() and (advantages < 0).any() and not mask.all()
    logprobs = -3 * logprobs
    return logprobs, logprobs + 0.6 * away, logprobs + 0.5 * ref_away, advantages, mask, 0.5 + weights


def loss_and_gradient(f, logprobs):
    logprobs = logprobs.clone().requires_grad_()
    value = f(logprobs)
    return value.detach(), torch.autograd.grad(value, logprobs)[0]


def settings(loss, mask, low=0.2, high=0.3):
    normalizer = grpo.loss_normalizer(mask, loss, LIMIT).clamp(min=1)
    return dict(loss=loss, clip_low=low, clip_high=high, normalizer=normalizer)


# Invariant 6: against TRL
@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    """A true GRPOTrainer around a toy model; the tests replace only what it would sample or compute with the model."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    trainer = GRPOTrainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=2, n_embd=4, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)),
        reward_funcs=len,
        args=GRPOConfig(
            tmp_path_factory.mktemp("trl"), report_to="none", use_cpu=True, bf16=False, num_generations=GROUP,
            per_device_train_batch_size=N, max_completion_length=LIMIT, use_bias_correction_kl=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * N),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
    )  # fmt: skip
    trainer.model.eval()  # the whole batch is one step, without accumulation
    return trainer


def trl_loss(trainer, logprobs, old, ref, advantages, mask, weights, loss, low, high, beta):
    trainer.loss_type = "grpo" if loss == "gspo" else loss
    trainer.importance_sampling_level = "sequence" if loss == "gspo" else "token"
    trainer.epsilon_low, trainer.epsilon_high = low, 1 + high if loss == "cispo" else high
    trainer.beta = beta
    trainer.use_vllm = weights is not None
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs).detach(), None)
    ids = torch.zeros(N, T, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask.long())
    inputs |= dict(advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref)
    inputs |= dict(importance_sampling_ratio=weights, num_items_in_batch=mask.sum())
    return trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize("extras", ["plain", "kl", "weights", "an advantage for each token"])
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_loss_and_gradient_equal_trl(trl, loss, extras):
    logprobs, old, ref, advantages, mask, weights = made_up()
    low, high = (0.03, 0.05) if loss == "gspo" else (0.2, 0.3)
    beta = 0.3 if extras == "kl" else 0.0
    weights = weights if extras == "weights" else None
    if extras == "an advantage for each token":
        advantages = advantages[:, None] * torch.linspace(-1, 1, T, dtype=torch.float64)

    def ours(x):
        value, _ = grpo.policy_loss(x, old, advantages, mask, **settings(loss, mask, low, high), weights=weights)
        total = grpo.loss_normalizer(mask, loss, LIMIT)
        return value + beta * grpo.aggregate(grpo.kl(x, ref, mask, "k3"), mask, loss, total)

    def theirs(x):
        return trl_loss(trl, x, old, ref, advantages, mask, weights, loss, low, high, beta)

    (value, gradient), expected = loss_and_gradient(ours, logprobs), loss_and_gradient(theirs, logprobs)
    torch.testing.assert_close(value, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, expected[1], atol=1e-6, rtol=1e-6)
    assert gradient.abs().max() > 1e-3 and not gradient[~mask].any()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_equal_trl(trl, scale):
    trl.scale_rewards, trl.beta, trl.use_vllm = scale, 0.0, False
    trl._generate = lambda prompts: ([[0]] * N, [[0, 1]] * N, None, ["a"] * N, None, {}, None, None)
    rewards = torch.rand(N, generator=torch.Generator().manual_seed(1)) - 0.3
    rewards[GROUP:] = 0.25  # a group without variance
    trl._calculate_rewards = lambda *_: rewards[:, None]
    expected = trl._generate_and_score_completions([{"prompt": "a"}] * N)["advantages"]
    ours = grpo.advantages(rewards[:, None], GROUP, scale, rewards.std())
    torch.testing.assert_close(ours[:, 0], expected, atol=1e-6, rtol=1e-6)
    assert ours[:GROUP].abs().max() > 0.1 and grpo.constant(rewards.view(-1, GROUP)).float().mean() == 0.5


# Advantages and credit
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_variance_give_exactly_zero(scale):
    rewards = torch.tensor([0.1] * 7 + [0.7] * 7 + [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])[:, None]
    assert (rewards[7:14] - rewards[7:14].mean()).any()  # rounding alone would not give zero
    result = grpo.advantages(rewards, 7, scale, rewards.std())
    assert not result[:14].any() and result[14:].abs().max() > 1e-6
    assert grpo.constant(rewards.view(3, 7)).tolist() == [True, True, False]
    assert grpo.advantages(torch.full((2, 1), math.nan), 2, scale, rewards.std()).isnan().all()  # is not hidden


def test_pieces_that_cancel_out_are_not_blown_up():
    """Where all rewards are equal there is no deviation of theirs to divide by, though pieces differ."""
    values = torch.tensor([[0.1, -0.1], [-0.1, 0.1]])
    assert grpo.advantages(values, 2, "group").abs().max() < 1


def test_credit_of_an_example_by_hand(toy_settings):
    """The texts "ab  cde f" and "ab" as ab|␣␣c|de|␣f and a|b: a token belongs to the span of its last character."""
    pieces = [
        [("whole", 0.5), ("first", 0.2, (0, 3)), ("second", 0.4, (3, 7)), ("ends", 0.1, (0, 3), (7, 9))],
        [("whole", 0.1), ("first", 0.6, (0, 2))],
    ]
    grades = [toy.Grade(reward, some, {}) for reward, some in zip((1.2, 0.7), pieces)]
    samples = [SimpleNamespace(grade=grade, ends=ends) for grade, ends in zip(grades, ([2, 5, 7, 9], [1, 2]))]
    batch = Batch(*[None] * 2, torch.zeros(2, 6), *[None] * 3)

    def paid(credit):
        toy_settings(CREDIT=credit, GROUP_SIZE=2)
        return train.with_advantages(batch, samples, None).advantages

    torch.testing.assert_close(paid("answer"), torch.tensor([[0.25] * 6, [-0.25] * 6]))
    # by piece, against the means 0.3, 0.4, 0.2 and 0.05: +0.2, -0.2, +0.2 and +0.05 for the first answer; a piece that
    # an answer lacks is 0 there and judges the whole
    expected = [[0.05, 0.4, 0.4, 0.25, 0.2, 0.2], [-0.25, -0.25, *[-0.45] * 4]]
    torch.testing.assert_close(paid("piece"), torch.tensor(expected))


# The policy loss
@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e30, -90.0, 90.0, 1e30])
def test_no_log_ratio_overflows(loss, sign, log_ratio):
    """The incident: a ratio of 99,990 made a gradient norm of 54,648,652."""
    old, mask = torch.full((2, 3), -1.0 - log_ratio), torch.ones(2, 3)

    def value(logprobs):
        policy = grpo.policy_loss(logprobs, old, sign * torch.ones(2), mask, **settings(loss, mask))[0]
        return policy + sum(grpo.kl(logprobs, old.clamp(-1e4, 1e4), mask, k).sum() for k in grpo.KL_ESTIMATORS)

    assert all(x.isfinite().all() for x in loss_and_gradient(value, torch.full((2, 3), -1.0)))


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_what_the_mask_hides_never_counts(loss):
    logprobs, old, ref, advantages, mask, weights = made_up()

    def run(x, o, r, w):
        def f(x):
            value, _ = grpo.policy_loss(x, o, advantages, mask, **settings(loss, mask), weights=w)
            return value + sum(grpo.aggregate(grpo.kl(x, r, mask, k), mask, loss, 7) for k in grpo.KL_ESTIMATORS)

        return loss_and_gradient(f, x)

    clean = run(logprobs, old, ref, weights)
    dirty = run(*(torch.where(mask, t, math.nan) for t in (logprobs, old, ref, weights)))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and not dirty[1][~mask].any()
    logprobs[0, 0] = math.nan
    assert run(logprobs, old, ref, weights)[0].isnan()  # a NaN that counts is not hidden


def test_stats_by_hand():
    ratio = torch.tensor([[0.5, 1.0, 2.0, 9.0], [0.5, 1.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    args = ratio.log(), torch.zeros(2, 4), torch.tensor([1.0, -1.0]), mask
    expected = dict(tokens=6, ratio_min=0.5, ratio_max=2, clip_low=1, clip_high=1)
    gspo = dict(ratio_min=1, ratio_max=1, clip_low=0, clip_high=0)  # 0.5 · 1 · 2: both rows have ratio 1
    for loss, changed in {"grpo": {}, "cispo": dict(clip_low=0, clip_high=2), "gspo": gspo}.items():
        stats = grpo.policy_loss(*args, **settings(loss, mask))[1]
        assert {k: v.item() for k, v in stats.items()} == pytest.approx(expected | changed)


def test_importance_weights():
    trained = torch.tensor([-1.0, -1.0, -1.0, 0.0], requires_grad=True)
    weights = grpo.importance_weights(trained, torch.tensor([-1.0, -1.5, -0.5, -1e4]), cap=1.5)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, math.exp(-0.5), 1.5]))
    assert not weights.requires_grad


# A step: microbatches change nothing
def batch_of(model, B):
    prompts = [list(range(3, 5 + 3 * b)) for b in range(B)]
    noise = torch.rand(B * GROUP, T, generator=torch.Generator().manual_seed(0))
    batch = generate(model.cast(torch.float32), prompts, GROUP, T, noise=noise)
    lengths = torch.arange(B * GROUP) * 7 % T + 1
    mask = torch.arange(T) < lengths[:, None]
    rewards = torch.rand(B * GROUP, 1, generator=torch.Generator().manual_seed(0))
    advantages = grpo.advantages(rewards, GROUP).expand(-1, T) * torch.linspace(0.5, 1, T)
    logprobs = batch.rollout_logprobs.masked_fill(~mask, 0)
    return batch._replace(completion_mask=mask, rollout_logprobs=logprobs, advantages=advantages)


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_a_step_does_not_depend_on_its_microbatches(loss, toy_settings, monkeypatch):
    """Two epochs, so the logprobs of the first one's weights and of the reference are cut, too."""
    start, results, rows, forward = toy.model(), [], [], train.forward
    start.config.eos_token_id = -1  # nothing ends early
    reference = copy.deepcopy(start).cast(torch.float32)
    batches = [batch_of(start, 3), batch_of(start, 1)]

    def counted(model, part):
        rows.append(len(part.tokens))
        return forward(model, part)

    monkeypatch.setattr(train, "forward", counted)
    for most, largest in (1, 4), (120, 8), (10**6, 12):
        toy_settings(LOSS=loss, EPOCHS=2, MICROBATCH_TOKENS=most)
        model = copy.deepcopy(start)
        rows.clear()
        metrics = train.update(model, reference, torch.optim.SGD(model.parameters(), lr=0.5), batches, 0.1)
        results.append((metrics, list(model.parameters())))
        assert max(rows) == largest
    (expected, weights), *others = results
    assert expected["grad_norm"] > 1e-3 and expected["kl"] < 1e-7 and expected["ratio_max"] > 1.001
    for metrics, parameters in others:
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6)
        for a, b in zip(parameters, weights):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# KL
def test_kl_estimators_and_their_gradients_are_as_documented():
    """Exactly averaged over the sampled token, of a distribution with six."""
    logits, ref_logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_()
    p, q, tokens = Categorical(logits=logits), Categorical(logits=ref_logits), torch.arange(6)

    def expected(estimator, q=q):
        estimates = grpo.kl(p.log_prob(tokens), q.log_prob(tokens), tokens >= 0, estimator)
        assert (estimates < 0).any() == (estimator == "k1")
        return (p.probs.detach() * estimates).sum()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    reverse, forward = kl_divergence(p, q), kl_divergence(q, p)
    for estimator in "k1", "k3":  # without bias
        torch.testing.assert_close(expected(estimator), reverse)
    near = Categorical(logits=logits.detach() + 0.01 * (ref_logits - logits.detach()))
    torch.testing.assert_close(expected("k2", near), kl_divergence(p, near), rtol=0.02, atol=0)
    torch.testing.assert_close(gradient(expected("k1")), torch.zeros(6).double())
    torch.testing.assert_close(gradient(expected("k2")), gradient(reverse))
    torch.testing.assert_close(gradient(expected("k3")), gradient(forward))
    assert reverse > 0.3 and (gradient(reverse) - gradient(forward)).abs().max() > 0.1


# Logprobs, entropy, schedules
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_equal_torch_distributions(temperature, dtype):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11, generator=g)).to(dtype)
    logits[..., 4:9] = -math.inf  # filtered out
    tokens = torch.randint(4, (3, 5), generator=g)
    logprobs, entropy = grpo.logprobs_and_entropy(logits, tokens, temperature)
    exact = Categorical(logits=logits.double() / temperature)
    torch.testing.assert_close(logprobs, exact.log_prob(tokens).float())  # fp32: bf16 is widened before the softmax
    torch.testing.assert_close(entropy, torch.special.entr(exact.probs).sum(-1).float())


@pytest.mark.parametrize("rows", [1, 3])  # at a time
def test_gradients_of_logprobs(rows, monkeypatch):
    monkeypatch.setattr(grpo, "chunks", lambda logits: [slice(i, i + rows) for i in range(0, len(logits), rows)])
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 7, generator=g, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(7, (4, 3), generator=g)
    assert torch.autograd.gradcheck(lambda x: grpo.logprobs_and_entropy(x, tokens, 0.7)[0], logits)
    assert not grpo.logprobs_and_entropy(logits, tokens, 0.7)[1].requires_grad  # a metric: nothing pays for entropy


@pytest.mark.parametrize("kind", grpo.SCHEDULES)
def test_the_learning_rate_falls_as_in_transformers(kind):
    """After the warm-up; ours begins with a warmup-th of the rate, theirs with a step for nothing."""
    weights = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = transformers.get_scheduler(name, weights, num_warmup_steps=5, num_training_steps=30)
    for step in range(30):
        expected = (step + 1) / 5 if step < 5 else theirs.get_last_lr()[0]
        assert grpo.schedule(step, 30, 5, kind) == pytest.approx(expected, abs=1e-12), step
        weights.step()
        theirs.step()


def test_the_kl_coefficient_warms_up():
    assert [grpo.kl_warmup(step, 4, 0.2) for step in (0, 1, 2, 4, 9)] == pytest.approx([0.2, 0.4, 0.6, 1, 1])
    assert grpo.kl_warmup(0, 0, 0.2) == 1
