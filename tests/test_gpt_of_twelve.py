"""What the planners promise on the 12-block GPT (width 256, sequence 256, batch 8): exact FLOPs, measured peaks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from ckptplan.data import Batch
from ckptplan.measure import profile_model
from ckptplan.models import GPT
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_nested_peak, plan_checkpoints
from ckptplan.planners.budgets import step_cost
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials

pytestmark = pytest.mark.slow


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


@cache
def _measured() -> tuple[GPT, Batch, ChainProfile]:
    torch.manual_seed(0)
    model = GPT(layers=12, width=256, heads=4, sequence_length=256, vocab_size=256)
    batch = Batch(torch.randint(0, 256, (8, 256)), torch.randint(0, 256, (8, 256)))
    profile = profile_model(model, None, batch, _loss, num_warmup=0, num_trials=1, selective=True)
    return model, batch, profile


def _plan(planner: str, **target: float | str) -> CheckpointPlan:
    return plan_checkpoints(_measured()[2], planner=planner, cost="flops", **target)  # type: ignore[arg-type]


def _require_proved(plan: CheckpointPlan) -> None:
    model, batch, _ = _measured()
    proof = prove_model(model, plan, batch, _loss, device=torch.device("cpu"), trials=Trials(0, 1), time_steps=False)
    assert proof.peak_bytes == plan.predicted_peak_bytes
    assert proof.gradients is not None
    assert proof.gradients.bitwise_equal


@pytest.mark.parametrize(("share", "most"), [(0.5, 0.08), (0.67, 0.0)])
def test_half_of_the_memory_costs_at_most_8_percent_and_two_thirds_no_matrix_product(share: float, most: float) -> None:
    plan = _plan("optimal", target_kind="activation_budget_fraction", target_value=share)
    step = step_cost(_measured()[2], "flops")
    assert plan.predicted_cost is not None
    assert plan.predicted_cost / step <= most
    assert plan.optimality_gap == 0.0
    blocks_only = _plan("dp", target_kind="activation_budget_fraction", target_value=share)
    assert blocks_only.predicted_cost is not None
    assert blocks_only.predicted_cost / step > 0.09
    _require_proved(plan)


def test_nested_plans_reach_four_fifths_of_the_peak_of_recomputing_every_block() -> None:
    _, _, profile = _measured()
    every_block = simulate_plan(profile, CheckpointPlan.from_text(" ".join(f"R({i})" for i in range(12)), profile))
    least, _ = least_nested_peak(profile)
    assert least <= 0.8 * every_block.peak_bytes
    plan = _plan("optimal", target_kind="activation_budget_bytes", target_value=int(0.8 * every_block.peak_bytes))
    _require_proved(plan)
