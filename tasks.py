"""The two tasks: how positions, questions and answers are written, and what the rules of chess say.

P: a position -> five candidate moves, their evaluations, the best.  A: a position and a move -> the next position.
What the rules say is always asked of python-chess.
"""

import re
import zlib
from collections import defaultdict
from typing import NamedTuple

import chess


class Position(NamedTuple):
    fen: str
    history: tuple  # up to ten recent moves (UCI), oldest first, leading to the FEN
    moves: tuple  # ((uci, centipawns), ...), best first, from the side to move's view; mate in n is ±(100000 - n)
    ask: str | None = None  # a move to ask the environment about, where the source has one


class Sample(NamedTuple):
    prompt: str
    labels: tuple  # policy: the position's moves; environment: what `transition` says


# ---------------------------------------------------------------------------------------------------------------------
# The text. `rookworld` is RookWorld-LM's own format; `expanded` is the embedded model's: a square always stands at the
# same place, because a board has one character for each square and a prompt is padded to a fixed width.

WIDTH = {"P: ": 94, "A: ": 160, "L: ": 94}  # of an expanded prompt: the longest FEN, move and history fit


def expand(fen):
    """A FEN whose board has a dot for every empty square."""
    board, rest = fen.split(" ", 1)
    return re.sub(r"\d", lambda m: "." * int(m[0]), board) + " " + rest


def contract(fen):
    """The usual FEN of an expanded one; any other string comes back as it is."""
    return re.sub(r"\.+", lambda m: str(len(m[0])), fen)


def write_fen(fen, chess_format):
    return expand(fen) if chess_format == "expanded" else fen


def write_prompt(prefix, text, chess_format):
    return (prefix + text).ljust(WIDTH[prefix]) if chess_format == "expanded" else prefix + text


def policy_prompt(fen, chess_format):
    return write_prompt("P: ", write_fen(fen, chess_format), chess_format)


def policy_fen(prompt):
    """What such a prompt asks about, in whichever format."""
    return contract(prompt[3:].strip())


def policy_completion(fen, moves, chess_format):
    """The ideal answer: `moves` in the order given, their evaluations in pawns, the best of them."""
    names = " ".join(uci for uci, _ in moves)
    evals = " ".join(str(cp / 100) for _, cp in moves)
    best = max(moves, key=lambda m: m[1])[0]
    if chess_format == "expanded":
        return f"M: {names} E: {evals} B: {best}"
    return f"{fen:90}"[len(fen) :] + f"M: {names:30}E: {evals:40}B: {best}"


def environment_prompt(fen, move, history, chess_format):
    """`history` ends with `move`."""
    return write_prompt("A: ", f"{write_fen(fen, chess_format)}+{move}+{' '.join(history)}+", chess_format)


def environment_completion(next_fen, reward, terminated, truncated, chess_format):
    return f"{write_fen(next_fen, chess_format)}+{reward}+{int(terminated)}+{int(truncated)}"


# ---------------------------------------------------------------------------------------------------------------------
# The environment task


def transition(fen, move):
    """What the rules say of `move`: (next FEN, reward, terminated, truncated), in the convention of RookWorld's data.

    An illegal move leaves the position as it was. Draws are those that end a game without a claim: stalemate, bare
    material, 75 moves. (A fivefold repetition takes 16 half-moves, more than the ten that a prompt shows.)
    """
    board = chess.Board(fen)
    if move not in {legal.uci() for legal in board.legal_moves}:
        return fen, -1.0, False, True
    board.push_uci(move)
    outcome = board.outcome()
    if outcome is None:
        return board.fen(), 0.001, False, False
    return board.fen(), 0.5 if outcome.winner is None else 1.0, True, False


def illegal_move(board, rng):
    """A move that the rules forbid: near misses as often as nonsense."""
    own, other = board.occupied_co[board.turn], board.occupied_co[not board.turn]
    if rng.random() < 0.25:  # leaves the king in check
        unsafe = [move for move in board.generate_pseudo_legal_moves() if board.is_into_check(move)]
        if unsafe:
            return rng.choice(unsafe)
    while True:
        start = rng.choice(list(chess.SquareSet(rng.choice([own, own, own, other, ~board.occupied & chess.BB_ALL]))))
        ends = chess.SquareSet(chess.BB_ALL)
        if board.piece_at(start) and rng.random() < 0.7:  # as the piece moves, but blocked, or it is not its turn
            ends = chess.BaseBoard.empty()
            ends.set_piece_at(start, board.piece_at(start))
            ends = ends.attacks(start)
        move = chess.Move(start, rng.choice(list(ends)))
        if start != move.to_square and not board.is_legal(move):
            return move


