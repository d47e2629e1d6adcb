"""Copies of what was read from a storage that is far, so that the next load on this machine reads them here.

Only files in data folders are kept: their names are never used twice. Manifests, names and sizes always come from
the storage itself. A copy is a sparse file, and beside it a list of the ranges that are in it. Who reads compares
checksums: a copy that is wrong is dropped and read anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptplan.state.storage import ReadInto, Storage

_log = logging.getLogger(__name__)
_RANGES = ".ranges"


class CachedStorage(Storage):
    """Another storage, with copies in a folder of this machine that several processes may share."""

    def __init__(self, storage: Storage, location: str, folder: Path, most_bytes: int | None) -> None:
        self._storage = storage
        self._root = folder.absolute()
        self._folder = self._root / hashlib.sha256(location.rstrip("/").encode()).hexdigest()[:32]
        self._most_bytes = most_bytes
        self.is_far = storage.is_far

    @property
    def origin(self) -> Storage:
        return self._storage

    def names(self, folder: str = "") -> list[str]:
        return self._storage.names(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._storage.sizes(folder)

    def size_bytes(self, path: str) -> int:
        return self._storage.size_bytes(path)

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        self._storage.write(path, pieces)

    def delete(self, path: str) -> None:
        self._storage.delete(path)
        self._drop(path)

    def left_overs(self) -> list[str]:
        return self._storage.left_overs()

    def discard(self, left_over: str) -> None:
        self._storage.discard(left_over)

    def check_access(self) -> None:
        self._storage.check_access()

    def forget(self, path: str) -> bool:
        copy = self._copy_of(path)
        if copy is None or not copy.with_name(copy.name + _RANGES).exists():
            return False
        _log.warning("the copy of %s in %s is damaged: it is read from the storage again", path, self._root)
        self._drop(path)
        return True

    @contextmanager
    def reader(self, path: str, *, sparse: bool = False) -> Iterator[ReadInto]:
        copy = self._copy_of(path)
        with self._storage.reader(path, sparse=sparse) as read_far:
            if copy is None:
                yield read_far
                return

            def read_into(offset: int, target: memoryview) -> None:
                if not _read_copy(copy, offset, target):
                    read_far(offset, target)
                    try:
                        _keep(copy, offset, target)
                    except OSError as error:  # a full disk is no reason not to load
                        _log.warning("no copy of %s is kept in %s: %s", path, self._root, error)

            yield read_into
        self._make_room()

    def _copy_of(self, path: str) -> Path | None:
        parts = path.split("/")
        is_kept = (
            len(parts) > 2 and parts[-2].startswith("data-") and not any(part in ("", ".", "..") for part in parts)
        )
        return self._folder / path if is_kept else None

    def _drop(self, path: str) -> None:
        copy = self._folder / path
        if copy.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
            return
        for name in (copy.name + _RANGES, copy.name):
            with suppress(FileNotFoundError):
                (copy.parent / name).unlink()

    def _make_room(self) -> None:
        """Deletes what was not used for longest, as far as there is more than may be."""
        if self._most_bytes is None:
            return
        ranges = []
        for listed in self._root.rglob(f"*{_RANGES}"):
            with suppress(OSError):
                status = listed.with_name(listed.name.removesuffix(_RANGES)).stat()
                ranges.append((listed.stat().st_mtime_ns, listed, status.st_blocks * 512))
        total = sum(size for _, _, size in ranges)
        for _, listed, size in sorted(ranges):
            if total <= self._most_bytes:
                return
            with suppress(OSError):
                listed.unlink()
                listed.with_name(listed.name.removesuffix(_RANGES)).unlink()
            total -= size


def _read_copy(copy: Path, offset: int, target: memoryview) -> bool:
    """Fills `target` from the copy; False where it does not hold all of it."""
    listed = copy.with_name(copy.name + _RANGES)
    try:
        if not _covers(listed.read_text(encoding="ascii"), offset, offset + len(target)):
            return False
        with copy.open("rb", buffering=0) as file:
            is_whole = os.preadv(file.fileno(), [target], offset) == len(target)
        os.utime(listed)  # used just now
        return is_whole
    except (OSError, ValueError):
        return False


def _covers(ranges: str, start: int, end: int) -> bool:
    """Whether the ranges, one "start end" a line, hold all of [start, end). A last line that was cut off is none."""
    for low, high in sorted(tuple(map(int, line.split())) for line in ranges.split("\n")[:-1]):
        if low > start:
            return False
        start = max(start, high)
        if start >= end:
            return True
    return False


def _keep(copy: Path, offset: int, data: memoryview) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        position = 0
        while position < len(data):
            position += os.pwrite(descriptor, data[position:], offset + position)
    finally:
        os.close(descriptor)
    # The range comes last, in one write: other processes may be reading and writing the same copy.
    with copy.with_name(copy.name + _RANGES).open("ab", buffering=0) as listed:
        listed.write(f"{offset} {offset + len(data)}\n".encode("ascii"))
