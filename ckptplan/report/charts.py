"""Every chart for which a folder has figures: Vega-Lite specifications over the datasets of ``figures.py``."""

from __future__ import annotations

from collections.abc import Sequence

from ckptplan.report.figures import Figures
from ckptplan.report.steps import DECISIONS, Row
from ckptplan.report.tradeoff import tradeoff
from ckptplan.report.vega import RUN_HOVER, Chart, Drawing, Spec, Theme, hover_of


def charts_of(figures: Figures, theme: Theme, *, legend: bool) -> tuple[Chart, ...]:
    """Every chart for which the folder has figures, in the order of the page."""
    draw = Drawing(figures, theme, legend)
    made = [tradeoff(draw), _memory_over_step(draw), _strips(draw), _predicted_peak(draw), _predicted_time(draw)]
    made.append(_loss(draw))
    if not figures.is_sweep:  # a single point says nothing that the run's own figures do not
        made = [chart for chart in made if not chart.name.startswith("predicted")]
    return tuple(chart for chart in made if figures.datasets[chart.datasets[0]])


# --- one step ---------------------------------------------------------------------------------------------------------


def _memory_over_step(draw: Drawing) -> Chart:
    hover, tooltip = hover_of(
        ("case", "", "text"),
        ("stage", "stage", "text"),
        ("phase", "phase", "text"),
        ("level_bytes", "most bytes alive", "bytes"),
    )
    case = "datum.plan_id == 0 ? 'nothing recomputed' : 'with the plan'"
    transforms = [{"calculate": case, "as": "case"}, draw.size("level_bytes"), *hover]
    colour = {
        "field": "case",
        "type": "nominal",
        "scale": {
            "domain": ["nothing recomputed", "with the plan"],
            "range": [draw.theme.muted, draw.theme.accent],
        },
        "legend": {"title": None, "orient": "top"},
    }
    x = {
        "field": "start",
        "type": "quantitative",
        "title": "forward, then backward",
        "axis": {
            "values": {"expr": "sequence(0.5, 2 * length(stages))"},
            "labelExpr": (
                "datum.value < length(stages) ? stages[floor(datum.value)] "
                ": stages[2 * length(stages) - 1 - floor(datum.value)]"
            ),
            "labelAngle": -35,
            "labelLimit": 120,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
            "grid": False,
        },
        "scale": {"domain": {"expr": "[0, 2 * length(stages)]"}, "nice": False},
    }
    y = {**draw.peak_axis("level_bytes", "memory alive"), "scale": {"zero": True}, "stack": None}
    budget = {
        "data": {"name": "allowed"},
        "transform": [draw.size("budget_bytes")],
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": draw.theme.ink},
        "encoding": {"y": {**y, "field": "u_budget_bytes"}},
    }
    middle = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "color": draw.theme.grid, "strokeWidth": 2},
        "encoding": {"x": {"datum": {"expr": "length(stages)"}, "type": "quantitative"}},
    }
    steps = {
        "data": {"name": "timeline"},
        "transform": transforms,
        "mark": {"type": "rect", "fillOpacity": 0.16, "strokeWidth": 0},
        "encoding": {
            "x": x,
            "x2": {"field": "end"},
            "y": y,
            "y2": {"datum": 0},
            "color": colour,
            "tooltip": tooltip,
        },
    }
    tops = {
        "data": {"name": "timeline"},
        "transform": transforms,
        "mark": {"type": "rule", "strokeWidth": 2.5},
        "encoding": {"x": x, "x2": {"field": "end"}, "y": y, "color": colour, "tooltip": tooltip},
    }
    stages = {"name": "stages", "value": list(draw.figures.stages[0]) if draw.figures.stages else []}
    return Chart(
        "memory",
        "Memory over one step, with the plan and without",
        "The most bytes alive while each block runs: first all forwards, then all backwards. A plan keeps less during "
        "the forward and gets it back, block by block, in the backward. The dashed line is what the budget allows.",
        {"": draw.spec([steps, tops, middle, budget], 320, params=[stages])},
        ("timeline", "allowed"),
        (
            ("stage", "stage", "text"),
            ("phase", "phase", "text"),
            ("plan_id", "plan (0: nothing recomputed)", "number"),
            ("level_bytes", "most bytes alive", "bytes"),
        ),
    )


