"""Speed: seconds of a rollout and of a whole step, beside this machine's own limit, transformers and TRL.

python -m tools.bench [W1 W2 W3 W4] [--runs 5] [--only nanorook] [--json FILE]

Weights are random and nothing ends early, so every run does the same work. In each round nanorook, the limit and the
others take turns, and a ratio is the median of the rounds' ratios, so that a machine whose speed changes does not
favour one of them. `--only nanorook` prints its seconds alone.
"""

import argparse
import json
import logging
import random
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import grpo
import rewards
import train
from model import GPT, GPTConfig
from nanorook import hardware, positions
from nanorook.hardware import fastest_dtype, peak_memory
from nanorook.monitor import describe
from nanorook.settings import refuse
from nanorook.tokenizer import Tokenizer
from rollout import capture, generate, read

SMALL, GPT2 = GPTConfig(257, 384, 256, 6, 8, eos_token_id=256), GPTConfig()
WARM_UP = 2  # runs that do not count


class Workload(NamedTuple):
    what: str
    config: GPTConfig
    prompts: int  # B
    group: int  # G
    new: int  # T
    kl: float | None = None  # KL_COEF of a whole step, above 0 with a reference; None is a rollout alone


def workloads(device):
    cuda = device.type == "cuda"
    return {
        "W1": Workload("rollout, 6 layers x 256", SMALL, 32, 8, 72),
        "W2": Workload("rollout, GPT-2 124M", GPT2, 64 if cuda else 4, 8, 64),
        "W3": Workload("whole step, 6 layers x 256", SMALL, 16, 8, 72, 0.0),
        "W4": Workload("whole step with reference, GPT-2 124M", GPT2, 64 if cuda else 2, 8, 64, 0.02),
    }


def dtypes(device):
    return (fastest_dtype(device),) if device.type == "cuda" else (torch.float32, torch.bfloat16)


def name(dtype):
    return str(dtype).removeprefix("torch.")


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---------------------------------------------------------------------------------------------------------------------
# nanorook


def questions():
    """Policy questions whose prompts have 50 to 70 bytes, in an order that is always the same."""
    found = positions.split(positions.load("builtin"))[0]
    asked = [rewards.policy_question(p, "rookworld") for p in random.Random(0).sample(found, len(found)) if p.moves]
    return [question for question in asked if 50 <= len(question.prompt) <= 70]


def build(w, device):
    """Random weights, and a tokenizer whose end token never comes."""
    torch.manual_seed(0)
    model = GPT(w.config).to(device)
    model.tokenizer = Tokenizer.of_bytes()
    model.tokenizer.eos = model.config.eos_token_id = -1
    return model


def sample(w, twin, asked, i):
    prompts = [twin.tokenizer.encode(question.prompt) for question in asked]
    device = twin.wte.weight.device
    noise = torch.rand(len(prompts) * w.group, w.new, generator=torch.Generator().manual_seed(i)).to(device)
    return generate(twin, prompts, w.group, w.new, noise=noise)


def rollouts(w, model, asked):
    """A function of (dtype, number of the run) that samples once: {"rollout": seconds}."""
    device = model.wte.weight.device
    twins = {dtype: model.cast(dtype) for dtype in dtypes(device)}

    def run(dtype, i, asked=asked):
        start = clock(device)
        sample(w, twins[dtype], asked, i)
        return {"rollout": clock(device) - start}

    return run


