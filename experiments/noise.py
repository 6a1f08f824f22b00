"""How much of a gradient is signal: do the gradients of two batches point the same way?

python -m experiments.noise [--batches 10] [--json FILE]        (settings of train.py as NAME=value after them)

For each part of the model its share of the squared gradient norm (with CREDIT=word) and, for each kind of CREDIT on the
same completions, the agreement: the mean cosine between the gradients of different batches, after each weight is
divided by its own root mean square, as AdamW does. Agreement a means that a batch 1 / a times as large is half signal.
"""

import argparse
import json
import sys

import torch
from tqdm import trange

import data
import train
from tools import replace

KINDS = "answer", "word"
PARTS = {"embeddings": "w", "attention": ".attn.", "feed-forward": ".mlp.", "norms": "ln_"}


def gradient(model, batches):
    """Of one update, by name, as it arrives at the optimizer."""
    arrived = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: arrived.update((n, p.grad) for n, p in model.named_parameters()))
    train.update(model, None, optimizer, batches, 0.0)
    return arrived


def agreement(gradients):
    """Mean cosine of the rows (n, parameters) with each other."""
    scaled = gradients / (gradients.square().mean(0).sqrt() + 1e-12)
    products = scaled @ scaled.T  # (n, n)
    n = len(products)
    return ((products.sum() - products.trace()) / (n - 1) / products.trace()).item()


def main():
    p = argparse.ArgumentParser("python -m experiments.noise", description=__doc__.split("\n")[0])
    p.add_argument("--batches", type=int, default=10)
    p.add_argument("--json", metavar="FILE")
    a, rest = p.parse_known_args()
    sys.argv[1:] = rest
    train.finish()
    train.TRAIN, train.KL_COEF, train.ENTROPY_COEF = "all", 0.0, 0.0
    model = train.build()[0]
    positions = data.split(data.load(train.DATA))[0]
    found = {}  # (credit, name of a weight) -> its gradient in each batch
    for step in trange(a.batches, desc="batches"):
        for train.CREDIT in KINDS:
            batches, _ = train.rollout(model, train.draw_prompts(positions, step, model.config.chess_format), step)
            for name, g in gradient(model, batches).items():
                found.setdefault((train.CREDIT, name), []).append(g.flatten().to(torch.bfloat16))
    rows = []
    print(f"{'':14}{'weights':>10}{'share of |g|²':>15}   agreement by" + "".join(f"{kind:>9}" for kind in KINDS))
    for part, mark in PARTS.items():
        names = [n for n, _ in model.named_parameters() if (mark in n if mark != "w" else n.startswith("w"))]
        row = {"part": part, "weights": sum(model.get_parameter(n).numel() for n in names)}
        for credit in KINDS:
            stacks = {n: torch.stack(found[credit, n]).float() for n, _ in model.named_parameters()}
            mine = torch.cat([stacks[n] for n in names], 1)
            row[f"share {credit}"] = (mine.square().sum() / sum(s.square().sum() for s in stacks.values())).item()
            row[f"agreement {credit}"] = agreement(mine)
        rows.append(row)
        agreements = "".join(f"{row[f'agreement {kind}']:9.4f}" for kind in KINDS)
        print(f"{part:14}{row['weights']:10}{row['share word']:15.1%}{'':15}{agreements}")
    if a.json:
        settings = train.values() | {"batches": a.batches}
        replace(a.json, json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
