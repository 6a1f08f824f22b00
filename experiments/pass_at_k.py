"""Did a reward teach, or only sharpen what the model already did sometimes (Yue et al., 2025)? pass@k before and after.

    python -m experiments.pass_at_k examples/mates.py weights/tiny runs/mates/model

pass@k is the share of held-out questions that one of k answers at temperature 1 gets right: a row for each metric that
is a share, and where it is 1, an answer is right. What was only sharpened gains at k = 1 and loses at large k. All
models answer the same questions, with the same random numbers.
"""

import argparse
import random

import torch

from model import GPT
from nanorook import hardware, monitor, task
from rollout import sample
from rook.benchmark import pass_at_k

KS = 1, 4, 16, 64


def tries(module, name, count):
    """{kind: [the metrics of KS[-1] answers to a question, those to the next one, ...]}"""
    device = hardware.choose_device()
    model = GPT.load(name).to(device).inference_copy(hardware.fastest_dtype(device))
    _, held_out = module.load("builtin", model.config)
    questions = task.make_questions(module, held_out, min(count, len(held_out)), random.Random(0), model.config)
    noise = torch.rand(len(questions), KS[-1], max(module.LIMITS.values()), generator=torch.Generator().manual_seed(0))
    found = {}
    for _, answers in sample(model, questions, KS[-1], module.LIMITS, noise=noise, rows=2048):
        for answer in task.graded(module, answers):
            found.setdefault(answer.question.kind, []).append(answer.grade.metrics)
    return found


def main():
    parser = argparse.ArgumentParser("python -m experiments.pass_at_k", description=__doc__.split("\n")[0])
    parser.add_argument("task", help="a task file, as for TASK")
    parser.add_argument("model", nargs="+", help="model folders, the start first")
    parser.add_argument("--questions", type=int, default=400, help="held-out ones (default: 400)")
    a = parser.parse_args()
    hardware.flush_denormals()
    module = task.load(a.task)
    print("| | k |" + "".join(f" {name} |" for name in a.model) + "\n| --- | ---: |" + " ---: |" * len(a.model))
    found = [tries(module, name, a.questions) for name in a.model]
    for kind in found[0]:
        answers = [metrics for of_model in found for metrics in of_model[kind]]
        for metric in dict.fromkeys(name for metrics in answers for name in metrics):
            if not all(0 <= metrics.get(metric, 0) <= 1 for metrics in answers):
                continue
            right = [[metrics.get(metric) == 1 for metrics in of_model[kind]] for of_model in found]
            right = [[sum(r[i : i + KS[-1]]) for i in range(0, len(r), KS[-1])] for r in right]  # of each question
            for k in KS:
                chances = [[pass_at_k(KS[-1], count, k) for count in counts] for counts in right]
                cells = [monitor.with_interval(*(100 * x for x in monitor.interval(c)), ".1f") for c in chances]
                print(f"| {kind} {metric} | {k} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
