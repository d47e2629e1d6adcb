"""A peak tracker that shares nothing with ckptplan: bytes of storages that operators made and that still live.

It sees no temporaries inside kernels. Make gradients first and run one step outside, then one inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def _release(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_iter((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage()._cdata for t in tensors}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in given or storage in self.known:
                continue
            size = storage.nbytes()
            self.known[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, size)
        return out


def step_peak(step: Callable[[], torch.Tensor], parameters: Any) -> int:
    """Peak bytes of forward, loss and backward, the gradients of ``parameters`` (and of the inputs) standing before."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    mode = LiveBytes()
    with mode:
        step().backward()
    return mode.peak
