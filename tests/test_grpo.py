import copy
import math
from collections import Counter
from itertools import permutations, product

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

import grpo
import toy
import train
from examples import gsm8k
from nanorook.task import Grade, shuffled
from rollout import Answer, Rollout, microbatches

N, T, GROUP, LIMIT = 8, 12, 4, 20
SCALES = ["none", "std", "mean"]
ASKED = toy.Question("short", "?", 0)


def made_up():
    g = torch.Generator().manual_seed(0)
    logprobs, weights = torch.rand(2, N, T, generator=g, dtype=torch.float64)
    away, ref_away = torch.randn(2, N, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(N, 1, generator=g, dtype=torch.float64)  # one for each answer
    lengths = torch.randint(1, T + 1, (N, 1), generator=g)
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
    trainer.loss_type = loss
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
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "cispo"])  # TRL lacks any loss that a reader adds
def test_loss_and_gradient_equal_trl(trl, loss, extras):
    logprobs, old, ref, advantages, mask, weights = made_up()
    low, high = 0.2, 0.3
    beta = 0.3 if extras == "kl" else 0.0
    weights = weights if extras == "weights" else None
    if extras == "an advantage for each token":
        advantages = advantages * torch.linspace(-1, 1, T, dtype=torch.float64)

    def ours(x):
        value, _ = grpo.policy_loss(x, old, advantages, mask, **settings(loss, mask, low, high), importance=weights)
        total = grpo.loss_normalizer(mask, loss, LIMIT)
        return value + beta * grpo.aggregate(grpo.kl(x, ref, mask, "k3"), mask, loss, total)

    def theirs(x):
        return trl_loss(trl, x, old, ref, advantages, mask, weights, loss, low, high, beta)

    (value, gradient), expected = loss_and_gradient(ours, logprobs), loss_and_gradient(theirs, logprobs)
    torch.testing.assert_close(value, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, expected[1], atol=1e-6, rtol=1e-6)
    assert gradient.abs().max() > 1e-3 and not gradient[~mask].any()


@pytest.mark.parametrize("scale, theirs", [("none", "none"), ("std", "group")])
def test_advantages_equal_trl(trl, scale, theirs):
    trl.scale_rewards, trl.beta, trl.use_vllm = theirs, 0.0, False
    trl._generate = lambda prompts: ([[0]] * N, [[0, 1]] * N, None, ["a"] * N, None, {}, None, None)
    rewards = torch.rand(N, generator=torch.Generator().manual_seed(1)) - 0.3
    rewards[GROUP:] = 0.25  # a group without variance
    trl._calculate_rewards = lambda *_: rewards[:, None]
    expected = trl._generate_and_score_completions([{"prompt": "a"}] * N)["advantages"]
    ours = grpo.advantages(rewards[:, None], GROUP, scale)
    torch.testing.assert_close(ours[:, 0], expected, atol=1e-6, rtol=1e-6)
    assert ours[:GROUP].abs().max() > 0.1 and (ours[GROUP:] == 0).all()


@pytest.mark.parametrize("best_of", [1, 3])
@pytest.mark.parametrize("scale", SCALES)
def test_groups_without_variance_give_exactly_zero(scale, best_of):
    rewards = torch.tensor([0.1] * 7 + [0.7] * 7 + [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])[:, None]
    assert (rewards[7:14] - rewards[7:14].mean()).any()  # rounding alone would not give zero
    result = grpo.advantages(rewards, 7, scale, best_of)
    assert not result[:14].any() and result[14:].abs().max() > 1e-6
    assert grpo.advantages(torch.full((7, 1), math.nan), 7, scale, best_of).isnan().all()  # is not hidden
    cancel_out = torch.tensor([[0.1, -0.1], [-0.1, 0.1]])  # pieces of equal rewards, whose deviation is 0
    assert grpo.advantages(cancel_out, 2, scale).abs().max() < 1


