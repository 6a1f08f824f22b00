"""What a chess model can do on positions that are never trained on, or two models and their difference.

python -m tools.chess_benchmark MODEL                          the table, greedy and at temperature 1
python -m tools.chess_benchmark MODEL OTHER                    two models and their difference, question by question
python -m tools.chess_benchmark MODEL --puzzles FILE ...       also on other people's positions, with published results

tools.evaluate asks the questions of a run's own task. Here all models get the same tests: whole policy
and environment answers, mates, games of a model against itself, and puzzles from files in three formats.
"""

import argparse
import csv
import io
import json
import random
import sys
from itertools import compress, product
from typing import NamedTuple

import chess
import chess.pgn

import architectures
import rewards
from nanorook import hardware
from nanorook.monitor import figures, pass_at_k
from nanorook.settings import fail, number
from nanorook.statistics import figure, known
from nanorook.tables import skill_rows, table
from nanorook.task import grade_answers
from rook import mating
from rook.positions import Position, distinct, draw, is_sound, load, mating_moves
from tools import chess_games as games

TRIES = 16  # answers to each question of pass@k
BANDS = {0: "below 1000", 1000: "1000 to 1499", 1500: "1500 to 1999", 2000: "2000 and above"}  # of Lichess ratings
BIGBENCH, MATE_IN_ONE, LICHESS = "mate in one, BIG-bench", "Lichess, mateIn1", "Lichess, all"
POLICY, ENVIRONMENT = "RookWorld P: best move", "RookWorld A: next state"
SMALL, LARGE = "RookWorld-LM 124M, 7M texts × 3 epochs", "RookWorld-LM 124M, 46M texts × 5 epochs"
PUBLISHED = {  # with the version of the model; their positions need not be those of the row
    BIGBENCH: {SMALL: "13.7 %", LARGE: "32.1 %", "ChessGPT-Base 3B": "26.5 %", "ROOK-LM 124M": "24.4 %"},
    MATE_IN_ONE: {"KINGPT 25M, supervised": "85 to 91 of 100"},
    LICHESS: {"C1-4B, supervised": "42.3 % of 900", "C1-4B, then with RL": "48.3 % of 900"},
    POLICY: {SMALL: "16.6 %", f"{LARGE}, action accuracy": "26.2 %"},
    ENVIRONMENT: {SMALL: "99.61 %", f"{LARGE}, environment": "99.9 %"},
}
PUBLISHED[BIGBENCH]["ROOK-CLF-9M, a supervised classifier"] = "57 %"
SOLVED = {"policy": "policy best", "moves": "moves best", "environment": "environment next_state"}  # metrics, by kind


class Puzzle(NamedTuple):
    position: Position  # with `asked` it is a question about the next state
    solutions: list = []  # any of these moves is right
    band: str = ""  # of BANDS


def measure(model, temperature, positions, puzzles, openings, tried):
    """{"policy legal": [the value of each question or game, or None], ...} of a model at one temperature."""
    text_format, rng = rewards.chess_format(model.config), random.Random(0)

    def ask(questions, tries=1):
        return figures(grade_answers(rewards, games.answers(model, questions, temperature, tries)))

    moves = [rewards.environment_question(position, rng, text_format) for position in positions]
    found = ask([rewards.policy_question(position, text_format) for position in positions]) | ask(moves)
    short = [position._replace(history=(), asked=None) for position in positions]
    short = ask([rewards.environment_question(position, rng, text_format, illegal_share=0) for position in short])
    found["environment next_state, legal move without history"] = short["environment next_state"]

    for name, some in puzzles.items():
        asked = [puzzle_questions(puzzle, text_format) for puzzle in some]
        for way, tries in product(asked[0], [1, TRIES] if temperature and tried else [1]):
            questions = [ways[way] for ways in (asked if tries == 1 else asked[:tried])]
            row = f"{name}{way}" + f", pass@{tries}" * (tries > 1)
            found[row] = pass_at_k(ask(questions, tries)[SOLVED[questions[0].kind]], tries, tries)
            for band in BANDS.values():
                found[f"{row}, {band}"] = [*compress(found[row], (puzzle.band == band for puzzle in some))]
    if openings:
        found |= games.count("self", *games.play(model, openings, temperature))
    return found


def puzzle_questions(puzzle, text_format):
    """{addition to the row's name: a question that asks for the solution in this way}"""
    position, solutions, _ = puzzle
    if move := position.asked:
        prompt = rewards.environment_prompt(position.fen, move, [*position.history, move], text_format)
        return {"": rewards.Question("environment", prompt, rewards.transition(position.fen, move))}
    position = position._replace(moves=tuple((uci, 0) for uci in solutions))  # as labels, so that no engine is asked
    whole = rewards.policy_question(position, text_format)
    first = rewards.first_question("moves", position, text_format)
    whole.truth["five"], first.truth["best"] = dict.fromkeys(solutions, 0.0), solutions  # there may be more than five
    return {"": whole, ", first candidate": first}


