"""Walk a plan over a profile: peak, timeline, and what the recomputation costs. Torch-free.

The memory model is section 4 of the design (docs/design.md), after section 3.1 of the theory behind it. The
walk keeps a ledger as the allocator would: a stage that retains bytes books them in the forward and gives them
back in its backward, and a boundary storage lives as long as anybody holds it: the caller (until its last
consumer has run) or a stage that saved it. Whatever the plan, the ledger ends at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.gaps import expanded, expanded_nodes, has_gaps, places
from ckptplan.in_replay import (
    kept_in_replay,
    let_go,
    part_cost,
    recompute_figures,
    recomputed_in_replay,
    recomputed_peaks,
    stopped_forward_peak,
)
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
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
    MemoryModel,
    as_chain,
    require_memory,
)
from ckptplan.recompute_cost import recompute_flops, recompute_time_ms
from ckptplan.selective import (
    find_compiled_model,
)

BEFORE, AFTER = "before the blocks", "head and loss"
COMPILED_MODEL = "the compiled model"


@dataclass(frozen=True)
class PlanCost:
    """What one training step under a plan takes.

    Attributes:
        peak_bytes: most bytes alive above what stands before the step.
        peak_at: the stage that sets it and its phase, as in ``"layers.3 backward"``.
        timeline: (stage, "forward" | "backward", most bytes alive in it), in the order in which they run.
        recompute_time_ms: added by recomputation; None where the profile holds no times or blocks run compiled.
        recompute_flops: the same in FLOPs; None where the profile does not hold them.
        retained_bytes: per block, what it adds to the bytes held until backward; a segment's stand at its first.
        weight_copies_bytes: of what is held from the forward until backward, the copies of weights in a narrower type
            that autocast made; None: not known (figures by hand, compiled blocks, the additive model).
        end_level_bytes: what is left on the ledger at the end: always 0.
    """

    peak_bytes: int
    peak_at: str
    timeline: tuple[tuple[str, str, int], ...]
    recompute_time_ms: float | None
    recompute_flops: int | None
    retained_bytes: tuple[int, ...]
    end_level_bytes: int = 0
    weight_copies_bytes: int | None = None


@dataclass(frozen=True)
class _Stage:
    """One step of the walk: a region, a block, or a recomputed segment.

    ``again`` is a recomputed node inside a replay. Its input is held by nobody else once that replay has run, so that
    it may go in the midst of the node's backward.
    """

    name: str
    cost: StageCost
    output_bytes: tuple[int, ...]
    output_is_input: tuple[int | None, ...]
    again: Recompute | None = None


def simulate_plan(
    profiles: ChainProfile | Sequence[BlockProfile],
    plan: CheckpointPlan | Sequence[PlanNode],
    memory_model: MemoryModel = "peak",
) -> PlanCost:
    """The exact peak of ``plan`` (or of bare nodes) under the profile's figures.

    With ``memory_model="additive"`` the peak is the sum of ``activation_bytes_estimate`` over kept blocks.
    Raises ``PlanIncompatibleError`` (not a plan over these blocks, a block recomputed that cannot be),
    ``TimingOnlyProfileError`` or ``ValueError`` (figures missing).
    """
    chain = as_chain(profiles)
    nodes = plan.nodes if isinstance(plan, CheckpointPlan) else tuple(plan)
    require_memory(chain, memory_model)
    faults = tree_faults(nodes, len(chain))
    if faults:
        raise PlanIncompatibleError(faults)
    if has_gaps(chain):
        whole = _simulated(expanded(chain), expanded_nodes(chain, nodes), memory_model)
        return replace(whole, retained_bytes=tuple(whole.retained_bytes[place] for place in places(chain)))
    return _simulated(chain, nodes, memory_model)


def _simulated(chain: ChainProfile, nodes: Sequence[PlanNode], memory_model: MemoryModel) -> PlanCost:
    faults = _recompute_faults(chain, nodes)
    if faults:
        raise PlanIncompatibleError(faults)
    time_ms, flops = recompute_time_ms(chain, nodes), recompute_flops(chain, nodes)
    if memory_model == "additive":
        return _additive_cost(chain, nodes, time_ms, flops)
    stages = _stages_of_chain(chain, nodes)
    is_whole = compiled_model(nodes) is not None
    timeline, retained, end_level = _walk(stages, () if is_whole else tuple(0 for _ in chain.input_bytes))
    if end_level != 0:
        raise AssertionError(f"the ledger ends at {end_level} bytes instead of 0; this is a fault in ckptplan")
    stage, phase, peak = max(timeline, key=lambda entry: entry[2])
    first = 1 if chain.pre is not None and not is_whole else 0
    per_block = [0] * len(chain)
    for node, bytes_held in zip(nodes, retained[first:], strict=False):
        per_block[blocks_of((node,))[0]] = bytes_held
    copies = _weight_copies_bytes(chain, nodes)
    return PlanCost(peak, f"{stage} {phase}", timeline, time_ms, flops, tuple(per_block), end_level, copies)


def _weight_copies_bytes(chain: ChainProfile, nodes: Sequence[PlanNode]) -> int | None:
    """Of all that is kept; a recomputed block makes its copies again."""
    kept = [region.cost for region in chain.regions]
    for node in nodes:
        if isinstance(node, CompiledModel):
            return None
        if isinstance(node, Keep):
            kept.append(chain[node.block].keep or StageCost(0, 0, 0))
        elif not isinstance(node, Recompute):
            kept.append(part_cost(chain[node.block], node))
    total = 0
    for cost in kept:
        if cost.weight_copies_bytes is None:
            return None
        total += cost.weight_copies_bytes
    return total


def _recompute_faults(chain: ChainProfile, nodes: Sequence[PlanNode]) -> list[str]:
    blocks = [chain[i] for i in sorted(recomputed_blocks(nodes))]
    return [
        f"block {block.block_id!r} cannot be recomputed: {block.exclusion_reason}"
        for block in blocks
        if not block.eligible_for_checkpoint
    ]


def no_checkpoint_peak(profile: ChainProfile | Sequence[BlockProfile], memory_model: MemoryModel = "peak") -> int:
    """Predicted peak in bytes with every block kept."""
    chain = as_chain(profile)
    return simulate_plan(chain, [Keep(i) for i in range(len(chain))], memory_model).peak_bytes


# Cost of recomputation -----------------------------------------------------------------------------------------------


# Stages --------------------------------------------------------------------------------------------------------------


def _stages_of_chain(chain: ChainProfile, nodes: Sequence[PlanNode]) -> list[_Stage]:
    whole = compiled_model(nodes)
    if whole is not None:
        return [_Stage(COMPILED_MODEL, find_compiled_model(chain, whole.budget).cost, (), ())]
    stages = [_stage_of_node(chain, node) for node in nodes]
    if chain.pre is not None:
        pre = chain.pre
        stages.insert(0, _Stage(BEFORE, pre.cost, pre.output_bytes, pre.output_is_input))
    if chain.post is not None:
        post = chain.post
        stages.append(_Stage(AFTER, post.cost, post.output_bytes, post.output_is_input))
    else:
        # the caller holds no handle on the output; all that its loss is taken to cost is the output's gradient
        gradient = chain[-1].output_gradient_bytes or 0
        stages.append(_Stage(AFTER, StageCost(0, 0, gradient, (False,), ()), (), ()))
    return stages


def _stage_of_node(chain: ChainProfile, node: PlanNode, *, inside: bool = False) -> _Stage:
    """The node at the top of the plan; ``inside``: as a child of a recomputed one, while that runs again."""
    if isinstance(node, Keep):
        block = chain[node.block]
        kept = kept_in_replay(block) if inside else block.keep
        assert kept is not None  # require_memory
        return _Stage(block.block_id, kept, block.output_bytes, block.output_is_input)
    if isinstance(node, (Selective, Offload, Compiled)):
        block = chain[node.block]
        chosen = part_cost(block, node)
        return _Stage(block.block_id, chosen, block.output_bytes, block.output_is_input)
    assert isinstance(node, Recompute)  # the compiled model is all of a plan
    members = blocks_of((node,))
    first, last = chain[members[0]], chain[members[-1]]
    if len(members) == 1:
        alone = recompute_figures(first)
        cost = recomputed_in_replay(first, alone) if inside else alone
        again = node if inside else None
        return _Stage(first.block_id, cost, first.output_bytes, first.output_is_input, again)
    output_bytes, output_is_input = _outputs_of_segment(
        [chain[i] for i in members], len(_recompute_inputs(chain, node))
    )
    saved = _random_bytes(chain, node) + (0 if inside else sum(chain[i].guard_bytes for i in members))
    cost = StageCost(
        saved_bytes=saved,
        forward_peak_bytes=_segment_forward_peak(chain, node, inside=inside),
        # inside a replay it depends on who else holds its input, so that the walk asks for it there
        backward_peak_bytes=0 if inside else saved + _segment_backward_peak(chain, node),
        keeps_input=recompute_figures(first).keeps_input,
        keeps_output=(False,) * len(output_bytes),
    )
    name = f"{first.block_id}..{last.block_id}"
    return _Stage(name, cost, output_bytes, output_is_input, node if inside else None)


def _random_bytes(chain: ChainProfile, node: Recompute) -> int:
    """Where the random streams stood: each node keeps it once, if any of its blocks draws."""
    return max(chain[i].random_state_bytes for i in blocks_of((node,)))


def _recompute_inputs(chain: ChainProfile, node: Recompute) -> tuple[int, ...]:
    """Bytes of the storages that enter the segment."""
    first = blocks_of((node,))[0]
    if first > 0:
        return chain[first - 1].output_bytes
    return chain.input_bytes if chain.pre is None else chain.pre.output_bytes


def _outputs_of_segment(
    members: Sequence[BlockProfile], num_inputs: int
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """The last member's outputs, each traced back: made inside, or an input of the whole segment."""
    origin: list[tuple[int, int | None]] = [(0, i) for i in range(num_inputs)]
    for block in members:
        origin = [
            (size, None) if passed is None else origin[passed]
            for size, passed in zip(block.output_bytes, block.output_is_input, strict=True)
        ]
    return tuple(size for size, _ in origin), tuple(passed for _, passed in origin)