def test_with_pieces_the_scale_is_the_root_of_their_summed_variances():
    found = grpo.advantages(torch.tensor([[0.0, 0.0], [0.3, 0.4]]), 2, "std")
    torch.testing.assert_close(found[1], torch.tensor([0.15, 0.2]) / (math.sqrt(0.045 + 0.08) + 1e-4))


def test_what_is_rare_is_weighed_by_the_gradients_that_are_documented():
    """The mean over all groups of five, of a policy with three answers whose values may be negative, is exactly the
    gradient: of E[best of k], and for "mean" of ∫ log P(best of k > x) dx / k to order G - 1 in 1 - P. As
    log(1 - q^k) = -q^k - q^2k / 2 - ..., that is the sum of E[best of j] / j over j = k, 2k, ..."""
    logits = torch.tensor([0.3, -1.0, -0.2], dtype=torch.float64, requires_grad=True)
    logp, values, G = logits.log_softmax(0), torch.tensor([-0.3, 1.0, 0.2], dtype=torch.float64), 5

    def best_of(k):
        return sum(logp[list(some)].sum().exp() * values[list(some)].max() for some in product(range(3), repeat=k))

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def estimated(**how):
        groups = torch.tensor([*product(range(3), repeat=G)])  # (3^5, G)
        paid = grpo.advantages(values[groups.flatten()][:, None], G, **how).view(-1, G)
        return gradient((logp[groups].sum(1).exp().detach() * (paid * logp[groups]).mean(1)).sum())

    for k in range(1, G):
        torch.testing.assert_close(estimated(best_of=k), (1 / k - 1 / G) * gradient(best_of(k)))
        expected = gradient(sum(best_of(j) / j for j in range(k, G, k)))
        torch.testing.assert_close(estimated(scale="mean", best_of=k), expected)


def in_every_order(group, weights):
    """The definition: the weighted differences up to an answer, component by component, as the mean over all orders
    from the lowest reward to the highest."""
    G, rewards = len(group), group.sum(1)
    orders = [order for order in permutations(range(G)) if (rewards[[*order]].diff() > -1e-6).all()]
    result = torch.zeros_like(group)
    for order in orders:
        climbed = torch.zeros_like(group[0])
        for weight, lower, upper in zip(weights, order, order[1:]):
            climbed = climbed + weight * (group[upper] - group[lower])
            result[upper] += climbed / len(orders)
    return result - result.mean(0)


@pytest.mark.parametrize("how", [dict(scale="mean"), dict(best_of=2), dict(best_of=4), dict(scale="mean", best_of=2)])
def test_components_are_weighed_in_the_order_of_whole_rewards(how):
    """Random groups with ties, also between answers that differ in their components, and with negative values."""
    random, G = torch.Generator().manual_seed(0), 5
    for K in 1, 2, 3:
        groups = torch.randint(-1, 3, (10, G, K), generator=random, dtype=torch.float64) / 4
        found = grpo.advantages(groups.flatten(0, 1), G, **how).unflatten(0, (-1, G))
        weights = grpo.weights_by_rank(G, how.get("scale", "none"), how.get("best_of", 1))
        for group, paid in zip(groups, found):
            torch.testing.assert_close(paid, in_every_order(group, weights), atol=1e-14, rtol=0)
        whole = grpo.advantages(groups.sum(2).flatten()[:, None], G, **how).view(-1, G)
        torch.testing.assert_close(found.sum(2), whole, atol=1e-14, rtol=0)
        plain = grpo.advantages_by_rank(groups, [1.0] * (G - 1))
        torch.testing.assert_close(plain, groups - groups.mean(1, keepdim=True), atol=1e-14, rtol=0)
        shuffled_rows = torch.randperm(G, generator=random)
        again = grpo.advantages(groups[:, shuffled_rows].flatten(0, 1), G, **how).unflatten(0, (-1, G))
        torch.testing.assert_close(again, found[:, shuffled_rows], atol=1e-14, rtol=0)


