"""What a step costs on 1, 8, 64 and 512 GPUs: counted, not measured. docs/scaling.md explains it.

    python -m experiments.scaling.model

A part takes the larger of FLOPs ÷ rate and bytes ÷ bandwidth. The figures of the machines are at the top; those of
Python and of this machine's CPU come from measured.json, against which the same functions are checked.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace as Record

MEASURED = Path(__file__).with_name("measured.json")

# Published figures times the share of them that a program like this one gets; seconds, bytes, FLOPs.
H100 = Record(
    flops=989e12 * 0.35,  # bf16, dense; a model 768 wide fills the tensor cores less than a large one
    memory=3.35e12 * 0.7,
    launch=2.5e-6,  # a kernel in a captured graph
    kernels=22,  # of a layer, in a decoding step
    size=2,  # bytes of a number in a product
    node=8,  # GPUs that share NVLink
    near=Record(bandwidth=450e9 * 0.8, latency=8e-6),  # NVLink 4, a direction
    far=Record(bandwidth=50e9 * 0.8, latency=20e-6),  # InfiniBand NDR, one 400 Gb/s card a GPU
    host=Record(bandwidth=2e9),  # gloo, over TCP, for what all_gather_object sends
)
GPT2 = Record(layers=12, width=768, vocabulary=50257, positions=1024)
# Tokens of RookWorld's format with GPT-2's tokenizer; a quarter of the prompts are environment tasks.
TEXT = Record(prompt=60, length=95, row_sd=15, group_sd=10, limit=144)
GROUP, MIX, REFERENCE = 8, 0.25, True


def weights(m):
    blocks, head = 12 * m.layers * m.width**2, m.vocabulary * m.width
    return Record(blocks=blocks, head=head, all=blocks + head + m.positions * m.width)


def highest_of(n, mean, sd, limit=math.inf):
    """About the largest of n normal numbers."""
    return min(limit, mean + sd * math.sqrt(2 * math.log(max(1, n))))


def attention(m, text):
    """FLOPs of a completion token against what it sees: scores and values."""
    return 4 * m.layers * m.width * (text.prompt + text.length / 2)


def rollout(m, text, machine, prompts, world):
    """Seconds of sampling on the slowest of `world` processes, each with so many prompts."""
    w, rows = weights(m), prompts * GROUP
    steps = math.ceil(highest_of(rows * world, text.length, text.row_sd, text.limit) / 8) * 8
    alive = rows * text.length / steps  # finished rows leave the batch
    prefill = prompts * text.prompt * 2 * w.blocks / machine.flops
    flops = alive * (2 * (w.blocks + w.head) + attention(m, text))
    cache = 2 * m.layers * m.width * (prompts * text.prompt + alive * text.length / 2)
    move = machine.size * (w.blocks + w.head + cache)
    overhead = machine.kernels * m.layers * machine.launch
    return prefill + steps * (max(flops / machine.flops, move / machine.memory) + overhead)


def update(m, text, machine, prompts, world):
    """Seconds of forward, backward, reference and optimizer on the slowest process; without the all-reduce."""
    w, rows = weights(m), prompts * GROUP
    spread = highest_of(world, text.length, text.group_sd / math.sqrt(prompts)) / text.length
    completion = rows * text.length * spread
    forward = 2 * w.blocks * (prompts * text.prompt + completion) + completion * (2 * w.head + attention(m, text))
    passes = 3 + REFERENCE  # backward is two; the reference is one more
    optimizer = 4 * 8 * w.all / machine.memory  # clipping and AdamW read five and write three floats a weight
    return passes * forward / machine.flops + optimizer


def all_reduce(size, calls, machine, world):
    """Seconds to add up `size` bytes in so many calls: a ring within the node, then across nodes each GPU its share.

    A ring moves 2 (n - 1) / n of the bytes (Patarasuk & Yuan, 2009). A call takes the latency of a tree, 2 log2 n
    hops, as NCCL does for short messages; a ring's would be 2 (n - 1).
    """
    if world == 1:
        return 0.0
    near = min(world, machine.node)
    seconds = 2 * (near - 1) / near * size / machine.near.bandwidth
    seconds += calls * 2 * math.log2(near) * machine.near.latency
    if world > near:
        nodes = world / near
        seconds += 2 * (nodes - 1) / nodes * size / near / machine.far.bandwidth
        seconds += calls * 2 * math.log2(nodes) * machine.far.latency
    return seconds


def python(cost, text, machine, prompts, world, everywhere):
    """Seconds of one process's Python: draw, grade, and, `everywhere`, the work on the whole batch in each process."""
    rows, whole = prompts * GROUP, world if everywhere else 1
    draw = prompts * whole * (MIX * cost["environment_sample"] + (1 - MIX) * cost["policy_sample"])
    noise = prompts * whole * GROUP * text.limit * cost["noise"]
    seconds = draw + noise + rows * cost["grade"]
    if world > 1 and everywhere:
        moved = rows * world * cost["pickled_bytes"] / machine.host.bandwidth
        seconds += rows * cost["pickle"] + rows * world * cost["unpickle"] + moved
    return seconds


