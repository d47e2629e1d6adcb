"""``report.html``: one file that opens from disk, without a network, made from records only. Torch-free.

The figures stand in the file as JSON; ``assets/page.js`` shows them. Vega's JavaScript, which draws the charts, comes
from the package vl-convert-python (the extra ``report``); without it the page holds tables in place of charts, and says
so.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import logging
import re
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ckptplan.record import write_atomic
from ckptplan.report.charts import charts_of
from ckptplan.report.figures import Figures, make_figures
from ckptplan.report.records import read_records
from ckptplan.report.steps import Row
from ckptplan.report.vega import OTHER_STYLE, PAGE_THEME, PLANNER_STYLES, Chart

log = logging.getLogger(__name__)

PAGE_FILE = "report.html"
INSTALL = "pip install vl-convert-python"  # what the extra "report" holds; the extra itself in a checkout
CREDITS = (
    "Charts are drawn by Vega, Vega-Lite and Vega-Embed (BSD-3-Clause, University of Washington Interactive Data Lab "
    "and contributors), which are inside this file."
)

# Field, head, kind: the table of runs, and that of one plan's blocks.
RUN_COLUMNS = (
    ("job", "run", "run"),
    ("command", "repeat", "command"),
    ("status", "status", "status"),
    ("planner", "planner", "text"),
    ("budget", "budget", "text"),
    ("plan", "plan", "strip"),
    ("budget_bytes", "allowed", "bytes"),
    ("predicted_peak_bytes", "predicted peak", "bytes"),
    ("measured_peak_bytes", "measured peak", "bytes"),
    ("prediction_error", "error", "error"),
    ("overhead_ratio", "time added", "ratio"),
    ("step_ms", "step", "ms"),
    ("recompute_flops_ratio", "FLOPs added", "ratio"),
    ("last_loss", "last loss", "number"),
)
BLOCK_COLUMNS = (
    ("block", "block", "text"),
    ("decision", "decision", "text"),
    ("retained_bytes", "keeps", "bytes"),
    ("added_ms", "adds", "ms"),
    ("why", "why", "text"),
)


def write_report(folder: str | Path) -> Path:
    """Write ``report.html`` into a run's or a sweep's folder from what lies there; returns its path.

    Raises ``CkptplanError`` where the folder holds no records.
    """
    folder = Path(folder)
    path = folder / PAGE_FILE
    write_atomic(path, page_html(make_figures(read_records(folder)), library_javascript(), folder))
    return path


def try_write_report(folder: str | Path) -> Path | None:
    """The same at the end of a run or a sweep, which must not fail for its page: the reason is told in one line."""
    try:
        path = write_report(folder)
    except Exception as error:  # whatever is wrong with the page, the run it tells of is done and on disk
        log.warning("no report.html: %s: %s", type(error).__name__, error)
        log.debug("the page failed", exc_info=True)
        return None
    if not has_library():
        log.info("%s holds tables only; for its charts: %s", path, INSTALL)
    return path


def show_report(folder: Path) -> None:
    """Write the page of a sweep that has come to some result, and print where it is."""
    page = try_write_report(folder) if (folder / "results.jsonl").exists() else None
    if page is not None:
        print(page)


def has_library() -> bool:
    """Whether Vega's JavaScript is at hand."""
    return importlib.util.find_spec("vl_convert") is not None


def library_javascript() -> str | None:
    """Vega, Vega-Lite and Vega-Embed as one script, about 0.9 MB; None where vl-convert-python is not installed."""
    if not has_library():
        return None
    return str(importlib.import_module("vl_convert").javascript_bundle())


