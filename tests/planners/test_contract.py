"""What every planner keeps to, on every chain and budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptplan import planners
from ckptplan.check import check_plan
from ckptplan.costs import CompiledOption, StageCost
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError, TimingOnlyProfileError
from ckptplan.nodes import Keep, PlanNode, Recompute
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import PLANNERS, PlannerResult, plan_checkpoints, shown_name, smallest_reachable
from ckptplan.planners.heuristic import greedy
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.simulate import PlanCost

Make = Callable[..., ChainProfile]
Oracle = Callable[[ChainProfile, str], list[tuple[float, int, int, tuple[bool, ...]]]]
SEARCHING = ["uniform", "greedy", "dynamic_programming"]


def _plan(chain: Any, budget: int, planner: Any = "dynamic_programming", **options: Any) -> CheckpointPlan:
    return plan_checkpoints(
        chain, target_kind="activation_budget_bytes", target_value=budget, planner=planner, **options
    )


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
@pytest.mark.parametrize("planner", SEARCHING)
def test_what_fits_is_within_the_budget_and_what_does_not_says_so(
    make_random: Make, oracle: Oracle, planner: str, memory_model: Any
) -> None:
    for seed in range(20):
        chain = make_random(seed, most_blocks=6)
        plans = oracle(chain, memory_model)
        peak_of = {choice: peak for _, _, peak, choice in plans}
        least = min(peak_of.values())
        for budget in sorted({peak for _, _, peak, _ in plans})[:: max(1, len(plans) // 6)]:
            plan = _plan(chain, budget, planner, memory_model=memory_model, on_infeasible="best_effort")
            choice = tuple(decision.checkpointed for decision in plan.decisions)
            assert plan.predicted_peak_bytes == peak_of[choice]
            assert plan.feasible == (peak_of[choice] <= budget)
            assert plan.feasible or planner == "uniform"  # the others fit whenever a flat plan does
            check_plan(chain, plan, budget if plan.feasible else None)
            again = _plan(chain, budget, planner, memory_model=memory_model, on_infeasible="best_effort")
            assert again.to_json() == plan.to_json()
        if least > 0:
            with pytest.raises(InfeasibleTargetError) as caught:
                _plan(chain, least - 1, planner, memory_model=memory_model)
            assert caught.value.budget_bytes == least - 1
            assert caught.value.smallest_reachable_any_bytes is not None
            assert caught.value.smallest_reachable_any_bytes <= least  # nesting may reach further
            assert caught.value.smallest_reachable_bytes is not None
            assert caught.value.smallest_reachable_bytes >= least
            if planner != "uniform":
                assert caught.value.smallest_reachable_bytes == least
            assert caught.value.limited_by is not None
            assert caught.value.limited_by in str(caught.value)


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
def test_the_dynamic_programme_is_never_dearer_than_greedy_or_uniform(make_random: Make, memory_model: Any) -> None:
    for seed in range(100, 130):
        chain = make_random(seed)
        for share in (0.9, 0.7, 0.5):

            def cost(planner: str, chain: ChainProfile = chain, share: float = share) -> float:
                plan = plan_checkpoints(
                    chain,
                    target_kind="activation_budget_fraction",
                    target_value=share,
                    planner=planner,
                    memory_model=memory_model,
                    on_infeasible="best_effort",
                )
                assert plan.predicted_cost is not None
                return plan.predicted_cost if plan.feasible else float("inf")

            assert cost("dp") <= min(cost("greedy"), cost("uniform"))


def test_no_recomputed_block_of_greedy_could_be_kept(make_random: Make, oracle: Oracle) -> None:
    for seed in range(30):
        chain = make_random(seed, most_blocks=7)
        peak_of = {choice: peak for _, _, peak, choice in oracle(chain, "peak")}
        budget = sorted(peak_of.values())[len(peak_of) // 3]
        choice = tuple(decision.checkpointed for decision in _plan(chain, budget, "greedy").decisions)
        for i in (i for i, again in enumerate(choice) if again):
            fewer = (*choice[:i], False, *choice[i + 1 :])
            assert peak_of[fewer] > budget


def test_uniform_spreads_the_fewest_blocks_that_fit(make_equal: Make) -> None:
    chain = make_equal(12, 100, boundary=1)
    none = plan_checkpoints(chain, target_kind="activation_budget_fraction", target_value=1.0, planner="uniform")
    assert none.recomputed == 0
    assert none.no_checkpoint_peak_bytes is not None
    plan = _plan(chain, none.no_checkpoint_peak_bytes - 201, "uniform")
    assert [i for i, d in enumerate(plan.decisions) if d.checkpointed] == [0, 4, 8]


@pytest.mark.parametrize(
    ("planner", "recomputed"), [("no_checkpoint", 0), ("none", 0), ("checkpoint_all", 4), ("all", 4)]
)
def test_the_references_stay_what_they_are_whatever_the_budget(make_equal: Make, planner: str, recomputed: int) -> None:
    """P6."""
    chain = make_equal(4, 100, boundary=1)
    plan = _plan(chain, 10, planner, on_infeasible="best_effort")
    assert (plan.recomputed, plan.feasible) == (recomputed, False)
    with pytest.raises(InfeasibleTargetError, match=shown_name(plan.planner)):
        _plan(chain, 10, planner)
    assert _plan(chain, 10**6, planner).recomputed == recomputed


def test_checkpoint_all_leaves_out_what_cannot_be_recomputed(make_random: Make) -> None:
    chain = make_random(3)
    eligible = [block.eligible_for_checkpoint for block in chain]
    assert False in eligible
    plan = _plan(chain, 10**9, "all")
    assert [decision.checkpointed for decision in plan.decisions] == eligible


def test_both_names_of_a_planner_give_the_same_plan(make_equal: Make) -> None:
    chain = make_equal(5, 100, boundary=1)
    assert _plan(chain, 400, "dp") == _plan(chain, 400, "dynamic_programming") == _plan(chain, 400)
    assert _plan(chain, 400, "dp").planner == "dynamic_programming"


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - {"text", "file"}))
def test_one_block_is_enough(make_equal: Make, planner: str) -> None:
    chain = make_equal(1, 100, boundary=4, compiled=(CompiledOption(0.5, StageCost(50, 100, 100), time_ms=0.0),))
    assert _plan(chain, 1000, planner).feasible


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - {"text", "file"}))
def test_no_block_is_not(planner: str) -> None:
    with pytest.raises(ValueError, match="no blocks"):
        _plan([], 1000, planner)


def test_a_chain_with_nothing_to_recompute_is_kept_or_infeasible(make_equal: Make) -> None:
    chain = make_equal(3, 100, eligible_for_checkpoint=False, exclusion_reason="grows a list", recompute=None)
    assert _plan(chain, 300, memory_model="additive").recomputed == 0
    with pytest.raises(InfeasibleTargetError, match="making 'b0', 'b1', 'b2' recomputable"):
        _plan(chain, 299)
    reasons = {decision.reason for decision in _plan(chain, 10**6).decisions}
    assert reasons == {"not eligible: grows a list"}


class TestPlugIns:
    def test_a_function_may_return_nodes_text_or_a_result(self, make_equal: Make) -> None:
        chain = make_equal(3, 100, boundary=1)

        def as_text(profile: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str) -> str:
            return "R(0) R(1-2)"

        def as_nodes(profile: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str) -> Sequence[PlanNode]:
            return [Recompute((Keep(0),)), Keep(1), Keep(2)]

        def as_result(
            profile: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str, gap: float = 0.5
        ) -> PlannerResult:
            return PlannerResult((Keep(0), Keep(1), Keep(2)), gap)

        assert _plan(chain, 1000, as_text).text == "R(0) R(1 2)"
        assert _plan(chain, 1000, as_text).planner == "as_text"
        assert _plan(chain, 1000, as_nodes).text == "R(0) K1 K2"
        assert _plan(chain, 1000, as_result, gap=0.25).optimality_gap == 0.25
        assert _plan(chain, 1000, greedy).planner == "greedy"

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("K0 K1", "planner 'plug_in': blocks 2 to 2 are missing"),
            ("K0 K1 R(2)", "block 'b2' is recomputed but not eligible: says the test"),
        ],
    )
    def test_a_result_that_is_no_plan_is_refused(self, make_equal: Make, text: str, fault: str) -> None:
        chain = make_equal(3, 100, boundary=1)
        last = dataclasses.replace(chain[2], eligible_for_checkpoint=False, exclusion_reason="says the test")

        def plug_in(profile: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str) -> str:
            return text

        with pytest.raises(PlanIncompatibleError, match=fault):
            _plan([chain[0], chain[1], last], 1000, plug_in)

    def test_a_result_over_the_budget_is_refused_with_what_others_reach(self, make_equal: Make) -> None:
        """B31."""
        chain = make_equal(3, 100, boundary=1, transient=5)

        def lazy(profile: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str) -> str:
            return "K0 K1 K2"

        with pytest.raises(InfeasibleTargetError, match="planner 'dp' reaches 107 bytes") as caught:
            _plan(chain, 250, lazy)
        assert caught.value.smallest_reachable_bytes == 307
        assert caught.value.smallest_reachable_any_bytes == 106  # nested: one boundary less
        assert caught.value.limited_by == "b2 backward"


def test_the_referee_stands_behind_every_result(make_equal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator that is off by one byte is found out."""
    real = planners.simulate_plan

    def off_by_one(*arguments: Any) -> PlanCost:
        cost = real(*arguments)
        return dataclasses.replace(cost, peak_bytes=cost.peak_bytes - 1)

    monkeypatch.setattr(planners, "simulate_plan", off_by_one)
    with pytest.raises(PlanIncompatibleError, match="predicted_peak_bytes is"):
        _plan(make_equal(3, 100, boundary=1), 250)


