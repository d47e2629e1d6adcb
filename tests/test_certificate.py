"""What a certificate proves, against brute force; it holds for any planner's plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.certificate import certify
from ckptplan.errors import PlanIncompatibleError
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import no_checkpoint_peak
from tests.planners import trees
from tests.planners.conftest import all_plans, random_chain, with_gaps


def _chain(seed: int) -> ChainProfile:
    return trees.uneven(random_chain(seed, most_blocks=4, plain=True), 2 * seed)


def _plan(chain: ChainProfile, budget: int, planner: str, **options: Any) -> Any:
    return plan_checkpoints(
        chain,
        target_kind="activation_budget_bytes",
        target_value=budget,
        planner=planner,
        on_infeasible="best_effort",
        **options,
    )


@pytest.mark.parametrize("planner", ["optimal", "dp", "ilp", "greedy", "uniform", "all"])
def test_its_bounds_are_the_least_costs_of_brute_force(planner: str) -> None:
    gaps = 0
    for seed in range(6):
        chain = _chain(seed)
        plans = [(trees.peak(chain, f), trees.cost(chain, f), f) for f in trees.all_forests(0, len(chain))]
        budget = no_checkpoint_peak(chain) * 3 // 4
        plan = _plan(chain, budget, planner)
        found = certify(chain, plan)
        limit = max(budget, plan.predicted_peak_bytes)
        fitting = [(cost, f) for peak, cost, f in plans if peak is not None and peak <= limit]
        flat = [cost for cost, forest in fitting if all(isinstance(t, int) or len(t) == 1 for t in forest)]
        least = min(cost for cost, _ in fitting)
        assert found.lower_bound == pytest.approx(least, abs=1e-9)
        assert found.flat_lower_bound == (pytest.approx(min(flat), abs=1e-9) if flat else None)
        assert found.gap == pytest.approx((plan.predicted_cost - least) / (plan.predicted_cost or 1), abs=1e-9)
        assert found.cross_check == ("agrees" if flat else "not made")
        assert (found.peak_bytes, found.cost) == (plan.predicted_peak_bytes, plan.predicted_cost)
        gaps += found.gap > 0
    assert (gaps > 0) == (planner not in ("optimal",)) or planner in ("dp", "ilp")


@pytest.mark.parametrize("planner", ["optimal", "dp", "greedy"])
def test_what_the_model_runs_between_blocks_is_counted_and_never_recomputed(planner: str) -> None:
    for seed in range(8):
        chain = with_gaps(random_chain(seed, most_blocks=7))
        for share in (0.6, 0.8):
            plan = _plan(chain, int(no_checkpoint_peak(chain) * share), planner)
            found = certify(chain, plan)
            limit = max(plan.budget_bytes or 0, plan.predicted_peak_bytes)
            flat = [cost for cost, _, peak, *_ in all_plans(chain, "peak") if peak <= limit]
            assert found.flat_lower_bound == (pytest.approx(min(flat), abs=1e-9) if flat else None)
            assert found.lower_bound <= found.cost + 1e-9
            assert found.cross_check == ("agrees" if flat else "not made")


def test_the_text_says_it_all() -> None:
    chain = _chain(2)
    plan = _plan(chain, no_checkpoint_peak(chain) * 3 // 4, "optimal")
    text = certify(chain, plan).text
    for part in (
        "peak ",
        " allowed, at ",
        "recomputing costs ",
        "proved the least of all plans over whole blocks (HiGHS agrees)",
    ):
        assert part in text


def test_a_dearer_plan_has_its_gap_told() -> None:
    chain = _chain(1)
    budget = no_checkpoint_peak(chain)
    found = certify(chain, _plan(chain, budget, "all"))
    assert (found.lower_bound, found.gap) == (0, 1.0)
    assert "up to 100 % more than needed: the least of all plans over whole blocks is no lower than 0" in found.text


def test_a_planner_that_is_wrong_is_seen_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptplan import certificate
    from ckptplan.planners.fixed import checkpoint_all

    chain = _chain(3)
    plan = _plan(chain, no_checkpoint_peak(chain), "dp")

    def wrong(*args: Any, **options: Any) -> Any:
        return replace(checkpoint_all(*args, **options), optimality_gap=0.0)

    monkeypatch.setattr(certificate, "ilp", wrong)
    assert certify(chain, plan).cross_check == "disagrees"


def test_without_scipy_the_cross_check_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = _chain(3)
    plan = _plan(chain, no_checkpoint_peak(chain) // 2, "dp")
    assert certify(chain, plan, cross_check=False).cross_check == "not made"
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert certify(chain, plan).cross_check == "not made"
    with pytest.raises(ModuleNotFoundError, match="ilp"):
        certify(chain, plan, cross_check=True)


@pytest.mark.parametrize(("memory_model", "cost"), [("additive", "time"), ("peak", "flops")])
def test_other_models_and_costs(memory_model: Any, cost: Any) -> None:
    chain = _chain(4)
    blocks = [replace(b, forward_flops=1000 + i, recompute_flops=700 + i) for i, b in enumerate(chain)]
    chain = replace(chain, blocks=tuple(blocks))
    budget = no_checkpoint_peak(chain, memory_model) * 2 // 3
    plan = _plan(chain, budget, "optimal", memory_model=memory_model, cost=cost)
    found = certify(chain, plan)
    assert (found.gap, found.cost_kind) == (0.0, cost)


def test_a_plan_that_was_tampered_with_gets_none() -> None:
    chain = _chain(0)
    plan = _plan(chain, no_checkpoint_peak(chain), "dp")
    with pytest.raises(PlanIncompatibleError, match="predicted_peak_bytes"):
        certify(chain, replace(plan, predicted_peak_bytes=1))


def test_json() -> None:
    chain = _chain(0)
    plan = _plan(chain, no_checkpoint_peak(chain), "dp")
    data = json.loads(certify(chain, plan).to_json())
    assert (data["plan_digest"], data["gap"]) == (plan.digest, 0.0)
