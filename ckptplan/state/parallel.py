"""A few threads over a list of work, the caller's own among them: it also goes on where no thread can be started."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Work = TypeVar("Work")


def run_all(call: Callable[[Work], object], work: Iterable[Work], threads: int) -> None:
    """Calls `call` with each piece of work; raises the first error, after all threads have stopped."""
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for piece in work:
        waiting.put(piece)
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            while not errors:
                call(waiting.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)

    helpers = [
        helper
        for helper in (threading.Thread(target=drain, daemon=True) for _ in range(min(threads, waiting.qsize()) - 1))
        if try_start(helper)
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
