"""From a manifest and templates to values: everything is compared first, then read and checked, then written.

Rules of a template: a tensor is filled in place; dicts and lists are filled in place, key by key, and so filter; tuples
and plain values are replaced; `None` takes everything; an object takes its state through `load_state_dict`, a module
directly into its tensors where that is all that loading means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptplan.errors import DamagedCheckpointError
from ckptplan.state import reading
from ckptplan.state.manifest import Manifest, RankPart, StoredItem, View
from ckptplan.state.memory import available_bytes
from ckptplan.state.merging import Finish, Request, merge
from ckptplan.state.parallel import in_batches
from ckptplan.state.resharder import DefaultResharder, Piece, Resharder
from ckptplan.state.slicing import Slices
from ckptplan.state.storage import Storage
from ckptplan.state.stored import ShardedTensors, StoredTensor, dense_strides
from ckptplan.state.values import has_state, numpy_dtype, torch_dtype
from ckptplan.units import MIB

_COPY_BATCH_BYTES = 64 * MIB  # read before they are copied to another device, or into strided memory

SpanKey = tuple[int, int]
"""Rank and number of a span."""


@dataclass
class _Item:
    name: str
    part: RankPart
    requests: list[Request]  # of whole tensors, into whole tensors
    finish: Finish


@dataclass
class _Redistributed:
    """An item of which every rank saved its own, and another number of ranks wants theirs."""

    template: Any
    resharder: Resharder
    items: list[_Item]  # of each rank
    value: Any = None

    def redistribute(self, rank: int, world_size: int) -> None:
        """Works out this rank's value; changes nothing."""
        self.value = self.resharder.redistribute([item.finish() for item in self.items], rank, world_size)

    def finish(self) -> Any:
        """Puts it in place: an object takes it, anything else is replaced by it."""
        if not has_state(self.template):
            return self.value
        self.template.load_state_dict(self.value)
        return self.template


