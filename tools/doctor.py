"""The doctor: one batch goes through train.py's own functions, and what each of them leaves is checked.

python -m tools.doctor                        with the default settings
python -m tools.doctor MODEL=mine LR=3e-5     with others, as train.py takes them

A check is ok, or says what is wrong and what to do; the first one that is wrong is usually the cause of the others.
Nothing is written. Warm-ups count as over: learning rate, KL and rewards are full.
"""

import copy
import math
import random
import sys
from typing import NamedTuple

import torch

from nanorook import settings

if __name__ == "__main__":
    settings.read_user()  # before train's first setting

import grpo
import train
from model import GPT
from nanorook import hardware, monitor, parallel
from nanorook.settings import refuse
from rollout import microbatches

STEP = 10**9  # beyond all warm-ups
UPDATES = 5  # on the same batch


class Check(NamedTuple):
    name: str
    sentence: str  # what is wrong and what to do; empty where all is well
    figures: dict


def check(name, figures, *wrong):
    """`wrong`: (condition, sentence) pairs, causes before their consequences; the first that is true is said."""
    return Check(name, next((sentence for condition, sentence in wrong if condition), ""), figures)


def mean(x):
    return x.float().mean().item()


def norm(tensors):
    return torch.stack([tensor.float().norm() for tensor in tensors if tensor is not None]).norm().item()


def examine(model, reference, optimizer, questions):
    """The checks one by one, as far as the batch gets. `model` is updated."""
    exact = model.dtype == torch.float32
    yield (found := weights(model))
    if found.figures["broken"]:
        return
    yield computing(model, questions[0], exact)
    results = train.rollout(model, questions, STEP)
    batches, samples = [batch for batch, _ in results], [sample for _, part in results for sample in part]
    yield truths(questions, samples)
    for batch, part in results:
        yield completions(model, batch, part)
    if any(len(batch.tokens) != len(batch.prompts) * train.GROUP_SIZE for batch in batches):
        return
    yield rewards(samples)

    # One number for each token, in the order of the microbatches
    parts = [part for batch in batches for part in microbatches(batch, train.microbatch_tokens(model))]

    @torch.no_grad()
    def each(function):
        return torch.cat([function(part)[part.completion_mask].float() for part in parts])  # (tokens,)

    def trained(part):
        return train.forward(model, part)[0]

    before = each(trained)
    yield logprobs(before, each(trained), each(lambda part: part.rollout_logprobs), 1e-3 if exact else 0.05)
    if reference is not None:
        referred = each(lambda part: train.reference_logprobs(reference, part))
        yield divergence(model, reference, before, referred, 1e-5 if exact else 1e-3)
    yield advantages(batches, samples)

    # The update, watched at the optimizer's door
    old, arrived = copy.deepcopy(model.state_dict()), []
    kept = copy.deepcopy(reference.state_dict()) if reference is not None else {}
    optimizer.register_step_pre_hook(lambda *_: arrived.append(norm(p.grad for p in model.parameters())))
    metrics = train.update(model, reference, optimizer, batches, train.KL_COEF)
    whole, most, limit = metrics["grad_norm"], max(arrived, default=math.nan), train.MAX_GRAD_NORM
    yield check(
        "gradient", {"norm": whole, "at the optimizer": most, "skipped": metrics["skipped"]},
        (metrics["skipped"], "It was not finite, so no update was made: see the checks above, or use DTYPE=float32."),
        (whole == 0, "It is 0, so nothing can be learnt from this batch: look at rewards and advantages."),
        (most > 1.001 * limit, f"A norm of {most:.4g} reaches the optimizer, above MAX_GRAD_NORM={limit:g}: clip it."),
        (whole > 10 * limit, f"Clipped to {limit:g}, few tokens decide its direction: lower KL_COEF or the rewards."),
    )  # fmt: skip
    change = norm(tensor - old[name] for name, tensor in model.state_dict().items())
    moved = any(not torch.equal(tensor, reference.state_dict()[name]) for name, tensor in kept.items())
    yield check(
        "update", {"lr": train.LR, "change": change, "relative": change / norm(old.values())},
        (metrics["broken"], f"It left weights that are not finite: lower LR={train.LR:g}."),
        (moved, "The reference moved with the policy, as they share weights, so KL says nothing: make it a copy."),
        (change == 0, f"The weights did not move: look at LR={train.LR:g}, and whether the optimizer holds them."),
    )  # fmt: skip
    if metrics["broken"]:
        return
    first = mean(grpo.kl(before, now := each(trained), torch.ones_like(now), "k3"))
    for _ in range(UPDATES - 1):
        train.update(model, reference, optimizer, batches, train.KL_COEF)
    gain = mean((each(trained) - before) * each(lambda part: part.advantages))
    yield check(
        "learning", {"updates": UPDATES, "KL of the first": first, "gain": gain},
        (first > train.KL_DIVERGENCE_THRESHOLD, f"One update made a KL of {first:.4g}: lower LR={train.LR:g}."),
        (not gain > 0, f"Better answers did not become likelier: look for a wrong sign, or lower LR={train.LR:g}."),
    )  # fmt: skip


