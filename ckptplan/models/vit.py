"""A vision transformer: an image as a sequence of square patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ckptplan.data.checks import require_int
from ckptplan.data.spec import DataSpec
from ckptplan.models.chain import ChainModel
from ckptplan.models.transformer import TransformerBlock, check_sizes, init_weights, tensor_parallel_plan


class ViT(ChainModel):
    """Patch and position embeddings, pre-norm blocks with full attention, the mean over patches, a linear head.

    Args:
        layers: number of blocks.
        width: features per patch, a multiple of ``heads``.
        heads: attention heads per block.
        patch_size: side of a patch in pixels; divides ``image_size``.
        image_size: height and width of an image in pixels.
        channels: colours of an image.
        classes: number of labels.
        dropout: probability of dropping, in the embedding, the attention and both branches.
        separate_qkv: a matrix each for queries, keys and values, for tensor parallelism.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        patch_size: int,
        image_size: int,
        channels: int,
        classes: int,
        dropout: float = 0.0,
        separate_qkv: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(layers, width, heads, dropout)
        for name, value in (("patch_size", patch_size), ("image_size", image_size), ("channels", channels)):
            require_int(name, value)
        require_int("classes", classes, minimum=2)
        if image_size % patch_size:
            raise ValueError(
                f"patch_size={patch_size} does not divide image_size={image_size}; expected a divisor of it"
            )
        self.expects = DataSpec("images", channels=channels, image_size=image_size, classes=classes)
        self.patches = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, width))
        self.drop = nn.Dropout(dropout)
        self.heads, self.separate_qkv = heads, separate_qkv
        self.layers = nn.ModuleList(
            TransformerBlock(width, heads, dropout, causal=False, separate_qkv=separate_qkv) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        init_weights(self, layers, width)
        nn.init.normal_(self.positions, std=0.5)  # about as large as the patches, so that places are told apart

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) -> logits (B, classes)."""
        x = self.embed(inputs)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))

    def embed(self, inputs: Tensor) -> Tensor:
        """What stands before the blocks: (B, channels, H, W) -> (B, patches, width)."""
        self.check_inputs(inputs)
        patches = self.patches(inputs.to(self.patches.weight.dtype))  # (B, width, rows, columns)
        return self.drop(patches.flatten(2).transpose(1, 2) + self.positions)

    def tensor_parallel_plan(self, num_ranks: int) -> dict[str, str]:
        """Which matrices ``num_ranks`` share, and how. Raises ``ValueError`` where they cannot."""
        return tensor_parallel_plan(self.heads, num_ranks, self.separate_qkv)
