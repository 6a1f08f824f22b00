"""Speed: how long a rollout and a whole step take, against this machine's own limit and against Hugging Face.

python -m tools.bench [rollout|step|run|growth|all|W1|W2|W3|W4] [--json OUT] [--runs 5]
W1 to W4 have random weights and fixed seeds, and nothing ends early, so every run does the same work. In each round the
limit, the project and the others take turns; a ratio is the median of the rounds' ratios. On CPU they also work in two
processes with half of the threads each, as ./train.sh does. `run` is the default run by phase, `growth` what more
completions, prompts and tokens cost. What the limit counts: tools/limits.py.
"""

import argparse
import copy
import functools
import json
import random
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

import torch

import data
import parallel
import rollout
import skill
import tasks
import train
from machine import fastest_dtype, prepare
from model import GPT, GPTConfig
from monitor import describe, peak_memory
from tokenizer import Tokenizer
from tools import limits, peers, replace
from tools.team import Team

CUDA = train.DEVICE == "cuda"
DTYPES = {"bfloat16": torch.bfloat16} if CUDA else {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROCESSES, WARM_UP = 1 if CUDA else 2, 2  # of the rows `, 2 processes`; runs that do not count
SMALL, GPT2 = GPTConfig(257, 384, 256, 6, 8, eos_token_id=256), GPTConfig()


class Workload(NamedTuple):
    what: str
    config: GPTConfig
    prompts: int  # B
    group: int  # G
    new: int  # T
    kl: float | None = None  # KL_COEF of a whole step, above 0 with a reference; None is a rollout alone


WORKLOADS = {
    "W1": Workload("rollout, 6 layers x 256", SMALL, 32, 8, 72),
    "W2": Workload("rollout, GPT-2 124M", GPT2, 64 if CUDA else 4, 8, 64),
    "W3": Workload("whole step, 6 layers x 256", SMALL, 16, 8, 72, 0.0),
    "W4": Workload("whole step with reference, GPT-2 124M", GPT2, 64 if CUDA else 2, 8, 64, 0.02),
}
if CUDA:  # where the small model has too little to do
    del WORKLOADS["W1"], WORKLOADS["W3"]
GROWS = Workload("growth", GPT2 if CUDA else SMALL, 8, 8, 72, 0.0)  # and from there, one at a time:
GROWTH = {"group": (4, 8, 16, 32), "prompts": (4, 8, 16, 32), "new": (18, 36, 72, 144)}

# Phases: whose function, its name, the phase that its time goes to, the phase that it is part of
ROLLOUT_PHASES = [(rollout, "generate", "decoding", "rest"), (GPT, "prefill", "prefill", "decoding")]
STEP_PHASES = [
    (GPT, "cast", "casting", "rest"),
    (skill, "generate", "sampling", "rest"),
    (skill, "grade", "grading", "rest"),
    (train, "credit", "credit", "rest"),
    (train, "forward", "forward", "rest"),
    (train, "refer", "reference", "rest"),
    (torch.Tensor, "backward", "backward", "rest"),
    (torch.nn.utils, "clip_grad_norm_", "clipping", "rest"),
    (torch.optim.AdamW, "step", "optimizer", "rest"),
]


def clock():
    limits.synchronise(train.DEVICE)
    return time.perf_counter()


# ---------------------------------------------------------------------------------------------------------------------
# The project's side


def positions():
    """Those whose prompt has 50 to 70 tokens (bytes), in an order that is always the same."""
    found = data.split(data.load("builtin"))[0]
    found = [p for p in found if 50 <= len(tasks.policy_prompt(p.fen, "rookworld")) <= 70]
    return random.Random(0).sample(found, len(found))


def build(w, found):
    """Random weights, a tokenizer whose end token never comes, and the samples."""
    torch.manual_seed(0)
    model = GPT(w.config).to(train.DEVICE)
    model.tokenizer = Tokenizer.of_bytes()
    model.tokenizer.eos = -1
    return model, [tasks.policy_sample(p, "rookworld") for p in found[: w.prompts]]


def rollouts(w, model, prompts):
    """A function of (dtype, number of the run) that samples once: {"rollout": seconds}."""
    twins = {dtype: model.cast(dtype) for dtype in DTYPES.values()}

    def run(dtype, i):
        chance = torch.Generator(train.DEVICE).manual_seed(i)
        start = clock()
        rollout.generate(twins[dtype], prompts, w.group, w.new, eos=-1, generator=chance)
        return {"rollout": clock() - start}

    return run


def steps(model, kl, samples=None, random_rewards=True):
    """A function of (dtype, number of the run) that makes a step as train.main does: seconds of its two halves."""
    references = {dtype: copy.deepcopy(model).cast(dtype) if kl else None for dtype in DTYPES.values()}
    optimizer = train.optimizer_for(model)
    if train.COMPILE:
        for each in filter(None, (model, *references.values())):
            each.score = torch.compile(each.score, dynamic=True)

    def run(dtype, i, samples=samples):
        train.DTYPE = dtype
        model.use(dtype)
        start = clock()
        batches, _ = train.rollout(model, samples, i)
        middle = clock()
        if random_rewards:  # random text earns the same everywhere, and there has to be a gradient
            torch.manual_seed(i)
            batches = [batch._replace(rewards=torch.rand_like(batch.rewards)) for batch in batches]
        train.update(model, references[dtype], optimizer, batches, kl)
        return {"rollout": middle - start, "update": clock() - middle}

    return run


def start(w, found):
    """(the function to be timed, the model, this process's prompts as tokens) of a workload."""
    model, samples = build(w, found)
    prompts = [model.tokenizer.encode(sample.prompt) for sample in samples[parallel.RANK :: parallel.WORLD]]
    if w.kl is None:
        return rollouts(w, model, prompts), model, prompts
    train.BATCH_POSITIONS, train.GROUP_SIZE, train.KL_COEF, train.ENTROPY_COEF = w.prompts, w.group, w.kl, 0.0
    train.TASKS = dict.fromkeys(train.TASKS, w.new)
    return steps(model, w.kl, samples), model, prompts


def member(pipe, w):
    """One of the processes that do a workload together: does what it is asked for, ours or of transformers."""
    parallel.start(train.DEVICE)
    prepare()
    run, model, prompts = start(w, positions())
    others = peers.generate(model, prompts, w.group, w.new, train.DEVICE) if w.kl is None else {}
    while True:
        name, i = pipe.recv()
        pipe.send({"generate": others[name](i)} if name in others else run(DTYPES[name], i))


def contestants(w, run):
    """The project's side: {row: (dtype, a function of the number of the run that gives seconds)}, and the team."""
    team = Team(PROCESSES, member, w) if PROCESSES > 1 else None
    rows = {name: (name, functools.partial(run, dtype)) for name, dtype in DTYPES.items()}
    if team:
        rows |= {f"{name}, {PROCESSES} processes": (name, functools.partial(team.ask, name)) for name in DTYPES}
    return rows, team


@contextmanager
def phases(watched):
    """Seconds by phase: of the functions that `watched` names, and the rest."""
    spent, current, mark = Counter(), "rest", clock()

    def switch(phase):
        nonlocal current, mark
        now = clock()
        spent[current] += now - mark
        current, mark = phase, now

    def timed(function, phase, within):
        def wrapper(*args, **kwargs):
            if current != within:
                return function(*args, **kwargs)
            switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                switch(within)

        return wrapper

    with ExitStack() as patches:
        for owner, name, phase, within in watched:
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), phase, within)))
        yield spent
        switch("rest")


