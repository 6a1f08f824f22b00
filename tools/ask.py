"""Ask a model of any task: your own question, a few answers, and what each of them is worth.

python -m tools.ask out/model "FEN"                      chess: five moves, their evaluations, the best of them
python -m tools.ask out/model "FEN e2e4"                 chess: the position after a move, legal or not
TASK=examples/letters.py python -m tools.ask runs/letters/model "k f q b t ="
python -m tools.ask out/model                            some held-out questions of the task

The task's function `question` makes a question of the text and knows its truth. A task without one is asked the text as
it stands, and its answers are not graded.
"""

import argparse
import json
import random

import torch

from nanorook import settings

if __name__ == "__main__":
    settings.read_user()  # before the task's first setting

from model import GPT
from nanorook import hardware
from nanorook import task as task_file
from nanorook.monitor import printable
from nanorook.settings import number, setting
from rollout import sample

HELD_OUT = 3  # questions where none is given


def questions_about(task, text, data, seed, config):
    """The questions, and whether the task knows their truth."""
    if text and hasattr(task, "question"):
        return task_file.checked(task, [task.question(text, config)]), True
    _, held_out = task.load(data, config)
    own = task_file.make_questions(task, held_out, min(HELD_OUT, len(held_out)), random.Random(seed), config)
    return ([own[0]._replace(prompt=text, truth=None)], False) if text else (own, True)


def ask(model, task, question, known, temperature, count):
    """Prints the question with its answers: one greedy, `count` sampled."""
    print(f"{question.kind}: {printable(question.prompt.strip())}")
    if known:
        print(f"truth: {json.dumps(question.truth)}")
    for title, size, heat in (("greedy", 1, 0.0), (f"T={temperature:g}", count, temperature)):
        ((_, answers),) = sample(model, [question], size, task.LIMITS, heat)
        for answer in task_file.graded(task, answers) if known else answers:
            print(f"  {title:6} -> {printable(answer.text.strip())}" + " ... (cut off)" * answer.hit_limit)
            if known:
                print(f"{'':9} {answer.grade.reward:.4g} = {task_file.as_sum(answer.grade.pieces) or 0}")


def main():
    p = argparse.ArgumentParser("python -m tools.ask", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("model", help="a model folder or hub id")
    p.add_argument("text", nargs="*", help="the question; TASK=FILE.py and other settings of the task, too")
    p.add_argument("--answers", type=number(int, 1), default=3, help="sampled ones, after the greedy one")
    p.add_argument("--temperature", type=number(float, 0), default=1.0, help="of the sampled answers")
    p.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="decides what is drawn")
    a = p.parse_args()
    task = task_file.load(setting("TASK", "rewards.py", "the file that asks and grades"))
    data = setting("DATA", "builtin", "as in train.py")
    text = " ".join(word for word in a.text if word.partition("=")[0] not in settings.SETTINGS)
    hardware.flush_denormals()
    device = hardware.choose_device()
    model = GPT.load(a.model).to(device).inference_copy(hardware.fastest_dtype(device))
    torch.manual_seed(a.seed)
    questions, known = questions_about(task, text, data, a.seed, model.config)
    for question in questions:
        ask(model, task, question, known, a.temperature, a.answers)
    if not known:
        print("not graded: the task has no function `question`, which would know the truth of this text.")


if __name__ == "__main__":
    main()
