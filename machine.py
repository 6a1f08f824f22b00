"""What makes the same numbers faster on this machine."""

import time

import torch
import torch.nn.functional as F


def prepare():
    """Call it once, at a program's start."""
    torch.set_flush_denormal(True)  # sharp attention is full of denormal numbers, which make a CPU half as fast


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


def packs(device, dtype):
    """Whether this is a CPU where bf16 products are oneDNN's, and faster with matrices that lie in its own order."""
    here = torch.device(device).type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return here and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(weight):
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_product(x, weight, bias=None, activation="none"):
    """oneDNN's linear layer, activation included; what torch.compile makes of one with constant weights."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "tanh")
