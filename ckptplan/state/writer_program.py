"""Puts snapshots on a local disk: files, manifest, one rename. The writer process runs this file by its path.

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

import contextlib
import errno
import json
import mmap
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

MANIFEST = "manifest.json"
ALIGN_BYTES = 4096  # O_DIRECT: of address, offset and length
DIRECT_PIECE_BYTES = 16 * 2**20
BUFFERED_PIECE_BYTES = 512 * 2**10  # small, so that each piece takes pages that the last one gave back
FLUSH_EVERY_BYTES = 8 * 2**20
MESSAGE_BYTES = 60_000
MOST_DESCRIPTORS = 64
NICE = 5  # enough to yield to the trainer; much more only stretches the write
_POLL_S = 0.02

_AT_FDCWD, _RENAME_NOREPLACE, _SYNC_FILE_RANGE_WRITE = -100, 1, 2

Json = Any
Report = Callable[[int], None]
"""Called with the number of bytes that are on their way to the disk since the last call."""


class Duplicate(Exception):
    """The id is taken."""


class Refused(Exception):
    """The save cannot become a checkpoint; the message says why."""


def checksum(data: Any) -> str:
    """32 hexadecimal digits of xxh3-128: against accidents, not against malice."""
    return xxhash.xxh3_128_hexdigest(data)


# --- the job ---


def pack_job(control: Json, files: bytes, tensors: bytes, items: bytes) -> bytes:
    """One block of bytes: four lengths, then the four parts (JSON each)."""
    parts = (json.dumps(control, separators=(",", ":")).encode(), files, tensors, items)
    return b"".join(len(part).to_bytes(8, "little") for part in parts) + b"".join(parts)


def unpack_job(block: bytes) -> tuple[Json, Json, bytes, bytes]:
    """The inverse: control and files parsed, tensors and items as they are (they go into the manifest as text)."""
    sizes = [int.from_bytes(block[8 * index : 8 * index + 8], "little") for index in range(4)]
    parts, position = [], 32
    for size in sizes:
        parts.append(block[position : position + size])
        position += size
    return json.loads(parts[0]), json.loads(parts[1]), parts[2], parts[3]


class Attempt:
    """A checkpoint being written: files one by one, then `finish`; or `drop`.

    Control: location, id, attempt (name of its folder), rank, world_size, chunk_bytes, head (of the manifest),
    supersede, delete, clean_up (names within the location), timeout_s.
    """

    def __init__(self, block: bytes, report: Report) -> None:
        self.control, self.files, self._tensors, self._items = unpack_job(block)
        self._report = report
        self._location = self.control["location"]
        self.folder = os.path.join(self._location, self.control["attempt"])
        self._chunks: dict[int, str] = {}
        self._headers: dict[int, str] = {}
        self._images_seen = 0
        self._hashing: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def open(self) -> None:
        """Makes the folder (rank 0; the others find it)."""
        if self.control["rank"] == 0:
            self._make_folder()
            return
        deadline = time.monotonic() + self.control["timeout_s"]
        while not os.path.isdir(self.folder):
            if time.monotonic() > deadline:
                raise Refused(f"rank 0 did not make {self.folder} in {self.control['timeout_s']} s")
            time.sleep(_POLL_S)

    def write_image(self, index: int, image: memoryview) -> None:
        """Writes file `index`, whose bytes are `image` (page-aligned, padded to whole pages); hashes it in a thread.

        Hashing a file begins when it is written, the last one's meanwhile: the trainer is still copying the snapshot
        when the first come, and needs the cores and the memory more than a checksum does.
        """
        file = self.files[index]
        self._images_seen += 1
        is_last = self._images_seen == len(self.files)
        if is_last:
            self._start_hashing(index, image)
        write_file(self._path(index), image, file["size"], self._report)
        if not is_last:
            self._start_hashing(index, image)

    def _start_hashing(self, index: int, image: memoryview) -> None:
        previous = self._hashing[-1] if self._hashing else None

        def hash_file() -> None:
            if previous is not None:
                previous.join()  # one at a time: the other cores are the trainer's
            try:
                file = self.files[index]
                for span, _, offset, size in file["spans"]:
                    self._chunks[span] = self._hash_span(image[offset : offset + size])
                self._headers[index] = checksum(image[: file["header"]])
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=hash_file)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads to give
            hash_file()
        else:
            self._hashing.append(thread)

    def _wait_for_hashing(self) -> None:
        while self._hashing:
            self._hashing.pop().join()
        if self._failures:
            raise self._failures[0]

    def write_stream(self, index: int, pieces: Iterator[Any]) -> None:
        """Writes file `index` from its header and then each of its spans, in file order; hashes while writing."""
        file = self.files[index]
        with new_file(self._path(index)) as descriptor:
            allocate(descriptor, file["size"])
            stream = _Buffered(descriptor, self._report)
            header = memoryview(next(pieces))
            self._headers[index] = checksum(header)
            stream.write(header)
            for span, _, _, size in file["spans"]:
                digests = []
                data = memoryview(next(pieces)) if size else memoryview(b"")
                for start in range(0, size, self.control["chunk_bytes"]):
                    chunk = data[start : start + self.control["chunk_bytes"]]
                    digests.append(checksum(chunk))
                    stream.write(chunk)
                self._chunks[span] = "".join(digests)
            os.fsync(descriptor)

    def finish(self) -> None:
        """Commits: rank 0 when every rank's part is there; the others wait for that."""
        self._wait_for_hashing()
        rank, world_size = self.control["rank"], self.control["world_size"]
        part = self._part()
        if rank != 0:
            self._put_part(f".part-{rank}", with_digest(part))
            self._wait_for_commit()
            return
        parts = [part, *(self._wait_for_part(other) for other in range(1, world_size))]
        for file in (file for each in parts for file in json.loads(each)["files"]):
            actual = self._size(file["name"])
            if actual != file["size"]:
                raise Refused(f"{file['name']} has {actual} bytes instead of {file['size']}")
        head = json.dumps(self.control["head"], separators=(",", ":")).encode()
        self._commit(with_digest(head[:-1] + b',"ranks":[\n' + b",\n".join(parts) + b"]}"))

    def _commit(self, manifest: bytes) -> None:
        for rank in range(1, self.control["world_size"]):
            os.unlink(os.path.join(self.folder, f".part-{rank}"))
        self._put(MANIFEST, manifest)
        for name in self.control["supersede"]:
            move_aside(self._location, name, "superseded")
        publish(self.folder, os.path.join(self._location, self.control["id"]))
        fsync_folder(self._location)

    def clean_up(self) -> list[str]:
        """Deletes what the new checkpoint makes needless and what earlier attempts left; returns what failed."""
        if self.control["rank"] != 0:
            return []
        failures = []
        for name in (*self.control["delete"], *self.control["clean_up"]):
            if not os.path.lexists(os.path.join(self._location, name)):
                continue  # the clean-up of the save before was still at it when this one was asked for
            try:
                delete_folder(self._location, name)
            except OSError as error:
                failures.append(f"could not delete {name}: {error}")
        return failures

    def drop(self, reason: str) -> None:
        """Gives the attempt up. Several ranks: the reason is left for the others, the folder for the next clean-up."""
        if self.control["world_size"] == 1:
            self._remove()
            return
        with contextlib.suppress(OSError):  # the disk may be full; the others then wait until their time is up
            self._make_folder()  # a rank can fail before rank 0 has made it; the others must hear of it all the same
            self._put(f".failed-{self.control['rank']}", reason.encode())

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, index: int) -> str:
        return os.path.join(self.folder, self.files[index]["name"])

    def _hash_span(self, data: memoryview) -> str:
        step = self.control["chunk_bytes"]
        return "".join(checksum(data[start : start + step]) for start in range(0, len(data), step))

    def _part(self) -> bytes:
        files, spans = [], {}
        for index, file in enumerate(self.files):
            entry = {"name": file["name"], "item": file["item"], "size": file["size"], "header": file["header"]}
            files.append({**entry, "checksum": self._headers[index]})
            for span, name, offset, size in file["spans"]:
                chunks = self._chunks[span]
                spans[span] = {"file": index, "name": name, "offset": offset, "size": size, "chunks": chunks}
        front = {"rank": self.control["rank"], "chunk_bytes": self.control["chunk_bytes"], "files": files}
        front["spans"] = [spans[index] for index in range(len(spans))]
        text = json.dumps(front, separators=(",", ":")).encode()
        return text[:-1] + b',"tensors":' + self._tensors + b',"items":' + self._items + b"}"

    def _wait_for_part(self, rank: int) -> bytes:
        deadline = time.monotonic() + self.control["timeout_s"]
        while time.monotonic() < deadline:
            self._raise_if_failed()
            content = self._get(f".part-{rank}")
            if content is not None and has_digest(content):  # otherwise it is still being written
                return split_digest(content)[0]
            time.sleep(_POLL_S)
        raise Refused(f"rank {rank} did not finish writing in {self.control['timeout_s']} s")

    def _wait_for_commit(self) -> None:
        deadline = time.monotonic() + self.control["timeout_s"]
        while time.monotonic() < deadline:
            self._raise_if_failed()
            if self.is_committed():
                return
            time.sleep(_POLL_S)
        raise Refused(f"rank 0 did not commit in {self.control['timeout_s']} s")

    def _raise_if_failed(self) -> None:
        for rank in range(self.control["world_size"]):
            reason = self._get(f".failed-{rank}") if rank != self.control["rank"] else None
            if reason is not None:
                raise Refused(f"rank {rank} failed: {reason.decode('utf-8', 'replace')}")

    # What follows is of a local folder; other storages do these in their own way.

    def _make_folder(self) -> None:
        os.makedirs(self._location, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # a rank that failed early made it to say why; the name is unique
            os.mkdir(self.folder)

    def _put_part(self, name: str, content: bytes) -> None:
        # The part comes last: as soon as rank 0 sees it whole, it may rename the folder.
        fsync_folder(self.folder)
        write_small(os.path.join(self.folder, name), content)

    def _put(self, name: str, content: bytes) -> None:
        write_small(os.path.join(self.folder, name), content)
        fsync_folder(self.folder)

    def _get(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, name), "rb") as file:
            return file.read()
        return None

    def _size(self, name: str) -> int:
        return os.stat(os.path.join(self.folder, name)).st_size

    def is_committed(self) -> bool:
        """Whether this attempt, and no other, has become the checkpoint."""
        path = os.path.join(self._location, self.control["id"], MANIFEST)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            return f'"{self.control["attempt"]}"'.encode() in file.read(MESSAGE_BYTES)
        return False


# --- files ---

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
        _Buffered(descriptor, report).write(image[:size])
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


class _Buffered:
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


# --- the digest in the last line ---

_DIGEST_PREFIX = b"\nxxh3_128:"


def with_digest(content: bytes) -> bytes:
    """The content, and a last line with the digest of all bytes before that line."""
    return content + b"\nxxh3_128:" + checksum(content + b"\n").encode() + b"\n"


def split_digest(content: bytes) -> tuple[bytes, str]:
    """Content and digest; the digest is "" where there is no such last line."""
    body, found, last = content.rpartition(_DIGEST_PREFIX)
    return (body, last[:-1].decode("ascii", "replace")) if found and last.endswith(b"\n") else (content, "")


def has_digest(content: bytes) -> bool:
    """Whether the last line is the digest of the bytes before it."""
    body, digest = split_digest(content)
    return digest == checksum(body + b"\n")


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


# --- the program ---


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