def _segment_forward_peak(chain: ChainProfile, node: Recompute, *, inside: bool) -> int:
    """The segment's first forward retains nothing: at each member only what is still handed on is alive.

    At the top of the plan the first values of all its buffers are copied before it, and each member's own figure
    holds its own; inside a replay each member runs on a copy.
    """
    members = [chain[i] for i in blocks_of((node,))]
    copied = 0 if inside else sum(block.guard_bytes for block in members)
    nothing_kept = [
        _Stage(
            block.block_id,
            StageCost(0, _forward_alone(block, copied), 0, (False,), (False,)),
            block.output_bytes,
            block.output_is_input,
        )
        for block in members
    ]
    timeline, _, _ = _walk(nothing_kept, tuple(0 for _ in _recompute_inputs(chain, node)))
    return max(level for _, phase, level in timeline if phase == "forward")


def _forward_alone(block: BlockProfile, copied_bytes: int) -> int:
    own = recompute_figures(block).forward_peak_bytes
    return own + copied_bytes - block.guard_bytes if copied_bytes else own


def _backward_letting_go(chain: ChainProfile, node: Recompute, only_its_own: Sequence[int]) -> int:
    """Backward peak of a node inside a replay that alone holds so many bytes of each of its input storages."""
    members = blocks_of((node,))
    if len(members) == 1:
        block = chain[members[0]]
        alone, gone = recompute_figures(block), let_go(block, only_its_own)
        peaks = recomputed_peaks(chain, block, alone)
        if peaks is None or not gone:
            return recomputed_in_replay(block, alone).backward_peak_bytes
        return max(peaks[0], peaks[1] - gone)
    return _random_bytes(chain, node) + _segment_backward_peak(chain, node, only_its_own)


