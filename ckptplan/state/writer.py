"""The trainer's side of the writer process: start it, hand it snapshots, hear how they went, notice its death."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ckptplan.state import writer_program
from ckptplan.state.arena import Arena
from ckptplan.state.parallel import try_start

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0

Handler = Callable[[dict[str, Any] | None], None]
"""Called in the reading thread with each message of a job, with None when the writer is dead."""


def is_supported() -> bool:
    """Whether this system can have the writer process: else a thread of the trainer writes."""
    return bool(sys.executable) and hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")


class WriterProcess:
    """One writer process. A dead one is not revived: make another."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        site = str(Path(xxhash.__file__).parents[1])
        command = [sys.executable, "-I", "-S", writer_program.__file__, str(theirs.fileno()), str(os.getpid()), site]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except BaseException:
            self._connection.close()
            raise
        self._handlers: dict[int, Handler] = {}
        self._lock = threading.Lock()
        self.is_ready = threading.Event()
        self._is_dead = False
        self._thread = threading.Thread(target=self._listen, daemon=True, name="ckptplan-state-writer")
        if not try_start(self._thread):
            self._process.kill()
            self._process.wait()
            self._connection.close()
            raise OSError(errno.EAGAIN, "no thread can be started to listen to the writer process")

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False as soon as its end has been noticed."""
        return not self._is_dead and self._process.poll() is None

    def begin(self, job: int, block: bytes, arena: Arena, lock: int | None, timeout_s: float, handler: Handler) -> None:
        """Announces a save: its description, the shared memory that will be filled, the folder's lock."""
        with self._lock:
            self._handlers[job] = handler
            if self._is_dead:
                raise BrokenPipeError("the writer process is dead")
        descriptor = os.memfd_create(f"job-{job}", os.MFD_CLOEXEC)
        try:
            view = memoryview(block)
            while view:
                view = view[os.write(descriptor, view) :]
            message = {
                "op": "begin",
                "job": job,
                "block_bytes": len(block),
                "slabs": [{"key": slab.key, "bytes": slab.size_bytes} for slab in arena.slabs],
                "images": [(arena.slabs[slab].key, offset) for slab, offset in arena.images],
                "timeout_s": max(1, int(timeout_s)),
            }
            descriptors = [descriptor, *(slab.descriptor for slab in arena.slabs), *([] if lock is None else [lock])]
            self._send(message, descriptors)
        finally:
            os.close(descriptor)

    def filled(self, job: int, file: int) -> None:
        """File number `file` of the job may be written."""
        self._send({"op": "filled", "job": job, "file": file})

    def commit(self, job: int) -> None:
        """All files are filled: the writer finishes even if this process ends now."""
        self._send({"op": "commit", "job": job})

    def abort(self, job: int, reason: str) -> None:
        """The snapshot failed."""
        with contextlib.suppress(OSError):
            self._send({"op": "abort", "job": job, "reason": reason[:8000]})
        with self._lock:
            self._handlers.pop(job, None)

    def abandon(self, job: int) -> None:
        """The connection broke while this job was handed over: tells its handler, unless the reading thread has."""
        with self._lock:
            handler = self._handlers.pop(job, None)
        if handler is not None:
            handler(None)

    def forget(self, job: int) -> None:
        """No more messages of this job are wanted."""
        with self._lock:
            self._handlers.pop(job, None)

    def close(self, timeout_s: float) -> None:
        """Lets it finish what it has been handed, then end; kills it after the time-out."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("the writer process did not end in %s s and is killed", timeout_s)
            self._process.kill()
            self._process.wait()
        self._thread.join(timeout_s)
        self._connection.close()

    def let_go(self) -> None:
        """Lets it finish what it has been handed wholly, without waiting for that."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.leave()

    def leave(self) -> None:
        """In a forked child: lets go of the socket without a word."""
        self._is_dead = True
        self._connection.close()
        self._process.returncode = 0  # nobody here waits for it; silences the warning of a running one

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        if len(data) > writer_program.MESSAGE_BYTES:
            raise OSError(f"a message of {len(data)} bytes is too long for the writer")
        socket.send_fds(self._connection, [data], list(descriptors))

    def _listen(self) -> None:
        while True:
            try:
                data = self._connection.recv(writer_program.MESSAGE_BYTES)
            except ConnectionError:
                continue  # told once, and before the messages that still wait
            except OSError:
                data = b""
            if not data:
                break
            message = json.loads(data)
            if message["op"] == "ready":
                self.is_ready.set()
                continue
            with self._lock:
                handler = self._handlers.get(message["job"])
            if handler is not None:
                handler(message)
        with self._lock:
            self._is_dead = True
            handlers, self._handlers = list(self._handlers.values()), {}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_START_TIMEOUT_S)
        for handler in handlers:
            handler(None)
