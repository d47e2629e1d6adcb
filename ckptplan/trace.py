"""One real forward of a model, cut at its blocks: what each block is called with, and whether they form a chain.

Works on a twin (see ``twin.py``): block forwards are exchanged for stand-ins while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptplan.errors import BlockDeclarationError, UnsupportedBoundaryError
from ckptplan.stages import GradientLayout, copies_of, own_copies
from ckptplan.trees import map_tensors, storage_key, tensors_in

Step = Callable[[], Any]  # one forward of the whole model; returns the loss, or the output where there is no loss
Autocast = tuple[bool, torch.dtype, bool]


@dataclass
class BlockCall:
    """What a block was called with and gave back in the real forward; all tensors cut off from the graph.

    Attributes:
        boundary: the tensors that the previous stage made, as distinct objects, in order.
        signature: shapes, dtypes and gradient flags of every argument, as text.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    boundary: list[torch.Tensor]
    output: Any = None
    autocast: Autocast = (False, torch.float32, True)
    signature: str = ""

    def fresh(
        self, handed_back: GradientLayout | None = None
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Owned copies of the boundary tensors, and the arguments with the copies in their places."""
        copies = own_copies(self.boundary, handed_back)
        by_id = {id(old): new for old, new in zip(self.boundary, copies, strict=True)}
        args, kwargs = map_tensors((self.args, self.kwargs), lambda t: by_id.get(id(t), t))
        return copies, args, kwargs


@dataclass
class ChainTrace:
    """The calls of all blocks, in order."""

    calls: list[BlockCall] = field(default_factory=list)
    has_pre: bool = False  # the first block's input is made by code of the model


class StopAtFirstBlock(Exception):
    """Ends the forward in front of the first block, carrying the boundary tensors."""

    def __init__(self, boundary: list[torch.Tensor]) -> None:
        super().__init__("stopped at the first block")
        self.boundary = boundary


@contextmanager
def exchanged_forwards(modules: Sequence[nn.Module], stands: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Each module's ``forward`` is its stand-in while the context lasts; signatures stay those of the originals."""
    own = [vars(module).get("forward") for module in modules]  # a forward that somebody set on the instance
    try:
        for module, stand in zip(modules, stands, strict=True):
            module.forward = functools.update_wrapper(stand, module.forward)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def autocast_now(device: torch.device) -> Autocast:
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast_as(device: torch.device, state: Autocast) -> AbstractContextManager[Any]:
    enabled, dtype, cached = state
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)


def trace_chain(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    step: Step,
    outside: Sequence[torch.Tensor],
    device: torch.device,
) -> ChainTrace:
    """Run ``step`` once and record every block's call.

    Args:
        names, modules: the blocks in declared order.
        outside: tensors that stand before the step (the batch, constants); they are no boundary.

    Raises:
        BlockDeclarationError: a block that does not run, runs twice, or runs out of order.
        UnsupportedBoundaryError: a block that is not called with what the previous one returned.
    """
    trace = ChainTrace()
    standing = {storage_key(t) for t in outside}
    standing.update(storage_key(t) for m in modules for t in (*m.parameters(), *m.buffers()))
    previous: list[torch.Tensor] = []

    def stand_for(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand(*args: Any, **kwargs: Any) -> Any:
            nonlocal previous
            _require_order(index, len(trace.calls), names)
            boundary = _boundary(index, names, args, kwargs, previous, standing)
            if index == 0:
                trace.has_pre = bool(boundary)
            call = _recorded(args, kwargs, boundary, autocast_now(device))
            trace.calls.append(call)
            output = original(*args, **kwargs)
            without_graph = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors_in(output)}
            call.output = map_tensors(output, lambda t: without_graph[id(t)])
            cut = _cut(output, args, kwargs)
            previous = list({id(t): t for t in tensors_in(cut)}.values())
            return cut

        return stand

    stands = [stand_for(i, m.forward) for i, m in enumerate(modules)]
    with exchanged_forwards(modules, stands):
        step()
    if len(trace.calls) < len(modules):
        raise BlockDeclarationError(
            f"block {names[len(trace.calls)]!r} is declared but does not run in the model's forward; leave it out"
        )
    return trace


