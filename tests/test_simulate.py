"""The simulator: peaks by hand, and against the formula of the memory model written down literally."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptplan.check import check_plan
from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError, TimingOnlyProfileError
from ckptplan.nodes import Keep, PlanNode, Recompute, parse_plan_text, recomputed_blocks
from ckptplan.plan import CheckpointPlan, decision_for
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import no_checkpoint_peak, simulate_plan


def _block(name: str, saved: int, **changes: Any) -> BlockProfile:
    """Output 4, gradient 4; keeps its input and saves ``saved``; recomputation needs one byte more in backward."""
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


def _three() -> list[BlockProfile]:
    return [_block("a", 10), _block("b", 20), _block("c", 30)]


class TestByHand:
    def test_three_kept_blocks(self) -> None:
        # forward: 0+16 | a keeps 10 and hands on 4: 14+26 | 10+20+4+4: 38+36 | loss: 60+8 kept, 4 handed on
        # backward: loss 68+4 | c 38+38 (its input held, its own 30 inside) | b 14+28 | a 0+18
        cost = simulate_plan(_three(), parse_plan_text("K0 K1 K2"))
        assert cost.timeline == (
            ("a", "forward", 16),
            ("b", "forward", 40),
            ("c", "forward", 74),
            ("head and loss", "forward", 72),
            ("head and loss", "backward", 72),
            ("c", "backward", 76),
            ("b", "backward", 42),
            ("a", "backward", 18),
        )
        assert (cost.peak_bytes, cost.peak_at) == (76, "c backward")
        assert cost.retained_bytes == (10, 24, 34)
        assert (cost.recompute_time_ms, cost.recompute_flops) == (0, 0)

    def test_recomputing_the_first_block_lowers_all_behind_it(self) -> None:
        cost = simulate_plan(_three(), parse_plan_text("R(0) K1 K2"))
        assert cost.peak_bytes == 66
        assert cost.retained_bytes == (0, 24, 34)
        assert cost.recompute_time_ms == 7.0
        assert cost.recompute_flops == 70

    def test_recomputing_the_last_block_saves_nothing(self) -> None:
        assert simulate_plan(_three(), parse_plan_text("K0 K1 R(2)")).peak_bytes == 77

    def test_a_segment_drops_its_inner_boundaries_and_replays_as_a_chain(self) -> None:
        cost = simulate_plan(_three(), parse_plan_text("R(0 1) K2"))
        # first forward: a alone 7, then b 7 beside a's output 4; replay of a (16) and b (14+26) beside the gradient 4
        # of the segment's end, b only as far as its own recomputation goes (29): 14+29, then backward b 14+28, a 18
        assert {s: level for s, p, level in cost.timeline if p == "forward"}["a..b"] == 11
        assert {s: level for s, p, level in cost.timeline if p == "backward"}["a..b"] == 43
        assert cost.peak_bytes == 43  # c: the segment's output 4 and its own 38 give 42
        assert cost.retained_bytes == (0, 0, 34)
        assert cost.recompute_time_ms == 10.0 + 7.0
        assert cost.recompute_flops == 170

    def test_a_nested_block_runs_once_per_level_but_not_where_its_node_ends_the_outer_replay(self) -> None:
        chain = ChainProfile(tuple(_three()))
        # outer replay: a only, as it ends when b's input is there; inner replay b, c: 10 + 7
        assert plan_recompute_cost(chain, parse_plan_text("R(0 R(1 2))"), "time") == 10.0 + 17.0
        # outer replay a, b, c: 10 + 10 + 7; inner replay a, b: 10 + 7
        assert plan_recompute_cost(chain, parse_plan_text("R(R(0 1) 2)"), "time") == 27.0 + 17.0
        assert plan_recompute_cost(chain, parse_plan_text("R(0 R(1) R(2))"), "flops") == 200 + 70 + 70

    def test_regions_stand_before_and_after(self) -> None:
        chain = ChainProfile(
            (_block("a", 10),),
            pre=RegionProfile("pre", StageCost(3, 9, 9, (False,), (False,)), output_bytes=(4,)),
            post=RegionProfile("post", StageCost(50, 60, 100, (True,))),
        )
        cost = simulate_plan(chain, [Keep(0)])
        assert cost.timeline == (
            ("before the blocks", "forward", 9),
            ("a", "forward", 3 + 4 + 16),
            ("head and loss", "forward", 3 + 4 + 10 + 4 + 60),
            ("head and loss", "backward", 3 + 4 + 10 + 4 + 100),
            ("a", "backward", 3 + 4 + 18),
            ("before the blocks", "backward", 9),
        )
        assert cost.peak_at == "head and loss backward"

    def test_a_storage_passed_through_is_counted_once_and_lives_on(self) -> None:
        # b hands a's output on; c is the last to use it, nobody keeps it
        drop = StageCost(0, 0, 0, (False,), (False,))
        blocks = [
            _block("a", 0, output_bytes=(100,), keep=drop),
            _block("b", 0, output_bytes=(100, 3), output_is_input=(0, None), keep=StageCost(0, 0, 0, False, False)),  # type: ignore[arg-type]
            _block("c", 0, output_bytes=(1,), keep=StageCost(0, 0, 0, (False, False), (False,))),
        ]
        levels = [level for _, phase, level in simulate_plan(blocks, parse_plan_text("K0-2")).timeline]
        assert levels == [0, 100, 103, 1, 4, 0, 0, 0]

    def test_a_storage_that_two_stages_keep_is_counted_once(self) -> None:
        out = StageCost(0, 0, 0, (False,), (True,))
        both = StageCost(0, 0, 0, (True,), (False,))
        blocks = [_block("a", 0, keep=out), _block("b", 0, keep=both)]
        cost = simulate_plan(blocks, parse_plan_text("K0 K1"))
        assert cost.retained_bytes == (4, 0)
        assert cost.peak_bytes == 8  # at the loss: a's output, and b's: handed on, then as a gradient

    def test_the_additive_model_sums_kept_blocks(self) -> None:
        cost = simulate_plan(_three(), parse_plan_text("K0 R(1) K2"), "additive")
        assert (cost.peak_bytes, cost.peak_at) == (40, "c forward")
        assert cost.retained_bytes == (10, 0, 30)
        assert no_checkpoint_peak(_three(), "additive") == 60
        assert simulate_plan(_three(), parse_plan_text("R(0 1 2)"), "additive").peak_bytes == 0


class TestRefusals:
    def test_a_plan_of_another_length(self) -> None:
        with pytest.raises(PlanIncompatibleError, match="blocks 2 to 2 are missing at the end"):
            simulate_plan(_three(), parse_plan_text("K0 K1"))

    def test_a_block_that_cannot_be_recomputed(self) -> None:
        blocks = [_block("a", 1, eligible_for_checkpoint=False, exclusion_reason="grows a list"), _block("b", 1)]
        with pytest.raises(PlanIncompatibleError, match=r"'a' cannot be recomputed.*grows a list"):
            simulate_plan(blocks, parse_plan_text("R(0) K1"))

    def test_a_segment_whose_last_gradient_is_unknown(self) -> None:
        blocks = [_block("a", 1), _block("b", 1, output_gradient_bytes=None), _block("c", 1)]
        simulate_plan(blocks, parse_plan_text("K0 R(1) K2"))
        with pytest.raises(ValueError, match="'b' ends a recomputed segment; its output_gradient_bytes is missing"):
            simulate_plan(blocks, parse_plan_text("R(0 1) K2"))

    def test_a_profile_of_times_only(self) -> None:
        with pytest.raises(TimingOnlyProfileError, match="'a'"):
            simulate_plan([_block("a", 1, timing_only=True)], parse_plan_text("K0"))


def test_unknown_costs_are_none_not_zero() -> None:
    blocks = [_block("a", 1, recompute_time_ms=None, recompute_flops=None)]
    cost = simulate_plan(blocks, parse_plan_text("R(0)"))
    assert (cost.recompute_time_ms, cost.recompute_flops) == (None, None)


# The formula, literally ----------------------------------------------------------------------------------------------


def _formula_peaks(stages: list[Any], num_inputs: int) -> tuple[list[int], list[int]]:
    """Stages as (k, F, Q, keeps_input, keeps_output, output_bytes, output_is_input); the contract's two sums."""
    groups: list[dict[str, Any]] = [{"s": -1, "b": 0, "in": set(), "keepers": set()} for _ in range(num_inputs)]
    current = list(groups)
    for index, (_, _, _, keeps_input, keeps_output, sizes, passed) in enumerate(stages):
        for group, kept in zip(current, keeps_input, strict=True):
            group["in"].add(index)
            group["keepers"] |= {index} if kept else set()
        following = []
        for size, source in zip(sizes, passed, strict=True):
            group = {"s": index, "b": size, "in": set(), "keepers": set()} if source is None else current[source]
            if source is None:
                groups.append(group)
            following.append(group)
        for group, kept in zip(following, keeps_output, strict=True):
            group["keepers"] |= {index} if kept else set()
        current = following
    for group in current:
        group["in"].add(len(stages))
    forward, backward = [], []
    for index, (_, f, q, *_rest) in enumerate(stages):
        before = sum(stage[0] for stage in stages[:index])
        older = [group for group in groups if group["s"] < index]
        forward.append(
            before + f + sum(g["b"] for g in older if max(g["in"]) >= index or any(j < index for j in g["keepers"]))
        )
        backward.append(before + q + sum(g["b"] for g in older if any(j <= index for j in g["keepers"])))
    return forward, backward


