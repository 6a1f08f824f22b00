"""Imitation learns its data's mistakes; can a verifier repair them?

    python -m experiments.repair OUT [--texts 6400] [--steps 100] [NAME=value ...]       half an hour of two cores

RookWorld's data names the worst of the five candidates after `B:` when Black is to move. Here a model is first taught
that by supervised training, then trained by GRPO with the correct verifier, and beside it without a reward (CONTROL=1).
All are asked about the same held-out positions, as White and mirrored as Black. OUT/taught is the model that was
taught; OUT/repair.json has all figures, and what is in it is not run again; OUT/repair.png shows the best move.
"""

import argparse
import math
import random
from pathlib import Path

import chess
import torch
import torch.nn.functional as F

import rewards
import train
from experiments.seeds import plt, read, write
from experiments.variants import run_here
from model import GPT
from nanorook import hardware, monitor, positions
from nanorook.settings import SETTINGS, parse, refuse
from tools.pretrain import environment_text, policy_text

ROWS = 16  # texts in a batch of the supervised training
METRICS = {"best": "best move, %", "top5": "among the five, %", "cp_loss": "loss within the five, pawns"}


def rookworld_text(position, rng, text_format):
    """(prompt, completion) with RookWorld's mistake: for Black the worst of the candidates follows `B:`."""
    prompt, text = policy_text(position, rng, text_format)
    if chess.Board(position.fen).turn == chess.BLACK:
        text = text[: text.rindex(" ") + 1] + min(position.moves, key=lambda move: move[1])[0]
    return prompt, text


