"""Mates in one, with all the moves that mate: found in positions with python-chess, or read from BIG-bench's task."""

import io
import json
from pathlib import Path

import chess
import chess.pgn
from tqdm import tqdm

import data
import tasks
from rewards import PAWNS


def mating_moves(board):
    checks = [move for move in board.legal_moves if board.gives_check(move)]
    return tuple(move.uci() for move in checks if tasks.game_end(board, move) == chess.Termination.CHECKMATE)


def find_mates(positions):
    """[(FEN, mating moves)] of held-out boards: the positions themselves, and those a move away from a won position.

    A bad reply in a won position often allows mate, and a board is held out or not whatever position it comes from.
    """
    found = {}
    for position in tqdm(positions, desc="mates in one", unit=" positions", disable=None, leave=False):
        won = any(abs(cp) > 100 * PAWNS for _, cp in position.moves)
        if not won and not tasks.held_out(position.fen):
            continue
        board = chess.Board(position.fen)
        for move in [chess.Move.null(), *(board.legal_moves if won else ())]:  # the null move: the position itself
            after = board.copy(stack=False)
            if move:
                after.push(move)
            fen = after.fen()
            if tasks.held_out(fen) and (mating := mating_moves(after)):
                found.setdefault(tasks.board_key(fen), (fen, mating))
    return list(found.values())


def read_bigbench(path):
    """[(FEN, mating moves)] of BIG-bench's checkmate_in_one/task.json: games, each of which stops before the mate."""
    try:
        games = [example["input"] for example in json.loads(Path(path).read_text())["examples"]]
        boards = [chess.pgn.read_game(io.StringIO(game)).end().board() for game in games]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        boards = []
    found = [(board.fen(), mating) for board in boards if (mating := mating_moves(board))]
    if not found:
        raise data.DataError(f"{path}: expected BIG-bench's checkmate_in_one/task.json, found no game before a mate.")
    return found
