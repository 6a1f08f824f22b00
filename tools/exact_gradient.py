"""Trains on the exact gradient of an objective, summed over all answers that the task lists, instead of on samples.

python -m tools.exact_gradient TASK=examples/mates.py STEPS=120 OUT_DIR=out/exact        the expected reward
python -m tools.exact_gradient TASK=examples/mates.py STEPS=120 OUT_DIR=out/log OBJECTIVE=log

Compared with a run of train.py that makes one update from a step's answers, only the sampling is gone. Questions,
learning rate and KL are those of train.py, and so is the size of the loss, a mean over tokens. A question whose answers
are not listed is left out, and an answer that is not listed gets the reward 0. The model is written to OUT_DIR/model,
where tools.evaluate and tools.compare find its settings.
"""

import json
import random
import time
from pathlib import Path

import torch

from nanorook import settings
from nanorook.settings import fail, heading, setting

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import architectures
import grpo
import train
from nanorook import hardware
from nanorook.run import write
from nanorook.task import draw_questions, load_items, start_folder
from tools import exact

heading("The exact gradient")
OBJECTIVE = setting(
    "OBJECTIVE",
    "best",
    "what is maximised; best: the expected best reward of BEST_OF answers, which with BEST_OF=1 is the expected "
    "reward; log: the log of the chance of each level of the reward; anchored: as best, with a KL that weighs more "
    "where the start model is seldom right",
    one_of=("best", "log", "anchored"),
)

REPORT_EVERY = 5  # steps
NEEDED = dict(LORA_RANK=0, CONTROL="none", OVERFIT=0, SCALE_REWARDS="none", EPOCHS=1)  # others are not implemented


def levels(policy, rewards):
    """For each question its rewards in rising order, each as the gain over the one before, and the chance that an
    answer earns at least as much: both (B, R). Equal rewards gain 0."""
    rewards, order = rewards.sort(1)
    gains = rewards.diff(dim=1, prepend=torch.zeros_like(rewards[:, :1]))
    at_least = policy.gather(1, order).flip(1).cumsum(1).flip(1)
    return gains, at_least


def objective(policy, rewards, best_of):
    """(B,) what is raised, for policies and rewards (B, R) of listed answers.

    The expected best of k answers is E[max] = Σ gain · (1 - (1 - chance)^k) over the levels of the reward. The gradient
    that GRPO estimates from groups of G is 1/k - 1/G times that of E[max], so it has this factor here, too, and the KL
    weighs as much (Walder & Karkhanis, 2025, Pass@K Policy Optimization). In the log, 1/G is what a group can see."""
    G, (gains, at_least) = train.GROUP_SIZE, levels(policy, rewards)
    if OBJECTIVE == "log":
        return (gains * (at_least + 1 / G).log()).sum(1)
    missed = (1 - at_least).clamp(min=1e-6)
    return (1 / best_of - 1 / G) * (gains * (1 - missed**best_of)).sum(1)


def kl_weights(reference, rewards, kinds):
    """(B,) the weight of each question's KL. With OBJECTIVE=anchored it is up to G times as large for questions that
    the reference (B, R) hardly ever answers right."""
    by_kind = getattr(train.task, "KL_WEIGHTS", {})
    weights = train.KL_COEF * torch.tensor([by_kind.get(kind, 1.0) for kind in kinds], device=rewards.device)
    if OBJECTIVE == "anchored":
        right = rewards == rewards.amax(1, keepdim=True)
        weights = weights / ((reference * right).sum(1) + 1 / train.GROUP_SIZE)
    return weights


def step_gradient(model, reference, questions, best_of):
    """Adds the gradient of the loss over these Listed questions; returns their mean reward and KL."""
    parts = list(exact.parts(model, train.task.LIMITS, questions))
    length = torch.cat([part.last[part.real.flatten()] + 1.0 for part in parts]).mean()  # of an answer, in tokens
    reward = kl = 0.0
    for part in parts:
        some = [questions[place] for place in part.places]
        rewards = torch.zeros(part.real.shape)
        for row, question in zip(rewards, some):
            row[: len(question.texts)] = torch.tensor(question.rewards)
        rewards = rewards.to(part.real.device)  # (B, R)

        logp = exact.logprobs(model, part, train.TEMPERATURE)  # (B, R)
        with torch.no_grad():
            ref_logp = exact.logprobs(reference, part, train.TEMPERATURE)
        policy, ref_policy = (torch.where(part.real, x.exp(), 0) for x in (logp, ref_logp))
        # The other answers' part of the KL is at least the mass that they gained, which is what the listed ones lost.
        terms = policy * (logp - ref_logp) + ref_policy - policy
        part_kl = torch.where(part.real, terms, 0).sum(1)  # (B,)
        weights = kl_weights(ref_policy, rewards, [question.kind for question in some])
        loss = (weights * part_kl - objective(policy, rewards, best_of)).sum() / len(questions)
        (loss / length).backward()
        reward += (policy * rewards).sum().item() / len(questions)
        kl += part_kl.sum().item() / len(questions)
    return reward, kl


def main():
    settings.finish("python -m tools.exact_gradient")
    out = Path(train.OUT_DIR)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"OUT_DIR={out} is no folder that a model can be written to ({error}).")
    if any(out.iterdir()):
        fail(f"OUT_DIR={out} is not empty; name another folder for the model.")
    for name, value in NEEDED.items():
        if getattr(train, name) != value:
            fail(f"this program needs {name}={value}; set it.")
    device, dtype = hardware.prepare(train.DEVICE, train.DTYPE)
    model = architectures.load_merged(train.MODEL or start_folder(train.task)).to(device).set_compute_dtype(dtype)
    reference, optimizers = train.make_reference(model), train.make_optimizers(model)
    items, _ = load_items(train.task, train.DATA, model.config)
    if len(items) < train.BATCH_POSITIONS:
        fail(
            f"DATA={train.DATA} has {len(items)} items, fewer than BATCH_POSITIONS={train.BATCH_POSITIONS}; provide "
            "more, or lower it."
        )
    started = time.time()
    for step in range(train.STEPS):
        rng = random.Random(f"{train.SEED}/{step}")
        asked = draw_questions(train.task, items, train.BATCH_POSITIONS, rng, model.config)
        questions = exact.listed(train.task, asked)
        if not questions:
            fail(f"TASK={train.TASK} lists the answers to none of its questions; see answers in nanorook/task.py.")
        lowest = min(question.rewards.min() for question in questions)
        if lowest < 0 and (train.BEST_OF > 1 or OBJECTIVE == "log"):  # levels() lacks the 0 of other answers
            fail(f"a listed answer has the reward {lowest:g}, but BEST_OF and OBJECTIVE=log need rewards of 0 or more.")
        reward, kl = step_gradient(model, reference, questions, train.best_of_at(step))
        factor = grpo.schedule(step, train.STEPS, train.WARMUP_STEPS, train.LR_SCHEDULE)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.MAX_GRAD_NORM)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * train.LR
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % REPORT_EVERY == 0 or step + 1 == train.STEPS:
            seconds = time.time() - started
            print(f"step {step}: expected reward {reward:.3f}, KL {kl:.4f}, {seconds:.0f} s", flush=True)
    model.save(out / "model")
    write(out / "settings.json", json.dumps(settings.values(), indent=2))


if __name__ == "__main__":
    main()
