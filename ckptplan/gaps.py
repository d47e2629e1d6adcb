"""What a model runs between its blocks, as blocks that can only be kept: planners know stages of one kind.

Plans are over blocks alone. ``expanded`` and ``expanded_nodes`` go from these to all stages, ``contracted`` back.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, PlanNode, Recompute, Selective, blocks_of
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile


def has_gaps(chain: ChainProfile) -> bool:
    return any(block.before is not None for block in chain)


def expanded(chain: ChainProfile) -> ChainProfile:
    """The chain with everything that runs between blocks as a block of its own that can only be kept."""
    if not has_gaps(chain):
        return chain
    stages: list[BlockProfile] = []
    for block in chain:
        if block.before is not None:
            stages.append(_fixed(block.before))
        stages.append(replace(block, before=None))
    return replace(chain, blocks=tuple(replace(stage, order=i) for i, stage in enumerate(stages)))


def _fixed(region: RegionProfile) -> BlockProfile:
    return BlockProfile(
        block_id=region.name,
        kind=f"fixed {region.cost} {region.output_bytes} {region.output_is_input}",
        activation_bytes_estimate=0,
        output_bytes=region.output_bytes,
        output_is_input=region.output_is_input,
        keep=region.cost,
        forward_time_ms=region.forward_time_ms,
        backward_time_ms=region.backward_time_ms,
        forward_flops=region.forward_flops,
        backward_flops=region.backward_flops,
        eligible_for_checkpoint=False,
        exclusion_reason=f"it is what the model itself runs {region.name}; recompute block by block beside it",
    )


def places(chain: ChainProfile) -> list[int]:
    """The number of each block among all stages of ``expanded``."""
    found, stages = [], 0
    for block in chain:
        stages += block.before is not None
        found.append(stages)
        stages += 1
    return found


def expanded_nodes(chain: ChainProfile, nodes: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """A plan over the blocks as one over all stages; what runs between blocks of a segment stands in it."""
    return _moved(nodes, places(chain), {i for i, block in enumerate(chain) if block.before is not None})


def _moved(nodes: Sequence[PlanNode], to: Sequence[int], behind_gaps: set[int]) -> tuple[PlanNode, ...]:
    found: list[PlanNode] = []
    for node in nodes:
        if isinstance(node, CompiledModel):
            return (replace(node, blocks=len(to) + len(behind_gaps)),)
        first = blocks_of((node,))[0]
        if first in behind_gaps:
            found.append(Keep(to[first] - 1))
        if isinstance(node, Recompute):
            found.append(Recompute(_moved(node.children, to, behind_gaps - {first})))
        else:
            found.append(_renumbered(node, to[node.block]))
    return tuple(found)


def contracted(chain: ChainProfile, nodes: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """A plan over all stages of ``expanded(chain)`` as one over its blocks."""
    if not has_gaps(chain):
        return tuple(nodes)
    return _back(nodes, {place: block for block, place in enumerate(places(chain))})


def _back(nodes: Sequence[PlanNode], blocks: dict[int, int]) -> tuple[PlanNode, ...]:
    found: list[PlanNode] = []
    for node in nodes:
        if isinstance(node, CompiledModel):
            found.append(replace(node, blocks=len(blocks)))
        elif isinstance(node, Recompute):
            found.append(Recompute(_back(node.children, blocks)))
        elif node.block in blocks:
            found.append(_renumbered(node, blocks[node.block]))
    return tuple(found)


def _renumbered(node: Keep | Selective | Offload | Compiled, block: int) -> PlanNode:
    return Keep(block) if isinstance(node, Keep) else replace(node, block=block)
