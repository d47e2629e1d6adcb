"""From a manifest and templates to values: everything is compared first, then read and checked, then written.

Rules of a template: a tensor is filled in place; dicts and lists are filled in place, key by key, and so filter; tuples
and plain values are replaced; `None` takes everything; an object takes its state through `load_state_dict`, a module
directly into its tensors where that is all that loading means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptplan.errors import DamagedCheckpointError
from ckptplan.state import reading
from ckptplan.state.manifest import Manifest, RankPart, StoredItem, View
from ckptplan.state.merging import Finish, Request, merge
from ckptplan.state.storage import Storage
from ckptplan.state.values import numpy_dtype, torch_dtype
from ckptplan.units import MIB

_COPY_BATCH_BYTES = 64 * MIB  # read before they are copied to another device, or into strided memory

SpanKey = tuple[int, int]
"""Rank and number of a span."""


@dataclass
class _Item:
    name: str
    part: RankPart
    requests: list[Request]
    finish: Finish


class Load:
    """One load: `want` for each item, then look at `faults`, then `check`, then `finish`."""

    def __init__(
        self, storage: Storage, folder: str, manifest: Manifest, *, rank: int, strict: bool, device: torch.device
    ) -> None:
        self._storage, self._folder, self._manifest = storage, folder, manifest
        self._rank, self._strict, self._device = rank, strict, device
        self._items: list[_Item] = []
        self._buffers: dict[SpanKey, torch.Tensor] = {}
        self.faults: list[str] = []

    def want(self, name: str, template: Any) -> None:
        """Compares one item with its template; what does not fit adds to `faults`."""
        found = self._find(name)
        if found is None:
            return
        part, item = found
        merged = merge(item.tree, template, name, part.tensors, strict=self._strict)
        self.faults += merged.faults
        self._items.append(_Item(name, part, merged.requests, merged.finish))

    def compare_memory(self) -> None:
        """Adds faults for templates that share memory where what is stored does not."""
        self.faults += _conflicts([(item.part, request) for item in self._items for request in item.requests])

    def check(self) -> list[str]:
        """Reads and checks all that is wanted, into new memory or none; returns what is damaged."""
        by_span = self._by_span()
        faults: list[str] = []
        for part in self._manifest.ranks:
            spans = [span for rank, span in by_span if rank == part.rank]
            numbers = sorted({part.spans[span].file for span in spans})
            missing = reading.check_sizes(self._storage, self._folder, [part.files[number] for number in numbers])
            faults += missing
            if missing:
                continue
            for span in spans:
                if any(request.target is None for request in by_span[part.rank, span]):
                    self._buffers[part.rank, span] = torch.empty(part.spans[span].size_bytes, dtype=torch.uint8)
            faults += self._read(part, spans, self._buffers, check=True)
        return faults

    def finish(self) -> dict[str, Any]:
        """Writes into the templates and returns the values by item; only after `check` found nothing."""
        with torch.no_grad():
            by_span = self._by_span()
            for part in self._manifest.ranks:
                self._fill_templates(
                    part, {span: found for (rank, span), found in by_span.items() if rank == part.rank}
                )
            for item in self._items:
                for request in item.requests:
                    if request.target is None:
                        request.value = self._make(item.part, request)
            return {item.name: item.finish() for item in self._items}

    def _find(self, name: str) -> tuple[RankPart, StoredItem] | None:
        part = self._manifest.ranks[0]
        item = part.items.get(name)
        if item is None:
            stored = ", ".join(self._manifest.item_names()) or "nothing"
            self.faults.append(f"{name}: missing in the checkpoint, which holds {stored}; leave it out of into=")
            return None
        if item.scope == "per_rank":
            if self._rank >= len(self._manifest.ranks):
                saved = len(self._manifest.ranks)
                why = f"saved per rank by {saved} ranks, so rank {self._rank} has none; leave it out of into="
                self.faults.append(f"{name}: {why}")
                return None
            part = self._manifest.ranks[self._rank]
            item = part.items[name]
        return part, item

    def _by_span(self) -> dict[SpanKey, list[Request]]:
        by_span: dict[SpanKey, list[Request]] = {}
        for item in self._items:
            for request in item.requests:
                by_span.setdefault((item.part.rank, request.view.span), []).append(request)
        return by_span

    def _read(
        self, part: RankPart, spans: Sequence[int], places: dict[SpanKey, torch.Tensor], *, check: bool
    ) -> list[str]:
        memory = {span: _memory_of(places[part.rank, span]) for span in spans if (part.rank, span) in places}
        return reading.read_spans(self._storage, self._folder, part, spans, target=memory.get, check=check)

    def _read_again(self, part: RankPart, places: dict[SpanKey, torch.Tensor]) -> None:
        spans = [span for _, span in places]
        faults = self._read(part, spans, places, check=False)
        if faults:  # the same bytes were read a moment ago
            message = (
                f"checkpoint {self._manifest.checkpoint_id!r} could not be read a second time; some values are loaded"
            )
            raise DamagedCheckpointError(message, faults, checkpoint_id=self._manifest.checkpoint_id)

    def _fill_templates(self, part: RankPart, by_span: dict[int, list[Request]]) -> None:
        """Straight into the tensors where they are plain memory; the others by a copy from there or from a buffer."""
        direct: dict[SpanKey, torch.Tensor] = {}
        indirect: list[int] = []
        for span, requests in by_span.items():
            plain = next((request.target for request in requests if _is_plain_memory(request)), None)
            if (part.rank, span) in self._buffers or part.spans[span].size_bytes == 0:
                continue
            if plain is None:
                indirect.append(span)
            else:
                direct[part.rank, span] = _flat(plain)
        self._read_again(part, direct)
        for span, requests in by_span.items():
            source = self._buffers.get((part.rank, span), direct.get((part.rank, span)))
            if source is not None:
                _copy_out(source, requests)
        for batch in _batches(part, indirect):
            places = {(part.rank, span): torch.empty(part.spans[span].size_bytes, dtype=torch.uint8) for span in batch}
            self._read_again(part, places)
            for span in batch:
                _copy_out(places[part.rank, span], by_span[span])

    def _make(self, part: RankPart, request: Request) -> Any:
        key = part.rank, request.view.span
        if request.is_array:
            return _array_view(self._buffers[key], request.view)
        if self._buffers[key].device != self._device:
            self._buffers[key] = self._buffers[key].to(self._device)
        made = _tensor_view(self._buffers[key], request.view)
        if request.view.is_parameter:
            return torch.nn.Parameter(made, requires_grad=request.view.requires_grad)
        return made.requires_grad_() if request.view.requires_grad else made


def _copy_out(source: torch.Tensor, requests: list[Request]) -> None:
    for request in requests:
        if request.target is None or 0 in request.view.shape:
            continue
        if request.is_array:
            np.copyto(request.target, _array_view(source, request.view))
        elif request.target.data_ptr() != source.data_ptr() or not _is_plain_memory(request):
            request.target.copy_(_tensor_view(source, request.view))


def _batches(part: RankPart, spans: list[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size_bytes = 0
    for span in spans:
        batch.append(span)
        size_bytes += part.spans[span].size_bytes
        if size_bytes >= _COPY_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _is_plain_memory(request: Request) -> bool:
    """Whether the target is exactly the bytes of the span, in this process's memory."""
    target = request.target
    if target is None or request.is_array or request.view.stride is not None:
        return False
    return bool(target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a tensor over the same memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.itemsize,), (1,))