def peak(function):
    """Peak memory in GB while `function` runs."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak so far
    function()
    return peak_memory(train.DEVICE)


def watch(run, found, count, steps, warm=20):
    """Many steps on changing prompts: graphs compiled, and memory held, from the end of the warm-up on."""
    graphs, seen = torch._dynamo.utils.counters["stats"], {}
    for i in range(steps):
        samples = [tasks.policy_sample(p, "rookworld") for p in random.Random(i).sample(found, count)]
        run(list(DTYPES.values())[-1], 100 + i, samples)
        if i + 1 in (warm, steps):
            held = torch.cuda.memory_reserved() / 1e9 if CUDA else peak_memory(train.DEVICE)
            seen[i + 1] = graphs["unique_graphs"], held
    recompiles, grown = (b - a for a, b in zip(seen[warm], seen[steps]))
    return {"steps": steps, "warm_up": warm, "recompiles": recompiles, "grown_gb": grown}


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def measure(w, found, runs):
    run, model, prompts = start(w, found)
    rows, team = contestants(w, run)
    lengths, count = [len(p) for p in prompts], sum(p.numel() for p in model.parameters())
    result, work = {**w._asdict(), "config": vars(w.config), "runs": runs, "ours": {}}, {}
    for name, dtype in DTYPES.items():
        parts = limits.parts(w.config, count, lengths, w.group, w.new, dtype.itemsize, bool(w.kl))
        work[name] = {"rollout": parts["rollout"]} if w.kl is None else parts
    for name, (dtype, once) in rows.items():
        for i in range(WARM_UP):
            once(i)
        result["ours"][name] = row = {}
        if name == dtype:  # in this process, so it can be looked at
            row["peak_memory_gb"] = peak(lambda once=once: once(3))
            with phases(ROLLOUT_PHASES if w.kl is None else STEP_PHASES) as row["phases"]:
                once(4)
    runners = peers.generate(model, prompts, w.group, w.new, train.DEVICE) if w.kl is None else {}
    result["transformers"] = looked = {setting: peers.look(peer) for setting, peer in runners.items()}
    timed = {setting: seconds for setting, seconds in looked.items() if not isinstance(seconds, str)}
    others = {setting: runners[setting] for setting in timed if setting in (min(timed, key=timed.get), peers.DEFAULT)}
    for setting in list(others) if team else []:
        together = f"{setting}, {PROCESSES} processes"
        others[together] = lambda i, setting=setting: team.ask(setting, i)["generate"]
        looked[together] = peers.look(others[together])

    rounds = []
    for i in range(runs):
        limit = {
            name: limits.seconds(w.config, work[name], w.prompts * w.group, w.new, dtype, train.DEVICE)
            for name, dtype in DTYPES.items()
        }
        ours = {}
        for name, (dtype, once) in rows.items():
            (least, rates), halves = limit[dtype], once(10 + i)
            ours[name] = {"least": least, "rates": rates, "halves": halves, "seconds": sum(halves.values())}
        rounds.append((ours, {name: peer(i) for name, peer in others.items()}))
    if team:
        team.dismiss()
    for name, row in result["ours"].items():
        mine, needed = [ours[name] for ours, _ in rounds], work[rows[name][0]]
        row["all_seconds"] = [r["seconds"] for r in mine]
        row["seconds"] = median(row["all_seconds"])
        row["tokens_per_second"] = w.prompts * w.group * w.new / row["seconds"]
        row["halves"] = {half: median(r["halves"][half] for r in mine) for half in mine[0]["halves"]}
        row["limit"] = {part: median(r["least"][part] for r in mine) for part in needed}
        row["work"], row["rates"] = {part: p._asdict() for part, p in needed.items()}, mine[-1]["rates"]
        row["of_limit"] = median(sum(r["least"].values()) / r["seconds"] for r in mine)
        if w.kl is not None:
            row["update_of_limit"] = median(
                (r["least"]["update"] + r["least"]["optimizer"]) / r["halves"]["update"] for r in mine
            )
        row["times_as_fast"] = {
            other: median(theirs[other] / ours[name]["seconds"] for ours, theirs in rounds) for other in others
        }
    result["others"] = {other: [theirs[other] for _, theirs in rounds] for other in others}
    if CUDA and w.kl is not None:
        result["watch"] = watch(run, found, w.prompts, 200)
    return result


def show(name, r):
    print(f"\n{name} {r['what']}: {r['prompts']} x {r['group']} rows, {r['new']} new tokens, {r['runs']} rounds")
    for dtype, row in r["ours"].items():
        low, high = min(row["all_seconds"]), max(row["all_seconds"])
        print(f"  {dtype:9} {row['seconds']:.3f} s ({low:.3f} to {high:.3f}), {row['of_limit']:.0%} of the limit, "
              f"{row['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
        if "update_of_limit" in row:
            print(f"            the update alone: {row['update_of_limit']:.0%} of its limit")
        if "phases" not in row:
            continue
        spent = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in row["phases"].items())
        print(f"            peak memory {row['peak_memory_gb']:.2f} GB, seconds by phase: {spent}")
        for part, work in row["work"].items():
            flops, copied = (row["rates"][rate].get(part) for rate in ("flops_per_second", "bytes_per_second"))
            products = f"{work['flops'] / 1e9:.1f} GFLOP at {flops / 1e9:.0f} a second, " if flops else ""
            print(f"            limit of the {part}: {row['limit'][part]:.3f} s, the larger of {products}"
                  f"{work['bytes'] / 1e9:.2f} GB at {copied / 1e9:.1f} a second")  # fmt: skip
    for setting, seconds in r["transformers"].items():
        ratios = [f"{dtype} is {row['times_as_fast'][setting]:.2f} times as fast"
                  for dtype, row in r["ours"].items() if setting in row["times_as_fast"]]  # fmt: skip
        figure = seconds if isinstance(seconds, str) else f"{seconds:.3f} s"
        print(f"  transformers, {setting}: {'; '.join([figure, *ratios])}")
    if "watch" in r:
        said = "  {steps} steps: after the first {warm_up} {recompiles} recompiles, memory grew by {grown_gb:.3f} GB"
        print(said.format(**r["watch"]))


def default_run(runs):
    """The default run's own steps by phase: seconds of each, medians."""
    model = GPT.load(train.MODEL).to(train.DEVICE)
    found, dtype = data.split(data.load(train.DATA))[0], fastest_dtype(train.DEVICE)
    step, seen = steps(model, train.KL_COEF, random_rewards=False), []
    for i in range(runs + 1):
        samples = train.draw_prompts(found, i, model.config.chess_format)
        with phases(STEP_PHASES) as spent:
            halves = step(dtype, i, samples)
        seen.append({"whole step": sum(halves.values()), **halves, **spent})
    result = {phase: median(s[phase] for s in seen[1:]) for phase in seen[-1]}  # the first warms up
    print(f"\na step of {train.MODEL} with the default settings, {dtype}, median of {runs}")
    print("  " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in result.items()))
    return result


