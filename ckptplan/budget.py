"""From a run's budget to a plan: what stands on the device beside activations, margins, and planner calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ckptplan.config import RunConfig
from ckptplan.config.wording import config_error
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError
from ckptplan.footprint import Room, StaticBytes, room_of
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import (
    PLANNERS_THAT_COMPILE,
    least_flat_peak,
    least_nested_peak,
    least_whole_peak,
    plan_checkpoints,
    smallest_reachable,
)
from ckptplan.planners.budgets import budget_for
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from ckptplan.units import format_bytes

# Share of a CUDA budget left to what the allocator's statistics do not show between stages, unless margin_frac
# says another. Stated in result.json; not calibrated on a device yet. On a CPU measured bytes are exact.
CUDA_MARGIN = 0.01


@dataclass(frozen=True)
class PlannedRun:
    """A plan with the budget it was made for; ``budget_bytes`` bounds the activation peak."""

    plan: CheckpointPlan
    budget_bytes: int | None
    margin_bytes: int
    smallest_reachable_bytes: int
    solve_s: float
    note: str | None = None  # what a reader should know of a plan from a file


def plan_for_budget(
    profile: ChainProfile,
    config: RunConfig,
    static: StaticBytes,
    device: torch.device,
    reserve_bytes: int = 0,
    room: Room | None = None,
) -> PlannedRun:
    """The configured planner's plan for the configured budget, of which ``reserve_bytes`` more are left alone.

    ``room``: of a device that is not there, for ``budget=auto``; None: what ``device`` has.

    Raises:
        InfeasibleTargetError: no plan of the planner's kind fits.
        ConfigError: a device budget that the weights, gradients and optimizer state alone exceed; a plan of the
            user's that is none for this model; an option that the planner does not have.
    """
    kind, value, options = _target(config, static, device, room)
    margin, share = 0, config.margin_frac
    if share is None:
        share = CUDA_MARGIN if device.type == "cuda" else 0.0
    if (share or reserve_bytes) and kind != "max_slowdown":
        budget = budget_for(kind, value, no_checkpoint_peak(profile)) - options.pop("static_bytes", 0)
        margin = int(max(budget, 0) * share) + reserve_bytes
        kind, value = "activation_budget_bytes", max(budget, 0) - margin
    options.update(config.planner.options)
    if config.planner.text is not None:
        options["text"] = config.planner.text
    if config.planner.path is not None:
        options["path"] = config.planner.path
    is_forced = config.planner.name in ("none", "all", "no_checkpoint", "checkpoint_all", "text", "file")
    start_s = time.perf_counter()
    try:
        plan = plan_checkpoints(
            profile,
            target_kind=kind,
            target_value=value,
            planner=config.planner.name,
            cost=config.cost,  # type: ignore[arg-type]  # checked by load_config
            on_infeasible="best_effort" if is_forced else "raise",
            **options,
        )
    except InfeasibleTargetError as error:
        if error.budget_bytes is not None:
            error.budget_bytes += margin  # what was asked for
        raise
    except PlanIncompatibleError as error:
        for key, given in (("planner.text", config.planner.text), ("planner.path", config.planner.path)):
            if given is not None:
                raise config_error(key, given, str(error)) from error
        raise
    except ValueError as error:
        if config.planner.name not in PLANNERS_THAT_COMPILE:
            raise
        raise config_error("planner", config.planner.name, str(error), remedy="planner=dp") from error
    except TypeError as error:
        if not config.planner.options:
            raise
        raise config_error("planner.options", config.planner.options, str(error)) from error
    solve_s = time.perf_counter() - start_s
    budget_bytes = None if plan.budget_bytes is None else plan.budget_bytes + margin
    note = None if config.planner.path is None else _note_on_stored(config.planner.path, profile)
    return PlannedRun(plan, budget_bytes, margin, least_peak_of(config.planner.name, profile)[0], solve_s, note)


def least_peak_of(planner: str, profile: ChainProfile) -> tuple[int, str]:
    """The least peak in bytes of this planner's kind of plan, and the stage and phase that set it."""
    if planner in PLANNERS_THAT_COMPILE:
        plan = plan_checkpoints(
            profile,
            target_kind="activation_budget_bytes",
            target_value=0,
            planner=planner,
            on_infeasible="best_effort",
        )
        simulated = simulate_plan(profile, plan)
        return simulated.peak_bytes, simulated.peak_at
    of_kind = {"optimal": least_nested_peak, "ilp": least_flat_peak, "dp": least_whole_peak}
    return of_kind.get(planner, smallest_reachable)(profile)


