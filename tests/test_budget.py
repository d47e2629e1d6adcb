"""From a run's budget to the number of bytes that a plan may use."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import ckptplan.footprint as footprint_module
from ckptplan.budget import CUDA_MARGIN, plan_for_budget
from ckptplan.config import PlannerConfig, RunConfig
from ckptplan.costs import StageCost
from ckptplan.errors import ConfigError, InfeasibleTargetError
from ckptplan.footprint import FREE_SHARE_LEFT, StaticBytes, available_host_bytes, static_bytes
from ckptplan.profiles import BlockProfile, ChainProfile

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chain(count: int = 4) -> ChainProfile:
    """Blocks that save 10 MiB and hand on 1 MiB; recomputing one brings its 10 MiB back in its backward."""
    blocks = tuple(
        BlockProfile(
            f"b{i}",
            output_bytes=(MIB,),
            output_is_input=(None,),
            output_gradient_bytes=MIB,
            keep=StageCost(10 * MIB, 11 * MIB, 12 * MIB),
            recompute=StageCost(0, 2 * MIB, 12 * MIB),
            forward_time_ms=1.0,
            backward_time_ms=2.0,
            recompute_time_ms=1.0,
        )
        for i in range(count)
    )
    return ChainProfile(blocks)


NO_STATE = StaticBytes(0, 0, 0)


def config(planner: str = "dp", **keys: object) -> RunConfig:
    return RunConfig(planner=PlannerConfig(name=planner), **keys)  # type: ignore[arg-type]


def test_a_fraction_is_of_the_predicted_peak_without_checkpointing() -> None:
    planned = plan_for_budget(chain(), config(budget_frac=0.5), NO_STATE, CPU)
    assert planned.plan.no_checkpoint_peak_bytes == 3 * 11 * MIB + 12 * MIB
    assert planned.budget_bytes == 45 * MIB // 2
    assert planned.margin_bytes == 0
    assert planned.plan.predicted_peak_bytes <= planned.budget_bytes
    assert planned.smallest_reachable_bytes == 15 * MIB


def test_the_smallest_reachable_peak_is_that_of_the_planners_kind() -> None:
    """Nests reach below the 15 MiB of flat plans; that peak is met and one byte less is not."""
    least = plan_for_budget(chain(), config("optimal", budget_frac=0.5), NO_STATE, CPU).smallest_reachable_bytes
    assert least < 15 * MIB
    assert plan_for_budget(chain(), config("optimal", budget_bytes=least), NO_STATE, CPU).plan.feasible
    with pytest.raises(InfeasibleTargetError):
        plan_for_budget(chain(), config("optimal", budget_bytes=least - 1), NO_STATE, CPU)


def test_on_cuda_a_stated_margin_is_taken_off_and_the_budget_reported_as_asked_for() -> None:
    planned = plan_for_budget(chain(), config(budget_bytes=30 * MIB), NO_STATE, CUDA)
    assert planned.margin_bytes == int(30 * MIB * CUDA_MARGIN) > 0
    assert planned.budget_bytes == 30 * MIB
    assert planned.plan.budget_bytes == 30 * MIB - planned.margin_bytes
    assert plan_for_budget(chain(), config(budget_bytes=30 * MIB), NO_STATE, CPU).margin_bytes == 0


def test_a_device_budget_leaves_what_stands_beside_activations() -> None:
    static = StaticBytes(weights_bytes=3 * MIB, gradients_bytes=3 * MIB, optimizer_bytes=6 * MIB)
    planned = plan_for_budget(chain(), config(device_budget_bytes=42 * MIB), static, CPU)
    assert planned.budget_bytes == 30 * MIB
    with pytest.raises(ConfigError, match=r"device_budget_bytes[\s\S]*alone take 12,582,912 bytes"):
        plan_for_budget(chain(), config(device_budget_bytes=12 * MIB), static, CPU)
    with pytest.raises(InfeasibleTargetError, match="what else stands on the device takes 12582912 bytes"):
        plan_for_budget(chain(), config(device_budget_bytes=20 * MIB), static, CPU)


@pytest.mark.parametrize("keys", [{"device_budget_bytes": 40 * MIB}, {"budget": "auto"}])
def test_an_optimizer_whose_state_is_not_known_is_told(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not known before its first step"):
        plan_for_budget(chain(), config(**keys), StaticBytes(1, 1, None), CPU)


def test_auto_is_what_is_free_less_headroom_gradients_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_module, "available_host_bytes", lambda: 100 * MIB)
    planned = plan_for_budget(chain(), config(budget="auto"), StaticBytes(7 * MIB, 20 * MIB, 40 * MIB), CPU)
    assert planned.budget_bytes == int(100 * MIB * (1 - FREE_SHARE_LEFT)) - 60 * MIB


def test_the_hosts_free_memory_is_a_sensible_number() -> None:
    assert 2**24 < available_host_bytes() < 2**50


def test_references_run_above_the_budget_and_planners_refuse() -> None:
    for planner in ("none", "all"):
        planned = plan_for_budget(chain(), config(planner, budget_bytes=MIB), NO_STATE, CPU)
        assert not planned.plan.feasible
    for planner in ("uniform", "greedy", "dp"):
        with pytest.raises(InfeasibleTargetError):
            plan_for_budget(chain(), config(planner, budget_bytes=MIB), NO_STATE, CPU)


def test_a_forced_plan_is_taken_as_it_is() -> None:
    forced = RunConfig(planner=PlannerConfig(name="text", text="K0 R(1 2) K3"), budget_frac=0.1)
    planned = plan_for_budget(chain(), forced, NO_STATE, CPU)
    assert planned.plan.text == "K0 R(1 2) K3"
    assert not planned.plan.feasible


def test_a_slowdown_has_no_budget_in_bytes() -> None:
    planned = plan_for_budget(chain(), config(max_slowdown=1.2), NO_STATE, CPU)
    assert planned.budget_bytes is None
    assert planned.plan.recomputed == 2  # of a step of 12 ms, 2.4 may be added


@pytest.mark.parametrize(
    ("make", "per_parameter"),
    [
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, momentum=0.9), 4),
        (torch.optim.AdamW, 8),
        (partial(torch.optim.AdamW, amsgrad=True), 12),
    ],
)
def test_static_bytes_are_what_a_first_step_leaves_behind(make, per_parameter: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[0].bias.requires_grad_(False)
    model[2].weight = model[0].weight  # tied: counted once
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    static = static_bytes(model, optimizer)
    trainable = 64 * 64 + 64 + 2 * 64
    assert static.weights_bytes == (trainable + 64) * 4 + 2 * 64 * 4 + 8
    assert static.gradients_bytes == trainable * 4
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert static.optimizer_bytes == pytest.approx(sum(t.numel() * t.element_size() for t in state), abs=64)
    assert static.optimizer_bytes == pytest.approx(trainable * per_parameter, abs=64)
    assert static.total_bytes == static.weights_bytes + static.gradients_bytes + static.optimizer_bytes


def test_a_margin_of_the_users_own_holds_on_every_device_and_for_every_budget_in_bytes() -> None:
    for device in (CPU, CUDA):
        planned = plan_for_budget(chain(), config(budget_frac=0.8, margin_frac=0.25), NO_STATE, device)
        assert planned.budget_bytes == int(45 * MIB * 0.8)
        assert planned.margin_bytes == int(45 * MIB * 0.8) // 4
        assert planned.plan.predicted_peak_bytes <= planned.budget_bytes - planned.margin_bytes
    static = StaticBytes(weights_bytes=3 * MIB, gradients_bytes=3 * MIB, optimizer_bytes=6 * MIB, batch_bytes=MIB)
    planned = plan_for_budget(chain(), config(device_budget_bytes=43 * MIB, margin_frac=0.1), static, CPU)
    assert (planned.budget_bytes, planned.margin_bytes) == (30 * MIB, 3 * MIB)


def test_the_batch_counts_towards_a_device_budget() -> None:
    model = nn.Linear(4, 4)
    batch = torch.zeros(8, 4)
    assert static_bytes(model, torch.optim.SGD(model.parameters()), (batch, batch[:2])).batch_bytes == 128
