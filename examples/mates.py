"""A task that builds on chess: name a move that mates. The rules alone judge it, without a label or an engine.

    TASK=examples/mates.py ./train.sh           P: a position with a mate in one   M:   ->   d8h4

The prompt is the policy's with the first header of its answer, so the embedded model answers it with its first
candidate: five or six tokens instead of 75, for the same skill. One question in four is about an ordinary position
and asks for a legal move, so that legal moves are not forgotten. It needs a model whose tokens are characters or
squares (chess_format).

    python -m examples.mates OUT FILE ...       makes the data from labelled positions
"""

import gzip
import math
import sys
from functools import lru_cache
from pathlib import Path

import chess

import rewards
from nanorook import positions
from nanorook.stockfish import MATE
from nanorook.task import Grade, Question

DEFAULTS = dict(STEPS=100, BATCH_POSITIONS=64, GROUP_SIZE=32, LR=3e-4, KL_COEF=0.0, EVAL_POSITIONS=1000)
DEFAULTS |= dict(EVAL_EVERY=0, OUT_DIR="runs/mates")
LIMITS = {"mates": 6, "moves": 6}  # four characters, perhaps the piece of a promotion, the space that ends them
start_model = rewards.start_model
MATES = Path(__file__).parent.parent / "data" / "mates.txt.gz"
SHARE = 0.75  # of questions with a mate in one
WEIGHTS = {  # rungs: each is reached more rarely than the one before, and each move on one is on all before it
    "mates": {"structure": 0.05, "legal": 0.15, "check": 0.2, "mate": 0.6},
    "moves": {"structure": 0.05, "legal": 0.95},
}


def load(source, config):
    """Items are (kind of question, FEN). `source` has the ordinary positions."""
    mates = [("mates", position.fen) for position in positions.load(MATES)]
    moves = [("moves", position.fen) for position in positions.load(source)]
    return [[item for item in mates + moves if positions.held_out(item[1]) == side] for side in (False, True)]


def make_questions(items, count, rng, config):
    mates = [fen for kind, fen in items if kind == "mates"]
    moves = [fen for kind, fen in items if kind == "moves"]
    chosen = [("mates", fen) for fen in rng.sample(mates, min(len(mates), round(SHARE * count)))]
    chosen += [("moves", fen) for fen in rng.sample(moves, count - len(chosen))]
    return [ask(kind, fen, config) for kind, fen in chosen]


def ask(kind, fen, config):
    prompt = rewards.policy_prompt(fen, rewards.chess_format(config)) + "M: "
    return Question(kind, prompt, fen, stop=" ")


def question(text, config):
    """A FEN, typed at tools.ask."""
    fen = rewards.typed_board(text.strip()).fen()
    return ask("mates" if positions.mating_moves(chess.Board(fen)) else "moves", fen, config)


@lru_cache(4096)  # the rows of a group share their question
def moves_of(fen):
    """{legal move: the rungs that it reaches}"""
    board = chess.Board(fen)
    mating = positions.mating_moves(board)
    checks = {move.uci() for move in board.legal_moves if board.gives_check(move)}
    legal = (move.uci() for move in board.legal_moves)
    return {uci: {"legal": 1.0, "check": float(uci in checks), "mate": float(uci in mating)} for uci in legal}


def grade(question, text, hit_limit=False, step=math.inf):
    """One move and the space that ends it. Where not all moves of a group are on the same rung, some do better."""
    move = text.removesuffix(" ")
    structure = {"structure": float(text != move and rewards.UCI.fullmatch(move) is not None)}
    rungs = dict.fromkeys(("legal", "check", "mate"), 0.0) | moves_of(question.truth).get(move, {})
    metrics = structure | (rungs if structure["structure"] else dict.fromkeys(rungs, 0.0))
    weights = WEIGHTS[question.kind]
    return Grade(tuple((name, weight * metrics[name]) for name, weight in weights.items()), metrics)


def make(out, files):
    """Writes the positions in which the engine's best move mates, a FEN in each line, ordered by their boards."""
    found = positions.distinct(position for file in files for position in positions.load(file))
    mates = sorted(position.fen for position in found if position.moves and position.moves[0][1] == MATE - 1)
    with open(out, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:  # the same bytes at any time
        zipped.write("".join(f"{fen}\n" for fen in mates).encode())


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2:])
