"""Blocks on the host, from the profile to the plan: brute force over keep, recompute and offload."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.certificate import certify
from ckptplan.costs import OffloadOption
from ckptplan.curve import plan_curve
from ckptplan.explanation import explain
from ckptplan.nodes import Offload, nodes_text, parse_plan_text
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.report.steps import decisions_of
from ckptplan.report.tables import plan_rows
from tests.planners import trees

Make = Callable[..., ChainProfile]


def _on_host(chain: ChainProfile, seed: int) -> ChainProfile:
    """Each block can be on the host: up to a tenth of its bytes stay, for a tenth to nine tenths of recomputing it."""
    rng = random.Random(seed)
    blocks = []
    for block in chain:
        assert block.keep is not None
        cost = replace(block.keep, saved_bytes=int(block.keep.saved_bytes * rng.random() / 10))
        time_ms = (block.recompute_time_ms or 0.0) * (0.1 + 0.8 * rng.random())
        blocks.append(replace(block, offload=(OffloadOption(cost, block.keep.saved_bytes, time_ms),)))
    return replace(chain, blocks=tuple(blocks))


def _flat_plans(chain: ChainProfile) -> list[tuple[float, int]]:
    """(cost, peak) of every flat plan; a block on the host is judged as if that were its own way of keeping."""
    plans = []
    for choice in itertools.product("KRO", repeat=len(chain)):
        blocks, cost = [], 0.0
        for block, way in zip(chain, choice, strict=True):
            (option,) = block.offload
            blocks.append(replace(block, keep=option.cost) if way == "O" else block)
            cost += {"K": 0.0, "R": block.recompute_time_ms or 0.0, "O": option.time_ms or 0.0}[way]
        forest = tuple((i,) if way == "R" else i for i, way in enumerate(choice))
        peak = trees.peak(replace(chain, blocks=tuple(blocks)), forest)
        assert peak is not None
        plans.append((cost, peak))
    return plans


def _plan(chain: ChainProfile, budget: int, planner: str, **options: Any) -> Any:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options
    )


def _uneven(make_random: Make, seed: int) -> ChainProfile:
    return _on_host(trees.uneven(make_random(seed, most_blocks=5, plain=True), 2 * seed), seed)


@pytest.mark.parametrize("seed", range(4))
def test_both_planners_put_blocks_on_the_host_and_equal_brute_force(make_random: Make, seed: int) -> None:
    chain = _uneven(make_random, seed)
    plans = _flat_plans(chain)
    peaks = sorted({peak for _, peak in plans})
    used = 0
    for budget in peaks[:: max(1, len(peaks) // 8)]:
        best = min(cost for cost, peak in plans if peak <= budget)
        flat, any_shape = _plan(chain, budget, "ilp"), _plan(chain, budget, "optimal")
        assert flat.predicted_cost == pytest.approx(best, abs=1e-9)
        assert any_shape.predicted_cost <= best + 1e-9
        assert (flat.optimality_gap, any_shape.optimality_gap) == (0.0, 0.0)
        found = certify(chain, any_shape)
        assert found.flat_lower_bound == pytest.approx(best, abs=1e-9)
        assert (found.gap, found.cross_check) == (0.0, "agrees")
        used += any_shape.offloaded
    assert used, "no block was ever on the host, so this test shows nothing"


def test_it_is_chosen_only_where_it_wins(make_random: Make) -> None:
    chain = _uneven(make_random, 1)
    budget = int(0.6 * max(peak for _, peak in _flat_plans(chain)))

    def priced(times: float) -> ChainProfile:
        blocks = (
            replace(b, offload=(replace(b.offload[0], time_ms=times * (b.recompute_time_ms or 0.0)),)) for b in chain
        )
        return replace(chain, blocks=tuple(blocks))

    cheap, dear = _plan(priced(0.01), budget, "optimal"), _plan(priced(1000.0), budget, "optimal")
    assert cheap.offloaded > 0
    assert (dear.offloaded, dear.recomputed > 0) == (0, True)
    without = replace(chain, blocks=tuple(replace(b, offload=()) for b in chain))
    assert dear.predicted_cost == _plan(without, budget, "optimal").predicted_cost


def test_it_costs_no_flops_and_so_is_no_choice_where_flops_are_weighed(make_random: Make) -> None:
    chain = _uneven(make_random, 2)
    blocks = (replace(b, recompute_flops=1000 + i, forward_flops=1000 + i) for i, b in enumerate(chain))
    chain = replace(chain, blocks=tuple(blocks))
    budget = int(0.7 * max(peak for _, peak in _flat_plans(chain)))
    plan = _plan(chain, budget, "optimal", cost="flops")
    assert (plan.offloaded, plan.recomputed > 0) == (0, True)
    given = plan_checkpoints(
        chain, target_kind="activation_budget_fraction", target_value=1.0, planner="text", cost="flops",
        text=" ".join(f"O{i}" for i in range(len(chain))),
    )  # fmt: skip
    assert given.predicted_cost == 0


@pytest.mark.parametrize("planner", ["dp", "greedy", "uniform", "all"])
def test_planners_over_whole_blocks_leave_it_out(make_random: Make, planner: str) -> None:
    chain = _uneven(make_random, 3)
    without = replace(chain, blocks=tuple(replace(b, offload=()) for b in chain))
    budget = int(0.8 * max(peak for _, peak in _flat_plans(chain)))
    assert _plan(chain, budget, planner, on_infeasible="best_effort").text == (
        _plan(without, budget, planner, on_infeasible="best_effort").text
    )


def test_the_additive_model_counts_what_stays_on_the_device(make_random: Make) -> None:
    chain = _on_host(make_random(1, most_blocks=6, plain=True), 1)
    total = sum(block.activation_bytes_estimate or 0 for block in chain)
    plans = [_plan(chain, total * 2 // 3, planner, memory_model="additive") for planner in ("ilp", "optimal")]
    assert plans[0].predicted_cost == pytest.approx(plans[1].predicted_cost, rel=1e-9)
    assert all(plan.offloaded for plan in plans)


def test_the_curve_the_explanation_and_the_tables_know_it(make_random: Make) -> None:
    chain = _uneven(make_random, 3)
    curve = plan_curve(chain)
    point = next(point for point in curve.points if "O" in point.plan)
    plan = _plan(chain, point.peak_bytes, "optimal")
    block = next(node.block for node in plan.nodes if isinstance(node, Offload))
    assert f"on the host until backward as O{block}: kept on the device" in explain(chain, plan).blocks[block].reason
    assert "on the host until backward, for" in plan.decisions[block].reason
    row = plan_rows(chain, plan)[block]
    assert (row.decision, row.added_time_ms) == ("on the host", chain[block].offload[0].time_ms)
    assert decisions_of(plan.nodes)[block] == "on the host"


def test_its_text_is_read_back_and_a_range_of_it_is_not_known() -> None:
    nodes = parse_plan_text("K0 O1 R(2 3) O4")
    assert nodes_text(nodes) == "K0 O1 R(2 3) O4"
    assert nodes[1] == Offload(1)
    with pytest.raises(ValueError, match=r"found 'O1-3' at position 3; expected .* O<block> or C<block>"):
        parse_plan_text("K0 O1-3")