def growth(found, runs):
    dtype, rows = fastest_dtype(train.DEVICE), []
    print(f"\nhow cost grows, {dtype}: milliseconds for a completion, and the GFLOP that limits.py counts for it")
    print(f"{'':12}{'rollout':>10}{'update':>10}{'GFLOP':>10}{'tokens/s':>10}")
    for what, values in GROWTH.items():
        for value in values:
            w = GROWS._replace(**{what: value})
            run, _, prompts = start(w, found)
            halves = [run(dtype, i) for i in range(runs + 1)][1:]  # the first warms up
            count, lengths = w.prompts * w.group, [len(p) for p in prompts]
            row = {half: 1e3 * median(h[half] for h in halves) / count for half in ("rollout", "update")}
            row["gflop"] = 4 * limits.forward_flops(w.config, lengths, w.group, w.new) / count / 1e9
            row["tokens_per_second"] = 1e3 * w.new / (row["rollout"] + row["update"])
            rows.append({"what": what, "value": value, "prompts": w.prompts, "group": w.group, "new": w.new, **row})
            print(f"{what:8}{value:4}{row['rollout']:10.2f}{row['update']:10.2f}{row['gflop']:10.2f}"
                  f"{row['tokens_per_second']:10,.0f}", flush=True)  # fmt: skip
    return rows