@pytest.mark.parametrize("how", [dict(BEST_OF=2), dict(SCALE_REWARDS="mean"), dict(SCALE_REWARDS="mean", BEST_OF=2)])
def test_a_right_answer_that_is_cut_off_is_paid_less(how, toy_settings):
    """Two right answers of eight, a right one without its end, and five that earn nothing."""
    right, asked = "8 + 10 = 18\n#### 18", toy.Question("gsm8k", "", "18")
    texts = [right, right, f"{right}\n", *["I do not know."] * 5]  # cut off after the number, not within it
    answers = []
    for n, text in enumerate(texts):
        grade = gsm8k.grade(asked, text, hit_limit=n == 2)
        answers.append(Answer(ASKED, text, [*range(1, len(text) + 1)], n == 2, grade))
    assert [answer.grade.reward for answer in answers] == [1, 1, 0.3, 0, 0, 0, 0, 0]
    toy_settings(**how)
    longest = len(right) + 1
    ended, _, cut_off, *_ = toy.advantages(answers, longest, "piece")
    assert (cut_off < ended - 0.05)[: len(right)].all()  # at each of its words
    whole = toy.advantages(answers, longest, "answer")
    assert (whole[2] < whole[0] - 0.05).all()
    ends = [answer.char_ends for answer in answers]
    pieces, _ = grpo.credit([answer.grade.pieces for answer in answers], ends, longest)
    summed = grpo.advantages(pieces, 8, train.SCALE_REWARDS, train.BEST_OF).sum(1)
    torch.testing.assert_close(summed, whole[:, 0], atol=1e-6, rtol=0)


def test_best_of_is_divided_by_the_deviation_of_the_rewards_themselves():
    values = torch.tensor([0.0, 0, 0, 1, 0, 1, 1, 0])[:, None]
    found = grpo.advantages(values, 4, "std", 2) / grpo.advantages(values, 4, "none", 2)
    expected = 1 / (values.view(2, 4).std(1) + 1e-4)
    torch.testing.assert_close(found.view(2, 4), expected[:, None].expand(2, 4))


@pytest.mark.parametrize("best_of", [1, 2, 5])
@pytest.mark.parametrize("scale", SCALES)
def test_a_better_answer_is_never_paid_less(scale, best_of):
    """Whatever the sign of the values, and it does not matter what they all have in common. The k lowest are alike."""
    values = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).sub(0.5)
    paid = grpo.advantages(values, 8, scale, best_of)
    torch.testing.assert_close(grpo.advantages(values + 3, 8, scale, best_of), paid, atol=1e-4, rtol=1e-4)
    steps = paid.view(-1, 8).gather(1, values.view(-1, 8).argsort(1)).diff(dim=1)
    assert (steps[:, best_of - 1 :] > 0).all() and not steps[:, : best_of - 1].any()


def test_shuffled_rewards_are_those_of_the_group_in_any_order():
    answers, orders = [Answer(toy.Question("short", f"{b}?", 0), "", [], False) for b in range(4) for _ in range(3)], []
    for seed in range(600):
        found = shuffled(answers, 3, f"{seed}/")
        assert found == shuffled(answers[:6], 3, f"{seed}/") + [6 + i for i in shuffled(answers[6:], 3, f"{seed}/")]
        orders += [tuple(i - first for i in found[first : first + 3]) for first in range(0, 12, 3)]
    counts = Counter(orders)
    assert counts.keys() == {*permutations(range(3))}  # also that in which each keeps its own
    assert all(330 < count < 470 for count in counts.values())


def test_a_shuffled_value_judges_the_tokens_that_the_answer_has_for_it(toy_settings):
    pieces = [[("whole", 0.5), ("word", 0.2, (0, 3))], [("whole", 0.1), ("word", 0.8, (3, 5))], [("whole", 0.0)]]
    answers = [Answer(ASKED, "", [3, 5], False, Grade(some, {})) for some in pieces]
    toy_settings(CONTROL="shuffle")
    found = [toy.advantages(answers, 2, "piece", step) for step in range(40)]
    for paid in found:
        values = [(0.5, 0.2), (0.1, 0.8), (0.0, 0.0)]
        expected = []
        for order in permutations(values):
            words = [word - 1 / 3 for _, word in order]
            judged = [[words[0], 0], [0, words[1]], [words[2], words[2]]]
            expected.append(torch.tensor([[whole - 0.2 + w for w in ws] for (whole, _), ws in zip(order, judged)]))
        assert any(torch.allclose(paid, one, atol=1e-6) for one in expected)
    assert len({tuple(paid.flatten().tolist()) for paid in found}) == 6
    assert sum(found).abs().max() / 40 < 0.2  # no information on average
    toy_settings(CONTROL="zero")
    assert not toy.advantages(answers, 2, "piece").any()


