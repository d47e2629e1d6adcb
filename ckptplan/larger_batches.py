"""The largest batch and the longest sequence that fit a device which is not there, by profiles of each size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptplan.errors import MODEL_ERRORS, DryRunError
from ckptplan.planners import smallest_reachable
from ckptplan.profiles import ChainProfile
from ckptplan.scaling import largest_within
from ckptplan.units import format_bytes

MOST_SAMPLES = 2**16
MOST_TOKENS = 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LargestBatch:
    """The answer, and what confirmed it.

    Attributes:
        samples: 0: not even one fits.
        peak_bytes: the smallest activation peak that a flat plan reaches there.
        next_peak_bytes: the same with one sample more, which does not fit; 0: that was not looked at.
    """

    samples: int
    peak_bytes: int
    next_peak_bytes: int
    room_bytes: int

    @property
    def text(self) -> str:
        """In one line."""
        if not self.samples:
            return (
                f"largest batch: not even one sample fits: its smallest peak is {format_bytes(self.next_peak_bytes)}, "
                f"there is room for {format_bytes(self.room_bytes)}"
            )
        if self.next_peak_bytes <= self.peak_bytes:
            return f"largest batch: {self.samples} samples fit, the most that was looked at"
        return (
            f"largest batch: {self.samples} samples with the smallest reachable peak, {format_bytes(self.peak_bytes)} "
            f"of {format_bytes(self.room_bytes)}; {self.samples + 1} would take {format_bytes(self.next_peak_bytes)}"
        )


def largest_batch(
    profiled: Callable[[int], ChainProfile], room_bytes: int, sample_bytes: int = 0, most: int = MOST_SAMPLES
) -> LargestBatch:
    """The largest number of samples whose smallest reachable peak is within ``room_bytes``.

    Looked for where a line through the peaks at 1 and 2 samples meets the room; the answer and one sample more are
    profiled: kernels and the stage that sets the peak may change with the size.

    Args:
        profiled: batch size -> profile.
        room_bytes: for activations and the batch itself.
        sample_bytes: of the batch, for each sample.
    """
    peaks: dict[int, int] = {}

    def over(samples: int) -> int:
        peaks[samples] = smallest_reachable(profiled(samples))[0]
        return peaks[samples] + samples * sample_bytes - room_bytes

    samples = largest_within(over, most)
    return LargestBatch(samples, peaks.get(samples, 0), peaks.get(samples + 1, 0), room_bytes)


@dataclass(frozen=True)
class LongestSequence:
    """As ``LargestBatch``, with as many samples as the batch has; lengths are multiples of ``step``."""

    length: int
    step: int
    peak_bytes: int
    next_peak_bytes: int | None
    room_bytes: int

    @property
    def text(self) -> str:
        """In one line."""
        room = format_bytes(self.room_bytes)
        if not self.length:
            return f"longest sequence: not even {self.step} tokens fit: there is room for {room}"
        reached = f"longest sequence: {self.length:,} tokens with the smallest reachable peak"
        of = f"{reached}, {format_bytes(self.peak_bytes)} of {room}"
        if self.next_peak_bytes is None:
            return f"{of}, the longest that was looked at or that the model takes"
        return f"{of}; {self.length + self.step:,} would take {format_bytes(self.next_peak_bytes)}"


def longest_in_room(
    profiled: Callable[[int], ChainProfile], room_bytes: int, own: int, token_bytes: int = 0, most: int = MOST_TOKENS
) -> LongestSequence:
    """The longest sequence whose smallest reachable peak is within ``room_bytes``, to a 64th of the batch's own.

    Args:
        profiled: length -> profile. Where the model fails at a length, that one counts as too long.
        room_bytes: for activations and the batch itself.
        own: length of the batch as it is.
        token_bytes: of the batch, for each place in its sequences.
    """
    step = max(1, own // 64)
    peaks: dict[int, int] = {}

    def over(count: int) -> int | None:
        length = count * step
        try:
            peaks[length] = smallest_reachable(profiled(length))[0]
        except (DryRunError, *MODEL_ERRORS) as error:
            if length == own:
                raise
            log.info("at a sequence of %s: %s", f"{length:,}", str(error).partition("\n")[0])
            return None
        return peaks[length] + length * token_bytes - room_bytes

    length = step * largest_within(over, max(1, most // step), start=(own // step,), of_nothing=-room_bytes)
    return LongestSequence(length, step, peaks.get(length, 0), peaks.get(length + step), room_bytes)
