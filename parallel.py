"""More than one process: each samples and grades its share of the prompts, gradients are added up.

NPROC=2 starts them on this machine; torchrun, across machines, starts them itself and says so in the environment.
"""

import atexit
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist

NPROC = os.environ.get("NPROC", 1) if os.path.basename(sys.argv[0]) == "train.py" else 1  # tools are one process
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", NPROC))


def start(device):
    if WORLD == 1:
        return
    if "RANK" not in os.environ:
        launch()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def places(world):
    """What torchrun would say in the environment of each of `world` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    where |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def launch():
    """The same program again for every other rank, in a session of its own: this one hears the signals for all."""
    first, *others = places(WORLD)
    os.environ.update(first)
    for place in others:
        other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **place}, start_new_session=True)
        atexit.register(other.terminate)


def lost(error):
    """What to say of an error that comes from the end of another process; any other is raised again."""
    if WORLD > 1 and (isinstance(error, dist.DistError) or "onnection" in str(error)):
        return "another process of this run has ended, see above; the same command goes on from the last checkpoint."
    raise error


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


def total_gradients(parameters):
    """The sums of the gradients over all processes, in one call: many small ones take several times as long."""
    if WORLD == 1:
        return
    learning = [p for p in parameters if p.grad is not None]
    sums = total(torch.cat([p.grad.flatten() for p in learning]))
    for p, part in zip(learning, sums.split([p.numel() for p in learning])):
        p.grad = part.view_as(p)


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
