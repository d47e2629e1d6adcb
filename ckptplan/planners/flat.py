"""The cheapest flat plan: keep or recompute, block by block, exact to the byte.

Method. Walk the chain from the end. For each stage, and for each set of boundary storages that somebody holds
already ("state", one or two for most chains), keep the trade-off of everything behind it as a staircase of labels:
(bytes that must be free here for the rest of the step to fit, least value of the rest). A label's bytes are the
largest of several needs, so the first stage's staircase holds true peaks, and the label of least value with the
least bytes is the answer: the cheapest plan, of those the one with fewest recomputed blocks, of those the one with
the lowest peak (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, has the dynamic programme
over discretised memory; here memory is not discretised).

Bound. The staircase can grow exponentially (the problem contains the knapsack problem). A label is dropped when
value + least value of what comes before it > value of a known plan. "Least value of what comes before" is bounded
from below by the same problem with blocks recomputed in fractions: a convex piecewise linear function of the bytes,
built once from the front, one convex hull per stage and state.

Guarantee. If no staircase was cut, the plan is optimal. If one was, the least bound among the dropped labels says
how far the plan may be from the optimum; ``optimality_gap`` reports it, 0.0 standing for less than 1e-9 of the
plan's cost (the precision of sums of floats). Costs are compared as integers of about 15 digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ckptplan.planners.heuristic import greedy_choice, least_peak_choice
from ckptplan.planners.tables import Bools, FlatTables, Floats, Ints, PlannerResult, Transition
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel

# Labels per stage and state: tried in turn until the plan is proved optimal. The first suffices for measured
# chains (few kinds of blocks); the last bounds a hopeless search at some seconds for 1,000 blocks.
LABEL_CAPS = (256, 2048, 8192)
_PROVED = 1e-9
_ENOUGH_TO_EXCHANGE, _MOST_TO_EXCHANGE = 32, 1000  # blocks; all pairs of them are looked at


def keep_or_recompute(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """The cheapest flat plan of kept and checkpointed blocks within the budget; that of least peak where none fits."""
    tables = FlatTables(profile, memory_model, cost)
    least_peak, choice = least_peak_choice(tables)
    if least_peak > budget_bytes:
        return PlannerResult(tables.nodes(choice), None)
    found, gap = cheapest_choice(tables, budget_bytes)
    return PlannerResult(tables.nodes(found), gap)


def cheapest_choice(tables: FlatTables, budget_bytes: int) -> tuple[Bools, float]:
    """The cheapest choice within a budget that some choice meets, and the proved relative gap."""
    none = np.zeros(tables.num_blocks, bool)
    if tables.peak(none) <= budget_bytes:
        return none, 0.0
    problem = _FlatProblem(tables, budget_bytes)
    best = greedy_choice(tables, budget_bytes)
    lower = problem.bound_of_all
    for cap in LABEL_CAPS:
        options, cut = search(problem, problem.value(best), cap)
        found = None if options is None else problem.choice(options)
        if found is not None and problem.value(found) <= problem.value(best):
            best = found
        if cut == float("inf"):
            return best, 0.0
        best = exchanged(problem, best, lower * (1 + _PROVED))
        lower = max(lower, min(cut, problem.value(best)))
        gap = (problem.value(best) - lower) / problem.value(best)
        if gap <= _PROVED:
            return best, 0.0
    return best, gap


Stages = list[list[list[tuple[Transition, int]]]]  # per stage, per state: the ways to run it, and what each costs


class Problem:
    """A budget over a state machine whose ways have integer values: the machine, and bounds from the front.

    Attributes:
        fronts: per stage and state, a lower bound on the value of everything before it.
        bound_of_all: a lower bound on the value of any plan; infinite where none fits.
    """

    def __init__(self, stages: Stages, budget_bytes: int) -> None:
        self.stages, self.budget_bytes = stages, budget_bytes
        needs = _least_needs(stages)
        self.least_retained = _least_retained(stages, budget_bytes)
        self.fronts = _fractional_fronts(stages, needs, budget_bytes)
        self.bound_of_all = min((float(f.value[-1]) for f in self.fronts[-1] if len(f.value)), default=float("inf"))
        most = sum(max(value for ways in stage for _, value in ways) for stage in stages)
        # rounding of float64 over sums of up to thousands of values
        self.tolerance = 1e-11 * (float(most) + 1.0)


class _FlatProblem(Problem):
    """Keep or recompute: the machine of ``tables`` with scaled values."""

    def __init__(self, tables: FlatTables, budget_bytes: int) -> None:
        self.tables = tables
        self.values = scaled_values(tables)
        machine = tables.transitions()
        super().__init__(
            [[self._with_values(ways, i) for ways in stage] for i, stage in enumerate(machine)], budget_bytes
        )

    def _with_values(self, ways: list[Transition], stage: int) -> list[tuple[Transition, int]]:
        block = stage - self.tables.first_stage
        # recompute first: of labels that are equal in all else, the first stays, so earlier blocks are recomputed
        return [(way, int(self.values[block]) if way.option else 0) for way in reversed(ways)]

    def value(self, choice: Bools) -> int:
        return int(self.values[choice].sum())

    def choice(self, options: Ints) -> Bools:
        """Options over stages as a choice over blocks."""
        first = self.tables.first_stage
        return options[first : first + self.tables.num_blocks].astype(bool)


def scaled_values(tables: FlatTables) -> Ints:
    """Per block cost x (blocks + 1) + 1 in integers: sums compare exactly, and equal costs by number of blocks."""
    count = tables.num_blocks + 1
    works = [Fraction(str(work or 0)) for work in tables.work]  # as decimals: 0.1 + 0.2 equals 0.3
    total, limit = sum(works), Fraction(2**59, count)
    unit = Fraction(1)
    while total / unit > limit:
        unit *= 10
    if any(work.denominator != 1 for work in works):
        while total * 10 / unit <= limit:
            unit /= 10
    return np.array([round(work / unit) * count + 1 for work in works], np.int64)


def _least_needs(stages: Stages) -> list[list[int]]:
    """Per stage and state, the least bytes with which the rest of the step fits."""
    needs: list[list[int]] = [[0] * (1 + max((w.next_state for s in stages[-1] for w, _ in s), default=0))]
    for stage in reversed(stages):
        behind = needs[-1]
        needs.append([min(max(w.need, w.retained + behind[w.next_state]) for w, _ in ways) for ways in stage])
    return needs[::-1]


def _least_retained(stages: Stages, budget_bytes: int) -> list[list[int | None]]:
    """Per stage and state, the least bytes retained by what came before it within the budget; None: not reached."""
    reached: list[list[int | None]] = [[0]]
    for index, stage in enumerate(stages):
        states = len(stages[index + 1]) if index + 1 < len(stages) else len(_final_states(stages))
        after: list[int | None] = [None] * states
        for before, ways in zip(reached[-1], stage, strict=True):
            for way, _ in ways:
                if before is None or before + way.need > budget_bytes:
                    continue
                known = after[way.next_state]
                after[way.next_state] = before + way.retained if known is None else min(known, before + way.retained)
        reached.append(after)
    return reached


def _final_states(stages: Stages) -> range:
    return range(1 + max(way.next_state for ways in stages[-1] for way, _ in ways))


# The bound: fractional fronts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Front:
    """A convex, falling, piecewise linear function: bytes retained -> least value with fractions allowed."""

    retained: Floats
    value: Floats

    def at(self, retained: Floats) -> Floats:
        if not len(self.retained):
            return np.full(len(retained), np.inf)
        return np.interp(retained, self.retained, self.value, left=np.inf)


_EMPTY = _Front(np.zeros(0), np.zeros(0))


def _fractional_fronts(stages: Stages, needs: list[list[int]], budget_bytes: int) -> list[list[_Front]]:
    """Per stage and state, a lower bound on the value of everything before it. No integer plan lies below it."""
    fronts = [[_Front(np.zeros(1), np.zeros(1))]]
    for index, stage in enumerate(stages):
        parts: list[list[_Front]] = [[] for _ in needs[index + 1]]
        for front, ways in zip(fronts[-1], stage, strict=True):
            for way, value in ways:
                room = min(budget_bytes - way.need, budget_bytes - needs[index + 1][way.next_state] - way.retained)
                clipped = _clipped(front, room)
                if len(clipped.retained):
                    parts[way.next_state].append(_Front(clipped.retained + way.retained, clipped.value + value))
        fronts.append([_lower_hull(pieces) for pieces in parts])
    return fronts


def _clipped(front: _Front, limit: int) -> _Front:
    """The front where retained <= limit."""
    inside = int(np.searchsorted(front.retained, limit, side="right"))
    if inside == len(front.retained):
        return front
    if inside == 0:
        return _EMPTY
    edge = np.interp(limit, front.retained, front.value)
    return _Front(np.append(front.retained[:inside], limit), np.append(front.value[:inside], edge))


def _lower_hull(pieces: list[_Front]) -> _Front:
    if len(pieces) <= 1:
        return pieces[0] if pieces else _EMPTY
    x = np.concatenate([piece.retained for piece in pieces])
    y = np.concatenate([piece.value for piece in pieces])
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    falling = np.append(True, y[1:] < np.minimum.accumulate(y)[:-1])
    x, y = x[falling], y[falling]
    while len(x) > 2:
        slope = np.diff(y) / np.diff(x)
        # a point on or above the line through its neighbours is no corner, whatever becomes of them
        corner = np.concatenate(([True], slope[:-1] < slope[1:], [True]))
        if corner.all():
            break
        x, y = x[corner], y[corner]
    return _Front(x, y)


# The search: staircases from the end ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stairs:
    """Labels of one stage and state, bytes rising and value falling, and how each goes on."""

    need: Ints
    value: Ints
    way: Ints  # which of the state's ways the stage is run by
    following: Ints  # which label of the next stage's staircase it goes on with


def search(problem: Problem, known_value: int, cap: int) -> tuple[Ints | None, float]:
    """The option of each stage in the best plan found; the least bound among labels cut only to stay within ``cap``."""
    zero = np.zeros(1, np.int64)
    behind = [_Stairs(zero, zero, zero, zero) for _ in _final_states(problem.stages)]
    trails: list[list[tuple[NDArray[np.int8], NDArray[np.int32]]]] = []
    least_cut = float("inf")
    for index in reversed(range(len(problem.stages))):
        here = []
        for state, ways in enumerate(problem.stages[index]):
            labels, cut = _bounded(problem, index, state, _extended(ways, behind), known_value, cap)
            least_cut = min(least_cut, cut)
            here.append(labels)
        behind = here
        trails.append([(labels.way.astype(np.int8), labels.following.astype(np.int32)) for labels in here])
    trails.reverse()
    start = behind[0]
    return _followed(problem, trails, len(start.need) - 1) if len(start.need) else None, least_cut


def _extended(ways: list[tuple[Transition, int]], behind: list[_Stairs]) -> _Stairs:
    """Every label of the next stage, run into by every way of this one."""
    parts = [(number, way, value, behind[way.next_state]) for number, (way, value) in enumerate(ways)]
    return _Stairs(
        np.concatenate([np.maximum(way.need, way.retained + stairs.need) for _, way, _, stairs in parts]),
        np.concatenate([value + stairs.value for _, _, value, stairs in parts]),
        np.concatenate([np.full(len(stairs.need), number) for number, _, _, stairs in parts]),
        np.concatenate([np.arange(len(stairs.need)) for _, _, _, stairs in parts]),
    )


def _bounded(
    problem: Problem, index: int, state: int, labels: _Stairs, known_value: int, cap: int
) -> tuple[_Stairs, float]:
    """The labels that may still lead to a plan as good as the known one, without dominated ones, at most ``cap``."""
    retained = problem.least_retained[index][state]
    if retained is None:
        return _taken(labels, np.zeros(0, np.int64)), float("inf")
    room = problem.budget_bytes - retained
    labels = _taken(labels, np.flatnonzero(labels.need <= room))
    labels = _taken(labels, _undominated(labels))
    front = problem.fronts[index][state]
    bound = labels.value + front.at((problem.budget_bytes - labels.need).astype(np.float64))
    hopeful = bound <= known_value + problem.tolerance
    labels, bound = _taken(labels, np.flatnonzero(hopeful)), bound[hopeful]
    if len(bound) <= cap:
        return labels, float("inf")
    chosen = _most_hopeful(bound, cap, problem.tolerance)
    return _taken(labels, np.flatnonzero(chosen)), float(bound[~chosen].min(initial=float("inf")))


def _taken(labels: _Stairs, chosen: Ints) -> _Stairs:
    return _Stairs(labels.need[chosen], labels.value[chosen], labels.way[chosen], labels.following[chosen])


def _undominated(labels: _Stairs) -> Ints:
    """Positions of the staircase: need rising, value falling; of equal labels the first."""
    if not len(labels.need):
        return np.zeros(0, np.int64)
    order: Ints = np.argsort(labels.need, kind="stable")  # merges sorted runs, one per way
    value = labels.value[order]
    order = order[np.append(True, value[1:] < np.minimum.accumulate(value)[:-1])]
    need = labels.need[order]
    return order[np.append(need[1:] != need[:-1], True)]


def _most_hopeful(bound: Floats, cap: int, tolerance: float) -> Bools:
    """Which labels have the ``cap`` lowest bounds; among equal ones evenly spread; always that of least need."""
    limit = np.partition(bound, cap - 1)[cap - 1]
    chosen = bound < limit - tolerance
    equal = np.flatnonzero(np.abs(bound - limit) <= tolerance)
    room = cap - int(chosen.sum())
    chosen[equal[np.arange(room) * len(equal) // room]] = True
    chosen[0] = True
    return chosen


def _followed(problem: Problem, trails: list[list[tuple[NDArray[np.int8], NDArray[np.int32]]]], label: int) -> Ints:
    """The options behind a label of the first stage."""
    state, options = 0, np.zeros(len(trails), np.int64)
    for index, trail in enumerate(trails):
        ways, following = trail[state]
        way = problem.stages[index][state][ways[label]][0]
        options[index] = way.option
        state, label = way.next_state, int(following[label])
    return options


# Improvement of a known plan -----------------------------------------------------------------------------------------


def exchanged(problem: _FlatProblem, choice: Bools, good_enough: float, tries: int = 64) -> Bools:
    """Better choices that differ in up to four blocks, until one is good enough: fills a budget to the byte.

    All pairs of changes are sorted by the bytes they free at the peak; for each pair the best partner that still
    fits is looked up. The most promising are judged exactly.
    """
    tables, budget = problem.tables, problem.budget_bytes
    while problem.value(choice) > good_enough:
        movable, change, slack = _movable(problem, choice)
        value = np.where(choice, -problem.values, problem.values)[movable]
        best = choice
        for blocks in _promising(change, value, slack, tries):
            changed = choice.copy()
            changed[movable[blocks]] ^= True
            if problem.value(changed) < problem.value(best) and tables.peak(changed) <= budget:
                best = changed
        if best is choice:
            break
        choice = best
    return choice


def _movable(problem: _FlatProblem, choice: Bools) -> tuple[Ints, Ints, int]:
    """Blocks to change, what each change does at the fullest stage, and the bytes that are free there.

    Taken from before the first stage that is nearly full where there are enough of them: such changes act on all
    nearly full stages alike.
    """
    tables = problem.tables
    forward, backward = tables.levels(choice)
    free = problem.budget_bytes - np.maximum(forward, backward)
    stage = int(free.argmin())
    change = tables.change_at(choice, stage, bool(backward[stage] >= forward[stage]))
    first_full = int(np.flatnonzero(free <= free[stage] + 2 * np.abs(change).max()).min())
    early = np.arange(tables.num_blocks) + tables.first_stage < first_full
    movable = np.flatnonzero(tables.eligible & early)
    if len(movable) < _ENOUGH_TO_EXCHANGE:
        movable = np.flatnonzero(tables.eligible)
    if len(movable) > _MOST_TO_EXCHANGE:
        movable = movable[np.arange(_MOST_TO_EXCHANGE) * len(movable) // _MOST_TO_EXCHANGE]
    return movable, change[movable], int(free[stage])


def _promising(change: Ints, value: Ints, slack: int, tries: int) -> list[Ints]:
    """Sets of up to four positions with falling value and total change <= slack, the most falling first."""
    first, second = np.triu_indices(len(change))
    single = first == second  # (i, i) stands for i alone
    pair_change = change[first] + np.where(single, 0, change[second])
    pair_value = value[first] + np.where(single, 0, value[second])
    order = np.argsort(pair_change, kind="stable")
    sorted_change = pair_change[order]
    least = np.minimum.accumulate(pair_value[order])
    is_new = np.append(True, least[1:] < least[:-1])
    least_at = np.maximum.accumulate(np.where(is_new, np.arange(len(least)), 0))
    partner = np.searchsorted(sorted_change, slack - pair_change, side="right") - 1
    total = np.where(partner >= 0, pair_value + least[partner], 0)
    best = np.argsort(total, kind="stable")[:tries]
    found = []
    for a in best[total[best] < 0]:
        b = order[least_at[partner[a]]]
        positions, counts = np.unique([*{first[a], second[a]}, *{first[b], second[b]}], return_counts=True)
        found.append(positions[counts == 1])
    return found
