"""What a run leaves behind: ``metrics.jsonl`` line by line and ``result.json`` at the end. Torch-free.

An unknown figure is null, never 0 or NaN. Both files are valid JSON whatever the run computed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptplan.console import naming
from ckptplan.errors import CkptplanError

log = logging.getLogger(__name__)

RESULT_SCHEMA = "ckptplan.result/1"

# The process ends with the code of its status; SIGTERM makes "interrupted" 143 (see `exit_code`).
STATUS_EXIT_CODES: dict[str, int] = {
    "ok": 0,
    "failed": 1,
    "infeasible": 3,
    "over_budget": 4,
    "oom": 5,
    "mismatch": 6,
    "timeout": 124,
    "interrupted": 130,
}

# Every key a line of metrics.jsonl may have, in this order.
METRIC_KEYS = (
    "step",  # optimizer step, from 1
    "epoch",  # from 0
    "train/loss",  # mean over the targets of the step's accumulation window
    "lr",  # the rate this step used
    "grad_norm",  # before clipping
    "step_s",  # wall time, reading the data included
    "peak_bytes",  # most bytes allocated on the device during the step; null on CPU
    "peak_drift",  # only on steps that were measured: share by which their peak was above (below: negative) the plan's
    "skipped_updates",  # only on steps whose update was skipped: how many so far
    "eval/loss",  # only on evaluation lines
    "eval_s",
)


def exit_code(status: str, signal_number: int | None = None) -> int:
    """The exit code for a status; ``128 + signal_number`` where a signal ended the run."""
    if status not in STATUS_EXIT_CODES:
        raise ValueError(f"status={status!r} is unknown; expected one of {', '.join(STATUS_EXIT_CODES)}")
    if status == "interrupted" and signal_number is not None:
        return 128 + signal_number
    return STATUS_EXIT_CODES[status]


# --- result.json: one mutable record, filled as the run goes, so that a run that dies half-way leaves what it knew ---


@dataclass(slots=True)
class ErrorRecord:
    type: str
    message: str
    signal: str | None = None


@dataclass(slots=True)
class ProfileRecord:
    source: str | None = None  # "measured" by this run, "shared": read from what another wrote, "resumed": from before
    file: str | None = None  # the file that runs share
    measured_s: float | None = None  # what measuring took, whoever did it


@dataclass(slots=True)
class PlanRecord:
    text: str | None = None
    digest: str | None = None
    solve_s: float | None = None
    kept: int | None = None
    recomputed: int | None = None
    selective: int | None = None
    offloaded: int | None = None
    compiled: int | None = None
    optimality_gap: float | None = None


@dataclass(slots=True)
class CertificateRecord:
    cost: float | None = None  # that recomputation adds to a step, in ms or FLOPs by cost_kind
    cost_kind: str | None = None
    lower_bound: float | None = None  # no plan of any shape within the budget costs less
    flat_lower_bound: float | None = None
    gap: float | None = None  # (cost - lower_bound) / cost
    cross_check: str | None = None
    weight_copies_bytes: int | None = None  # autocast's, held from the forward until backward
    dry_run_peak_bytes: int | None = None
    operator: str | None = None  # at the dry run's peak, with block and phase
    block: str | None = None
    phase: str | None = None


@dataclass(slots=True)
class BudgetRecord:
    kind: str | None = None
    value: float | int | str | None = None
    bytes: int | None = None
    margin_bytes: int | None = None


@dataclass(slots=True)
class MemoryRecord:
    no_checkpoint_predicted_peak_bytes: int | None = None
    no_checkpoint_measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    prediction_error: float | None = None  # (predicted - measured) / measured
    within_budget: bool | None = None
    smallest_reachable_bytes: int | None = None
    peak_at: str | None = None
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_reserved_bytes: int | None = None
    training_peak_bytes: int | None = None  # of the step of training furthest above its plan, with its gradients
    training_expected_bytes: list[int] | None = None  # least and most that was expected of it
    training_drift: float | None = None  # share by which it is outside of these
    rows: list[dict[str, Any]] | None = None  # all of the device's memory at the plan's peak: name, bytes, note
    largest_batch_samples: int | None = None
    longest_sequence: int | None = None


@dataclass(slots=True)
class RankRecord:
    """One process of the run; peaks are above what stands on it before a step."""

    rank: int = 0
    host: str | None = None
    device: str | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    prediction_error: float | None = None  # (predicted - measured) / measured
    within_budget: bool | None = None


@dataclass(slots=True)
class EngineRecord:
    kind: str | None = None
    ranks: int | None = None
    tensor_ranks: int | None = None  # of these, how many share each matrix product
    gathered_weights_bytes: int | None = None  # FSDP2: the most weights and buffers of them at once, in the peak above
    gradient_buckets_bytes: int | None = None  # DDP: its buckets, which are the gradients
    per_rank: list[RankRecord] = field(default_factory=list)  # empty with one process


@dataclass(slots=True)
class StepTimes:
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    std: float | None = None
    n: int | None = None


@dataclass(slots=True)
class LatencyRecord:
    step_ms: StepTimes = field(default_factory=StepTimes)
    no_checkpoint_step_ms: StepTimes = field(default_factory=StepTimes)
    overhead_ratio: float | None = None
    predicted_overhead_ratio: float | None = None
    predicted_step_ms: dict[str, float] | None = None  # of an estimate: low, likely, high
    recompute_flops_ratio: float | None = None


@dataclass(slots=True)
class GradientsRecord:
    checked: bool = False
    reference: str | None = None  # what they were compared with, or why they were not
    max_abs_diff: float | None = None
    max_rel_diff: float | None = None
    bitwise_equal: bool | None = None
    passed: bool | None = None


@dataclass(slots=True)
class TrainingRecord:
    steps: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    oom_recoveries: int | None = None  # how often memory ran out and a tighter plan was taken


@dataclass(slots=True)
class BatchRecord:
    size: int | None = None  # samples of a micro-batch, of all ranks together; None: the data does not say
    accumulate: int | None = None
    planned_shape: list[int] | None = None  # of the inputs that were measured and planned for
    shapes_read: int | None = None  # batches that were looked at to find them; None: the data says which is the largest
    largest: int | None = None  # with batch=auto or largest: what was found, with samples per second as predicted
    fastest: int | None = None
    largest_samples_per_s: float | None = None
    fastest_samples_per_s: float | None = None


@dataclass(slots=True)
class StateRecord:
    path: str | None = None  # the newest state of the run that is durable
    step: int | None = None  # of that state
    saved: int | None = None  # how many this process has saved
    stall_s: float | None = None  # what training waited for them
    resumed_from: str | None = None
    resumed_step: int | None = None


@dataclass(slots=True)
class TimingRecord:
    profile_s: float | None = None
    plan_s: float | None = None
    apply_s: float | None = None
    train_s: float | None = None
    total_s: float | None = None


@dataclass(slots=True)
class RunResult:
    """Everything ``result.json`` holds. ``notes`` says why a figure is null where that is not plain."""

    status: str = "failed"
    error: ErrorRecord | None = None
    config_hash: str | None = None
    name: str | None = None
    planner: str | None = None
    profile: ProfileRecord = field(default_factory=ProfileRecord)
    plan: PlanRecord = field(default_factory=PlanRecord)
    certificate: CertificateRecord = field(default_factory=CertificateRecord)
    model: str | None = None
    data: str | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int | None = None
    torch: str | None = None
    budget: BudgetRecord = field(default_factory=BudgetRecord)
    memory: MemoryRecord = field(default_factory=MemoryRecord)
    engine: EngineRecord = field(default_factory=EngineRecord)
    latency: LatencyRecord = field(default_factory=LatencyRecord)
    gradients: GradientsRecord = field(default_factory=GradientsRecord)
    batch: BatchRecord = field(default_factory=BatchRecord)
    training: TrainingRecord = field(default_factory=TrainingRecord)
    state: StateRecord = field(default_factory=StateRecord)
    timing: TimingRecord = field(default_factory=TimingRecord)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object: NaN and infinite figures become null and a note says so."""
        if self.status not in STATUS_EXIT_CODES:
            raise ValueError(f"status={self.status!r} is unknown; expected one of {', '.join(STATUS_EXIT_CODES)}")
        reasons: list[str] = []
        plain = _finite({"schema": RESULT_SCHEMA, **asdict(self)}, "", reasons)
        plain["notes"] += [reason for reason in reasons if reason not in plain["notes"]]
        return dict(plain)