def steps(w, model, asked):
    """A function of (dtype, number of the run) that makes a step as train.py does: the seconds of its two halves."""
    device = model.wte.weight.device
    references = {dtype: train.make_reference(model, device, dtype) if w.kl else None for dtype in dtypes(device)}
    optimizer = train.make_optimizer(model)

    def run(dtype, i, asked=asked):
        model.use(dtype)
        start = clock(device)
        batch = sample(w, model.cast(dtype), asked, i)
        texts = [read(model.tokenizer, ids) for ids in batch.tokens.tolist()]
        grades = [rewards.grade(asked[n // w.group], text, True) for n, (text, _) in enumerate(texts)]
        values, judged = grpo.credit([grade.pieces for grade in grades], [ends for _, ends in texts], w.new)
        values = torch.rand(values.shape, generator=torch.Generator().manual_seed(i))  # random text earns nothing
        advantages = grpo.token_advantages(grpo.advantages(values, w.group), judged).to(device)
        middle = clock(device)
        train.update(model, references[dtype], optimizer, [batch._replace(advantages=advantages)], w.kl)
        return {"rollout": middle - start, "update": clock(device) - middle}

    return run


def watch(run, asked, w, device, count, warm=20):
    """Many steps on changing prompts: graphs compiled, and GB of memory held, from the end of the warm-up on."""
    seen = []
    for i in range(count):
        run(dtypes(device)[-1], i, random.Random(i).sample(asked, w.prompts))
        if i + 1 in (warm, count):
            held = torch.cuda.memory_reserved(device) / 1e9 if device.type == "cuda" else peak_memory(device)
            seen.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], held))
            print(f"  {i + 1} steps: {seen[-1][0]} graphs compiled, {held:.2f} GB held", flush=True)
    recompiles, grown = (b - a for a, b in zip(seen[0], seen[-1]))
    return {"steps": count, "warm_up": warm, "recompiles": recompiles, "grown_gb": grown}


# ---------------------------------------------------------------------------------------------------------------------
# The limit: what no implementation can leave out, at the speed at which this machine does just that.
#
# C width, L layers, V vocabulary; a prompt has p tokens, the last of them fed by each row; T new tokens.
#   a token through the matrices of a layer       24 C²          its query against one key and value   4 C
#   a prompt's other p-1 tokens through layers 1 to L-1, and their keys and values (4 C²) in layer L, once for a group
#   a row's T tokens through all layers and the head (2 C V); token t sees p-1+t keys
#   decoding reads T times the matrices (12 L C² + C V) and all keys and values so far, a prompt's once for its group
#   an update is 3 forwards (1 forward, 2 backward), and 1 more for a reference; it reads the matrices for each of
#   them, and writes a gradient; clipping and AdamW move 8 floats a parameter (5 read: the gradient twice; 3 written)
#
# Padding and masked pairs do not count; sampling, norms, GELU, softmax and activations that go through memory count as
# nothing, so 100 % cannot be reached. A part's limit is the larger of FLOPs / matmul rate and bytes / copy rate.


class Part(NamedTuple):
    flops: float
    bytes: float


def forward_flops(config, lengths, group_size, new):
    """Of prompts with these lengths and `group_size` completions of `new` tokens each: a whole rollout's, too."""
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    shared = [p - 1 for p in lengths]
    tokens = len(lengths) * group_size * new
    pairs = sum(group_size * (new * s + new * (new + 1) // 2) for s in shared)
    prompt_pairs = sum(s * (s + 1) // 2 for s in shared)
    prompts = sum(shared) * (24 * (L - 1) + 4) * C * C + prompt_pairs * 4 * C * (L - 1)
    return prompts + tokens * (24 * L * C * C + 2 * C * V) + pairs * 4 * C * L


def needed(w, lengths, parameters, size):
    """{part: Part} of a workload with elements of `size` bytes."""
    L, C = w.config.n_layer, w.config.n_embd
    matrices = 12 * L * C * C + C * w.config.vocab_size
    forward = forward_flops(w.config, lengths, w.group, w.new)
    keys = sum(p - 1 for p in lengths) * w.new + len(lengths) * w.group * w.new * (w.new + 1) // 2
    parts = {"rollout": Part(forward, size * (w.new * matrices + keys * 2 * L * C))}
    if w.kl is not None:
        forwards = 3 + (w.kl > 0)
        parts["update"] = Part(forwards * forward, forwards * matrices * size + 4 * parameters)
        parts["optimizer"] = Part(0, 8 * 4 * parameters)
    return parts


def best(function, device, times=3):
    """Seconds of the fastest of a few calls, after one that does not count."""
    function()
    repeats = 1
    if device.type == "cuda":  # several in one captured graph, else launches would be what is measured
        once, repeats = function, 8
        function = capture(lambda: [once() for _ in range(repeats)], device)
    seconds = []
    for _ in range(times):
        start = clock(device)
        function()
        seconds.append(clock(device) - start)
    return min(seconds) / repeats


def matmul_rate(config, rows, dtype, device, backward):
    """FLOPs a second of the model's own matrix products with `rows` tokens, layers and head in their proportion;
    with `backward` also the products of the backward pass, with the gradient's transpose and with the weights."""
    C, V = config.n_embd, config.vocab_size

    def operands(into, out):
        x, g, w = (torch.ones(n, m, dtype=dtype, device=device) for n, m in ((rows, into), (rows, out), (out, into)))
        return x, g, w, torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)

    def multiply(several):
        for x, g, w, y, dx, dw in several:
            torch.mm(x, w.t(), out=y)
            if backward:
                torch.mm(g, w, out=dx)
                torch.mm(g.t(), x, out=dw)

    shapes = ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C))
    several = [operands(*shape) for _ in range(3) for shape in shapes]  # one alone would stay in the cache
    seconds = config.n_layer / 3 * best(lambda: multiply(several), device)
    several = [operands(C, V)]
    seconds += best(lambda: multiply(several), device)
    return (3 if backward else 1) * 2 * rows * (config.n_layer * 12 * C * C + C * V) / seconds


