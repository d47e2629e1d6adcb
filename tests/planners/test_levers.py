"""A budget that cannot be met is answered with what would help, each with its number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptplan.costs import StageCost
from ckptplan.errors import InfeasibleTargetError
from ckptplan.planners import plan_checkpoints
from ckptplan.planners.nested import least_nested_peak
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import simulate_plan


def _chain(head: int = 0) -> ChainProfile:
    """Six blocks that keep 300, hand on 100 and need 320 in backward; a head that takes ``head``."""
    blocks = [
        BlockProfile(
            f"b{i}",
            i,
            activation_bytes_estimate=300,
            output_bytes=(100,),
            output_gradient_bytes=100,
            keep=StageCost(300, 300, 320),
            recompute=StageCost(0, 200, 320),
            forward_time_ms=3.0,
            recompute_time_ms=2.0,
        )
        for i in range(6)
    ]
    return ChainProfile(tuple(blocks), post=RegionProfile("head", StageCost(0, 0, head)))


def _refused(chain: ChainProfile, budget: int, planner: str = "dp", **options: Any) -> InfeasibleTargetError:
    with pytest.raises(InfeasibleTargetError) as caught:
        plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options)
    return caught.value


def test_nesting_is_named_with_its_least_peak() -> None:
    # flat: five boundaries of 100 and the last block's 320; nested: what brute force of test_nested finds
    chain = _chain()
    least, at = least_nested_peak(chain, "peak")
    error = _refused(chain, 700)
    assert error.smallest_reachable_bytes == 820
    assert error.smallest_reachable_any_bytes == least < 700
    assert f"nesting (planner 'optimal') reaches {least} bytes" in str(error)
    assert f"set by {at}" in str(error)
    assert "what would help: planner='optimal'" in str(error)
    plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=700, planner="optimal")
    assert simulate_plan(chain, plan.nodes).peak_bytes <= 700


def test_a_planner_that_is_enough_and_flat_is_named_first() -> None:
    error = _refused(_chain(), 820, "none")
    assert "what would help: planner='dp'" in str(error)
    assert "planner='optimal'" not in str(error)


def test_below_the_nested_peak_no_planner_is_named() -> None:
    chain = _chain()
    least, _ = least_nested_peak(chain, "peak")
    error = _refused(chain, least - 1, "optimal")
    assert error.smallest_reachable_bytes == error.smallest_reachable_any_bytes == least
    assert "planner='" not in str(error).replace("planner 'optimal'", "")


def test_a_smaller_batch_comes_with_the_most_it_may_be() -> None:
    assert (
        "a smaller batch (by proportion at most 50 % of this one's size, not measured; batch=auto, or maximize("
        in str(_refused(_chain(), 410))
    )
    assert "a smaller batch (with more accumulation" in str(_refused(_chain(), 0))


def test_a_chunked_loss_comes_with_what_all_else_takes() -> None:
    error = _refused(_chain(head=5000), 1000)
    assert error.limited_by == "head and loss backward"
    assert "without them the same plan takes 820 B" in str(error)


def test_the_additive_model_names_no_nesting() -> None:
    chain = replace(_chain(), blocks=tuple(replace(b, eligible_for_checkpoint=i > 2) for i, b in enumerate(_chain())))
    error = _refused(chain, 899, memory_model="additive")
    assert error.smallest_reachable_any_bytes == error.smallest_reachable_bytes == 900
    assert "nesting" not in str(error)
