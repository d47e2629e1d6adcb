"""What all charts share: colours, a chart as a Vega-Lite specification over datasets, its hover text. Torch-free.

The page draws them with Vega's JavaScript, ``export.py`` as PNG and SVG. Vega-Lite's own form is used as it is:
https://vega.github.io/vega-lite/docs/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptplan.report.figures import Figures
from ckptplan.report.steps import Row
from ckptplan.units import GIB, MIB

Spec = dict[str, Any]

VEGA_LITE = "https://vega.github.io/schema/vega-lite/v6.json"

# One colour and one shape a planner, the same in every picture: Okabe and Ito's palette, which the colour-blind can
# tell apart, and which reads on white and on black alike.
PLANNER_STYLES: dict[str, tuple[str, str]] = {
    "dp": ("#0072B2", "circle"),
    "optimal": ("#D55E00", "diamond"),
    "greedy": ("#009E73", "square"),
    "uniform": ("#CC79A7", "triangle-up"),
    "ilp": ("#E69F00", "triangle-down"),
    "all": ("#56B4E9", "triangle-right"),
    "none": ("#8A8A8A", "triangle-left"),
    "text": ("#9C6ADE", "stroke"),
    "file": ("#B08D57", "stroke"),
}
OTHER_STYLE = ("#8A8A8A", "circle")


@dataclass(frozen=True)
class Theme:
    """Colours of everything but the planners; in the page CSS variables, so that light, dark and print follow."""

    ink: str
    muted: str
    grid: str
    paper: str
    accent: str
    warning: str
    decisions: tuple[str, str, str, str, str, str]  # in the order of DECISIONS


PAGE_THEME = Theme(
    *("var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)", "var(--accent)", "var(--warning)"),
    decisions=(
        "var(--keep)",
        "var(--part)",
        "var(--host)",
        "var(--compiled)",
        "var(--recompute)",
        "var(--repeat)",
    ),
)
PRINT_THEME = Theme(
    *("#1b1f24", "#5b6470", "#e3e6ea", "#ffffff", "#6d4bc3", "#b42318"),
    decisions=("#d9dde3", "#c9b8f0", "#9cc3e6", "#a8d5b5", "#8a63d2", "#45228a"),
)


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        name: of its file, and in the page.
        variants: label -> specification; more than one where the reader may choose what stands on an axis.
        datasets: names of what it draws; the first one is what its table shows, in ``columns``.
    """

    name: str
    title: str
    caption: str
    variants: Mapping[str, Spec]
    datasets: tuple[str, ...]
    columns: tuple[tuple[str, str, str], ...]  # field, head, kind ("bytes", "ratio", "ms", "number", "text")


def with_data(spec: Spec, datasets: Mapping[str, Sequence[Row]]) -> Spec:
    """The specification with its rows inside, whole in itself."""
    return spec | {"datasets": {name: list(rows) for name, rows in datasets.items()}}


def chart_config(theme: Theme) -> Spec:
    """Fonts, grid and colours for all charts."""
    axis = {
        "labelColor": theme.muted,
        "titleColor": theme.ink,
        "gridColor": theme.grid,
        "domainColor": theme.grid,
        "tickColor": theme.grid,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": 500,
        "titlePadding": 10,
        "labelPadding": 4,
        "labelOverlap": True,
    }
    legend = {"labelColor": theme.ink, "titleColor": theme.ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        "legend": legend | {"titleFontWeight": 500, "orient": "top", "symbolStrokeWidth": 2},
        "text": {"color": theme.muted},
    }


# --- pieces -----------------------------------------------------------------------------------------------------------


def _text(field: str, kind: str) -> str:
    """A Vega expression for the exact figure, with its unit."""
    formats = {
        "bytes": f"format(datum.{field}, ',') + ' bytes'",
        "ratio": f"format(datum.{field}, '+.2%')",
        "ms": f"format(datum.{field}, ',.3f') + ' ms'",
        "number": f"format(datum.{field}, ',.4~f')",
    }
    known = formats.get(kind, f"datum.{field}")
    return f"isValid(datum.{field}) ? {known} : 'not measured'"


def hover_of(*shown: tuple[str, str, str]) -> tuple[list[Spec], list[Spec]]:
    """(transforms, tooltip) for (field, head, kind)s."""
    transforms = [{"calculate": _text(field, kind), "as": f"t_{field}"} for field, _, kind in shown]
    tooltip = [{"field": f"t_{field}", "type": "nominal", "title": head} for field, head, _ in shown]
    return transforms, tooltip


RUN_HOVER = (
    ("job", "run", "text"),
    ("status", "status", "text"),
    ("planner", "planner", "text"),
    ("budget", "budget", "text"),
    ("budget_bytes", "allowed", "bytes"),
    ("measured_peak_bytes", "measured peak", "bytes"),
    ("predicted_peak_bytes", "predicted peak", "bytes"),
    ("step_ms", "step", "ms"),
    ("overhead_ratio", "time added, measured", "ratio"),
    ("predicted_overhead_ratio", "time added, predicted", "ratio"),
    ("recompute_flops_ratio", "FLOPs added", "ratio"),
    ("plan", "plan", "text"),
)


class Drawing:
    """The charts of one folder in one theme; what they share is decided once."""

    def __init__(self, figures: Figures, theme: Theme, legend: bool) -> None:
        self.figures, self.theme, self.legend = figures, theme, legend
        peaks = [row["place_bytes"] for name in ("runs", "baselines") for row in figures.datasets[name]]
        largest = max((peak for peak in peaks if peak is not None), default=0)
        self.unit, self.unit_bytes = ("GiB", GIB) if largest >= 10 * GIB else ("MiB", MIB)

    def size(self, field: str) -> Spec:
        """A transform that gives ``<field>`` in the page's unit, as ``u_<field>``."""
        return {"calculate": f"datum.{field} / {self.unit_bytes}", "as": f"u_{field}"}

    def planner_colour(self) -> Spec:
        legend = {"title": "planner"} if self.legend else None
        styles = [PLANNER_STYLES.get(name, OTHER_STYLE) for name in self.figures.planners]
        scale = {"domain": list(self.figures.planners), "range": [colour for colour, _ in styles]}
        return {"field": "planner", "type": "nominal", "scale": scale, "legend": legend}

    def planner_shape(self) -> Spec:
        styles = [PLANNER_STYLES.get(name, OTHER_STYLE) for name in self.figures.planners]
        scale = {"domain": list(self.figures.planners), "range": [shape for _, shape in styles]}
        return {
            "field": "planner",
            "type": "nominal",
            "scale": scale,
            "legend": {"title": "planner"} if self.legend else None,
        }

    def spec(self, layers: list[Spec], height: int, **more: Any) -> Spec:
        width: Any = 620 if self.legend else "container"
        return {
            "$schema": VEGA_LITE,
            "width": width,
            "height": height,
            "autosize": {"type": "fit-x" if width == "container" else "pad", "contains": "padding"},
            "config": chart_config(self.theme),
            "layer": layers,
            **more,
        }

    def peak_axis(self, field: str, title: str) -> Spec:
        return {
            "field": f"u_{field}",
            "type": "quantitative",
            "title": f"{title} ({self.unit})",
            "scale": {"zero": False, "nice": True},
        }
