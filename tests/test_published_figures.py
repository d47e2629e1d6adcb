"""What a layer keeps, beside the equation of Korthikanti et al. (2022), arXiv:2205.05198: s b h (34 + 5 a s / h) bytes.

The equation counts a GPT layer with dropout in 16 bit, masks of one byte. It leaves out what this test adds exactly:
the statistics of two norms, and of the flash kernel one float32 for each row of each head and the random state.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckptplan.devices import device_named
from ckptplan.estimate import Estimating

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
