"""The writer process: puts snapshots on a local disk while training goes on. Run by its path.

As a program it is started as `python -I -S writer_program.py SOCKET PARENT FOLDER_OF_XXHASH`; it imports the standard
library and xxhash only, so it is ready in a few hundredths of a second and never loads torch. The snapshot comes as
shared memory (one image of each file), messages and descriptors come over the socket.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.setpgid(0, 0)  # Ctrl-C goes to the trainer's group; the same session, so that the nice value counts against it
    sys.path.append(sys.argv[3])
    # The package as mere folders: its own first lines would load what is not needed here.
    here = os.path.dirname(os.path.abspath(__file__))
    for name, folder in (("ckptplan", os.path.dirname(here)), ("ckptplan.state", here)):
        sys.modules[name] = type(sys)(name)
        sys.modules[name].__path__ = [folder]

import contextlib
import errno
import json
import mmap
import select
import signal
import socket
from typing import Any

from ckptplan.state.attempt import Attempt, Json
from ckptplan.state.disk import ALIGN_BYTES

MESSAGE_BYTES = 60_000
MOST_DESCRIPTORS = 64
NICE = 5  # enough to yield to the trainer; much more only stretches the write


def describe(error: BaseException) -> Json:
    """An exception as JSON, for the trainer."""
    return {
        "kind": type(error).__name__,
        "errno": getattr(error, "errno", None),
        "filename": str(getattr(error, "filename", None) or "")[:4000],
        "message": (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error))[:8000],
    }


class _Server:
    """Reads messages until the trainer is gone; a save that was handed over wholly is still committed."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._slabs: dict[str, mmap.mmap] = {}
        self._attempt: Attempt | None = None
        self._images: list[tuple[str, int]] = []
        self._descriptors: list[int] = []
        self._job = -1
        self._parent = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: the end of the socket must do
            self._parent = os.pidfd_open(parent)

    def run(self) -> None:
        os.nice(NICE)
        self._send({"op": "ready"})
        while (message := self._receive()) is not None:
            try:
                self._handle(*message)
            except Exception as error:
                self._fail(error)
        if self._attempt is not None:
            self._attempt.drop("the trainer ended during the snapshot")

    def _receive(self) -> tuple[Json, list[int]] | None:
        """The next message; None when the trainer is gone. Its end of the socket may live on in a forked child."""
        watched: list[Any] = [self._connection] if self._parent is None else [self._connection, self._parent]
        ready, _, _ = select.select(watched, [], [])
        if self._connection not in ready:
            return None
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:
            # Told once, and before the messages that still wait: a trainer that was killed had not read all of ours.
            return self._receive()
        if not data:
            return None
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "the writer has no room for more descriptors")
        return json.loads(data), descriptors

    def _handle(self, message: Json, descriptors: list[int]) -> None:
        op = message["op"]
        if op == "begin":
            self._begin(message, descriptors)
        elif self._attempt is None or message["job"] != self._job:
            return  # of a save that has failed already
        elif op == "filled":
            slab, offset = self._images[message["file"]]
            size = self._attempt.files[message["file"]]["size"]
            padded = -(-size // ALIGN_BYTES) * ALIGN_BYTES
            self._attempt.write_image(message["file"], memoryview(self._slabs[slab])[offset : offset + padded])
        elif op == "commit":
            attempt = self._attempt
            attempt.finish()
            self._end()
            self._send({"op": "done", "job": self._job})
            self._send({"op": "cleaned", "job": self._job, "notes": attempt.clean_up()})
            self._release()
        elif op == "abort":
            self._attempt.drop(message["reason"])
            self._end()
            self._release()

    def _begin(self, message: Json, descriptors: list[int]) -> None:
        self._release()
        self._job = message["job"]
        self._descriptors = descriptors
        # Ends this process: nobody may wait for ever for a dead disk. Waits for other ranks end well before.
        signal.alarm(2 * message["timeout_s"] + 10)
        block = os.pread(descriptors[0], message["block_bytes"], 0)
        fresh = {slab["key"]: descriptor for slab, descriptor in zip(message["slabs"], descriptors[1:], strict=False)}
        for key in set(self._slabs) - set(fresh):
            del self._slabs[key]
        for slab in message["slabs"]:
            if slab["key"] not in self._slabs:
                self._slabs[slab["key"]] = mmap.mmap(fresh[slab["key"]], slab["bytes"], prot=mmap.PROT_READ)
        self._images = [tuple(image) for image in message["images"]]
        self._attempt = Attempt(block, self._progress)
        self._attempt.open()

    def _progress(self, count: int) -> None:
        self._send({"op": "progress", "job": self._job, "bytes": count})

    def _fail(self, error: Exception) -> None:
        if self._attempt is not None:
            self._attempt.drop(f"{type(error).__name__}: {error}")
        self._end()
        self._release()
        self._send({"op": "failed", "job": self._job, **describe(error)})

    def _end(self) -> None:
        signal.alarm(0)
        self._attempt = None

    def _release(self) -> None:
        """Closes what came with the job: the block, the slabs (their mappings stay) and the folder's lock."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _send(self, message: Json) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # the trainer is gone; finish all the same
            self._connection.send(json.dumps(message).encode())


def main() -> None:
    """The writer process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when to end
    _Server(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
