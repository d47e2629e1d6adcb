"""Estimates beside what others have published.

What a layer keeps: the equation of Korthikanti et al. (2022), arXiv:2205.05198: s b h (34 + 5 a s / h) bytes. It counts
a GPT layer with dropout in 16 bit, masks of one byte. It leaves out what this test adds exactly: the statistics of two
norms, and of the flash kernel one float32 for each row of each head and the random state.

The peak of a whole step: 60.0 GiB active, measured by the authors of torchtune on an A100 (its README of 18 November
2024, table of optimization flags, row "+ Packed Dataset"): Llama-3.2-3B, full fine-tuning in bfloat16 with AdamW, two
samples of 4,096 tokens, nothing recomputed, nothing compiled.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckptplan.devices import device_named
from ckptplan.estimate import Estimating, estimate_profile
from ckptplan.planners import plan_checkpoints

# hidden, heads, sequence, samples: of about 7 B, the paper's 22 B, and GPT-3 175 B
SIZES = [
    pytest.param((4096, 32, 2048, 1), id="7B"),
    pytest.param((6144, 64, 2048, 4), id="22B", marks=pytest.mark.slow),
    pytest.param((12288, 96, 2048, 1), id="175B", marks=pytest.mark.slow),
]


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, is_flash: bool) -> None:
        super().__init__()
        self.heads, self.is_flash = heads, is_flash
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        shape = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.is_flash:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        else:
            mixed = F.dropout(torch.softmax(q @ k.transpose(-1, -2) / shape[-1] ** 0.5, -1), 0.1) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


@functools.cache
def kept_bytes(hidden: int, heads: int, length: int, samples: int, *, is_flash: bool) -> int:
    """By a layer in the middle of three, its own output, which the next one reads, among it."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(hidden, heads, is_flash) for _ in range(3))).to(torch.bfloat16)
        batch = torch.empty(samples, length, hidden, dtype=torch.bfloat16)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    middle = Estimating(device_named("a100"), ranged=False).profile(model, None, batch, loss_fn)[1]
    assert middle.keep is not None
    return middle.keep.saved_bytes + middle.output_bytes[0]


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_keeps_what_the_published_equation_says_and_the_statistics_of_its_norms(
    size: tuple[int, int, int, int],
) -> None:
    h, a, s, b = size
    statistics = 2 * 2 * 4 * s * b
    assert kept_bytes(*size, is_flash=False) == s * b * h * 34 + 5 * a * s * s * b + statistics
    random_state = 2 * 512
    assert kept_bytes(*size, is_flash=True) == s * b * h * 34 + 4 * a * s * b + statistics + random_state


@pytest.mark.parametrize("size", SIZES)
def test_it_is_within_a_seventh_of_a_percent_of_the_equation(size: tuple[int, int, int, int]) -> None:
    h, a, s, b = size
    assert kept_bytes(*size, is_flash=False) == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.0001)
    assert kept_bytes(*size, is_flash=True) == pytest.approx(s * b * h * 34, rel=0.0014)


class RootMeanSquare(nn.Module):
    """In float32, of plain operators, as torchtune 0.4.0 had it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions in float32. ``x``: (samples, length, heads, size); ``turns``: (samples, length, size / 2, 2)."""
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns.unsqueeze(2).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(3).type_as(x)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RootMeanSquare(width), RootMeanSquare(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.size)
        y = self.norm1(x)
        q = turned(self.q(y).view(shape), table[places]).transpose(1, 2)
        k = turned(self.k(y).view(shape), table[places]).transpose(1, 2)
        v = self.v(y).view(shape).transpose(1, 2)
        k, v = (part.unsqueeze(2).expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(mixed.transpose(1, 2).flatten(2)) + x
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama3Point2Of3B(nn.Module):
    """The sizes of Llama-3.2-3B; the head uses the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128_256, 3072)
        self.layers = nn.ModuleList(LlamaLayer(3072, 24, 8, 8192) for _ in range(28))
        self.norm = RootMeanSquare(3072)
        self.register_buffer("table", torch.empty(4096, 64, 2), persistent=False)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.table, places)
        return F.linear(self.norm(x), self.embed.weight).float()


@pytest.mark.slow
def test_the_peak_of_a_step_is_that_which_others_have_measured() -> None:
    with torch.device("meta"):
        model = Llama3Point2Of3B()
        batch = [torch.empty(2, 4096, dtype=torch.long) for _ in range(3)]
    for parameter in model.parameters():  # the table of positions stays in float32
        parameter.data = parameter.data.to(torch.bfloat16)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        tokens, places, labels = batch
        return F.cross_entropy(model(tokens, places).flatten(0, 1), labels.flatten(), ignore_index=-100)

    profile = estimate_profile(model, "layers.*", batch, loss_fn, device="a100")
    plan = plan_checkpoints(
        profile, target_kind="activation_budget_fraction", target_value=1.0, planner="no_checkpoint"
    )
    assert plan.predicted_peak_bytes is not None
    assert plan.predicted_peak_at == "head and loss backward"  # gradients, dropped after each step, come later
    weights_and_state = 3 * sum(2 * p.numel() for p in model.parameters())
    layer = profile[0].keep
    assert layer is not None
    assert layer.saved_bytes > sum(2 * p.numel() for p in model.layers[0].parameters())  # and never make up for it
    assert weights_and_state + plan.predicted_peak_bytes == 64_288_521_216  # 59.87 GiB
    assert weights_and_state + plan.predicted_peak_bytes == pytest.approx(60.0 * 2**30, rel=0.003)
