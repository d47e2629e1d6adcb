"""The clock that measuring code reads: the machine's, or that of a device which is only computed. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_read: Callable[[], float] = time.perf_counter


def now_s() -> float:
    """Seconds since some fixed moment."""
    return _read()


@contextmanager
def reading(clock: Callable[[], float]) -> Iterator[None]:
    """While the context lasts ``now_s`` is ``clock``, in every thread: a backward may run in one of its own."""
    global _read
    before, _read = _read, clock
    try:
        yield
    finally:
        _read = before
