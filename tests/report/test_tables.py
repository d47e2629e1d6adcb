"""What the two tables say, in 80 columns and without colour."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.nodes import Keep, PlanNode, Recompute, Selective
from ckptplan.plan import CheckpointDecision, CheckpointPlan
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.record import (
    BudgetRecord,
    EngineRecord,
    ErrorRecord,
    GradientsRecord,
    LatencyRecord,
    MemoryRecord,
    PlanRecord,
    RunResult,
    StepTimes,
    TrainingRecord,
)
from ckptplan.report.tables import PlanRow, plan_rows, plan_table, result_table

MIB = 1 << 20


def make_profile(count: int, prefix: str = "layers.") -> ChainProfile:
    keep, recompute = StageCost(3 * MIB, 4 * MIB, 5 * MIB), StageCost(1024, 4 * MIB, 6 * MIB)
    return ChainProfile(
        tuple(
            BlockProfile(f"{prefix}{i}", i, keep=keep, recompute=recompute, recompute_time_ms=2.5) for i in range(count)
        )
    )


def make_plan(
    profile: ChainProfile, nodes: tuple[PlanNode, ...], recomputed: set[int], **fields: Any
) -> CheckpointPlan:
    decisions = tuple(
        CheckpointDecision(block.block_id, index in recomputed, reason="saves 8 MiB" if index in recomputed else "fits")
        for index, block in enumerate(profile)
    )
    return CheckpointPlan(nodes=nodes, decisions=decisions, planner="dp", **fields)


def printed(draw: Any, *arguments: Any, width: int = 80, **options: Any) -> list[str]:
    stream = io.StringIO()
    draw(*arguments, Console(file=stream, width=width), **options)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def row(lines: list[str], start: str) -> str:
    """The only line that begins with ``start``, with single spaces between its words."""
    (line,) = [line for line in lines if line.strip().startswith(start)]
    return " ".join(line.split())


def test_rows_take_bytes_and_times_from_the_plan_or_else_the_profile() -> None:
    profile = make_profile(2)
    plan = make_plan(profile, (Recompute((Keep(0),)), Keep(1)), {0})
    assert plan_rows(profile, plan) == (
        PlanRow("layers.0", "recompute", 1024, 2.5, "saves 8 MiB"),
        PlanRow("layers.1", "keep", 3 * MIB, 0.0, "fits"),
    )
    own = CheckpointDecision("layers.0", True, retained_bytes=7, recompute_time_ms=1.0)
    plan = CheckpointPlan(nodes=plan.nodes, decisions=(own, plan.decisions[1]))
    assert plan_rows(profile, plan)[0] == PlanRow("layers.0", "recompute", 7, 1.0, "")


def test_segments_and_nests_are_named_by_their_blocks() -> None:
    profile = make_profile(6)
    nodes = (Keep(0), Recompute((Keep(1), Keep(2))), Recompute((Keep(3), Recompute((Keep(4), Keep(5))))))
    plan = make_plan(profile, nodes, {1, 2, 3, 4, 5})
    assert [found.decision for found in plan_rows(profile, plan)] == [
        "keep",
        "recompute in 1-2",
        "recompute in 1-2",
        "recompute in 3-5",
        "recompute in 3-5, 4-5",
        "recompute in 3-5, 4-5",
    ]


def test_a_plan_for_another_chain_is_refused() -> None:
    plan = make_plan(make_profile(2), (Keep(0), Keep(1)), set())
    with pytest.raises(ValueError, match="zip"):
        plan_rows(make_profile(3), plan)


def test_equal_neighbours_share_a_row_and_the_totals_are_of_all_blocks() -> None:
    profile = make_profile(12)
    nodes = (*(Recompute((Keep(i),)) for i in range(8)), *(Keep(i) for i in range(8, 12)))
    plan = make_plan(profile, nodes, set(range(8)), predicted_peak_bytes=9 * MIB, budget_bytes=10 * MIB)
    lines = printed(plan_table, profile, plan)
    assert lines[0] == "plan by dp: predicted peak 9.00 MiB of 10.00 MiB allowed"
    assert row(lines, "layers.0-7") == "layers.0-7 recompute x8 1.00 KiB 2.5 ms saves 8 MiB"
    assert row(lines, "layers.8-11") == "layers.8-11 keep x4 3.00 MiB - fits"
    assert row(lines, "12 blocks") == "12 blocks 8 recomputed 12.01 MiB 20 ms"
    assert len(lines) < 10


def test_blocks_kept_in_part_say_so_and_are_counted_apart() -> None:
    keep, part = StageCost(3 * MIB, 4 * MIB, 5 * MIB), StageCost(MIB, 4 * MIB, 5 * MIB)
    option = SelectiveOption(("fc.addmm#0:0",), part, time_ms=0.5, sequence_hash="hash")
    profile = ChainProfile(
        tuple(BlockProfile(f"layers.{i}", i, keep=keep, output_bytes=8, selective=(option,)) for i in range(4))
    )
    nodes = (Selective(0, ("fc",)), Selective(1, ("fc",)), Recompute((Keep(2),)), Keep(3))
    decisions = tuple(
        CheckpointDecision(
            f"layers.{i}",
            i == 2,
            recompute_time_ms=0.5,
            saved_ops=option.saved_ops if i < 2 else None,
            reason="kept in part: fc",
        )
        for i in range(4)
    )
    plan = CheckpointPlan(nodes=nodes, decisions=decisions, planner="optimal")
    assert [found.decision for found in plan_rows(profile, plan)] == ["keep part", "keep part", "recompute", "keep"]
    lines = printed(plan_table, profile, plan, width=100)
    assert row(lines, "layers.0-1") == "layers.0-1 keep part x2 1.00 MiB 0.5 ms kept in part: fc"
    assert "1 recomputed, 2 in" in row(lines, "4 blocks")


def test_an_unmeasured_figure_is_said_to_be_one_and_spoils_its_total() -> None:
    profile = ChainProfile((BlockProfile("a"), BlockProfile("b")))
    plan = make_plan(profile, (Recompute((Keep(0),)), Keep(1)), {0})
    lines = printed(plan_table, profile, plan)
    assert row(lines, "a ") == "a recompute not measured not measured saves 8 MiB"
    assert row(lines, "2 blocks") == "2 blocks 1 recomputed not measured not measured"


def test_brackets_in_names_are_no_markup() -> None:
    profile = make_profile(1, prefix="stages[bold].")
    lines = printed(plan_table, profile, make_plan(profile, (Keep(0),), set()))
    assert row(lines, "stages[bold].0").startswith("stages[bold].0 keep")


def full_result() -> RunResult:
    return RunResult(
        status="ok", model="gpt", data="stdlib_text", device="cpu", dtype="float32", planner="dp",
        plan=PlanRecord(text="R(0) K1", kept=1, recomputed=1),
        budget=BudgetRecord("budget_frac", 0.5, 10 * MIB, 0),
        memory=MemoryRecord(
            no_checkpoint_predicted_peak_bytes=20 * MIB, no_checkpoint_measured_peak_bytes=21 * MIB,
            predicted_peak_bytes=9 * MIB, measured_peak_bytes=9 * MIB + 1024, prediction_error=-0.0001,
            within_budget=True, smallest_reachable_bytes=5 * MIB, peak_at="layers.1 backward",
        ),
        latency=LatencyRecord(
            StepTimes(10.1, 10.0, 11.0, 0.2, 20), StepTimes(9.1, 9.0, 9.5, 0.2, 20), 0.111, 0.1, 0.2
        ),
        gradients=GradientsRecord(True, "the unplanned step", 0.0, 0.0, True, True),
        training=TrainingRecord(60, 5.5, 3.25, 12.34, 25600.0),
    )  # fmt: skip


def test_the_result_table_has_what_was_predicted_beside_what_was_measured() -> None:
    lines = printed(result_table, full_result().to_dict())
    assert lines[0] == "ok: gpt on stdlib_text, cpu float32, planner dp, 1 blocks kept, 1 recomputed"
    on_ranks = full_result()
    on_ranks.engine = EngineRecord("ddp", 2)
    assert printed(result_table, on_ranks.to_dict())[0].startswith(
        "ok: gpt on stdlib_text, ddp on 2 ranks, cpu float32,"
    )
    assert row(lines, "budget").startswith("budget 10.00 MiB budget_frac = 0.5")
    assert row(lines, "peak with the plan").startswith("peak with the plan 9.00 MiB 9.00 MiB within budget;")
    assert row(lines, "peak without") == "peak without 20.00 MiB 21.00 MiB"
    assert row(lines, "smallest reachable").startswith("smallest reachable 5.00 MiB by plans of planner ")
    assert row(lines, "step with the plan") == "step with the plan 10 ms median of 20, p95 11 ms"
    assert row(lines, "step without") == "step without 9 ms median of 20, p95 9.5 ms"
    assert row(lines, "time added").startswith("time added +10.0 % +11.1 % of a step; median over pairs of")
    assert row(lines, "gradients") == "gradients bitwise equal the unplanned step"
    assert row(lines, "loss").startswith("loss 5.5000 -> 3.2500")
    text = " ".join(" ".join(lines).split())
    assert "prediction off by -0.01 %" in text
    assert "layers.1 backward" in text
    assert "60 steps; 12.3 samples/s" in text
    assert "25,600 tokens/s" in text


def test_both_tables_fit_eighty_columns_and_have_no_colour_when_piped() -> None:
    profile = make_profile(3, prefix="transformer.decoder.h.")
    plan = make_plan(profile, (Keep(0), Keep(1), Recompute((Keep(2),))), {2})
    for lines in (printed(plan_table, profile, plan), printed(result_table, full_result().to_dict())):
        assert max(len(line) for line in lines) <= 80
        assert not any("\x1b" in line for line in lines)


def test_failure_differences_and_being_over_budget_stand_out() -> None:
    result = full_result()
    result.status, result.error = "over_budget", ErrorRecord("RuntimeError", "peak [9 MiB] above budget")
    result.memory.within_budget = False
    result.gradients = GradientsRecord(True, "the unplanned step", 1.0, 0.5, False, False)
    result.notes.append("training/last_loss came out as nan, so it is unknown")
    lines = printed(result_table, result.to_dict())
    assert lines[0].startswith("over_budget: ")
    assert any("OVER BUDGET" in line for line in lines)
    assert row(lines, "gradients").startswith("gradients DIFFERENT")
    assert "RuntimeError: peak [9 MiB] above budget" in lines
    assert "note: training/last_loss came out as nan, so it is unknown" in lines


def test_an_empty_result_says_not_measured_and_never_zero() -> None:
    lines = printed(result_table, RunResult(status="infeasible").to_dict())
    assert row(lines, "peak with the plan") == "peak with the plan not measured not measured"
    assert row(lines, "budget") == "budget none"
    assert row(lines, "gradients") == "gradients not checked"
    assert row(lines, "loss") == "loss not trained"


def test_a_long_path_stays_on_one_line() -> None:
    path = "/runs/" + "x" * 120 + "/result.json"
    lines = printed(result_table, full_result().to_dict(), paths={"result": path, "log": "/runs/train.log"})
    assert lines[-2:] == [f"result  {path}", "log     /runs/train.log"]