def step(prompts, world, cost, mended):
    """A step of the 124M model on `world` H100s, as it is, or mended as docs/scaling.md says."""
    parts = {
        "rollout": rollout(GPT2, TEXT, H100, prompts, world),
        "python": python(cost, TEXT, H100, prompts, world, not mended),
        "update": update(GPT2, TEXT, H100, prompts, world),
        "all-reduce": all_reduce(4 * weights(GPT2).all, 1, H100, world),
    }
    return parts | {"step": sum(parts.values())}


def table(title, prompts_of, cost, mended):
    print(f"\n{title}\n")
    names = ["rollout", "python", "update", "all-reduce", "step"]
    print("| GPUs | prompts | " + " | ".join(f"{name} (s)" for name in names) + " | completion tokens/s | efficiency |")
    print("| ---: " * (len(names) + 4) + "|")
    for world in (1, 8, 64, 512):
        prompts = prompts_of(world)
        parts = step(prompts, world, cost, mended)
        rate = prompts * world * GROUP * TEXT.length / parts["step"]
        alone = rate / world if world == 1 else alone  # noqa: F821
        cells = " | ".join(f"{parts[name]:.3f}" for name in names)
        print(f"| {world} | {prompts * world} | {cells} | {rate:,.0f} | {rate / world / alone:.0%} |")


def check(found):
    """The same functions with this machine's figures. The rates of one process are taken from its own measured step;
    what two processes, or two threads, take is then said by the model alone."""
    global GROUP, REFERENCE
    cost, reduce = found["serial"], found["reduce"]
    m = Record(layers=6, width=256, vocabulary=257, positions=384)
    prompts = found["settings"]["BATCH_POSITIONS"]
    text = Record(prompt=111, length=found["runs"][0]["length"], row_sd=cost["length_sd"], limit=144)
    text.group_sd = cost["group_sd"]
    gloo = Record(bandwidth=reduce["bytes"] / max(1e-9, reduce["all_at_once"] - reduce["latency"]))
    gloo.latency = reduce["latency"] / 2  # two hops of log2(2)
    machine = Record(
        flops=1e99, memory=1e99, launch=0.0, kernels=22, size=4, node=2, near=gloo, host=Record(bandwidth=1e9)
    )
    measured = {(r["processes"], r["threads"]): r for r in found["runs"]}

    def predict(part, function, processes, threads):
        """Scaled from one process and thread: what the model counts, by the measured rate."""
        one = Record(**{**vars(machine), "flops": 1.0, "memory": 1e99})
        rate = function(m, text, one, prompts, 1) / (measured[1, 1][part] - (alone if part == "rollout" else 0))
        rate *= found["flops"][str(threads)] / found["flops"]["1"]
        return function(m, text, one, prompts // processes, processes) / rate

    alone = python(cost, text, machine, prompts, 1, True)
    print("\n| processes × threads | rollout: model (s) | measured | update: model (s) | measured | off |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for (processes, threads), run in measured.items():
        said = predict("rollout", rollout, processes, threads)
        said += python(cost, text, machine, prompts // processes, processes, True)
        then = predict("update", update, processes, threads)
        then += all_reduce(4 * weights(m).all, 1, machine, processes)
        off = (said + then) / (run["rollout"] + run["update"]) - 1
        print(f"| {processes} × {threads} | {said:.2f} | {run['rollout']:.2f} | {then:.2f} | {run['update']:.2f} | "
              f"{'taken from it' if processes == threads == 1 else f'{off:+.0%}'} |")  # fmt: skip
    print(f"\ngradients of {reduce['tensors']} tensors, {reduce['bytes'] / 1e6:.1f} MB, two processes: "
          f"one by one {1000 * reduce['one_by_one']:.1f} ms (model "
          f"{1000 * all_reduce(reduce['bytes'], reduce['tensors'], machine, 2):.1f}), "
          f"all at once {1000 * reduce['all_at_once']:.1f} ms")  # fmt: skip


def main():
    found = json.loads(MEASURED.read_text())
    cost = found["serial"]
    for mended in (False, True):
        how = "mended" if mended else "as it is"
        table(f"Weak: 64 prompts × {GROUP} on each GPU, {how}", lambda world: 64, cost, mended)
        table(f"Strong: 512 prompts × {GROUP} on all GPUs together, {how}", lambda world: 512 // world, cost, mended)
    check(found)


if __name__ == "__main__":
    main()