def weights(model):
    state = model.state_dict()
    broken = sum(not tensor.isfinite().all() for tensor in state.values())
    untrained = not any(tensor.any() for name, tensor in state.items() if name.endswith("bias"))
    return check(
        "weights", {"tensors": len(state), "norm": norm(state.values()), "broken": broken},
        (broken, f"{broken} tensors hold NaN or infinity: load a checkpoint from before the run broke."),
        (untrained, f"Every bias is 0, as in random weights never loaded or trained: check MODEL={train.MODEL}."),
    )  # fmt: skip


@torch.no_grad()
def computing(model, question, exact):
    """This machine's forward against the same in float64, and against itself."""
    ids = torch.tensor([model.tokenizer.encode(question.prompt)])
    double = copy.deepcopy(model).to("cpu", torch.float64).use(torch.float64)(ids).log_softmax(-1)
    first, again = (model(ids.to(model.wte.weight.device)).double().cpu().log_softmax(-1) for _ in range(2))
    error, change, bound = mean((first - double).abs()), (again - first).abs().max().item(), 1e-3 if exact else 0.1
    return check(
        "computing", {"error": error, "bound": bound, "asked again": change},
        (change > bound / 10, f"Asked again, the forward differs by {change:.4g}: remove dropout or other chance."),
        (not error < bound, f"{model.dtype} is wrong or too coarse here, by {error:.4g} nats: use DTYPE=float32."),
    )  # fmt: skip


def truths(questions, samples):
    known = [question for question in questions if question.truth]
    kinds = {question.kind: len({repr(q.truth) for q in known if q.kind == question.kind}) for question in known}
    stub = [kind for kind, n in kinds.items() if n == 1 < sum(question.kind == kind for question in known)]
    # The engine may have been asked while an answer was graded; then the answer's metrics say if it knew.
    unknown = int(sum(s.grade.metrics.get("unlabelled", not s.question.truth) for s in samples)) // train.GROUP_SIZE
    return check(
        "questions", {"count": len(questions), "with a truth": len(questions) - unknown, **kinds},
        (stub, f"All {' and '.join(stub)} questions have the same truth, that of a stub: check DATA={train.DATA}."),
        (unknown, f"{unknown} have no truth, so right answers go unpaid: install Stockfish, or use tools.label."),
    )  # fmt: skip


def completions(model, batch, samples):
    tokenizer, kind = model.tokenizer, samples[0].question.kind
    rows = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.completion_mask)]
    metrics = {name.split(" ", 1)[1]: value for name, (value, _) in monitor.intervals(samples).items()}
    nats = -mean(batch.rollout_logprobs[batch.completion_mask])
    expected, cut = len(batch.prompts) * train.GROUP_SIZE, sum(s.hit_limit for s in samples) / len(samples)
    ends = sum(row[-1:].count(tokenizer.eos) != row.count(tokenizer.eos) or row.count(tokenizer.eos) == s.hit_limit
               for row, s in zip(rows, samples))  # fmt: skip
    foreign = sum(tokenizer.decode(row) != s.text for row, s in zip(rows, samples))
    structure, limit = metrics.get("structure", 1.0), train.task.LIMITS[kind]
    return check(
        f"{kind} completions",
        {"count": len(rows), "tokens": sum(map(len, rows)), "nats": nats, "hit_limit": cut, **metrics},
        (len(rows) != expected, f"There are {len(rows)}, not {expected}: GROUP_SIZE={train.GROUP_SIZE} is not used."),
        (ends, f"The mask of {ends} does not end with their one end token, which goes untrained: use lengths."),
        (foreign, f"The tokens of {foreign} are not the text that was graded: keep the ids, make none from text."),
        (structure < 0.2 and nats > 0.8 * math.log(model.config.vocab_size),
         f"This is random text: MODEL={train.MODEL} was never loaded or trained."),
        (cut > 0.2, f"{cut:.0%} run into the limit of {limit} tokens: raise it, or pretrain with the end token."),
        (structure < 0.2, f"Only {structure:.0%} have the form of an answer: check config.json, or pretrain first."),
    )  # fmt: skip


