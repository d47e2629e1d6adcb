"""A context that picks the kernels of attention is in force in recomputations too, where backward runs outside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckptplan.apply import checkpointed
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + heads.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("text", ["R(0) R(1) K2", "R(0 1 2)", "R(0 R(1 2))", "S0[] S1[] K2"])
def test_the_attention_kernels_of_the_forward_are_those_of_every_recomputation(text: str) -> None:
    """B16: the context that picks them is left before backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(2, 37, 16)

    def gradients(*allowed: SDPBackend) -> list[Tensor]:
        with sdpa_kernel(list(allowed)):
            loss = model(x).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert torch.backends.cuda.flash_sdp_enabled(), "what was allowed before is allowed again"
        return list(found)

    profile = profile_model(model, ["0", "1", "2"], x, mean_square, num_warmup=0, num_trials=1, selective=True)
    by_math, by_flash = gradients(SDPBackend.MATH), gradients(SDPBackend.FLASH_ATTENTION)
    assert not all(torch.equal(a, b) for a, b in zip(by_math, by_flash, strict=True))
    with checkpointed(model, CheckpointPlan.from_text(text, profile)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(SDPBackend.MATH), by_math, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(gradients(SDPBackend.FLASH_ATTENTION), by_flash, strict=True))
