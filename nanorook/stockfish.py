"""Stockfish: a process that gives the best moves of a position, and a labeller that survives its failures."""

import os
import re
import select
import shutil
import subprocess
import sys

import chess

CANDIDATES = 5  # moves in a label
NODES = 6000  # of the search for a label, as in the embedded positions
MATE = 100000  # mate in n is worth ±(MATE - n) centipawns


class EngineError(Exception):
    """The message continues the sentence "Stockfish ..."."""


def find():
    """The path of the program, from STOCKFISH_PATH or from PATH; None if there is none."""
    return os.environ.get("STOCKFISH_PATH") or shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


def require():
    """The path of the program; if there is none, exits with a sentence."""
    path = find()
    if path and not shutil.which(path):
        sys.exit(f"STOCKFISH_PATH is {path}, which is no program: set it to Stockfish's, or unset it to search PATH.")
    if not path:
        sys.exit("Stockfish was not found: `apt install stockfish` (or `brew`), or set STOCKFISH_PATH to the program.")
    return path


class Engine:
    """A Stockfish process with one thread, so that a search of so many nodes always gives the same answer."""

    TIMEOUT = 60  # seconds without a line after which the engine counts as stuck
    INFO = re.compile(r"info depth (\d+) .*multipv (\d+) score (cp|mate) (-?\d+)( \w+bound)?.* pv (\w+)")

    def __init__(self, path):
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen([path], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        except OSError as error:
            raise EngineError(f"cannot be started ({error.strerror})") from None
        self.unread = b""
        try:
            self.send("uci")
            names = [line[8:] for line in self.receive("uciok") if line.startswith("id name ")]
            options = "Threads value 1", "Hash value 16", f"MultiPV value {CANDIDATES}"
            self.send(*(f"setoption name {option}" for option in options))
        except BaseException:  # the caller gets no Engine that it could close
            self.close()
            raise
        self.name = names[0] if names else "unknown"

    def send(self, *commands):
        try:
            self.process.stdin.write("".join(f"{command}\n" for command in commands).encode())
        except OSError:
            raise EngineError("died") from None

    def receive(self, last):
        """Yields the engine's lines up to the one that begins with `last`."""
        line = ""
        while not line.startswith(last):
            while b"\n" not in self.unread:
                if not select.select([self.process.stdout], [], [], self.TIMEOUT)[0]:
                    raise EngineError(f"said nothing for {self.TIMEOUT} seconds")
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise EngineError("died")
                self.unread += read
            line, self.unread = self.unread.split(b"\n", 1)
            line = line.decode("utf-8", "replace").strip()
            yield line

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def search(self, board, nodes):
        """The best moves as ((uci, centipawns), ...), best first, from the side to move's view.

        They are taken from the last depth that was finished for all of them. When the nodes run out in the
        middle of a depth, the engine reports some moves at this depth and the others at the one before.
        Evaluations of different depths cannot be compared, and the first move is then often not the one with
        the highest.
        """
        legal = {move.uci() for move in board.legal_moves}
        count = min(CANDIDATES, len(legal))
        self.send(f"position fen {board.fen()}", f"go nodes {nodes}")
        report, finished = [], []
        for match in filter(None, map(self.INFO.match, self.receive("bestmove"))):
            depth, rank, unit, score, bound, move = match.groups()
            if rank == "1":
                report = []
            score = int(score)
            score = score if unit == "cp" else MATE - score if score > 0 else -MATE - score
            report.append((depth, bound, move, score))
            if len(report) == count and not bound and len({line[:2] for line in report}) == 1:
                finished = report
        if not finished and report and nodes < 10**6:  # too few nodes to finish even the first depth
            return self.search(board, 2 * nodes)
        moves = tuple(line[2:] for line in finished)
        if len(legal.intersection(uci for uci, _ in moves)) != count:
            raise EngineError(f"gave no legal moves for {board.fen()}")
        return tuple(sorted(moves, key=lambda move: -move[1]))

    def search_afresh(self, board, nodes=NODES):
        """A search from an empty hash table: the answer does not depend on earlier searches."""
        self.send("ucinewgame")
        return self.search(board, nodes)


class Labeller:
    """Labels positions during training, and survives an engine that dies, hangs or answers nonsense.

    Such an engine is started again. After MAX_FAILURES, or if there is no engine, labels are empty, and
    answers are graded by the rules of chess alone.
    """

    MAX_FAILURES = 10

    def __init__(self):
        self.path = require() if find() else None
        self.engine, self.failures = None, 0

    def label(self, fen):
        """((uci, centipawns), ...), best first, or ()."""
        for _ in range(2):
            if self.path is None or self.failures >= self.MAX_FAILURES:
                break
            try:
                self.engine = self.engine or Engine(self.path)
                return self.engine.search_afresh(chess.Board(fen))
            except EngineError:
                self.failures += 1
                self.close()
        return ()

    def close(self):
        if self.engine:
            self.engine.close()
        self.engine = None
