"""What did training do to the policy? Compares models with their start, answer by answer and without sampling.

python -m tools.compare START MODEL [MODEL ...]           several models are seeds of one setting, which are averaged
python -m tools.compare START MODEL --training            on questions about the training data

It takes the questions whose answers the task lists (`answers`, see nanorook/task.py), all that are held out. An answer
is right if it has the highest reward of its question; a question without a wrong answer is left out. pass@k is computed
for the whole policy, other texts included; everything below it for the listed answers, as if there were no others.

Sharpening raises all probabilities of a question to one power α. As in arXiv 2607.16097, α is the one for all questions
with the lowest mean KL(after ‖ start^α), and what it explains is 1 - JSD(after, start^α) / JSD(after, start), in all
and as the median over questions; where a JSD (in nats) is below 0.02, too little changed to be explained.

Settings are those of the first model that belongs to a run; NAME=value takes precedence. Intervals are 95 %, over
questions and, of several models, over seeds.
"""

import argparse
import random
from statistics import median
from typing import NamedTuple

import numpy as np

from nanorook import settings

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import architectures
import train
from nanorook import hardware
from nanorook.settings import fail
from nanorook.statistics import interval, linearised, over_seeds, shared_variance, with_interval
from nanorook.tables import table
from nanorook.task import draw_questions, load_items
from tools import exact

BANDS = 0, 0.002, 0.01, 0.05, 0.2, 1  # of the start's probability of a right answer
UNLIKELY, FOUND = 0.05, 0.25  # a right answer is found if its chance rises from below the first to above the second
CHANGED = 0.02  # the least JSD of which a share can be explained
GAINED = 0.1  # what a wrong answer gains at least, if it is counted
TINY = 1e-300  # for logarithms


class Policy(NamedTuple):
    """Probabilities of the answers to Q questions, R to each, padded with zeros."""

    whole: np.ndarray  # (Q, R)
    right: np.ndarray  # (Q, R) whether an answer is right
    listed: np.ndarray  # (Q, R) False for padding

    @property
    def p(self):
        """(Q, R) as if there were no answers but the listed ones: each row sums to 1."""
        return self.whole / self.whole.sum(1, keepdims=True)

    @property
    def chance(self):
        """(Q,) the chance of a right answer, under p."""
        return (self.p * self.right).sum(1)

    @property
    def whole_chance(self):
        """(Q,) the same, other answers included."""
        return (self.whole * self.right).sum(1)

    def skills(self):
        """{name: (Q,)} of the whole policy: what it can do, and the probability of other answers."""
        rates = {f"pass@{k}": exact.pass_at_k(self.whole_chance, k) for k in exact.TRIES}
        return {"likeliest": is_top(self.right, self).astype(float), **rates, "other": 1 - self.whole.sum(1)}


def padded(rows, dtype=float):
    result = np.zeros((len(rows), max(map(len, rows))), dtype)
    for place, row in enumerate(rows):
        result[place, : len(row)] = row
    return result


def policy(model, questions):
    """The model's Policy for Listed questions."""
    whole = padded(exact.policy(model, train.task.LIMITS, questions, train.TEMPERATURE))
    right = [question.rewards == question.rewards.max() for question in questions]
    return Policy(whole, padded(right, bool), padded([np.ones(len(row), bool) for row in right], bool))


def kl(p, q):
    """(Q,) KL(p ‖ q) in nats."""
    return (p * (np.log(np.maximum(p, TINY)) - np.log(np.maximum(q, TINY)))).sum(1)


def jsd(p, q):
    """(Q,) the Jensen-Shannon divergence in nats."""
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def sharpened(start, alpha):
    """(Q, R) the start's probabilities to the power of alpha."""
    logs = alpha * np.log(np.maximum(start.p, TINY))
    powers = np.where(start.listed, np.exp(logs - logs.max(1, keepdims=True)), 0)
    return powers / powers.sum(1, keepdims=True)


def exponent(start, after):
    """The α with the lowest mean KL(after ‖ start^α). That is convex in α, and its slope is the difference of two
    means of the start's log-probabilities: that under start^α, which rises with α, and that under `after`."""
    logs = np.log(np.maximum(start.p, TINY))
    low, high = 0.0, 100.0
    for _ in range(50):
        alpha = (low + high) / 2
        if ((sharpened(start, alpha) - after.p) * logs).sum() < 0:
            low = alpha
        else:
            high = alpha
    return alpha


def over_models(values):
    """The mean and the half-width of its interval; values: of each question, for each model."""
    values = [list(map(float, row)) for row in values]
    intervals = [interval(row) for row in values]
    if len(values) == 1:
        return intervals[0]
    return over_seeds(intervals, shared_variance([range(len(row)) for row in values], values))[:2]


def percent(values):
    mean, half = over_models(values)
    return with_interval(100 * mean, 100 * half, ".1f")


def is_top(chosen, policy):
    """(Q,) whether the policy's most likely answer is among those chosen."""
    return np.take_along_axis(chosen, policy.whole.argmax(1)[:, None], 1)[:, 0]


def favourite_gain(start, after):
    """(Q,) what the start's most likely answer gained."""
    top = start.p.argmax(1)[:, None]
    return np.take_along_axis(after.p - start.p, top, 1)[:, 0]


