"""Dashboards as code: a W&B workspace and a report for a project's runs. Needs wandb-workspaces. Torch-free.

Runs that were recorded offline appear in them once they are uploaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from ckptplan.config import LoggerConfig
from ckptplan.config.wording import config_error
from ckptplan.tracking import has_key, host

log = logging.getLogger(__name__)

PEAK, PREDICTED = "memory/measured_peak_bytes", "memory/predicted_peak_bytes"
STEP, ADDED = "latency/step_ms/p50", "latency/overhead_ratio"
TITLE = "Memory against time"


def require_dashboards(logger: LoggerConfig) -> None:
    """Raise ``ConfigError`` where ``push_dashboard=true`` cannot work: told before any job starts."""
    missing = "wandb-workspaces is not installed"
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise config_error("push_dashboard", True, missing, remedy="pip install -e '.[workspaces]'")
    if logger.kind != "wandb":
        raise config_error(
            "push_dashboard", True, f"logger={logger.kind} records nothing in W&B", remedy="logger=wandb"
        )
    if not has_key():
        raise config_error("push_dashboard", True, f"W&B has no key for {host()}", remedy="wandb login")


def push_dashboards(logger: LoggerConfig) -> list[str]:
    """Make the project's workspace and report on the W&B server; their addresses.

    What the server or the network refuses costs a warning: the runs are recorded all the same.
    """
    wandb = importlib.import_module("wandb")
    try:
        entity = logger.entity or wandb.Api().default_entity
        saved = [save.save() for save in (workspace(entity, logger.project), report(entity, logger.project))]
    except Exception as error:  # each of its layers has classes of its own
        log.warning("the dashboards were not pushed: %s", str(error).strip() or type(error).__name__)
        return []
    addresses = [str(one.url) for one in saved]
    for address in addresses:
        log.info("dashboard: %s", address)
    if logger.mode != "online":
        log.info("runs that were recorded offline appear there after wandb sync")
    return addresses


def panels() -> dict[str, list[Any]]:
    """Section -> its panels."""
    wr = importlib.import_module("wandb_workspaces.reports.v2")
    return {
        "Memory against time": [
            wr.ScatterPlot(title="Step time against peak", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(STEP)),
            wr.ScatterPlot(title="Time added against peak", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(ADDED)),
            _line_chart(wr, "step_time_against_peak", "Step time against peak, by planner"),
        ],
        "Predicted against measured": [
            wr.ScatterPlot(
                title="Predicted against measured peak", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(PREDICTED)
            ),
            wr.BarPlot(title="Prediction error", metrics=[wr.SummaryMetric("memory/prediction_error")]),
            wr.BarPlot(title="Largest gradient difference", metrics=[wr.SummaryMetric("gradients/max_abs_diff")]),
        ],
        "Loss": [
            wr.LinePlot(title="Training loss", x="train/step", y=["train/loss"]),
            wr.LinePlot(title="Evaluation loss", x="train/step", y=["eval/loss"]),
        ],
        "Plans": [
            _line_chart(wr, "plan_strip", "Bytes kept, block by block"),
            _line_chart(wr, "memory_over_step", "Memory over one step"),
            _line_chart(wr, "tradeoff", "What every peak costs, predicted"),
        ],
    }


def workspace(entity: str, project: str) -> Any:
    """The workspace of the project, runs grouped by planner."""
    ws = importlib.import_module("wandb_workspaces.workspaces")
    sections = [ws.Section(name=name, panels=found, is_open=True) for name, found in panels().items()]
    settings = ws.RunsetSettings(groupby=[ws.Config("planner.name")])
    return ws.Workspace(entity=entity, project=project, name=TITLE, sections=sections, runset_settings=settings)


def report(entity: str, project: str) -> Any:
    """The report of the project: the same panels with a sentence on each."""
    wr = importlib.import_module("wandb_workspaces.reports.v2")
    words = {
        "Memory against time": "Each point is a run: its measured activation peak, and what a training step takes.",
        "Predicted against measured": "A plan is worth its prediction; points on the diagonal were predicted exactly.",
        "Loss": "Recomputation does not change the training: curves of equal seeds lie on each other.",
        "Plans": "What each plan keeps, the memory over one step under it, and what other peaks would cost.",
    }
    blocks: list[Any] = []
    for name, found in panels().items():
        runs = wr.Runset(entity=entity, project=project, groupby=["config.planner.name"])
        blocks += [wr.H2(name), wr.P(words[name]), wr.PanelGrid(runsets=[runs], panels=found)]
    return wr.Report(entity=entity, project=project, title=TITLE, blocks=blocks)


def _line_chart(wr: Any, key: str, title: str) -> Any:
    """The chart that a run logged under ``key``; W&B keeps its points in a table of this name."""
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": f"{key}_table"}},
        chart_name="wandb/lineseries/v0" if key == "step_time_against_peak" else "wandb/line/v0",
        chart_fields=CHART_FIELDS[key],
        chart_strings={"title": title},
    )


# Chart -> which column of its table is on which axis.
CHART_FIELDS: dict[str, dict[str, str]] = {
    "step_time_against_peak": {"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"},
    "plan_strip": {"x": "block", "y": "MiB kept"},
    "memory_over_step": {"x": "stage", "y": "MiB"},
    "tradeoff": {"x": "peak MiB", "y": "added"},
}
