"""Several processes: each samples and grades its share of the prompts, and gradients are summed.

NPROC=2 starts them on this machine. torchrun, across machines, starts them itself and says so in the environment.
"""

import atexit
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist

from nanorook.settings import refuse


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def start(device, processes):
    """Joins the other processes, or starts them first; returns this one's device."""
    device = torch.device(device)
    if processes > 1 and "RANK" not in os.environ:
        launch(processes)
    alone = "RANK" not in os.environ
    if device.type == "cuda":  # set_device wants a number
        device = torch.device("cuda", device.index or 0 if alone else int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            refuse(f"there is no {device}: this machine has {torch.cuda.device_count()} usable GPU(s).")
        torch.cuda.set_device(device)
    if alone:
        return device
    if device.type == "cpu" and ("OMP_NUM_THREADS" not in os.environ or os.environ.get("TORCHELASTIC_RUN_ID")):
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"])))  # torchrun sets it to 1
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def launch(processes):
    """Starts this program again for every other rank, in a session of its own: Ctrl-C reaches this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    for rank in reversed(range(processes)):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))  # as torchrun would set them
        if rank > 0:
            process = subprocess.Popen([sys.executable, *sys.argv], start_new_session=True)
            atexit.register(process.kill)  # it has nothing to save


def explain(error):
    """The sentence for an error that another process caused by ending; any other error is raised again."""
    if world() > 1 and (isinstance(error, dist.DistError) or "onnection" in str(error)):
        return "another process of this run has ended, see above; the same command goes on from the last checkpoint."
    raise error


def finish():
    if world() > 1:
        dist.destroy_process_group()


def total(tensor, how="sum"):
    """The tensor's sum, minimum or maximum over all processes, in place."""
    if world() > 1:
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[how])
    return tensor


def sum_gradients(parameters):
    """Sums the gradients over all processes, in one call: one call for each parameter takes several times as long."""
    if world() == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = total(torch.cat([g.flatten() for g in gradients]))
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def gather(items):
    """The lists of all processes, one after the other."""
    if world() == 1:
        return items
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def from_lead(value):
    """The value that the first process has."""
    box = [value]
    if world() > 1:
        dist.broadcast_object_list(box)
    return box[0]
