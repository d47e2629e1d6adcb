"""Planner ``compile`` on made-up figures: brute force over every memory budget of every block, refusals, words."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.certificate import certify
from ckptplan.check import check_plan
from ckptplan.costs import CompiledModelOption, CompiledOption, CompiledStep, StageCost
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError
from ckptplan.explanation import explain
from ckptplan.nodes import Compiled, CompiledModel, Keep
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.report.steps import decisions_of
from ckptplan.report.tables import plan_rows
from ckptplan.simulate import simulate_plan
from tests.planners.conftest import flat_peak

Make = Callable[..., ChainProfile]


def with_compiled(chain: ChainProfile, seed: int, *, every: int = 1) -> ChainProfile:
    """Three budgets for every ``every``-th block; which one is fastest is left to chance, as it is in life."""
    rng = random.Random(seed)
    blocks = []
    for i, block in enumerate(chain):
        assert block.keep is not None
        kept_faster = 0.5 * (rng.random() < 0.3)
        options = [
            CompiledOption(
                budget,
                replace(
                    block.keep,
                    saved_bytes=int(block.keep.saved_bytes * budget),
                    backward_peak_bytes=int(block.keep.backward_peak_bytes * (1 + rng.random() * (1 - budget))),
                ),
                time_ms=rng.choice((0.0, 0.25, 0.5, 1.25)) + (1 - budget) + kept_faster,
            )
            for budget in (0.0, 0.5, 1.0)
        ]
        blocks.append(replace(block, compiled=tuple(options)) if i % every == 0 else block)
    return replace(chain, blocks=tuple(blocks))


def every_plan(chain: ChainProfile) -> list[tuple[float, int]]:
    """(cost, peak) of every choice; a compiled block is judged as if that were its own way of being kept.

    A block may be kept where no option adds nothing, for then it is fastest as it is.
    """
    ways = [
        [(option.cost, option.time_ms or 0.0) for option in b.compiled]
        + [(b.keep, 0.0)] * all(option.time_ms for option in b.compiled)
        for b in chain
    ]
    plans = []
    for choice in itertools.product(*ways):
        blocks = [replace(block, keep=cost) for block, (cost, _) in zip(chain, choice, strict=True)]
        peak = flat_peak(replace(chain, blocks=tuple(blocks)), (False,) * len(chain))
        plans.append((sum(time_ms for _, time_ms in choice), peak))
    return plans


def planned(chain: ChainProfile, budget: int, **options: Any) -> CheckpointPlan:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner="compile", **options
    )


def two_blocks(*options: CompiledOption) -> ChainProfile:
    block = BlockProfile(
        "a",
        output_bytes=5,
        output_gradient_bytes=5,
        keep=StageCost(40, 45, 60),
        recompute=StageCost(0, 20, 60),
        recompute_time_ms=1.0,
        compiled=options,
    )
    return ChainProfile((block, replace(block, block_id="b", order=1, compiled=())))


HALF = CompiledOption(0.5, StageCost(20, 45, 65), 1.0, 2.0, 0.5)
WHOLE = CompiledOption(1.0, StageCost(40, 45, 60), 1.0, 1.5, 0.0)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_the_fastest_of_all_choices_of_budgets(make_random: Make, seed: int, plain: bool) -> None:
    chain = with_compiled(make_random(seed, most_blocks=6, plain=plain), seed, every=1 + seed % 2)
    plans = every_plan(chain)
    peaks = sorted({peak for _, peak in plans})
    for budget in peaks[:: max(1, len(peaks) // 12)]:
        plan = planned(chain, budget)
        assert plan.predicted_cost == pytest.approx(min(cost for cost, peak in plans if peak <= budget), abs=1e-9)
        assert (plan.predicted_peak_bytes or 0) <= budget
        assert plan.optimality_gap == 0.0
        assert plan.planner == "compile_budget"
    with pytest.raises(InfeasibleTargetError) as told:
        planned(chain, peaks[0] - 1)
    assert told.value.smallest_reachable_bytes == peaks[0]


def as_one(chain: ChainProfile, seed: int) -> ChainProfile:
    """The chain with its model measured as one graph, faster or slower than compiled blocks by chance."""
    rng = random.Random(seed)
    peaks = sorted({peak for _, peak in every_plan(chain)})
    options = [
        CompiledModelOption(b, StageCost(1, rng.randint(1, peaks[-1]), rng.randint(peaks[0], peaks[-1]), (), ()), ms)
        for b, ms in ((0.5, 20 + rng.choice((-0.5, 0.25, 1.0))), (1.0, 20 + rng.choice((-1.0, 0.0, 0.5))))
    ]
    return replace(chain, compiled_model=tuple(options), compiled_blocks_step_ms=20.0)


@pytest.mark.parametrize("seed", range(12))
def test_the_model_as_one_graph_is_taken_exactly_where_it_fits_and_its_step_is_faster(
    make_random: Make, seed: int
) -> None:
    chain = as_one(with_compiled(make_random(seed, most_blocks=5, plain=seed % 3 > 0), seed), seed)
    fastest = min(20.0, *(option.step_time_ms or 0.0 for option in chain.compiled_model))
    plans = [
        (cost + (0.0 if cost == 0 and not _compiles(chain) else 20.0 - fastest), peak)
        for cost, peak in every_plan(chain)
    ]
    wholes = [
        ((o.step_time_ms or 0.0) - fastest, max(o.cost.forward_peak_bytes, o.cost.backward_peak_bytes))
        for o in chain.compiled_model
    ]
    peaks = sorted({peak for _, peak in (*plans, *wholes)})
    taken = []
    for budget in peaks[:: max(1, len(peaks) // 12)]:
        plan = planned(chain, budget)
        taken.append(plan.compiled_model is not None)
        of_all = min(cost for cost, peak in (*plans, *wholes) if peak <= budget)
        assert plan.predicted_cost == pytest.approx(of_all, abs=1e-9) or plan.compiled == 0
        assert (plan.predicted_peak_bytes or 0) <= budget
        assert simulate_plan(chain, plan).peak_bytes == plan.predicted_peak_bytes
        check_plan(chain, plan, budget)
        if plan.compiled_model is not None:
            assert (plan.compiled, plan.kept, plan.predicted_peak_at) == (
                len(chain),
                0,
                simulate_plan(chain, plan).peak_at,
            )
    with pytest.raises(InfeasibleTargetError) as told:
        planned(chain, peaks[0] - 1)
    assert told.value.smallest_reachable_bytes == peaks[0]


def _compiles(chain: ChainProfile) -> bool:
    """Whether the cheapest plan of blocks compiles any."""
    return any(any(option.time_ms == 0 for option in block.compiled) for block in chain)


def one_graph(budget: float = 0.5, step_ms: float | None = 9.0, peak: int = 70) -> ChainProfile:
    option = CompiledModelOption(budget, StageCost(30, 50, peak, (), ()), step_ms)
    return replace(two_blocks(HALF, WHOLE), compiled_model=(option,), compiled_blocks_step_ms=10.0)


def test_a_plan_of_one_graph_reads_back_and_tables_strips_and_explanations_name_it() -> None:
    chain = one_graph()
    plan = planned(chain, 100)
    assert (plan.nodes, plan.text) == ((CompiledModel(2, 0.5),), "C0-1[0.5]")
    assert (plan.predicted_peak_bytes, plan.predicted_peak_at) == (70, "the compiled model backward")
    assert (plan.predicted_cost, plan.optimality_gap) == (0.0, 0.0)
    assert CheckpointPlan.from_json(plan.to_json()) == plan
    assert ChainProfile.from_json(chain.to_json()) == chain
    assert [row.decision for row in plan_rows(chain, plan)] == ["compiled as one [0.5]"] * 2
    assert decisions_of(plan.nodes) == ["compiled", "compiled"]
    assert "no block of it can be decided by itself" in explain(chain, plan).text
    with pytest.raises(PlanIncompatibleError, match="2 of the plan's blocks run compiled"):
        certify(chain, plan)


def test_compiled_blocks_that_are_slower_than_one_graph_say_by_how_much() -> None:
    plan = planned(one_graph(step_ms=9.0, peak=10_000), 10_000 - 1)
    assert (plan.text, plan.predicted_cost) == ("C0[1.0] K1", 1.0)
    plan = planned(one_graph(step_ms=11.0, peak=70), 80)
    assert (plan.text, plan.predicted_cost) == ("C0-1[0.5]", 1.0)


def test_what_the_model_runs_between_compiled_blocks_is_kept_in_steps_timed_as_a_whole() -> None:
    first, second = two_blocks(HALF, WHOLE).blocks
    between = RegionProfile("between a and b", StageCost(0, 5, 5, (True,), (False,)), (5,))
    blocks = (first, replace(second, compiled=(HALF, WHOLE), before=between))
    steps = (CompiledStep(0.5, 9.0), CompiledStep(1.0, 8.0))
    chain = ChainProfile(blocks, compiled_blocks_step_ms=10.0, compiled_steps=steps)
    assert planned(chain, 1000).text == "C0[1.0] C1[1.0]"
    one_graph = (CompiledModelOption(0.5, StageCost(30, 50, 70, (), ()), 7.0),)
    assert planned(replace(chain, compiled_model=one_graph), 1000).text == "C0-1[0.5]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("C0-1[0.5] K2", "stands alone and names all its blocks, 0-2"),
        ("C0-2[2]", "a budget from 0.0 to 1.0"),
        ("R(0 C0-1[0.5])", "stands inside a recomputation"),
    ],
)
def test_one_graph_that_is_not_all_of_the_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanIncompatibleError, match=said):
        CheckpointPlan.from_text(text)


def test_a_range_of_compiled_blocks_begins_at_block_0() -> None:
    with pytest.raises(ValueError, match="whole model compiled as one graph, so it begins at block 0"):
        CheckpointPlan.from_text("K0 C1-2[0.5]")


def test_one_graph_that_was_not_measured_is_refused_with_what_was() -> None:
    plan = CheckpointPlan.from_text("C0-1[0.25]", one_graph())
    for judge in (simulate_plan, check_plan):
        with pytest.raises(PlanIncompatibleError, match=r"as one graph with the budget 0\.25; measured: 0\.5"):
            judge(one_graph(), plan)


def test_a_block_that_is_faster_as_it_is_is_kept_until_memory_asks_for_more() -> None:
    chain = two_blocks(replace(HALF, time_ms=0.5), replace(WHOLE, time_ms=0.25))
    plan = planned(chain, 10_000)
    assert (plan.text, plan.predicted_cost) == ("K0 K1", 0.0)
    assert planned(chain, 100).text == "C0[0.5] K1"


def test_blocks_without_compiled_options_run_as_they_are_and_equal_budgets_count_once() -> None:
    plan = planned(two_blocks(HALF, replace(WHOLE, budget=0.75), WHOLE), 10_000)
    assert plan.nodes == (Compiled(0, 1.0), Keep(1))
    assert (plan.text, plan.kept, plan.compiled, plan.recomputed) == ("C0[1.0] K1", 1, 1, 0)


def test_tables_strips_and_explanations_name_compiled_blocks() -> None:
    chain = two_blocks(HALF, WHOLE)
    plan = planned(chain, 100)
    assert plan.text == "C0[0.5] K1"
    row = plan_rows(chain, plan)[0]
    assert (row.decision, row.added_time_ms) == ("compiled [0.5]", 0.5)
    assert row.reason == "compiled with a lower memory budget, for 0.5 ms beside its fastest"
    assert decisions_of(plan.nodes) == ["compiled", "keep"]
    assert "compiled as C0[0.5]" in explain(chain, plan).text


def test_a_profile_and_a_plan_are_read_back_as_they_were() -> None:
    chain = two_blocks(HALF, WHOLE)
    assert ChainProfile.from_json(chain.to_json()) == chain
    plan = planned(chain, 100)
    assert CheckpointPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("chain", "options", "said"),
    [
        (two_blocks(HALF), {"cost": "time", "memory_model": "additive"}, "plans the peak"),
        (two_blocks(), {}, r"no compiled blocks; profile with compiled_budgets="),
        (two_blocks(replace(HALF, time_ms=None)), {}, "options of 'a' have no times; profile with num_trials"),
    ],
)
def test_what_cannot_be_planned_is_told_with_its_remedy(chain: ChainProfile, options: Any, said: str) -> None:
    filled = [replace(block, activation_bytes_estimate=1, recompute=StageCost(0, 1, 1)) for block in chain]
    with pytest.raises(ValueError, match=said):
        planned(replace(chain, blocks=tuple(filled)), 10_000, **options)


def test_counted_flops_are_no_cost_of_compiled_code() -> None:
    blocks = [replace(b, recompute_flops=1, forward_flops=1, recompute=StageCost(0, 1, 1)) for b in two_blocks(HALF)]
    with pytest.raises(ValueError, match="nobody counts the FLOPs of compiled code"):
        planned(ChainProfile(tuple(blocks)), 10_000, cost="flops")


def test_a_slowdown_is_no_target_as_times_are_beside_the_fastest_compiled_step() -> None:
    with pytest.raises(ValueError, match=r"max_slowdown.*own fastest step"):
        plan_checkpoints(two_blocks(HALF), target_kind="max_slowdown", target_value=1.5, planner="compile")


def test_a_budget_that_was_not_measured_is_refused_by_simulator_and_referee() -> None:
    plan = CheckpointPlan.from_text("C0[0.25] K1", two_blocks(HALF))
    for judge in (simulate_plan, check_plan):
        with pytest.raises(PlanIncompatibleError, match=r"not measured compiled with the budget 0\.25; measured: 0\.5"):
            judge(two_blocks(HALF), plan)


def test_compiled_plans_have_no_certificate_and_say_why() -> None:
    chain = two_blocks(WHOLE)
    with pytest.raises(PlanIncompatibleError, match="1 of the plan's blocks run compiled"):
        certify(chain, planned(chain, 10_000))


@pytest.mark.parametrize(
    ("text", "said"), [("R(0 C1[0.5])", "stands inside a recomputation"), ("C0[2] K1", "a budget from 0.0 to 1.0")]
)
def test_trees_that_no_executor_runs_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanIncompatibleError, match=said):
        CheckpointPlan.from_text(text)


def timed_as_a_whole(half_ms: float, whole_ms: float, blocks_ms: float = 100.0) -> ChainProfile:
    """Two equal blocks whose budget 0.5 costs 1 ms more each; and steps with all blocks at 0.5 and at 1.0, as timed."""
    chain = two_blocks(HALF, WHOLE)
    blocks = (chain[0], replace(chain[1], compiled=(HALF, WHOLE)))
    half, whole = (replace(option, time_ms=ms) for option, ms in ((HALF, 8.0), (WHOLE, 0.0)))
    blocks = tuple(replace(block, compiled=(half, whole)) for block in blocks)
    steps = (CompiledStep(0.5, half_ms), CompiledStep(1.0, whole_ms))
    return replace(chain, blocks=blocks, compiled_blocks_step_ms=blocks_ms, compiled_steps=steps)


@pytest.mark.parametrize(
    ("half_ms", "budget", "text", "why"),
    [
        (116.0, 90, "C0[0.5] C1[1.0]", "108 by its blocks, 116 with one budget: promises more than 5 %"),
        (108.0, 90, "C0[0.5] C1[0.5]", "108 by its blocks, 108 as timed: what was timed is taken"),
        (112.0, 90, "C0[0.5] C1[0.5]", "108 by its blocks, 112 as timed: within the doubt of 5 %"),
        (120.0, 105, "C0[1.0] C1[1.0]", "everything fits"),
    ],
)
def test_a_step_that_was_timed_is_believed_before_a_sum_of_blocks(
    half_ms: float, budget: int, text: str, why: str
) -> None:
    chain = timed_as_a_whole(half_ms, whole_ms=100.0)
    plan = planned(chain, budget)
    assert plan.text == text, why
    assert (plan.predicted_peak_bytes or 0) <= budget
    assert ChainProfile.from_json(chain.to_json()) == chain


def test_a_budget_that_only_a_mixed_plan_meets_best_is_not_given_to_one_that_does_not_fit() -> None:
    chain = timed_as_a_whole(half_ms=150.0, whole_ms=1.0)
    plan = planned(chain, 90)
    assert plan.text == "C0[0.5] C1[1.0]"
    assert planned(chain, 105).text == "C0[1.0] C1[1.0]"