def _formula_stage(chain: ChainProfile, node: PlanNode, num_inputs: int) -> Any:
    if isinstance(node, Keep) or node.children == (Keep(_first(node)),):
        block = chain[_first(node)]
        cost = block.keep if isinstance(node, Keep) else block.recompute
        assert cost is not None
        k, f, q = cost.saved_bytes, cost.forward_peak_bytes, cost.backward_peak_bytes
        return (k, f, q, cost.keeps_input, cost.keeps_output, block.output_bytes, block.output_is_input)
    members = [chain[i] for i in _leaves(node)]
    nothing_kept = []
    traced: list[Any] = list(range(num_inputs))
    count = num_inputs
    for block in members:
        assert block.recompute is not None
        width = len(block.output_bytes)
        f = block.recompute.forward_peak_bytes
        nothing_kept.append((0, f, 0, (False,) * count, (False,) * width, block.output_bytes, block.output_is_input))
        outputs = zip(block.output_bytes, block.output_is_input, strict=True)
        traced = [("made", size) if source is None else traced[source] for size, source in outputs]
        count = width
    first_forward, _ = _formula_peaks(nothing_kept, num_inputs)
    children, count = [], num_inputs
    for child in node.children:
        children.append(_formula_stage(chain, child, count))
        count = len(children[-1][5])
    gradient, alone = members[-1].output_gradient_bytes, members[-1].recompute
    assert gradient is not None
    assert alone is not None
    assert members[0].recompute is not None
    k, f, *rest = children[
        -1
    ]  # the replay's end: nothing of a nested node, of a block what its own recomputation needs
    f = min(f, max(0, alone.backward_peak_bytes - gradient)) if isinstance(node.children[-1], Keep) else 0
    children[-1] = (k, f, *rest)
    replay, backward = _formula_peaks(children, num_inputs)
    sizes = tuple(entry[1] if isinstance(entry, tuple) else 0 for entry in traced)
    passed = tuple(None if isinstance(entry, tuple) else entry for entry in traced)
    peak = max(gradient + max(replay), *backward)
    keeps_input = members[0].recompute.keeps_input
    return (0, max(first_forward), peak, keeps_input, (False,) * len(sizes), sizes, passed)


