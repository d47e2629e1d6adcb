"""The planner ``optimal`` against brute force over all recursive plans, the flat planner, and known schedules."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.check import check_plan
from ckptplan.costs import StageCost
from ckptplan.errors import InfeasibleTargetError
from ckptplan.nodes import parse_plan_text
from ckptplan.planners import plan_checkpoints
from ckptplan.planners.nested import cheapest_plan, least_peak_plan, longest
from ckptplan.planners.options import option_chain
from ckptplan.planners.stretches import Stretches
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from tests.planners import trees

Make = Callable[..., ChainProfile]


def _plan(chain: Any, budget: int, planner: str = "optimal", **options: Any) -> Any:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options
    )


def _judged(chain: ChainProfile) -> list[tuple[float, int, tuple[trees.Tree, ...]]]:
    """(cost, peak, plan) of every recursive plan that can be run, cheapest first."""
    plans = []
    for forest in trees.all_forests(0, len(chain)):
        peak = trees.peak(chain, forest)
        if peak is not None:
            plans.append((trees.cost(chain, forest), peak, forest))
    return sorted(plans, key=lambda plan: plan[:2])


def test_the_number_of_recursive_plans_is_known() -> None:
    """One block: K, R. Two: 4 of single blocks and a segment over each of them. 8, 48, 352."""
    assert [sum(1 for _ in trees.all_forests(0, count)) for count in (1, 2, 3, 4)] == [2, 8, 48, 352]
    assert len({trees.text(forest) for forest in trees.all_forests(0, 4)}) == 352


def test_the_judge_of_these_tests_agrees_with_the_simulator(make_random: Make) -> None:
    for seed in range(12):
        chain = trees.uneven(make_random(seed, most_blocks=4), seed)
        for cost, peak, forest in _judged(chain):
            simulated = simulate_plan(chain, parse_plan_text(trees.text(forest)))
            assert (simulated.peak_bytes, simulated.recompute_time_ms) == (peak, pytest.approx(cost)), (seed, forest)


@pytest.mark.parametrize("batch", range(4))
def test_it_equals_brute_force_over_all_recursive_plans(make_random: Make, batch: int) -> None:
    """Least cost at every peak that any plan has and one byte below; infeasible exactly where no plan fits."""
    for seed in range(12 * batch, 12 * (batch + 1)):
        chain = make_random(seed, most_blocks=5 if seed % 12 == 0 else 4, plain=seed % 3 == 0)
        chain = trees.uneven(chain, seed)
        plans = _judged(chain)
        peaks = sorted({peak for _, peak, _ in plans})
        for budget in [peaks[0], *random.Random(seed).sample(peaks, min(8, len(peaks)))]:
            for limit in (budget, budget - 1):
                if limit < peaks[0]:
                    with pytest.raises(InfeasibleTargetError) as caught:
                        _plan(chain, limit)
                    assert caught.value.smallest_reachable_bytes == peaks[0]
                    with pytest.raises(InfeasibleTargetError) as caught:
                        _plan(chain, limit, "greedy")
                    assert caught.value.smallest_reachable_any_bytes == peaks[0]
                    continue
                best = next(cost for cost, peak, _ in plans if peak <= limit)
                plan = _plan(chain, limit)
                assert plan.predicted_cost == pytest.approx(best, abs=1e-9), (seed, limit)
                assert plan.optimality_gap == 0.0


def test_its_own_figures_are_the_simulators_to_the_byte(make_random: Make) -> None:
    """Every corner of the whole trade-off is a plan of exactly that peak and cost."""
    for seed in range(16):
        chain = trees.uneven(make_random(seed, most_blocks=7, plain=seed % 3 == 0), seed)
        options = option_chain(chain, "time")
        stretches = Stretches(options, 2**60, slack=2**61)
        whole = stretches.whole()
        for need, value in zip(whole.need, whole.value, strict=True):
            nodes = stretches.nodes(int(need))
            simulated = simulate_plan(chain, nodes)
            assert (simulated.peak_bytes, options.value_of(nodes)) == (need, value)
            assert simulated.recompute_time_ms == pytest.approx(options.cost_of(int(value)), abs=1e-9)


def test_it_is_never_worse_than_the_flat_planner(make_random: Make) -> None:
    cheaper = 0
    for seed in range(20):
        chain = trees.uneven(make_random(seed, plain=True), 2 * seed)
        none = no_checkpoint_peak(chain)
        for share in (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2):
            optimal = _plan(chain, int(none * share), on_infeasible="best_effort")
            flat = _plan(chain, int(none * share), "dp", on_infeasible="best_effort")
            check_plan(chain, optimal)
            if flat.feasible:
                assert optimal.feasible
                assert optimal.predicted_cost <= flat.predicted_cost
                cheaper += optimal.predicted_cost < flat.predicted_cost
            assert optimal.predicted_peak_bytes <= max(flat.predicted_peak_bytes, int(none * share))
    assert cheaper, "no segment ever paid, so this test shows nothing"


def test_where_the_flat_plan_is_proved_it_is_the_plan(make_equal: Make) -> None:
    """Boundaries of no bytes: segments can save nothing."""
    chain = make_equal(8, 100, forward_time_ms=2.0)
    for budget in (800, 650, 400, 300):
        assert _plan(chain, budget).nodes == _plan(chain, budget, "dp").nodes


def test_the_additive_model_has_nothing_to_nest(make_random: Make) -> None:
    chain = make_random(5)
    for share in (0.8, 0.5):
        plans = [
            plan_checkpoints(
                chain,
                target_kind="activation_budget_fraction",
                target_value=share,
                planner=planner,
                memory_model="additive",
                on_infeasible="best_effort",
            )
            for planner in ("optimal", "dp")
        ]
        assert plans[0].nodes == plans[1].nodes


# Known schedules -----------------------------------------------------------------------------------------------------


def _steps(count: int, unit: int = 100) -> ChainProfile:
    """Steps of time integration: a step costs 1 each time it runs, and only inputs of steps can be stored.

    What a step itself keeps takes one byte in its backward; keeping it until then is made too dear to be an option.
    """
    bare = StageCost(0, 0, 1)
    dear = StageCost(10**6, 10**6, 10**6)
    return ChainProfile(
        tuple(
            BlockProfile(
                f"s{i}",
                i,
                output_bytes=(unit if i < count - 1 else 0,),
                output_gradient_bytes=0,
                keep=dear,
                recompute=bare,
                forward_time_ms=1.0,
                recompute_time_ms=1.0,
            )
            for i in range(count)
        )
    )


def _fewest_advances(steps: int, slots: int) -> int:
    """Griewank and Walther, Algorithm 799: steps run ahead of the reversals, with ``slots`` stored inputs.

    r * steps - C(slots + r, r - 1), where r is the least with steps <= C(slots + r, slots).
    """
    repeats = next(r for r in itertools.count(1) if steps <= math.comb(slots + r, slots))
    return repeats * steps - math.comb(slots + repeats, repeats - 1)


def test_the_formula_gives_the_published_example() -> None:
    """Ten steps in three slots: 15."""
    assert [_fewest_advances(10, slots) for slots in (1, 2, 3, 9)] == [45, 20, 15, 9]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_uniform_steps_get_binomial_schedules(slots: int) -> None:
    """Advances less the first sweep, which is the forward pass itself, and each step once more for its backward.

    The first input stands outside; one more is the state at hand.
    """
    for steps in range(2, 15):
        plan = _plan(_steps(steps), slots * 100 + 1)
        assert plan.predicted_cost == _fewest_advances(steps, slots) - (steps - 1) + steps, steps
        assert plan.optimality_gap == 0.0


@pytest.mark.parametrize(
    ("steps", "slots", "text"),
    [
        (4, 1, "R(R(R(0) R(1)) R(2)) R(3)"),
        (5, 4, "R(0) R(1) R(2) R(3) R(4)"),
        (6, 2, "R(R(0) R(1) R(2)) R(R(3) R(4)) R(5)"),
        (10, 3, "R(R(0) R(1) R(2) R(3)) R(R(4) R(5) R(6)) R(R(7) R(8)) R(9)"),
    ],
)
def test_schedules_as_text(steps: int, slots: int, text: str) -> None:
    assert _plan(_steps(steps), slots * 100 + 1).text == text


# Scale and bounds ----------------------------------------------------------------------------------------------------


def test_more_options_are_used_and_equal_brute_force(make_random: Make) -> None:
    """Flat plans of five options a block, judged tensor by tensor: each option as if it were the block's keep."""
    for seed in range(6):
        chain = trees.uneven(make_random(seed, most_blocks=4, plain=True), 2 * seed)
        options, figures = trees.five_options(option_chain(chain, "time"), seed)
        ways = [range(len(block.options)) for block in options.blocks]
        plans = []
        for choice in itertools.product(*ways):
            blocks = [
                replace(b, keep=figures[i, way - 2]) if way >= 2 else b
                for i, (b, way) in enumerate(zip(chain, choice, strict=True))
            ]
            forest = tuple((i,) if way == 1 else i for i, way in enumerate(choice))
            value = sum(block.options[way].value for block, way in zip(options.blocks, choice, strict=True))
            plans.append((value, trees.peak(replace(chain, blocks=tuple(blocks)), forest)))
        peaks = sorted({peak for _, peak in plans if peak is not None})
        for budget in peaks[:: max(1, len(peaks) // 10)]:
            best = min(value for value, peak in plans if peak is not None and peak <= budget)
            flat = cheapest_plan(options, budget, None, most_blocks=1)
            assert options.value_of(flat.nodes) == best
            found = cheapest_plan(options, budget, None)
            assert options.value_of(found.nodes) <= best  # segments may do better still
            assert (found.optimality_gap, flat.optimality_gap) == (0.0, 0.0)


def test_a_coarse_search_tells_a_gap_that_holds(make_random: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []
    for seed in range(0, 24, 2):
        chain = trees.uneven(make_random(seed, most_blocks=9, plain=True), seed)
        least = simulate_plan(chain, least_peak_plan(option_chain(chain, "time"))).peak_bytes
        none = no_checkpoint_peak(chain)
        for share in (0.1, 0.3, 0.5):
            budget = int(least + share * (none - least))
            best = _plan(chain, budget)
            assert best.optimality_gap == 0.0
            monkeypatch.setattr("ckptplan.planners.nested.GRAINS", (2,))
            found = _plan(chain, budget)
            monkeypatch.undo()
            assert found.predicted_cost >= best.predicted_cost
            if found.predicted_cost > best.predicted_cost:
                shortfall = (found.predicted_cost - best.predicted_cost) / found.predicted_cost
                assert found.optimality_gap >= shortfall * (1 - 1e-9)
                gaps.append(found.optimality_gap)
    assert gaps, "the cut never cost anything, so this test shows nothing"


def test_a_search_that_grows_too_large_ends_with_what_it_has(
    make_random: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = trees.uneven(make_random(4, most_blocks=9, plain=True), 4)
    least = simulate_plan(chain, least_peak_plan(option_chain(chain, "time"))).peak_bytes
    budget = (4 * least + no_checkpoint_peak(chain)) // 5
    exact = _plan(chain, budget)
    for most, grains in itertools.product((10, 1000), ((0, 8), (0, 2, 4, 8))):
        monkeypatch.setattr("ckptplan.planners.nested.MOST_CORNERS", most)
        monkeypatch.setattr("ckptplan.planners.nested.GRAINS", grains)
        cut = _plan(chain, budget)
        assert cut.feasible
        assert cut.predicted_cost * (1 - cut.optimality_gap) <= exact.predicted_cost <= cut.predicted_cost


def test_segments_of_limited_length_tell_a_gap_that_holds(make_random: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dearer = 0
    for seed in range(1, 24, 2):
        chain = trees.uneven(make_random(seed, most_blocks=9, plain=True), 2 * seed)
        budget = int(0.45 * no_checkpoint_peak(chain))
        best = _plan(chain, budget, on_infeasible="best_effort")
        monkeypatch.setattr("ckptplan.planners.nested.MOST_WAYS", 3 * len(chain))
        assert longest(option_chain(chain, "time")) < len(chain)
        found = _plan(chain, budget, on_infeasible="best_effort")
        monkeypatch.undo()
        if best.feasible and found.feasible and found.predicted_cost > best.predicted_cost:
            dearer += 1
            assert found.optimality_gap >= 1 - best.predicted_cost / found.predicted_cost - 1e-9
    assert dearer, "long segments never paid, so this test shows nothing"


def test_equal_blocks_share_their_staircases() -> None:
    chain = option_chain(_steps(41), "time")
    stretches = Stretches(chain, 2**40, slack=2**61)
    stretches.whole()
    assert longest(chain) == 41
    assert len(stretches._segments) == 39 + 40  # one per length; those with the last block are different


def test_flops_are_added_exactly() -> None:
    chain = ChainProfile(
        tuple(
            replace(block, forward_flops=10**15 + i, recompute_flops=10**15 + 2 * i)
            for i, block in enumerate(_steps(6))
        )
    )
    plan = _plan(chain, 201, cost="flops")
    assert type(plan.predicted_cost) is int
    assert plan.predicted_cost == plan_recompute_cost(chain, plan.nodes, "flops")


def test_a_block_that_cannot_be_recomputed_stands_in_no_segment() -> None:
    stubborn = StageCost(50, 60, 80)
    blocks = [
        BlockProfile(
            f"b{i}",
            i,
            output_bytes=(40,),
            output_gradient_bytes=40,
            keep=stubborn,
            recompute=None if i == 2 else StageCost(0, 60, 80),
            recompute_time_ms=1.0,
            forward_time_ms=1.0,
            eligible_for_checkpoint=i != 2,
            exclusion_reason="grows a list" if i == 2 else None,
        )
        for i in range(6)
    ]
    chain = ChainProfile(tuple(blocks), post=RegionProfile("head", StageCost(0, 0, 0)))
    plan = _plan(chain, 0, on_infeasible="best_effort")
    assert "K2" in plan.text
    assert plan.decisions[2].reason == "not eligible: grows a list"
