"""What a rollout and an update need at least of a machine, and how fast this machine does just that.

Counted is what no implementation can leave out: matrix products on real tokens (padding and masked pairs do not
count), weights and caches read, the optimizer's state. A part's limit is the larger of FLOPs ÷ matmul rate and
bytes ÷ copy rate, both measured on shapes and sizes of that part. Sampling, norms, GELU, softmax and activations that
go through memory count as nothing, so 100 % cannot be reached.
"""

import time
from typing import NamedTuple

import torch

from rollout import capture

EXPLANATION = """
The counting (C width, L layers, V vocabulary; a prompt has p tokens, the last of them fed by each row; T new tokens):
  a token through the matrices of a layer       24 C²          its query against one key and value   4 C
  a prompt's other p-1 tokens through layers 1 to L-1, and their keys and values (4 C²) in layer L, once for a group
  a row's T tokens through all layers and the head (2 C V); token t sees p-1+t keys
  decoding reads T times the matrices (12 L C² + C V) and all keys and values so far, a prompt's once for its group
  an update is 3 forwards (1 forward, 2 backward), and 1 more for a reference; it reads the matrices for each of
  them, and writes a gradient; clipping and AdamW move 8 floats a parameter (5 read: the gradient twice; 3 written)
""".strip()


class Part(NamedTuple):
    flops: float
    bytes: float


def matrices(config):
    """Elements of one layer's matrices, and of the head."""
    return 12 * config.n_embd**2, config.n_embd * config.vocab_size


def forward_flops(config, lengths, group_size, new):
    """Of prompts with these lengths and `group_size` completions of `new` tokens each: a whole rollout's, too."""
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    shared = [p - 1 for p in lengths]
    tokens = len(lengths) * group_size * new
    pairs = sum(group_size * (new * s + new * (new + 1) // 2) for s in shared)
    prompt_pairs = sum(s * (s + 1) // 2 for s in shared)
    prompts = sum(shared) * (24 * (L - 1) + 4) * C * C + prompt_pairs * 4 * C * (L - 1)
    return prompts + tokens * (24 * L * C * C + 2 * C * V) + pairs * 4 * C * L


def decoding_bytes(config, lengths, group_size, new, size):
    """Weights and caches that `new` steps read, `size` bytes an element."""
    layer, head = matrices(config)
    shared = sum(p - 1 for p in lengths) * new
    own = len(lengths) * group_size * new * (new + 1) // 2
    return size * (new * (config.n_layer * layer + head) + (shared + own) * 2 * config.n_layer * config.n_embd)


def parts(config, parameters, lengths, group_size, new, size, reference):
    """{part: Part} of a whole step; a rollout alone is its first."""
    forward = forward_flops(config, lengths, group_size, new)
    layer, head = matrices(config)
    weights = config.n_layer * layer + head
    return {
        "rollout": Part(forward, decoding_bytes(config, lengths, group_size, new, size)),
        "update": Part((3 + reference) * forward, (3 + reference) * weights * size + 4 * parameters),
        "optimizer": Part(0, 8 * 4 * parameters),
    }


def best(function, device, times=3):
    """Seconds of the fastest of a few calls, after one that does not count."""
    function()
    repeats = 1
    if device == "cuda":  # several in one captured graph, else launches would be what is measured
        once, repeats = function, 8
        function = capture(lambda: [once() for _ in range(repeats)])
    seconds = []
    for _ in range(times):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / repeats


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


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
    a = torch.ones(int(size) // 8, device=device)
    b = torch.ones_like(a)
    return 8 * len(a) / best(lambda: b.copy_(a), device, 10)


def seconds(config, all_parts, rows, new, dtype, device):
    """{part: least seconds on this machine}, and the rates measured for it. `rows` decode `new` tokens, and so many
    rows as fit are trained at once."""
    trained = min(rows * new, 8192 if device == "cuda" else 1024)
    flops = {"rollout": matmul_rate(config, rows, dtype, device, False)}
    if "update" in all_parts:
        flops["update"] = matmul_rate(config, trained, dtype, device, True)
    moved = {"rollout": all_parts["rollout"].bytes / new}  # a decoding step
    moved |= {name: part.bytes for name, part in all_parts.items() if name != "rollout"}
    copied = {name: copy_rate(min(size, 2**30), device) for name, size in moved.items()}
    limit = {
        name: max(part.flops / flops.get(name, torch.inf), part.bytes / copied[name])
        for name, part in all_parts.items()
    }
    return limit, {"flops_per_second": flops, "bytes_per_second": copied}
