"""The doctor: one batch goes the whole road with train.py's own functions, and every station on it is looked at.

python -m tools.single_batch                        with the default settings
python -m tools.single_batch MODEL=mine LR=3e-5     with others, as train.py takes them
A station is ok, or says what is wrong and what to do. Warm-ups count as over: learning rate, KL and rewards are full.
"""

import argparse
import copy
import hashlib
import json
import math
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

import data
import grpo
import tasks
import train
from batch import microbatches
from engine import LiveLabels
from rewards import MALFORMED, legal_moves
from rollout import distribution
from settings import finish, values
from skill import NAMES, interval, mean_parts
from tokenizer import LoadError
from tools import replace


class Station(NamedTuple):
    name: str
    ok: bool
    sentence: str  # what is wrong and what to do; empty where all is well
    figures: dict


# What can be wrong with a station's figures, causes before their consequences: the first that is true is said.
# fmt: off
WRONG = {
    "weights": (
        (lambda f: f["broken"], "{broken} tensors hold NaN or infinity: load a checkpoint from before the run broke."),
        (lambda f: f["fresh"], "Every bias is 0, as in random weights never loaded or trained: check MODEL={MODEL}."),
    ),
    "prompts": (
        (lambda f: f["labelled"] > 1 == f["label_sets"],
         "All {labelled} labelled positions have the same moves, those of a stub: label them with tools.label."),
        (lambda f: f["labelled"] < f["policy"],
         "Only {labelled} of {policy} have labels, so best moves go unpaid: install Stockfish, or use tools.label."),
    ),
    "completions": (
        (lambda f: f["completions"] != f["prompts"] * train.GROUP_SIZE,
         "{prompts} prompts got {completions} completions: GROUP_SIZE={GROUP_SIZE} does not reach the sampler."),
        (lambda f: f["wrong_ends"],
         "The mask of {wrong_ends} does not end with their one end token, which goes untrained: make it from lengths."),
        (lambda f: f["foreign"],
         "The tokens of {foreign} are not the text that was graded: keep the sampled ids, make none from text."),
        (lambda f: f["structure"] < 0.2 and f["nats"] > 0.8 * f["nats_of_chance"],
         "This is random text ({nats:.1f} nats a token, as by chance): MODEL={MODEL} was never loaded or trained."),
        (lambda f: f["truncated"] > 0.2 and f["longest_answer"] > f["limit"],
         "{truncated:.0%} are cut off at {limit} tokens, but answers take up to {longest_answer}: raise {limited_by}."),
        (lambda f: f["truncated"] > 0.2,
         "{truncated:.0%} run on to the limit of {limit} tokens, where {longest_answer} are enough: pretrain with the "
         "end token, and keep RUNAWAY_PENALTY_MULTIPLIER below 1."),
        (lambda f: f["structure"] < 0.2,
         "Only {structure:.0%} have the structure of an answer: check chess_format in config.json, or pretrain first."),
    ),
    "rewards": (
        (lambda f: not math.isfinite(f["mean"]),
         "A reward is NaN or infinite: find the completion that the grader cannot read."),
        (lambda f: f["max"] < 0,
         "Every reward is negative, the best is {max:g}: pay for each part that is right instead of a cliff."),
        (lambda f: f["min"] < MALFORMED - 1e-6 or f["max"] > 1 + 1e-6,
         "They go from {min:g} to {max:g}, beyond -0.3 to 1, so that a few rows outweigh the others: scale them back."),
        (lambda f: f["min"] > 1 - 1e-6,
         "Every completion is perfect and nothing is left to learn: give harder positions as DATA."),
        (lambda f: f["different"] == 1,
         "Every reward is {max:g}, so there is no variance and no gradient: penalise by a factor, not by a cap."),
        (lambda f: f["different"] == 2 < f["completions"] / 2,
         "They are binary, {min:g} or {max:g}, which leaves groups without variance: grade in steps."),
        (lambda f: f["at_max"] > 0.5 and f["different"] > 2 and f["max"] < 1 - 1e-6,
         "{at_max:.0%} are capped at {max:g}, which hides the better ones: penalise by a factor, not by a cap."),
    ),
    "logprobs": (
        (lambda f: not math.isfinite(f["training"]),
         "Training gives NaN or infinity from finite weights: try DTYPE=float32, then look into the forward."),
        (lambda f: f["training_again"] > f["bound"] / 10,
         "The training forward says something else when asked again: dropout or other chance is in it, remove it."),
        (lambda f: f.get("sampling_as_set", math.inf) < f["bound"],
         "Training leaves out TEMPERATURE={TEMPERATURE:g}, TOP_K={TOP_K} or TOP_P={TOP_P:g}: train what is sampled."),
        (lambda f: f.get("sampling_as_plain", math.inf) < f["bound"],
         "Sampling leaves out TEMPERATURE={TEMPERATURE:g}, TOP_K={TOP_K} or TOP_P={TOP_P:g}: hand them on to it."),
        (lambda f: not f["gap"] < f["bound"],
         "Sampling and training disagree by {gap:.4f} nats a token: look for other weights or token ids on one side; "
         "if it is rounding, use DTYPE=float32."),
    ),
    "ratios": (
        (lambda f: not 1 / f["bound"] < f["min"] <= f["max"] < f["bound"],
         "They reach from {min:.4g} to {max:.4g} before any update, where all are 1: mend the logprobs (the loss caps "
         "them at 2, so they cannot blow up the update)."),
    ),
    "KL": (
        (lambda f: not f["per_token"] < 1e-5 and f["tensors_that_differ"],
         "It is {per_token:.4g} a token before any update, and {tensors_that_differ} tensors are not the policy's: "
         "the reference is not the start model, so copy it from there."),
        (lambda f: not f["per_token"] < 1e-5,
         "It is {per_token:.4g} a token before any update, with equal weights: look for dropout, another precision or "
         "another temperature on one side, and do not raise the threshold."),
    ),
    "advantages": (
        (lambda f: f["zero_variance"] > 0.5,
         "{zero_variance:.0%} of groups have zero variance and teach nothing: grade in steps, or raise TEMPERATURE."),
        (lambda f: f["amplified"] > 20,
         "SCALE_REWARDS={SCALE_REWARDS} makes the differences of near-constant rewards {amplified:.0f} times as large, "
         "which turns noise into signal: use none."),
    ),
    "gradient": (
        (lambda f: f["skipped"],
         "A loss or gradient was not finite, so no update was made: mend what is wrong above, or use DTYPE=float32."),
        (lambda f: f["norm"] == 0,
         "It is 0, so nothing can be learnt from this batch: look at rewards and advantages."),
        (lambda f: f["arrived"] > train.MAX_GRAD_NORM * 1.001,
         "A norm of {arrived:.4g} reaches the optimizer, above MAX_GRAD_NORM={MAX_GRAD_NORM:g}: clip it before."),
        (lambda f: f["norm"] > 10 * train.MAX_GRAD_NORM,
         "Its norm of {norm:,.0f} is clipped to {arrived:.4g}: the weights are safe, but few tokens decide where they "
         "go; look at rewards, ratios and KL, or lower KL_COEF={KL_COEF:g}."),
    ),
    "update": (
        (lambda f: f["broken"], "It left weights that are not finite: lower LR={LR:g}."),
        (lambda f: f["reference_moved"],
         "The reference moved with the policy, as they share weights, so KL says nothing: make it a copy."),
        (lambda f: f["change"] == 0,
         "The weights did not move: look at the gradient, at LR={LR:g}, and whether the optimizer holds them."),
        (lambda f: f["clipped"] > 0.3, "The clip stops {clipped:.0%} of the tokens: lower LR={LR:g} or EPOCHS."),
    ),
    "after": (
        (lambda f: f["kl"] > train.KL_DIVERGENCE_THRESHOLD,
         "One update moved the policy by a KL of {kl:.4g} a token: lower LR={LR:g}."),
        (lambda f: f["gain"] < 0,
         "The better completions of a group became less likely: look for a wrong sign, or lower LR={LR:g}."),
        (lambda f: f["rise"] + f["margin"] < 0 and f["rise"] < -0.05,
         "The reward on the same prompts fell from {before:.3f} to {after:.3f}: lower LR={LR:g}."),
    ),
}
# fmt: on


