"""Plans that do not search: nothing, everything, evenly spread blocks, and a plan given by the user."""

from __future__ import annotations

import os

import numpy as np

from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners.tables import Bools, FlatTables, PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel, name_some


def no_checkpoint(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """Keeps every block, whatever the budget: the reference."""
    tables = FlatTables(profile, memory_model, cost)
    return PlannerResult(tables.nodes(np.zeros(tables.num_blocks, bool)))


def checkpoint_all(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel
) -> PlannerResult:
    """Recomputes every block that can be, whatever the budget: the other reference."""
    tables = FlatTables(profile, memory_model, cost)
    return PlannerResult(tables.nodes(tables.eligible))


def uniform(profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel) -> PlannerResult:
    """Evenly spread blocks, the fewest that fit; where no number of them does, the number of least peak."""
    tables = FlatTables(profile, memory_model, cost)
    best: tuple[int, int] | None = None
    for count in range(int(tables.eligible.sum()) + 1):
        peak = tables.peak(evenly_spread(tables.eligible, count))
        if best is None or peak < best[0]:
            best = peak, count
        if peak <= budget_bytes:
            break
    assert best is not None
    return PlannerResult(tables.nodes(evenly_spread(tables.eligible, best[1])))


def evenly_spread(eligible: Bools, count: int) -> Bools:
    """``count`` of the eligible blocks at even distances, the first one among them: early blocks save most."""
    positions = np.flatnonzero(eligible)
    choice = np.zeros(len(eligible), bool)
    choice[positions[np.arange(count) * len(positions) // max(count, 1)]] = True
    return choice


def text(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel, text: str
) -> PlannerResult:
    """The plan that the user wrote: ``text="K0 R(1) R(2 3)"``."""
    return PlannerResult(parse_plan_text(text))


def file(
    profile: ChainProfile, budget_bytes: int, *, cost: CostKind, memory_model: MemoryModel, path: str | os.PathLike[str]
) -> PlannerResult:
    """The tree of a stored plan, judged anew under this profile and budget.

    Raises ``PlanIncompatibleError`` where it was made for other blocks or another model.
    """
    stored = CheckpointPlan.load(path)
    faults = []
    if stored.block_ids != profile.block_ids:
        faults.append(f"{path} is of blocks {name_some(stored.block_ids)}, not {name_some(profile.block_ids)}")
    if stored.fingerprint and profile.fingerprint and stored.fingerprint != profile.fingerprint:
        faults.append(f"{path} was made for another model: fingerprint {stored.fingerprint}, not {profile.fingerprint}")
    if faults:
        raise PlanIncompatibleError(faults)
    return PlannerResult(stored.nodes)
