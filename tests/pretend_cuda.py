"""A pretended GPU for tests: numbers are computed on the CPU, but each tensor knows on which device it would lie.

`with pretend_cuda.on(monkeypatch) as seen:` answers `.device`, `.is_cuda`, `.to("cuda")` and `device="cuda"`, and does
with each operator, in backward and in fused optimizers too, what a CUDA build would do: it refuses tensors on
different devices, and counts in `seen.waits` what makes the host wait, the copy of a Python list to the GPU included.
A CUDA graph records operators, whose effects are undone at its end, refuses what a real capture refuses, and replays
them on the very same memory. What it cannot show: kernels, speed, memory, torch.compile.
"""

import contextlib
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CPU, aten, T, ROOT = torch.device("cpu"), torch.ops.aten, torch.Tensor, str(Path(__file__).parent.parent)
NOW = SimpleNamespace(device=0, ambient=CPU, graph=None, moving=False, seen=None)  # ambient: where new tensors lie
GETTERS = {getattr(T, name).__get__: name for name in ("device", "is_cuda", "is_cpu")}
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
CROSSING = {aten.copy_.default, aten._to_copy.default}


class Forbidden(RuntimeError): ...


def line():
    frames = [f for f in traceback.extract_stack(limit=40) if f.filename.startswith(ROOT) and f.filename != __file__]
    return f"{frames[-1].filename[len(ROOT) + 1 :]}:{frames[-1].lineno}" if frames else "?"


def wait(what):
    if NOW.graph is not None:
        raise Forbidden(f"{what} makes the host wait during a capture ({line()})")
    NOW.seen.waits.append(f"{line()} {what}")


def full(device):
    device = torch.device(device)
    return torch.device("cuda", NOW.device) if device.type == "cuda" and device.index is None else device


def tensors_in(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, T) and not t.is_meta]


def device_of(t):
    return t.device if t.is_meta else getattr(t.untyped_storage(), "_pretended", CPU)


def lay(tree, device):
    for t in tensors_in(tree) if device.type == "cuda" else ():
        t.untyped_storage()._pretended = device
    return tree


def key(t):
    return t.untyped_storage()._cdata


def move(t, device, dtype=None, copy=False):
    device, dtype = full(device), dtype or t.dtype
    with torch._C.DisableTorchFunction():
        if device_of(t) == device and not copy and dtype == t.dtype:
            return t
        if device_of(t) != device and "cuda" in (device.type, device_of(t).type):
            wait(f"copy {device_of(t)} -> {device}")
        ambient, NOW.ambient, NOW.moving = NOW.ambient, CPU, True
        try:
            return t.to("meta") if device.type == "meta" else lay(t.to(dtype, copy=True), device)
        finally:
            NOW.ambient, NOW.moving = ambient, False


