"""Where checkpoints lie: the few operations that a backend must offer.

A `StorageConfig` is plain data and pickles; the `Storage` that it opens is live and does not. Paths are relative to the
location, with "/" between folder and file.
"""

from __future__ import annotations

import abc
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptplan.state.disk import delete_folder, fsync_folder, new_file
from ckptplan.state.ids import ATTEMPT_PREFIX, MANIFEST, TRASH_PREFIX

ReadInto = Callable[[int, memoryview], None]
"""(offset in the file, memory to fill) -> None. Raises OSError when the file ends before."""


class Storage(abc.ABC):
    """Files in folders, written whole and never changed.

    Attributes:
        local_path: the folder on this machine, or None; with it the fast writer is used.
        is_far: each request takes long and each byte costs: many at a time, large ones, and nothing is read twice.
    """

    local_path: Path | None = None
    is_far: bool = False

    @abc.abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in `folder`, sorted; none for a folder that is not there."""

    @abc.abstractmethod
    def size_bytes(self, path: str) -> int:
        """Size of a file. Raises FileNotFoundError."""

    @abc.abstractmethod
    def reader(self, path: str, *, sparse: bool = False) -> AbstractContextManager[ReadInto]:
        """Opens a file for reading at offsets, from several threads; `sparse`: only little of it will be wanted."""

    @abc.abstractmethod
    def write(self, path: str, pieces: Iterable[Any]) -> None:
        """Writes a new file from buffers. On return it is durable and visible; before, or after an error, it is not
        there. Raises FileExistsError."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with all in it; nothing if it is not there."""

    # What follows has a default that will do.

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file directly in `folder`, by name."""
        found = {}
        for name in self.names(folder):
            with suppress(FileNotFoundError):  # a folder
                found[name] = self.size_bytes(f"{folder}/{name}")
        return found

    def left_overs(self) -> list[str]:
        """What attempts have left that never became checkpoints, and half-deleted ones: names for `discard`."""
        return []

    def discard(self, left_over: str) -> None:
        """Takes one of the `left_overs` away; nothing if it is not there any more."""
        self.delete(left_over)

    def check_access(self) -> None:
        """Finds out whether files can be written here, by writing one and deleting it. Raises OSError."""
        probe = f".probe-{os.urandom(8).hex()}"
        self.write(probe, [b"ckptplan asks whether it may write here"])
        self.delete(probe)

    @property
    def origin(self) -> Storage:
        """The storage itself, where this one keeps copies of what it has read."""
        return self

    def forget(self, path: str) -> bool:
        """Drops the copy of a file; False where none was kept."""
        return False

    def read(self, path: str) -> bytes:
        """A whole (small) file."""
        content = bytearray(self.size_bytes(path))
        with self.reader(path) as read_into:
            read_into(0, memoryview(content))
        return bytes(content)


@dataclass(frozen=True)
class StorageConfig:
    """A location as plain data: a folder, or a URL of fsspec with the options of its file system.

    Attributes:
        location: "outputs/run/state", "s3://bucket/run", "memory://run", ...
        options: handed to fsspec as they are; as pairs, so that the config is immutable. Not shown: there may be
            secrets among them.
        cache: folder for copies of what is read, so that a second load of the same checkpoint reads no tensor again.
        cache_bytes: how much may lie there; what was not used for longest goes first. None: no limit.
    """

    location: str
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    cache: str | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if "://" in self.location:
            if self.location.partition("://")[2].partition("/")[0].rpartition("@")[0].count(":"):
                # It would stand in every message.
                raise ValueError("location: a URL with a password in it; give it in options= or in the environment")
            return
        if self.options:
            names = ", ".join(name for name, _ in self.options)
            raise ValueError(f"options= ({names}) are for URLs; {self.location!r} is a local folder")
        if self.cache is not None:
            raise ValueError(f"cache={self.cache!r} is for URLs; {self.location!r} is a local folder")

    def open(self, timeout_s: float = 600.0) -> Storage:
        """The live storage. Requests that fail in passing are tried again for at most half of `timeout_s`.

        Raises ImportError that names the package that is missing, ValueError for a URL that nobody knows.
        """
        if "://" not in self.location:
            return LocalStorage(self.location)
        from ckptplan.state.remote import FsspecStorage
        from ckptplan.state.s3 import S3Storage

        kind = S3Storage if self.location.startswith(("s3://", "s3a://")) else FsspecStorage
        opened = kind(self.location, timeout_s=timeout_s, **dict(self.options))
        if self.cache is None:
            return opened
        from ckptplan.state.cache import CachedStorage

        return CachedStorage(opened, self.location, Path(self.cache), self.cache_bytes)


class LocalStorage(Storage):
    """A folder of this machine (or one mounted into it). Never follows a symbolic link below the location."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.local_path: Path = Path(location).absolute()

    def names(self, folder: str = "") -> list[str]:
        path = self.local_path / folder
        if folder and path.is_symlink():
            return []
        try:
            return sorted(entry.name for entry in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size_bytes(self, path: str) -> int:
        status = (self.local_path / path).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return status.st_size

    @contextmanager
    def reader(self, path: str, *, sparse: bool = False) -> Iterator[ReadInto]:
        descriptor = self._open(path)
        try:
            if sparse and hasattr(os, "posix_fadvise"):
                # Else read-ahead fetches several times what is wanted.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            yield lambda offset, target: _read_all(descriptor, offset, target, path)
        finally:
            os.close(descriptor)

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        target = self.local_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() or target.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
        try:
            with new_file(str(aside)) as descriptor:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    while view:
                        view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            os.link(aside, target)  # unlike a rename it refuses a name that is taken
            fsync_folder(str(target.parent))
        finally:
            with suppress(FileNotFoundError):
                aside.unlink()

    def delete(self, path: str) -> None:
        target = self.local_path / path
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def left_overs(self) -> list[str]:
        return [name for name in self.names() if name.startswith((ATTEMPT_PREFIX, TRASH_PREFIX))]

    def _open(self, path: str) -> int:
        """A descriptor of a regular file below the location; refuses symbolic links in every part of the path."""
        *folders, name = path.split("/")
        if any(part in ("", ".", "..") for part in (*folders, name)):
            raise FileNotFoundError(errno.ENOENT, "not a path below the location", path)
        current = os.open(self.local_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
                os.close(current)
                current = below
            # Not blocking: a pipe under the name of a file must not hang the reader.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=current)
        finally:
            os.close(current)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return descriptor


def delete_checkpoint(storage: Storage, name: str) -> None:
    """Takes a checkpoint away so that no half of it is ever seen."""
    if storage.local_path is not None:
        delete_folder(str(storage.local_path), name)
        return
    storage.delete(f"{name}/{MANIFEST}")  # without it the rest is no checkpoint
    storage.delete(name)


def _read_all(descriptor: int, offset: int, target: memoryview, path: str) -> None:
    target = target.cast("B")
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early", path)
        target, offset = target[count:], offset + count