def _require_order(index: int, already: int, names: Sequence[str]) -> None:
    if index < already:
        raise BlockDeclarationError(
            f"block {names[index]!r} runs again after {names[already - 1]!r}; a block must run once per forward"
        )
    if index > already:
        raise BlockDeclarationError(
            f"block {names[index]!r} runs before {names[already]!r}; declare the blocks in the order in which they run"
        )


def _boundary(
    index: int,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    previous: Sequence[torch.Tensor],
    standing: set[int],
) -> list[torch.Tensor]:
    """The tensors that came from the previous block (for the first: from the model), distinct objects in order."""
    given = {id(t): t for t in tensors_in((args, kwargs))}
    if index == 0:
        return [t for t in given.values() if storage_key(t) not in standing]
    handed = {id(t) for t in previous}
    strange = [t for t in given.values() if id(t) not in handed and storage_key(t) not in standing]
    if strange:
        raise UnsupportedBoundaryError(
            f"block {names[index]!r} is called with a tensor of shape {tuple(strange[0].shape)} that is neither what "
            f"{names[index - 1]!r} returned nor part of the batch: the model computes something between the two. "
            "Declare blocks that follow each other directly, or move that code into one of them"
        )
    return list(previous)


def _recorded(
    args: tuple[Any, ...], kwargs: dict[str, Any], boundary: list[torch.Tensor], autocast: Autocast
) -> BlockCall:
    cut = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors_in((args, kwargs))}
    # copies: the block may change its input in place, and what came in is what has to be recorded
    cut.update((id(t), copy) for t, copy in zip(boundary, copies_of(boundary), strict=True))
    at_boundary = {id(t) for t in boundary}
    for key, stand_in in cut.items():  # an input of the user's that wants a gradient has one before the step
        if stand_in.requires_grad and key not in at_boundary:
            stand_in.grad = torch.zeros_like(stand_in)
    own_args, own_kwargs = map_tensors((args, kwargs), lambda t: cut[id(t)])
    own_boundary = [cut[id(t)] for t in boundary]
    inside = {id(t) for t in own_boundary}
    return BlockCall(
        own_args, own_kwargs, own_boundary, autocast=autocast, signature=_signature(own_args, own_kwargs, inside)
    )


def _cut(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output without its graph; what the block handed through stays the same object."""
    passed = {id(t) for t in tensors_in((args, kwargs))}
    fresh = list({id(t): t for t in tensors_in(output) if id(t) not in passed}.values())
    detached = [t.detach().requires_grad_(t.requires_grad) for t in fresh]
    copies = {id(old): new for old, new in zip(fresh, own_copies(detached), strict=True)}
    return map_tensors(output, lambda t: copies.get(id(t), t))


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any], inside: set[int]) -> str:
    seen: dict[int, int] = {}

    def describe(t: torch.Tensor) -> str:
        first = seen.setdefault(id(t), len(seen))
        origin = "in" if id(t) in inside else "out"
        flags = "grad" if t.requires_grad else "no-grad"
        return f"<{first}:{origin}:{tensor_signature(t)}:{t.stride()}:{flags}>"

    return repr(map_tensors((args, kwargs), lambda t: _Text(describe(t))))


class _Text(str):
    """Text that prints without quotes inside a container's repr."""

    def __repr__(self) -> str:
        return str(self)


def tensor_signature(tensor: torch.Tensor) -> str:
    """Such as ``float32[8,128,64]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def value_signature(value: Any) -> str:
    """The shapes of all tensors of a value, with its nesting."""
    return repr(map_tensors(value, lambda t: _Text(tensor_signature(t))))