class Functions(TorchFunctionMode):
    """What a caller in Python sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in GETTERS:
            device = device_of(args[0])
            return device if GETTERS[func] == "device" else device.type == GETTERS[func][3:]
        if func is T.to:
            given = [*args[1:], kwargs.get("device"), kwargs.get("dtype")]
            device = next((value for value in given if isinstance(value, str | torch.device)), None)
            if device is not None:
                dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
                return move(args[0], device, dtype, kwargs.get("copy", False))
        if func is T.tolist and device_of(args[0]).type == "cuda":
            wait("tolist")
        if func is T.__deepcopy__:
            return lay(func(*args, **kwargs), device_of(args[0]))
        device, ambient, tensors = kwargs.get("device"), NOW.ambient, tensors_in((args, kwargs))
        device = full(device) if device is not None else CPU
        if "cuda" in (device.type, *(device_of(t).type for t in tensors)):
            NOW.ambient = device if device.type == "cuda" else next(d for d in map(device_of, tensors) if d != CPU)
        if device.type == "cuda":
            kwargs["device"] = "cpu"
            if func in (torch.tensor, torch.as_tensor) and not tensors:
                wait("upload")
        try:
            return lay(func(*args, **kwargs), device)
        finally:
            NOW.ambient = ambient


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = tensors_in((args, kwargs := kwargs or {}))
        homes = {device_of(t) for t in tensors} - {CPU}
        home, strangers = next(iter(homes), None), [t for t in tensors if homes and device_of(t) == CPU]
        floats = any(t.is_floating_point() for t in strangers)
        if func in INDEXING and strangers and not floats and device_of(args[0]) != CPU:
            wait("indices on the CPU")
        elif func not in CROSSING and (len(homes) > 1 or any(t.ndim for t in strangers)):
            raise Forbidden(f"{func}: {[(tuple(t.shape), str(device_of(t))) for t in tensors]} ({line()})")
        if home and (func in WAITS or func is aten.copy_.default and strangers):
            wait(func.name())
        if home and func in INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            wait(f"{func.name()} with a boolean mask")
        home = home or (None if tensors else NOW.ambient)
        if NOW.graph is not None and NOW.graph.device == (home or NOW.ambient):
            return NOW.graph.record(func, args, kwargs, tensors)
        return settle(func(*args, **kwargs), tensors, home)


def settle(out, tensors, home):
    if home and not NOW.moving:
        old = {key(t) for t in tensors}
        lay([t for t in tensors_in(out) if key(t) not in old], home)
    return out


class Graph:
    """torch.cuda.CUDAGraph, as far as its rules go."""

    def __init__(self):
        self.kernels, self.saved, self.number = [], {}, len(NOW.seen.captures)
        NOW.seen.captures.append(0)  # how often it was replayed

    def record(self, func, args, kwargs, tensors):
        """Runs the operator, keeps what it overwrites, and notes it with its very tensors if it is no view."""
        arguments = func._schema.arguments
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(arguments)]
        written = tensors_in([v for v, a in zip(given, arguments) if a.alias_info and a.alias_info.is_write])
        for t in written:
            if key(t) not in self.saved:
                self.saved[key(t)] = t.untyped_storage(), t.untyped_storage().clone()
        out, old = settle(func(*args, **kwargs), tensors, self.device), {key(t) for t in tensors}
        results = [None if key(t) in old else t for t in tensors_in(out)]
        if written or any(t is not None for t in results):
            self.kernels.append((func, args, kwargs, results))
        return out

    def replay(self):
        NOW.seen.captures[self.number] += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for func, args, kwargs, results in self.kernels:
                for t, result in zip(tensors_in(func(*args, **kwargs)), results):
                    if result is not None:
                        result.copy_(t)


@contextlib.contextmanager
def capturing(graph):
    NOW.graph, graph.device = graph, torch.device("cuda", NOW.device)
    try:
        yield
    finally:
        NOW.graph = None
        with _disable_current_modes():
            for storage, old in graph.saved.values():
                storage.copy_(old)


@contextlib.contextmanager
def current(device):
    before, NOW.device = NOW.device, full(device).index
    yield
    NOW.device = before


def set_device(device):
    NOW.device = torch._utils._get_device_index(device)  # as torch: refuses "cuda" without a number


@contextlib.contextmanager
def on(monkeypatch, capability=(9, 0), devices=2, free=70e9):
    NOW.device, NOW.graph, NOW.ambient, NOW.seen = 0, None, CPU, SimpleNamespace(waits=[], captures=[])
    fakes = dict(is_available=True, device_count=devices, get_device_capability=capability)
    fakes |= dict(mem_get_info=(free, free))
    fakes = {name: lambda *args, answer=answer: answer for name, answer in fakes.items()}
    fakes |= dict(get_device_name=lambda device: "pretended GPU", current_device=lambda: NOW.device)
    fakes |= dict(set_device=set_device, device=current, CUDAGraph=Graph, graph=capturing)
    fakes |= dict(is_current_stream_capturing=lambda: NOW.graph is not None)  # torch.optim asks one of the two
    stream = SimpleNamespace(is_capturing=fakes["is_current_stream_capturing"])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    fakes |= dict(get_device_properties=lambda device: SimpleNamespace(total_memory=24e9))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with Operators(), Functions():
        yield NOW.seen
