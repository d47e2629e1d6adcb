"""Tensors that are stored in parts, or wanted in parts: which bytes of which files a rank needs, read and put in place.

What is stored is a list of parts, and what is wanted is a list of pieces of memory, each a box of the whole. Where two
boxes meet, bytes are copied: straight from the file where they follow each other on both sides, else through a buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ckptplan.state import reading
from ckptplan.state.manifest import DTYPE_BYTES, RankPart, View
from ckptplan.state.parallel import in_batches
from ckptplan.state.resharder import Piece
from ckptplan.state.storage import Storage
from ckptplan.state.stored import StoredTensor, dense_strides
from ckptplan.state.values import torch_dtype
from ckptplan.units import MIB

_PASS_BYTES = 64 * MIB  # of buffers at a time
_SLICE_BYTES = 16 * MIB  # read at once


@dataclass
class _Slice:
    """A box of a stored part, and the memory of the same shape that it belongs into."""

    part: RankPart
    span: int
    first: int  # byte of the span
    last: int  # one behind
    dtype: str
    stride: tuple[int, ...]
    target: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.last - self.first

    def is_direct(self) -> bool:
        """Whether the bytes follow each other in the file as they do in the target."""
        target = self.target
        is_plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_conj()
        return is_plain and not target.is_neg() and _is_dense(target.shape, self.stride)


class Slices:
    """What one rank wants of tensors that are stored or wanted in parts: `add`, then `check`, then `fill`."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._slices: list[_Slice] = []

    def add(self, stored: StoredTensor, pieces: Sequence[Piece]) -> None:
        """Wants these pieces of the tensor; their memory is written by `fill`."""
        for piece in pieces:
            for number, offsets, sizes in stored.index.overlaps(piece.offsets, piece.tensor.shape):
                part, view, begins = stored.parts[number]
                target = _box_of(piece.tensor, piece.offsets, offsets, sizes)
                within = tuple(offset - begin for offset, begin in zip(offsets, begins, strict=True))
                self._slices += _slices(part, view, within, target)

    def wanted(self) -> dict[int, tuple[RankPart, dict[int, list[tuple[int, int]]]]]:
        """By rank that wrote them: the ranges of bytes of each span."""
        found: dict[int, tuple[RankPart, dict[int, list[tuple[int, int]]]]] = {}
        for each in self._slices:
            _, ranges = found.setdefault(each.part.rank, (each.part, {}))
            ranges.setdefault(each.span, []).append((each.first, each.last))
        return found

    def check(self) -> list[str]:
        """Reads all chunks that hold something wanted, and compares their checksums; returns what is damaged."""
        faults: list[str] = []
        for part, ranges in self.wanted().values():
            files = [part.files[number] for number in sorted({part.spans[span].file for span in ranges})]
            missing = reading.check_sizes(self._storage, self._folder, files)
            faults += missing or reading.read_spans(
                self._storage, self._folder, part, ranges, target=lambda span: None, ranges=ranges
            )
        return faults

    def fill(self) -> list[str]:
        """Reads what is wanted into its places; returns what could not be read."""
        faults: list[str] = []
        for batch in in_batches(self._slices, lambda each: each.size_bytes, _PASS_BYTES):
            pieces: dict[int, list[tuple[int, int, memoryview]]] = {}
            buffered: list[tuple[_Slice, torch.Tensor]] = []
            for each in batch:
                if each.is_direct():
                    memory = _memory(each.target.data_ptr(), each.size_bytes)
                else:
                    buffer = torch.empty(each.size_bytes, dtype=torch.uint8)
                    buffered.append((each, buffer))
                    memory = _memory(buffer.data_ptr(), each.size_bytes)
                pieces.setdefault(each.part.rank, []).append((each.span, each.first, memory))
            parts = {each.part.rank: each.part for each in batch}
            for rank, wanted in pieces.items():
                faults += reading.read_pieces(self._storage, self._folder, parts[rank], wanted)
            for each, buffer in buffered:
                source = torch.empty(0, dtype=torch_dtype(each.dtype))
                each.target.copy_(source.set_(buffer.untyped_storage(), 0, each.target.shape, each.stride))
        return faults


def _slices(part: RankPart, view: View, start: tuple[int, ...], target: torch.Tensor) -> Iterator[_Slice]:
    """The slices of one box of a stored part, none much longer than what is read at once."""
    item_bytes = DTYPE_BYTES[view.dtype]
    stride = dense_strides(view.shape) if view.stride is None else view.stride
    first = view.offset_bytes + item_bytes * sum(map(prod, zip(start, stride, strict=True)))
    sizes = target.shape
    extent = item_bytes * (1 + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True)))
    if extent > _SLICE_BYTES and max(sizes) > 1:
        dim = max((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: stride[dim])
        step = max(1, min(sizes[dim] // 2, _SLICE_BYTES // max(1, stride[dim] * item_bytes)))
        for position in range(0, sizes[dim], step):
            length = min(step, sizes[dim] - position)
            moved = tuple(offset + position if each == dim else offset for each, offset in enumerate(start))
            yield from _slices(part, view, moved, target.narrow(dim, position, length))
        return
    yield _Slice(part, view.span, first, first + extent, view.dtype, stride, target)


def _box_of(tensor: torch.Tensor, begins: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of a piece's memory that is this box of the whole."""
    for dim, (begin, offset, size) in enumerate(zip(begins, offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset - begin, size)
    return tensor


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    dense = dense_strides(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, stride, dense, strict=True))


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
