"""The maths against TRL's own code, torch.distributions and exact expectations."""

import math

import pytest
import torch
import transformers
from torch.distributions import Categorical, kl_divergence

import grpo

N, T, GROUP, LIMIT = 8, 12, 4, 20


def batch(seed=0, dtype=torch.float64):
    """Random rows with ragged masks and ratios on both sides of any clip; outside the mask there is NaN."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(N, T, generator=g, dtype=dtype)
    old = logprobs + 0.6 * torch.randn(N, T, generator=g, dtype=dtype)
    ref = logprobs + 0.5 * torch.randn(N, T, generator=g, dtype=dtype)
    advantages = torch.randn(N, generator=g, dtype=dtype)
    lengths = torch.randint(1, T + 1, (N,), generator=g)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    weights = 0.5 + torch.rand(N, T, generator=g, dtype=dtype)
    assert (advantages > 0).any() and (advantages < 0).any() and not mask.all()
    return logprobs, old, ref, advantages, mask, weights


def loss_and_gradient(f, logprobs):
    logprobs = logprobs.clone().requires_grad_()
    value = f(logprobs)
    return value.detach(), torch.autograd.grad(value, logprobs)[0]


def settings(loss, low=0.2, high=0.3):
    return dict(loss=loss, clip_low=low, clip_high=high, max_completion_tokens=LIMIT)


# --- against TRL -----------------------------------------------------------------------------------------------------


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
    trainer._metrics["eval"].clear()
    return trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize("seed, dtype", [(0, torch.float64), (1, torch.float64), (2, torch.float32)])
@pytest.mark.parametrize("extras", ["plain", "kl", "weights", "advantage of each token"])
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_loss_and_gradient_equal_trl(trl, loss, extras, seed, dtype):
    logprobs, old, ref, advantages, mask, weights = batch(seed, dtype)
    low, high = (0.03, 0.05) if loss == "gspo" else (0.2, 0.3)
    beta = 0.3 if extras == "kl" else 0.0
    weights = weights if extras == "weights" else None
    if extras == "advantage of each token":  # where each word has its own
        advantages = advantages[:, None] * torch.linspace(-1, 1, T, dtype=dtype)

    def ours(x):
        value, ours.stats = grpo.policy_loss(
            x, old, advantages, mask, **settings(loss, low, high), weights=weights
        )  # fmt: skip
        total = grpo.loss_normalizer(mask, loss, LIMIT)
        return value + beta * grpo.aggregate(grpo.kl(x, ref, mask, "k3"), mask, loss, total)

    def theirs(x):
        return trl_loss(trl, x, old, ref, advantages, mask, weights, loss, low, high, beta)

    (value, gradient), expected = loss_and_gradient(ours, logprobs), loss_and_gradient(theirs, logprobs)
    torch.testing.assert_close(value, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, expected[1], atol=1e-6, rtol=1e-6)
    assert gradient.abs().max() > 1e-3 and not gradient[~mask].any()

    metrics = {name: values[0] for name, values in trl._metrics["eval"].items()}
    low, high = (ours.stats[name].item() / mask.sum().item() for name in ("clip_low", "clip_high"))
    if loss == "cispo":
        assert high >= metrics["cispo_clip_ratio"] > 0 == low  # TRL leaves out negative advantages
    elif loss == "gspo":  # TRL counts rows
        assert (low > 0) == (metrics["clip_ratio/low_mean"] > 0)
        assert (high > 0) == (metrics["clip_ratio/high_mean"] > 0)
        assert low + high > 0
    else:
        assert low == pytest.approx(metrics["clip_ratio/low_mean"]) and low > 0
        assert high == pytest.approx(metrics["clip_ratio/high_mean"]) and high > 0
    if beta:
        assert grpo.kl(logprobs, ref, mask, "k3").sum().item() / mask.sum().item() == pytest.approx(metrics["kl"])


def test_k2_has_the_gradient_of_trls_corrected_k3(trl):
    """TRL's default multiplies k3 by the ratio (DeepSeek-V3.2); on policy this is k2's gradient, token for token."""
    logprobs, _, ref, advantages, mask, _ = batch()

    def theirs(x, beta):
        return trl_loss(trl, x, logprobs, ref, advantages, mask, None, "dapo", 0.2, 0.2, beta)

    trl.args.use_bias_correction_kl = True
    with_kl, without = (loss_and_gradient(lambda x: theirs(x, beta), logprobs)[1] for beta in (1.0, 0.0))  # noqa: B023
    trl.args.use_bias_correction_kl = False
    k2 = loss_and_gradient(lambda x: grpo.kl(x, ref, mask, "k2").sum() / mask.sum(), logprobs)[1]
    torch.testing.assert_close(with_kl - without, k2)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_equal_trl(trl, scale):
    trl.scale_rewards, trl.beta, trl.use_vllm = scale, 0.0, False
    trl._generate = lambda prompts: ([[0]] * N, [[0, 1]] * N, None, ["a"] * N, None, {}, None, None)
    rewards = torch.rand(N, generator=torch.Generator().manual_seed(1)) - 0.3
    rewards[GROUP:] = 0.25  # a group without variance
    trl._calculate_rewards = lambda *_: rewards[:, None]
    trl._metrics["eval"].clear()
    expected = trl._generate_and_score_completions([{"prompt": "a"}] * N)["advantages"]
    ours = grpo.advantages(rewards, GROUP, scale)
    frac_zero_std = grpo.zero_variance(rewards, GROUP).float().mean()
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    assert ours[:GROUP].abs().max() > 0.1 and frac_zero_std == 0.5
    if scale != "batch":  # there TRL looks at the batch, not at groups
        assert trl._metrics["eval"]["frac_reward_zero_std"] == [0.5]


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_variance_give_exactly_zero(scale):
    rewards = torch.tensor([0.1] * 7 + [0.7] * 7 + [-0.3] * 7 + [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert (rewards[7:14] - rewards[7:14].mean()).any()  # rounding alone would not give zero
    result = grpo.advantages(rewards, 7, scale)
    assert not result[:21].any() and result[21:].abs().min() < 1e-6 < result[21:].abs().max()
    assert grpo.zero_variance(rewards, 7).tolist() == [True, True, True, False]
    nearly = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert grpo.zero_variance(nearly, 2).all() and not grpo.advantages(nearly, 2, scale).any()
    with pytest.raises(RuntimeError):
        grpo.advantages(rewards, 5, scale)


def test_a_nan_reward_is_not_hidden():
    rewards = torch.tensor([0.0, 1.0, math.nan, math.nan])
    result = grpo.advantages(rewards, 2)
    assert result.tolist()[:2] == [-0.5, 0.5] and result[2:].isnan().all()
    assert not grpo.zero_variance(rewards, 2).any()


# --- the policy loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_at_ratio_one_it_is_the_policy_gradient(loss):
    logprobs, _, _, advantages, mask, _ = batch()
    value, gradient = loss_and_gradient(
        lambda x: grpo.policy_loss(x, logprobs, advantages, mask, **settings(loss))[0], logprobs
    )
    lengths = mask.sum(1, keepdim=True)
    share = {"grpo": 1 / (N * lengths), "gspo": 1 / (N * lengths), "dr_grpo": torch.tensor(1 / (N * LIMIT))}
    expected = -advantages[:, None] * mask * share.get(loss, 1 / mask.sum())  # of -A log p, weighed by the share
    torch.testing.assert_close(gradient, expected)
    if loss != "cispo":
        torch.testing.assert_close(value, expected.sum())  # -A · ratio with ratio 1


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_microbatches_may_be_cut_in_any_way(loss):
    logprobs, old, ref, advantages, mask, weights = batch(3)
    total = grpo.loss_normalizer(mask, loss, LIMIT)

    def whole(x):
        value, whole.stats = grpo.policy_loss(x, old, advantages, mask, **settings(loss), weights=weights)
        return value + 0.1 * grpo.aggregate(grpo.kl(x, ref, mask, "k2"), mask, loss, total)

    value, gradient = loss_and_gradient(whole, logprobs)
    for cuts in ([N], [1] * N, [3, 5], [1, 6, 1]):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(len(cuts)))
        x, losses, stats, part_totals = logprobs.clone().requires_grad_(), [], [], []
        for rows in order.split(cuts):
            width = mask[rows].sum(1).max()  # a microbatch is as wide as its longest row
            p, o, r, m, w = (t[rows, :width] for t in (x, old, ref, mask, weights))
            part, part_stats = grpo.policy_loss(
                p, o, advantages[rows], m, **settings(loss), weights=w, normalizer=total
            )
            part = part + 0.1 * grpo.aggregate(grpo.kl(p, r, m, "k2"), m, loss, total)
            part.backward()
            losses.append(part.detach())
            stats.append(part_stats)
            part_totals.append(grpo.loss_normalizer(m, loss, LIMIT))
        assert sum(part_totals) == total
        torch.testing.assert_close(sum(losses), value)
        torch.testing.assert_close(x.grad, gradient)
        merged = grpo.merge_stats(stats)
        assert merged.keys() == whole.stats.keys()
        for name, stat in merged.items():
            torch.testing.assert_close(stat, whole.stats[name])


@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e30, -1e4, -90.0, 90.0, 1e4, 1e30])
def test_no_log_ratio_overflows(loss, sign, log_ratio):
    logprobs, old, mask = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0 - log_ratio), torch.ones(2, 3)
    value, gradient = loss_and_gradient(
        lambda x: grpo.policy_loss(x, old, sign * torch.ones(2), mask, **settings(loss))[0], logprobs
    )
    assert value.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_the_log_ratio_is_exact_up_to_its_bound_and_without_gradient_beyond(loss):
    def f(shift):
        old, advantages, mask = torch.zeros(1, 1).double(), -torch.ones(1), torch.ones(1, 1)
        return loss_and_gradient(
            lambda x: grpo.policy_loss(x, old, advantages, mask, **settings(loss), normalizer=1)[0], old + shift
        )

    for value in f(19.9):
        assert value.item() == pytest.approx(math.exp(19.9))  # loss and gradient of -A exp(x)
    assert f(20.1)[0].item() == pytest.approx(math.exp(20)) and f(20.1)[1].item() == 0


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_what_the_mask_hides_never_counts(loss, hidden):
    logprobs, old, ref, advantages, mask, weights = batch(4)

    def run(*tensors):
        x, o, r, w = tensors

        def f(x):
            value, f.stats = grpo.policy_loss(x, o, advantages, mask, **settings(loss), weights=w)
            for estimator in grpo.KL_ESTIMATORS:
                value = value + grpo.aggregate(grpo.kl(x, r, mask, estimator), mask, loss, 7)
            return value

        return *loss_and_gradient(f, x), f.stats

    clean = run(logprobs, old, ref, weights)
    dirty = run(*(torch.where(mask, t, hidden) for t in (logprobs, old, ref, weights)))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and not dirty[1][~mask].any()
    assert clean[2] == dirty[2]
    one_bad = logprobs.clone()
    one_bad[0, 0] = math.nan
    assert run(one_bad, old, ref, weights)[0].isnan()  # a NaN that counts is not hidden


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_rows_without_a_token(loss):
    logprobs, old, _, advantages, mask, _ = batch()
    value, gradient = loss_and_gradient(
        lambda x: grpo.policy_loss(x, old, advantages, mask & False, **settings(loss))[0], logprobs
    )
    assert value == 0 and not gradient.any()


def test_stats_by_hand():
    ratio = torch.tensor([[0.5, 1.0, 2.0, 9.0], [0.5, 1.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    args = ratio.log(), torch.zeros(2, 4), torch.tensor([1.0, -1.0]), mask
    expected = dict(tokens=6, ratio_sum=7, ratio_min=0.5, ratio_max=2, clip_low=1, clip_high=1)
    for loss, changed in {"grpo": {}, "cispo": dict(clip_low=0, clip_high=2)}.items():
        stats = grpo.policy_loss(*args, **settings(loss))[1]
        assert {k: v.item() for k, v in stats.items()} == pytest.approx(expected | changed)
    stats = grpo.policy_loss(*args, **settings("gspo"))[1]  # 0.5 · 1 · 2: both completions have ratio 1
    assert {k: v.item() for k, v in stats.items()} == pytest.approx(
        dict(tokens=6, ratio_sum=6, ratio_min=1, ratio_max=1, clip_low=0, clip_high=0)
    )


def test_importance_weights():
    train = torch.tensor([-1.0, -1.0, -1.0, 0.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.5, -0.5, -1e4])
    weights = grpo.importance_weights(train, rollout, cap=1.5)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, math.exp(-0.5), 1.5]))
    assert not weights.requires_grad


# --- KL --------------------------------------------------------------------------------------------------------------


def distributions(seed=0, V=6):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(V, generator=g, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("estimator", grpo.KL_ESTIMATORS)
def test_kl_estimates(estimator):
    logits, ref_logits = distributions()
    p, q = Categorical(logits=logits), Categorical(logits=ref_logits)
    exact = kl_divergence(p, q)
    torch.manual_seed(0)
    sample = p.sample((200_000,))
    estimate = grpo.kl(p.log_prob(sample), q.log_prob(sample), torch.ones_like(sample), estimator)
    error = 5 * estimate.std() / len(sample) ** 0.5
    assert exact > 0.3 and error < 0.02
    if estimator == "k2":  # biased: half the second moment, near the KL when p is near q
        assert abs(estimate.mean() - exact) > error
        near = Categorical(logits=logits + 0.01 * (ref_logits - logits))
        tokens = torch.arange(6)
        mean = (p.probs * grpo.kl(p.log_prob(tokens), near.log_prob(tokens), tokens >= 0, "k2")).sum()
        torch.testing.assert_close(mean, kl_divergence(p, near), rtol=0.02, atol=0)
    else:
        assert abs(estimate.mean() - exact) < error
    assert (estimate.min() < 0) == (estimator == "k1")


def test_gradients_of_the_kl_estimators_are_as_documented():
    logits, ref_logits = distributions(1)
    logits.requires_grad_()
    p, q, tokens = Categorical(logits=logits), Categorical(logits=ref_logits), torch.arange(6)

    def expected_gradient(estimator):  # each token's estimate in the loss, exactly averaged over the sampled token
        estimates = grpo.kl(p.log_prob(tokens), q.log_prob(tokens), tokens >= 0, estimator)
        return torch.autograd.grad((p.probs.detach() * estimates).sum(), logits, retain_graph=True)[0]

    reverse = torch.autograd.grad(kl_divergence(p, q), logits, retain_graph=True)[0]
    forward = torch.autograd.grad(kl_divergence(q, p), logits, retain_graph=True)[0]
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(6).double())
    torch.testing.assert_close(expected_gradient("k2"), reverse)
    torch.testing.assert_close(expected_gradient("k3"), forward)
    assert (reverse - forward).abs().max() > 0.1


@pytest.mark.parametrize("estimator", grpo.KL_ESTIMATORS)
def test_kl_is_zero_when_equal_exact_when_close_and_finite_when_far(estimator):
    logprobs, mask = -torch.rand(4, 5), torch.ones(4, 5)
    assert not grpo.kl(logprobs, logprobs, mask, estimator).any()
    near = grpo.kl(logprobs.double() + 1e-4, logprobs.double(), mask, estimator).float()
    x = torch.full((4, 5), 1e-4)
    torch.testing.assert_close(grpo.kl(x, torch.zeros(4, 5), mask, estimator), near, rtol=0.01, atol=0)
    for gap in (-1e4, 1e4):
        value, gradient = loss_and_gradient(
            lambda x: grpo.kl(x, torch.zeros(1, 1), torch.ones(1, 1), estimator).sum(), torch.full((1, 1), gap)
        )
        assert value.isfinite() and gradient.isfinite().all()
        assert gradient * gap >= 0 or estimator == "k1"  # never pushes further away


def test_the_kl_coefficient():
    assert grpo.adapt_kl_coef(0.1, kl=2.0, target=2.0) == 0.1
    assert grpo.adapt_kl_coef(0.1, kl=2.2, target=2.0) == pytest.approx(0.1 * 1.01)  # 10 % too large, at a rate of 0.1
    assert grpo.adapt_kl_coef(0.1, kl=1.8, target=2.0) == pytest.approx(0.1 * 0.99)
    for kl in (1e9, math.inf, math.nan):
        assert grpo.adapt_kl_coef(0.1, kl, target=2.0) == pytest.approx(0.1 * 1.02)
    assert grpo.adapt_kl_coef(0.1, kl=0.0, target=2.0) == pytest.approx(0.1 * 0.98)
    coef = 1.0
    for _ in range(2000):  # a KL that falls as its coefficient rises settles at the target
        coef = grpo.adapt_kl_coef(coef, kl=1 / coef, target=0.05)
    assert 1 / coef == pytest.approx(0.05, rel=1e-3)
    assert [grpo.kl_warmup(step, 4, 0.2) for step in (0, 1, 2, 4, 9)] == pytest.approx([0.2, 0.4, 0.6, 1, 1])
    assert grpo.kl_warmup(0, 0, 0.2) == 1


# --- logprobs and entropy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
@pytest.mark.parametrize("filtered", [False, True])
def test_logprobs_and_entropy_equal_torch_distributions(temperature, filtered):
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, 11, generator=g)
    tokens = torch.randint(4, (3, 5), generator=g)
    if filtered:
        logits[..., 4:9] = -math.inf
    logprobs, entropy = grpo.logprobs_and_entropy(logits, tokens, temperature)
    exact = Categorical(logits=logits.double() / temperature)
    torch.testing.assert_close(logprobs, exact.log_prob(tokens).float())
    p = exact.probs
    torch.testing.assert_close(entropy, -(p * p.clamp(min=1e-300).log()).sum(-1).float())
    if not filtered:
        torch.testing.assert_close(entropy, exact.entropy().float())


@pytest.mark.parametrize("elements", [2**22, 5])  # in one piece, in many
def test_gradients_of_logprobs_and_entropy(elements, monkeypatch):
    monkeypatch.setattr(grpo.chunks, "__defaults__", (elements,))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 7, generator=g, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(7, (4, 3), generator=g)
    assert len(grpo.chunks(logits)) == (1 if elements > 99 else 4)
    assert torch.autograd.gradcheck(lambda x: grpo.logprobs_and_entropy(x, tokens, 0.7), logits)
    # each by itself: the other's gradient is then None
    assert torch.autograd.gradcheck(lambda x: grpo.logprobs_and_entropy(x, tokens, 0.7)[0], logits)
    assert torch.autograd.gradcheck(lambda x: grpo.logprobs_and_entropy(x, tokens, 0.7)[1], logits)


def test_gradients_with_filtered_and_extreme_logits():
    logits = torch.tensor([[0.0, 1.0, -math.inf, 2.0], [1e4, -1e4, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy = grpo.logprobs_and_entropy(logits, torch.tensor([1, 0]))
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    x = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)  # the first row without what is filtered
    exact = Categorical(logits=x)
    (expected,) = torch.autograd.grad(exact.log_prob(torch.tensor(1)) + exact.entropy(), x)
    torch.testing.assert_close(gradient[0, [0, 1, 3]], expected)
    assert gradient[0, 2] == 0 and not gradient[1].any()
    assert logprobs[1] == 0 and entropy[1] == 0


def test_bf16_logits_are_widened_before_the_softmax():
    g = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(20, 300, generator=g)).bfloat16().requires_grad_()
    tokens = torch.randint(300, (20,), generator=g)
    logprobs, entropy = grpo.logprobs_and_entropy(logits, tokens, 0.7)
    exact = Categorical(logits=logits.detach().double() / 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact.log_prob(tokens).float())
    torch.testing.assert_close(entropy, exact.entropy().float())
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    expected = torch.nn.functional.one_hot(tokens, 300) - exact.probs
    torch.testing.assert_close(logits.grad.double(), expected / 0.7, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("kind", grpo.SCHEDULES)
def test_the_learning_rate_falls_as_in_transformers(kind):
    """After the warm-up; ours begins with a warmup-th of the rate, theirs with nothing, a step for nothing."""
    weights = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = transformers.get_scheduler(name, weights, num_warmup_steps=5, num_training_steps=30)
    for step in range(30):
        expected = (step + 1) / 5 if step < 5 else theirs.get_last_lr()[0]
        assert grpo.schedule(step, 30, 5, kind) == pytest.approx(expected, abs=1e-12), step
        weights.step()
        theirs.step()
