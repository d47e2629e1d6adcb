"""Options inside blocks, from the profile to the plan: brute force over keep, recompute and every selective option."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.certificate import certify
from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.curve import plan_curve
from ckptplan.explanation import explain
from ckptplan.nodes import Selective
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from tests.planners import trees

Make = Callable[..., ChainProfile]


def _with_options(chain: ChainProfile, seed: int) -> ChainProfile:
    """Three options a block: a fifth to two thirds of its bytes for four fifths to a tenth of its time."""
    rng = random.Random(seed)
    blocks = []
    for block in chain:
        assert block.keep is not None
        options = []
        for number, (share, price) in enumerate(((0.2, 0.8), (0.45, 0.35), (0.65, 0.1))):
            kept = int(block.keep.saved_bytes * (share + rng.random() / 10))
            options.append(
                SelectiveOption(
                    (f"inner.op{number}#0:0",),
                    replace(block.keep, saved_bytes=kept),
                    time_ms=(block.recompute_time_ms or 0.0) * price,
                    flops=int(1000 * price),
                )
            )
        blocks.append(replace(block, selective=tuple(options)))
    return replace(chain, blocks=tuple(blocks))


def _flat_plans(chain: ChainProfile) -> list[tuple[float, int]]:
    """(cost, peak) of every flat plan; an option is judged as if it were the block's own way of keeping."""
    plans = []
    for choice in itertools.product(range(5), repeat=len(chain)):
        blocks, cost = [], 0.0
        for block, way in zip(chain, choice, strict=True):
            if way >= 2:
                option = block.selective[way - 2]
                blocks.append(replace(block, keep=option.cost))
                cost += option.time_ms or 0.0
            else:
                blocks.append(block)
                cost += (block.recompute_time_ms or 0.0) if way == 1 else 0.0
        forest = tuple((i,) if way == 1 else i for i, way in enumerate(choice))
        peak = trees.peak(replace(chain, blocks=tuple(blocks)), forest)
        assert peak is not None
        plans.append((cost, peak))
    return plans


def _plan(chain: ChainProfile, budget: int, planner: str, **options: Any) -> Any:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options
    )


@pytest.mark.parametrize("seed", range(4))
def test_both_planners_use_options_and_equal_brute_force(make_random: Make, seed: int) -> None:
    chain = _with_options(trees.uneven(make_random(seed, most_blocks=4, plain=True), 2 * seed), seed)
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
        used += any(isinstance(node, Selective) for node in any_shape.nodes)
    assert used, "no option was ever taken, so this test shows nothing"


@pytest.mark.parametrize("cost", ["time", "flops"])
def test_the_additive_model_counts_what_an_option_keeps(make_random: Make, cost: Any) -> None:
    chain = _with_options(make_random(1, most_blocks=6, plain=True), 1)
    blocks = [replace(b, recompute_flops=1000 + i, forward_flops=1000 + i) for i, b in enumerate(chain)]
    chain = replace(chain, blocks=tuple(blocks))
    total = sum(block.activation_bytes_estimate or 0 for block in chain)
    plans = [
        _plan(chain, total * 2 // 3, planner, memory_model="additive", cost=cost) for planner in ("ilp", "optimal")
    ]
    assert plans[0].predicted_cost == pytest.approx(plans[1].predicted_cost, rel=1e-9)
    dp = _plan(chain, total * 2 // 3, "dp", memory_model="additive", cost=cost)
    assert plans[0].predicted_cost <= dp.predicted_cost


def test_an_option_without_a_figure_for_the_cost_is_left_out(make_random: Make) -> None:
    chain = _with_options(make_random(2, most_blocks=4, plain=True), 2)
    unknown = [
        replace(b, selective=tuple(replace(o, time_ms=None) for o in b.selective), forward_time_ms=5.0) for b in chain
    ]
    chain = replace(chain, blocks=tuple(unknown))
    plan = plan_checkpoints(chain, target_kind="activation_budget_fraction", target_value=0.7, planner="optimal")
    assert not any(isinstance(node, Selective) for node in plan.nodes)


def test_equal_blocks_with_equal_options_stay_equal(make_equal: Make) -> None:
    from ckptplan.planners.options import option_chain

    option = SelectiveOption(("qkv.addmm#0:0",), StageCost(40, 100, 100), time_ms=0.25)
    chain = make_equal(6, 100, boundary=4, selective=(option,))
    assert option_chain(chain, "time").kinds == (0,) * 6


def test_the_curve_and_the_explanation_know_them(make_random: Make) -> None:
    chain = _with_options(trees.uneven(make_random(3, most_blocks=4, plain=True), 6), 3)
    curve = plan_curve(chain)
    assert any("S" in point.plan for point in curve.points)
    point = next(point for point in curve.points if "S" in point.plan)
    plan = _plan(chain, point.peak_bytes, "optimal")
    part = next(node for node in plan.nodes if isinstance(node, Selective))
    reason = explain(chain, plan).blocks[part.block].reason
    assert reason.startswith(f"kept in part as S{part.block}[")
    assert "kept whole, it would spare" in reason
