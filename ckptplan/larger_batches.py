"""The largest batch that fits, by stage figures that are affine in the batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptplan.planners import smallest_reachable
from ckptplan.profiles import ChainProfile
from ckptplan.units import format_bytes

MOST_SAMPLES = 2**16


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

    Looked for where a line through the peaks at 1 and 2 samples meets the room, then walked to by profiles of the
    answer and of one more: kernels and the stage that sets the peak may change with the size.

    Args:
        profiled: batch size -> profile.
        room_bytes: for activations and the batch itself.
        sample_bytes: of the batch, for each sample.
    """
    peaks: dict[int, int] = {}

    def needed(samples: int) -> int:
        if samples not in peaks:
            peaks[samples] = smallest_reachable(profiled(samples))[0]
        return peaks[samples] + samples * sample_bytes

    if needed(1) > room_bytes:
        return LargestBatch(0, 0, peaks[1], room_bytes)
    if most < 2:
        return LargestBatch(1, peaks[1], 0, room_bytes)
    slope = max(1, needed(2) - needed(1))
    low, high = 1, None  # fits, does not fit
    guess = max(1, min(most, 1 + (room_bytes - needed(1)) // slope))
    while high is None or high - low > 1:
        if needed(guess) <= room_bytes:
            low = guess
            if low == most:
                break
            ahead = 1 + (room_bytes - needed(low)) // slope
            guess = min(most, low + ahead) if high is None else min(high - 1, low + max(1, ahead))
        else:
            high = guess
            behind = -(-(needed(high) - room_bytes) // slope)
            guess = max(low + 1, min(high - 1, high - behind))
        if guess in (low, high):
            break
    return LargestBatch(low, peaks[low], 0 if low == most else peaks[low + 1], room_bytes)
