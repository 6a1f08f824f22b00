"""The doctor: one step's answers go through train.py's own functions, and the result of each of them is checked.

python -m tools.doctor                        with the default settings
python -m tools.doctor MODEL=mine LR=3e-5     with others, as train.py takes them
python -m tools.doctor MODEL=out/model        with those of the run that made the model

A check is ok, or says what is wrong and what to do; the first one that is wrong is usually the cause of the others.
Nothing is written, except a task's start model if it has not been made yet. The learning rate is that after the
warm-up.
"""

import copy
import random
import sys
from typing import NamedTuple

import torch
from torch.nn.utils import get_total_norm
from tqdm import tqdm

from nanorook import settings

if __name__ == "__main__":
    settings.read_run()  # before train's first setting

import architectures
import train
from nanorook import hardware, lora, monitor, sizes
from nanorook.settings import fail
from nanorook.task import draw_questions, grade_answers, load_items, prompt_ids, start_folder
from rollout import detokenize, microbatches, room_after, sample, stop_tokens_of

UPDATES = 5  # on the same answers


class Check(NamedTuple):
    name: str
    sentence: str  # what is wrong and what to do; empty if all is well
    figures: dict


def check(name, figures, *wrong):
    """`wrong`: (condition, sentence) pairs, causes before their consequences; the first that is true is reported."""
    sentence = next((sentence for condition, sentence in wrong if condition), "")
    return Check(name, sentence[:1].upper() + sentence[1:], figures)  # a run prints such sentences after "error: "


def model_and_questions(count):
    """A model, its source, and `count` questions, as the settings ask for them."""
    device, dtype = hardware.prepare(train.DEVICE, train.DTYPE)
    print(sizes.in_words(train.SIZE_DEFAULTS))
    source = train.MODEL or start_folder(train.task)
    model = architectures.load_merged(source).to(device).set_compute_dtype(dtype)
    items, _ = load_items(train.task, train.DATA, model.config)
    if len(items) < count:
        fail(f"DATA={train.DATA} has {len(items)} items, fewer than the {count} questions; ask fewer (BATCH_POSITIONS, "
             "or QUESTIONS of tools.signal), or provide more.")  # fmt: skip
    return model, source, draw_questions(train.task, items, count, random.Random(train.SEED), model.config)


def graded_rollouts(model, questions):
    """Yields what a step has before its update: graded Rollouts with their advantages."""
    sampler = model.inference_copy(model.dtype)
    noise = train.sampling_noise(len(questions), train.GROUP_SIZE, train.SEED)
    rollouts = sample(sampler, questions, train.GROUP_SIZE, train.task.LIMITS, train.TEMPERATURE, noise)
    for rollout in tqdm(rollouts, "sampling", leave=False, disable=None):
        rollout.answers = grade_answers(train.task, rollout.answers)
        train.add_advantages(rollout)
        yield rollout


def run_checks(model, reference, optimizers, questions):
    """Yields the checks one by one. `model` is updated."""
    if model.dtype == torch.bfloat16:
        yield halfway(model)
    yield computing(model, questions[0])
    rollouts = list(graded_rollouts(model, questions))
    answers = [answer for rollout in rollouts for answer in rollout.answers]
    yield truths(questions, answers)
    malformed = monitor.check_answers(monitor.describe_answers(answers, train.GROUP_SIZE), train.task.LIMITS)
    yield check("form", {}, (malformed, malformed))
    for rollout in rollouts:
        yield completions(model, rollout)
    for rollout in rollouts:
        yield rewards(rollout)

    # The first step of a run
    most = train.plan_memory(model, questions)
    kinds = {}
    for rollout in rollouts:  # questions of one kind may stop at different texts
        kinds.setdefault(rollout.kind, []).extend(microbatches(rollout, most, all_have_gradient=True))
    before = {kind: logprobs(model, parts) for kind, parts in kinds.items()}
    old, old_reference = copy.deepcopy((model.state_dict(), reference.state_dict() if reference else {}))
    metrics = train.update(model, reference, optimizers, rollouts, most)
    disagree = monitor.check_agreement(metrics, model.dtype)
    change = get_total_norm(tensor - old[name] for name, tensor in model.state_dict().items()).item()
    moved = any(not torch.equal(tensor, reference.state_dict()[name]) for name, tensor in old_reference.items())
    yield check(
        "update", {"lr": train.LR, "gradient": metrics["grad_norm"], "change": change},
        (disagree, disagree),
        (moved, "The reference moved with the policy, as they share weights, so the KL means nothing: make it a copy."),
        (metrics["grad_norm"] == 0, "The gradient is 0: give partial credit or raise GROUP_SIZE; rewards must differ."),
        (metrics["skipped"] or metrics["broken"], f"Gradient or weights are not finite: lower LR={train.LR:g}."),
        (change == 0, f"The weights did not move: check LR={train.LR:g}, and whether the optimizer has all of them."),
    )  # fmt: skip

    for _ in range(UPDATES - 1):
        train.update(model, reference, optimizers, rollouts, most)
    gains = {}  # of the kinds in which some answers are better than others
    for kind, parts in kinds.items():
        advantages = torch.cat([part.advantages[part.completion_mask] for part in parts])
        if advantages.any():
            gains[f"{kind}/gain"] = ((logprobs(model, parts) - before[kind]) * advantages).mean().item()
    gain, kind = monitor.lowest(gains, "gain")
    if kind:  # otherwise the gradient is 0, which has been said
        yield check(
            "learning", {"updates": UPDATES, f"{kind} gain": gain},
            (not gain > 0,
             f"Better {kind} answers did not become likelier: lower LR={train.LR:g}, or look for a wrong sign."),
        )  # fmt: skip