class TestForcedPlans:
    def test_text_is_judged_like_any_planner(self, make_equal: Make) -> None:
        chain = make_equal(4, 100, boundary=1)
        plan = _plan(chain, 1000, "text", text="K0 R(1) R(2 3)")
        assert (plan.text, plan.planner) == ("K0 R(1) R(2 3)", "text")
        assert plan.predicted_peak_bytes is not None
        with pytest.raises(InfeasibleTargetError, match="planner 'text'"):
            _plan(chain, 100, "text", text="K0 K1 K2 K3")

    def test_a_stored_plan_is_replayed(self, make_equal: Make, tmp_path: Path) -> None:
        chain = make_equal(4, 100, boundary=1)
        stored = _plan(chain, 250)
        stored.save(tmp_path / "plan.json")
        again = _plan(chain, 1000, "file", path=tmp_path / "plan.json")
        assert again.nodes == stored.nodes
        assert again.optimality_gap is None  # proved for another budget

    def test_a_stored_plan_of_another_model_is_refused(self, make_equal: Make, tmp_path: Path) -> None:
        chain = dataclasses.replace(make_equal(4, 100, boundary=1), fingerprint="gelu")
        _plan(chain, 250).save(tmp_path / "plan.json")
        swapped = dataclasses.replace(chain, fingerprint="relu")
        with pytest.raises(PlanIncompatibleError, match="another model: fingerprint gelu, not relu"):
            _plan(swapped, 1000, "file", path=tmp_path / "plan.json")
        with pytest.raises(PlanIncompatibleError, match="is of blocks 'b0', 'b1', 'b2', 'b3', not 'b0', 'b1'"):
            _plan(chain[:2], 1000, "file", path=tmp_path / "plan.json")

    def test_options_are_checked_by_name(self, make_equal: Make) -> None:
        chain = make_equal(2, 100)
        with pytest.raises(TypeError, match="planner 'text' needs the option text"):
            _plan(chain, 1000, "text")
        with pytest.raises(TypeError, match="'greedy': unknown option slots; it takes no options"):
            _plan(chain, 1000, "greedy", slots=5)
        with pytest.raises(TypeError, match="'text': unknown option txt; it takes text"):
            _plan(chain, 1000, "text", txt="K0 K1")


