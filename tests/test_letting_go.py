"""Inputs that a replay lets go of early while an earlier block holds some of them: predicted as a real step has it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.memory import CpuAllocatorMeter, LiveStorageMeter, MemoryMeter
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, InputsLetGo, StageCost
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
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Across() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.sin(self.embed(x))
        for layer in self.layers:
            side = torch.cos(x)  # made for one block alone
            x = layer(x, side, memory)
        return x


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def profile() -> ChainProfile:
    torch.manual_seed(0)
    return ckptplan.profile_model(
        Decoder(2), "layers.*", torch.randn(64, WIDTH), _loss, num_warmup=0, num_trials=1, selective=True
    )


def _ways(profile: ChainProfile, block: int) -> list[str]:
    """How to run a block: kept, recomputed, and with each option inside it."""
    parts = (",".join(short_names(profile[block], option)) for option in profile[block].selective)
    return [f"K{block}", f"R({block})", *(f"S{block}[{names}]" for names in parts)]


def test_every_plan_over_blocks_that_share_one_input_of_three_peaks_as_predicted(profile: ChainProfile) -> None:
    assert any(len(option.cost.inputs_let_go) > 1 for option in profile[1].selective), "no inputs go one by one"
    for ways in itertools.product(_ways(profile, 0), _ways(profile, 1)):
        plan = CheckpointPlan.from_text(" ".join(ways), profile)
        torch.manual_seed(0)
        proof = prove_model(
            Decoder(2),
            plan,
            torch.randn(64, WIDTH),
            _loss,
            device=torch.device("cpu"),
            trials=Trials(0, 1),
            time_steps=False,
            check_gradients=False,
        )
        assert simulate_plan(profile, plan).peak_bytes == proof.peak_bytes, " ".join(ways)


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
    with pytest.raises(ValueError, match=r"rise\('start', 'freed'\): the mark before 'freed' is 'full'"):
        meter.rise("start", "freed")
