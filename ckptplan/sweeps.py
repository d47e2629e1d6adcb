"""Many runs: each job in a process of its own, one at a time, and one table at the end. Torch-free.

A job that dies, hangs or raises costs only itself: whatever happens it leaves a ``result.json``, and the others go on.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ckptplan.errors import CkptplanError
from ckptplan.record import ErrorRecord, RunResult, load_result, write_atomic
from ckptplan.units import format_bytes, format_percent, format_seconds

log = logging.getLogger(__name__)

# A job with one of these has given an answer; any other status makes the sweep fail.
FINE_STATUSES = ("ok", "infeasible", "over_budget", "oom")
EXIT_BAD_CONFIG = 2
STOP_GRACE_S = 30.0  # what a job gets to end after a signal before it is killed
CONSOLE_FILE = "console.log"


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


class SweepTerminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came while jobs were running."""

    def __init__(self, signal_number: int = signal.SIGTERM) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = int(signal_number)


def run_jobs(jobs: Sequence[Job], folder: Path, *, fail_fast: bool = False, timeout_s: float | None = None) -> None:
    """Run the jobs one after the other; the table in ``folder`` grows with each, and is printed at the end.

    Raises ``CkptplanError`` at the end if a job failed, ``KeyboardInterrupt`` where the user stopped the sweep.
    """
    log.info(f"{len(jobs)} jobs, one at a time, each in a process of its own, below {folder}")
    for job in jobs:
        log.info(f"  {job.index:3d}  {' '.join(job.overrides) or '(the defaults)'}")
    results: list[dict[str, Any]] = []
    try:
        with _signals_interrupt():
            for result in _run_each(jobs, fail_fast, timeout_s):
                results.append(result)
                write_table(_rows(jobs, results), results, folder)
    finally:
        rows = _rows(jobs, results)
        write_table(rows, results, folder)
        print(text_table(rows))
        print(f"{folder / 'results.md'}  results.csv  results.jsonl")
    failed = [row["job"] for row in rows if row["status"] not in FINE_STATUSES]
    if failed:
        not_run = f"; {len(jobs) - len(rows)} were not started" if len(rows) < len(jobs) else ""
        raise CkptplanError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)} (in {folder}){not_run}")


