"""Tensors as they are stored: in one part, or in parts that several ranks wrote. Needs no torch.

A part is a box of the whole tensor that lies somewhere in a file; a plain tensor is its own only part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ckptplan.state.boxes import BoxIndex
from ckptplan.state.manifest import DTYPE_BYTES, Manifest, RankPart, View
from ckptplan.state.tree import BadValueError, Json, leaves_of


class Part(NamedTuple):
    """Where a part of a tensor is stored, and where it begins in the whole."""

    part: RankPart
    view: View
    offsets: tuple[int, ...]


class StoredTensor:
    """A tensor as it is stored, in one part or in many."""

    def __init__(self, shape: tuple[int, ...], dtype: str, parts: Sequence[Part]) -> None:
        self.shape, self.dtype, self.parts = shape, dtype, parts
        self.index = BoxIndex([part.offsets for part in parts], [part.view.shape for part in parts], len(shape))
        self._same_bytes: tuple[object, ...] | None = None

    @classmethod
    def plain(cls, part: RankPart, view: View) -> StoredTensor:
        """One that is stored as a whole."""
        return cls(view.shape, view.dtype, [Part(part, view, (0,) * len(view.shape))])

    def same_bytes(self) -> tuple[object, ...]:
        """Equal for two tensors that are stored once."""
        if self._same_bytes is None:
            self._same_bytes = tuple(
                (part.part.rank, part.view.span, part.view.offset_bytes, part.view.stride, part.offsets)
                for part in self.parts
            )
        return self._same_bytes


class ShardedTensors:
    """The sharded tensors of a checkpoint, by number."""

    def __init__(self, manifest: Manifest) -> None:
        self._parts: dict[int, list[Part]] = {}
        for part in manifest.ranks:
            for view in part.tensors:
                if view.shard is not None:
                    number, offsets = view.shard
                    self._parts.setdefault(number, []).append(Part(part, view, offsets))
        self._found: dict[int, StoredTensor] = {}

    def of(self, content: Json, path: str) -> StoredTensor:
        """The tensor that the leaf of a tree means. Raises BadValueError unless its parts are exactly the whole."""
        number, shape, dtype = content["number"], tuple(content["shape"]), content["dtype"]
        if number not in self._found:
            self._found[number] = StoredTensor(shape, dtype, self._parts.get(number, []))
        found = self._found[number]
        fits = all(part.view.dtype == dtype and len(part.offsets) == len(shape) for part in found.parts)
        if dtype not in DTYPE_BYTES or found.shape != shape or not fits:
            raise BadValueError(f"{path}: the parts of sharded tensor {number} are not parts of {dtype} {list(shape)}")
        if not found.index.lie_within(shape) or found.index.total() != prod(shape):
            stored = found.index.total()
            raise BadValueError(
                f"{path}: {stored} elements are stored for {dtype} {list(shape)}, which has {prod(shape)}"
            )
        return found


def stored_tensor(part: RankPart, node: Json, sharded: ShardedTensors, path: str) -> StoredTensor | None:
    """The tensor or array that the leaf of a tree means; None for any other leaf. Raises BadValueError."""
    if not isinstance(node, dict):
        return None
    if "sharded" in node:
        return sharded.of(node["sharded"], path)
    number = node.get("tensor", node.get("array"))
    if number is None:
        return None
    if number >= len(part.tensors):
        raise BadValueError(f"{path}: there is no leaf {number}")
    return StoredTensor.plain(part, part.tensors[number])


def sharding_faults(manifest: Manifest) -> list[str]:
    """Sharded tensors of which something is missing, or stored twice."""
    sharded, faults = ShardedTensors(manifest), []
    for part in manifest.ranks:
        for name, item in part.items.items():
            try:
                leaves = list(leaves_of(item.tree, name))
            except BadValueError as error:
                faults.append(str(error))
                continue
            for path, node in leaves:
                try:
                    stored_tensor(part, node, sharded, path)
                except BadValueError as error:
                    faults.append(str(error))
    return faults


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a tensor without holes."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)
