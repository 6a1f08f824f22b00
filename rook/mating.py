"""Positions with a mate in one, for the questions about mates: the embedded ones, or those of a user's data."""

import random
from functools import lru_cache

import chess
from tqdm import tqdm

from nanorook import parallel
from rook import positions
from rook.positions import Position
from rook.stockfish import MATE

MATES = positions.BUILTIN.with_name("mates.txt.gz")


def beside(source, *sides):
    """Items, to train on and held out: ("ordinary", position) of the data, and ("mates", position) where a move mates.
    The latter come from a user's data, too, unless one of its sides has positions and none of these; a file for
    evaluation has no side to train on. In data with labels, a position without them is there for its mate alone."""
    mates = embedded() if all(sides) else ([], [])
    if source != "builtin":
        own = [find(side) for side in sides]
        complete = all(found or not side for found, side in zip(own, sides))
        if all(sides):
            instead = "" if complete else ", so questions about mates are about the embedded positions"
            found = " and ".join((f"{len(own[0])} positions with a mate in one to train on", f"{len(own[1])} held out"))
            parallel.log(f"{source} has {found}{instead}.")
        if complete:
            mates, sides = own, [without_mates(side, found) for side, found in zip(sides, own)]
    return [[("mates", p) for p in own] + [("ordinary", p) for p in side] for own, side in zip(mates, sides)]


def without_mates(side, mates):
    if not any(p.moves for p in side):
        return side
    fens = {mate.fen for mate in mates}
    return [p for p in side if p.moves or p.fen not in fens]


def find(found):
    """The positions with a mate in one; a label that says otherwise rules a position out. At most 50,000 positions are
    searched on each side, which takes about 15 seconds without labels."""
    found = [p for p in found if not p.moves or p.moves[0][1] == MATE - 1]
    found = random.Random(0).sample(found, min(50_000, len(found)))
    found = tqdm(found, "looking for mates", leave=False, disable=parallel.rank() > 0 or None)
    found = [p for p in found if positions.is_sound(p) and positions.mating_moves(chess.Board(p.fen))]
    return positions.distinct(Position(p.fen, (), ()) for p in found)


@lru_cache(1)
def embedded():
    """Positions with a mate in one: (to train on, held out)."""
    fens = positions.read_text(MATES).splitlines()  # which examples/mates.py made of verified positions
    return positions.split(Position(fen, (), ()) for fen in fens)
