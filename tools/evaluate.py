"""The table of chess skill of one or more models, on positions they have never been trained on."""

import argparse
import json
import sys
from pathlib import Path

import torch

import data
from model import GPT, fastest_dtype
from skill import ask, skill, table
from tokenizer import LoadError


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
        model = GPT.load(name).to(device).cast(dtype)
        samples = ask(held_out, a.limit or len(held_out), model.config.chess_format)
        columns[name] = skill(model, samples, (0.0, a.temperature))
    print(table(columns))
    if a.json:
        Path(a.json).write_text(json.dumps(columns, indent=2))


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        sys.exit(f"error: {error}")
