"""Chess positions: read from files in six formats, held out for evaluation, and moves to ask about.

`load` recognises the format of each line by itself and keeps each board once. A line that cannot be used is reported
with its file, its number and what was expected there.
"""

import functools
import gzip
import io
import logging
import re
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import chess
import chess.pgn

from nanorook.settings import fail


class Position(NamedTuple):
    fen: str
    history: tuple  # up to ten recent moves (UCI), oldest first, that lead to the FEN
    moves: tuple  # ((uci, centipawns), ...), best first, seen from the side to move; mate in n is ±(100000 - n)
    asked: str | None = None  # a move to ask the environment about, if the source has one


BUILTIN = Path(__file__).parent.parent / "data" / "positions.txt.gz"


def expand_board(fen):
    """The FEN with a dot for each empty square of its board, so that a square always has the same place."""
    board, space, rest = fen.partition(" ")
    return re.sub(r"\d", lambda match: "." * int(match[0]), board) + space + rest


def contract_board(fen):
    """The usual FEN of one with dots; a FEN without dots is returned as it is."""
    board, space, rest = fen.partition(" ")
    return re.sub(r"\.+", lambda match: str(len(match[0])), board) + space + rest


def read_prompt(prompt):
    """(FEN, []) of a question about a position, (FEN, [move, recent moves, ""]) of one about a move."""
    fen, *asked = prompt[3:].partition("M:")[0].strip().split("+")
    return contract_board(fen), asked


def mirror_fen(fen):
    """The same position with White and Black exchanged."""
    board, turn, castling, en_passant, *counters = fen.split(" ")
    board = "/".join(reversed(board.split("/"))).swapcase()
    turn = "b" if turn == "w" else "w"
    castling = "".join(sorted(castling.swapcase()))  # capitals first, as in KQkq
    en_passant = en_passant if en_passant == "-" else en_passant[0] + str(9 - int(en_passant[1]))
    return " ".join([board, turn, castling, en_passant, *counters])


def mirror_move(uci):
    return uci[0] + str(9 - int(uci[1])) + uci[2] + str(9 - int(uci[3])) + uci[4:]


def board_key(fen):
    """A key that positions share if they count as one board: neither counters nor mirroring make a difference."""
    fen = fen if fen.split(" ", 2)[1] == "w" else mirror_fen(fen)
    return fen.rsplit(" ", 2)[0]


def held_out(fen):
    """Whether the board is never trained on, which holds for one in eleven. Its hash decides, in every file and run,
    and must never change, since what a trained model has not seen depends on it."""
    return zlib.crc32(board_key(fen).encode()) % 11 == 0


def distinct(positions):
    """Each board once, and once for each move that is asked about: the first position, or the first with labels."""
    found = {}
    for position in positions:
        mirrored = position.asked and position.fen.split(" ", 2)[1] == "b"  # the move with its board, see board_key
        key = board_key(position.fen), mirror_move(position.asked) if mirrored else position.asked
        if key not in found or position.moves and not found[key].moves:
            found[key] = position
    return list(found.values())


def split(positions):
    """(train, held_out)"""
    sides = [], []
    for position in positions:
        sides[held_out(position.fen)].append(position)
    return sides


# ---- Lines of text -----------------------------------------------------------------------------------------

UCI = "[a-h][1-8][a-h][1-8][qrbn]?"
CP = r"-?\d{1,7}"  # 99999 is a mate
BOARD = r"[1-8.pnbrqkPNBRQK/]+ [wb] [-A-Ha-hKQkq]+ (?:-|[a-h][36])"  # the first four fields of a FEN
OURS = re.compile(rf"({BOARD} \d+ \d+);((?:{UCI}(?: {UCI})*)?);((?:{UCI}:{CP}(?: {UCI}:{CP})*)?)")
POLICY = re.compile(rf"P: ({BOARD} \d+ \d+)\s+M: ((?:{UCI}\s+)+)E: ((?:{CP}(?:\.\d+)?\s+)+)B: {UCI}")
ENVIRONMENT = re.compile(rf"(?:A: )?({BOARD} \d+ \d+)\+({UCI})\+((?:{UCI} )*)\2 ?\+[^+]+\+-?\d(?:\.\d+)?\+[01]\+[01]")
FEN_OR_EPD = re.compile(rf"({BOARD})( \d+ \d+)?(?:\s+[a-zA-Z;].*)?")  # an EPD's operations are not read
VERIFIED_LINES = 5_000  # labelled ones at the start of a file in our own format, see `read_line`
UNVERIFIED = {}  # position of a later line -> (file, number of the line), see `is_sound`


def split_moves(text):
    """The moves in `text`, interned: half a million positions share a few thousand different strings."""
    return tuple(map(sys.intern, text.split()))


