"""The chess skill of a model on positions that are never trained on, or of two models with their difference.

python -m rook.benchmark MODEL                   the table, greedy and at temperature 1
python -m rook.benchmark MODEL OTHER             two models and their difference

Every figure has a 95 % interval. Two models answer the same questions with the same random numbers, so their
difference is taken question by question: it is more than noise where its interval leaves out zero.

A row of the table is computed from a column, a list with one (value, weight) for each question or game, where
(0, 0) stands for a question that has no value.
"""

import argparse
import io
import json
import math
import random
from itertools import compress
from pathlib import Path

import chess
import chess.pgn

import rewards
from model import GPT
from nanorook import hardware, monitor
from nanorook.settings import fail, number
from nanorook.task import graded
from rook import games
from rook.games import answers, best_moves, progress
from rook.positions import board_key, distinct, held_out, mating_moves

POLICY = {  # row of the table: the metric of rewards.grade it shows
    "structure": "structure",
    "legal move": "legal",
    "best move": "best",
    "top-5 move": "top5",
    "candidates: legal": "candidates_legal",
    "candidates: found of the engine's five": "candidates",
    "evaluation error, pawns": "eval_mae",
}
ENVIRONMENT = {
    "structure": "structure",
    "next state": "next_state",
    "next state: similarity": "similarity",
    "reward": "reward_match",
    "terminated": "terminated",
    "truncated": "truncated",
}
PUBLISHED = {  # of RookWorld-LM 124M on positions of its own
    "policy": {"best move": 0.166, "top-5 move": 0.392, "mate in one": 0.137, "mate in one: BIG-bench": 0.137},
    "environment": {"next state": 0.9961, "reward": 0.9911, "terminated": 0.9913, "truncated": 0.9998},
    "self-play": {"half-moves before an illegal one": 36.3, "illegal moves": 0.027},
}
TRIES = 16  # answers to each question of pass@k


def grades(model, questions, temperature, group_size=1):
    """[Answer, ...] with grades: `group_size` to each question."""
    return graded(rewards, answers(model, questions, temperature, group_size))


def column(values):
    return [(0, 0) if value is None else (float(value), 1) for value in values]


def metric(found, name):
    return column(answer.grade.metrics.get(name) for answer in found)


def metric_columns(found, rows):
    columns = {"answer's reward": column(answer.grade.reward for answer in found)}
    return columns | {row: metric(found, name) for row, name in rows.items()}


def policy(boards, found):
    columns = metric_columns(found, POLICY)
    white, in_check = [board.turn for board in boards], [board.is_check() for board in boards]
    for what, chosen in ("White", white), ("Black", [not turn for turn in white]), ("in check", in_check):
        columns |= {f"{row}: {what}": list(compress(columns[row], chosen)) for row in ("legal move", "best move")}
    return columns


