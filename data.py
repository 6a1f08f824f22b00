"""Where prompts come from: positions of the embedded file, of files in six formats, of the hub.

A line is recognised by itself. What cannot be read is said with its file, its line and what was expected.
"""

import gzip
import io
import itertools
import re
import sys
import zlib
from pathlib import Path

import chess
import chess.pgn

from tasks import Position, contract, held_out


class DataError(ValueError):
    """One sentence for the user: which file, which line, what was expected."""


BUILTIN = Path(__file__).parent / "data" / "positions.txt.gz"
BAD_SHARE = 0.01  # of a file's lines (or a PGN's games); more is an error
PROVEN = 5_000  # lines at the start of a file in our own format, see `read_lines`
HUB_LINES = 100_000  # of a dataset on the hub
HUB_BAD_SHARE = 0.1  # RookWorld's games went on after some illegal moves, even a king's capture; nobody can mend that

UCI = "[a-h][1-8][a-h][1-8][qrbn]?"
CP = r"-?\d{1,7}"  # 99999 is a mate; a number of any length would not fit into a float
BOARD = r"[1-8.pnbrqkPNBRQK/]+ [wb] [-A-Ha-hKQkq]+ (?:-|[a-h][36])"  # the first four fields of a FEN
OURS = re.compile(rf"({BOARD} \d+ \d+);((?:{UCI}(?: {UCI})*)?);((?:{UCI}:{CP}(?: {UCI}:{CP})*)?)")
POLICY = re.compile(rf"P: ({BOARD} \d+ \d+)\s+M: ((?:{UCI}\s+)+)E: ((?:{CP}(?:\.\d+)?\s+)+)B: {UCI}")
ENVIRONMENT = re.compile(rf"(?:A: )?({BOARD} \d+ \d+)\+({UCI})\+((?:{UCI} ?)+)\+([^+]+)\+-?\d(?:\.\d+)?\+[01]\+[01]")
FEN_OR_EPD = re.compile(rf"({BOARD})( \d+ \d+)?(?:\s+[a-zA-Z].*)?")  # an EPD's operations are not read

EXPECTED = (
    "a FEN, an EPD, 'FEN;recent moves;move:centipawns ...', 'P: FEN M: moves E: evaluations B: move' "
    "or 'A: FEN+move+recent moves+next FEN+reward+terminated+truncated'"
)


def write_position(position):
    moves = " ".join(f"{uci}:{cp}" for uci, cp in position.moves)
    return f"{position.fen};{' '.join(position.history)};{moves}"


def words(text):
    """The words of `text`. Moves are interned: half a million positions share a few thousand of them."""
    return tuple(map(sys.intern, text.split()))


def read_position(line):
    """The position of a line in our own format."""
    match = OURS.fullmatch(line)
    if not match:
        raise ValueError("expected 'FEN;recent moves;move:centipawns ...'")
    moves = []
    for label in match[3].split():
        uci, cp = label.split(":")
        moves.append((sys.intern(uci), int(cp)))
    fen = contract(match[1])
    if fen.count("/") != 7 or fen.split(" ")[3] != "-":
        fen = chess.Board(fen).fen()  # en passant has two spellings; no board may be held out in one of them only
    return Position(fen, words(match[2])[-10:], tuple(moves))


def read_line(line):
    """The position of a line of any kind."""
    if match := POLICY.fullmatch(line):
        moves, evals = words(match[2]), match[3].split()
        if len(moves) != len(evals):
            raise ValueError(f"expected as many evaluations as moves, found {len(moves)} moves and {len(evals)}")
        # Best first by evaluation. `B:` is not asked: for Black, the original data has the worst of the five there.
        labels = sorted(zip(moves, (round(100 * float(e)) for e in evals)), key=lambda label: -label[1])
        return Position(contract(match[1]), (), tuple(labels))
    if match := ENVIRONMENT.fullmatch(line):
        fen, ask, history, _ = match.groups()  # what the line says of the next state is not asked either
        if words(history)[-1] != ask:
            raise ValueError(f"expected the recent moves to end with the move, {ask}")
        return Position(contract(fen), words(history)[-10:-1], (), ask)
    if match := FEN_OR_EPD.fullmatch(line):
        return Position(contract(match[1]) + (match[2] or " 0 1"), (), ())
    if not OURS.fullmatch(line):
        raise ValueError(f"expected {EXPECTED}, found {line[:40]!r}")
    return read_position(line)


def prove(position):
    """The position as python-chess writes it; ValueError if the rules do not allow it or one of its moves."""
    board = chess.Board(position.fen)
    if not board.is_valid():
        raise ValueError(f"expected a position that chess allows, found {position.fen}")
    moves = tuple((sys.intern(board.parse_uci(uci).uci()), cp) for uci, cp in position.moves)
    if list(moves) != sorted(moves, key=lambda label: -label[1]) or len(dict(moves)) != len(moves):
        raise ValueError("expected each move once, best first")
    return position._replace(fen=board.fen(), moves=moves)


