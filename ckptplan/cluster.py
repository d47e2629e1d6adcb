"""The jobs of a sweep on a cluster, through submitit: in Slurm's queue, or in processes of this machine that act alike.

What is submitted is the job's own command line, so whatever happens to it leaves a ``result.json`` as anywhere else. A
job that is taken off its node (preemption, time limit) saves its state first, is put back into the queue and goes on
from there, in the same folder. Torch-free.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ckptplan.config import SweepConfig
from ckptplan.config.wording import config_error, hydra_text
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.jobs import Job, RunningJob, complete, stop_jobs
from ckptplan.record import ErrorRecord, load_result
from ckptplan.runs import holds_state
from ckptplan.sweeps import FINE_STATUSES, Progress, Result, set_aside

log = logging.getLogger(__name__)

POLL_S = 0.5
SAVE_GRACE_S = 100.0  # what a job gets to save before it is put back; Slurm is asked to warn 120 s before the end
_SHARED = "timeout_min cpus_per_task gpus_per_node tasks_per_node mem_gb nodes name stderr_to_stdout".split()
# The end of a job as Slurm tells it -> status in result.json. Any other is "failed".
_STATUS_OF_STATE = {"OUT_OF_MEMORY": "oom", "TIMEOUT": "timeout", "CANCELLED": "interrupted"}


def require_submitit(cluster: str) -> None:
    """Raises ``ConfigError`` where the package is missing."""
    if importlib.util.find_spec("submitit") is None:
        problem = "it needs the package submitit, which is not installed"
        raise config_error("hydra/launcher", f"submitit_{cluster}", problem, remedy="pip install -e '.[slurm]'")


class SubmittedJob:
    """What submitit keeps in a file and calls on the node."""

    def __init__(self, job: Job, timeout_s: float | None) -> None:
        self.job, self.timeout_s = job, timeout_s
        self._running: RunningJob | None = None
        self._is_ending = False

    def __call__(self) -> Result:
        """Run the job, or go on with it if it has saved a state; its result."""
        self._running = running = RunningJob(self._this_attempt(), self.timeout_s)
        signal.signal(signal.SIGTERM, self._end)  # of a queue that cancels, or puts jobs back itself
        try:
            while not running.has_ended() and not running.is_late():
                time.sleep(POLL_S / 5)
            while self._is_ending:  # no result: if the job is put back, this was not its end
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return stop_jobs([running], signal.SIGTERM)[0][1]
        return running.result() if running.has_ended() else running.time_out()

    def checkpoint(self) -> Any:
        """Called by submitit before it puts the job back into the queue: the job saves its state and ends."""
        from submitit.helpers import DelayedSubmission

        if self._running is not None:
            self._ask_to_end()
            deadline_s = time.monotonic() + SAVE_GRACE_S
            while not _has_exited(self._running.process.pid) and time.monotonic() < deadline_s:
                time.sleep(POLL_S / 5)
        return DelayedSubmission(SubmittedJob(self.job, self.timeout_s))

    def _this_attempt(self) -> Job:
        folder = self.job.folder
        if holds_state(folder):
            return replace(self.job, command=(*self.job.command, f"resume={hydra_text(str(folder))}"))
        if (folder / "result.json").exists():  # of an attempt that saved nothing
            set_aside(folder)
        return self.job

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        if self._running is not None and not _has_exited(self._running.process.pid):
            os.kill(self._running.process.pid, signal.SIGTERM)

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "timeout_s": self.timeout_s, "_running": None, "_is_ending": False}


def _has_exited(pid: int) -> bool:
    """Without taking the exit code away: whoever waits for the process may be interrupted right now."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


