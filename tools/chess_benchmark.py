"""What a chess model can do on positions that are never trained on, or two models and their difference.

python -m tools.chess_benchmark MODEL                          the table, greedy and at temperature 1
python -m tools.chess_benchmark MODEL OTHER                    two models and their difference, question by question
python -m tools.chess_benchmark MODEL --puzzles FILE ...       also on other people's positions

tools.evaluate asks the questions of a run's own task. Here all models get the same tests: whole policy
and environment answers, mates, games of a model against itself, and puzzles from files in two formats.
"""

import argparse
import csv
import io
import json
import random

import chess
import chess.pgn

import architectures
import rewards
from nanorook import hardware
from nanorook.monitor import pass_at_k, values_by_name
from nanorook.settings import fail, number
from nanorook.statistics import figure, known
from nanorook.tables import skill_rows, table
from nanorook.task import grade_answers
from rook import mating
from rook.positions import Position, distinct, draw, is_sound, load_unfinished, mating_moves, split
from tools import chess_games as games

TRIES = 16  # answers to each question of pass@k
ILLEGAL = 1 / 3  # share of the random moves that environment questions ask about


def measure(model, temperature, positions, puzzles, openings, tried):
    """{"policy legal": [the value of each question or game, or None], ...} of a model at one temperature."""
    text_format, rng = rewards.chess_format(model.config), random.Random(0)

    def ask(questions, tries=1):
        return values_by_name(grade_answers(rewards, games.answers(model, questions, temperature, tries)))

    found = ask([rewards.policy_question(position, text_format) for position in positions])
    found |= ask([rewards.environment_question(position, rng, text_format, ILLEGAL) for position in positions])
    for name, some in puzzles.items():
        whole, first = zip(*(puzzle_questions(*puzzle, text_format) for puzzle in some))
        for row, best, questions in (
            (name, "policy best", whole),
            (f"{name}, first candidate", "moves best", first),
        ):
            found[row] = ask(questions)[best]
            if temperature and tried:
                found[f"{row}, pass@{TRIES}"] = pass_at_k(ask(questions[:tried], TRIES)[best], TRIES, TRIES)
    if openings:
        found |= games.count("self", *games.play(model, openings, temperature))
    return found


def puzzle_questions(fen, solutions, text_format):
    """Two questions about a puzzle, which any of some moves solves: for a whole answer and for the first candidate."""
    position = Position(fen, (), tuple((uci, 0) for uci in solutions))  # as labels, so that no engine is asked
    whole = rewards.policy_question(position, text_format)
    first = rewards.first_question("moves", position, text_format)
    whole.truth["five"], first.truth["best"] = dict.fromkeys(solutions, 0.0), solutions  # there may be more than five
    return whole, first


def with_mate(boards):
    """[(FEN, the moves that mate), ...] of the boards where there are any."""
    found = ((board.fen(), sorted(mating_moves(board))) for board in boards)
    return [(fen, mating) for fen, mating in found if mating]


def read_puzzles(path, most):
    """{row: [(FEN, solutions), ...]} of BIG-bench's checkmate_in_one/task.json, or of Lichess's CSV of puzzles, with at
    most `most` of these in each row."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if file.read(1) == "{":
                file.seek(0)
                played = [chess.pgn.read_game(io.StringIO(e["input"])) for e in json.load(file)["examples"]]
                boards = [game.end().board() for game in played]  # each ends before its mate
                return {"mate in one, BIG-bench": with_mate(boards)}
            file.seek(0)
            return read_lichess(csv.DictReader(file), most)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        fail(f"{path} cannot be read as puzzles: {type(error).__name__}, {error}; expected BIG-bench's "
             "checkmate_in_one/task.json, or Lichess's CSV.")  # fmt: skip


def read_lichess(lines, most):
    mates, puzzles = [], []
    for line in lines:  # there are five million
        board, (played, answer, *_) = chess.Board(line["FEN"]), line["Moves"].split()
        board.push_uci(played)  # by the opponent
        solutions = sorted(mating_moves(board)) or [board.parse_uci(answer).uci()]  # any mate solves a puzzle
        puzzles.append((board.fen(), solutions))
        if "mateIn1" in line["Themes"].split():
            mates.append(puzzles[-1])
        if len(mates) == most:
            break
    return {"Lichess, mateIn1": mates, "Lichess, all": puzzles[:most]}


def main():
    p = argparse.ArgumentParser("python -m tools.chess_benchmark", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", nargs="+", help="a model folder or hub id, or two to compare")
    p.add_argument("--data", nargs="+", default=["builtin"], help="files of positions; only the held-out ones are used")
    p.add_argument("--positions", type=number(int, 1), default=1000, help="limit on positions, mates, puzzles, games")
    p.add_argument("--temperature", type=number(float, 0), nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--self-play", type=number(int, 0), default=100, help="games against itself; 0: none")
    p.add_argument("--pass-at-k", type=number(int, 0), default=100, help=f"mates or puzzles to answer {TRIES} times")
    p.add_argument("--puzzles", metavar="FILE", nargs="+", default=[], help="also solve BIG-bench's checkmate_in_one "
                   "(task.json) or Lichess's puzzles (CSV)")  # fmt: skip
    a = p.parse_args()
    if len(a.model) > 2 or len({*a.model}) < len(a.model):
        p.error("give one model, or two different ones to compare.")
    device, dtype = hardware.prepare()
    models = [architectures.load(name).to(device).inference_copy(dtype) for name in a.model]
    held = []
    for source in a.data:
        loaded = load_unfinished(source)
        rewards.warn_of_missing_labels(loaded)
        _, held_out = split(loaded)
        held += held_out
    held = distinct(held)
    if not held:
        fail(f"{' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    chosen = draw(held, min(a.positions, len(held)), rng)
    pool = distinct([*held, *(mating.embedded()[1] if "builtin" in a.data else [])])
    asked = {"mate in one": with_mate(chess.Board(p.fen) for p in rng.sample(pool, len(pool)) if is_sound(p))}
    for file in a.puzzles:
        for row, puzzles in read_puzzles(file, a.positions).items():
            asked[row] = [*asked.get(row, []), *puzzles]
    asked = {row: puzzles[: a.positions] for row, puzzles in asked.items() if puzzles}
    openings, columns = games.openings(held, min(a.self_play, a.positions)), {}
    for title, model in zip("AB", models):
        at = {t: measure(model, t, chosen, asked, openings, a.pass_at_k) for t in a.temperature}
        columns[title] = {f"{row} T={t:g}": figure(v) for t, rows in at.items() for row, v in rows.items() if known(v)}
    print(f"{len(chosen)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}; "
          f"{', '.join(map(' is '.join, zip('AB', a.model)))}\n\n{table(skill_rows(columns, {}))}")  # fmt: skip


if __name__ == "__main__":
    main()
