"""Geometry of sharded tensors: which part of a tensor a rank holds, as boxes. Needs neither torch nor a process group.

A box is a part of a tensor that is contiguous along every dimension: offsets and sizes. Placements are those of a
DTensor in plain form, one per dimension of the mesh, applied from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

Placement = tuple[int, int] | None
"""(tensor dimension, split factor) of a shard; the factor is 1 but for `_StridedShard`. None: replicated."""
Range = tuple[int, int]
"""Start and length along one dimension."""

LEAST_PART_BYTES = 1024 * 1024  # of a replicated tensor that several ranks write parts of


class Box(NamedTuple):
    """A part of a tensor, and where it lies in the local tensor of its rank."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Box]:
    """The boxes of a rank, which together are its local tensor; none where that is empty.

    One box as a rule; several where `_StridedShard` leaves a rank with parts that do not touch.
    """
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for parts, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement is not None:
            dim, factor = placement
            ranges[dim] = _touching(_strided_chunk(ranges[dim], parts, place, factor))
    boxes = []
    for combination in product(*(_with_local_offsets(along) for along in ranges)):
        sizes = tuple(length for _, _, length in combination)
        if 0 not in sizes:
            offsets = tuple(start for start, _, _ in combination)
            boxes.append(Box(offsets, tuple(local for _, local, _ in combination), sizes))
    return boxes


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Shape of the local tensor of a rank."""
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for parts, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement is not None:
            ranges[placement[0]] = _strided_chunk(ranges[placement[0]], parts, place, placement[1])
    return tuple(sum(length for _, length in along) for along in ranges)


def _strided_chunk(ranges: list[Range], parts: int, place: int, factor: int) -> list[Range]:
    """Chunk number `place` of `parts` of each of `factor` chunks, one behind the other."""
    found: list[Range] = []
    for number in range(factor):
        whole = _chunk(ranges, factor, number)
        found += _chunk(whole, parts, place)
    return found


def _chunk(ranges: list[Range], parts: int, place: int) -> list[Range]:
    """Chunk number `place` as torch.chunk makes them: of equal size, rounded up, the last ones shorter or empty."""
    total = sum(length for _, length in ranges)
    size = -(-total // parts)
    first, last = min(total, place * size), min(total, (place + 1) * size)
    found = []
    position = 0
    for start, length in ranges:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            found.append((start + low - position, high - low))
        position += length
    return found


def _touching(ranges: list[Range]) -> list[Range]:
    """Neighbours that follow each other made one."""
    joined: list[Range] = []
    for start, length in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _with_local_offsets(ranges: list[Range]) -> list[tuple[int, int, int]]:
    placed, local = [], 0
    for start, length in ranges:
        placed.append((start, local, length))
        local += length
    return placed


def replica_of(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, int]:
    """(number of this rank among those that hold the same part, how many they are)."""
    number, count = 0, 1
    for parts, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement is None:
            number, count = number * parts + place, count * parts
    return number, count


def rows_to_write(sizes: Sequence[int], item_bytes: int, tensor: int, replica: int, replicas: int) -> Range | None:
    """Which rows of a box a replica writes, so that each byte is written once and all replicas write about as much.

    Big boxes are cut along their first dimension; small ones go to one replica each, by the number of the tensor.
    None: nothing.
    """
    rows = sizes[0] if sizes else 1
    parts = max(1, min(replicas, rows, prod(sizes) * item_bytes // LEAST_PART_BYTES))
    part = (replica - tensor) % replicas
    if part >= parts:
        return None
    first, last = rows * part // parts, rows * (part + 1) // parts
    return first, last - first


class BoxIndex:
    """Boxes of one tensor, to be found by what they share with another box."""

    def __init__(self, offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], dims: int) -> None:
        self._starts = np.array(offsets, np.int64).reshape(len(offsets), dims)
        self._ends = self._starts + np.array(sizes, np.int64).reshape(len(sizes), dims)

    def overlaps(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(number of a box, offsets of what both share, its sizes) for every box that shares anything."""
        wanted = np.array(offsets, np.int64)
        starts = np.maximum(self._starts, wanted)
        lengths = np.minimum(self._ends, wanted + np.array(sizes, np.int64)) - starts
        numbers = np.flatnonzero((lengths > 0).all(axis=1))
        return [(int(n), tuple(starts[n].tolist()), tuple(lengths[n].tolist())) for n in numbers]

    def total(self) -> int:
        """Elements of all boxes."""
        return int((self._ends - self._starts).prod(axis=1).sum())

    def lie_within(self, shape: Sequence[int]) -> bool:
        """Whether no box reaches beyond a tensor of that shape."""
        return bool((self._starts >= 0).all() and (self._ends <= np.array(shape, np.int64)).all())
