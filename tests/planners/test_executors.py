"""Two ways to recompute a whole block, PyTorch's checkpoint and replay: which one is part of the plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.errors import InfeasibleTargetError
from ckptplan.nodes import Keep, Recompute, Selective, blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_whole_peak, plan_checkpoints, smallest_reachable
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import simulate_plan

Make = Callable[..., ChainProfile]


def with_replays(chain: ChainProfile, seed: int) -> ChainProfile:
    """Most blocks get a replay, dearer or cheaper than the checkpoint and of a lower or a higher peak, and some
    an option that keeps a part, which planner dp has to leave alone."""
    rng = random.Random(seed)
    blocks = []
    for block in chain:
        again = block.recompute
        if again is None or not block.eligible_for_checkpoint or rng.random() < 0.2:
            blocks.append(block)
            continue
        cost = replace(
            again,
            saved_bytes=rng.choice([again.saved_bytes, again.saved_bytes + 3]),
            backward_peak_bytes=max(0, again.backward_peak_bytes + rng.randint(-20, 5)),
        )
        work = block.recompute_time_ms if block.recompute_time_ms is not None else 1.0
        option = SelectiveOption((), cost, round(work * rng.choice([0.5, 0.9, 1.0, 1.5]), 3), None)
        part = SelectiveOption(("addmm#0:0",), cost, 0.0, None)
        blocks.append(replace(block, selective=(option, part) if rng.random() < 0.5 else (option,)))
    return replace(chain, blocks=tuple(blocks))


def all_whole_nodes(chain: ChainProfile) -> list[tuple[Any, ...]]:
    """Every flat plan over whole blocks."""
    ways: list[list[Any]] = []
    for i, block in enumerate(chain):
        ways.append([Keep(i)])
        if block.eligible_for_checkpoint and block.recompute is not None:
            ways[-1].append(Recompute((Keep(i),)))
        if any(not option.saved_ops for option in block.selective):
            ways[-1].append(Selective(i, ()))
    return list(itertools.product(*ways))


def judged(chain: ChainProfile, nodes: tuple[Any, ...]) -> tuple[float, int, int]:
    """Cost, number of blocks that are not kept, and peak."""
    count = sum(not isinstance(node, Keep) for node in nodes)
    return round(plan_recompute_cost(chain, nodes, "time"), 9), count, simulate_plan(chain, nodes).peak_bytes


@pytest.mark.parametrize("batch", range(3))
def test_dp_equals_brute_force_over_both_executors(make_random: Make, batch: int) -> None:
    replayed = 0
    for seed in range(12 * batch, 12 * (batch + 1)):
        chain = with_replays(make_random(seed, most_blocks=5, plain=seed % 2 == 0), seed)
        plans = [judged(chain, nodes) for nodes in all_whole_nodes(chain)]
        peaks = sorted({peak for *_, peak in plans})
        assert least_whole_peak(chain)[0] == peaks[0] <= smallest_reachable(chain)[0]
        for budget in {peaks[0], peaks[len(peaks) // 3], peaks[-1], peaks[len(peaks) // 2] - 1} - {peaks[0] - 1}:
            plan = plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget, planner="dp")
            cost, count, peak = min(p for p in plans if p[2] <= budget)
            assert plan.predicted_cost == pytest.approx(cost, rel=1e-9, abs=1e-12), (seed, budget)
            assert (plan.recomputed, plan.predicted_peak_bytes) == (count, peak), (seed, budget)
            assert plan.optimality_gap == 0.0
            assert not plan.selective
            replayed += sum(decision.executor == "replay" for decision in plan.decisions)
        with pytest.raises(InfeasibleTargetError) as caught:
            plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=peaks[0] - 1, planner="dp")
        assert caught.value.smallest_reachable_bytes == peaks[0]
    assert replayed > 10, "replay was hardly ever chosen, so this test shows less than it should"


def block(name: str, replay_ms: float, replay_peak: int = 60) -> BlockProfile:
    return BlockProfile(
        name,
        output_bytes=(10,),
        output_is_input=(None,),
        output_gradient_bytes=10,
        keep=StageCost(100, 110, 130),
        recompute=StageCost(0, 50, 130),
        recompute_time_ms=2.0,
        forward_time_ms=2.0,
        recompute_flops=100,
        forward_flops=100,
        backward_flops=200,
        selective=(SelectiveOption((), StageCost(0, 50, replay_peak), replay_ms, 100),),
    )


def planned(chain: ChainProfile, budget: int, **options: Any) -> CheckpointPlan:
    return plan_checkpoints(chain, target_kind="activation_budget_bytes", target_value=budget, **options)


def test_the_cheaper_executor_is_chosen_and_the_reason_names_both() -> None:
    chain = ChainProfile((block("faster", 1.5), block("slower", 3.0), block("last", 3.0)))
    plan = planned(chain, 200)
    assert plan.text == "S0[] R(1) K2"
    assert [d.executor for d in plan.decisions] == ["replay", "checkpoint", None]
    assert [d.checkpointed for d in plan.decisions] == [True, True, False]
    assert plan.decisions[0].reason == "recomputed by replay for 1.5 ms (PyTorch's checkpoint: 2 ms)"
    assert plan.decisions[1].reason == "recomputed by PyTorch's checkpoint for 2 ms (replay: 3 ms)"


def test_the_executor_of_the_lower_peak_is_chosen_where_only_that_fits() -> None:
    chain = ChainProfile((block("a", 3.0), block("b", 3.0)))
    plan = planned(chain, 110)
    assert plan.text == "S0[] S1[]"
    assert plan.decisions[1].reason == (
        "recomputed by replay for 3 ms, with a backward peak of 60 B (PyTorch's checkpoint: 2 ms, 130 B)"
    )
    with pytest.raises(InfeasibleTargetError, match="planner 'dp' reaches"):
        planned(chain, 110, planner="greedy")


@pytest.mark.parametrize("planner", ["dp", "optimal"])
def test_of_equal_flops_less_time_wins_and_of_equal_time_the_lower_peak(make_random: Make, planner: str) -> None:
    decided_by_time = 0
    for seed in range(16):
        chain = with_replays(make_random(seed, most_blocks=5, plain=True), seed)
        rng = random.Random(seed)
        blocks = []
        for b in chain:
            flops = rng.choice([1000, 2000])
            options = tuple(replace(o, flops=rng.choice([0, flops])) for o in b.selective if not o.saved_ops)
            figures = {"recompute_flops": flops, "forward_flops": flops, "forward_time_ms": b.recompute_time_ms}
            blocks.append(replace(b, selective=options, **figures))
        chain = replace(chain, blocks=tuple(blocks))
        plans = []
        for nodes in all_whole_nodes(chain):
            figures_of = [plan_recompute_cost(chain, nodes, kind) for kind in ("flops", "time")]
            plans.append((*figures_of, simulate_plan(chain, nodes).peak_bytes))
        peaks = sorted({peak for *_, peak in plans})
        for budget in {peaks[len(peaks) // 3], peaks[len(peaks) // 2]}:
            plan = planned(chain, budget, planner=planner, cost="flops")
            if any(len(blocks_of((node,))) > 1 for node in plan.nodes):
                continue  # a segment or a nest that costs less than any flat plan
            fits = sorted((flops, round(ms, 6), peak) for flops, ms, peak in plans if peak <= budget)
            time_ms = plan_recompute_cost(chain, plan.nodes, "time")
            assert (plan.predicted_cost, round(time_ms, 6), plan.predicted_peak_bytes) == fits[0], (seed, budget)
            decided_by_time += sum(flops == fits[0][0] and ms > fits[0][1] for flops, ms, _ in fits)
    assert decided_by_time > 10