def copy_rate(size, device):
    """Bytes a second, read and written, of a copy that moves `size` bytes: what fits into a cache is faster."""
    a = torch.ones(int(min(size, 2**30)) // 8, device=device)
    b = torch.ones_like(a)
    return 8 * len(a) / best(lambda: b.copy_(a), device, 10)


def limit(w, parts, dtype, device):
    """{part: the least seconds on this machine}."""
    rows, seconds = w.prompts * w.group, {}
    for part, (flops, size) in parts.items():
        trained = min(rows * w.new, 8192 if device.type == "cuda" else 1024)  # as many as fit at once
        at_once, moved, backward = (rows, size / w.new, False) if part == "rollout" else (trained, size, True)
        products = flops / matmul_rate(w.config, at_once, dtype, device, backward) if flops else 0
        seconds[part] = max(products, size / copy_rate(moved, device))
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# transformers and TRL. GPT-2's gelu_new is written out there as many small operations, so a fused one is tried as well.

FUSED = {"activation_function": "gelu_pytorch_tanh"}
TRANSFORMERS = {  # dtype, cache, what the model is made with
    "default": (torch.float32, "dynamic", {}),
    "float32, fused GELU": (torch.float32, "dynamic", FUSED),
    "float32, static cache, fused GELU": (torch.float32, "static", FUSED),  # on CUDA generate() compiles these
    "bfloat16, fused GELU": (torch.bfloat16, "dynamic", FUSED),
    "bfloat16, static cache, fused GELU": (torch.bfloat16, "static", FUSED),
}
PLAIN = {"bf16": False, "gradient_checkpointing": False}
TRL = {  # what the model is made with, what GRPOConfig gets beside what the work itself asks for
    "default": ({}, {}),  # fp32 weights, bf16 autocast, gradient checkpointing
    "float32": (FUSED, PLAIN),
    "bfloat16 autocast": (FUSED, PLAIN | {"bf16": True}),
    "bfloat16 weights": (FUSED | {"dtype": "bfloat16"}, PLAIN),
    "bfloat16 weights, 4 microbatches": (FUSED | {"dtype": "bfloat16"}, PLAIN | {"gradient_accumulation_steps": 4}),
}


def generators(w, model, asked, folder):
    """{setting: a function of the run's number that gives seconds}, with the same weights and prompts."""
    from transformers import GPT2LMHeadModel

    device, models = model.wte.weight.device, {}
    prompts = [model.tokenizer.encode(question.prompt) for question in asked]
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(p)) + p for p in prompts]  # on the left, as generate wants it
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    inputs = {"input_ids": torch.tensor(padded).to(device), "attention_mask": torch.tensor(mask).to(device)}

    def run(i, dtype, cache, options):
        key = dtype, *options
        if key not in models:
            models[key] = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, **options).eval().to(device)
            models[key].generation_config.eos_token_id = None  # nothing ends early
        torch.manual_seed(i)
        start = clock(device)
        out = models[key].generate(
            **inputs, num_return_sequences=w.group, max_new_tokens=w.new, do_sample=True, top_k=0, pad_token_id=0,
            cache_implementation=cache,
        )  # fmt: skip
        seconds = clock(device) - start
        assert out.shape == (len(prompts) * w.group, longest + w.new)
        return seconds

    return {f"transformers, {setting}": lambda i, rest=rest: run(i, *rest) for setting, rest in TRANSFORMERS.items()}


