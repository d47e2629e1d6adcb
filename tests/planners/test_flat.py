"""The dynamic programme against brute force, HiGHS and its own bounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from ckptplan.costs import StageCost
from ckptplan.planners import plan_checkpoints
from ckptplan.planners.flat import cheapest_choice, scaled_values
from ckptplan.planners.tables import FlatTables
from ckptplan.profiles import BlockProfile, ChainProfile

Make = Callable[..., ChainProfile]
Oracle = Callable[[ChainProfile, str], list[tuple[float, int, int, tuple[bool, ...]]]]


def _budgets(plans: list[Any], rng: random.Random) -> list[int]:
    """The least peak, the largest, and some that fall exactly on or one byte below the peak of a plan."""
    peaks = sorted({plan[2] for plan in plans})
    chosen = rng.sample(peaks, min(4, len(peaks)))
    return sorted({peaks[0], peaks[-1], *chosen, *(peak - 1 for peak in chosen if peak > peaks[0])})


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
@pytest.mark.parametrize("batch", range(4))
def test_it_equals_brute_force_on_200_seeded_chains(
    make_random: Make, oracle: Oracle, memory_model: Any, batch: int
) -> None:
    """P3. Least cost; of those the fewest recomputed blocks; of those the lowest peak. Plain and wild in turn."""
    for seed in range(50 * batch, 50 * (batch + 1)):
        chain = make_random(seed, most_blocks=10 if seed % 2 == 0 else 7, plain=seed % 2 == 0)
        plans = oracle(chain, memory_model)
        tables = FlatTables(chain, memory_model, "time")
        for budget in _budgets(plans, random.Random(seed)):
            best = next(plan for plan in plans if plan[2] <= budget)
            choice, gap = cheapest_choice(tables, budget)
            assert (tables.total_work(choice), int(choice.sum()), tables.peak(choice)) == best[:3], (seed, budget)
            assert gap == 0.0


def test_a_plan_reports_what_the_oracle_says_of_it(make_random: Make, oracle: Oracle) -> None:
    for seed in range(10):
        chain = make_random(seed, most_blocks=6)
        plans = oracle(chain, "peak")
        budget = plans[len(plans) // 2][2]
        plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget)
        by_choice = {choice: (cost, peak) for cost, _, peak, choice in plans}
        choice = tuple(decision.checkpointed for decision in plan.decisions)
        assert (plan.predicted_cost, plan.predicted_peak_bytes) == by_choice[choice]
        assert plan.no_checkpoint_peak_bytes == by_choice[(False,) * len(chain)][1]
        assert plan.feasible
        assert plan.optimality_gap == 0.0


def test_an_ample_budget_gives_the_empty_plan_even_where_recomputing_is_free(make_equal: Make) -> None:
    """B34."""
    chain = make_equal(6, 100, cost=0.0)
    plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=10**6)
    assert plan.text == "K0 K1 K2 K3 K4 K5"


def test_equal_costs_go_to_the_fewest_blocks_then_to_the_lowest_peak() -> None:
    sizes = [4, 4, 8, 6]
    costs = [1.0, 1.0, 2.0, 2.0]
    blocks = [
        BlockProfile(f"b{i}", activation_bytes_estimate=s, recompute_time_ms=c)
        for i, (s, c) in enumerate(zip(sizes, costs, strict=True))
    ]
    plan = plan_checkpoints(blocks, target_kind="activation_budget_bytes", target_value=16, memory_model="additive")
    assert plan.text == "K0 K1 R(2) K3"  # not R(0) R(1), as dear; not R(3), as dear and heavier


def test_costs_that_are_equal_as_decimals_are_equal() -> None:
    """0.1 + 0.2 is not 0.3 in binary; a plan of one block must still win over one of two."""
    blocks = [
        BlockProfile(f"b{i}", activation_bytes_estimate=s, recompute_time_ms=c)
        for i, (s, c) in enumerate([(1, 0.1), (2, 0.2), (3, 0.3)])
    ]
    values = scaled_values(FlatTables(blocks, "additive", "time"))
    assert values[0] + values[1] == values[2] + 1
    plan = plan_checkpoints(blocks, target_kind="activation_budget_bytes", target_value=3, memory_model="additive")
    assert plan.recomputed == 1


def test_flops_are_compared_exactly() -> None:
    big = 10**15
    blocks = [
        BlockProfile(f"b{i}", activation_bytes_estimate=1, recompute_flops=big + extra)
        for i, extra in enumerate((1, 0, 2))
    ]
    plan = plan_checkpoints(
        blocks, target_kind="activation_budget_bytes", target_value=2, memory_model="additive", cost="flops"
    )
    assert plan.text == "K0 R(1) K2"
    assert plan.predicted_cost == big


@pytest.mark.parametrize("seed", range(12))
def test_it_equals_highs_on_additive_chains_of_30_blocks(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 12 * 2**20) for _ in range(30)]
    costs = [rng.randint(16, 160) / 32 for _ in range(30)]
    budget = sum(sizes) * rng.randint(1, 9) // 10
    blocks = [
        BlockProfile(f"b{i}", activation_bytes_estimate=s, recompute_time_ms=c)
        for i, (s, c) in enumerate(zip(sizes, costs, strict=True))
    ]
    plan = plan_checkpoints(blocks, target_kind="activation_budget_bytes", target_value=budget, memory_model="additive")
    best = milp(
        costs,
        constraints=LinearConstraint(np.array([sizes]), lb=sum(sizes) - budget),
        integrality=np.ones(30),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert best.success
    assert plan.predicted_cost == pytest.approx(best.fun, rel=1e-12)
    assert plan.optimality_gap == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_highs_on_the_peak_of_chains_of_30_blocks(seed: int) -> None:
    """Every block keeps its input, so each stage's peak is linear in the choice."""
    rng = random.Random(seed)
    n = 30
    saved = [rng.randint(1, 12 * 2**20) for _ in range(n)]
    boundary = [rng.randint(1, 2**20) for _ in range(n)]
    more = [(rng.randint(0, 2**22), rng.randint(0, 2**22)) for _ in range(n)]
    costs = [rng.randint(16, 160) / 32 for _ in range(n)]
    chain = ChainProfile(
        tuple(
            BlockProfile(
                f"b{i}",
                output_bytes=(boundary[i],),
                output_gradient_bytes=boundary[i],
                keep=StageCost(saved[i], saved[i], saved[i] + more[i][0]),
                recompute=StageCost(0, 0, saved[i] + sum(more[i])),
                recompute_time_ms=costs[i],
            )
            for i in range(n)
        )
    )
    held = [sum(boundary[: i + 1]) for i in range(n)]  # inputs of blocks 1 .. i+1
    rows, limits = [], []
    for i in range(n):
        row = np.zeros(n)
        row[:i] = [-s for s in saved[:i]]
        row[i] = more[i][1]
        rows.append(row)
        limits.append(-(sum(saved[:i]) + (held[i - 1] if i else 0) + saved[i] + more[i][0]))
    rows.append(-np.array(saved, float))
    limits.append(-(sum(saved) + held[n - 1]))  # the output beside what is retained; its gradient replaces it
    none = -min(limits)
    budget = none * (3 + seed) // 10
    best = milp(
        costs,
        constraints=LinearConstraint(np.array(rows), ub=np.array(limits) + budget),
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert best.success
    plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget)
    assert plan.no_checkpoint_peak_bytes == none
    assert plan.predicted_cost == pytest.approx(best.fun, rel=1e-12)


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
def test_a_search_that_is_cut_short_reports_a_gap_that_holds(
    make_random: Make, oracle: Oracle, memory_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptplan.planners.flat.LABEL_CAPS", (1,))
    monkeypatch.setattr("ckptplan.planners.flat.exchanged", lambda problem, choice, good_enough: choice)
    gaps = []
    for seed in range(0, 60, 2):
        chain = make_random(seed, plain=True)
        plans = oracle(chain, memory_model)
        tables = FlatTables(chain, memory_model, "time")
        for budget in _budgets(plans, random.Random(seed)):
            best = next(plan for plan in plans if plan[2] <= budget)
            choice, gap = cheapest_choice(tables, budget)
            assert tables.peak(choice) <= budget
            found = tables.total_work(choice)
            assert found >= best[0]
            if found > best[0]:
                assert gap >= (found - best[0]) / found * (1 - 1e-9)
                gaps.append(gap)
    assert gaps, "the cut never cost anything, so this test shows nothing"


def test_hard_knapsacks_get_an_honest_gap() -> None:
    """Cost = size + a constant is the classic hard case; whatever is proved has to hold against HiGHS."""
    rng = random.Random(5)
    sizes = [rng.randint(10**6, 10**7) for _ in range(60)]
    costs = [s / 2**20 + 2.0 for s in sizes]
    budget = sum(sizes) // 3
    blocks = [
        BlockProfile(f"b{i}", activation_bytes_estimate=s, recompute_time_ms=c)
        for i, (s, c) in enumerate(zip(sizes, costs, strict=True))
    ]
    plan = plan_checkpoints(blocks, target_kind="activation_budget_bytes", target_value=budget, memory_model="additive")
    best = milp(
        costs,
        constraints=LinearConstraint(np.array([sizes]), lb=sum(sizes) - budget),
        integrality=np.ones(60),
        bounds=Bounds(0, 1),
        options={"time_limit": 5},
    )
    assert plan.predicted_cost is not None
    assert plan.optimality_gap is not None
    assert plan.predicted_cost * (1 - plan.optimality_gap) <= best.fun * (1 + 1e-9)
    assert plan.optimality_gap < 0.01
