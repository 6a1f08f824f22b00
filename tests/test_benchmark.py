import itertools
import json
import math
import re
import sys

import chess
import pytest

import rewards
from nanorook.statistics import figure, known
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
    """measure(policy, environment): {row: mean} of a model that answers as these functions do."""

    def make(policy=perfect_policy, environment=true_environment, some=HELD_OUT, mates=(), openings=(), temperature=0):
        answer_by(monkeypatch, policy, environment)
        found = benchmark.measure(byte_model, temperature, some, {"mate in one": list(mates)}, openings, 5)
        return {row: figure(values) for row, values in found.items() if known(values)}

    return make


def mates(count):
    return benchmark.with_mate(chess.Board(position.fen) for position in rewards.load_mates()[1][:count])


def test_a_perfect_player_is_perfect_in_every_row(measure):
    some = [position for position in HELD_OUT if len(position.moves) > 1]
    found = measure(some=some, mates=mates(12), openings=games.openings(some, 4))
    assert found["half-moves from the starting position"][1] == math.inf  # greedy: one game, no interval
    assert found.pop("illegal moves")[0] == 0 and "environment next_state, legal move, short history" in found
    for row, (mean, *_) in found.items():
        if not row.startswith("half-moves"):
            assert mean == (0 if row.endswith(("cp_loss", "eval_mae")) else pytest.approx(1)), row


def test_what_a_model_cannot_do_is_seen_in_the_rows_of_that_alone(measure):
    found = measure(
        lambda fen: perfect_policy(fen) if fen.split()[1] == "w" else answer_of("a1a1"),
        lambda fen, move, history: true_environment(fen, move, history) if rewards.transition(fen, move)[3] else "none",
    )
    boards = [chess.Board(position.fen) for position in HELD_OUT]
    checks = [board.turn for board in boards if board.is_check()]
    white = sum(board.turn for board in boards) / len(boards), sum(checks) / len(checks)
    assert 0 < min(white) and max(white) < 1
    for row in ("policy legal", "policy best"):
        means = [found[row + sort][0] for sort in ("", ", in check", ", White", ", Black")]
        assert means == pytest.approx([*white, 1, 0])
    assert found["environment next_state, legal move"][0] == 0 and found["environment next_state, illegal move"][0] == 1
    assert 0 < found["environment structure"][0] == found["environment next_state"][0] < 1


def test_of_sixteen_answers_one_may_mate(measure):
    """pass@k: the chance that k draws of sixteen answers, of which four are right, hold a right one."""
    times = itertools.count()
    policy = lambda fen: perfect_policy(fen) if next(times) % 4 == 3 else answer_of("a1a1")  # noqa: E731
    found = measure(policy, some=HELD_OUT[:8], mates=mates(12), temperature=1)
    shares = [found[f"mate in one, pass@{k}"][:2] for k in (1, 4, 16)]
    assert [share for share, _ in shares] == pytest.approx([1 / 4, 1 - 495 / 1820, 1])
    assert not any("pass@" in row for row in measure(some=HELD_OUT[:8], mates=mates(2)))


def test_mates_are_complete_and_bigbench_games_are_read(tmp_path):
    assert len(found := mates(12)) == 12
    for fen, mating in found:
        board, mate = chess.Board(fen), chess.Termination.CHECKMATE
        expected = {move.uci() for move in board.legal_moves if positions.game_end(board.copy(), move) == mate}
        assert positions.held_out(fen) and mating == expected and expected
    example = {"input": "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.", "target": "Qxf7#", "target_scores": {"Qxf7#": 1}}
    (tmp_path / "task.json").write_text(json.dumps({"name": "checkmate_in_one", "examples": [example]}))
    [(fen, mating)] = benchmark.read_bigbench(tmp_path / "task.json")
    assert mating == {"h5f7"} and fen.startswith("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq")
    with pytest.raises(SystemExit, match="found no game before a mate"):
        benchmark.read_bigbench(tmp_path / "none.json")


def test_the_command_compares_two_models(monkeypatch, capsys, tmp_path, byte_model):
    for kind in rewards.LIMITS:
        monkeypatch.setitem(rewards.LIMITS, kind, 8)  # random weights answer nothing, in as many tokens as they may
    for name in ("one", "two"):
        byte_model.save(tmp_path / name)
    some = HELD_OUT[:3] + positions.split(POSITIONS)[0][:3]  # of which only those held out are asked
    (tmp_path / "some.txt").write_text("\n".join(map(write_position, some)))
    monkeypatch.chdir(tmp_path)
    command = "benchmark one two --data some.txt some.txt --positions 9 --markdown"
    monkeypatch.setattr(sys, "argv", command.split())
    benchmark.main()
    shown = capsys.readouterr()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in shown.out.splitlines() if line.startswith("|")]
    assert shown.out.startswith("3 held-out positions of some.txt some.txt, ") and "; A is one, B is two\n" in shown.out
    assert rows[0] == ["held-out", "A", "B", "gain"]
    assert shown.err == ""  # no progress where nobody watches
    cells = {row[0]: row[1:] for row in rows}
    assert cells["policy structure T=0"] == ["0.000 ± 0.562", "0.000 ± 0.562", "+0.000 ± 0.562"]
    assert cells["illegal moves T=1"][0].startswith("1.000")
