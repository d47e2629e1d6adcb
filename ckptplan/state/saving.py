"""Carries a planned save out: by the writer process, by a thread, or on the spot.

- A local folder and mode "async": the snapshot goes into shared memory and the writer process writes it.
- Another storage, or a system without that: the snapshot goes into private memory and a thread writes it.
- Mode "sync", or no memory for a snapshot: the caller's thread streams the tensors to the storage.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from ckptplan.errors import DuplicateCheckpointError, SaveFailedError, StateError, WriterDiedError
from ckptplan.state.arena import Arena, memory_of
from ckptplan.state.attempt import Attempt, Json
from ckptplan.state.disk import Duplicate
from ckptplan.state.folder import CheckpointInfo
from ckptplan.state.future import Future
from ckptplan.state.ids import TAKEN
from ckptplan.state.memory import available_bytes
from ckptplan.state.parallel import try_start
from ckptplan.state.reading import num_threads
from ckptplan.state.snapshot import Snapshot
from ckptplan.state.storage import Storage
from ckptplan.state.writer import WriterProcess, is_supported
from ckptplan.units import format_bytes

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


@dataclass
class Job:
    """A save that has begun. `done`: its future has its outcome; `cleaned`: what it made needless is gone as well."""

    storage: Storage
    future: Future
    info: CheckpointInfo
    attempt: str
    timeout_s: float
    on_success: Callable[[], None]
    number: int = field(default_factory=lambda: next(_numbers))
    done: threading.Event = field(default_factory=threading.Event)
    cleaned: threading.Event = field(default_factory=threading.Event)

    def succeed(self) -> None:
        """The checkpoint is durable."""
        self.on_success()
        self.future.succeed(self.info)
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """The checkpoint will not be."""
        wrapped = as_save_failure(error, self.info.checkpoint_id) if isinstance(error, Exception) else error
        self.future.fail(wrapped)
        self.done.set()
        self.cleaned.set()

    def has_cleaned(self, notes: list[str]) -> None:
        """The clean-up is over; `notes`: what it could not do."""
        for note in notes:
            _log.warning("%s", note)
        self.cleaned.set()


class Saver:
    """Owns the writer process and the memory for snapshots."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._writer: WriterProcess | None = None
        self._free: list[Arena] = []
        self._has_told_of_memory = False

    @property
    def writer_pid(self) -> int | None:
        """Process that writes, None while there is none."""
        return self._writer.pid if self._writer is not None else None

    def start_writer(self) -> None:
        """Starts the writer process unless a living one is there."""
        if self._writer is not None and not self._writer.is_alive:
            self._writer.close(1.0)
            self._writer = None
        if self._writer is None and self._mode == "async" and is_supported():
            try:
                self._writer = WriterProcess()
            except OSError as error:
                _log.warning("no writer process can be started (%s): this save is written on the spot", error)

    def wait_for_writer(self, timeout_s: float) -> None:
        """Waits until the writer process has started."""
        if self._writer is not None:
            self._writer.is_ready.wait(timeout_s)

    def prewarm(self, storage: Storage, snapshot: Snapshot) -> None:
        """Takes the memory for such a snapshot."""
        arena = self._take_arena(storage, snapshot)
        if arena is not None:
            files = snapshot.at_once | snapshot.later
            arena.fill(snapshot.plans, snapshot.spans, files, num_threads(), lambda file: None)
            arena.wait_for_population()
            self._free.append(arena)

    def run(self, job: Job, snapshot: Snapshot, block: bytes, lock: int | None) -> None:
        """Saves; returns when the payload may be changed. Errors go to the job."""
        job.future.note(total_bytes=snapshot.total_bytes)
        arena = self._take_arena(job.storage, snapshot) if self._mode == "async" else None
        if arena is None:
            self._stream(job, block, lambda file: _pieces_of_spans(snapshot, file), len(snapshot.plans))
        elif not arena.is_shared:
            self._hand_to_thread(job, snapshot, block, arena)
        else:
            self.start_writer()
            if self._writer is not None:
                self._hand_to_process(job, snapshot, block, lock, arena, self._writer)
                return
            self._free.append(arena)
            self._stream(job, block, lambda file: _pieces_of_spans(snapshot, file), len(snapshot.plans))

    def close(self, timeout_s: float) -> None:
        """Ends the writer process and frees the memory."""
        if self._writer is not None:
            self._writer.close(timeout_s)
            self._writer = None
        for arena in self._free:
            arena.close()
        self._free = []

    def let_go(self) -> None:
        """Waits for nothing: the writer process finishes what it was handed wholly, and ends by itself."""
        if self._writer is not None:
            self._writer.let_go()

    def leave(self) -> None:
        """In a forked child: lets go of the parent's writer."""
        if self._writer is not None:
            self._writer.leave()

    def _take_arena(self, storage: Storage, snapshot: Snapshot) -> Arena | None:
        """Memory for the snapshot; None where the system has not enough, which is said once."""
        shared = storage.local_path is not None and is_supported()
        matching = [arena for arena in self._free if arena.is_shared == shared]
        arena = matching[0] if matching else Arena(shared=shared)
        growth, available = arena.growth_bytes(snapshot.plans), available_bytes()
        if available is not None and growth > available:
            self._tell_of_memory(f"a snapshot needs {format_bytes(growth)} more and {format_bytes(available)} is free")
            return None
        if matching:
            self._free.remove(arena)
        try:
            arena.fit(snapshot.plans)
        except SaveFailedError as error:  # a limit of this process: ulimit -v, -f, -n
            arena.close()
            self._tell_of_memory(str(error))
            return None
        except BaseException:
            arena.close()
            raise
        return arena

    def _tell_of_memory(self, reason: str) -> None:
        if not self._has_told_of_memory:
            self._has_told_of_memory = True
            _log.warning("%s: saves are written on the spot, and training waits", reason)

    def _hand_to_process(
        self, job: Job, snapshot: Snapshot, block: bytes, lock: int | None, arena: Arena, writer: WriterProcess
    ) -> None:
        copied = threading.Event()

        def free() -> None:
            copied.wait()  # a writer that ended meanwhile is no reason to give memory away that is being filled
            self._free.append(arena)

        def on_message(message: Json | None) -> None:
            if message is None:
                if job.done.is_set():
                    job.has_cleaned([])  # the next save finishes the clean-up
                    return
                free()
                _end_without_writer(job, block, writer.pid)
            elif message["op"] == "progress":
                job.future.add_written(message["bytes"])
            elif message["op"] == "failed":
                writer.forget(job.number)
                free()
                job.fail(_from_writer(message))
            elif message["op"] == "done":
                free()
                job.succeed()
            elif message["op"] == "cleaned":
                writer.forget(job.number)
                job.has_cleaned(message["notes"])

        def fill(files: Set[int]) -> None:
            arena.fill(
                snapshot.plans, snapshot.spans, files, num_threads(), lambda file: writer.filled(job.number, file)
            )

        def fill_the_rest() -> None:
            try:
                fill(snapshot.later)
                writer.commit(job.number)
            except ConnectionError:
                copied.set()
                writer.abandon(job.number)
            except BaseException as error:
                writer.abort(job.number, f"{type(error).__name__}: {error}")
                self._free.append(arena)
                job.fail(error)
            finally:
                copied.set()

        try:
            writer.begin(job.number, block, arena, lock, job.timeout_s, on_message)
            fill(snapshot.at_once)
            if snapshot.later and try_start(
                threading.Thread(target=fill_the_rest, daemon=True, name="ckptplan-state-copy")
            ):
                return
            fill(snapshot.later)
            copied.set()
            writer.commit(job.number)
        except ConnectionError:
            copied.set()
            writer.abandon(job.number)
        except BaseException as error:
            copied.set()
            writer.abort(job.number, f"{type(error).__name__}: {error}")
            self._free.append(arena)
            raise

    def _hand_to_thread(self, job: Job, snapshot: Snapshot, block: bytes, arena: Arena) -> None:
        def fill(files: Set[int]) -> None:
            arena.fill(snapshot.plans, snapshot.spans, files, num_threads(), lambda file: None)

        fill(snapshot.at_once)
        sizes = [[snapshot.spans[span].size_bytes for span in plan.spans] for plan in snapshot.plans]
        images = [arena.image(file, plan) for file, plan in enumerate(snapshot.plans)]
        offsets = [(len(plan.header), plan.offsets) for plan in snapshot.plans]

        def pieces(file: int) -> Iterator[memoryview]:
            header, starts = offsets[file]
            yield images[file][:header]
            for start, size in zip(starts, sizes[file], strict=True):
                if size:
                    yield images[file][start : start + size]

        def write() -> None:
            try:
                fill(snapshot.later)
            except BaseException as error:
                self._free.append(arena)
                job.fail(error)
                return
            try:
                self._stream(job, block, pieces, len(images), on_free=lambda: self._free.append(arena))
            finally:
                images.clear()

        if not try_start(threading.Thread(target=write, daemon=True, name="ckptplan-state-save")):
            write()

    def _stream(
        self,
        job: Job,
        block: bytes,
        pieces: Callable[[int], Iterator[memoryview]],
        num_files: int,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        attempt = make_attempt(job, block)
        try:
            attempt.open()
            for file in range(num_files):
                attempt.write_stream(file, pieces(file))
            attempt.finish()
        except BaseException as error:
            attempt.drop(f"{type(error).__name__}: {error}")
            on_free()
            job.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        on_free()
        job.succeed()
        job.has_cleaned(attempt.clean_up())


def _end_without_writer(job: Job, block: bytes, pid: int) -> None:
    """The writer is dead. It may have committed without saying so; else its files go, and other ranks hear of it."""
    attempt = make_attempt(job, block)
    if attempt.is_committed():
        job.succeed()
        job.has_cleaned([])  # the next save finishes the clean-up
        return
    reason = f"the writer process (pid {pid}) ended before everything was written (killed? out of memory?); save again"
    attempt.drop(reason)
    job.fail(WriterDiedError(reason))


def make_attempt(job: Job, block: bytes) -> Attempt:
    """The attempt for the storage of this job."""
    if job.storage.local_path is not None:
        return Attempt(block, job.future.add_written)
    from ckptplan.state.remote import StorageAttempt

    return StorageAttempt(job.storage, block, job.future.add_written)


def _pieces_of_spans(snapshot: Snapshot, file: int) -> Iterator[memoryview]:
    plan = snapshot.plans[file]
    yield memoryview(plan.header)
    for index in plan.spans:
        if snapshot.spans[index].size_bytes:
            yield memory_of(snapshot.spans[index])


def as_save_failure(error: Exception, checkpoint_id: str) -> Exception:
    """The error that a future carries: one of this package, with the system's error number where there is one."""
    if isinstance(error, StateError):
        return error if type(error) is not StateError else SaveFailedError(f"saving {checkpoint_id!r} failed: {error}")
    if isinstance(error, Duplicate):
        return DuplicateCheckpointError(f"checkpoint {checkpoint_id!r} {TAKEN}")
    reason = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
    number = error.errno if isinstance(error, OSError) else None
    name = str(error.filename) if isinstance(error, OSError) and error.filename else None
    made = SaveFailedError(f"saving {checkpoint_id!r} failed: {reason}", errno=number, filename=name)
    made.__cause__ = error
    return made


def _from_writer(message: Json) -> Exception:
    if message["kind"] == "Duplicate":
        return Duplicate(message["message"])
    if message["errno"] is not None:
        return OSError(message["errno"], message["message"], message["filename"] or None)
    return SaveFailedError(f"the save failed: {message['message']} ({message['kind']})")
