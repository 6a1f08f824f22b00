"""The chess skill of a model on positions that are never trained on, or of two models with their difference.

python -m tools.evaluate MODEL                   the table, greedy and at temperature 1
python -m tools.evaluate MODEL OTHER             two models and their difference

Every figure has a 95 % interval. Two models answer the same questions with the same random numbers, so their
difference is taken question by question: it is more than noise where its interval leaves out zero.

A row of the table is computed from a column, a list with one (value, weight) for each question or game, where
(0, 0) stands for a question that has no value.
"""

import argparse
import json
import random
import sys
from functools import lru_cache
from io import StringIO
from itertools import compress
from pathlib import Path

import chess
import chess.pgn

import rewards
from model import GPT
from nanorook import hardware, monitor, stockfish
from nanorook.positions import board_key, contract_board, game_end, held_out
from nanorook.settings import refuse
from tools import games
from tools.games import best_moves, progress, sample

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
PUBLISHED = {
    "RookWorld-LM 124M": {  # on positions of its own
        "policy": {"best move": 0.166, "top-5 move": 0.392, "mate in one": 0.137, "mate in one: BIG-bench": 0.137},
        "environment": {"next state": 0.9961, "reward": 0.9911, "terminated": 0.9913, "truncated": 0.9998},
        "self-play": {"half-moves before an illegal one": 36.3, "illegal moves": 0.027},
    }
}


# ---------------------------------------------------------------------------------------------------------------------
# Answers and their columns


def sample_and_grade(model, questions, temperature, rows=128):
    """[(text, Grade), ...]"""
    answers = sample(model, questions, temperature, rows)
    return [(text, rewards.grade(q, text, hit_limit)) for q, (text, hit_limit) in zip(questions, answers)]


def column(values):
    return [(0, 0) if value is None else (float(value), 1) for value in values]


