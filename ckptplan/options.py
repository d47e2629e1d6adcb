"""Which outputs to keep inside a block: the best sets for every number of bytes, by an exact search. Torch-free.

The problem. A value that autograd needs is either kept or made again by its operator; an operator that runs again
needs the values that it reads, kept or made again in turn. With x_v = "value v is kept" and y_o = "operator o
runs again":

    minimise   sum of cost_o y_o         (milliseconds, or FLOPs)
    subject to x_v + y_maker(v) >= 1     for every needed value v
               x_v + y_maker(v) >= y_o   for every operator o and every value v that it reads
               sum of bytes_v x_v <= budget

a 0-1 program of some tens of variables, solved by HiGHS in milliseconds. What a set of options costs is
measured afterwards; the search only proposes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptplan.graph import BlockOperators

_BUDGET_SHARES = tuple(i / 16 for i in range(1, 16))  # of the bytes that autograd needs
_SOLVER_LIMIT_S = 10.0  # for blocks of thousands of operators; a set that is not proved best is an option too


@dataclass(frozen=True)
class KeepSet:
    """Values to keep, what then runs again, and its predicted cost."""

    kept: tuple[int, ...]
    run_again: tuple[int, ...]
    kept_bytes: int
    time_ms: float
    flops: int


def propose_keep_sets(block: BlockOperators) -> list[KeepSet]:
    """Keep sets worth measuring, fewest bytes first: the two ends, the free one, and a grid between.

    The *free* one keeps the fewest bytes with which no operator that counts FLOPs (a matrix product, a
    convolution, attention) runs again. For each budget of the grid there is the set of least time, the one of least
    FLOPs, and the one that writes the fewest bytes again.
    """
    if not block.needed:
        return []
    problem = _Problem.of(block)
    needed_bytes = sum(block.values[v].size_bytes for v in problem.needed)
    free = problem.fewest_bytes(without=[i for i, call in enumerate(block.calls) if call.flops])
    found = [problem.cleaned(())]
    budgets = {int(needed_bytes * share) for share in _BUDGET_SHARES}
    if free is not None:
        found.append(problem.cleaned(free))
        budgets.add(found[-1].kept_bytes)
    for budget_bytes in sorted(budgets):
        for cost in (problem.times, problem.flops, problem.written_bytes):
            found.append(problem.cleaned(problem.least_cost(cost, budget_bytes) or ()))
    distinct = {keep_set.kept: keep_set for keep_set in found if keep_set.run_again}
    return sorted(distinct.values(), key=lambda s: (s.kept_bytes, s.time_ms))


@dataclass(frozen=True)
class _Problem:
    """The constraints in matrix form: variables are all values, then all operator calls."""

    block: BlockOperators
    needed: tuple[int, ...]
    rows: NDArray[np.float64]  # one constraint each, rows @ variables >= least
    least: NDArray[np.float64]
    upper: NDArray[np.float64]

    @staticmethod
    def of(block: BlockOperators) -> _Problem:
        count = len(block.values)
        width = count + len(block.calls)
        entries: list[tuple[tuple[int, ...], int | None]] = [
            ((v, count + block.values[v].operator), None) for v in block.needed
        ]
        for index, call in enumerate(block.calls):
            entries += [((v, count + block.values[v].operator), count + index) for v in call.reads]
        rows, least = np.zeros((len(entries), width)), np.zeros(len(entries))
        for row, (positive, negative) in enumerate(entries):
            rows[row, list(positive)] = 1.0
            if negative is None:
                least[row] = 1.0
            else:
                rows[row, negative] -= 1.0
        upper = np.ones(width)
        upper[[v for v, value in enumerate(block.values) if not value.keepable]] = 0.0
        return _Problem(block, block.needed, rows, least, upper)

    @property
    def times(self) -> list[float]:
        return [call.time_ms for call in self.block.calls]

    @property
    def flops(self) -> list[float]:
        """FLOPs; among sets of equal FLOPs the one that writes fewer bytes is better.

        Nothing here is timed, so that what is proposed for FLOPs is the same in every run.
        """
        written = self.written_bytes
        total_bytes = sum(written) or 1.0
        least = min((call.flops for call in self.block.calls if call.flops), default=1)
        return [
            call.flops + 1e-3 * least * size / total_bytes for call, size in zip(self.block.calls, written, strict=True)
        ]

    @property
    def written_bytes(self) -> list[float]:
        """By each call: what it costs where memory's bandwidth is what counts, and the same in every run."""
        return [sum(self.sizes[v] for v in call.makes) for call in self.block.calls]

    @property
    def sizes(self) -> list[float]:
        return [float(value.size_bytes) for value in self.block.values]

    def fewest_bytes(self, without: Iterable[int]) -> tuple[int, ...] | None:
        """The values to keep so that none of the calls ``without`` runs again; None where that cannot be."""
        upper = self.upper.copy()
        upper[[len(self.sizes) + call for call in without]] = 0.0
        total_ms = sum(self.times) or 1.0
        # one byte is worth more than all time: time only decides between sets of equal bytes
        costs = np.array([*self.sizes, *(0.5 * t / total_ms for t in self.times)])
        return self._solved(costs, upper, None)

    def least_cost(self, cost: Sequence[float], budget_bytes: int) -> tuple[int, ...] | None:
        total = sum(cost) or 1.0
        total_bytes = sum(self.sizes) or 1.0
        costs = np.array([*(1e-6 * size / total_bytes for size in self.sizes), *(c / total for c in cost)])
        return self._solved(costs, self.upper, budget_bytes)

    def _solved(
        self, costs: NDArray[np.float64], upper: NDArray[np.float64], budget_bytes: int | None
    ) -> tuple[int, ...] | None:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError as error:
            raise ImportError(
                "finding selective options needs scipy; install it (pip install -e '.[solvers]')"
            ) from error

        constraints: list[Any] = [LinearConstraint(self.rows, self.least, np.inf)] if len(self.rows) else []
        if budget_bytes is not None and self.sizes:
            scale = max(self.sizes)  # well-scaled rows keep the solver exact
            row = np.array([*(size / scale for size in self.sizes), *([0.0] * len(self.block.calls))])
            constraints.append(LinearConstraint(row[None], -np.inf, budget_bytes / scale))
        largest = float(np.abs(costs).max(initial=0.0)) or 1.0
        result = milp(
            costs / largest * 1e3,
            constraints=constraints,
            integrality=np.ones(len(costs)),
            bounds=Bounds(0, upper),
            options={"time_limit": _SOLVER_LIMIT_S, "mip_rel_gap": 0.0},
        )
        if result.x is None:  # what may not run again makes a value that cannot be kept
            return None
        return tuple(int(v) for v in np.flatnonzero(result.x[: len(self.sizes)] > 0.5))

    def cleaned(self, kept: Iterable[int]) -> KeepSet:
        """Without values that nothing asks for, and without results of operators that run again anyway."""
        chosen = {v for v in kept if self.block.values[v].keepable}
        while True:
            used, run_again = self._reached(chosen)
            wanted = {v for v in used if self.block.values[v].operator not in run_again}
            if wanted == chosen:
                break
            chosen = wanted
        calls = [self.block.calls[o] for o in run_again]
        return KeepSet(
            kept=tuple(sorted(chosen)),
            run_again=tuple(sorted(run_again)),
            kept_bytes=sum(self.block.values[v].size_bytes for v in chosen),
            time_ms=sum(call.time_ms for call in calls),
            flops=sum(call.flops for call in calls),
        )

    def _reached(self, kept: set[int]) -> tuple[set[int], set[int]]:
        """Kept values that are asked for, and operators that run again."""
        used: set[int] = set()
        run_again: set[int] = set()
        pending = list(self.needed)
        while pending:
            value = pending.pop()
            operator = self.block.values[value].operator
            if value in kept:
                used.add(value)
            elif operator not in run_again:
                run_again.add(operator)
                pending.extend(self.block.calls[operator].reads)
        return used, run_again
