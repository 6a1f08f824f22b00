import itertools
import json
import math
import random
import re
import sys

import chess
import pytest

import rewards
from nanorook import monitor
from rook import benchmark, games, positions, texts
from rook.label import write_position
from test_games import answer_by, answer_of, true_environment

POSITIONS = positions.load("builtin")[:6000]
HELD_OUT = positions.split(POSITIONS)[1]
LABELS = {position.fen: position.moves for position in POSITIONS}


def perfect_policy(fen):
    if fen in LABELS:
        return texts.policy_completion(fen, LABELS[fen], "expanded")
    board = chess.Board(fen)
    return answer_of((*positions.mating_moves(board), *(move.uci() for move in board.legal_moves))[0])


@pytest.fixture
def measure(byte_model, monkeypatch):
    """measure(policy, environment): {section: {row: figure}} of a model that answers as these functions do."""

    def make(policy=perfect_policy, environment=true_environment, some=HELD_OUT, mates=(), openings=(), temperature=0):
        answer_by(monkeypatch, policy, environment)
        sections = benchmark.measure(byte_model, temperature, some, {"mate in one": list(mates)}, openings, 5)
        return {name: {row: benchmark.figure(c) for row, c in columns.items()} for name, columns in sections.items()}

    return make


def test_a_perfect_player_is_perfect_in_every_row(measure):
    some = [position for position in HELD_OUT if len(position.moves) > 1]
    mates, openings = benchmark.find_mates(POSITIONS, 12), games.openings(some, 4)
    found = measure(some=some, mates=mates, openings=openings)
    for section in ("policy", "environment"):
        for row, figure in found[section].items():
            assert figure == ((0, 0) if row.endswith("pawns") else (1, 0)), row
    assert found["self-play"]["illegal moves"] == (0, 0)
    assert "mate in one" in found["policy"] and "next state: legal move, short history" in found["environment"]
    assert found["self-play"]["half-moves from the starting position"][1] == math.inf  # greedy: one game, no interval


def test_what_a_model_cannot_do_is_seen_in_the_rows_of_that_alone(measure):
    found = measure(
        lambda fen: perfect_policy(fen) if fen.split()[1] == "w" else answer_of("a1a1"),
        lambda fen, move, history: true_environment(fen, move, history) if rewards.transition(fen, move)[3] else "none",
    )
    boards = [chess.Board(position.fen) for position in HELD_OUT]
    checks = [board.turn for board in boards if board.is_check()]
    white = sum(board.turn for board in boards) / len(boards), sum(checks) / len(checks)
    assert 0 < min(white) and max(white) < 1
    for row in ("legal move", "best move"):
        figures = [found["policy"][f"{row}{what}"][0] for what in ("", ": in check", ": White", ": Black")]
        assert figures == pytest.approx([*white, 1, 0])
    found = found["environment"]
    assert found["next state: legal move"] == (0, 0) and found["next state: illegal move"] == (1, 0)
    assert 0 < found["structure"][0] == found["next state"][0] < 1


def test_of_sixteen_answers_one_may_be_right(measure):
    """pass@k: the chance that k draws of sixteen answers, of which four are right, hold a right one."""

    def sometimes(right, wrong):
        times = itertools.count()
        return lambda *question: right(*question) if next(times) % 4 == 3 else wrong

    mates = benchmark.find_mates(POSITIONS, 12)
    policy, environment = sometimes(perfect_policy, answer_of("a1a1")), sometimes(true_environment, "nonsense")
    some = [position for position in HELD_OUT if len(position.moves) > 1][:8]
    found = measure(policy, environment, some, mates, temperature=1)["pass@k"]
    for row in ("best move", "mate in one", "next state"):
        shares = [found[f"{row}: pass@{k}"] for k in (1, 4, 16)]
        assert shares == [pytest.approx((share, 0)) for share in (1 / 4, 1 - 495 / 1820, 1)], row
    assert "pass@k" not in measure(some=some)


def test_mates_are_held_out_and_complete_and_bigbench_games_are_read(tmp_path):
    found = dict(benchmark.find_mates(POSITIONS, 12))
    assert len(found) == 12
    for fen, mating in found.items():
        board, mate = chess.Board(fen), chess.Termination.CHECKMATE
        expected = {move.uci() for move in board.legal_moves if positions.game_end(board.copy(), move) == mate}
        assert positions.held_out(fen) and mating == expected and expected
    example = {"input": "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.", "target": "Qxf7#", "target_scores": {"Qxf7#": 1}}
    (tmp_path / "task.json").write_text(json.dumps({"name": "checkmate_in_one", "examples": [example]}))
    [(fen, mating)] = benchmark.read_bigbench(tmp_path / "task.json")
    assert mating == {"h5f7"} and fen.startswith("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq")


def test_figures_and_differences_are_those_computed_by_hand():
    assert benchmark.figure(benchmark.column([1, None, 0, 1, None]))[0] == pytest.approx(2 / 3)  # None: not known
    one, other = [(1, 1), (0, 0), (0, 0)], [(0, 1), (0, 0), (0, 0)]
    assert (
        benchmark.difference(one, other) == (-1, math.inf) and benchmark.cell("", (-0.5, math.inf), "+") == "-50.0 %  "
    )
    rng = random.Random(1)
    hard = [rng.random() for _ in range(1000)]  # what both models share: some questions are easier than others
    a, b = ([(h + 0.1 * rng.random() + gain, 1) for h in hard] for gain in (0, 0.02))
    mean, half = benchmark.difference(a, b)  # taken question by question
    assert (mean, half) == pytest.approx(monitor.interval([y - x for (x, _), (y, _) in zip(a, b)]))
    assert 0 < half < mean < benchmark.figure(a)[1] + benchmark.figure(b)[1]
    uneven = [(n // 9, n) for n in range(1, 60)]  # illegal moves in games
    assert monitor.interval(benchmark.spread(uneven)) == pytest.approx(benchmark.figure(uneven))


def test_the_command_compares_two_models(monkeypatch, capsys, tmp_path, byte_model):
    for kind in rewards.LIMITS:
        monkeypatch.setitem(rewards.LIMITS, kind, 8)  # random weights answer nothing, in as many tokens as they may
    for name in ("one", "two"):
        byte_model.save(tmp_path / name)
    some = HELD_OUT[:3] + positions.split(POSITIONS)[0][:3]  # of which only those held out are asked
    (tmp_path / "some.txt").write_text("\n".join(map(write_position, some)))
    monkeypatch.chdir(tmp_path)
    command = "evaluate one two --data some.txt some.txt --positions 9 --json out.json"
    monkeypatch.setattr(sys, "argv", command.split())
    benchmark.main()
    shown, written = capsys.readouterr(), json.loads((tmp_path / "out.json").read_text())
    one, two = written["models"]["one"], written["models"]["two"]
    assert one == two and one["T=0"]["policy"]["structure"] == [0, 0]
    assert one["T=1"]["self-play"]["illegal moves"] == [1, 0]
    assert written["difference"]["T=0"]["environment"]["structure"] == [0, 0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in shown.out.splitlines() if line.startswith("|")]
    assert any(row[:3] == ["best move", "3", "0.0 ± 0.0 %"] and "16.6 %" in row for row in rows)
    assert " B - A |" in shown.out and shown.err == ""  # no progress where nobody watches