def _note_on_stored(path: str, profile: ChainProfile) -> str | None:
    """Another autocast is another plan's figures: those of this run are predicted anew, and it is said."""
    stored = CheckpointPlan.load(path)
    then, now = ((made.environment or {}).get("autocast") for made in (stored, profile))
    if then is None or then == now:
        return None
    return f"{path} was made under autocast {then}, this run has {now}; its peak and cost are predicted anew"


def _target(
    config: RunConfig, static: StaticBytes, device: torch.device, room: Room | None
) -> tuple[str, int | float, dict[str, Any]]:
    """(target kind, value, options) for ``plan_checkpoints``."""
    target = config.target
    if target.key == "auto":
        room = room or room_of(device, static.weights_bytes + static.batch_bytes)
        return "activation_budget_bytes", _auto_bytes(static, room), {}
    assert target.value is not None  # only "auto" has no value
    if target.key != "device_budget_bytes":
        return target.target_kind, target.value, {}
    if static.total_bytes is None:
        raise config_error(target.key, target.value, "the optimizer's state is not known before its first step")
    if static.total_bytes >= target.value:
        raise config_error(
            target.key,
            target.value,
            f"weights ({static.weights_bytes:,} bytes), gradients ({static.gradients_bytes:,}), optimizer state "
            f"({static.optimizer_bytes:,}) and batch ({static.batch_bytes:,}) alone take {static.total_bytes:,} bytes",
            remedy=f"{target.key}=<more than {static.total_bytes:,}>",
        )
    return target.target_kind, target.value, {"static_bytes": static.total_bytes}


def budget_at_any_size(config: RunConfig, static: StaticBytes, device: torch.device) -> tuple[str, int | float]:
    """(target kind, value) of the budget where the micro-batch is yet to be chosen.

    A share is one of the peak of the batch as it is; ``static`` is what stands beside that one.
    """
    kind, value, options = _target(config, static, device, None)
    if kind == "max_slowdown":
        problem = "batch=auto needs a budget of memory"
        raise config_error("max_slowdown", value, problem, remedy="budget_frac=0.5, or batch=fixed")
    if config.target.key == "auto" and static.total_bytes is not None:
        return "device_budget_bytes", int(value) + static.total_bytes
    return ("device_budget_bytes", value) if options else (kind, value)


def _auto_bytes(static: StaticBytes, room: Room) -> int:
    """What the device has left for activations once all else stands, and at least what the optimizer's step takes."""
    if static.total_bytes is None:
        raise config_error("budget", "auto", "the optimizer's state is not known before its first step")
    left = room.left_bytes - static.total_bytes
    least = max(static.optimizer_step_bytes or 0, 1)
    if left < least:
        raise InfeasibleTargetError(_too_small(static, room), budget_bytes=max(0, left), limited_by="weights")
    return left


def _too_small(static: StaticBytes, room: Room) -> str:
    rows = {
        "weights": static.weights_bytes,
        "gradients": static.gradients_bytes,
        "optimizer state": static.optimizer_bytes or 0,
        "gathered": static.gathered_bytes,
        "batch": static.batch_bytes,
        "the optimizer's own step": static.optimizer_step_bytes or 0,
    }
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in rows.items() if size)
    needed, has = sum(rows.values()), room.left_bytes
    return (
        f"{room.title} has {format_bytes(has)} of {format_bytes(room.total_bytes)} for training, and {told} take "
        f"{format_bytes(needed)} before any activation: {format_bytes(needed - has)} too much. What would help: an "
        "optimizer with less state, a half precision format (runtime.dtype=bfloat16), a larger device, or sharding "
        "(runtime.shards=8 plans for FSDP)"
    )
