"""The table of chess skill of a model, or of two with their difference, on positions they have never been trained on.

Every figure has a 95 % interval. Two models answer the same prompts, so their difference is taken prompt by prompt
(paired bootstrap; Efron and Tibshirani, 1993): it counts as more than noise where its interval leaves out zero.
A column of figures is an array (n, 2): for each prompt or game a value and its weight, 0 where there is no value.
"""

import argparse
import json
import random
import sys
from functools import lru_cache, partial
from pathlib import Path

import chess
import numpy as np
import torch
from tqdm import tqdm

import data
import tasks
from engine import MATE, Engine, EngineError, find_stockfish
from machine import fastest_dtype, prepare
from model import GPT
from rewards import distance, read_policy
from skill import answers, ask, interval
from tokenizer import LoadError
from tools import games, replace
from tools.mates import find_mates, read_bigbench

RESAMPLES = 2000

# What is shown, and the part of a grade that it is (rewards.py says what each means); `worth` is the reward itself.
POLICY = "structure", "legal", "best", "top5", "candidates", "candidates_legal", "eval_mae"
ENVIRONMENT = {
    "next_state": "next_state",
    "next_state_nls": "next_state_nls",
    "reward": "reward_match",
    "reward_mae": "reward_mae",
    "terminated": "terminated_match",
    "truncated": "truncated_match",
}
PLAIN = {"eval_mae", "cp_loss", "reward_mae", "half_moves"}  # pawns, rewards, half-moves; the others are shares

PUBLISHED = {  # RookWorld-LM 124M, on positions of its own
    "policy": {"best": 0.166, "top5": 0.392, "mate_in_one": 0.137},
    "environment": {"next_state": 0.9961, "reward": 0.9911, "terminated": 0.9913, "truncated": 0.9998},
    "self-play": {"half_moves": 36.3, "illegal": 0.027},
}


# ---------------------------------------------------------------------------------------------------------------------
# Figures of one model: {section: {name: column}}


def column(values):
    return np.array([(0, 0) if value is None else (value, 1) for value in values], float)  # (n, 2)


def labelled(positions, engine):
    """The positions, those without labels with Stockfish's if it is there."""
    found = []
    for position in tqdm(positions, desc="labels", unit=" positions", disable=None, leave=False):
        if engine and not position.moves:
            position = position._replace(moves=engine.search_afresh(chess.Board(position.fen)))
        found.append(position)
    return found


@lru_cache(None)  # both models and temperatures often choose the same move
def judge(engine, fen, uci):
    """Centipawns that a move is worth, with as many nodes as the label of its position had."""
    board = chess.Board(fen)
    board.push_uci(uci)
    if board.is_game_over():
        return MATE if board.is_checkmate() else 0
    return -engine.search_afresh(board)[0][1]


def cp_loss(engine, sample, text, grade):
    """Pawns that a legal best move gives away; None for any other."""
    if not sample.labels or not grade.parts["legal"]:
        return None
    if "cp_loss" in grade.parts:  # one of the labelled five
        return grade.parts["cp_loss"]
    top, worth = sample.labels[0][1], judge(engine, tasks.policy_fen(sample.prompt), read_policy(text)[1][2])
    return distance(top / 100, min(top, worth) / 100)


PLAYS = {"white": lambda board: board.turn, "black": lambda board: not board.turn, "in check": chess.Board.is_check}


def by_play(columns, boards):
    """The policy's sections: all, where it plays White or Black, and where it is in check."""
    sections = {"policy": columns}
    for play, test in PLAYS.items():
        mine = {name: c[[test(board) for board in boards[name]]] for name, c in columns.items()}
        sections[f"policy {play}"] = {name: c for name, c in mine.items() if len(c)}
    return sections


def boards_of(samples):
    return [chess.Board(tasks.policy_fen(sample.prompt)) for sample in samples]


def policy(say, samples, mates, chess_format, engine, judged):
    texts, grades = say(samples, "policy")
    columns = {"worth": column([g.reward for g in grades])}
    columns |= {name: column([g.parts.get(name) for g in grades]) for name in POLICY}
    boards = dict.fromkeys(columns, boards_of(samples))
    if engine:
        rows = zip(samples[:judged], texts, tqdm(grades[:judged], desc="cp_loss", disable=None, leave=False))
        columns["cp_loss"] = column([cp_loss(engine, *row) for row in rows])
        boards["cp_loss"] = boards["legal"][:judged]
    for name, positions in mates.items():
        asked = [tasks.Sample(tasks.policy_prompt(fen, chess_format), ()) for fen, _ in positions]
        said = [(read_policy(text)[1] or (None,) * 3)[2] for text in say(asked, name)[0]]
        columns[name] = column([move in mating for move, (_, mating) in zip(said, positions)])
        boards[name] = boards_of(asked)
    return by_play({name: c for name, c in columns.items() if len(c)}, boards)


