"""One writer per folder: an advisory lock on `<location>/.lock`, held also by a writer that lost its trainer."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ckptplan.errors import FolderInUseError
from ckptplan.state.ids import LOCK

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_GRACE_S = 2.0  # for a run that is just ending


class FolderLock:
    """Held by an open descriptor, and by every copy of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, location: Path, timeout_s: float) -> FolderLock:
        """Takes the lock; waits for the writer of a trainer that is gone, and says so. Raises FolderInUseError."""
        try:
            location.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            told = "is a file, and a folder is expected for checkpoints; give another location"
            raise NotADirectoryError(errno.ENOTDIR, told, str(location)) from None
        descriptor = os.open(location / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _wait_for(descriptor, location, timeout_s)
            with suppress(OSError):  # a full disk must not stop the clean-up that makes room; the note is for people
                note = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
                os.pwrite(descriptor, note, 0)
                os.ftruncate(descriptor, len(note))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Gives up this process's hold."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _wait_for(descriptor: int, location: Path, timeout_s: float) -> None:
    start = time.monotonic()
    told = False
    while not _try(descriptor, location):
        waited_s = time.monotonic() - start
        holder = _holder(descriptor)
        alive = holder is not None and _is_alive(holder)
        if alive and (holder == os.getpid() or waited_s > _GRACE_S):
            who = "this process, by another manager" if holder == os.getpid() else f"process {holder}"
            raise FolderInUseError(
                f"{location} is being written by {who}; give each run its own folder, or close the other manager"
            )
        if waited_s > timeout_s:
            raise FolderInUseError(
                f"{location} is still being written by the writer of an ended run after {timeout_s} s"
            )
        if not told:
            _log.warning("waiting for the writer of an ended run to finish in %s", location)
            told = True
        time.sleep(_POLL_S)


def _try(descriptor: int, location: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            _log.warning("%s cannot be locked (%s): two runs in it would not notice each other", location, error)
            return True
        raise
    return True


def _holder(descriptor: int) -> int | None:
    """Process that took the lock, if it runs on this machine; the file may be half written."""
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
        return int(note["pid"]) if note["host"] == socket.gethostname() else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):  # a killed process that nobody has waited for yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True
