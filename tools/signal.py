"""Signal: how much of a step's gradient is common to all questions, and how much is chance?

python -m tools.signal                                  the default step, before hours are spent on it
python -m tools.signal TASK=mine.py QUESTIONS=128       settings as train.py takes them, and QUESTIONS
python -m tools.signal MODEL=out/step-000040            with the settings of the run that made the model

The gradient g of n questions is the true one, G, plus noise: |g|² is |G|² + noise / n on average. The gradients of
different questions share no noise, so the mean of their products is |G|² without bias. The noise scale is the number of
questions at which half of |g|² is signal (McCandlish et al., 2018, An Empirical Model of Large-Batch Training). Its
interval comes from leaving out each question in turn, so one heavy answer widens it and does not pass for signal.
Nothing is trained or written. docs/signal.md explains how to read the result.
"""

import math
import time
from collections import defaultdict

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from nanorook import settings
from nanorook.settings import heading, setting

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import train
from model import GPT
from nanorook.statistics import interval
from nanorook.tables import table
from nanorook.task import earned, start_model
from rollout import Batch
from tools.doctor import ask, prepare

heading("Signal")
QUESTIONS = setting("QUESTIONS", 64, "number of questions, with the mix of kinds that a step of this size has", low=3)
REFERENCE = setting("REFERENCE", "", "for a trained MODEL: the reference of its KL, which has no gradient at the start")

SKETCH = 65537  # numbers that represent a gradient; odd, so that the entries of one column do not meet
SET = "as set"
TEMPERATURES = 0.7, 1.3  # times that of the settings


def signal(rows):
    """The share of |g|² of one question that is signal, and the half-width of its 95 % interval, by the jackknife.
    rows (n, d + 1): for each question a gradient or its sketch, and last the square of a single gradient."""
    n, (vectors, squares) = len(rows), rows.double().split([rows.shape[1] - 1, 1], 1)
    products, squares = (vectors * (vectors.sum(0) - vectors)).sum(1), squares[:, 0]  # (n,) of each with all others
    if not squares.any():
        return 0.0, 0.0
    whole = products.sum() / (n - 1) / squares.sum()
    without = (products.sum() - 2 * products) / (n - 2) / (squares.sum() - squares)
    return interval((n * whole - (n - 1) * without.nan_to_num()).tolist())


def noise_scale(share):
    """The number of questions at which half is signal, if `share` of one question's is."""
    return max(0.0, 1 / share - 1) if share > 0 else math.inf


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
    """Ways of paying a group: (name, the answers with what is paid, CREDIT, KL_COEF)."""
    yield SET, answers, train.CREDIT, train.KL_COEF
    other = "answer" if train.CREDIT == "piece" else "piece"
    yield f"CREDIT={other}", answers, other, train.KL_COEF
    if REFERENCE and train.KL_COEF:
        yield "KL_COEF=0", answers, train.CREDIT, 0.0
    for name in dict.fromkeys(name for answer in answers for name in earned(answer.grade.pieces)):
        pieces = [[piece for piece in a.grade.pieces if piece[0].split(" ")[0] == name] for a in answers]
        alone = [a._replace(grade=a.grade._replace(pieces=part)) for a, part in zip(answers, pieces)]
        yield f"{name} alone", alone, train.CREDIT, 0.0


def gradients(model, reference, rollouts, sizes, temperature, ways=ways):
    """{way of paying: rows for signal()}: each question's gradient, or, with groups cut to other `sizes`, the mean of
    its groups' gradients and of their squares. The first size is that of the whole group, which is paid in all ways."""
    groups = [(batch, answers, i) for batch, answers in rollouts for i in range(len(batch.prompts))]
    found = defaultdict(lambda: torch.zeros(len(groups), SKETCH + 1))
    project, parameters, G = projection(model), list(model.parameters()), sizes[0]
    cuts = [(size, start) for size in sizes for start in range(0, G, size)]
    for place, (batch, answers, i) in enumerate(tqdm(groups, "questions", leave=False, disable=None)):
        rows = slice(i * G, i * G + G)
        whole = batch.select([i], batch.prompt_lengths[i], batch.completion_mask[rows].sum(1).max())
        for size, start in cuts:
            part = Batch(*whole[:2], *(x if x is None else x[start : start + size] for x in whole[2:]))
            logprobs, _ = train.forward(model, part, temperature)
            with torch.no_grad():
                ref = train.forward(reference, part, temperature)[0] if reference else None
            part = part._replace(old_logprobs=logprobs.detach(), ref_logprobs=ref)
            some = answers[rows][start : start + size]
            smaller = [(f"GROUP_SIZE={size}", some, train.CREDIT, train.KL_COEF)]
            for name, paid, credit, kl_coef in ways(some) if size == G else smaller:
                part = train.add_advantages(part, paid, size, credit)
                if part.advantages.any() or (reference and kl_coef):
                    loss, _ = train.loss_and_sums(logprobs, part, 1.0, kl_coef)
                    gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
                    found[name][place] += project(gradient) * size / G
    return {SET: found[SET], **found}


