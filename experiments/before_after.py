"""The picture at the top of the README: a model's greedy move before and after a run of mates, with its reward.

    python -m experiments.before_after runs/mates/model docs/before-after.svg

It takes the first held-out position with a mate in one, in the order of the data, in which the run has changed the
greedy move, whether for the better or not.
"""

import argparse

import torch

import architectures
import rewards
from examples import mates
from nanorook.monitor import printable
from nanorook.settings import fail, output_file
from nanorook.task import grade_answers
from rollout import sample
from rook import board

AT_ONCE = 64  # questions


def moves(model, questions):
    """The graded greedy answer to each question."""
    rollouts = sample(model, questions, 1, mates.LIMITS, temperature=0)
    return [answer for rollout in rollouts for answer in grade_answers(mates, rollout.answers)]


def first_change(before, after):
    """The first position in which the two models' moves differ: the answer of each."""
    _, held_out = mates.load("builtin", before.config)
    questions = [mates.ask("mates", position, before.config) for pool, position in held_out if pool == "mates"]
    for first in range(0, len(questions), AT_ONCE):
        some = questions[first : first + AT_ONCE]
        for pair in zip(moves(before, some), moves(after, some)):
            if pair[0].text != pair[1].text:
                return pair
    fail("the two models' greedy moves are the same in all held-out positions.")


def picture(answers):
    """Two boards beside each other, each below its title."""
    parts = []
    for place, (title, answer) in enumerate(zip(("before", "after"), answers)):
        text = f"{title}: {printable(answer.text.strip())}, reward {answer.grade.reward:.2g}"
        drawn = board.draw(answer.question, answer.text).replace(
            "<svg ", f'<svg x="{400 * place}" y="40" width="378" height="378" ', 1
        )
        parts.append(f'<text x="{400 * place + 200}" y="26" text-anchor="middle">{text}</text>{drawn}')
    style = 'font-family="sans-serif" font-size="20" fill="#24292f"'
    size = 'viewBox="0 0 800 440" width="800" height="440"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def main():
    p = argparse.ArgumentParser("python -m experiments.before_after", description=__doc__.split("\n")[0])
    p.add_argument("model", help="what a run of examples/mates.py has made of the embedded model")
    p.add_argument("out", type=output_file, help="the SVG to write")
    a = p.parse_args()
    start, trained = (
        architectures.load(source).inference_copy(torch.float32) for source in (rewards.start_model(), a.model)
    )
    drawn = picture(first_change(start, trained))
    with open(a.out, "w") as file:
        file.write(drawn)


if __name__ == "__main__":
    main()
