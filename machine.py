"""Settings of the machine that make the same numbers faster."""

import contextlib
import ctypes
import time

import torch
import torch.nn.functional as F

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def prepare():
    """For a program that lives from CPU tensors. Call it once, at its start."""
    torch.set_flush_denormal(True)  # sharp attention is full of denormal numbers, which make a CPU half as fast
    # glibc gives large blocks back to the kernel, which clears each page anew for the next tensor: a cache of 100 MB
    # then takes four times as long to grow. Let it keep them. (Other libraries than glibc do as they like.)
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def fastest_dtype(device):
    """For matrix products: bf16 on CUDA; on CPU what multiplies faster here, since only some have bf16 units."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(2048, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            F.linear(x, w)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return min(seconds, key=seconds.get)
