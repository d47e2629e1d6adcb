"""What the recomputation of a plan costs, in milliseconds and in FLOPs. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from ckptplan.nodes import (
    Compiled,
    CompiledModel,
    Keep,
    Offload,
    PlanNode,
    Recompute,
    Selective,
    blocks_of,
    nodes_text,
)
from ckptplan.profiles import (
    ChainProfile,
    CostKind,
    recompute_costs,
)
from ckptplan.selective import (
    compiled_blocks_base_ms,
    compiled_model_ms,
    find_compiled,
    find_offload,
    find_option,
)


def recompute_time_ms(profile: ChainProfile, nodes: Sequence[PlanNode]) -> float | None:
    """Milliseconds that recomputation adds to an eager step; None without times, and where blocks run compiled."""
    if any(isinstance(node, (Compiled, CompiledModel)) for node in nodes):
        return None  # what they cost is beside their own fastest step
    if not any(b.recompute_time_ms is not None or b.recompute_time_upper_bound_ms_mean is not None for b in profile):
        return None
    return plan_recompute_cost(profile, nodes, "time")


def recompute_flops(profile: ChainProfile, nodes: Sequence[PlanNode]) -> int | None:
    """FLOPs that recomputation adds to a step; None where the profile does not hold them."""
    if any(b.recompute_flops is None and b.eligible_for_checkpoint for b in profile):
        return None
    if any(isinstance(node, (Compiled, CompiledModel)) for node in nodes):
        return None  # a compiler fuses and recomputes as it likes; nobody counts what
    return int(plan_recompute_cost(profile, nodes, "flops"))


def plan_recompute_cost(profile: ChainProfile, nodes: Sequence[PlanNode], cost: CostKind) -> float:
    """Each replay runs the blocks in it, the last one only as far as backward needs; nested nodes replay again.

    Raises ``ValueError`` naming a block that is recomputed though it cannot be, or whose figure is missing.
    """
    last_cost = recompute_costs(profile, cost)
    total: float = 0  # an int stays one: FLOPs are exact
    for node in nodes:
        if isinstance(node, Recompute):
            total += _replay_cost(profile, node, last_cost, cost)
        elif isinstance(node, Selective):
            option = find_option(profile[node.block], node.saved_ops)
            known = option.flops if cost == "flops" else option.time_ms
            is_untimed = cost == "time" and recompute_time_ms(profile, ()) is None
            total += _known(profile, node.block, 1.0 if known is None and is_untimed else known, cost)
        elif isinstance(node, Offload):
            total += (
                0 if cost == "flops" else _known(profile, node.block, find_offload(profile[node.block]).time_ms, cost)
            )
        elif isinstance(node, (Compiled, CompiledModel)):
            if cost == "flops":
                raise ValueError(f"cost='flops': the FLOPs of compiled code ({nodes_text((node,))}) are not counted")
            total += _compiled_cost(profile, node)
    if any(isinstance(node, Compiled) for node in nodes):
        total += compiled_blocks_base_ms(profile)
    return total


def _compiled_cost(profile: ChainProfile, node: Compiled | CompiledModel) -> float:
    if isinstance(node, Compiled):
        return _known(profile, node.block, find_compiled(profile[node.block], node.budget).time_ms, "time")
    found = compiled_model_ms(profile, node.budget)
    if found is None:
        raise ValueError(f"{nodes_text((node,))}: the compiled model has no times; profile with num_trials=1 or more")
    return found


def _replay_cost(profile: ChainProfile, node: Recompute, last_cost: Sequence[float | None], cost: CostKind) -> float:
    """One replay of the node, and those of the nodes inside it.

    The replay ends as soon as all that its last child saves is there: for a block that is its early stop, for
    another Recompute its input, so that child's blocks run in its own replay only.
    """
    *leading, last = node.children
    total: float = 0
    for block in blocks_of(leading):
        full = profile[block].forward_flops if cost == "flops" else profile[block].forward_time_ms
        total += _known(profile, block, last_cost[block] if full is None else full, cost)
    if isinstance(last, Keep):
        total += _known(profile, last.block, last_cost[last.block], cost)
    return total + sum(_replay_cost(profile, c, last_cost, cost) for c in node.children if isinstance(c, Recompute))


def _known(profile: ChainProfile, block: int, figure: float | None, cost: CostKind) -> float:
    if figure is None:
        reason = profile[block].exclusion_reason or "no cost figure"
        raise ValueError(f"block {profile[block].block_id!r} cannot be recomputed (cost={cost!r}): {reason}")
    return figure
