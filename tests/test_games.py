import random
import re
import sys
from types import SimpleNamespace

import chess
import chess.pgn
import pytest

import rewards
from nanorook.statistics import interval, with_interval
from rollout import Answer
from rook.positions import Position, contract_board
from tools import chess_games as games
from tools import chess_texts as texts
from tools.chess_texts import mirror

START = Position(chess.STARTING_FEN, (), ())


def answer_of(move):
    return f"M: {move} E: 0.0 B: {move}"


def true_environment(fen, move, history):
    return texts.environment_completion(*rewards.transition(fen, move), "expanded")


def any_move(fen):
    return answer_of(random.Random(fen).choice([move.uci() for move in chess.Board(fen).legal_moves]))


def until(last, policy=any_move):
    return lambda fen: answer_of("e1e9") if int(fen.split()[-1]) == last else policy(fen)


FOOLS_MATE, REPETITION = (("f2f3", "e7e5"), ("g2g4", "d8h4")), (("g1f3", "g8f6"), ("f3g1", "f6g8"))


def scripted(*moves):
    return lambda fen: answer_of(moves[(int(fen.split()[-1]) - 1) % len(moves)][fen.split()[1] == "b"])


def answer_by(monkeypatch, policy=any_move, environment=true_environment):
    """A model answers as these functions of (fen) and of (fen, move, history) do."""

    def sample(model, questions, group_size, *_, **__):
        for question in (question for question in questions for _ in range(group_size)):
            fen, *rest = question.prompt[3:].strip().split("+")
            fen = contract_board(fen.removesuffix("M:").strip())
            text = environment(fen, rest[0], rest[1].split()) if rest else policy(fen)
            text = f"{text.split()[1]} " if question.stop else text  # the first candidate alone
            yield SimpleNamespace(answers=[Answer(question, text, [], False)])

    monkeypatch.setattr(games, "sample", sample)


SELF_PLAY = [(until(6), 10, 1), (lambda fen: "no answer", 0, 1)]
SELF_PLAY += [(scripted(*FOOLS_MATE), 4, 0), (scripted(*REPETITION), 8, 0)]


@pytest.mark.parametrize("policy, half_moves, illegal", SELF_PLAY)
def test_self_play_counts_half_moves_before_an_illegal_one(byte_model, monkeypatch, policy, half_moves, illegal):
    answer_by(monkeypatch, policy)
    counted = games.count("self", *games.play(byte_model, [START], 0.0))
    assert counted["half-moves before an illegal one"] == [half_moves]
    assert counted["illegal moves"] == [illegal / (half_moves + illegal)]


def test_openings_are_the_earliest_positions_in_which_a_game_can_go_on():
    mated = Position("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", (), ())
    early, late = (Position(f"4k3/8/8/8/8/8/8/{rank} w - - 0 {n}", (), ()) for rank, n in (("R3K3", 4), ("Q3K3", 10)))
    assert games.openings([late, mated, early], 5) == [early, late] and games.openings([late, early], 1) == [early]
    copies = [early._replace(asked=move) for move in ("a1a2", "a1a3")]  # questions about one board are one opening
    assert games.openings([*copies, late, mirror(early)], 5) == [early, late]


@pytest.mark.needs("stockfish")
@pytest.mark.parametrize("policy", [until(4), any_move])
def test_the_score_against_stockfish_is_that_of_the_games_written(policy, byte_model, monkeypatch, capsys, tmp_path):
    answer_by(monkeypatch, policy)
    byte_model.save(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    command = "games mine --opponent stockfish --games 4 --temperature 0 --skill 20 --nodes 300 --pgn games.pgn"
    monkeypatch.setattr(sys, "argv", command.split())
    games.main()
    printed = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[3:])
    with open("games.pgn") as file:  # read again by python-chess, which knows how they ended
        played = list(iter(lambda: chess.pgn.read_game(file), None))
    assert len({game.headers["FEN"] for game in played}) == 4  # each from a position of its own
    points, illegal, lengths = [], [], []
    for i, game in enumerate(played):
        board, color = game.end().board(), game.headers["White"] == "mine"
        assert not game.errors and color == (i % 2 == 0)
        illegal.append(game.headers["Termination"] == "illegal move")
        lengths.append(len(list(game.mainline_moves())))
        outcome = board.outcome(claim_draw=True)
        points.append(0.5 if not outcome or outcome.winner is None else int(outcome.winner == color))
        if illegal[-1]:
            assert board.turn == color and not outcome
            points[-1] = 0
        won = {"1-0": chess.WHITE, "0-1": chess.BLACK}.get(game.headers["Result"])
        assert points[-1] == (0.5 if won is None else won == color)
    expected = {"score": points, "lost": [p == 0 for p in points], "lost by an illegal move": illegal}
    for row, values in (expected | {"half-moves": lengths}).items():
        assert printed[row].strip() == with_interval(*interval(values)), row
    assert points == [0] * 4 and any(illegal) == (policy != any_move)  # Stockfish mates who plays at random
