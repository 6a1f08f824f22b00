"""tools/games.py: players whose every answer is known, watched by python-chess, a scripted engine and Stockfish."""

import random
import re
import sys

import chess
import chess.pgn
import pytest

import rewards
from nanorook import monitor
from nanorook.positions import Position, contract_board
from rollout import Answer
from tools import games, texts
from tools.texts import mirror

START = Position(chess.STARTING_FEN, (), ())


def answer_of(move):
    return f"M: {move} E: 0.0 B: {move}"


def true_environment(fen, move, history):
    return texts.environment_completion(*rewards.transition(fen, move), "expanded")


def any_move(fen):
    return answer_of(random.Random(fen).choice([move.uci() for move in chess.Board(fen).legal_moves]))


def until(last, policy=any_move):
    """Plays on to move number `last`, in which White answers nonsense."""
    return lambda fen: answer_of("e1e9") if int(fen.split()[-1]) == last else policy(fen)


def scripted(**moves):
    """scripted(w=[...], b=[...]) plays these moves in turn, and again from the first one."""
    return lambda fen: answer_of(moves[fen.split()[1]][(int(fen.split()[-1]) - 1) % len(moves["w"])])


def answer_by(monkeypatch, policy=any_move, environment=true_environment):
    """A model answers as these functions of (fen) and of (fen, move, history) do."""

    def sample(model, questions, group_size, *_, **__):
        for question in (question for question in questions for _ in range(group_size)):
            fen, *rest = question.prompt[3:].strip().split("+")
            fen = contract_board(fen)
            text = environment(fen, rest[0], rest[1].split()) if rest else policy(fen)
            yield None, [Answer(question, text, [], False)]

    monkeypatch.setattr(games, "sample", sample)


@pytest.fixture
def play(byte_model, monkeypatch):
    """play(policy): {row: column} of a game from the start position."""

    def make(policy):
        answer_by(monkeypatch, policy)
        return games.count("self", *games.play(byte_model, [START], 0.0))

    return make


def test_self_play_counts_half_moves_before_an_illegal_one_or_the_end(play):
    def counted(half_moves, illegal):
        lengths = {"half-moves before an illegal one": [(half_moves, 1)]}
        return lengths | {"illegal moves": [(illegal, half_moves + illegal)]}

    assert play(until(6)) == counted(10, 1)
    assert play(lambda fen: "no answer") == counted(0, 1)
    assert play(scripted(w=["f2f3", "g2g4"], b=["e7e5", "d8h4"])) == counted(4, 0)  # mate
    assert play(scripted(w=["g1f3", "f3g1"], b=["g8f6", "f6g8"])) == counted(8, 0)  # the third time


def test_openings_are_the_earliest_positions_in_which_a_game_can_go_on():
    mated = Position("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", (), ())
    early, late = (Position(f"4k3/8/8/8/8/8/8/{rank} w - - 0 {n}", (), ()) for rank, n in (("R3K3", 4), ("Q3K3", 10)))
    assert games.openings([late, mated, early], 5) == [early, late] and games.openings([late, early], 1) == [early]
    copies = [early._replace(asked=move) for move in ("a1a2", "a1a3")]  # questions about one board are one opening
    assert games.openings([*copies, late, mirror(early)], 5) == [early, late]


def test_how_many_answers_are_sampled_at_once_changes_none(byte_model):
    questions = [rewards.Question("policy", prompt, ()) for prompt in ("P: 1", "P: 23", "P: 456")]
    assert games.answers(byte_model, questions, 1.0, rows=1) == games.answers(byte_model, questions, 1.0, rows=2)


@pytest.fixture
def command(byte_model, monkeypatch, capsys, tmp_path):
    """command("--games", 2): what is printed, {row: figures}, and the games."""
    byte_model.save(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["games", *map(str, arguments)])
        games.main()
        with open("games.pgn") as file:
            played = list(iter(lambda: chess.pgn.read_game(file), None))
        rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[3:]]
        return {row: figures for row, *figures in rows}, played

    return run


@pytest.mark.needs("stockfish")
@pytest.mark.parametrize("policy", [until(4), any_move])
def test_the_score_against_stockfish_is_that_of_the_games_written(policy, command, monkeypatch):
    """The games are read again by python-chess, which knows how they ended."""
    answer_by(monkeypatch, policy)
    arguments = "--opponent", "stockfish", "--games", 6, "--temperature", 0, "--skill", 20, "--nodes", 300
    printed, played = command("mine", *arguments, "--pgn", "games.pgn")
    assert len({game.headers["FEN"] for game in played}) == 6  # each from a position of its own
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
        assert printed[row] == [monitor.with_interval(*monitor.interval(values))], row
    assert points == [0] * 6 and any(illegal) == (policy != any_move)  # Stockfish mates who plays at random


def test_games_from_the_starting_position(command, monkeypatch):
    """At temperature 0 the model plays one such game only."""
    answer_by(monkeypatch, until(3))
    printed, played = command("mine", "--start", "initial", "--games", 3, "--pgn", "games.pgn")
    assert [game.board().fen() for game in played] == [chess.STARTING_FEN] * 4
    assert printed["half-moves before an illegal one"] == ["4.000", "4.000 ± 0.000"]  # one game has no interval


def test_what_is_wrong_is_said_in_one_sentence(command, monkeypatch, tmp_path):
    wrong = "--temperature nan", "--temperature inf", "--games 0", "--skill 21", "--nodes 0", "--opponent me"
    for arguments in (*wrong, "--start e4", "--pgn nowhere/a.pgn"):
        with pytest.raises(SystemExit, match="^2$"):
            command("mine", *arguments.split())
    (tmp_path / "over.fen").write_text("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1\n" * 3)
    with pytest.raises(SystemExit, match="over.fen has no held-out position"):
        command("mine", "--data", "over.fen")
