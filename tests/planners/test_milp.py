"""The planner ``ilp``: HiGHS says the same as the dynamic programme, and both as brute force."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.planners import plan_checkpoints, smallest_reachable
from ckptplan.planners.flat import cheapest_choice
from ckptplan.planners.milp import cheapest_flat_plan
from ckptplan.planners.options import flat_peak, option_chain
from ckptplan.planners.tables import FlatTables
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import no_checkpoint_peak
from tests.planners import trees

Make = Callable[..., ChainProfile]


def _plan(chain: Any, budget: int, **options: Any) -> Any:
    return plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget, planner="ilp", **options)


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
@pytest.mark.parametrize("batch", range(2))
def test_it_equals_the_dynamic_programme_on_200_instances(make_random: Make, memory_model: Any, batch: int) -> None:
    """25 chains a batch, plain and wild in turn, each at the least peak and one budget above it: 200 in all."""
    for seed in range(25 * batch, 25 * (batch + 1)):
        chain = make_random(seed, plain=seed % 2 == 0)
        tables = FlatTables(chain, memory_model, "time")
        least = smallest_reachable(chain, memory_model)[0]
        none = no_checkpoint_peak(chain, memory_model)
        for budget in (least, least + (none - least) * (1 + seed % 4) // 5):
            choice, _ = cheapest_choice(tables, budget)
            plan = _plan(chain, budget, memory_model=memory_model)
            assert plan.predicted_cost == pytest.approx(tables.total_work(choice), abs=1e-9), (seed, budget)
            assert plan.optimality_gap == 0.0


def test_more_options_equal_brute_force(make_random: Make) -> None:
    for seed in range(8):
        chain = trees.uneven(make_random(seed, most_blocks=4, plain=seed % 2 == 0), 2 * seed)
        options, _ = trees.five_options(option_chain(chain, "time"), seed)
        plans = []
        for choice in itertools.product(*(range(len(block.options)) for block in options.blocks)):
            value = sum(block.options[way].value for block, way in zip(options.blocks, choice, strict=True))
            plans.append((value // options.runs_scale, flat_peak(options, choice)))
        peaks = sorted({peak for _, peak in plans})
        for budget in random.Random(seed).sample(peaks, min(6, len(peaks))):
            found = cheapest_flat_plan(options, budget, (), 60.0)
            best = min(cost for cost, peak in plans if peak <= budget)
            assert options.value_of(found.nodes) // options.runs_scale == pytest.approx(best, rel=1e-9)
            assert found.optimality_gap == 0.0


def test_a_plan_that_is_one_byte_too_large_is_not_taken(make_equal: Make) -> None:
    """HiGHS cannot tell a byte in 10 GB; the plan must keep to it all the same."""
    size = 10**9
    blocks = [
        replace(block, block_id=f"b{i}", activation_bytes_estimate=size + i, recompute_time_ms=1.0 + i / 64)
        for i, block in enumerate(make_equal(10, size))
    ]
    chain = ChainProfile(tuple(blocks))
    kept = 10 * size + 45 - (size + 7)  # all but block 7; to recompute block 0 is cheapest, and 7 bytes too little
    plan = _plan(chain, kept, memory_model="additive")
    assert [i for i, d in enumerate(plan.decisions) if d.checkpointed] == [7]
    assert plan.predicted_peak_bytes == kept
    assert plan.optimality_gap == 0.0


def test_no_time_leaves_the_plan_of_least_peak_and_an_honest_gap(make_random: Make) -> None:
    chain = make_random(8, plain=True)
    budget = no_checkpoint_peak(chain) * 3 // 4
    best = _plan(chain, budget)
    hurried = _plan(chain, budget, time_limit_s=0.0)
    assert hurried.feasible
    assert hurried.predicted_cost * (1 - hurried.optimality_gap) <= best.predicted_cost * (1 + 1e-9)


def test_without_scipy_it_says_what_to_install(make_equal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match=r"planner 'ilp' needs scipy.*\[solvers\].*planner 'dp'"):
        _plan(make_equal(3, 100), 350)
