"""Games of a model: against itself, in its own environment, or against Stockfish.

python -m tools.games MODEL                          against itself, until its first illegal move
python -m tools.games MODEL --opponent loop          the same, but its environment task writes each next position
python -m tools.games MODEL --opponent stockfish     an illegal move loses

Games start from held-out positions that come early in a game, and all of them advance together, one half-move at a
time. The model plays the move after `B:`. Every figure has a 95 % interval.
"""

import argparse
import itertools
from pathlib import Path

import chess
import chess.pgn
import torch
from tqdm import tqdm

import rewards
from model import GPT
from nanorook import hardware, monitor, stockfish
from nanorook.settings import refuse
from rollout import generate

LONGEST_GAME = 200  # half-moves; RookWorld-LM's games against itself last 36
ILLEGAL, UNTRUE, NORMAL = "illegal move", "untrue answer", "normal"  # how a game ends


def sample(model, questions, temperature, rows=128, seed=0):
    """[(text, hit_limit), ...]: one answer to each of some questions of one kind, `rows` of them sampled at once."""
    if not questions:
        return []
    kind, room = questions[0].kind, model.config.n_positions
    prompts = [model.tokenizer.encode(question.prompt) for question in questions]
    limit = min(rewards.LIMITS[kind], room - max(map(len, prompts)))
    if limit < 1:
        refuse(f"the model's {room} positions leave no room after its longest prompt.")
    noise = torch.rand(len(questions), limit, generator=torch.Generator().manual_seed(seed))
    answers = []
    for i in progress(range(0, len(questions), rows), f"{kind}, temperature {temperature:g}"):
        uniform = noise[i : i + rows].to(model.wte.weight.device)
        batch = generate(model, prompts[i : i + rows], 1, limit, temperature, noise=uniform)
        texts = [model.tokenizer.decode(ids) for ids in batch.tokens.tolist()]
        answers += zip(texts, batch.hit_limit.tolist())
    return answers


def progress(items, title):
    return tqdm(items, title, leave=False, disable=None)


def best_moves(model, fens, temperature, seed=0):
    """The move after `B:` in each position, or None."""
    text_format = rewards.chess_format(model.config)
    questions = [rewards.Question("policy", rewards.policy_prompt(fen, text_format), ()) for fen in fens]
    answers = [rewards.parse_policy(text)[1] for text, _ in sample(model, questions, temperature, seed=seed)]
    return [answer and answer[2][0] for answer in answers]


# ---------------------------------------------------------------------------------------------------------------------
# Games


def openings(positions, count):
    """The earliest of the positions in which a game can go on."""
    unfinished = [position for position in positions if not is_over(chess.Board(position.fen))]
    return sorted(unfinished, key=lambda position: int(position.fen.split(" ")[-1]))[:count]


def is_over(board):
    return board.is_game_over() or board.is_repetition(3) or len(board.move_stack) >= LONGEST_GAME


def is_legal(board, uci):
    return uci in {move.uci() for move in board.legal_moves}


def play(model, starts, temperature, loop=False, opponent=None):
    """(boards, how each game ended). `opponent` is a function of a board; the model has White in every other game."""
    boards, ends, seeds = [chess.Board(start.fen) for start in starts], {}, itertools.count()
    while alive := [i for i in range(len(boards)) if i not in ends]:
        turn = [i for i in alive if opponent is None or boards[i].turn == has_white(i)]
        chosen = best_moves(model, [boards[i].fen() for i in turn], temperature, next(seeds))
        moves = {i: move for i, move in zip(turn, chosen) if is_legal(boards[i], move)}
        ends |= {i: ILLEGAL for i in turn if i not in moves}
        if loop:
            questions = [environment_question(model, starts[i], boards[i], move) for i, move in moves.items()]
            answers = sample(model, questions, temperature, seed=next(seeds))
            grades = [rewards.grade(question, text) for question, (text, _) in zip(questions, answers)]
            ends |= {i: UNTRUE for i, grade in zip(moves, grades) if min(grade.metrics.values()) < 1}
        for i in alive:
            if i not in ends:
                boards[i].push_uci(moves[i] if i in moves else opponent(boards[i]))
                ends |= {i: NORMAL} if is_over(boards[i]) else {}
    return boards, [ends[i] for i in range(len(boards))]


def has_white(i):
    return i % 2 == 0


def environment_question(model, start, board, uci):
    """Asked with the board as python-chess sees it: until the first untrue answer the model has written the same."""
    fen, moves, text_format = board.fen(), [move.uci() for move in board.move_stack], rewards.chess_format(model.config)
    prompt = rewards.environment_prompt(fen, uci, [*start.history, *moves, uci][-10:], text_format)
    return rewards.Question("environment", prompt, rewards.transition(fen, uci))


