"""More than one process, as torchrun starts them: each samples and grades its share, gradients are added up."""

import os

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


def start(device):
    if WORLD > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def wait():
    """Until all processes are here."""
    if WORLD > 1:
        dist.barrier()


def finish():
    if WORLD > 1:
        dist.destroy_process_group()


def total(tensor, how="sum"):
    """The tensor's sum (or amin, amax) over all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "amin": dist.ReduceOp.MIN, "amax": dist.ReduceOp.MAX}[how])
    return tensor


def gather(tensor):
    """The tensors of all processes, which have one shape, one after the other."""
    if WORLD == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def collect(items):
    """The lists of all processes, one after the other."""
    if WORLD == 1:
        return items
    lists = [None] * WORLD
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
