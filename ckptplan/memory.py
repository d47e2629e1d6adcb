"""Meters: how many bytes are alive while a piece of code runs.

One protocol, three meters. A meter is a context manager; inside it ``mark(name)`` cuts the time into
stretches; afterwards ``level(name)`` is the bytes alive at a mark, ``peak(a, b)`` the most alive
between two marks and ``rise(a, b)`` the most behind an allocation between them, all relative to entering
the meter. Never take time and memory in the same run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_memory.py

from ckptplan.kernels import ALLOCATOR_ROUNDING_BYTES, workspace_bytes
from ckptplan.trees import given_storages, storage_key, tensors_in

AS_ON_CUDA = "as on cuda"  # the meter that counts tensors as a CUDA device would hold them
_MARK = "ckptplan mark "


class MemoryMeter(Protocol):
    """What measuring code needs of a meter."""

    name: str

    def __enter__(self) -> MemoryMeter: ...
    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None: ...
    def mark(self, name: str) -> None: ...
    def level(self, name: str) -> int: ...
    def peak(self, start: str, end: str) -> int: ...
    def rise(self, start: str, end: str) -> int | None: ...
    def marks(self, start: str, end: str) -> set[str]: ...


class _Marks:
    """Levels at marks and peaks between neighbouring marks; what every meter fills in."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.levels: list[int] = []
        self.rises_before: list[int | None] = []  # most bytes alive behind an allocation since the previous mark

    def add(self, name: str, level_bytes: int, rise_bytes: int | None) -> None:
        self.names.append(name)
        self.levels.append(level_bytes)
        self.rises_before.append(rise_bytes)

    def level(self, name: str) -> int:
        return self.levels[self.names.index(name)]

    def peak(self, start: str, end: str) -> int:
        first, last = self.names.index(start), self.names.index(end)
        rises = self.rises_before[first + 1 : last + 1]
        return max([self.levels[first], *(rise for rise in rises if rise is not None)])

    def marks(self, start: str, end: str) -> set[str]:
        """The names from one mark to another."""
        return set(self.names[self.names.index(start) : self.names.index(end) + 1])

    def rise(self, start: str, end: str) -> int | None:
        """None where nothing was allocated.

        A mark made while memory is being freed may stand before that or behind it; this says the same for both.
        """
        first, last = self.names.index(start), self.names.index(end)
        return max((rise for rise in self.rises_before[first + 1 : last + 1] if rise is not None), default=None)


class CpuAllocatorMeter(_Marks):
    """Real bytes of the CPU allocator, temporaries inside kernels included, from the profiler's memory events."""

    name = "cpu"

    def __enter__(self) -> CpuAllocatorMeter:
        # torch 2.13's tracer prints a line to stderr at every start and stop unless told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profiler.profile(use_cpu=True, profile_memory=True)
        self._profiler.__enter__()
        return self

    def mark(self, name: str) -> None:
        with profiler.record_function(_MARK + name):
            pass

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self._profiler.__exit__(kind, error, trace)
        results = self._profiler.kineto_results
        if results is None or kind is not None:
            return
        events: Any = results.events()  # torch's stubs lack the fields of both
        roots: Any = results.experimental_event_tree()
        marks = [(e.start_ns(), e.name()[len(_MARK) :], 0) for e in events if e.name().startswith(_MARK)]
        level = 0
        rise: int | None = None
        held: dict[int, int] = {}  # bytes by address, of what was given inside
        for _, what, size in sorted([*marks, *_cpu_memory(roots)], key=lambda moment: moment[0]):
            if isinstance(what, str):
                self.add(what, level, rise)
                rise = None
            elif size > 0:
                held[what] = size
                level += size
                rise = level if rise is None else max(rise, level)
            else:  # of memory from before torch tells by chance: where it remembers something at that address
                level -= held.pop(what, 0)


def _cpu_memory(roots: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time in ns, address, bytes) of what the CPU's allocator gave (above 0) and took back."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.typed[1]
        if hasattr(fields, "alloc_size") and fields.device.type == "cpu":
            yield event.start_time_ns, fields.ptr, fields.alloc_size


class CudaAllocatorMeter(_Marks):
    """Bytes that PyTorch's CUDA caching allocator has handed out (its 512-byte rounding included).

    Resets the device's peak statistics. ``reserved_peak_bytes`` is what the allocator held in total. Its ``rise`` has
    the level at its first mark in it, which those statistics do not tell apart: it is never too low.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.reserved_peak_bytes = 0

    def __enter__(self) -> CudaAllocatorMeter:
        torch.cuda.synchronize(self.device)
        self._start = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def mark(self, name: str) -> None:
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self._start
        self.add(name, torch.cuda.memory_allocated(self.device) - self._start, peak)
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        return None


class LiveStorageMeter(_Marks):
    """Bytes of tensors made by operators and still alive; sees no temporaries inside kernels.

    Needs no device: it counts fake tensors as well as real ones.

    Args:
        as_on_cuda: count what a CUDA device would take for the same tensors: sizes rounded as its allocator does it,
            and while an operator runs its kernel's workspace.
    """

    def __init__(self, *, as_on_cuda: bool = False) -> None:
        super().__init__()
        self.name = AS_ON_CUDA if as_on_cuda else "live"
        self._mode = _CudaStorages() if as_on_cuda else LiveStorages()

    def __enter__(self) -> LiveStorageMeter:
        self._mode.__enter__()
        return self

    def mark(self, name: str) -> None:
        self.add(name, self._mode.level_bytes, self._mode.peak_bytes or None)
        self._mode.peak_bytes = 0

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self._mode.__exit__(kind, error, trace)


class LiveStorages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.level_bytes = 0
        self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def _release(self, size_bytes: int) -> None:
        self.level_bytes -= size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = given_storages(args, kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage in self._known or storage_key(tensor) in given:
                continue
            self._known.add(storage)
            size_bytes = self.size_of(storage)
            self.level_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.level_bytes)
            weakref.finalize(storage, self._release, size_bytes)
        return out

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that the storage counts."""
        return storage.nbytes()


class _CudaStorages(LiveStorages):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self.level_bytes + workspace_bytes(func, args, out))
        return out

    def size_of(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // ALLOCATOR_ROUNDING_BYTES) * ALLOCATOR_ROUNDING_BYTES


def make_meter(device: torch.device | str, kind: str = "auto") -> MemoryMeter:
    """A fresh meter: "auto" (the device's own allocator), "cpu", "cuda", "live" or ``AS_ON_CUDA``.

    Raises:
        ValueError: an unknown kind, or an allocator meter that does not belong to the device.
    """
    device = torch.device(device)
    if kind == "auto":
        kind = device.type if device.type in ("cpu", "cuda") else "live"
    if kind in ("live", AS_ON_CUDA):
        return LiveStorageMeter(as_on_cuda=kind == AS_ON_CUDA)
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"memory={kind!r} is not a meter; expected one of auto, cpu, cuda, live, off")
    if kind != device.type:
        raise ValueError(f"memory={kind!r} cannot measure device {device}; use memory='auto' or 'live'")
    return CudaAllocatorMeter(device) if kind == "cuda" else CpuAllocatorMeter()
