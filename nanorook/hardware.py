"""What a model runs on: the device, the dtype of its matrix products, whether it is compiled."""

import shutil
import timeit
from functools import partial

import torch

from nanorook.settings import fail


def choose_device(name="auto"):
    """The device of that name; auto: cuda if there is one."""
    gpus = torch.cuda.device_count()
    usable = ["cuda", *(f"cuda:{i}" for i in range(gpus)), "cpu"] if gpus else ["cpu"]
    if name not in ("auto", *usable):
        fail(f"this machine has no device {name} to train on; use auto, {', '.join(usable)}.")
    return torch.device(usable[0] if name == "auto" else name)


def flush_denormals():
    """Sharp attention is full of denormal numbers, which make a CPU half as fast: from now on they are 0."""
    torch.set_flush_denormal(True)


def fastest_dtype(device):
    """For matrix products: bf16 where CUDA has units for it; on CPU what multiplies faster on this machine."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(2048, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(partial(torch.nn.functional.linear, x, w), number=1, repeat=5))
    return min(seconds, key=seconds.get)


def compiles(wanted, device):
    """Whether torch.compile is used; `wanted` is 0, 1 or auto: on CUDA, where there is a C compiler."""
    if wanted == "auto" and device.type == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        print("no C compiler was found, so torch.compile is left out: apt install gcc", flush=True)
        return False
    return wanted == "1" or wanted == "auto" and device.type == "cuda"
