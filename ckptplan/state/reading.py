"""Reads spans and checks their checksums: every wanted byte, and hardly any other.

Small neighbours are fetched together, big spans chunk by chunk, on two threads where there are two cores.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import xxhash

from ckptplan.state.attempt import checksum
from ckptplan.state.manifest import RankPart, StoredFile
from ckptplan.state.parallel import in_batches, run_all
from ckptplan.state.storage import ReadInto, Storage
from ckptplan.units import MIB

_RUN_BYTES = MIB  # neighbours are fetched together up to this size
_PIECE_BYTES = 8 * MIB  # of the work of one thread; a multiple of a chunk
FAR_THREADS = 8  # requests at a time to a storage that is far
_SPARSE_SHARE = 0.5  # of a file's bytes; below, read-ahead is switched off

Use = Callable[[int, int, memoryview], None]
"""(span, offset in the span, bytes read) -> None; from several threads."""
Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""span -> (first byte, one behind the last) in it."""
Target = Callable[[int], "memoryview | None"]
"""span -> the memory to read it into, or None for a buffer of the reader."""


@dataclass(frozen=True)
class _Run:
    """Bytes to be fetched with one read: [offset, offset + size) of the file; (span, offset in span, bytes) each."""

    offset_bytes: int
    size_bytes: int
    pieces: tuple[tuple[int, int, int], ...]


def num_threads() -> int:
    """Threads worth using for copying, hashing and reading: never more than two."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, usable)


def read_spans(
    storage: Storage,
    folder: str,
    part: RankPart,
    wanted: Iterable[int],
    *,
    target: Target,
    use: Use | None = None,
    check: bool = True,
    ranges: Ranges = MappingProxyType({}),
) -> list[str]:
    """Reads the wanted spans of one rank; returns what is wrong, one sentence each (a checksum, a missing file, ...).

    Args:
        folder: of the checkpoint, relative to the storage's location.
        target: where the bytes go. Without memory for a span they pass through a buffer, for `use` to look at.
        check: compare the checksums (and the header's).
        ranges: only these bytes of a span, which is then no more than checked.
    """
    least_bytes = _PIECE_BYTES if storage.is_far else _RUN_BYTES
    most_bytes = _step_bytes(part, check, storage.is_far)
    by_file: dict[int, list[int]] = {}
    for span in sorted(set(wanted), key=lambda span: (part.spans[span].file, part.spans[span].offset_bytes)):
        by_file.setdefault(part.spans[span].file, []).append(span)
    buffers = threading.local()
    readers = []
    work: list[tuple[_Reader, list[_Run]]] = []
    for number, spans in by_file.items():
        runs = _runs(part, spans, least_bytes, most_bytes, ranges)
        batches = list(in_batches(runs, lambda run: run.size_bytes, _PIECE_BYTES))
        wanted_bytes = sum(run.size_bytes for batch in batches for run in batch)
        sparse = wanted_bytes < _SPARSE_SHARE * part.files[number].size_bytes
        file = _OpenFile(storage, folder, part.files[number], users=max(1, len(batches)), sparse=sparse, check=check)
        readers.append(_Reader(part, file, target, use, check, buffers))
        work += [(readers[-1], batch) for batch in batches or [[]]]
    try:
        # One queue over all files: at the end of each file threads would wait for each other.
        run_all(lambda piece: piece[0].read(piece[1]), work, FAR_THREADS if storage.is_far else num_threads())
    finally:
        for reader in readers:
            reader.file.close()
    return [fault for reader in readers for fault in (*reader.file.faults, *sorted(reader.faults))]


def check_sizes(storage: Storage, folder: str, files: Iterable[StoredFile]) -> list[str]:
    """Faults of the files' presence and sizes; nothing is read."""
    faults = []
    listed: dict[str, dict[str, int]] = {}
    for file in files:
        inner, _, name = file.name.rpartition("/")
        try:
            if not storage.is_far:
                actual = storage.size_bytes(f"{folder}/{file.name}")
            else:  # one request for all
                if inner not in listed:
                    listed[inner] = storage.sizes(f"{folder}/{inner}".rstrip("/"))
                if name not in listed[inner]:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.name)
                actual = listed[inner][name]
        except OSError as error:
            faults.append(f"{file.name}: missing ({error.strerror or error})")
            continue
        if actual != file.size_bytes:
            faults.append(f"{file.name}: {actual} bytes instead of {file.size_bytes}")
    return faults


def _check_header(read_into: ReadInto, file: StoredFile) -> list[str]:
    header = bytearray(file.header_bytes)
    read_into(0, memoryview(header))
    return [] if checksum(header) == file.checksum else [f"{file.name}: the header does not match its checksum"]