class TestArguments:
    def test_an_unknown_planner_gets_the_nearest_and_the_list(self, make_equal: Make) -> None:
        with pytest.raises(ValueError, match=r"'greedi' is not known; did you mean 'greedy'\?.*uniform"):
            _plan(make_equal(2, 1), 10, "greedi")
        with pytest.raises(TypeError, match="planner=3 is a int"):
            _plan(make_equal(2, 1), 10, 3)

    def test_an_unknown_policy_is_refused(self, make_equal: Make) -> None:
        with pytest.raises(ValueError, match="on_infeasible='warn'"):
            _plan(make_equal(2, 1), 10, on_infeasible="warn")

    def test_blocks_of_another_model_are_refused(self, make_equal: Make) -> None:
        chain = make_equal(2, 1)
        assert _plan(chain, 10, blocks=chain).feasible
        with pytest.raises(PlanIncompatibleError, match="profile is of blocks 'b0', 'b1', the blocks given are 'b0'"):
            _plan(chain, 10, blocks=chain[:1])

    def test_a_profile_of_times_only_is_refused(self) -> None:
        with pytest.raises(TimingOnlyProfileError):
            _plan([BlockProfile("a", timing_only=True)], 10)

    def test_a_profile_without_peak_fields_is_refused_naming_them(self) -> None:
        with pytest.raises(ValueError, match="keep of 'a'"):
            _plan([BlockProfile("a", activation_bytes_estimate=5)], 10)


