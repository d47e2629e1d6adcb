"""1,000 blocks: exact in 2 s and 200 MiB whatever the byte sizes. What is proved is checked against HiGHS.

    python -m pytest tests/benchmarks/test_planner_speed.py -m "slow or not slow" --durations=0

Times are of this process on one core (process time, so that a busy machine does not fail the test).
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from ckptplan.costs import StageCost
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints, smallest_reachable
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import no_checkpoint_peak

MIB, GIB = 2**20, 2**30
NUM_BLOCKS = 1000
MOST_SECONDS, MOST_BYTES = 2.0, 200 * MIB


def _chain(total_gib: int, costs: str) -> ChainProfile:
    """1,000 blocks of together ``total_gib`` GiB, each keeping its input, a head after them.

    Costs: "random", "equal" (as are the bytes), or "proportional" to the bytes.
    """
    rng = random.Random(total_gib)
    weights = [1.0 if costs == "equal" else 0.2 + rng.random() for _ in range(NUM_BLOCKS)]
    unit = total_gib * GIB / sum(weights)
    blocks = []
    for i, weight in enumerate(weights):
        saved = int(weight * unit)
        transient = 2 * MIB + (saved // 4 if costs == "equal" else rng.randint(0, saved // 2))
        blocks.append(
            BlockProfile(
                f"layers.{i}",
                i,
                activation_bytes_estimate=saved,
                output_bytes=(2 * MIB,),
                output_gradient_bytes=2 * MIB,
                keep=StageCost(saved, saved + 2 * MIB, saved + transient),
                recompute=StageCost(0, saved, saved + transient + MIB),
                recompute_time_ms={"random": rng.randint(16, 160) / 32, "equal": 1.0, "proportional": saved / 2**24}[
                    costs
                ],
            )
        )
    return ChainProfile(tuple(blocks), post=RegionProfile("head", StageCost(50 * MIB, 300 * MIB, 900 * MIB)))


def _timed_plan(chain: ChainProfile, share: float, memory_model: Any) -> tuple[CheckpointPlan, float]:
    begin = time.process_time()
    plan = plan_checkpoints(
        chain, target_kind="activation_budget_fraction", target_value=share, memory_model=memory_model
    )
    return plan, time.process_time() - begin


def _least_cost(
    chain: ChainProfile, budget: int, memory_model: str, *, fractions: bool, num_constraints: int = 40
) -> float:
    """HiGHS, on the last stages' constraints only: a lower bound on the cost of any flat plan.

    ``fractions`` allows parts of blocks, a lower bound still: where cost is proportional to bytes HiGHS does not
    finish in whole blocks, while fractions and 1,000 whole ones can fill the budget equally well.
    """
    n = len(chain)
    if memory_model == "additive":
        saved = np.array([block.activation_bytes_estimate for block in chain], float)
        rows, limits = [-saved], [budget - saved.sum()]
    else:
        assert chain.post is not None
        keeps = [block.keep for block in chain if block.keep is not None]
        again = [block.recompute for block in chain if block.recompute is not None]
        saved = np.array([keep.saved_bytes for keep in keeps], float)
        # the input of block 0 is the batch; those of all later ones stay, and the head keeps the last output
        rows, limits = [-saved], [budget - saved.sum() - n * 2 * MIB - chain.post.cost.backward_peak_bytes]
        for i in range(n - num_constraints, n):
            row = np.where(np.arange(n) < i, -saved, 0.0)
            row[i] = again[i].backward_peak_bytes - keeps[i].backward_peak_bytes
            rows.append(row)
            limits.append(budget - saved[:i].sum() - i * 2 * MIB - keeps[i].backward_peak_bytes)
    best = milp(
        [block.recompute_time_ms for block in chain],
        constraints=LinearConstraint(np.array(rows) / MIB, ub=np.array(limits) / MIB),
        integrality=np.full(n, 0 if fractions else 1),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-9},
    )
    assert best.success
    return float(best.fun)


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
@pytest.mark.parametrize("costs", ["random", "equal", "proportional"])
@pytest.mark.parametrize("total_gib", [20, pytest.param(70, marks=pytest.mark.slow)])
def test_1000_blocks_are_planned_exactly_in_two_seconds(total_gib: int, costs: str, memory_model: str) -> None:
    chain = _chain(total_gib, costs)
    plan, seconds = _timed_plan(chain, 0.5, memory_model)
    assert plan.optimality_gap == 0.0
    assert plan.feasible
    assert 0 < plan.recomputed < NUM_BLOCKS
    assert plan.predicted_cost is not None
    assert plan.budget_bytes is not None
    assert seconds < MOST_SECONDS
    least = _least_cost(chain, plan.budget_bytes, memory_model, fractions=costs == "proportional")
    assert plan.predicted_cost == pytest.approx(least, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("memory_model", ["peak", "additive"])
@pytest.mark.parametrize("costs", ["random", "equal", "proportional"])
@pytest.mark.parametrize("total_gib", [20, 70])
def test_so_at_every_budget(total_gib: int, costs: str, memory_model: str) -> None:
    chain = _chain(total_gib, costs)
    for share in (0.9, 0.7, 0.3, 0.15):
        plan, seconds = _timed_plan(chain, share, memory_model)
        assert (plan.optimality_gap, seconds < MOST_SECONDS) == (0.0, True), (share, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("costs", ["random", "equal", "proportional"])
def test_1000_blocks_are_planned_in_200_mib(costs: str) -> None:
    chain = _chain(20, costs)
    tracemalloc.start()
    try:
        plan_checkpoints(chain, target_kind="activation_budget_fraction", target_value=0.5)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MOST_BYTES


def test_c11_200_equal_blocks_at_20_budgets() -> None:
    """The case allows 10 s and 200 MiB for each."""
    block = _chain(20, "equal")[0]
    chain = ChainProfile(tuple(BlockProfile(f"b{i}", **_figures(block)) for i in range(200)))
    none, (least, _) = no_checkpoint_peak(chain), smallest_reachable(chain)
    plans = [_timed_plan(chain, (least + (none - least) * k // 20) / none, "peak") for k in range(20, 0, -1)]
    assert max(seconds for _, seconds in plans) < 1
    counts = [plan.recomputed for plan, _ in plans]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert not any(plan.decisions[-1].checkpointed for plan, _ in plans)


def _figures(block: BlockProfile) -> dict[str, Any]:
    names = ("activation_bytes_estimate", "output_bytes", "output_gradient_bytes", "keep", "recompute")
    return {name: getattr(block, name) for name in names}
