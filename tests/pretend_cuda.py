"""A pretended GPU for tests: numbers are computed on the CPU, but each tensor knows on which device it would lie.

`with pretend_cuda.on(monkeypatch) as seen:` answers `.device`, `.is_cuda`, `.to("cuda")` and `device="cuda"`, and does
with each operator, in backward and in fused optimizers too, what a CUDA build would do: it refuses tensors on
different devices, and counts in `seen.waits` what makes the host wait, the copy of a Python list to the GPU included.
A CUDA graph records operators, whose effects are undone at its end, refuses what a real capture refuses, and replays
them on the very same memory. What it cannot show: kernels, speed, memory, torch.compile.
"""

import contextlib
import os
import sys
import weakref
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPU, aten, T = torch.device("cpu"), torch.ops.aten, torch.Tensor
NOW = SimpleNamespace(device=0, ambient=CPU, graph=None, moving=False, seen=None)  # ambient: where new tensors lie
GETTERS = {
    T.device.__get__: lambda device: device,
    T.is_cuda.__get__: lambda device: device.type == "cuda",
    T.is_cpu.__get__: lambda device: device.type == "cpu",
}
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
INDEXING = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
CROSSING = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.set_.source_Storage}


class DeviceError(RuntimeError):
    pass


class CaptureError(RuntimeError):
    pass


def place_in_project():
    """The innermost line of the project that is running."""
    frame = sys._getframe(2)
    while frame:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and name != __file__ and "site-packages" not in name:
            return f"{os.path.relpath(name, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def wait(what):
    if NOW.graph is not None:
        raise CaptureError(f"{what} makes the host wait during a capture ({place_in_project()})")
    NOW.seen.waits.append(f"{place_in_project()} {what}")


def full(device):
    device = torch.device(device)
    return torch.device("cuda", NOW.device) if device.type == "cuda" and device.index is None else device


def device_of(t):
    return t.device if t.is_meta else getattr(t.untyped_storage(), "_pretended", CPU)


def lay(t, device):
    if isinstance(t, T) and not t.is_meta and device.type == "cuda":
        t.untyped_storage()._pretended = device
    return t


def key(t):
    return t.untyped_storage()._cdata


def move(t, device, dtype=None, copy=False):
    device = full(device)
    with torch._C.DisableTorchFunction():
        if device_of(t) == device and not copy and dtype in (None, t.dtype):
            return t
        if device_of(t) != device and "cuda" in (device.type, device_of(t).type):
            wait(f"copy {device_of(t)} -> {device}")
        ambient, NOW.ambient, NOW.moving = NOW.ambient, CPU, True
        try:
            if device.type == "meta":
                return t.to("meta")
            return lay(t.clone() if dtype in (None, t.dtype) else t.to(dtype), device)
        finally:
            NOW.ambient, NOW.moving = ambient, False


class Functions(TorchFunctionMode):
    """What a caller in Python sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in GETTERS:
            return GETTERS[func](device_of(args[0]))
        if func in (T.cuda, T.cpu):
            return move(args[0], "cuda" if func is T.cuda else "cpu")
        if func is T.to:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            for value in args[1:]:
                device = value if isinstance(value, str | torch.device) else device
                dtype = value if isinstance(value, torch.dtype) else dtype
            if device is not None:
                return move(args[0], device, dtype, kwargs.get("copy", False))
        if func is T.tolist and device_of(args[0]).type == "cuda":
            wait("tolist")
        if func is T.numpy and device_of(args[0]).type == "cuda":
            raise DeviceError("can't convert a cuda tensor to numpy")
        if func is T.__deepcopy__:
            return lay(func(*args, **kwargs), device_of(args[0]))
        device, ambient = kwargs.get("device"), NOW.ambient
        if device is not None and full(device).type != "meta":
            device, kwargs["device"] = full(device), "cpu"
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, T)]
        near = [d for d in map(device_of, tensors) if d.type == "cuda"]
        NOW.ambient = device if isinstance(device, torch.device) else near[0] if near else CPU
        if func in (torch.tensor, torch.as_tensor) and NOW.ambient.type == "cuda" and not tensors:
            wait("upload")
            NOW.ambient = CPU
        try:
            out = func(*args, **kwargs)
        finally:
            NOW.ambient = ambient
        if isinstance(device, torch.device):
            tree_map(lambda t: lay(t, device), out)
        return out


class Operators(TorchDispatchMode):
    """What the device sees."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, T) and not t.is_meta]
        homes = {device_of(t) for t in tensors} - {CPU}
        if len(homes) > 1 and func not in CROSSING:
            raise DeviceError(f"{func}: tensors on {homes} ({place_in_project()})")
        home = next(iter(homes), None)
        strangers = [t for t in tensors if device_of(t) == CPU] if homes else []
        indices = all(t.dtype != torch.float for t in strangers) and func in INDEXING and device_of(args[0]) != CPU
        if strangers and indices:
            wait("indices on the CPU")
        elif func not in CROSSING and any(t.ndim for t in strangers):
            shapes = [(tuple(t.shape), str(device_of(t))) for t in tensors]
            raise DeviceError(f"{func}: {shapes} ({place_in_project()})")
        if home and (func in WAITS or func is aten.copy_.default and strangers):
            wait(func.name())
        if home and func in INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            wait(f"{func.name()} with a boolean mask")
        if NOW.graph is not None and (home or NOW.ambient).type == "cuda":
            return NOW.graph.record(func, args, kwargs, tensors, home or NOW.ambient)
        out = func(*args, **kwargs)
        settle(tensors, home, out)
        return out


