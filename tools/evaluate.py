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
import math
import os
import random
import sys
from functools import lru_cache
from io import StringIO
from pathlib import Path

import chess
import chess.pgn
import torch
from tqdm import tqdm

import rewards
from model import GPT
from nanorook import hardware, monitor, stockfish
from nanorook.positions import DataError, board_key, contract_board, game_end, held_out
from nanorook.tokenizer import LoadError
from rollout import generate, read

LONGEST_GAME = 200  # half-moves, in self-play; RookWorld-LM's games against itself last 36

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
PUBLISHED = {  # RookWorld-LM 124M, on positions of its own
    "policy": {"best move": 0.166, "top-5 move": 0.392, "mate in one": 0.137, "mate in one: BIG-bench": 0.137},
    "environment": {"next state": 0.9961, "reward": 0.9911, "terminated": 0.9913, "truncated": 0.9998},
    "self-play": {"half-moves before an illegal one": 36.3, "illegal moves": 0.027},
}
PLAIN = {"answer's reward", "half-moves before an illegal one"}  # and what ends in "pawns"; the others are shares


# ---------------------------------------------------------------------------------------------------------------------
# Questions and answers


def sample(model, questions, temperature, rows, seed=0):
    """[(text, hit_limit), ...]: one answer to each of some questions of one kind, `rows` of them sampled at once."""
    if not questions:
        return []
    kind, room = questions[0].kind, model.config.n_positions
    prompts = [model.tokenizer.encode(question.prompt) for question in questions]
    limit = min(rewards.LIMITS[kind], room - max(map(len, prompts)))
    if limit < 1:
        raise LoadError(f"the model's {room} positions leave no room after its longest prompt.")
    noise = torch.rand(len(questions), limit, generator=torch.Generator().manual_seed(seed))
    answers = []
    for i in progress(range(0, len(questions), rows), f"{kind}, temperature {temperature:g}"):
        uniform = noise[i : i + rows].to(model.wte.weight.device)
        batch = generate(model, prompts[i : i + rows], 1, limit, temperature, noise=uniform)
        texts = [read(model.tokenizer, ids)[0] for ids in batch.tokens.tolist()]
        answers += zip(texts, batch.hit_limit.tolist())
    return answers


def sample_and_grade(model, questions, temperature, rows):
    """[(text, Grade), ...]"""
    answers = sample(model, questions, temperature, rows)
    return [(text, rewards.grade(q, text, hit_limit)) for q, (text, hit_limit) in zip(questions, answers)]


def progress(items, title):
    return tqdm(items, title, leave=False, disable=None)


def policy_questions(fens, config):
    text_format = rewards.chess_format(config)
    return [rewards.Question("policy", rewards.policy_prompt(fen, text_format), ()) for fen in fens]


def board_of(question):
    return chess.Board(contract_board(question.prompt[3:].split("+")[0].strip()))


def best_move(text):
    """The move after `B:`, or None."""
    answer = rewards.parse_policy(text)[1]
    return answer and answer[2][0]


def column(values):
    return [(0, 0) if value is None else (float(value), 1) for value in values]


def select(column, chosen):
    """The part of a column that belongs to some of the questions."""
    return [entry for entry, is_chosen in zip(column, chosen) if is_chosen]


