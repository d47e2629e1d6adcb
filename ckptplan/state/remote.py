"""Object stores and other file systems, through fsspec.

There is no folder to rename there: the files of a save go to `<id>/data-<unique>/`, and writing `<id>/manifest.json`
last is the commit. What no manifest names is a left-over; the next save of the same id deletes it.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import fsspec

from ckptplan.state.attempt import Attempt, Refused, checksum
from ckptplan.state.disk import Duplicate, Report
from ckptplan.state.failures import Patience
from ckptplan.state.ids import MANIFEST, SUPERSEDED, is_name
from ckptplan.state.parallel import run_all
from ckptplan.state.reading import FAR_THREADS
from ckptplan.state.storage import ReadInto, Storage, delete_checkpoint
from ckptplan.units import MIB

_COPY_BYTES = 16 * MIB
_NEAR = ("file", "local", "memory")
_DATA_FOLDER = re.compile(r"data-[0-9a-f]{1,32}")
_SMALL_BYTES = 16 * MIB  # files up to this size are written several at a time
_POLL_S, _FAR_POLL_S = 0.02, 0.5  # between looks at what other ranks have written
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # protocol -> extra of this package that brings it

Made = TypeVar("Made")


class FsspecStorage(Storage):
    """A location given by a URL that fsspec knows: `s3://`, `gs://`, `file://`, `memory://`, ..."""

    def __init__(self, location: str, *, timeout_s: float = 600.0, **options: Any) -> None:
        protocol = location.partition("://")[0]
        self._files, root = _open_file_system(location, protocol, options)
        self._root = root.rstrip("/")
        self.is_far = protocol not in _NEAR
        self._patience = Patience(timeout_s / 2)  # who waits for a save waits longer than its last try

    def names(self, folder: str = "") -> list[str]:
        return sorted(self._listed(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        found = self._listed(folder)
        return {name: int(entry["size"]) for name, entry in found.items() if entry.get("type") == "file"}

    def size_bytes(self, path: str) -> int:
        def look() -> Any:
            self._files.invalidate_cache()
            return self._files.info(self._path(path))

        info = self._call(path, look)
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "not a file", path)
        return int(info["size"])

    @contextmanager
    def reader(self, path: str, *, sparse: bool = False) -> Iterator[ReadInto]:
        full = self._path(path)

        def read_into(offset: int, target: memoryview) -> None:
            if not target:
                return
            data = self._call(path, lambda: self._files.cat_file(full, start=offset, end=offset + len(target)))
            if len(data) != len(target):
                raise OSError(errno.EIO, "the file ends too early", path)
            target[:] = data

        yield read_into

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        full = self._path(path)
        self._refuse_if_there(path)
        self._call(path, lambda: self._files.makedirs(full.rpartition("/")[0], exist_ok=True))
        file = self._call(path, lambda: self._files.open(full, "wb", autocommit=False))
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

        def remove() -> None:
            self._files.invalidate_cache()
            self._files.rm(full, recursive=True)

        with suppress(FileNotFoundError):
            self._call(path, remove)

    def left_overs(self) -> list[str]:
        """Data folders that no manifest speaks for. A folder in which anything else lies is not ours."""
        found = []
        for name in self.names():
            if is_name(name) and name != SUPERSEDED:
                inner = self.names(name)
                if inner and all(map(_DATA_FOLDER.fullmatch, inner)):
                    found += [f"{name}/{data}" for data in inner]
        return found

    def _listed(self, folder: str) -> dict[str, Any]:
        """What lies directly in a folder, by name."""
        path = self._path(folder)

        def look() -> Any:
            self._files.invalidate_cache()
            return self._files.ls(path, detail=True)

        try:
            entries = self._call(folder, look)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        by_path = {str(entry["name"]).strip("/"): entry for entry in entries}
        by_path.pop(path.strip("/"), None)  # some stores list a placeholder for the folder itself
        return {name.rpartition("/")[2]: entry for name, entry in by_path.items()}

    def _refuse_if_there(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.size_bytes(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _call(self, path: str, call: Callable[[], Made]) -> Made:
        """Calls again what fails in passing; every error is an OSError that names where."""
        return self._patience.call(f"{self._root}/{path}".rstrip("/"), call)

    def _path(self, path: str) -> str:
        if any(part in (".", "..") for part in path.split("/")):
            raise FileNotFoundError(errno.ENOENT, "not a path below the location", path)
        return f"{self._root}/{path}" if path else self._root


def _open_file_system(location: str, protocol: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        # An instance of our own: its settings and its connections are nobody else's.
        files, root = fsspec.core.url_to_fs(location, **{"skip_instance_cache": True, **options})
        return files, str(root)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]'" if extra else str(error)
        raise ImportError(f"{location}: the package for {protocol}:// is not installed: {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{location}: {error}; expected a folder, or a URL such as s3://bucket/run") from error


class StorageAttempt(Attempt):
    """A checkpoint being written to a storage that is not a local folder."""

    def __init__(self, storage: Storage, block: bytes, report: Report) -> None:
        super().__init__(block, report)
        self._storage = storage
        self._data = f"data-{self.control['attempt'].rpartition('-')[2]}"
        for file in self.files:
            file["name"] = f"{self._data}/{file['name']}"
        self._small: list[tuple[int, Iterator[Any]]] = []
        self._poll_s = _FAR_POLL_S if storage.is_far else _POLL_S
        self._looked_s = float("-inf")
        self._names: set[str] = set()
        self._sizes: dict[str, int] | None = None

    def open(self) -> None:
        """Nothing: folders come with their files."""

    def write_stream(self, index: int, pieces: Iterator[Any]) -> None:
        """Writes one file; hashes while writing. Small ones wait for `finish`, which writes several at a time."""
        if self._storage.is_far and self.files[index]["size"] <= _SMALL_BYTES:
            self._small.append((index, pieces))
        else:
            with self._told_if_another_was_first():
                self._write_file((index, pieces))

    def finish(self) -> None:
        """Writes the small files, then commits."""
        with self._told_if_another_was_first():
            run_all(self._write_file, self._small, FAR_THREADS)
            super().finish()

    @contextmanager
    def _told_if_another_was_first(self) -> Iterator[None]:
        """Another save of this id that commits meanwhile takes our files for an earlier attempt's and deletes them.

        What fails then is a write or a look at one of them; the reason is that the id is taken, and that is said.
        """
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                is_there = MANIFEST in self._storage.names(self.control["id"])
                if is_there and self.control["id"] not in self.control["supersede"] and not self.is_committed():
                    raise Duplicate(self.control["id"]) from error
            raise

    def _write_file(self, work: tuple[int, Iterator[Any]]) -> None:
        index, pieces = work
        self._storage.write(self._at(self.files[index]["name"]), self._hashed(index, pieces))

    def clean_up(self) -> list[str]:
        """Deletes what the new checkpoint makes needless; returns what failed."""
        if self.control["rank"] != 0:
            return []
        failures = []
        try:
            names = self._storage.names(self.control["id"])
        except OSError as error:
            names = []
            failures.append(f"could not look for what earlier attempts left in {self.control['id']}: {error}")
        own = [self._at(name) for name in names if name not in (MANIFEST, self._data)]
        others = [name for name in self.control["clean_up"] if name not in own]
        for delete, name in (
            *((self._delete_checkpoint, name) for name in self.control["delete"]),
            *((self._storage.discard, name) for name in own),
            *((self._discard_if_left, name) for name in others),
        ):
            try:
                delete(name)
            except OSError as error:
                failures.append(f"could not delete {name}: {error}")
        return failures

    def _discard_if_left(self, name: str) -> None:
        """What was a left-over when this save began may have been another's save at work: committed, it stays."""
        if MANIFEST not in self._storage.names(name.partition("/")[0]):
            self._storage.discard(name)

    def _delete_checkpoint(self, name: str) -> None:
        delete_checkpoint(self._storage, name)

    def _commit(self, manifest: bytes) -> None:
        for name in self.control["supersede"]:
            move_aside(self._storage, name)
        try:
            self._storage.write(self._at(MANIFEST), [manifest])
        except FileExistsError:
            if not self.is_committed():  # it may be ours, and only the answer was lost
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
        """What another rank has put there; the storage is asked once in a while only, with one request for all."""
        if time.monotonic() - self._looked_s > self._poll_s:
            self._names = set(self._storage.names(self._at(self._data)))
            self._looked_s = time.monotonic()
        if name not in self._names:
            return None
        with suppress(FileNotFoundError):
            return self._storage.read(self._at(f"{self._data}/{name}"))
        return None

    def _size(self, name: str) -> int:
        if self._sizes is None:  # one request for all files of all ranks
            self._sizes = self._storage.sizes(self._at(self._data))
        file = name.rpartition("/")[2]
        if file not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._at(name))
        return self._sizes[file]

    def _wait_for_commit(self) -> None:
        deadline = time.monotonic() + self.control["timeout_s"]
        while time.monotonic() < deadline:
            self._raise_if_failed()
            if self.is_committed():
                return
            time.sleep(self._poll_s)
        raise Refused(f"rank 0 did not commit in {self.control['timeout_s']} s")

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
