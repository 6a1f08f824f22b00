"""The model as a chess engine: UCI on stdin and stdout, for chess programs and match runners.

There is no search, and all moves take the same time: it plays the legal move that the model finds likeliest, or draws
one by these probabilities if Temperature is set. The protocol is UCI, by Huber and Meyer-Kahlen.
"""

import argparse
import os
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
from tools.chess_texts import policy_completion

COMMANDS = "uci debug isready setoption register ucinewgame position go stop quit".split()
SHOWN = 5  # candidates in a report
COUNTER = 9999  # the largest counter in a FEN; without a limit a prompt could be of any length


def send(*lines):
    print("\n".join(lines), flush=True)


def read_temperature(words):
    """The temperature in `name Temperature value N`, N in hundredths, as UCI has only whole numbers; None if absent."""
    match = re.fullmatch(r"name temperature value ([0-9]{1,6})", " ".join(words).lower())
    if not match:
        send("info string the option is Temperature (0 to 1000)")
    return match and min(1000, int(match[1])) / 100


def read_position(words):
    """The board of `startpos|fen FEN [moves ...]`. The moves end before the first illegal one."""
    at = words.index("moves") if "moves" in words else len(words)
    if words[:1] == ["startpos"]:
        board = chess.Board()
    elif words[:1] == ["fen"]:
        board = chess.Board(" ".join(words[1:at]))
    else:
        raise ValueError("a position is startpos, or fen and a FEN")
    if max(board.halfmove_clock, board.fullmove_number) > COUNTER:
        raise ValueError("no game lasts that long")
    for word in words[at + 1 :]:
        try:
            if not (move := board.parse_uci(word.lower())):
                raise ValueError("a null move")
            board.push(move)
        except ValueError:
            send(f"info string {word} is illegal in {board.fen()}, so the moves end before it")
            break
    return board


def before_the_move(model, board):
    """The tokens after which the model names its move. That is its first candidate, which is its best one. RookWorld's
    lists are in random order, so in that format the model writes its list first, and the move is the one after `B:`."""
    text_format = chess_format(model.config)
    prompt, header = policy_prompt(board.fen(), text_format), "M:"
    if text_format == "rookworld":
        (rollout,) = sample(model, [Question("policy", prompt, ())], 1, LIMITS, temperature=0)
        list_made, header, _ = rollout.answers[0].text.rpartition("B:")
        padded = policy_completion(board.fen(), [("a1a1", 0)], text_format).partition("M:")[0] + "M:"
        header = list_made + header if header else padded  # without a list it is the first candidate
    return prompt_ids(prompt, model.tokenizer) + model.tokenizer.encode(header)


@torch.no_grad()
def rank(model, board, moves):
    """The log-probability of each of `moves`, (n,), in one batch."""
    prompt, device = before_the_move(model, board), model.wte.weight.device
    tokens, lengths = pad_prompts([model.tokenizer.encode(f" {move}") for move in moves], device)  # (n, T), (n,)
    logits = model.head(model.score(*pad_prompts([prompt], device), tokens))  # (n, T, V)
    logprobs = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    padding = torch.arange(tokens.shape[1], device=device) >= lengths[:, None]
    return logprobs.masked_fill(padding, 0).sum(1).cpu()


def choose(model, board, temperature, asked=()):
    """The move to play, one of `asked` if any of them is legal. Reports the likeliest moves, each with its share of the
    probability of all moves that it chooses from."""
    legal = [move.uci() for move in board.legal_moves]
    moves = [move for move in legal if move in asked] or legal
    if not moves:
        send(f"info depth 0 score {'mate 0' if board.is_checkmate() else 'cp 0'}")
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
    board, temperature, waiting = chess.Board(), 0.0, None
    for line in sys.stdin.buffer:
        words = line.decode("ascii", "ignore").split()
        while words and words[0] not in COMMANDS:  # the protocol: what is unknown is skipped
            words.pop(0)
        command, *words = words or [""]
        if command == "uci":
            send(f"id name nanorook {Path(name).resolve().name}", "id author the nanorook authors")
            send("option name Temperature type spin default 0 min 0 max 1000", "uciok")
        elif command == "isready":
            send("readyok")
        elif command == "setoption":
            given = read_temperature(words)
            temperature = temperature if given is None else given
        elif command == "position":
            try:
                board = read_position(words)
            except ValueError as error:
                send(f"info string {error}, so the position stays what it was")
        elif command == "quit":
            break
        elif command in ("go", "stop") and waiting:
            send(f"bestmove {waiting}")
            waiting = None
        if command == "go":
            searched = words[words.index("searchmoves") :] if "searchmoves" in words else ()
            waiting = choose(model, board, temperature, searched)
            if "infinite" not in words:  # otherwise the answer waits for `stop`
                send(f"bestmove {waiting}")
                waiting = None
    if waiting:
        send(f"bestmove {waiting}")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # nobody listens any more
        os._exit(1)