def test_k_falls_to_one_during_the_run(toy_settings):
    toy_settings(STEPS=10, BEST_OF=4, BEST_OF_SCHEDULE="linear")
    values = torch.rand(8, 1, generator=torch.Generator().manual_seed(0))
    answers = [Answer(ASKED, "", [1], False, Grade([("whole", value)], {})) for value in values.flatten().tolist()]
    for step, k in enumerate([4, 4, 4, 3, 3, 2, 2, 2, 1, 1]):
        found = toy.advantages(answers, 1, "piece", step)
        torch.testing.assert_close(found, grpo.advantages(values, 8, best_of=k))


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_objective_is_the_weighted_loss_and_the_kl(loss, toy_settings, monkeypatch):
    """The KL of each kind of question has its own weight, 1 where the task names none."""
    logprobs, old, ref, advantages, mask, weights = made_up()
    toy_settings(LOSS=loss, CLIP_RANGE=0.2, CLIP_RANGE_HIGH=0.3, KL_COEF=0.3, KL_ESTIMATOR="k3")
    total, paid = grpo.loss_normalizer(mask, loss, LIMIT), advantages.expand(N, T)
    rows = {kind: slice(i, None, 2) for i, kind in enumerate(toy.LIMITS)}
    monkeypatch.setattr(train.task, "KL_WEIGHTS", {[*rows][1]: 0.25}, raising=False)
    kl_weights = torch.tensor([1, 0.25], dtype=torch.float64).repeat(N // 2)  # of each row
    parts = {}
    for kind, some in rows.items():
        answers = [Answer(toy.Question(kind, "?", 0), "", [], False)] * len(mask[some])
        parts[kind] = part = Rollout(None, None, mask[some], mask[some], (old - weights.log())[some], None, answers)
        part.advantages = paid[some]
        part.old_logprobs, part.ref_logprobs = old[some], ref[some]

    def expected(x):
        value, _ = grpo.policy_loss(x, old, advantages, mask, **settings(loss, mask), importance=weights)
        return value + 0.3 * grpo.aggregate(kl_weights[:, None] * grpo.kl(x, ref, mask, "k3"), mask, loss, total)

    def of_kind(kind, x):
        return train.loss_and_sums(x[rows[kind]], torch.zeros_like(x[rows[kind]]), parts[kind], total)

    ours = loss_and_gradient(lambda x: sum(of_kind(kind, x)[0] for kind in rows), logprobs)
    torch.testing.assert_close(ours, loss_and_gradient(expected, logprobs))
    guarded = grpo.kl(logprobs, ref, mask, "k2")  # whatever the estimator and weights
    sums = {kind: of_kind(kind, logprobs)[1] for kind in rows}
    torch.testing.assert_close(sum(of["kl"] for of in sums.values()), guarded.sum())
    for kind, some in rows.items():
        torch.testing.assert_close(sums[kind][f"{kind}/kl"], guarded[some].sum())
        assert sums[kind][f"{kind}/tokens"] == mask[some].sum()


def test_credit_of_an_example_by_hand(toy_settings):
    """The texts "ab  cde f" and "ab" as ab|␣␣c|de|␣f and a|b: a token belongs to the span of its last character."""
    pieces = [[("whole", 0.5), ("first", 0.2, (0, 3)), ("second", 0.4, (3, 7)), ("ends", 0.1, (0, 3), (7, 9))]]
    pieces += [[("whole", 0.1), ("first", 0.6, (0, 2))]]
    answers = [Answer(ASKED, "", ends, False, Grade(some, {})) for some, ends in zip(pieces, ([2, 5, 7, 9], [1, 2]))]
    toy_settings()
    torch.testing.assert_close(toy.advantages(answers, 6, "answer"), torch.tensor([[0.25] * 6, [-0.25] * 6]))
    # by piece, against the means 0.3, 0.4, 0.2 and 0.05: +0.2, -0.2, +0.2 and +0.05 for the first answer; a piece that
    # an answer lacks is 0 there and judges the whole
    expected = [[0.05, 0.4, 0.4, 0.25, 0.2, 0.2], [-0.25, -0.25, *[-0.45] * 4]]
    torch.testing.assert_close(toy.advantages(answers, 6, "piece"), torch.tensor(expected))


WAYS = [*product(grpo.LOSSES, ["piece", "answer"], ["none", "std", "mean"], [1, 2])]


@pytest.mark.parametrize("loss, credit, scale, best_of", WAYS)
def test_the_better_answer_becomes_likelier(loss, credit, scale, best_of, toy_settings):
    """The better answer has the right letter at its end, worth 0.5, and the worse one more for its form,
    four tokens that are the same in both: by the sum over its tokens' advantages the better one would lose."""
    toy_settings(LOSS=loss, CREDIT=credit, GROUP_SIZE=3, KL_COEF=0.0, EPOCHS=2, SCALE_REWARDS=scale, BEST_OF=best_of)
    policy, texts = toy.model(), ("wxyzA", "wxyzB", "wxyzB")
    tokens = torch.tensor([policy.tokenizer.encode(text) for text in texts])
    rollout = Rollout(torch.tensor([[7, 8]]), torch.tensor([2]), tokens, tokens >= 0, None, torch.tensor([True] * 3))
    with torch.no_grad():
        before = rollout.rollout_logprobs = train.forward(policy, rollout, train.TEMPERATURE)[0]
    pieces = [[("form", 0.0, (0, 4)), ("letter", 0.5, (4, 5))], *[[("form", 0.2, (0, 4)), ("letter", 0.0, (4, 5))]] * 2]
    rollout.answers = [Answer(ASKED, text, [1, 2, 3, 4, 5], True, Grade(p, {})) for text, p in zip(texts, pieces)]
    train.add_advantages(rollout)
    train.update(policy, None, [torch.optim.SGD(policy.parameters(), lr=0.01)], [rollout], 10**6)
    better, worse, _ = (train.forward(policy, rollout, train.TEMPERATURE)[0] - before).sum(1).tolist()
    assert better > 1e-4 and worse < -1e-4


@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e30, -90.0, 90.0, 1e30])
def test_no_log_ratio_overflows(loss, sign, log_ratio):
    old, mask = torch.full((2, 3), -1.0 - log_ratio), torch.ones(2, 3)

    def value(logprobs):
        policy = grpo.policy_loss(logprobs, old, sign * torch.ones(2, 1), mask, **settings(loss, mask))[0]
        return policy + sum(grpo.kl(logprobs, old.clamp(-1e4, 1e4), mask, k).sum() for k in grpo.KL_ESTIMATORS)

    assert all(x.isfinite().all() for x in loss_and_gradient(value, torch.full((2, 3), -1.0)))


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_what_the_mask_hides_never_counts(loss):
    logprobs, old, ref, advantages, mask, weights = made_up()

    def run(x, o, r, w):
        def f(x):
            value, _ = grpo.policy_loss(x, o, advantages, mask, **settings(loss, mask), importance=w)
            return value + sum(grpo.aggregate(grpo.kl(x, r, mask, k), mask, loss, 7) for k in grpo.KL_ESTIMATORS)

        return loss_and_gradient(f, x)

    clean = run(logprobs, old, ref, weights)
    dirty = run(*(torch.where(mask, t, math.nan) for t in (logprobs, old, ref, weights)))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and not dirty[1][~mask].any()
    logprobs[0, 0] = math.nan
    assert run(logprobs, old, ref, weights)[0].isnan()  # a NaN that counts is not hidden