class TestReasons:
    def test_each_block_says_why(self) -> None:
        def block(name: str, saved: int, cost: float, **changes: Any) -> BlockProfile:
            known: dict[str, Any] = {
                "output_bytes": (0,),
                "output_gradient_bytes": 0,
                "keep": StageCost(saved, saved, saved),
                "recompute": StageCost(0, saved, saved),
                "recompute_time_ms": cost,
            }
            return BlockProfile(name, **(known | changes))

        mib = 2**20
        blocks = [
            block("a", 8 * mib, 1.25),
            block("b", 2 * mib, 9.0),
            block("c", 2 * mib, 1.0, eligible_for_checkpoint=False, exclusion_reason="grows a list"),
            block("d", 8 * mib, 1.0),
        ]
        plan = _plan(blocks, 12 * mib)
        assert plan.text == "R(0) K1 K2 K3"
        assert [decision.reason for decision in plan.decisions] == [
            "recomputed: saves 8.00 MiB at the peak for 1.25 ms",
            "kept: not needed; recomputing it too would save 2.00 MiB for 9 ms",
            "not eligible: grows a list",
            "kept: its recomputation would itself set the peak, saving nothing",
        ]
        assert [decision.retained_bytes for decision in plan.decisions] == [0, 2 * mib, 2 * mib, 8 * mib]

    def test_a_peak_elsewhere_is_named(self, make_equal: Make) -> None:
        blocks = make_equal(3, 10).blocks
        pre = RegionProfile("pre", StageCost(0, 500, 0), output_bytes=(0,))
        assert {d.reason for d in _plan(ChainProfile(blocks, pre=pre), 500).decisions} == {
            "kept: the peak is before the blocks, which recomputing this block would not lower"
        }
        heavy = dataclasses.replace(blocks[0], keep=StageCost(0, 10, 700), recompute=StageCost(0, 10, 700))
        plan = _plan([heavy, *blocks[1:]], 700)
        assert (
            plan.decisions[2].reason == "kept: the peak is in block 'b0', which recomputing this block would not lower"
        )

    def test_blocks_of_a_segment_name_it(self, make_equal: Make) -> None:
        plan = _plan(make_equal(3, 10), 100, "text", text="K0 R(1 2)")
        assert [decision.reason for decision in plan.decisions] == [
            "kept",
            "recomputed: part of R(1 2)",
            "recomputed: part of R(1 2)",
        ]


def test_the_smallest_reachable_peak_is_the_least_of_all_plans(make_random: Make, oracle: Oracle) -> None:
    for seed in range(30):
        chain = make_random(seed, most_blocks=6)
        assert smallest_reachable(chain)[0] == min(peak for _, _, peak, _ in oracle(chain, "peak"))
