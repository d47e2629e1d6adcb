"""From records to rows: every figure that the page, the exported pictures and the terminal show. Torch-free.

A dataset is a list of flat rows. Rows with the same ``workload`` (model, data, batch, device) may be compared with
each other; ``plan_id`` names one plan on one workload. An unknown figure is None.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptplan.curve import PlanCurve, plan_curve
from ckptplan.errors import CkptplanError
from ckptplan.nodes import parse_plan_text
from ckptplan.planners.budgets import step_cost
from ckptplan.profiles import ChainProfile, CostKind
from ckptplan.recompute_cost import recompute_flops, recompute_time_ms
from ckptplan.report.records import Records, RunRecords, some
from ckptplan.report.steps import Row, block_rows, stage_names, strip_rows, timeline_rows

# What a page may hold at most, so that it opens at once.
MOST_LOSS_POINTS = 6000

# A point of these has figures to be drawn; any other status is drawn as a cross.
DRAWN_STATUSES = ("ok", "over_budget")

# Column of the runs -> path in result.json.
RUN_FIGURES: dict[str, str] = {
    "status": "status",
    "planner": "planner",
    "seed": "seed",
    "budget_kind": "budget/kind",
    "budget_value": "budget/value",
    "budget_bytes": "budget/bytes",
    "predicted_peak_bytes": "memory/predicted_peak_bytes",
    "measured_peak_bytes": "memory/measured_peak_bytes",
    "prediction_error": "memory/prediction_error",
    "within_budget": "memory/within_budget",
    "peak_at": "memory/peak_at",
    "no_checkpoint_predicted_peak_bytes": "memory/no_checkpoint_predicted_peak_bytes",
    "no_checkpoint_measured_peak_bytes": "memory/no_checkpoint_measured_peak_bytes",
    "smallest_reachable_bytes": "memory/smallest_reachable_bytes",
    "step_ms": "latency/step_ms/p50",
    "step_p95_ms": "latency/step_ms/p95",
    "no_checkpoint_step_ms": "latency/no_checkpoint_step_ms/p50",
    "overhead_ratio": "latency/overhead_ratio",
    "predicted_overhead_ratio": "latency/predicted_overhead_ratio",
    "recompute_flops_ratio": "latency/recompute_flops_ratio",
    "gradients_bitwise_equal": "gradients/bitwise_equal",
    "gradients_passed": "gradients/passed",
    "first_loss": "training/first_loss",
    "last_loss": "training/last_loss",
    "recomputed": "plan/recomputed",
    "kept": "plan/kept",
    "selective": "plan/selective",
    "optimality_gap": "plan/optimality_gap",
    "plan": "plan/text",
    "total_s": "timing/total_s",
    "error": "error/message",
}


@dataclass(frozen=True)
class Figures:
    """Everything that is shown of a folder.

    Attributes:
        workloads: one label each; a row's ``workload`` is an index into them.
        stages: per workload, the names along the step: before the blocks, the blocks, head and loss.
        datasets: name -> rows.
        notes: what could not be read or was left out, a sentence each.
    """

    title: str
    is_sweep: bool
    workloads: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    datasets: Mapping[str, Sequence[Row]]
    notes: tuple[str, ...] = ()

    @property
    def planners(self) -> tuple[str, ...]:
        """In the order of their first run."""
        return tuple(dict.fromkeys(str(row["planner"]) for row in self.datasets["runs"]))


def make_figures(records: Records) -> Figures:
    """All figures of a folder. Takes no longer than the trade-off curves where no run stored one."""
    notes = list(records.faults)
    workloads, of_run = _workloads(records.runs)
    profiles = [_profile_of(records.runs, of_run, number) for number in range(len(workloads))]
    plan_ids = _plan_ids(records.runs, of_run)
    runs = [
        _run_row(run, workload, plan_id) for run, workload, plan_id in zip(records.runs, of_run, plan_ids, strict=True)
    ]
    _stack_crosses(runs)
    unplaced = [row["job"] for row in runs if row["place_bytes"] is None]
    if unplaced and records.is_sweep:
        notes.append(f"{some(unplaced)} ended before there was a budget in bytes or a peak: in the table only")
    baselines = _baselines(runs, len(workloads))
    datasets: dict[str, list[Row]] = {
        "runs": runs,
        "baselines": baselines,
        "budgets": _budget_rows(runs),
        "curve": [row for n, p in enumerate(profiles) if p for row in _curve_rows(records.runs, runs, n, p, baselines)],
        "timeline": timeline_rows(records.runs, of_run, plan_ids, profiles, notes),
        "blocks": block_rows(records.runs, of_run, plan_ids, notes),
        "strips": strip_rows(records.runs, of_run, plan_ids, notes),
        "loss": _loss_rows(records.runs, of_run),
    }
    stages = tuple(() if profile is None else stage_names(profile) for profile in profiles)
    return Figures(_title(records), records.is_sweep, tuple(workloads), stages, datasets, tuple(notes))


def _title(records: Records) -> str:
    folder = records.folder.resolve()
    return folder.name if folder.parent == folder else "/".join(folder.parts[-2:])


# --- which runs may be compared ---------------------------------------------------------------------------------------


def _workloads(runs: Sequence[RunRecords]) -> tuple[list[str], list[int]]:
    """Labels, and the number of each run's: runs of one share model, data, batch, device and number format."""
    parts = [_workload_parts(run) for run in runs]
    distinct = list({json.dumps(part, sort_keys=True, default=str): part for part in parts}.values())
    keys = sorted({key for part in distinct for key in part if len({str(other.get(key)) for other in distinct}) > 1})
    labels = []
    for part in distinct:
        always = f"{part['model_name']} on {part['data_name']}, {part['device']} {part['dtype']}"
        differs = [f"{key}={part.get(key)}" for key in keys if "." in key and not key.endswith("._target_")]
        labels.append(", ".join([always, *differs]))
    order = [distinct.index(part) for part in parts]
    return labels, order


