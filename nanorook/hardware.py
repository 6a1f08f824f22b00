"""What a model runs on: the device, the processes, the dtype of its matrix products, whether it is compiled."""

import os
import shutil
import sysconfig
import timeit
from functools import partial
from pathlib import Path

import torch

from nanorook.settings import fail


def choose_device(name="auto"):
    """The device of this name; auto is cuda if there is a GPU."""
    gpus = torch.cuda.device_count()
    usable = ["cuda", *(f"cuda:{i}" for i in range(gpus)), "cpu"] if gpus else ["cpu"]
    if name not in ("auto", *usable):
        fail(f"this machine has no device {name} to train on; use {' or '.join(['auto', *usable])}.")
    return torch.device(usable[0] if name == "auto" else name)


def processes(wanted, device, large, before=0):
    """The number of processes from the value of the setting NPROC. auto: one, but on a CPU as many as a run had
    `before` it was stopped, and two for a new run of a small model on several cores. The threads of one process wait
    for each other at every matrix product, and if another program takes the core of one of them, all others wait;
    processes meet only a few times in a step. A user who sets OMP_NUM_THREADS has chosen threads."""
    if wanted != "auto":
        if not str(wanted).isdecimal() or int(wanted) < 1:
            fail(f"NPROC={wanted} is neither auto nor a whole number of at least 1.")
        return int(wanted)
    if device.type != "cpu":
        return 1
    several_cores = torch.get_num_threads() > 1  # torch's default is the number of physical cores
    return before or (2 if several_cores and not large and "OMP_NUM_THREADS" not in os.environ else 1)


def prepare(device="auto", dtype="auto"):
    """(device, dtype of matrix products) from the values of the settings DEVICE and DTYPE."""
    flush_denormals()
    device = choose_device(device)
    return device, fastest_dtype(device) if dtype == "auto" else getattr(torch, dtype)


def flush_denormals():
    """Treats denormal numbers as zero. Sharply peaked attention produces many of them, and they halve a CPU's speed."""
    torch.set_flush_denormal(True)


def fastest_dtype(device):
    """For matrix products: bf16 on a GPU that has units for it; on a CPU the one that multiplies faster there."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(2048, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(partial(torch.nn.functional.linear, x, w), number=1, repeat=5))
    return min(seconds, key=seconds.get)


# Memory in training. What a block keeps of a token for the backward pass is counted on a few tokens, as it depends on
# the architecture; attention also keeps its inputs, and a number for each head and key. For GPT-2 124M in bf16 this
# gives 461, 479 and 491 kB a token, logits included, for 40, 100 and 144 tokens after prompts of 60, where a forward
# pass on a CPU kept 449, 483 and 493. In the backward pass the logits have two gradients at once. Their fp32 copies
# are at most four of 2**28 numbers, see grpo.logprobs_and_entropy. A parameter needs its gradient, AdamW's moments,
# and one copy each for products and for sampling.


def kept_by_a_block(model, tokens):
    """The bytes that a block keeps for this many tokens and for its weights; attention adds only its inputs."""
    sizes, x = {}, torch.zeros(1, tokens, model.config.n_embd, device=model.wte.weight.device, requires_grad=True)

    def keep(x):
        x = x.detach()  # a graph that holds its own output would never be freed, nor would the weights
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = x, storage.nbytes()
        return x

    def attend(layer, *qkv):
        copies = [x.clone(memory_format=torch.contiguous_format) for x in qkv]
        for x in copies:
            keep(x)
        return copies[0]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.h[0](x, 0, attend)
    return sum(size for _, size in sizes.values())


def bytes_of_a_token(model, keys):
    c, width = model.config, model.dtype.itemsize
    more, fewer = kept_by_a_block(model, 96), kept_by_a_block(model, 32)
    block = (more - fewer) / 64 + width * c.n_head * keys
    blocks = block + 4 * c.n_layer * c.n_embd if model.recompute else c.n_layer * block  # one, and the inputs of all
    return blocks + 3 * width * c.vocab_size


def must_recompute(model, tokens, keys):
    """Whether the backward pass has to recompute blocks, which takes a third longer: it has to if what is kept for
    `tokens`, each of which attends to `keys` others, exceeds a third of the memory."""
    device = model.wte.weight.device
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return tokens * bytes_of_a_token(model, keys) > memory / 3


def microbatch_tokens(model, keys):
    """The most tokens of one microbatch, if a token attends to at most `keys` others. On CUDA, these are as many as fit
    into four fifths of the free memory, up to 32,768."""
    weight, parameters = model.wte.weight, sum(p.numel() for p in model.parameters())
    if not weight.is_cuda:
        return 4096
    free, _ = torch.cuda.mem_get_info(weight.device)
    room = 0.8 * free - 16 * parameters - 4 * 4 * 2**28
    return max(1, min(32768, int(room / bytes_of_a_token(model, keys))))


def compiles(wanted, device):
    """Whether torch.compile is used; `wanted` is 0, 1 or auto: on CUDA, if there are a C compiler and Python.h."""
    if wanted != "auto" or device.type != "cuda":
        return wanted == "1"
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    possible = headers and any(map(shutil.which, ("cc", "gcc", "clang")))
    if not possible:
        print("torch.compile is off, as it needs a C compiler and Python.h: apt install gcc python3-dev", flush=True)
    return possible
