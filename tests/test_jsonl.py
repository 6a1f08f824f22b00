"""examples/jsonl.py: a file of questions, and a reward that a user replaces."""

import gzip
import itertools
import json
import random
from types import SimpleNamespace

import pytest

import toy
from examples import jsonl
from examples.chat import is_held_out, prompt
from nanorook.task import Question, prompt_text, wrong_grade
from nanorook.tokenizer import Special, Tokenizer

CASES = {  # the reference answer: {a text: what it earns}
    "85": {"85": 1, "It is 85.": 1, "47 + 38 = 85.0": 1, "85 or 86": 0.1, "no idea": 0, "": 0},
    "18446744073709551616": {"18446744073709551616": 1, "18446744073709551615": 0.1, "9" * 400: 0.1},
    "1,200": {"1200": 1, "$1,200": 1, "1.2": 0.1},
    "-2.5": {"-2.50": 1, "2.5": 0.1},
    "Paris": {"Paris": 1, " paris\n": 1, "It is Paris.": 0.2, "Rome": 0},
    "/^(yes|true)\\b/": {"yes, it is": 1, "true": 1, "oh yes": 0, "": 0},
}
QUESTIONS = [(f"What is {a} + {b}?", str(a + b)) for a in range(10, 20) for b in range(10, 20)]


@pytest.fixture
def file(tmp_path):
    """A hundred questions, whose answers are numbers."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": int(a)}) + "\n" for q, a in QUESTIONS))
    return path


def test_a_number_a_text_or_a_regular_expression_is_compared_as_such():
    for answer, texts in CASES.items():
        for text, worth in texts.items():
            grade = jsonl.grade(Question("jsonl", "?", answer), text)
            cut = jsonl.grade(Question("jsonl", "?", answer), text, hit_limit=True)
            assert (grade.reward, grade.metrics["right"]) == (worth, worth == 1), (answer, text)
            assert cut.metrics["right"] == 0
            assert cut.reward == pytest.approx(0.3 * worth)


def test_answers_that_json_spells_in_its_own_way(tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"question": "a", "answer": 0.00005}\n{"question": "half \\ud83d", "answer": 1e16}\n')
    answers = {answer for items in jsonl.load(str(file), None) for _, answer in items}
    assert answers == {"0.00005", "10000000000000000"}
    assert [jsonl.reward("It is 0.00005.", "0.00005"), jsonl.reward("/", "/"), jsonl.reward("plus", "/")] == [1, 1, 0]


def test_any_text_is_graded():
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123-.,/$ \n٣éyesPari", k=rng.randrange(40))) for _ in range(300)]
    for answer, text in itertools.product(CASES, ["9" * 10_000, *texts]):
        grade = jsonl.grade(Question("jsonl", "?", answer), text, hit_limit=rng.random() < 0.5)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


def test_a_question_that_is_held_out_stays_so_when_the_file_grows(file):
    items, held_out = jsonl.load(str(file), None)
    assert sorted(items + held_out) == sorted(QUESTIONS) and 10 <= len(held_out) <= 30
    with open(file, "a") as lines:
        lines.write('\n{"question": "How many legs has a spider?", "answer": "8"}\n')
    more, more_held_out = jsonl.load(str(file), None)
    assert {*items} <= {*more} and {*held_out} <= {*more_held_out} and len(more + more_held_out) == 101
    for question, _ in QUESTIONS:
        assert is_held_out(question) == is_held_out(f" {question.upper()}\n")


def test_other_keys_are_named_by_settings(tmp_path, monkeypatch):
    (tmp_path / "file.jsonl").write_text('{"problem": "1 + 1?", "solution": 2}')
    monkeypatch.setattr(jsonl, "QUESTION", "problem")
    monkeypatch.setattr(jsonl, "ANSWER", "solution")
    assert sorted(sum(jsonl.load(str(tmp_path / "file.jsonl"), None), [])) == [("1 + 1?", "2")]
    table = '\ufeffproblem,solution\r\n"1, 2 or\n3?",2\r\n'  # as a spreadsheet saves it
    (tmp_path / "file.csv").write_bytes(table.encode())
    assert sorted(sum(jsonl.load(str(tmp_path / "file.csv"), None), [])) == [("1, 2 or\n3?", "2")]


def test_a_file_that_is_missing_or_damaged_ends_in_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="name a file of questions: DATA=questions.jsonl"):
        jsonl.load("builtin", None)
    with pytest.raises(SystemExit, match="none.jsonl cannot be read after row 0: FileNotFoundError"):
        jsonl.load(str(tmp_path / "none.jsonl"), None)
    for line, sentence in {
        "What?": "cannot be read after row 1: JSONDecodeError",
        "[" * 100_000: "cannot be read after row 1: RecursionError",
        "[]": "each line has to be a JSON object",
        '{"question": "What?"}': "row 2: question has to be a text, and answer a text or a number",
        '{"question": 5, "answer": 5}': "row 2: question has to be a text, and answer a text or a number",
        '{"question": "What?", "answer": " "}': "row 2: question has to be a text, and answer a text or a number",
        '{"question": "What?", "answer": "/(/"}': "row 2: .*it has to be a regular expression",
    }.items():
        (tmp_path / "bad.jsonl").write_text('{"question": "Why?", "answer": "because"}\n' + line)
        with pytest.raises(SystemExit, match=sentence):
            jsonl.load(str(tmp_path / "bad.jsonl"), None)
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"question": "Why?"}' * 99)[:40])
    with pytest.raises(SystemExit, match="cannot be read after row 0: EOFError"):
        jsonl.load(str(tmp_path / "bad.jsonl.gz"), None)


def test_a_question_is_a_chat_and_its_text_stays_text(chats, monkeypatch):
    monkeypatch.setattr(jsonl, "SYSTEM", "Answer with a number.")
    ((_, asked, answer, *_),) = jsonl.make_questions([("Is <|im_end|> 2 + 3?", "5")], 1, random.Random(0), chats)
    assert answer == "5" and isinstance(asked[0], Special) and any("Is <|im_end|> 2 + 3?" in piece for piece in asked)
    assert prompt_text(asked).startswith("<|im_start|>system\nAnswer with a number.<|im_end|>")
    assert prompt_text(asked).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_examples_come_before_the_question_in_a_chat_and_in_plain_text(chats):
    plain = SimpleNamespace(tokenizer=Tokenizer.of_bytes())
    assert prompt(plain, "2 + 3?") == "Question: 2 + 3?\nAnswer:"
    shown = prompt(plain, "2 + 3?", "Add.", [("1 + 1?", "2")])
    assert shown == "Add.\n\nQuestion: 1 + 1?\nAnswer: 2\n\nQuestion: 2 + 3?\nAnswer:"
    text = prompt_text(prompt(chats, "2 + 3?", "Add.", [("1 + 1?", "2")]))
    turns = ["system\nAdd.", "user\n1 + 1?", "assistant\n2", "user\n2 + 3?"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def test_a_run_with_a_model_that_has_no_template(file, tmp_path, monkeypatch):
    toy.model(positions=160).save(tmp_path / "model")
    monkeypatch.setattr(jsonl, "LIMITS", {"jsonl": 8})
    monkeypatch.setattr(jsonl, "reward", lambda text, answer: len(text) % 3 / 2)  # which random bytes can earn
    found = toy.run(tmp_path / "out", jsonl, MODEL=str(tmp_path / "model"), DATA=str(file))
    assert found[-1]["step"] == 2 and found[-1]["jsonl/reward"] > 0 and "jsonl/right" in found[-1]
