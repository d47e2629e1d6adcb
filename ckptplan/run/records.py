"""How what was measured and planned becomes parts of ``result.json``."""

from __future__ import annotations

import statistics
from typing import Any

from ckptplan.benchmark import percentile
from ckptplan.budget import PlannedRun
from ckptplan.nodes import OFFLOAD
from ckptplan.plan import CheckpointDecision
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.proof import GradientCheck
from ckptplan.record import GradientsRecord, PlanRecord, StepTimes
from ckptplan.simulate import PlanCost


def decision_word(decision: CheckpointDecision, *, is_compiled: bool) -> str:
    """What a plan does with a block, in a word."""
    if is_compiled:
        return "compiled"
    if decision.executor == OFFLOAD:
        return "on the host"
    if decision.checkpointed:
        return "recompute"
    return "keep" if decision.saved_ops is None else "keep part"


def short_name(node: dict[str, Any]) -> str:
    """The class or function that a config node names, without its module."""
    return str(node["_target_"]).rpartition(".")[2]


def plan_record(planned: PlannedRun) -> PlanRecord:
    """The plan and what it decides."""
    plan = planned.plan
    return PlanRecord(
        text=plan.text,
        digest=plan.digest,
        solve_s=planned.solve_s,
        kept=plan.kept,
        recomputed=plan.recomputed,
        selective=plan.selective,
        offloaded=plan.offloaded,
        compiled=plan.compiled,
        optimality_gap=plan.optimality_gap,
    )


def gradients_record(check: GradientCheck | None, note: str | None) -> GradientsRecord:
    """The check of the gradients; ``note`` says why there is none."""
    if check is None:
        return GradientsRecord(checked=False, reference=note)
    return GradientsRecord(
        checked=True,
        reference=check.reference,
        max_abs_diff=check.max_abs_diff,
        max_rel_diff=check.max_rel_diff,
        bitwise_equal=check.bitwise_equal,
        passed=check.passed,
    )


def step_times(values_ms: tuple[float, ...]) -> StepTimes:
    """Mean, median, 95th percentile and spread of step times; all unknown without a value."""
    if not values_ms:
        return StepTimes()
    return StepTimes(
        mean=statistics.fmean(values_ms),
        p50=percentile(values_ms, 50),
        p95=percentile(values_ms, 95),
        std=statistics.stdev(values_ms) if len(values_ms) > 1 else None,
        n=len(values_ms),
    )


def _stages(profile: ChainProfile) -> list[BlockProfile | RegionProfile]:
    return [*profile.blocks, *profile.regions]


def predicted_overhead_ratio(profile: ChainProfile, cost: PlanCost) -> float | None:
    """Predicted share of a step's time that the plan adds, from the measured parts."""
    stages = _stages(profile)
    parts = [t for s in stages for t in (s.forward_time_ms, s.backward_time_ms)]
    if cost.recompute_time_ms is None or any(part is None for part in parts):
        return None
    step_ms = sum(part for part in parts if part is not None)
    return cost.recompute_time_ms / step_ms if step_ms else None


def recompute_flops_ratio(profile: ChainProfile, cost: PlanCost) -> float | None:
    """Share of a step's FLOPs that the plan computes again; exact."""
    stages = _stages(profile)
    parts = [f for s in stages for f in (s.forward_flops, s.backward_flops)]
    if cost.recompute_flops is None or any(part is None for part in parts):
        return None
    step = sum(part for part in parts if part is not None)
    return cost.recompute_flops / step if step else None
