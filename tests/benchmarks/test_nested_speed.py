"""Nested plans: 48 uneven blocks in 10 s, with five options each too; 100 repeating blocks in 5 s; both proved.

    python -m pytest tests/benchmarks/test_nested_speed.py -m "slow or not slow" --durations=0

Times are of this process on one core (process time, so that a busy machine does not fail the test).
"""

from __future__ import annotations

import random
import time

import pytest

from ckptplan.costs import StageCost
from ckptplan.planners import plan_checkpoints, smallest_reachable
from ckptplan.planners.nested import cheapest_plan, least_peak_plan
from ckptplan.planners.options import option_chain
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from tests.planners import trees

MIB = 2**20
HEAD = RegionProfile("head", StageCost(10 * MIB, 26 * MIB, 26 * MIB))


def _uneven(count: int, boundary_mib: float) -> ChainProfile:
    """Blocks that keep 4 to 32 MiB, no two alike."""
    rng = random.Random(count)
    blocks = []
    for i in range(count):
        saved = int(4 * MIB * 8 ** rng.random())
        boundary = int(MIB * boundary_mib * (0.5 + rng.random()))
        forward_ms = round(rng.uniform(2, 10), 3)
        blocks.append(
            BlockProfile(
                f"layers.{i}",
                i,
                output_bytes=(boundary,),
                output_gradient_bytes=boundary,
                keep=StageCost(saved, saved + boundary // 2, saved + boundary + rng.randint(0, 4 * MIB)),
                recompute=StageCost(0, int(saved * 0.7) + boundary, saved + boundary + rng.randint(4 * MIB, 8 * MIB)),
                forward_time_ms=forward_ms,
                recompute_time_ms=round(forward_ms * 0.7, 3),
            )
        )
    return ChainProfile(tuple(blocks), post=HEAD)


def _repeating(count: int, kinds: int) -> ChainProfile:
    """A GPT's figures (12 blocks of 256 wide, sequence 256, batch 8); ``kinds`` of them in turn."""
    blocks = [
        BlockProfile(
            f"layers.{i}",
            i,
            output_bytes=(2 * MIB,),
            output_gradient_bytes=2 * MIB,
            keep=StageCost((30 + 3 * (i % kinds)) * MIB + 90_000, 34 * MIB, 39 * MIB),
            recompute=StageCost(0, 26 * MIB, 39 * MIB),
            forward_time_ms=5.0 + i % kinds,
            recompute_time_ms=3.4 + 0.6 * (i % kinds),
        )
        for i in range(count)
    ]
    return ChainProfile(tuple(blocks), post=HEAD)


def _budgets(chain: ChainProfile) -> list[int]:
    """The least nested peak, some between it and the least flat one, that one, and some above."""
    none, flat = no_checkpoint_peak(chain), smallest_reachable(chain)[0]
    least = simulate_plan(chain, least_peak_plan(option_chain(chain, "time"))).peak_bytes
    between = [least + (flat - least) * k // 4 for k in range(5)]
    return sorted({*between, *(flat + (none - flat) * k // 4 for k in range(1, 4))})


def _solve_within(chain: ChainProfile, budgets: list[int], most_seconds: float) -> None:
    for budget in budgets:
        begin = time.process_time()
        plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget, planner="optimal")
        seconds = time.process_time() - begin
        assert plan.optimality_gap == 0.0, budget
        assert seconds < most_seconds, (budget, seconds)


@pytest.mark.parametrize("kinds", [1, 4])
def test_100_repeating_blocks_nested_in_5_s(kinds: int) -> None:
    chain = _repeating(100, kinds)
    _solve_within(chain, _budgets(chain)[1:6:2], 5)


@pytest.mark.parametrize("boundary_mib", [0.2, 2.0])
def test_48_uneven_blocks_nested_in_10_s(boundary_mib: float) -> None:
    chain = _uneven(48, boundary_mib)
    _solve_within(chain, _budgets(chain)[::3], 10)


def test_48_uneven_blocks_with_five_options_each_in_10_s() -> None:
    chain = _uneven(48, 2.0)
    options, _ = trees.five_options(option_chain(chain, "time"), 1)
    for budget in _budgets(chain)[1::2]:
        begin = time.process_time()
        found = cheapest_plan(options, budget, None)
        assert time.process_time() - begin < 10
        assert found.optimality_gap is not None
        assert found.optimality_gap < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_so_at_every_budget_of_repeating_blocks(kinds: int) -> None:
    chain = _repeating(100, kinds)
    _solve_within(chain, _budgets(chain), 5)


@pytest.mark.slow
@pytest.mark.parametrize("boundary_mib", [0.2, 2.0, 8.0])
def test_so_at_every_budget_of_uneven_blocks(boundary_mib: float) -> None:
    chain = _uneven(48, boundary_mib)
    _solve_within(chain, _budgets(chain), 10)
