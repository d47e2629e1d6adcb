"""A sweep's own run: every job in its table, planners beside each other, what is unknown left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptplan.config import LoggerConfig
from ckptplan.record import RunResult
from ckptplan.sweep_table import table_row
from ckptplan.sweep_tracking import planner_series, record_rows, track_sweep
from ckptplan.tracking import NoTracker
from tests.test_sweeps import make_job
from tests.test_tracking import inspect, no_account, offline_runs

__all__ = ["no_account"]


class Told(NoTracker):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def table(self, *given: Any) -> None:
        self.calls.append(("table", *given))

    def curves(self, *given: Any) -> None:
        self.calls.append(("curves", *given))

    def summary(self, result: Any) -> None:
        self.calls.append(("summary", result))


def result_of(planner: str, peak: int | None, step_ms: float | None, status: str = "ok") -> dict[str, Any]:
    result = RunResult(status=status, planner=planner)
    result.memory.measured_peak_bytes, result.latency.step_ms.p50 = peak, step_ms
    return result.to_dict()


def pairs_in(folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    results = [
        result_of("dp", 300, 1.0),
        result_of("dp", 200, 2.0),
        result_of("greedy", 250, 3.0),
        result_of("greedy", None, None, "infeasible"),
    ]
    return [(make_job(folder, "", index), result) for index, result in enumerate(results)]


def test_a_planner_is_a_line_in_order_of_x_and_what_lacks_a_figure_is_no_point(tmp_path: Path) -> None:
    rows = [table_row(result, job) for job, result in pairs_in(tmp_path)]
    assert planner_series(rows, ("measured_peak_bytes", "step_ms")) == {
        "dp": [(200, 2.0), (300, 1.0)],
        "greedy": [(250, 3.0)],
    }
    assert planner_series(rows, ("measured_peak_bytes", "predicted_peak_bytes")) == {}


def test_the_table_has_every_job_and_the_summary_how_they_ended(tmp_path: Path) -> None:
    told = Told()
    rows = [table_row(result, job) for job, result in pairs_in(tmp_path)]
    record_rows(told, rows)
    name, columns, cells = told.calls[0][1:]
    assert (name, columns) == ("jobs", list(rows[0]))
    assert cells == [list(row.values()) for row in rows]
    assert [call[1] for call in told.calls if call[0] == "curves"] == ["step_time_against_peak"]
    assert told.calls[-1] == ("summary", {"jobs": {"count": 4, "infeasible": 1, "ok": 3}})
    record_rows(told, [])
    assert told.calls[-1] == ("summary", {"jobs": {"count": 0}})


def test_a_sweep_that_goes_on_keeps_its_run(tmp_path: Path) -> None:
    for _ in range(2):
        track_sweep(pairs_in(tmp_path), tmp_path, LoggerConfig(tags=["mine"]), "group", ["planner=dp,greedy"])
    runs = [inspect(run)["run"][0] for run in offline_runs(tmp_path)]
    assert {run["run_id"] for run in runs} == {(tmp_path / "wandb" / "run_id.txt").read_text().strip()}
    assert {(run["job_type"], run["run_group"], *run["tags"]) for run in runs} == {("sweep", "group", "mine", "sweep")}


def test_other_loggers_have_the_files_of_the_sweep_already(tmp_path: Path) -> None:
    for kind in ("none", "csv"):
        track_sweep(pairs_in(tmp_path), tmp_path, LoggerConfig(kind=kind), "group", [])
    assert list(tmp_path.iterdir()) == []
