"""The referee: does a plan keep what it promises? It knows nothing of how plans are made. Torch-free.

It shares no code with the simulator. The simulator keeps a ledger step by step; here each byte is placed on an
interval of the step, and the intervals are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import (
    Compiled,
    CompiledModel,
    Keep,
    Offload,
    PlanNode,
    Recompute,
    Selective,
    blocks_of,
    compiled_model,
    recomputed_blocks,
    tree_faults,
)
from ckptplan.plan import CheckpointPlan, segment_faults
from ckptplan.profiles import BlockProfile, ChainProfile, as_chain, recompute_costs, require_memory
from ckptplan.selective import find_compiled, find_compiled_model, find_offload, find_option
from ckptplan.units import format_bytes, require_amount


def check_plan(
    profiles: ChainProfile | Sequence[BlockProfile], plan: CheckpointPlan, budget_bytes: int | None = None
) -> None:
    """Raises ``PlanIncompatibleError`` with every fault at once, or returns None.

    Checked: the tree, block ids, eligibility, each predicted number, and the peak against ``budget_bytes``
    (None: against ``plan.budget_bytes`` where the plan calls itself feasible). Raises ``TimingOnlyProfileError`` or
    ``ValueError`` for a profile that does not hold the figures to judge by; ``ValueError`` or ``TypeError`` for a
    budget that is no number of bytes.
    """
    chain = as_chain(profiles)
    if budget_bytes is not None:
        require_amount("budget_bytes", budget_bytes)
    require_memory(chain, plan.memory_model)
    if plan.predicted_cost is not None:
        recompute_costs(chain, plan.cost_kind)
    faults = tree_faults(plan.nodes, len(chain))
    faults += _id_faults(chain, plan)
    if faults:
        raise PlanIncompatibleError(faults)  # nothing further can be computed
    forbidden = _eligibility_faults(chain, plan)
    if forbidden:
        raise PlanIncompatibleError(forbidden)
    faults = _number_faults(chain, plan)
    peak = _peak_bytes(chain, plan)
    limit = budget_bytes
    if limit is None and plan.feasible:
        limit = plan.budget_bytes
    if limit is not None and not peak <= limit:  # so that NaN fails
        faults.append(
            f"over budget: the plan peaks at {peak} bytes ({format_bytes(peak)}), the budget is {limit} bytes"
        )
    if faults:
        raise PlanIncompatibleError(faults)


def _id_faults(chain: ChainProfile, plan: CheckpointPlan) -> list[str]:
    if len(plan.block_ids) != len(chain):
        return [f"the plan decides on {len(plan.block_ids)} blocks, the profile has {len(chain)}"]
    pairs = enumerate(zip(plan.block_ids, chain.block_ids, strict=True))
    return [
        f"block {i} is {mine!r} in the plan and {theirs!r} in the profile"
        for i, (mine, theirs) in pairs
        if mine != theirs
    ]


def _eligibility_faults(chain: ChainProfile, plan: CheckpointPlan) -> list[str]:
    faults = []
    for i in sorted(recomputed_blocks(plan.nodes)):
        block = chain[i]
        if not block.eligible_for_checkpoint:
            faults.append(f"block {block.block_id!r} is recomputed but not eligible: {block.exclusion_reason}")
        elif plan.memory_model == "peak" and block.recompute is None:
            faults.append(f"block {block.block_id!r} is recomputed but the profile has no figures for that")
    faults += segment_faults(chain, plan.nodes)
    for node in plan.nodes:
        if isinstance(node, (Offload, Compiled, CompiledModel)):
            try:
                if isinstance(node, Offload):
                    find_offload(chain[node.block])
                elif isinstance(node, Compiled):
                    find_compiled(chain[node.block], node.budget)
                else:
                    find_compiled_model(chain, node.budget)
            except PlanIncompatibleError as error:
                faults += error.faults
        if isinstance(node, Selective):
            try:
                option = find_option(chain[node.block], node.saved_ops)
            except PlanIncompatibleError as error:
                faults += error.faults
                continue
            decision = plan.decisions[node.block]
            if decision.saved_ops != option.saved_ops or decision.sequence_hash != option.sequence_hash:
                faults.append(
                    f"block {decision.block_id!r} keeps {decision.saved_ops} of operators {decision.sequence_hash}; "
                    f"the profile's option is {option.saved_ops} of {option.sequence_hash}"
                )
    return faults


def _number_faults(chain: ChainProfile, plan: CheckpointPlan) -> list[str]:
    faults = []
    expected_bytes = {
        "predicted_peak_bytes": _peak_bytes(chain, plan),
        "no_checkpoint_peak_bytes": _peak_of_nodes(chain, [Keep(i) for i in range(len(chain))], plan.memory_model),
    }
    for name, expected in expected_bytes.items():
        found = getattr(plan, name)
        if found is not None and found != expected:
            faults.append(f"{name} is {found}; the profile gives {expected}")
    if plan.predicted_cost is not None:
        cost = sum(_replays(chain, node, plan.cost_kind) for node in plan.nodes) + _compiled_ms(chain, plan.nodes)
        if not math.isclose(plan.predicted_cost, cost, rel_tol=1e-9, abs_tol=1e-12):
            faults.append(f"predicted_cost is {plan.predicted_cost}; the profile gives {cost}")
    return faults


def _replays(chain: ChainProfile, node: PlanNode, cost_kind: str) -> float:
    """What the replays under ``node`` cost; its own ends before a nested last child, or in that block's early stop."""
    if isinstance(node, Keep):
        return 0
    if isinstance(node, Selective):
        option = find_option(chain[node.block], node.saved_ops)
        added = option.flops if cost_kind == "flops" else option.time_ms
        return (1.0 if cost_kind == "time" and _is_untimed(chain) else 0) if added is None else added
    if isinstance(node, Offload):
        return 0 if cost_kind == "flops" else find_offload(chain[node.block]).time_ms or 0.0
    if isinstance(node, Compiled):
        return find_compiled(chain[node.block], node.budget).time_ms or 0.0
    if isinstance(node, CompiledModel):
        return 0  # a whole step's, and so in _compiled_ms
    *leading, last = node.children
    total = sum(_full_cost(chain, i, cost_kind) for i in blocks_of(leading))
    if isinstance(last, Keep):
        total += _last_cost(chain, last.block, cost_kind)
    return total + sum(_replays(chain, child, cost_kind) for child in node.children)


