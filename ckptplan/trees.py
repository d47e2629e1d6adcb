"""Tensors inside nested Python values: what blocks take and return.

Tuples, namedtuples, lists, dicts (``OrderedDict``, Hugging Face's ``ModelOutput``) and dataclasses
are looked into; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # pinned by tests/test_dry_run.py


def has_values(tensor: torch.Tensor) -> bool:
    """False for a tensor that is only a shape: on the meta device, or a fake one."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def map_tensors(value: Any, function: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """``value`` rebuilt with every tensor (every leaf of ``kind``) replaced; other leaves are the same objects."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function, kind)
        return rebuilt
    if isinstance(value, tuple):
        return _tuple_like(value, [map_tensors(item, function, kind) for item in value])
    if isinstance(value, list):
        items = [map_tensors(item, function, kind) for item in value]
        if type(value) is list:
            return items
        same_kind = copy.copy(value)  # a subclass may have a constructor of its own
        same_kind[:] = items
        return same_kind
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replica: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(replica, field.name, map_tensors(getattr(value, field.name), function, kind))
        return replica
    return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the kind of ``value``, past constructors of its own (PackedSequence checks what it is given)."""
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    if all(new is old for new, old in zip(items, value, strict=True)):  # torch.Size has no other way to be built
        return value
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and other functions return
        return kind(items)
    rebuilt: Any = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(rebuilt).update(vars(value))
    return rebuilt


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


def tensors_anywhere(value: Any, depth: int = 6) -> list[torch.Tensor]:
    """Every tensor of ``value``, also those in objects that are not rebuilt: a namespace, a UserDict, a batch class."""
    found: dict[int, torch.Tensor] = {}
    coming = [(value, depth)]
    while coming:  # no inner function that calls itself: it would keep the tensors alive until garbage is collected
        item, left = coming.pop()
        if isinstance(item, torch.Tensor):
            found.setdefault(id(item), item)
        elif left > 0 and not isinstance(item, (torch.nn.Module, type)) and not inspect.isroutine(item):
            coming.extend((part, left - 1) for part in reversed(_parts(item)))
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    return list(attributes_of(value).values())


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and its ``__slots__``, by name."""
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, private):
                held[private] = getattr(value, private)
    return held


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of an enclosing scope has been set already."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, as long as one of them lives (fake and empty tensors included)."""
    return id(tensor.untyped_storage())


def given_storages(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Memory that an operator is called with, by ``storage_key``: that of tensors, and bare storages (``set_``)."""
    bare = {id(argument) for argument in args if isinstance(argument, torch.UntypedStorage)}
    return bare | {storage_key(tensor) for tensor in tensors_in((args, kwargs))}


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per distinct storage, in order of first appearance."""
    by_key: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        by_key.setdefault(storage_key(tensor), tensor)
    return list(by_key.values())


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Bitwise equal values, NaN equal to NaN; of tensors without values the shapes and dtypes."""
    if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
        return left is right
    if not (has_values(left) and has_values(right)):
        return True
    return bool(torch.equal(left, right)) or bool(torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))


def value_hash(tensor: torch.Tensor) -> str:
    """Equal for tensors of equal bits; made of their bytes on the host."""
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy(force=True).tobytes()).hexdigest()[:16]


MOST_HASHED = 10**7  # elements


def array_hash(array: Any) -> str:
    """Equal for tensors or NumPy arrays of equal dtype, shape and bits.

    Made of the identity where the values are no plain bytes, or more than ``MOST_HASHED``.
    """
    if isinstance(array, torch.Tensor):
        if isinstance(array, FakeTensor):  # nobody knows its values, so they tell nothing apart
            return f"{array.dtype}{tuple(array.shape)}"
        is_plain = array.layout == torch.strided and not array.is_nested and array.device.type != "meta"
        values = value_hash(array) if is_plain and array.numel() <= MOST_HASHED else f"@{id(array)}"
    else:
        is_plain = not array.dtype.hasobject and array.size <= MOST_HASHED
        values = hashlib.sha256(array.tobytes()).hexdigest()[:16] if is_plain else f"@{id(array)}"
    return f"{array.dtype}{tuple(array.shape)}{values}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; another tensor is itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The value over all ranks of a sharded or partial tensor; another tensor is itself."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def sharded_shape(tensor: torch.Tensor, num_ranks: int) -> tuple[int, ...]:
    """The largest part of a tensor that ``fully_shard`` cuts along its first dimension; padding makes all so large.

    Of a matrix that ranks share already (tensor parallelism), a part of this rank's part.
    """
    shape = local(tensor.detach()).shape
    return (-(-shape[0] // num_ranks), *shape[1:]) if shape else ()


def sharded_bytes(tensor: torch.Tensor, num_ranks: int) -> int:
    """Bytes of ``sharded_shape``."""
    return math.prod(sharded_shape(tensor, num_ranks)) * tensor.element_size()
