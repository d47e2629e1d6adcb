"""Tensors inside nested Python values: what blocks take and return.

Tuples, namedtuples, lists, dicts (``OrderedDict``, Hugging Face's ``ModelOutput``) and dataclasses
are looked into; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` rebuilt with every tensor replaced; other leaves are the same objects."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replica: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(replica, field.name, map_tensors(getattr(value, field.name), function))
        return replica
    return value


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