def _finite(value: Any, path: str, reasons: list[str]) -> Any:
    """A copy with null for what JSON has no number for; each replacement is named in ``reasons``."""
    if isinstance(value, Mapping):
        return {key: _finite(inner, f"{path}/{key}" if path else str(key), reasons) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner, f"{path}/{index}", reasons) for index, inner in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        reasons.append(f"{path} came out as {value}, so it is unknown")
        return None
    raise TypeError(f"{path} is a {type(value).__name__}; a record holds numbers, text, true, false and null")


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"memory": {"peak_at": ...}}`` as ``{"memory/peak_at": ...}``: the names figures have in a tracker."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            flat.update(flatten(value, name))
        else:
            flat[name] = value
    return flat


def load_result(path: str | Path) -> dict[str, Any]:
    """Read ``result.json`` (the file or its run folder) back as a dict with every key of the schema.

    Raises ``CkptplanError`` naming the file when it is no result, is cut off, has another schema or
    other keys than this version writes.
    """
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CkptplanError(f"{path} is not valid JSON ({error}); the run that wrote it did not end") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != RESULT_SCHEMA:
        raise CkptplanError(f"{path} has schema {schema!r}; this version reads {RESULT_SCHEMA!r}")
    faults = _key_faults(found, RunResult().to_dict())
    if faults:
        raise CkptplanError(f"{path}: {'; '.join(faults)}")
    return dict(found)