def _memory_of(flat: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def _tensor_view(flat: torch.Tensor, view: View) -> torch.Tensor:
    dtype = torch_dtype(view.dtype)
    stride = _dense_strides(view.shape) if view.stride is None else view.stride
    start = flat.storage_offset() + view.offset_bytes
    if start % dtype.itemsize:  # a template at an address that is odd for this view
        flat, start = flat.clone(), view.offset_bytes
    made = torch.empty(0, dtype=dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), start // dtype.itemsize, view.shape, stride)


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def _array_view(flat: torch.Tensor, view: View) -> np.ndarray[Any, Any]:
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    return flat.cpu().numpy().view(dtype).reshape(view.shape)


def _conflicts(requests: list[tuple[RankPart, Request]]) -> list[str]:
    """Templates that lie over each other in memory, though what is stored for them does not in the same way."""
    placed = []
    for part, request in requests:
        target = request.target
        if isinstance(target, torch.Tensor) and target.is_contiguous() and target.numel():
            start = target.data_ptr()
            # Where the span would start if it were loaded here.
            origin = part.rank, request.view.span, start - request.view.offset_bytes
            placed.append(((str(target.device), start), start + target.numel() * target.itemsize, origin, request.path))
    placed.sort(key=lambda entry: entry[:2])
    faults = []
    last = None
    for entry in placed:
        (device, start), end, origin, path = entry
        if last is not None and device == last[0][0] and start < last[1] and origin != last[2]:
            faults.append(f"{path}: shares memory with {last[3]} in the template, but is stored apart from it")
        if last is None or device != last[0][0] or end > last[1]:
            last = entry
    return faults
