"""A checkpoint on its way to a local disk: files, manifest, one rename. No torch: the writer process runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import xxhash

from ckptplan.state.disk import (
    BufferedFile,
    Report,
    allocate,
    delete_folder,
    fsync_folder,
    move_aside,
    new_file,
    publish,
    write_file,
    write_small,
)

MANIFEST = "manifest.json"
_FIRST_BYTES = 60_000  # of a manifest: its head, which names the attempt
_POLL_S = 0.02

Json = Any


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
            stream = BufferedFile(descriptor, self._report)
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
            return f'"{self.control["attempt"]}"'.encode() in file.read(_FIRST_BYTES)
        return False


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
