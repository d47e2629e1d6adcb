"""What a block is, and how a model declares its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class CheckpointableBlock:
    """One block of the chain: a submodule of the model, by reference.

    Attributes:
        block_id: name in plans, profiles and tables; unique in the chain.
        order: 0-based position in the chain.
        module: the module itself.
    """

    block_id: str
    order: int
    module: nn.Module


def declare_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> tuple[CheckpointableBlock, ...]:
    raise NotImplementedError
