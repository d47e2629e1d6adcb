"""Compiled blocks with a memory budget each, or the model as one graph: a league of its own, compiled by compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptplan.nodes import Compiled, CompiledModel, Keep, PlanNode
from ckptplan.planners.nested import cheapest_plan
from ckptplan.planners.options import compiled_chain
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel, name_some
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.selective import compiled_blocks_base_ms, fastest_compiled_step_ms
from ckptplan.simulate import simulate_plan

# Times of blocks add up to a step's only so far: what a compiled block hands on lies otherwise in memory than what it
# got when it was timed by itself. The U-Net of tests/benchmarks/race was 12 % slower than the sum.
_DOUBT = 0.05


def compile_budget(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """For each block the measured budget of torch.compile's partitioner, so that the step is fastest within the budget.

    A block that runs faster as it is, or cannot be compiled, may be kept; where the model compiled as one graph was
    measured and is faster, that. Costs are what a step takes beside the fastest compiled step measured. Where nothing
    fits: the plan of least peak. Steps that were timed as a whole (the model as one graph, every block with the same
    budget) stand against the sum of blocks' times: the fastest of them that fits is taken unless the plan of
    different budgets promises 5 % of a step more.

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
    best = best if 0 in fitting else replace(best, optimality_gap=0.0)  # no plan of blocks fits
    return _timed_as_a_whole(profile, budget_bytes, best) or best


def _every_block(profile: ChainProfile, budget: float) -> tuple[PlanNode, ...]:
    """Every block compiled with one budget; what the model runs between blocks is only ever kept."""
    return tuple(Compiled(i, budget) if block.compiled else Keep(i) for i, block in enumerate(profile))


def _timed_as_a_whole(profile: ChainProfile, budget_bytes: int, best: PlannerResult) -> PlannerResult | None:
    """The fastest step that was timed as a whole and fits; None where ``best`` is that, or promises enough more."""
    if not profile.compiled_steps:
        return None
    timed_ms: dict[Sequence[PlanNode], float] = {
        _every_block(profile, step.budget): step.step_time_ms for step in profile.compiled_steps
    }
    for option in profile.compiled_model:
        if option.step_time_ms is not None:
            timed_ms[(CompiledModel(len(profile), option.budget),)] = option.step_time_ms
    fitting_ms = {
        nodes: ms for nodes, ms in timed_ms.items() if simulate_plan(profile, nodes).peak_bytes <= budget_bytes
    }
    if not fitting_ms:
        return None
    nodes = min(fitting_ms, key=lambda nodes: fitting_ms[nodes])
    added_ms = plan_recompute_cost(profile, best.nodes, "time")
    expected_ms = timed_ms.get(best.nodes, fastest_compiled_step_ms(profile) + added_ms)
    is_timed = best.nodes in timed_ms or added_ms == compiled_blocks_base_ms(profile)  # each block its fastest way
    promised_ms = expected_ms if is_timed else expected_ms + _DOUBT * fitting_ms[nodes]
    return None if promised_ms <= fitting_ms[nodes] else PlannerResult(tuple(nodes))
