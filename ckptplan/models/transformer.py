"""The pre-norm transformer block of GPT and ViT. Shapes: B batch, T positions, C width, H heads."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data.checks import require_int, require_number


class TransformerBlock(nn.Module):
    """Attention, then a two-layer MLP of four times the width; each behind a LayerNorm and added to its input.

    ``separate_qkv``: a matrix each for queries, keys and values, whose rows are then whole heads, so that ranks of
    tensor parallelism can share them; else one for all three.
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, *, causal: bool, separate_qkv: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = None if separate_qkv else nn.Linear(width, 3 * width)
        if separate_qkv:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.drop(self.proj(self.attend(*self.heads_of(self.norm1(x)))))
        return x + self.drop(self.out(F.gelu(self.fc(self.norm2(x)))))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> queries, keys and values, each (B, H, T, C / H); of cut matrices this rank's heads."""
        if self.qkv is None:
            query, key, value = (
                projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                for projection in (self.q, self.k, self.v)
            )
            return query, key, value
        qkv = self.qkv(x)  # queries, then keys, then values
        split = qkv.view(*qkv.shape[:2], 3, -1, self.head_width)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each (B, H, T, C / H) -> the heads' outputs side by side, (B, T, C)."""
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)


def tensor_parallel_plan(heads: int, num_ranks: int, separate_qkv: bool) -> dict[str, str]:
    """How ``num_ranks`` share the matrices of the blocks in ``layers``: whole heads, and parts of the hidden layer.

    Raises ``ValueError`` where they cannot.
    """
    if not separate_qkv:
        raise ValueError(
            "qkv of each block is one matrix for queries, keys and values, which cannot be cut by heads; "
            "type: model.separate_qkv=true"
        )
    if heads % num_ranks:
        raise ValueError(f"heads={heads} do not split evenly over {num_ranks} ranks; expected a multiple of that")
    first, second = ("q", "k", "v", "fc"), ("proj", "out")
    return {f"layers.*.{name}": style for names, style in ((first, "colwise"), (second, "rowwise")) for name in names}


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
