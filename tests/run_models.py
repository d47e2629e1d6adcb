"""Models that runs of the tests meet something with: named by ``model._target_``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckptplan.models import GPT


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _WrongWhenRecomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.tensor(2.0 if inside_backward() else 1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class WrongGradients(GPT):
    """Its first block's gradient is doubled if the block is recomputed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[0] = nn.Sequential(self.layers[0], _Wrong())


class _Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _WrongWhenRecomputed.apply(x)


class NanLoss(GPT):
    """Its logits are NaN."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float("nan")


class Breaks(GPT):
    """Its forward fails on every batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("the user's own fault")


class BreaksLater(GPT):
    """Its forward fails where gradients are wanted: not at the first look at it."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("the user's own fault")
        return super().forward(inputs)
