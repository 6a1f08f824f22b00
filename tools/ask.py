"""Ask a model a question of your own: shows a few answers and their rewards, for any task.

python -m tools.ask runs/letters/model "k f q b t ="       a model of a run, whose task is known
python -m tools.ask runs/letters/model                     some held-out questions of the task
TASK=examples/letters.py python -m tools.ask MODEL "k f q b t ="

The task's function `question` turns the text into a question and knows its reference answer. Without such a function,
the model gets the text as it stands, and its answers are not graded.
"""

import argparse
import random
import re

import torch

from nanorook import settings

if __name__ == "__main__":
    settings.read_run()  # before the task's first setting

import architectures
from nanorook import hardware
from nanorook.monitor import printable, show_answer
from nanorook.settings import fail, number, setting
from nanorook.task import check_questions, draw_questions, grade_answers, load_items, load_task, prompt_text
from rollout import sample

HELD_OUT = 3  # questions if none is given


def questions_about(task, text, data, seed, config):
    """Held-out questions of the task, or the one that `text` asks."""
    if text and hasattr(task, "question"):
        return check_questions(task, [task.question(text, config)])
    _, held_out = load_items(task, data, config)
    count = min(HELD_OUT, len(held_out)) or fail(f"DATA={data} has no held-out items; provide more.")
    own = draw_questions(task, held_out, count, random.Random(seed), config)
    if not text:
        return own
    # The text as it stands, with the kind and the stop of the task's own questions
    return check_questions(task, [own[0]._replace(prompt=text, truth=None)])


def ask(model, task, question, known, temperature, count):
    """Prints the question and its answers, one greedy and `count` sampled. If the reference answer is known, they are
    graded, and it follows."""
    print(f"{question.kind}: {printable(prompt_text(question.prompt).strip())}")
    for title, size, at in (("greedy", 1, 0.0), (f"T={temperature:g}", count, temperature)):
        (rollout,) = sample(model, [question], size, task.LIMITS, at)
        for answer in grade_answers(task, rollout.answers) if known else rollout.answers:
            show_answer(task, answer, f"{title:6} ")
    if known:
        show_truth(question.truth)


def show_truth(truth):
    """Prints a reference answer, with a line for each named part, and long lines cut off."""
    parts = truth if isinstance(truth, dict) else {"": truth}
    for name, part in parts.items():
        line = printable(f"reference answer{f', {name}' if name else ''}: {part}")
        print(f"{line:.110}{' ...' * (len(line) > 110)}")


def main():
    p = argparse.ArgumentParser("python -m tools.ask", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", help="a model folder or hub id")
    p.add_argument("text", nargs="*", help="the question; also TASK=FILE.py and other settings of the task")
    p.add_argument("--answers", type=number(int, 1), default=3, help="number of sampled answers after the greedy one")
    a = p.parse_intermixed_args()
    task = load_task(setting("TASK", "rewards.py", "the file that makes questions and grades answers"))
    settings.take_defaults(task.DEFAULTS)
    data = setting("DATA", "builtin", "as in train.py")
    seed = setting("SEED", 0, "as in train.py", low=0, high=2**32 - 1)
    temperature = setting("TEMPERATURE", 1.0, "as in train.py", low=1e-3)
    dtype = setting("DTYPE", "auto", "as in train.py", one_of=("auto", "float32", "bfloat16"))
    device, dtype = hardware.prepare(setting("DEVICE", "auto", "as in train.py"), dtype)
    text = [word for word in a.text if word.partition("=")[0] not in settings.SETTINGS]
    if unknown := [word for word in text if re.fullmatch(r"[A-Z][A-Z_]+=\S*", word)]:
        fail(f"{unknown[0].partition('=')[0]} is not a setting of {task.__file__}; leave it out.")
    text = " ".join(text)
    model = architectures.load(a.model).to(device).inference_copy(dtype)
    torch.manual_seed(seed)
    known = hasattr(task, "question") or not text
    for question in questions_about(task, text, data, seed, model.config):
        ask(model, task, question, known, temperature, a.answers)
    if not known:
        print("not graded: the task has no function `question`, which would know the reference answer to this text.")


if __name__ == "__main__":
    main()