def station(name, figures):
    sentence = next((sentence for wrong, sentence in WRONG[name.split(" ")[-1]] if wrong(figures)), "")
    sentence = sentence.format_map({**vars(train), **figures})
    odd = {key: str(value) for key, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    return Station(name, not sentence, sentence, figures | odd)  # JSON has no NaN


def examine(model, reference, optimizer, samples):
    """The stations one by one, as far as the road can be gone. `model` is updated once."""
    step, exact = train.REWARD_WARMUP_STEPS, train.DTYPE == torch.float32
    yield station("weights", figures := weights(model))
    if figures["broken"]:
        return
    yield station("prompts", prompts(samples))
    batches, graded = train.rollout(model, samples, step)
    for prefix, batch in zip([p for p in train.TASKS if any(s.prompt.startswith(p) for s in samples)], batches):
        mine = [sample for sample in samples if sample.prompt.startswith(prefix)]
        figures = completions(model, prefix, mine, batch, [row for row in graded if row[0].startswith(prefix)])
        yield station(f"{NAMES[prefix]} completions", figures)
    if any(len(batch.tokens) != len(batch.prompts) * train.GROUP_SIZE for batch in batches):
        return
    rewards, batches = train.compare_groups(batches)  # (N, K)
    paid = rewards[:, 0]  # (N,) what the whole answer earned
    figures = {"completions": len(paid), "mean": mean(paid), "std": paid.std().item()}
    figures |= {"min": paid.min().item(), "max": paid.max().item()}
    figures |= {"at_max": mean(paid > paid.max() - 1e-6), "different": len((paid * 1e6).round().unique())}
    yield station("rewards", figures)

    # Before the update: one number for each token, in the order of the microbatches
    parts = [part for batch in batches for part in microbatches(batch, train.MICROBATCH_TOKENS)]

    @torch.no_grad()
    def each(function):
        return torch.cat([function(part)[part.mask].float() for part in parts])  # (tokens,)

    def forward(part):
        return train.forward(model, part)[0]

    def under(part, *filters):  # the distribution as rollout.py has it, whatever train.forward does
        logp = distribution(model.score(part.prompts, part.lengths, part.tokens), *filters, keep=part.tokens)
        return logp.gather(-1, part.tokens[..., None])[..., 0]

    sampled, trained = each(lambda part: part.rollout_logprobs), each(forward)
    gap = (trained - sampled).abs()
    figures = {"sampling": mean(sampled), "training": mean(trained), "gap": mean(gap), "gap_max": gap.max().item()}
    figures |= {"training_again": mean((each(forward) - trained).abs()), "bound": 1e-3 if exact else 0.05}
    if not figures["gap"] < figures["bound"]:  # train.first_look's bound; look for the cause
        asked = train.TEMPERATURE, train.TOP_K, train.TOP_P
        figures["sampling_as_set"] = mean((each(lambda part: under(part, *asked)) - sampled).abs())
        figures["sampling_as_plain"] = mean((each(under) - sampled).abs())
    yield station("logprobs", figures)
    ratio = (trained - sampled).exp()
    figures = {"mean": mean(ratio), "min": ratio.min().item(), "max": ratio.max().item()}
    yield station("ratios", figures | {"bound": 1.1 if exact else 3.0})
    if reference is not None:
        referred = each(lambda part: train.refer(reference, part))
        kl = mean(grpo.kl(trained, referred, torch.ones_like(trained), "k3"))
        pairs = zip(model.state_dict().values(), reference.state_dict().values())
        differ = sum(not torch.equal(a.to(b.device, train.DTYPE), b.to(train.DTYPE)) for a, b in pairs)
        figures = {"reference": mean(referred), "per_token": kl, "per_sequence": kl * len(trained) / len(paid)}
        yield station("KL", figures | {"tensors_that_differ": differ})
    advantages = grpo.advantages(paid, train.GROUP_SIZE, train.SCALE_REWARDS)
    groups, centred = advantages.view(-1, train.GROUP_SIZE), paid.view(-1, train.GROUP_SIZE)  # (B, G)
    centred = (centred - centred.mean(1, keepdim=True)).abs().amax(1).clamp(min=1e-9)
    figures = {"std": advantages.std().item(), "min": advantages.min().item(), "max": advantages.max().item()}
    figures |= {"zero_variance": mean(grpo.zero_variance(paid, train.GROUP_SIZE))}
    yield station("advantages", figures | {"amplified": (groups.abs().amax(1) / centred).max().item()})

    # The update, watched at each parameter and at the optimizer's door
    norms, arrived, old = {}, [], copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(reference.state_dict()) if reference is not None else {}
    for name, p in ((name, p) for name, p in model.named_parameters() if p.requires_grad):
        p.register_post_accumulate_grad_hook(lambda p, name=name: norms.update({name: p.grad.norm().item()}))
    optimizer.register_step_pre_hook(lambda *_: arrived.append(norm(p.grad for p in model.parameters())))
    metrics = train.update(model, reference, optimizer, batches, train.KL_COEF)
    layers = defaultdict(float)
    for name, value in norms.items():
        layer = ".".join(name.split(".")[: 2 if name.startswith("h.") else 1])
        layers[layer] = math.hypot(layers[layer], value)
    figures = {"norm": metrics["grad_norm"], "arrived": max(arrived, default=math.nan), "skipped": metrics["skipped"]}
    yield station("gradient", figures | layers)
    change = [tensor - old[name] for name, tensor in model.state_dict().items()]
    figures = {"lr": train.LR, "change": norm(change), "relative": norm(change) / norm(old.values())}
    figures |= {name: metrics[name] for name in ("ratio_min", "ratio_max", "broken")}
    figures["clipped"] = metrics["clip_low"] + metrics["clip_high"]
    figures["reference_moved"] = any(not torch.equal(t, reference.state_dict()[name]) for name, t in kept.items())
    yield station("update", figures)
    if metrics["broken"]:
        return
    now = each(forward)
    gain = mean((now - trained) * each(lambda part: part.advantages))
    again = torch.cat([batch.rewards for batch in train.rollout(model, samples, step)[0]])[:, 0]
    rise, margin = interval((again - paid).view(-1, train.GROUP_SIZE).mean(1).tolist())
    figures = {"before": mean(paid), "after": mean(again), "rise": rise, "margin": margin, "gain": gain}
    yield station("after", figures | {"kl": mean(grpo.kl(trained, now, torch.ones_like(now), "k3"))})


def mean(x):
    return x.float().mean().item()


def norm(tensors):
    return torch.stack([tensor.float().norm() for tensor in tensors if tensor is not None]).norm().item()


def weights(model):
    state, digest = model.state_dict(), hashlib.sha256()
    for tensor in state.values():
        digest.update(tensor.float().cpu().contiguous().numpy())
    figures = {"parameters": sum(tensor.numel() for tensor in state.values()), "tensors": len(state)}
    figures |= {"norm": norm(state.values()), "fingerprint": digest.hexdigest()[:12]}
    figures["broken"] = sum(not tensor.isfinite().all() for tensor in state.values())
    return figures | {"fresh": not any(tensor.any() for name, tensor in state.items() if name.endswith("bias"))}


def prompts(samples):
    policy = [sample for sample in samples if sample.prompt.startswith("P: ")]
    labels = [frozenset(uci for uci, _ in sample.labels) for sample in policy if sample.labels]
    figures = {"policy": len(policy), "environment": len(samples) - len(policy)}
    return figures | {"labelled": len(labels), "label_sets": len(set(labels))}


def ideal_answer(sample, chess_format):
    if sample.prompt.startswith("A: "):
        return tasks.environment_completion(*sample.labels, chess_format)
    moves = sample.labels or [(uci, 0) for uci in sorted(legal_moves(sample.prompt))]
    return tasks.policy_completion(tasks.policy_fen(sample.prompt), moves[:5], chess_format)


def completions(model, prefix, samples, batch, graded):
    tokenizer, config, parts = model.tokenizer, model.config, mean_parts([grade for _, _, grade in graded])
    rows, eos = [row[keep].tolist() for row, keep in zip(batch.tokens, batch.mask)], tokenizer.eos
    figures = {"prompts": len(samples), "completions": len(rows), "tokens": sum(map(len, rows))}
    figures |= {name: parts[name] for name in ("structure", "legal", "best", "next_state") if name in parts}
    figures |= {"nats": -mean(batch.rollout_logprobs[batch.mask]), "nats_of_chance": math.log(config.vocab_size)}
    ended = [not grade.parts["runaway"] for _, _, grade in graded]
    figures["wrong_ends"] = sum(row.count(eos) != e or e and row[-1] != eos for row, e in zip(rows, ended))
    figures["foreign"] = sum(tokenizer.decode(row) != text for row, (_, text, _) in zip(rows, graded))
    room = config.n_positions - max(len(tokenizer.encode(sample.prompt)) for sample in samples)
    needed = 1 + max(len(tokenizer.encode(ideal_answer(sample, config.chess_format))) for sample in samples)
    limit, setting = train.TASKS[prefix], "MAX_NEW_TOKENS" if prefix == "P: " else "MAX_NEW_TOKENS_ENV"
    figures |= {"truncated": parts["runaway"], "longest_answer": needed, "limit": min(limit, room)}
    return figures | {"limited_by": setting if limit < room else "the model's n_positions"}


def build():
    """What train.main() has before its first step."""
    model, reference, optimizer = train.build()
    positions = data.split(data.load(train.DATA))[0]
    if len(positions) < train.BATCH_POSITIONS:
        train.refuse(f"DATA={train.DATA} has {len(positions)} positions to train on, fewer than BATCH_POSITIONS.")
    samples = train.draw_prompts(positions, train.REWARD_WARMUP_STEPS, model.config.chess_format)
    return model, reference, optimizer, LiveLabels()(samples)


def show(look):
    figures = ", ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in look.figures.items()
    )
    head = f"{look.name:24}{'ok' if look.ok else 'WRONG':7}"
    print(textwrap.fill(head + figures, 120, subsequent_indent=" " * 31), flush=True)
    if not look.ok:
        print(textwrap.fill(look.sentence, 120, initial_indent=f"{'':24}-> ", subsequent_indent=" " * 27), flush=True)


def main():
    p = argparse.ArgumentParser("python -m tools.single_batch", description=__doc__.split("\n")[0], add_help=False)
    p.usage = "%(prog)s [--json FILE] [NAME=value ...]"
    p.add_argument("--json", metavar="FILE", help="also write the stations to this file")
    p.add_argument("-h", "--help", action="store_true", help="show this and the settings")
    a, rest = p.parse_known_args()
    if a.help:
        print(p.format_help() + "\nsettings:")
    sys.argv[1:] = ["--help"] if a.help else rest
    finish()
    if a.json and not Path(a.json).absolute().parent.is_dir():
        train.refuse(f"{a.json} cannot be written: its folder does not exist.")
    stations = []
    for look in examine(*build()):
        stations.append(look)
        show(look)
    wrong = [look.name for look in stations if not look.ok]
    print(f"\nwrong: {', '.join(wrong)}" if wrong else f"\nall {len(stations)} stations are ok")
    if a.json:
        result = {"settings": values(), "stations": [look._asdict() for look in stations]}
        replace(a.json, json.dumps(result, indent=2) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        train.refuse(str(error))
