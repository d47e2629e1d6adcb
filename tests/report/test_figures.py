"""Rows of the page: each figure is that of result.json, the simulator or the curve, and unknown ones stay unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptplan.costs import StageCost
from ckptplan.curve import CurvePoint, PlanCurve, plan_curve
from ckptplan.nodes import parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import RegionProfile
from ckptplan.report import figures as figures_module
from ckptplan.report import steps
from ckptplan.report.figures import RUN_FIGURES, Figures, make_figures, typical_run
from ckptplan.report.records import read_records
from ckptplan.report.steps import decisions_of, stage_names, timeline_of
from ckptplan.simulate import simulate_plan
from tests.report_folders import MIB, STEP_MS, make_profile, write_run, write_sweep


def figures_of(folder: Path) -> Figures:
    return make_figures(read_records(folder))


def test_every_figure_of_a_run_is_that_of_its_result(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    rows = figures_of(tmp_path).datasets["runs"]
    assert len(rows) == len(results)
    for row, result in zip(rows, results, strict=True):
        for column, path in RUN_FIGURES.items():
            value: Any = result
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            assert row[column] == value, (row["job"], column)
        assert row["command"] == f"python train.py planner={result['planner']} budget_frac={result['budget']['value']}"


def test_a_point_stands_at_its_measured_peak_a_cross_at_what_is_known(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    rows = {(r["planner"], r["budget_value"]): r for r in figures_of(tmp_path).datasets["runs"]}
    known = {(r["planner"], r["budget"]["value"]): r for r in results}
    ok, infeasible, oom, failed = (rows[key] for key in (("dp", 0.9), ("dp", 0.3), ("uniform", 0.5), ("uniform", 0.3)))
    assert ok["place_bytes"] == known["dp", 0.9]["memory"]["measured_peak_bytes"]
    assert infeasible["place_bytes"] == known["dp", 0.3]["budget"]["bytes"]
    assert oom["place_bytes"] == known["uniform", 0.5]["memory"]["predicted_peak_bytes"]
    assert failed["place_bytes"] is None
    assert [row["is_drawn"] for row in (ok, rows["greedy", 0.3], infeasible, oom, failed)] == [True] * 2 + [False] * 3
    assert any("ended before there was a budget" in note for note in figures_of(tmp_path).notes)


def test_crosses_at_one_place_are_stacked(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text("")
    for index in range(3):
        write_run(tmp_path / f"{index:03d}_dp_0.3_0", fraction=0.3, status="infeasible", seed=index)
    assert [row["cross_level"] for row in figures_of(tmp_path).datasets["runs"]] == [0, 1, 2]


def test_the_curve_is_the_whole_predicted_trade_off_of_the_profile(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    rows = figures_of(tmp_path / "run").datasets["curve"]
    profile = make_profile()
    curve = plan_curve(profile)
    assert [(row["place_bytes"], row["plan"]) for row in rows] == [(p.peak_bytes, p.plan) for p in curve.points]
    step_ms = 6 * 12.0 + 2 * 3.0
    for row, point in zip(rows, curve.points, strict=True):
        assert row["place_ratio"] == pytest.approx(point.cost / step_ms)
        assert row["step_ms"] == pytest.approx(STEP_MS * (1 + point.cost / step_ms))
        nodes = parse_plan_text(point.plan)
        assert row["recompute_flops_ratio"] == simulate_plan(profile, nodes).recompute_flops / (6 * 3000 + 60)
    assert rows[-1]["place_ratio"] == 0.0


def test_a_stored_curve_is_taken_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    kept = "K0 K1 K2 K3 K4 K5"
    PlanCurve((CurvePoint(40 * MIB, 0.0, kept),), 40 * MIB, step_cost=78.0).save(tmp_path / "run" / "curve.json")
    (row,) = figures_of(tmp_path / "run").datasets["curve"]
    assert (row["place_bytes"], row["plan"]) == (40 * MIB, kept)


def test_the_timeline_covers_the_step_and_is_that_of_the_simulator() -> None:
    profile = make_profile(4)
    nodes = CheckpointPlan.from_text("K0 R(1 2) R(3)", profile).nodes
    rows = timeline_of(profile, nodes)
    assert [(row["start"], row["end"]) for row in rows] == [
        *((0, 1), (1, 2), (2, 4), (4, 5), (5, 6)),
        *((6, 7), (7, 8), (8, 10), (10, 11), (11, 12)),
    ]
    stages = ["before the blocks", "layers.0", "layers.1..layers.2", "layers.3", "head and loss"]
    assert [row["stage"] for row in rows] == [*stages, *reversed(stages)]
    cost = simulate_plan(profile, nodes)
    assert [row["level_bytes"] for row in rows] == [level for _, _, level in cost.timeline]
    assert max(row["level_bytes"] for row in rows) == cost.peak_bytes


def test_what_the_model_runs_between_blocks_has_its_place_in_the_timeline() -> None:
    plain = make_profile(4)
    between = RegionProfile("between layers.0 and layers.1", StageCost(0, 5, 7, (True,), (False,)), (8,), (None,))
    profile = replace(plain, blocks=tuple(replace(b, before=between if i == 1 else None) for i, b in enumerate(plain)))
    nodes = CheckpointPlan.from_text("K0 R(1) R(2 3)", profile).nodes
    rows = timeline_of(profile, nodes)
    stages = ["before the blocks", "layers.0", between.name, "layers.1", "layers.2..layers.3", "head and loss"]
    assert [row["stage"] for row in rows] == [*stages, *reversed(stages)]
    assert [(row["start"], row["end"]) for row in rows[:6]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert max(row["level_bytes"] for row in rows) == simulate_plan(profile, nodes).peak_bytes
    assert set(stage_names(profile)) >= {row["stage"] for row in rows if ".." not in row["stage"]}


def test_the_page_has_the_timeline_of_each_plan_once_and_that_without_a_plan(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    figures = figures_of(tmp_path)
    ids = {row["plan_id"] for row in figures.datasets["runs"]} - {None}
    assert {row["plan_id"] for row in figures.datasets["timeline"]} == {0, *ids}
    assert len(figures.datasets["timeline"]) == (1 + len(ids)) * 2 * len(figures.stages[0])
    assert len(ids) == len({row["plan"] for row in figures.datasets["runs"]} - {None}) == 3


def test_decisions_tell_how_often_a_block_runs() -> None:
    nodes = parse_plan_text("K0 S1[a] R(2) R(3 R(4))")
    assert decisions_of(nodes) == ["keep", "keep part", "recompute", "recompute", "recompute repeatedly"]


def test_strips_are_those_of_the_plans(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    rows = [row for row in figures_of(tmp_path).datasets["strips"] if row["strip"] == "dp 0.5"]
    letters = "".join({"keep": "K", "recompute": "R"}[row["decision"]] for row in rows)
    (plan,) = [r["plan"]["text"] for r in results if (r["planner"], r["budget"]["value"]) == ("dp", 0.5)]
    assert letters == "".join(word[0] for word in plan.split())
    assert [row["block"] for row in rows] == [f"layers.{i}" for i in range(6)]


def test_blocks_carry_the_reasons_of_the_plan(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    plan = CheckpointPlan.load(tmp_path / "run" / "plan.json")
    rows = figures_of(tmp_path / "run").datasets["blocks"]
    assert [(row["block"], row["why"]) for row in rows] == [(d.block_id, d.reason) for d in plan.decisions]


def test_losses_are_those_of_the_metrics_and_long_runs_are_thinned_with_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    rows = figures_of(tmp_path / "run").datasets["loss"]
    assert [(r["step"], r["loss"]) for r in rows if r["what"] == "training"] == [(s, 5.0 / s) for s in range(1, 21)]
    assert [(r["step"], r["loss"]) for r in rows if r["what"] == "evaluation"] == [(20, 2.5)]
    monkeypatch.setattr(figures_module, "MOST_LOSS_POINTS", 10)
    steps_shown = [r["step"] for r in figures_of(tmp_path / "run").datasets["loss"] if r["what"] == "training"]
    assert (steps_shown[0], steps_shown[-1], len(steps_shown)) == (1, 20, 10)


def test_runs_of_other_sizes_are_another_workload_named_by_what_differs(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text("")
    for index, layers in enumerate((6, 4)):
        config = f"model:\n  _target_: m.GPT\n  layers: {layers}\ndata:\n  batch_size: 8\n  seed: {index}\n"
        write_run(tmp_path / f"00{index}_dp", count=layers, config=config)
    figures = figures_of(tmp_path)
    assert figures.workloads == tuple(f"GPT on stdlib_text, cpu float32, model.layers={n}" for n in (6, 4))
    assert [row["workload"] for row in figures.datasets["runs"]] == [0, 1]
    assert [len(stages) for stages in figures.stages] == [8, 6]
    assert {row["workload"] for row in figures.datasets["curve"]} == {0, 1}


def test_what_is_too_much_for_a_page_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(tmp_path)
    for name, most in (("MOST_BLOCK_ROWS", 6), ("MOST_TIMELINE_ROWS", 32), ("MOST_STRIP_CELLS", 6)):
        monkeypatch.setattr(steps, name, most)
    figures = figures_of(tmp_path)
    assert len(figures.datasets["blocks"]) == 6
    assert len(figures.datasets["timeline"]) == 32
    assert len(figures.datasets["strips"]) == 6
    assert sum("left out" in note or "no strip" in note for note in figures.notes) == 3


def test_a_run_without_figures_gives_a_row_of_unknowns(tmp_path: Path) -> None:
    write_run(tmp_path / "run", status="failed", error="boom")
    figures = figures_of(tmp_path / "run")
    (row,) = figures.datasets["runs"]
    assert (row["status"], row["error"], row["measured_peak_bytes"], row["plan_id"]) == ("failed", "boom", None, None)
    assert [name for name, rows in figures.datasets.items() if rows] == ["runs"]
    assert typical_run([row]) is row
