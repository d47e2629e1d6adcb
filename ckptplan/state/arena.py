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
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from ckptplan.errors import SaveFailedError
from ckptplan.state.files import PAGE_BYTES, FilePlan
from ckptplan.state.parallel import run_all, try_start
from ckptplan.state.spans import Span
from ckptplan.units import MIB, format_bytes

_PIECE_BYTES = 4 * MIB  # of one thread's work; small enough that two threads end together
_FEWEST_BYTES_PER_COPY_FOR_TWO_THREADS = 64 * 1024  # below, they wait for each other's interpreter lock
_FEWEST_BYTES_FOR_TWO_SLABS = 64 * MIB
_MOST_SLABS = 4
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
_Copy = tuple[int, "int | bytes", int]  # target address, source (its address, or the bytes), number of bytes
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
        self._unwritten: set[int] = set()  # files in fresh memory, of which the system has given no page yet
        self._populating: threading.Thread | None = None
        self._copies_of: tuple[Sequence[FilePlan], Sequence[Span]] | None = None
        self._copies: list[list[list[_Copy]]] = []  # of the files of `_copies_of`: pieces of work of one or more copies

    def fit(self, plans: Sequence[FilePlan]) -> None:
        """Makes room for these files; slabs that are big enough are used again. SaveFailedError: no memory."""
        self.wait_for_population()
        sizes, images = _place(plans)
        if images != self.images:
            self.images, self._copies_of = images, None
            if self._unwritten:  # an earlier filling failed
                self._unwritten = set(range(len(plans)))
        for number, size in enumerate(sizes):
            if number < len(self.slabs) and self.slabs[number].size_bytes >= size:
                continue
            self._copies_of = None
            if number < len(self.slabs):
                self.slabs[number].close()
            slab = _make_slab(size, shared=self.is_shared)
            self.slabs[number : number + 1] = [slab]
            self._unwritten = set(range(len(plans)))
        for slab in self.slabs[len(sizes) :]:
            slab.close()
        del self.slabs[len(sizes) :]

    def growth_bytes(self, plans: Sequence[FilePlan]) -> int:
        """Memory that `fit` would take from the system."""
        sizes, _ = _place(plans)
        have = [slab.size_bytes for slab in self.slabs] + [0] * len(sizes)
        return sum(size for size, existing in zip(sizes, have, strict=False) if size > existing)

    def fill(
        self,
        plans: Sequence[FilePlan],
        spans: Sequence[Span],
        files: Set[int],
        threads: int,
        filled: Callable[[int], None],
    ) -> None:
        """Copies headers and spans of these files; calls `filled(file)` as each is complete. Returns when all are."""
        self.wait_for_population()
        if files & self._unwritten:
            self._fill_fresh(plans, spans, files, threads, filled)
            self._unwritten -= files
            if self._unwritten:
                return
            populating = threading.Thread(target=self._populate, daemon=True, name="ckptplan-state-populate")
            self._populating = populating if try_start(populating) else None  # else the next save faults the pages in
            return
        self._fill_warm(plans, spans, files, threads, filled)

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
        self,
        plans: Sequence[FilePlan],
        spans: Sequence[Span],
        files: Set[int],
        threads: int,
        filled: Callable[[int], None],
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
            self._fill_warm(plans, spans, files, threads, filled)
            return
        # One thread per slab: the system lets only one write into a memory file at a time.
        lanes: dict[int, list[int]] = {}
        for file, (slab, _) in enumerate(self.images):
            if file in files:
                lanes.setdefault(slab, []).append(file)
        run_all(fill_lane, lanes.values(), threads)

    def _fill_warm(
        self,
        plans: Sequence[FilePlan],
        spans: Sequence[Span],
        files: Set[int],
        threads: int,
        filled: Callable[[int], None],
    ) -> None:
        """By address, from one queue over all files; what has no address is copied here first, by the caller."""
        by_file = self._copies_for(plans, spans)
        copies = sum(len(piece) for pieces in by_file for piece in pieces)
        if sum(plan.size_bytes for plan in plans) < copies * _FEWEST_BYTES_PER_COPY_FOR_TWO_THREADS:
            threads = 1
        left = [len(pieces) for pieces in by_file]
        lock = threading.Lock()

        def copy(work: tuple[int, list[_Copy]]) -> None:
            file, piece = work
            for target, source, size in piece:
                ctypes.memmove(target, source, size)
            with lock:
                left[file] -= 1
                is_last = left[file] == 0
            if is_last:
                filled(file)

        waiting: list[tuple[int, list[_Copy]]] = []
        for file, plan in enumerate(plans):
            if file not in files:
                continue
            has_others = self._copy_others(file, plan, spans)
            waiting += [(file, piece) for piece in by_file[file]]
            if has_others:  # on a device as a rule: they take their time, so the file is handed over at once
                run_all(copy, waiting, threads)
                waiting = []
        run_all(copy, waiting, threads)

    def _copy_others(self, file: int, plan: FilePlan, spans: Sequence[Span]) -> bool:
        """Copies the spans of a file that have no address; whether there are any."""
        slab, offset = self.images[file]
        has_others = False
        for index, position in zip(plan.spans, plan.offsets, strict=True):
            span = spans[index]
            if span.size_bytes and not span.address:
                has_others = True
                start = offset + position
                copy_to(span, self.slabs[slab].view()[start : start + span.size_bytes])
        return has_others

    def _copies_for(self, plans: Sequence[FilePlan], spans: Sequence[Span]) -> list[list[list[_Copy]]]:
        """What to copy by address for each file: its header, and its spans in pieces of about equal size."""
        if self._copies_of is not None and self._copies_of[0] is plans and self._copies_of[1] is spans:
            return self._copies
        by_file = []
        for (slab, offset), plan in zip(self.images, plans, strict=True):
            base = self.slabs[slab].address() + offset
            copies: list[_Copy] = [(base, plan.header, len(plan.header))]
            for index, position in zip(plan.spans, plan.offsets, strict=True):
                address, size = spans[index].address, spans[index].size_bytes
                for start in range(0, size if address else 0, _PIECE_BYTES):
                    copies.append((base + position + start, address + start, min(_PIECE_BYTES, size - start)))
            by_file.append(list(_grouped(copies)))
        if all(span.source is None for span in spans):  # else it would keep tensors alive
            self._copies_of, self._copies = (plans, spans), by_file
        return by_file

    def _populate(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for slab in self.slabs:
            # The pages are there already. Reading maps them many at a time, and writable, as nothing watches for writes
            # to such memory. Where the system does not know the advice, the next save faults them in one by one.
            libc.madvise(ctypes.c_void_p(slab.address()), ctypes.c_size_t(slab.size_bytes), _POPULATE_READ)


def _grouped(copies: list[_Copy]) -> Iterator[list[_Copy]]:
    """Neighbours together until they are a piece of work."""
    group: list[_Copy] = []
    size_bytes = 0
    for copy in copies:
        if group and size_bytes + copy[2] > _PIECE_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(copy)
        size_bytes += copy[2]
    yield group


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
    descriptor = -1
    try:
        if not shared:
            return Slab(key, size_bytes, -1, mmap.mmap(-1, size_bytes))
        descriptor = os.memfd_create(key, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        return Slab(key, size_bytes, descriptor)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        message = f"no memory for a snapshot of {format_bytes(size_bytes)}: {error}"
        raise SaveFailedError(message, errno=error.errno) from error


def _pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset += written
        data = data[written:]