def read_lines(lines):
    """Yields (line number, positions or ValueError).

    python-chess takes 80 microseconds to prove a labelled line, ten times what reading it takes. Lines in our own
    format are its own work already, so only the first PROVEN of a file are proven again: enough to expose a file that
    something else has made or spoilt, and half a million lines load in seconds.
    """
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if number > PROVEN and OURS.fullmatch(line):
                yield number, [read_position(line)]
            else:
                yield number, [prove(read_line(line))]
        except ValueError as error:
            yield number, error


class GameReader(chess.pgn.BaseVisitor):
    """Collects the positions of a game's main line, each with the move that was played."""

    def begin_game(self):
        self.positions, self.history, self.error = [], (), None

    def begin_variation(self):
        return chess.pgn.SKIP

    def visit_move(self, board, move):
        if not self.positions and (type(board) is not chess.Board or board.chess960 or not board.is_valid()):
            self.error = ValueError("expected a game of standard chess from a possible position")
        if not move:
            self.error = ValueError("expected moves, found a null move")
        self.positions.append(Position(board.fen(), self.history[-10:], (), sys.intern(move.uci())))
        self.history = (*self.history[-9:], self.positions[-1].ask)

    def handle_error(self, error):
        self.error = self.error or ValueError(f"expected a game without errors, found {error}")

    def result(self):
        return self.error or self.positions


def read_games(text):
    """Yields (line number, positions or ValueError) for each game of a PGN."""
    file, line, counted = io.StringIO(text), 1, 0
    while True:
        start = file.tell()
        try:
            result = chess.pgn.read_game(file, Visitor=GameReader)
        except ValueError as error:  # a number with thousands of digits
            result = ValueError(f"expected a game that python-chess reads, found {error}")
        if result is None:
            return
        start += len(text[start : file.tell()]) - len(text[start : file.tell()].lstrip())
        line += text.count("\n", counted, start)
        counted = start
        yield line, result


def read_text(path):
    try:
        content = Path(path).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path}: the gzip file is damaged or cut short; make or fetch it again.")
    except OSError as error:
        raise DataError(f"{path}: expected a file of positions, but it cannot be read ({error.strerror}).")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: expected text in UTF-8, found the byte 0x{content[error.start]:02x}.")


def hub_lines(name):
    """The first HUB_LINES of a dataset on the hub, from the `text` column of its first file of training data.

    RookWorld's seven million lines are in random order, so these are a sample of them; all would take 10 GB of memory.
    """
    first = "data/train-00000-of-*.parquet"
    try:
        from huggingface_hub import snapshot_download
        from pyarrow.parquet import ParquetFile

        files = list(Path(snapshot_download(name, repo_type="dataset", allow_patterns=first)).glob(first))
        if not files:
            raise FileNotFoundError(f"it has no {first}")
        batches = ParquetFile(files[0]).iter_batches(columns=["text"])
        return list(itertools.islice((line for batch in batches for line in batch["text"].to_pylist()), HUB_LINES))
    except ImportError:
        raise DataError(f"hub:{name} needs pyarrow to be read: pip install pyarrow.")
    except Exception as error:  # offline, unknown, private, full disk: the hub has many ways to say no
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"hub:{name}: the hub did not give the dataset: {type(error).__name__} {reason}")


def load(source):
    """The positions of `builtin`, of a file (text or PGN, gzipped or not), or of `hub:owner/dataset`."""
    source, kind, bad_share = str(source), "line", BAD_SHARE
    if source.startswith("hub:"):
        entries, bad_share = read_lines(hub_lines(source[4:])), HUB_BAD_SHARE
    else:
        text = read_text(BUILTIN if source == "builtin" else source)
        if text.lstrip().startswith("[") or re.search(r"\.pgn(\.gz)?$", source.lower()):
            entries, kind = read_games(text), "game"
        else:
            entries = read_lines(text.split("\n"))
    positions, bad, total = [], [], 0
    for line, result in entries:
        total += 1
        if isinstance(result, ValueError):
            bad.append(f"line {line}: {result}")
        else:
            positions += result
    count = f"{len(bad)} of {total} {kind}s"
    if len(bad) > bad_share * total:
        raise DataError(f"{source}, {bad[0]} ({count} cannot be used).")
    if not positions:
        raise DataError(f"{source}: expected positions, found none.")
    if bad:
        print(f"{source}: left out {count} that cannot be used; the first is {bad[0]}.", file=sys.stderr)
    return positions


def split(positions):
    """(train, held-out)"""
    sides = [], []
    for position in positions:
        sides[held_out(position.fen)].append(position)
    return sides
