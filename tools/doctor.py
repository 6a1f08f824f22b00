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
import grpo
import train
from nanorook import hardware, monitor, sizes
from nanorook.settings import fail
from nanorook.task import draw_questions, grade_answers, load_items, prompt_ids, start_folder
from rollout import detokenize, microbatches, sample, stop_tokens_of

UPDATES = 5  # on the same answers


class Check(NamedTuple):
    name: str
    sentence: str  # what is wrong and what to do; empty if all is well
    figures: dict


def check(name, figures, *wrong):
    """`wrong`: (condition, sentence) pairs, causes before their consequences; the first that is true is reported."""
    return Check(name, next((sentence for condition, sentence in wrong if condition), ""), figures)


def mean(x):
    return x.float().mean().item()


def prepare(count):
    """A model and `count` questions, as the settings ask for them."""
    device, dtype = hardware.prepare(train.DEVICE, train.DTYPE)
    print(sizes.in_words(train.SIZE_DEFAULTS))
    model = architectures.load(train.MODEL or start_folder(train.task)).to(device).set_compute_dtype(dtype)
    items, _ = load_items(train.task, train.DATA, model.config)
    if len(items) < count:
        fail(f"DATA={train.DATA} has {len(items)} items, fewer than the {count} questions; ask fewer (BATCH_POSITIONS, "
             "or QUESTIONS of tools.signal), or provide more.")  # fmt: skip
    return model, draw_questions(train.task, items, count, random.Random(train.SEED), model.config)


def ask(model, questions, temperature):
    """Yields what a step has before its update: graded Rollouts with their advantages."""
    sampler = model.inference_copy(model.dtype)
    noise = train.sampling_noise(len(questions), train.GROUP_SIZE, train.SEED)
    rollouts = sample(sampler, questions, train.GROUP_SIZE, train.task.LIMITS, temperature, noise)
    for rollout in tqdm(rollouts, "sampling", leave=False, disable=None):
        rollout.answers = grade_answers(train.task, rollout.answers)
        train.add_advantages(rollout, train.CREDIT)
        yield rollout


