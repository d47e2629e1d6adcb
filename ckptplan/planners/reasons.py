"""Why: the reason for each block's decision, and the error where no plan will do. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptplan.costs import SelectiveOption
from ckptplan.errors import InfeasibleTargetError
from ckptplan.nodes import (
    Compiled,
    CompiledModel,
    Keep,
    Offload,
    PlanNode,
    Selective,
    blocks_of,
    nodes_text,
    recomputed_blocks,
)
from ckptplan.planners.nested import least_nested_peak, least_whole_peak
from ckptplan.planners.tables import FlatTables
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, MemoryModel, name_some
from ckptplan.selective import find_compiled, find_offload, find_option
from ckptplan.simulate import AFTER, BEFORE, PlanCost
from ckptplan.units import format_bytes, format_ms

_SHOWN = {"dynamic_programming": "dp", "no_checkpoint": "none", "checkpoint_all": "all", "compile_budget": "compile"}


def shown_name(planner: str) -> str:
    """A planner as users are told of it: by the name that the API, the configuration and the documents share."""
    return _SHOWN.get(planner, planner)


def infeasible_slowdown(
    planner: str, least: PlanCost, least_any_bytes: int, *, ratio: float, added: float, step: float, cost: CostKind
) -> InfeasibleTargetError:
    """The planner's cheapest plan, ``least``, adds ``added`` to a step of ``step``: more than ``ratio`` allows."""
    return InfeasibleTargetError(
        f"planner {shown_name(planner)!r} has no plan within max_slowdown={ratio}: it adds {_cost_text(added, cost)} "
        f"to a step of {_cost_text(step, cost)}, a ratio of {1 + added / step:.4g}",
        smallest_reachable_bytes=least.peak_bytes,
        smallest_reachable_any_bytes=least_any_bytes,
        limited_by=least.peak_at,
    )


def infeasible_budget(
    planner: str,
    chain: ChainProfile,
    memory_model: MemoryModel,
    least: PlanCost,
    *,
    budget_bytes: int,
    static_bytes: int,
) -> InfeasibleTargetError:
    """The planner's plan of least peak, ``least``, is above the budget: what sets its peak, and what would help."""
    least_flat, flat_at = least_whole_peak(chain, memory_model)
    least_any, any_at = least_nested_peak(chain, memory_model)
    own = least.peak_bytes
    first = f"no plan of planner {shown_name(planner)!r} keeps the activation peak within {_bytes_text(budget_bytes)}"
    if static_bytes:
        first += f" (what else stands on the device takes {_bytes_text(static_bytes)})"
    parts = [first, f"its smallest reachable peak is {_bytes_text(own)}, set by {least.peak_at}"]
    if least_flat < own:
        parts.append(f"planner 'dp' reaches {_bytes_text(least_flat)}, set by {flat_at}")
    if least_any < min(own, least_flat):
        has_parts = any(option.saved_ops for block in chain for option in block.selective)
        how = "options inside blocks and nesting" if has_parts else "nesting"
        parts.append(f"{how} (planner 'optimal') reaches {_bytes_text(least_any)}, set by {any_at}")
    others = [("dp", least_flat), ("optimal", least_any)]
    enough = [f"planner={name!r}" for name, reached in others if reached <= budget_bytes]
    parts.append("what would help: " + "; ".join([*enough[:1], *_levers(chain, least, budget_bytes)]))
    return InfeasibleTargetError(
        "; ".join(parts),
        budget_bytes=budget_bytes,
        smallest_reachable_bytes=own,
        smallest_reachable_any_bytes=min(own, least_flat, least_any),
        limited_by=least.peak_at,
    )


def _levers(chain: ChainProfile, least: PlanCost, budget_bytes: int) -> list[str]:
    levers = []
    if least.peak_at.startswith(AFTER):
        rest = max(level for stage, _, level in least.timeline if stage != AFTER)
        levers.append(
            "a chunked or fused loss (the head and the loss set the peak; "
            f"without them the same plan takes {format_bytes(rest)})"
        )
    levers.append(_smaller_batch(least.peak_bytes, budget_bytes))
    if not least.peak_at.startswith((AFTER, BEFORE)):
        levers.append(f"declaring smaller blocks inside {least.peak_at.rsplit(' ', 1)[0]!r}")
    excluded = [block.block_id for block in chain if not block.eligible_for_checkpoint]
    if excluded:
        levers.append(f"making {name_some(excluded)} recomputable")
    return levers


def _smaller_batch(peak_bytes: int, budget_bytes: int) -> str:
    """Each stage's bytes are affine in the batch size, so that they shrink with it in proportion at the most."""
    percent = max(0, budget_bytes) * 100 // max(peak_bytes, 1)
    size = f" (by proportion at most {percent} % of this one's size, not measured" if percent else " ("
    told = "; batch=auto, or maximize(model, batch, loss_fn, budget), finds and confirms it; " if percent else ""
    return f"a smaller batch{size}{told}with more accumulation the result is the same)"


