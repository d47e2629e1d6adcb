"""The Python attributes of a model around a step: put back before it, compared behind it."""

from __future__ import annotations

import copy
from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptplan.observe import DEPTH, attributes_by_name, comparable, instance_state
from ckptplan.twin import CANNOT_COPY

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class KeptAttributes:
    """What a model's attributes were. Those of its classes, which other models share, are left alone."""

    values: dict[str, Any]
    state: dict[str, Any]  # what tells whether one was changed
    hooks: dict[str, dict[str, dict[int, Any]]]  # by module and kind: a forward may register some (transformers does)

    @staticmethod
    def of(model: nn.Module) -> KeptAttributes:
        parts = _parts(model)
        values = {name: _copied(value, parts) for name, (_, value) in attributes_by_name(model).items()}
        hooks = {path: {name: dict(table) for name, table in _hooks_of(part)} for path, part in model.named_modules()}
        return KeptAttributes(values, instance_state(model), hooks)

    def put_back(self, model: nn.Module) -> None:
        """Attributes that changed get the kept values, new ones go, and so do hooks."""
        now, parts = instance_state(model), _parts(model)
        for name, (holder, _) in attributes_by_name(model).items():
            last = name.rpartition(".")[2]
            if name not in self.values:
                delattr(holder, last)
            elif now[name] != self.state[name]:
                vars(holder)[last] = _copied(self.values[name], parts)
        for name in self.values.keys() - now.keys():
            owner, _, last = name.rpartition(".")
            vars(model.get_submodule(owner))[last] = _copied(self.values[name], parts)
        for path, part in model.named_modules():
            for name, table in _hooks_of(part):
                kept = self.hooks.get(path, {}).get(name, {})
                if table.keys() != kept.keys():
                    table.clear()
                    table.update(kept)


def _hooks_of(module: nn.Module) -> list[tuple[str, dict[int, Any]]]:
    """The tables of hooks that torch keeps in a module, by attribute."""
    return [(name, table) for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)]


def _parts(model: nn.Module) -> dict[int, Any]:
    return {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}


def _copied(value: Any, parts: dict[int, Any]) -> Any:
    """A deep copy that holds the same modules, parameters and buffers; what cannot be copied is itself."""
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)):
        return value
    try:
        return copy.deepcopy(value, ChainMap({}, parts))  # type: ignore[arg-type]  # any mutable mapping does
    except CANNOT_COPY:
        return value


@dataclass(frozen=True)
class AttributeValues:
    """What a model's attributes hold, by dotted name: all but the tensors, and these on the host."""

    plain: dict[str, Any]
    tensors: dict[str, list[torch.Tensor]]

    @staticmethod
    def of(model: nn.Module) -> AttributeValues:
        parts = frozenset(id(part) for part in (*model.modules(), *model.parameters(), *model.buffers()))
        plain: dict[str, Any] = {}
        tensors: dict[str, list[torch.Tensor]] = {}
        for name, (_, value) in attributes_by_name(model).items():
            found = tensors[name] = []

            def note(tensor: torch.Tensor, found: list[torch.Tensor] = found) -> tuple[str, torch.Size]:
                if id(tensor) not in parts:
                    found.append(tensor.detach().to("cpu", copy=True))
                return str(tensor.dtype), tensor.shape

            plain[name] = comparable(value, DEPTH, note, parts, lambda opaque: type(opaque).__qualname__)
        return AttributeValues(plain, tensors)