def _leaves(node: PlanNode) -> list[int]:
    return [node.block] if isinstance(node, Keep) else [leaf for child in node.children for leaf in _leaves(child)]


def _first(node: PlanNode) -> int:
    return _leaves(node)[0]


def formula_peak(chain: ChainProfile, nodes: tuple[PlanNode, ...]) -> int:
    """The peak by the formula of the memory model, every sum written out."""
    stages, count = [], len(chain.input_bytes)
    if chain.pre is not None:
        c = chain.pre.cost
        stages.append((c.saved_bytes, c.forward_peak_bytes, c.backward_peak_bytes, c.keeps_input, c.keeps_output,
                       chain.pre.output_bytes, chain.pre.output_is_input))  # fmt: skip
        count = len(chain.pre.output_bytes)
    for node in nodes:
        stages.append(_formula_stage(chain, node, count))
        count = len(stages[-1][5])
    if chain.post is None:
        stages.append((0, 0, chain[-1].output_gradient_bytes, (False,) * count, (), (), ()))
    else:
        c = chain.post.cost
        stages.append((c.saved_bytes, c.forward_peak_bytes, c.backward_peak_bytes, c.keeps_input, (), (), ()))
    return max(map(max, _formula_peaks(stages, len(chain.input_bytes))))


_SIZES = st.integers(0, 30)


