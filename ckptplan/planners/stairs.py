"""Staircases: the least value as a falling step function of the bytes that are free, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckptplan.planners.tables import Ints


class Stairs(NamedTuple):
    """Corners of the step function: ``need`` bytes rising, ``value`` falling. Below the first one nothing fits."""

    need: Ints
    value: Ints

    def at(self, free_bytes: int) -> int | None:
        """The least value with so many bytes free; None where nothing fits."""
        position = int(np.searchsorted(self.need, free_bytes, side="right"))
        return int(self.value[position - 1]) if position else None


NO_STAIRS = Stairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


def single(need: int, value: int) -> Stairs:
    return Stairs(np.array([need], np.int64), np.array([value], np.int64))


def shifted(stairs: Stairs, more_bytes: int, least_bytes: int, more_value: int) -> Stairs:
    """The same choices where ``more_bytes`` are held beside them and at least ``least_bytes`` are needed."""
    if not len(stairs.need):
        return stairs
    first = max(int(np.searchsorted(stairs.need, least_bytes - more_bytes, side="right")) - 1, 0)
    need = stairs.need[first:] + more_bytes
    need[0] = max(need[0], least_bytes)
    return Stairs(need, stairs.value[first:] + more_value)


def added(a: Stairs, b: Stairs, least_bytes: int, more_value: int) -> Stairs:
    """Two choices made at the same time, each with all the bytes that are free: values add up."""
    if not (len(a.need) and len(b.need)):
        return NO_STAIRS
    start = max(least_bytes, int(a.need[0]), int(b.need[0]))
    from_a, from_b = (int(np.searchsorted(stairs.need, start, side="right")) for stairs in (a, b))
    need = np.concatenate(([start], a.need[from_a:], b.need[from_b:]))
    need.sort()
    value = a.value[np.searchsorted(a.need, need, side="right") - 1]
    value = value + b.value[np.searchsorted(b.need, need, side="right") - 1] + more_value
    return Stairs(need, value)


def lowest(parts: Sequence[Stairs], most_bytes: int, most_value: int) -> Stairs:
    """The lower envelope of all parts, as far as it lies within both limits."""
    if not parts:
        return NO_STAIRS
    need = np.concatenate([part.need for part in parts])
    value = np.concatenate([part.value for part in parts])
    inside = np.flatnonzero((need <= most_bytes) & (value <= most_value))
    need, value = need[inside], value[inside]
    if not len(need):
        return NO_STAIRS
    order = np.argsort(need, kind="stable")  # merges sorted runs, one per part
    need, value = need[order], value[order]
    falls = np.append(True, value[1:] < np.minimum.accumulate(value)[:-1])
    need, value = need[falls], value[falls]
    last = np.append(need[1:] != need[:-1], True)
    return Stairs(need[last], value[last])


def coarsened(stairs: Stairs, grain: int, *, optimistic: bool) -> Stairs:
    """At most one corner per ``grain`` of value: the one of fewest bytes; ``grain`` 0 changes nothing.

    ``optimistic`` gives that corner the least value among those it stands for, so that the result lies nowhere
    above the given staircase; else it lies at most one grain above it.
    """
    if grain == 0 or len(stairs.need) < 2:
        return stairs
    bucket = stairs.value // grain
    first = np.append(True, bucket[1:] < bucket[:-1])
    if first.all():
        return stairs
    if not optimistic:
        return Stairs(stairs.need[first], stairs.value[first])
    last = np.append(first[1:], True)
    return Stairs(stairs.need[first], stairs.value[last])
