import itertools
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import chess
import pytest

import rewards
from nanorook.statistics import figure, known
from rook import mating, positions
from test_games import answer_by, answer_of, true_environment
from tools import chess_benchmark as benchmark
from tools import chess_games as games
from tools import chess_texts as texts
from tools.chess_label import write_position

POSITIONS = positions.load("builtin")[:6000]
HELD_OUT = positions.split(POSITIONS)[1][:120]
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
        puzzles = mates if isinstance(mates, dict) else {"mate in one": mates} if mates else {}
        found = benchmark.measure(byte_model, temperature, some, puzzles, openings, 5)
        return {row: figure(values) for row, values in found.items() if known(values)}

    return make


def mates(count):
    return benchmark.with_mate(chess.Board(position.fen) for position in mating.embedded()[1][:count])


def test_a_perfect_player_is_perfect_in_every_row(measure):
    some = [position for position in HELD_OUT if len(position.moves) > 1]
    found = measure(some=some, mates=mates(12), openings=games.openings(some, 4))
    assert found.pop("illegal moves")[0] == 0
    for row, (mean, *_) in found.items():
        if not row.startswith("half-moves"):
            assert mean == (0 if row.endswith(("move_error", "eval_error")) else pytest.approx(1)), row


def test_what_a_model_cannot_do_is_seen_in_the_rows_of_that_alone(measure):
    found = measure(
        lambda fen: perfect_policy(fen) if fen.split()[1] == "w" else answer_of("a1a1"),
        lambda fen, move, history: true_environment(fen, move, history) if rewards.transition(fen, move)[3] else "none",
    )
    boards = [chess.Board(position.fen) for position in HELD_OUT]
    checks = [board.turn for board in boards if board.is_check()]
    assert found["policy best"][0] == found["policy legal"][0] == pytest.approx(fmean(board.turn for board in boards))
    assert 0 < fmean(checks) < 1 and found["policy legal_in_check"][0] == pytest.approx(fmean(checks))
    assert found["environment next_state_illegal"][0] == 1 and found["environment next_state_capture"][0] == 0
    assert 0 < found["environment structure"][0] == found["environment next_state"][0] < 1


def test_of_sixteen_answers_one_may_mate(measure):
    """pass@16: with White to move one of sixteen answers is right, with Black none."""
    times, some = itertools.count(), mates(12)
    right = lambda fen: fen.split()[1] == "w" and next(times) % 16 == 5  # noqa: E731
    policy = lambda fen: perfect_policy(fen) if right(fen) else answer_of("a1a1")  # noqa: E731
    white = [" w " in fen for fen, _ in some[:5]]
    found = measure(policy, some=HELD_OUT[:8], mates=some, temperature=1)
    for way in ("", ", first candidate"):
        assert 0 < found[f"mate in one{way}, pass@16"][0] == sum(white) / 5 < 1
        assert found[f"mate in one{way}"][0] <= 1 / 12
    assert not any("pass@" in row for row in measure(some=HELD_OUT[:8], mates=mates(2)))


def test_more_than_five_moves_may_mate(measure):
    [puzzle] = benchmark.with_mate([chess.Board("k7/8/1K6/8/8/8/QQQQQQQQ/8 w - - 0 1")])
    assert len(puzzle[1]) > 6
    for move in puzzle[1][5:7]:
        found = measure(lambda fen: answer_of(move), some=HELD_OUT[:2], mates=[puzzle])  # noqa: B023
        assert (found["mate in one"][0], found["mate in one, first candidate"][0]) == (1, 1)


@pytest.fixture
def puzzle_files(tmp_path, monkeypatch):
    """Small files in the formats that others publish."""
    monkeypatch.chdir(tmp_path)
    example = {"input": "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.", "target": "Qxf7#", "target_scores": {"Qxf7#": 1}}
    Path("task.json").write_text(json.dumps({"name": "checkmate_in_one", "examples": [example] * 3}, indent=4))
    heading = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
    rook, pawn = "7k/5ppp/8/8/8/8/5PPP/R5K1 b - - 0 1,h8g8 a1a8", "6k1/8/8/8/8/8/4p3/K7 w - - 0 1,a1b1 e2e1q"
    two = "1k6/8/1K6/8/8/8/8/6QR b - - 0 1,b8a8 h1h8"  # g1g8 mates, too
    lines = [f"{rook},999,80,90,5,backRankMate mateIn1 short", f"{pawn},1000,80,90,5,promotion short"]
    lines += [f"{two},2400,80,90,5,mateIn1", f"{pawn},1999,80,90,5,mateIn10 promotion"]
    lines = [f"0000{i},{line},https://example.org/{i},\n" for i, line in enumerate(lines)]
    Path("lichess.csv").write_text("".join([heading + "\n", *lines]))
    return "task.json", "lichess.csv"


