"""Labels positions with Stockfish: up to five best moves of each, with their evaluations.

The positions come from games that Stockfish plays against itself, or from files (--from). The work is cut
into numbered units: a game, or CHUNK positions of the input. What a unit gives depends only on the settings
and its number. So the file is the same with any number of workers, and a run that was killed continues after
its last unit.
"""

import argparse
import collections
import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import chess
from tqdm import tqdm

from nanorook import positions
from nanorook.settings import refuse
from nanorook.stockfish import CANDIDATES, MATE, NODES, Engine, EngineError, require

CHUNK = 16  # positions of the input in a unit

# Self-play. Moves are drawn from cheap searches. Games differ by a random opening, the temperature of the draw
# and the share of random moves. Neighbours in a game are much alike, so only one position in eight is kept.
PLAY_NODES = 300
OPENING = 20  # half-moves at most; short openings are more frequent: after a long one few games are even
TEMPERATURES = 10, 20, 40, 80, 160  # centipawns
RANDOM_MOVES = 0, 0.02, 0.1
KEPT = 1 / 8


# -----------------------------------------------------------------------------
# Units of work


def play(engine, rng):
    """The positions of one game, without labels."""
    opening = int(rng.random() ** 2 * (OPENING + 1))
    temperature, share = rng.choice(TEMPERATURES), rng.choice(RANDOM_MOVES)
    board, history = chess.Board(), []
    engine.send("ucinewgame")
    while not board.is_game_over() and not board.is_repetition(3):
        yield positions.Position(board.fen(), tuple(history[-10:]), ())
        if len(history) < opening or rng.random() < share:
            move = rng.choice([move.uci() for move in board.legal_moves])
        else:
            moves = engine.search(board, PLAY_NODES)
            weights = [math.exp((score - moves[0][1]) / temperature) for _, score in moves]
            move = rng.choices(moves, weights)[0][0]
        board.push_uci(move)
        history.append(move)


def label(engine, unlabelled, nodes):
    """The positions with their moves; those of finished games are left out."""
    labelled = []
    for position in unlabelled:
        board = chess.Board(position.fen)
        if any(board.legal_moves):
            labelled.append(position._replace(moves=engine.search_afresh(board, nodes)))
    return labelled


ENGINES = {}  # path -> Engine, of this worker process


def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches workers too: they end without a traceback
    # A parent that was killed cannot stop its workers, so each waits for the parent's end in a thread.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work(path, unit, nodes):
    """Labels one unit: positions, or a game's seed. If the engine fails, the unit is tried once more."""
    for last_try in False, True:
        try:
            if path not in ENGINES:
                ENGINES[path] = Engine(path)
            if isinstance(unit, list):
                return label(ENGINES[path], unit, nodes)
            rng = random.Random(unit)
            kept = [position for position in play(ENGINES[path], rng) if rng.random() < KEPT]
            return label(ENGINES[path], kept, nodes)
        except EngineError as error:
            if path in ENGINES:
                ENGINES.pop(path).close()
            if last_try:
                raise EngineError(f"{error}, and again after a restart") from None


# -----------------------------------------------------------------------------
# The partial file: a line of settings, then for each unit its positions and a line that ends it


def resume(partial, header):
    """(lines, number of units) of an earlier run. A unit that was not written to its end is cut off."""
    with open(partial, "a+b") as file:
        file.seek(0)
        text = file.read()
        if header.startswith(text):  # a new file, or the run was killed while it wrote the first line
            file.truncate(0)
            file.write(header)
            return [], 0
        if not text.startswith(header):
            refuse(f"{partial} was started with other settings or input: use those, or delete it to start again.")
        lines, unit, units, end = [], [], 0, len(header)
        for line in text[end:].splitlines(keepends=True):
            unit.append(line)
            if line == b"# unit %d\n" % units:
                lines += unit[:-1]
                end += sum(map(len, unit))
                unit = []
                units += 1
        file.truncate(end)
    print(f"Continuing {partial}: {len(lines)} positions are done.")
    return [line.decode() for line in lines], units


def write_result(out, lines):
    """The file appears whole or not at all; its bytes depend on the lines alone (gzip's time is 0)."""
    text = "".join(lines).encode()
    with open(f"{out}.tmp", "wb") as file:
        if out.endswith(".gz"):
            with gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:
                zipped.write(text)
        else:
            file.write(text)
    os.replace(f"{out}.tmp", out)


