"""The snapshot's memory: an image of every file to be, shared with the writer process, filled at the speed of memcpy.

A few slabs hold all images, each at a page boundary. They are anonymous memory files, so they leave nothing behind and
a small /dev/shm does not limit them. They are kept between saves: fresh memory costs several times a copy.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckptplan.errors import SaveFailedError
from ckptplan.state.files import PAGE_BYTES, FilePlan
from ckptplan.state.parallel import run_all, try_start
from ckptplan.state.spans import Span
from ckptplan.units import MIB, format_bytes

_PIECE_BYTES = 4 * MIB  # of one copy; small enough that two threads end together
_FEWEST_BYTES_FOR_TWO_SLABS = 64 * MIB
_MOST_SLABS = 4
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_numbers = itertools.count()


@dataclass
class Slab:
    """One piece of shared memory; `descriptor` is -1 where it is private to this process."""

    key: str
    size_bytes: int
    descriptor: int
    mapping: mmap.mmap | None = None

    def address(self) -> int:
        """Where the mapping starts; maps on first use."""
        if self.mapping is None:
            self.mapping = mmap.mmap(self.descriptor, self.size_bytes)
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def view(self) -> memoryview:
        """The bytes of the slab."""
        self.address()
        assert self.mapping is not None
        return memoryview(self.mapping)

    def close(self) -> None:
        """Gives the memory back as soon as nobody else has it mapped."""
        self.mapping = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Arena:
    """Slabs that hold the images of the files of one save after the other."""

    def __init__(self, *, shared: bool) -> None:
        self.is_shared = shared
        self.slabs: list[Slab] = []
        self.images: list[tuple[int, int]] = []  # per file: number of its slab, offset in it
        self._populating: threading.Thread | None = None

    def fit(self, plans: Sequence[FilePlan]) -> None:
        """Makes room for these files; slabs that are big enough are used again. SaveFailedError: no memory."""
        self.wait_for_population()
        sizes, self.images = _place(plans)
        for number, size in enumerate(sizes):
            if number < len(self.slabs) and self.slabs[number].size_bytes >= size:
                continue
            if number < len(self.slabs):
                self.slabs[number].close()
            slab = _make_slab(size, shared=self.is_shared)
            self.slabs[number : number + 1] = [slab]
        for slab in self.slabs[len(sizes) :]:
            slab.close()
        del self.slabs[len(sizes) :]

    def growth_bytes(self, plans: Sequence[FilePlan]) -> int:
        """Memory that `fit` would take from the system."""
        sizes, _ = _place(plans)
        have = [slab.size_bytes for slab in self.slabs] + [0] * len(sizes)
        return sum(size for size, existing in zip(sizes, have, strict=False) if size > existing)

    def fill(
        self, plans: Sequence[FilePlan], spans: Sequence[Span], threads: int, filled: Callable[[int], None]
    ) -> None:
        """Copies headers and spans; calls `filled(file)` as each file is complete. Returns when all are."""
        self.wait_for_population()
        if any(slab.mapping is None for slab in self.slabs):
            self._fill_fresh(plans, spans, threads, filled)
            populating = threading.Thread(target=self._populate, daemon=True, name="ckptplan-state-populate")
            self._populating = populating if try_start(populating) else None  # else the next save faults the pages in
            return
        for file, plan in enumerate(plans):
            self._fill_warm(file, plan, spans, threads)
            filled(file)

    def image(self, file: int, plan: FilePlan) -> memoryview:
        """The bytes of one file, padded to whole pages."""
        slab, offset = self.images[file]
        return self.slabs[slab].view()[offset : offset + _padded(plan.size_bytes)]

    def close(self) -> None:
        """Frees the memory."""
        self.wait_for_population()
        for slab in self.slabs:
            slab.close()
        self.slabs, self.images = [], []

    def wait_for_population(self) -> None:
        """Waits for the background mapping of fresh memory, which must not run beside a close."""
        if self._populating is not None:
            self._populating.join()
            self._populating = None

    def _fill_fresh(
        self, plans: Sequence[FilePlan], spans: Sequence[Span], threads: int, filled: Callable[[int], None]
    ) -> None:
        """By `pwrite`: fresh pages then need no zeroing and no fault, and no memory is an error instead of a signal."""

        def fill(file: int) -> None:
            plan = plans[file]
            slab, offset = self.images[file]
            descriptor = self.slabs[slab].descriptor
            _pwrite_all(descriptor, memoryview(plan.header), offset)
            for index, position in zip(plan.spans, plan.offsets, strict=True):
                span = spans[index]
                if span.size_bytes:
                    _pwrite_all(descriptor, memory_of(span), offset + position)
            filled(file)

        def fill_lane(files: list[int]) -> None:
            for file in files:
                fill(file)

        if any(slab.descriptor < 0 for slab in self.slabs):
            for file, plan in enumerate(plans):
                self._fill_warm(file, plan, spans, threads)
                filled(file)
            return
        # One thread per slab: the system lets only one write into a memory file at a time.
        lanes: dict[int, list[int]] = {}
        for file, (slab, _) in enumerate(self.images):
            lanes.setdefault(slab, []).append(file)
        run_all(fill_lane, lanes.values(), threads)

    def _fill_warm(self, file: int, plan: FilePlan, spans: Sequence[Span], threads: int) -> None:
        slab, offset = self.images[file]
        base = self.slabs[slab].address() + offset
        ctypes.memmove(base, plan.header, len(plan.header))
        pieces: list[tuple[int, int, int]] = []
        for index, position in zip(plan.spans, plan.offsets, strict=True):
            span = spans[index]
            if span.address:
                pieces.append((base + position, span.address, span.size_bytes))
            elif span.size_bytes:
                view = self.slabs[slab].view()[offset + position : offset + position + span.size_bytes]
                copy_to(span, view)
        copy_pieces(pieces, threads)

    def _populate(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for slab in self.slabs:
            # Where the system does not know the advice, the next save faults the pages in.
            libc.madvise(ctypes.c_void_p(slab.address()), ctypes.c_size_t(slab.size_bytes), _POPULATE_WRITE)


def copy_pieces(pieces: Sequence[tuple[int, int, int]], threads: int) -> None:
    """Copies (target address, source address, bytes) each; with two threads from one queue of small pieces."""
    total = sum(size for _, _, size in pieces)
    if threads < 2 or total < 2 * _PIECE_BYTES:
        for target, source, size in pieces:
            ctypes.memmove(target, source, size)
        return
    small = (
        (target + start, source + start, min(_PIECE_BYTES, size - start))
        for target, source, size in pieces
        for start in range(0, size, _PIECE_BYTES)
    )
    run_all(lambda piece: ctypes.memmove(*piece), small, threads)


def dense_on_cpu(span: Span) -> torch.Tensor:
    """The values of a span as a dense CPU tensor; the span's own memory where it is that already."""
    assert span.source is not None
    return span.source.contiguous().cpu()


