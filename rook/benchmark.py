"""What a chess model can do on positions that are never trained on, or two models with their difference.

python -m rook.benchmark MODEL                   the table, greedy and at temperature 1
python -m rook.benchmark MODEL OTHER             two models and their difference, question by question

tools.evaluate asks the questions of a run's own task. Here all models get the same ones: whole policy and environment
answers by sorts of positions and moves, mates, games against itself, and the positions of BIG-bench's checkmate_in_one.
"""

import argparse
import io
import json
import random
from itertools import compress
from pathlib import Path

import chess
import chess.pgn

import rewards
from model import GPT
from nanorook import hardware
from nanorook.monitor import figures, pass_at_k
from nanorook.settings import fail, number
from nanorook.statistics import figure, known
from nanorook.tables import skill_rows, table
from nanorook.task import graded
from rook import games
from rook.positions import distinct, mating_moves

TRIES = 16  # answers to each question of pass@k


def measure(model, temperature, positions, mates, openings, tried):
    """{"policy legal": [the value of each question or game, or None], ...} of a model at one temperature."""
    text_format, rng = rewards.chess_format(model.config), random.Random(0)

    def ask(questions):
        return figures(graded(rewards, games.answers(model, questions, temperature)))

    def find_mate(positions, tries=1):
        moves = games.best_moves(model, [fen for fen, _ in positions], temperature, tries)
        return [move in positions[i // tries][1] for i, move in enumerate(moves)]

    moves = [rewards.environment_question(position, rng, text_format) for position in positions]
    found = ask([rewards.policy_question(position, text_format) for position in positions]) | ask(moves)
    boards, illegal = [chess.Board(position.fen) for position in positions], [move.truth[3] for move in moves]
    by_board = {"White": [board.turn for board in boards], "Black": [not board.turn for board in boards]}
    by_board["in check"] = [board.is_check() for board in boards]
    best = [[chess.Move.from_uci(uci) for uci, _ in position.moves[:1]] for position in positions]
    by_board["best move captures"] = [any(map(board.is_capture, moves)) for board, moves in zip(boards, best)]
    by_move = {"legal move": [not wrong for wrong in illegal], "illegal move": illegal}
    for name in ("policy legal", "policy best", "environment next_state", "environment truncated"):
        for sort, chosen in (by_board if name.startswith("policy") else by_move).items():
            found[f"{name}, {sort}"] = [*compress(found.get(name, ()), chosen)]
    short = [position._replace(history=(), asked=None) for position in positions]  # the history is the move alone
    short = ask([rewards.environment_question(position, rng, text_format, illegal_share=0) for position in short])
    found["environment next_state, legal move, short history"] = short["environment next_state"]

    found |= {name: find_mate(some) for name, some in mates.items()}
    if temperature and tried:
        for name, some in mates.items():
            right = find_mate(some[:tried], TRIES)
            found |= {f"{name}, pass@{k}": pass_at_k(right, TRIES, k) for k in (1, 4, 16)}
    if openings:
        found |= games.count("self", *games.play(model, openings, temperature))
        starts = [games.START] * (len(openings) if temperature else 1)  # all would be the same game
        lengths, _ = games.count("self", *games.play(model, starts, temperature)).values()
        found["half-moves from the starting position"] = lengths
    return found


def with_mate(boards):
    """[(FEN, moves that mate), ...] of boards that have a mate in one."""
    return [(board.fen(), mating) for board in boards if (mating := mating_moves(board))]


def read_bigbench(path):
    """Of BIG-bench's checkmate_in_one/task.json: games, each of which stops before the mate."""
    try:
        inputs = [example["input"] for example in json.loads(Path(path).read_text())["examples"]]
        found = with_mate(chess.pgn.read_game(io.StringIO(text)).end().board() for text in inputs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = []
    return found or fail(f"{path}: expected BIG-bench's checkmate_in_one/task.json, found no game before a mate.")


def main():
    p = argparse.ArgumentParser("python -m rook.benchmark", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", nargs="+", help="a model folder or hub id, or two to compare")
    p.add_argument("--data", nargs="+", default=["builtin"], help="files of positions, of which the held-out are used")
    p.add_argument("--positions", type=number(int, 1), default=1000, help="how many of them at most, and of mates")
    p.add_argument("--temperature", type=number(float, 0), nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--self-play", type=number(int, 0), default=100, help="games against itself, of each kind")
    p.add_argument("--pass-at-k", type=number(int, 0), default=100, help=f"mates to which {TRIES} answers are given")
    p.add_argument("--bigbench", metavar="FILE", help="also find the mates of BIG-bench's checkmate_in_one/task.json")
    p.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    a = p.parse_args()
    if len(a.model) > 2 or len({*a.model}) < len(a.model):
        p.error("give one model, or two different ones to compare.")
    device, dtype = hardware.prepare()
    models = [GPT.load(name).to(device).inference_copy(dtype) for name in a.model]
    held = distinct(position for source in a.data for position in rewards.load(source, models[0].config)[1])
    if not held:
        fail(f"{' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    positions = rng.sample(held, min(a.positions, len(held)))
    pool = distinct([*held, *(rewards.load_mates()[1] if "builtin" in a.data else [])])
    mates = with_mate(chess.Board(position.fen) for position in rng.sample(pool, len(pool)))
    asked = {"mate in one": mates[: a.positions]} if mates else {}
    if a.bigbench:
        asked["mate in one, BIG-bench"] = read_bigbench(a.bigbench)[: a.positions]
    openings, columns = games.openings(held, a.self_play), {}
    for title, model in zip("AB", models):
        at = {t: measure(model, t, positions, asked, openings, a.pass_at_k) for t in a.temperature}
        columns[title] = {f"{row} T={t:g}": figure(v) for t, rows in at.items() for row, v in rows.items() if known(v)}
    print(f"{len(positions)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}; "
          f"{', '.join(map(' is '.join, zip('AB', a.model)))}\n\n{table(skill_rows(columns), a.markdown)}")  # fmt: skip


if __name__ == "__main__":
    main()