def test_a_loss_scale_or_estimator_that_does_not_exist_is_refused():
    logprobs, old, ref, advantages, mask, _ = made_up()
    with pytest.raises(ValueError, match="'ppo' is not a policy loss; there are grpo, dapo, dr_grpo, cispo"):
        grpo.policy_loss(logprobs, old, advantages, mask, **settings("dapo", mask) | {"loss": "ppo"})
    with pytest.raises(ValueError, match="'var' is no way to scale rewards; there are none, std, mean"):
        grpo.advantages(torch.zeros(4, 1), 4, scale="var")
    with pytest.raises(ValueError, match="'k4' is not a KL estimator; there are k1, k2, k3"):
        grpo.kl(logprobs, ref, mask, "k4")


def test_stats_and_importance_weights_by_hand():
    ratio, mask = torch.tensor([[0.5, 1.0, 2.0, 9.0]]).repeat(2, 1), torch.tensor([[1, 1, 1, 0]]).repeat(2, 1)
    args = ratio.log(), torch.zeros(2, 4), torch.tensor([[1.0], [-1.0]]), mask
    expected = dict(ratio_gap=3, clip_low=1, clip_high=1)
    for loss, changed in {"grpo": {}, "cispo": dict(clip_low=0, clip_high=2)}.items():
        stats = grpo.policy_loss(*args, **settings(loss, mask))[1]
        assert {k: v.item() for k, v in stats.items()} == pytest.approx(expected | changed)
    weights = grpo.importance_weights(torch.zeros(4, requires_grad=True), torch.tensor([0, -0.5, 0.5, -1e4]))
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(0.5), math.exp(-0.5), grpo.MAX_IMPORTANCE]))
    assert not weights.requires_grad


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_a_step_does_not_depend_on_its_microbatches(loss, toy_settings, monkeypatch):
    """Two epochs, so the logprobs of the first one's weights and of the reference are cut, too."""
    start, results, rows, forward = toy.model(), [], [], train.forward
    toy_settings(LOSS=loss, EPOCHS=2, KL_COEF=0.1)
    reference, rollouts = copy.deepcopy(start), toy.rollouts(start, toy.questions(8))
    whole = max(len(rollout.completions) for rollout in rollouts)
    monkeypatch.setattr(
        train, "forward", lambda model, part, t: rows.append(len(part.completions)) or forward(model, part, t)
    )
    for most, largest in (1, {train.GROUP_SIZE}), (70, range(train.GROUP_SIZE + 1, whole)), (10**6, {whole}):
        model = copy.deepcopy(start)
        rows.clear()
        metrics = train.update(model, reference, [torch.optim.SGD(model.parameters(), lr=0.5)], rollouts, most)
        results.append((metrics, list(model.parameters())))
        assert max(rows) in largest
    (expected, weights), *others = results
    assert expected["grad_norm"] > 1e-3 and expected["kl"] < 1e-7 and expected["ratio_gap"] > 1e-4
    if loss in ("dapo", "grpo", "dr_grpo"):  # ratios are 1 and the KL 0, so it is minus the mean of the advantages
        masks = [rollout.completion_mask for rollout in rollouts]
        rows = torch.cat([(rollout.advantages * mask).sum(1) for rollout, mask in zip(rollouts, masks)])
        lengths, longest = torch.cat([mask.sum(1) for mask in masks]), max(toy.LIMITS.values())
        means = {"dapo": rows.sum() / lengths.sum(), "grpo": (rows / lengths).mean(), "dr_grpo": rows.mean() / longest}
        assert expected["loss"] == pytest.approx(-means[loss].item(), abs=1e-5)
    for metrics, parameters in others:
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6)
        torch.testing.assert_close(parameters, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_groups_without_signal_leave_the_update_and_nothing_else(loss, toy_settings, monkeypatch):
    """Without a KL they have no gradient, but their tokens count in the loss's normalizer and in all metrics."""
    start, results, rows_with_gradient, forward = toy.model(), [], [], train.forward
    toy_settings(LOSS=loss, EPOCHS=2, KL_COEF=0.0)
    rollouts = toy.rollouts(start, toy.questions(8))
    for rollout in rollouts:
        rollout.advantages.view(len(rollout.prompts), -1)[::2] = 0  # every other group

    def watched(model, part, temperature):
        rows_with_gradient.append(torch.is_grad_enabled() * len(part.completions))
        return forward(model, part, temperature)

    monkeypatch.setattr(train, "forward", watched)
    for all_have in True, False:
        monkeypatch.setattr(train, "microbatches", lambda *args, has=all_have: microbatches(*args[:2], has))
        model = copy.deepcopy(start)
        rows_with_gradient.clear()
        metrics = train.update(model, None, [torch.optim.SGD(model.parameters(), lr=0.5)], rollouts, 10**6)
        results.append((metrics, list(model.parameters()), sum(rows_with_gradient)))
    (expected, weights, whole), (metrics, parameters, rest) = results
    paid = sum((len(rollout.prompts) // 2) * train.GROUP_SIZE for rollout in rollouts)
    assert whole == 2 * sum(len(rollout.completions) for rollout in rollouts) and rest == 2 * paid < whole
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6) and metrics["ratio_gap"] > 1e-4
    torch.testing.assert_close(parameters, weights, atol=1e-5, rtol=0)


def test_a_step_without_signal_makes_no_update_and_is_sound(toy_settings):
    toy_settings(KL_COEF=0.0)
    model, [rollout] = toy.model(), toy.rollouts(toy.model(), [q for q in toy.questions(8) if q.kind == "long"])
    optimizers = train.make_optimizers(model)
    assert train.update(model, None, optimizers, [rollout], 10**6)["grad_norm"] > 0
    before = copy.deepcopy(list(model.parameters()))  # and the optimizer has momentum
    rollout.advantages = 0 * rollout.advantages
    metrics = train.update(model, None, optimizers, [rollout], 10**6)
    assert all(map(torch.equal, model.parameters(), before))
    assert (metrics["grad_norm"], metrics["skipped"], metrics["broken"]) == (0, 0, False) and metrics["entropy"] > 0


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_equal_torch_distributions(temperature, dtype):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11, generator=g)).to(dtype)
    logits[..., 4:9] = -math.inf  # no probability
    tokens = torch.randint(4, (3, 5), generator=g)
    logprobs, entropy = grpo.logprobs_and_entropy(logits, tokens, lambda x: x, 11, temperature, 2**28)
    exact = Categorical(logits=logits.double() / temperature)
    torch.testing.assert_close(logprobs, exact.log_prob(tokens).float())  # fp32: bf16 is widened before the softmax
    torch.testing.assert_close(entropy, torch.special.entr(exact.probs).sum(-1).float())


def test_gradients_of_logprobs_made_a_few_rows_at_a_time():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, 2**17, generator=g).requires_grad_()  # more than fit: of the 5 rows 4 go first
    tokens = torch.randint(2**17, (5, 8), generator=g)
    logprobs, entropy = grpo.logprobs_and_entropy(logits, tokens, lambda x: x, 2**17, 0.7, 2**28)
    plain = (logits / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    weights = torch.randn(5, 8, generator=g)
    ours, expected = (torch.autograd.grad((x * weights).sum(), logits)[0] for x in (logprobs, plain))
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
    assert not entropy.requires_grad  # a metric: nothing pays for entropy


def test_schedules_by_hand():
    expected = dict(constant=[1, 1, 1, 1], linear=[1, 0.75, 0.5, 0.25], cosine=[1, 0.853553, 0.5, 0.146447])
    for kind in grpo.SCHEDULES:
        rates = [grpo.schedule(step, 6, 2, kind) for step in range(6)]
        assert rates == pytest.approx([0.5, 1, *expected[kind]], abs=1e-6)
