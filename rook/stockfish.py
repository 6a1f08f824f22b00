"""Stockfish: a process that gives the best moves of a position."""

import os
import re
import shutil
import subprocess
import threading
from contextlib import suppress
from functools import lru_cache

import chess

from nanorook.settings import fail

CANDIDATES = 5  # moves in a label
NODES = 6000  # of the search for a label, as in the embedded positions
MATE = 100000  # mate in n is worth ±(MATE - n) centipawns


class EngineError(Exception):
    """The message continues the sentence "Stockfish ..."."""


def find():
    """The path of the program, from STOCKFISH_PATH or from PATH; None if there is none."""
    path = os.environ.get("STOCKFISH_PATH") or shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")
    if path and not shutil.which(path):
        fail(f"STOCKFISH_PATH is {path}, which is not a program: set it to Stockfish's, or unset it to search PATH.")
    return path


class Engine:
    """A Stockfish process with one thread, so that searches of equally many nodes give equal answers."""

    TIMEOUT = 60  # seconds for an answer; a search of very many nodes gets more
    INFO = re.compile(r"info depth (\d+) .*multipv (\d+) score (cp|mate) (-?\d+)( \w+bound)?.* pv (\w+)")

    def __init__(self, path):
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, errors="replace")
        try:
            self.process = subprocess.Popen([path], **options, start_new_session=True)  # which Ctrl-C does not reach
        except OSError as error:
            raise EngineError(f"cannot be started ({error.strerror})") from None
        names = [line[8:].strip() for line in self.answer("uci", "uciok") if line.startswith("id name ")]
        self.name = names[0] if names else "unknown"
        for option in ("Threads value 1", "Hash value 16", f"MultiPV value {CANDIDATES}"):
            self.send(f"setoption name {option}")

    def send(self, command):
        with suppress(OSError, ValueError):  # it has died or was closed, which its missing answer will show
            print(command, file=self.process.stdin, flush=True)

    def answer(self, command, last, nodes=0):
        """The engine's lines up to the one that begins with `last`. An engine that hangs or fails is closed."""
        seconds, lines, hangs = self.TIMEOUT + nodes / 10**5, [], threading.Event()
        alarm = threading.Timer(seconds, lambda: (hangs.set(), self.process.kill()))
        alarm.start()
        try:
            self.send(command)
            for line in self.process.stdout:
                lines.append(line)
                if line.startswith(last):
                    return lines
        finally:
            alarm.cancel()
        self.close()
        raise EngineError(f"gave no answer for {seconds:g} seconds" if hangs.is_set() else "died")

    def close(self):
        self.process.kill()
        self.process.communicate()

    def search(self, board, nodes=NODES, afresh=True):
        """The best moves as ((uci, centipawns), ...), best first, from the side to move's view: those of the last depth
        that was finished for all of them. Where the nodes run out within a depth, the engine reports some moves at this
        one and others at the one before, which cannot be compared. `afresh`: earlier searches are forgotten."""
        legal = {move.uci() for move in board.legal_moves}
        count = min(CANDIDATES, len(legal))
        report, finished = [], []
        if afresh:
            self.send("ucinewgame")
        self.send(f"position fen {board.fen()}")
        for match in filter(None, map(self.INFO.match, self.answer(f"go nodes {nodes}", "bestmove", nodes))):
            depth, rank, unit, score, bound, move = match.groups()
            score = int(score)
            score = score if unit == "cp" else MATE - score if score > 0 else -MATE - score
            if rank == "1":
                report = []
            report.append((depth, bound, move, score))
            if len(report) == count and not bound and len({line[:2] for line in report}) == 1:
                finished = report
        if not finished and report and nodes < 10**6:  # too few nodes to finish even the first depth
            return self.search(board, 2 * nodes, False)
        moves = tuple(line[2:] for line in finished)
        if len(legal.intersection(uci for uci, _ in moves)) != count:
            raise EngineError(f"gave no legal moves for {board.fen()}")
        return tuple(sorted(moves, key=lambda move: -move[1]))


@lru_cache(1)
def labelling_engine():
    return Engine(path) if (path := find()) else None


def label(fen):
    """The best moves of a position without labels, as search() gives them. Without Stockfish there are none, and the
    rules of chess alone grade the answers. An engine that fails ends the run, since the reward would change."""
    try:
        engine = labelling_engine()
        return engine.search(chess.Board(fen)) if engine else ()
    except EngineError as error:
        fail(f"Stockfish {error}: label the positions beforehand with tools.chess_label, or run the same command "
             "again.")  # fmt: skip
