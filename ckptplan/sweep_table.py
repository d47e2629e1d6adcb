"""The table of a sweep: a row per job, in the terminal and in ``results.jsonl``, ``.csv`` and ``.md``. Torch-free."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.jobs import Job
from ckptplan.record import write_atomic
from ckptplan.units import format_bytes, format_percent

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
