import random
from types import SimpleNamespace

import chess
import pytest

from examples import mates
from model import GPT
from nanorook import positions, task
from rollout import sample

FOOLS = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"  # d8h4 mates
CHECKS = "4k3/8/8/8/8/8/8/R3K2R w KQ - 0 1"  # a1a8 checks, a1a2 does not


@pytest.fixture(scope="module")
def sides():
    return mates.load("builtin", None)


def test_each_position_of_the_data_has_a_mate_and_none_is_on_both_sides(sides):
    train, held_out = ([p.fen for kind, p in side if kind == "mates"] for side in sides)
    assert len(train) > 12_000 and len(held_out) > 1_000
    for fen in random.Random(0).sample(train + held_out, 300):
        assert positions.mating_moves(chess.Board(fen))
    boards = [{positions.board_key(p.fen) for _, p in side} for side in sides]
    assert not boards[0] & boards[1]


def test_each_rung_pays_more_than_the_one_before():
    def worth(fen, text, kind="mates"):
        config = SimpleNamespace(extra={"chess_format": "expanded"})
        return mates.grade(mates.ask(kind, positions.Position(fen, (), ()), config), text).reward

    assert worth(FOOLS, "d8h4 ") == 1.0 and worth(FOOLS, "d8h4") == 0.0  # unfinished
    assert [worth(CHECKS, text) for text in ("a1a8 ", "a1a2 ", "a1b2 ", "a1 ")] == [0.4, 0.2, 0.05, 0.0]
    assert [worth(CHECKS, text, "moves") for text in ("a1a8 ", "a1a2 ", "a1b2 ")] == [1.0, 1.0, 0.05]


def test_the_embedded_model_answers_with_a_move_and_the_space_that_ends_it(sides):
    model = GPT.load(mates.start_model())
    questions = task.make_questions(mates, sides[1], 16, random.Random(0), model.config)
    assert [question.kind for question in questions] == ["mates"] * 12 + ["moves"] * 4
    answers = [answer for _, part in sample(model, questions, 1, mates.LIMITS, temperature=0) for answer in part]
    assert all(answer.text.endswith(" ") and len(answer.text) in (5, 6) and not answer.hit_limit for answer in answers)
    assert sum(answer.grade.metrics["legal"] for answer in task.graded(mates, answers)) > 8