def _compiled_ms(chain: ChainProfile, nodes: Sequence[PlanNode]) -> float:
    """What the step that the plan's compiled code begins from takes beside the fastest compiled step measured."""
    steps = [chain.compiled_blocks_step_ms, *(option.step_time_ms for option in chain.compiled_model)]
    fastest = min((ms for ms in steps if ms is not None), default=0.0)
    whole = compiled_model(nodes)
    if whole is not None:
        return (find_compiled_model(chain, whole.budget).step_time_ms or fastest) - fastest
    if any(isinstance(node, Compiled) for node in nodes):
        return (chain.compiled_blocks_step_ms or fastest) - fastest
    return 0  # an int, as FLOPs are


def _last_cost(chain: ChainProfile, i: int, cost_kind: str) -> float:
    block = chain[i]
    if cost_kind == "flops":
        return block.recompute_flops or 0
    if _is_untimed(chain):
        return 1.0
    if block.recompute_time_ms is not None:
        return block.recompute_time_ms
    return block.recompute_time_upper_bound_ms_mean or 0.0


def _is_untimed(chain: ChainProfile) -> bool:
    return all(b.recompute_time_ms is None and b.recompute_time_upper_bound_ms_mean is None for b in chain)


def _full_cost(chain: ChainProfile, i: int, cost_kind: str) -> float:
    figure = chain[i].forward_flops if cost_kind == "flops" else chain[i].forward_time_ms
    return _last_cost(chain, i, cost_kind) if figure is None else figure


# The peak ------------------------------------------------------------------------------------------------------------


