import gzip
import random
import sys
from types import SimpleNamespace

import chess
import pytest

import toy
from examples import mates
from nanorook.task import load_items
from rook import mating, positions
from rook.positions import Position, board_key, held_out, mating_moves
from tools import chess_unseen as unseen
from tools.chess_texts import mirror

FILE = toy.ROOT / "data/test.txt.gz"


@pytest.fixture(scope="module")
def part():
    """(ordinary positions, those with a mate) of the file."""
    found = positions.load(str(FILE))
    return [p for p in found if p.moves], [p for p in found if not p.moves]


@pytest.fixture(scope="module")
def known():
    return unseen.known_boards()


def test_the_test_part_is_held_out_and_shares_no_board_with_the_other_data(part, known):
    ordinary, mating_ones = part
    assert (len(ordinary), len(mating_ones)) == (2000, 1200) and FILE.stat().st_size < 400_000
    boards = [board_key(position.fen) for side in part for position in side]
    assert len({*boards}) == 3200 and not known.intersection(boards)
    assert all(held_out(position.fen) for side in part for position in side)
    assert all(mating_moves(chess.Board(position.fen)) for position in mating_ones)
    assert not any(mating_moves(chess.Board(position.fen)) for position in ordinary[::4])


def test_known_boards_are_those_of_both_files_mirrored_or_not(known):
    files = [gzip.open(toy.ROOT / "data" / name, "rt").readlines() for name in ("positions.txt.gz", "mates.txt.gz")]
    for line in (line for lines in files for line in lines[:50]):
        position = Position(line.split(";")[0].strip(), (), ())
        assert {board_key(position.fen), board_key(mirror(position).fen)} <= known


def test_it_is_a_source_for_evaluation_without_training_items(part):
    items, found = load_items(mates, str(FILE), SimpleNamespace(extra={}))
    kinds = [sorted(p.fen for pool, p in found if pool == wanted) for wanted in ("ordinary", "mates")]
    assert items == [] and kinds == [sorted(p.fen for p in side) for side in part]
    questions = mates.make_questions(found, 60, random.Random(0), SimpleNamespace(extra={}))
    assert len(questions) == 60 and {"mates", "moves"} == {question.kind for question in questions}


MATE, QUIET = "k7/8/1K6/8/8/8/8/7R w - - 0 1", "k7/8/8/3K4/8/8/8/7R w - - 0 1"


def test_a_position_without_labels_is_there_for_its_mate_alone_only_if_others_have_labels():
    mate, quiet = (Position(fen, (), ()) for fen in (MATE, QUIET))
    labelled = quiet._replace(moves=(("d5d6", 500),))
    assert mating.beside("mine", [], [mate, labelled])[1] == [("mates", mate), ("ordinary", labelled)]
    assert mating.beside("mine", [], [mate, quiet])[1] == [("mates", mate), ("ordinary", mate), ("ordinary", quiet)]
    both = mating.beside("mine", [mate, labelled], [labelled])  # none is held out, so the embedded ones are asked
    assert [len([pool for pool, _ in side if pool == "mates"]) for side in both] == [*map(len, mating.embedded())]
    assert mating.beside("mine", [], [labelled]) == [[], [("ordinary", labelled)]]


def test_new_mates_are_held_out_and_unknown_and_come_from_different_games():
    found = unseen.new_mates(2, set(), seed=5)
    assert len({board_key(fen) for fen in found}) == 2
    assert all(held_out(fen) and mating_moves(chess.Board(fen)) and chess.Board(fen).is_valid() for fen in found)
    assert unseen.new_mates(1, {board_key(found[0])}, seed=5) == found[1:]


def test_the_greedy_player_takes_what_is_free_and_not_what_is_defended():
    free = chess.Board("4k3/8/8/3r4/8/2N5/8/4K3 w - - 0 1")
    assert {unseen.greedy_move(free, random.Random(n)).uci() for n in range(20)} == {"c3d5"}
    defended = chess.Board("4k3/4p3/3p4/8/8/8/3Q4/4K3 w - - 0 1")
    assert "d2d6" not in {unseen.greedy_move(defended, random.Random(n)).uci() for n in range(20)}


def test_as_a_user_starts_it(tmp_path, monkeypatch, few_positions, capsys):
    monkeypatch.setattr(unseen, "known_boards", lambda: set())  # or few_positions would have none that is new
    out = tmp_path / "test.txt.gz"
    command = ["unseen", str(out), few_positions, "--positions", "4", "--mates", "1"]
    monkeypatch.setattr(sys, "argv", command)
    unseen.main()
    lines = gzip.open(out, "rt").read().splitlines()
    assert [line.count(";") for line in lines] == [2, 2, 2, 2, 0] and capsys.readouterr().out.startswith(f"{out}: 4 ")
    with pytest.raises(SystemExit):  # somebody forgot OUT, and this is a file that took hours
        unseen.main()
    assert "already exists: delete it to make it again" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["unseen", str(tmp_path / "more"), few_positions, "--positions", "4000"])
    with pytest.raises(SystemExit, match="fewer than --positions 4000; give more files"):
        unseen.main()