def metric_columns(answers, rows):
    columns = {"answer's reward": column([grade.reward for _, grade in answers])}
    return columns | {row: column([grade.metrics.get(name) for _, grade in answers]) for row, name in rows.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The policy


def policy(questions, answers, engine, judged):
    """{row: column}. `engine` judges the legal moves of the first `judged` answers that have no label."""
    columns, boards = metric_columns(answers, POLICY), [board_of(question) for question in questions]
    for what, chosen in {
        "White": [board.turn for board in boards],
        "Black": [not board.turn for board in boards],
        "in check": [board.is_check() for board in boards],
    }.items():
        for row in ("legal move", "best move"):
            columns[f"{row}: {what}"] = select(columns[row], chosen)
    columns["best move agrees with own evaluations"] = column([agrees(text) for text, _ in answers])
    if engine:
        asked = progress(list(zip(questions, answers))[:judged], "pawns lost")
        columns["lost by a legal move, pawns"] = column([pawns_lost(engine, q, *a) for q, a in asked])
    return columns


def agrees(text):
    """Whether the move after `B:` is the candidate that the answer itself evaluates highest; None where several are."""
    answer = rewards.parse_policy(text)[1]
    if not answer:
        return False
    moves, numbers, (best, _), _ = answer
    highest = max(number for number, _ in numbers)
    first = {move for (move, _), (number, _) in zip(moves, numbers) if number == highest}
    ranked = len({move for move, _ in moves}) > 1 and len(first) == 1
    return first == {best} if ranked else None


def pawns_lost(engine, question, text, grade):
    """What a legal best move gives away; None for any other, and where no move has a label."""
    _, five = rewards.policy_truth(question.prompt, question.truth)
    if not five or not grade.metrics["legal"]:
        return None
    if "cp_loss" in grade.metrics:  # one of the engine's five
        return grade.metrics["cp_loss"]
    top = max(five.values())
    return rewards.pawns_apart(top, min(top, judge(engine, board_of(question).fen(), best_move(text))))


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
        won = any(abs(cp) > 100 * rewards.MAX_PAWNS for _, cp in position.moves)
        if not won and not held_out(position.fen):
            continue
        board = chess.Board(position.fen)
        for move in [None, *(board.legal_moves if won else ())]:  # None: the position itself
            after = board.copy(stack=False)
            if move:
                after.push(move)
            fen = after.fen()
            if held_out(fen) and (mating := mating_moves(after)):
                found.setdefault(board_key(fen), (fen, mating))
        if len(found) >= count:
            break
    return list(found.values())[:count]


def read_bigbench(path):
    """[(FEN, mating moves)] of BIG-bench's checkmate_in_one/task.json: games, each of which stops before the mate."""
    try:
        games = [example["input"] for example in json.loads(Path(path).read_text())["examples"]]
        boards = [chess.pgn.read_game(StringIO(game)).end().board() for game in games]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        boards = []
    found = [(board.fen(), mating) for board in boards if (mating := mating_moves(board))]
    if not found:
        raise DataError(f"{path}: expected BIG-bench's checkmate_in_one/task.json, found no game before a mate.")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The environment

KINDS = {  # of questions, by the board, the move, whether it is legal and how the game ends by it
    "legal move": lambda board, move, legal, end: legal,
    "illegal move": lambda board, move, legal, end: not legal,
    "capture": lambda board, move, legal, end: legal and board.is_capture(move),
    "promotion": lambda board, move, legal, end: legal and bool(move.promotion),
    "castling": lambda board, move, legal, end: legal and board.is_castling(move),
    "en passant": lambda board, move, legal, end: legal and board.is_en_passant(move),
    "game over": lambda board, move, legal, end: bool(end),
}


def kinds(question):
    """The names of KINDS that a question belongs to."""
    board, move = board_of(question), chess.Move.from_uci(question.prompt.split("+")[1])
    legal = board.is_legal(move)
    end = game_end(board, move) if legal else None
    return {name for name, test in KINDS.items() if test(board, move, legal, end)}


def environment(questions, answers):
    columns, asked = metric_columns(answers, ENVIRONMENT), [kinds(question) for question in questions]
    rows = [("next state", kind) for kind in KINDS] + [("terminated", "game over"), ("truncated", "illegal move")]
    return columns | {f"{row}: {kind}": select(columns[row], [kind in k for k in asked]) for row, kind in rows}


def environment_questions(positions, config):
    """(questions as in training, legal moves alone with a history that is the move itself)."""
    rng, text_format = random.Random(0), rewards.chess_format(config)
    usual = [rewards.environment_question(position, rng, text_format) for position in positions]
    playable = [p._replace(history=()) for p in positions if p.asked or any(chess.Board(p.fen).legal_moves)]
    short = [rewards.environment_question(position, rng, text_format, illegal_share=0) for position in playable]
    return usual, [question for question in short if not question.truth[3]]


# ---------------------------------------------------------------------------------------------------------------------
# Self-play


def self_play(model, fens, temperature, rows):
    """Games that last until the first illegal move, all together, one half-move at a time."""
    boards = [chess.Board(fen) for fen in fens]
    illegal, alive = [0] * len(boards), list(range(len(boards)))
    while alive:
        questions = policy_questions([boards[i].fen() for i in alive], model.config)
        half_move = len(boards[alive[0]].move_stack)
        for i, (text, _) in zip(alive, sample(model, questions, temperature, rows, seed=half_move)):
            best = best_move(text)
            if best in {move.uci() for move in boards[i].legal_moves}:
                boards[i].push_uci(best)
            else:
                illegal[i] = 1
        alive = [i for i in alive if not illegal[i] and not is_over(boards[i])]
    legal = [len(board.move_stack) for board in boards]
    return {
        "half-moves before an illegal one": column(legal),
        "illegal moves": [(bad, bad + good) for bad, good in zip(illegal, legal)],
    }


def is_over(board):
    return board.is_game_over() or board.is_repetition(3) or len(board.move_stack) >= LONGEST_GAME


# ---------------------------------------------------------------------------------------------------------------------
# All of a model's columns, and the figures that are computed from them


def measure(model, positions, mates, engine, a, temperature):
    """{section: {row: column}} of a model at one temperature."""
    playable = [p for p in positions if any(chess.Board(p.fen).legal_moves)]
    text_format = rewards.chess_format(model.config)
    questions = [rewards.policy_question(position, text_format) for position in playable]
    answers = sample_and_grade(model, questions, temperature, a.rows)
    sections = {"policy": policy(questions, answers, engine, a.judged)}
    for row, boards in mates.items():
        answers = sample(model, policy_questions([fen for fen, _ in boards], model.config), temperature, a.rows)
        found = [best_move(text) in mating for (text, _), (_, mating) in zip(answers, boards)]
        sections["policy"][row] = column(found)

    usual, short = environment_questions(positions, model.config)
    sections["environment"] = environment(usual, sample_and_grade(model, usual, temperature, a.rows))
    answers = sample_and_grade(model, short, temperature, a.rows)
    row = "next state: legal move, short history"
    sections["environment"][row] = column([grade.metrics["next_state"] for _, grade in answers])

    if a.self_play:
        openings = sorted((p.fen for p in playable), key=lambda fen: int(fen.split(" ")[-1]))[: a.self_play]
        sections["self-play"] = self_play(model, openings, temperature, a.rows)
    return {name: {row: c for row, c in columns.items() if c} for name, columns in sections.items()}


def figure(column):
    """(mean, half-width of the 95 % interval), or None where no value is known."""
    values, weights = zip(*column)
    return monitor.interval(values, weights) if any(weights) else None


def difference(a, b):
    """The figure of b - a, for two columns of the same questions.

    A mean differs from its true value by about the sum of its residuals, here (value - mean · weight) / sum of weights
    (Cochran, 1977, chapter 6), and those of the same question are subtracted before they are squared.
    """
    if not figure(a) or not figure(b):
        return None
    means, sums = [figure(c)[0] for c in (a, b)], [sum(weight for _, weight in c) for c in (a, b)]
    residuals = [[(v - mean * w) / total for v, w in c] for c, mean, total in zip((a, b), means, sums)]
    variance = sum((y - x) ** 2 for x, y in zip(*residuals)) * len(a) / max(1, len(a) - 1)
    return means[1] - means[0], 1.96 * math.sqrt(variance)


def figures(function, *models):
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
    scale, form, unit = (1, ".2f", "") if row in PLAIN or row.endswith("pawns") else (100, ".1f", " %")
    if isinstance(value, float):
        return f"{scale * value:{form}}{unit}"
    mean, half = value
    clear = (" *" if abs(mean) > half else "  ") if sign else ""
    return f"{scale * mean:{sign}{form}} ± {scale * half:{form}}{unit}{clear}"


def table(sizes, columns):
    """A row for each row of each section, with a cell for each of {title: {section: {row: value}}}."""
    lines = [["", "n", *columns]]
    for section, rows in sizes.items():
        lines.append([f"**{section}**", *[""] * (1 + len(columns))])
        for row, n in rows.items():
            values = {title: skill.get(section, {}).get(row) for title, skill in columns.items()}
            cells = [cell(row, value, "+" if title == "B - A" else "") for title, value in values.items()]
            lines.append([row, str(n), *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_tables(names, sizes, skills, change):
    published = {"RookWorld-LM 124M": PUBLISHED}
    titles = {t: "greedy" if t == "T=0" else t for t in sizes}
    if not change:
        print(table(next(iter(sizes.values())), {titles[t]: skills[0][t] for t in sizes} | published))
        return
    for t in sizes:
        columns = {"A": skills[0][t], "B": skills[1][t], "B - A": change[t]}
        print(f"{titles[t]}\n\n{table(sizes[t], columns | published)}\n")
    print(f"A is {names[0]}, B is {names[1]}. * is more than noise: the interval of the difference leaves out zero.")


# ---------------------------------------------------------------------------------------------------------------------


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
    p.add_argument("--rows", type=int, default=128, help="answers that are sampled at once; the result is the same")
    p.add_argument("--json", metavar="OUT", help="also write the figures to this file")
    a = p.parse_args()
    if len(a.model) > 2:
        p.error("give one model, or two to compare.")
    if min(a.positions, a.rows) < 1 or min(*a.temperature, a.judged, a.self_play) < 0:
        p.error("--positions and --rows have to be at least 1, other numbers at least 0.")
    if a.json and (Path(a.json).is_dir() or not Path(a.json).absolute().parent.is_dir()):  # said before the work
        p.error(f"{a.json} cannot be written: it is a folder, or in one that does not exist.")
    return a


def main():
    a = arguments()
    device = hardware.choose()
    dtype = hardware.fastest_dtype(device)
    models = [GPT.load(name).to(device).cast(dtype) for name in a.model]
    sides = [rewards.load(source, models[0].config) for source in a.data]
    positions = [position for _, held in sides for position in held]
    if not positions:
        sys.exit(f"error: {' '.join(a.data)} has no held-out position; give more positions.")
    rng = random.Random(0)
    everything = [position for side in sides for part in side for position in part]
    mates = {"mate in one": find_mates(rng.sample(everything, len(everything)), a.positions)}
    if a.bigbench:
        mates["mate in one: BIG-bench"] = read_bigbench(a.bigbench)[: a.positions]
    positions = rng.sample(positions, min(a.positions, len(positions)))
    engine = stockfish.Engine(stockfish.require()) if a.judged and stockfish.find() else None
    if a.judged and not engine:
        print("Without Stockfish (apt install stockfish) it is not known how many pawns a move loses.", file=sys.stderr)

    measured = []
    for model in models:
        temperatures = dict.fromkeys(a.temperature)
        measured.append({f"T={t:g}": measure(model, positions, mates, engine, a, t) for t in temperatures})
    skills = [figures(figure, columns) for columns in measured]
    change = figures(difference, *measured) if len(models) == 2 else None
    print(f"{len(positions)} held-out positions of {' '.join(a.data)}, on {device} in {str(dtype)[6:]}\n")
    print_tables(a.model, figures(len, measured[0]), skills, change)
    if a.json:
        result = {"settings": vars(a), "models": dict(zip(a.model, skills)), "difference": change}
        Path(f"{a.json}.tmp").write_text(json.dumps(result, indent=2) + "\n")
        os.replace(f"{a.json}.tmp", a.json)


if __name__ == "__main__":
    try:
        main()
    except (LoadError, DataError) as error:
        sys.exit(f"error: {error}")
    except stockfish.EngineError as error:
        sys.exit(f"error: Stockfish {error}.")
