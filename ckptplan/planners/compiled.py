"""Compiled blocks, a memory budget each: a league of its own, compiled against compiled."""

from __future__ import annotations

from ckptplan.planners.nested import cheapest_plan
from ckptplan.planners.options import compiled_chain
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel, name_some


def compile_budget(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """For each block the measured budget of torch.compile's partitioner, so that the step is fastest within the budget.

    Costs are what a step takes beside every block under its fastest measured budget. Blocks that cannot be compiled
    run as they are, kept. Where nothing fits: the plan of least peak.

    Raises ``ValueError`` for ``cost="flops"`` (nobody counts what compiled code does), for the additive model, and
    for a profile without compiled options or without their times.
    """
    if cost == "flops":
        raise ValueError("cost='flops': nobody counts the FLOPs of compiled code; planner 'compile' needs cost='time'")
    if memory_model != "peak":
        raise ValueError(f"memory_model={memory_model!r}: planner 'compile' plans the peak; leave memory_model out")
    if not any(block.compiled for block in profile):
        reasons = sorted({warning for block in profile for warning in block.warnings})
        raise ValueError(
            "the profile has no compiled blocks; profile with compiled_budgets=(0.0, 0.5, 1.0)"
            + "".join(f" ({reason})" for reason in reasons)
        )
    untimed = [block.block_id for block in profile if any(option.time_ms is None for option in block.compiled)]
    if untimed:
        raise ValueError(
            f"the compiled options of {name_some(untimed)} have no times; profile with num_trials=1 or more"
        )
    return cheapest_plan(compiled_chain(profile), budget_bytes, None, most_blocks=1)