class _OpenFile:
    """A file that is open from its first use to its last, so that few are open at a time. Its header is checked."""

    def __init__(
        self, storage: Storage, folder: str, stored: StoredFile, *, users: int, sparse: bool, check: bool
    ) -> None:
        self.stored = stored
        self.faults: list[str] = []
        self._storage, self._path = storage, f"{folder}/{stored.name}"
        self._reader = storage.reader(self._path, sparse=sparse)
        self._users, self._check = users, check
        self._lock = threading.Lock()
        self._state: Literal["new", "open", "closed"] = "new"
        self._read_into: ReadInto | None = None

    @contextmanager
    def use(self) -> Iterator[ReadInto | None]:
        """For one of the `users`; None when the file cannot be read, which is then among the faults."""
        with self._lock:
            if self._state == "new":
                self._open()
        try:
            yield self._read_into
        finally:
            with self._lock:
                self._users -= 1
                is_last = self._users == 0
            if is_last:
                self.close()

    def forget(self) -> bool:
        """Drops a copy that is not what the checkpoint holds; False where there is none."""
        return self._storage.forget(self._path)

    def close(self) -> None:
        """Twice is fine."""
        if self._state == "open":
            self._state, self._read_into = "closed", None
            self._reader.__exit__(None, None, None)

    def _open(self) -> None:
        try:
            self._read_into = self._reader.__enter__()
            self._state = "open"
            if self._check:
                faults = _check_header(self._read_into, self.stored)
                self.faults += _check_header(self._read_into, self.stored) if faults and self.forget() else faults
        except OSError as error:
            self.faults.append(f"{self.stored.name}: {error.strerror or error}")
            self.close()
            self._state = "closed"