def settle(tensors, home, out):
    """Where a result lies: with its inputs, or where the caller asked for."""
    home = home or (None if tensors else NOW.ambient)
    if home and not NOW.moving:
        old = {key(t) for t in tensors}
        [lay(t, home) for t in tree_flatten(out)[0] if isinstance(t, T) and not t.is_meta and key(t) not in old]


class Reference:
    """How a captured kernel knows a tensor: an address with sizes and strides. Only the graph's own memory is kept."""

    def __init__(self, t, own):
        storage = t.untyped_storage()
        self.storage = (lambda: storage) if own else weakref.ref(storage)
        self.view = t.storage_offset(), tuple(t.shape), tuple(t.stride())
        self.dtype = t.dtype

    def tensor(self):
        if self.storage() is None:
            raise CaptureError("a replay reads memory that is gone")
        return torch.empty(0, dtype=self.dtype).set_(self.storage(), *self.view)


class Graph:
    """torch.cuda.CUDAGraph, as far as its rules go."""

    def __init__(self):
        self.kernels, self.own, self.saved = [], set(), {}
        self.number = len(NOW.seen.captures)
        NOW.seen.captures.append(0)  # how often it was replayed

    def record(self, func, args, kwargs, tensors, home):
        if home != self.device:  # another device's stream: the kernel simply runs and is not captured
            out = func(*args, **kwargs)
            settle(tensors, home, out)
            return out
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)]
        written = [v for v, a in zip(given, func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        for t in tree_flatten(written)[0]:
            if key(t) not in self.own and key(t) not in self.saved:
                self.saved[key(t)] = t.untyped_storage(), t.untyped_storage().clone()
        stored = tree_map(lambda x: Reference(x, key(x) in self.own) if isinstance(x, T) else x, (args, kwargs))
        out, old = func(*args, **kwargs), {key(t) for t in tensors}
        results = [t for t in tree_flatten(out)[0] if isinstance(t, T)]
        new = [t for t in results if key(t) not in old]
        self.own |= {key(t) for t in new}
        settle(tensors, home, out)
        if written or new:  # all but views
            self.kernels.append((func, stored, [Reference(t, True) if key(t) not in old else None for t in results]))
        return out

    def replay(self):
        NOW.seen.captures[self.number] += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for func, stored, results in self.kernels:
                args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Reference) else x, stored)
                out = tree_flatten(func(*args, **kwargs))[0]
                for t, reference in zip((t for t in out if isinstance(t, T)), results):
                    if reference is not None:
                        reference.tensor().copy_(t)


@contextlib.contextmanager
def capturing(graph, **options):
    NOW.graph, graph.device = graph, torch.device("cuda", NOW.device)
    try:
        yield
    finally:
        NOW.graph = None
        with _disable_current_modes():
            for storage, old in graph.saved.values():
                storage.copy_(old)
        graph.saved = {}


@contextlib.contextmanager
def current(device):
    before, NOW.device = NOW.device, full(device).index
    try:
        yield
    finally:
        NOW.device = before


def set_device(device):
    NOW.device = torch._utils._get_device_index(device)  # as torch: refuses "cuda" without a number


@contextlib.contextmanager
def on(monkeypatch, capability=(9, 0), devices=2):
    NOW.device, NOW.graph, NOW.ambient = 0, None, CPU
    NOW.seen = SimpleNamespace(waits=[], captures=[])
    fakes = {
        "is_available": lambda: True, "device_count": lambda: devices, "current_device": lambda: NOW.device,
        "get_device_capability": lambda *a: capability, "get_device_name": lambda *a: "pretended GPU",
        "set_device": set_device, "device": current, "CUDAGraph": Graph, "graph": capturing,
        "max_memory_allocated": lambda *a: 0, "memory_reserved": lambda *a: 0,
        "reset_peak_memory_stats": lambda *a: None, "empty_cache": lambda: None, "synchronize": lambda *a: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with Operators(), Functions():
        yield NOW.seen
