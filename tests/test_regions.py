"""What runs around the blocks: a model may hold on to what it calls its first block with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ckptplan.measure import profile_model
from ckptplan.planners import plan_checkpoints
from ckptplan.proof import prove_model
from ckptplan.subject import Trials


class HoldsItsInput(nn.Module):
    """As ``nn.TransformerEncoder`` does: ``output = src``, and ``src`` stays until the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = x
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 128, batch_first=True), 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


@pytest.mark.parametrize(("make", "paths"), [(HoldsItsInput, "layers.*"), (Encoder, "encoder.layers.*")])
@pytest.mark.parametrize("fraction", [1.0, 0.8])
def test_what_the_model_holds_under_another_name_is_not_taken_off_the_head(
    make: type[nn.Module], paths: str, fraction: float
) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    model, tokens = make(), torch.randint(0, 50, (8, 32))
    profile = profile_model(model, paths, tokens, loss_fn, num_warmup=0, num_trials=1)
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=fraction, cost="flops")
    proof = prove_model(model, plan, tokens, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
    assert plan.predicted_peak_bytes == proof.peak_bytes
    assert proof.gradients.bitwise_equal
