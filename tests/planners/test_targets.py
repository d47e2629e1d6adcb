"""Targets: what each kind means, the cases P1 to P8, and bad values refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptplan.costs import StageCost
from ckptplan.errors import InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import no_checkpoint_peak, simulate_plan

Make = Callable[..., ChainProfile]
Oracle = Callable[[ChainProfile, str], list[tuple[float, int, int, tuple[bool, ...]]]]
MIB = 2**20
MINIMISING = ["greedy", "dynamic_programming"]


def _additive(chain: ChainProfile, kind: str, value: Any, planner: str = "dp", **options: Any) -> CheckpointPlan:
    return plan_checkpoints(
        chain, target_kind=kind, target_value=value, planner=planner, memory_model="additive", **options
    )


def _uneven(pairs: list[tuple[int, float]]) -> ChainProfile:
    return ChainProfile(
        tuple(
            BlockProfile(f"b{i}", activation_bytes_estimate=size, recompute_time_ms=cost)
            for i, (size, cost) in enumerate(pairs)
        )
    )


@pytest.mark.parametrize("planner", [*MINIMISING, "uniform"])
@pytest.mark.parametrize(("budget", "recomputed"), [(60 * MIB, 0), (60 * MIB - 1, 1), (30 * MIB, 3), (0, 6)])
def test_p1_bounds_are_exact_to_the_byte(make_equal: Make, planner: str, budget: int, recomputed: int) -> None:
    plan = _additive(make_equal(6, 10 * MIB), "activation_budget_bytes", budget, planner)
    assert plan.recomputed == recomputed


@pytest.mark.parametrize("planner", [*MINIMISING, "uniform"])
def test_p2_there_is_no_grid(make_equal: Make, planner: str) -> None:
    plan = _additive(make_equal(100, 1_992_294), "activation_budget_bytes", 99_614_700, planner)
    assert plan.recomputed == 50


@pytest.mark.parametrize("planner", MINIMISING)
def test_p4_what_is_not_needed_is_kept(planner: str) -> None:
    plan = _additive(_uneven([(10 * MIB, 1.0), (100 * MIB, 20.0)]), "activation_budget_bytes", 10 * MIB, planner)
    assert plan.text == "K0 R(1)"


@pytest.mark.parametrize("planner", [*MINIMISING, "uniform"])
@pytest.mark.parametrize("n", range(1, 25))
def test_p5_a_fraction_of_equal_blocks_is_that_many_blocks(make_equal: Make, planner: str, n: int) -> None:
    small, large = make_equal(n, 3), make_equal(n, 70 * 2**30 // n + 1)
    for k in range(1, n + 1):
        assert _additive(large, "activation_saving_fraction", k / n, planner).recomputed == k
        assert _additive(small, "activation_budget_fraction", k / n, planner).recomputed == n - k


def test_p6_keeping_everything_is_called_what_it_is(make_equal: Make) -> None:
    chain = make_equal(6, 10 * MIB)
    plan = _additive(chain, "activation_budget_bytes", 30 * MIB, "none", on_infeasible="best_effort")
    assert (plan.recomputed, plan.feasible, plan.predicted_peak_bytes) == (0, False, 60 * MIB)


def _mlp_chain(widths: list[int]) -> ChainProfile:
    """Pre-norm MLP blocks, d 64, 1,024 rows, equal costs: figures as a boundary (0.25 MiB) times small numbers.

    A block of hidden width h saves the norm's output and the hidden values before and after the activation.
    """
    unit = MIB // 4
    blocks = []
    for i, width in enumerate(widths):
        hidden = unit * width // 64
        saved = unit + 2 * hidden
        backward = saved + hidden + 2 * unit
        blocks.append(
            BlockProfile(
                f"b{i}",
                output_bytes=(unit,),
                output_gradient_bytes=unit,
                keep=StageCost(saved, saved + unit, backward),
                recompute=StageCost(0, unit + 2 * hidden, backward),
                recompute_time_ms=1.0,
            )
        )
    return ChainProfile(tuple(blocks), loss_region="assumed")


def test_p7_a_dominating_block_sets_the_floor_and_is_named(oracle: Oracle) -> None:
    chain = _mlp_chain([64, 64, 1024, 64, 64])
    floor = min(peak for _, _, peak, _ in oracle(chain, "peak"))
    assert no_checkpoint_peak(chain) == 14.75 * MIB
    assert floor == 13.25 * MIB
    with pytest.raises(InfeasibleTargetError) as caught:
        plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=int(10.3 * MIB))
    assert caught.value.smallest_reachable_bytes == floor
    assert caught.value.limited_by == "b2 backward"
    assert "declaring smaller blocks inside 'b2'" in str(caught.value)
    assert "13.25 MiB" in str(caught.value)


def test_p8_late_blocks_save_nothing_and_the_planner_knows() -> None:
    chain = _mlp_chain([32, 64, 128, 256, 512, 1024])
    none = no_checkpoint_peak(chain)
    last_alone = simulate_plan(chain, CheckpointPlan.from_text("K0-4 R(5)", chain))
    assert last_alone.peak_bytes == none == 23 * MIB
    plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=int(16.1 * MIB))
    assert plan.text == "K0 K1 R(2) R(3) R(4) K5"
    assert plan.predicted_peak_bytes == 15.25 * MIB


def test_c08_position_counts_on_equal_blocks(oracle: Oracle) -> None:
    """Six tanh MLP blocks, width 64, inner width 256, batch 512: figures of the case."""
    edge = MIB // 8
    saved = 3 * MIB // 2
    backward = saved + 9 * MIB // 8
    chain = ChainProfile(
        tuple(
            BlockProfile(
                f"b{i}",
                output_bytes=(edge,),
                output_gradient_bytes=edge,
                keep=StageCost(saved, saved + edge, backward),
                recompute=StageCost(0, MIB, backward),
                recompute_time_ms=1.0,
            )
            for i in range(6)
        )
    )
    peaks = {choice: peak / MIB for _, _, peak, choice in oracle(chain, "peak")}

    def flags(*chosen: int) -> tuple[bool, ...]:
        return tuple(i in chosen for i in range(6))

    assert peaks[flags()] == peaks[flags(5)] == 10.75
    assert {peaks[flags(i)] for i in range(5)} == {9.25}
    assert (peaks[flags(0, 1, 2)], peaks[flags(3, 4, 5)]) == (6.25, 7.75)
    assert peaks[flags(0, 1, 2, 3, 4)] == peaks[flags(0, 1, 2, 3, 4, 5)] == 3.25
    for budget, count in zip((10.0, 8.5, 7.0, 5.5, 4.0), (1, 2, 3, 4, 5), strict=True):
        for planner in ("dp", "greedy"):
            plan = plan_checkpoints(
                chain, target_kind="activation_budget_bytes", target_value=budget * MIB, planner=planner
            )
            assert plan.recomputed == count
            assert not plan.decisions[5].checkpointed
            assert plan.decisions[5].reason == "kept: its recomputation would itself set the peak, saving nothing"


def test_c11_cost_never_falls_and_peak_never_rises_with_a_smaller_budget(make_random: Make) -> None:
    for seed in range(8):
        chain = make_random(seed)
        none = no_checkpoint_peak(chain)
        plans = [
            plan_checkpoints(
                chain,
                target_kind="activation_budget_bytes",
                target_value=none * share // 20,
                on_infeasible="best_effort",
            )
            for share in range(20, 6, -1)
        ]
        feasible = [plan for plan in plans if plan.feasible]
        costs = [plan.predicted_cost or 0.0 for plan in feasible]
        peaks = [plan.predicted_peak_bytes or 0 for plan in feasible]
        assert costs == sorted(costs)
        assert peaks == sorted(peaks, reverse=True)


class TestPeakTargets:
    def test_a_fraction_is_of_the_predicted_peak_with_every_block_kept(self, make_equal: Make) -> None:
        chain = make_equal(4, 100, boundary=10, transient=15)
        none = no_checkpoint_peak(chain)
        plan = plan_checkpoints(chain, target_kind="activation_budget_fraction", target_value=0.5)
        assert plan.budget_bytes == none // 2
        assert plan.no_checkpoint_peak_bytes == none
        saving = plan_checkpoints(chain, target_kind="activation_saving_fraction", target_value=0.5)
        assert saving.budget_bytes == none - -(-none // 2)

    def test_a_device_budget_takes_off_what_else_stands_there(self, make_equal: Make) -> None:
        chain = make_equal(4, 100, boundary=1, transient=5)
        plan = plan_checkpoints(chain, target_kind="device_budget_bytes", target_value=5_300, static_bytes=5_000)
        assert plan.budget_bytes == 300
        assert plan.target_value == 5_300
        with pytest.raises(InfeasibleTargetError, match="what else stands on the device takes 5400 bytes") as caught:
            plan_checkpoints(chain, target_kind="device_budget_bytes", target_value=5_300, static_bytes=5_400)
        assert caught.value.budget_bytes == -100
        best = plan_checkpoints(
            chain,
            target_kind="device_budget_bytes",
            target_value=5_300,
            static_bytes=5_400,
            on_infeasible="best_effort",
        )
        assert (best.budget_bytes, best.feasible, best.recomputed) == (0, False, 3)

    def test_a_device_budget_needs_to_know_what_stands_there(self, make_equal: Make) -> None:
        with pytest.raises(ValueError, match="needs static_bytes"):
            plan_checkpoints(make_equal(2, 1), target_kind="device_budget_bytes", target_value=10)
        for bad, error in ((-1, ValueError), (float("nan"), ValueError), (True, TypeError), ("1GiB", TypeError)):
            with pytest.raises(error, match="static_bytes="):
                plan_checkpoints(make_equal(2, 1), target_kind="device_budget_bytes", target_value=10, static_bytes=bad)

    def test_the_head_is_named_and_a_chunked_loss_suggested_where_it_sets_the_floor(self, make_equal: Make) -> None:
        blocks = make_equal(3, 10, boundary=1).blocks
        chain = ChainProfile(blocks, post=RegionProfile("post", StageCost(500, 600, 900)))
        with pytest.raises(InfeasibleTargetError, match="chunked or fused loss") as caught:
            plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=800)
        assert caught.value.limited_by == "head and loss backward"


class TestSlowdown:
    @pytest.mark.parametrize("planner", ["dp", "greedy", "uniform"])
    def test_the_ratio_holds_and_for_the_dynamic_programme_the_peak_is_the_least(
        self, make_random: Make, oracle: Oracle, planner: str
    ) -> None:
        for seed in range(0, 24, 2):
            chain = _timed(make_random(seed, most_blocks=7, plain=True))
            step = sum(3 * (block.recompute_time_ms or 0) for block in chain)
            plans = oracle(chain, "peak")
            for ratio in (1.0, 1.05, 1.15, 1.25, 2.0):
                plan = plan_checkpoints(chain, target_kind="max_slowdown", target_value=ratio, planner=planner)
                assert plan.predicted_cost is not None
                assert plan.predicted_cost <= (ratio - 1) * step * (1 + 1e-9)
                assert (plan.budget_bytes, plan.feasible) == (None, True)
                least = min(peak for cost, _, peak, _ in plans if cost <= (ratio - 1) * step * (1 + 1e-9))
                assert plan.predicted_peak_bytes is not None
                assert plan.predicted_peak_bytes >= least
                if planner == "dp":
                    assert plan.predicted_peak_bytes == least

    def test_a_plan_that_is_always_too_slow_is_infeasible(self, make_equal: Make) -> None:
        chain = make_equal(4, 100)
        with pytest.raises(InfeasibleTargetError, match=r"ratio of 1\.333"):
            plan_checkpoints(chain, target_kind="max_slowdown", target_value=1.2, planner="checkpoint_all")
        plan = plan_checkpoints(
            chain, target_kind="max_slowdown", target_value=1.2, planner="all", on_infeasible="best_effort"
        )
        assert (plan.recomputed, plan.feasible) == (4, False)

    def test_it_needs_the_times_of_the_whole_step(self, make_equal: Make) -> None:
        chain = make_equal(2, 100, backward_time_ms=None)
        with pytest.raises(ValueError, match="backward_time_ms are missing for 'b0', 'b1'"):
            plan_checkpoints(chain, target_kind="max_slowdown", target_value=1.2)
        blocks = make_equal(2, 100).blocks
        with_head = ChainProfile(blocks, post=RegionProfile("the head", StageCost(0, 0, 0)))
        with pytest.raises(ValueError, match="missing for 'the head'"):
            plan_checkpoints(with_head, target_kind="max_slowdown", target_value=1.2)


def _timed(chain: ChainProfile) -> ChainProfile:
    blocks = tuple(
        dataclasses.replace(
            block, forward_time_ms=block.recompute_time_ms, backward_time_ms=2 * (block.recompute_time_ms or 0)
        )
        for block in chain
    )
    return dataclasses.replace(chain, blocks=blocks, post=None)


class TestBadValues:
    @pytest.mark.parametrize(
        ("kind", "value", "error"),
        [
            ("activation_budget_bytes", float("nan"), ValueError),
            ("activation_budget_bytes", float("inf"), ValueError),
            ("activation_budget_bytes", -1, ValueError),
            ("activation_budget_bytes", -0.5, ValueError),
            ("activation_budget_bytes", True, TypeError),
            ("activation_budget_bytes", np.bool_(True), TypeError),
            ("activation_budget_bytes", "6GiB", TypeError),
            ("activation_budget_bytes", None, TypeError),
            ("activation_budget_bytes", [1], TypeError),
            ("device_budget_bytes", float("-inf"), ValueError),
            ("activation_budget_fraction", 0, ValueError),
            ("activation_budget_fraction", 1.01, ValueError),
            ("activation_budget_fraction", float("nan"), ValueError),
            ("activation_budget_fraction", True, TypeError),
            ("activation_saving_fraction", 0.0, ValueError),
            ("activation_saving_fraction", -0.1, ValueError),
            ("activation_saving_fraction", "half", TypeError),
            ("max_slowdown", 0.99, ValueError),
            ("max_slowdown", float("inf"), ValueError),
            ("max_slowdown", None, TypeError),
        ],
    )
    def test_each_is_refused_naming_the_argument(
        self, make_equal: Make, kind: str, value: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match=rf"target_value=.*for {kind}.*expected"):
            plan_checkpoints(make_equal(2, 10), target_kind=kind, target_value=value)

    def test_an_unknown_kind_gets_the_nearest_and_the_list(self, make_equal: Make) -> None:
        with pytest.raises(ValueError, match=r"did you mean 'activation_budget_bytes'\?.*max_slowdown"):
            plan_checkpoints(make_equal(2, 10), target_kind="activation_budget", target_value=5)

    def test_whole_numbers_of_numpy_and_floats_are_taken(self, make_equal: Make) -> None:
        chain = make_equal(2, 10)
        plans = [_additive(chain, "activation_budget_bytes", v) for v in (10, np.int64(10), 10.0, 10.9)]
        assert {plan.digest for plan in plans} == {plans[0].digest}