def main():
    p = argparse.ArgumentParser("python -m tools.bench", description=__doc__.split("\n")[0])
    chosen = ["rollout", "step", "run", "growth", "all", *WORKLOADS]
    p.add_argument("what", nargs="?", default="all", choices=chosen, help="what to measure")
    p.add_argument("--json", metavar="OUT", help="also write the numbers to this file")
    p.add_argument("--runs", type=int, default=5, help="rounds, of which a number is the median")
    a = p.parse_args()
    if a.json and not Path(a.json).absolute().parent.is_dir():
        train.refuse(f"{a.json} cannot be written: its folder does not exist.")
    if a.runs < 1:
        train.refuse(f"--runs {a.runs} measures nothing; give at least 1.")
    prepare()
    machine = describe("python -m tools.bench", train.DEVICE, "see workloads")
    result = {"machine": machine, "threads": torch.get_num_threads(), "workloads": {}}
    print(f"{machine['machine']}, {result['threads']} threads, torch {torch.__version__}")
    print(limits.EXPLANATION, flush=True)
    if a.what in ("all", "run"):  # first, as the workloads change train's settings
        result["run"] = default_run(a.runs)
    found = positions()
    for name, w in WORKLOADS.items():
        if a.what in ("all", name, "rollout" if w.kl is None else "step"):
            result["workloads"][name] = measure(w, found, a.runs)
            show(name, result["workloads"][name])
    if a.what in ("all", "growth"):
        result["growth"] = growth(found, a.runs)
    if a.json:
        replace(a.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
