"""The pre-norm transformer block of GPT and ViT. Shapes: B batch, T positions, C width, H heads."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data.checks import require_int, require_number


class TransformerBlock(nn.Module):
    """Attention, then a two-layer MLP of four times the width; each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.drop(self.proj(self.attend(self.qkv(self.norm1(x)))))
        return x + self.drop(self.out(F.gelu(self.fc(self.norm2(x)))))

    def attend(self, qkv: Tensor) -> Tensor:
        """(B, T, 3C), queries then keys then values -> the heads' outputs side by side, (B, T, C)."""
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        split = qkv.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, C / H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return y.transpose(1, 2).reshape(batch, length, width)


def check_sizes(layers: int, width: int, heads: int, dropout: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` where no transformer of these sizes exists."""
    for name, value in (("layers", layers), ("width", width), ("heads", heads)):
        require_int(name, value)
    if width % heads:
        raise ValueError(f"width={width} does not split evenly over heads={heads}; expected a multiple of heads")
    require_number("dropout", dropout, below=1)


def init_weights(model: nn.Module, layers: int, width: int) -> None:
    """Normal weights of variance 2 / (5 * width) and zero biases, drawn from torch's global generator.

    The variance is that of Nguyen and Salazar 2019 (arXiv:1910.05895, "SmallInit"), for embeddings too. The last linear
    of each branch is divided by sqrt(2 * layers), so that the sum of all branches does not grow with their number
    (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).
    """
    std = math.sqrt(2 / (5 * width))
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            is_branch_end = name.endswith((".proj", ".out"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * layers) if is_branch_end else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
