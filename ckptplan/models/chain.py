"""What our models have in common: blocks that run once each, in order, with nothing between them."""

from __future__ import annotations

from torch import nn

from ckptplan.data.spec import DataSpec


class ChainModel(nn.Module):
    """A model whose forward is: something before, ``for block in self.layers: x = block(x)``, something after.

    Nothing runs between blocks and no inner value outlives its use, so the model is exactly a chain of stages.
    A block that takes or returns several tensors does so as a tuple, and is called as ``block(*x)``.

    Attributes:
        layers: the blocks.
        expects: the batches that the model takes.
    """

    layers: nn.ModuleList
    expects: DataSpec

    def declared_blocks(self) -> list[tuple[str, nn.Module]]:
        """The blocks in the order in which they run, each with its module path as id."""
        return [(f"layers.{index}", block) for index, block in enumerate(self.layers)]
