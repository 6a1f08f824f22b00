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

from collections import defaultdict
from dataclasses import replace

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from nanorook import settings
from nanorook.settings import heading, setting

if __name__ == "__main__":
    # Before train's first setting. Each graph is differentiated several times, which compiled ones refuse.
    settings.read_run(COMPILE="0")

import train
from nanorook.statistics import interval
from nanorook.tables import table
from nanorook.task import earned, start_folder
from tools.doctor import ask, prepare

heading("Signal")
QUESTIONS = setting("QUESTIONS", 64, "number of questions, with the mix of kinds that a step of this size has", low=3)

SKETCH = 65537  # size of a gradient's sketch; odd, so that the entries of a matrix's column are not added up
SET, HALVES = "as set", "halves"


def jackknife(rows, estimate):
    """An estimate, made of three means (see signal and between), and the half-width of its 95 % interval, which comes
    from leaving out each question in turn, so one heavy answer widens it and does not pass for signal.
    rows (n, d + 1): for each question the mean gradient of its groups, or a sketch of it; last, their mean square."""
    n, (vectors, squares) = len(rows), rows.double().split([rows.shape[1] - 1, 1], 1)
    if n < 3:  # two are needed for a product, and one is left out
        return 0.0, torch.inf
    products = (vectors * (vectors.sum(0) - vectors)).sum(1)  # (n,) of each with all others
    terms = torch.stack([products, vectors.square().sum(1), squares[:, 0]])  # (3, n)
    left_out = pad(terms * torch.tensor([[2], [1], [1]]), (1, 0))  # (3, n + 1) nothing, then each question
    count = torch.tensor([n] + [n - 1] * n)
    products, own, squares = (terms.sum(1, keepdim=True) - left_out) / count
    values = estimate(products / (count - 1), own, squares).nan_to_num()
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


def number(x):
    return f"{x:.1f}" if x < 10 else f"{float(f'{x:.2g}'):,.0f}"


def describe(rows, answers=1):
    """The noise scale in words, in questions or in answers, `answers` to a question."""
    share, half = signal(rows)
    least, value, most = (number(answers * noise_scale(x)) for x in (share + half, share, share - half))
    if len(rows) < 3 or not rows[:, -1].any():
        return "too few questions" if len(rows) < 3 else "no gradient at all"
    if share <= half:
        return f"no signal seen with these {len(rows)} questions" + f": more than {least}" * (share + half > 0)
    return f"{value} ({least} to {most})"


def projection(model):
    """A function that reduces a gradient to SKETCH numbers and its square. Products of sketches are right on average,
    with an error below their variation from question to question."""
    count, generator = sum(p.numel() for p in model.parameters()), torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1).to(model.wte.weight.device)

    def project(gradient):
        flat = torch.cat([part.flatten() for part in gradient]).float()
        sketch = pad(flat * signs, (0, -count % SKETCH)).view(-1, SKETCH).sum(0)
        return torch.cat([sketch, flat.square().sum()[None]]).cpu()

    return project


def ways(answers):
    """{way of paying: (the answers with what is paid, CREDIT)} of a whole group."""
    other = "answer" if train.CREDIT == "piece" else "piece"
    found = {SET: (answers, train.CREDIT), f"CREDIT={other}": (answers, other)}
    for name in earned(piece for answer in answers for piece in answer.grade.pieces):
        alone = []
        for answer in answers:
            pieces = [piece for piece in answer.grade.pieces if piece[0].split(" ")[0] == name]
            alone.append(answer._replace(grade=answer.grade._replace(pieces=pieces)))
        found[f"{name} alone"] = alone, train.CREDIT
    return found


