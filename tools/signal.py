"""Signal: how much of a step's gradient is common to all questions, and how much is chance?

python -m tools.signal                                  the default step, before hours are spent on it
python -m tools.signal TASK=mine.py QUESTIONS=128       settings as train.py takes them, and QUESTIONS
python -m tools.signal MODEL=out/step-000040            with the settings of the run that made the model

The gradient g of n questions is the true one, G, plus noise: |g|² is |G|² + noise / n on average. The gradients of
different questions share no noise, so the mean of their products is |G|² without bias. The noise scale is the number of
questions at which half of |g|² is signal (McCandlish et al., 2018, An Empirical Model of Large-Batch Training). Noise
comes from which questions are drawn, and from which answers to them; more answers to each reduce only the second
("Critical Batch Size for LLM Policy Optimization", HiLD at ICML 2026). docs/tools.md explains the tables.
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from nanorook import settings
from nanorook.settings import heading, setting

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import train
from nanorook import hardware, lora
from nanorook.statistics import interval
from nanorook.tables import table
from tools.doctor import graded_rollouts, model_and_questions

heading("Signal")
QUESTIONS = setting("QUESTIONS", 64, "number of questions, with the mix of kinds that a step of this size has", low=3)

SKETCH = 65537  # size of a gradient's sketch; odd, so that the entries of a matrix's column are not added up


# ---- Estimates from the gradients of single questions --------------------------------------------------------


def jackknife(rows, estimate):
    """An estimate, made of three means (see signal and between), and the half-width of its 95 % interval, which comes
    from leaving out each question in turn, so one heavy answer widens it and does not pass for signal.
    rows (n, d + 1): for each question the mean gradient of its groups, or a sketch of it; last, their mean square."""
    n = len(rows)
    if n < 3:  # two are needed for a product, and one is left out
        return 0.0, torch.inf
    rows = rows.double()
    vectors, squares = rows[:, :-1], rows[:, -1]
    products = (vectors * (vectors.sum(0) - vectors)).sum(1)  # (n,) of each with all others
    own = vectors.square().sum(1)  # (n,)
    terms = torch.stack([products, own, squares])  # (3, n)
    # In the sum of all products, a question's own occur twice: with it first and with it second
    left_out = terms * torch.tensor([[2], [1], [1]])
    left_out = pad(left_out, (1, 0))  # (3, n + 1): nothing, then each question
    count = torch.tensor([n] + [n - 1] * n)
    means = (terms.sum(1, keepdim=True) - left_out) / count  # (3, n + 1)
    means[0] /= count - 1  # each product is a sum over the other questions
    values = estimate(*means).nan_to_num()
    return interval((n * values[0] - (n - 1) * values[1:]).tolist())


def signal(rows):
    """The share of |g|² of one question that is signal: what is `common` to the gradients of different questions."""
    return jackknife(rows, lambda common, own, square: common / square)


def between(rows):
    """The share of the noise that lies between questions, where rows are of the two halves of each group: they share a
    question but no answers, so their product, 2 |their mean|² - their mean square, has the question's noise alone."""
    return jackknife(rows, lambda common, own, square: (2 * own - square - common) / (square - common))


def noise_scale(share):
    """The number of questions at which half of |g|² is signal, if for one question this `share` of it is."""
    return max(0.0, 1 / share - 1) if share > 0 else torch.inf


# ---- The gradients -------------------------------------------------------------------------------------------


def projection(model):
    """A function that reduces a gradient to SKETCH numbers and its square. Products of sketches are right on average,
    with an error below their variation from question to question."""
    count = hardware.count_trained(model)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    signs = signs.to(model.wte.weight.device)

    def project(gradient):
        flat = torch.cat([part.flatten() for part in gradient]).float()
        sketch = pad(flat * signs, (0, -count % SKETCH)).view(-1, SKETCH).sum(0)
        square = flat.square().sum()
        return torch.cat([sketch, square[None]]).cpu()

    return project


def gradients(model, rollouts):
    """Rows for jackknife(): each question's gradient; and the mean of the gradients of the halves of its group, which
    are rewarded as groups of their own, or None where half a group is too small for that. The KL to the start model has
    no gradient at the start."""
    G = train.GROUP_SIZE
    H = G // 2
    has_halves = H > train.BEST_OF
    project = projection(model)
    groups = [(rollout, b) for rollout in rollouts for b in range(len(rollout.prompts))]
    whole, halves = [], []
    for rollout, b in tqdm(groups, "questions", leave=False, disable=None):
        longest = rollout.completion_mask[b * G : (b + 1) * G].sum(1).max()
        group = rollout.select([b], rollout.prompt_lengths[b], longest)
        whole.append(gradient_row(model, group, project))
        if has_halves:
            first = gradient_row(model, answers_of(group, slice(0, H)), project)
            second = gradient_row(model, answers_of(group, slice(H, 2 * H)), project)
            halves.append((first + second) / 2)
    return torch.stack(whole), torch.stack(halves) if has_halves else None