def _workload_parts(run: RunRecords) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "model_name": run.figure("model") or "a model",
        "data_name": run.figure("data") or "data",
        "device": run.figure("device") or "device unknown",
        "dtype": run.figure("dtype") or "",
    }
    for section in ("model", "data", "blocks"):
        node = run.config.get(section)
        if isinstance(node, Mapping):
            parts.update({f"{section}.{key}": value for key, value in node.items() if key != "seed"})
    return parts


def _profile_of(runs: Sequence[RunRecords], of_run: Sequence[int], workload: int) -> ChainProfile | None:
    """Of the first run of the workload that ended well, else of any."""
    mine = [run for run, number in zip(runs, of_run, strict=True) if number == workload and run.profile is not None]
    ended = [run for run in mine if run.figure("status") in DRAWN_STATUSES]
    return (ended or mine)[0].profile if mine else None


def _plan_ids(runs: Sequence[RunRecords], of_run: Sequence[int]) -> list[int | None]:
    """A number for each distinct plan on a workload, from 1; 0 stands for "nothing recomputed", None for no plan."""
    numbers: dict[tuple[int, str], int] = {}
    found: list[int | None] = []
    for run, workload in zip(runs, of_run, strict=True):
        text = run.figure("plan/text")
        found.append(None if text is None else numbers.setdefault((workload, text), len(numbers) + 1))
    return found


# --- points -----------------------------------------------------------------------------------------------------------


def _run_row(run: RunRecords, workload: int, plan_id: int | None) -> Row:
    row: Row = {"job": run.name, "index": run.index, "workload": workload, "plan_id": plan_id}
    row |= {column: run.figure(path) for column, path in RUN_FIGURES.items()}
    row["config_hash"] = (run.figure("config_hash") or "")[:8] or None
    row["budget"] = budget_words(row)
    row["command"] = run.command
    row["is_measured"] = row["measured_peak_bytes"] is not None
    row["is_drawn"] = row["status"] in DRAWN_STATUSES
    measured, predicted = row["measured_peak_bytes"], row["predicted_peak_bytes"]
    row["place_bytes"] = (
        measured if measured is not None else predicted if predicted is not None else row["budget_bytes"]
    )
    row["place_ratio"] = row["overhead_ratio"] if row["is_measured"] else row["predicted_overhead_ratio"]
    return row


def _stack_crosses(runs: Sequence[Row]) -> None:
    """``cross_level``: runs without a point that stand at the same place are drawn one below the other."""
    taken: dict[tuple[int, int | None], int] = {}
    for row in runs:
        row["cross_level"] = 0
        if not row["is_drawn"]:
            place = (row["workload"], row["place_bytes"])
            row["cross_level"] = taken[place] = taken.get(place, -1) + 1


def typical_run(runs: Sequence[Row]) -> Row:
    """The run that is shown until another one is chosen: the first that recomputes something and ended well."""
    ended = [row for row in runs if row["is_drawn"]]
    return next((row for row in ended if row["recomputed"]), (ended or list(runs))[0])


def budget_words(row: Mapping[str, Any]) -> str:
    kind, value = row["budget_kind"], row["budget_value"]
    return "-" if kind is None else "auto" if kind == "auto" else f"{kind}={value}"


