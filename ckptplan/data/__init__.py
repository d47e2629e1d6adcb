"""What conf/data names: text, synthetic tokens, labelled images, digits.

Every source is a function that returns a ``Dataset`` (``dataset.py``), which serves ``Batch``es in an order that is a
function of seed and epoch alone. Importing this package or ``data.spec`` loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptplan.data.spec import DataSpec, explain_mismatch, explain_missing_data_keys

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORE_INDEX", "Batch", "DataSpec", "explain_mismatch", "explain_missing_data_keys"]

IGNORE_INDEX = -100
"""A target of this value takes no part in the loss."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, on the CPU.

    Attributes:
        inputs: tokens int64 (B, T), or images float32 (B, C, H, W).
        targets: int64, (B, T) or (B,); ``IGNORE_INDEX`` where nothing is to be learnt.
    """

    inputs: Tensor
    targets: Tensor
