"""A few threads over a list of work, the caller's own among them: it also goes on where no thread can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sized
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


def try_start(thread: threading.Thread) -> bool:
    """Starts it; False where the system has no more threads to give."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