def describe(name):
    """Prints what a file of labelled positions consists of."""
    counts, labelled = collections.Counter(), [position for position in positions.load(name) if position.moves]
    for position in labelled:
        board = chess.Board(position.fen)
        uci, score = position.moves[0]
        best = chess.Move.from_uci(uci)
        pieces = (board.occupied & ~board.pawns & ~board.kings).bit_count()
        counts.update({
            "held out": positions.held_out(position.fen),
            "White to move": board.turn,
            "Black to move": not board.turn,
            "many pieces (more than 10 besides kings and pawns)": pieces > 10,
            "fewer (7 to 10)": 7 <= pieces <= 10,
            "few (at most 6)": pieces <= 6,
            "in check": board.is_check(),
            "fewer than five legal moves": len(position.moves) < CANDIDATES,
            "about equal (within a pawn)": abs(score) <= 100,
            "mate in one": score == MATE - 1,
            "mate in two to five": MATE - 5 <= score < MATE - 1,
            "mated in five or sooner": score <= 5 - MATE,
            "best move: capture": board.is_capture(best),
            "best move: check": board.gives_check(best),
            "best move: castling": board.is_castling(best),
            "best move: promotion": best.promotion is not None,
            "best move: en passant": board.is_en_passant(best),
            "a legal move castles": any(map(board.is_castling, board.legal_moves)),
            "a legal move promotes": any(move.promotion for move in board.legal_moves),
            "a legal move takes en passant": board.has_legal_en_passant(),
        })  # fmt: skip
    print(f"| {name} | {len(labelled)} | |\n| --- | ---: | ---: |")
    for what, count in counts.items():
        print(f"| {what} | {count:d} | {100 * count / len(labelled):.1f} % |")


def run(args):
    out, partial, path = args.out, f"{args.out}.partial", require()
    if os.path.exists(out) and not os.path.exists(partial):
        refuse(f"{out} is there already: delete it to make it again.")
    probe = Engine(path)
    probe.close()
    settings = {"engine": probe.name, "nodes": args.nodes, "positions": args.positions, "seed": args.seed}
    if args.source:
        given = [position for name in args.source for position in positions.load(name)]
        settings["from"] = zlib.crc32(repr(given).encode())
        wanted = min(args.positions or len(given), len(given))
        every_unit = (given[at : at + CHUNK] for at in range(0, len(given), CHUNK))
    else:
        wanted = args.positions or 22000
        every_unit = (f"{args.seed}/{number}" for number in itertools.count())

    lines, done = resume(partial, (json.dumps(settings) + "\n").encode())
    boards = {positions.board_key(line.split(";")[0]) for line in lines}
    units, ahead = itertools.islice(every_unit, done, None), collections.deque()
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker)
    bar = tqdm(total=wanted, initial=len(lines), unit=" positions", smoothing=0.05)
    try:
        with open(partial, "ab") as file:
            while len(lines) < wanted:
                for unit in itertools.islice(units, 4 * args.workers - len(ahead)):
                    ahead.append(pool.submit(work, path, unit, args.nodes))
                if not ahead:
                    break
                new = []
                for position in ahead.popleft().result():  # in the order of the units, whichever ends first
                    key = positions.board_key(position.fen)
                    if key not in boards and len(lines) + len(new) < wanted:
                        boards.add(key)
                        new.append(positions.write_position(position) + "\n")
                file.write("".join([*new, f"# unit {done}\n"]).encode())
                file.flush()
                done += 1
                lines += new
                bar.update(len(new))
    finally:
        bar.close()
        pool.shutdown(cancel_futures=True)
    write_result(out, lines)
    os.remove(partial)
    left_out = f" ({wanted - len(lines)} left out: seen before, or no legal move)" if len(lines) < wanted else ""
    print(f"{out}: {len(lines)} positions{left_out}, {os.path.getsize(out) / 1e6:.2f} MB.")


def main():
    def number(text):
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(prog="python -m tools.label", description="Label positions with Stockfish.")
    parser.add_argument("out", metavar="OUT", help="the file to make; gzipped if its name ends in .gz")
    parser.add_argument("--from", dest="source", metavar="FILE", nargs="+", help="what to label (default: self-play)")
    parser.add_argument("--positions", type=number, help="how many (default: 22000 from self-play, all from files)")
    parser.add_argument("--nodes", type=number, default=NODES, help=f"of a search (default: {NODES})")
    parser.add_argument("--seed", type=int, default=0, help="of self-play (default: 0)")
    parser.add_argument("--workers", type=number, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--describe", action="store_true", help="only print what the finished OUT consists of")
    args = parser.parse_args()
    again = f"the same command continues from {args.out}.partial"
    try:
        try:
            describe(args.out) if args.describe else run(args)
        except BrokenProcessPool:
            time.sleep(0.1)  # Ctrl-C ends the workers too, perhaps before KeyboardInterrupt is raised here
            refuse(f"A worker was killed, perhaps for lack of memory (--workers asks for fewer); {again}.")
    except KeyboardInterrupt:
        sys.exit(f"Stopped; {again}.")
    except EngineError as error:
        refuse(f"Stockfish ({require()}) {error}.")
    except OSError as error:
        refuse(f"{args.out} cannot be written: {error.strerror}.")


if __name__ == "__main__":
    main()
