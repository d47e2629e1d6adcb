"""Many runs: each job in a process of its own, one at a time unless asked otherwise, and one table. Torch-free.

A job that dies, hangs or raises costs only itself: whatever happens it leaves a ``result.json``, and the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ckptplan.config import SweepConfig
from ckptplan.config.wording import config_error
from ckptplan.errors import CkptplanError
from ckptplan.jobs import CONSOLE_FILE, Job, RunningJob, last_lines, stop_jobs
from ckptplan.record import load_result
from ckptplan.sweep_table import describe, table_row, text_table, write_table
from ckptplan.units import format_seconds

log = logging.getLogger(__name__)

# A job with one of these has given an answer; any other status makes the sweep fail.
FINE_STATUSES = ("ok", "infeasible", "over_budget", "oom")
POLL_S = 0.1
EARLIER = "earlier"  # folder of attempts that were run again

Result = dict[str, Any]


class SweepTerminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came while jobs were running."""

    def __init__(self, signal_number: int = signal.SIGTERM) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = int(signal_number)


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    settings: SweepConfig | None = None,
    done: Mapping[int, Result] | None = None,
    at_end: Callable[[Sequence[tuple[Job, Result]]], None] = lambda pairs: None,
    held: Sequence[int] = (),
    runner: Runner | None = None,
) -> list[tuple[Job, Result]]:
    """Run the jobs; the table in ``folder`` grows with each, and is printed at the end.

    Args:
        settings: how many at once, how long each, whether a failure stops the rest.
        done: job index -> result of a job that an earlier sweep finished; it is not run.
        held: descriptors that each job holds too (``sole_sweep``).
        at_end: called with jobs and results after the table, unless the user stopped the sweep.
        runner: who runs them; None: processes of this machine.

    Returns jobs with their results, in the order of ``jobs``.
    Raises ``CkptplanError`` at the end if a job failed, ``KeyboardInterrupt`` where the user stopped the sweep.
    """
    settings = settings or SweepConfig()
    results = dict(done or {})
    runner = runner or Processes(settings, held)
    announce(jobs, folder, runner.described, results)
    try:
        with _signals_interrupt():
            left = [job for job in jobs if job.index not in results]
            for job, result in runner.each(left, common_overrides(jobs)):
                results[job.index] = result
                write_table(_rows(jobs, results), [result for _, result in _pairs(jobs, results)], folder)
    except BaseException as error:  # Ctrl-C, or something of our own that fails: no job is left running alone
        asked = int(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        asked = error.signal_number if isinstance(error, SweepTerminated) else asked
        results |= {job.index: result for job, result in runner.stop(asked)}
        raise
    finally:
        rows = _rows(jobs, results)
        write_table(rows, [result for _, result in _pairs(jobs, results)], folder)
        print(text_table(rows))
        print(f"{folder / 'results.md'}  results.csv  results.jsonl")
    at_end(_pairs(jobs, results))
    failed = [row["job"] for row in rows if row["status"] not in FINE_STATUSES]
    if failed:
        not_run = f"; {len(jobs) - len(rows)} were not started" if len(rows) < len(jobs) else ""
        again = "; sweep.resume=true with the same command runs only those" if len(jobs) > len(failed) else ""
        raise CkptplanError(
            f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)} (in {folder}){not_run}{again}"
        )
    return _pairs(jobs, results)


def announce(jobs: Sequence[Job], folder: Path, how: str, done: Mapping[int, Result]) -> None:
    """The list of jobs, before the first starts; ``how`` they are run."""
    log.info(f"{len(jobs)} jobs, {how}, below {folder}")
    common = common_overrides(jobs)
    if common:
        log.info(f"  all with {' '.join(common)}")
    for job in jobs:
        mark = f"  (done: {done[job.index]['status']})" if job.index in done else ""
        log.info(f"  {job.index:3d}  {own_overrides(job, common)}{mark}")
    if done:
        log.info(f"{len(done)} are done already, {len(jobs) - len(done)} are left")


def common_overrides(jobs: Sequence[Job]) -> tuple[str, ...]:
    """What all jobs were asked for, in the order typed; nothing where there is one job only."""
    if len(jobs) < 2:
        return ()
    return tuple(text for text in jobs[0].overrides if all(text in job.overrides for job in jobs))


def own_overrides(job: Job, common: Sequence[str]) -> str:
    return " ".join(text for text in job.overrides if text not in common) or "(nothing more)"


def _pairs(jobs: Sequence[Job], results: Mapping[int, Result]) -> list[tuple[Job, Result]]:
    return [(job, results[job.index]) for job in jobs if job.index in results]


def _rows(jobs: Sequence[Job], results: Mapping[int, Result]) -> list[dict[str, Any]]:
    return [table_row(result, job) for job, result in _pairs(jobs, results)]


class Runner(Protocol):
    """Runs the jobs of a sweep."""

    @property
    def described(self) -> str:
        """How, in a few words."""

    def each(self, jobs: Sequence[Job], common: Sequence[str]) -> Iterator[tuple[Job, Result]]:
        """Each job with its result as it ends; ``common``: what all were asked for and need not be repeated."""

    def stop(self, signal_number: int) -> list[tuple[Job, Result]]:
        """End what is under way, because the user stops the sweep; each leaves a result."""