@torch.no_grad()
def logprobs(model, parts):
    """Those of all tokens of these microbatches."""
    found = [(train.forward(model, part, train.TEMPERATURE)[0], part.completion_mask) for part in parts]
    return torch.cat([logprobs[mask].float() for logprobs, mask in found])


def halfway(model):
    """Counts the weights that lie halfway between two bf16 numbers, which lack the last 16 bits of fp32."""
    state = model.state_dict().values()
    count = sum((p.view(torch.int32) & 0xFFFF == 0x8000).sum().item() for p in state)
    share = count / sum(p.numel() for p in state)
    sentence = (f"{share:.0%} of the weights lie halfway between two bf16 numbers, so the first update decides which "
                "way they are rounded, however small LR is: use DTYPE=float32, or add noise to them, as "
                "examples/start.py does.")  # fmt: skip
    return check("weights", {"halfway": share}, (share > 0.01, sentence))


@torch.no_grad()
def computing(model, question):
    """Compares this machine's forward pass with the same in float64."""
    prompt = prompt_ids(question.prompt, model.tokenizer)
    room_after(question, prompt, model.config)  # ends here if there is none
    ids = torch.tensor([prompt])
    double = copy.deepcopy(model).to("cpu", torch.float64).set_compute_dtype(torch.float64)(ids).log_softmax(-1)
    here = model(ids.to(model.wte.weight.device)).double().cpu().log_softmax(-1)
    error = (here - double).abs().mean().item()
    bound = 1e-3 if model.dtype == torch.float32 else 0.1
    remedy = "look for a bug in its forward pass" if model.dtype == torch.float32 else "use DTYPE=float32"
    wrong = not error < bound  # also where it is NaN
    sentence = f"The model in {model.dtype} is off by {error:.4g} nats: {remedy}."
    return check("computing", {"error": error, "bound": bound}, (wrong, sentence))


def truths(questions, answers):
    by_kind = {}
    for question in questions:
        if question.truth is not None:
            by_kind.setdefault(question.kind, []).append(repr(question.truth))
    # Of a few yes-or-no questions, all may have the same by chance
    stub = [kind for kind, known in by_kind.items() if len(known) >= 8 and len({*known}) == 1]
    # A truth may lack labels, which the metrics of its answers then say.
    unlabelled = sum(a.grade.metrics.get("unlabelled", a.question.truth is None) for a in answers)
    unknown = int(unlabelled) // train.GROUP_SIZE
    return check(
        "questions", {"count": len(questions), "with a reference answer": len(questions) - unknown},
        (stub, f"All {' and '.join(stub)} questions have the same reference answer: check DATA={train.DATA}."),
        (unknown, f"{unknown} have no reference answer: if grade needs one, right answers get no reward, so check the "
                  f"labels of DATA={train.DATA}."),
    )  # fmt: skip


def completions(model, rollout):
    """Checks that the mask and the tokens of a rollout are those of the answers that were graded."""
    asked = rollout.answers[0].question
    stops = stop_tokens_of(model.tokenizer, asked.kind, asked.stop, asked.stop_after)
    unmasked = foreign = 0
    for answer, tokens, mask in zip(rollout.answers, rollout.completions, rollout.completion_mask):
        row = tokens[mask].tolist()
        ends = [place for place, token in enumerate(row) if place >= stops.get(token, len(row))]
        expected = [] if answer.hit_limit else [len(row) - 1]
        unmasked += ends != expected
        foreign += detokenize(model.tokenizer, row)[0] != answer.text
    return check(
        f"{rollout.kind} completions",
        {"count": len(rollout.answers), "tokens": rollout.completion_mask.sum().item()},
        (unmasked,
         f"In {unmasked} answers the mask leaves out the end token, so it is not trained: make masks from lengths."),
        (foreign,
         f"In {foreign} answers the tokens are not the text that was graded: keep the sampled ids as they are."),
    )  # fmt: skip


def rewards(rollout):
    values = torch.tensor([answer.grade.reward for answer in rollout.answers])
    least, most = values.min().item(), values.max().item()
    # A likely answer is sampled repeatedly
    different = {(answer.question.prompt, answer.text): answer.grade.reward for answer in rollout.answers}
    best = [reward for reward in different.values() if reward > most - 1e-6]
    share = len(best) / len(different)
    return check(
        f"{rollout.kind} rewards",
        {"mean": values.mean().item(), "min": least, "max": most},
        (max(-least, most) > 10, f"They range from {least:g} to {most:g}, so a few outweigh the others: scale them."),
        (len(best) > 4 and share > 0.5 and 1e-6 < most < 1 - 1e-6,
         f"{share:.0%} of the different answers get the highest reward, {most:g}: if grade caps it, penalise by a "
         "factor instead; if no answer is right yet, give partial credit or ask easier questions."),
    )  # fmt: skip


def main():
    settings.finish("python -m tools.doctor")
    model, source, questions = model_and_questions(train.BATCH_POSITIONS)
    reference = train.make_reference(model) if train.KL_COEF else None
    if train.LORA_RANK:
        lora.add(model, train.LORA_RANK, train.SEED, source)
    wrong = []
    for name, sentence, figures in run_checks(model, reference, train.make_optimizers(model), questions):
        told = ", ".join(f"{key} {f'{v:.4g}' if isinstance(v, float) else v}" for key, v in figures.items())
        print(f"{name:24}{'WRONG' if sentence else 'ok':7}{told}", flush=True)
        if sentence:
            print(f"{'':24}-> {sentence}", flush=True)
            wrong.append(name)
    print(f"\nwrong: {', '.join(wrong)}" if wrong else "\nall checks are ok; next: tools.signal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
