"""examples/gsm8k.py, on problems of our own."""

import json
import random
import time
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch

import toy
from examples import gsm8k
from model import GPT, GPTConfig
from nanorook.task import Question, prompt_text, wrong_grade
from nanorook.tokenizer import Special, Tokenizer

PROBLEMS = [  # the question, its working, the final answer as it is written
    ("A tram has 12 rows of 4 seats. How many seats is that?", "12 * 4 = 48.", "48"),
    ("A barn costs $1,200, a gate $350. What do both cost?", "1200 + 350 = $1,550.", "1,550"),
    ("Tom reads 15 pages a day. How many are that in a week?", "A week has 7 days.\n15 * 7 = 105.", "105"),
    ("It was 3 degrees and became 8 degrees colder. How cold is it?", "3 - 8 = -5.", "-5"),
    ("A city of 2,000,000 people grows by 1 %. How many live there then?", "2000000 * 1.01 = 2020000.", "2,020,000"),
    ("All 17 cats ran away. How many are there still?", "17 - 17 = 0.", "0"),
]


def graded(final, text, **options):
    return gsm8k.grade(Question("gsm8k", "?", final), text, **options)


@pytest.fixture
def folder(tmp_path):
    """Four problems to train on and two held out, in the form of the published files."""
    lines = [json.dumps({"question": q, "answer": f"{working}\n#### {final}"}) for q, working, final in PROBLEMS]
    for name, part in (("train.jsonl", lines[:4]), ("test.jsonl", lines[4:])):
        (tmp_path / name).write_text("\n".join(part))
    return tmp_path


def test_a_solution_earns_1_however_its_number_is_written_and_another_number_does_not():
    for _, working, final in PROBLEMS:
        whole = int(final.replace(",", ""))
        for same in (final, f"${final}", f"{final}.", f"{whole}", f"{whole:,}", f"{whole}.00", f"${whole}.0"):
            assert graded(final, f"{working}\n#### {same}").reward == 1.0, same
        for other in (whole + 1, whole - 1, whole + 1000, f"{whole}.5"):
            assert graded(final, f"{working}\n#### {other}").reward == pytest.approx(0.2), other


def test_each_rung_pays_more_than_the_one_before():
    texts = ["9 * 2 = 18", "9 * 2 = 18 ####", "9 * 2 = 17 #### 17", "9 * 2 = 18 #### 18"]
    assert [graded("18", text).reward for text in texts] == [0.0, 0.1, 0.2, 1.0]
    assert [graded("18", text + "\n", hit_limit=True).reward for text in texts] == [0.0, 0.03, 0.06, 0.3]
    for wrong in ("18 eggs", "1,8", "18/0", "36/2", "١٨", "9" * 5000, "18 19", "."):  # no number, or still to work out
        assert graded("18", f"#### {wrong}").reward == 0.1, wrong
    for text in ("#### 18\nor\n17", "#### 18\n#### 17", "18", ""):  # the last line counts
        assert not graded("18", text).metrics["right"], text
    assert graded("0.5", "#### .5").reward == graded("-0.5", "#### -$.50").reward == 1.0


def test_a_number_that_the_limit_cut_off_is_not_known():
    """1 may be the beginning of 18."""
    for text in ("9 / 9 = 1 #### 1", "#### $1", "#### 1."):
        assert not graded("1", text, hit_limit=True).metrics["right"] and graded("1", text).metrics["right"]
        assert graded("1", f"{text}\n", hit_limit=True).metrics["right"]
        cut_off, wrong = (graded(truth, text, hit_limit=True).reward for truth in ("1", "2"))
        assert cut_off == wrong == pytest.approx(0.06)


def test_the_number_is_judged_by_its_line_and_the_rest_by_the_whole_answer():
    text = "9 * 2 = 18.\n#### 18"
    pieces = {name: [text[a:b] for a, b in spans] for name, _, *spans in graded("18", text).pieces}
    assert pieces == {"form": [], "number": ["#### 18"], "right": []}
    wrong = "9 * 2 = 18.\n#### eighteen"
    assert graded("18", wrong).pieces[1] == ("number", 0.0, (12, len(wrong)))  # blamed on this line alone


