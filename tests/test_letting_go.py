"""Inputs that a replay lets go of early while an earlier block holds some of them: predicted as a real step has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.costs import InputsLetGo, StageCost
from ckptplan.memory import CpuAllocatorMeter, LiveStorageMeter, MemoryMeter
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, RegionProfile
from ckptplan.proof import prove_model
from ckptplan.selective import short_names
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials

WIDTH = 32


class Across(nn.Module):
    """Wide work on x first, then a little on the others: a backward is done with these when the wide work comes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = (
            nn.Linear(WIDTH, 8 * WIDTH),
            nn.Linear(8 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, side: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        hidden = hidden + torch.sigmoid(self.gate(side)) * side
        return hidden + torch.tanh(memory).sin()


class Decoder(nn.Module):
    """``watched``: the loss looks at what each block returns, as in distillation."""

    def __init__(self, *, watched: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Across() for _ in range(2))
        self.watched = watched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.sin(self.embed(x))
        seen = []
        for layer in self.layers:
            side = torch.cos(x)  # made for one block alone
            x = layer(x, side, memory)
            seen.append(x)
        return torch.stack([state.exp().mean() for state in seen]).sum() if self.watched else x


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def _profile(watched: bool) -> ChainProfile:
    torch.manual_seed(0)
    model, batch = Decoder(watched=watched), torch.randn(64, WIDTH)
    return ckptplan.profile_model(model, "layers.*", batch, _loss, num_warmup=0, num_trials=1, selective=True)


def _plans(profile: ChainProfile) -> list[CheckpointPlan]:
    """Each block kept, recomputed, and with each option inside it."""
    ways = []
    for i, block in enumerate(profile):
        parts = (",".join(short_names(block, option)) for option in block.selective)
        ways.append([f"K{i}", f"R({i})", *(f"S{i}[{names}]" for names in parts)])
    return [CheckpointPlan.from_text(" ".join(pair), profile) for pair in itertools.product(*ways)]


def _with_costs(profile: ChainProfile, changed: Callable[[StageCost], StageCost]) -> ChainProfile:
    def of_region(region: RegionProfile | None) -> RegionProfile | None:
        return region and replace(region, cost=changed(region.cost))

    blocks = [
        replace(
            block,
            keep=block.keep and changed(block.keep),
            recompute=block.recompute and changed(block.recompute),
            selective=tuple(replace(option, cost=changed(option.cost)) for option in block.selective),
            before=of_region(block.before),
        )
        for block in profile
    ]
    return replace(profile, blocks=tuple(blocks), pre=of_region(profile.pre), post=of_region(profile.post))


def _none_held(cost: StageCost) -> StageCost:
    return replace(cost, inputs_let_go=())


def _all_held(cost: StageCost) -> StageCost:
    peak = max([cost.backward_peak_bytes, *(letting.backward_peak_bytes for letting in cost.inputs_let_go)])
    return replace(cost, backward_peak_bytes=peak, inputs_let_go=())


@pytest.mark.parametrize("watched", [False, True])
def test_every_plan_over_blocks_that_share_one_input_of_three_peaks_as_predicted(watched: bool) -> None:
    profile = _profile(watched)
    others = [_with_costs(profile, changed) for changed in (_none_held, _all_held)]
    differing = [0, 0]
    for plan in _plans(profile):
        torch.manual_seed(0)
        proof = prove_model(
            Decoder(watched=watched),
            plan,
            torch.randn(64, WIDTH),
            _loss,
            device=torch.device("cpu"),
            trials=Trials(0, 1),
            time_steps=False,
            check_gradients=False,
        )
        assert simulate_plan(profile, plan).peak_bytes == proof.peak_bytes, plan.text
        for i, other in enumerate(others):
            differing[i] += simulate_plan(other, plan.nodes).peak_bytes != proof.peak_bytes
    assert all(differing), "this model tells nothing about inputs that are held elsewhere"


def test_what_is_held_elsewhere_is_not_freed_by_letting_it_go() -> None:
    cost = StageCost(
        0,
        0,
        100,
        (True, True, True),
        inputs_let_go=(InputsLetGo((2,), 130), InputsLetGo((0, 1), 150)),
    )
    assert cost.backward_peak_beside((20, 10, 40)) == 100  # 130 - 40, 150 - 70
    assert cost.backward_peak_beside((0, 10, 40)) == 100  # 90, 100
    assert cost.backward_peak_beside((20, 10, 0)) == 130  # 130, 120
    assert cost.backward_peak_beside((0, 0, 0)) == 150


@pytest.mark.parametrize("meter", [CpuAllocatorMeter(), LiveStorageMeter()], ids=lambda meter: meter.name)
def test_a_rise_is_what_stands_behind_an_allocation_and_not_what_stood_at_the_mark(meter: MemoryMeter) -> None:
    kept: list[Any] = []
    with meter:
        meter.mark("start")
        kept.append(torch.ones(1000))
        meter.mark("full")
        kept.clear()
        meter.mark("freed")
        kept.append(torch.ones(10))
        meter.mark("end")
    assert [meter.rise(*pair) for pair in itertools.pairwise(("start", "full", "freed", "end"))] == [4000, None, 40]
    assert (meter.rise("start", "end"), meter.rise("full", "end")) == (4000, 40)
    assert meter.marks("full", "end") == {"full", "freed", "end"}
