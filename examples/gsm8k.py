"""GSM8K: word problems from primary school, for an instruction-tuned model (Cobbe et al., 2021).

    TASK=examples/gsm8k.py MODEL=Qwen/Qwen2.5-0.5B-Instruct ./train.sh

The loss is CISPO's (MiniMax, 2025): a mean over all tokens, only an upper clip, no KL. In contrast to that paper,
advantages are not divided by the standard deviation of their group. DATA names a folder with the published train.jsonl
and test.jsonl; problems of train.jsonl are trained on, and those of test.jsonl are held out. By default both files are
downloaded once.
"""

import re
import urllib.request
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from examples.chat import prompt
from examples.rows import read_rows
from nanorook.folder import write
from nanorook.settings import ROOT, fail, setting
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=200, BATCH_POSITIONS=16, GROUP_SIZE=8, LR=1e-5, LOSS="cispo", TEMPERATURE=1.0, KL_COEF=0.0)
DEFAULTS |= dict(CLIP_RANGE_HIGH=0.28, SCALE_REWARDS="none", EVAL_POSITIONS=500, EVAL_EVERY=100, OUT_DIR="runs/gsm8k")
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 300, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"gsm8k": MAX_NEW_TOKENS}
NAMES = {"gsm8k right": "right results"}
START = "Qwen/Qwen2.5-0.5B-Instruct"
PUBLISHED = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
DOWNLOADED = ROOT / "runs" / "gsm8k-data"
ASKED = 'Let\'s think step by step. End with a line that has "####" and then the final answer, a number alone.'

WEIGHTS = {"form": 0.1, "number": 0.1, "right": 0.8}
# As people write numbers: 70000, $70,000, -2.50, .5, 18. (Lengths are bounded, as float() reads inf in the longest.)
WHOLE = r"\d{1,3}(?:,\d{3}){1,5}|\d{1,15}"
NUMBER = re.compile(rf"(?:-\$?|\$?-?)(?:(?:{WHOLE})(?:\.\d{{1,15}})?|\.\d{{1,15}})\.?", re.ASCII)


def start_model():
    """The model's name on the hub, if this machine has it already: nothing is downloaded unless a user names it."""
    if not isinstance(try_to_load_from_cache(START, "model.safetensors"), str):
        fail(f"{START} is not on this machine: MODEL={START} downloads it from the Hugging Face hub (1 GB), "
             "and MODEL also takes a folder or another chat model; one that is gated needs HF_TOKEN.")  # fmt: skip
    return START


def load(source, config):
    """(training items, held-out items), each the (question, final answer) of a line."""
    folder = download() if source == "builtin" else Path(source)
    return read(folder / "train.jsonl"), read(folder / "test.jsonl")


def download():
    names = [name for name in ("train.jsonl", "test.jsonl") if not (DOWNLOADED / name).exists()]
    for name in names:
        print(f"downloading {PUBLISHED}{name}", flush=True)
        try:
            content = urllib.request.urlopen(PUBLISHED + name, timeout=60).read()
        except OSError as error:
            fail(f"GSM8K could not be downloaded ({error}): get train.jsonl and test.jsonl from {PUBLISHED}, "
                 "and name their folder with DATA=.")  # fmt: skip
        DOWNLOADED.mkdir(parents=True, exist_ok=True)  # so that each of several processes replaces the whole file
        write(DOWNLOADED, {name: content})
    return DOWNLOADED


def read(file):
    items = []
    for number, row in enumerate(read_rows(file), 1):
        answer = str(row.get("answer")).rpartition("####")[2].strip()
        if not isinstance(row.get("question"), str) or number_in(answer) is None:
            fail(f"{file}, row {number}: expected a question, and an answer that ends with #### and a number.")
        items.append((row["question"], answer))
    return items


def make_questions(items, count, rng, config):
    return [ask(question, answer, config) for question, answer in rng.sample(items, count)]


def ask(question, answer, config):
    return Question("gsm8k", prompt(config, f"{question}\n{ASKED}"), answer)


def number_in(text):
    """The number that a text consists of, or None."""
    return float(re.sub(r"[$,]|\.$", "", text)) if NUMBER.fullmatch(text) else None


def grade(question, text, hit_limit=False):
    """Partial credit: a last line with ####, a number on it, the right one. Working is not judged, as nobody can tell
    which step of a text is wrong; so the right number rewards all of the words, and the number's form only its own. A
    number at which the limit cut the answer off is not right: 1 may be the beginning of 18."""
    before, mark, last = text.rstrip().rpartition("####")
    has_form = bool(mark) and not {"\n", "#"} & {*last}
    number = number_in(last.strip()) if has_form else None
    complete = not hit_limit or text != text.rstrip()
    right = number is not None and complete and number == number_in(question.truth)
    span = [(len(before), len(text))] if has_form else []
    pieces = [("form", WEIGHTS["form"] * has_form), ("number", WEIGHTS["number"] * (number is not None), *span)]
    pieces += [("right", WEIGHTS["right"] * right)]
    if hit_limit:
        pieces.append(runaway(pieces))
    return Grade(tuple(pieces), {"structure": float(number is not None), "right": float(right)})
