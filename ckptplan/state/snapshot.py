"""From a payload to what the writer needs: the memory to copy, the files to make, the entries of the manifest."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptplan.errors import UnsaveableValueError
from ckptplan.state.files import FilePlan, entry_names, plan_files
from ckptplan.state.items import ItemSpec
from ckptplan.state.manifest import View
from ckptplan.state.spans import Span, SpanFinder
from ckptplan.state.tree import Json
from ckptplan.state.values import Encoder, Leaf

_SMALL_TENSOR_BYTES = 64 * 1024


@dataclass
class Encoded:
    """Items as typed JSON, and the tensors that their trees refer to by number."""

    trees: dict[str, Json]
    leaves: list[Leaf]

    def digest(self, name: str) -> str:
        """Of what must be the same on all ranks for a global item: its tree, shapes and small tensors."""
        hasher = hashlib.blake2b(json.dumps(self.trees[name]).encode(), digest_size=16)
        for leaf in self.leaves:
            if leaf.item == name:
                hasher.update(repr((leaf.name, tuple(leaf.value.shape), str(leaf.value.dtype))).encode())
                hasher.update(_small_bytes(leaf.value))
        return hasher.hexdigest()


def encode_items(payload: Mapping[str, Any]) -> Encoded:
    """All items of a payload. Raises UnsaveableValueError that names everything that cannot be saved."""
    leaves: list[Leaf] = []
    faults: list[str] = []
    trees = {name: Encoder(name, leaves, faults).encode(value, name) for name, value in payload.items()}
    if faults:
        count = f"{len(faults)} values have" if len(faults) > 1 else "one value has"
        raise UnsaveableValueError(f"{count} no exact form in a checkpoint", faults)
    return Encoded(trees, leaves)


def _small_bytes(value: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _SMALL_TENSOR_BYTES else b""
    # A tensor on a device would have to be waited for.
    if value.device.type != "cpu" or value.numel() * value.itemsize > _SMALL_TENSOR_BYTES:
        return b""
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.itemsize) if dense.numel() else b""


@dataclass
class Snapshot:
    """What one rank writes: `files`, `tensors` and `items` are JSON for the writer and the manifest."""

    spans: list[Span]
    plans: list[FilePlan]
    files: bytes
    tensors: bytes
    items: bytes
    names: tuple[str, ...]  # of all items, also those that other ranks write
    at_once: frozenset[int]  # numbers of the files to copy before `save` returns
    later: frozenset[int]  # and of those whose values the caller leaves as they are until they are written
    source: Encoded  # holds the values, whose memory spans know by address only

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        return sum(plan.size_bytes for plan in self.plans)


class Snapshots:
    """Makes snapshots; what depends on shapes and names alone is made anew only when they change."""

    def __init__(self) -> None:
        self._finder = SpanFinder()
        self._settings: Any = None
        self._views: list[View] = []
        self._geometry: list[Any] = []
        self._plans: list[FilePlan] = []
        self._files = self._tensors = b""

    def plan(self, encoded: Encoded, specs: Mapping[str, ItemSpec], scopes: Mapping[str, str], rank: int) -> Snapshot:
        """The snapshot of the items that this rank writes: its own, and on rank 0 the global ones."""
        mine = [name for name in encoded.trees if scopes[name] == "per_rank" or rank == 0]
        trees, leaves = _only(encoded, mine)
        views, spans, is_same = self._finder.find(leaves)
        settings = rank, {name: layout.split_bytes for name in mine if (layout := specs[name].layout) is not None}
        if not is_same or settings != self._settings:
            self._plan_files(views, spans, settings)
        items = {name: {"scope": scopes[name], "tree": trees[name]} for name in mine}
        encoded_items = json.dumps(items, separators=(",", ":")).encode()
        later = frozenset(file for file, plan in enumerate(self._plans) if not specs[plan.item].requires_copy)
        return Snapshot(
            spans,
            self._plans,
            self._files,
            self._tensors,
            encoded_items,
            tuple(encoded.trees),
            frozenset(range(len(self._plans))) - later,
            later,
            encoded,
        )

    def _plan_files(self, views: list[View], spans: list[Span], settings: tuple[int, dict[str, int | None]]) -> None:
        geometry = [settings, *((span.item, span.name, span.format_dtype, span.format_shape) for span in spans)]
        if geometry == self._geometry and views == self._views:
            return  # other tensors of the same names and shapes
        self._plans = plan_files(spans, *settings)
        self._files = json.dumps([_file_entry(plan, spans) for plan in self._plans], separators=(",", ":")).encode()
        self._tensors = json.dumps([view.to_json() for view in views], separators=(",", ":")).encode()
        self._geometry, self._views, self._settings = geometry, views, settings


def _only(encoded: Encoded, names: list[str]) -> tuple[dict[str, Json], list[Leaf]]:
    """The trees of these items, with their leaves numbered anew."""
    if len(names) == len(encoded.trees):
        return encoded.trees, encoded.leaves
    kept = [number for number, leaf in enumerate(encoded.leaves) if leaf.item in names]
    renumbered = {old: new for new, old in enumerate(kept)}
    trees = {name: _renumber(encoded.trees[name], renumbered) for name in names}
    return trees, [encoded.leaves[number] for number in kept]


def _renumber(node: Json, numbers: Mapping[int, int]) -> Json:
    if isinstance(node, list):
        return [_renumber(part, numbers) for part in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag in ("tensor", "array"):
        return {tag: numbers[content]}
    if tag == "dict":
        return {tag: {key: _renumber(part, numbers) for key, part in content.items()}}
    return {tag: _renumber(content, numbers)} if tag in ("items", "ordered", "tuple", "namedtuple") else node


def _file_entry(plan: FilePlan, spans: list[Span]) -> Json:
    """A file for the writer: spans as (number, name, offset, bytes), in the order of the file."""
    placed = zip(plan.spans, entry_names(plan), plan.offsets, strict=True)
    entries = [(span, name, offset, spans[span].size_bytes) for span, name, offset in placed]
    return {
        "name": plan.name, "item": plan.item, "size": plan.size_bytes, "header": len(plan.header), "spans": entries
    }  # fmt: skip
