"""What a model learns of mates in one from right answers instead of rewards: is it the model that limits a run?

    python -m experiments.imitate MODEL --steps 300

Each step has --rows questions of examples/mates.py: the answers are a random mating move, and in ordinary positions a
random legal move. The loss is the cross-entropy of their tokens, the optimizer that of train.py, with the task's LR. If
a model learns no more from this than from rewards, then neither the reward nor the estimator is what holds it back.
If a part of the mates (--share) teaches it as much as all of them do, the number of questions is not, either.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import grpo
import rewards
import train
from examples import mates
from model import GPT
from nanorook import hardware
from nanorook.settings import number
from nanorook.task import draw_questions, load_items
from tools.chess_pretrain import hidden

ASKED = 400  # held-out questions, of which 300 are about mates, and as many of those that are trained on
ANSWERS = 4  # sampled answers to each, for pass@1
SHOWN = "mates mate T=0", "mates mate pass@1", "moves legal T=0", "moves legal pass@1"


def texts(questions, tokenizer, space, rng):
    """Tokens (R, S) and targets (R, S), -100 where there is none: only the answer's tokens are learnt."""
    tokens, targets = [], []
    for question in questions:
        prompt = tokenizer.encode(question.prompt)
        answer = tokenizer.encode(space + rng.choice(question.truth["mate" if question.kind == "mates" else "legal"]))
        tokens.append(torch.tensor([*prompt, *answer[:-1]]))
        targets.append(torch.tensor([-100] * (len(prompt) - 1) + answer))
    return pad_sequence(tokens, True), pad_sequence(targets, True, -100)


def main():
    p = argparse.ArgumentParser("python -m experiments.imitate", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    count = number(int, 1)
    p.add_argument("model", help="a GPT-2 that plays chess: a model folder or hub id")
    p.add_argument("--steps", type=count, default=300, help="number of updates")
    p.add_argument("--rows", type=count, default=256, help="number of questions in a step")
    p.add_argument("--eval-every", type=count, default=100, help="steps between evaluations")
    p.add_argument("--share", type=number(float, 0.05, 1), default=1.0, help="share of the mates that it learns from")
    a = p.parse_args()
    train.task, train.LR, warmup = mates, mates.DEFAULTS["LR"], mates.DEFAULTS["WARMUP_STEPS"]
    device, dtype = hardware.prepare()
    model = GPT.load(a.model).to(device).set_compute_dtype(dtype)
    space = "" if rewards.chess_format(model.config) in rewards.WIDTH else " "
    items, held_out = load_items(mates, "builtin", model.config)
    known = [item for item in items if item[0] == "mates"]
    learnt = set(random.Random(0).sample(known, round(a.share * len(known))))
    items = [item for item in items if item[0] != "mates" or item in learnt]
    asked = {"held out": held_out, "trained on": items}
    asked = {name: draw_questions(mates, some, ASKED, random.Random(0), model.config) for name, some in asked.items()}
    (optimizer,) = train.make_optimizers(model)
    print("step  questions   " + "  ".join(SHOWN))
    for step in tqdm(range(a.steps + 1), leave=False, disable=None):
        if step % a.eval_every == 0 or step == a.steps:
            for which, questions in asked.items():
                skill, _ = train.evaluate(model, questions, ANSWERS)
                figures = "  ".join(f"{skill[name][0]:{len(name)}.1%}" for name in SHOWN)
                print(f"{step:4}  {which:10}  {figures}", flush=True)
        if step == a.steps:
            break
        rng = random.Random(f"imitate/{step}")
        shown = draw_questions(mates, items, a.rows, rng, model.config)
        tokens, targets = (x.to(device) for x in texts(shown, model.tokenizer, space, rng))
        states = hidden(model, tokens)[targets >= 0]  # (K, C)
        F.cross_entropy(model.head(states).float(), targets[targets >= 0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.MAX_GRAD_NORM)
        optimizer.param_groups[0]["lr"] = train.LR * grpo.schedule(step, a.steps, warmup, "linear")
        optimizer.step()
        model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
