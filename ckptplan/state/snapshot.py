"""From a payload to what the writer needs: the memory to copy, the files to make, the entries of the manifest."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckptplan.errors import UnsaveableValueError
from ckptplan.state.boxes import rows_to_write
from ckptplan.state.files import CHUNK_BYTES, FilePlan, entry_names, plan_files
from ckptplan.state.items import ItemSpec
from ckptplan.state.manifest import View
from ckptplan.state.resharder import DefaultResharder
from ckptplan.state.spans import Span, SpanFinder
from ckptplan.state.tree import Json
from ckptplan.state.values import Encoder, Leaf, ShardedLeaf
from ckptplan.units import MIB

_SMALL_TENSOR_BYTES = 64 * 1024
_LEAST_CHUNK_BYTES = 16 * 1024
_MOST_CHUNKS = 2**18


@dataclass
class Encoded:
    """Items as typed JSON, and the tensors that their trees refer to by number, in two lists."""

    trees: dict[str, Json]
    leaves: list[Leaf]
    sharded: list[ShardedLeaf] = field(default_factory=list)

    def holders(self) -> list[tuple[int, ...]]:
        """The sets of ranks that hold sharded tensors between them, in the order of their first tensor."""
        return list(dict.fromkeys(leaf.sharded.holders for leaf in self.sharded))

    def digests_of_sharded(self) -> dict[str, str]:
        """By item: of what all ranks must say alike about its sharded tensors."""
        groups = {holders: number for number, holders in enumerate(self.holders())}
        hashers: dict[str, Any] = {}
        for number, leaf in enumerate(self.sharded):
            hasher = hashers.setdefault(leaf.item, hashlib.blake2b(digest_size=16))
            told = number, leaf.name, str(leaf.dtype), leaf.sharded.shape, leaf.sharded.note
            hasher.update(repr((told, groups[leaf.sharded.holders])).encode())
        return {item: hasher.hexdigest() for item, hasher in hashers.items()}

    def digest(self, name: str) -> str:
        """Of what must be the same on all ranks for a global item: its tree, shapes and small tensors."""
        hasher = hashlib.blake2b(json.dumps(self.trees[name]).encode(), digest_size=16)
        for leaf in self.leaves:
            if leaf.item == name:
                hasher.update(repr((leaf.name, tuple(leaf.value.shape), str(leaf.value.dtype))).encode())
                hasher.update(_small_bytes(leaf.value))
        return hasher.hexdigest()


def encode_items(payload: Mapping[str, Any], specs: Mapping[str, ItemSpec]) -> Encoded:
    """All items of a payload. Raises UnsaveableValueError that names everything that cannot be saved."""
    leaves: list[Leaf] = []
    faults: list[str] = []
    sharded: dict[Any, ShardedLeaf] = {}
    trees = {}
    for name, value in payload.items():
        resharder = None if specs[name].scope == "per_rank" else specs[name].resharder or DefaultResharder()
        trees[name] = Encoder(name, leaves, faults, resharder, sharded).encode(value, name)
    if faults:
        count = f"{len(faults)} values have" if len(faults) > 1 else "one value has"
        raise UnsaveableValueError(f"{count} no exact form in a checkpoint", faults)
    return Encoded(trees, leaves, list(sharded.values()))


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
    chunk_bytes: int  # of one checksum
    source: list[Leaf]  # holds the values, whose memory spans know by address only

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

    def plan(
        self,
        encoded: Encoded,
        specs: Mapping[str, ItemSpec],
        scopes: Mapping[str, str],
        rank: int,
        world_size: int,
        holders: Sequence[Sequence[tuple[int, ...]]],
    ) -> Snapshot:
        """The snapshot of what this rank writes: its own items, its parts of sharded tensors, on rank 0 all the rest.

        `holders`: of each rank, what `Encoded.holders` says there.
        """
        mine = [name for name in encoded.trees if scopes[name] == "per_rank" or rank == 0]
        trees, leaves = _only(encoded, mine)
        if encoded.sharded:
            parts = parts_to_write(encoded.sharded, rank, holders)
            chunk_bytes = _chunk_bytes_for_slices(parts, world_size)
            leaves = leaves + parts
        else:
            chunk_bytes = CHUNK_BYTES
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
            chunk_bytes,
            leaves,
        )

    def _plan_files(self, views: list[View], spans: list[Span], settings: tuple[int, dict[str, int | None]]) -> None:
        geometry = [settings, *((span.item, span.name, span.format_dtype, span.format_shape) for span in spans)]
        if geometry == self._geometry and views == self._views:
            return  # other tensors of the same names and shapes
        self._plans = plan_files(spans, *settings)
        self._files = json.dumps([_file_entry(plan, spans) for plan in self._plans], separators=(",", ":")).encode()
        self._tensors = json.dumps([view.to_json() for view in views], separators=(",", ":")).encode()
        self._geometry, self._views, self._settings = geometry, views, settings


def parts_to_write(
    sharded: Sequence[ShardedLeaf], rank: int, holders: Sequence[Sequence[tuple[int, ...]]]
) -> list[Leaf]:
    """The parts of sharded tensors that this rank writes: over all ranks every byte once."""
    groups = holders[rank]
    teams = {group: sorted({of_rank[number] for of_rank in holders}) for number, group in enumerate(groups)}
    leaves = []
    for number, leaf in enumerate(sharded):
        found = leaf.sharded
        team = teams[found.holders]
        replicas = found.replicas * len(team)
        replica = found.replicas * team.index(found.holders) + found.replica
        for offsets, tensor in found.pieces:
            rows = rows_to_write(tensor.shape, tensor.itemsize, number, replica, replicas)
            if rows is None or tensor.numel() == 0:
                continue
            if tensor.dim() and rows != (0, tensor.shape[0]):
                offsets, tensor = (offsets[0] + rows[0], *offsets[1:]), tensor.narrow(0, *rows)
            leaves.append(Leaf(leaf.item, leaf.name, tensor, (number, tuple(offsets))))
    return leaves


def _chunk_bytes_for_slices(parts: Sequence[Leaf], world_size: int) -> int:
    """Small chunks, so that other ranks than those that saved read little more than what they want.

    But not so small that the checksums of a big state fill the manifest: about 2**18 over all ranks.
    """
    total = world_size * sum(leaf.value.nbytes for leaf in parts)
    chunk_bytes = _LEAST_CHUNK_BYTES
    while chunk_bytes < MIB and chunk_bytes * _MOST_CHUNKS < total:
        chunk_bytes *= 2
    return chunk_bytes


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
