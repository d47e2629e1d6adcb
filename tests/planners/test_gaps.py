"""Chains in which the model itself runs something between blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckptplan.check import check_plan
from ckptplan.curve import plan_curve
from ckptplan.errors import PlanIncompatibleError
from ckptplan.gaps import contracted, expanded, expanded_nodes
from ckptplan.nodes import parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_nested_peak, plan_checkpoints, smallest_reachable
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from tests.planners.conftest import flat_peak, with_gaps

Make = Callable[..., ChainProfile]
Oracle = Callable[..., list[Any]]


@pytest.mark.parametrize("planner", ["dp", "ilp", "greedy", "uniform"])
def test_flat_planners_count_what_runs_between_blocks_as_brute_force_does(
    make_random: Make, oracle: Oracle, planner: str
) -> None:
    for seed in range(6 if planner == "ilp" else 20):
        chain = with_gaps(make_random(seed, most_blocks=8))
        plans = oracle(chain, "peak")
        for budget in sorted({plan[2] for plan in plans})[:: max(1, len(plans) // 4)]:
            plan = plan_checkpoints(
                chain,
                target_kind="activation_budget_bytes",
                target_value=budget,
                planner=planner,
                on_infeasible="best_effort",
            )
            choice = tuple(decision.checkpointed for decision in plan.decisions)
            assert plan.predicted_peak_bytes == flat_peak(chain, choice)
            if planner in ("dp", "ilp"):
                best = next(found for found in plans if found[2] <= budget)
                assert plan.predicted_cost == pytest.approx(best[0])
                assert plan.optimality_gap == 0.0
            if planner != "uniform":
                assert plan.feasible


def test_the_optimal_planner_nests_beside_gaps_and_is_no_dearer_than_flat(make_random: Make, oracle: Oracle) -> None:
    for seed in range(8):
        chain = with_gaps(make_random(seed, most_blocks=8))
        plans = oracle(chain, "peak")
        budget = plans[len(plans) // 2][2]
        best = next(found for found in plans if found[2] <= budget)
        plan = plan_checkpoints(
            chain, target_kind="activation_budget_bytes", target_value=budget, planner="optimal"
        )  # the referee has checked its bytes
        assert plan.predicted_cost is not None
        assert plan.predicted_cost <= best[0] + 1e-9
        assert least_nested_peak(chain)[0] <= smallest_reachable(chain)[0] == min(found[2] for found in plans)


def test_the_curve_is_of_plans_over_the_blocks(make_random: Make) -> None:
    chain = with_gaps(make_random(3, most_blocks=7))
    for point in plan_curve(chain).points:
        assert simulate_plan(chain, parse_plan_text(point.plan)).peak_bytes == point.peak_bytes


def test_simulator_and_referee_agree_about_every_flat_plan(make_random: Make, oracle: Oracle) -> None:
    chain = with_gaps(make_random(5, most_blocks=7))
    for cost, _, peak, choice in oracle(chain, "peak"):
        text = " ".join(f"R({i})" if again else f"K{i}" for i, again in enumerate(choice))
        plan = dataclasses.replace(
            CheckpointPlan.from_text(text, chain),
            predicted_peak_bytes=simulate_plan(chain, parse_plan_text(text)).peak_bytes,
            predicted_cost=cost,
        )
        check_plan(chain, plan)
        assert plan.predicted_peak_bytes == peak
        assert len(simulate_plan(chain, plan).retained_bytes) == len(chain)


def test_a_segment_cannot_go_over_what_runs_between_its_blocks(make_equal: Make) -> None:
    chain = with_gaps(make_equal(4, 100, boundary=10))
    assert [block.block_id for block in chain] == ["b0", "b2", "b3"]
    with pytest.raises(PlanIncompatibleError, match="goes over what the model runs between b0 and b2"):
        CheckpointPlan.from_text("R(0 1) K2", chain)
    plan = CheckpointPlan.from_text("R(0 1) K2", chain.block_ids)  # ids alone do not say what runs between them
    with pytest.raises(PlanIncompatibleError, match="between b0 and b2"):
        simulate_plan(chain, plan)
    with pytest.raises(PlanIncompatibleError, match="goes over what the model runs between b0 and b2"):
        check_plan(chain, plan)
    assert simulate_plan(chain, CheckpointPlan.from_text("K0 R(1 2)", chain)).peak_bytes < no_checkpoint_peak(chain)


def test_a_plan_over_all_stages_and_one_over_blocks_are_two_forms_of_one(make_equal: Make) -> None:
    chain = with_gaps(make_equal(7, 100))
    nodes = parse_plan_text("K0 R(1 2) R(3 R(4)) ")[:3]
    assert len(expanded(chain)) == 7
    assert len(expanded_nodes(chain, nodes)) == 5
    assert contracted(chain, expanded_nodes(chain, nodes)) == nodes


def test_profiles_with_gaps_are_stored_and_read_back(make_random: Make) -> None:
    chain = with_gaps(make_random(1))
    assert ChainProfile.from_json(chain.to_json()) == chain
    assert len(chain.regions) == sum(block.before is not None for block in chain) + (chain.pre is not None) + (
        chain.post is not None
    )
    with pytest.raises(ValueError, match="is the first"):
        ChainProfile(tuple(block for block in chain if block.before is not None))
