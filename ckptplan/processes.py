"""Processes that end when the one that they work for has ended. Torch-free."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, signal_number: int) -> None:
    """From now on this process gets ``signal_number`` when its parent ends, however that ends (Linux only).

    ``parent``: who the parent is; if it has ended before this call, the signal comes at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