def test_puzzles_are_recognised_by_their_content(puzzle_files):
    found = {}
    for name, file in zip("ab", puzzle_files):
        found |= benchmark.read_puzzles(str(Path(file).rename(name)), 3)
    assert {row: [solutions for _, solutions in puzzles] for row, puzzles in found.items()} == {
        "mate in one, BIG-bench": [["h5f7"]] * 3,
        "Lichess, mateIn1": [["a1a8"], ["g1g8", "h1h8"]],
        "Lichess, all": [["a1a8"], ["e2e1q"], ["g1g8", "h1h8"]],
    }
    fens = {row: puzzles[0][0] for row, puzzles in found.items()}
    assert fens["mate in one, BIG-bench"].startswith("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq")
    assert fens["Lichess, all"] == "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 1 2"  # after the opponent's move


def test_what_is_wrong_with_a_file_of_puzzles_is_said(tmp_path):
    for content, error in (
        ('{"name": ""}', "KeyError"),
        (f"{chess.STARTING_FEN}\n" * 2, "KeyError"),
        (f"FEN,Moves,Themes\n{chess.STARTING_FEN},e2e5 e7e5,", "IllegalMoveError"),
    ):
        (tmp_path / "some").write_text(content)
        with pytest.raises(SystemExit, match=f"some cannot be read as puzzles: {error}"):
            benchmark.read_puzzles(str(tmp_path / "some"), 9)


def test_puzzles_are_solved_by_the_first_candidate_or_the_whole_answer(measure, puzzle_files):
    puzzles = {row: some for file in puzzle_files for row, some in benchmark.read_puzzles(file, 9).items()}

    def policy(fen):  # Black's first candidate is right, of White's answers the move after B:
        if " b " in fen:
            return "M: e2e1q g8g7 E: 0.1 0.1 B: g8g7"
        best = "h5f7" if "4p2Q" in fen else "g1g8" if "QR" in fen else "a1a8"
        return f"M: g1f1 {best} E: 0.1 0.1 B: {best}"

    found = measure(policy, some=HELD_OUT[:8], mates=puzzles, temperature=1)
    for tries in ("", ", pass@16"):
        means = lambda row: [found[row + way + tries][0] for way in ("", ", first candidate")]  # noqa: B023, E731
        assert means("mate in one, BIG-bench") == means("Lichess, mateIn1") == [1, 0]
        assert means("Lichess, all") == [0.5, 0.5]


def test_the_command_compares_two_models(monkeypatch, capsys, tmp_path, byte_model, puzzle_files):
    for kind in rewards.LIMITS:
        monkeypatch.setitem(rewards.LIMITS, kind, 8)  # random weights answer nothing, in as many tokens as they may
    for name in ("one", "two"):
        byte_model.save(tmp_path / name)
    some = HELD_OUT[:3] + positions.split(POSITIONS)[0][:3]  # of which only those held out are asked
    (tmp_path / "some.txt").write_text("\n".join(map(write_position, some)))
    played, play = [], games.play
    monkeypatch.setattr(games, "play", lambda model, starts, t: played.append(len(starts)) or play(model, starts, t))
    command = "benchmark one two --data some.txt some.txt --positions 2 --pass-at-k 1 --puzzles"
    monkeypatch.setattr(sys, "argv", [*command.split(), *puzzle_files])
    benchmark.main()
    shown = capsys.readouterr()
    rows = [re.split("   *", line) for line in shown.out.splitlines()[2:]]
    assert shown.out.startswith("2 held-out positions of some.txt some.txt, ") and "; A is one, B is two\n" in shown.out
    assert rows[0] == ["held-out", "A", "B", "gain"] and max(played) == 2
    assert shown.err == ""  # no progress where nobody watches
    cells = {row[0]: row[1:] for row in rows}
    assert cells["policy structure, greedy"] == ["0.000 ± 0.658", "0.000 ± 0.658", "+0.000 ± 0.658"]
    assert cells["illegal moves, sampled"][0].startswith("1.000")
    assert {"Lichess, all, first candidate, pass@16, sampled", "mate in one, BIG-bench, greedy"} <= cells.keys()
