"""Checks of single arguments, shared by data and models; each error names argument, value and what is expected."""

from __future__ import annotations

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


def require_fraction(name: str, value: object, *, one_allowed: bool = False) -> float:
    """A number with 0 <= value < 1 (or <= 1), as a float."""
    expected = "0 <= value <= 1" if one_allowed else "0 <= value < 1"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a number with {expected}")
    if not 0 <= value <= 1 or (value == 1 and not one_allowed):
        raise ValueError(f"{name}={value}; expected a number with {expected}")
    return float(value)
