"""The outcome of a save, and how far it has got."""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import dataclass
from typing import Any

from ckptplan.state.folder import CheckpointInfo


@dataclass(frozen=True)
class Progress:
    """How far a save is.

    Attributes:
        phase: "copying", "writing", "done" or "failed".
        written_bytes, total_bytes: of the tensor files.
        wait_s: spent in `save` waiting for an earlier save to give up its memory.
        copy_s: spent in `save` on the snapshot (in mode "sync": on everything).
        durable_s: from the call of `save` until the checkpoint was committed; None before.
    """

    phase: str
    written_bytes: int
    total_bytes: int
    wait_s: float
    copy_s: float
    durable_s: float | None


class Future(concurrent.futures.Future[CheckpointInfo]):
    """Of one save: `result()` returns when the checkpoint is durable, or raises what went wrong."""

    def __init__(self, checkpoint_id: str) -> None:
        super().__init__()
        self.checkpoint_id = checkpoint_id
        self.is_reported = False  # somebody has seen how it ended
        self._started = time.monotonic()
        self._phase = "copying"
        self._written_bytes = self._total_bytes = 0
        self._wait_s = self._copy_s = 0.0
        self._durable_s: float | None = None

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """The finished checkpoint. Raises what made the save fail, or TimeoutError."""
        try:
            return super().result(timeout)
        finally:
            self.is_reported |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What made the save fail, or None."""
        try:
            return super().exception(timeout)
        finally:
            self.is_reported |= self.done()

    def cancel(self) -> bool:
        """Never: a save that has begun ends by itself."""
        return False

    def progress(self) -> Progress:
        """A picture of this moment."""
        return Progress(
            self._phase, self._written_bytes, self._total_bytes, self._wait_s, self._copy_s, self._durable_s
        )

    def note(self, **figures: Any) -> None:
        """Sets figures of `progress` by name; for the manager."""
        for name, value in figures.items():
            setattr(self, f"_{name}", value)

    def add_written(self, count: int) -> None:
        """`count` more bytes are on their way to the disk; for the writer."""
        self._written_bytes += count

    def succeed(self, info: CheckpointInfo) -> None:
        """Ends well; for the manager."""
        self._durable_s = time.monotonic() - self._started
        self._phase = "done"
        self.set_result(info)

    def fail(self, error: BaseException) -> None:
        """Ends badly; for the manager."""
        self._phase = "failed"
        self.set_exception(error)
