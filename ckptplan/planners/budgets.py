"""Targets: what a user asks for, checked, and the budget in bytes that it comes to. Torch-free."""

from __future__ import annotations

import difflib
import math
import operator
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from ckptplan.profiles import ChainProfile, CostKind, name_some

TargetKind = Literal[
    "activation_budget_bytes",
    "activation_budget_fraction",
    "activation_saving_fraction",
    "device_budget_bytes",
    "max_slowdown",
]
TARGET_KINDS: tuple[str, ...] = TargetKind.__args__  # type: ignore[attr-defined]


def checked_target(kind: str, value: Any) -> int | float:
    """The target's value, bytes as an int; raises ``ValueError`` or ``TypeError`` naming it and what is expected."""
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


def take_static_bytes(options: dict[str, Any]) -> int:
    """Takes ``static_bytes`` off the options; raises ``ValueError`` or ``TypeError`` naming it."""
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


def budget_for(kind: str, value: int | float, unplanned_bytes: int) -> int:
    """Most bytes that the peak may have; ``unplanned_bytes`` is the peak with every block kept."""
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


def step_cost(chain: ChainProfile, cost: CostKind) -> float:
    """Forward and backward of the whole step, in ms or FLOPs."""
    regions = chain.regions
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
