"""From tensors to spans of memory: what is stored once, and how each tensor looks at it.

Tensors that share memory share one span: the smallest one that covers them, not the whole storage behind them. Parts of
one storage that lie far apart and share nothing become spans of their own. A tensor that shares with nobody is stored
dense, in its own shape, whatever its strides were.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from operator import eq
from typing import Any

import numpy as np
import torch

from ckptplan.state.manifest import View, format_of
from ckptplan.state.values import Leaf

_MERGE_GAP_BYTES = 512  # views nearer than this (an allocator's padding) are covered by one span


@dataclass
class Span:
    """Memory to be stored once.

    `source` is a dense tensor over exactly these bytes, or one to be copied densely; None where `address` says all and
    the payload keeps the memory alive. `address` is 0 where the bytes cannot be copied by address (another device, or
    strided). `leaves`: numbers of the leaves that look at it.
    """

    name: str
    item: str
    format_dtype: str
    format_shape: tuple[int, ...]
    size_bytes: int
    source: torch.Tensor | None
    address: int
    leaves: tuple[int, ...]

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


class SpanFinder:
    """Finds the spans of one payload after the other; fast where the tensors lie where they lay the last time.

    Between two payloads it remembers addresses, but holds no tensor.
    """

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._views: list[View] = []
        self._spans: list[Span] = []

    def find(self, leaves: list[Leaf]) -> tuple[list[View], list[Span], bool]:
        """One view per leaf, the spans in the order of their first leaf, and whether all lies as it did before."""
        if self._lie_as_before(leaves):
            if all(span.address or not span.size_bytes for span in self._spans):
                return self._views, self._spans, True
            # Spans without a lasting address are found again: a copy of them was made the last time.
            spans = [
                span if span.address else _span_of([_place(number, leaves[number]) for number in span.leaves], index)[0]
                for index, span in enumerate(self._spans)
            ]
            return self._views, spans, True
        views, spans = find_spans(leaves)
        self._signature, self._views = [_signature_of(leaf) for leaf in leaves], views
        lasting = [span.address if all(_is_own_memory(leaves[n].value) for n in span.leaves) else 0 for span in spans]
        self._spans = [
            replace(span, source=None, address=address) for span, address in zip(spans, lasting, strict=True)
        ]
        return views, spans, False

    def _lie_as_before(self, leaves: list[Leaf]) -> bool:
        # One by one: a list of ten thousand signatures would push everything else out of the processor's cache.
        before = self._signature
        return len(leaves) == len(before) and all(map(eq, map(_signature_of, leaves), before))


def _signature_of(leaf: Leaf) -> Any:
    """What must be equal for a leaf to lie where it lay before."""
    item, name, value, shard = leaf
    if not isinstance(value, torch.Tensor):
        return item, name, value.dtype.str, value.shape, shard
    return (
        item,
        name,
        value.data_ptr(),
        value.storage_offset(),  # with the pointer: which storage
        value.dtype,
        value.shape,
        value.stride(),
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
        type(value),
        value.get_device(),
        shard,
    )


def _is_own_memory(value: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg()


def _place(number: int, leaf: Leaf) -> _Placed:
    tensor = _as_tensor(leaf.value)
    start = int(tensor.storage_offset()) * tensor.itemsize
    end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
    return _Placed(number, leaf, tensor, start, end)


def find_spans(leaves: list[Leaf]) -> tuple[list[View], list[Span]]:
    """One view per leaf, and the spans that the views look at, in the order of their first leaf."""
    by_storage: dict[Any, list[_Placed]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        placed = _place(number, leaf)
        pointer = placed.tensor.untyped_storage().data_ptr() if placed.end > placed.start else 0
        # Empty tensors share nothing, whatever pointer they carry.
        by_storage[(placed.tensor.device, pointer) if pointer else number].append(placed)
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
    numbers = tuple(placed.number for placed in group)
    start, end = min(placed.start for placed in group), max(placed.end for placed in group)
    geometries = {(placed.tensor.dtype, placed.start, placed.tensor.stride(), placed.tensor.shape) for placed in group}
    if len(geometries) == 1 and (tensor.is_contiguous() or tensor.numel() * tensor.itemsize <= end - start):
        views = [_view(placed, index) for placed in group]
        return _make_span(first.leaf, tensor, numbers), views
    # Every view must start at a whole number of its own elements, counted from the span's first byte.
    start -= start % max(placed.tensor.itemsize for placed in group)
    views = [_view(placed, index, start) for placed in group]
    for placed in group:
        if placed.tensor.is_contiguous() and (placed.start, placed.end) == (start, end):
            return _make_span(placed.leaf, placed.tensor, numbers), views
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = flat.set_(tensor.untyped_storage(), start, (end - start,), (1,))
    span = _make_span(first.leaf, flat, numbers)
    span.name += ".storage"
    dtypes = {placed.tensor.dtype for placed in group}
    if len(dtypes) == 1 and span.size_bytes % tensor.itemsize == 0:
        span.format_dtype, span.format_shape = format_of(_name_of(tensor.dtype), (span.size_bytes // tensor.itemsize,))
    return span, views


def _view(placed: _Placed, span: int, start: int | None = None) -> View:
    value, tensor = placed.leaf.value, placed.tensor
    if not isinstance(value, torch.Tensor):
        return View(value.dtype.str, value.shape, span)
    return View(
        _name_of(tensor.dtype),
        tuple(tensor.shape),
        span,
        offset_bytes=0 if start is None else placed.start - start,
        stride=None if start is None else tuple(tensor.stride()),
        is_parameter=isinstance(value, torch.nn.Parameter),
        requires_grad=value.requires_grad and value.is_leaf,
        shard=placed.leaf.shard,
    )


def _make_span(leaf: Leaf, source: torch.Tensor, numbers: tuple[int, ...]) -> Span:
    format_dtype, format_shape = format_of(_name_of(source.dtype), tuple(source.shape))
    size_bytes = source.numel() * source.itemsize
    by_address = source.device.type == "cpu" and size_bytes > 0 and source.is_contiguous()
    address = source.data_ptr() if by_address else 0
    return Span(leaf.name or leaf.item, leaf.item, format_dtype, format_shape, size_bytes, source, address, numbers)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