def memory_of(span: Span) -> memoryview:
    """The bytes of a span; of its own memory where that is dense and on the CPU, else of a copy."""
    dense = None if span.address else dense_on_cpu(span)
    address = span.address if dense is None else dense.data_ptr()
    array = (ctypes.c_char * span.size_bytes).from_address(address)
    array._keep_alive = dense  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def copy_to(span: Span, target: memoryview) -> None:
    """Copies a span that cannot be copied by address (strided, or on another device) into `target`."""
    assert span.source is not None
    view = torch.frombuffer(target, dtype=torch.uint8)
    if view.data_ptr() % span.source.itemsize == 0:
        torch.frombuffer(target, dtype=span.source.dtype).view(span.source.shape).copy_(span.source)
        return
    dense = dense_on_cpu(span)
    ctypes.memmove(view.data_ptr(), dense.data_ptr(), span.size_bytes)


def _place(plans: Sequence[FilePlan]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of the slabs, and (slab, offset) of each file: one slab for little, up to four of about equal size."""
    total = sum(_padded(plan.size_bytes) for plan in plans)
    count = min(_MOST_SLABS, len(plans)) if total > _FEWEST_BYTES_FOR_TWO_SLABS else min(1, len(plans))
    sizes = [0] * count
    images = []
    for plan in plans:
        slab = min(range(count), key=sizes.__getitem__)
        images.append((slab, sizes[slab]))
        sizes[slab] += _padded(plan.size_bytes)
    return sizes, images


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _make_slab(size_bytes: int, *, shared: bool) -> Slab:
    key = f"{os.getpid()}-{next(_numbers)}"
    try:
        if not shared:
            return Slab(key, size_bytes, -1, mmap.mmap(-1, size_bytes))
        descriptor = os.memfd_create(key, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        return Slab(key, size_bytes, descriptor)
    except OSError as error:
        message = f"no memory for a snapshot of {format_bytes(size_bytes)}: {error}; mode='sync' needs none"
        raise SaveFailedError(message, errno=error.errno) from error


def _pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset += written
        data = data[written:]
