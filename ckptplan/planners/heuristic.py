"""Greedy: most bytes at the peak per unit of cost first, then pruned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptplan.gaps import expanded
from ckptplan.planners.tables import Bools, FlatTables, PlannerResult
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, MemoryModel, as_chain, require_memory
from ckptplan.simulate import simulate_plan


def greedy(profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel) -> PlannerResult:
    """Recomputes, while the peak is above the budget, the block that saves most bytes at the peak per cost.

    Then every block that turns out not to be needed is kept after all, the dearest first. Where that ends above
    the budget, it starts from the plan of least peak instead; so it fits whenever a flat plan does.
    """
    tables = FlatTables(profile, memory_model, cost)
    return PlannerResult(tables.nodes(greedy_choice(tables, budget_bytes)))


def greedy_choice(tables: FlatTables, budget_bytes: int) -> Bools:
    """The choice of :func:`greedy`; above the budget only if every flat plan is."""
    choice = _grow(tables, budget_bytes)
    if tables.peak(choice) > budget_bytes:
        choice = least_peak_choice(tables)[1]
    return pruned(tables, choice, max(budget_bytes, tables.peak(choice)))


def _grow(tables: FlatTables, budget_bytes: int) -> Bools:
    choice = np.zeros(tables.num_blocks, bool)
    work = np.array([w or 0.0 for w in tables.work], float)
    while True:
        forward, backward = tables.levels(choice)
        in_backward = bool(backward.max() >= forward.max())
        stage = int((backward if in_backward else forward).argmax())
        if max(backward[stage], forward[stage]) <= budget_bytes:
            return choice
        saving = -tables.change_at(choice, stage, in_backward)
        saving[choice | ~tables.eligible] = 0
        if saving.max() <= 0:
            return choice
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(saving > 0, saving / work, -1.0)  # a block that costs nothing comes first
        choice[np.lexsort((-saving, -rate))[0]] = True


def pruned(tables: FlatTables, choice: Bools, limit_bytes: int) -> Bools:
    """Keeps every block whose recomputation is not needed to stay within the limit, the dearest first."""
    choice = choice.copy()
    work = np.array([w or 0.0 for w in tables.work], float)
    found = True
    while found:  # keeping one block can make another one's recomputation needless
        found = False
        for block in sorted(np.flatnonzero(choice), key=lambda b: (-work[b], -b)):
            choice[block] = False
            if tables.peak(choice) > limit_bytes:
                choice[block] = True
            else:
                found = True
    return choice


def least_peak_choice(tables: FlatTables) -> tuple[int, Bools]:
    """The smallest peak of any flat plan, and a choice that reaches it (exact, one backward pass)."""
    transitions = tables.transitions()
    below: list[tuple[int, int]] = []  # per state: least bytes needed from here on, the option that needs them
    trail: list[list[tuple[int, int]]] = []
    for stage in reversed(transitions):
        here = [
            min((max(t.need, t.retained + (below[t.next_state][0] if below else 0)), t.option) for t in options)
            for options in stage
        ]
        trail.append(here)
        below = here
    trail.reverse()
    state, options = 0, np.zeros(len(transitions), np.int64)
    for index, stage in enumerate(transitions):
        options[index] = trail[index][state][1]
        state = next(t.next_state for t in stage[state] if t.option == options[index])
    first = tables.first_stage
    return trail[0][0][0], options[first : first + tables.num_blocks].astype(bool)


def smallest_reachable(
    profile: ChainProfile | Sequence[BlockProfile], memory_model: MemoryModel = "peak"
) -> tuple[int, str]:
    """The least peak in bytes of any flat plan, and the stage and phase that set it (``"layers.2 backward"``)."""
    chain = expanded(as_chain(profile))
    require_memory(chain, memory_model)
    tables = FlatTables(chain, memory_model)
    _, choice = least_peak_choice(tables)
    simulated = simulate_plan(chain, tables.nodes(choice), memory_model)
    return simulated.peak_bytes, simulated.peak_at