def with_mate(boards):
    found = ((board.fen(), sorted(mating_moves(board))) for board in boards)
    return [Puzzle(Position(fen, (), ()), mating) for fen, mating in found if mating]


def read_puzzles(path, most):
    """{row: [Puzzle, ...]} of a file in any of the three formats, with at most `most` of Lichess's in each row."""
    if path.endswith(".zst"):
        fail(f"{path} is compressed; unpack it first: zstd -d {path}")
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            start = file.readline().lstrip()
            file.seek(0)
            if start.startswith("{"):
                played = [chess.pgn.read_game(io.StringIO(e["input"])) for e in json.load(file)["examples"]]
                found = {BIGBENCH: with_mate(game.end().board() for game in played)}  # each ends before its mate
            elif start.startswith("PuzzleId,"):
                found = read_lichess(csv.DictReader(file), most)
            else:
                lines = [p for p in load(path) if is_sound(p)]
                best = [(p, [uci for uci, cp in p.moves if cp == p.moves[0][1]]) for p in lines if p.moves]
                found = {POLICY: [Puzzle(*p) for p in best], ENVIRONMENT: [Puzzle(p) for p in lines if p.asked]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        fail(f"{path} cannot be read as puzzles: {type(error).__name__}, {error}.")
    found = {row: puzzles for row, puzzles in found.items() if puzzles}
    return found or fail(f"{path} has no puzzle: expected BIG-bench's checkmate_in_one/task.json, Lichess's CSV of "
                         "puzzles, or RookWorld's P: and A: lines.")  # fmt: skip


def read_lichess(lines, most):
    found = {MATE_IN_ONE: [], LICHESS: []}
    for line in lines:  # there are five million
        board, (played, answer, *_) = chess.Board(line["FEN"]), line["Moves"].split()
        board.push_uci(played)  # by the opponent
        solutions = sorted(mating_moves(board)) or [board.parse_uci(answer).uci()]  # any mate solves a puzzle
        band = BANDS[max(low for low in BANDS if low <= int(line["Rating"]))]
        for row in [LICHESS, *[MATE_IN_ONE] * ("mateIn1" in line["Themes"].split())]:
            found[row].append(Puzzle(Position(board.fen(), (), ()), solutions, band))
        if len(found[MATE_IN_ONE]) == most:
            break
    return {row: puzzles[:most] for row, puzzles in found.items()}


def with_published(rows):
    """The rows of a table, and below the first row of each set of puzzles, in a new column, what others publish."""
    result, published = [[*rows[0], "published"]], dict(PUBLISHED)
    for row in rows[1:]:
        theirs = published.pop(row[0].rpartition(", ")[0], {})
        result += [[*row, ""], *([f"  {who}", *[""] * (len(row) - 1), what] for who, what in theirs.items())]
    return result


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
                   "(task.json), Lichess's puzzles (CSV), or RookWorld's P: and A: lines")  # fmt: skip
    p.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    a = p.parse_args()
    if len(a.model) > 2 or len({*a.model}) < len(a.model):
        p.error("give one model, or two different ones to compare.")
    device, dtype = hardware.prepare()
    models = [architectures.load(name).to(device).inference_copy(dtype) for name in a.model]
    held = distinct(position for source in a.data for position in rewards.load_positions(source)[1])
    if not held:
        fail(f"{' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    chosen = draw(held, min(a.positions, len(held)), rng)
    pool = distinct([*held, *(mating.embedded()[1] if "builtin" in a.data else [])])
    mates = with_mate(chess.Board(p.fen) for p in rng.sample(pool, len(pool)) if is_sound(p))
    asked = {"mate in one": mates[: a.positions]} if mates else {}
    for row, puzzles in (item for file in a.puzzles for item in read_puzzles(file, a.positions).items()):
        asked[row] = [*asked.get(row, []), *puzzles][: a.positions]
    openings, columns = games.openings(held, min(a.self_play, a.positions)), {}
    for title, model in zip("AB", models):
        at = {t: measure(model, t, chosen, asked, openings, a.pass_at_k) for t in a.temperature}
        columns[title] = {f"{row} T={t:g}": figure(v) for t, rows in at.items() for row, v in rows.items() if known(v)}
    rows = skill_rows(columns, {})
    if a.puzzles:
        rows = with_published(rows)
    print(f"{len(chosen)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}; "
          f"{', '.join(map(' is '.join, zip('AB', a.model)))}\n\n{table(rows, a.markdown)}")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
