"""Segments and nests of blocks that draw random numbers or change buffers: predicted as measured, to the byte.

Each recomputed node keeps where the random streams stood; the outermost keeps the first values of all its buffers; each
run in backward works on copies of them, some of which autograd saves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.proof import prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.planners import trees


class Normalised(nn.Module):
    """Two convolutions with BatchNorm, (B, C, H, W) -> same: buffers that change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Dropping(nn.Module):
    """An MLP with dropout, (B, C) -> same: random draws."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Averaging(nn.Module):
    """Dropout, BatchNorm and a moving average that the output depends on, (B, C) -> same: both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.down(F.gelu(self.norm(self.up(x)))))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return torch.tanh(x + y - self.mean)


class Chain(nn.Module):
    def __init__(self, layers: list[nn.Module], first: nn.Module | None) -> None:
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


CHAINS: dict[str, tuple[Callable[[], Chain], tuple[int, ...]]] = {
    "buffers": (lambda: Chain([Normalised(16) for _ in range(4)], nn.Conv2d(3, 16, 3, padding=1)), (2, 3, 8, 8)),
    "large buffers": (lambda: Chain([Normalised(64) for _ in range(4)], nn.Conv2d(3, 64, 3, padding=1)), (1, 3, 2, 2)),
    "draws": (lambda: Chain([Dropping() for _ in range(4)], nn.Linear(8, 32)), (64, 8)),
    "draws from the start": (lambda: Chain([Dropping() for _ in range(4)], None), (64, 32)),
    "both": (lambda: Chain([Averaging() for _ in range(4)], nn.Linear(8, 32)), (64, 8)),
    "of each": (lambda: Chain([Dropping(0.0), Dropping(), Averaging(), Dropping(0.0)], nn.Linear(8, 32)), (64, 8)),
}


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


@pytest.mark.parametrize("name", list(CHAINS))
def test_any_tree_is_predicted_to_the_byte_and_gives_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CHAINS[name]
    model, batch = make(), torch.randn(shape)
    profile = profile_model(model, "layers.*", batch, _loss, num_warmup=0, num_trials=1)
    forests = [trees.text(forest) for forest in trees.all_forests(0, 4)]
    chosen = ["K0 R(1 2) K3", "R(0 R(1 R(2))) K3", *random.Random(name).sample(forests, 12)]
    off = []
    for text in chosen:
        plan = CheckpointPlan.from_text(text, profile)
        proof = prove_model(
            model, plan, batch, _loss, device=torch.device("cpu"), trials=Trials(0, 1), time_steps=False
        )
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal, (text, proof.gradients.faults)
        predicted = simulate_plan(profile, plan).peak_bytes
        if predicted != proof.peak_bytes:
            off.append(f"{text}: predicted {predicted}, measured {proof.peak_bytes}")
    assert off == []


@pytest.mark.parametrize("name", ["both", "draws from the start"])
def test_optimal_solves_such_chains_as_the_simulator_sees_them(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CHAINS[name]
    profile = profile_model(make(), "layers.*", torch.randn(shape), _loss, num_warmup=0, num_trials=1)
    profile = replace(profile, blocks=tuple(replace(block, selective=()) for block in profile))  # by checkpoint alone
    peaks = {
        text: simulate_plan(profile, CheckpointPlan.from_text(text, profile))
        for text in (trees.text(forest) for forest in trees.all_forests(0, 4))
    }
    for budget in sorted({cost.peak_bytes for cost in peaks.values()}):
        plan = plan_checkpoints(
            profile, target_kind="activation_budget_bytes", target_value=budget, planner="optimal", cost="flops"
        )
        least = min(cost.recompute_flops or 0 for cost in peaks.values() if cost.peak_bytes <= budget)
        assert plan.predicted_cost == least
