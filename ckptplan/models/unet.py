"""A U-Net as a chain (Ronneberger et al. 2015, arXiv:1505.04597): uneven blocks, skips carried from block to block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data.checks import require_int, require_ints
from ckptplan.data.spec import DataSpec
from ckptplan.models.chain import ChainModel

GROUPS = 4  # of every GroupNorm; divides all widths


class ConvPair(nn.Module):
    """GroupNorm, SiLU and a 3 x 3 convolution, twice; the first changes the width, the second adds to what it gets."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(GROUPS, width_in)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, width_out)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width_in, H, W) -> (B, width_out, H, W)."""
        x = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(x)))


class Down(nn.Module):
    """Encoder block: (x, *skips) -> (half-size x, full-size x, *skips)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.convs = ConvPair(width_in, width_out)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        full = self.convs(x)
        return F.avg_pool2d(full, 2), full, *skips


class Middle(nn.Module):
    """The block between encoder and decoder: (x, *skips) -> (x, *skips)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.convs = ConvPair(width_in, width_out)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return self.convs(x), *skips


class Up(nn.Module):
    """Decoder block: doubles x and joins it with the newest skip: (x, skip, *skips) -> (x, *skips), or x alone."""

    def __init__(self, width_in: int, width_skip: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(width_in, width_skip, kernel_size=2, stride=2)
        self.convs = ConvPair(2 * width_skip, width_skip)

    def forward(self, x: Tensor, skip: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = self.convs(torch.cat((self.up(x), skip), dim=1))
        return (x, *skips) if skips else x


class UNet(ChainModel):
    """A stem, 2 * levels - 1 blocks (encoder, middle, decoder), the mean over pixels, a linear head.

    Resolution and width change from block to block, and each skip passes through all blocks between its encoder block
    and its decoder block as the same tensor.

    Args:
        widths: channels at each level, from full resolution down; each a multiple of 4, at least two levels.
        image_size: height and width of an image in pixels, a multiple of 2 ** (levels - 1).
        channels: colours of an image.
        classes: number of labels.
    """

    def __init__(self, *, widths: Sequence[int], image_size: int, channels: int, classes: int) -> None:
        super().__init__()
        widths = require_ints("widths", widths)
        if len(widths) < 2 or any(width % GROUPS for width in widths):
            raise ValueError(f"widths={widths}; expected at least two multiples of {GROUPS}, such as [16, 32, 64]")
        *encoder_widths, middle_width = widths
        factor = 2 ** len(encoder_widths)
        if require_int("image_size", image_size) % factor:
            raise ValueError(
                f"image_size={image_size}; {len(widths)} levels halve it {len(encoder_widths)} times, "
                f"expected a multiple of {factor} (or fewer widths)"
            )
        require_int("channels", channels)
        require_int("classes", classes, minimum=2)
        self.expects = DataSpec("images", channels=channels, image_size=image_size, classes=classes)
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.layers = nn.ModuleList()
        width_in = widths[0]
        for width in encoder_widths:
            self.layers.append(Down(width_in, width))
            width_in = width
        self.layers.append(Middle(width_in, middle_width))
        width_in = middle_width
        for width in reversed(encoder_widths):
            self.layers.append(Up(width_in, width))
            width_in = width
        self.head = nn.Linear(width_in, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) -> logits (B, classes)."""
        self.check_inputs(inputs)
        x = self.stem(inputs.to(self.stem.weight.dtype))
        for block in self.layers:
            x = block(*x) if isinstance(x, tuple) else block(x)
        return self.head(x.mean(dim=(2, 3)))