def answers_of(group, cut):
    """Some of the answers to a question, as a group of their own."""
    return replace(
        group,
        completions=group.completions[cut],
        completion_mask=group.completion_mask[cut],
        rollout_logprobs=group.rollout_logprobs[cut],
        answers=group.answers[cut],
    )


def gradient_row(model, group, project):
    train.add_advantages(group)
    if not group.advantages.any():
        return torch.zeros(SKETCH + 1)
    logprobs, entropy = train.forward(model, group, train.TEMPERATURE)
    group.old_logprobs = logprobs.detach()
    loss, _ = train.loss_and_sums(logprobs, entropy, group, normalizer=1.0)
    return project(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


# ---- In words ------------------------------------------------------------------------------------------------


def rounded(x):
    return f"{x:.1f}" if x < 10 else f"{float(f'{x:.2g}'):,.0f}"


def scale_in_words(rows):
    """The noise scale."""
    if len(rows) < 3:
        return "too few questions"
    if not rows[:, -1].any():
        return "no gradient at all"
    share, half = signal(rows)
    least, value, most = (rounded(noise_scale(x)) for x in (share + half, share, share - half))
    if share > half:
        return f"{value} ({least} to {most})"
    at_least = f": more than {least}" if share + half > 0 else ""
    return f"no signal seen with these {len(rows)} questions{at_least}"


def noise_in_words(rows, P, T):
    """The share of the noise that lies between questions, the best G at equal cost, and what helps. rows: as
    for between().

    The gradient of a group is (G - k) / k times that of the objective on average (k: BEST_OF, 1 in plain GRPO). Divided
    by that, the gradient of B questions has the noise (σ_b² + σ_w² / (G - k)) / B, exactly for k = 1 if rewards and
    logprobs are independent; for k > 1 it is only a guide. With P tokens in a prompt and T in an answer a step costs
    B (P + G T), so the best G - k is √(σ_w² / σ_b² · (k + P / T))."""
    G, k = train.GROUP_SIZE, train.BEST_OF
    share, half = between(rows)
    shares = [min(1, max(1e-9, x)) for x in (share + half, share, share - half)]
    within = [(1 / x - 1) * (G // 2 - k) for x in shares]  # σ_w² / σ_b²
    high, value, low = (f"{1 / (1 + x / (G - k)):.0%}" for x in within)
    least, best, most = (max(k + 1, round(k + (x * (k + P / T)) ** 0.5)) for x in within)
    if most < G:
        helps = "more questions"
    elif least > G:
        helps = "more answers"
    else:
        helps = "either"
    if share <= half:
        return f"none seen, at most {high}", f"at least {least}", helps
    return f"{value} ({low} to {high})", f"{best} ({least} to {most})", helps


def report(whole, halves, kinds, tokens):
    """Prints two tables. `kinds` and `tokens` (prompt, answer) are given for each question."""
    names = list(dict.fromkeys(kinds))
    names = ["all", *names] if len(names) > 1 else ["all"]
    steps = [["questions", "in a step", "until half is signal", "a step's signal"]]
    noise = [["noise of a step", "between questions", "best group", "what helps"]]
    for name in names:
        at = [i for i, kind in enumerate(kinds) if name in ("all", kind)]
        n = len(at) / len(kinds) * train.BATCH_POSITIONS  # in a step
        share, half = signal(whole[at])
        part = f"{n / (n + noise_scale(share)):.1%}" if share > half else ""
        steps.append([name, f"{n:.3g}", scale_in_words(whole[at]), part])
        if halves is not None and halves[at].any():
            P, T = tokens[at].mean(0).tolist()
            noise.append([name, *noise_in_words(halves[at], P, T)])
    print(table(steps))
    if len(noise) > 1:
        print("\n" + table(noise))


def main():
    settings.finish("python -m tools.signal")
    model, source, questions = model_and_questions(QUESTIONS)
    if train.LORA_RANK:
        lora.add(model, train.LORA_RANK, train.SEED, source)
    print(f"{source}, {train.TASK}: {QUESTIONS} questions × {train.GROUP_SIZE} answers on {model.wte.weight.device} in "
          f"{str(model.dtype)[6:]}, SEED={train.SEED}\n", flush=True)  # fmt: skip
    rollouts = list(graded_rollouts(model, questions))
    kinds, tokens = [], []
    for rollout in rollouts:
        n = len(rollout.prompts)
        kinds += [rollout.kind] * n
        answer_lengths = rollout.completion_mask.sum(1).view(n, -1).float().mean(1)  # (B,)
        tokens.append(torch.stack([rollout.prompt_lengths, answer_lengths], 1))
    whole, halves = gradients(model, rollouts)
    report(whole, halves, kinds, torch.cat(tokens))


if __name__ == "__main__":
    main()
