"""What the model knows of two facts, and where: that the side to move is in check, that a move captures.

    python -m experiments.probe                    # the embedded model: two minutes on a core
    python -m experiments.probe out/model          # any model of the expanded format over bytes

A linear probe (Alain and Bengio, 2016) reads the residual stream after each layer at one place of a prompt with its
perfect answer, and says yes or no; half of the texts are a yes, so 50 % is a guess. It is fitted on positions for
training and counted on held-out ones. What it does not find, the layers that follow cannot use without learning more.
"""

import argparse
import random

import chess
import torch
import torch.nn.functional as F

import data
import tasks
from machine import prepare
from model import GPT

FITTED, COUNTED, ROWS = 3000, 350, 100
FORMAT = "expanded"


def in_check(position, yes, rng):
    """(text, {place: index of the letter to read there}) with or without a check; None where that cannot be asked."""
    if chess.Board(position.fen).is_check() != yes:
        return None
    prompt = tasks.policy_prompt(position.fen, FORMAT)
    return prompt + "M: ", {"before the first candidate": len(prompt) + 2}


def captures(position, yes, rng):
    """The same for a move of a piece that captures or does not. (A pawn's move resets the clock anyway.)"""
    board = chess.Board(position.fen)
    kinds = {True: [], False: []}
    for move in board.legal_moves:
        if board.piece_type_at(move.from_square) != chess.PAWN and not board.is_castling(move):
            kinds[board.is_capture(move)].append(move)
    if not all(kinds.values()):  # so that not the position, but the move decides
        return None
    move = rng.choice(kinds[yes])
    truth, history = tasks.transition(position.fen, move.uci()), (*position.history, move.uci())[-10:]
    prompt = tasks.environment_prompt(position.fen, move.uci(), history, FORMAT)
    answer = tasks.environment_completion(*truth, FORMAT)
    square = 9 * (7 - chess.square_rank(move.to_square)) + chess.square_file(move.to_square)  # of a board with slashes
    clock = answer.rindex(" ", 0, answer.rindex(" "))  # the halfmove clock stands between the last two spaces
    places = {"the move in the prompt": prompt.index("+") + 4, "before the square it goes to": len(prompt) + square - 1}
    return prompt + answer, places | {"before the clock": len(prompt) + clock}


@torch.no_grad()
def residuals(model, texts, places):
    """{place: (L, n, C)} of the letters at `places`."""
    found, seen = [], []
    hooks = [block.register_forward_hook(lambda block, given, out: seen.append(out[0])) for block in model.h]
    for start in range(0, len(texts), ROWS):
        ids = [torch.tensor(model.tokenizer.encode(text)) for text in texts[start : start + ROWS]]
        seen.clear()
        model.trunk(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
        rows = torch.arange(len(ids))
        at = {name: torch.tensor([p[name] for p in places[start : start + ROWS]]) for name in places[0]}
        found.append({name: torch.stack([x[rows, index] for x in seen]) for name, index in at.items()})
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([part[name] for part in found], 1) for name in found[0]}


def accuracy(x, y):
    """Share of the last COUNTED rows of x (n, C) that a logistic regression on the others gets right."""
    x = (x - x[:-COUNTED].mean(0)) / (x[:-COUNTED].std(0) + 1e-6)
    w = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100)

    def loss():
        optimizer.zero_grad()
        logits = x[:-COUNTED] @ w[1:] + w[0]
        value = F.binary_cross_entropy_with_logits(logits, y[:-COUNTED]) + 0.02 * w[1:].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return ((x[-COUNTED:] @ w[1:] + w[0] > 0) == y[-COUNTED:].bool()).float().mean().item()


def main():
    p = argparse.ArgumentParser("python -m experiments.probe", description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?", default="weights/tiny")
    model = GPT.load(p.parse_args().model)
    if model.config.chess_format != FORMAT or model.tokenizer.vocab_size != 257:
        p.error("this needs a model of the expanded format over bytes, where a square always stands at the same place.")
    prepare()
    layers = range(1, len(model.h) + 1)
    print(f"| fact | read | {' | '.join(f'layer {i}' for i in layers)} |\n| --- | --- |{' ---: |' * len(layers)}")
    split = data.split(data.load("builtin"))
    for fact in (in_check, captures):
        rng, asked = random.Random(0), []
        for positions, count in zip(map(list, split), (FITTED, COUNTED)):
            rng.shuffle(positions)
            for yes in (True, False):
                some = filter(None, (fact(position, yes, rng) for position in positions))
                asked += [(*next(some), yes) for _ in range(count // 2)]
        texts, places, truth = zip(*asked)
        for name, x in residuals(model, texts, places).items():
            cells = " | ".join(f"{accuracy(layer, torch.tensor(truth).float()):.0%}" for layer in x)
            print(f"| {fact.__name__.replace('_', ' ')} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