def game_end(board, move):
    """How the game ends by `move`: a chess.Termination, or None."""
    board.push(move)
    outcome = board.outcome()
    board.pop()
    return outcome and outcome.termination


def environment_move(board, rng, illegal, best=None):
    """A move to ask the environment about: a share of illegal ones, and rare kinds more often than games have them."""
    legal = list(board.legal_moves)
    if not legal or rng.random() < illegal:
        return illegal_move(board, rng).uci()
    # Looking at every move for one that ends the game is slow, so it is done where there is hope: the best move ends it
    # (or is not known), the opponent has only king and pawns (stalemate), or little material is left at all.
    hope = game_end(board, chess.Move.from_uci(best)) if best else rng.random() < 0.3
    officers = board.occupied_co[not board.turn] & ~board.kings & ~board.pawns
    if hope or not officers or chess.popcount(board.occupied) <= 5:
        endings = defaultdict(list)
        for move in legal:
            endings[game_end(board, move)].append(move)
        endings.pop(None, None)
        if endings and rng.random() < 0.9:
            return rng.choice(rng.choice(list(endings.values()))).uci()
    for share, kind in (
        (0.9, board.is_en_passant),
        (0.6, lambda move: move.promotion),
        (0.5, board.is_castling),
        (0.1, board.is_capture),
    ):
        special = [move for move in legal if kind(move)]
        if special and rng.random() < share:
            return rng.choice(special).uci()
    return best if best and rng.random() < 0.3 else rng.choice(legal).uci()


# ---------------------------------------------------------------------------------------------------------------------
# Samples of the two tasks


def policy_sample(position, chess_format):
    return Sample(policy_prompt(position.fen, chess_format), position.moves)


def environment_sample(position, rng, chess_format, illegal=1 / 4):
    """Asks about the position's own move if it has one. No move leads from a training board to a held-out one."""
    board, move = chess.Board(position.fen), position.ask
    if move is None and not board.ep_square and rng.random() < 0.03:  # near a draw by 75 moves, which games never reach
        board.halfmove_clock = rng.choice([149, rng.randrange(100, 150)])
        board.fullmove_number += 74
    fen = board.fen()
    move = move or environment_move(board, rng, illegal, position.moves and position.moves[0][0])
    labels = transition(fen, move)
    while held_out(labels[0]) and not held_out(fen):
        move = environment_move(board, rng, illegal)
        labels = transition(fen, move)
    history = (*position.history, move)[-10:]
    return Sample(environment_prompt(fen, move, history, chess_format), labels)


# ---------------------------------------------------------------------------------------------------------------------
# Mirrored colours: the same game with White and Black exchanged


def mirror_move(uci):
    return uci[0] + str(9 - int(uci[1])) + uci[2] + str(9 - int(uci[3])) + uci[4:]


def mirror_fen(fen):
    board, turn, castling, passant, *counters = fen.split(" ")
    board = "/".join(reversed(board.split("/"))).swapcase()
    turn = "b" if turn == "w" else "w"
    castling = "".join(sorted(castling.swapcase()))  # capitals first, as KQkq
    passant = passant if passant == "-" else passant[0] + str(9 - int(passant[1]))
    return " ".join([board, turn, castling, passant, *counters])


def mirror(position):
    return Position(
        mirror_fen(position.fen),
        tuple(map(mirror_move, position.history)),
        tuple((mirror_move(uci), cp) for uci, cp in position.moves),
        position.ask and mirror_move(position.ask),
    )


def board_key(fen):
    """What makes two positions the same board: all but the counters, and the colours' mirror image counts as equal."""
    fen = fen if fen.split(" ", 2)[1] == "w" else mirror_fen(fen)
    return fen.rsplit(" ", 2)[0]


def held_out(fen):
    """Every eleventh board is held out, wherever it comes from: chosen by the board itself, so no file can disagree."""
    return zlib.crc32(board_key(fen).encode()) % 11 == 0
