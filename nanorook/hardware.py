"""What a model runs on: the device, the processes, the dtype of its matrix products, whether it is compiled."""

import copy
import os
import shutil
import sysconfig
import timeit
from functools import partial
from pathlib import Path

import torch

from nanorook import lora
from nanorook.settings import fail

PROPOSED_RANK = 16  # of adapters, where a model does not fit
CPU_MICROBATCH = 4096  # tokens: more are not faster


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
# gives, with the logits, 461, 479 and 491 kB a token for 40, 100 and 144 tokens after prompts of 60, where a forward
# pass on a CPU kept 449, 483 and 493. In the backward pass the logits have two gradients at once, and a part of them
# has at most four copies in fp32, see grpo.logprobs_and_entropy. A weight in training needs 16 bytes beside itself: its
# gradient (4), AdamW's moments (8), and one copy each for products and for sampling (2 and 2 in bf16). In sampling it
# has no gradient. What LoRA freezes is kept once for all. `keys` is how many tokens one attends to: at most those of
# the longest prompt with its answer.


def try_a_block(model, tokens):
    """(the bytes that the first block keeps for the backward pass of this many tokens and for its weights, the keys and
    values that it makes). Attention adds only its inputs. A model without weights gets arbitrary numbers on the CPU."""
    block = model.h[0]
    if model.wte.weight.is_meta:
        block = copy.deepcopy(block).to_empty(device="cpu")
    device = next(block.parameters()).device
    x = torch.zeros(1, tokens, model.config.n_embd, device=device, requires_grad=True)
    kept, keys_and_values = {}, []

    def keep(x):
        x = x.detach()  # a graph that holds its own output would never be freed, nor would the weights
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = x, storage.nbytes()
        return x

    def attend(layer, *qkv):
        copies = [x.clone(memory_format=torch.contiguous_format) for x in qkv]
        for x in copies:
            keep(x)
        keys_and_values.extend(copies[1:])
        return copies[0]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x, 0, attend)
    return sum(size for _, size in kept.values()), sum(x.numel() for x in keys_and_values)


def bytes_of_a_token(model, keys):
    """What the blocks keep of a token that attends to `keys` others."""
    c, width = model.config, model.dtype.itemsize
    (more, _), (fewer, _) = try_a_block(model, 96), try_a_block(model, 32)
    block = (more - fewer) / 64 + width * c.n_head * keys
    return block + 4 * c.n_layer * c.n_embd if model.recompute else c.n_layer * block  # one, and the inputs of all


def bytes_of_logits(model, tokens, keys):
    """What the logits of a microbatch take, if an answer has at most `keys` tokens: a part has at least one row."""
    V = model.config.vocab_size
    logits = min(tokens * V, max(model.most_logits, keys * V))
    part = min(tokens * V, max(model.most_logits // 2, keys * V))
    return 3 * model.dtype.itemsize * logits + 4 * 4 * part


def count_trained(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def bytes_in_training(model, tokens, keys):
    """What an update takes beside the loaded model, in microbatches of `tokens`."""
    return 16 * count_trained(model) + tokens * bytes_of_a_token(model, keys) + bytes_of_logits(model, tokens, keys)


def bytes_in_sampling(model, rows, keys):
    """What sampling takes beside the loaded model: moments and copies, the cache, and the logits of one token."""
    _, of_a_token = try_a_block(model, 1)
    cache = rows * keys * model.config.n_layer * of_a_token * model.dtype.itemsize
    return 12 * count_trained(model) + cache + 4 * 4 * rows * model.config.vocab_size


def bytes_loaded(model, has_reference):
    """What the weights take: of the policy, and of a reference that does not share them."""
    width, count = model.dtype.itemsize, sum(p.numel() for p in model.parameters())
    if model.lora:
        adapters = count_trained(model)
        return width * (count - adapters) + 4 * adapters
    embedding = model.wte.weight.numel()  # of which the reference has one copy to read and one for its head
    return 4 * count + has_reference * (width * count + 4 * embedding * (width < 4))


def memory(device):
    """(free bytes, all bytes) of a GPU; on a CPU both are all of it, as other programs may end and free theirs."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical, physical


def most_logits(model):
    """How many numbers of logits are made at once: on CUDA as many as an eighth of the free memory has room for."""
    most, device = type(model).most_logits, model.wte.weight.device
    if device.type == "cpu":
        return most
    free, _ = memory(device)
    return min(most, int(free / 8 / (3 * model.dtype.itemsize + 8)))


def must_recompute(model, tokens, keys):
    """Whether the backward pass has to recompute blocks: it has to if what is kept for `tokens`, each of which attends
    to `keys` others, exceeds a third of the memory. Recomputing takes a third longer, and torch.compile leaves most of
    such a pass uncompiled."""
    _, everything = memory(model.wte.weight.device)
    return tokens * bytes_of_a_token(model, keys) > everything / 3


def microbatch_tokens(model, keys):
    """The most tokens of one microbatch, if a token attends to at most `keys` others. On CUDA, these are as many as fit
    into four fifths of the free memory, up to 32,768."""
    device = model.wte.weight.device
    if device.type == "cpu":
        return CPU_MICROBATCH
    room = 0.8 * memory(device)[0] - 16 * count_trained(model)
    each, tokens = bytes_of_a_token(model, keys), 32768
    while tokens > 1 and tokens * each + bytes_of_logits(model, tokens, keys) > room:
        tokens = int(tokens * 0.99)
    return tokens


def least_memory(model, has_reference, group, rows, new_tokens):
    """The bytes without which a model, which need not be loaded yet, cannot be trained: room for an update from one
    group of answers with `new_tokens` each, and for sampling `rows` of them. Prompts are not known yet."""
    model.recompute, model.most_logits = True, 0
    training = bytes_in_training(model, group * new_tokens, new_tokens)
    return bytes_loaded(model, has_reference) + max(training, bytes_in_sampling(model, rows, new_tokens))


def what_is_missing(model, device, *needs):
    """A sentence if a model, which is not loaded yet, cannot be trained on this device, otherwise empty; `needs` as in
    least_memory()."""
    needed, (free, _) = least_memory(model, *needs), memory(device)
    if needed <= free:
        return ""
    remedy = "take a smaller model, or lower GROUP_SIZE, MAX_NEW_TOKENS (the task's LIMITS) or BATCH_POSITIONS."
    if not model.lora:
        lora.add_empty(model, lora.Lora(PROPOSED_RANK, ""))
        with_adapters = least_memory(model, *needs)
        if with_adapters <= free:
            remedy = f"set LORA_RANK={PROPOSED_RANK}, which needs at least {with_adapters / 1e9:.1f} GB."
    return (f"this model needs at least {needed / 1e9:.1f} GB of memory, but {device} has only {free / 1e9:.1f} "
            f"available, so {(needed - free) / 1e9:.1f} GB are missing: {remedy}")  # fmt: skip


def compiles(wanted, device):
    """Whether torch.compile is used; `wanted` is 0, 1 or auto: on CUDA, if there are a C compiler and Python.h."""
    if wanted != "auto" or device.type != "cuda":
        return wanted == "1"
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    possible = headers and any(map(shutil.which, ("cc", "gcc", "clang")))
    if not possible:
        print("torch.compile is off, as it needs a C compiler and Python.h: apt install gcc python3-dev", flush=True)
    return possible
