"""Planners by name, and ``plan_checkpoints``, which runs one and has the referee check what it returns. Torch-free."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from ckptplan.check import check_plan
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError
from ckptplan.plan import (
    CheckpointDecision,
    CheckpointPlan,
    Keep,
    PlanNode,
    blocks_of,
    decision_for,
    nodes_text,
    parse_plan_text,
    recomputed_blocks,
    tree_faults,
)
from ckptplan.planners.fixed import checkpoint_all, file, no_checkpoint, text, uniform
from ckptplan.planners.flat import dynamic_programming
from ckptplan.planners.heuristic import greedy, least_peak_choice
from ckptplan.planners.tables import FlatTables, PlannerResult
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
    CostKind,
    MemoryModel,
    as_chain,
    name_some,
    recompute_costs,
    require_memory,
)
from ckptplan.simulate import AFTER, BEFORE, PlanCost, no_checkpoint_peak, plan_recompute_cost, simulate_plan
from ckptplan.units import format_bytes, format_ms

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
    "text": text,
    "file": file,
}

TargetKind = Literal[
    "activation_budget_bytes",
    "activation_budget_fraction",
    "activation_saving_fraction",
    "device_budget_bytes",
    "max_slowdown",
]
TARGET_KINDS: tuple[str, ...] = TargetKind.__args__  # type: ignore[attr-defined]


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
    value = _checked_target(target_kind, target_value)
    static_bytes = _static_bytes(options) if target_kind == "device_budget_bytes" else 0
    _require_options(name, function, options)
    run = _Run(name, function, chain, memory_model, cost, options)
    unplanned_bytes = no_checkpoint_peak(chain, memory_model)
    budget: int | None = None
    if target_kind == "max_slowdown":
        result, feasible = _within_slowdown(run, float(value), unplanned_bytes)
    else:
        budget = _budget_bytes(target_kind, value, unplanned_bytes) - static_bytes
        result = run(max(budget, 0))
        feasible = run.simulated(result.nodes).peak_bytes <= budget
    simulated = run.simulated(result.nodes)
    if not feasible and on_infeasible == "raise":
        if budget is None:
            raise _infeasible_slowdown(run, result.nodes, float(value))
        raise _infeasible(run, simulated, budget, static_bytes)
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


def smallest_reachable(
    profile: ChainProfile | Sequence[BlockProfile], memory_model: MemoryModel = "peak"
) -> tuple[int, str]:
    """The least peak in bytes of any flat plan, and the stage and phase that set it (``"layers.2 backward"``)."""
    chain = as_chain(profile)
    require_memory(chain, memory_model)
    tables = FlatTables(chain, memory_model)
    _, choice = least_peak_choice(tables)
    simulated = simulate_plan(chain, tables.nodes(choice), memory_model)
    return simulated.peak_bytes, simulated.peak_at


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
        returned = self.function(
            self.chain, budget_bytes, cost=self.cost, memory_model=self.memory_model, **self.options
        )
        if isinstance(returned, str):
            returned = parse_plan_text(returned)
        if not isinstance(returned, PlannerResult):
            returned = PlannerResult(tuple(returned))
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
    if ids != chain.block_ids:
        raise PlanIncompatibleError(
            f"the profile is of blocks {name_some(chain.block_ids)}, the blocks given are {name_some(ids)}"
        )


# Targets -------------------------------------------------------------------------------------------------------------


def _checked_target(kind: str, value: Any) -> int | float:
    if kind not in TARGET_KINDS:
        close = difflib.get_close_matches(str(kind), TARGET_KINDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"target_kind={kind!r}{hint} Expected one of {', '.join(TARGET_KINDS)}")
    in_bytes = kind in ("activation_budget_bytes", "device_budget_bytes")
    expected = {
        "activation_budget_fraction": "a fraction, 0 < f <= 1",
        "activation_saving_fraction": "a fraction, 0 < f <= 1",
        "max_slowdown": "a ratio of step times from 1.0 on",
    }.get(kind, "a number of bytes from 0 on")
    number = _plain_number(value, f"target_value={value!r} for {kind}", expected)
    if not math.isfinite(number):
        raise ValueError(f"target_value={value!r} for {kind}; expected {expected}")
    low_enough = number >= 0 if in_bytes else 0 < number <= 1 if "fraction" in kind else number >= 1
    if not low_enough:
        raise ValueError(f"target_value={value!r} for {kind}; expected {expected}")
    return int(number) if in_bytes else float(number)


def _plain_number(value: Any, what: str, expected: str) -> int | float:
    if isinstance(value, (bool, np.bool_, str, bytes)) or value is None:
        raise TypeError(f"{what} is a {type(value).__name__}; expected {expected}")
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is a {type(value).__name__}; expected {expected}") from None


def _static_bytes(options: dict[str, Any]) -> int:
    """Takes ``static_bytes`` off the options."""
    if "static_bytes" not in options:
        raise ValueError(
            "target_kind='device_budget_bytes' needs static_bytes=...: the bytes of weights, gradients, optimizer "
            "state and batch that stand on the device beside the activations"
        )
    value = options.pop("static_bytes")
    number = _plain_number(value, f"static_bytes={value!r}", "a number of bytes from 0 on")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"static_bytes={value!r}; expected a number of bytes from 0 on")
    return math.ceil(number)


def _budget_bytes(kind: str, value: int | float, unplanned_bytes: int) -> int:
    if kind == "activation_budget_fraction":
        return math.floor(_share(value, unplanned_bytes) + _rounding(unplanned_bytes))
    if kind == "activation_saving_fraction":
        return unplanned_bytes - math.ceil(_share(value, unplanned_bytes) - _rounding(unplanned_bytes))
    return int(value)


def _share(fraction: float, total_bytes: int) -> Fraction:
    return Fraction(fraction) * total_bytes


def _rounding(total_bytes: int) -> Fraction:
    """What a fraction such as 3/17 may be off by as a float: it must not cost a block."""
    return Fraction(total_bytes, 2**52)


def _within_slowdown(run: _Run, ratio: float, unplanned_bytes: int) -> tuple[PlannerResult, bool]:
    """The result of least peak whose cost stays within the ratio, by a search over budgets.

    For planners whose cost does not rise with the budget this is the least peak that they can reach.
    """
    allowed = (ratio - 1) * _step_cost(run.chain, run.cost) * (1 + 1e-12)
    best = run(unplanned_bytes)
    cost_above = run.added_cost(best.nodes)
    if cost_above > allowed:
        return best, False
    above, below = run.simulated(best.nodes).peak_bytes, smallest_reachable(run.chain, run.memory_model)[0] - 1
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


def _step_cost(chain: ChainProfile, cost: CostKind) -> float:
    """Forward and backward of the whole step, in ms or FLOPs."""
    regions = [region for region in (chain.pre, chain.post) if region is not None]
    names = [*chain.block_ids, *(region.name for region in regions)]
    total, missing = 0.0, []
    for name, stage in zip(names, [*chain, *regions], strict=True):
        both = (stage.forward_time_ms, stage.backward_time_ms)
        if cost == "flops":
            both = (stage.forward_flops, stage.backward_flops)
        forward, backward = both
        if forward is None or backward is None:
            missing.append(name)
        else:
            total += forward + backward
    if missing:
        unit = "flops" if cost == "flops" else "time_ms"
        raise ValueError(
            f"target_kind='max_slowdown' needs the step's cost: forward_{unit} and backward_{unit} are missing "
            f"for {name_some(missing)}"
        )
    return total


# When it cannot be done ----------------------------------------------------------------------------------------------


def _infeasible_slowdown(run: _Run, nodes: Sequence[PlanNode], ratio: float) -> InfeasibleTargetError:
    added, step = run.added_cost(nodes), _step_cost(run.chain, run.cost)
    simulated = run.simulated(nodes)
    return InfeasibleTargetError(
        f"planner {run.name!r} has no plan within max_slowdown={ratio}: it adds {_cost_text(added, run.cost)} to a "
        f"step of {_cost_text(step, run.cost)}, a ratio of {1 + added / step:.4g}",
        smallest_reachable_bytes=simulated.peak_bytes,
        smallest_reachable_any_bytes=smallest_reachable(run.chain, run.memory_model)[0],
        limited_by=simulated.peak_at,
    )


def _infeasible(run: _Run, simulated: PlanCost, budget: int, static_bytes: int) -> InfeasibleTargetError:
    least_any, any_at = smallest_reachable(run.chain, run.memory_model)
    own = simulated.peak_bytes
    first = f"no plan of planner {run.name!r} keeps the activation peak within {_bytes_text(budget)}"
    if static_bytes:
        first += f" (what else stands on the device takes {_bytes_text(static_bytes)})"
    parts = [first, f"its smallest reachable peak is {_bytes_text(own)}, set by {simulated.peak_at}"]
    if least_any < own:
        parts.append(f"planner 'dynamic_programming' reaches {_bytes_text(least_any)}, set by {any_at}")
    parts.append("what would help: " + _levers(run.chain, simulated.peak_at, other_planner=least_any <= budget))
    return InfeasibleTargetError(
        "; ".join(parts),
        budget_bytes=budget,
        smallest_reachable_bytes=own,
        smallest_reachable_any_bytes=least_any,
        limited_by=simulated.peak_at,
    )


def _levers(chain: ChainProfile, peak_at: str, *, other_planner: bool) -> str:
    levers = ["planner='dynamic_programming'"] if other_planner else []
    if peak_at.startswith(AFTER):
        levers.append("a chunked or fused loss (the head and the loss set the peak)")
    levers.append("a smaller batch (with more accumulation the result is the same)")
    if not peak_at.startswith((AFTER, BEFORE)):
        levers.append(f"declaring smaller blocks inside {peak_at.rsplit(' ', 1)[0]!r}")
    excluded = [block.block_id for block in chain if not block.eligible_for_checkpoint]
    if excluded:
        levers.append(f"making {name_some(excluded)} recomputable")
    return "; ".join(levers)


def _bytes_text(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"


def _cost_text(cost: float, kind: CostKind) -> str:
    return format_ms(cost) if kind == "time" else f"{cost:.4g} FLOPs"


# Reasons -------------------------------------------------------------------------------------------------------------


def _decisions(run: _Run, nodes: tuple[PlanNode, ...], simulated: PlanCost) -> tuple[CheckpointDecision, ...]:
    chosen = recomputed_blocks(nodes)
    flat = all(isinstance(node, Keep) or len(blocks_of((node,))) == 1 for node in nodes)
    reasons = _flat_reasons(run, chosen, simulated) if flat else _tree_reasons(run.chain, nodes)
    return tuple(
        decision_for(block, i in chosen, reasons[i], simulated.retained_bytes[i]) for i, block in enumerate(run.chain)
    )


def _tree_reasons(chain: ChainProfile, nodes: Sequence[PlanNode]) -> list[str]:
    reasons = []
    for node in nodes:
        for i in blocks_of((node,)):
            if isinstance(node, Keep):
                reasons.append(_not_eligible(chain[i]) or "kept")
            else:
                reasons.append(f"recomputed: part of {nodes_text((node,))}")
    return reasons


def _flat_reasons(run: _Run, chosen: frozenset[int], simulated: PlanCost) -> list[str]:
    """Each block's reason is what the peak would be if that block alone were decided the other way."""
    tables = FlatTables(run.chain, run.memory_model, run.cost)
    choice = np.array([i in chosen for i in range(len(run.chain))])
    reasons = []
    for i, block in enumerate(run.chain):
        if not block.eligible_for_checkpoint:
            reasons.append(_not_eligible(block))
            continue
        choice[i] ^= True
        otherwise, stage = tables.peak_and_stage(choice)
        choice[i] ^= True
        cost = _cost_text(tables.work[i] or 0.0, run.cost)
        difference = otherwise - simulated.peak_bytes if i in chosen else simulated.peak_bytes - otherwise
        if i in chosen and difference > 0:
            reasons.append(f"recomputed: saves {format_bytes(difference)} at the peak for {cost}")
        elif i in chosen:
            reasons.append(f"recomputed: for {cost}, though by itself it does not lower the peak")
        elif not chosen and difference > 0:
            reasons.append(f"kept: recomputing it would save {format_bytes(difference)} for {cost}")
        elif difference > 0:
            reasons.append(f"kept: not needed; recomputing it too would save {format_bytes(difference)} for {cost}")
        else:
            reasons.append(_no_gain(run.chain, i, stage - tables.first_stage))
    return reasons


def _no_gain(chain: ChainProfile, block: int, peak_block: int) -> str:
    if peak_block == block:
        return "kept: its recomputation would itself set the peak, saving nothing"
    if peak_block >= len(chain):
        return "kept: its recomputation would coincide with the peak of the head and loss, saving nothing"
    where = BEFORE if peak_block < 0 else f"block {chain[peak_block].block_id!r}"
    return f"kept: the peak is at {where}, which recomputing this block would not lower"


def _not_eligible(block: BlockProfile) -> str:
    return "" if block.eligible_for_checkpoint else f"not eligible: {block.exclusion_reason or 'no reason given'}"
