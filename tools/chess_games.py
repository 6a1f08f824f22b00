"""Games of a model: against itself, or against Stockfish.

python -m tools.chess_games MODEL                          against itself, until its first illegal move
python -m tools.chess_games MODEL --opponent stockfish     an illegal move loses

Games start from held-out positions that come early in a game, or all from the starting position, and advance together,
one half-move at a time. The model plays the move after `B:`. Every figure has a 95 % interval.
"""

import argparse
import itertools
import sys
from pathlib import Path

import chess
import chess.pgn
import torch
from tqdm import tqdm

import architectures
import rewards
from nanorook import hardware
from nanorook.settings import fail, number, output_file
from nanorook.statistics import interval, spread, with_interval
from nanorook.tables import table
from rollout import sample
from rook import stockfish
from rook.positions import Position, distinct, is_sound, load_unfinished, split
from tools.chess_label import require

START = Position(chess.STARTING_FEN, (), ())
LONGEST_GAME = 200  # half-moves; RookWorld-LM's games against itself last 36
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


def start_stockfish(skill, nodes):
    """The opponent, and its name."""
    engine = stockfish.Engine(require())
    engine.send("setoption name MultiPV value 1")
    engine.send(f"setoption name Skill Level value {skill}")

    def opponent(board):
        played = " ".join(move.uci() for move in board.move_stack)  # with which the engine sees repetitions
        engine.send(f"position fen {board.root().fen()} moves {played}")
        words = engine.answer(f"go nodes {nodes}", "bestmove", nodes)[-1].split()
        if words[1:2] not in [[move.uci()] for move in board.legal_moves]:
            raise stockfish.EngineError(f"gave no legal move for {board.fen()}")
        return words[1]

    return opponent, f"{engine.name}, skill {skill}, {nodes} nodes"


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
        return {"half-moves before an illegal one": lengths, "illegal moves": spread(illegal, moves)}
    white = {"1-0": 1, "0-1": 0, "1/2-1/2": 0.5}
    points = [abs((not has_white(i)) - white[result(*game)]) for i, game in enumerate(zip(boards, ends))]
    lost = [p == 0 for p in points]
    return {"score": points, "lost": lost, "lost by an illegal move": illegal, "half-moves": lengths}


def main():
    p = argparse.ArgumentParser("python -m tools.chess_games", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", help="a model folder or hub id")
    p.add_argument("--opponent", choices=["self", "stockfish"], default="self")
    p.add_argument("--games", type=number(int, 1), default=100, help="number of games")
    p.add_argument("--start", choices=["held-out", "initial"], default="held-out", help="initial: the usual start")
    p.add_argument("--temperature", type=number(float, 0), nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--skill", type=number(int, 0, 20), default=0, help="Stockfish's Skill Level, 0 to 20")
    p.add_argument("--nodes", type=number(int, 1), default=1000, help="nodes that Stockfish searches for a move")
    p.add_argument("--data", default="builtin", help="a file of positions; only the held-out ones are used")
    p.add_argument("--pgn", metavar="OUT", type=output_file, help="also write the games to this file")
    a = p.parse_args()
    opponent, name = start_stockfish(a.skill, a.nodes) if a.opponent == "stockfish" else (None, a.model)
    device, dtype = hardware.prepare()
    model = architectures.load(a.model).to(device).inference_copy(dtype)
    held = a.start == "held-out" and openings(split(load_unfinished(a.data))[1], a.games)
    if held == []:
        fail(f"{a.data} has no held-out position in which a game can go on; give more positions.")
    columns, pgn = [], ""
    for t in dict.fromkeys(a.temperature):
        starts = held or [START] * (a.games if t or opponent else 1)  # greedy ones would all be the same
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


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except stockfish.EngineError as error:
        fail(f"Stockfish {error}.")