def _step_bytes(part: RankPart, check: bool, is_far: bool) -> int:
    """Of one read of a big span, in whole chunks: about 1 MiB, hashed while it is in the cache; more from afar."""
    wanted = _PIECE_BYTES if is_far or not check else _RUN_BYTES
    return max(1, wanted // part.chunk_bytes) * part.chunk_bytes


def _runs(part: RankPart, spans: Sequence[int], least_bytes: int, most_bytes: int, ranges: Ranges) -> Iterator[_Run]:
    """Neighbouring spans in one run of up to `least_bytes`; a bigger span in runs of its own, of `most_bytes` each."""
    pieces: list[tuple[int, int, int]] = []
    start = end = 0
    for span in spans:
        stored = part.spans[span]
        if stored.size_bytes == 0:
            continue
        chunks = _whole_chunks(ranges[span], part.chunk_bytes, stored.size_bytes) if span in ranges else None
        if chunks is not None and chunks != [(0, stored.size_bytes)]:
            for start, stop in chunks:
                yield from _runs_of_one(part, span, most_bytes, start, stop)
            continue
        fits = stored.offset_bytes == end and stored.offset_bytes + stored.size_bytes - start <= least_bytes
        if pieces and not fits:
            yield _Run(start, end - start, tuple(pieces))
            pieces = []
        if stored.size_bytes > least_bytes:
            yield from _runs_of_one(part, span, most_bytes, 0, stored.size_bytes)
            continue
        if not pieces:
            start = stored.offset_bytes
        pieces.append((span, 0, stored.size_bytes))
        end = stored.offset_bytes + stored.size_bytes
    if pieces:
        yield _Run(start, end - start, tuple(pieces))


def _runs_of_one(part: RankPart, span: int, most_bytes: int, first: int, last: int) -> Iterator[_Run]:
    stored = part.spans[span]
    for start in range(first, last, most_bytes):
        size = min(most_bytes, last - start)
        yield _Run(stored.offset_bytes + start, size, ((span, start, size),))


def _whole_chunks(ranges: Sequence[tuple[int, int]], chunk_bytes: int, size_bytes: int) -> list[tuple[int, int]]:
    """The chunks that cover these ranges, neighbours joined, none twice."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        start, stop = first // chunk_bytes * chunk_bytes, min(-(-last // chunk_bytes) * chunk_bytes, size_bytes)
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def read_pieces(
    storage: Storage, folder: str, part: RankPart, pieces: Sequence[tuple[int, int, memoryview]]
) -> list[str]:
    """Fills memory from places within spans: (span, offset in the span, memory). What is read has been checked before.

    Returns what could not be read, one sentence each.
    """
    by_file: dict[int, list[tuple[int, int, memoryview]]] = {}
    for span, offset, memory in sorted(pieces, key=lambda piece: piece[:2]):
        by_file.setdefault(part.spans[span].file, []).append((span, offset, memory))
    files, work = [], []
    for number, found in by_file.items():
        wanted_bytes = sum(len(memory) for _, _, memory in found)
        sparse = wanted_bytes < _SPARSE_SHARE * part.files[number].size_bytes
        file = _OpenFile(storage, folder, part.files[number], users=len(found), sparse=sparse, check=False)
        files.append(file)
        work += [(file, part.spans[span].offset_bytes + offset, memory) for span, offset, memory in found]

    def read(piece: tuple[_OpenFile, int, memoryview]) -> None:
        file, offset, memory = piece
        with file.use() as read_into:
            if read_into is None:
                return
            try:
                read_into(offset, memory)
            except OSError as error:
                file.faults.append(f"{file.stored.name}: cannot read at {offset}: {error.strerror or error}")

    try:
        run_all(read, work, FAR_THREADS if storage.is_far else num_threads())
    finally:
        for file in files:
            file.close()
    return [fault for file in files for fault in file.faults]


def _pieces(run: _Run, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(span, offset in the span, bytes) for each piece of what was read."""
    position = 0
    for span, start, size in run.pieces:
        yield span, start, data[position : position + size]
        position += size


class _Reader:
    """Reads runs of one file. `buffers` holds one bounce buffer for each thread."""

    def __init__(
        self,
        part: RankPart,
        file: _OpenFile,
        target: Target,
        use: Use | None,
        check: bool,
        buffers: threading.local,
    ) -> None:
        self.file, self._buffers = file, buffers
        self._part, self._target, self._use, self._check = part, target, use, check
        self.faults: list[str] = []

    def read(self, runs: list[_Run]) -> None:
        with self.file.use() as read_into:
            if read_into is None:
                return
            for run in runs:
                try:
                    self._read_run(run, read_into)
                except OSError as error:
                    names = ", ".join(self._part.spans[span].name for span, _, _ in run.pieces[:3])
                    self.faults.append(f"{self.file.stored.name}: cannot read {names!r}: {error.strerror or error}")

    def _read_run(self, run: _Run, read_into: ReadInto) -> None:
        span, start, size = run.pieces[0]
        into = self._target(span) if len(run.pieces) == 1 else None
        data = self._bounce(run.size_bytes) if into is None else into[start : start + size]
        read_into(run.offset_bytes, data)
        wrong = self._wrong(run, data)
        if wrong and self.file.forget():
            read_into(run.offset_bytes, data)
            wrong = self._wrong(run, data)
        for span, start, piece in _pieces(run, data):
            if span in wrong:
                name = self._part.spans[span].name
                self.faults.append(f"{self.file.stored.name}: {name!r} does not match its checksum")
                continue
            if into is None and (place := self._target(span)) is not None:
                place[start : start + len(piece)] = piece
            if self._use is not None:
                self._use(span, start, piece)

    def _wrong(self, run: _Run, data: memoryview) -> set[int]:
        """Spans whose bytes do not match their checksums."""
        if not self._check:
            return set()
        return {span for span, start, piece in _pieces(run, data) if not self._is_right(span, start, piece)}

    def _is_right(self, span: int, start: int, piece: memoryview) -> bool:
        chunks, step = self._part.spans[span].chunks, self._part.chunk_bytes
        for offset in range(0, len(piece), step):
            if xxhash.xxh3_128_digest(piece[offset : offset + step]) != chunks[(start + offset) // step]:
                return False
        return True

    def _bounce(self, size: int) -> memoryview:
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < size:
            self._buffers.buffer = buffer = memoryview(bytearray(max(size, _RUN_BYTES)))
        return buffer[:size]


def check_everything(storage: Storage, folder: str, parts: Iterable[RankPart]) -> list[str]:
    """All faults of a checkpoint's files: sizes, headers, every chunk, and files that do not belong."""
    faults: list[str] = []
    known = {"manifest.json"}
    for part in parts:
        missing = check_sizes(storage, folder, part.files)
        faults += missing
        known |= {file.name for file in part.files}
        broken = {fault.split(":")[0] for fault in missing}
        spans = [index for index, span in enumerate(part.spans) if part.files[span.file].name not in broken]
        faults += read_spans(storage, folder, part, spans, target=lambda span: None)
        # A file without any span has a header all the same.
        for file in part.files:
            if file.size_bytes == file.header_bytes and file.name not in broken:
                with storage.reader(f"{folder}/{file.name}") as read_into:
                    faults += _check_header(read_into, file)
    # Files in a data folder of an object store are known by their path.
    known |= {name.split("/")[0] for name in known}
    faults += [f"{name}: does not belong to the checkpoint" for name in storage.names(folder) if name not in known]
    return faults
