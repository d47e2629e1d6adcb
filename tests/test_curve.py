"""The whole trade-off: each point against the planner, the sentence, the picture, the file."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.costs import StageCost
from ckptplan.curve import CurvePoint, PlanCurve, plan_curve
from ckptplan.errors import PlannerScaleError, TimingOnlyProfileError, UnsupportedPlanVersionError
from ckptplan.nodes import parse_plan_text
from ckptplan.planners import plan_checkpoints, smallest_reachable
from ckptplan.planners.nested import least_peak_plan
from ckptplan.planners.options import option_chain
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import no_checkpoint_peak, simulate_plan

KIB = 2**10


def _chain(count: int, seed: int | None = None) -> ChainProfile:
    """Equal blocks (30 KiB kept, 2 KiB handed on, 10 ms forward, 7 ms again), or uneven ones; a head after them."""
    rng = random.Random(seed)
    blocks = []
    for i in range(count):
        saved = 30 * KIB if seed is None else rng.randint(4 * KIB, 40 * KIB)
        forward_ms = 10.0 if seed is None else rng.randint(64, 320) / 32
        blocks.append(
            BlockProfile(
                f"b{i}",
                i,
                activation_bytes_estimate=saved,
                output_bytes=(2 * KIB,),
                output_gradient_bytes=2 * KIB,
                keep=StageCost(saved, saved + 4 * KIB, saved + 9 * KIB),
                recompute=StageCost(0, saved, saved + 9 * KIB),
                forward_time_ms=forward_ms,
                backward_time_ms=2 * forward_ms,
                recompute_time_ms=0.75 * forward_ms,
                forward_flops=1000,
                backward_flops=2000,
                recompute_flops=700,
            )
        )
    head = RegionProfile(
        "head",
        StageCost(10 * KIB, 26 * KIB, 26 * KIB),
        forward_time_ms=10.0,
        backward_time_ms=20.0,
        forward_flops=500,
        backward_flops=1000,
    )
    return ChainProfile(tuple(blocks), post=head)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("memory_model", ["peak", "additive"])
def test_each_point_is_what_the_planner_gives_at_its_peak_and_nothing_lies_between(
    nested: bool, memory_model: Any
) -> None:
    chain = _chain(9, seed=3)
    curve = plan_curve(chain, nested=nested, memory_model=memory_model)
    assert curve.epsilon == 0.0
    assert curve.num_found == len(curve.points)
    planner = "optimal" if nested else "dp"
    for point, following in zip(curve.points, [*curve.points[1:], None], strict=True):
        budgets = [point.peak_bytes] if following is None else [point.peak_bytes, following.peak_bytes - 1]
        for budget in budgets:
            plan = plan_checkpoints(
                chain,
                target_kind="activation_budget_bytes",
                target_value=budget,
                planner=planner,
                memory_model=memory_model,
            )
            assert plan.predicted_cost == pytest.approx(point.cost, abs=1e-9)
        simulated = simulate_plan(chain, parse_plan_text(point.plan), memory_model)
        assert (simulated.peak_bytes, simulated.recompute_time_ms) == (point.peak_bytes, pytest.approx(point.cost))


def test_it_reaches_from_the_least_peak_to_nothing_recomputed() -> None:
    chain = _chain(10, seed=1)
    curve, flat = plan_curve(chain), plan_curve(chain, nested=False)
    nested_least = simulate_plan(chain, least_peak_plan(option_chain(chain, "time"))).peak_bytes
    assert curve.minimum.peak_bytes == nested_least
    assert flat.minimum.peak_bytes == smallest_reachable(chain)[0]
    assert nested_least < flat.minimum.peak_bytes
    for each in (curve, flat):
        assert each.points[-1].cost == 0
        assert each.points[-1].peak_bytes <= each.no_checkpoint_peak_bytes == no_checkpoint_peak(chain)
    for point in flat.points:
        within = curve.at(point.peak_bytes)
        assert within is not None
        assert within.cost <= point.cost


def test_a_budget_finds_its_point() -> None:
    curve = _by_hand()
    assert curve.at(99) is None
    assert curve.at(100) == curve.minimum == curve.points[0]
    assert curve.at(399) == curve.points[1]
    assert curve.at(10**9) == curve.points[-1]


def _by_hand() -> PlanCurve:
    points = [(100, 90.0), (200, 12.0), (400, 6.0), (800, 0.0)]
    return PlanCurve(
        tuple(CurvePoint(peak, cost, f"plan of {peak}") for peak, cost in points), 800, step_cost=300.0, num_found=4
    )


def test_the_knee_lies_furthest_below_the_straight_line() -> None:
    # from (100, 90) to (800, 0): the line is at 77 ms for 200 bytes and 51 for 400; 65 and 45 ms above the points
    assert _by_hand().knee.peak_bytes == 200


def test_a_straight_or_single_point_has_its_knee_at_the_end() -> None:
    single = PlanCurve((CurvePoint(5, 0.0, "K0"),), 5)
    assert single.knee == single.minimum
    assert "knee at 1 " in single.text


def test_the_sentence() -> None:
    assert _by_hand().text == (
        "memory as a share of 800 B: 0.9 costs +2 %, 0.75 +2 %, 0.5 +2 %, 0.35 +4 %, 0.25 +4 %; "
        "knee at 0.25 (+4 %); no plan below 0.12 (100 B)"
    )


@pytest.mark.parametrize(("kind", "expected"), [("time", "0.9 costs +6 ms"), ("flops", "0.9 costs +6 FLOPs")])
def test_without_a_step_cost_it_tells_what_is_added(kind: str, expected: str) -> None:
    assert expected in replace(_by_hand(), step_cost=None, cost_kind=kind).text


def test_the_step_cost_is_that_of_the_profile_or_none() -> None:
    chain = _chain(4)
    assert plan_curve(chain).step_cost == 4 * 30.0 + 30.0
    assert plan_curve(chain, cost="flops").step_cost == 4 * 3000 + 1500
    assert plan_curve(chain.blocks[:1]).step_cost == 30.0
    assert plan_curve(replace(chain, blocks=(replace(chain[0], backward_time_ms=None),))).step_cost is None


def test_flops_are_whole_numbers() -> None:
    assert all(type(point.cost) is int for point in plan_curve(_chain(5), cost="flops").points)


def test_the_picture() -> None:
    assert _by_hand().plot(width=16, height=6) == "\n".join(
        [
            "+12 % |  ^^",
            "      |",
            "      |",
            "      |",
            "      |    K***",
            "      |        ********",
            " +0 % |                *",
            "      +-----------------",
            "       0           800 B",
        ]
    )


def test_a_long_curve_is_thinned_to_equal_distances() -> None:
    chain = _chain(16, seed=5)
    whole, few = plan_curve(chain, most_points=10**6), plan_curve(chain, most_points=8)
    assert len(whole.points) == whole.num_found == few.num_found > 8
    assert 2 <= len(few.points) <= 8
    assert set(few.points) <= set(whole.points)
    assert (few.minimum, few.points[-1]) == (whole.minimum, whole.points[-1])


def test_json_both_ways_and_as_a_file(tmp_path: Any) -> None:
    for cost in ("time", "flops"):
        curve = plan_curve(_chain(6, seed=2), cost=cost)  # type: ignore[arg-type]
        assert PlanCurve.from_json(curve.to_json()) == curve
        assert PlanCurve.from_json(curve.to_json()).to_json() == curve.to_json()
        curve.save(tmp_path / "curve.json")
        assert PlanCurve.load(tmp_path / "curve.json") == curve


def test_a_file_out_of_form_is_refused() -> None:
    data = json.loads(_by_hand().to_json())
    with pytest.raises(UnsupportedPlanVersionError, match="curve/1"):
        PlanCurve.from_json(json.dumps({**data, "schema": "ckptplan.curve/9"}))
    with pytest.raises(ValueError, match="unknown colour"):
        PlanCurve.from_json(json.dumps({**data, "colour": 1}))
    with pytest.raises(ValueError, match="not sorted"):
        PlanCurve.from_json(json.dumps({**data, "points": data["points"][::-1]}))
    with pytest.raises(ValueError, match="no points"):
        PlanCurve.from_json(json.dumps({**data, "points": []}))


def test_a_coarse_curve_tells_an_epsilon_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = _chain(12, seed=7)
    exact = plan_curve(chain, most_points=10**6)
    monkeypatch.setattr("ckptplan.planners.nested.GRAINS", (2,))
    coarse = plan_curve(chain, most_points=10**6)
    assert coarse.epsilon is not None
    dearer = 0
    for point in coarse.points:
        least = exact.at(point.peak_bytes)
        assert least is not None
        assert point.cost * (1 - coarse.epsilon) <= least.cost + 1e-9
        dearer += point.cost > least.cost
    assert dearer, "nothing was lost, so this test shows nothing"
    assert coarse.minimum.peak_bytes == exact.minimum.peak_bytes


def test_limited_segments_leave_epsilon_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.planners.nested.MOST_WAYS", 30)
    assert plan_curve(_chain(10, seed=7)).epsilon is None
    assert plan_curve(_chain(10, seed=7), nested=False).epsilon == 0.0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="most_points=1"):
        plan_curve(_chain(3), most_points=1)
    with pytest.raises(TimingOnlyProfileError, match="'a'"):
        plan_curve([BlockProfile("a", timing_only=True)])


def test_a_slowdown_allowed_gets_the_curves_least_peak_within_it() -> None:
    chain = _chain(8, seed=11)
    curve = plan_curve(chain, most_points=10**6)
    assert curve.step_cost is not None
    for ratio in (1.02, 1.1, 1.25, 1.5):
        plan = plan_checkpoints(chain, target_kind="max_slowdown", target_value=ratio, planner="optimal")
        allowed = (ratio - 1) * curve.step_cost * (1 + 1e-12)
        assert plan.predicted_peak_bytes == min(p.peak_bytes for p in curve.points if p.cost <= allowed)


def test_a_curve_beyond_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.planners.nested.MOST_CORNERS", 3)
    with pytest.raises(PlannerScaleError, match="6 blocks is beyond"):
        plan_curve(_chain(6))
