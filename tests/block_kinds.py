"""The kinds of blocks on which replay is tried: what people train, and what is hard to recompute.

``make_block(kind)`` gives a module and its inputs, small enough for a test; ``make_block(kind, scale=8)`` widens them
for measurements.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.models.transformer import TransformerBlock


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions, then a gated MLP; RMSNorm before each. (B, T, C) -> same."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, self.head_width, 2) / self.head_width))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.rotated(self.q(h).view(batch, length, self.heads, -1).transpose(1, 2))
        k = self.rotated(self.k(h).view(batch, length, self.kv_heads, -1).transpose(1, 2))
        v = self.v(h).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, BatchNorm and in-place ReLU. (B, C, H, W) -> same."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += x
        return self.relu(y)


class UNetStage(nn.Module):
    """A diffusion U-Net's residual stage: GroupNorm, SiLU, a time embedding, and a strided convolution down."""

    def __init__(self, channels: int, wider: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, wider, 3, padding=1)
        self.time = nn.Linear(embedding, wider)
        self.norm2, self.conv2 = nn.GroupNorm(4, wider), nn.Conv2d(wider, wider, 3, padding=1)
        self.skip, self.down = nn.Conv2d(channels, wider, 1), nn.Conv2d(wider, wider, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.down(h + self.skip(x))


class MixtureOfExperts(nn.Module):
    """Top-2 routing: which tokens an expert sees, and how many, depends on the data. (B, T, C) -> same."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            if len(rows):
                total.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return x + total.view_as(x)


class ViewsAndWrites(nn.Module):
    """Slices written in place, values read before and after a write, views of views. (B, T, C) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.third = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        left = left.clone()
        left[..., ::2].mul_(0.5)
        left.add_(1.0)
        mask = torch.sigmoid(right).transpose(1, 2).contiguous().transpose(1, 2)
        y = self.second(F.relu_(left * mask))
        y[:, 0] = 0.0
        y = F.leaky_relu_(y.view(-1, y.shape[-1]), 0.1)
        return self.third(y).view_as(x) + x


class TanhSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inner = torch.tanh(x @ weight)
        ctx.save_for_backward(x, weight, inner)
        return inner * inner

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inner = ctx.saved_tensors
        g = 2 * inner * gradient * (1 - inner * inner)
        return g @ weight.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


class CustomFunction(nn.Module):
    """An autograd function of the user's own between two layers. (B, T, C) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.gelu(TanhSquared.apply(self.norm(x), self.weight)))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Recurrent(nn.Module):
    """An LSTM over the positions, its last state handed on in a sum. (B, T, C) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, cell) = self.lstm(self.norm(x))
        return x + y + (hidden + cell.tanh()).transpose(0, 1)


KINDS = "gpt encoder llama vit resnet unet moe dropout encoder_dropout views custom gated_mlp lstm".split()


def make_block(kind: str, scale: int = 1) -> tuple[nn.Module, list[Tensor]]:
    """A block of that kind and its inputs. Scale 8: width 256, 256 positions, batch 8."""
    torch.manual_seed(0)
    width, length, batch = 32 * scale, 32 * scale, min(8, 2 * scale)
    sequence = [torch.randn(batch, length, width)]
    if kind in ("gpt", "dropout"):
        return TransformerBlock(width, 4, 0.1 if kind == "dropout" else 0.0, causal=True), sequence
    if kind in ("encoder", "encoder_dropout"):
        share = 0.1 if kind == "encoder_dropout" else 0.0
        return nn.TransformerEncoderLayer(width, 4, 4 * width, share, batch_first=True), sequence
    if kind == "llama":
        return LlamaLayer(width, 4, 2, 11 * width // 4, length), sequence
    if kind == "vit":
        return TransformerBlock(width, 4, causal=False), [torch.randn(batch, length + 1, width)]
    if kind == "resnet":
        return Bottleneck(8 * scale, 2 * scale), [torch.randn(2 * batch, 8 * scale, 4 * scale, 4 * scale)]
    if kind == "unet":
        return UNetStage(4 * scale, 8 * scale, 16), [torch.randn(batch, 4 * scale, 8, 8), torch.randn(batch, 16)]
    if kind == "moe":
        return MixtureOfExperts(width // 2, 4), [torch.randn(batch, length, width // 2)]
    if kind == "views":
        return ViewsAndWrites(width), sequence
    if kind == "custom":
        return CustomFunction(width), sequence
    if kind == "gated_mlp":
        return GatedMLP(width, 11 * width // 4), sequence
    assert kind == "lstm"
    return Recurrent(width), sequence