def read_position(line):
    """The position of a line in any of the formats."""
    if match := OURS.fullmatch(line):
        labels = (label.split(":") for label in match[3].split())
        moves = tuple((sys.intern(uci), int(cp)) for uci, cp in labels)
        return Position(contract_board(match[1]), split_moves(match[2])[-10:], moves)
    if match := POLICY.fullmatch(line):
        moves, evals = split_moves(match[2]), match[3].split()
        if len(moves) != len(evals):
            raise ValueError(f"expected as many evaluations as moves, found {len(moves)} moves and {len(evals)}")
        # Sorted by evaluation. `B:` is ignored: for Black, the original data has the worst of the five there.
        labels = sorted(zip(moves, (round(100 * float(e)) for e in evals)), key=lambda label: -label[1])
        return Position(contract_board(match[1]), (), tuple(labels))
    if match := ENVIRONMENT.fullmatch(line):  # the next state comes from the rules, not from the line
        return Position(contract_board(match[1]), split_moves(match[3])[-9:], (), match[2])
    if match := FEN_OR_EPD.fullmatch(line):
        return Position(contract_board(match[1]) + (match[2] or " 0 1"), (), ())
    raise ValueError(
        "expected a FEN, an EPD, 'FEN;recent moves;move:centipawns ...', 'P: FEN M: moves E: evaluations B: move' or "
        f"'A: FEN+move+recent moves and the move+next FEN+reward+terminated+truncated', found {line[:80]!r}"
    )


def verify(position):
    """The position with the FEN that python-chess writes; ValueError if it or one of its moves is illegal."""
    board = chess.Board(position.fen)
    if not board.is_valid():
        raise ValueError(f"expected a position that chess allows, found {position.fen}")
    moves = tuple((sys.intern(board.parse_uci(uci).uci()), cp) for uci, cp in position.moves)
    if list(moves) != sorted(moves, key=lambda label: -label[1]) or len(dict(moves)) != len(moves):
        raise ValueError("expected each move once, best first")
    if position.asked:
        chess.Move.from_uci(position.asked)  # which may be illegal, but has to lead to another square
    return position._replace(fen=board.fen(), moves=moves)


def typed_board(fen):
    try:
        return chess.Board(verify(Position(contract_board(fen), (), ())).fen)
    except ValueError:
        fail(f"{fen!r:.80} is not the FEN of a possible position; for a question of another task, set TASK=FILE.py.")


def typed_move(board, san):
    try:
        if move := board.parse_san(san):  # "--" and "Z0" are null moves
            return move.uci()
    except ValueError:
        pass
    fail(f"{san!r:.80} is not a legal move in {board.fen()}; use the form e2e4 for any move, legal or not.")


def read_line(line, place):
    """[position] of a line, [] of an empty one or a comment. `place` is (file, number of the line).

    Verifying half a million labelled lines in our own format would take two minutes. So after a file's first
    VERIFIED_LINES, which show whether another program wrote it, only odd lines are verified: those without eight ranks,
    or with an en passant square, which python-chess removes if no pawn can use it, so that a board has one hash. The
    others are verified when they are drawn, see `is_sound`."""
    line = line.strip()
    if not line or line.startswith("#"):
        return []
    position = read_position(line)
    odd = position.fen.count("/") != 7 or position.fen.split(" ")[3] != "-"
    if place[1] > VERIFIED_LINES and position.moves and OURS.fullmatch(line) and not odd:
        UNVERIFIED.setdefault(position, place)
        return [position]
    return [verify(position)]


def is_sound(position):
    """Whether a position can be used. If `load` has not verified it, that is done here, before its first use."""
    return position not in UNVERIFIED or is_verified(position)


@functools.cache
def is_verified(position):
    try:
        if verify(position) != position:
            raise ValueError("python-chess writes this FEN or its moves in another way")
    except ValueError as error:
        print("{}, line {}, is left out: {}.".format(*UNVERIFIED[position], error), file=sys.stderr)
        return False
    return True


def draw(positions, count, rng):
    """`count` of the positions at random. One that cannot be used is replaced by the rng's next choice that can."""
    chosen = rng.sample(positions, count)
    others = filter(is_sound, (rng.choice(positions) for _ in range(1000)))  # a tenth of them may be wrong, not all
    return [p if is_sound(p) else next(others, None) or fail("too many lines are wrong, see above.") for p in chosen]


def read_game(game, place):
    """The positions of the main line of a PGN's game."""
    board, found, history = game.board(), [], []
    if game.errors:
        raise ValueError(f"expected a game without errors, found {game.errors[0]}")
    if type(board) is not chess.Board or board.chess960 or not board.is_valid():
        raise ValueError("expected a game of standard chess from a possible position")
    for move in game.mainline_moves():
        if not move:
            raise ValueError("expected moves, found a null move")
        found.append(Position(board.fen(), tuple(history[-10:]), ()))
        history.append(sys.intern(move.uci()))
        board.push(move)
    return found


# ---- Files -------------------------------------------------------------------------------------------------

BAD_SHARE = 0.4  # of lines or games may be unusable: a quarter of RookWorld's A: lines may come after an illegal move
logging.getLogger("chess.pgn").setLevel(logging.CRITICAL)  # python-chess would print each bad game, too