def run_checks(model, reference, optimizers, questions):
    """Yields the checks one by one, as far as the answers get. `model` is updated."""
    yield (found := weights(model))
    if found.sentence:
        return
    yield computing(model, questions[0])
    rollouts = list(ask(model, questions, train.TEMPERATURE))
    samples = [answer for rollout in rollouts for answer in rollout.answers]
    yield truths(questions, samples)
    for rollout in rollouts:
        yield completions(model, rollout)
    if any(rollout.group_size != train.GROUP_SIZE for rollout in rollouts):
        return
    for rollout in rollouts:
        yield rewards(rollout)

    # The first step of a run, and what train.py reports about it
    most = train.plan_memory(model, questions)
    kinds = {}
    for rollout in rollouts:  # questions of one kind may stop at different texts
        kinds.setdefault(rollout.kind, []).extend(microbatches(rollout, most, all_have_gradient=True))

    @torch.no_grad()
    def logprobs(parts):  # (tokens,)
        rows = [(train.forward(model, part, train.TEMPERATURE)[0], part.completion_mask) for part in parts]
        return torch.cat([found[mask].float() for found, mask in rows])

    before, old = {kind: logprobs(parts) for kind, parts in kinds.items()}, copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(reference.state_dict()) if reference is not None else {}
    metrics = monitor.describe_answers(samples, train.GROUP_SIZE)
    metrics |= train.update(model, reference, optimizers, rollouts, most)
    structure, kind = monitor.lowest(metrics, "structure")
    figures = {f"{kind} structure": structure} if kind else {}
    wrong = monitor.check_answers(metrics, train.task.LIMITS) or monitor.check_agreement(metrics, model.dtype)
    yield check("start", figures | shown(metrics, "logprob_gap", "kl"), (wrong, f"{wrong[:1].upper()}{wrong[1:]}"))
    verdict = monitor.diagnose(metrics, [metrics], train.KL_DIVERGENCE_THRESHOLD, train.MAX_GRAD_NORM)
    state, advice = verdict.values()
    figures = shown(metrics, "reward", "frac_zero_std", "hit_limit", "entropy", "grad_norm", "skipped")
    yield check("first step", figures, (state != "green", f"{advice[:1].upper()}{advice[1:]}."))
    change = get_total_norm(tensor - old[name] for name, tensor in model.state_dict().items()).item()
    moved = any(not torch.equal(tensor, reference.state_dict()[name]) for name, tensor in kept.items())
    yield check(
        "update", {"lr": train.LR, "change": change, "relative": change / get_total_norm(old.values()).item()},
        (moved, "The reference moved with the policy, as they share weights, so the KL means nothing: make it a copy."),
        (metrics["grad_norm"] == 0, "The gradient is 0: give partial credit or raise GROUP_SIZE; rewards must differ."),
        (change == 0, f"The weights did not move: check LR={train.LR:g}, and whether the optimizer has all of them."),
    )  # fmt: skip
    if metrics["broken"]:
        return
    first = max(mean(grpo.kl(b, logprobs(kinds[kind]), torch.ones_like(b), "k3")) for kind, b in before.items())
    for _ in range(UPDATES - 1):
        train.update(model, reference, optimizers, rollouts, most)
    gains = {}  # of the kinds in which some answers are better than others
    for kind, parts in kinds.items():
        paid = torch.cat([part.advantages[part.completion_mask] for part in parts])
        gains |= {f"{kind}/gain": mean((logprobs(parts) - before[kind]) * paid)} if paid.any() else {}
    if not gains:  # which "update" has already said
        return
    gain, kind = monitor.lowest(gains, "gain")
    yield check(
        "learning", {"updates": UPDATES, "KL of the first": first, f"{kind} gain": gain},
        (first > train.KL_DIVERGENCE_THRESHOLD, f"One update led to a KL of {first:.4g}: lower LR={train.LR:g}."),
        (not gain > 0,
         f"Better {kind} answers did not become likelier: lower LR={train.LR:g}, or look for a wrong sign."),
    )  # fmt: skip


def shown(metrics, *names):
    return {name: metrics[name] for name in names if name in metrics}


def weights(model):
    state = model.state_dict()
    untrained = all((tensor == tensor[0]).all() for tensor in state.values() if tensor.ndim == 1)
    halfway = 0.0
    if model.dtype == torch.bfloat16:  # which lacks the last 16 bits of fp32
        count = sum((p.view(torch.int32) & 0xFFFF == 0x8000).sum().item() for p in state.values())
        halfway = count / sum(p.numel() for p in state.values())
    return check(
        "weights", {"tensors": len(state), "norm": get_total_norm(state.values()).item(), "halfway": halfway},
        (untrained, f"All biases and norms are those of an untrained model: check MODEL={train.MODEL}."),
        (halfway > 0.01,
         f"{halfway:.0%} of the weights lie halfway between two bf16 numbers, so the first update decides which way "
         "they are rounded, however small LR is: use DTYPE=float32, or add noise to them, as examples/start.py does."),
    )  # fmt: skip


@torch.no_grad()
def computing(model, question):
    """Compares this machine's forward pass with the same in float64, and with itself."""
    ids = torch.tensor([prompt_ids(question.prompt, model.tokenizer)])
    double = copy.deepcopy(model).to("cpu", torch.float64).set_compute_dtype(torch.float64)(ids).log_softmax(-1)
    first, again = (model(ids.to(model.wte.weight.device)).double().cpu().log_softmax(-1) for _ in range(2))
    error, change = mean((first - double).abs()), (again - first).abs().max().item()
    bound = 1e-3 if model.dtype == torch.float32 else 0.1
    remedy = "look for a bug in its forward pass" if model.dtype == torch.float32 else "use DTYPE=float32"
    return check(
        "computing", {"error": error, "bound": bound, "asked again": change},
        (change > bound / 10, f"A second forward pass differs by {change:.4g}: remove dropout or other randomness."),
        (not error < bound, f"The model in {model.dtype} is off by {error:.4g} nats: {remedy}."),
    )  # fmt: skip


