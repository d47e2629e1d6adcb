"""One job of a sweep: a process of its own, which leaves a ``result.json`` whatever becomes of it. Torch-free."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptplan.config.wording import config_error
from ckptplan.errors import CkptplanError
from ckptplan.processes import end_with_parent
from ckptplan.record import ErrorRecord, RunResult, load_result, write_atomic

log = logging.getLogger(__name__)

EXIT_BAD_CONFIG = 2
STOP_GRACE_S = 30.0  # what a job gets to end after a signal before it is killed
CONSOLE_FILE = "console.log"
LAUNCHER_VARIABLE = "CKPTPLAN_LAUNCHER_PID"  # environment of a job: who waits for it


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        overrides: what the job was asked for, as typed ("planner=dp").
        command: the whole command line of its process.
        result: what is known of it before it runs; its ``result.json`` where the job cannot write one itself.
    """

    index: int
    overrides: tuple[str, ...]
    folder: Path
    command: tuple[str, ...]
    result: RunResult


@dataclass
class RunningJob:
    """A job whose process was started.

    Attributes:
        device: the only CUDA device that it sees, counted among those of the sweep; None: all of them.
        held: open descriptors that its process holds too, until it ends.
    """

    job: Job
    timeout_s: float | None = None
    device: int | None = None
    held: Sequence[int] = ()
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.job.folder.mkdir(parents=True, exist_ok=True)
        self._oom_kills = oom_kills()
        self._earlier_ns = _written_ns(self.job)  # of a run that the job goes on with
        with (self.job.folder / CONSOLE_FILE).open("ab") as console:
            # A session of its own: the job gets signals from us only, and can be killed with all its children.
            self.process = subprocess.Popen(
                self.job.command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=_environment(self.device),
                start_new_session=True,
                pass_fds=self.held,
            )
        self._deadline_s = None if self.timeout_s is None else time.monotonic() + self.timeout_s

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def time_out(self) -> dict[str, Any]:
        """End the job, with its children, because its time is over; its result."""
        stop([self.process], signal.SIGTERM)
        return complete(self.job, "timeout", ErrorRecord("timeout", f"still running after {self.timeout_s:g} s"))

    def result(self) -> dict[str, Any]:
        """The result of the job that ended by itself; one that wrote none gets one."""
        exit_code = self.process.returncode
        if exit_code < 0:
            end_children(self.process)  # workers that nobody waits for any more
            return self._killed(_signal_name(-exit_code))
        written_ns = _written_ns(self.job)
        if written_ns is None or (exit_code != 0 and written_ns == self._earlier_ns):
            kind = "ConfigError" if exit_code == EXIT_BAD_CONFIG else f"exit code {exit_code}"
            error = ErrorRecord(kind, last_lines(self.job.folder / CONSOLE_FILE) or "no output")
            if written_ns is None:
                return complete(self.job, "failed", error)
            return {**self.job.result.to_dict(), "status": "failed", "error": asdict(error)}  # the earlier one stays
        return read_result(self.job)

    def _killed(self, name: str) -> dict[str, Any]:
        before, after = self._oom_kills, oom_kills()
        if name == "SIGKILL" and before is not None and after is not None and after > before:
            return complete(self.job, "oom", ErrorRecord(name, "killed by the system, out of memory", signal=name))
        hint = "; often the system, out of memory" if name == "SIGKILL" else ""
        return complete(self.job, "failed", ErrorRecord(name, f"ended by {name}{hint}", signal=name))


def run_in_process(job: Job, timeout_s: float | None = None) -> dict[str, Any]:
    """Run one job to its end and return its result; a job that wrote none gets one (failed, oom, timeout)."""
    running = RunningJob(job, timeout_s)
    try:
        running.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return running.time_out()
    return running.result()


def stop_jobs(running: Sequence[RunningJob], signal_number: int) -> list[tuple[Job, dict[str, Any]]]:
    """End jobs because the user stops the sweep; each leaves a result."""
    stop([job.process for job in running], signal_number)
    error = ErrorRecord("interrupted", "the sweep was stopped", signal=_signal_name(signal_number))
    return [(one.job, complete(one.job, "interrupted", error)) for one in running]


def end_with_launcher() -> None:
    """In a job of a sweep: end as after SIGTERM when the launcher has died, also by ``kill -9`` (Linux).

    Without it the job would go on beside those of the sweep's next call, in the same folders.
    """
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)  # not for processes that the job starts
    if launcher is not None:
        end_with_parent(int(launcher), signal.SIGTERM)


def stop(processes: Sequence[subprocess.Popen[bytes]], signal_number: int) -> None:
    """Ask the processes to end, wait ``STOP_GRACE_S`` for all, then kill what is left, with their children."""
    for process in processes:
        process.send_signal(signal_number)
    deadline_s = time.monotonic() + STOP_GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            log.info("    still running; killed")
            deadline_s = 0.0
        end_children(process)
        process.wait()


def end_children(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session of ``process``, itself included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def read_result(job: Job) -> dict[str, Any]:
    """The job's ``result.json``; where that is missing or torn, what we know with status failed."""
    try:
        return load_result(job.folder)
    except (OSError, CkptplanError) as error:
        return complete(job, "failed", ErrorRecord("no result", str(error)))


def complete(job: Job, status: str, error: ErrorRecord) -> dict[str, Any]:
    """Write ``result.json`` for a job that ended badly: what it wrote itself, with ``status`` and ``error`` on top."""
    try:
        result = load_result(job.folder)
    except (OSError, CkptplanError):
        result = job.result.to_dict()
    result |= {"status": status, "error": result["error"] or asdict(error)}
    write_atomic(job.folder / "result.json", json.dumps(result, indent=2) + "\n")
    return result


def last_lines(path: Path, count: int = 5) -> str:
    """The last lines of a text file, "" where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])


def oom_kills(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of our control group the kernel has killed for memory so far; None where nobody counts."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = (mount / "memory", "memory.oom_control") if controllers else (mount, "memory.events")
        for counter in (folder / path.lstrip("/") / name, folder / name):  # a container may see its group as the root
            with contextlib.suppress(OSError):
                counts = dict(entry.split(maxsplit=1) for entry in counter.read_text(encoding="utf-8").splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return None


def _written_ns(job: Job) -> int | None:
    try:
        return (job.folder / "result.json").stat().st_mtime_ns
    except OSError:
        return None


def _environment(device: int | None) -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parent.parent)
    paths = [package_root, os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment[LAUNCHER_VARIABLE] = str(os.getpid())
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(device)
    return environment


def _visible(device: int) -> str:
    """The name of a device; where only some may be used (a queue gives a job its share so), it counts among those."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if names and device >= len(names):
        problem = f"CUDA_VISIBLE_DEVICES={','.join(names)} leaves {len(names)} to choose from, counted from 0"
        raise config_error("sweep.devices", device, problem, remedy=f"'sweep.devices={list(range(len(names)))}'")
    return names[device] if names else str(device)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