def _segment_backward_peak(chain: ChainProfile, node: Recompute, only_its_own: Sequence[int] = ()) -> int:
    """Replay and backward of the segment: its children as a chain of their own; incoming gradient and loss alive.

    While it runs again the place of the random streams now is kept too, to be put back. What the segment
    saves by itself is not in it. Input storages that only it holds are alive until it has run again; then its first
    child may hold them or not.
    """
    last = chain[blocks_of((node,))[-1]]
    if last.output_gradient_bytes is None:
        raise ValueError(f"block {last.block_id!r} ends a recomputed segment; its output_gradient_bytes is missing")
    children = [_stage_of_node(chain, child, inside=True) for child in node.children]
    # a nested node that ends a replay does not run at all, a block not beyond what its backward needs
    ends_with_block = isinstance(node.children[-1], Keep)
    peak = stopped_forward_peak(chain, last, recompute_figures(last)) if ends_with_block else 0
    children[-1] = replace(children[-1], cost=replace(children[-1].cost, forward_peak_bytes=peak))
    own = tuple(only_its_own) or tuple(0 for _ in _recompute_inputs(chain, node))
    first = node.children[0]
    gone = let_go(chain[first.block], own) if isinstance(first, Keep) else 0
    timeline, _, _ = _walk(children, tuple(0 for _ in own), chain, own)
    running = last.output_gradient_bytes + _random_bytes(chain, node) + chain.loss_bytes
    return max(level + (running if phase == "forward" else -gone) for _, phase, level in timeline)


# The ledger ----------------------------------------------------------------------------------------------------------


class _Ledger:
    """Bytes alive: those of stages, and those of boundary storages that somebody holds."""

    def __init__(self) -> None:
        self.level = 0
        self.storage_bytes: list[int] = []
        self.holders: list[set[int]] = []  # stages by index, the caller as -1

    def new_storage(self, size: int) -> int:
        self.storage_bytes.append(size)
        self.holders.append(set())
        return len(self.holders) - 1

    def hold(self, storage: int, holder: int) -> None:
        if not self.holders[storage]:
            self.level += self.storage_bytes[storage]
        self.holders[storage].add(holder)

    def release(self, storage: int, holder: int) -> None:
        if holder in self.holders[storage]:
            self.holders[storage].discard(holder)
            if not self.holders[storage]:
                self.level -= self.storage_bytes[storage]


