"""From tensors to spans of memory: what is stored once, and how each tensor looks at it.

Tensors that share memory share one span: the smallest one that covers them, not the whole storage behind them. Parts of
one storage that lie far apart and share nothing become spans of their own. A tensor that shares with nobody is stored
dense, in its own shape, whatever its strides were.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from ckptplan.state.manifest import View, format_of
from ckptplan.state.values import Leaf

_MERGE_GAP_BYTES = 512  # views nearer than this (an allocator's padding) are covered by one span


@dataclass
class Span:
    """Memory to be stored once.

    `source` is a dense tensor over exactly these bytes, or one to be copied densely (`is_strided`). It keeps the
    memory alive. `address` is 0 where the bytes cannot be copied by address (another device, or strided).
    """

    name: str
    item: str
    format_dtype: str
    format_shape: tuple[int, ...]
    size_bytes: int
    source: torch.Tensor
    is_strided: bool
    address: int

    @property
    def item_bytes(self) -> int:
        """Of one element as the file's format sees it."""
        return self.size_bytes // max(1, prod(self.format_shape))


@dataclass(frozen=True)
class _Placed:
    """A leaf with the bytes of its storage that it reaches: [start, end)."""

    number: int
    leaf: Leaf
    tensor: torch.Tensor
    start: int
    end: int


def find_spans(leaves: list[Leaf]) -> tuple[list[View], list[Span]]:
    """One view per leaf, and the spans that the views look at, in the order of their first leaf."""
    by_storage: dict[Any, list[_Placed]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        tensor = _as_tensor(leaf.value)
        start = int(tensor.storage_offset()) * tensor.itemsize
        end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
        pointer = tensor.untyped_storage().data_ptr() if end > start else 0
        # Empty tensors share nothing, whatever pointer they carry.
        by_storage[(tensor.device, pointer) if pointer else number].append(_Placed(number, leaf, tensor, start, end))
    groups = [group for placed in by_storage.values() for group in _split(placed)]
    groups.sort(key=lambda group: min(placed.number for placed in group))
    views: list[View | None] = [None] * len(leaves)
    spans = []
    for index, group in enumerate(groups):
        span, group_views = _span_of(group, index)
        spans.append(span)
        for placed, view in zip(group, group_views, strict=True):
            views[placed.number] = view
    return [view for view in views if view is not None], spans


def extent_bytes(shape: tuple[int, ...], stride: tuple[int, ...], item_bytes: int) -> int:
    """Bytes from the first to the last element of a strided tensor, both included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * item_bytes


def _as_tensor(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg()
    # As plain bytes: NumPy has dtypes (text, dates, other byte orders) that torch has not.
    dense = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return torch.from_numpy(dense if dense.flags.writeable else dense.copy())


def _split(placed: list[_Placed]) -> list[list[_Placed]]:
    """Groups of leaves of one storage whose bytes touch or nearly touch."""
    if len(placed) == 1:
        return [placed]
    groups: list[list[_Placed]] = []
    end = 0
    for leaf in sorted(placed, key=lambda leaf: (leaf.start, leaf.number)):
        if groups and leaf.start < end + _MERGE_GAP_BYTES:
            groups[-1].append(leaf)
        else:
            groups.append([leaf])
        end = max(end, leaf.end)
    return groups


def _span_of(group: list[_Placed], index: int) -> tuple[Span, list[View]]:
    first = min(group, key=lambda placed: placed.number)
    tensor = first.tensor
    start, end = min(placed.start for placed in group), max(placed.end for placed in group)
    geometries = {(placed.tensor.dtype, placed.start, placed.tensor.stride(), placed.tensor.shape) for placed in group}
    if len(geometries) == 1 and (tensor.is_contiguous() or tensor.numel() * tensor.itemsize <= end - start):
        views = [_view(placed, index) for placed in group]
        return _make_span(first.leaf, "", tensor, tensor.dtype, tuple(tensor.shape)), views
    # Every view must start at a whole number of its own elements, counted from the span's first byte.
    start -= start % max(placed.tensor.itemsize for placed in group)
    views = [_view(placed, index, start) for placed in group]
    for placed in group:
        if placed.tensor.is_contiguous() and (placed.start, placed.end) == (start, end):
            return _make_span(placed.leaf, "", placed.tensor, placed.tensor.dtype, tuple(placed.tensor.shape)), views
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = flat.set_(tensor.untyped_storage(), start, (end - start,), (1,))
    dtypes = {placed.tensor.dtype for placed in group}
    dtype = dtypes.pop() if len(dtypes) == 1 and (end - start) % tensor.itemsize == 0 else torch.uint8
    return _make_span(first.leaf, ".storage", flat, dtype, ((end - start) // dtype.itemsize,)), views


def _view(placed: _Placed, span: int, start: int | None = None) -> View:
    value, tensor = placed.leaf.value, placed.tensor
    if not isinstance(value, torch.Tensor):
        return View(value.dtype.str, value.shape, span)
    return View(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        span,
        offset_bytes=0 if start is None else placed.start - start,
        stride=None if start is None else tuple(tensor.stride()),
        is_parameter=isinstance(value, torch.nn.Parameter),
        requires_grad=value.requires_grad and value.is_leaf,
    )


def _make_span(leaf: Leaf, suffix: str, source: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Span:
    format_dtype, format_shape = format_of(str(dtype).removeprefix("torch."), shape)
    is_strided = not source.is_contiguous()
    size_bytes = prod(shape) * dtype.itemsize
    by_address = source.device.type == "cpu" and not is_strided and size_bytes > 0
    address = source.data_ptr() if by_address else 0
    name = (leaf.name or leaf.item) + suffix
    return Span(name, leaf.item, format_dtype, format_shape, size_bytes, source, is_strided, address)