def page_html(figures: Figures, library: str | None, folder: Path) -> str:
    """The whole page."""
    charts = charts_of(figures, PAGE_THEME, legend=False)
    count = len(figures.datasets["runs"])
    workloads = "; ".join(figures.workloads)
    # a module has names of its own, so the library's thousands cannot meet the page's
    script = f'<script type="module">/* {CREDITS} */\n{_inside_script(library)}</script>' if library else ""
    values = {
        "title": html.escape(f"{'Sweep' if figures.is_sweep else 'Run'} {figures.title}"),
        "lead": html.escape(f"{count} runs. {workloads}" if figures.is_sweep else workloads),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "notes": _notes(figures.notes),
        "install": INSTALL,
        "sweep_only": "" if figures.is_sweep else " hidden",
        "run_title": "One run" if figures.is_sweep else "What came of it",
        "table_title": "All runs",
        "blocks_open": "" if figures.is_sweep else " open",
        "before_run": _figures_of(charts, ("tradeoff",) if figures.is_sweep else ()),
        "of_run": _figures_of(charts, ("memory",)),
        "after_run": _figures_of(charts, () if figures.is_sweep else ("tradeoff",))
        + _figures_of(charts, ("strips",))
        + f'<div class="pair">{_figures_of(charts, ("predicted_peak", "predicted_time"))}</div>'
        + _figures_of(charts, ("loss",)),
        "again": html.escape(shlex.join(["python", "-m", "ckptplan.report", str(folder)])),
        "credits": CREDITS if library else "",
        "data": _inside_script(json.dumps(_payload(figures, charts), separators=(",", ":"), allow_nan=False)),
        "library": script,
    }
    return Template(_asset("page.html")).substitute(values)


def _asset(name: str) -> str:
    return resources.files("ckptplan.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _inside_script(text: str) -> str:
    """Nothing in the text ends its script element; in JSON and in strings of JavaScript it means the same."""
    return re.sub(r"<(?=/script|!--)", r"\\u003c", text, flags=re.IGNORECASE)


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<div class="notice" id="notes"><p>Not on this page, or to be taken with care:</p><ul>{items}</ul></div>'


def _figures_of(charts: Sequence[Chart], names: Sequence[str]) -> str:
    return "\n".join(_figure(chart) for chart in charts if chart.name in names)


def _figure(chart: Chart) -> str:
    title, name = html.escape(chart.title), chart.name
    choice = ""
    if len(chart.variants) > 1:
        listed = "".join(f"<option>{html.escape(label)}</option>" for label in chart.variants)
        choice = f'<label class="field chart-choice">upright axis <select class="variant">{listed}</select></label>'
    return (
        f'<figure id="figure-{name}" aria-labelledby="title-{name}">'
        f'<figcaption><div class="figure-head"><h2 id="title-{name}">{title}</h2>{choice}</div>'
        f"<p>{html.escape(chart.caption)}</p></figcaption>"
        f'<div class="chart"></div>'
        f'<details class="figures"><summary>these figures as a table</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}, as a table"></div></details></figure>'
    )


def _payload(figures: Figures, charts: Sequence[Chart]) -> dict[str, Any]:
    styles = {name: PLANNER_STYLES.get(name, OTHER_STYLE) for name in figures.planners}
    return {
        "workloads": figures.workloads,
        "stages": figures.stages,
        "planners": [{"name": name, "colour": colour, "shape": shape} for name, (colour, shape) in styles.items()],
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "caption": chart.caption,
                "variants": chart.variants,
                "datasets": chart.datasets,
                "columns": chart.columns,
            }
            for chart in charts
        ],
        "columns": RUN_COLUMNS,
        "block_columns": BLOCK_COLUMNS,
        "datasets": {name: packed(rows) for name, rows in figures.datasets.items()},
    }


def packed(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows column by column, each text once: a third of the size of the rows themselves."""
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if all(value is None or isinstance(value, str) for value in values):
            words = list(dict.fromkeys(value for value in values if value is not None))
            numbers = {word: number for number, word in enumerate(words)}
            columns[name] = {"words": words, "values": [None if v is None else numbers[v] for v in values]}
        else:
            columns[name] = {"values": values}
    return {"length": len(rows), "columns": columns}
