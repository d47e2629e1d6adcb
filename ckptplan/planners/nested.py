"""The cheapest plan of any shape: options, recomputed segments, and recomputation inside recomputation.

Method. The flat plan first: it is found fast (``flat.py``) and gives a cost to beat. Then a lower bound on every plan,
nested or not: the flat problem in which a recomputed block takes no bytes at all. Where the two meet, the flat plan is
proved. Where they do not, or where no flat plan fits, the recursion of ``stretches.py`` is solved within the bounds
found so far: what costs more than the known plan, or needs more than the budget, is left out.

Guarantee. ``optimality_gap`` is relative to the least cost of all persistent plans (a kept value stays until its
backward) over the profile's options; 0.0 stands for less than 1e-9. Staircases can grow exponentially. Where they grow
beyond ``MOST_CORNERS``, values that differ by less than a grain are merged, ever finer while that is affordable, and
the same recursion merged downwards gives the bound of which the gap is told. Chains with more different stretches than
``MOST_WAYS`` allows get segments of limited length; the gap counts what that may cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ckptplan.errors import PlannerScaleError
from ckptplan.gaps import expanded
from ckptplan.nodes import PlanNode, blocks_of
from ckptplan.planners.flat import LABEL_CAPS, Problem, cheapest_choice, keep_or_recompute, search
from ckptplan.planners.heuristic import least_peak_choice, smallest_reachable
from ckptplan.planners.options import (
    LARGEST_VALUE,
    OptionChain,
    additive_profile,
    flat_peak,
    flat_stages,
    option_chain,
    timed_option_chain,
)
from ckptplan.planners.stairs import Stairs
from ckptplan.planners.stretches import Stretches, TooManyCornersError
from ckptplan.planners.tables import FlatTables, PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel
from ckptplan.simulate import simulate_plan

GRAINS = (0, 64, 256, 1024)  # values told apart within the range of interest, in turn; 0: all of them
MOST_CORNERS = 30_000_000  # of staircases merged in one pass: some 3 s
MOST_WAYS = 200_000  # pairs of staircases added in one pass: some 4 s
_LABELS = 512
_PROVED = 1e-9


def optimal(profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel) -> PlannerResult:
    """The plan of least cost within the budget; the one of least peak where none fits.

    Under the additive model every recomputed block counts nothing, so that nesting has nothing to give: the flat plan.
    """
    if memory_model == "additive":
        return cheapest_flat(profile, budget_bytes, cost, memory_model)
    chain = option_chain(profile, cost)
    found = cheapest_plan(chain, budget_bytes, _flat_nodes(profile, budget_bytes, cost))
    return _fastest_of_equals(profile, budget_bytes, cost, found)


def dynamic_programming(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """The cheapest flat plan of whole blocks within the budget; the one of least peak where none fits.

    Each block is kept or recomputed, by PyTorch's checkpoint or by replay, as measured.
    """
    return cheapest_flat(whole_blocks(profile), budget_bytes, cost, memory_model)


def whole_blocks(profile: ChainProfile) -> ChainProfile:
    """The profile without options that keep part of a block, or have what it saves on the host."""
    blocks = (replace(b, selective=tuple(o for o in b.selective if not o.saved_ops), offload=()) for b in profile)
    return replace(profile, blocks=tuple(blocks))


def _has_other_ways(profile: ChainProfile) -> bool:
    """Whether there is more to choose between than keeping a block and recomputing it by the checkpoint."""
    return any(block.selective or block.offload for block in profile)


def cheapest_flat(profile: ChainProfile, budget_bytes: int, cost: CostKind, memory_model: MemoryModel) -> PlannerResult:
    """The cheapest flat plan over all options of the profile; the one of least peak where none fits."""
    if not _has_other_ways(profile):
        found = keep_or_recompute(profile, budget_bytes, cost=cost, memory_model=memory_model)
    elif memory_model == "additive":
        return cheapest_plan(option_chain(additive_profile(profile), cost), budget_bytes, None, most_blocks=1)
    else:
        nodes = _flat_nodes(profile, budget_bytes, cost)
        found = cheapest_plan(option_chain(profile, cost), budget_bytes, nodes, most_blocks=1)
    return found if memory_model == "additive" else _fastest_of_equals(profile, budget_bytes, cost, found)


def _fastest_of_equals(profile: ChainProfile, budget_bytes: int, cost: CostKind, found: PlannerResult) -> PlannerResult:
    """Of flat plans of equal FLOPs the one of least measured time, and of those the one of least peak."""
    is_flat = all(len(blocks_of((node,))) == 1 for node in found.nodes)
    if cost != "flops" or not is_flat or simulate_plan(profile, found.nodes).peak_bytes > budget_bytes:
        return found
    chain = timed_option_chain(profile)
    if chain is None:
        return found
    best, _ = _flat_over_options(chain, budget_bytes, _Known(found.nodes, chain.value_of(found.nodes)), _LABELS)
    return found if best is None else replace(found, nodes=best.nodes)


def least_peak_plan(chain: OptionChain, most_blocks: int | None = None) -> tuple[PlanNode, ...]:
    """A plan of the least peak of all with segments of at most so many blocks; 1: flat; None: :func:`longest`."""
    found = _least_peak(chain, LARGEST_VALUE, longest(chain) if most_blocks is None else most_blocks)
    assert found is not None
    return found.nodes


def cheapest_plan(
    chain: OptionChain,
    budget_bytes: int,
    flat_nodes: tuple[PlanNode, ...] | None,
    most_blocks: int | None = None,
) -> PlannerResult:
    """The cheapest plan of a chain with options within the budget; the one of least peak where none fits.

    Args:
        flat_nodes: a plan that fits, to start from.
        most_blocks: in a segment; 1: flat plans only, and the gap is to the least of them. None: as many as there are.
    """
    wanted = len(chain) if most_blocks is None else most_blocks
    limit = min(wanted, longest(chain))
    best = None if flat_nodes is None else _Known(flat_nodes, chain.value_of(flat_nodes))
    if best is not None and best.value == 0:
        return PlannerResult(best.nodes, 0.0)
    if most_blocks == 1:
        return _cheapest_flat_plan(chain, budget_bytes, best)
    if any(len(block.options) > 1 + (block.inside_again is not None) for block in chain.blocks):
        best, _ = _flat_over_options(chain, budget_bytes, best, _LABELS)
    relaxed = Problem(flat_stages(chain, relaxed=True), budget_bytes)
    lower = _least_value(chain, relaxed, LARGEST_VALUE if best is None else best.value)
    if best is None:
        best = _least_peak(chain, budget_bytes, limit)
        if best is None:
            return PlannerResult(least_peak_plan(chain, limit), None)
    if _gap(chain, best.value, lower) == 0.0:
        return PlannerResult(best.nodes, 0.0)
    return _refined(chain, relaxed, best, lower, limit, is_limited=limit < wanted)


def least_nested_peak(profile: ChainProfile, memory_model: MemoryModel = "peak") -> tuple[int, str]:
    """The least peak in bytes of plans of any shape, and the stage and phase that set it; quick on long chains too.

    Where stretches neither repeat nor are few, segments are limited in length, and the least may be lower still.
    """
    if memory_model == "additive":
        return smallest_reachable(profile, memory_model)
    profile = expanded(profile)
    chain = option_chain(profile, None)
    found = _least_peak(chain, LARGEST_VALUE, longest(chain, MOST_WAYS // 10))
    assert found is not None
    simulated = simulate_plan(profile, found.nodes)
    return simulated.peak_bytes, simulated.peak_at


def least_whole_peak(profile: ChainProfile, memory_model: MemoryModel = "peak") -> tuple[int, str]:
    """As :func:`least_flat_peak`, of plans over whole blocks: what planner ``dp`` chooses among."""
    return least_flat_peak(whole_blocks(profile), memory_model)


def least_flat_peak(profile: ChainProfile, memory_model: MemoryModel = "peak") -> tuple[int, str]:
    """The least peak in bytes of flat plans with options inside blocks, and the stage and phase that set it."""
    if memory_model == "additive" or not _has_other_ways(profile):
        return smallest_reachable(profile, memory_model)
    profile = expanded(profile)
    simulated = simulate_plan(profile, least_peak_plan(option_chain(profile, None), most_blocks=1))
    return simulated.peak_bytes, simulated.peak_at


@dataclass(frozen=True)
class _Known:
    """A plan that fits, and its value."""

    nodes: tuple[PlanNode, ...]
    value: int


def _flat_nodes(profile: ChainProfile, budget_bytes: int, cost: CostKind) -> tuple[PlanNode, ...] | None:
    tables = FlatTables(profile, "peak", cost)
    if least_peak_choice(tables)[0] > budget_bytes:
        return None
    return tables.nodes(cheapest_choice(tables, budget_bytes)[0])


def _cheapest_flat_plan(chain: OptionChain, budget_bytes: int, best: _Known | None) -> PlannerResult:
    """The cheapest flat plan, by searches that leave out less and less; the one of least peak where none fits."""
    lower, gap = 0, 1.0
    for cap in LABEL_CAPS:
        best, cut = _flat_over_options(chain, budget_bytes, best, cap)
        if best is None:
            break
        lower = max(lower, int(min(cut, best.value)))
        gap = _gap(chain, best.value, lower)
        if gap == 0.0:
            break
    return PlannerResult(least_peak_plan(chain, 1)) if best is None else PlannerResult(best.nodes, gap)


def _flat_over_options(
    chain: OptionChain, budget_bytes: int, best: _Known | None, cap: int
) -> tuple[_Known | None, float]:
    """The better of a known plan and the best flat one that a search over all options finds.

    Of equals the latter, whose peak is the least. And a lower bound on what was left out to stay within ``cap``;
    infinite for nothing.
    """
    problem = Problem(flat_stages(chain), budget_bytes)
    picked, cut = search(problem, LARGEST_VALUE if best is None else best.value, cap)
    if picked is None:
        return best, cut
    blocks = zip(chain.blocks, picked[0 if chain.pre is None else 1 :], strict=False)
    nodes = tuple(block.options[option].node(i) for i, (block, option) in enumerate(blocks))
    found = _Known(nodes, chain.value_of(nodes))
    return (found if best is None or found.value <= best.value else best), cut


def _least_value(chain: OptionChain, relaxed: Problem, known_value: int) -> int:
    """No plan within the budget has a lower value; at most ``known_value``."""
    options, cut = search(relaxed, known_value, _LABELS)
    least = min(known_value, cut)
    if options is not None:
        first = 0 if chain.pre is None else 1
        picked = zip(chain.blocks, options[first:], strict=False)
        values = ((*(o.value for o in block.options), block.least)[option] for block, option in picked)
        least = min(least, sum(values))
    return int(least)


def _gap(chain: OptionChain, value: int, lower: int) -> float:
    """Relative, in cost: counts of block runs, which only break ties, are left out."""
    cost = value // chain.runs_scale
    gap = (cost - lower // chain.runs_scale) / cost if cost else 0.0
    return gap if gap > _PROVED else 0.0


def _least_peak(chain: OptionChain, most_bytes: int, limit: int) -> _Known | None:
    """The plan of least peak if it is within ``most_bytes``: with one corner per staircase, that of fewest bytes."""
    one_corner = 2 * LARGEST_VALUE
    stretches = Stretches(chain, most_bytes, slack=LARGEST_VALUE, grain=one_corner, longest=limit)
    whole = stretches.whole()
    if not len(whole.need):
        return None
    nodes = stretches.nodes(int(whole.need[0]))
    return _Known(nodes, chain.value_of(nodes))


def _refined(
    chain: OptionChain, relaxed: Problem, best: _Known, lower: int, limit: int, *, is_limited: bool
) -> PlannerResult:
    """The best plan that the recursion finds, and the gap to the bound that it proves.

    ``is_limited``: longer segments than ``limit`` are wanted, so that only ``lower`` bounds the cost.
    """
    complete, grain = False, None
    for count in GRAINS:
        finer = max(1, (best.value - lower) // count) if count else 0
        stretches = _bounded(chain, relaxed, best.value, lower, finer, limit)
        try:
            best = _better(chain, stretches, relaxed.budget_bytes, best)
        except TooManyCornersError:
            if count:
                break
            continue
        grain, complete = finer, stretches.num_merged == 0
        if complete:
            break
    if is_limited or grain is None:
        return PlannerResult(best.nodes, _gap(chain, best.value, lower))
    if complete:
        return PlannerResult(best.nodes, 0.0)
    downwards = _bounded(chain, relaxed, best.value, lower, grain, limit, optimistic=True)
    least = downwards.whole().at(relaxed.budget_bytes)
    bound = best.value if least is None else max(lower, min(least, best.value))
    return PlannerResult(best.nodes, _gap(chain, best.value, bound))


def _better(chain: OptionChain, stretches: Stretches, budget_bytes: int, best: _Known) -> _Known:
    whole = stretches.whole()
    fits = int(np.searchsorted(whole.need, budget_bytes, side="right"))
    if not fits:
        return best
    nodes = stretches.nodes(int(whole.need[fits - 1]))
    found = _Known(nodes, chain.value_of(nodes))
    return found if found.value < best.value else best


def _bounded(
    chain: OptionChain, relaxed: Problem, known: int, lower: int, grain: int, limit: int, *, optimistic: bool = False
) -> Stretches:
    """Staircases that hold every plan within the budget at no more than the known value."""
    skipped = 0 if chain.pre is None else 1

    def trim(first: int, stairs: Stairs) -> Stairs:
        free = (relaxed.budget_bytes - stairs.need).astype(np.float64)
        before = np.min([front.at(free) for front in relaxed.fronts[first + skipped]], axis=0)
        hopeful = stairs.value + before <= known + relaxed.tolerance
        return Stairs(stairs.need[hopeful], stairs.value[hopeful])

    return Stretches(
        chain,
        relaxed.budget_bytes,
        slack=known - lower,
        grain=grain,
        optimistic=optimistic,
        longest=limit,
        most_corners=None if optimistic else MOST_CORNERS,
        trim=trim,
    )


# The whole trade-off -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tradeoff:
    """Every peak at which the least cost falls, and the plan for each.

    Attributes:
        peaks: in bytes, rising; the last is reached with nothing recomputed, or with less than that.
        epsilon: relative to each plan's cost, how far it may be above the least; None: not known.
    """

    peaks: tuple[int, ...]
    epsilon: float | None
    stretches: Stretches

    def nodes(self, peak_bytes: int) -> tuple[PlanNode, ...]:
        """A cheapest plan within the peak."""
        return self.stretches.nodes(peak_bytes)


def tradeoff(profile: ChainProfile, *, cost: CostKind, memory_model: MemoryModel, nested: bool) -> Tradeoff:
    """The whole trade-off in one solve: exact where staircases stay within ``MOST_CORNERS``, else the finest grain.

    ``profile`` is of all stages: what runs between blocks stands in it as blocks (``gaps.expanded``).
    Raises ``PlannerScaleError`` where even the coarsest one is too much.
    """
    chain = option_chain(additive_profile(profile) if memory_model == "additive" else profile, cost)
    is_nested = nested and memory_model == "peak"
    limit = longest(chain) if is_nested else 1
    stretches, whole = _solved_whole(chain, limit)
    epsilon: float | None = 0.0
    if is_nested and limit < len(chain):
        epsilon = None
    elif stretches.num_merged:
        lower = _all_budgets(chain, limit, stretches.grain, optimistic=True).whole()
        epsilon = max(_gap(chain, int(v), lower.at(int(n)) or 0) for n, v in zip(whole.need, whole.value, strict=True))
    return Tradeoff(tuple(whole.need.tolist()), epsilon, stretches)


def _solved_whole(chain: OptionChain, limit: int) -> tuple[Stretches, Stairs]:
    """The finest staircases that can be afforded."""
    total = sum(block.least for block in chain.blocks)
    solved = None
    for count in GRAINS:
        stretches = _all_budgets(chain, limit, max(1, total // (4 * count)) if count else 0)
        try:
            solved = stretches, stretches.whole()
        except TooManyCornersError:
            if solved:
                break
            continue
        if count == 0:
            break
    if solved is None:
        raise PlannerScaleError(
            f"the trade-off of {len(chain)} blocks is beyond what can be solved; ask for one budget (plan_checkpoints)"
        )
    return solved


def _all_budgets(chain: OptionChain, limit: int, grain: int, *, optimistic: bool = False) -> Stretches:
    """Staircases up to the peak of keeping everything."""
    return Stretches(
        chain,
        flat_peak(chain, [0] * len(chain)),
        slack=LARGEST_VALUE,
        grain=grain,
        optimistic=optimistic,
        longest=limit,
        most_corners=None if optimistic else MOST_CORNERS,
    )


def longest(chain: OptionChain, most_ways: int | None = None) -> int:
    """Most blocks in a segment so that solving stays affordable; all of them where stretches repeat or are few."""
    most_ways = MOST_WAYS if most_ways is None else most_ways
    length, ways = 1, 0
    while length < len(chain):
        length += 1
        different = len({chain.kinds[i : i + length] for i in range(len(chain) - length + 1)})
        ways += different * length + len(chain)
        if ways > most_ways:
            return length - 1
    return length