def _bytes_text(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"


def _cost_text(cost: float, kind: CostKind) -> str:
    return format_ms(cost) if kind == "time" else f"{cost:.4g} FLOPs"


# Reasons -------------------------------------------------------------------------------------------------------------


def block_reasons(
    chain: ChainProfile, nodes: Sequence[PlanNode], peak_bytes: int, memory_model: MemoryModel, cost: CostKind
) -> list[str]:
    """One sentence per block: why it is kept or recomputed."""
    if any(
        len(blocks_of((node,))) > 1 or isinstance(node, (Selective, Offload, Compiled, CompiledModel)) for node in nodes
    ):
        return _tree_reasons(chain, nodes, cost)
    tables = FlatTables(chain, memory_model, cost)
    return _flat_reasons(tables, chain, recomputed_blocks(nodes), peak_bytes, cost)


def _tree_reasons(chain: ChainProfile, nodes: Sequence[PlanNode], cost: CostKind) -> list[str]:
    reasons = []
    for node in nodes:
        for i in blocks_of((node,)):
            if isinstance(node, Keep):
                reasons.append(
                    _not_eligible(chain[i]) or ("kept: faster than compiled" if chain[i].compiled else "kept")
                )
            elif isinstance(node, Offload):
                reasons.append(_offload_reason(chain[i]))
            elif isinstance(node, Compiled):
                reasons.append(_compiled_reason(chain[i], node))
            elif isinstance(node, CompiledModel):
                reasons.append("compiled with the whole model, as one graph")
            elif isinstance(node, Selective):
                part = _part_reason(chain[i], node) if node.saved_ops else ""
                reasons.append(part or _executor_reason(chain[i], cost, by_replay=True))
            elif len(blocks_of((node,))) == 1:
                reasons.append(_executor_reason(chain[i], cost, by_replay=False))
            else:
                reasons.append(f"recomputed: part of {nodes_text((node,))}")
    return reasons


def _offload_reason(block: BlockProfile) -> str:
    option = find_offload(block)
    cost = "an unmeasured time" if option.time_ms is None else format_ms(option.time_ms)
    return f"{format_bytes(option.host_bytes)} on the host until backward, for {cost}"


def _compiled_reason(block: BlockProfile, node: Compiled) -> str:
    added_ms = find_compiled(block, node.budget).time_ms
    if added_ms == 0:
        return "compiled with its fastest memory budget"
    cost = "an unmeasured time" if added_ms is None else format_ms(added_ms)
    return f"compiled with a lower memory budget, for {cost} beside its fastest"


def _executor_reason(block: BlockProfile, cost: CostKind, *, by_replay: bool) -> str:
    """A block recomputed whole: what that takes, beside the other way to do it where it was measured."""
    option = next((o for o in block.selective if not o.saved_ops), None)
    replay, checkpoint = None if option is None else (option.cost, _option_cost(option, cost)), None
    if block.eligible_for_checkpoint and block.recompute is not None:
        figure = block.recompute_flops if cost == "flops" else block.recompute_time_ms
        checkpoint = block.recompute, figure
    ways = [("replay", replay), ("PyTorch's checkpoint", checkpoint)]
    (name, mine), (other_name, other) = ways if by_replay else ways[::-1]
    assert mine is not None  # the referee has checked the plan
    told = f"recomputed by {name}" + ("" if mine[1] is None else f" for {_cost_text(mine[1], cost)}")
    if other is None or mine[1] is None or other[1] is None:
        return told
    if mine[1] <= other[1]:
        return f"{told} ({other_name}: {_cost_text(other[1], cost)})"
    peaks = [format_bytes(figures.backward_peak_bytes) for figures, _ in (mine, other)]
    return f"{told}, with a backward peak of {peaks[0]} ({other_name}: {_cost_text(other[1], cost)}, {peaks[1]})"


def _option_cost(option: SelectiveOption, cost: CostKind) -> float | None:
    return option.flops if cost == "flops" else option.time_ms


def _part_reason(block: BlockProfile, node: Selective) -> str:
    names = ", ".join(node.saved_ops)
    free = "; no matrix product runs again" if find_option(block, node.saved_ops).flops == 0 else ""
    return f"kept in part: {names}{free}"


def _flat_reasons(
    tables: FlatTables, chain: ChainProfile, chosen: frozenset[int], peak_bytes: int, kind: CostKind
) -> list[str]:
    """Each block's reason is what the peak would be if that block alone were decided the other way."""
    choice = np.array([i in chosen for i in range(len(chain))])
    reasons = []
    for i, block in enumerate(chain):
        if not block.eligible_for_checkpoint:
            reasons.append(_not_eligible(block))
            continue
        choice[i] ^= True
        otherwise, stage = tables.peak_and_stage(choice)
        choice[i] ^= True
        cost = _cost_text(tables.work[i] or 0.0, kind)
        difference = otherwise - peak_bytes if i in chosen else peak_bytes - otherwise
        if i in chosen and difference > 0:
            reasons.append(f"recomputed: saves {format_bytes(difference)} at the peak for {cost}")
        elif i in chosen:
            reasons.append(f"recomputed: for {cost}, though by itself it does not lower the peak")
        elif difference > 0:
            too = " too" if chosen else ""
            reasons.append(f"kept: not needed; recomputing it{too} would save {format_bytes(difference)} for {cost}")
        else:
            reasons.append(_no_gain(chain, i, stage - tables.first_stage))
    return reasons


def _no_gain(chain: ChainProfile, block: int, peak_block: int) -> str:
    if peak_block == block:
        return "kept: its recomputation would itself set the peak, saving nothing"
    if 0 <= peak_block < len(chain):
        where = f"in block {chain[peak_block].block_id!r}"
    else:
        where = BEFORE if peak_block < 0 else f"in {AFTER}"
    return f"kept: the peak is {where}, which recomputing this block would not lower"


def _not_eligible(block: BlockProfile) -> str:
    return "" if block.eligible_for_checkpoint else f"not eligible: {block.exclusion_reason or 'no reason given'}"
