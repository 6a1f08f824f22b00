"""Chess skill: sample completions of both tasks, grade them, and what the grades are on average.

train.py looks at held-out positions with it before, during and after a run; tools/evaluate.py builds its tables on it.
"""

import math
import random

import torch

import tasks
from rewards import grade
from rollout import generate
from tokenizer import LoadError

CHUNK = 128  # rows that are sampled at once

SKILL = {  # the rows of the table: for each task the parts of a grade that say what a model can do
    "P: ": ("reward", "structure", "legal", "top5", "best", "candidates_legal"),
    "A: ": ("reward", "structure", "next_state", "reward_match", "terminated_match", "truncated_match"),
}
NAMES = {"P: ": "policy", "A: ": "environment"}


def sample_and_grade(model, samples, group_size, limit, temperature, generator, top_k=0, top_p=1.0, **grading):
    """Completions of one task's prompts: the rollout, the texts, their grades, in rows of groups."""
    tokenizer = model.tokenizer
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    limit = min(limit, model.config.n_positions - max(map(len, prompts)))
    if limit < 1:
        raise LoadError(f"the model's {model.config.n_positions} positions leave no room after its longest prompt.")
    out = generate(model, prompts, group_size, limit, temperature, top_k, top_p, tokenizer.eos, generator)
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


def skill(model, samples, temperatures=(0.0, 1.0), limit=144):
    """{"policy legal T=0": (mean, half-width of its 95 % interval), ...} from one completion for each sample."""
    result = {}
    for prefix, names in SKILL.items():
        chosen = [sample for sample in samples if sample.prompt.startswith(prefix)]
        for temperature in temperatures if chosen else ():
            generator = torch.Generator(model.wte.weight.device).manual_seed(0)
            grades = []
            for i in range(0, len(chosen), CHUNK):
                part = chosen[i : i + CHUNK]
                grades += sample_and_grade(model, part, 1, limit, temperature, generator)[2]
            for name in names:
                values = [g.reward if name == "reward" else g.parts.get(name, 0.0) for g in grades]
                result[f"{NAMES[prefix]} {name} T={temperature:g}"] = interval(values)
    return result


def interval(values):
    """The mean and the half-width of its 95 % interval."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, 1.96 * math.sqrt(variance / len(values))


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
    policy = [tasks.policy_sample(p, chess_format) for p in chosen if p.moves]
    return policy + [tasks.environment_sample(p, rng, chess_format) for p in chosen]
