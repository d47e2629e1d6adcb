"""Equal blocks of a long list are looked at once: a model cut short to a few, and its profile made long again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from ckptplan.blocks import CheckpointableBlock, describe_module
from ckptplan.flow import between
from ckptplan.kinds import PLACE_IN_MODEL
from ckptplan.profiles import BlockProfile, ChainProfile

_KEPT = 4  # the first, the last, and two between that have to have equal figures


@dataclass(frozen=True)
class Repeats:
    """Blocks that stand in one list, one after the other, and are alike: positions ``start`` to ``stop``."""

    holder: nn.Module
    start: int
    stop: int

    @property
    def left_out(self) -> range:
        return range(self.start + _KEPT // 2, self.stop - _KEPT // 2)


def find_repeats(model: nn.Module, blocks: Sequence[CheckpointableBlock]) -> list[Repeats]:
    """All stretches of equal blocks that are long enough to be cut short."""
    holders = {id(child): part for part in model.modules() for child in part.children()}
    texts = [describe_module(block.module, without=PLACE_IN_MODEL) for block in blocks]
    found = []
    numbered = groupby(range(len(blocks)), key=lambda i: (id(holders[id(blocks[i].module)]), texts[i]))
    for _, group in numbered:
        positions = list(group)
        holder = holders[id(blocks[positions[0]].module)]
        if isinstance(holder, (nn.ModuleList, nn.Sequential)) and len(positions) > _KEPT:
            found.append(Repeats(holder, positions[0], positions[-1] + 1))
    return found


@contextmanager
def cut_short(blocks: Sequence[CheckpointableBlock], repeats: Sequence[Repeats]) -> Iterator[list[CheckpointableBlock]]:
    """While it lasts, the blocks between are not in their lists; gives those that are."""
    out = {position for found in repeats for position in found.left_out}
    gone = {id(blocks[position].module) for position in out}
    held = [(found.holder, dict(found.holder._modules)) for found in repeats]
    try:
        for holder, children in held:
            holder._modules = {name: child for name, child in children.items() if id(child) not in gone}
        yield [replace(b, order=i) for i, b in enumerate(b for j, b in enumerate(blocks) if j not in out)]
    finally:
        for holder, children in held:
            holder._modules = children


def made_long(
    profile: ChainProfile, blocks: Sequence[CheckpointableBlock], repeats: Sequence[Repeats]
) -> ChainProfile | None:
    """The profile with the blocks that were left out; None where the two between have not equal figures."""
    by_id = {block.block_id: block for block in profile}
    if len(by_id) != len(blocks) - sum(len(found.left_out) for found in repeats):
        return None  # a block that is called more than once has a stage for each call
    chain: list[BlockProfile] = []
    copied = {position: found.left_out.start - 1 for found in repeats for position in found.left_out}
    for found in repeats:
        one, other = blocks[found.left_out.start - 1], blocks[found.left_out.stop]
        if one.block_id not in by_id or _figures(by_id[one.block_id]) != _figures(by_id[other.block_id]):
            return None
    for position, block in enumerate(blocks):
        like = by_id.get(blocks[copied.get(position, position)].block_id)
        if like is None:
            return None
        before = like.before
        if before is not None:
            before = replace(before, name=between(chain[-1].block_id, block.block_id))
        chain.append(replace(like, block_id=block.block_id, order=position, before=before))
    return replace(profile, blocks=tuple(chain))


def _figures(block: BlockProfile) -> BlockProfile:
    """All but the name and the place."""
    before = None if block.before is None else replace(block.before, name="")
    return replace(block, block_id="", order=0, before=before)
