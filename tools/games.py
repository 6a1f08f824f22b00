"""Games of a model: against itself, in its own world model, against Stockfish.

All games of a kind advance together, one rollout for each half-move. What is counted comes back as an array (games, 2)
for each name: a value and its weight, so that the figure is the sum of the values over the sum of the weights.
"""

from functools import partial

import chess
import chess.pgn
import numpy as np
from tqdm import tqdm

import tasks
from engine import Engine, find_stockfish
from rewards import read_environment, read_policy
from skill import answers

LONGEST = 200  # half-moves; RookWorld-LM's games against itself last 36
NODES = 10_000  # of Stockfish for a move

bar = partial(tqdm, unit=" games", disable=None, leave=False)


def choose(model, boards, temperature, generator):
    """The moves that the policy wants on each board: the one after B:, then its candidates, as it evaluates them."""
    chess_format = model.config.chess_format
    samples = [tasks.Sample(tasks.policy_prompt(board.fen(), chess_format), ()) for board in boards]
    for text in answers(model, samples, temperature, generator)[0]:
        moves, numbers, best, _ = read_policy(text)[1] or ((), (), None, ())
        yield [best, *(move for _, move in sorted(zip(numbers, moves), reverse=True))]


def is_legal(board, uci):
    return uci in {move.uci() for move in board.legal_moves}


def is_over(board):
    return board.is_game_over() or board.is_repetition(3) or len(board.move_stack) >= LONGEST


def ratio(values, weights=None):
    return np.stack([values, np.ones(len(values)) if weights is None else weights], 1).astype(float)  # (games, 2)


def self_play(model, starts, temperature, generator):
    """Half-moves before the first illegal one (or the game's end), and the share of illegal ones."""
    boards = [chess.Board(position.fen) for position in starts]
    illegal = np.zeros(len(boards))
    alive = list(range(len(boards)))
    with bar(total=len(boards), desc=f"self-play T={temperature:g}") as shown:
        while alive:
            for i, (best, *_) in zip(alive, choose(model, [boards[i] for i in alive], temperature, generator)):
                if is_legal(boards[i], best):
                    boards[i].push_uci(best)
                else:
                    illegal[i] = 1
            alive = [i for i in alive if not illegal[i] and not is_over(boards[i])]
            shown.update(len(boards) - len(alive) - shown.n)
    half_moves = np.array([len(board.move_stack) for board in boards])
    return {"half_moves": ratio(half_moves), "illegal": ratio(illegal, half_moves + illegal)}


def closed_loop(model, starts, temperature, generator):
    """The policy plays and the environment answers: half-moves for which FEN and flags stay those of python-chess, and
    what ended it: an illegal move of the policy, or an untrue answer of the environment."""
    chess_format = model.config.chess_format
    boards = [chess.Board(position.fen) for position in starts]  # as long as the answers are true, they say the same
    illegal, untrue = np.zeros(len(boards)), np.zeros(len(boards))
    alive = list(range(len(boards)))
    with bar(total=len(boards), desc=f"closed loop T={temperature:g}") as shown:
        while alive:
            asked = []
            for i, (best, *_) in zip(alive, choose(model, [boards[i] for i in alive], temperature, generator)):
                illegal[i] = not is_legal(boards[i], best)
                if not illegal[i]:
                    fen, played = boards[i].fen(), (move.uci() for move in boards[i].move_stack)
                    history = (*starts[i].history, *played, best)[-10:]
                    prompt = tasks.environment_prompt(fen, best, history, chess_format)
                    asked.append((i, best, tasks.Sample(prompt, tasks.transition(fen, best))))
            texts = answers(model, [sample for *_, sample in asked], temperature, generator)[0]
            for (i, best, sample), text in zip(asked, texts):
                fen, _, terminated, truncated = read_environment(text) or ("", 0, False, False)
                untrue[i] = (fen, terminated, truncated) != (sample.labels[0], *sample.labels[2:])
                if not untrue[i]:
                    boards[i].push_uci(best)
            alive = [i for i in alive if not illegal[i] and not untrue[i] and not is_over(boards[i])]
            shown.update(len(boards) - len(alive) - shown.n)
    half_moves = [len(board.move_stack) for board in boards]
    return {"half_moves": ratio(half_moves), "illegal": ratio(illegal), "untrue": ratio(untrue)}


def match(model, name, count, level, temperature, generator):
    """`count` games against Stockfish at a skill level, colours in turn: what they are worth, and the games as PGN.

    The model's move is the first legal one that it wants; where it wants none, it loses. `illegal` is how often the
    very first was not legal.
    """
    engine = Engine(find_stockfish())
    engine.send("setoption name MultiPV value 1", f"setoption name Skill Level value {level}", "ucinewgame")
    boards = [chess.Board() for _ in range(count)]
    lost, illegal, moved = set(), np.zeros(count), np.zeros(count)
    alive = list(range(count))
    with bar(total=count, desc=f"match T={temperature:g}") as shown:
        while alive:
            turn = [i for i in alive if boards[i].turn == (i % 2 == 0)]  # the model has White in even games
            for i in set(alive).difference(turn):
                engine.send(f"position fen {boards[i].fen()}", f"go nodes {NODES}")
                *_, last = engine.answer("bestmove")
                boards[i].push_uci(last.split()[1])
            for i, wanted in zip(turn, choose(model, [boards[i] for i in turn], temperature, generator)):
                legal = [uci for uci in wanted if is_legal(boards[i], uci)]
                moved[i] += 1
                illegal[i] += wanted[0] not in legal
                if legal:
                    boards[i].push_uci(legal[0])
                else:
                    lost.add(i)
            alive = [i for i in alive if i not in lost and not is_over(boards[i])]
            shown.update(count - len(alive) - shown.n)
    engine.close()
    results = [("0-1", "1-0")[i % 2] if i in lost else board.result() for i, board in enumerate(boards)]
    results = [result if result != "*" else "1/2-1/2" for result in results]  # a repetition, or too long
    points = [{"1-0": 1, "0-1": 0, "1/2-1/2": 0.5}[result] for result in results]
    columns = {
        "score": ratio([p if i % 2 == 0 else 1 - p for i, p in enumerate(points)]),
        "half_moves": ratio([len(board.move_stack) for board in boards]),
        "illegal": ratio(illegal, moved),
    }
    games = []
    for i, (board, result) in enumerate(zip(boards, results)):
        white, black = (name, f"{engine.name}, skill {level}")[:: 1 if i % 2 == 0 else -1]
        game = chess.pgn.Game.from_board(board)
        game.headers.update(Event=f"temperature {temperature:g}", White=white, Black=black, Result=result)
        game.headers["Round"] = str(i + 1)
        game.headers["Termination"] = "rules infraction" if i in lost else "normal"
        games.append(str(game))
    return columns, games
