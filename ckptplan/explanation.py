"""Why each block is kept or recomputed: what the plan would be with that block the other way. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, PlanNode, Recompute, Selective, blocks_of, nodes_text
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import NOT_REPLAYED, BlockProfile, ChainProfile, CostKind, MemoryModel, as_chain
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import simulate_plan
from ckptplan.units import format_bytes, format_ms


@dataclass(frozen=True)
class BlockExplanation:
    """One block's part in a plan, and the plan with this block the other way: kept for recomputed, or the reverse.

    Attributes:
        node: the text of the node that the block stands in.
        runs: how often its forward runs in a step.
        other_peak_bytes, other_cost: of the plan with the block the other way; None where that cannot be run.
        fits_otherwise: whether that plan keeps to the budget; None where there is no such plan or no budget.
        reason: one sentence with these numbers.
    """

    block_id: str
    node: str
    runs: int
    other_peak_bytes: int | None
    other_cost: float | None
    fits_otherwise: bool | None
    reason: str


@dataclass(frozen=True)
class PlanExplanation:
    """A plan, block by block.

    ``weight_copies_bytes``: as in ``PlanCost``.
    """

    peak_bytes: int
    peak_at: str
    cost: float
    blocks: tuple[BlockExplanation, ...]
    weight_copies_bytes: int | None = None

    @property
    def text(self) -> str:
        """The peak, what of it are copies of weights, then one line per block."""
        width = max(len(block.block_id) for block in self.blocks)
        lines = [f"peak {format_bytes(self.peak_bytes)} at {self.peak_at}"]
        if self.weight_copies_bytes:
            lines.append(weight_copies_text(self.weight_copies_bytes))
        return "\n".join([*lines, *(f"{block.block_id:<{width}}  {block.reason}" for block in self.blocks)])


def explain(profiles: ChainProfile | Sequence[BlockProfile], plan: CheckpointPlan) -> PlanExplanation:
    """For every block of the plan why it was or was not chosen, with numbers.

    Raises as :func:`ckptplan.simulate_plan` does where the plan is not one of this profile.
    """
    chain = as_chain(profiles)
    judge = _Judge(chain, plan.memory_model, plan.cost_kind, plan.budget_bytes)  # type: ignore[arg-type]
    now = simulate_plan(chain, plan.nodes, judge.memory_model)
    cost = plan_recompute_cost(chain, plan.nodes, judge.cost)
    blocks = []
    for position, node in enumerate(plan.nodes):
        for block in blocks_of((node,)):
            blocks.append(_explained(judge, plan.nodes, position, block, now.peak_bytes, cost))
    return PlanExplanation(now.peak_bytes, now.peak_at, cost, tuple(blocks), now.weight_copies_bytes)


def weight_copies_text(size_bytes: int) -> str:
    """The row of a prediction for autocast's copies of weights."""
    return f"low-precision copies of weights (autocast) take {format_bytes(size_bytes)} from forward to backward"


@dataclass(frozen=True)
class _Judge:
    chain: ChainProfile
    memory_model: MemoryModel
    cost: CostKind
    budget_bytes: int | None

    def cost_text(self, cost: float) -> str:
        return format_ms(cost) if self.cost == "time" else f"{cost:.4g} FLOPs"


