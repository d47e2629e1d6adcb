"""Ranks as threads of one process, and tensors sharded by hand: many layouts in little time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from ckptplan.state import Piece, Resharder, Sharded
from ckptplan.state.boxes import Placement, local_boxes, replica_of

Outcome = TypeVar("Outcome")


class Meeting:
    """Where the threads of one job hand round JSON."""

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.said: list[str] = [""] * world_size


class ThreadRank:
    """The coordinator of one thread."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.num_gathers = rank, world_size, 0
        self._meeting = meeting

    def all_gather(self, value: Any) -> list[Any]:
        self.num_gathers += 1
        self._meeting.said[self.rank] = json.dumps(value)
        self._meeting.barrier.wait()
        said = list(self._meeting.said)
        self._meeting.barrier.wait()
        return [json.loads(text) for text in said]


def on_ranks(world_size: int, work: Callable[[ThreadRank], Outcome]) -> list[Outcome]:
    """What `work` returns on each of so many ranks; raises the first error."""
    meeting = Meeting(world_size)
    outcomes: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ThreadRank(meeting, rank, world_size))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return outcomes


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks, and how a tensor is placed on it."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def world_size(self) -> int:
        return prod(self.mesh)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        place = []
        for size in reversed(self.mesh):
            rank, along = divmod(rank, size)
            place.insert(0, along)
        return tuple(place)

    def local(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank holds, by torch.chunk and torch.cat alone: an oracle that knows nothing of boxes."""
        for size, place, placement in zip(self.mesh, self.coordinate(rank), self.placements, strict=True):
            if placement is not None:
                dim, factor = placement
                full = torch.cat([_chunk(_chunk(full, factor, n, dim), size, place, dim) for n in range(factor)], dim)
        return full.clone()


def _chunk(tensor: torch.Tensor, parts: int, place: int, dim: int) -> torch.Tensor:
    """torch.chunk, with empty tensors where it makes fewer than asked for."""
    if tensor.shape[dim] == 0:
        return tensor
    chunks = torch.chunk(tensor, parts, dim)
    return chunks[place] if place < len(chunks) else tensor.narrow(dim, 0, 0)


class ByHand(Resharder):
    """Tells that plain tensors are the parts of bigger ones; those that it does not know are whole."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], layouts: dict[str, Layout], rank: int) -> None:
        self._shapes, self._layouts, self._rank = shapes, layouts, rank

    def describe(self, path: str, value: torch.Tensor) -> Sharded | None:
        if path not in self._shapes:
            return None
        layout, shape = self._layouts[path], self._shapes[path]
        where = layout.mesh, layout.coordinate(self._rank), layout.placements
        pieces = []
        for box in local_boxes(shape, *where):
            ranges = zip(box.local_offsets, box.sizes, strict=True)
            pieces.append(Piece(box.offsets, value[tuple(slice(start, start + size) for start, size in ranges)]))
        replica, replicas = replica_of(*where)
        note = layout.mesh, tuple("R" if each is None else f"S{each[0]}" for each in layout.placements)
        identity = value.untyped_storage()._cdata, value.storage_offset()
        return Sharded(shape, tuple(pieces), replica, replicas, (), note, identity, value)