def _peak_bytes(chain: ChainProfile, plan: CheckpointPlan) -> int:
    return _peak_of_nodes(chain, plan.nodes, plan.memory_model)


def _peak_of_nodes(chain: ChainProfile, nodes: Sequence[PlanNode], memory_model: str) -> int:
    whole = compiled_model(nodes)
    if whole is not None:  # one stage that was measured by itself
        cost = find_compiled_model(chain, whole.budget).cost
        return (
            cost.saved_bytes if memory_model == "additive" else max(cost.forward_peak_bytes, cost.backward_peak_bytes)
        )
    if memory_model == "additive":
        kept = sum(chain[node.block].activation_bytes_estimate or 0 for node in nodes if isinstance(node, Keep))
        return kept + sum(
            _part_kept(chain[node.block], node) for node in nodes if isinstance(node, (Selective, Offload, Compiled))
        )
    stages = []
    for node in nodes:
        before = chain[blocks_of((node,))[0]].before
        if before is not None:
            stages.append(_Stage(before.cost, before.output_bytes, before.output_is_input))
        stages.append(_as_stage(chain, node))
    if chain.pre is not None:
        stages.insert(0, _Stage(chain.pre.cost, chain.pre.output_bytes, chain.pre.output_is_input))
    if chain.post is not None:
        stages.append(_Stage(chain.post.cost, chain.post.output_bytes, chain.post.output_is_input))
    else:
        stages.append(_Stage(StageCost(0, 0, chain[-1].output_gradient_bytes or 0, (False,), (False,)), (), ()))
    forward, backward = _phase_peaks(stages, len(chain.input_bytes))
    return max(forward + backward)


def _part_kept(block: BlockProfile, node: Selective | Offload | Compiled) -> int:
    if isinstance(node, Offload):
        cost = find_offload(block).cost
    elif isinstance(node, Compiled):
        cost = find_compiled(block, node.budget).cost
    else:
        cost = find_option(block, node.saved_ops).cost
    held = cost.keeps_output * len(block.output_bytes) if len(cost.keeps_output) == 1 else cost.keeps_output
    own = [size for size, passed in zip(block.output_bytes, block.output_is_input, strict=True) if passed is None]
    own_held = [kept for kept, passed in zip(held, block.output_is_input, strict=True) if passed is None]
    return cost.saved_bytes + sum(size for size, kept in zip(own, own_held, strict=True) if kept)


class _Stage(NamedTuple):
    """``shrunk``: of a node in a replay, its backward peak by the bytes of each input that nobody else holds."""

    cost: StageCost
    output_bytes: Sequence[int]
    output_is_input: Sequence[int | None]
    shrunk: Callable[[list[int]], int] | None = None


def _as_stage(chain: ChainProfile, node: PlanNode, depth: int = 0) -> _Stage:
    """A node as one stage; ``depth``: how many recomputed nodes stand around it."""
    members = [chain[i] for i in blocks_of((node,))]
    if len(members) == 1:
        block = members[0]
        shrunk = None
        if depth and isinstance(node, Recompute):
            shrunk = lambda own: _single_shrunk(chain, block, _single(block, node, depth), own)  # noqa: E731
        return _Stage(_single(block, node, depth), block.output_bytes, block.output_is_input, shrunk)
    assert isinstance(node, Recompute)
    num_inputs = _num_entering(chain, blocks_of((node,))[0])
    streams = max(b.random_state_bytes for b in members)
    copies = sum(b.guard_bytes for b in members) if depth == 0 else 0
    bare = []
    for b in members:
        others = copies - b.guard_bytes if depth == 0 else 0
        peak = _costs(b).forward_peak_bytes + others
        bare.append(_Stage(StageCost(0, peak, 0, (False,), (False,)), b.output_bytes, b.output_is_input))
    first_forward, _ = _phase_peaks(bare, num_inputs)
    incoming = members[-1].output_gradient_bytes or 0
    children = [_as_stage(chain, child, depth + 1) for child in node.children]
    cut = 0  # of the replay's last child: nothing of a nested node runs, of a block what backward needs
    if isinstance(node.children[-1], Keep):
        cut = min(children[-1].cost.forward_peak_bytes, _run_to_stop(chain, members[-1], incoming))
    children[-1] = children[-1]._replace(cost=replace(children[-1].cost, forward_peak_bytes=cut))

    def whole(own: list[int]) -> int:
        """Replay and backward; inputs of which nobody else holds so many bytes go after the replay, or stay."""
        run, backward = _phase_peaks(children, num_inputs, own)
        gone = _unkept(members[0], own) if isinstance(node.children[0], Keep) else 0
        return guards + max(max(run) + incoming + streams + chain.loss_bytes, max(backward) - gone)

    guards = copies + streams
    sources: list[tuple[int, int | None]] = [(0, i) for i in range(num_inputs)]
    for block in members:
        outputs = zip(block.output_bytes, block.output_is_input, strict=True)
        sources = [(size, None) if passed is None else sources[passed] for size, passed in outputs]
    at_top = 0 if depth else whole([0] * num_inputs)  # in a replay it is asked for with what nobody else holds
    cost = StageCost(guards, max(first_forward), at_top, _costs(members[0]).keeps_input, (False,))
    return _Stage(cost, [size for size, _ in sources], [passed for _, passed in sources], whole if depth else None)


