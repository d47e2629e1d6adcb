"""Bytes and seconds: the only module that converts and prints units.

"GiB" is 2**30 bytes, "GB" is 10**9; a bare number is bytes.
"""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTES_PER_UNIT = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | float | str, name: str = "size") -> int:
    """Bytes as an int from ``6_442_450_944``, ``"6GiB"``, ``"1.5 GB"``, ``"300MiB"``.

    Fractions of a byte are cut off. Raises ``TypeError`` for what is neither number nor text and
    ``ValueError`` (naming ``name``, the value and the forms allowed) for anything else.
    """
    allowed = 'a whole number of bytes or a size such as "512MiB", "6GiB", "1.5GB"'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected {allowed}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(f"{name}={value!r} is not a size; expected {allowed}")
        number = match[1].replace("_", "")
        value = int(number) * factor if number.isdigit() else float(number) * factor
    if not value >= 0 or value == float("inf"):
        raise ValueError(f"{name}={value!r} is not a size; expected {allowed}, not negative and finite")
    return int(value)


def format_bytes(size_bytes: int | None) -> str:
    """``"8.25 MiB"``; ``"not measured"`` for None."""
    if size_bytes is None:
        return "not measured"
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"


def format_ms(milliseconds: float | None) -> str:
    """``"12.3 ms"``, ``"1.20 s"`` from 1,000 ms on; ``"not measured"`` for None."""
    if milliseconds is None:
        return "not measured"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def format_seconds(seconds: float | None) -> str:
    """The same for seconds."""
    return format_ms(None if seconds is None else seconds * 1000)


def format_percent(ratio: float | None) -> str:
    """``"+3.1 %"`` for 0.031; ``"not measured"`` for None."""
    return "not measured" if ratio is None else f"{ratio * 100:+.1f} %"


def require_amount(name: str, value: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` naming ``name`` unless ``value`` is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a number, 0 or more")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value}; expected a finite number, 0 or more")
