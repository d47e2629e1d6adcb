"""Compiled blocks with a memory budget each, or the model as one graph: a league of its own, compiled by compiled."""

from __future__ import annotations

from dataclasses import replace

from ckptplan.plan import CompiledModel
from ckptplan.planners.nested import cheapest_plan
from ckptplan.planners.options import compiled_chain
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel, name_some
from ckptplan.simulate import plan_recompute_cost, simulate_plan


def compile_budget(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """For each block the measured budget of torch.compile's partitioner, so that the step is fastest within the budget.

    A block that runs faster as it is, or cannot be compiled, may be kept; where the model compiled as one graph was
    measured and is faster, that. Costs are what a step takes beside the fastest compiled step measured. Where nothing
    fits: the plan of least peak.

    Raises ``ValueError`` for ``cost="flops"`` (nobody counts what compiled code does), for the additive model, and
    for a profile without compiled options or without their times.
    """
    if cost == "flops":
        raise ValueError("cost='flops': nobody counts the FLOPs of compiled code; planner 'compile' needs cost='time'")
    if memory_model != "peak":
        raise ValueError(f"memory_model={memory_model!r}: planner 'compile' plans the peak; leave memory_model out")
    if not profile.compiled_model and not any(block.compiled for block in profile):
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
    of_blocks = cheapest_plan(compiled_chain(profile), budget_bytes, None, most_blocks=1)
    ways = [of_blocks]  # the first of equals is taken
    for option in profile.compiled_model:
        if option.step_time_ms is not None:
            whole = CompiledModel(len(profile), option.budget)
            ways.append(PlannerResult((whole,), of_blocks.optimality_gap))  # it costs less, and so does its bound
    judged = [
        (simulate_plan(profile, way.nodes).peak_bytes, plan_recompute_cost(profile, way.nodes, cost)) for way in ways
    ]
    fitting = [number for number, (peak_bytes, _) in enumerate(judged) if peak_bytes <= budget_bytes]
    if not fitting:
        return ways[min(range(len(ways)), key=lambda number: judged[number])]
    best = ways[min(fitting, key=lambda number: judged[number][1])]
    return best if 0 in fitting else replace(best, optimality_gap=0.0)  # no plan of blocks fits
