"""The largest batch that a training will read: looked for before anything is measured, so that the plan is made for it.

    found = find_largest(data, steps=1000, accumulate=4, limit_s=10)
    found.batch, found.others, found.text

Where batches have several shapes, such as texts padded to the longest of a batch, the first one tells nothing. That
with the most elements is measured and planned for. One that is larger in another way (fewer but longer samples) may
have the higher peak all the same: ``plan_for_all`` has the plan dry-run with each of those, and made tighter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ckptplan.budget import PlannedRun
from ckptplan.data import Batch
from ckptplan.errors import DryRunError, InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.randomness import random_state_restored
from ckptplan.training import windows, windows_per_epoch
from ckptplan.units import format_bytes

log = logging.getLogger(__name__)

_MOST_HELD = 16  # batches that none of the others is larger than in every dimension
_MOST_OTHERS = 4
_MOST_ATTEMPTS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LargestShapes:
    """What was found in the data.

    Attributes:
        batch: the one with the most elements in its inputs, of those the longest.
        others: larger than ``batch`` in some dimension and smaller in another, the largest first.
        first_shape: of the inputs of the first batch.
        number: of ``batch``, counted from 1 in the order of training; None: the data set gave it.
        num_read: batches that were looked at; None: the data set says by itself which is the largest.
        num_trained: batches that the training reads.
    """

    batch: Batch
    others: tuple[Batch, ...] = ()
    first_shape: Shape = ()
    number: int | None = 1
    num_read: int | None = None
    num_trained: int = 0

    @property
    def has_several(self) -> bool:
        """Whether the first batch is not the largest, or none is in every dimension."""
        return tuple(self.batch.inputs.shape) != self.first_shape or bool(self.others)

    @property
    def text(self) -> str:
        """In one line."""
        told = f"largest batch of the data: {shape_text(self.batch)}"
        if self.number is None:
            return f"{told}, by its own largest_batch()"
        told += f", number {self.number:,}"
        if self.num_read is not None:
            told += f" of {self.num_read:,} that were looked at"
            if self.num_read < self.num_trained:
                told += f" (the training reads {self.num_trained:,}; shape_scan_s is the time to look for it)"
        if self.others:
            told += f"; other ways large: {', '.join(shape_text(other) for other in self.others)}"
        return told


def shape_text(batch: Batch) -> str:
    """As in ``int64[8, 512]``."""
    return f"{str(batch.inputs.dtype).removeprefix('torch.')}[{', '.join(map(str, batch.inputs.shape))}]"


def find_largest(
    data: Any, *, steps: int, accumulate: int, limit_s: float, check_stop: Callable[[], None] = lambda: None
) -> LargestShapes:
    """The largest batch among those that ``steps`` optimizer steps read, looked for no longer than ``limit_s``.

    Nothing is read twice over where the data says what its shapes are: by ``one_shape`` (true: no batch is larger than
    the first) or ``largest_batch()`` (a ``Batch``, or None: not known). The random streams are left as they were.
    """
    first = next(iter(data.epoch_batches(0)))
    shape = tuple(first.inputs.shape)
    own = data.largest_batch() if callable(getattr(data, "largest_batch", None)) else None
    if own is not None:
        return LargestShapes(own, first_shape=shape, number=None)
    if getattr(data, "one_shape", False) or not limit_s:
        return LargestShapes(first, first_shape=shape)
    front: dict[Shape, tuple[Batch, int]] = {}
    count, started = 0, time.perf_counter()
    with random_state_restored(torch.device("cpu")):
        for _, window in islice(windows(data, accumulate), steps):
            check_stop()
            for batch in window:
                count += 1
                _add(front, batch, count)
            if time.perf_counter() - started > limit_s:
                break
    ranked = sorted(front.values(), key=lambda entry: _size(entry[0]), reverse=True)
    others = sorted((batch for batch, _ in ranked[1:]), key=_reach, reverse=True)[:_MOST_OTHERS]
    batch, number = ranked[0]
    return LargestShapes(batch, tuple(others), shape, number, count, batches_of_training(data, steps, accumulate))


def batches_of_training(data: Any, steps: int, accumulate: int) -> int:
    """Micro-batches that so many optimizer steps read: the last window of an epoch may be short."""
    epochs, rest = divmod(steps, windows_per_epoch(data, accumulate))
    return int(epochs * data.batches_per_epoch + min(rest * accumulate, data.batches_per_epoch))


def is_within(batch: Batch, largest: Batch) -> bool:
    """Whether no dimension of ``batch`` is larger."""
    return _is_within(_shape(batch), _shape(largest))


def _add(front: dict[Shape, tuple[Batch, int]], batch: Batch, number: int) -> None:
    shape = _shape(batch)
    if any(_is_within(shape, other) for other in front):
        return
    for other in [other for other in front if _is_within(other, shape)]:
        del front[other]
    front[shape] = batch, number
    if len(front) > _MOST_HELD:
        del front[min(front, key=lambda each: _reach(front[each][0]))]


def _shape(batch: Batch) -> Shape:
    return (batch.inputs.dim(), *batch.inputs.shape, *batch.targets.shape)


def _is_within(shape: Shape, other: Shape) -> bool:
    same_kind = len(shape) == len(other) and shape[0] == other[0]
    return same_kind and all(one <= most for one, most in zip(shape, other, strict=True))


def _size(batch: Batch) -> tuple[int, int]:
    return batch.inputs.numel(), max(batch.inputs.shape[1:], default=0)


def _reach(batch: Batch) -> int:
    """What grows with the square of a length counts it twice."""
    return batch.inputs.numel() * max(batch.inputs.shape[1:], default=1)


def plan_for_all(
    shapes: LargestShapes,
    make: Callable[[int], PlannedRun],
    peak_of: Callable[[CheckpointPlan, Batch], int],
    notes: list[str],
) -> PlannedRun:
    """A plan that keeps to its budget with ``shapes.batch``, for which it is made, and with each of the others.

    Args:
        make: a plan that leaves so many bytes of the budget alone.
        peak_of: activation peak in bytes of a dry run of a plan with a batch.
        notes: gets what was found, and why where it could not be.

    Raises ``InfeasibleTargetError``, which names the shape, where no such plan is found.
    """
    planned = make(0)
    allowed_bytes, reserve_bytes = planned.plan.budget_bytes, 0
    if not shapes.others or allowed_bytes is None:
        return planned
    for _ in range(_MOST_ATTEMPTS):
        try:
            peak, shape = _largest_peak(shapes, planned.plan, peak_of)
        except DryRunError as error:
            notes.append(f"the plan is not checked with {shape_text(shapes.others[0])}: {error}")
            return planned
        if peak <= allowed_bytes or not planned.plan.feasible:
            told = f"the peak with {shape} is {format_bytes(peak)} by a dry run"
            if reserve_bytes:
                told += f"; {format_bytes(reserve_bytes)} of the budget are left alone for it"
            notes.append(told)
            return planned
        reserve_bytes += peak - allowed_bytes
        if reserve_bytes >= allowed_bytes:
            break
        try:
            planned = make(reserve_bytes)
        except InfeasibleTargetError:
            break
    raise InfeasibleTargetError(
        f"no plan was found that keeps to {format_bytes(allowed_bytes)} with batches of {shape} too: the last one "
        f"takes {format_bytes(peak)} with them. Raise the budget, or give smaller batches of long samples",
        budget_bytes=allowed_bytes,
        smallest_reachable_bytes=peak,
        limited_by=shape,
    )


def _largest_peak(
    shapes: LargestShapes, plan: CheckpointPlan, peak_of: Callable[[CheckpointPlan, Batch], int]
) -> tuple[int, str]:
    """The highest peak with the other shapes, and the shape. What a dry run does not see is taken to be the same."""
    unseen = max(0, (plan.predicted_peak_bytes or 0) - peak_of(plan, shapes.batch))  # workspaces of kernels
    return max((peak_of(plan, other) + unseen, shape_text(other)) for other in shapes.others)


def named_in(error: InfeasibleTargetError, shapes: LargestShapes) -> InfeasibleTargetError:
    """The error, which says for what batch no plan was found where there are several shapes."""
    if shapes.has_several:
        error.args = (f"{error}; this is for the {shapes.text}", *error.args[1:])
    return error