_CALLER = -1


def _walk(
    stages: Sequence[_Stage],
    input_bytes: tuple[int, ...],
    chain: ChainProfile | None = None,
    only_its_own: Sequence[int] = (),
) -> tuple[tuple[tuple[str, str, int], ...], list[int], int]:
    """(stage, phase, peak) in running order; bytes that each stage added to what is held; the level at the end.

    ``only_its_own``: of a replay, bytes of the inputs that nobody outside holds once it has run.
    """
    ledger = _Ledger()
    inputs = [ledger.new_storage(size) for size in input_bytes]
    first_inputs = dict(zip(inputs, only_its_own, strict=False))
    arriving: list[list[int]] = []
    timeline: list[tuple[str, str, int]] = []
    held: list[list[int]] = []  # per stage, the storages it holds until its backward
    created: list[list[int]] = []
    retained: list[int] = []

    for index, stage in enumerate(stages):
        arriving.append(inputs)
        timeline.append((stage.name, "forward", ledger.level + stage.cost.forward_peak_bytes))
        passed_to = zip(stage.output_bytes, stage.output_is_input, strict=True)
        outputs = [ledger.new_storage(size) if source is None else inputs[source] for size, source in passed_to]
        created.append([s for s, source in zip(outputs, stage.output_is_input, strict=True) if source is None])
        keeps = _flagged(inputs, stage.cost.keeps_input) + _flagged(outputs, stage.cost.keeps_output)
        unheld = {storage for storage in keeps if not ledger.holders[storage] - {_CALLER}}
        ledger.level += stage.cost.saved_bytes
        for storage in keeps:
            ledger.hold(storage, index)
        for storage in outputs:
            ledger.hold(storage, _CALLER)
        for storage in set(inputs) - set(outputs):
            ledger.release(storage, _CALLER)
        held.append(keeps)
        retained.append(stage.cost.saved_bytes + sum(ledger.storage_bytes[s] for s in unheld))
        inputs = outputs
    for storage in inputs:
        ledger.release(storage, _CALLER)

    for index in reversed(range(len(stages))):
        stage = stages[index]
        # a stage's own saved bytes and outputs are inside its measured backward peak
        ledger.level -= stage.cost.saved_bytes
        for storage in created[index]:
            ledger.release(storage, index)
        own = [
            first_inputs.get(s, ledger.storage_bytes[s]) if ledger.holders[s] == {index} else 0 for s in arriving[index]
        ]
        peak = stage.cost.backward_peak_beside(own)
        if stage.again is not None and chain is not None:
            peak = _backward_letting_go(chain, stage.again, own)
        timeline.append((stage.name, "backward", ledger.level + peak))
        for storage in held[index]:
            ledger.release(storage, index)
    return tuple(timeline), retained, ledger.level


def _flagged(storages: Sequence[int], flags: Sequence[bool]) -> list[int]:
    """The storages that a stage keeps; a single flag stands for all of them."""
    if len(flags) == 1:
        return list(storages) if flags[0] else []
    return [storage for storage, kept in zip(storages, flags, strict=True) if kept]


def _additive_cost(
    chain: ChainProfile, nodes: Sequence[PlanNode], time_ms: float | None, flops: int | None
) -> PlanCost:
    retained = [0] * len(chain)
    level, timeline = 0, []
    whole = compiled_model(nodes)
    if whole is not None:
        retained[0] = level = find_compiled_model(chain, whole.budget).cost.saved_bytes
        return PlanCost(
            level, f"{COMPILED_MODEL} forward", ((COMPILED_MODEL, "forward", level),), None, None, tuple(retained)
        )
    for node in nodes:
        if isinstance(node, (Keep, Selective, Offload, Compiled)):
            retained[node.block] = _additive_bytes(chain[node.block], node)
            level += retained[node.block]
            timeline.append((chain[node.block].block_id, "forward", level))
        else:
            timeline.extend((chain[i].block_id, "forward", level) for i in blocks_of((node,)))
    stage = max(timeline, key=lambda entry: entry[2])[0]
    return PlanCost(level, f"{stage} forward", tuple(timeline), time_ms, flops, tuple(retained))


def _additive_bytes(block: BlockProfile, node: Keep | Selective | Offload | Compiled) -> int:
    """What stays alive because of the block, its own output included where the block itself holds it."""
    if isinstance(node, Keep):
        return block.activation_bytes_estimate or 0
    cost = part_cost(block, node)
    flags = cost.keeps_output * (len(block.output_bytes) if len(cost.keeps_output) == 1 else 1)
    outputs = zip(block.output_bytes, block.output_is_input, flags, strict=True)
    return cost.saved_bytes + sum(size for size, passed, kept in outputs if kept and passed is None)
