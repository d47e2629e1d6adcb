"""Learning-rate schedules and what an optimizer will hold, both known before the first step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from ckptplan.trees import sharded_shape

log = logging.getLogger(__name__)

ScheduleKind = Literal["constant", "cosine", "linear"]


def learning_rate_schedule(
    kind: ScheduleKind, base_rate: float, steps: int, *, warmup_steps: int = 0, final_factor: float = 0.1
) -> Callable[[int], float]:
    """The learning rate as a pure function of the optimizer step s = 1 .. steps.

    With W = warmup_steps, w = max(W, 1) the first step at full rate, f = final_factor and
    p = (s - w) / (steps - w), which runs from 0 to 1::

        s < W      base_rate * s / W
        constant   base_rate
        linear     base_rate * (1 - (1 - f) * p)
        cosine     base_rate * (f + (1 - f) * (1 + cos(pi * p)) / 2)

    So step w uses ``base_rate`` and the last step ``base_rate * f``. Beyond ``steps`` the last rate holds.
    Nothing is counted, so a resumed run continues exactly.
    """
    _check_schedule(kind, base_rate, steps, warmup_steps, final_factor)
    first_full = max(warmup_steps, 1)

    def learning_rate_at(step: int) -> float:
        if step < 1:
            raise ValueError(f"step={step}; optimizer steps are counted from 1")
        if step < warmup_steps:
            return base_rate * step / warmup_steps
        if kind == "constant" or steps <= first_full:
            return base_rate
        progress = min(1.0, (step - first_full) / (steps - first_full))
        if kind == "linear":
            return base_rate * (1 - (1 - final_factor) * progress)
        return base_rate * (final_factor + (1 - final_factor) * (1 + math.cos(math.pi * progress)) / 2)

    return learning_rate_at


def _check_schedule(kind: str, base_rate: float, steps: int, warmup_steps: int, final_factor: float) -> None:
    if kind not in ("constant", "cosine", "linear"):
        raise ValueError(f"scheduler.kind={kind!r} is unknown; expected constant, cosine or linear")
    if not (base_rate >= 0 and math.isfinite(base_rate)):
        raise ValueError(f"the learning rate is {base_rate!r}; expected a finite number of at least 0")
    if steps < 1:
        raise ValueError(f"steps={steps!r}; expected at least 1")
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"scheduler.warmup_steps={warmup_steps!r}; expected 0 to steps={steps}")
    if not 0 <= final_factor <= 1:
        raise ValueError(f"scheduler.final_factor={final_factor!r}; expected 0 to 1")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give the first parameter group ``rate``; groups made with another rate keep their ratio to it."""
    groups = optimizer.param_groups
    for group in groups:
        group.setdefault("initial_lr", float(group["lr"]))  # the name torch's own schedulers use; saved with the state
    reference = groups[0]["initial_lr"]
    for group in groups:
        scaled = rate if reference == 0 else rate * (group["initial_lr"] / reference)
        if isinstance(group["lr"], torch.Tensor):  # a tensor rate (capturable, compiled) is changed in place
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, num_shards: int = 1) -> int | None:
    """Bytes of the optimizer's state after its first step, found without taking it.

    A twin of the optimizer steps over parameters of the same shapes without storage (the meta device),
    so nothing is allocated. An optimizer that has stepped already is simply counted. None, with the
    reason in the log, where the optimizer's class does not run on such parameters. ``num_shards``: of the largest share
    where so many ranks share it.
    """
    if optimizer.state:
        return _state_bytes(optimizer)
    try:
        twin = meta_twin(optimizer, num_shards)
        twin.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        log.warning("the state of %s is unknown before its first step: %s", type(optimizer).__name__, error)
        return None
    return _state_bytes(twin)


def meta_twin(optimizer: torch.optim.Optimizer, num_shards: int = 1, *, foreach: bool = False) -> torch.optim.Optimizer:
    """The same optimizer over parameters of the same shapes that have gradients and no memory.

    ``foreach``: go over all parameters at once where the optimizer leaves that open.
    """
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimizer)
    groups = [_meta_group(group, num_shards) for group in optimizer.param_groups]
    if foreach:
        groups = [{**group, "foreach": True} if group.get("foreach", 0) is None else group for group in groups]
    return make(groups)


def _meta_group(group: dict[str, Any], num_shards: int) -> dict[str, Any]:
    parameters = []
    for parameter in group["params"]:
        if not parameter.requires_grad:
            continue
        shape = sharded_shape(parameter, num_shards)
        twin = torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
        twin.grad = torch.empty_like(twin)
        parameters.append(twin)
    # The fused and capturable variants insist on a real device; they hold the same tensors.
    plain = {key: False for key in ("fused", "capturable") if group.get(key)}
    return {**group, **plain, "params": parameters}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
