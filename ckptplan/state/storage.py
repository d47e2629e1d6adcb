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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptplan.state.ids import MANIFEST
from ckptplan.state.writer_program import delete_folder, fsync_folder, new_file

ReadInto = Callable[[int, memoryview], None]
"""(offset in the file, memory to fill) -> None. Raises OSError when the file ends before."""


class Storage(abc.ABC):
    """Files in folders, written whole and never changed.

    `local_path` is the folder on this machine, or None; with it the fast writer is used.
    """

    local_path: Path | None = None

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
        options: handed to fsspec as they are; as pairs, so that the config is immutable.
    """

    location: str
    options: tuple[tuple[str, Any], ...] = ()

    def open(self) -> Storage:
        """The live storage."""
        if "://" not in self.location:
            if self.options:
                raise ValueError(f"options={self.options!r} are for URLs; {self.location!r} is a local folder")
            return LocalStorage(self.location)
        from ckptplan.state.remote import FsspecStorage

        return FsspecStorage(self.location, **dict(self.options))


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
