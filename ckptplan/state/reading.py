"""Reads spans and checks their checksums: every wanted byte, and hardly any other.

Small neighbours are fetched together, big spans chunk by chunk, on two threads where there are two cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ckptplan.state.manifest import RankPart, StoredFile
from ckptplan.state.parallel import run_all
from ckptplan.state.storage import ReadInto, Storage
from ckptplan.state.writer_program import checksum
from ckptplan.units import MIB

_RUN_BYTES = MIB  # neighbours are fetched together up to this size
_PIECE_BYTES = 8 * MIB  # of the work of one thread; a multiple of a chunk
_SPARSE_SHARE = 0.5  # of a file's bytes; below, read-ahead is switched off

Use = Callable[[int, int, memoryview], None]
"""(span, offset in the span, bytes read) -> None; from several threads."""
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
) -> list[str]:
    """Reads the wanted spans of one rank; returns what is wrong, one sentence each (a checksum, a missing file, ...).

    Args:
        folder: of the checkpoint, relative to the storage's location.
        target: where the bytes go. Without memory for a span they pass through a buffer, for `use` to look at.
        check: compare the checksums (and the header's).
    """
    by_file: dict[int, list[int]] = {}
    for span in sorted(set(wanted), key=lambda span: (part.spans[span].file, part.spans[span].offset_bytes)):
        by_file.setdefault(part.spans[span].file, []).append(span)
    faults: list[str] = []
    for number, spans in by_file.items():
        file = part.files[number]
        wanted_bytes = sum(part.spans[span].size_bytes for span in spans)
        sparse = wanted_bytes < _SPARSE_SHARE * file.size_bytes
        try:
            with storage.reader(f"{folder}/{file.name}", sparse=sparse) as read_into:
                if check:
                    faults += _check_header(read_into, file)
                reader = _Reader(part, file, read_into, target, use, check)
                run_all(reader.read, _batches(list(_runs(part, spans))), num_threads())
                faults += sorted(reader.faults)
        except OSError as error:
            faults.append(f"{file.name}: {error.strerror or error}")
    return faults


def check_sizes(storage: Storage, folder: str, files: Iterable[StoredFile]) -> list[str]:
    """Faults of the files' presence and sizes; nothing is read."""
    faults = []
    for file in files:
        try:
            actual = storage.size_bytes(f"{folder}/{file.name}")
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


def _runs(part: RankPart, spans: Sequence[int]) -> Iterator[_Run]:
    """Neighbouring small spans in one run; a big span in runs of its own."""
    pieces: list[tuple[int, int, int]] = []
    start = end = 0
    for span in spans:
        stored = part.spans[span]
        if stored.size_bytes == 0:
            continue
        fits = stored.offset_bytes == end and stored.offset_bytes + stored.size_bytes - start <= _RUN_BYTES
        if pieces and not fits:
            yield _Run(start, end - start, tuple(pieces))
            pieces = []
        if stored.size_bytes > _RUN_BYTES:
            yield from _runs_of_one(part, span)
            continue
        if not pieces:
            start = stored.offset_bytes
        pieces.append((span, 0, stored.size_bytes))
        end = stored.offset_bytes + stored.size_bytes
    if pieces:
        yield _Run(start, end - start, tuple(pieces))


def _runs_of_one(part: RankPart, span: int) -> Iterator[_Run]:
    stored = part.spans[span]
    for start in range(0, stored.size_bytes, part.chunk_bytes):
        size = min(part.chunk_bytes, stored.size_bytes - start)
        yield _Run(stored.offset_bytes + start, size, ((span, start, size),))


def _batches(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    batch: list[_Run] = []
    size = 0
    for run in runs:
        batch.append(run)
        size += run.size_bytes
        if size >= _PIECE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Reader:
    """Reads runs of one file; each thread has one bounce buffer."""

    def __init__(
        self, part: RankPart, file: StoredFile, read_into: ReadInto, target: Target, use: Use | None, check: bool
    ) -> None:
        self._part, self._file, self._read_into = part, file, read_into
        self._target, self._use, self._check = target, use, check
        self._local = threading.local()
        self.faults: list[str] = []

    def read(self, runs: list[_Run]) -> None:
        for run in runs:
            try:
                self._read_run(run)
            except OSError as error:
                names = ", ".join(self._part.spans[span].name for span, _, _ in run.pieces[:3])
                self.faults.append(f"{self._file.name}: cannot read {names!r}: {error.strerror or error}")

    def _read_run(self, run: _Run) -> None:
        span, start, size = run.pieces[0]
        into = self._target(span) if len(run.pieces) == 1 else None
        data = self._bounce(run.size_bytes) if into is None else into[start : start + size]
        self._read_into(run.offset_bytes, data)
        position = 0
        for span, start, size in run.pieces:
            piece = data[position : position + size]
            position += size
            if self._check and not self._is_right(span, start, piece):
                self.faults.append(f"{self._file.name}: {self._part.spans[span].name!r} does not match its checksum")
                continue
            if into is None and (place := self._target(span)) is not None:
                place[start : start + size] = piece
            if self._use is not None:
                self._use(span, start, piece)

    def _is_right(self, span: int, start: int, piece: memoryview) -> bool:
        chunks, step = self._part.spans[span].chunks, self._part.chunk_bytes
        for offset in range(0, len(piece), step):
            if xxhash.xxh3_128_digest(piece[offset : offset + step]) != chunks[(start + offset) // step]:
                return False
        return True

    def _bounce(self, size: int) -> memoryview:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            self._local.buffer = buffer = memoryview(bytearray(max(size, _RUN_BYTES)))
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