def trl_steps(w, asked, folder, device, setting, runs, before):
    """[(what before(i) gave ahead of step i, seconds of that step in TRL), ...]"""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    pairs, started = [], [None, 0.0]

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            model.generation_config.eos_token_id = None  # the trainer has just taken it from the tokenizer

        def on_step_begin(self, *args, **kwargs):
            started[:] = before(len(pairs)), clock(device)

        def on_step_end(self, *args, **kwargs):
            pairs.append((started[0], timed(f"TRL, {setting}", lambda: clock(device) - started[1])))

    def reward(prompts, completions, completion_ids, **kwargs):
        assert all(len(ids) == w.new for ids in completion_ids)
        for prompt, text in zip(prompts, completions):
            rewards.grade(by_prompt[prompt], text, True)
        return torch.rand(len(prompts)).tolist()  # as in steps()

    by_prompt = {question.prompt: question for question in asked}
    init, options = TRL[setting]
    options = {"gradient_accumulation_steps": 1, **options}
    config = GRPOConfig(
        output_dir=f"{folder}/out", use_cpu=device.type == "cpu", seed=0, model_init_kwargs=dict(init),
        per_device_train_batch_size=w.prompts * w.group // options["gradient_accumulation_steps"],
        num_generations=w.group, max_completion_length=w.new, temperature=train.TEMPERATURE, max_steps=runs,
        beta=w.kl, loss_type=train.LOSS, scale_rewards=train.SCALE_REWARDS, epsilon=train.CLIP_RANGE,
        epsilon_high=train.CLIP_RANGE_HIGH, learning_rate=train.LR, lr_scheduler_type="constant", adam_beta2=0.95,
        max_grad_norm=train.MAX_GRAD_NORM, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": [question.prompt for question in asked]})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(str(folder), reward, config, dataset, processing_class=tokenizer, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = None
    trainer.eos_token_ids = [-1]
    trainer.train()
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def timed(who, function, *args):
    """What a run took, printed at once: a long measurement is seen to go on."""
    halves = function(*args)
    halves = halves if isinstance(halves, dict) else {"whole": halves}
    detail = ", ".join(f"{half} {seconds:.3f}" for half, seconds in halves.items()) if len(halves) > 1 else ""
    print(f"  {who:50} {sum(halves.values()):8.3f} s  {detail}", flush=True)
    return sum(halves.values())


def measure(title, w, device, runs, alone=False, watched=0):
    print(f"\n{title} {w.what}: {w.prompts} x {w.group} rows, {w.new} new tokens, {runs} rounds", flush=True)
    everything = questions()
    asked, model = everything[: w.prompts], build(w, device)
    run = (rollouts if w.kl is None else steps)(w, model, asked)
    for dtype in dtypes(device):
        for i in range(WARM_UP):
            run(dtype, i)
    result = {**w._asdict(), "config": vars(w.config), "runs": runs, "peak_memory_gb": peak_memory(device), "ours": {}}
    parameters = sum(p.numel() for p in model.parameters())
    lengths = [len(model.tokenizer.encode(question.prompt)) for question in asked]

    def turn(i, with_limit):
        """{who: seconds} of one round."""
        seconds = {}
        for dtype in dtypes(device):
            who = f"limit, {name(dtype)}"
            seconds[name(dtype)] = timed(f"nanorook, {name(dtype)}", run, dtype, 10 + i)
            if with_limit:
                seconds[who] = timed(who, limit, w, needed(w, lengths, parameters, dtype.itemsize), dtype, device)
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        peers = {} if alone or w.kl is not None else choose(generators(w, model, asked, folder))
        rounds = []
        for i in range(runs):
            rounds.append(turn(i, not alone) | {peer: timed(peer, once, i) for peer, once in peers.items()})
        for setting in [] if alone or w.kl is None else TRL:
            pairs = trl_steps(w, asked, folder, device, setting, runs + WARM_UP, lambda i: turn(i, False))
            rounds += [ours | {f"TRL, {setting}": theirs} for ours, theirs in pairs[WARM_UP:]]
    summarise(result, rounds, w)
    if watched:
        result["watch"] = watch(run, everything, w, device, watched)
    return result


def choose(peers):
    """transformers' default, and the fastest of its settings."""
    seconds = {}
    for peer, once in peers.items():
        try:
            once(0)
            seconds[peer] = timed(peer, once, 1)
        except Exception as error:  # no compiler, or a cache that this version does not have
            print(f"  {peer}: failed ({type(error).__name__})", flush=True)
    return {peer: peers[peer] for peer in dict.fromkeys([*list(peers)[:1], min(seconds, key=seconds.get)])}


def summarise(result, rounds, w):
    """Medians and ratios of the rounds."""
    others = dict.fromkeys(who for seconds in rounds for who in seconds if "," in who)
    for dtype in (who for who in rounds[0] if who not in others):
        mine = [seconds[dtype] for seconds in rounds]
        row = {"seconds": median(mine), "all_seconds": mine, "times_as_fast": {}}
        row["tokens_per_second"] = w.prompts * w.group * w.new / row["seconds"]
        print(f"{dtype}: {row['seconds']:.3f} s, {row['tokens_per_second']:,.0f} tokens/s", flush=True)
        for who in others:
            ratio = median(seconds[who] / seconds[dtype] for seconds in rounds if who in seconds)
            if not who.startswith("limit"):
                row["times_as_fast"][who] = ratio
                print(f"  {ratio:.2f} times as fast as {who}")
            elif who.endswith(dtype):
                row["of_limit"] = ratio
                print(f"  {ratio:.0%} of the limit")
        result["ours"][dtype] = row
    result["others"] = {who: [seconds[who] for seconds in rounds if who in seconds] for who in others}


def silence():
    """Whether the others are installed; they print no warnings and no progress bars."""
    try:
        import datasets
        import transformers
        import trl  # noqa: F401
    except ImportError as error:
        print(f"{error.name} is not installed, so nanorook is measured alone: pip install transformers trl")
        return False
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return True


def main():
    device = hardware.choose()
    all_workloads = workloads(device)
    p = argparse.ArgumentParser("python -m tools.bench", description=__doc__.split("\n")[0])
    p.add_argument("what", nargs="*", choices=[[], *all_workloads], help="default: those that suit the machine")
    p.add_argument("--runs", type=int, default=5, help="rounds, of which a number is the median")
    p.add_argument("--only", choices=["nanorook"], help="leave out the limit and the others")
    p.add_argument("--watch", type=int, default=0, metavar="N", help="then N steps: do graphs or memory grow?")
    p.add_argument("--json", metavar="FILE", help="also write the numbers to this file")
    a = p.parse_args()
    if a.runs < 1:
        refuse(f"--runs {a.runs} measures nothing; give at least 1.")
    if a.json and not Path(a.json).absolute().parent.is_dir():
        refuse(f"{a.json} cannot be written: its folder does not exist.")
    alone = bool(a.only) or not silence()
    machine = describe("python -m tools.bench", device, dtypes(device)[-1])
    result = {"machine": machine, "threads": torch.get_num_threads(), "workloads": {}}
    print(f"{machine['machine']}, {result['threads']} threads, torch {torch.__version__}", flush=True)
    for title in a.what or (["W2", "W4"] if device.type == "cuda" else list(all_workloads)):
        result["workloads"][title] = measure(title, all_workloads[title], device, a.runs, alone, a.watch)
        if a.json:  # after each, as it may be stopped
            Path(a.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
