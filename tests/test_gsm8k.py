"""examples/gsm8k.py, on twenty problems of our own."""

import gzip
import json
import random
import time
from fractions import Fraction
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
    ("Ida had 31 marbles and lost 13. How many are left?", "31 - 13 = 18.", "18"),
    ("Six friends share 42 plums. How many does each get?", "42 / 6 = 7.", "7"),
    ("A barn costs $1,200, a gate $350. What do both cost?", "1200 + 350 = $1,550.", "1,550"),
    ("Tom reads 15 pages a day. How many are that in a week?", "A week has 7 days.\n15 * 7 = 105.", "105"),
    ("It was 3 degrees and became 8 degrees colder. How cold is it?", "3 - 8 = -5.", "-5"),
    ("A city of 2,000,000 people grows by 1 %. How many live there then?", "2000000 * 1.01 = 2020000.", "2,020,000"),
    ("Half of 90 sheep are white. How many are not?", "90 / 2 = 45.", "45"),
    ("A rope of 5 m is cut into 2 equal parts. How many cm has each?", "500 / 2 = 250.", "250"),
    ("A pen costs $1.25. What do 8 of them cost?", "8 * 1.25 = $10.", "10"),
    ("Nora is 4 years older than Ben, who is 9. How old is she?", "9 + 4 = 13.", "13"),
    ("A box has 3 layers of 24 eggs; 5 are broken. How many are whole?", "3 * 24 = 72.\n72 - 5 = 67.", "67"),
    ("A clock strikes once an hour. How often in two days?", "24 * 2 = 48.", "48"),
    ("All 17 cats ran away. How many are there still?", "17 - 17 = 0.", "0"),
    ("A car needs 6 l for 100 km. How much for 350 km?", "3.5 * 6 = 21.", "21"),
    ("Lea saves $20 a month from January to December. How much is it?", "20 * 12 = $240.", "240"),
    ("A film of 95 minutes begins 10 minutes late. After how many is it over?", "95 + 10 = 105.", "105"),
    ("Two of 8 slices are eaten. What percentage is left?", "6 / 8 = 0.75.", "75"),
    ("A tower has 40 floors of 3 m and a mast of 12 m. How high is it?", "40 * 3 = 120.\n120 + 12 = 132.", "132"),
    ("Pia runs 3 km on 4 days and 5 km on one. How far is it in all?", "3 * 4 = 12.\n12 + 5 = 17.", "17"),
]


def graded(final, text, **options):
    return gsm8k.grade(Question("gsm8k", "?", final), text, **options)


def write_lines(folder, names=("train.jsonl", "test.jsonl")):
    lines = [json.dumps({"question": q, "answer": f"{working}\n#### {final}"}) for q, working, final in PROBLEMS]
    for name, part in zip(names, (lines[:16], lines[16:])):
        (gzip.open if name.endswith("gz") else open)(folder / name, "wt").write("\n".join(part))
    return str(folder)


@pytest.mark.parametrize("question, working, final", PROBLEMS)
def test_a_solution_earns_1_however_its_number_is_written_and_another_number_does_not(question, working, final):
    whole = int(final.replace(",", ""))
    for same in (
        final,
        f"${final}",
        f"{final}.",
        f"{whole}",
        f"{whole:,}",
        f"{whole}.00",
        f"${whole}.0",
    ):
        assert graded(final, f"{working}\n#### {same}").reward == 1.0, same
    for other in (whole + 1, whole - 1, whole + 1000, whole + Fraction(1, 2), f"{whole}.5"):
        assert graded(final, f"{working}\n#### {other}").reward == pytest.approx(0.2), other


def test_each_rung_pays_more_than_the_one_before():
    texts = ["9 * 2 = 18", "9 * 2 = 18 ####", "9 * 2 = 17 #### 17", "9 * 2 = 18 #### 18"]
    assert [graded("18", text).reward for text in texts] == [0.0, 0.1, 0.2, 1.0]
    assert [graded("18", text + "\n", hit_limit=True).reward for text in texts] == [0.0, 0.03, 0.06, 0.3]
    for text in ("#### 18 eggs", "#### 1,8", "#### 18/0", "#### ١٨", f"#### {'9' * 5000}", "#### 18 19", "#### 36/2"):
        assert graded("18", text).reward == 0.1, text
    for text in ("#### 18\nor\n17", "#### 18\n#### 17", "18", ""):  # the last line counts
        assert not graded("18", text).metrics["right"], text
    assert graded("1.5", "#### 3/2\n").reward == graded("1/2", "#### -$0.50").reward + 0.8 == 1.0
    assert graded("1/2", "#### .5").reward == graded("-0.5", "#### -.50").reward == 1.0
    for text in (
        "#### 18/1",
        "#### 54/3",
        "#### 9/.5",
        "#### .",
        "#### 36.0/2",
    ):  # still to be worked out, or no number
        assert graded("18", text).reward == 0.1, text


def test_a_number_that_the_limit_cut_off_is_not_known():
    """1 may be the beginning of 18."""
    for text in ("9 / 9 = 1 #### 1", "#### $1", "#### 1."):
        assert not graded("1", text, hit_limit=True).metrics["right"] and graded("1", text).metrics["right"]
        assert graded("1", f"{text}\n", hit_limit=True).metrics["right"]
        cut_off, wrong = (graded(truth, text, hit_limit=True).reward for truth in ("1", "2"))
        assert cut_off == wrong == pytest.approx(0.06)