def find_mate(model, mates, temperature, group_size=1):
    """The column of whether each answer mates."""
    moves = best_moves(model, [fen for fen, _ in mates], temperature, group_size)
    return column(move in mates[i // group_size][1] for i, move in enumerate(moves))


def environment(found):
    columns, illegal = metric_columns(found, ENVIRONMENT), [answer.question.truth[3] for answer in found]
    for row in ("next state", "truncated"):
        columns[f"{row}: legal move"] = list(compress(columns[row], [not wrong for wrong in illegal]))
        columns[f"{row}: illegal move"] = list(compress(columns[row], illegal))
    return columns


# ---- All of a model's columns, and the figures that are computed from them ---------------------------------


def measure(model, temperature, positions, mates, openings, tried):
    """{section: {row: column}} of a model at one temperature."""
    text_format, rng = rewards.chess_format(model.config), random.Random(0)
    boards, asked = zip(*((chess.Board(p.fen), rewards.policy_question(p, text_format)) for p in positions))
    sections = {"policy": policy(boards, grades(model, asked, temperature))}
    sections["policy"] |= {row: find_mate(model, found, temperature) for row, found in mates.items()}

    moves = [rewards.environment_question(position, rng, text_format) for position in positions]
    sections["environment"] = environment(grades(model, moves, temperature))
    short = [position._replace(history=(), asked=None) for position in positions]  # the history is the move alone
    short = [rewards.environment_question(position, rng, text_format, illegal_share=0) for position in short]
    found = grades(model, short, temperature)
    sections["environment"]["next state: legal move, short history"] = metric(found, "next_state")

    if openings:
        sections["self-play"] = games.count("self", *games.play(model, openings, temperature))
        starts = [games.START] * (len(openings) if temperature else 1)  # all would be the same game
        lengths, _ = games.count("self", *games.play(model, starts, temperature)).values()
        sections["self-play"]["half-moves from the starting position"] = lengths
    if temperature == 1 and tried:
        several = {"best move": metric(grades(model, asked[:tried], 1, TRIES), "best")}
        several |= {row: find_mate(model, found[:tried], 1, TRIES) for row, found in mates.items()}
        several["next state"] = metric(grades(model, moves[:tried], 1, TRIES), "next_state")
        sections["pass@k"] = {
            f"{row}: pass@{k}": some_right(tries, k) for row, tries in several.items() for k in (1, 4, 16)
        }
    return {name: {row: c for row, c in columns.items() if c} for name, columns in sections.items()}


def find_mates(positions, count):
    """On held-out boards: the positions themselves, and those one move after a position that is won by ten pawns.

    A bad reply in a won position often allows mate, and a board is held out or not whatever position it comes from.
    """
    found = {}
    for position in positions:
        boards = [chess.Board(position.fen)]
        if any(abs(cp) > 1000 for _, cp in position.moves):
            for move in boards[0].legal_moves:
                boards.append(boards[0].copy(stack=False))
                boards[-1].push(move)
        for board in boards:
            if held_out(board.fen()) and (mating := mating_moves(board)):
                found.setdefault(board_key(board.fen()), (board.fen(), mating))
        if len(found) >= count:
            break
    return list(found.values())[:count]


def read_bigbench(path):
    """Of BIG-bench's checkmate_in_one/task.json: games, each of which stops before the mate."""
    try:
        inputs = [example["input"] for example in json.loads(Path(path).read_text())["examples"]]
        boards = [chess.pgn.read_game(io.StringIO(text)).end().board() for text in inputs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        boards = []
    found = [(board.fen(), mating) for board in boards if (mating := mating_moves(board))]
    if not found:
        fail(f"{path}: expected BIG-bench's checkmate_in_one/task.json, found no game before a mate.")
    return found


def pass_at_k(n, c, k):
    """The chance that one of k answers is right where c of n were, without bias (Chen et al., 2021, Evaluating Large
    Language Models Trained on Code)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def some_right(tries, k):
    """The column of whether one of k answers is right, from one with TRIES answers to each question."""
    groups = [tries[i : i + TRIES] for i in range(0, len(tries), TRIES)]
    right = [int(sum(value for value, _ in group)) if group[0][1] else None for group in groups]
    return column(c if c is None else pass_at_k(TRIES, c, k) for c in right)


def figure(column):
    """(mean, half-width of the 95 % interval), or None where no value is known."""
    return monitor.interval(*zip(*column)) if any(weight for _, weight in column) else None


def spread(column):
    """Numbers with the column's mean and, to first order, its variance: the values themselves where all weights are 1.

    A mean differs from its true value by about the mean of its residuals (Cochran, 1977, chapter 6)."""
    mean, average_weight = figure(column)[0], sum(weight for _, weight in column) / len(column)
    return [mean + (value - mean * weight) / average_weight for value, weight in column]


def difference(a, b):
    """The figure of b - a, for two columns of the same questions."""
    if figure(a) and figure(b):
        mean, half = monitor.interval([y - x for x, y in zip(spread(a), spread(b))])
        return mean, half if figure(a)[1] + figure(b)[1] < math.inf else math.inf


def each_row(function, *models):
    """`function` of the columns of one model or two: {temperature: {section: {row: ...}}}."""
    if not isinstance(models[0], dict):
        return function(*models)
    return {key: each_row(function, *(model[key] for model in models)) for key in models[0]}


# ---- Tables, in Markdown -----------------------------------------------------------------------------------


def cell(row, value, sign=""):
    """A figure (mean, half-width) or a published number as text; a difference has a sign."""
    if value is None:
        return ""
    is_share = not row.startswith(("answer's reward", "half-moves")) and not row.endswith("pawns")
    scale, form, unit = (100, ".1f", " %") if is_share else (1, ".2f", "")
    if isinstance(value, float):
        return f"{scale * value:{form}}{unit}"
    mean, half = value
    clear = (" *" if abs(mean) > half else "  ") if sign else ""
    return monitor.with_interval(scale * mean, scale * half, sign + form) + unit + clear


def table(measured, columns):
    """A row for each row of each section of each of `measured`, with a cell for each of
    {title: {section: {row: value}}}."""
    lengths = {}
    for section, row, column in ((s, row, rows[row]) for m in measured for s, rows in m.items() for row in rows):
        lengths.setdefault(section, {}).setdefault(row, set()).add(len(column))
    lines = [["", "n", *columns]]
    for section, rows in lengths.items():
        lines.append([f"**{section}**", *[""] * (1 + len(columns))])
        for row, n in rows.items():
            values = {title: skill.get(section, {}).get(row) for title, skill in columns.items()}
            cells = [cell(row, value, "+" if title == "B - A" else "") for title, value in values.items()]
            lines.append([row, ", ".join(map(str, sorted(n))), *cells])
    widths = [max(2, *map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments():
    p = argparse.ArgumentParser("python -m rook.benchmark", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", nargs="+", help="a model folder or hub id, or two to compare")
    p.add_argument("--data", nargs="+", default=["builtin"], help="files of positions, of which the held-out are used")
    p.add_argument("--positions", type=number(int, 1), default=1000, help="how many of them at most")
    p.add_argument("--temperature", type=number(float, 0), nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--self-play", type=number(int, 0), default=100, help="games against itself, of each kind")
    p.add_argument(
        "--pass-at-k", type=number(int, 0), default=100, help=f"questions of a kind that get {TRIES} answers"
    )
    p.add_argument("--bigbench", metavar="FILE", help="also find the mates of BIG-bench's checkmate_in_one/task.json")
    p.add_argument("--json", metavar="OUT", help="also write the figures to this file")
    a = p.parse_args()
    if len(a.model) > 2 or len({*a.model}) < len(a.model):
        p.error("give one model, or two different ones to compare.")
    games.check_output(p, a.json)
    return a


def main():
    a = arguments()
    hardware.flush_denormals()
    device = hardware.choose_device()
    dtype = hardware.fastest_dtype(device)
    models = [GPT.load(name).to(device).inference_copy(dtype) for name in a.model]
    loaded = [rewards.load(source, models[0].config) for source in a.data]
    held = distinct(position for _, part in loaded for position in part)
    if not held:
        fail(f"{' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    everything = [position for parts in loaded for part in parts for position in part]
    everything = progress(rng.sample(everything, len(everything)), "mates in one")
    mates = {"mate in one": find_mates(everything, a.positions)}
    positions = rng.sample(held, min(a.positions, len(held)))
    if a.bigbench:
        mates["mate in one: BIG-bench"] = read_bigbench(a.bigbench)[: a.positions]
    openings = games.openings(held, a.self_play)
    asked = positions, mates, openings, a.pass_at_k
    measured = [{f"T={t:g}": measure(model, t, *asked) for t in dict.fromkeys(a.temperature)} for model in models]
    skills, published = [each_row(figure, columns) for columns in measured], {"RookWorld-LM 124M": PUBLISHED}
    change = each_row(difference, *measured) if len(models) == 2 else None
    print(f"{len(positions)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}\n")
    if len(models) == 1:
        print(table(measured[0].values(), skills[0] | published))
    else:
        for t, sections in measured[0].items():
            columns = {"A": skills[0][t], "B": skills[1][t], "B - A": change[t]}
            print(f"{t}\n\n{table([sections], columns | published)}\n")
        print("A is {}, B is {}. * is more than noise: the interval leaves out zero.".format(*a.model))
    if a.json:
        result = {"settings": vars(a), "models": dict(zip(a.model, skills)), "difference": change}
        text = json.dumps(result, indent=2).replace(" Infinity\n", " null\n")  # one value has no interval
        Path(a.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