def _explained(
    judge: _Judge, nodes: Sequence[PlanNode], position: int, block: int, peak_bytes: int, cost: float
) -> BlockExplanation:
    node, profile = nodes[position], judge.chain[block]
    if isinstance(node, CompiledModel):
        text = nodes_text((node,))
        reason = f"compiled with the whole model as {text}, one graph: no block of it can be decided by itself"
        return BlockExplanation(profile.block_id, text, 1, None, None, None, reason)
    kept = isinstance(node, Keep)
    runs = 1 + _replays(node, block)
    other = (*nodes[:position], *_turned(node, block), *nodes[position + 1 :])
    try:
        simulated = simulate_plan(judge.chain, other, judge.memory_model)
        other_cost = plan_recompute_cost(judge.chain, other, judge.cost)
    except (PlanIncompatibleError, ValueError) as error:  # not eligible, or no segment can end there
        reason = f"{'kept' if kept else f'recomputed in {nodes_text((node,))}'}: there is no other way: {error}"
        return BlockExplanation(profile.block_id, nodes_text((node,)), runs, None, None, None, reason)
    fits = None if judge.budget_bytes is None else simulated.peak_bytes <= judge.budget_bytes
    change, saved_cost = simulated.peak_bytes - peak_bytes, cost - other_cost
    if kept:
        reason = _why_kept(judge, change, -saved_cost, simulated.peak_at)
    else:
        how = f"recomputed in {nodes_text((node,))}, its forward runs {runs} times: kept"
        if isinstance(node, Compiled):
            how = f"compiled as {nodes_text((node,))}: kept"
        if isinstance(node, Offload):
            how = f"on the host until backward as {nodes_text((node,))}: kept on the device"
        if isinstance(node, Selective) and not node.saved_ops:
            how = f"recomputed by replay ({nodes_text((node,))}): kept"
        elif isinstance(node, Selective):
            how = f"kept in part as {nodes_text((node,))}: kept whole"
        reason = _why_recomputed(judge, how, simulated.peak_bytes, change, saved_cost, fits)
    reason += _why_not_replayed(profile)
    return BlockExplanation(profile.block_id, nodes_text((node,)), runs, simulated.peak_bytes, other_cost, fits, reason)


def _why_not_replayed(profile: BlockProfile) -> str:
    """A block that replay's gate refuses can be kept or recomputed whole, and nothing between."""
    told = [warning for warning in profile.warnings if warning.startswith(NOT_REPLAYED)]
    return f"; no part of it can be kept: {told[0].removeprefix(NOT_REPLAYED)}" if told else ""


def _why_kept(judge: _Judge, change: int, added: float, peak_at: str) -> str:
    cost = judge.cost_text(added)
    if change < 0:
        return f"kept: recomputing it would take {format_bytes(-change)} off the peak for {cost}; it is not needed"
    if change == 0:
        return f"kept: recomputing it would cost {cost} and leave the peak, which is at {peak_at}"
    return f"kept: recomputing it would cost {cost} and raise the peak by {format_bytes(change)}, at {peak_at}"


def _why_recomputed(judge: _Judge, how: str, other_peak: int, change: int, saved_cost: float, fits: bool | None) -> str:
    cost = judge.cost_text(abs(saved_cost))
    spared = f"spare {cost}" if saved_cost >= 0 else f"cost {cost} more"
    if fits is False and judge.budget_bytes is not None:
        over = format_bytes(other_peak - judge.budget_bytes)
        return f"{how}, it would {spared}, and the peak would be {over} above the budget"
    if change > 0:
        return f"{how}, it would {spared} and raise the peak by {format_bytes(change)}"
    return f"{how}, it would {spared} and not raise the peak"


def _replays(node: PlanNode, block: int) -> int:
    """How often the block runs in the replays under the node: not in one that ends before it."""
    if not isinstance(node, Recompute) or block not in blocks_of((node,)):
        return 0
    *leading, last = node.children
    here = block in blocks_of(leading) or last == Keep(block)
    return int(here) + sum(_replays(child, block) for child in node.children)


def _turned(node: PlanNode, block: int) -> tuple[PlanNode, ...]:
    """The node with this block the other way: a kept one recomputed by itself; else kept, its node cut around it."""
    if isinstance(node, Keep):
        return (Recompute((node,)),)
    if isinstance(node, (Selective, Offload, Compiled)):
        return (Keep(block),)
    return (*_part(node, lambda i: i < block), Keep(block), *_part(node, lambda i: i > block))


def _part(node: PlanNode, wanted: Callable[[int], bool]) -> tuple[PlanNode, ...]:
    """What is left of the node with only the wanted blocks; nothing, or one node."""
    assert not isinstance(node, CompiledModel)  # it stands alone
    if not isinstance(node, Recompute):
        return (node,) if wanted(node.block) else ()
    children = tuple(part for child in node.children for part in _part(child, wanted))
    if len(children) == 1 and isinstance(children[0], Recompute):
        return children
    return (Recompute(children),) if children else ()
