"""Several processes: each samples and grades its share of the prompts, and gradients are summed.

NPROC=2 starts them on this machine. torchrun, across machines, starts them itself and says so in the environment.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nanorook import hardware
from nanorook.settings import fail

OTHERS = []  # the processes that launch() has started, each with the file of what it has written to stderr
LEAD = "NANOROOK_LEAD"  # the variable that tells them the id of the process that has started them
JOIN_WITHIN = timedelta(minutes=2)  # in which all processes have to start


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def in_words():
    threads = f" of {torch.get_num_threads()} thread(s) each" if world() > 1 else ""
    return f"{world()} process(es){threads}"


def log(text):
    """Prints a text once, and not once for each process."""
    if rank() == 0:
        print(text, flush=True)


def start(device, processes):
    """Joins the other processes, after starting them if necessary; returns the device of this one."""
    if processes > 1 and device.index is not None:
        fail(f"DEVICE={device} names one GPU, but NPROC={processes}; set DEVICE=cuda, and choose GPUs with "
             "CUDA_VISIBLE_DEVICES.")  # fmt: skip
    if processes > 1 and not launched():
        if device.type == "cuda" and processes > (found := torch.cuda.device_count()):
            fail(f"NPROC={processes}, but this machine has {found} GPU(s); NPROC may be at most {found}.")
        launch(processes)
    if device.type == "cuda":
        index = os.environ["LOCAL_RANK"] if launched() else device.index or 0
        device = hardware.choose_device(f"cuda:{index}")
        torch.cuda.set_device(device)
    if launched():
        if LEAD in os.environ:
            threading.Thread(target=end_with_lead, daemon=True).start()
        if device.type == "cpu":
            share_cores()
        join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def share_cores():
    """Divides this machine's cores among its processes, unless OMP_NUM_THREADS is set. Under torchrun it is ignored, as
    torchrun sets it itself, to one thread for each process."""
    by_torchrun = dist.is_torchelastic_launched()
    if by_torchrun or "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() if by_torchrun else torch.get_num_threads()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def join(backend):
    """Waits for the other processes, but not for ever for one that has ended before."""
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=JOIN_WITHIN))
    except dist.DistError as error:
        show_errors()
        fail(f"the processes of this run have not all started within {JOIN_WITHIN.seconds} seconds ({error}); "
             "check above whether one of them has ended, and start the run again.")  # fmt: skip
    # With Gloo, a process that has ended is noticed by its closed connection, so torch's limit of half an hour is not
    # needed, and making a start model may take longer. NCCL needs the limit.
    timeout = timedelta(days=30) if backend == "gloo" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def launched():
    """Whether the environment describes the other processes. RANK alone may belong to another program."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def launch(processes):
    """Starts this program again for every other rank, in a session of its own, so that Ctrl-C reaches this one alone.
    torchrun would pass it on, and 30 seconds later kill any process that is still in its step, before it has saved.
    What the others write to stderr is shown only if one of them ends the run: all of them give the same warnings."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))  # it outlives a change of Wi-Fi
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the usual way to die skips atexit
    atexit.register(kill_others)
    for rank in reversed(range(processes)):  # this process is rank 0, so its values are set last and stay
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))  # as torchrun would set them
        if rank > 0:
            environment = os.environ | {LEAD: str(os.getpid())}
            errors = tempfile.TemporaryFile()
            command = [sys.executable, *sys.argv]
            process = subprocess.Popen(command, start_new_session=True, env=environment, stderr=errors)
            OTHERS.append((process, errors))


def end_with_lead():
    """Ends this process when the one that has started it ends, even if that is killed and can tell nobody."""
    while os.getppid() == int(os.environ[LEAD]):
        time.sleep(1)
    os._exit(1)


def kill_others():
    """They have nothing to save."""
    for process, _ in OTHERS:
        process.kill()


def show_errors():
    """Shows what the processes that launch() has started have written to stderr."""
    for _, errors in OTHERS:
        errors.seek(0)
        print(errors.read().decode(errors="replace"), end="", file=sys.stderr, flush=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def another_has_ended(error):
    """Whether a process gets such an error when another one of its run has ended. Gloo's has no class of its own."""
    if world() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "connection" in str(error).lower()


def finish():
    if world() > 1:
        dist.destroy_process_group()


def total(tensor):
    """The tensor's sum over all processes, in place."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients(weights):
    """Sums the gradients over all processes, in one call: one call for each weight takes several times as long. A
    weight without a gradient gets one of zeros."""
    for p in weights:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if world() > 1:
        gradients = [p.grad for p in weights]
        vector_to_parameters(total(parameters_to_vector(gradients)), gradients)


def gather(items):
    """The lists of all processes, concatenated."""
    if world() == 1:
        return [*items]
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]
