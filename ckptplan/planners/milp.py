"""The cheapest flat plan as a mixed-integer linear programme, solved and proved by HiGHS through scipy.

A second opinion on ``flat.py`` that shares no method with it. One binary per block and option; one variable per
boundary storage and stage that may take hold of it, at least 1 once somebody has; one variable per stage for the bytes
retained before it; one row per stage and phase that keeps the bytes alive in it to the budget. The variables beside the
binaries only tighten rows by being large, so that they need no integrality.

HiGHS works in floating point and may take a plan to fit that is above the budget by less than its tolerance. Every plan
is therefore judged in whole bytes; one that does not fit is forbidden by name, and HiGHS is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from ckptplan.costs import StageCost
from ckptplan.nodes import PlanNode
from ckptplan.planners.nested import least_peak_plan
from ckptplan.planners.options import OptionChain, Outputs, additive_profile, flat_peak, option_chain, spread
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import ChainProfile, CostKind, MemoryModel
from ckptplan.simulate import simulate_plan

_PROVED = 1e-9
_MOST_CUTS = 100  # plans forbidden by name; each is above the budget by less than HiGHS can tell
# The budget and the cost of recomputing everything as HiGHS sees them; it compares numbers to 1e-6.
_BUDGET_SCALE, _COST_SCALE = 1e6, 1e6


def ilp(
    profile: ChainProfile,
    budget_bytes: int,
    *,
    cost: CostKind,
    memory_model: MemoryModel,
    time_limit_s: float = 60.0,
) -> PlannerResult:
    """The flat plan of least cost within the budget, with HiGHS' bound; the one of least peak where none fits.

    Args:
        time_limit_s: HiGHS is stopped after this; the gap then tells what is proved.

    Raises ``ModuleNotFoundError`` saying what to install where scipy is missing.
    """
    chain = option_chain(additive_profile(profile) if memory_model == "additive" else profile, cost)
    fallback = least_peak_plan(chain, most_blocks=1)
    if simulate_plan(profile, fallback, memory_model).peak_bytes > budget_bytes:
        return PlannerResult(fallback)
    return cheapest_flat_plan(chain, budget_bytes, fallback, time_limit_s)


def cheapest_flat_plan(
    chain: OptionChain, budget_bytes: int, fallback: tuple[PlanNode, ...], time_limit_s: float
) -> PlannerResult:
    """The cheapest flat plan over the chain's options; ``fallback`` fits, and stands where HiGHS finds none in time."""
    model = _Model(chain, budget_bytes)
    lower = 0.0
    for _ in range(_MOST_CUTS):
        choice, bound = model.solved(time_limit_s)
        lower = max(lower, bound)
        if choice is None:
            break
        if flat_peak(chain, choice) <= budget_bytes:
            picked = zip(chain.blocks, choice, strict=True)
            nodes = tuple(block.options[option].node(i) for i, (block, option) in enumerate(picked))
            return PlannerResult(nodes, _gap(chain, nodes, lower))
        model.forbid(choice)
    return PlannerResult(fallback, _gap(chain, fallback, lower))


def _gap(chain: OptionChain, nodes: Sequence[PlanNode], lower: float) -> float:
    """Relative; ``lower`` is in units of cost."""
    cost = chain.value_of(nodes) // chain.runs_scale
    gap = (cost - lower) / cost if cost else 0.0
    return gap if gap > _PROVED else 0.0


@dataclass(eq=False)
class _Storage:
    """A boundary storage (bytes scaled) and the variable that says whether somebody holds it; None: nobody can."""

    size: float
    held: int | None = None


