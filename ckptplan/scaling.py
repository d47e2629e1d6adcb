"""Profiles of a model at any batch size, from those measured at two. Torch-free.

    profile_at = AffineProfile(profile_of_4, 4, profile_of_8, 8)
    least_nested_peak(profile_at(32))

Bytes and FLOPs of one stage are affine in the batch size: each tensor either has the batch as a dimension or does not.
A whole step is that only piecewise, as its peak is the largest of many stages: so figures are scaled stage by stage,
and the peak is simulated at the size asked for. A kernel that chooses another way to compute at another size (a
convolution's workspace) breaks the rule; confirm what is found (``batch_size.maximize`` does).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any

from ckptplan.costs import StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.profiles import INPUTS_KEY, BlockProfile, ChainProfile

# What tells of one measurement and has nothing to do with another size: taken from the larger one.
_AS_MEASURED = frozenset(
    """kind input_shape_signature output_shape_signature warnings fingerprint sequence_hash num_warmup
    num_trials forward_time_ms_std recompute_time_ms_std exclusion_reason activation_bytes_method""".split()
)


@dataclass(frozen=True)
class AffineProfile:
    """``profile_at(size)``: what a profile at that size would hold.

    Raises ``PlanIncompatibleError`` where the two are not profiles of the same chain of stages.
    """

    low: ChainProfile
    low_size: int
    high: ChainProfile
    high_size: int

    def __post_init__(self) -> None:
        if not 0 < self.low_size < self.high_size:
            raise ValueError(f"low_size={self.low_size}, high_size={self.high_size}; expected 0 < low_size < high_size")
        if self.low.block_ids != self.high.block_ids:
            raise PlanIncompatibleError(
                f"the model has other blocks at another batch size ({len(self.low)} at {self.low_size} samples, "
                f"{len(self.high)} at {self.high_size}); its figures cannot be scaled"
            )
        pairs = [_with_common_choices(*pair) for pair in zip(self.low, self.high, strict=True)]
        for name, blocks in zip(("low", "high"), zip(*pairs, strict=True), strict=True):
            object.__setattr__(self, name, replace(getattr(self, name), blocks=blocks))
        self(self.high_size)

    def __call__(self, size: int) -> ChainProfile:
        found = _between(self.low, self.high, _Line(self.low_size, self.high_size, size), "the profile")
        assert isinstance(found, ChainProfile)
        return found


@dataclass(frozen=True)
class _Line:
    """The straight line through the figures at two sizes, read at a third."""

    low_size: int
    high_size: int
    size: int

    def count(self, low: int, high: int) -> int:
        """Exact; rounded up where the two are no whole number of samples apart."""
        share = Fraction(self.size - self.low_size, self.high_size - self.low_size)
        return max(0, ceil(low + (high - low) * share))

    def time(self, low: float, high: float) -> float:
        """Neither a fixed part nor a part for each sample is below zero, whatever the noise says."""
        per_sample = max(0.0, (high - low) / (self.high_size - self.low_size))
        fixed = high - per_sample * self.high_size
        return high * self.size / self.high_size if fixed < 0 else fixed + per_sample * self.size


def _with_common_choices(low: BlockProfile, high: BlockProfile) -> tuple[BlockProfile, BlockProfile]:
    """Both with the options inside the block that both have: which are worth offering depends on the size a little."""
    of_low = {option.saved_ops: option for option in low.selective}
    common = [option for option in high.selective if option.saved_ops in of_low]
    matched = tuple(of_low[option.saved_ops] for option in common)
    low, high = replace(low, selective=matched), replace(high, selective=tuple(common))
    if bool(low.offload) != bool(high.offload):  # at the smaller size nothing was worth moving
        low, high = replace(low, offload=()), replace(high, offload=())
    return low, high


def _between(low: Any, high: Any, line: _Line, where: str) -> Any:
    if isinstance(low, StageCost) and isinstance(high, StageCost):
        low, high = _with_common_lettings(low, high)
    if dataclasses.is_dataclass(high) and not isinstance(high, type) and type(low) is type(high):
        values: dict[str, Any] = {}
        for field in dataclasses.fields(high):
            pair = getattr(low, field.name), getattr(high, field.name)
            values[field.name] = _of_field(field.name, *pair, line, f"{where}.{field.name}")
        return replace(high, **values)
    if type(low) is type(high) and isinstance(high, (tuple, list)) and len(low) == len(high):
        pairs = enumerate(zip(low, high, strict=True))
        return type(high)(_between(a, b, line, f"{where}[{i}]") for i, (a, b) in pairs)
    if low == high:
        return high
    if type(low) is type(high) is int:
        return line.count(low, high)
    if type(low) is type(high) is float:
        return line.time(low, high)
    raise PlanIncompatibleError(f"{where} is {low!r} at one batch size and {high!r} at the other; it cannot be scaled")


def _with_common_lettings(low: StageCost, high: StageCost) -> tuple[StageCost, StageCost]:
    """Where inputs go in another order at the other size, each cost takes all to be held elsewhere: the higher peak."""
    if [letting.inputs for letting in low.inputs_let_go] == [letting.inputs for letting in high.inputs_let_go]:
        return low, high
    return _all_held(low), _all_held(high)


def _all_held(cost: StageCost) -> StageCost:
    peaks = [letting.backward_peak_bytes for letting in cost.inputs_let_go]
    return replace(cost, inputs_let_go=(), backward_peak_bytes=max([cost.backward_peak_bytes, *peaks]))


def _of_field(name: str, low: Any, high: Any, line: _Line, where: str) -> Any:
    if name == "environment":  # of what stands in it only the shapes that the model was called with grow
        shapes = low.get(INPUTS_KEY), high.get(INPUTS_KEY)
        is_known = None not in shapes
        return {**high, INPUTS_KEY: _between(*shapes, line, where)} if is_known else high
    return high if name in _AS_MEASURED else _between(low, high, line, where)


def largest_within(
    over: Callable[[int], int | None],
    most: int,
    *,
    start: Sequence[int] = (1, 2),
    of_nothing: int | None = None,
    growth: float = inf,
) -> int:
    """The largest size from 1 to ``most`` that fits; 0: none. Few are looked at: each guess is where a line leads.

    Args:
        over: bytes above the limit at a size, at or below zero where it fits; None: there is no figure, and it does not
            fit. Taken to rise with the size.
        start: the sizes to look at first.
        of_nothing: ``over(0)``, where it is known without looking.
        growth: how many times the largest size that fits the next guess may be.
    """
    known: dict[int, int | None] = {} if of_nothing is None else {0: of_nothing}
    good, bad, halve = 0, most + 1, False
    guesses = [size for size in start if size <= most]
    while bad - good > 1:
        gap = bad - good
        if guesses:
            size = guesses.pop(0)
        elif halve:
            size = (good + bad) // 2
        else:
            highest = bad - 1 if bad in known else min(bad - 1, max(good + 1, int(min(growth * max(good, 1), most))))
            size = max(good + 1, min(_where_a_line_meets(known, good, bad), highest))
        if not good < size < bad:
            continue
        known[size] = value = over(size)
        good, bad = (size, bad) if value is not None and value <= 0 else (good, size)
        # Along a curve the guesses creep towards the limit from one side: then every other one halves what is left.
        halve = not guesses and not halve and bad in known and 2 * (bad - good) > gap
    return good


def _where_a_line_meets(known: Mapping[int, int | None], good: int, bad: int) -> int:
    """The size at which the line through the two figures nearest to the limit meets it; without such a line halfway."""
    figures = sorted((abs(value), size, value) for size, value in known.items() if value is not None)[:2]
    if known.get(bad, 0) is None or len(figures) < 2:
        return (good + bad) // 2
    (_, a, of_a), (_, b, of_b) = figures
    slope = Fraction(of_b - of_a, b - a)
    return floor(b - of_b / slope) if slope > 0 else bad


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size from 1 to ``most`` that ``fits``; 0: none. Beyond one that does not fit, none does."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
