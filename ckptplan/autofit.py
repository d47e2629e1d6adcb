"""Profile, plan, patch and check in one call."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.blocks import CheckpointableBlock
from ckptplan.budget import CUDA_MARGIN
from ckptplan.compiled_choices import COMPILED_BUDGETS
from ckptplan.compiled_model import COMPILED_MODEL_BUDGETS
from ckptplan.equality import EqualityCheck, check_equality
from ckptplan.errors import InfeasibleTargetError
from ckptplan.explanation import weight_copies_text
from ckptplan.footprint import StaticBytes, static_bytes
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import PLANNERS_THAT_COMPILE, PLANNERS_WITH_OPTIONS, plan_checkpoints, shown_name
from ckptplan.planners.budgets import budget_for, step_cost
from ckptplan.profiles import ChainProfile, name_some
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from ckptplan.subject import LossFn, default_device
from ckptplan.units import format_bytes, format_ms, format_percent, format_seconds, parse_bytes
from ckptplan.wrappers import foreign_checkpoints, switched_off

LONGEST_PLAN = 80  # characters of a plan's text in the summary


@dataclass
class Fitted:
    """A model that runs under a plan; leaving the ``with``, or ``remove()``, gives it back as it was.

    Attributes:
        plan, profile: what was planned, from which figures.
        equality: the comparison of one planned with one unplanned step; None with ``check=False``.
        static_bytes: what stands on the device beside activations; ``optimizer_bytes`` None: no optimizer was given.
        summary: what was done, in a few lines.
    """

    plan: CheckpointPlan
    profile: ChainProfile
    equality: EqualityCheck | None
    static_bytes: StaticBytes
    summary: str
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Give the model back as it was. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self.remove()


def fit(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    budget: int | float | str,
    *,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "dynamic_programming",
    cost: str = "time",
    check: bool = True,
    device: str | torch.device | None = None,
    say: Callable[[str], object] | None = print,
) -> Fitted:
    """Make training steps of ``model`` fit ``budget`` at the least recomputation: measure, plan, patch, compare.

    Nothing else of the model changes: parameters, ``state_dict`` keys and hooks are the same objects, evaluation and
    everything without gradients runs as before. Give the largest batch that training will see; smaller ones run too,
    and a training forward on a larger one is told by a ``LargerBatchWarning``.

    Args:
        batch: handed to ``loss_fn``.
        loss_fn: ``loss_fn(model, batch)`` -> scalar loss, as in your loop; autocast, if any, is entered in it.
        budget: a size in bytes (``"12GiB"``, ``12 * 2**30``): all that may stand on the device, which is weights,
            buffers, gradients, the optimizer's state and the batch besides activations. A float, 0 < f <= 1: a share
            of the activation peak without checkpointing.
        blocks: module paths, globs such as ``"layers.*"``, or declared blocks; None: they are found.
        optimizer: for a size, so that its state is counted, also before its first step. Without it nothing is
            counted for it, and that is said.
        planner, cost: as in ``plan_checkpoints``; ``"optimal"`` and ``"ilp"`` measure options inside blocks too, and
            on a device with memory of its own blocks with their activations on the host.
        check: compare a planned with an unplanned step (``check_equality``); the model is left unpatched where they
            differ.
        say: gets each line of the summary; None: nothing is said.

    Raises:
        InfeasibleTargetError: no plan fits; the message has the least budget that one does.
        StepMismatchError: the planned step is not the unplanned one.
        BlockDeclarationError, UnsupportedBoundaryError, NoDifferentiableOutputError: as ``profile_model``.
        ValueError, TypeError: a budget that is neither.
    """
    kind, amount = parse_budget(budget)
    start_s = time.perf_counter()
    where = torch.device(device) if device is not None else default_device(model, batch)
    with_options = planner in PLANNERS_WITH_OPTIONS and importlib.util.find_spec("scipy") is not None
    undo: list[Callable[[], None]] = []
    lines: list[str] = []
    try:
        if any(place.switch for place in foreign_checkpoints(model)):
            undo.append(switched_off(model))
            lines.append("the model's own gradient checkpointing is switched off: the plan takes its place")
        profile = profile_model(
            model,
            blocks,
            batch,
            loss_fn,
            device=where,
            selective=with_options,
            offload=has_host_apart(where) and planner in PLANNERS_WITH_OPTIONS and cost == "time",
            compiled_budgets=COMPILED_BUDGETS if planner in PLANNERS_THAT_COMPILE else (),
            compiled_model_budgets=COMPILED_MODEL_BUDGETS if planner in PLANNERS_THAT_COMPILE else (),
        )
        static = static_of(model, optimizer, batch)
        plan = _plan(profile, kind, amount, static, where, planner, cost)
        equality = check_equality(model, plan, batch, loss_fn, device=where) if check else None
        undo.append(checkpointed(model, plan).permanent().remove)
    except BaseException:
        while undo:
            undo.pop()()
        raise
    lines += summary_lines(profile, plan, equality, static, kind, time.perf_counter() - start_s)
    if say is not None:
        for line in lines:
            say(f"ckptplan: {line}")
    return Fitted(plan, profile, equality, static, "\n".join(lines), undo)


def has_host_apart(device: torch.device) -> bool:
    """Whether the device has memory of its own, so that activations may lie on the host instead."""
    return device.type == "cuda"


def parse_budget(budget: int | float | str) -> tuple[str, int | float]:
    """(target kind, value); raises ``ValueError`` or ``TypeError`` that says both forms."""
    forms = 'a size of everything on the device ("12GiB", or bytes) or a float, 0 < f <= 1, of the activation peak'
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(f"budget={budget!r} is a {type(budget).__name__}; expected {forms}")
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(f"budget={budget!r}; expected {forms}")
        return "activation_budget_fraction", budget
    size = parse_bytes(budget, "budget")
    if size == 0:
        raise ValueError(f"budget={budget!r}; expected {forms}")
    return "device_budget_bytes", size


def static_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> StaticBytes:
    """What stands beside activations; an optimizer that is not given is one without state whose size is unknown."""
    if optimizer is not None:
        return static_bytes(model, optimizer, batch)
    parameters = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    counted = static_bytes(model, torch.optim.SGD(parameters, lr=0.0), batch)
    return StaticBytes(counted.weights_bytes, counted.gradients_bytes, None, counted.batch_bytes)


def _plan(
    profile: ChainProfile,
    kind: str,
    amount: int | float,
    static: StaticBytes,
    device: torch.device,
    planner: str,
    cost: str,
) -> CheckpointPlan:
    budget_bytes = budget_for(kind, amount, no_checkpoint_peak(profile))
    standing = _standing_bytes(static) if kind == "device_budget_bytes" else 0
    if kind == "device_budget_bytes" and standing >= budget_bytes:
        raise InfeasibleTargetError(
            f"budget={format_bytes(budget_bytes)} of everything on the device: {_standing(static)} alone take "
            f"{format_bytes(standing)}, before any activation",
            budget_bytes=budget_bytes,
            limited_by="weights, gradients and optimizer state",
        )
    if device.type == "cuda":
        allowed = allowed_bytes(kind, amount, no_checkpoint_peak(profile), static, device)
        kind, amount, standing = "activation_budget_bytes", allowed, 0
    options: dict[str, Any] = {"static_bytes": standing} if kind == "device_budget_bytes" else {}
    return plan_checkpoints(
        profile,
        target_kind=kind,
        target_value=amount,
        planner=planner,
        cost=cost,  # type: ignore[arg-type]  # checked by the planner
        **options,
    )


def allowed_bytes(
    kind: str,
    amount: int | float,
    unplanned_peak_bytes: int,
    static: StaticBytes,
    device: torch.device,
    margin_frac: float | None = None,
) -> int:
    """What a budget of this kind leaves for activations, the margin taken off (None: that of CUDA); 0: nothing."""
    left = budget_for(kind, amount, unplanned_peak_bytes)
    if kind == "device_budget_bytes":
        left = max(0, left - _standing_bytes(static))
    if margin_frac is None:
        margin_frac = CUDA_MARGIN if device.type == "cuda" else 0.0
    return left - int(left * margin_frac)


def _standing_bytes(static: StaticBytes) -> int:
    return static.weights_bytes + static.gradients_bytes + (static.optimizer_bytes or 0) + static.batch_bytes


def _standing(static: StaticBytes) -> str:
    parts = [f"weights {format_bytes(static.weights_bytes)}", f"gradients {format_bytes(static.gradients_bytes)}"]
    if static.optimizer_bytes is not None:
        parts.append(f"optimizer state {format_bytes(static.optimizer_bytes)}")
    return f"{', '.join(parts)} and batch {format_bytes(static.batch_bytes)}"


def summary_lines(
    profile: ChainProfile,
    plan: CheckpointPlan,
    equality: EqualityCheck | None,
    static: StaticBytes,
    kind: str,
    elapsed_s: float,
) -> list[str]:
    """What was done, for people."""
    done = f"{plan.recomputed} of {len(profile)} blocks recomputed"
    if plan.selective:
        done += f", {plan.selective} kept in part"
    if plan.compiled:
        done += f", {plan.compiled} compiled"
    text = plan.text if len(plan.text) <= LONGEST_PLAN else f"{plan.text[:LONGEST_PLAN]}..."
    lines = [f"{done}: {text} (planner {shown_name(plan.planner)}, {format_seconds(elapsed_s)})"]
    unplanned = plan.no_checkpoint_peak_bytes
    peak = f"activation peak {format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)} allowed"
    lines.append(f"{peak}, {format_bytes(unplanned)} without; {_added(profile, plan)}")
    copies_bytes = simulate_plan(profile, plan).weight_copies_bytes
    if copies_bytes:
        lines.append(f"of these bytes, {weight_copies_text(copies_bytes)}")
    if kind == "device_budget_bytes":
        lines.append(f"beside it stand {_standing(static)}")
        if static.optimizer_bytes is None:
            lines[-1] += "; the optimizer's state is not counted (give optimizer=...)"
    excluded = [block for block in profile if not block.eligible_for_checkpoint]
    if excluded:
        named = name_some([block.block_id for block in excluded])
        lines.append(f"never recomputed: {named}, as {excluded[0].exclusion_reason}")
    if equality is not None:
        lines.append(_told(equality))
    return lines


def _told(equality: EqualityCheck) -> str:
    if not equality.checked:
        return f"not checked: {equality.reference}"
    off = f"gradients off by at most {equality.max_rel_diff:.1e} of their size"
    return f"checked: a planned step equals {equality.reference} ({'bitwise' if equality.bitwise_equal else off})"


def _added(profile: ChainProfile, plan: CheckpointPlan) -> str:
    if plan.predicted_cost is None:
        return "time not measured"
    if plan.compiled:
        return f"about {format_ms(plan.predicted_cost)} above the fastest compiled step"
    if plan.cost_kind == "flops":
        return f"{format_percent(plan.predicted_cost / step_cost(profile, 'flops'))} of a step's FLOPs again"
    share = plan.predicted_cost / step_cost(profile, "time")
    return f"about {format_ms(plan.predicted_cost)} added to a step ({format_percent(share)})"
