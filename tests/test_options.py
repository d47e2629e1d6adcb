"""The search for what to keep is exact: against brute force on random graphs, and on blocks whose best is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckptplan.graph import BlockOperators, OperatorCall, Output, Value
from ckptplan.options import KeepSet, propose_keep_sets


def random_block(seed: int) -> BlockOperators:
    """Up to nine operators of one or two results each; some results cannot be kept, some are needed."""
    stream = random.Random(seed)
    calls: list[OperatorCall] = []
    values: list[Value] = []
    for index in range(stream.randint(2, 9)):
        reads = tuple(sorted(stream.sample(range(len(values)), min(len(values), stream.choice((0, 1, 1, 2))))))
        makes = tuple(range(len(values), len(values) + stream.choice((1, 1, 2))))
        flops = stream.choice((0, 0, 100, 250, 400))
        calls.append(OperatorCall(f"op{index}", 0, "", reads, makes, flops, stream.randint(1, 40) / 16))
        for position, _ in enumerate(makes):
            size, keepable = stream.choice((4, 64, 100, 256)), stream.random() < 0.9
            values.append(Value(Output(f"op{index}", 0, position), size, index, keepable))
    needed = tuple(v for v in range(len(values)) if stream.random() < 0.6)
    return BlockOperators(tuple(calls), tuple(values), needed, "")


def run_again(block: BlockOperators, kept: Iterable[int]) -> set[int]:
    """By definition: the makers of what is needed and not kept, and so on through what they read."""
    held = set(kept)
    running: set[int] = set()
    changed = True
    while changed:
        wanted = set(block.needed) | {v for o in running for v in block.calls[o].reads}
        makers = {block.values[v].operator for v in wanted - held}
        changed = not makers <= running
        running |= makers
    return running


def written_again(block: BlockOperators, again: Iterable[OperatorCall]) -> int:
    """Bytes that the operators write, which says how long pointwise ones take without timing them."""
    return sum(block.values[v].size_bytes for call in again for v in call.makes)


def brute_force(block: BlockOperators) -> list[tuple[int, float, int, int]]:
    """(bytes, ms, FLOPs, bytes written again) of every keep set."""
    keepable = [v for v, value in enumerate(block.values) if value.keepable]
    found = []
    for count in range(len(keepable) + 1):
        for kept in itertools.combinations(keepable, count):
            again = [block.calls[o] for o in run_again(block, kept)]
            size = sum(block.values[v].size_bytes for v in kept)
            costs = sum(c.time_ms for c in again), sum(c.flops for c in again), written_again(block, again)
            found.append((size, *costs))
    return found


def figures(block: BlockOperators, keep_set: KeepSet) -> tuple[int, float, int, int]:
    again = [block.calls[o] for o in run_again(block, keep_set.kept)]
    assert {block.calls.index(call) for call in again} == set(keep_set.run_again)
    return (
        sum(block.values[v].size_bytes for v in keep_set.kept),
        sum(c.time_ms for c in again),
        sum(c.flops for c in again),
        written_again(block, again),
    )


@pytest.mark.parametrize("seed", range(60))
def test_each_proposal_is_the_best_within_its_bytes_or_for_its_cost(seed: int) -> None:
    block = random_block(seed)
    every = brute_force(block)
    proposals = propose_keep_sets(block)
    for proposal in proposals:
        size, time_ms, flops, written = figures(block, proposal)
        assert (proposal.kept_bytes, proposal.time_ms, proposal.flops) == (size, pytest.approx(time_ms), flops)
        least_ms = min(ms for s, ms, *_ in every if s <= size)
        least_flops = min(f for s, _, f, _ in every if s <= size)
        least_written = min(w for s, _, _, w in every if s <= size)
        assert time_ms == pytest.approx(least_ms) or flops == least_flops or written == least_written
        fewest = min(s for s, ms, f, w in every if ms <= time_ms + 1e-9 and f <= flops and w <= written)
        assert size == fewest, "bytes that buy nothing"


@pytest.mark.parametrize("seed", range(60))
def test_the_grid_misses_no_cheaper_set_at_any_of_its_budgets(seed: int) -> None:
    block = random_block(seed)
    every = brute_force(block)
    proposals = [figures(block, p) for p in propose_keep_sets(block)]
    total = sum(block.values[v].size_bytes for v in block.needed)
    for share in range(1, 16):
        budget = int(total * share / 16)
        best_ms = min(ms for s, ms, *_ in every if s <= budget)
        best_flops = min(f for s, _, f, _ in every if s <= budget)
        least_written = min(w for s, _, _, w in every if s <= budget)
        within = [p for p in proposals if p[0] <= budget] or [(0, 0.0, 0, 0)]
        if best_ms > 0:  # all kept is no option
            assert min(ms for _, ms, *_ in within) == pytest.approx(best_ms)
            assert min(f for _, _, f, _ in within) == best_flops
            assert min(w for _, _, _, w in within) == least_written


@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_for_flops_does_not_depend_on_how_long_operators_took(seed: int) -> None:
    """Times differ from one measuring to the next; a budget in reach must not be out of reach in the next run."""
    block, stream = random_block(seed), random.Random(seed)
    again = replace(block, calls=tuple(replace(c, time_ms=stream.randint(1, 40) / 16) for c in block.calls))
    assert cheapest_at_every_budget(again) == cheapest_at_every_budget(block)


def cheapest_at_every_budget(block: BlockOperators) -> list[tuple[int, int]]:
    """(FLOPs, bytes written again) of the best proposal within each budget of the grid; nothing again: all is kept."""
    proposals = [figures(block, p) for p in propose_keep_sets(block)]
    total = sum(block.values[v].size_bytes for v in block.needed)
    return [
        min(((f, w) for s, _, f, w in proposals if s <= int(total * share / 16)), default=(0, 0))
        for share in range(1, 16)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_free_set_keeps_the_fewest_bytes_that_no_flops_need(seed: int) -> None:
    block = random_block(seed)
    free = [size for size, ms, flops, _ in brute_force(block) if flops == 0 and ms > 0]
    proposed = [p.kept_bytes for p in propose_keep_sets(block) if p.flops == 0]
    all_kept = [size for size, _, flops, _ in brute_force(block) if flops == 0]
    if free and min(free) == min(all_kept):
        assert min(proposed) == min(free)


def norm_and_product() -> BlockOperators:
    """norm -> product -> gelu -> product: what an MLP is."""
    calls = (
        OperatorCall("norm", 0, "norm", (), (0,), 0, 1.0),
        OperatorCall("mm", 0, "fc", (0,), (1,), 1000, 4.0),
        OperatorCall("gelu", 0, "", (1,), (2,), 0, 2.0),
        OperatorCall("mm", 1, "out", (2,), (3,), 1000, 4.0),
    )
    sizes = (10, 40, 40, 10)
    values = tuple(Value(Output(c.name, c.nth), s, i, True) for i, (c, s) in enumerate(zip(calls, sizes, strict=True)))
    return BlockOperators(calls, values, (0, 1, 2), "")


def test_the_options_of_an_mlp() -> None:
    found = [(p.kept, p.kept_bytes, p.flops) for p in propose_keep_sets(norm_and_product())]
    assert found[0] == ((), 0, 1000)
    assert ((1,), 40, 0) in found  # the free one: norm and gelu run again
    assert ((0, 1), 50, 0) in found  # only gelu does
    assert all(kept != (0, 1, 2) for kept, *_ in found)  # everything kept is no option


def test_a_block_that_saves_nothing_has_no_options() -> None:
    call = OperatorCall("add", 0, "", (), (0,), 0, 1.0)
    block = BlockOperators((call,), (Value(Output("add", 0), 4, 0, True),), (), "")
    assert propose_keep_sets(block) == []
    assert propose_keep_sets(BlockOperators((), (), (), "")) == []


def test_what_cannot_be_kept_runs_again() -> None:
    calls = (OperatorCall("mm", 0, "", (), (0,), 100, 1.0), OperatorCall("relu_", 0, "", (0,), (1,), 0, 1.0))
    values = (Value(Output("mm", 0), 8, 0, False), Value(Output("relu_", 0), 8, 1, True))
    found = propose_keep_sets(BlockOperators(calls, values, (0, 1), ""))
    assert [(p.kept, p.flops) for p in found] == [((), 100), ((1,), 100)]
