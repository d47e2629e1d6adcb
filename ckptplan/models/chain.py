"""What our models have in common: blocks that run once each, in order, with nothing between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

    def check_inputs(self, inputs: Tensor) -> None:
        """Raise ``ValueError`` for a batch that ``expects`` rules out (token numbers are not looked at)."""
        spec, shape = self.expects, tuple(inputs.shape)
        if spec.kind == "tokens":
            longest = spec.sequence_length or 0
            fits = len(shape) == 2 and shape[1] <= longest and inputs.dtype in (torch.int64, torch.int32)
            wanted = f"int64 tokens (batch, time) with time at most sequence_length={longest}"
        else:
            size = shape[2:] if spec.image_size is None else (spec.image_size, spec.image_size)
            fits = len(shape) == 4 and shape[1:] == (spec.channels, *size) and inputs.is_floating_point()
            wanted = f"floating-point images (batch, channels={spec.channels}, {spec.image_size or 'height'}, "
            wanted += f"{spec.image_size or 'width'})"
        if not fits:
            raise ValueError(f"inputs of shape {shape} and {inputs.dtype} do not fit the model; expected {wanted}")
