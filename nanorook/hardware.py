"""What a model runs on: the device, the dtype of its matrix products, whether it is compiled."""

import resource
import shutil
import time

import torch

from nanorook.settings import refuse


def choose(name="auto"):
    """The device of that name; auto: cuda if there is one."""
    torch.set_flush_denormal(True)  # sharp attention is full of denormal numbers, which make a CPU half as fast
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        refuse(f"{name} is no device; use auto, cpu, cuda or cuda:1.")


def fastest_dtype(device):
    """For matrix products: bf16 where CUDA has units for it; on CPU what multiplies faster on this machine."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(2048, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return min(seconds, key=seconds.get)


def compiles(wanted, device):
    """Whether torch.compile is used; `wanted` is 0, 1 or auto: on CUDA, where there is a C compiler."""
    if wanted == "auto" and device.type == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        print("no C compiler was found, so torch.compile is left out: apt install gcc", flush=True)
        return False
    return wanted == "1" or wanted == "auto" and device.type == "cuda"


def peak_memory(device):
    """In GB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in KB
