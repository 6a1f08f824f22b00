import random

import pytest
import torch

from examples import start, sums
from model import GPT
from nanorook.task import Question, wrong_grade

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
    for _ in range(2000):
        text = "".join(rng.choices("0123456789+-=,# ٣é", k=rng.randrange(36)))
        grade = sums.grade(QUESTION, text)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


def test_held_out_questions_are_not_trained_on():
    items, held_out = sums.load("", None)
    assert not set(items) & set(held_out) and len(held_out) == 1000
    questions = sums.make_questions(held_out, 1000, random.Random(0), None)
    assert max(len(question.prompt) for question in questions) + sums.LIMITS["sums"] <= 72


def test_a_start_model_writes_what_it_was_shown_and_is_made_once(tmp_path, capsys):
    def write(rng):
        word = rng.choice(("one", "three"))
        return f"{word}?", {"one": " 1", "three": " 333"}[word]

    folder = start.make_start_model(tmp_path / "start", write, steps=60, batch=8, width=32, layers=1, positions=16)
    assert "step 60/60: loss 0.0" in capsys.readouterr().out
    model = GPT.load(folder)
    for prompt, answer in (("one?", " 1"), ("three?", " 333")):
        tokens = model.tokenizer.encode(prompt)
        for _ in range(len(answer) + 1):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
        assert tokens[len(prompt) :] == [*answer.encode(), model.tokenizer.eos]
    assert start.make_start_model(folder, None) == folder
    with pytest.raises(SystemExit, match="6 tokens, more than the 5 positions"):
        start.make_start_model(tmp_path / "small", lambda rng: ("abc", "de"), positions=5)
    assert not (tmp_path / "small").exists()