def report(found, kinds, seconds):
    """Prints two tables; `kinds`: the questions' kinds, `seconds`: {kind: seconds of one question}."""
    all_kinds, G = dict.fromkeys(kinds) if len({*kinds}) > 1 else {}, train.GROUP_SIZE
    places = {"all": slice(None)} | {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in all_kinds}
    lines = [["questions", "in a step", "until half is signal", "a step's signal", "seconds until half"]]
    for kind, at in places.items():
        rows = found[SET][at]
        n, (share, half) = len(rows) / len(kinds) * train.BATCH_POSITIONS, signal(rows)
        value = noise_scale(share)
        rest = [f"{n / (n + value):.1%}", number(value * seconds[kind])] if share > half else ["", ""]
        lines.append([kind, f"{n:.3g}", describe(rows), *rest])
    print(table(lines))
    lines = [["at equal answers", "answers until half is signal", "squared gradient"]]
    for kind, at in places.items():
        for name, rows in ((name, rows[at]) for name, rows in found.items()):
            size = int(name.removeprefix("GROUP_SIZE=")) if name.startswith("GROUP_SIZE=") else G
            square, base = rows[:, -1].mean() * G / size, found[SET][at][:, -1].mean()
            if rows[:, -1].any() and (len(places) == 1 or kind != "all" or not name.endswith("alone")):
                lines.append([f"{kind}, {name}", describe(rows, size), f"{square / base:.0%}" if base else ""])
    print(f"\n{table(lines)}")


def main():
    settings.finish("python -m tools.signal")
    model, questions = prepare(QUESTIONS)
    device, dtype = model.wte.weight.device, model.dtype
    reference = GPT.load(REFERENCE).to(device).inference_copy(dtype) if REFERENCE and train.KL_COEF else None
    source = train.MODEL or start_model(train.task)
    print(f"{source}, {train.TASK}: {QUESTIONS} questions × {train.GROUP_SIZE} answers, {device} in {str(dtype)[6:]}, "
          f"SEED={train.SEED}\n", flush=True)  # fmt: skip

    # A step of each kind, timed: with a learning rate of 0 its update changes nothing
    rollouts, kinds, seconds, clock = [], [], {"all": 0.0}, time.time()
    most = train.plan_memory(model, questions)
    for batch, answers in ask(model, questions, train.TEMPERATURE):
        batch = train.add_advantages(batch, answers, train.GROUP_SIZE, train.CREDIT)
        train.update(model, reference, [torch.optim.SGD(model.parameters(), lr=0.0)], [batch], most)
        spent, n, clock = time.time() - clock, len(batch.prompts), time.time()
        seconds |= {answers[0].question.kind: spent / n, "all": seconds["all"] + spent / QUESTIONS}
        rollouts.append((batch, answers))
        kinds += [answers[0].question.kind] * n

    G = train.GROUP_SIZE
    sizes = [G, *(G // cut for cut in (2, 4) if G % cut == 0 and G // cut > train.BEST_OF)]
    found = gradients(model, reference, rollouts, sizes, train.TEMPERATURE)
    as_set = lambda answers: [*ways(answers)][:1]  # noqa: E731
    for temperature in (factor * train.TEMPERATURE for factor in TEMPERATURES):
        again = gradients(model, reference, list(ask(model, questions, temperature)), [G], temperature, as_set)
        found[f"TEMPERATURE={temperature:g}"] = again[SET]
    report(found, kinds, seconds)


if __name__ == "__main__":
    main()