def rewards(samples):
    values = torch.tensor([s.grade.reward for s in samples])
    least, most = values.min().item(), values.max().item()
    same, capped = most - least < 1e-6, mean(values > most - 1e-6)
    apart = max(abs(s.grade.reward - sum(value for _, value, *_ in s.grade.pieces)) for s in samples)
    return check(
        "rewards", {"mean": mean(values), "std": values.std().item(), "min": least, "max": most},
        (not values.isfinite().all(), "A reward is NaN or infinite: find the completion that grade() cannot read."),
        (apart > 1e-4, f"The pieces of an answer differ from its reward by {apart:.4g}: they have to add up to it."),
        (most < 0, f"Every reward is negative, the best is {most:g}: pay for each right part instead of a cliff."),
        (max(-least, most) > 10, f"They go from {least:g} to {most:g}, so a few rows outweigh the others: scale them."),
        (same, f"Every reward is {most:g}, so there is no gradient: penalise by a factor, not by a cap."),
        (capped > 0.5 and most < 1 - 1e-6, f"{capped:.0%} are capped at {most:g}: penalise by a factor, not by a cap."),
    )  # fmt: skip


def logprobs(before, again, sampled, bound):
    gap, change = mean((before - sampled).abs()), mean((again - before).abs())
    sides = f"TEMPERATURE={train.TEMPERATURE:g}, TOP_K={train.TOP_K} and TOP_P={train.TOP_P:g}, weights and token ids"
    return check(
        "logprobs", {"sampling": mean(sampled), "training": mean(before), "gap": gap, "bound": bound},
        (not before.isfinite().all(), "Training gives NaN or infinity from finite weights: use DTYPE=float32."),
        (change > bound / 10, "Asked again, the training forward gives other numbers: remove dropout or other chance."),
        (not gap < bound, f"Sampling and training differ by {gap:.4f} nats a token: use {sides} on both sides."),
    )  # fmt: skip


def divergence(model, reference, before, referred, bound):
    kl = mean(grpo.kl(before, referred, torch.ones_like(before), "k3"))
    pairs = zip(model.state_dict().values(), reference.state_dict().values())
    differ = sum(not torch.equal(a.to(b.device, model.dtype), b.to(model.dtype)) for a, b in pairs)
    wrong, start = not kl < bound, f"It is {kl:.4g} a token before any update"
    return check(
        "KL", {"per token": kl, "tensors that differ": differ},
        (wrong and differ, f"{start}, and {differ} tensors differ: the reference is not the start model, so copy it."),
        (wrong, f"{start}, with equal weights: look for dropout, precision or temperature on one side only."),
    )  # fmt: skip


def advantages(batches, samples):
    values = torch.cat([batch.advantages[batch.completion_mask] for batch in batches]).float()
    groups = torch.tensor([s.grade.reward for s in samples]).view(-1, train.GROUP_SIZE)
    still, most = mean(grpo.constant(groups)), values.abs().max().item()
    times = most / max(1e-9, (groups - groups.mean(1, keepdim=True)).abs().max().item())
    return check(
        "advantages", {"std": values.std().item(), "most": most, "frac_zero_std": still},
        (still > 0.5, f"{still:.0%} of groups have one reward only and teach nothing: grade in steps."),
        (times > 20, f"SCALE_REWARDS={train.SCALE_REWARDS} makes noise {times:.0f} times as large: use none."),
    )  # fmt: skip


def main():
    settings.finish()
    device = parallel.start(hardware.choose(train.DEVICE), 1)
    dtype = hardware.fastest_dtype(device) if train.DTYPE == "auto" else getattr(torch, train.DTYPE)
    model = GPT.load(train.MODEL or train.task.start_model()).to(device).use(dtype)
    items, _ = train.task.load(train.DATA, model.config)
    if len(items) < train.BATCH_POSITIONS:
        refuse(f"DATA={train.DATA} has {len(items)} items, fewer than BATCH_POSITIONS={train.BATCH_POSITIONS}.")
    questions = train.task.make_questions(items, train.BATCH_POSITIONS, random.Random(train.SEED), model.config)
    reference = train.make_reference(model, device, dtype) if train.KL_COEF else None
    checks = []
    for found in examine(model, reference, train.make_optimizer(model), questions):
        checks.append(found)
        figures = ", ".join(f"{key} {f'{v:.4g}' if isinstance(v, float) else v}" for key, v in found.figures.items())
        print(f"{found.name:24}{'WRONG' if found.sentence else 'ok':7}{figures}", flush=True)
        if found.sentence:
            print(f"{'':24}-> {found.sentence}", flush=True)
    wrong = [found.name for found in checks if found.sentence]
    print(f"\nwrong: {', '.join(wrong)}" if wrong else f"\nall {len(checks)} checks are ok")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
