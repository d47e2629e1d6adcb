"""What a block takes beside kept or recomputed alone: in part, and inside the replay of a segment. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptplan.costs import StageCost
from ckptplan.nodes import (
    Compiled,
    Offload,
    Selective,
)
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
)
from ckptplan.selective import (
    find_compiled,
    find_offload,
    find_option,
)


def part_cost(block: BlockProfile, node: Selective | Offload | Compiled) -> StageCost:
    """The bytes of a measured option of the block."""
    if isinstance(node, Offload):
        return find_offload(block).cost
    if isinstance(node, Compiled):
        return find_compiled(block, node.budget).cost
    return find_option(block, node.saved_ops).cost


def kept_in_replay(block: BlockProfile) -> StageCost:
    """A kept block inside a replay: it runs on copies of the buffers that it changes; autograd saves some of them."""
    assert block.keep is not None  # require_memory
    cost, backward = block.keep, block.replayed_backward_peak_bytes
    return StageCost(
        saved_bytes=cost.saved_bytes + block.replay_copy_bytes,
        forward_peak_bytes=cost.forward_peak_bytes + block.guard_bytes,
        backward_peak_bytes=cost.backward_peak_bytes + block.replay_copy_bytes if backward is None else backward,
        keeps_input=cost.keeps_input,
        keeps_output=cost.keeps_output,
    )


def recomputed_in_replay(block: BlockProfile, alone: StageCost) -> StageCost:
    """A block recomputed inside a replay: the first values of its buffers are kept by the outermost node."""
    return replace(
        alone,
        saved_bytes=max(0, alone.saved_bytes - block.guard_bytes),
        backward_peak_bytes=max(0, alone.backward_peak_bytes - block.guard_bytes),
        inputs_let_go=(),
    )


def stopped_forward_peak(chain: ChainProfile, block: BlockProfile, alone: StageCost) -> int:
    """Most bytes of a block's run that ends a replay as soon as all that backward needs is there, copies included.

    Where that was not measured: it is inside the backward peak of recomputing the block alone, beside its gradient,
    the loss, and what guards it, once kept and once in use.
    """
    stopped = block.stopped_forward_peak_bytes
    if stopped is None:
        guarded = block.guard_bytes + block.random_state_bytes
        beside = (block.output_gradient_bytes or 0) + chain.loss_bytes + 2 * guarded
        stopped = max(0, alone.backward_peak_bytes - beside)
    return min(kept_in_replay(block).forward_peak_bytes, block.guard_bytes + stopped)


def recompute_figures(block: BlockProfile) -> StageCost:
    if block.recompute is None or not block.eligible_for_checkpoint:
        reason = block.exclusion_reason or "its profile has no figures for it"
        raise ValueError(f"block {block.block_id!r} cannot be recomputed: {reason}")
    return block.recompute


def let_go(block: BlockProfile, only_its_own: Sequence[int]) -> int:
    """Of bytes per input storage, those that a kept block has let go of when it has run."""
    assert block.keep is not None  # require_memory
    flags = block.keep.keeps_input
    kept = flags * len(only_its_own) if len(flags) == 1 else flags
    pairs = enumerate(zip(only_its_own, kept, strict=True))
    return sum(size for i, (size, keeps) in pairs if not keeps and i not in block.output_is_input)


def recomputed_peaks(chain: ChainProfile, block: BlockProfile, alone: StageCost) -> tuple[int, int] | None:
    """Backward peaks of one block recomputed inside a replay: while it runs again, and behind that.

    None where they were not measured apart.
    """
    inside = recomputed_in_replay(block, alone)
    backward, stopped = block.replayed_backward_peak_bytes, block.stopped_forward_peak_bytes
    if backward is None or stopped is None:
        return None
    running = (block.output_gradient_bytes or 0) + chain.loss_bytes + block.random_state_bytes + block.guard_bytes
    return min(inside.backward_peak_bytes, inside.saved_bytes + running + stopped), inside.saved_bytes + backward
