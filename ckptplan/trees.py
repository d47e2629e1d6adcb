"""Tensors inside nested Python values: what blocks take and return.

Tuples, namedtuples, lists, dicts (``OrderedDict``, Hugging Face's ``ModelOutput``) and dataclasses
are looked into; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """``value`` rebuilt with every tensor (every leaf of ``kind``) replaced; other leaves are the same objects."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function, kind)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function, kind) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function, kind) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replica: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(replica, field.name, map_tensors(getattr(value, field.name), function, kind))
        return replica
    return value


class _Place:
    """Where a tensor stood in a value that was taken apart."""

    def __init__(self, index: int) -> None:
        self.index = index


def split_tensors(value: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The distinct tensors of ``value``, and a function that puts others in their places; it holds none itself."""
    tensors = list({id(t): t for t in tensors_in(value)}.values())
    places = {id(t): _Place(index) for index, t in enumerate(tensors)}
    empty = map_tensors(value, lambda t: places[id(t)])
    return tensors, lambda others: map_tensors(empty, lambda place: others[place.index], _Place)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of ``value``, in order of appearance."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, as long as one of them lives (fake and empty tensors included)."""
    return id(tensor.untyped_storage())


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per distinct storage, in order of first appearance."""
    by_key: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        by_key.setdefault(storage_key(tensor), tensor)
    return list(by_key.values())
