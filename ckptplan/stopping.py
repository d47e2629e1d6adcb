"""Ctrl-C, SIGTERM and SIGHUP during a run: finish what is in hand, write the records, leave with 130, 143 or 129."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ckptplan.errors import RunInterruptedError

log = logging.getLogger(__name__)

# SIGHUP: the terminal was closed. Windows has none.
HANDLED_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopFlag:
    """Owns SIGINT, SIGTERM and SIGHUP inside a ``with`` block and turns the first of them into a flag.

    Every loop of a run asks the flag (``if stop(): ...``, or ``stop.check()``, which raises), so a
    signal that comes while profiling or evaluating is not lost. A Ctrl-C that comes when the flag is
    already set raises ``KeyboardInterrupt`` at once. A handler that somebody installed before (not
    Python's own) is called after the flag is set; all handlers are put back on leaving. SIGHUP stays ignored where
    it was (``nohup``).

    Signals reach Python code in the main thread only; elsewhere the block changes nothing and says so.
    A worker process forked inside the block inherits the handler but not its meaning: there Ctrl-C is
    left to the parent, and the others end the worker as it always would.

    Attributes:
        signal_number: the first signal received, or None.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._earlier: dict[int, Any] = {}
        self._owner_pid = os.getpid()

    def __call__(self) -> bool:
        """Whether the run was asked to end."""
        return self.signal_number is not None

    @property
    def signal_name(self) -> str | None:
        """``"SIGINT"``, ``"SIGTERM"``, ``"SIGHUP"`` or None."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process ended by this signal: 130, 143 or 129; 0 if none came."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def request(self, signal_number: int) -> None:
        """Set the flag as if ``signal_number`` had come; the first one stays."""
        if self.signal_number is None:
            self.signal_number = int(signal_number)

    def check(self) -> None:
        """Raise ``RunInterruptedError`` if the run was asked to end: for loops that cannot return early."""
        if self.signal_number is not None and self.signal_name is not None:
            raise RunInterruptedError(self.signal_number, self.signal_name)

    def __enter__(self) -> StopFlag:
        self._owner_pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            log.warning("not in the main thread: Ctrl-C, SIGTERM and SIGHUP are left to whoever handles them now")
            return self
        for number in HANDLED_SIGNALS:
            if is_hangup_ignored(number):
                continue
            self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            # None: installed from C, which Python cannot put back; the default is the nearest thing
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner_pid:
            _handle_in_worker(number)
            return
        again = self()
        self.request(number)
        handler = self._earlier.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            user_handler: Callable[[int, FrameType | None], Any] = handler
            user_handler(number, frame)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt


def is_hangup_ignored(number: int) -> bool:
    """Whether ``number`` is SIGHUP and the process was started to outlive its terminal (``nohup``)."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN


def _handle_in_worker(number: int) -> None:
    # A terminal sends Ctrl-C to the whole process group; the parent still needs its workers for the current step.
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