def _unkept(block: BlockProfile, own: list[int]) -> int:
    """Bytes that are in nobody's hands once the block has run: it does not keep them and does not pass them on."""
    assert block.keep is not None
    flags = block.keep.keeps_input * (len(own) if len(block.keep.keeps_input) == 1 else 1)
    return sum(own[i] for i in range(len(own)) if not (flags[i] or i in block.output_is_input))


def _single_shrunk(chain: ChainProfile, block: BlockProfile, cost: StageCost, own: list[int]) -> int:
    behind, stopped, gone = block.replayed_backward_peak_bytes, block.stopped_forward_peak_bytes, _unkept(block, own)
    if gone == 0 or behind is None or stopped is None:
        return cost.backward_peak_bytes
    beside = block.guard_bytes + block.random_state_bytes + chain.loss_bytes + (block.output_gradient_bytes or 0)
    run = cost.saved_bytes + min(stopped + beside, cost.backward_peak_bytes - cost.saved_bytes)
    return max(run, cost.saved_bytes + behind - gone)


def _single(block: BlockProfile, node: PlanNode, depth: int) -> StageCost:
    """One block; in a replay it runs on copies of its buffers, whose first values the outermost node keeps."""
    if isinstance(node, Selective):
        return find_option(block, node.saved_ops).cost
    if isinstance(node, Offload):
        return find_offload(block).cost
    if isinstance(node, Compiled):
        return find_compiled(block, node.budget).cost
    cost = block.keep if isinstance(node, Keep) else block.recompute
    assert cost is not None, f"block {block.block_id!r} has no figures"
    if depth == 0:
        return cost
    k, f, q = cost.saved_bytes, cost.forward_peak_bytes, cost.backward_peak_bytes
    if isinstance(node, Keep):
        known = block.replayed_backward_peak_bytes
        k, f = k + block.replay_copy_bytes, f + block.guard_bytes
        q = known if known is not None else q + block.replay_copy_bytes
    else:
        k, q = max(k - block.guard_bytes, 0), max(q - block.guard_bytes, 0)
    return StageCost(k, f, q, cost.keeps_input, cost.keeps_output)


def _run_to_stop(chain: ChainProfile, block: BlockProfile, incoming: int) -> int:
    """Most bytes of the block's run where it ends a replay, its copies of buffers included."""
    if block.stopped_forward_peak_bytes is not None:
        return block.stopped_forward_peak_bytes + block.guard_bytes
    twice = 2 * (block.guard_bytes + block.random_state_bytes)  # kept, and in use
    return max(_costs(block).backward_peak_bytes - incoming - chain.loss_bytes - twice, 0) + block.guard_bytes