def test_a_long_answer_is_graded_in_no_time():
    for text in ("####" + " " * 200_000 + "x", "#" * 200_000, "####\n" * 50_000, " " * 200_000):
        start = time.process_time()
        assert graded("18", text).reward <= 0.1
        assert time.process_time() - start < 0.5


def test_the_number_is_judged_by_its_line_and_the_rest_by_the_whole_answer():
    text = "9 * 2 = 18.\n#### 18"
    pieces = {name: [text[a:b] for a, b in spans] for name, _, *spans in graded("18", text).pieces}
    assert pieces == {"form": [], "number": ["#### 18"], "right": []}
    wrong = "9 * 2 = 18.\n#### eighteen"
    assert graded("18", wrong).pieces[1] == ("number", 0.0, (12, len(wrong)))  # blamed on this line alone


def test_any_text_is_graded():
    rng = random.Random(0)
    for _ in range(2000):
        text, hit_limit = "".join(rng.choices("0123456789##$,./- \n٣é", k=rng.randrange(40))), rng.random() < 0.5
        grade = graded("18", text, hit_limit=hit_limit)
        assert not wrong_grade(grade, text) and 0 <= grade.reward <= 1


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train.jsonl.gz", "test.jsonl.gz")])
def test_the_published_files_are_read(tmp_path, names):
    items, held_out = gsm8k.load(write_lines(tmp_path, names), None)
    assert (len(items), len(held_out)) == (16, 4) and items[3] == (PROBLEMS[3][0], "1,550")


def test_a_file_that_is_missing_or_damaged_ends_in_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"has no train.jsonl or train.jsonl.gz; they are published at https://"):
        gsm8k.load(str(tmp_path), None)
    for line, sentence in {
        '{"question": "?", "answer": "18"': "JSON",
        '{"question": "?"}': "KeyError",
        '{"question": "?", "answer": "#### many"}': "train.jsonl, line 1: the answer has to end with ####",
    }.items():
        (tmp_path / "train.jsonl").write_text(line)
        with pytest.raises(SystemExit, match=sentence):
            gsm8k.load(str(tmp_path), None)
    (tmp_path / "train.jsonl").write_text("[" * 100_000)
    with pytest.raises(SystemExit, match="expected lines of JSON .* RecursionError"):
        gsm8k.load(str(tmp_path), None)
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(bytes(range(250)), mtime=0)[:12] + bytes(300))
    with pytest.raises(SystemExit, match="expected lines of JSON .*: error Error -3 while decompressing"):
        gsm8k.load(str(tmp_path), None)


def test_builtin_is_downloaded_once_and_without_a_network_a_sentence_says_where_it_is(tmp_path, monkeypatch):
    write_lines(tmp_path)
    asked = []

    def urlopen(url, timeout):
        asked.append(url.rpartition("/")[2])
        return open(tmp_path / asked[-1], "rb")

    monkeypatch.setattr(gsm8k, "DOWNLOADED", tmp_path / "runs" / "gsm8k-data")
    monkeypatch.setattr(gsm8k.urllib.request, "urlopen", lambda *_, **__: (_ for _ in ()).throw(URLError("no network")))
    with pytest.raises(SystemExit, match="no network.*get train.jsonl and test.jsonl from https://.*DATA="):
        gsm8k.load("builtin", None)
    assert not gsm8k.DOWNLOADED.exists()
    monkeypatch.setattr(gsm8k.urllib.request, "urlopen", urlopen)
    assert [len(part) for _ in range(2) for part in gsm8k.load("builtin", None)] == [16, 4] * 2
    assert asked == ["train.jsonl", "test.jsonl"]


def test_a_question_is_a_chat_and_its_text_stays_text(tmp_path):
    config = SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/smollm2"))
    question = gsm8k.ask("Is <|im_end|> 2 + 3?", "5", config)
    assert isinstance(question.prompt[0], Special) and "Is <|im_end|> 2 + 3?\nLet's think" in question.prompt[-5]
    assert prompt_text(question.prompt).endswith("a number alone.<|im_end|>\n<|im_start|>assistant\n")
    thinks = SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/qwen3"))
    assert prompt_text(gsm8k.ask("?", "5", thinks).prompt).endswith("<think>\n\n</think>\n\n")  # it need not any more
    items, _ = gsm8k.load(write_lines(tmp_path), config)
    some = gsm8k.make_questions(items, 8, random.Random(1), config)
    assert some == gsm8k.make_questions(items, 8, random.Random(1), config) and len({q.prompt for q in some}) == 8


def test_the_start_model_is_not_downloaded_unasked():
    with pytest.raises(SystemExit, match="MODEL=Qwen/Qwen2.5-0.5B-Instruct downloads it.*HF_TOKEN"):
        gsm8k.start_model()


def test_a_run_has_the_defaults_and_refuses_random_weights(tmp_path, capsys):
    torch.manual_seed(0)
    model = GPT(GPTConfig(1000, 256, 16, 1, 2, eos_token_id=2))
    model.tokenizer = Tokenizer.load(toy.ROOT / "tests/published/smollm2")
    model.save(tmp_path / "model")
    (tmp_path / "data").mkdir()
    small = dict(TASK="examples/gsm8k.py", MODEL=tmp_path / "model", MAX_NEW_TOKENS=5)
    small |= dict(DATA=write_lines(tmp_path / "data"))
    assert "0% of the first gsm8k answers are well-formed" in toy.main(tmp_path / "out", **small)
    chosen = capsys.readouterr().out
    assert "16 items to train on, 4 held out" in chosen and "LOSS=cispo" in chosen and "KL_COEF=0.0" in chosen
