"""What goes wrong with a storage that is far: every error as an OSError, and whether it will pass.

fsspec's file systems raise OSErrors for most answers of a server, and errors of their HTTP libraries for the rest.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Made = TypeVar("Made")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0
_LONGEST_FIRST_S = 10.0  # as long as nothing has ever succeeded
_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "requests", "urllib3", "gcsfs", "azure", "google", "fsspec", "s3fs")
_NO_SUCH_BUCKET = ("NoSuchBucket", "InvalidBucketName")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError")
_PASSING_CODES = (
    "SlowDown Throttling ThrottlingException RequestLimitExceeded TooManyRequests RequestTimeout InternalError "
    "ServiceUnavailable BadDigest IncompleteBody XAmzContentSHA256Mismatch OperationAborted ConditionalRequestConflict"
).split()
_PASSING_NUMBERS = {
    getattr(errno, name)
    for name in "EAGAIN EBUSY EPIPE ETIMEDOUT ECONNRESET ECONNREFUSED ECONNABORTED EHOSTUNREACH ENETUNREACH "
    "ENETDOWN EREMOTEIO".split()
    if hasattr(errno, name)
}


class Patience:
    """Calls again what failed in passing, with growing pauses.

    Until something has succeeded, it gives up soon: a wrong address is more likely than a store that is down.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._first_s = min(longest_s, _LONGEST_FIRST_S)
        self._has_succeeded = False

    def call(self, path: str, call: Callable[[], Made]) -> Made:
        """What `call` returns. Raises OSError, of `path`, for everything that a storage or its libraries raise."""
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                made = call()
            except Exception as error:
                found = as_os_error(error, path)
                longest_s = self._longest_s if self._has_succeeded else self._first_s
                if not is_passing(found) or time.monotonic() - started + pause_s > longest_s:
                    if isinstance(found, (FileNotFoundError, FileExistsError)):
                        self._has_succeeded = True  # an answer all the same
                    raise found from error
            else:
                self._has_succeeded = True
                return made
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # many ranks must not come back in the same moment
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def as_os_error(error: Exception, path: str) -> OSError:
    """The error as one of the system's. Raises it again if it is none of a storage."""
    code, status = _answer(error)
    text = " ".join(str(error).split()) or type(error).__name__
    names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    if code in _NO_SUCH_BUCKET:
        return OSError(errno.ENXIO, f"there is no such bucket ({text}); create it, or correct the location", path)
    if code == "PreconditionFailed":
        return FileExistsError(errno.EEXIST, "it is there already", path)
    if names.intersection(_NO_CREDENTIALS):
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role, or give options="
        return PermissionError(errno.EACCES, f"no credentials ({text}); {advice}", path)
    if code in _PASSING_CODES or (status is not None and (status >= 500 or status == 429)):
        return OSError(errno.EBUSY, f"the store does not serve this now: {code or status}: {text}", path)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"not allowed: {text}", path)
    if isinstance(error, TimeoutError) or names.intersection(("ReadTimeoutError", "ConnectTimeoutError", "Timeout")):
        return TimeoutError(errno.ETIMEDOUT, f"the store does not answer ({text})", path)
    if isinstance(error, OSError) and error.errno is not None:
        return error
    is_of_library = type(error).__module__.partition(".")[0] in _LIBRARIES
    if names.intersection(("HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError")):
        return ConnectionError(errno.ECONNRESET, f"the connection failed ({text})", path)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "it is not there", path)
    if isinstance(error, OSError) or is_of_library:
        return OSError(errno.EIO, text, path)
    raise error


def is_passing(error: OSError) -> bool:
    """Whether the same request may well succeed a little later."""
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in _PASSING_NUMBERS


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _answer(error: BaseException) -> tuple[str | None, int | None]:
    """Code and HTTP status of the server's answer, if there was one."""
    for cause in _chain(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            found = response.get("Error", {}), response.get("ResponseMetadata", {})
            return found[0].get("Code"), found[1].get("HTTPStatusCode")
    return None, None
