"""Files and folders on a local disk, for what must be there after a power cut; no torch, the writer process runs it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

ALIGN_BYTES = 4096  # O_DIRECT: of address, offset and length
DIRECT_PIECE_BYTES = 16 * 2**20
BUFFERED_PIECE_BYTES = 512 * 2**10  # small, so that each piece takes pages that the last one gave back
FLUSH_EVERY_BYTES = 8 * 2**20

_AT_FDCWD, _RENAME_NOREPLACE, _SYNC_FILE_RANGE_WRITE = -100, 1, 2

Report = Callable[[int], None]
"""Called with the number of bytes that are on their way to the disk since the last call."""


class Duplicate(Exception):
    """The id is taken."""


_no_direct: set[int] = set()  # devices that refused O_DIRECT


@contextlib.contextmanager
def new_file(path: str, flags: int = 0) -> Iterator[int]:
    """A file that did not exist; its close is checked (network file systems report a full disk there)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)


def write_file(path: str, image: memoryview, size: int, report: Report) -> None:
    """Writes the first `size` bytes of `image` to a new file and fsyncs it; past the page cache where that works."""
    device = os.stat(os.path.dirname(path)).st_dev
    if device not in _no_direct and size >= ALIGN_BYTES and hasattr(os, "O_DIRECT"):
        try:
            with new_file(path, os.O_DIRECT) as descriptor:
                allocate(descriptor, size)
                _write_direct(descriptor, image, size, report)
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            _no_direct.add(device)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    with new_file(path) as descriptor:
        allocate(descriptor, size)
        BufferedFile(descriptor, report).write(image[:size])
        os.fsync(descriptor)


def _write_direct(descriptor: int, image: memoryview, size: int, report: Report) -> None:
    padded = -(-size // ALIGN_BYTES) * ALIGN_BYTES
    position = 0
    while position < padded:
        written = os.pwrite(descriptor, image[position : min(position + DIRECT_PIECE_BYTES, padded)], position)
        # After a short write only whole blocks count; the rest of one is written again.
        step = written // ALIGN_BYTES * ALIGN_BYTES
        if step == 0:
            raise OSError(errno.EIO, "the disk took no whole block")
        position += step
        report(min(position, size) - min(position - step, size))


class BufferedFile:
    """Writes through the page cache in small pieces and has them flushed early; the fsync then finds little to do."""

    def __init__(self, descriptor: int, report: Report) -> None:
        self._descriptor, self._report = descriptor, report
        self._position = self._flushed = 0

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        start = 0
        while start < len(data):
            piece = data[start : start + BUFFERED_PIECE_BYTES]
            written = os.pwrite(self._descriptor, piece, self._position)
            start += written
            self._position += written
            self._report(written)
            if self._position - self._flushed >= FLUSH_EVERY_BYTES:
                _start_flush(self._descriptor, self._flushed, self._position - self._flushed)
                self._flushed = self._position


def allocate(descriptor: int, size: int) -> None:
    """Reserves the space, so that a full disk is found before anything is written; nothing where that is not known.

    Not `os.posix_fallocate`: where a file system cannot, the C library writes into every block instead.
    """
    if size and _libc() is not None and _libc().fallocate64(descriptor, 0, _long(0), _long(size)) != 0:
        code = _errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def _start_flush(descriptor: int, offset: int, size: int) -> None:
    if _libc() is not None:  # only a hint: fsync does the work and reports
        _libc().sync_file_range(descriptor, _long(offset), _long(size), _SYNC_FILE_RANGE_WRITE)


def write_small(path: str, content: bytes) -> None:
    """Writes and fsyncs a small new file."""
    with new_file(path) as descriptor:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)


def fsync_folder(path: str) -> None:
    """Makes the entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)


def publish(attempt: str, target: str) -> None:
    """Renames the folder to its final name unless that is taken. Raises Duplicate."""
    if _libc() is not None and hasattr(_libc(), "renameat2"):
        paths = os.fsencode(attempt), os.fsencode(target)
        if _libc().renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_NOREPLACE) == 0:
            return
        code = _errno()
        if code in (errno.EEXIST, errno.ENOTEMPTY):
            raise Duplicate(target)
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), attempt, None, target)
    if os.path.lexists(target):
        raise Duplicate(target)
    os.rename(attempt, target)  # refuses a folder that is not empty; the folder's lock keeps others off


def move_aside(location: str, name: str, folder: str) -> None:
    """Moves a checkpoint into a folder of the location, under a name that is free there."""
    os.makedirs(os.path.join(location, folder), exist_ok=True)
    number, target = 1, os.path.join(location, folder, name)
    while os.path.lexists(target):
        number += 1
        target = os.path.join(location, folder, f"{name}.{number}")
    os.rename(os.path.join(location, name), target)


def delete_folder(location: str, name: str) -> None:
    """Takes a folder out of sight by one rename, then deletes it: never half a checkpoint under a good name."""
    path = os.path.join(location, name)
    if os.path.islink(path) or not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
    if not name.startswith("."):
        hidden = os.path.join(location, f".trash-{name}-{os.urandom(6).hex()}")
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path)


# --- the C library ---

_loaded: list[Any] = []


def _libc() -> Any:
    """The C library of Linux, or None. Loaded on first use: it would double the start-up time."""
    if not _loaded:
        import ctypes

        _loaded.append(ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None)
    return _loaded[0]


def _long(value: int) -> Any:
    import ctypes

    return ctypes.c_int64(value)


def _errno() -> int:
    import ctypes

    return ctypes.get_errno()