def metric_columns(answers, rows):
    columns = {"answer's reward": column(grade.reward for _, grade in answers)}
    return columns | {row: column(grade.metrics.get(name) for _, grade in answers) for row, name in rows.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The policy


def policy(boards, questions, answers, engine, judged):
    """{row: column}. `engine` judges the legal moves of the first `judged` answers that have no label."""
    columns = metric_columns(answers, POLICY)
    white, in_check = [board.turn for board in boards], [board.is_check() for board in boards]
    for what, chosen in ("White", white), ("Black", [not turn for turn in white]), ("in check", in_check):
        for row in ("legal move", "best move"):
            columns[f"{row}: {what}"] = list(compress(columns[row], chosen))
    columns["best move agrees with own evaluations"] = column(agrees(text) for text, _ in answers)
    if engine:
        asked = progress(list(zip(boards, questions, answers))[:judged], "pawns lost")
        columns["lost by a legal move, pawns"] = column(pawns_lost(engine, b, q, *answer) for b, q, answer in asked)
    return columns


def agrees(text):
    """Whether the move after `B:` is the candidate that the answer itself evaluates highest; None where several are."""
    answer = rewards.parse_policy(text)[1]
    if not answer:
        return False
    moves, numbers, (best, _), _ = answer
    top = max(number for number, _ in numbers)
    highest = {move for (move, _), (number, _) in zip(moves, numbers) if number == top}
    return highest == {best} if len(highest) == 1 < len({move for move, _ in moves}) else None


def pawns_lost(engine, board, question, text, grade):
    """What a legal best move gives away; None for any other, and where no move has a label."""
    _, five = rewards.policy_truth(question.prompt, question.truth)
    if not five or not grade.metrics["legal"]:
        return None
    if "cp_loss" in grade.metrics:  # one of the engine's five
        return grade.metrics["cp_loss"]
    top, (best, _) = max(five.values()), rewards.parse_policy(text)[1][2]
    return rewards.pawns_apart(top, min(top, judge(engine, board.fen(), best)))


@lru_cache(None)  # both models and all temperatures often choose the same move
def judge(engine, fen, uci):
    """Pawns that a move is worth, by a search with as many nodes as the label of its position had."""
    board = chess.Board(fen)
    board.push_uci(uci)
    if board.is_game_over():
        return stockfish.MATE / 100 if board.is_checkmate() else 0.0
    return -engine.search_afresh(board)[0][1] / 100


def mating_moves(board):
    checks = [move for move in board.legal_moves if board.gives_check(move)]
    return {move.uci() for move in checks if game_end(board, move) == chess.Termination.CHECKMATE}


def find_mates(positions, count):
    """[(FEN, mating moves)] of held-out boards: the positions themselves, and those one move after a won position.

    A bad reply in a won position often allows mate, and a board is held out or not whatever position it comes from.
    """
    found = {}
    for position in progress(positions, "mates in one"):
        boards = [chess.Board(position.fen)]
        if any(abs(cp) > 100 * rewards.MAX_PAWNS for _, cp in position.moves):
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
    """[(FEN, mating moves)] of BIG-bench's checkmate_in_one/task.json: games, each of which stops before the mate."""
    try:
        inputs = [example["input"] for example in json.loads(Path(path).read_text())["examples"]]
        boards = [chess.pgn.read_game(StringIO(text)).end().board() for text in inputs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        boards = []
    found = [(board.fen(), mating) for board in boards if (mating := mating_moves(board))]
    if not found:
        refuse(f"{path}: expected BIG-bench's checkmate_in_one/task.json, found no game before a mate.")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The environment


def kinds(question):
    """{kind of question: whether this is one}"""
    fen, uci = question.prompt[3:].split("+")[:2]
    board, move = chess.Board(contract_board(fen)), chess.Move.from_uci(uci)
    _, _, over, illegal = question.truth
    legal = {
        "legal move": True,
        "capture": board.is_capture(move),
        "promotion": bool(move.promotion),
        "castling": board.is_castling(move),
        "en passant": board.is_en_passant(move),
        "game over": over,
    }
    return {kind: not illegal and value for kind, value in legal.items()} | {"illegal move": illegal}


def environment(questions, answers):
    columns, asked = metric_columns(answers, ENVIRONMENT), [kinds(question) for question in questions]
    rows = [("next state", kind) for kind in asked[0]] + [("terminated", "game over"), ("truncated", "illegal move")]
    return columns | {f"{row}: {kind}": list(compress(columns[row], [k[kind] for k in asked])) for row, kind in rows}


# ---------------------------------------------------------------------------------------------------------------------
# All of a model's columns, and the figures that are computed from them


def measure(model, temperature, positions, mates, openings, engine, judged):
    """{section: {row: column}} of a model at one temperature."""
    playable = [position for position in positions if any(chess.Board(position.fen).legal_moves)]
    text_format, rng = rewards.chess_format(model.config), random.Random(0)
    questions = [rewards.policy_question(position, text_format) for position in playable]
    boards, answers = [chess.Board(p.fen) for p in playable], sample_and_grade(model, questions, temperature)
    sections = {"policy": policy(boards, questions, answers, engine, judged)}
    for row, found in mates.items():
        moves = best_moves(model, [fen for fen, _ in found], temperature)
        sections["policy"][row] = column(move in mating for move, (_, mating) in zip(moves, found))

    questions = [rewards.environment_question(position, rng, text_format) for position in positions]
    sections["environment"] = environment(questions, sample_and_grade(model, questions, temperature))
    short = [position._replace(history=(), asked=None) for position in playable]  # the history is the move alone
    questions = [rewards.environment_question(position, rng, text_format, illegal_share=0) for position in short]
    row, answers = "next state: legal move, short history", sample_and_grade(model, questions, temperature)
    sections["environment"][row] = column(grade.metrics["next_state"] for _, grade in answers)

    if openings:
        sections["self-play"] = games.count("self", *games.play(model, openings, temperature))
    return {name: {row: c for row, c in columns.items() if c} for name, columns in sections.items()}


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
        return monitor.interval([y - x for x, y in zip(spread(a), spread(b))])


def each_row(function, *models):
    """`function` of the columns of one model or two: {temperature: {section: {row: ...}}}."""
    return {
        t: {s: {row: function(*(m[t][s][row] for m in models)) for row in columns} for s, columns in sections.items()}
        for t, sections in models[0].items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables, in Markdown


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
    return f"{scale * mean:{sign}{form}} ± {scale * half:{form}}{unit}{clear}"


def table(measured, columns):
    """A row for each row of each section, with a cell for each of {title: {section: {row: value}}}."""
    lines = [["", "n", *columns]]
    for section, rows in measured.items():
        lines.append([f"**{section}**", *[""] * (1 + len(columns))])
        for row, column in rows.items():
            values = {title: skill.get(section, {}).get(row) for title, skill in columns.items()}
            cells = [cell(row, value, "+" if title == "B - A" else "") for title, value in values.items()]
            lines.append([row, str(len(column)), *cells])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments():
    p = argparse.ArgumentParser("python -m tools.evaluate", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", nargs="+", help="a model folder or hub id, or two to compare")
    p.add_argument("--data", nargs="+", default=["builtin"], help="files of positions, of which the held-out are used")
    p.add_argument("--positions", type=int, default=1000, help="how many of them at most")
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--judged", type=int, default=500, help="answers whose move Stockfish judges, for pawns lost")
    p.add_argument("--self-play", type=int, default=100, help="games against itself")
    p.add_argument("--bigbench", metavar="FILE", help="also find the mates of BIG-bench's checkmate_in_one/task.json")
    p.add_argument("--json", metavar="OUT", help="also write the figures to this file")
    a = p.parse_args()
    if len(a.model) > 2:
        p.error("give one model, or two to compare.")
    if a.positions < 1 or min(*a.temperature, a.judged, a.self_play) < 0:
        p.error("--positions has to be at least 1, other numbers at least 0.")
    games.check_output(p, a.json)
    return a


def main():
    a = arguments()
    device = hardware.choose()
    dtype = hardware.fastest_dtype(device)
    models = [GPT.load(name).to(device).cast(dtype) for name in a.model]
    loaded = [rewards.load(source, models[0].config) for source in a.data]
    held = [position for _, part in loaded for position in part]
    if not held:
        refuse(f"{' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    everything = [position for parts in loaded for part in parts for position in part]
    mates = {"mate in one": find_mates(rng.sample(everything, len(everything)), a.positions)}
    positions = rng.sample(held, min(a.positions, len(held)))
    if a.bigbench:
        mates["mate in one: BIG-bench"] = read_bigbench(a.bigbench)[: a.positions]
    openings = games.openings(held, a.self_play)
    engine = stockfish.Engine(stockfish.require()) if a.judged and stockfish.find() else None
    if a.judged and not engine:
        print("Without Stockfish (apt install stockfish) it is not known how many pawns a move loses.", file=sys.stderr)

    asked = positions, mates, openings, engine, a.judged
    measured = [{f"T={t:g}": measure(model, t, *asked) for t in dict.fromkeys(a.temperature)} for model in models]
    skills = [each_row(figure, columns) for columns in measured]
    change = each_row(difference, *measured) if len(models) == 2 else None
    print(f"{len(positions)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}\n")
    if len(models) == 1:
        print(table(next(iter(measured[0].values())), skills[0] | PUBLISHED))
    else:
        for t, sections in measured[0].items():
            columns = {"A": skills[0][t], "B": skills[1][t], "B - A": change[t]}
            print(f"{t}\n\n{table(sections, columns | PUBLISHED)}\n")
        print("A is {}, B is {}. * is more than noise: the interval leaves out zero.".format(*a.model))
    if a.json:
        result = {"settings": vars(a), "models": dict(zip(a.model, skills)), "difference": change}
        Path(a.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except stockfish.EngineError as error:
        refuse(f"Stockfish {error}.")