def truths(questions, samples):
    known = [question for question in questions if question.truth is not None]
    kinds = {question.kind: len({repr(q.truth) for q in known if q.kind == question.kind}) for question in known}
    stub = [kind for kind, n in kinds.items() if n == 1 < sum(question.kind == kind for question in known)]
    # If a truth lacks the labels, the metrics of the answers say so.
    unknown = int(sum(s.grade.metrics.get("unlabelled", s.question.truth is None) for s in samples)) // train.GROUP_SIZE
    return check(
        "questions", {"count": len(questions), "with a reference answer": len(questions) - unknown, **kinds},
        (stub, f"All {' and '.join(stub)} questions have the same reference answer: check DATA={train.DATA}."),
        (unknown, f"{unknown} have no reference answer, so right ones get no reward: check the labels of "
                  f"DATA={train.DATA}."),
    )  # fmt: skip


def completions(model, rollout):
    """Checks that the mask and the tokens of a rollout are those of the answers that were graded."""
    samples = rollout.answers
    rows = [row[mask].tolist() for row, mask in zip(rollout.completions, rollout.completion_mask)]
    metrics = {name.split(" ", 1)[1]: figure[0] for name, figure in monitor.intervals(samples).items()}
    rules = samples[0].question.kind, samples[0].question.stop, samples[0].question.stop_after
    expected, last = len(rollout.prompts) * train.GROUP_SIZE, stop_tokens_of(model.tokenizer, *rules)
    marks = [[i >= last.get(token, len(row)) for i, token in enumerate(row)] for row in rows]
    wrong = sum((sum(row), sum(row[-1:])) != (not s.hit_limit,) * 2 for row, s in zip(marks, samples))
    foreign = sum(detokenize(model.tokenizer, row)[0] != s.text for row, s in zip(rows, samples))
    return check(
        f"{samples[0].question.kind} completions", {"count": len(rows), "tokens": sum(map(len, rows)), **metrics},
        (len(rows) != expected,
         f"There are {len(rows)} answers instead of {expected}: let rollout.sample use GROUP_SIZE={train.GROUP_SIZE}."),
        (wrong, f"The mask of {wrong} leaves out the end token, so it is not trained: make masks from lengths."),
        (foreign, f"The tokens of {foreign} are not the text that was graded: keep the sampled ids as they are."),
    )  # fmt: skip


def rewards(rollout):
    samples = rollout.answers
    values = torch.tensor([s.grade.reward for s in samples])
    least, most, groups = values.min().item(), values.max().item(), values.view(-1, train.GROUP_SIZE)
    different = {(s.question.prompt, s.text): s.grade.reward for s in samples}  # a likely answer is sampled repeatedly
    capped = [reward for reward in different.values() if reward > most - 1e-6]
    share = len(capped) / len(different)
    paid = rollout.advantages.abs().max().item()
    times = paid / max(1e-9, (groups - groups.mean(1, keepdim=True)).abs().max().item())
    return check(
        f"{samples[0].question.kind} rewards",
        {"mean": mean(values), "std": values.std().item(), "min": least, "max": most, "advantage": paid},
        (max(-least, most) > 10, f"They range from {least:g} to {most:g}, so a few outweigh the others: scale them."),
        (len(capped) > 4 and share > 0.5 and 1e-6 < most < 1 - 1e-6,
         f"{share:.0%} are capped at {most:g}: penalise by a factor, not by a cap."),
        (train.SCALE_REWARDS == "std" and times > 20, f"SCALE_REWARDS=std multiplies noise by {times:.0f}: use "
         "none."),
    )  # fmt: skip


def main():
    settings.finish("python -m tools.doctor")
    model, questions = prepare(train.BATCH_POSITIONS)
    reference = train.make_reference(model) if train.KL_COEF else None
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