def _baselines(runs: Sequence[Row], count: int) -> list[Row]:
    """Per workload the step with nothing recomputed: peak, and the median of what the runs measured beside theirs."""
    rows = []
    for workload in range(count):
        mine = [row for row in runs if row["workload"] == workload]
        peaks = [row["no_checkpoint_measured_peak_bytes"] for row in mine] or [None]
        peaks += [row["no_checkpoint_predicted_peak_bytes"] for row in mine]
        peak = next((value for value in peaks if value is not None), None)
        times = [row["no_checkpoint_step_ms"] for row in mine if row["no_checkpoint_step_ms"] is not None]
        if peak is not None:
            step_ms = statistics.median(times) if times else None
            rows.append(
                {"workload": workload, "place_bytes": peak, "step_ms": step_ms, "place_ratio": 0.0}
                | {"recompute_flops_ratio": 0.0, "what": "nothing recomputed"}
            )
    return rows


def _budget_rows(runs: Sequence[Row]) -> list[Row]:
    found: dict[tuple[int, int], set[str]] = {}
    for row in runs:
        if row["budget_bytes"] is not None:
            found.setdefault((row["workload"], row["budget_bytes"]), set()).add(str(row["budget_value"]))
    return [
        {"workload": workload, "budget_bytes": size, "label": ", ".join(sorted(values))}
        for (workload, size), values in sorted(found.items())
    ]


def _curve_rows(
    runs: Sequence[RunRecords],
    run_rows: Sequence[Row],
    workload: int,
    profile: ChainProfile,
    baselines: Sequence[Row],
) -> list[Row]:
    """The predicted trade-off of one workload: as a run stored it, else computed from its profile."""
    run_rows = [row for row in run_rows if row["workload"] == workload]
    names = {row["job"] for row in run_rows}
    mine = [run for run in runs if run.name in names]
    cost: CostKind = "flops" if mine[0].config.get("cost") == "flops" else "time"
    curve = next((run.curve for run in mine if run.curve is not None), None)
    if curve is None:
        curve = _computed_curve(profile, cost)
    if curve is None:
        return []
    step_ms = next((row["step_ms"] for row in baselines if row["workload"] == workload), None)
    most = _most_ratio(run_rows, curve)
    whole_ms, whole_flops = _step_cost(profile, "time"), _step_cost(profile, "flops")
    rows = []
    for point in curve.points:
        nodes = parse_plan_text(point.plan)
        ratio, flops = _ratio(recompute_time_ms(profile, nodes), whole_ms), recompute_flops(profile, nodes)
        rows.append(
            {
                "workload": workload,
                "place_bytes": point.peak_bytes,
                "place_ratio": ratio,
                "recompute_flops_ratio": _ratio(flops, whole_flops),
                "step_ms": None if ratio is None or step_ms is None else step_ms * (1 + ratio),
                "plan": point.plan,
                "is_shown": ratio is None or ratio <= most,
            }
        )
    return rows


def _most_ratio(runs: Sequence[Row], curve: PlanCurve) -> float:
    """Where the picture of the curve ends: its last bytes are so dear that the points would be pressed flat."""
    points = [row["place_ratio"] for row in runs if row["is_drawn"] and row["place_ratio"] is not None]
    knee = float(curve.knee.cost) / curve.step_cost if curve.step_cost and curve.cost_kind == "time" else 0.0
    return max([1.4 * max(points, default=0.0), 2 * knee, 0.1])


def _computed_curve(profile: ChainProfile, cost: CostKind) -> PlanCurve | None:
    try:
        return plan_curve(profile, cost=cost)
    except (CkptplanError, ValueError):  # figures are missing, as where only times were measured
        return None


def _step_cost(profile: ChainProfile, cost: CostKind) -> float | None:
    try:
        return step_cost(profile, cost)
    except ValueError:
        return None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


# --- losses -----------------------------------------------------------------------------------------------------------


def _loss_rows(runs: Sequence[RunRecords], of_run: Sequence[int]) -> list[Row]:
    """Loss of each step and each evaluation; long runs, and runs among many, are thinned evenly, both ends kept."""
    with_steps = [run for run in runs if run.metrics]
    most = max(8, MOST_LOSS_POINTS // max(1, len(with_steps)))
    rows: list[Row] = []
    for run, workload in zip(runs, of_run, strict=True):
        for what, key in (("training", "train/loss"), ("evaluation", "eval/loss")):
            points = [(line["step"], line[key]) for line in run.metrics if line.get(key) is not None]
            rows += [
                {"workload": workload, "planner": run.figure("planner"), "job": run.name}
                | {"what": what, "step": step, "loss": loss}
                for step, loss in _thinned(points, most)
            ]
    return rows


def _thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[place] for place in sorted({round(i * last / (most - 1)) for i in range(most)})]