def gradients(model, rollouts):
    """{way of paying: rows for jackknife()}: each question's gradient; and as HALVES, where half of a group is large
    enough to be paid as a group of its own, the means of the halves' gradients and of their squares. The KL to the
    start model has no gradient at the start."""
    groups = [(rollout, b) for rollout in rollouts for b in range(len(rollout.prompts))]
    found = defaultdict(lambda: torch.zeros(len(groups), SKETCH + 1))
    project, parameters, G, H = projection(model), [*model.parameters()], train.GROUP_SIZE, train.GROUP_SIZE // 2
    halves = [slice(0, H), slice(H, 2 * H)] if H > train.BEST_OF else []
    for place, (rollout, b) in enumerate(tqdm(groups, "questions", leave=False, disable=None)):
        longest = rollout.completion_mask[b * G : (b + 1) * G].sum(1).max()
        group = rollout.select([b], rollout.prompt_lengths[b], longest)
        for cut in [slice(0, G), *halves]:
            part = rows_of_group(group, cut)
            answers = part.answers
            logprobs, entropy = train.forward(model, part, train.TEMPERATURE)
            part.old_logprobs = logprobs.detach()
            paid = {HALVES: (answers, train.CREDIT)} if cut in halves else ways(answers)
            for name, (some, credit) in paid.items():
                part.answers = some
                train.add_advantages(part, credit)
                if part.advantages.any():
                    loss, _ = train.loss_and_sums(logprobs, entropy, part, normalizer=1.0)
                    gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
                    found[name][place] += project(gradient) / (G // len(answers))
    return {SET: found[SET], **found}


def rows_of_group(group, cut):
    """Some of the answers to a question, as a group of their own."""
    return replace(
        group,
        completions=group.completions[cut],
        completion_mask=group.completion_mask[cut],
        rollout_logprobs=group.rollout_logprobs[cut],
        answers=group.answers[cut],
    )


def split(rows, P, T):
    """In words, the share of the noise that lies between questions, the best G at equal cost, and what helps. rows: as
    for between().

    The gradient of a group is (G - k) / k times that of the objective on average (k: BEST_OF, 1 in plain GRPO). Divided
    by that, the gradient of B questions has the noise (σ_b² + σ_w² / (G - k)) / B, exactly for k = 1 if rewards and
    logprobs are independent; for k > 1 it is only a guide. With P tokens in a prompt and T in an answer a step costs
    B (P + G T), so the best G - k is √(σ_w² / σ_b² · (k + P / T))."""
    G, k, (share, half) = train.GROUP_SIZE, train.BEST_OF, between(rows)
    shares = [min(1, max(1e-9, x)) for x in (share + half, share, share - half)]
    within = [(1 / x - 1) * (G // 2 - k) for x in shares]  # σ_w² / σ_b²
    high, value, low = (f"{1 / (1 + x / (G - k)):.0%}" for x in within)
    least, best, most = (max(k + 1, round(k + (x * (k + P / T)) ** 0.5)) for x in within)
    helps = "more questions" if most < G else "more answers" if least > G else "either"
    if share <= half:
        return f"none seen, at most {high}", f"at least {least}", helps
    return f"{value} ({low} to {high})", f"{best} ({least} to {most})", helps


def report(found, kinds, tokens):
    """Prints three tables. `kinds` and `tokens` (prompt, answer) are given for each question."""
    names, halves = ["all", *dict.fromkeys(kinds)][: None if len({*kinds}) > 1 else 1], found.pop(HALVES, None)
    steps = [["questions", "in a step", "until half is signal", "a step's signal"]]
    noise = [["noise of a step", "between questions", "best group", "what helps"]]
    paid = [["at equal answers", "answers until half is signal"]]
    for kind in names:
        at = [i for i, k in enumerate(kinds) if kind in ("all", k)]
        n, (share, half) = len(at) / len(kinds) * train.BATCH_POSITIONS, signal(found[SET][at])
        part = f"{n / (n + noise_scale(share)):.1%}" if share > half else ""
        steps.append([kind, f"{n:.3g}", describe(found[SET][at]), part])
        if halves is not None and halves[at].any():
            noise.append([kind, *split(halves[at], *tokens[at].mean(0).tolist())])
        for name, rows in found.items():
            if rows[at, -1].any() and (len(names) == 1 or kind != "all" or not name.endswith("alone")):
                paid.append([f"{kind}, {name}", describe(rows[at], train.GROUP_SIZE)])
    print("\n\n".join(table(lines) for lines in (steps, noise, paid) if lines[1:]))


def main():
    settings.finish("python -m tools.signal")
    model, questions = prepare(QUESTIONS)
    source = train.MODEL or start_folder(train.task)
    print(f"{source}, {train.TASK}: {QUESTIONS} questions × {train.GROUP_SIZE} answers on {model.wte.weight.device} in "
          f"{str(model.dtype)[6:]}, SEED={train.SEED}\n", flush=True)  # fmt: skip
    rollouts = list(ask(model, questions))
    kinds, tokens = [], []
    for rollout in rollouts:
        n = len(rollout.prompts)
        kinds += [rollout.kind] * n
        answer_lengths = rollout.completion_mask.sum(1).view(n, -1).float().mean(1)  # (B,)
        tokens.append(torch.stack([rollout.prompt_lengths, answer_lengths], 1))
    report(gradients(model, rollouts), kinds, torch.cat(tokens))


if __name__ == "__main__":
    main()