def strips_height(rows: Sequence[Row]) -> int:
    """Pixels: 24 a strip, as in the page. Vega-Lite's height in steps does not go with a fitted width."""
    return 24 * len({row["strip"] for row in rows})


def _strips(draw: Drawing) -> Chart:
    hover, tooltip = hover_of(("strip", "run", "text"), ("block", "block", "text"), ("decision", "decision", "text"))
    colour = {
        "field": "decision",
        "type": "nominal",
        "scale": {"domain": list(DECISIONS), "range": list(draw.theme.decisions)},
        "legend": {"title": None, "orient": "top"},
    }
    cells = {
        "data": {"name": "strips"},
        "transform": hover,
        "mark": {"type": "rect", "stroke": draw.theme.paper, "strokeWidth": 1.5, "cornerRadius": 2},
        "encoding": {
            "x": {
                "field": "block",
                "type": "ordinal",
                "sort": {"field": "number"},
                "title": None,
                "axis": {
                    "labelAngle": -35,
                    "labelLimit": 120,
                    "labelOverlap": "greedy",
                    "domain": False,
                    "ticks": False,
                },
            },
            "y": {
                "field": "strip",
                "type": "ordinal",
                "sort": {"field": "order"},
                "title": None,
                "axis": {"domain": False, "ticks": False, "labelLimit": 160},
            },
            "color": colour,
            "tooltip": tooltip,
        },
    }
    return Chart(
        "strips",
        "What each plan does with each block",
        "One row a plan, the blocks in the order in which they run.",
        {"": draw.spec([cells], strips_height(draw.figures.datasets["strips"]))},
        ("strips",),
        (("strip", "run", "text"), ("block", "block", "text"), ("decision", "decision", "text")),
    )


# --- predicted against measured ---------------------------------------------------------------------------------------


def _predicted_peak(draw: Drawing) -> Chart:
    errors = [abs(r["prediction_error"]) for r in draw.figures.datasets["runs"] if r["prediction_error"] is not None]
    words = "No run measured its peak yet."
    if errors:
        words = (
            f"On the line, prediction and measurement agree. Largest difference over {_counted(len(errors), 'run')}: "
            f"{max(errors) * 100:.2f} %."
        )
    return Chart(
        "predicted_peak",
        "Peak memory, predicted against measured",
        words,
        {"": _against(draw, "predicted_peak_bytes", "measured_peak_bytes", "peak", True)},
        ("runs",),
        (
            ("planner", "planner", "text"),
            ("budget", "budget", "text"),
            ("predicted_peak_bytes", "predicted peak", "bytes"),
            ("measured_peak_bytes", "measured peak", "bytes"),
            ("prediction_error", "error", "ratio"),
        ),
    )


def _predicted_time(draw: Drawing) -> Chart:
    return Chart(
        "predicted_time",
        "Time added, predicted against measured",
        "Predicted from blocks timed alone, measured over pairs of whole steps with and without the plan. Times carry "
        "the machine's noise; bytes do not.",
        {"": _against(draw, "predicted_overhead_ratio", "overhead_ratio", "time added", False)},
        ("runs",),
        (
            ("planner", "planner", "text"),
            ("budget", "budget", "text"),
            ("predicted_overhead_ratio", "predicted", "ratio"),
            ("overhead_ratio", "measured", "ratio"),
        ),
    )