def _key_faults(found: Mapping[str, Any], template: Mapping[str, Any], path: str = "") -> list[str]:
    """What ``found`` has too much or too little beside ``template``; an empty object in it admits any keys."""
    faults = [f"unknown key {path}{key}" for key in sorted(found.keys() - template.keys())]
    faults += [f"missing key {path}{key}" for key in sorted(template.keys() - found.keys())]
    for key in sorted(found.keys() & template.keys()):
        section = template[key]
        if not (isinstance(section, Mapping) and section):
            continue
        if isinstance(found[key], Mapping):
            faults += _key_faults(found[key], section, f"{path}{key}/")
        else:
            faults.append(f"{path}{key} is not an object")
    return faults


# --- writing ---


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader finds the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RunRecorder:
    """Writes the records of one run into its folder, which must exist.

    ``metrics.jsonl`` gets one line per call of ``log``, flushed, so that a killed run keeps every step it
    finished.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Append one line. Keys are those of ``METRIC_KEYS``; NaN and infinity are written as null."""
        unknown = sorted(row.keys() - set(METRIC_KEYS))
        if unknown:
            raise ValueError(f"metrics {unknown} are unknown; metrics.jsonl holds {', '.join(METRIC_KEYS)}")
        with naming(self._metrics.name):
            self._metrics.write(json.dumps(_finite(row, "", []), allow_nan=False) + "\n")
            self._metrics.flush()

    def go_back_to(self, step: int) -> int:
        """Move the lines of later steps to ``metrics.discarded.jsonl``; returns how many.

        A last line that was cut off is dropped, a damaged one is moved as well. A kill in between leaves the file as
        it was, or as it should be.
        """
        path = self.folder / "metrics.jsonl"
        self._metrics.close()
        try:
            content = path.read_bytes()
            lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
            is_late = [not _is_metrics_line_up_to(line, step) for line in lines]
            late = [line for line, later in zip(lines, is_late, strict=True) if later]
            if late:
                with (
                    naming(aside := self.folder / "metrics.discarded.jsonl"),
                    aside.open("ab") as file,
                ):
                    file.writelines(late)
                    file.flush()
                    os.fsync(file.fileno())
            kept = b"".join(line for line, later in zip(lines, is_late, strict=True) if not later)
            if kept != content:
                write_atomic(path, kept.decode())
        finally:
            self._metrics = path.open("a", encoding="utf-8")
        return len(late)

    def write_result(self, result: RunResult) -> Path:
        """Write ``result.json`` whole or not at all; returns its path."""
        plain = result.to_dict()
        for note in plain["notes"][len(result.notes) :]:
            log.warning("result.json: %s", note)
        path = self.folder / "result.json"
        write_atomic(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")
        return path

    def close(self) -> None:
        with naming(self._metrics.name):
            self._metrics.close()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):  # told already
            self.close()


def _is_metrics_line_up_to(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def load_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` (the file or its run folder); a last line cut off by a kill is left out."""
    path = Path(path)
    text = (path / "metrics.jsonl" if path.is_dir() else path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


# --- where it ran ---


def environment(device: str | None = None) -> dict[str, Any]:
    """What a reader needs to judge the figures: versions, machine, cores this process may use, commit of the code."""
    commit, is_dirty = _git_state(Path(__file__).resolve().parent.parent)
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ckptplan": _version("ckptplan"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device,
        "git_commit": commit,
        "git_dirty": is_dirty,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit and "has uncommitted changes" of the checkout this package runs from; None outside one."""
    if not (folder / ".git").exists():
        return None, None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no git commit recorded: %s", error)
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()
