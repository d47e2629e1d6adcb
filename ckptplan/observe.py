"""What a block's forward does besides computing: random draws, changed buffers, attributes and inputs.

Observed by running the block twice from the same state, not guessed from class names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.randomness import library_state, set_torch_state, torch_state
from ckptplan.trace import BlockCall
from ckptplan.trees import tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_DEPTH = 6  # how deep nested attribute values are looked into


@dataclass(frozen=True)
class Observation:
    """``exclusion_reason`` is None where a recomputation gives exactly what the forward gave."""

    draws_random: bool
    mutated_buffers: tuple[str, ...]
    exclusion_reason: str | None


def observe(module: nn.Module, call: BlockCall, run: Callable[..., Any], device: torch.device) -> Observation:
    """Call ``run(*args, **kwargs)``, which runs the module, twice from equal state and compare.

    ``module`` must be a twin: its buffers and attributes are changed.
    """
    _outputs(call, run)  # lazily made caches and attributes come into being here
    buffers = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
    versions = _versions(module)
    streams, library = torch_state(device), library_state()
    first, touched = _outputs(call, run)
    is_library_drawn = library != library_state()
    mutated = tuple(
        name
        for name, b in module.named_buffers(remove_duplicate=False)
        if not same(b, buffers.get(name)) or versions.get(name) != (id(b), b._version)
    )
    draws = not all(same(a, b) for a, b in zip(streams, torch_state(device), strict=True))
    attributes = attribute_state(module)
    _restore_buffers(module, buffers)
    set_torch_state(streams, device)
    second, _ = _outputs(call, run)
    again = attribute_state(module)
    changed = sorted(name for name in {*attributes, *again} if attributes.get(name) != again.get(name))
    reason = None
    if touched:
        reason = "its forward changes its own input in place, so the input kept for a recomputation would be wrong"
    elif is_library_drawn:
        reason = (
            "its forward draws from Python's or NumPy's global random stream, which a recomputation does not restore"
        )
    elif changed:  # an attribute that is set to the same value again is none of these
        reason = f"its forward changes the Python attribute {changed[0]!r}, which a recomputation would change again"
    elif len(first) != len(second) or not all(same(a, b) for a, b in zip(first, second, strict=True)):
        reason = "two runs from the same state give different outputs, so a recomputation would not be exact"
    return Observation(draws, mutated, reason)


def _outputs(call: BlockCall, run: Callable[..., Any]) -> tuple[list[torch.Tensor], bool]:
    copies, args, kwargs = call.fresh()
    outside = [t for t in tensors_in((args, kwargs)) if not any(t is c for c in copies)]
    before = [t.detach().clone() for t in outside]
    versions = [t._version for t in (*copies, *outside)]
    output = [t.detach().clone() for t in tensors_in(run(*args, **kwargs))]
    touched = [t._version for t in (*copies, *outside)] != versions
    touched |= not all(same(c.detach(), o.detach()) for c, o in zip(copies, call.boundary, strict=True))
    for now, then in zip(outside, before, strict=True):
        if not same(now.detach(), then):
            touched = True
            with torch.no_grad():
                now.detach().copy_(then)
    return output, touched


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Bitwise equal values, NaN equal to NaN."""
    if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
        return left is right
    return bool(torch.equal(left, right)) or bool(torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer is and how often it was written to: a write may leave the value as it was.

    That is so for a power iteration that has converged, until the weights change.
    """
    return {name: (id(b), b._version) for name, b in module.named_buffers(remove_duplicate=False)}


def _restore_buffers(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def attribute_state(module: nn.Module) -> dict[str, Any]:
    """Comparable values of all plain Python attributes of a module and its submodules, by dotted name."""
    state = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _MODULE_INTERNALS:
                state[f"{path}.{name}".lstrip(".")] = _comparable(value, _DEPTH)
    return state


def _comparable(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().cpu().flatten().tolist() if value.numel() < 1e5 else None,
        )
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if depth == 0 or isinstance(value, (nn.Module, type)) or callable(value):
        return id(value)
    if isinstance(value, dict):
        return [(repr(key), _comparable(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_comparable(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    try:
        return [(name, _comparable(item, depth - 1)) for name, item in vars(value).items()]
    except TypeError:
        return id(value)
