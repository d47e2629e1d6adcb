"""A chain of MLP blocks of uneven cost: the same width between blocks, another one inside each."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data.checks import require_int, require_ints, require_number
from ckptplan.data.spec import DataSpec
from ckptplan.models.chain import ChainModel


class MLPBlock(nn.Module):
    """LayerNorm, linear, GELU, linear, added to the input."""

    def __init__(self, width: int, hidden_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, hidden_width)
        self.out = nn.Linear(hidden_width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return x + self.drop(self.out(F.gelu(self.fc(self.norm(x)))))


class MLP(ChainModel):
    """A linear layer on the flat image, one block per hidden width, a norm and a linear head.

    Args:
        width: features between blocks.
        hidden_widths: features inside each block; their number is the number of blocks.
        image_size: height and width of an image in pixels.
        channels: colours of an image.
        classes: number of labels.
        dropout: probability of dropping a block's contribution.
    """

    def __init__(
        self,
        *,
        width: int,
        hidden_widths: Sequence[int],
        image_size: int,
        channels: int,
        classes: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("image_size", image_size), ("channels", channels)):
            require_int(name, value)
        require_int("classes", classes, minimum=2)
        hidden_widths = require_ints("hidden_widths", hidden_widths)
        require_number("dropout", dropout, below=1)
        self.expects = DataSpec("images", channels=channels, image_size=image_size, classes=classes)
        self.embed = nn.Linear(channels * image_size**2, width)
        self.layers = nn.ModuleList(MLPBlock(width, hidden_width, dropout) for hidden_width in hidden_widths)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) -> logits (B, classes)."""
        self.check_inputs(inputs)
        x = self.embed(inputs.to(self.embed.weight.dtype).flatten(1))
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))