def _rows(jobs: Sequence[Job], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [table_row(result, job) for job, result in zip(jobs, results, strict=False)]


def _run_each(jobs: Sequence[Job], fail_fast: bool, timeout_s: float | None) -> Iterator[dict[str, Any]]:
    """The result of each job as it ends, also of the one that the user stopped."""
    started = time.monotonic()
    for count, job in enumerate(jobs, start=1):
        log.info(f"[{count}/{len(jobs)}] {' '.join(job.overrides)}")
        try:
            result = run_in_process(job, timeout_s)
        except KeyboardInterrupt:
            yield read_result(job)
            raise
        left_s = (time.monotonic() - started) / count * (len(jobs) - count)
        log.info(f"    {describe(result)}{f'; about {format_seconds(left_s)} to go' if count < len(jobs) else ''}")
        if result["status"] not in FINE_STATUSES:
            log.info(_indented_tail(job.folder / CONSOLE_FILE))
        yield result
        if fail_fast and result["status"] not in FINE_STATUSES:
            return


# --- one job ----------------------------------------------------------------------------------------------------------


def run_in_process(job: Job, timeout_s: float | None = None) -> dict[str, Any]:
    """Run one job to its end and return its result; a job that wrote none gets one (failed, timeout, interrupted)."""
    job.folder.mkdir(parents=True, exist_ok=True)
    package_root = str(Path(__file__).resolve().parent.parent)
    paths = [package_root, os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with (job.folder / CONSOLE_FILE).open("ab") as console:
        # A session of its own: the job gets signals from us only, and can be killed with all its children.
        process = subprocess.Popen(
            job.command, stdout=console, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stop(process, signal.SIGTERM)
            return _complete(job, "timeout", ErrorRecord("timeout", f"still running after {timeout_s:g} s"))
        except KeyboardInterrupt as error:
            asked = signal.Signals(error.signal_number if isinstance(error, SweepTerminated) else signal.SIGINT)
            stop(process, asked)
            _complete(job, "interrupted", ErrorRecord("interrupted", "the sweep was stopped", signal=asked.name))
            raise
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "; often the system, out of memory" if name == "SIGKILL" else ""
        return _complete(job, "failed", ErrorRecord(name, f"ended by {name}{hint}", signal=name))
    if not (job.folder / "result.json").exists():
        kind = "ConfigError" if exit_code == EXIT_BAD_CONFIG else f"exit code {exit_code}"
        message = _last_lines(job.folder / CONSOLE_FILE) or "no output"
        return _complete(job, "failed", ErrorRecord(kind, message))
    return read_result(job)


def stop(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Ask the process to end, wait ``STOP_GRACE_S``, then kill it with its children."""
    process.send_signal(signal_number)
    try:
        process.wait(STOP_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        log.info("    still running; killed")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_result(job: Job) -> dict[str, Any]:
    """The job's ``result.json``; where that is missing or torn, what we know with status failed."""
    try:
        return load_result(job.folder)
    except (OSError, CkptplanError) as error:
        return _complete(job, "failed", ErrorRecord("no result", str(error)))


def _complete(job: Job, status: str, error: ErrorRecord) -> dict[str, Any]:
    """Write ``result.json`` for a job that ended badly: what it wrote itself, with ``status`` and ``error`` on top."""
    try:
        result = load_result(job.folder)
    except (OSError, CkptplanError):
        result = job.result.to_dict()
    result |= {"status": status, "error": result["error"] or asdict(error)}
    write_atomic(job.folder / "result.json", json.dumps(result, indent=2) + "\n")
    return result


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


def _last_lines(path: Path, count: int = 5) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])


def _indented_tail(path: Path) -> str:
    return "\n".join(f"      {line}" for line in _last_lines(path).splitlines() or [f"nothing in {path}"])


# --- the table --------------------------------------------------------------------------------------------------------

# Column -> path in result.json. The first ones are printed; the files hold all.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "planner": ("planner",),
    "budget": ("budget", "value"),
    "seed": ("seed",),
    "budget_bytes": ("budget", "bytes"),
    "measured_peak_bytes": ("memory", "measured_peak_bytes"),
    "overhead_ratio": ("latency", "overhead_ratio"),
    "recomputed": ("plan", "recomputed"),
    "last_loss": ("training", "last_loss"),
    "budget_kind": ("budget", "kind"),
    "predicted_peak_bytes": ("memory", "predicted_peak_bytes"),
    "prediction_error": ("memory", "prediction_error"),
    "within_budget": ("memory", "within_budget"),
    "smallest_reachable_bytes": ("memory", "smallest_reachable_bytes"),
    "step_ms": ("latency", "step_ms", "p50"),
    "gradients_passed": ("gradients", "passed"),
    "plan": ("plan", "text"),
    "config_hash": ("config_hash",),
    "error": ("error", "message"),
}
_PRINTED = ("job", *list(_COLUMNS)[:9])


def table_row(result: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """One flat row per job; what a job did not find out is None. Seed and config hash allow any grouping."""
    row: dict[str, Any] = {"index": job.index, "job": job.folder.name}
    for column, path in _COLUMNS.items():
        value: Any = result
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        row[column] = value
    return row


def describe(result: Mapping[str, Any]) -> str:
    """A job's outcome in a few words: ``ok, peak 3.10 MiB, step time +8.0 %``."""
    peak = (result.get("memory") or {}).get("measured_peak_bytes")
    ratio = (result.get("latency") or {}).get("overhead_ratio")
    words = [str(result.get("status"))]
    words += [f"peak {format_bytes(peak)}"] if peak is not None else []
    words += [f"step time {format_percent(ratio)}"] if ratio is not None else []
    return ", ".join(words)


def write_table(rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """``results.jsonl`` (each job's whole result), ``results.csv`` and ``results.md`` (a row each)."""
    whole = [{"job": row["job"], "index": row["index"], **result} for row, result in zip(rows, results, strict=True)]
    write_atomic(folder / "results.jsonl", "".join(json.dumps(result) + "\n" for result in whole))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=["index", "job", *_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(folder / "results.csv", text.getvalue())
    lines = ["| " + " | ".join(_PRINTED) + " |", "|" + " --- |" * len(_PRINTED)]
    lines += ["| " + " | ".join(_cell(column, row[column]) for column in _PRINTED) + " |" for row in rows]
    write_atomic(folder / "results.md", "\n".join(lines) + "\n")


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The printed table: a column as wide as its widest cell."""
    heads = [column.replace("_", " ") for column in _PRINTED]
    cells = [heads, *([_cell(column, row[column]) for column in _PRINTED] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
