"""The chart of peak memory against step time: what each planner came to, between the budgets and the predicted best."""

from __future__ import annotations

from ckptplan.report.vega import RUN_HOVER, Chart, Drawing, Spec, hover_of
from ckptplan.units import format_bytes, format_percent

CROSS = "M-1,-1L1,1M-1,1L1,-1"

CROSS_HOVER = (
    ("job", "run", "text"),
    ("status", "status", "text"),
    ("planner", "planner", "text"),
    ("budget", "budget", "text"),
    ("budget_bytes", "allowed", "bytes"),
    ("smallest_reachable_bytes", "smallest reachable", "bytes"),
    ("error", "why", "text"),
)

# What may stand on the upright axis of the trade-off: label -> (field of all its datasets, axis title, format).
COSTS: dict[str, tuple[str, str, str]] = {
    "time added": ("place_ratio", "time added to a step", "+.0%"),
    "step time": ("step_ms", "step time (ms)", ",.0f"),
    "FLOPs added": ("recompute_flops_ratio", "FLOPs added to a step", "+.0%"),
}


def tradeoff(draw: Drawing) -> Chart:
    return Chart(
        "tradeoff",
        "Peak memory against step time",
        _tradeoff_caption(draw),
        {label: _tradeoff_spec(draw, *cost) for label, cost in COSTS.items()},
        ("runs", "curve", "baselines", "budgets"),
        (
            ("planner", "planner", "text"),
            ("budget", "budget", "text"),
            ("status", "status", "text"),
            ("measured_peak_bytes", "measured peak", "bytes"),
            ("step_ms", "step", "ms"),
            ("overhead_ratio", "time added", "ratio"),
            ("recompute_flops_ratio", "FLOPs added", "ratio"),
        ),
    )


def _tradeoff_caption(draw: Drawing) -> str:
    words = (
        "Lower and further left is better. The grey staircase is the least that any plan is predicted to cost at each "
        "peak; dashed lines are the budgets that were asked for."
    )
    cut = [row for row in draw.figures.datasets["curve"] if not row["is_shown"]]
    if cut and len(draw.figures.workloads) == 1:
        least = min(cut, key=lambda row: row["place_bytes"])
        ratio = format_percent(least["place_ratio"])
        words += f" It goes on, beyond the picture, to {format_bytes(least['place_bytes'])} at {ratio}."
    runs = draw.figures.datasets["runs"]
    if any(not row["is_drawn"] for row in runs):
        words += " Crosses at the upper edge: no plan fits that budget, or the run failed."
    if any(row["is_drawn"] and not row["is_measured"] for row in runs):
        words += " Hollow points are planned, not measured."
    return words


def _tradeoff_spec(draw: Drawing, cost: str, title: str, number_format: str) -> Spec:
    x = draw.peak_axis("place_bytes", "activation peak of a step")
    y = {
        "field": cost,
        "type": "quantitative",
        "title": title,
        "axis": {"format": number_format},
        "scale": {"zero": False, "nice": True},
    }
    run_hover, run_tooltip = hover_of(*RUN_HOVER)
    cross_hover, cross_tooltip = hover_of(*CROSS_HOVER)
    known = f"isValid(datum.{cost})"
    drawn = {"filter": f"datum.is_drawn && {known} && isValid(datum.place_bytes)"}
    points: Spec = {
        "type": "point",
        "size": 90,
        "strokeWidth": 2,
        "opacity": 1,
        "filled": False,
        "cursor": "pointer",
    }
    place = {"x": x, "y": y, "color": draw.planner_colour()}
    return draw.spec(
        [
            *_budget_layers(draw, x),
            *_curve_layers(draw, x, y, cost),
            _baseline_layer(draw, x, y, cost),
            {
                "data": {"name": "runs"},
                "transform": [draw.size("place_bytes"), drawn],
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.6},
                "encoding": place | {"order": {"field": "place_bytes"}},
            },
            {
                "data": {"name": "runs"},
                "transform": [draw.size("place_bytes"), drawn, *run_hover],
                "mark": points,
                "encoding": place
                | {
                    "shape": draw.planner_shape(),
                    "fillOpacity": {"condition": {"test": "datum.is_measured", "value": 0.55}, "value": 0},
                    "fill": draw.planner_colour(),
                    "tooltip": run_tooltip,
                },
            },
            {
                "data": {"name": "runs"},
                "transform": [
                    draw.size("place_bytes"),
                    {"filter": "!datum.is_drawn && isValid(datum.place_bytes)"},
                    *cross_hover,
                ],
                "mark": {
                    "type": "point",
                    "shape": CROSS,
                    "size": 80,
                    "strokeWidth": 2.5,
                    "opacity": 1,
                    "yOffset": {"expr": "14 * min(datum.cross_level, 20)"},
                    "cursor": "pointer",
                },
                "encoding": {"x": x, "y": {"value": 8}, "color": draw.planner_colour(), "tooltip": cross_tooltip},
            },
        ],
        380,
    )


def _budget_layers(draw: Drawing, x: Spec) -> list[Spec]:
    transforms, tooltip = hover_of(("label", "budget asked for", "text"), ("budget_bytes", "allowed", "bytes"))
    data = {"data": {"name": "budgets"}, "transform": [draw.size("budget_bytes"), *transforms]}
    at = {"x": {**x, "field": "u_budget_bytes"}, "tooltip": tooltip}
    rule = {"type": "rule", "strokeDash": [4, 4], "color": draw.theme.muted, "opacity": 0.7, "strokeWidth": 1}
    text = {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "fontSize": 11}
    return [
        data | {"mark": rule, "encoding": at},
        data | {"mark": text, "encoding": at | {"y": {"value": {"expr": "height - 4"}}, "text": {"field": "label"}}},
    ]


def _curve_layers(draw: Drawing, x: Spec, y: Spec, cost: str) -> list[Spec]:
    shown = (("place_bytes", "predicted peak", "bytes"), ("place_ratio", "time added, predicted", "ratio"))
    more = (("recompute_flops_ratio", "FLOPs added", "ratio"), ("plan", "plan", "text"))
    hover, tooltip = hover_of(*shown, *more)
    known = {"filter": f"isValid(datum.{cost}) && datum.is_shown"}
    data = {"data": {"name": "curve"}, "transform": [draw.size("place_bytes"), known, *hover]}
    line = {
        "type": "line",
        "interpolate": "step-after",
        "color": draw.theme.muted,
        "strokeWidth": 1.5,
        "opacity": 0.8,
    }
    point = {"type": "point", "filled": True, "size": 22, "color": draw.theme.muted, "opacity": 0.9}
    return [
        data | {"mark": line, "encoding": {"x": x, "y": y, "order": {"field": "place_bytes"}}},
        data | {"mark": point, "encoding": {"x": x, "y": y, "tooltip": tooltip}},
    ]


def _baseline_layer(draw: Drawing, x: Spec, y: Spec, cost: str) -> Spec:
    hover, tooltip = hover_of(
        ("what", "", "text"), ("place_bytes", "peak", "bytes"), ("step_ms", "step, median of the runs", "ms")
    )
    return {
        "data": {"name": "baselines"},
        "transform": [draw.size("place_bytes"), {"filter": f"isValid(datum.{cost})"}, *hover],
        "mark": {
            "type": "point",
            "shape": "circle",
            "size": 130,
            "color": draw.theme.ink,
            "fill": draw.theme.paper,
            "opacity": 1,
            "strokeWidth": 2,
        },
        "encoding": {"x": x, "y": y, "tooltip": tooltip},
    }
