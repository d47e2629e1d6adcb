"""The blocks of the zoo: what people train, what is hard to recompute. Each takes and gives (B, T, C) unless said."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Mlp(nn.Module):
    """The plain residual block that others are made from."""

    def __init__(self, hidden: int = 48, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def branch(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Attention(nn.Module):
    """Causal self-attention without a norm, with whatever mask it is given."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class BatchNormConv(nn.Module):
    """(B, C, H, W) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class SpectralNorm(Mlp):
    """The power iteration changes two buffers in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)
        nn.utils.parametrizations.spectral_norm(self.down)


class WeightNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)


class Pruned(Mlp):
    """A mask computes the weight before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.prune.random_unstructured(self.up, "weight", 0.3)


class MovingAverage(Mlp):
    """A buffer that the forward updates and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return x + torch.tanh(y - self.average)


class Table(nn.Module):
    """Adds a buffer; one that moves follows what it reads."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("table", torch.randn(48), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.table
        if self.moves and self.training:
            with torch.no_grad():
                self.table.lerp_(x.mean((0, 1)), 0.1)
        return y


class HasParts(Mlp):
    """What comes between its matrices is given, so that blocks may have it in common."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(self.parts(self.up(self.norm(x))))


class CacheInAttribute(nn.Module):
    """Generation's key-value cache, left on while training: each forward puts its keys into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x.detach().mean(0))
        return x + self.inner(x)


class Experts(nn.Module):
    """Top-1 routing; ``how`` says what becomes of the router's load: "buffer", "attribute" or "output"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mlp(hidden=24) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor, auxiliary: Tensor | None = None) -> Any:
        b, t, _ = x.shape
        tokens = x.reshape(-1, WIDTH)
        weights = self.router(tokens).softmax(-1)
        gate, choice = weights.max(-1)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).nonzero().squeeze(-1)
            y = y.index_add(0, chosen, gate[chosen, None] * expert(tokens[chosen]))
        if self.training and self.how == "buffer":
            self.load += torch.bincount(choice, minlength=3)
        loss = (weights.mean(0) * F.one_hot(choice, 3).float().mean(0)).sum()
        if self.how == "attribute":
            self.auxiliary = loss
        output = x + y.view(b, t, WIDTH)
        return output if auxiliary is None else (output, auxiliary + loss)


class RandomSlope(Mlp):
    """RReLU draws its slopes from torch's stream."""

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.rrelu(self.up(self.norm(x)), training=self.training))


class DrawsFrom(Mlp):
    """Stochastic depth whose coin comes from ``draw()``."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * (1.5 if self.draw() < 0.6 else 0.5)


class PrivateTorchStream(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator()
        self.stream.manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], 1, 1, generator=self.stream) < 0.7
        return x + self.branch(x) * keep


class PrivateNumpyStream(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stream = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * float(self.stream.random())


def python_coin() -> float:
    return random.random()


def numpy_coin() -> float:
    return float(np.random.random())  # noqa: NPY002 - the global stream is what the case is about


class WritesAside(Mlp):
    """Leaves its branch where a later block finds it."""

    def __init__(self, place: dict[str, Tensor], reads: bool) -> None:
        super().__init__()
        self.place, self.reads = place, reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if self.reads:
            return x + y + self.place["y"]
        self.place["y"] = y
        return x + y


class InPlaceOnInput(Mlp):
    """An activation that overwrites what the block was given."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x, inplace=True)
        return x + self.branch(x)


class AddsToInput(Mlp):
    """Gives back the tensor that it was given, changed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.branch(x.clone()))


class InPlaceInside(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).relu_()
        y = self.down(y)
        y += x
        return y.mul_(0.5)


class GivesViews(Mlp):
    """Takes and gives a transposed view of the first half of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.branch(x), x], -1).transpose(0, 1)
        return torch.tanh(y)[..., :WIDTH].transpose(0, 1)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class CustomFunction(Mlp):
    def branch(self, x: Tensor) -> Tensor:
        return self.down(_Swish.apply(self.up(self.norm(x))))


class LowRank(nn.Module):
    """A frozen layer with a trainable path of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@dataclass
class State:
    """What the blocks of one model hand on."""

    hidden: Tensor
    note: str
    extra: Any
    missing: None = None


class TakesDataclass(Mlp):
    def forward(self, state: State) -> State:
        count = state.extra["count"] + 1
        return State(
            state.hidden + self.branch(state.hidden), state.note, {"count": count, "scale": state.hidden.mean()}
        )


class TakesDict(Mlp):
    def forward(self, hidden: Tensor, total: Tensor) -> dict[str, Tensor]:
        y = self.branch(hidden)
        return {"hidden": hidden + y, "total": total + y.square().mean()}


class GivesNone(Mlp):
    """A decoder layer's ``(hidden, attention weights)`` where nobody asked for weights."""

    def forward(self, x: Tensor, weights: None = None) -> tuple[Tensor, None]:
        return x + self.branch(x), None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Reversible(nn.Module):
    """Two streams, each moved by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Mlp(24), Mlp(24)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = a + self.f.branch(b)
        return a, b + self.g.branch(a)


class TimeConditioned(Mlp):
    """A diffusion model's block: scaled and shifted by the step's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.modulate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.modulate(F.silu(time))[:, None].chunk(2, -1)
        return x + self.branch(x * (1 + scale) + shift)


class TakesPositions(Mlp):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.branch(x + positions)


class MaskedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.attention(self.norm(x), mask)
        return self.mlp(x + y), y.detach().abs().mean()


class HalfInside(Mlp):
    """Enters autocast itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.branch(x)
        return x + y.float()


class Fourier(Mlp):
    """FNet's mixing: complex numbers inside."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.fft2(self.branch(x)).abs() * 0.1


class Detaches(Mlp):
    """A path without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.branch(x)
        return x + self.branch(x) * torch.sigmoid(target)


class ChecksPoints(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.branch, x, use_reentrant=False)


class CountsCalls(Mlp):
    """A Python counter that does not reach the result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)
