"""A GPT: a decoder-only language model, on bytes unless told otherwise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ckptplan.data.checks import require_int
from ckptplan.data.spec import DataSpec
from ckptplan.models.chain import ChainModel
from ckptplan.models.transformer import TransformerBlock, check_sizes, init_weights, tensor_parallel_plan


class GPT(ChainModel):
    """Token and position embeddings, pre-norm blocks with causal attention, a norm and a linear head.

    Args:
        layers: number of blocks.
        width: features per position, a multiple of ``heads``.
        heads: attention heads per block.
        sequence_length: longest input, in tokens.
        vocab_size: number of different tokens; 256 is bytes.
        dropout: probability of dropping, in the embedding, the attention and both branches.
        tie_weights: the head uses the token embedding's matrix.
        separate_qkv: a matrix each for queries, keys and values, for tensor parallelism.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        sequence_length: int,
        vocab_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
        separate_qkv: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(layers, width, heads, dropout)
        require_int("sequence_length", sequence_length)
        require_int("vocab_size", vocab_size, minimum=2)
        self.expects = DataSpec("tokens", vocab_size=vocab_size, sequence_length=sequence_length)
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.drop = nn.Dropout(dropout)
        self.heads, self.separate_qkv = heads, separate_qkv
        self.layers = nn.ModuleList(
            TransformerBlock(width, heads, dropout, causal=True, separate_qkv=separate_qkv) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.tokens.weight
        init_weights(self, layers, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens int64 (B, T), T up to ``sequence_length`` -> logits (B, T, vocab_size)."""
        x = self.embed(inputs)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))

    def embed(self, inputs: Tensor) -> Tensor:
        """What stands before the blocks: (B, T) -> (B, T, width)."""
        self.check_inputs(inputs)
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return self.drop(self.tokens(inputs) + self.positions(positions))

    def tensor_parallel_plan(self, num_ranks: int) -> dict[str, str]:
        """Which matrices ``num_ranks`` share, and how. Raises ``ValueError`` where they cannot."""
        return tensor_parallel_plan(self.heads, num_ranks, self.separate_qkv)
