"""The page's charts as PNG and SVG files, for papers and slides; needs vl-convert-python, no browser. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptplan.errors import CkptplanError
from ckptplan.report.charts import charts_of, strips_height
from ckptplan.report.figures import Figures, make_figures, typical_run
from ckptplan.report.page import INSTALL, has_library
from ckptplan.report.records import read_records
from ckptplan.report.steps import Row
from ckptplan.report.vega import PRINT_THEME, Chart, with_data

FORMATS = ("png", "svg")
PICTURES_FOLDER = "figures"
PNG_PIXELS_PER_INCH = 220


def export_pictures(folder: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write every chart of a run's or a sweep's folder into its ``figures/``; returns the files.

    One set for each workload of a sweep, numbered where there are several. Raises ``CkptplanError`` where the folder
    holds no records or vl-convert-python is not installed.
    """
    folder = Path(folder)
    if not has_library():
        raise CkptplanError(f"pictures are made by Vega, which is not installed; to install it: {INSTALL}")
    figures = make_figures(read_records(folder))
    target = folder / PICTURES_FOLDER
    target.mkdir(exist_ok=True)
    written = []
    for chart in charts_of(figures, PRINT_THEME, legend=True):
        for workload in range(len(figures.workloads)):
            number = f"_{workload}" if len(figures.workloads) > 1 else ""
            for form in formats:
                path = target / f"{chart.name}{number}.{form}"
                path.write_bytes(picture(chart, figures, workload, form))
                written.append(path)
    return written


def picture(chart: Chart, figures: Figures, workload: int, form: str) -> bytes:
    """One chart of one workload as the bytes of a ``png`` or ``svg`` file, with what stands first on its axis."""
    convert = importlib.import_module("vl_convert")
    spec = _whole(chart, figures, workload)
    if form == "png":
        return bytes(convert.vegalite_to_png(spec, ppi=PNG_PIXELS_PER_INCH))
    return str(convert.vegalite_to_svg(spec)).encode()


def _whole(chart: Chart, figures: Figures, workload: int) -> dict[str, Any]:
    spec = next(iter(chart.variants.values()))
    run = typical_run([row for row in figures.datasets["runs"] if row["workload"] == workload])
    datasets = {name: _rows(figures, name, workload, run) for name in chart.datasets}
    whole = with_data(spec, datasets) | {"background": PRINT_THEME.paper}
    if chart.name == "strips":
        whole["height"] = strips_height(datasets["strips"])
    if "params" in whole:
        whole["params"] = [whole["params"][0] | {"value": list(figures.stages[workload])}]
    return whole


def _rows(figures: Figures, name: str, workload: int, run: Row) -> list[Row]:
    """What ``rowsOf`` of the page gives with nothing filtered and the typical run chosen."""
    if name == "allowed":
        return [] if run["budget_bytes"] is None else [{"budget_bytes": run["budget_bytes"]}]
    rows = [row for row in figures.datasets[name] if row["workload"] == workload]
    return [row for row in rows if row["plan_id"] in (0, run["plan_id"])] if name == "timeline" else rows
