"""Arguments and values as text: shapes, dtypes, and which tensor stands where."""

from __future__ import annotations

from typing import Any

import torch

from ckptplan.trees import map_tensors


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any], inside: set[int]) -> str:
    """Shapes, dtypes, strides and gradient flags of all arguments; ``inside``: ``id`` of those that the step made."""
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


def nesting(value: Any) -> str:
    """How tensors are nested in a value, whatever their shapes; tuples and lists of any length are alike."""
    if isinstance(value, (tuple, list)):
        return type(value).__name__
    return repr(map_tensors(value, lambda t: _Text("tensor")))


def value_signature(value: Any) -> str:
    """The shapes of all tensors of a value, with its nesting."""
    return repr(map_tensors(value, lambda t: _Text(tensor_signature(t))))
