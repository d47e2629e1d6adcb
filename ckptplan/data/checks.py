"""Checks of single arguments, shared by data and models; each error names argument, value and what is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence


def require_int(name: str, value: object, minimum: int = 1) -> int:
    """``value`` if it is a whole number of at least ``minimum``, else ``TypeError`` or ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number >= {minimum}")
    if value < minimum:
        raise ValueError(f"{name}={value} is too small; expected a whole number >= {minimum}")
    return value


def require_ints(name: str, values: object, minimum: int = 1) -> list[int]:
    """A list of at least one whole number, each at least ``minimum``."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{name}={values!r}; expected a list of at least one whole number, such as [64, 128]")
    return [require_int(f"{name}[{index}]", value, minimum) for index, value in enumerate(values)]


def require_number(name: str, value: object, *, maximum: float = math.inf, below: float = math.inf) -> float:
    """A finite number with 0 <= value, value <= maximum and value < below, as a float."""
    bounds = f"0 <= {name}"
    if below < math.inf:
        bounds += f" < {below:g}"
    if maximum < math.inf:
        bounds += f" <= {maximum:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a number with {bounds}")
    if not 0 <= value < below or value > maximum or value == math.inf:
        raise ValueError(f"{name}={value}; expected a finite number with {bounds}")
    return float(value)
