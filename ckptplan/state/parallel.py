"""Work in batches, and a few threads over it, the caller's own among them: it goes on where none can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

Work = TypeVar("Work")


def run_all(call: Callable[[Work], object], work: Iterable[Work], threads: int) -> None:
    """Calls `call` with each piece of work, which is asked for when a thread is free.

    Raises the first error, also one of the iterator, after all threads have stopped.
    """
    waiting = iter(work)
    taking = threading.Lock()
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            while not errors:
                with taking:
                    try:
                        piece = next(waiting)
                    except StopIteration:
                        return
                call(piece)
        except BaseException as error:
            errors.append(error)

    most = min(threads, len(work)) if isinstance(work, Sized) else threads
    helpers = [
        helper for helper in (threading.Thread(target=drain, daemon=True) for _ in range(most - 1)) if try_start(helper)
    ]
    drain()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def in_batches(work: Iterable[Work], size_bytes: Callable[[Work], int], least_bytes: int) -> Iterator[list[Work]]:
    """The work in its order, in lists of at least so many bytes each; the last one may have fewer."""
    batch: list[Work] = []
    total_bytes = 0
    for piece in work:
        batch.append(piece)
        total_bytes += size_bytes(piece)
        if total_bytes >= least_bytes:
            yield batch
            batch, total_bytes = [], 0
    if batch:
        yield batch


def try_start(thread: threading.Thread) -> bool:
    """Starts it; False where the system has no more threads to give."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
