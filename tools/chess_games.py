"""Games of a model: against itself, or against Stockfish.

python -m tools.chess_games MODEL                          against itself, until its first illegal move
python -m tools.chess_games MODEL --opponent stockfish     an illegal move loses

Games start from held-out positions that come early in a game, and advance together, one half-move at a time. The model
plays the move after `B:`; an answer that cannot be read counts as an illegal move. Every figure has a 95 % interval.
"""

import argparse
import itertools
from pathlib import Path

import chess
import chess.pgn
import torch
from chess.engine import EngineError, Limit, SimpleEngine
from tqdm import tqdm

import architectures
import rewards
from nanorook import hardware
from nanorook.settings import fail, number, output_file
from nanorook.statistics import interval, linearised, with_interval
from nanorook.tables import table
from rollout import sample
from rook.positions import distinct, is_sound, load_unfinished, split
from tools.chess_label import require

LONGEST_GAME = 200  # half-moves; RookWorld-LM's games against itself last 36
PATIENCE = 600  # seconds for a move; an engine that needs more hangs
ILLEGAL, NORMAL = "illegal move", "normal"  # how a game ends


def answers(model, questions, temperature, group_size=1, seed=0):
    """[Answer, ...]: `group_size` answers to each of some questions of one kind."""
    generator, limit = torch.Generator().manual_seed(seed), max(rewards.LIMITS.values())
    noise = torch.rand(len(questions), group_size, limit, generator=generator)
    rollouts = sample(model, questions, group_size, rewards.LIMITS, temperature, noise=noise, max_rows=128)
    rollouts = tqdm(rollouts, f"answers, temperature {temperature:g}", leave=False, disable=None)
    return [answer for rollout in rollouts for answer in rollout.answers]


def best_moves(model, fens, temperature, seed):
    """For each position the move after `B:` in the model's answer, or None."""
    text_format = rewards.chess_format(model.config)
    questions = [rewards.Question("policy", rewards.policy_prompt(fen, text_format), ()) for fen in fens]
    found = [rewards.parse_policy(a.text)[1] for a in answers(model, questions, temperature, seed=seed)]
    return [answer and answer[2][0] for answer in found]


def openings(positions, count):
    """The earliest positions in which the game is not over, each board once."""
    early = sorted(positions, key=lambda position: int(position.fen.split(" ")[-1]))
    early = distinct(position._replace(asked=None) for position in early)
    going_on = (p for p in early if is_sound(p) and not is_over(chess.Board(p.fen)))
    return list(itertools.islice(going_on, count))


def is_over(board):
    return board.is_game_over() or board.is_repetition(3) or len(board.move_stack) >= LONGEST_GAME


def has_white(i):
    return i % 2 == 0


def play(model, starts, temperature, opponent=None):
    """(boards, how each game ended). `opponent` is a function from a board to a move; without one the model plays both
    sides, and with one it has White in every other game."""
    boards, ends, seeds = [chess.Board(start.fen) for start in starts], {}, itertools.count()
    while alive := [i for i in range(len(boards)) if i not in ends]:
        turn = [i for i in alive if opponent is None or boards[i].turn == has_white(i)]
        chosen = best_moves(model, [boards[i].fen() for i in turn], temperature, next(seeds))
        moves = {i: uci for i, uci in zip(turn, chosen) if uci in {move.uci() for move in boards[i].legal_moves}}
        ends |= {i: ILLEGAL for i in turn if i not in moves}
        for i in alive:
            if i not in ends:
                boards[i].push_uci(moves[i] if i in moves else opponent(boards[i]))
                ends |= {i: NORMAL} if is_over(boards[i]) else {}
    return boards, [ends[i] for i in range(len(boards))]


def result(board, end):
    """As PGN writes it. An illegal move loses; a repetition, or a game that is too long, is a draw."""
    if end == ILLEGAL:
        return "0-1" if board.turn else "1-0"
    return "1/2-1/2" if end == NORMAL and board.result() == "*" else board.result()


def count(opponent, boards, ends):
    """{row: [the value of each game]}. Illegal moves are a share of all moves, so a long game counts for more."""
    lengths, illegal = [len(board.move_stack) for board in boards], [end == ILLEGAL for end in ends]
    if opponent == "self":
        moves = [bad + good for bad, good in zip(illegal, lengths)]
        return {"half-moves before an illegal one": lengths, "illegal moves": linearised(illegal, moves)}
    white = {"1-0": 1, "0-1": 0, "1/2-1/2": 0.5}
    points = [abs((not has_white(i)) - white[result(*game)]) for i, game in enumerate(zip(boards, ends))]
    lost = [p == 0 for p in points]
    return {"score": points, "lost": lost, "lost by an illegal move": illegal, "half-moves": lengths}


def report(a, model, opponent, name):
    """Plays the games, prints their figures and writes them to a.pgn."""
    starts = openings(split(load_unfinished(a.data))[1], a.games)
    if not starts:
        fail(f"{a.data} has no held-out position in which a game can go on; give more positions.")
    columns, pgn = [], ""
    for t in a.temperature:
        boards, ends = play(model, starts, t, opponent)
        found = count(a.opponent, boards, ends)
        columns.append([f"T={t:g}, n={len(boards)}", *(with_interval(*interval(values)) for values in found.values())])
        for i, (board, end) in enumerate(zip(boards, ends)):
            white, black = (a.model, name) if has_white(i) else (name, a.model)
            game = chess.pgn.Game.from_board(board)
            game.headers.update(
                Event=f"temperature {t:g}", White=white, Black=black, Result=result(board, end), Termination=end
            )
            pgn += f"{game}\n\n"
    print(f"Games of {a.model} against {name}\n\n{table([*zip(['', *found], *columns)])}")
    if a.pgn:
        Path(a.pgn).write_text(pgn)


def main():
    p = argparse.ArgumentParser("python -m tools.chess_games", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", help="a model folder or hub id")
    p.add_argument("--opponent", choices=["self", "stockfish"], default="self")
    p.add_argument("--games", type=number(int, 1), default=100, help="number of games")
    p.add_argument("--temperature", type=number(float, 0), nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--skill", type=number(int, 0, 20), default=0, help="Stockfish's Skill Level, 0 to 20")
    p.add_argument("--nodes", type=number(int, 1), default=1000, help="nodes that Stockfish searches for a move")
    p.add_argument("--data", default="builtin", help="a file of positions; only the held-out ones are used")
    p.add_argument("--pgn", metavar="OUT", type=output_file, help="also write the games to this file")
    a = p.parse_args()
    device, dtype = hardware.prepare()
    model = architectures.load(a.model).to(device).inference_copy(dtype)
    if a.opponent == "self":
        report(a, model, None, a.model)
        return
    try:
        engine = SimpleEngine.popen_uci(require())
    except (EngineError, OSError) as error:
        fail(f"Stockfish did not start: {error or type(error).__name__}.")
    with engine:
        engine.configure({"Skill Level": a.skill})
        name = f"{engine.id['name']}, skill {a.skill}, {a.nodes} nodes"
        limit = Limit(PATIENCE, nodes=a.nodes)
        report(a, model, lambda board: engine.play(board, limit).move.uci(), name)


if __name__ == "__main__":
    try:
        main()
    except (EngineError, TimeoutError) as error:
        fail(f"Stockfish failed: {error or type(error).__name__}.")
