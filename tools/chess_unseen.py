"""Makes a test part: held-out positions on which no setting was chosen; data/README.md describes the one that is here.

python -m tools.chess_unseen OUT FILE ...           FILE: positions that tools.chess_label has labelled

Ordinary positions are drawn from the files, with their labels. Positions with a mate in one come from new games of a
greedy player against itself, one at most from each. All of them are held out, and none is a board of data/.
"""

import argparse
import itertools
import random

import chess
from tqdm import tqdm

from nanorook.settings import fail, new_file, number
from rook import mating, positions
from rook.positions import board_key, held_out, mating_moves
from tools import chess_label

# Games: random half-moves first, then greedy moves and a share of random ones.
MOST_OPENING = 20
RANDOM_MOVES = 0, 0.1, 0.3
LONGEST_GAME = 200  # half-moves
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9, chess.KING: 0}


def known_boards():
    """The boards of data/, mirrored ones included."""
    mates = itertools.chain(*mating.embedded())
    return {board_key(position.fen) for position in [*positions.load("builtin"), *mates]}


def ordinary(files, count, known, seed):
    """Labelled held-out positions at random, each board once."""
    found = positions.distinct(position for file in files for position in positions.load(file))
    found = [p for p in found if p.moves and held_out(p.fen) and board_key(p.fen) not in known]
    random.Random(seed).shuffle(found)
    return list(itertools.islice(filter(positions.is_sound, found), count))


def greedy_move(board, rng):
    """A random move of those that win the most at once: what is taken or promoted, less a piece that can be taken."""

    def gain(move):
        taken = board.piece_type_at(move.to_square)  # none if en passant
        gained = VALUES.get(taken, 0) + VALUES.get(move.promotion, 0) + (taken is not None)  # exchanges, too
        risked = VALUES[board.piece_type_at(move.from_square)]
        return gained - risked * board.is_attacked_by(not board.turn, move.to_square) + rng.random()

    return max(board.legal_moves, key=gain)


def mate_of_game(rng):
    """The FEN of a held-out position that a game comes to and in which a move mates, or None.

    Only one in eleven of these positions is held out. So where a move mates, the player before may have played another
    of its moves instead; and if none leads to such a position, the mate is not played and the game goes on."""
    board, opening, share = chess.Board(), rng.randrange(MOST_OPENING), rng.choice(RANDOM_MOVES)
    while not board.is_game_over() and len(board.move_stack) < LONGEST_GAME:
        mates = mating_moves(board)
        if mates:
            last = board.pop()
            moves = list(board.legal_moves)
            rng.shuffle(moves)
            for move in moves:
                board.push(move)
                if held_out(board.fen()) and mating_moves(board):
                    return board.fen()
                board.pop()
            board.push(last)
        others = [move for move in board.legal_moves if move.uci() not in mates]
        if mates or len(board.move_stack) < opening or rng.random() < share:
            board.push(rng.choice(others or list(board.legal_moves)))
        else:
            board.push(greedy_move(board, rng))
    return None


def new_mates(count, known, seed):
    """FENs from different games, no board twice and none that is known."""
    found, known, rng = [], set(known), random.Random(seed)
    with tqdm(total=count, unit=" mates", disable=None) as bar:
        while len(found) < count:
            fen = mate_of_game(rng)
            if fen and board_key(fen) not in known:
                known.add(board_key(fen))
                found.append(fen)
                bar.update()
    return found


def main():
    parser = argparse.ArgumentParser("python -m tools.chess_unseen", description=__doc__.split("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("out", type=new_file, help="the file to make, gzipped if it ends in .gz")
    parser.add_argument("files", metavar="FILE", nargs="*", help="labelled positions")
    parser.add_argument("--positions", type=number(int, 0), default=2000, help="ordinary positions, from the files")
    parser.add_argument("--mates", type=number(int, 0), default=1200, help="positions with a mate in one, from games")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw and of the games")
    a = parser.parse_args()
    known = known_boards()
    drawn = ordinary(a.files, a.positions, known, a.seed)
    if len(drawn) < a.positions:
        fail(f"the files have {len(drawn)} labelled, held-out positions that are not in data/, fewer than "
             f"--positions {a.positions}; give more files.")  # fmt: skip
    known |= {board_key(position.fen) for position in drawn}
    mates = new_mates(a.mates, known, a.seed)
    positions.write_lines(a.out, [*map(chess_label.write_position, drawn), *mates])
    print(f"{a.out}: {len(drawn)} positions, {len(mates)} with a mate in one.")


if __name__ == "__main__":
    main()