def start_stockfish(skill, nodes):
    """The opponent, and its name."""
    engine = stockfish.Engine(stockfish.require())
    engine.send("setoption name MultiPV value 1")
    engine.send(f"setoption name Skill Level value {skill}")

    def opponent(board):
        engine.send(f"position fen {board.fen()}")
        move = engine.answer(f"go nodes {nodes}", "bestmove", nodes)[-1].split()[1]
        if not is_legal(board, move):
            raise stockfish.EngineError(f"played {move} in {board.fen()}, which is illegal")
        return move

    return opponent, f"{engine.name}, skill {skill}, {nodes} nodes"


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def result(board, end):
    """As PGN writes it. An illegal move loses; a repetition, or a game that is too long, is a draw."""
    if end == ILLEGAL:
        return "0-1" if board.turn else "1-0"
    return "1/2-1/2" if end == NORMAL and board.result() == "*" else board.result()


def count(opponent, boards, ends):
    """{row: [(value, weight) of each game]}; a figure is the sum of the values divided by the sum of the weights."""
    lengths = [(len(board.move_stack), 1) for board in boards]
    illegal, untrue = ([(end == reason, 1) for end in ends] for reason in (ILLEGAL, UNTRUE))
    if opponent == "self":
        moves = [(bad, bad + good) for (bad, _), (good, _) in zip(illegal, lengths)]
        return {"half-moves before an illegal one": lengths, "illegal moves": moves}
    if opponent == "loop":
        ends = {"ended by an illegal move": illegal, "ended by an untrue answer": untrue}
        return {"half-moves before a deviation": lengths} | ends
    worth = {"1-0": (0, 1), "0-1": (1, 0), "1/2-1/2": (0.5, 0.5)}  # for Black, for White
    points = [worth[result(board, end)][has_white(i)] for i, (board, end) in enumerate(zip(boards, ends))]
    lost = [(p == 0, 1) for p in points]
    return {"score": [(p, 1) for p in points], "lost": lost, "lost by an illegal move": illegal, "half-moves": lengths}


def write_pgn(board, end, white, black):
    game = chess.pgn.Game.from_board(board)
    game.headers.update(White=white, Black=black, Result=result(board, end), Termination=end)
    return f"{game}\n\n"


def check_output(parser, file):
    """Before the work, not after it."""
    if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
        parser.error(f"{file} cannot be written: it is a folder, or in one that does not exist.")


def arguments():
    p = argparse.ArgumentParser("python -m tools.games", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", help="a model folder or hub id")
    p.add_argument("--opponent", choices=["self", "loop", "stockfish"], default="self", help="loop: its environment")
    p.add_argument("--games", type=int, default=100, help="how many, each from a position of its own")
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    p.add_argument("--skill", type=int, default=0, help="Stockfish's Skill Level, 0 to 20")
    p.add_argument("--nodes", type=int, default=1000, help="that Stockfish searches for a move")
    p.add_argument("--data", default="builtin", help="positions, of which the held-out are used")
    p.add_argument("--pgn", metavar="OUT", help="also write the games to this file")
    a = p.parse_args()
    if min(a.games, a.nodes) < 1 or min(a.temperature) < 0 or not 0 <= a.skill <= 20:
        p.error("--games and --nodes have to be at least 1, --temperature at least 0, --skill 0 to 20.")
    check_output(p, a.pgn)
    return a


def main():
    a = arguments()
    opponent, name = start_stockfish(a.skill, a.nodes) if a.opponent == "stockfish" else (None, a.model)
    device = hardware.choose()
    model = GPT.load(a.model).to(device).cast(hardware.fastest_dtype(device))
    starts = openings(rewards.load(a.data, model.config)[1], a.games)
    if not starts:
        refuse(f"{a.data} has no held-out position in which a game can go on; give more positions.")
    figures, pgn = {}, ""
    for temperature in dict.fromkeys(a.temperature):
        boards, ends = play(model, starts, temperature, a.opponent == "loop", opponent)
        rows = count(a.opponent, boards, ends)
        figures[f"T={temperature:g}"] = {row: monitor.interval(*zip(*column)) for row, column in rows.items()}
        for i, (board, end) in enumerate(zip(boards, ends)):
            pgn += write_pgn(board, end, *((a.model, name) if has_white(i) else (name, a.model)))
    print(f"{len(starts)} games of {a.model} against {name}\n\n{monitor.table(figures)}")
    if a.pgn:
        Path(a.pgn).write_text(pgn)


if __name__ == "__main__":
    try:
        main()
    except stockfish.EngineError as error:
        refuse(f"Stockfish {error}.")
