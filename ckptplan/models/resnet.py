"""A ResNet of basic blocks (He et al. 2016, arXiv:1512.03385), all stages in one flat list of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data.checks import require_int, require_ints
from ckptplan.data.spec import DataSpec
from ckptplan.models.chain import ChainModel


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, added to the input (1 x 1 convolution where its shape changes)."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width_out)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and width_in == width_out
            else nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, width_in, H, W) -> (B, width_out, H / stride, W / stride)."""
        # In place only on tensors made here: the block's input belongs to the block before.
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(ChainModel):
    """A 3 x 3 stem, stages of basic blocks (each but the first halves the image), the mean over pixels, a linear head.

    Args:
        blocks: blocks in each stage.
        widths: channels in each stage.
        channels: colours of an image; images may have any size.
        classes: number of labels.
    """

    def __init__(self, *, blocks: Sequence[int], widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        blocks, widths = require_ints("blocks", blocks), require_ints("widths", widths)
        if len(blocks) != len(widths):
            raise ValueError(f"blocks={blocks} and widths={widths}; expected one number per stage in both")
        require_int("channels", channels)
        require_int("classes", classes, minimum=2)
        self.expects = DataSpec("images", channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.layers = nn.ModuleList()
        width_in = widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for index in range(count):
                halve = stage > 0 and index == 0
                self.layers.append(BasicBlock(width_in, width, stride=2 if halve else 1))
                width_in = width
        self.head = nn.Linear(width_in, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (B, channels, H, W) -> logits (B, classes)."""
        self.check_inputs(inputs)
        x = F.relu(self.stem_norm(self.stem(inputs.to(self.stem.weight.dtype))), inplace=True)
        for block in self.layers:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))