def policy_rows(start, models):
    """Figures of a policy by itself."""
    before, after = start.skills(), [m.skills() for m in models]
    return [[name, percent([before[name]]), percent([skills[name] for skills in after])] for name in before]


def change_rows(start, models):
    """What became of the start's policy."""
    alphas = [exponent(start, m) for m in models]
    sharp = [sharpened(start, alpha) for alpha in alphas]
    changed = [jsd(m.p, start.p) for m in models]
    left = [jsd(m.p, s) for m, s in zip(models, sharp)]
    rows = [["α of the nearest sharpened start", with_interval(*interval(alphas), ".2f")]]
    if min(row.mean() for row in changed) >= CHANGED:
        explained, medians = [], []
        for total, rest in zip(changed, left):  # (Q,) each
            explained.append(linearised((total - rest).tolist(), total.tolist()))
            enough = total >= CHANGED
            medians.append(median(1 - rest[enough] / total[enough]))
        rows.append(["explained by sharpening, all", percent(explained)])
        mean, half = interval(medians)
        rows.append(["explained by sharpening, median", with_interval(100 * mean, 100 * half, ".1f")])
    for k in (1, 16):
        rates = [exact.pass_at_k((s * start.right).sum(1), k) for s in sharp]
        rows.append([f"pass@{k} of the sharpened start", percent(rates)])
    wrong = ~is_top(start.right, start)  # (Q,) positions with a wrong favourite
    rows.append(["right answer became likelier", percent([m.chance > start.chance for m in models])])
    if wrong.any():
        amplified = [(favourite_gain(start, m) > 0)[wrong] for m in models]
        rows.append(["wrong favourite became likelier", percent(amplified)])
    gained = [((m.p - start.p) * (start.listed & ~start.right)).max(1) > GAINED for m in models]
    rows.append([f"a wrong answer gained over {GAINED:g}", percent(gained)])
    return rows


def band_rows(start, models):
    """By the start's probability of a right answer: what became of it, and of a wrong favourite."""
    rows = [["right at the start", "questions", "before", "after", "likelier", "found", "wrong favourite likelier"]]
    for low, high in zip(BANDS, BANDS[1:]):
        band = (start.chance >= low) & ((start.chance < high) | (high == 1))
        if not band.any():
            continue
        wrong = band & ~is_top(start.right, start)
        rows.append([
            f"{low:g} to {high:g}", str(band.sum()),
            f"{100 * start.chance[band].mean():.2f}",
            percent([m.chance[band] for m in models]),
            percent([(m.chance > start.chance)[band] for m in models]),
            percent([(m.chance > FOUND)[band] for m in models]) if high <= UNLIKELY else "",
            percent([(favourite_gain(start, m) > 0)[wrong] for m in models]) if wrong.any() else "",
        ])  # fmt: skip
    return rows


def listed_questions(config, training=False):
    """All held-out questions with a wrong answer among the listed ones, or as many about training items."""
    items, held_out = load_items(train.task, train.DATA, config)
    asked = items if training else held_out
    count = min(len(asked), len(held_out) or len(asked))
    questions = draw_questions(train.task, asked, count, random.Random(train.SEED), config) if count else []
    questions = exact.listed(train.task, questions)
    return [question for question in questions if len({*question.rewards}) > 1]


def main():
    p = argparse.ArgumentParser("python -m tools.compare", description=__doc__.split("\n")[0])
    p.formatter_class, p.epilog = argparse.RawDescriptionHelpFormatter, settings.listed()
    p.add_argument("start", help="the model that training started from: a folder or hub id")
    p.add_argument("model", nargs="+", help="trained models, seeds of one setting; and settings, NAME=value")
    p.add_argument("--training", action="store_true", help="questions from the training data, not held-out ones")
    a = p.parse_intermixed_args()
    models, _ = settings.models_and_settings(a.model, "python -m tools.compare")
    if not models:
        p.error("name a trained model after its start.")
    device, _ = hardware.prepare(train.DEVICE, "float32")
    start = architectures.load(a.start).to(device)
    questions = listed_questions(start.config, a.training)
    if not questions:
        fail(f"TASK={train.TASK} lists no answers with unequal rewards; see answers in nanorook/task.py.")
    kinds = np.array([question.kind for question in questions])
    before = policy(start, questions)
    after = [policy(architectures.load(name).to(device), questions) for name in models]
    split = "training" if a.training else "held-out"
    for kind in dict.fromkeys(kinds.tolist()):
        some = kinds == kind
        before_of_kind, *after_of_kind = (Policy(*(x[some] for x in one)) for one in (before, *after))
        seeds = f", {len(models)} seeds" if len(models) > 1 else ""
        print(f"{some.sum()} {split} questions of the kind {kind}{seeds}: {a.start} and {', '.join(models)}\n")
        print(table([["%", "start", "after"], *policy_rows(before_of_kind, after_of_kind)]), end="\n\n")
        print(table([["%, but α", "after"], *change_rows(before_of_kind, after_of_kind)]), end="\n\n")
        print(table(band_rows(before_of_kind, after_of_kind)), end="\n\n")


if __name__ == "__main__":
    main()