class Load:
    """One load: `want` for each item, look at `faults`, `check`, `redistribute`, then `finish`."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifest: Manifest,
        *,
        rank: int,
        world_size: int,
        strict: bool,
        device: torch.device,
    ) -> None:
        self._storage, self._folder, self._manifest = storage, folder, manifest
        self._rank, self._world_size, self._strict, self._device = rank, world_size, strict, device
        self._items: list[_Item] = []
        self._redistributed: dict[str, _Redistributed] = {}
        self._sharded = ShardedTensors(manifest)
        self._sliced: list[tuple[Request, StoredTensor]] = []
        self._slices = Slices(storage, folder)
        self._news: dict[Any, torch.Tensor] = {}
        self._buffers: dict[SpanKey, torch.Tensor] = {}
        self.faults: list[str] = []
        self.notes: list[str] = []  # for the log

    def want(self, name: str, template: Any, resharder: Resharder | None) -> None:
        """Compares one item with its template; what does not fit adds to `faults`."""
        stored = next((part.items[name] for part in self._manifest.ranks if name in part.items), None)
        ranks = self._manifest.world_size
        if stored is not None and stored.scope == "per_rank" and ranks != self._world_size and resharder is not None:
            self._want_of_all_ranks(name, template, resharder)
            return
        found = self._find(name)
        if found is not None:
            self._items.append(self._want(name, *found, template, resharder))

    def _want(self, name: str, part: RankPart, item: StoredItem, template: Any, resharder: Resharder | None) -> _Item:
        chosen = resharder or DefaultResharder()
        merged = merge(
            item.tree, template, name, part.tensors, strict=self._strict, resharder=chosen, sharded=self._sharded
        )
        self.faults += merged.faults
        whole = []
        for request in merged.requests:
            if isinstance(request.stored, StoredTensor):
                self._sliced.append((request, request.stored))
            elif request.pieces is not None:
                self._sliced.append((request, StoredTensor.plain(part, request.stored)))
            else:
                whole.append(request)
        return _Item(name, part, whole, merged.finish)

    def _want_of_all_ranks(self, name: str, template: Any, resharder: Resharder) -> None:
        items = []
        for part in self._manifest.ranks:
            item = part.items.get(name)
            if item is None:
                self.faults.append(f"{name}: rank {part.rank} has saved none, but others have")
                return
            items.append(self._want(name, part, item, None, resharder))
        self._redistributed[name] = _Redistributed(template, resharder, items)

    def compare_memory(self) -> None:
        """Adds faults for templates that share memory where what is stored does not."""
        whole = [(item.part, request) for item in self._all_items() for request in item.requests]
        self.faults += _conflicts(whole, self._sliced)

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
            keeps = self._storage.is_far and _fits_in_memory(sum(part.spans[span].size_bytes for span in spans))
            for span in spans:
                if keeps or any(request.target is None for request in by_span[part.rank, span]):
                    self._buffers[part.rank, span] = torch.empty(part.spans[span].size_bytes, dtype=torch.uint8)
            faults += self._read(part, spans, self._buffers, check=True)
        for request, stored in self._sliced:
            pieces = request.pieces
            if pieces is None:
                target = request.target if request.target is not None else self._new(request, stored)
                pieces = [Piece((0,) * len(stored.shape), target)]
            self._slices.add(stored, pieces)
        faults += self._slices.check()
        return faults

    def finish(self) -> dict[str, Any]:
        """Writes into the templates and returns the values by item; only after `check` found nothing."""
        with torch.no_grad():
            by_span = self._by_span()
            for part in self._manifest.ranks:
                self._fill_templates(
                    part, {span: found for (rank, span), found in by_span.items() if rank == part.rank}
                )
            self._fill_slices()
            for item in self._items:
                self._make_values(item)
        loaded = {item.name: item.finish() for item in self._items}
        return loaded | {name: item.finish() for name, item in self._redistributed.items()}

    def _all_items(self) -> list[_Item]:
        return [*self._items, *(item for each in self._redistributed.values() for item in each.items)]

    def _new(self, request: Request, stored: StoredTensor) -> torch.Tensor:
        """Memory for a tensor that no template has; one for all names of what is stored once."""
        key = stored.shape, stored.dtype, stored.same_bytes()
        if key not in self._news:
            self._news[key] = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device=self._device)
        made = self._news[key]
        request.value = _as_stored(made, request.is_parameter, request.requires_grad)
        return made

    def redistribute(self) -> list[str]:
        """Works out what this rank gets of items that other ranks saved; after `check`. What stands in the way."""
        faults = []
        for name, each in self._redistributed.items():
            for item in each.items:
                self._make_values(item)
            try:
                each.redistribute(self._rank, self._world_size)
            except Exception as error:  # of somebody's own code: told on all ranks, and nothing is loaded
                faults.append(f"{name}: {error}" if isinstance(error, ValueError) else f"{name}: {error!r}")
        return faults

    def _fill_slices(self) -> None:
        self._raise_if_lost(self._slices.fill())

    def _make_values(self, item: _Item) -> None:
        for request in item.requests:
            if request.target is None:
                request.value = self._make(item.part, request)

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
            saved = self._manifest.world_size
            if self._world_size < saved:
                left = f"{self._world_size}" if saved == self._world_size + 1 else f"{self._world_size} to {saved - 1}"
                self.notes.append(f"{name} was saved per rank by {saved} ranks: what rank {left} saved is not loaded")
        return part, item

    def _by_span(self) -> dict[SpanKey, list[Request]]:
        by_span: dict[SpanKey, list[Request]] = {}
        for item in self._all_items():
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
        self._raise_if_lost(self._read(part, spans, places, check=False))

    def _raise_if_lost(self, faults: list[str]) -> None:
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
        for batch in in_batches(indirect, lambda span: part.spans[span].size_bytes, _COPY_BATCH_BYTES):
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
        return _as_stored(made, request.is_parameter, request.requires_grad)


def _as_stored(made: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_() if requires_grad else made


def _fits_in_memory(size_bytes: int) -> bool:
    """Whether so much can be kept from the check until it is written into the templates, and not read twice."""
    available = available_bytes()
    return available is None or 2 * size_bytes <= available


def _copy_out(source: torch.Tensor, requests: list[Request]) -> None:
    for request in requests:
        if request.target is None or 0 in request.view.shape:
            continue
        if request.is_array:
            np.copyto(request.target, _array_view(source, request.view))
        elif request.target.data_ptr() != source.data_ptr() or not _is_plain_memory(request):
            request.target.copy_(_tensor_view(source, request.view))


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
    stride = dense_strides(view.shape) if view.stride is None else view.stride
    start = flat.storage_offset() + view.offset_bytes
    if start % dtype.itemsize:  # a template at an address that is odd for this view
        flat, start = flat.clone(), view.offset_bytes
    made = torch.empty(0, dtype=dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), start // dtype.itemsize, view.shape, stride)


def _array_view(flat: torch.Tensor, view: View) -> np.ndarray[Any, Any]:
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    return flat.cpu().numpy().view(dtype).reshape(view.shape)


def _conflicts(whole: list[tuple[RankPart, Request]], sliced: list[tuple[Request, StoredTensor]]) -> list[str]:
    """Templates that lie over each other in memory, though what is stored for them does not in the same way."""
    placed: list[tuple[tuple[str, int], int, Any, str]] = []

    def place(target: torch.Tensor, origin: Any, path: str) -> None:
        start = target.data_ptr()
        placed.append(((str(target.device), start), start + target.numel() * target.itemsize, origin, path))

    for part, request in whole:
        target = request.target
        if isinstance(target, torch.Tensor) and target.is_contiguous() and target.numel():
            # Where the span would start if it were loaded here.
            place(target, (part.rank, request.view.span, target.data_ptr() - request.view.offset_bytes), request.path)
    for request, stored in sliced:
        pieces = request.pieces
        if pieces is None:
            pieces = [Piece((), request.target)] if request.target is not None else []
        for offsets, tensor in pieces:
            if tensor.is_contiguous() and tensor.numel():
                place(tensor, (stored.same_bytes(), stored.shape, offsets), request.path)
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