def _num_entering(chain: ChainProfile, block: int) -> int:
    """Storages that come into ``block`` from the stage before it; none where the batch itself comes in."""
    before = chain[block].before
    if before is not None:
        return len(before.output_bytes)
    if block:
        return len(chain[block - 1].output_bytes)
    return len(chain.input_bytes if chain.pre is None else chain.pre.output_bytes)


def _costs(block: BlockProfile) -> StageCost:
    assert block.recompute is not None, f"block {block.block_id!r} has no figures for recomputation"
    return block.recompute


def _phase_peaks(stages: Sequence[_Stage], num_inputs: int, own: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Most bytes alive in the forward and in the backward of each stage.

    ``own``: of a replay, bytes of the inputs that nobody outside holds.
    """
    n = len(stages)
    # steps[l] holds what changes at stage l; summed from the left they give the bytes at each stage
    forward_steps, backward_steps = [0] * (n + 2), [0] * (n + 2)
    groups, arriving = _storages(stages, num_inputs)
    alone = {id(group): size for group, size in zip(groups, own, strict=False)}
    for group in groups:
        forward_steps[group.made_at + 1] += group.size
        if group.first_keeper is None:
            forward_steps[group.last_use + 1] -= group.size
        else:
            backward_steps[max(group.first_keeper, group.made_at + 1)] += group.size
    for index, stage in enumerate(stages):
        forward_steps[index + 1] += stage.cost.saved_bytes
        backward_steps[index + 1] += stage.cost.saved_bytes
    forward = [held + s.cost.forward_peak_bytes for held, s in zip(accumulate(forward_steps), stages, strict=False)]
    peaks = []
    for index, stage in enumerate(stages):
        sole = [group.first_keeper == index for group in arriving[index]]  # the later ones are done by then
        all_sizes = [alone.get(id(group), group.size) for group in arriving[index]]
        sizes = [size if mine else 0 for size, mine in zip(all_sizes, sole, strict=True)]
        peaks.append(_backward_peak(stage.cost, sizes) if stage.shrunk is None else stage.shrunk(sizes))
    backward = [held + peak for held, peak in zip(accumulate(backward_steps), peaks, strict=False)]
    return forward, backward


def _backward_peak(cost: StageCost, sole_sizes: Sequence[int]) -> int:
    """The highest of the stretches between the times at which inputs go, each without what went before it."""
    lettings = cost.inputs_let_go
    stretches = [
        letting.backward_peak_bytes - sum(sole_sizes[i] for earlier in lettings[: n + 1] for i in earlier.inputs)
        for n, letting in enumerate(lettings)
    ]
    return max([cost.backward_peak_bytes, *stretches])


class _Storage:
    """A boundary storage: made by a stage, in use up to a last one, kept for backward from some stage on."""

    def __init__(self, size: int, made_at: int) -> None:
        self.size, self.made_at, self.last_use = size, made_at, made_at
        self.first_keeper: int | None = None
        self.later_keepers: list[int] = []


def _storages(stages: Sequence[_Stage], num_inputs: int) -> tuple[list[_Storage], list[list[_Storage]]]:
    """All storages, those that come in first; and per stage those that it finds at hand."""
    at_hand = [_Storage(0, -1) for _ in range(num_inputs)]
    found = list(at_hand)
    arriving = []
    for index, stage in enumerate(stages):
        made = [
            _Storage(size, index) if passed is None else at_hand[passed]
            for size, passed in zip(stage.output_bytes, stage.output_is_input, strict=True)
        ]
        for storages, flags in ((at_hand, stage.cost.keeps_input), (made, stage.cost.keeps_output)):
            spread = flags * len(storages) if len(flags) == 1 else flags
            for storage, kept in zip(storages, spread, strict=True):
                if kept and storage.first_keeper is None:
                    storage.first_keeper = index
                elif kept and storage.first_keeper != index:
                    storage.later_keepers.append(index)
        arriving.append(at_hand)
        for storage in at_hand:
            storage.last_use = max(storage.last_use, index)
        found += [storage for storage in made if storage.made_at == index]
        at_hand = made
    for storage in at_hand:
        storage.last_use = max(storage.last_use, len(stages) - 1)
    return found, arriving
