"""Chess skill: sample completions of both tasks, grade them, and what the grades are on average.

train.py looks at held-out positions with it before, during and after a run; tools/evaluate.py builds its tables on it.
"""

import json
import math
import random

import chess
import torch

import tasks
from parallel import RANK, WORLD, collect
from rewards import grade
from rollout import generate
from tokenizer import LoadError

CHUNK = 128  # rows that are sampled at once
LIMIT = 144  # tokens of an answer; with GPT-2's tokenizer one takes about 100

SKILL = {  # the rows of the table: for each task the parts of a grade that say what a model can do
    "P: ": ("reward", "structure", "legal", "top5", "best", "candidates_legal"),
    "A: ": ("reward", "structure", "next_state", "reward_match", "terminated_match", "truncated_match"),
}
NAMES = {"P: ": "policy", "A: ": "environment"}


def sample_and_grade(
    model, samples, group_size, limit, temperature, generator=None, top_k=0, top_p=1.0, noise=None, **grading
):
    """Completions of one task's prompts: the rollout, the texts, their grades, in rows of groups."""
    tokenizer = model.tokenizer
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    limit = min(limit, model.config.n_positions - max(map(len, prompts)))
    if limit < 1:
        raise LoadError(f"the model's {model.config.n_positions} positions leave no room after its longest prompt.")
    out = generate(model, prompts, group_size, limit, temperature, top_k, top_p, tokenizer.eos, generator, noise)
    texts = [tokenizer.decode(row) for row in out.tokens.tolist()]
    owners = [sample for sample in samples for _ in range(group_size)]
    grades = [
        grade(sample.prompt, text, sample.labels, truncated, **grading)
        for sample, text, truncated in zip(owners, texts, out.truncated.tolist())
    ]
    return out, texts, grades


def mean_parts(grades):
    """The mean of every part of some grades, over those that have it."""
    values = {}
    for g in grades:
        for name, value in g.parts.items():
            values.setdefault(name, []).append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


def answers(model, samples, temperature, generator=None, limit=LIMIT, progress=iter, noise=None):
    """(texts, grades) of one completion for each of one task's prompts; `progress` may show the chunks go by."""
    texts, grades = [], []
    for i in progress(range(0, len(samples), CHUNK)):
        chance = None if noise is None else noise[i : i + CHUNK]
        chunk = samples[i : i + CHUNK]
        _, said, graded = sample_and_grade(model, chunk, 1, limit, temperature, generator, noise=chance)
        texts += said
        grades += graded
    return texts, grades


def shared_answers(model, samples, temperature, limit):
    """The same, by all processes together: each answers its share, and all get [(sample, text, grade), ...]."""
    mine = slice(len(samples) * RANK // WORLD, len(samples) * (RANK + 1) // WORLD)
    noise = torch.rand(len(samples), limit, generator=torch.Generator().manual_seed(0))[mine]
    texts, grades = answers(model, samples[mine], temperature, None, limit, noise=noise.to(model.wte.weight.device))
    return collect(list(zip(samples[mine], texts, grades)))


def skill(model, samples, temperatures=(0.0, 1.0), limit=LIMIT):
    """{"policy legal T=0": (mean, half-width of its 95 % interval), ...} from one completion for each sample, and the
    completions themselves: {("P: ", 0.0): [(sample, text, grade), ...], ...}."""
    figures, said = {}, {}
    for prefix, names in SKILL.items():
        chosen = [sample for sample in samples if sample.prompt.startswith(prefix)]
        for temperature in temperatures if chosen else ():
            said[prefix, temperature] = shared_answers(model, chosen, temperature, limit)
            parts = [g.parts | {"reward": g.reward} for _, _, g in said[prefix, temperature]]
            for name in names:
                values = [p[name] for p in parts if name in p]
                if values:
                    figures[f"{NAMES[prefix]} {name} T={temperature:g}"] = interval(values)
    return figures, said


def look(model, tests, temperature, limit, file, dtype, step):
    """Held-out skill, greedy and as sampled in training; `file` gets the completions of a few positions, too."""
    figures, said = skill(model.cast(dtype), tests, (0.0, temperature), limit)
    if RANK == 0:
        with open(file, "a") as samples:
            for prefix, count in (("P: ", 16), ("A: ", 8)):
                for sample, text, g in said.get((prefix, temperature), [])[:count]:
                    row = {"step": step, "task": prefix[0], "prompt": sample.prompt, "completion": text}
                    samples.write(json.dumps(row | {"labels": sample.labels, **g._asdict()}) + "\n")
    return figures


def interval(values, counts=None):
    """The mean and the half-width of its 95 % interval.

    With `counts` it is the ratio of two sums, such as illegal moves over moves in some games. Its variance is that of
    the residuals values - ratio · counts (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    counts = [1] * len(values) if counts is None else counts
    ratio = sum(values) / sum(counts)
    variance = sum((v - ratio * c) ** 2 for v, c in zip(values, counts)) / max(1, len(values) - 1)
    return ratio, 1.96 * math.sqrt(variance * len(values)) / sum(counts)


def table(columns):
    """{title: skill} side by side, one row for each name."""
    lines = [f"{'held-out skill':38}" + "".join(f"{title[-17:]:>18}" for title in columns)]
    for name in next(iter(columns.values())):
        cells = ["{:.3f} ± {:.3f}".format(*values[name]) for values in columns.values()]
        lines.append(f"{name:38}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def ask(positions, limit, chess_format):
    """Samples of both tasks from some of the positions, the same ones every time."""
    rng = random.Random(0)
    chosen = rng.sample(positions, min(limit, len(positions)))
    playable = (p for p in chosen if p.moves or any(chess.Board(p.fen).legal_moves))
    policy = [tasks.policy_sample(p, chess_format) for p in playable]
    return policy + [tasks.environment_sample(p, rng, chess_format) for p in chosen]
