"""A sweep in the tracker: a run of its own with the table of its jobs, and planners beside each other. Torch-free."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.config import LoggerConfig
from ckptplan.jobs import Job
from ckptplan.other_trackers import Points
from ckptplan.sweep_table import table_row
from ckptplan.tracking import Tracker, open_tracker

log = logging.getLogger(__name__)

# Chart -> columns of the table on its two axes; one line a planner.
CHARTS = {
    "step_time_against_peak": ("measured_peak_bytes", "step_ms"),
    "predicted_against_measured_peak": ("measured_peak_bytes", "predicted_peak_bytes"),
    "time_added_against_budget": ("budget_bytes", "overhead_ratio"),
}


def track_sweep(
    pairs: Sequence[tuple[Job, Mapping[str, Any]]],
    folder: Path,
    logger: LoggerConfig,
    group: str,
    command: Sequence[str],
) -> None:
    """Record the sweep as one run of ``job_type`` "sweep" in the group of its jobs; never raises.

    A sweep that went on keeps its run.
    """
    if logger.kind != "wandb":
        return
    tracker = open_tracker(
        "wandb",
        folder,
        project=logger.project,
        mode=logger.mode,  # type: ignore[arg-type]  # checked by load_config
        entity=logger.entity,
        tags=[*logger.tags, "sweep"],
        job_type="sweep",
    )
    rows = [table_row(result, job) for job, result in pairs]
    tracker.start({"command": " ".join(command), "jobs": len(rows)}, f"sweep {group}", group)
    record_rows(tracker, rows)
    tracker.finish("ok")
    if list(folder.glob("*/wandb/offline-run-*")):
        where = shlex.quote(str(folder))
        log.info(f"to upload the whole sweep: wandb sync {where}/wandb/offline-run-* {where}/*/wandb/offline-run-*")


def record_rows(tracker: Tracker, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of all jobs, a chart of each kind with a line a planner, and how many jobs ended how."""
    if rows:
        columns = list(rows[0])
        tracker.table("jobs", columns, [[row[column] for column in columns] for row in rows])
    for name, axes in CHARTS.items():
        series = planner_series(rows, axes)
        if series:
            tracker.curves(name, axes, series)
    counts = Counter(str(row["status"]) for row in rows)
    tracker.summary({"jobs": {"count": len(rows), **{status: counts[status] for status in sorted(counts)}}})


def planner_series(rows: Sequence[Mapping[str, Any]], axes: tuple[str, str]) -> dict[str, Points]:
    """Planner -> its (x, y) points in order of x; a job that lacks one of the figures has no point."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = (row[axis] for axis in axes)
        if x is not None and y is not None:
            series.setdefault(str(row["planner"]), []).append((x, y))
    return {planner: sorted(points) for planner, points in series.items()}