@st.composite
def _costs(draw: st.DrawFn, num_inputs: int, num_outputs: int) -> StageCost:
    flags = [tuple(draw(st.booleans()) for _ in range(count)) for count in (num_inputs, num_outputs)]
    return StageCost(draw(_SIZES), draw(_SIZES), draw(_SIZES), *flags)


@st.composite
def chains(draw: st.DrawFn) -> ChainProfile:
    """Chains with several storages at a boundary, storages passed through, and any keep flags."""
    num_inputs = count = draw(st.integers(1, 2))
    pre = post = None
    if draw(st.booleans()):
        sizes = tuple(draw(_SIZES) for _ in range(draw(st.integers(1, 2))))
        pre, count = RegionProfile("pre", draw(_costs(count, len(sizes))), sizes), len(sizes)
    blocks = []
    for index in range(draw(st.integers(1, 6))):
        sizes = tuple(draw(_SIZES) for _ in range(draw(st.integers(1, 3))))
        free = list(draw(st.permutations(range(count))))
        passed = tuple(free.pop() if free and draw(st.booleans()) else None for _ in sizes)
        blocks.append(
            BlockProfile(
                f"b{index}",
                output_bytes=sizes,
                output_is_input=passed,
                output_gradient_bytes=draw(_SIZES),
                keep=draw(_costs(count, len(sizes))),
                recompute=draw(_costs(count, len(sizes))),
            )
        )
        count = len(sizes)
    if draw(st.booleans()):
        post = RegionProfile("post", draw(_costs(count, 0)))
    return ChainProfile(tuple(blocks), pre=pre, post=post, input_bytes=(0,) * num_inputs)


@st.composite
def _nodes(draw: st.DrawFn, first: int, stop: int, depth: int = 0) -> tuple[PlanNode, ...]:
    nodes: list[PlanNode] = []
    while first < stop:
        after = draw(st.integers(first + 1, stop))
        inner: tuple[PlanNode, ...] = tuple(Keep(i) for i in range(first, after))
        if draw(st.booleans()):
            if depth < 2:
                inner = draw(_nodes(first, after, depth + 1))
            if len(inner) == 1 and isinstance(inner[0], Recompute):
                inner = inner[0].children
            inner = (Recompute(inner),)
        nodes.extend(inner)
        first = after
    return tuple(nodes)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_simulator_and_referee_agree_with_the_formula_on_any_plan(data: st.DataObject) -> None:
    chain = data.draw(chains())
    nodes = data.draw(_nodes(0, len(chain)))
    peak = formula_peak(chain, nodes)
    cost = simulate_plan(chain, nodes)
    assert cost.peak_bytes == max(level for _, _, level in cost.timeline) == peak
    assert cost.end_level_bytes == 0
    recomputed = recomputed_blocks(nodes)
    plan = CheckpointPlan(
        nodes,
        tuple(decision_for(block, i in recomputed) for i, block in enumerate(chain)),
        predicted_peak_bytes=peak,
        predicted_cost=plan_recompute_cost(chain, nodes, "time"),
        no_checkpoint_peak_bytes=formula_peak(chain, tuple(Keep(i) for i in range(len(chain)))),
    )
    check_plan(chain, plan, budget_bytes=peak)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_more_saved_bytes_never_lower_the_peak(data: st.DataObject) -> None:
    chain = data.draw(chains())
    nodes = data.draw(_nodes(0, len(chain)))
    at = data.draw(st.integers(0, len(chain) - 1))
    block = chain[at]
    assert block.keep is not None
    assert block.recompute is not None
    heavier = dataclasses.replace(
        block,
        keep=dataclasses.replace(block.keep, saved_bytes=block.keep.saved_bytes + 5),
        recompute=dataclasses.replace(block.recompute, saved_bytes=block.recompute.saved_bytes + 5),
    )
    blocks = tuple(heavier if i == at else b for i, b in enumerate(chain))
    assert simulate_plan(dataclasses.replace(chain, blocks=blocks), nodes).peak_bytes >= formula_peak(chain, nodes)