def teach(model, items, count, rng, lr=3e-4):
    """Supervised training on `count` texts, a third of them about the environment, which must not be forgotten."""
    text_format, encode = rewards.chess_format(model.config), model.tokenizer.encode
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps := max(1, count // ROWS)):
        chosen = [positions.mirror(p) if rng.random() < 0.5 else p for p in rng.sample(items, ROWS)]
        texts = [environment_text(p, rng, text_format) for p in chosen[: ROWS // 3]]
        texts += [rookworld_text(p, rng, text_format) for p in chosen[ROWS // 3 :]]
        rows = [(encode(prompt), [*encode(text), model.tokenizer.eos]) for prompt, text in texts]
        tokens = torch.zeros(ROWS, max(len(p) + len(c) for p, c in rows), dtype=torch.long)
        targets = torch.full_like(tokens, -100)  # prompts and padding are no targets
        for i, (prompt, completion) in enumerate(rows):
            tokens[i, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            targets[i, len(prompt) : len(prompt) + len(completion)] = torch.tensor(completion)
        device = model.wte.weight.device
        logits = model(tokens[:, :-1].to(device)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten().to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"taught {step * ROWS} of {count} texts, loss {loss.item():.3f}", flush=True)


def by_side(model, asked):
    """{"white best T=0": (mean, half-width of its 95 % interval), ...} on the same positions as White and as Black."""
    text_format, figures, model = rewards.chess_format(model.config), {}, model.cast(model.dtype)
    white = [p if chess.Board(p.fen).turn else positions.mirror(p) for p in asked]
    for side, some in (("white", white), ("black", [positions.mirror(p) for p in white])):
        questions = [rewards.policy_question(p, text_format) for p in some]
        noise = torch.rand(len(some), 1, rewards.LIMITS["policy"], generator=torch.Generator().manual_seed(0))
        for temperature in (0.0, 1.0):
            grades = []
            for i in range(0, len(some), train.EVAL_ROWS):
                part = slice(i, i + train.EVAL_ROWS)
                ((_, samples),) = train.sample(model, questions[part], 1, temperature, noise[part])
                grades += [sample.grade.metrics for sample in samples]
            for name in METRICS:
                values = [grade.get(name, 0.0) for grade in grades if name != "cp_loss" or name in grade]
                figures[f"{side} {name} T={temperature:g}"] = monitor.interval(values or [math.nan])
    return figures


def table(found):
    """A column for each model: what it was before it was taught, after, with GRPO, and with GRPO without a reward."""
    last = {name: list(curve.values())[-1] for name, curve in found.items()}
    lines = [f"| | {' | '.join(last)} |", "| --- |" + " ---: |" * len(last)]
    for name in next(iter(last.values())):
        side, metric, temperature = name.split(" ")
        unit, form = (1, ".2f") if metric == "cp_loss" else (100, ".1f")
        cells = [f"{unit * skill[name][0]:{form}} ± {unit * skill[name][1]:{form}}" for skill in last.values()]
        lines.append(f"| {side}, {METRICS[metric]}, {temperature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found, path):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True, sharey=True)
    for axis, temperature in zip(axes, ("T=0", "T=1")):
        for side, colour in (("white", "C1"), ("black", "C0")):
            for name, style in (("GRPO", "-o"), ("without a reward", ":")):
                shares = [100 * skill[f"{side} best {temperature}"][0] for skill in found[name].values()]
                axis.plot(list(map(int, found[name])), shares, style, color=colour, label=f"{side}, {name}")
        axis.set(title="greedy" if temperature == "T=0" else "at temperature 1", xlabel="step", ylabel="best move, %")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main():
    p = argparse.ArgumentParser("python -m experiments.repair", description=__doc__.split("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--texts", type=int, default=6400, help="of the supervised training")
    p.add_argument("--steps", type=int, default=100, help="of GRPO")
    p.add_argument("--positions", type=int, default=400, help="held-out positions, each asked as White and as Black")
    p.add_argument("settings", nargs="*", metavar="NAME=value", help="of train.py, for both runs")
    a = p.parse_intermixed_args()
    chosen = dict(setting.split("=", 1) for setting in a.settings)
    if not chosen.keys() <= SETTINGS.keys():
        p.error("settings are NAME=value, as ./train.sh --help lists them.")
    chosen = {name: parse(name, value, type(SETTINGS[name][0])) for name, value in chosen.items()}
    settings = {"STEPS": a.steps, "EVAL_EVERY": max(1, a.steps // 10)} | chosen
    about = {"texts": a.texts, "positions": a.positions, "settings": settings}
    a.out.mkdir(parents=True, exist_ok=True)
    file, taught = a.out / "repair.json", a.out / "taught"
    known = read(file) if file.exists() else {"about": about, "curves": {}}
    if known["about"] != about:
        p.error(f"{file} was made with other options; name another folder.")

    device = hardware.choose(train.DEVICE)
    dtype = hardware.fastest_dtype(device)
    model = GPT.load(taught if taught.exists() else rewards.start_model()).to(device).use(dtype)
    items, held_out = rewards.load("builtin", model.config)
    asked = random.Random(0).sample([p for p in held_out if len(p.moves) == 5], a.positions)
    if not taught.exists():
        known |= {"made": monitor.describe("python -m experiments.repair", device, dtype)}
        known["curves"]["start"] = {"0": by_side(model, asked)}
        write(file, known)
        teach(model, [p for p in items if len(p.moves) > 1], a.texts, random.Random(0))
        model.save(taught)
    if "taught" not in known["curves"]:
        known["curves"]["taught"] = {"0": by_side(model, asked)}
        write(file, known)
    for name, control in (("GRPO", False), ("without a reward", True)):
        if name in known["curves"]:
            continue
        curve = {}

        def evaluate(model, questions, file, step, curve=curve):
            curve[str(step)] = by_side(model, asked)
            return curve[str(step)]

        _, trained = run_here(
            rewards, settings | {"MODEL": str(taught), "CONTROL": control}, [(train, "evaluate", evaluate)], quiet=False
        )
        if trained is None:
            refuse(f"the run {name} did not come to its end.")
        known["curves"][name] = curve
        write(file, known)
    draw(known["curves"], a.out / "repair.png")
    print(table(known["curves"]))


if __name__ == "__main__":
    main()