@dataclass
class _Rows:
    """Sparse rows: sum of coefficient x variable <= limit."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        for column, coefficient in terms:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.coefficients.append(coefficient)
        self.limits.append(limit)


_Ways = list[tuple[int, StageCost]]  # variable and bytes of each way to run a stage


class _Model:
    """The variables: a binary per block and option, in order, then whatever the stages need."""

    def __init__(self, chain: OptionChain, budget_bytes: int) -> None:
        self.scipy = _scipy()
        self.chain = chain
        self.scale = _BUDGET_SCALE / max(budget_bytes, 1)  # of bytes
        self.budget = budget_bytes * self.scale
        self.least: list[float] = []  # of each variable
        self.rows = _Rows()
        self.firsts: list[int] = []
        for block in chain.blocks:
            self.firsts.append(len(self.least))
            variables = [self._variable() for _ in block.options]
            self._require_one(variables)
        self.num_binaries = len(self.least)
        self.always = self._variable(1.0)  # stands for what is no choice
        self.rows.add([(self.always, 1.0)], 1.0)
        self._add_stages()

    def _variable(self, least: float = 0.0) -> int:
        self.least.append(least)
        return len(self.least) - 1

    def _require_one(self, variables: Sequence[int]) -> None:
        self.rows.add([(v, 1.0) for v in variables], 1.0)
        self.rows.add([(v, -1.0) for v in variables], -1.0)

    # bytes

    def _add_stages(self) -> None:
        chain = self.chain
        stages: list[tuple[_Ways, Outputs]] = []
        if chain.pre is not None:
            stages.append(([(self.always, chain.pre[0])], chain.pre[1]))
        for block, first in zip(chain.blocks, self.firsts, strict=True):
            ways = [(first + number, option.cost) for number, option in enumerate(block.options)]
            stages.append((ways, block.outputs))
        stages.append(([(self.always, chain.post)], ()))
        at_hand = [_Storage(0.0) for _ in chain.inputs]
        retained = self._variable()
        for ways, outputs in stages:
            retained, at_hand = self._add_stage(ways, outputs, retained, at_hand)

    def _add_stage(
        self, ways: _Ways, outputs: Outputs, retained: int, at_hand: list[_Storage]
    ) -> tuple[int, list[_Storage]]:
        """Rows of one stage; the variable of what is retained behind it, and the storages that it hands on."""
        handed_on = [_Storage(size * self.scale) if source is None else at_hand[source] for size, source in outputs]
        handed = sum(storage.size for storage in at_hand)
        earlier = [storage.held for storage in at_hand]
        forward = [(v, cost.forward_peak_bytes * self.scale) for v, cost in ways]
        self.rows.add([(retained, 1.0), *forward], self.budget - handed)
        for storage in dict.fromkeys([*at_hand, *handed_on]):
            self._take_hold(storage, ways, at_hand, handed_on)
        held = [(s.held, s.size) for s in at_hand if s.held is not None]
        backward = [(v, cost.backward_peak_bytes * self.scale) for v, cost in ways]
        self.rows.add([(retained, 1.0), *held, *backward], self.budget)
        for variable, cost in ways:
            self._add_lettings(variable, cost, [(retained, 1.0), *held], at_hand, earlier)
        gone = [(s.held, s.size) for s in at_hand if s.held is not None and s not in handed_on]
        saved = [(v, cost.saved_bytes * self.scale) for v, cost in ways]
        behind = self._variable()
        self.rows.add([(retained, 1.0), *gone, *saved, (behind, -1.0)], 0.0)
        return behind, handed_on

    def _take_hold(
        self, storage: _Storage, ways: _Ways, at_hand: Sequence[_Storage], handed_on: Sequence[_Storage]
    ) -> None:
        keepers = [variable for variable, cost in ways if self._keeps(cost, storage, at_hand, handed_on)]
        if keepers:
            now = self._variable()
            self.rows.add([*((v, 1.0) for v in keepers), (now, -1.0)], 0.0)
            if storage.held is not None:
                self.rows.add([(storage.held, 1.0), (now, -1.0)], 0.0)
            storage.held = now

    def _add_lettings(
        self,
        variable: int,
        cost: StageCost,
        alive: Sequence[tuple[int, float]],
        at_hand: Sequence[_Storage],
        earlier: Sequence[int | None],
    ) -> None:
        """A row for each time at which a way lets go of inputs: what somebody before it holds too is not freed."""
        freed: list[tuple[int, float]] = []  # the way is taken and the storage is held earlier: with its bytes
        freed_bytes = 0.0
        for letting in cost.inputs_let_go:
            for i in letting.inputs:
                freed_bytes += at_hand[i].size
                held = earlier[i]
                if held is not None:
                    both = self._variable()
                    self.rows.add([(variable, 1.0), (held, 1.0), (both, -1.0)], 1.0)
                    freed.append((both, at_hand[i].size))
            if freed and letting.backward_peak_bytes > cost.backward_peak_bytes:
                own = letting.backward_peak_bytes * self.scale - freed_bytes
                self.rows.add([*alive, (variable, own), *freed], self.budget)

    @staticmethod
    def _keeps(cost: StageCost, storage: _Storage, at_hand: Sequence[_Storage], handed_on: Sequence[_Storage]) -> bool:
        flags = (*spread(cost.keeps_input, len(at_hand)), *spread(cost.keeps_output, len(handed_on)))
        return any(kept and other is storage for other, kept in zip((*at_hand, *handed_on), flags, strict=True))

    # solving

    def forbid(self, choice: Sequence[int]) -> None:
        """This choice, in all its blocks, no more."""
        picked = [(first + option, 1.0) for first, option in zip(self.firsts, choice, strict=True)]
        self.rows.add(picked, len(picked) - 1.0)

    def solved(self, time_limit_s: float) -> tuple[tuple[int, ...] | None, float]:
        """An option per block (None: no plan found in time), and a lower bound on any plan's cost in units."""
        values = [option.value // self.chain.runs_scale for block in self.chain.blocks for option in block.options]
        unit = max(sum(values), 1) / _COST_SCALE
        objective = np.zeros(len(self.least))
        objective[: self.num_binaries] = np.array(values, float) / unit
        rows = self.rows
        shape = (len(rows.limits), len(self.least))
        matrix = self.scipy.sparse.csr_matrix((rows.coefficients, (rows.rows, rows.columns)), shape=shape)
        found = self.scipy.optimize.milp(
            objective,
            constraints=self.scipy.optimize.LinearConstraint(matrix, ub=np.array(rows.limits)),
            integrality=np.arange(len(self.least)) < self.num_binaries,
            bounds=self.scipy.optimize.Bounds(np.array(self.least), np.inf),
            options={"mip_rel_gap": 0.0, "time_limit": time_limit_s},
        )
        bound = 0.0 if found.mip_dual_bound is None else max(0.0, float(found.mip_dual_bound)) * unit
        if found.x is None:
            return None, bound
        ends = [*self.firsts[1:], self.num_binaries]
        return tuple(int(found.x[a:b].argmax()) for a, b in zip(self.firsts, ends, strict=True)), bound


def _scipy() -> ModuleType:
    """scipy with the parts used here."""
    try:
        import scipy
        import scipy.optimize
        import scipy.sparse
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "planner 'ilp' needs scipy, which is not installed; type pip install -e '.[solvers]', or take planner "
            "'dp' or 'optimal', which need none"
        ) from error
    return scipy