class Queue:
    """Runs jobs in the queue of a cluster (``sweeps.Runner``)."""

    def __init__(self, cluster: str, folder: Path, parameters: Mapping[str, Any], settings: SweepConfig) -> None:
        self._cluster, self._folder, self._settings = cluster, folder, settings
        self._parameters = dict(parameters)
        self._open: dict[int, tuple[Job, Any]] = {}  # submitted and not ended
        if settings.devices or settings.parallel != 1:
            key, value = ("devices", settings.devices) if settings.devices else ("parallel", settings.parallel)
            remedy = "hydra.launcher.gpus_per_node=1, or hydra.launcher.array_parallelism=4 (submitit_slurm)"
            raise config_error(f"sweep.{key}", value, "the queue decides where and how many jobs run", remedy=remedy)
        for key in ("nodes", "tasks_per_node"):
            if self._parameters.get(key, 1) != 1:
                problem = "a job of a sweep is one process on one node; for a run on several nodes see docs/slurm.md"
                raise config_error(f"hydra.launcher.{key}", self._parameters[key], problem, remedy="leave it out")

    @property
    def described(self) -> str:
        return {"slurm": "in Slurm's queue", "local": "all at once, each in a process of its own"}[self._cluster]

    def each(self, jobs: Sequence[Job], common: Sequence[str]) -> Iterator[tuple[Job, Result]]:
        """Each job with its result as it ends."""
        progress = Progress(len(jobs))
        if not jobs:
            return
        submitted = self._submit(jobs)
        for job, handle in zip(jobs, submitted, strict=True):
            progress.begins(job, common)
            log.info(f"      job {handle.job_id}")
            self._open[job.index] = job, handle
        while self._open:
            over = [(job, handle) for job, handle in self._open.values() if handle.done()]
            if not over:
                time.sleep(POLL_S)
            for job, handle in over:
                del self._open[job.index]
                result = _result_of(job, handle)
                if result["status"] not in FINE_STATUSES and self._settings.fail_fast:
                    self._withdraw()
                progress.ended(job, result, len(self._open))
                yield job, result

    def stop(self, signal_number: int) -> list[tuple[Job, Result]]:
        """Cancel what waits or runs."""
        error = ErrorRecord("interrupted", "the sweep was stopped", signal=signal.Signals(signal_number).name)
        found = list(self._open.values())
        for _, handle in found:
            handle.cancel()
        for _, handle in found:
            _wait_briefly(handle)
        return [(job, complete(job, "interrupted", error)) for job, _ in found]

    def _withdraw(self) -> None:
        """Take back the jobs that still wait in the queue."""
        for index, (_, handle) in list(self._open.items()):
            if handle.state == "PENDING":
                handle.cancel()
                del self._open[index]

    def _submit(self, jobs: Sequence[Job]) -> list[Any]:
        import submitit

        given = {**self._parameters}
        most_timeouts = given.pop("max_num_timeout", 0)
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)  # the node finds this package
        try:
            settings = {f"{self._cluster}_max_num_timeout": most_timeouts}
            executor = submitit.AutoExecutor(folder=self._folder, cluster=self._cluster, **settings)
            own = {name if name in _SHARED else f"{self._cluster}_{name}": value for name, value in given.items()}
            executor.update_parameters(**{name: value for name, value in own.items() if value not in (None, {}, [])})
            with executor.batch():  # one array of jobs
                handles = [executor.submit(SubmittedJob(job, self._settings.timeout_s)) for job in jobs]
        except (RuntimeError, NameError, ValueError, TypeError) as error:
            # No srun on this machine, a parameter that nobody knows, an answer of sbatch
            told = " ".join(str(error).split())
            raise ConfigError(f"hydra/launcher=submitit_{self._cluster}: {told}") from error
        return handles


def _result_of(job: Job, handle: Any) -> Result:
    """What the job told; where it could not, what the queue knows."""
    error = handle.exception()
    if error is None:
        return dict(handle.result())
    state = str(handle.state).split()[0].rstrip("+")  # "CANCELLED by 1000", "OUT_OF_MEMORY+"
    told = str(error).strip().splitlines()
    timed_out = any("timed-out" in line for line in told)
    status = "timeout" if timed_out else _STATUS_OF_STATE.get(state, "failed")
    written = _written(job)
    if written is not None and written["status"] != "interrupted":
        return written
    return complete(job, status, ErrorRecord(state, told[-1] if told else "no output"))


def _written(job: Job) -> Result | None:
    try:
        return load_result(job.folder)
    except (OSError, CkptplanError):
        return None


def _wait_briefly(handle: Any, longest_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + longest_s
    while not handle.done() and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 5)