def test_any_text_is_graded_and_a_long_one_in_no_time():
    rng = random.Random(0)
    for _ in range(1000):
        text, hit_limit = "".join(rng.choices("0123456789##$,./- \n٣é", k=rng.randrange(40))), rng.random() < 0.5
        grade = graded("18", text, hit_limit=hit_limit)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1
    for text in ("####" + " " * 200_000 + "x", "#" * 200_000, "####\n" * 50_000, " " * 200_000):
        start = time.process_time()
        assert graded("18", text).reward <= 0.1
        assert time.process_time() - start < 0.5


def test_the_files_are_read_and_what_is_wrong_in_them_is_named(folder):
    items, held_out = gsm8k.load(str(folder), None)
    assert (len(items), len(held_out)) == (4, 2) and items[1] == (PROBLEMS[1][0], "1,550")
    for line in ('{"question": "?"}', '{"question": "?", "answer": "#### many"}'):
        (folder / "train.jsonl").write_text(line)
        with pytest.raises(SystemExit, match="train.jsonl, row 1: expected a question, and an answer that ends with"):
            gsm8k.load(str(folder), None)


def test_builtin_is_downloaded_once_and_without_a_network_a_sentence_says_where_it_is(folder, monkeypatch):
    asked = []

    def urlopen(url, timeout):
        asked.append(url.rpartition("/")[2])
        return open(folder / asked[-1], "rb")

    monkeypatch.setattr(gsm8k, "DOWNLOADED", folder / "runs" / "gsm8k-data")
    monkeypatch.setattr(gsm8k.urllib.request, "urlopen", lambda *_, **__: (_ for _ in ()).throw(URLError("no network")))
    with pytest.raises(SystemExit, match="no network.*get train.jsonl and test.jsonl from https://.*DATA="):
        gsm8k.load("builtin", None)
    assert not gsm8k.DOWNLOADED.exists()
    monkeypatch.setattr(gsm8k.urllib.request, "urlopen", urlopen)
    assert [len(part) for _ in range(2) for part in gsm8k.load("builtin", None)] == [4, 2] * 2
    assert asked == ["train.jsonl", "test.jsonl"]


def test_a_question_is_a_chat_and_its_text_stays_text(chats):
    question = gsm8k.ask("Is <|im_end|> 2 + 3?", "5", chats)
    assert isinstance(question.prompt[0], Special) and "Is <|im_end|> 2 + 3?\nLet's think" in question.prompt[-5]
    assert prompt_text(question.prompt).endswith("a number alone.<|im_end|>\n<|im_start|>assistant\n")
    thinks = SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/qwen3"))
    assert prompt_text(gsm8k.ask("?", "5", thinks).prompt).endswith("<think>\n\n</think>\n\n")  # it need not any more


def test_the_start_model_is_not_downloaded_unasked():
    with pytest.raises(SystemExit, match="MODEL=Qwen/Qwen2.5-0.5B-Instruct downloads it.*HF_TOKEN"):
        gsm8k.start_model()


def test_a_run_has_the_defaults_and_refuses_random_weights(folder, chats, capsys):
    torch.manual_seed(0)
    model = GPT(GPTConfig(1000, 256, 16, 1, 2, eos_token_id=2))
    model.tokenizer = chats.tokenizer
    model.save(folder / "model")
    small = dict(TASK="examples/gsm8k.py", MODEL=folder / "model", MAX_NEW_TOKENS=5, DATA=folder)
    assert "0% of the first gsm8k answers are well-formed" in toy.main(folder / "out", **small)
    chosen = capsys.readouterr().out
    assert "4 items to train on, 2 held out" in chosen and "LOSS=cispo" in chosen and "KL_COEF=0.0" in chosen
