"""Chains of blocks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptplan.blocks import CheckpointableBlock, declare_blocks


class Residual(nn.Module):
    """x + W_o(tanh(W_2(tanh(W_1(tanh(W_i x)))))) with an inner width of its own."""

    def __init__(self, hidden: int, width: int = 64) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class DropoutBlock(nn.Module):
    """Two linear layers with dropout, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def residual_chain(*hidden: int, batch: int = 512) -> tuple[nn.Module, Tensor]:
    """Residual blocks in a Sequential, and an input that needs a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(h) for h in hidden))
    return model, torch.randn(batch, 64, requires_grad=True)


def declared(modules: Sequence[nn.Module]) -> tuple[CheckpointableBlock, ...]:
    """The modules as the blocks b0, b1, ..."""
    holder = nn.ModuleList(modules)
    return declare_blocks(holder, [(f"b{i}", module) for i, module in enumerate(holder)])


def mean_square(output: Any) -> Tensor:
    return output.float().square().mean()


def flat_texts(count: int) -> list[str]:
    """All 2 ** count flat plans."""
    return [" ".join(f"R({i})" if chosen >> i & 1 else f"K{i}" for i in range(count)) for chosen in range(2**count)]
