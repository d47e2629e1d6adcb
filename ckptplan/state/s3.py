"""S3 and stores that speak its protocol: parts in parallel, each sent again by itself, and exclusive creation.

Reading and listing are fsspec's (s3fs). Writing is here, because what is large has to go in parts that are retried one
by one, and because a key must be created and never replaced.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from ckptplan.state.parallel import run_all
from ckptplan.state.reading import FAR_THREADS
from ckptplan.state.remote import FsspecStorage
from ckptplan.units import MIB

_log = logging.getLogger(__name__)
PART_BYTES = 16 * MIB  # all but the last of one size, as some stores want it
_MOST_PARTS = 10_000
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10.0, 60.0
_UPLOAD = "?unfinished-upload="


class S3Storage(FsspecStorage):
    """`s3://bucket/prefix`, with what s3fs takes as options: `endpoint_url`, `key`, `secret`, `profile`, ...

    Credentials and endpoint come from the environment or the files of the AWS tools unless they are given.
    """

    def __init__(self, location: str, *, timeout_s: float = 600.0, **options: Any) -> None:
        # One policy of retries, ours: three on top of each other would take minutes for what one does in seconds.
        network = {
            "connect_timeout": min(_CONNECT_TIMEOUT_S, timeout_s / 8),
            "read_timeout": min(_READ_TIMEOUT_S, timeout_s / 8),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 4 * FAR_THREADS,
            **(options.pop("config_kwargs", None) or {}),
        }
        super().__init__(location, timeout_s=timeout_s, config_kwargs=network, **options)
        self._files.retries = 1
        self._refuses_taken_keys = True
        self._bucket, _, self._prefix = self._root.partition("/")

    def size_bytes(self, path: str) -> int:
        return int(self._request("head_object", path)["ContentLength"])

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        self._refuse_if_there(path)
        parts = _parts(pieces)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self._put(path, first)
        else:
            self._put_in_parts(path, itertools.chain([first, second], parts))

    def left_overs(self) -> list[str]:
        """Data folders without a manifest, and uploads that were begun and never finished: they cost, unseen."""
        try:
            uploads = self._unfinished_uploads()
        except OSError as error:  # a right of its own, and not every store can tell
            _log.debug("unfinished uploads are not looked for: %s", error)
            uploads = []
        return [*super().left_overs(), *uploads]

    def discard(self, left_over: str) -> None:
        path, found, upload = left_over.partition(_UPLOAD)
        if not found:
            self.delete(path)
            return
        with suppress(FileNotFoundError):
            self._request("abort_multipart_upload", path, UploadId=upload)

    def _listed(self, folder: str) -> dict[str, Any]:
        start = self._path(f"{folder}/" if folder else "").partition("/")[2]
        start = start if not start or start.endswith("/") else f"{start}/"
        arguments = {"Bucket": self._bucket, "Prefix": start, "Delimiter": "/"}
        found: dict[str, Any] = {}
        while True:
            page = self._call(folder, partial(self._files.call_s3, "list_objects_v2", **arguments))
            for entry in page.get("CommonPrefixes") or ():
                found[entry["Prefix"].removeprefix(start).rstrip("/")] = {"type": "directory"}
            for entry in page.get("Contents") or ():
                found[entry["Key"].removeprefix(start)] = {"type": "file", "size": entry["Size"]}
            if not page.get("IsTruncated"):
                found.pop("", None)  # some tools make an empty object for the folder itself
                return found
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _unfinished_uploads(self) -> list[str]:
        start = f"{self._prefix}/" if self._prefix else ""
        arguments = {"Bucket": self._bucket, "Prefix": start}
        found: list[str] = []
        while True:
            page = self._call("", partial(self._files.call_s3, "list_multipart_uploads", **arguments))
            for upload in page.get("Uploads") or ():
                found.append(f"{upload['Key'].removeprefix(start)}{_UPLOAD}{upload['UploadId']}")
            if not page.get("IsTruncated"):
                return found
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _put(self, path: str, content: bytes) -> None:
        def put() -> None:
            try:
                self._create("put_object", path, Body=content)
            except Exception as error:
                # Taken by an earlier try of ours, whose answer was lost? (The HTTP library tries again as well.)
                if not _is_taken(error) or self.read(path) != content:
                    raise

        self._call(path, put)

    def _put_in_parts(self, path: str, parts: Iterator[bytes]) -> None:
        upload = self._request("create_multipart_upload", path)["UploadId"]
        done: dict[int, str] = {}
        sizes: dict[int, int] = {}

        def send(numbered: tuple[int, bytes]) -> None:
            number, part = numbered
            if number > _MOST_PARTS:
                raise OSError(errno.EFBIG, f"more than {_MOST_PARTS} parts of {PART_BYTES} bytes", path)
            answer = self._request("upload_part", path, UploadId=upload, PartNumber=number, Body=part)
            done[number], sizes[number] = answer["ETag"], len(part)

        try:
            run_all(send, enumerate(parts, start=1), FAR_THREADS)
            listed = [{"PartNumber": number, "ETag": done[number]} for number in sorted(done)]
            self._complete(path, upload, listed, sum(sizes.values()))
        except BaseException:
            with suppress(OSError):  # else the next good save finds it
                self._request("abort_multipart_upload", path, UploadId=upload)
            raise

    def _complete(self, path: str, upload: str, parts: list[dict[str, Any]], size_bytes: int) -> None:
        def complete() -> None:
            try:
                self._create("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})
            except Exception as error:
                # Done by an earlier try of ours? An upload is gone once it is complete.
                with suppress(FileNotFoundError):
                    is_gone = isinstance(error, FileNotFoundError) or _is_taken(error)
                    if is_gone and self.size_bytes(path) == size_bytes:
                        return
                raise

        self._call(path, complete)

    def _create(self, method: str, path: str, **arguments: Any) -> None:
        """A request that makes the object, unless there is one: where the store knows how, it makes sure of that."""
        if self._refuses_taken_keys:
            try:
                self._request_once(method, path, IfNoneMatch="*", **arguments)
                return
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self._refuses_taken_keys = False
        self._request_once(method, path, **arguments)

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        return self._call(path, lambda: self._request_once(method, path, **arguments))

    def _request_once(self, method: str, path: str, **arguments: Any) -> Any:
        key = self._path(path).partition("/")[2]
        return self._files.call_s3(method, Bucket=self._bucket, Key=key, **arguments)


def _is_taken(error: Exception) -> bool:
    return isinstance(error, FileExistsError) or "PreconditionFailed" in repr(error.__cause__)


def _parts(pieces: Iterable[Any]) -> Iterator[bytes]:
    """The same bytes in parts of one size, but for the last."""
    waiting = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            room = PART_BYTES - len(waiting)
            waiting += view[:room]
            view = view[room:]
            if len(waiting) == PART_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
