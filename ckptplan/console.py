"""Output that never stops a run: whoever reads it may leave (``| head -1``), its disk may be full. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: ``ulimit -f``


class LastingStream:
    """A text stream; once a write fails, it and all that follows go nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._failures_dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failures_dropped():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _failures_dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The descriptor itself leads nowhere now: the stream still holds text that Python writes at the end.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Stdout and stderr that drop what nobody can take, and loggers that do the same without a word."""
    streams, tells = (sys.stdout, sys.stderr), logging.raiseExceptions
    # Python has no stream where the descriptor was closed (``>&-``).
    lasting = [cast(TextIO, LastingStream(stream if stream is not None else _nowhere())) for stream in streams]
    sys.stdout, sys.stderr = lasting
    logging.raiseExceptions = False  # else a log file on a full disk is told with a traceback for every line
    try:
        yield
    finally:
        for stream in lasting:
            stream.flush()
        sys.stdout, sys.stderr = streams
        logging.raiseExceptions = tells


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """A failed write to an open file does not say which: put ``path`` into its error."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