KINDS = {  # of a legal move, which ends the game as `end` says
    "capture": lambda board, move, end: board.is_capture(move),
    "promotion": lambda board, move, end: move.promotion,
    "castling": lambda board, move, end: board.is_castling(move),
    "en passant": lambda board, move, end: board.is_en_passant(move),
    "mate": lambda board, move, end: end == chess.Termination.CHECKMATE,
    "stalemate": lambda board, move, end: end == chess.Termination.STALEMATE,
}


def kinds(sample):
    """Which of them an environment's prompt asks about, or that its move is illegal."""
    fen, uci, *_ = sample.prompt[3:].split("+")
    board, move = chess.Board(tasks.contract(fen)), chess.Move.from_uci(uci)
    if not board.is_legal(move):
        return {"illegal"}
    end = tasks.game_end(board, move)
    return {name for name, test in KINDS.items() if test(board, move, end)}


def environment(say, samples):
    _, grades = say(samples, "environment")
    columns = {"worth": column([g.reward for g in grades])}
    columns["invalid"] = column([1 - g.parts["structure"] for g in grades])
    columns |= {name: column([g.parts.get(part) for g in grades]) for name, part in ENVIRONMENT.items()}
    sections, asked = {"environment": columns}, [kinds(sample) for sample in samples]
    for kind in (*KINDS, "illegal"):
        of_kind = np.array([kind in k for k in asked])
        if of_kind.any():
            names = "next_state", "reward", "terminated", "truncated"
            sections[f"environment {kind}"] = {name: columns[name][of_kind] for name in names}
    return sections


def measure(model, name, a, held_out, mates, engine, temperature):
    """All sections of one model at one temperature, and its games against Stockfish as PGN."""
    generator = torch.Generator(model.wte.weight.device).manual_seed(0)
    chess_format = model.config.chess_format

    def say(samples, what):
        show = partial(tqdm, desc=f"{what} T={temperature:g}", unit=" chunks", disable=None, leave=False)
        return answers(model, samples, temperature, generator, progress=show)

    samples = ask(held_out, len(held_out), chess_format)
    questions = [sample for sample in samples if sample.prompt.startswith("P: ")]
    sections = policy(say, questions, mates, chess_format, engine, a.judged)
    sections |= environment(say, samples[len(questions) :])
    openings = sorted(held_out, key=lambda position: int(position.fen.split(" ")[-1]))
    starts = [position for position in openings if any(chess.Board(position.fen).legal_moves)][: a.self_play]
    played = []
    if starts:
        sections["self-play"] = games.self_play(model, starts, temperature, generator)
        sections["closed loop"] = games.closed_loop(model, starts, temperature, generator)
    if a.games:
        title = f"Stockfish skill {a.level}"
        sections[title], played = games.match(model, name, a.games, a.level, temperature, generator)
    return sections, played


# ---------------------------------------------------------------------------------------------------------------------
# From columns to figures


def figure(c):
    """(mean, half-width of the 95 % interval), or None where no value is known."""
    return interval(*c.T.tolist()) if c[:, 1].any() else None


@lru_cache(None)
def resamples(n):
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)  # (RESAMPLES, n)


def difference(a, b):
    """b - a of two columns for the same prompts or games: (mean, low, high) of its 95 % interval, or None."""
    if not (a[:, 1].any() and b[:, 1].any()):
        return None
    mean = b[:, 0].sum() / b[:, 1].sum() - a[:, 0].sum() / a[:, 1].sum()
    x, y = resamples(len(a)) @ a, resamples(len(b)) @ b  # (RESAMPLES, 2), the same draws for both
    with np.errstate(invalid="ignore"):  # a draw may hold nothing that counts
        return mean, *np.nanpercentile(y[:, 0] / y[:, 1] - x[:, 0] / x[:, 1], [2.5, 97.5])


