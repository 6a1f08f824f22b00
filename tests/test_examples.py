import importlib
import random
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest
import torch

import toy
from examples import letters, mates, start, sums
from model import GPT
from nanorook import settings, task
from nanorook.task import Question, wrong_grade
from rollout import sample
from rook import positions

QUESTION = Question("sums", "7 nuts, gets 2, eats 4?", [7, ("+", 2), ("-", 4)])
ANSWERS = {  # best first: the answer, its reward by steps, whether result and working are right
    " 7+2=9, 9-4=5 #### 5": (1.0, 1, 1),
    " 7+2=9, 9-4=5, 5-1=4 #### 5": (1.0, 1, 0),  # a step too many
    " 7+2=9, 9-4=5 #### 6": (0.8, 0, 0),  # the last word is wrong
    " 7+3=10, 10-4=6 #### 6": (0.45, 0, 0),  # the second step goes on from what was written
    " 7+2=9 #### 9": (0.45, 0, 0),  # a step is left out
    " 7+3=10, 10-5=5 #### 5": (0.3, 1, 0),  # two careless steps cancel out
    " 7+2=8, 8-5=3 #### 3": (0.1, 0, 0),
    "7+3=10, 10-5=5 #### 5": (0.0, 0, 0),  # no space
    "": (0.0, 0, 0),
}


def test_better_answers_earn_more(monkeypatch):
    grades = [sums.grade(QUESTION, text) for text in ANSWERS]
    assert [(g.reward, g.metrics["result"], g.metrics["working"]) for g in grades] == list(ANSWERS.values())
    monkeypatch.setattr(sums, "SUMS_REWARD", "result")
    assert [sums.grade(QUESTION, text).reward for text in ANSWERS] == [result for _, result, _ in ANSWERS.values()]


def test_a_piece_judges_its_step():
    text = " 7+3=10, 10-4=6 #### 6"
    pieces = {name: (value, [text[a:b] for a, b in spans]) for name, value, *spans in sums.grade(QUESTION, text).pieces}
    assert pieces["step 1"] == (0, ["7+3=10"]) and pieces["step 2"] == (0.35, ["10-4=6"])
    assert pieces["structure"][1] == pieces["result"][1] == []


def test_an_answer_without_an_end_and_any_nonsense_are_graded():
    assert sums.grade(QUESTION, next(iter(ANSWERS)), hit_limit=True).reward == 0.7
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("0123456789+-=,# ٣é", k=rng.randrange(36)))
        grade = sums.grade(QUESTION, text)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


def test_held_out_questions_are_not_trained_on():
    items, held_out = sums.load("", None)
    assert not set(items) & set(held_out) and len(held_out) == 1000
    letter_items, letters_held_out = letters.load("", None)
    assert not set(letter_items) & set(letters_held_out) and len(letter_items) + len(letters_held_out) == 65780
    questions = sums.make_questions(held_out, 1000, random.Random(0), None)
    assert max(len(question.prompt) for question in questions) + sums.LIMITS["sums"] <= 72


def test_a_start_model_writes_what_it_was_shown_and_is_made_once(tmp_path):
    def write(rng):
        return rng.choice([("one?", " 1"), ("three?", " 333")])

    folder = start.make_start_model(tmp_path / "start", write, steps=60, batch=8, width=32, layers=1, positions=16)
    model = GPT.load(folder)
    for prompt, answer in (("one?", " 1"), ("three?", " 333")):
        tokens = model.tokenizer.encode(prompt)
        for _ in range(len(answer) + 1):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
        assert tokens[len(prompt) :] == [*answer.encode(), model.tokenizer.eos]
    changes = dict(steps=60, batch=8, width=32, layers=1, positions=16)
    weights, before = Path(folder) / "model.safetensors", model.state_dict()
    made = weights.stat().st_mtime_ns
    assert start.make_start_model(folder, write, **changes) == folder and weights.stat().st_mtime_ns == made
    start.make_start_model(folder, write, **(changes | {"steps": 5}))  # made of something else
    assert not torch.equal(GPT.load(folder).wte.weight, before["wte.weight"])
    toy.model().save(tmp_path / "own")
    with pytest.raises(SystemExit, match="own has no file made_from, so it may be something else"):
        start.make_start_model(tmp_path / "own", write)
    with pytest.raises(SystemExit, match="6 tokens, more than the 5 positions"):
        start.make_start_model(tmp_path / "small", lambda rng: ("abc", "de"), positions=5)


FOOLS = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"  # d8h4 mates
CHECKS = "4k3/8/8/8/8/8/8/R3K2R w KQ - 0 1"  # a1a8 checks, a1a2 does not


@pytest.fixture(scope="module")
def sides():
    return mates.load("builtin", None)


def test_each_position_of_the_data_has_a_mate_and_none_is_on_both_sides(sides, monkeypatch):
    train, held_out = ([p.fen for pool, p in side if pool == "mates"] for side in sides)
    assert len(train) > 12_000 and len(held_out) > 1_000
    for fen in random.Random(0).sample(train + held_out, 300):
        assert positions.mating_moves(chess.Board(fen))
    boards = [{positions.board_key(p.fen) for _, p in side} for side in sides]
    assert not boards[0] & boards[1]
    config, few = SimpleNamespace(extra={"chess_format": "expanded"}), sides[1][:20] + sides[1][-1:]
    kinds = [question.kind for question in mates.make_questions(few, 21, random.Random(0), config)]
    assert kinds == ["mates"] * 20 + ["moves"]  # all that there are
    monkeypatch.setattr(mates, "MATES_SHARE", 0.5)
    kinds = [question.kind for question in mates.make_questions(sides[1], 16, random.Random(0), config)]
    assert kinds == ["mates"] * 8 + ["moves"] * 8


def test_the_kl_on_ordinary_positions_is_a_setting(monkeypatch):
    monkeypatch.setattr(settings, "SETTINGS", {})
    for given, weight in (({"MOVES_KL": "3"}, 3.0), ({}, 1.0)):
        monkeypatch.setitem(settings.GIVEN, "arguments", given)
        assert importlib.reload(mates).KL_WEIGHTS == {"moves": weight}


def test_each_rung_pays_more_than_the_one_before():
    def worth(fen, text, kind="mates"):
        config = SimpleNamespace(extra={"chess_format": "expanded"})
        return mates.grade(mates.ask(kind, positions.Position(fen, (), ()), config), text).reward

    assert worth(FOOLS, "d8h4 ") == 1.0 and worth(FOOLS, "d8h4") == 0.0  # unfinished
    assert [worth(CHECKS, text) for text in ("a1a8 ", "a1a2 ", "a1b2 ", "a1 ")] == [0.4, 0.2, 0.05, 0.0]
    assert [worth(CHECKS, text, "moves") for text in ("a1a8 ", "a1a2 ", "a1b2 ")] == [1.0, 1.0, 0.05]


def test_the_embedded_model_answers_with_a_move_and_the_space_that_ends_it(sides):
    model = GPT.load(mates.start_model())
    questions = task.draw_questions(mates, sides[1], 16, random.Random(0), model.config)
    assert [question.kind for question in questions] == ["mates"] * 12 + ["moves"] * 4
    rollouts = sample(model, questions, 1, mates.LIMITS, temperature=0)
    answers = [answer for rollout in rollouts for answer in rollout.answers]
    assert all(answer.text.endswith(" ") and len(answer.text) in (5, 6) and not answer.hit_limit for answer in answers)
    assert sum(answer.grade.metrics["legal"] for answer in task.grade_answers(mates, answers)) > 8
