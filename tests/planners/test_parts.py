"""Options inside blocks of every sort, inputs that are shared too: against brute force over all plans with options."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.check import check_plan
from ckptplan.errors import InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_flat_peak, plan_checkpoints
from ckptplan.planners.nested import cheapest_flat
from ckptplan.planners.options import flat_peak, option_chain
from ckptplan.planners.stretches import Stretches
from ckptplan.profiles import ChainProfile
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.selective import short_names
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from tests.planners import trees

Make = Callable[..., ChainProfile]


def _plan(chain: Any, budget: int, planner: str = "optimal", **options: Any) -> CheckpointPlan:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options
    )


def _chain(make_random: Make, seed: int, most_blocks: int, most: int = 3) -> ChainProfile:
    return trees.with_parts(
        trees.uneven(make_random(seed, most_blocks=most_blocks, plain=seed % 3 == 0), seed), seed, most
    )


def test_the_judge_of_these_tests_agrees_with_the_simulator_and_the_referee(make_random: Make) -> None:
    shared = 0
    for seed in range(8):
        chain = _chain(make_random, seed, 3)
        for ms, peak, forest, parts in trees.all_plans_with_parts(chain):
            names = [short_names(b, b.selective[way]) if way >= 0 else () for b, way in zip(chain, parts, strict=True)]
            text = " ".join(
                f"S{tree}[{','.join(names[tree])}]"
                if isinstance(tree, int) and parts[tree] >= 0
                else trees.text((tree,))
                for tree in forest
            )
            plan = _plan(chain, 2**40, "text", text=text)
            assert (plan.predicted_peak_bytes, plan.predicted_cost) == (peak, pytest.approx(ms)), (seed, text)
            alone = [
                replace(b, selective=tuple(_sharing_nothing(option) for option in b.selective)) for b in chain.blocks
            ]
            shared += simulate_plan(replace(chain, blocks=tuple(alone)), plan.nodes).peak_bytes != peak
    assert shared, "no option ever shared its input, so this test shows less than it should"


def _sharing_nothing(option: Any) -> Any:
    return replace(option, cost=replace(option.cost, inputs_let_go=()))


@pytest.mark.parametrize("batch", range(3))
def test_flat_planners_equal_brute_force_over_all_flat_plans_with_options(make_random: Make, batch: int) -> None:
    chosen = 0
    for seed in range(6 * batch, 6 * (batch + 1)):
        chain = _chain(make_random, seed, 4)
        plans = sorted(trees.all_plans_with_parts(chain, flat=True), key=lambda plan: plan[:2])
        peaks = sorted({peak for _, peak, _, _ in plans})
        for budget in (peaks[0], *random.Random(seed).sample(peaks, min(5, len(peaks)))):
            best = next(ms for ms, peak, _, _ in plans if peak <= budget)
            flat = cheapest_flat(chain, budget, "time", "peak")
            proved = _plan(chain, budget, "ilp")
            assert simulate_plan(chain, flat.nodes).peak_bytes <= budget
            assert plan_recompute_cost(chain, flat.nodes, "time") == pytest.approx(best, abs=1e-9), (seed, budget)
            assert proved.predicted_cost == pytest.approx(best, abs=1e-9), (seed, budget)
            assert (flat.optimality_gap, proved.optimality_gap) == (0.0, 0.0)
            chosen += proved.selective > 0
        with pytest.raises(InfeasibleTargetError) as caught:
            _plan(chain, peaks[0] - 1, "ilp")
        assert caught.value.smallest_reachable_bytes == least_flat_peak(chain)[0] == peaks[0]
    assert chosen, "no option was ever chosen, so this test shows nothing"


@pytest.mark.parametrize("batch", range(3))
def test_optimal_equals_brute_force_over_all_plans_with_options(make_random: Make, batch: int) -> None:
    both = 0
    for seed in range(6 * batch, 6 * (batch + 1)):
        chain = _chain(make_random, seed, 4 if seed % 6 == 0 else 3, most=2)
        plans = sorted(trees.all_plans_with_parts(chain), key=lambda plan: plan[:2])
        peaks = sorted({peak for _, peak, _, _ in plans})
        for budget in (peaks[0], *random.Random(seed).sample(peaks, min(8, len(peaks)))):
            plan = _plan(chain, budget)
            assert plan.predicted_cost == pytest.approx(
                next(ms for ms, peak, _, _ in plans if peak <= budget), abs=1e-9
            ), (seed, budget)
            assert plan.optimality_gap == 0.0
            both += plan.selective > 0 and plan.recomputed > 1
        with pytest.raises(InfeasibleTargetError) as caught:
            _plan(chain, peaks[0] - 1)
        assert caught.value.smallest_reachable_bytes == caught.value.smallest_reachable_any_bytes == peaks[0]
    assert both, "options and recomputation never stood side by side"


def test_the_solvers_own_figures_are_the_simulators_to_the_byte(make_random: Make) -> None:
    for seed in range(12):
        chain = _chain(make_random, seed, 6)
        options = option_chain(chain, "time")
        stretches = Stretches(options, 2**60, slack=2**61)
        whole = stretches.whole()
        for need, value in zip(whole.need, whole.value, strict=True):
            nodes = stretches.nodes(int(need))
            simulated = simulate_plan(chain, nodes)
            assert (simulated.peak_bytes, options.value_of(nodes)) == (need, value)
            assert simulated.recompute_time_ms == pytest.approx(options.cost_of(int(value)), abs=1e-9)
        rng = random.Random(seed)
        for _ in range(20):
            choice = [rng.randrange(len(block.options)) for block in options.blocks]
            nodes = tuple(b.options[way].node(i) for i, (b, way) in enumerate(zip(options.blocks, choice, strict=True)))
            assert flat_peak(options, choice) == simulate_plan(chain, nodes).peak_bytes


@pytest.mark.parametrize("cost", ["time", "flops"])
def test_optimal_is_never_worse_than_dp_at_any_budget(make_random: Make, cost: Any) -> None:
    cheaper = 0
    for seed in range(12):
        chain = _chain(make_random, seed, 8)
        none = no_checkpoint_peak(chain)
        for share in (1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3):
            budget = int(none * share)
            optimal = _plan(chain, budget, cost=cost, on_infeasible="best_effort")
            flat = _plan(chain, budget, "dp", cost=cost, on_infeasible="best_effort")
            check_plan(chain, optimal)
            assert optimal.predicted_peak_bytes <= max(flat.predicted_peak_bytes, budget)
            if flat.feasible:
                assert optimal.feasible
                assert optimal.predicted_cost <= flat.predicted_cost
                cheaper += optimal.predicted_cost < flat.predicted_cost
    assert cheaper, "no option ever paid, so this test shows nothing"


def test_under_the_additive_model_an_option_counts_what_it_holds(make_random: Make) -> None:
    for seed in range(0, 12, 3):
        chain = _chain(make_random, seed, 4)
        for share in (0.7, 0.4):
            plans = [
                plan_checkpoints(
                    chain,
                    target_kind="activation_budget_fraction",
                    target_value=share,
                    planner=planner,
                    memory_model="additive",
                )
                for planner in ("optimal", "ilp", "dp")
            ]
            optimal, proved, flat = (plan.predicted_cost for plan in plans)
            assert optimal == pytest.approx(proved, abs=1e-9)
            assert optimal <= flat