def figures(function, *models):
    """`function` of the models' columns: {temperature: {section: {name: ...}}}."""
    return {
        t: {s: {n: function(*(m[t][s][n] for m in models)) for n in columns} for s, columns in sections.items()}
        for t, sections in models[0].items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables, in Markdown


def write(name, value):
    """A figure (mean, half-width), a difference (mean, low, high), a published number, or nothing."""
    if value is None:
        return ""
    scale, form, unit = (1, ".2f", "") if name in PLAIN else (100, ".1f", " %")
    if isinstance(value, float):
        return f"{scale * value:{form}}{unit}"
    if len(value) == 2:
        return " ± ".join(f"{scale * v:{form}}" for v in value) + unit
    mean, low, high = (f"{scale * v:+{form}}" for v in value)
    return f"{mean} [{low}, {high}] " + ("*" if value[1] > 0 or value[2] < 0 else " ")


def table(sizes, columns):
    """A row for each name of each section, with a cell for each of {title: {section: {name: value}}}."""
    rows = [["", "n", *columns]]
    for section, names in sizes.items():
        rows.append([f"**{section}**", *[""] * (1 + len(columns))])
        for name, n in names.items():
            cells = (write(name, values.get(section, {}).get(name)) for values in columns.values())
            rows.append([name, str(n), *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(names, sizes, skills, change):
    published = {"RookWorld-LM 124M": PUBLISHED}
    title = {t: "greedy" if t == "T=0" else t for t in sizes}
    if change is None:
        print(table(sizes["T=0"], {title[t]: skills[0][t] for t in sizes} | published))
        return
    for t in sizes:
        columns = {"A": skills[0][t], "B": skills[1][t], "B - A": change[t]}
        print(f"{title[t]}\n\n{table(sizes[t], columns | published)}\n")
    print(f"A is {names[0]}, B is {names[1]}.")
    print("* is more than noise: the 95 % interval of the difference leaves out zero.")


# ---------------------------------------------------------------------------------------------------------------------


def arguments():
    p = argparse.ArgumentParser("python -m tools.evaluate", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", nargs="+", help="a model folder or hub id, or two to compare")
    p.add_argument("--data", default="builtin", help="positions, as data.py reads them; the held-out ones are used")
    p.add_argument("--limit", type=int, help="how many of them at most")
    p.add_argument("--temperature", type=float, default=1.0, help="of the sampled figures; the others are greedy")
    p.add_argument("--judged", type=int, default=500, help="prompts whose moves Stockfish judges, for cp_loss")
    p.add_argument("--self-play", type=int, default=100, help="games against itself, and as many in the closed loop")
    p.add_argument("--games", type=int, default=0, help="games against Stockfish, at each temperature")
    p.add_argument("--level", type=int, default=0, help="Stockfish's skill level in them, 0 to 20")
    p.add_argument("--pgn", default="games.pgn", help="where those games are written")
    p.add_argument("--bigbench", metavar="FILE", help="also find the mates of BIG-bench's checkmate_in_one/task.json")
    p.add_argument("--json", metavar="OUT", help="also write the figures to this file")
    a = p.parse_args()
    if len(a.model) > 2:
        p.error("give one model, or two to compare.")
    if a.limit is not None and a.limit < 1:
        p.error("--limit has to be at least 1.")
    if min(a.temperature, a.judged, a.self_play, a.games) < 0 or not 0 <= a.level <= 20:
        p.error("numbers have to be at least 0, and --level at most 20.")
    for path in filter(None, (a.json, a.pgn)):  # known now rather than after minutes of work
        if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            p.error(f"{path} cannot be written: it is a folder, or in one that does not exist.")
    return a


def stockfish(a):
    """The judge of moves without a label, where there is one; a match cannot do without."""
    try:
        return Engine(find_stockfish()) if a.judged or a.games else None
    except SystemExit as missing:
        if a.games:
            raise
        print(f"cp_loss is left out. {missing}", file=sys.stderr)


def main():
    a = arguments()
    prepare()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    positions = data.load(a.data)
    held_out = data.split(positions)[1]
    if not held_out:
        sys.exit(f"error: {a.data} has no held-out position; give more positions.")
    held_out = random.Random(0).sample(held_out, min(a.limit or len(held_out), len(held_out)))
    mates = {"mate_in_one": find_mates(positions)[: a.limit]}
    if a.bigbench:
        mates["mate_in_one_bigbench"] = read_bigbench(a.bigbench)[: a.limit]
    dtype, measured, played = fastest_dtype(device), [], []
    models = [GPT.load(name).to(device).cast(dtype) for name in a.model]
    engine = stockfish(a)
    held_out = labelled(held_out, engine)
    for name, model in zip(a.model, models):
        measured.append({})
        for temperature in dict.fromkeys((0.0, a.temperature)):
            sections, pgns = measure(model, name, a, held_out, mates, engine, temperature)
            measured[-1][f"T={temperature:g}"] = sections
            played += pgns
    skills = [figures(figure, m) for m in measured]
    change = figures(difference, *measured) if len(models) == 2 else None
    print(f"{len(held_out)} held-out positions of {a.data}, on {device} in {str(dtype).removeprefix('torch.')}\n")
    show(a.model, figures(len, measured[0]), skills, change)
    if played:
        replace(a.pgn, "\n\n".join(played) + "\n")
        print(f"{a.pgn} has the games.")
    if a.json:
        result = {"settings": vars(a), "models": dict(zip(a.model, skills)), "difference": change}
        replace(a.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        sys.exit(f"error: {error}")
    except EngineError as error:
        sys.exit(f"error: Stockfish {error}.")
