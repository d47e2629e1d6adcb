"""Figures of a batch whose blocks cannot be measured at its own size for want of memory: scaled from smaller ones.

Measuring holds a second set of weights and runs blocks with all their activations, so it may need more memory than
the planned step. Bytes and FLOPs of stages are affine in the batch size (``scaling``), so two smaller sizes tell them.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckptplan.batch_size import resized, samples_in
from ckptplan.errors import PlanIncompatibleError
from ckptplan.profiles import ChainProfile
from ckptplan.proof import is_out_of_memory
from ckptplan.scaling import AffineProfile

log = logging.getLogger(__name__)

_LEAST = 2  # a dimension of one is contiguous however it lies, so one sample leaves out copies that others need


@dataclass(frozen=True)
class MeasuredBatch:
    """A profile for the batch, and why it is none that was measured at its size; None: it is."""

    profile: ChainProfile
    note: str | None = None


def profile_or_scale(measure: Callable[[Any], ChainProfile], batch: Any) -> MeasuredBatch:
    """``measure(batch)``; where memory runs out, that of a batch half and one a quarter as large, and so on, scaled.

    Raises what the allocator raised first, with what was tried, where no smaller size can be measured either, or where
    the model's figures cannot be scaled.
    """
    try:
        return MeasuredBatch(measure(batch))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first = error
    let_go(first)
    samples = samples_in(batch)
    high = samples // 2
    while high > _LEAST:
        low = max(_LEAST, high // 2)
        log.warning(
            "out of memory while the blocks were measured with %d samples (%s): they are measured with %d and %d, and "
            "their figures scaled", samples, str(first).partition("\n")[0], low, high,
        )  # fmt: skip
        try:
            of_high = measure(resized(batch, high))
            scaled = AffineProfile(measure(resized(batch, low)), low, of_high, high)(samples)
        except PlanIncompatibleError as error:
            first.args = (f"{first}; its figures cannot be scaled from smaller batches: {error}",)
            raise first from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
            high //= 2
            continue
        return MeasuredBatch(
            scaled,
            f"memory ran out while the blocks were measured with {samples} samples: their figures are scaled from "
            f"{low} and {high} samples",
        )
    first.args = (
        f"{str(first).partition(chr(10))[0]}; nor could blocks be measured with fewer of the {samples} samples",
    )
    raise first


def let_go(error: BaseException) -> None:
    """The frames of a failed step hold its tensors; nothing of them is needed any more."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
