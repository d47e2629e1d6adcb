"""Running code whose activations are dropped and computed again in backward.

This is PyTorch's non-reentrant ``torch.utils.checkpoint`` with early stop and its determinism check on,
plus one thing that it does not do: buffers that the code changes (BatchNorm's running statistics, a
moving average) are changed once. The recomputation starts from the buffer values that the forward
started from and works on copies, so that nothing it does is seen outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckptplan.trees import split_tensors

BufferSlot = tuple[nn.Module, str]  # the submodule that holds the buffer, and the buffer's name in it


@dataclass(frozen=True)
class Guards:
    """What a recomputation must restore to be exact.

    Attributes:
        preserve_rng_state: the code draws random numbers (about 5 kB per call on a CPU).
        buffers: the buffers that the code changes.
    """

    preserve_rng_state: bool = True
    buffers: tuple[BufferSlot, ...] = ()


def buffer_slots(module: nn.Module, names: Sequence[str] | None = None) -> tuple[BufferSlot, ...]:
    """The named buffers of ``module`` (all of them for None), each with the submodule that holds it."""
    slots = []
    for path, _ in module.named_buffers(remove_duplicate=False):
        if names is None or path in names:
            parent, _, name = path.rpartition(".")
            slots.append((module.get_submodule(parent), name))
    return tuple(slots)


def run_recomputed(call: Callable[..., Any], guards: Guards, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``, keeping its inputs only; backward runs it again.

    Without gradients this is a plain call. PyTorch's checkpoint is handed bare tensors only: it would keep a
    tuple of tensors alive by itself, out of reach of an enclosing recomputation, and it has keyword
    arguments of its own (``debug``, ``context_fn``).
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    tensors, put_back = split_tensors((args, kwargs))
    del args, kwargs
    kinds = {t.device.type for t in tensors}
    starts: list[torch.Tensor] | None = None

    def forward_or_again(*inputs: torch.Tensor) -> Any:
        nonlocal starts
        own_args, own_kwargs = put_back(inputs)
        with no_cast_cache(kinds):
            if starts is None:  # the forward
                starts = [getattr(owner, name).detach().clone() for owner, name in guards.buffers]
                return call(*own_args, **own_kwargs)
            with _copies_in_place(guards.buffers, starts):
                return call(*own_args, **own_kwargs)

    return checkpoint(forward_or_again, *tensors, use_reentrant=False, preserve_rng_state=guards.preserve_rng_state)


@contextmanager
def no_cast_cache(device_kinds: Iterable[str]) -> Iterator[None]:
    """Autocast as it is, without its cache, which would hold a copy of every weight until the user's context ends."""
    with ExitStack() as stack:
        for kind in device_kinds:
            if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
                stack.enter_context(torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False))
        yield


@contextmanager
def _copies_in_place(slots: Sequence[BufferSlot], starts: Sequence[torch.Tensor]) -> Iterator[None]:
    # The buffers are exchanged, not overwritten: writing into them would invalidate what autograd saved.
    current = [getattr(owner, name) for owner, name in slots]
    try:
        for (owner, name), start in zip(slots, starts, strict=True):
            setattr(owner, name, start.clone())
        yield
    finally:
        for (owner, name), buffer in zip(slots, current, strict=True):
            setattr(owner, name, buffer)
