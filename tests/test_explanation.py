"""Why each block was chosen or not: every number against the simulator, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.explanation import explain
from ckptplan.nodes import parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.simulate import simulate_plan


def _block(name: str, saved: int, **changes: Any) -> BlockProfile:
    known: dict[str, Any] = {
        "output_bytes": (4,),
        "output_gradient_bytes": 4,
        "keep": StageCost(saved, saved + 6, saved + 8),
        "recompute": StageCost(0, 7, saved + 9),
        "forward_time_ms": 10.0,
        "recompute_time_ms": 7.0,
        "forward_flops": 100,
        "recompute_flops": 70,
        "activation_bytes_estimate": saved,
    }
    return BlockProfile(name, **(known | changes))


def _chain(**changes: Any) -> ChainProfile:
    sizes = (10, 20, 30)
    return ChainProfile(tuple(_block(name, size, **changes) for name, size in zip("abc", sizes, strict=True)))


def _plan(chain: ChainProfile, text: str, **target: Any) -> CheckpointPlan:
    known: dict[str, Any] = {"target_kind": "activation_budget_bytes", "target_value": 10**6}
    return plan_checkpoints(chain, planner="text", text=text, on_infeasible="best_effort", **(known | target))


def _reasons(chain: ChainProfile, text: str, **target: Any) -> dict[str, str]:
    return {block.block_id: block.reason for block in explain(chain, _plan(chain, text, **target)).blocks}


def test_kept_blocks_say_what_recomputing_them_would_do() -> None:
    # all kept: 76 at c backward; without a's 10: 66; without b's 20: 56, as a is kept; c again: one byte more
    assert _reasons(_chain(), "K0-2") == {
        "a": "kept: recomputing it would take 10 B off the peak for 7 ms; it is not needed",
        "b": "kept: recomputing it would take 20 B off the peak for 7 ms; it is not needed",
        "c": "kept: recomputing it would cost 7 ms and raise the peak by 1 B, at c backward",
    }


def test_recomputed_blocks_say_what_keeping_them_would_do() -> None:
    reasons = _reasons(_chain(), "R(0) K1 K2", target_value=70)
    assert reasons["a"] == (
        "recomputed in R(0), its forward runs 2 times: kept, it would spare 7 ms, and the peak would be 6 B above the "
        "budget"
    )
    assert _reasons(_chain(), "R(0) K1 K2")["a"].endswith("kept, it would spare 7 ms and raise the peak by 10 B")
    assert _reasons(_chain(), "K0 K1 R(2)")["c"].endswith("kept, it would spare 7 ms and not raise the peak")


@pytest.mark.parametrize(
    ("text", "block", "runs", "otherwise"),
    [
        ("R(0 1 2)", 1, 2, "R(0) K1 R(2)"),
        ("R(R(0 1) 2)", 0, 3, "K0 R(R(1) 2)"),
        ("R(R(0 1) 2)", 1, 3, "R(0) K1 R(2)"),
        ("R(R(0 1) 2)", 2, 2, "R(0 1) K2"),
        ("R(0 R(1 2))", 2, 2, "R(0 R(1)) K2"),
        ("R(0 R(1 2))", 0, 2, "K0 R(1 2)"),
        ("R(0) R(1 2)", 2, 2, "R(0) R(1) K2"),
    ],
)
def test_a_block_kept_out_of_a_nest_leaves_the_rest_as_it_was(text: str, block: int, runs: int, otherwise: str) -> None:
    chain = _chain()
    found = explain(chain, _plan(chain, text)).blocks[block]
    expected = simulate_plan(chain, parse_plan_text(otherwise))
    assert (found.other_peak_bytes, found.other_cost) == (expected.peak_bytes, expected.recompute_time_ms)
    assert found.runs == runs


def test_forward_runs_are_those_that_the_cost_counts() -> None:
    """With every run at the same price, blocks' runs beyond the first add up to the cost."""
    chain = _chain(forward_time_ms=1.0, recompute_time_ms=1.0)
    for text in ("R(R(R(0) 1) 2)", "R(0 R(1) R(2))", "R(R(0 1) 2)", "R(0) R(R(1) 2)", "R(0 R(1 2))"):
        found = explain(chain, _plan(chain, text))
        assert sum(block.runs - 1 for block in found.blocks) == found.cost


def test_a_block_without_another_way_says_why() -> None:
    chain = ChainProfile(
        (
            _block("a", 10, eligible_for_checkpoint=False, exclusion_reason="grows a list"),
            _block("b", 20, output_gradient_bytes=None),
            *(_block(name, 30) for name in "cd"),
        )
    )
    reasons = _reasons(chain, "K0 R(1 2 3)")
    assert "no other way" in reasons["a"]
    assert "grows a list" in reasons["a"]
    assert "no other way" not in reasons["c"]
    longer = ChainProfile((*(_block(n, 5) for n in "xy"), *chain[1:]))
    assert "'b'" in _reasons(longer, "R(0 1 2 3) K4")["c"]


def test_flops_and_the_additive_model() -> None:
    chain = _chain()
    plan = _plan(chain, "K0 R(1) K2", memory_model="additive", cost="flops", target_value=45)
    found = explain(chain, plan)
    assert (found.peak_bytes, found.cost) == (40, 70)
    assert found.blocks[1].fits_otherwise is False
    assert "spare 70 FLOPs, and the peak would be 15 B above the budget" in found.blocks[1].reason


def test_the_text_has_the_peak_and_a_line_per_block() -> None:
    chain = _chain()
    found = explain(chain, _plan(chain, "R(0) K1 K2"))
    lines = found.text.splitlines()
    assert lines[0] == "peak 66 B at c backward"
    assert [line.split()[0] for line in lines[1:]] == ["a", "b", "c"]


def test_a_plan_of_another_chain_is_refused() -> None:
    plan = _plan(_chain(), "K0-2")
    with pytest.raises(PlanIncompatibleError, match="block 2 is out of range"):
        explain(replace(_chain(), blocks=_chain().blocks[:2]), plan)
