"""How good a plan is, proved: its cost against the least of its kind and of any, by two solvers. Torch-free."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckptplan.check import check_plan
from ckptplan.errors import PlanIncompatibleError
from ckptplan.explanation import weight_copies_text
from ckptplan.gaps import expanded
from ckptplan.plan import CheckpointPlan
from ckptplan.planners.milp import ilp
from ckptplan.planners.nested import cheapest_flat, optimal
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, MemoryModel, as_chain
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import simulate_plan
from ckptplan.strict_json import canonical_json, write_text_whole
from ckptplan.units import format_bytes, format_ms

CERTIFICATE_SCHEMA = "ckptplan.certificate/1"
_SAME = 1e-9  # relative: the precision of sums of floats
CROSS_CHECK_BLOCKS = 64  # most blocks for HiGHS without being asked


@dataclass(frozen=True)
class Certificate:
    """What is proved of a plan under its profile's figures.

    Attributes:
        cost: what recomputation adds to a step, in ms or FLOPs by ``cost_kind``.
        budget_bytes: the plan's own; where it has none, its peak.
        flat_lower_bound: no flat plan within the budget costs less; None where none fits.
        lower_bound: no plan of any shape within the budget costs less.
        gap: (cost - lower_bound) / cost; 0.0: proved a cheapest plan of all.
        cross_check: "agrees", "disagrees" or "not made" (scipy is missing, there are too many blocks, or no flat plan
            fits): does HiGHS find the same least cost of flat plans?
        dry_run_peak_bytes: of a step on fake tensors (``verify_plan``); None: not run, or not possible.
        operator, block, phase: what ran at that peak.
        measured_peak_bytes: of a real step; None: not measured (yet).
        weight_copies_bytes: of the predicted bytes, copies of weights that autocast made and that are held from the
            forward until backward; None: not known.
        with_options: the profile holds options inside blocks; else the bounds are those of plans over whole blocks.
    """

    plan_digest: str
    peak_bytes: int
    peak_at: str
    budget_bytes: int
    cost: float
    cost_kind: str
    flat_lower_bound: float | None
    lower_bound: float
    gap: float
    cross_check: str
    dry_run_peak_bytes: int | None = None
    operator: str | None = None
    block: str | None = None
    phase: str | None = None
    measured_peak_bytes: int | None = None
    with_options: bool = False
    weight_copies_bytes: int | None = None

    @property
    def text(self) -> str:
        """The certificate in one sentence: the peak, what recomputation costs, and what is proved of that."""
        parts = [
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed, at {self.peak_at}"
        ]
        if self.weight_copies_bytes:
            parts.append(weight_copies_text(self.weight_copies_bytes))
        parts.append(f"recomputing costs {self._cost_text(self.cost)}, {self._proved()}")
        if self.dry_run_peak_bytes is not None:
            parts.append(f"dry run: {format_bytes(self.dry_run_peak_bytes)}, at {self.operator} in {self.block}")
        if self.measured_peak_bytes is not None:
            parts.append(f"measured peak {format_bytes(self.measured_peak_bytes)}")
        return "; ".join(parts)

    def _proved(self) -> str:
        over = "all plans" if self.with_options else "all plans over whole blocks"
        check = {"agrees": " (HiGHS agrees)", "disagrees": " (HiGHS disagrees)"}.get(self.cross_check, "")
        if self.gap == 0:
            return f"proved the least of {over}{check}"
        if self.flat_lower_bound is not None and self.cost <= self.flat_lower_bound * (1 + 1e-9):
            least = self._cost_text(self.lower_bound)
            return f"proved the least of flat plans{check}; one with segments or nests costs no less than {least}"
        bounds = [f"the least of {over} is no lower than {self._cost_text(self.lower_bound)}"]
        if self.flat_lower_bound is not None:
            bounds.append(f"of flat ones than {self._cost_text(self.flat_lower_bound)}{check}")
        return f"up to {100 * self.gap:.3g} % more than needed: {', '.join(bounds)}"

    def _cost_text(self, cost: float) -> str:
        return format_ms(cost) if self.cost_kind == "time" else f"{cost:.4g} FLOPs"

    def to_json(self) -> str:
        """Canonical text."""
        return canonical_json({"schema": CERTIFICATE_SCHEMA, **dataclasses.asdict(self)}) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the certificate as JSON; the file is whole or not there."""
        write_text_whole(path, self.to_json())


def certify(
    profiles: ChainProfile | Sequence[BlockProfile], plan: CheckpointPlan, *, cross_check: bool | None = None
) -> Certificate:
    """Solves the plan's problem anew and says how far the plan is from the least cost. Any planner's plan will do.

    Args:
        cross_check: whether HiGHS confirms the flat bound; None: where scipy is there and the chain is short.

    Raises ``PlanIncompatibleError`` for a plan that does not keep what it says (the referee judges it first), and for
    one with compiled blocks.
    """
    chain = as_chain(profiles)
    check_plan(chain, plan)
    if plan.compiled:
        raise PlanIncompatibleError(
            f"{plan.compiled} of the plan's blocks run compiled; a certificate compares eager plans with eager ones. "
            "How far planner 'compile' may be from its best is the plan's optimality_gap"
        )
    memory_model: MemoryModel = "additive" if plan.memory_model == "additive" else "peak"
    kind: CostKind = "flops" if plan.cost_kind == "flops" else "time"
    simulated = simulate_plan(chain, plan.nodes, memory_model)
    budget = max(plan.budget_bytes or 0, simulated.peak_bytes)
    cost = plan_recompute_cost(chain, plan.nodes, kind)
    stages = expanded(chain)  # solvers number what runs between blocks too

    def solved(result: PlannerResult) -> tuple[float, float] | None:
        """Least cost by the solver's bound and by its plan; None where none fits."""
        if simulate_plan(stages, result.nodes, memory_model).peak_bytes > budget:
            return None
        found = plan_recompute_cost(stages, result.nodes, kind)
        return found * (1 - (result.optimality_gap or 0.0)), found

    flat = solved(cheapest_flat(stages, budget, kind, memory_model))
    any_shape = solved(optimal(stages, budget, cost=kind, memory_model=memory_model))
    lower = cost if any_shape is None else min(any_shape[0], cost)
    checked = "not made"
    if cross_check is None:
        cross_check = importlib.util.find_spec("scipy") is not None and len(chain) <= CROSS_CHECK_BLOCKS
    if cross_check and flat is not None:
        other = solved(ilp(stages, budget, cost=kind, memory_model=memory_model))
        checked = "agrees" if other is not None and _overlap(flat, other) else "disagrees"
    gap = (cost - lower) / cost if cost else 0.0
    return Certificate(
        plan_digest=plan.digest,
        peak_bytes=simulated.peak_bytes,
        peak_at=simulated.peak_at,
        budget_bytes=budget,
        cost=cost,
        cost_kind=kind,
        flat_lower_bound=None if flat is None else flat[0],
        lower_bound=lower,
        gap=gap if gap > _SAME else 0.0,
        cross_check=checked,
        weight_copies_bytes=simulated.weight_copies_bytes,
        with_options=any(b.offload or any(option.saved_ops for option in b.selective) for b in chain),
    )


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether one least cost can lie between both pairs of bounds."""
    return a[0] <= b[1] * (1 + _SAME) and b[0] <= a[1] * (1 + _SAME)
