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
from nanorook import monitor, stockfish
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


def answer(model, questions, temperature, rows, seed=0):
    """[(text, Grade), ...]: one answer to each of some questions of one kind, `rows` of them sampled at once."""
    if not questions:
        return []
    prompts = [model.tokenizer.encode(question.prompt) for question in questions]
    limit = min(rewards.LIMITS[questions[0].kind], model.config.n_positions - max(map(len, prompts)))
    if limit < 1:
        raise LoadError(f"the model's {model.config.n_positions} positions leave no room after its longest prompt.")
    noise = torch.rand(len(questions), limit, generator=torch.Generator().manual_seed(seed))
    answers = []
    title = f"{questions[0].kind}, temperature {temperature:g}"
    for i in tqdm(range(0, len(questions), rows), title, unit=" chunks", leave=False, disable=None):
        chunk, uniform = questions[i : i + rows], noise[i : i + rows].to(model.wte.weight.device)
        batch = generate(model, prompts[i : i + rows], 1, limit, temperature, noise=uniform)
        for question, ids, hit_limit in zip(chunk, batch.tokens.tolist(), batch.hit_limit.tolist()):
            text = read(model.tokenizer, ids)[0]
            answers.append((text, rewards.grade(question, text, hit_limit)))
    return answers


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


def of(column, chosen):
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
            columns[f"{row}: {what}"] = of(columns[row], chosen)
    columns["best move agrees with own evaluations"] = column([agrees(text) for text, _ in answers])
    if engine:
        asked = tqdm(list(zip(questions, answers))[:judged], "pawns lost", leave=False, disable=None)
        columns["lost by a legal move, pawns"] = column([pawns_lost(engine, q, *a) for q, a in asked])
    return columns


def agrees(text):
    """Whether the move after `B:` is a candidate that no other is evaluated higher than, by the answer itself."""
    answer = rewards.parse_policy(text)[1]
    if not answer:
        return False
    moves, numbers, (best, _), _ = answer
    highest = max(number for number, _ in numbers)
    return any(move == best and number == highest for (move, _), (number, _) in zip(moves, numbers))


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
    for position in tqdm(positions, "mates in one", unit=" positions", leave=False, disable=None):
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
    return columns | {f"{row}: {kind}": of(columns[row], [kind in k for k in asked]) for row, kind in rows}


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
        for i, text in zip(alive, generate_texts(model, questions, temperature, rows, half_move)):
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
