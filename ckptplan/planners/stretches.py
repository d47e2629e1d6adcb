"""Staircases of all stretches of a chain: the recursion behind nested plans.

Method. A recomputed segment is one stage: what it saves (random streams, first values of buffers), its first forward
and its boundaries do not depend on what happens inside, and its replay is a chain of its own with the gradient of its
last block alive. So three families of staircases describe every recursive plan (after Beaumont et al., "Optimal
checkpointing for heterogeneous chains", 2019; memory is not discretised here, and boundaries are counted by who holds
them):

- ``segment(p, j, own)``: replay and backward of blocks p .. j as one Recompute node; bytes above its input, of which
  it lets go of ``own`` if its first child does not hold them: inside a replay nobody else may.
- ``inside(p, j, loads, streams)``: the rest of such a replay from block p on, where ``loads`` bytes at hand are held
  by nobody, and ``streams`` bytes are kept until it has run (random streams to put back, an input that nobody holds).
- ``behind(p, loads)``: the rest of the step at the top of the plan.

Each is the lowest over the ways to begin: a block under one of its options, or a segment p .. q whose own staircase
is added to that of what follows, both with the bytes free at the time. Equal stretches of blocks share one staircase.

Exactness. With ``grain`` 0 nothing is left out that a plan within the limits needs. Otherwise every staircase keeps one
corner per ``grain`` of value; an optimistic run of the same recursion says how much that may have cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckptplan.costs import StageCost
from ckptplan.nodes import Keep, PlanNode, Recompute
from ckptplan.planners.options import (
    Block,
    Loads,
    OptionChain,
    Outputs,
    Passage,
    passed_on,
    recompute_one,
    spread,
    unheld,
)
from ckptplan.planners.stairs import Stairs, added, coarsened, lowest, shifted, single

Trim = Callable[[int, Stairs], Stairs]


class TooManyCornersError(Exception):
    """The staircases grew beyond what the caller allows."""


class Span(NamedTuple):
    """What does not depend on the plan inside a segment.

    Attributes:
        forward: most bytes of its first forward inside a replay, above its input; nothing is retained in it.
        bare: the same at the top of the plan, without the copies of buffers.
        guard, random: copies of its buffers (held by a segment at the top), and of random streams (by any).
        loads: bytes at hand behind its last block in that forward.
        outputs: its last block's outputs, traced back to its own inputs.
        full, least: value of running all its blocks once, and the least value of recomputing them.
        eligible: whether all its blocks can be recomputed.
    """

    forward: int
    loads: Loads
    outputs: Outputs
    full: int
    least: int
    eligible: bool
    bare: int = 0
    guard: int = 0
    random: int = 0


class Way(NamedTuple):
    """One first child, and what follows it.

    Attributes:
        end: its last block.
        floor: bytes that it needs whatever is decided inside it and behind it.
        own, own_bytes: staircase of a segment's replay, and the bytes held beside it; None for a block.
        rest, rest_bytes: the same for what follows; None where nothing does.
        loads: bytes at hand for what follows.
        node: of a block; None for a segment.
        own_loads: input storages that only a segment holds and may let go of.
        streams: kept until the replay that the way stands in has run.
    """

    end: int
    floor: int
    value: int
    own: Stairs | None
    own_bytes: int
    rest: Stairs | None
    rest_bytes: int
    loads: Loads
    node: Callable[[int], PlanNode] | None
    own_loads: Loads = ()
    streams: int = 0

    def stairs(self) -> Stairs:
        parts = [(s, b) for s, b in ((self.own, self.own_bytes), (self.rest, self.rest_bytes)) if s is not None]
        if not parts:
            return single(self.floor, self.value)
        if len(parts) == 1:
            return shifted(*parts[0], self.floor, self.value)
        (own, own_bytes), (rest, rest_bytes) = parts
        return added(shifted(own, own_bytes, 0, 0), shifted(rest, rest_bytes, 0, 0), self.floor, self.value)

    def value_at(self, free_bytes: int) -> int | None:
        """The least value with so many bytes free; None where it does not fit."""
        if free_bytes < self.floor:
            return None
        total = self.value
        for stairs, held_bytes in ((self.own, self.own_bytes), (self.rest, self.rest_bytes)):
            if stairs is not None:
                value = stairs.at(free_bytes - held_bytes)
                if value is None:
                    return None
                total += value
        return total


_NO_LIMIT = 2**62


class Stretches:
    """The staircases of one chain within limits; each is made when it is first asked for.

    Args:
        most_bytes: corners above it are left out.
        slack: so is what costs more than the least recomputation of its blocks by more than this.
        grain: values closer than this may be merged; 0: none are.
        optimistic: merge downwards, so that no plan lies below the result.
        longest: most blocks in a segment.
        most_corners: of all staircases that are merged; beyond it ``TooManyCornersError`` is raised.
        trim: leaves out corners of ``behind(p, ...)`` that can lead to no plan worth having.
    """

    def __init__(
        self,
        chain: OptionChain,
        most_bytes: int,
        *,
        slack: int,
        grain: int = 0,
        optimistic: bool = False,
        longest: int | None = None,
        most_corners: int | None = None,
        trim: Trim | None = None,
    ) -> None:
        self.chain, self.most_bytes, self.slack = chain, most_bytes, slack
        self.grain, self.optimistic = grain, optimistic
        self.longest = len(chain) if longest is None else longest
        self._trim = trim
        self._corners_left = _NO_LIMIT if most_corners is None else most_corners
        self.num_merged = 0
        self._numbers: dict[tuple[int, int], int] = {}
        self._kind_runs: list[list[int]] = [[] for _ in chain.blocks]
        self._spans: dict[int, Span] = {}
        self._segments: dict[tuple[int, Loads], Stairs] = {}
        self._inside: dict[tuple[int, Loads, int], Stairs] = {}
        self._behind: dict[tuple[int, Loads], Stairs] = {}

    # asked from outside

    def whole(self) -> Stairs:
        """Peak bytes of the step against value: the trade-off of the whole chain."""
        for length in range(2, min(self.longest, len(self.chain)) + 1):  # short ones first: no deep recursion
            for first in range(len(self.chain) - length + 1):
                if self._may_recompute(first, first + length - 1):
                    self.segment(first, first + length - 1)
                    self.segment(first, first + length - 1, self._let_go(first, self._handed(first)))
        for first in range(len(self.chain) - 1, 0, -1):
            self.behind(first, self.span(first - 1, first - 1).loads)
        passage, need = self._start()
        return shifted(self.behind(0, passage.loads), passage.retained, need, 0)

    def nodes(self, peak_bytes: int) -> tuple[PlanNode, ...]:
        """A plan of least value within the peak; ``peak_bytes`` is no less than the least need of :meth:`whole`."""
        passage, _ = self._start()
        first, loads, free = 0, passage.loads, peak_bytes - passage.retained
        found: list[PlanNode] = []
        while first < len(self.chain):
            way = _best(self._ways_behind(first, loads), free)
            found.append(self._node(first, way, free))
            first, loads, free = way.end + 1, way.loads, free - way.rest_bytes
        return tuple(found)

    # the staircases

    def segment(self, first: int, last: int, own: Loads = ()) -> Stairs:
        """Replay and backward of blocks ``first`` to ``last`` as one Recompute node of several children."""
        key = (self._number(first, last), own)
        if key not in self._segments:
            streams = self.span(first, last).random
            ways = self._ways_inside(first, last, self._zeros(first), streams, own)
            self._segments[key] = self._limited(first, last, [way.stairs() for way in ways])
        return self._segments[key]

    def inside(self, first: int, last: int, loads: Loads, streams: int) -> Stairs:
        """The rest of a replay that ends with block ``last``."""
        loads = unheld(loads)
        key = (self._number(first, last), loads, streams)
        if key not in self._inside:
            self._inside[key] = self._make_inside(first, last, loads, streams)
        return self._inside[key]

    def behind(self, first: int, loads: Loads) -> Stairs:
        """The rest of the step at the top of the plan."""
        key = (first, loads)
        if key not in self._behind:
            if first == len(self.chain):
                post, passage = self.chain.post, passed_on(self.chain.post, (), loads)
                self._behind[key] = single(passage.need(post), 0)
            else:
                parts = [way.stairs() for way in self._ways_behind(first, loads)]
                stairs = self._lowest(parts, _NO_LIMIT)
                if self._trim is not None:
                    stairs = self._trim(first, stairs)
                self._behind[key] = self._coarsened(stairs)
        return self._behind[key]

    def _make_inside(self, first: int, last: int, loads: Loads, streams: int) -> Stairs:
        if first == last:
            return self._limited(first, last, [way.stairs() for way in self._ways_last(first, last, loads, streams)])
        if streams != self.span(first, last).random or self._let_go(first, loads):
            return self._limited(first, last, [way.stairs() for way in self._ways_inside(first, last, loads, streams)])
        alone = self.segment(first, last)
        if not any(loads):
            return alone
        # A first child that takes hold of all that is at hand needs just these bytes more than with nothing at hand;
        # of one that does not this is more than it needs, so its true figures are put beside.
        parts = [shifted(alone, sum(loads), 0, 0)]
        parts += [way.stairs() for way in self._ways_inside(first, last, loads, streams, leaving=True)]
        return self._limited(first, last, parts)

    def _limited(self, first: int, last: int, parts: list[Stairs]) -> Stairs:
        least = self.span(first, last).least
        return self._coarsened(self._lowest(parts, min(least + self.slack, _NO_LIMIT)))

    def _lowest(self, parts: list[Stairs], most_value: int) -> Stairs:
        self._corners_left -= sum(len(part.need) for part in parts)
        if self._corners_left < 0:
            raise TooManyCornersError
        return lowest(parts, self.most_bytes, most_value)

    def _coarsened(self, stairs: Stairs) -> Stairs:
        merged = coarsened(stairs, self.grain, optimistic=self.optimistic)
        self.num_merged += len(stairs.need) - len(merged.need)
        return merged

    # first children

    def _ways_behind(self, first: int, loads: Loads) -> Iterator[Way]:
        block = self.chain.blocks[first]
        for option in block.options:
            passage = passed_on(option.cost, block.outputs, loads)
            floor = passage.need(option.cost)
            rest = self.behind(first + 1, passage.loads)
            yield Way(first, floor, option.value, None, 0, rest, passage.retained, passage.loads, option.node)
        for end, span, passage in self._segments_from(first, len(self.chain) - 1, loads):
            own, rest = self.segment(first, end), self.behind(end + 1, passage.loads)
            floor, kept = passage.unheld + span.bare + span.guard, span.guard + span.random
            yield Way(end, floor, 0, own, passage.newly + kept, rest, passage.retained + kept, passage.loads, None)

    def _ways_inside(
        self, first: int, last: int, loads: Loads, streams: int, own: Loads = (), *, leaving: bool = False
    ) -> Iterator[Way]:
        """First children of a replay of several blocks.

        Args:
            own: at the very beginning, the inputs of the whole node that only it holds.
            leaving: only those that leave some load unheld.
        """
        block, loads = self.chain.blocks[first], unheld(loads)
        assert block.inside_again is not None
        beside, gone = self._beside(last, streams), sum(own)
        may_go = own or self._let_go(first, loads)
        for cost, value, node, backward, let_go in (
            (block.inside_keep, block.full, Keep, block.inside_keep.backward_peak_bytes, gone),
            (block.inside_again, block.full + block.last, recompute_one, _backward_again(block, may_go), 0),
        ):
            passage = passed_on(cost, block.outputs, loads)
            if leaving and passage.newly == passage.unheld:
                continue
            forward = beside + passage.unheld + cost.forward_peak_bytes
            rest = self.inside(first + 1, last, passage.loads, streams + let_go)
            floor, retained = max(forward, passage.newly + backward - let_go), passage.retained - let_go
            yield Way(first, floor, value, None, 0, rest, retained, passage.loads, node, streams=streams + let_go)
        if leaving and passage.newly == passage.unheld:
            return  # segments hold what their first block does when it is recomputed
        for end, span, passage in self._segments_from(first, last - 1, loads):
            stairs, rest = self.segment(first, end, may_go), self.inside(end + 1, last, passage.loads, streams)
            floor, kept = beside + passage.unheld + span.forward, passage.newly + span.random
            retained = passage.retained + span.random
            yield Way(end, floor, span.full, stairs, kept, rest, retained, passage.loads, None, may_go, streams)
        if not own and (any(loads) or streams != self.span(first, last).random):
            yield from self._ways_last(first, last, loads, streams)

    def _beside(self, last: int, streams: int) -> int:
        """Bytes alive while a replay that ends with block ``last`` runs: its gradient, the loss, random streams."""
        gradient = self.chain.blocks[last].gradient
        assert gradient is not None
        return gradient + self.chain.loss_bytes + streams

    def _ways_last(self, first: int, last: int, loads: Loads, streams: int) -> Iterator[Way]:
        """The last child of a replay: it runs only as far as its backward needs, a nested node not at all."""
        block, beside, loads = self.chain.blocks[first], self._beside(last, streams), unheld(loads)
        again = block.inside_again
        assert again is not None
        may_go = self._let_go(first, loads)
        if first < last:
            passage = passed_on(again, block.outputs, loads)
            stairs, kept = self.segment(first, last, may_go), passage.newly + self.span(first, last).random
            yield Way(last, beside + passage.unheld, 0, stairs, kept, None, 0, (), None, may_go)
            return
        for cost, forward, node, backward in (
            (block.inside_keep, block.shortcut, Keep, block.inside_keep.backward_peak_bytes),
            (again, 0, recompute_one, _backward_again(block, may_go)),
        ):
            passage = passed_on(cost, block.outputs, loads)
            floor = max(beside + passage.unheld + forward, passage.newly + backward)
            yield Way(last, floor, block.last, None, 0, None, 0, (), node)

    def _let_go(self, first: int, loads: Loads) -> Loads:
        """Of what is at hand for block ``first`` and held by nobody, what it lets go of after it has run again."""
        flags = spread(self.chain.blocks[first].lets_go, len(loads))
        own = tuple(size if flag and size > 0 else 0 for flag, size in zip(flags, loads, strict=True))
        return own if any(own) else ()

    def _handed(self, first: int) -> Loads:
        """What block ``first`` finds at hand where nobody holds it."""
        if first > 0:
            return tuple(size for size, _ in self.chain.blocks[first - 1].outputs)
        return self._zeros(first)

    def _segments_from(self, first: int, most: int, loads: Loads) -> Iterator[tuple[int, Span, Passage]]:
        again = self.chain.blocks[first].inside_again
        if again is None:
            return
        held = StageCost(0, 0, 0, again.keeps_input, (False,))
        for end in range(first + 1, min(most, first + self.longest - 1) + 1):
            span = self.span(first, end)
            if not span.eligible:
                return
            if self.chain.blocks[end].gradient is not None:
                counts = any(loads) or any(source is not None for _, source in span.outputs)
                yield end, span, passed_on(held, span.outputs, loads) if counts else Passage(0, 0, 0, span.loads)

    # from a staircase to a plan

    def _node(self, first: int, way: Way, free_bytes: int) -> PlanNode:
        if way.node is not None:
            return way.node(first)
        return Recompute(self._children(first, way.end, way.own_loads, free_bytes - way.own_bytes))

    def _children(self, first: int, last: int, own: Loads, free_bytes: int) -> tuple[PlanNode, ...]:
        found: list[PlanNode] = []
        streams, loads = self.span(first, last).random, self._zeros(first)
        while first <= last:
            if first == last:
                ways = self._ways_last(first, last, loads, streams)
            else:
                ways = self._ways_inside(first, last, loads, streams, own)
            way = _best(ways, free_bytes)
            found.append(self._node(first, way, free_bytes))
            first, loads, free_bytes = way.end + 1, way.loads, free_bytes - way.rest_bytes
            streams, own = way.streams, ()
        return tuple(found)

    # what the blocks are

    def _start(self) -> tuple[Passage, int]:
        """What stands before the blocks, and the bytes that it needs itself."""
        if self.chain.pre is None:
            return Passage(0, 0, 0, self.chain.inputs), 0
        cost, outputs = self.chain.pre
        passage = passed_on(cost, outputs, self.chain.inputs)
        return passage, max(cost.forward_peak_bytes, cost.backward_peak_bytes)

    def _zeros(self, first: int) -> Loads:
        if first > 0:
            return (0,) * len(self.chain.blocks[first - 1].outputs)
        return self.chain.inputs if self.chain.pre is None else (0,) * len(self.chain.pre[1])

    def _number(self, first: int, last: int) -> int:
        """A number for the run of kinds ``first`` to ``last``: equal runs have equal numbers."""
        runs = self._kind_runs[first]
        while len(runs) <= last - first:
            before = runs[-1] if runs else -1
            key = (before, self.chain.kinds[first + len(runs)])
            runs.append(self._numbers.setdefault(key, len(self._numbers)))
        return runs[last - first]

    def span(self, first: int, last: int) -> Span:
        number = self._number(first, last)
        if number not in self._spans:
            self._spans[number] = self._make_span(first, last)
        return self._spans[number]

    def _make_span(self, first: int, last: int) -> Span:
        block = self.chain.blocks[last]
        if first == last:
            zeros = self._zeros(first)
            before = Span(0, zeros, tuple((0, i) for i in range(len(zeros))), 0, 0, True)
        else:
            before = self.span(first, last - 1)
        forward = max(before.forward, sum(before.loads) + block.bare_forward + block.guard)
        bare = max(before.bare, sum(before.loads) + block.bare_forward)
        loads = tuple(size if passed is None else before.loads[passed] for size, passed in block.outputs)
        outputs = tuple((size, None) if passed is None else before.outputs[passed] for size, passed in block.outputs)
        return Span(
            forward,
            loads,
            outputs,
            before.full + block.full,
            before.least + block.least,
            before.eligible and block.inside_again is not None,
            bare,
            before.guard + block.guard,
            max(before.random, block.random),
        )

    def _may_recompute(self, first: int, last: int) -> bool:
        return self.span(first, last).eligible and self.chain.blocks[last].gradient is not None


def _backward_again(block: Block, own: Loads) -> int:
    """Backward peak of the block recomputed inside a replay, where it alone holds ``own``."""
    assert block.inside_again is not None
    if block.recomputed is None or not own:
        return block.inside_again.backward_peak_bytes
    running, behind = block.recomputed
    return max(running, behind - sum(own))


def _best(ways: Iterator[Way], free_bytes: int) -> Way:
    fitting = [(value, way) for way in ways if (value := way.value_at(free_bytes)) is not None]
    return min(fitting, key=lambda pair: pair[0])[1]