def _against(draw: Drawing, predicted: str, measured: str, what: str, is_bytes: bool) -> Spec:
    hover, tooltip = hover_of(*RUN_HOVER)
    known = {"filter": f"isValid(datum.{predicted}) && isValid(datum.{measured})"}
    sizes = [draw.size(predicted), draw.size(measured)] if is_bytes else []
    fields = [f"u_{name}" if is_bytes else name for name in (predicted, measured)]
    unit = f" ({draw.unit})" if is_bytes else ""
    axis = {"format": ",.4~g" if is_bytes else "+.0%"}
    x, y = (
        {
            "field": field,
            "type": "quantitative",
            "title": f"{word} {what}{unit}",
            "axis": axis,
            "scale": {"zero": False, "nice": True},
        }
        for field, word in zip(fields, ("predicted", "measured"), strict=True)
    )
    data = {"data": {"name": "runs"}}
    ends = [
        {
            **data,
            "transform": [
                *sizes,
                known,
                {
                    "aggregate": [
                        {"op": op, "field": field, "as": f"{op}_{name}"}
                        for op in ("min", "max")
                        for field, name in zip(fields, "pm", strict=True)
                    ]
                },
                {"calculate": "[min(datum.min_p, datum.min_m), max(datum.max_p, datum.max_m)]", "as": "ends"},
                {"flatten": ["ends"]},
            ],
            "mark": {"type": "line", "color": draw.theme.muted, "strokeWidth": 1, "strokeDash": [4, 4]},
            "encoding": {"x": {**x, "field": "ends"}, "y": {**y, "field": "ends"}},
        }
    ]
    points = {
        **data,
        "transform": [*sizes, known, *hover],
        "mark": {"type": "point", "size": 80, "strokeWidth": 2, "filled": False, "opacity": 1, "cursor": "pointer"},
        "encoding": {
            "x": x,
            "y": y,
            "color": draw.planner_colour(),
            "shape": draw.planner_shape(),
            "tooltip": tooltip,
        },
    }
    return draw.spec([*ends, points], 280)


# --- training ---------------------------------------------------------------------------------------------------------


def _loss(draw: Drawing) -> Chart:
    hover, tooltip = hover_of(
        ("job", "run", "text"), ("step", "step", "number"), ("what", "loss of", "text"), ("loss", "loss", "number")
    )
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "optimizer step",
        "scale": {"nice": False, "zero": False},
        "axis": {"tickMinStep": 1, "format": ",d"},
    }
    y = {"field": "loss", "type": "quantitative", "title": "loss", "scale": {"zero": False, "nice": True}}
    place = {"x": x, "y": y, "color": draw.planner_colour()}
    data = {"data": {"name": "loss"}}
    only = "datum.what == 'training'"
    layers = [
        {
            **data,
            "transform": [{"filter": only}],
            "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.75},
            "encoding": place | {"detail": {"field": "job"}},
        },
        {
            **data,
            "transform": [{"filter": only}, *hover],
            "mark": {"type": "point", "filled": True, "size": 30, "opacity": 0},
            "encoding": place | {"tooltip": tooltip},
        },
        {
            **data,
            "transform": [{"filter": f"!({only})"}, *hover],
            "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 80, "opacity": 1},
            "encoding": place | {"tooltip": tooltip},
        },
    ]
    return Chart(
        "loss",
        "Loss",
        _loss_caption(draw),
        {"": draw.spec(layers, 280)},
        ("loss",),
        (
            ("job", "run", "text"),
            ("what", "loss of", "text"),
            ("step", "step", "number"),
            ("loss", "loss", "number"),
        ),
    )


def _loss_caption(draw: Drawing) -> str:
    words = "Lines: training loss of each step. Diamonds: evaluation."
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in draw.figures.datasets["loss"]:
        if row["what"] == "training":
            curves.setdefault(row["job"], []).append((row["step"], row["loss"]))
    distinct = {tuple(points) for points in curves.values()}
    if len(curves) > 1:
        same = len(distinct) == 1
        words += (
            f" All {len(curves)} curves are the same to the last digit: a plan does not change the training."
            if same
            else f" {len(curves)} curves, {len(distinct)} of them different from each other."
        )
    return words


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
