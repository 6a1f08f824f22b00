"""Chess skill: what a model's completions are worth on positions it has never been trained on."""

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch

import data
import tasks
from model import GPT, autocast, fastest_dtype
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


def main():
    p = argparse.ArgumentParser("python -m tools.evaluate", description=__doc__)
    p.add_argument("model", nargs="+", help="model folders or hub ids, a column each")
    p.add_argument("--data", default="builtin", help="positions, as data.py reads them; the held-out ones are used")
    p.add_argument("--limit", type=int, help="how many of them; all by default")
    p.add_argument("--temperature", type=float, default=1.0, help="of the sampled rows; the others are greedy")
    p.add_argument("--json", help="also write the figures to this file")
    a = p.parse_args()
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, columns = fastest_dtype(device), {}
    held_out = data.split(data.load(a.data))[1]
    if not held_out:
        sys.exit(f"error: {a.data} has no held-out position; give more positions.")
    for name in a.model:
        model = GPT.load(name).to(device)
        samples = ask(held_out, a.limit or len(held_out), model.config.chess_format)
        with autocast(device, dtype):
            columns[name] = skill(model, samples, (0.0, a.temperature))
    print(table(columns))
    if a.json:
        Path(a.json).write_text(json.dumps(columns, indent=2))


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        sys.exit(f"error: {error}")
