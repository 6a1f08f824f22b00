"""Labels positions with Stockfish: up to five best moves of each, with their evaluations.

The positions come from games that Stockfish plays against itself, or from files (--from). The work is divided into
numbered units, each of which is a game or CHUNK positions of the input. The result of a unit depends only on the
settings and its number. So the file is the same with any number of workers, and a run that was killed continues after
its last unit.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import chess
from tqdm import tqdm

from nanorook.settings import fail, number, output_file
from rook import positions
from rook.stockfish import NODES, Engine, EngineError, find

CHUNK = 16  # positions of the input in a unit

# Self-play. Moves are drawn from cheap searches. Games differ in their random opening, the temperature of the draw and
# the share of random moves. Neighbouring positions of a game are much alike, so only one position in eight is kept.
PLAY_NODES = 300
OPENING = 20  # half-moves at most; short openings are more frequent, since few games are even after a long one
TEMPERATURES = 10, 20, 40, 80, 160  # centipawns
RANDOM_MOVES = 0, 0.02, 0.1
KEPT = 1 / 8


def require():
    """The path of Stockfish's program."""
    return find() or fail("Stockfish was not found: `apt install stockfish` (or `brew`), or set STOCKFISH_PATH.")


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
            moves = engine.search(board, PLAY_NODES, afresh=False)
            weights = [math.exp((score - moves[0][1]) / temperature) for _, score in moves]
            move = rng.choices(moves, weights)[0][0]
        board.push_uci(move)
        history.append(move)


def label(engine, unlabelled, nodes):
    """The positions with their best moves, without those in which the game is over."""
    labelled = []
    for position in unlabelled:
        board = chess.Board(position.fen)
        if any(board.legal_moves):
            labelled.append(position._replace(moves=engine.search(board, nodes)))
    return labelled


def start_worker(*_):
    """Ctrl-C is left to the main process. A worker ends when the main process does, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def write_position(position):
    """The position as a line of our own format."""
    moves = " ".join(f"{uci}:{cp}" for uci, cp in position.moves)
    return f"{position.fen};{' '.join(position.history)};{moves}"


engine = functools.cache(Engine)  # one for each worker process


def work(path, nodes, unit):
    """The lines of one unit: positions, or a game's seed."""
    if isinstance(unit, str):
        rng = random.Random(unit)
        unit = [position for position in play(engine(path), rng) if rng.random() < KEPT]
    return [write_position(position) for position in label(engine(path), unit, nodes)]


def resume(partial, header):
    """The units that an earlier run has written after the header, one on each line with tabs between its positions. A
    line that was not finished is cut off."""
    if not partial.exists():
        partial.write_text(f"{header}\n")
    if "\n" not in partial.read_text():  # it was killed as it wrote the header
        partial.write_text(f"{header}\n")
    whole = partial.read_text().rpartition("\n")[0]
    first, *units = whole.split("\n")
    if first != header:
        fail(f"{partial} was started with other settings or input: use those, or delete it to start again.")
    os.truncate(partial, len(whole) + 1)
    return [unit.split("\t") if unit else [] for unit in units]


def run(args):
    out, partial, path = args.out, Path(f"{args.out}.partial"), require()
    if os.path.exists(out) and not partial.exists():
        fail(f"{out} already exists: delete it to make it again.")
    probe = Engine(path)
    probe.close()
    settings = {"engine": probe.name, "nodes": args.nodes, "positions": args.positions, "seed": args.seed}
    if args.source:
        loaded = (p for name in args.source for p in positions.load(name) if positions.is_sound(p))
        given = positions.distinct(p._replace(asked=None) for p in loaded)  # a label belongs to a board
        settings["from"] = zlib.crc32(repr(given).encode())
        wanted = min(args.positions or len(given), len(given))
        every_unit = (given[at : at + CHUNK] for at in range(0, len(given), CHUNK))
    else:
        wanted = args.positions or 22000
        every_unit = (f"{args.seed}/{number}" for number in itertools.count())

    done = resume(partial, json.dumps(settings))
    lines = [line for unit in done for line in unit]
    if done:
        print(f"Continuing {partial}: {len(lines)} positions are done.")
    boards = {positions.board_key(line.split(";")[0]) for line in lines}
    units = itertools.islice(every_unit, len(done), None)
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker)
    with open(partial, "a") as file, tqdm(total=wanted, initial=len(lines), unit=" positions", smoothing=0.05) as bar:
        while len(lines) < wanted:
            some = [*itertools.islice(units, 4 * args.workers)]
            if not some:
                break
            for found in pool.map(functools.partial(work, path, args.nodes), some):  # in the order of the units
                new = []
                for line in found:
                    key = positions.board_key(line.split(";")[0])
                    if key not in boards and len(lines) + len(new) < wanted:
                        boards.add(key)
                        new.append(line)
                file.write("\t".join(new) + "\n")
                file.flush()
                lines += new
                bar.update(len(new))
    pool.shutdown()
    if not lines:
        os.remove(partial)
        fail(f"there is nothing to label: no position of {' '.join(args.source)} has a legal move.")
    positions.write_lines(out, lines)
    os.remove(partial)  # only now: a file beside its .partial is written again
    left_out = f" ({wanted - len(lines)} left out: seen before, or no legal move)" * (len(lines) < wanted)
    print(f"{out}: {len(lines)} positions{left_out}.")


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.chess_label", description="Label positions with Stockfish.")
    parser.add_argument("out", metavar="OUT", type=output_file, help="the file to make, gzipped if it ends in .gz")
    parser.add_argument("--from", dest="source", metavar="FILE", nargs="+", help="files to label (default: self-play)")
    many, cores = number(int, 1), os.cpu_count()
    parser.add_argument("--positions", type=many, help="how many (default: 22000 from self-play, all from files)")
    parser.add_argument("--nodes", type=many, default=NODES, help=f"nodes in a search (default: {NODES})")
    parser.add_argument("--seed", type=int, default=0, help="seed of self-play (default: 0)")
    parser.add_argument("--workers", type=many, default=cores, help="number of processes (default: one for each core)")
    args = parser.parse_args()
    try:
        run(args)
    except EngineError as error:
        fail(f"Stockfish {error}; the same command continues from {args.out}.partial.")
    except BrokenProcessPool:
        fail(f"a worker was killed, perhaps for lack of memory: lower --workers; the same command continues from "
             f"{args.out}.partial.")  # fmt: skip
    except OSError as error:
        fail(f"{args.out} cannot be written ({error.strerror}); the same command continues from {args.out}.partial.")
    except KeyboardInterrupt:
        print(f"\nStopped; the same command continues from {args.out}.partial.", file=sys.stderr, flush=True)
        os._exit(130)  # workers end with this process, and do not finish their units


if __name__ == "__main__":
    main()
