"""Planners by name, and ``plan_checkpoints``, which runs one and has the referee check what it returns. Torch-free."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptplan.check import check_plan
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError
from ckptplan.gaps import contracted, expanded, expanded_nodes, places
from ckptplan.nodes import PlanNode, Selective, parse_plan_text, recomputed_blocks, tree_faults, wholly_again
from ckptplan.plan import CheckpointDecision, CheckpointPlan, decision_for
from ckptplan.planners.budgets import TARGET_KINDS, TargetKind, budget_for, checked_target, step_cost, take_static_bytes
from ckptplan.planners.compiled import compile_budget
from ckptplan.planners.fixed import checkpoint_all, file, no_checkpoint, text, uniform
from ckptplan.planners.heuristic import greedy, smallest_reachable
from ckptplan.planners.milp import ilp
from ckptplan.planners.nested import (
    dynamic_programming,
    least_flat_peak,
    least_nested_peak,
    least_whole_peak,
    optimal,
)
from ckptplan.planners.reasons import block_reasons, infeasible_budget, infeasible_slowdown, shown_name
from ckptplan.planners.tables import PlannerResult
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
    CostKind,
    MemoryModel,
    as_chain,
    modules_of,
    name_some,
    recompute_costs,
    require_memory,
)
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import PlanCost, no_checkpoint_peak, simulate_plan

__all__ = [
    "PLANNERS",
    "PLANNERS_THAT_COMPILE",
    "PLANNERS_WITH_OPTIONS",
    "TARGET_KINDS",
    "Planner",
    "PlannerResult",
    "TargetKind",
    "least_flat_peak",
    "least_nested_peak",
    "least_whole_peak",
    "no_checkpoint_peak",
    "plan_checkpoints",
    "shown_name",
    "smallest_reachable",
]

Planner = Callable[..., "PlannerResult | Sequence[PlanNode] | str"]

PLANNERS: dict[str, Planner] = {
    "no_checkpoint": no_checkpoint,
    "none": no_checkpoint,
    "checkpoint_all": checkpoint_all,
    "all": checkpoint_all,
    "uniform": uniform,
    "greedy": greedy,
    "dynamic_programming": dynamic_programming,
    "dp": dynamic_programming,
    "optimal": optimal,
    "ilp": ilp,
    "compile_budget": compile_budget,
    "compile": compile_budget,
    "text": text,
    "file": file,
}
PLANNERS_WITH_OPTIONS = frozenset({"optimal", "ilp"})  # those that choose options inside blocks, if the profile has any
PLANNERS_THAT_COMPILE = frozenset({"compile_budget", "compile"})  # those that need compiled blocks in the profile


def plan_checkpoints(
    profiles: ChainProfile | Sequence[BlockProfile],
    blocks: Sequence[Any] | None = None,
    *,
    target_kind: TargetKind | str,
    target_value: int | float,
    planner: str | Planner = "dynamic_programming",
    memory_model: MemoryModel = "peak",
    cost: CostKind = "time",
    on_infeasible: Literal["raise", "best_effort"] = "raise",
    **options: Any,
) -> CheckpointPlan:
    """The planner's plan for a target, checked by the referee.

    Args:
        blocks: the declared blocks, to check that the profile is theirs.
        target_kind: ``activation_budget_bytes`` (most bytes of the activation peak); ``activation_budget_fraction``
            and ``activation_saving_fraction`` (of the predicted peak with every block kept; 0 < f <= 1);
            ``device_budget_bytes`` (needs the option ``static_bytes``: what else stands on the device, as weights,
            gradients and optimizer state); ``max_slowdown`` (a ratio >= 1 of step times: the smallest peak within it).
        planner: a name in ``PLANNERS``, or a function like those: ``(profile, budget_bytes, *, cost, memory_model,
            **options)`` that returns a ``PlannerResult``, plan nodes, or plan text.
        on_infeasible: ``"best_effort"`` returns the planner's plan of least peak with ``feasible=False``.
        options: for the planner.

    Raises ``InfeasibleTargetError``; ``TimingOnlyProfileError`` or ``ValueError`` for a profile without the figures
    needed; ``PlanIncompatibleError`` for a planner's result that is no plan of this chain; ``ValueError`` or
    ``TypeError`` naming the argument for a bad value.
    """
    chain = as_chain(profiles)
    name, function = _resolve_planner(planner)
    if on_infeasible not in ("raise", "best_effort"):
        raise ValueError(f"on_infeasible={on_infeasible!r}; expected 'raise' or 'best_effort'")
    _require_same_blocks(chain, blocks)
    require_memory(chain, memory_model)
    recompute_costs(chain, cost)
    value = checked_target(target_kind, target_value)
    static_bytes = take_static_bytes(options) if target_kind == "device_budget_bytes" else 0
    _require_options(name, function, options)
    run = _Run(name, function, chain, memory_model, cost, options)
    unplanned_bytes = no_checkpoint_peak(chain, memory_model)
    budget: int | None = None
    if target_kind == "max_slowdown":
        if name in PLANNERS_THAT_COMPILE:
            raise ValueError(
                "target_kind='max_slowdown': planner 'compile' counts time beside its own fastest step, not beside the "
                "eager one; give it a budget, such as activation_budget_fraction"
            )
        result, feasible = _within_slowdown(run, float(value), unplanned_bytes)
    else:
        budget = budget_for(target_kind, value, unplanned_bytes) - static_bytes
        result = run(max(budget, 0))
        feasible = run.simulated(result.nodes).peak_bytes <= budget
    simulated = run.simulated(result.nodes)
    if not feasible and on_infeasible == "raise":
        raise _infeasible(run, result, budget, static_bytes=static_bytes, ratio=float(value))
    plan = CheckpointPlan(
        nodes=result.nodes,
        decisions=_decisions(run, result.nodes, simulated),
        planner=name,
        target_kind=target_kind,
        target_value=value,
        budget_bytes=None if budget is None else max(budget, 0),
        memory_model=memory_model,
        cost_kind=cost,
        predicted_peak_bytes=simulated.peak_bytes,
        predicted_peak_at=simulated.peak_at,
        no_checkpoint_peak_bytes=unplanned_bytes,
        predicted_cost=plan_recompute_cost(chain, result.nodes, cost),
        optimality_gap=result.optimality_gap if feasible else None,
        feasible=feasible,
        fingerprint=chain.fingerprint,
        environment=dict(chain.environment),
    )
    check_plan(chain, plan)
    return plan


# The planner ---------------------------------------------------------------------------------------------------------


def _resolve_planner(planner: str | Planner) -> tuple[str, Planner]:
    if callable(planner):
        function = planner
        named = [name for name, known in PLANNERS.items() if known is function]
        return (named[0] if named else getattr(function, "__name__", type(function).__name__)), function
    if not isinstance(planner, str):
        raise TypeError(f"planner={planner!r} is a {type(planner).__name__}; expected a name or a function")
    if planner not in PLANNERS:
        close = difflib.get_close_matches(planner, PLANNERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"planner={planner!r} is not known{hint} Known: {', '.join(PLANNERS)}, or any function")
    function = PLANNERS[planner]
    return next(name for name, known in PLANNERS.items() if known is function), function


def _require_options(name: str, function: Planner, options: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("cost", "memory_model")}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else sorted(options.keys() - own.keys())
    missing = sorted(n for n, p in own.items() if p.default is p.empty and n not in options)
    if unknown:
        takes = f"takes {', '.join(own)}" if own else "takes no options"
        raise TypeError(f"planner {name!r}: unknown option {', '.join(unknown)}; it {takes}")
    if missing:
        raise TypeError(f"planner {name!r} needs the option {', '.join(missing)}")


@dataclass(frozen=True)
class _Run:
    """One planner over one chain; calling it with a budget gives a checked result."""

    name: str
    function: Planner
    chain: ChainProfile
    memory_model: MemoryModel
    cost: CostKind
    options: dict[str, Any]

    def __call__(self, budget_bytes: int) -> PlannerResult:
        is_given = self.function in (text, file)  # a plan of the user's is over the blocks alone
        returned = self.function(
            self.chain if is_given else expanded(self.chain),
            budget_bytes,
            cost=self.cost,
            memory_model=self.memory_model,
            **self.options,
        )
        if isinstance(returned, str):
            returned = parse_plan_text(returned)
        if not isinstance(returned, PlannerResult):
            returned = PlannerResult(tuple(returned))
        if not is_given:
            returned = replace(returned, nodes=contracted(self.chain, returned.nodes))
        faults = tree_faults(returned.nodes, len(self.chain))
        if not faults:
            blocks = [self.chain[i] for i in sorted(recomputed_blocks(returned.nodes))]
            faults = [
                f"block {block.block_id!r} is recomputed but not eligible: {block.exclusion_reason}"
                for block in blocks
                if not block.eligible_for_checkpoint
            ]
        if faults:
            raise PlanIncompatibleError([f"planner {self.name!r}: {fault}" for fault in faults])
        return returned

    def simulated(self, nodes: Sequence[PlanNode]) -> PlanCost:
        return simulate_plan(self.chain, nodes, self.memory_model)

    def added_cost(self, nodes: Sequence[PlanNode]) -> float:
        return plan_recompute_cost(self.chain, nodes, self.cost)


def _require_same_blocks(chain: ChainProfile, blocks: Sequence[Any] | None) -> None:
    if blocks is None:
        return
    ids = tuple(block.block_id for block in blocks)
    if ids != tuple(dict.fromkeys(modules_of(chain.block_ids))):
        raise PlanIncompatibleError(
            f"the profile is of blocks {name_some(chain.block_ids)}, the blocks given are {name_some(ids)}"
        )


# Targets -------------------------------------------------------------------------------------------------------------


def _within_slowdown(run: _Run, ratio: float, unplanned_bytes: int) -> tuple[PlannerResult, bool]:
    """The result of least peak whose cost stays within the ratio, by a search over budgets.

    For planners whose cost does not rise with the budget this is the least peak that they can reach.
    """
    allowed = (ratio - 1) * step_cost(run.chain, run.cost) * (1 + 1e-12)
    best = run(unplanned_bytes)
    cost_above = run.added_cost(best.nodes)
    if cost_above > allowed:
        return best, False
    above, below = run.simulated(best.nodes).peak_bytes, run.simulated(run(0).nodes).peak_bytes - 1
    cost_below = math.inf
    proved, tries = True, 0
    while above - below > 1:
        # by turns: half way; where the cost would be the one allowed if it were linear in between; one byte less
        share = (cost_below - allowed) / (cost_below - cost_above) if math.isfinite(cost_below) else 0.5
        share = (0.5, share, 1.0)[tries % 3]
        middle = min(above - 1, max(below + 1, below + math.ceil((above - below) * share)))
        tries += 1
        result = run(middle)
        peak, cost = run.simulated(result.nodes).peak_bytes, run.added_cost(result.nodes)
        proved = proved and result.optimality_gap == 0
        if peak <= middle and cost <= allowed:
            best, above, cost_above = result, peak, cost
        else:
            below, cost_below = middle, cost if peak <= middle else math.inf
    return (best if proved else replace(best, optimality_gap=None)), True


# What comes of it ----------------------------------------------------------------------------------------------------


def _decisions(run: _Run, nodes: Sequence[PlanNode], simulated: PlanCost) -> tuple[CheckpointDecision, ...]:
    chosen = wholly_again(nodes)
    stages, all_nodes = expanded(run.chain), expanded_nodes(run.chain, nodes)
    of_stages = block_reasons(stages, all_nodes, simulated.peak_bytes, run.memory_model, run.cost)
    reasons = [of_stages[place] for place in places(run.chain)]
    saved = {node.block: node.saved_ops for node in nodes if isinstance(node, Selective)}
    return tuple(
        decision_for(block, i in chosen, reasons[i], simulated.retained_bytes[i], saved.get(i))
        for i, block in enumerate(run.chain)
    )


def _infeasible(
    run: _Run, result: PlannerResult, budget: int | None, *, static_bytes: int, ratio: float
) -> InfeasibleTargetError:
    simulated = run.simulated(result.nodes)
    if budget is not None:
        return infeasible_budget(
            run.name, run.chain, run.memory_model, simulated, budget_bytes=budget, static_bytes=static_bytes
        )
    return infeasible_slowdown(
        run.name,
        simulated,
        least_nested_peak(run.chain, run.memory_model)[0],
        ratio=ratio,
        added=run.added_cost(result.nodes),
        step=step_cost(run.chain, run.cost),
        cost=run.cost,
    )
