"""The referee: each fault alone, all of them at once, and no knowledge of how plans are made."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import ckptplan.check
from ckptplan.check import check_plan
from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import Keep
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.simulate import simulate_plan


def _chain(**changes: Any) -> ChainProfile:
    """Each block saves 10, hands on 4, needs 20 in backward; recomputing it costs 1.5 ms and 6 FLOPs."""
    known: dict[str, Any] = {
        "output_bytes": (4,),
        "output_gradient_bytes": 4,
        "keep": StageCost(10, 14, 20),
        "recompute": StageCost(0, 8, 21),
        "activation_bytes_estimate": 10,
        "recompute_time_ms": 1.5,
        "recompute_flops": 6,
    }
    return ChainProfile(tuple(BlockProfile(name, **(known | changes)) for name in "abc"))


def _plan(text: str = "R(0) K1 K2", **changes: Any) -> CheckpointPlan:
    """Kept before c: b's 10, and the inputs of b and c, 8; c's backward adds 20. Without recomputation 10 more."""
    known: dict[str, Any] = {
        "predicted_peak_bytes": 38,
        "no_checkpoint_peak_bytes": 48,
        "predicted_cost": 1.5,
        "budget_bytes": 38,
    }
    return dataclasses.replace(CheckpointPlan.from_text(text, _chain()), **(known | changes))


def _faults(chain: ChainProfile, plan: CheckpointPlan, budget_bytes: int | None = None) -> tuple[str, ...]:
    with pytest.raises(PlanIncompatibleError) as caught:
        check_plan(chain, plan, budget_bytes)
    return caught.value.faults


def test_a_right_plan_passes() -> None:
    check_plan(_chain(), _plan(), 38)
    check_plan(_chain(), _plan())
    check_plan(_chain().blocks, _plan(), 38)


def test_a_plan_that_predicts_nothing_is_judged_by_its_peak_alone() -> None:
    check_plan(_chain(), CheckpointPlan.from_text("R(0) K1 K2", _chain()), 38)
    assert _faults(_chain(), CheckpointPlan.from_text("K0 K1 K2", _chain()), 47)[0].startswith("over budget")


def test_one_byte_over_the_budget_is_a_fault() -> None:
    assert _faults(_chain(), _plan(), 37) == ("over budget: the plan peaks at 38 bytes (38 B), the budget is 37 bytes",)


@pytest.mark.parametrize(
    ("budget", "error"),
    [(math.nan, ValueError), (math.inf, ValueError), (-1, ValueError), ("38", TypeError), (True, TypeError)],
)
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"budget_bytes={budget!r}"):
        check_plan(_chain(), _plan(), budget)


@pytest.mark.parametrize("text", ["R(0 1) K2", "R(0 R(1 2))", "R(0 1 2)", "R(R(0 1) 2)", "R(0) R(1 2)"])
def test_segments_from_block_0_are_judged_where_the_batch_itself_comes_in(text: str) -> None:
    """Nothing of the chain comes in: the batch stands before the step, and no stage has a flag for it."""
    first, *rest = _chain()
    keep, again = StageCost(10, 14, 20, keeps_input=()), StageCost(0, 8, 21, keeps_input=())
    chain = ChainProfile((dataclasses.replace(first, keep=keep, recompute=again), *rest), input_bytes=())
    known = _chain()  # there an input of 0 bytes comes in, which costs the same
    expected = simulate_plan(known, CheckpointPlan.from_text(text, known))
    plan = dataclasses.replace(
        CheckpointPlan.from_text(text, chain),
        predicted_peak_bytes=expected.peak_bytes,
        predicted_cost=expected.recompute_time_ms,
    )
    check_plan(chain, plan)
    assert simulate_plan(chain, plan).peak_bytes == expected.peak_bytes


def test_a_plan_over_its_own_budget_is_a_fault_unless_it_says_so() -> None:
    assert "over budget" in _faults(_chain(), _plan(budget_bytes=30))[0]
    check_plan(_chain(), _plan(budget_bytes=30, feasible=False))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"predicted_peak_bytes": 37}, "predicted_peak_bytes is 37; the profile gives 38"),
        ({"no_checkpoint_peak_bytes": 49}, "no_checkpoint_peak_bytes is 49; the profile gives 48"),
        ({"predicted_cost": 1.25}, "predicted_cost is 1.25; the profile gives 1.5"),
        ({"predicted_cost": 1.5, "cost_kind": "flops"}, "predicted_cost is 1.5; the profile gives 6"),
    ],
)
def test_a_wrong_number_is_a_fault(changes: dict[str, Any], fault: str) -> None:
    assert _faults(_chain(), _plan(**changes)) == (fault,)


def test_an_ineligible_block_is_a_fault_with_its_reason() -> None:
    chain = _chain(eligible_for_checkpoint=False, exclusion_reason="grows a list")
    assert _faults(chain, _plan("R(0) R(1) K2")) == (
        "block 'a' is recomputed but not eligible: grows a list",
        "block 'b' is recomputed but not eligible: grows a list",
    )


def test_wrong_block_ids_are_named_in_both() -> None:
    decisions = [dataclasses.replace(d, block_id=d.block_id.upper()) for d in _plan().decisions]
    assert (
        _faults(_chain(), _plan(decisions=tuple(decisions)))[0] == "block 0 is 'A' in the plan and 'a' in the profile"
    )


def test_a_plan_of_another_length_is_a_fault() -> None:
    plan = CheckpointPlan.from_text("K0 K1")
    assert _faults(_chain(), plan) == (
        "blocks 2 to 2 are missing at the end",
        "the plan decides on 2 blocks, the profile has 3",
    )


def test_a_malformed_tree_is_a_fault_even_when_forced_past_the_constructor() -> None:
    plan = _plan()
    object.__setattr__(plan, "nodes", (Keep(0), Keep(2)))
    assert _faults(_chain(), plan) == ("blocks 1 to 1 are missing before block 2",)


def test_all_faults_come_at_once() -> None:
    plan = _plan(predicted_peak_bytes=1, no_checkpoint_peak_bytes=2, predicted_cost=3.0)
    faults = _faults(_chain(), plan, 30)
    assert [fault.split()[0] for fault in faults] == [
        "predicted_peak_bytes",
        "no_checkpoint_peak_bytes",
        "predicted_cost",
        "over",
    ]


def test_additive_plans_are_judged_by_their_sum() -> None:
    plan = _plan(memory_model="additive", predicted_peak_bytes=20, no_checkpoint_peak_bytes=30, budget_bytes=20)
    check_plan(_chain(), plan)
    assert "over budget" in _faults(_chain(), plan, 19)[0]


def test_a_profile_without_the_figures_is_refused_not_taken_for_zero() -> None:
    bare = _chain(activation_bytes_estimate=None, recompute_flops=None)
    with pytest.raises(ValueError, match="activation_bytes_estimate of 'a', 'b', 'c'"):
        check_plan(bare, _plan(memory_model="additive"))
    with pytest.raises(ValueError, match="recompute_flops, which is missing for 'a', 'b', 'c'"):
        check_plan(bare, _plan(cost_kind="flops"))


def test_the_referee_imports_neither_simulator_nor_planners() -> None:
    tree = ast.parse(Path(ckptplan.check.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {m for m in imported if m and m.startswith("ckptplan")} == {
        "ckptplan.costs",
        "ckptplan.errors",
        "ckptplan.nodes",
        "ckptplan.plan",
        "ckptplan.profiles",
        "ckptplan.selective",  # what names stand for
        "ckptplan.units",
    }