class Processes:
    """Jobs as processes of this machine, one at a time, several, or one for each of some CUDA devices."""

    def __init__(self, settings: SweepConfig, held: Sequence[int] = ()) -> None:
        self._settings, self._held = settings, held
        self._running: list[RunningJob] = []  # those that were started and have not ended

    @property
    def described(self) -> str:
        count = len(_slots(self._settings))
        at_once = "one at a time" if count == 1 else f"{count} at once"
        return f"{at_once}, each in a process of its own"

    def each(self, jobs: Sequence[Job], common: Sequence[str]) -> Iterator[tuple[Job, Result]]:
        settings, running = self._settings, self._running
        progress = Progress(len(jobs))
        waiting, free = deque(jobs), _slots(settings)
        while waiting or running:
            while waiting and free:
                job = waiting.popleft()
                progress.begins(job, common)
                running.append(RunningJob(job, settings.timeout_s, free.pop(0), self._held))
            over = [one for one in running if one.has_ended() or one.is_late()]
            if not over:
                time.sleep(POLL_S)
            for one in over:
                result = one.result() if one.has_ended() else one.time_out()
                running.remove(one)
                free.append(one.device)
                if result["status"] not in FINE_STATUSES and settings.fail_fast:
                    waiting.clear()
                progress.ended(one.job, result, len(waiting) + len(running))
                yield one.job, result

    def stop(self, signal_number: int) -> list[tuple[Job, Result]]:
        return stop_jobs(self._running, signal_number)


class Progress:
    """Tells when jobs begin and end, and about how long the rest will take."""

    def __init__(self, count: int) -> None:
        self._count, self._ended = count, 0
        self._started_s = time.monotonic()
        self._numbers: dict[int, int] = {}

    def begins(self, job: Job, common: Sequence[str]) -> None:
        number = self._numbers[job.index] = len(self._numbers) + 1
        log.info(f"[{number}/{self._count}] {own_overrides(job, common)}")

    def ended(self, job: Job, result: Result, left: int) -> None:
        """``left``: jobs that have not ended yet."""
        self._ended += 1
        left_s = (time.monotonic() - self._started_s) / self._ended * left
        to_go = f"; about {format_seconds(left_s)} to go" if left else ""
        log.info(f"[{self._numbers[job.index]}/{self._count}] {describe(result)}{to_go}")
        if result["status"] not in FINE_STATUSES:
            log.info(_indented_tail(job.folder / CONSOLE_FILE))


def _slots(settings: SweepConfig) -> list[int | None]:
    """What each job that runs at the same time gets: a CUDA device, or None."""
    return list(settings.devices) or [None] * settings.parallel


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """While jobs run, SIGTERM and SIGHUP end the sweep like Ctrl-C (handlers exist in the main thread only).

    A SIGHUP that is ignored stays so (``nohup``).
    """

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        raise SweepTerminated(signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, terminate)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _indented_tail(path: Path) -> str:
    return "\n".join(f"      {line}" for line in last_lines(path).splitlines() or [f"nothing in {path}"])


@contextlib.contextmanager
def sole_sweep(folder: Path, wait_s: float = 5.0) -> Iterator[Sequence[int]]:
    """Keep other sweeps out of ``folder``; gives the descriptors by which this is done, for the jobs to hold too.

    So a sweep that goes on with one that was killed waits until the job that was running then has ended.
    Raises ``ConfigError`` where that takes longer than ``wait_s``. File systems without locks keep nobody out.
    """
    if sys.platform == "win32":
        yield ()
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline_s, is_told = time.monotonic() + wait_s, False
        while _is_locked_by_another(descriptor):
            if time.monotonic() > deadline_s:
                problem = "a sweep, or a job of one, is still running in this folder"
                raise config_error("sweep.resume", folder, problem, remedy="the same command when it has ended")
            if not is_told:
                log.info(f"waiting for what still runs in {folder}")
                is_told = True
            time.sleep(POLL_S)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _is_locked_by_another(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        log.debug("no lock: %s", error)
    return False


# --- going on with an earlier sweep -----------------------------------------------------------------------------------


def finished_jobs(jobs: Sequence[Job], folder: Path) -> dict[int, tuple[Path, Result]]:
    """Job index -> folder and result of the job of ``folder`` that computed the same and gave an answer.

    Jobs are the same if their config hashes are; each folder stands for one job only.
    """
    there: dict[str, deque[tuple[Path, Result]]] = {}
    for path in sorted(folder.glob("*/result.json")):
        try:
            result = load_result(path)
        except (OSError, CkptplanError) as error:
            log.info(f"{path.parent.name} is run again: {error}")
            continue
        if result["status"] in FINE_STATUSES:
            there.setdefault(str(result["config_hash"]), deque()).append((path.parent, result))
    found = {}
    for job in jobs:
        same = there.get(str(job.result.config_hash))
        if same:
            found[job.index] = same.popleft()
    return found


def newest_sweep(root: Path, overrides: Sequence[str]) -> Path | None:
    """The newest sweep below ``root`` that was started with these overrides, apart from how its jobs are run."""
    wanted = _what_is_run(overrides)
    for path in sorted(root.glob("*/*/multirun.yaml"), reverse=True):
        try:
            stored = OmegaConf.select(OmegaConf.load(path), "hydra.overrides.task")
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            log.info(f"{path} is passed over: {error}")
            continue
        if _what_is_run(stored or ()) == wanted:
            return path.parent
    return None


def _what_is_run(overrides: Iterable[str]) -> list[str]:
    return sorted(text for text in overrides if not text.startswith(("sweep.", "logger", "push_dashboard=")))


def set_aside(folder: Path) -> None:
    """Move what an earlier attempt at a job left, so that its folder is free."""
    if not folder.exists():
        return
    aside, count = folder.parent / EARLIER / folder.name, 1
    while aside.exists():
        count += 1
        aside = aside.with_name(f"{folder.name}_{count}")
    aside.parent.mkdir(exist_ok=True)
    folder.rename(aside)
