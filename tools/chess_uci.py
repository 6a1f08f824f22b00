"""The model as a chess engine: UCI on stdin and stdout, for chess programs and match runners.

There is no search, and all moves take the same time: it plays the legal move that the model finds likeliest, or draws
one by these probabilities if Temperature is set. The protocol is UCI, by Huber and Meyer-Kahlen.
"""

import argparse
import re
import sys
from pathlib import Path

import chess
import torch

import architectures
from nanorook import hardware
from nanorook.task import prompt_ids
from rewards import LIMITS, Question, chess_format, policy_prompt, start_model
from rollout import pad_prompts, sample

SHOWN = 5  # candidates in a report


def send(*lines):
    print("\n".join(lines), flush=True)


def read_position(words):
    """The board of `startpos|fen FEN [moves ...]`."""
    at = words.index("moves") if "moves" in words else len(words)
    board = chess.Board() if words[:1] == ["startpos"] else chess.Board(" ".join(words[1:at]))
    for uci in words[at + 1 :]:
        board.push_uci(uci)
    return board


def before_the_move(model, board):
    """The tokens after which the model names its move. That is its first candidate, which is its best one. RookWorld's
    lists are in random order, so in that format the model writes its list first, and the move is the one after `B:`."""
    text_format = chess_format(model.config)
    prompt, written = policy_prompt(board.fen(), text_format), "M:"
    if text_format == "rookworld":
        (rollout,) = sample(model, [Question("policy", prompt, ())], 1, LIMITS, temperature=0)
        written = rollout.answers[0].text.partition("B:")[0] + "B:"
    return prompt_ids(prompt, model.tokenizer) + model.tokenizer.encode(written)


@torch.no_grad()
def rank(model, board, moves):
    """The log-probability of each of `moves`, (n,), in one batch."""
    prompt, device = before_the_move(model, board), model.wte.weight.device
    tokens, lengths = pad_prompts([model.tokenizer.encode(f" {move}") for move in moves], device)  # (n, T), (n,)
    logits = model.head(model.score(*pad_prompts([prompt], device), tokens))  # (n, T, V)
    logprobs = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    padding = torch.arange(tokens.shape[1], device=device) >= lengths[:, None]
    return logprobs.masked_fill(padding, 0).sum(1).cpu()


def choose(model, board, temperature):
    """The move to play. Reports the likeliest moves, each with its share of the probability of all legal ones."""
    moves = [move.uci() for move in board.legal_moves]
    if not moves:
        return "(none)"
    logprobs = rank(model, board, moves)
    shares = dict(sorted(zip(moves, logprobs.softmax(0).tolist()), key=lambda pair: -pair[1])[:SHOWN])
    send("info string " + ", ".join(f"{move} {share:.0%}" for move, share in shares.items()))
    if temperature:
        best = moves[(logprobs / temperature).softmax(0).multinomial(1)]
    else:
        best = next(iter(shares))
    send(f"info depth 1 nodes {len(moves)} pv {best}")
    return best


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.chess_uci", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a model folder or hub id (default: weights/tiny)")
    name = parser.parse_args().model or start_model()
    device, dtype = hardware.prepare()
    model = architectures.load(name).to(device).inference_copy(dtype)
    board, temperature, waiting = chess.Board(), 0.0, False
    for line in sys.stdin:
        command, *words = line.split() or [""]
        if command == "uci":
            send(f"id name nanorook {Path(name).resolve().name}", "id author the nanorook authors")
            send("option name Temperature type spin default 0 min 0 max 1000", "uciok")  # in hundredths
        elif command == "isready":
            send("readyok")
        elif command == "setoption":
            if match := re.fullmatch(r"name temperature value (\d+)", " ".join(words).lower()):
                temperature = int(match[1]) / 100
        elif command == "position":
            try:
                board = read_position(words)
            except ValueError as error:
                send(f"info string {error}, so the position stays what it was")
        elif command == "go":
            best = choose(model, board, temperature)
            waiting = "infinite" in words  # for `stop`
            if not waiting:
                send(f"bestmove {best}")
        elif command == "stop" and waiting:
            send(f"bestmove {best}")
            waiting = False
        elif command == "quit":
            break


if __name__ == "__main__":
    main()