def read_text(path):
    try:
        content = Path(path).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig", "replace")  # a Latin-1 PGN loses only letters of names
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path}: expected a file of positions, but it cannot be read ({error}).")


def write_lines(path, lines):
    """Writes a file, gzipped if its name says so, with the same bytes at any time."""
    content = "".join(f"{line}\n" for line in lines).encode()
    Path(path).write_bytes(gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)


def load(source):
    """The positions of `builtin`, or of a file: text or PGN, gzipped or not."""
    source, kind, read = str(source), "line", read_line
    text = read_text(BUILTIN if source == "builtin" else source)
    entries = text.splitlines()
    if text.lstrip().startswith("[") or re.search(r"\.pgn(\.gz)?$", source.lower()):
        file = io.StringIO(text)
        kind, read, entries = "game", read_game, list(iter(lambda: chess.pgn.read_game(file), None))
    positions, bad = [], []
    for number, entry in enumerate(entries, 1):
        try:
            positions += read(entry, (source, number))
        except ValueError as error:
            bad.append(f"{kind} {number}: {error}")
    count = f"{len(bad)} of {len(entries)} {kind}s"
    if len(bad) > BAD_SHARE * len(entries) or bad and not positions:
        fail(f"{source}, {bad[0]} ({count} cannot be used).")
    if not positions:
        fail(f"{source}: expected positions, found none; data/README.md lists the formats.")
    if bad:
        print(f"{source}: left out {count} that cannot be used; the first is {bad[0]}.", file=sys.stderr)
    return distinct(positions)


def load_unfinished(source):
    """The positions with a legal move; those with labels need not be checked."""
    return [p for p in load(source) if p.moves or any(chess.Board(p.fen).legal_moves)]


# ---- Moves -------------------------------------------------------------------------------------------------

SPECIAL = {  # moves that are asked about more often than games have them: where there are any, with this probability
    "en_passant": (0.9, chess.Board.is_en_passant),
    "promotion": (0.6, lambda board, move: bool(move.promotion)),
    "castling": (0.5, chess.Board.is_castling),
    "capture": (0.1, chess.Board.is_capture),
}


def illegal_move(board, rng):
    """A random illegal move, often a nearly legal one, as moves between random squares are too easy to recognise."""
    own, other = board.occupied_co[board.turn], board.occupied_co[not board.turn]
    pseudo_legal = board.generate_pseudo_legal_moves() if rng.random() < 0.25 else ()
    if unsafe := [move for move in pseudo_legal if board.is_into_check(move)]:  # leaves the king in check
        return rng.choice(unsafe)
    while True:
        start = rng.choice(list(chess.SquareSet(rng.choice([own, own, own, other, ~board.occupied & chess.BB_ALL]))))
        ends = chess.SquareSet(chess.BB_ALL)
        if board.piece_at(start) and rng.random() < 0.7:  # as the piece moves, but blocked or out of turn
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


def mating_moves(board):
    checks = [move for move in board.legal_moves if board.gives_check(move)]
    return {move.uci() for move in checks if game_end(board, move) == chess.Termination.CHECKMATE}


def environment_move(board, rng, illegal_share, best=None):
    """A move to ask about. It may be illegal, and rare kinds of moves are more frequent than in games."""
    legal = list(board.legal_moves)
    if not legal or rng.random() < illegal_share:
        return illegal_move(board, rng).uci()
    # Trying every move is slow, so moves that end the game are looked for only where they are likely: if the best move
    # is one (or at random, if it is unknown), if the opponent has only king and pawns, or if few pieces are left.
    likely = game_end(board, chess.Move.from_uci(best)) if best else rng.random() < 0.3
    pieces = board.occupied_co[not board.turn] & ~board.kings & ~board.pawns
    if likely or not pieces or chess.popcount(board.occupied) <= 5:
        endings = defaultdict(list)
        for move in legal:
            endings[game_end(board, move)].append(move)
        endings.pop(None, None)
        if endings and rng.random() < 0.9:
            return rng.choice(rng.choice(list(endings.values()))).uci()
    for share, is_special in SPECIAL.values():
        special = [move for move in legal if is_special(board, move)]
        if special and rng.random() < share:
            return rng.choice(special).uci()
    return best if best and rng.random() < 0.3 else rng.choice(legal).uci()


@functools.lru_cache(1000)  # the answers of a group have one question
def groups(prompt):
    """The groups that a question belongs to, whose results a mean over all questions would hide."""
    fen, asked = read_prompt(prompt)
    board = chess.Board(fen)
    if not asked:
        return ["in_check"] * board.is_check()
    if asked[0] not in {move.uci() for move in board.legal_moves}:
        return ["illegal"]
    move, short = chess.Move.from_uci(asked[0]), len(asked[1].split()) < 10
    return [name for name, (_, is_special) in SPECIAL.items() if is_special(board, move)] + ["short_history"] * short
