"""Object stores and other file systems, through fsspec.

There is no folder to rename there: the files of a save go to `<id>/data-<unique>/`, and writing `<id>/manifest.json`
last is the commit. What no manifest names is a left-over; the next save of the same id deletes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from ckptplan.state.ids import MANIFEST, SUPERSEDED
from ckptplan.state.storage import ReadInto, Storage, delete_checkpoint
from ckptplan.state.writer_program import Attempt, Duplicate, Report, checksum
from ckptplan.units import MIB

_COPY_BYTES = 16 * MIB


class FsspecStorage(Storage):
    """A location given by a URL that fsspec knows: `s3://`, `gs://`, `file://`, `memory://`, ..."""

    def __init__(self, location: str, **options: Any) -> None:
        self._files, root = fsspec.core.url_to_fs(location, **options)
        self._root = root.rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        self._files.invalidate_cache()
        try:
            entries = [str(entry).strip("/") for entry in self._files.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list a placeholder for the folder itself.
        return sorted({entry.rpartition("/")[2] for entry in entries if entry != path.strip("/")})

    def size_bytes(self, path: str) -> int:
        self._files.invalidate_cache()
        info = self._files.info(self._path(path))
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "not a file", path)
        return int(info["size"])

    @contextmanager
    def reader(self, path: str, *, sparse: bool = False) -> Iterator[ReadInto]:
        full = self._path(path)

        def read_into(offset: int, target: memoryview) -> None:
            data = self._files.cat_file(full, start=offset, end=offset + len(target)) if target else b""
            if len(data) != len(target):
                raise OSError(errno.EIO, "the file ends too early", path)
            target[:] = data

        yield read_into

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        full = self._path(path)
        self._files.invalidate_cache()
        if self._files.exists(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
        file = self._files.open(full, "wb", autocommit=False)
        try:
            for piece in pieces:
                file.write(bytes(piece))
            file.close()
        except BaseException:
            file.discard()
            with suppress(OSError):  # some stores show a file from the start
                self._files.rm(full)
            raise
        file.commit()

    def delete(self, path: str) -> None:
        full = self._path(path)
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            self._files.rm(full, recursive=True)

    def _path(self, path: str) -> str:
        if any(part in (".", "..") for part in path.split("/")):
            raise FileNotFoundError(errno.ENOENT, "not a path below the location", path)
        return f"{self._root}/{path}" if path else self._root


class StorageAttempt(Attempt):
    """A checkpoint being written to a storage that is not a local folder."""

    def __init__(self, storage: Storage, block: bytes, report: Report) -> None:
        super().__init__(block, report)
        self._storage = storage
        self._data = f"data-{self.control['attempt'].rpartition('-')[2]}"
        for file in self.files:
            file["name"] = f"{self._data}/{file['name']}"

    def open(self) -> None:
        """Nothing: folders come with their files."""

    def write_stream(self, index: int, pieces: Iterator[Any]) -> None:
        """Writes one file; hashes while writing."""
        self._storage.write(self._at(self.files[index]["name"]), self._hashed(index, pieces))

    def clean_up(self) -> list[str]:
        """Deletes what the new checkpoint makes needless; returns what failed."""
        if self.control["rank"] != 0:
            return []
        failures = []
        own = [name for name in self._storage.names(self.control["id"]) if name not in (MANIFEST, self._data)]
        for name in self.control["delete"]:
            try:
                delete_checkpoint(self._storage, name)
            except OSError as error:
                failures.append(f"could not delete {name}: {error}")
        for name in own:
            try:
                self._storage.delete(self._at(name))
            except OSError as error:
                failures.append(f"could not delete {self._at(name)}: {error}")
        return failures

    def _commit(self, manifest: bytes) -> None:
        for name in self.control["supersede"]:
            move_aside(self._storage, name)
        try:
            self._storage.write(self._at(MANIFEST), [manifest])
        except FileExistsError:
            raise Duplicate(self.control["id"]) from None
        for rank in range(1, self.control["world_size"]):
            self._storage.delete(self._at(f"{self._data}/.part-{rank}"))

    def _remove(self) -> None:
        with suppress(OSError):  # it failed already; the next save of this id tries again
            self._storage.delete(self._at(self._data))

    def _make_folder(self) -> None:
        """Keys need none."""

    def _put_part(self, name: str, content: bytes) -> None:
        self._put(name, content)

    def _put(self, name: str, content: bytes) -> None:
        self._storage.write(self._at(f"{self._data}/{name}"), [content])

    def _get(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._storage.read(self._at(f"{self._data}/{name}"))
        return None

    def _size(self, name: str) -> int:
        return self._storage.size_bytes(self._at(name))

    def is_committed(self) -> bool:
        with suppress(FileNotFoundError):
            return f'"{self.control["attempt"]}"'.encode() in self._storage.read(self._at(MANIFEST))
        return False

    def _hashed(self, index: int, pieces: Iterator[Any]) -> Iterator[memoryview]:
        file, step = self.files[index], self.control["chunk_bytes"]
        header = memoryview(next(pieces))
        self._headers[index] = checksum(header)
        yield header
        self._report(len(header))
        for span, _, _, size in file["spans"]:
            data = memoryview(next(pieces)).cast("B") if size else memoryview(b"")
            self._chunks[span] = self._hash_span(data)
            for start in range(0, size, step):
                piece = data[start : start + step]
                yield piece
                self._report(len(piece))

    def _at(self, name: str) -> str:
        return f"{self.control['id']}/{name}"


def move_aside(storage: Storage, name: str) -> None:
    """Copies a checkpoint to `superseded/`, under a name that is free there, and then takes it away."""
    number, target = 1, name
    while target in storage.names(SUPERSEDED):
        number += 1
        target = f"{name}.{number}"
    files = [
        f"{folder}/{file}"
        for folder in storage.names(name)
        if folder != MANIFEST
        for file in storage.names(f"{name}/{folder}")
    ]
    for file in (*files, MANIFEST):
        storage.write(f"{SUPERSEDED}/{target}/{file}", _content(storage, f"{name}/{file}"))
    delete_checkpoint(storage, name)


def _content(storage: Storage, path: str) -> Iterator[memoryview]:
    size = storage.size_bytes(path)
    with storage.reader(path) as read_into:
        for start in range(0, size, _COPY_BYTES):
            piece = memoryview(bytearray(min(_COPY_BYTES, size - start)))
            read_into(start, piece)
            yield piece
