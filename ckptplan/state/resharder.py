"""How sharded things are described, so that they can be saved in parts and loaded onto another layout.

`DefaultResharder` knows DTensors, and every item has it without asking. A `Resharder` of one's own, given by
`ItemSpec(resharder=...)`, describes other kinds of sharded tensors, or tells what a rank gets of a `per_rank` item that
was saved by another number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptplan.state.boxes import Placement, local_boxes, local_shape, replica_of


class Piece(NamedTuple):
    """A part of a sharded tensor that this rank holds: `tensor` (its memory) begins at `offsets` of the whole."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Sharded:
    """What a rank knows of a tensor that several ranks hold together.

    Attributes:
        shape: of the whole tensor.
        pieces: what this rank holds of it, in memory; none where it holds nothing.
        replica: which one of `replicas` ranks this is that hold the same pieces. Each writes a part of them.
        holders: the ranks that hold the whole tensor between them; () for all. Other ranks may hold it once more
            between them: then they are replicas too.
        note: shape of the mesh and placements, for people and for optimizer states without a template.
        identity: equal for two names of one tensor, as long as `memory` is kept alive.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica: int = 0
    replicas: int = 1
    holders: tuple[int, ...] = ()
    note: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
    identity: Any = None
    memory: torch.Tensor | None = None


class Resharder:
    """What an item that is sharded in a way of its own must know. A subclass overrides what it needs."""

    def describe(self, path: str, value: torch.Tensor) -> Sharded | None:
        """How a tensor of the item, live or a template, is sharded; None: it is not, each rank holds all of it.

        Called on every rank for the same names. Raises ValueError for what cannot be saved or loaded.
        """
        return describe_dtensor(value)

    def redistribute(self, saved: Sequence[Any], rank: int, world_size: int) -> Any:
        """What this rank gets of a `per_rank` item that was saved by another number of ranks, `len(saved)`.

        Args:
            saved: the value of each rank, by rank. Nothing has been changed yet when this is called: an error here
                means that nothing is loaded on any rank.
        """
        raise ValueError(
            f"saved per rank by {len(saved)} ranks and loaded by {world_size}: what rank {rank} gets is not known; "
            "leave it out of into=, or give its ItemSpec a resharder that tells"
        )


class DefaultResharder(Resharder):
    """DTensors of any mesh and placement; per-rank items go back to as many ranks as they came from."""


def is_dtensor(value: Any) -> bool:
    """Whether it is a DTensor; loads nothing to find out."""
    if type(value) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: of a DTensor what this rank holds of it."""
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        local = value.to_local()  # type: ignore[attr-defined]  # a DTensor's, whose module may be missing
    # The result of a collective that may be under way.
    return local.wait() if hasattr(local, "wait") else local


def describe_dtensor(value: torch.Tensor) -> Sharded | None:
    """How a DTensor is sharded; None for any other tensor. Raises ValueError for what has no definite values."""
    if not is_dtensor(value):
        return None
    dtensor: Any = value
    placements = [_plain(placement) for placement in dtensor.placements]
    mesh, shape, local = dtensor.device_mesh, tuple(value.shape), local_of(value)
    if type(local) is not torch.Tensor:
        raise ValueError(f"is a DTensor of {type(local).__name__}s; only those of plain tensors are saved")
    if local.is_meta:
        raise ValueError("is on the meta device and has no values")
    coordinate, mesh_shape = mesh.get_coordinate(), tuple(mesh.shape)
    note = mesh_shape, tuple(_text(placement) for placement in placements)
    holders = tuple(mesh.mesh.flatten().tolist())
    identity = local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride()
    if coordinate is None:  # a rank outside of the mesh
        return Sharded(shape, (), 0, 1, holders, note, identity, local)
    expected = local_shape(shape, mesh_shape, coordinate, placements)
    if tuple(local.shape) != expected:
        raise ValueError(
            f"is a DTensor of {list(shape)} with the placements {', '.join(note[1])} on a mesh of {list(mesh_shape)}, "
            f"so this rank should hold {list(expected)} of it, but it holds {list(local.shape)}"
        )
    pieces = []
    for box in local_boxes(shape, mesh_shape, coordinate, placements):
        part = local
        for dim, (start, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
            part = part.narrow(dim, start, size) if size != part.shape[dim] else part
        pieces.append(Piece(box.offsets, part))
    replica, replicas = replica_of(mesh_shape, coordinate, placements)
    return Sharded(shape, tuple(pieces), replica, replicas, holders, note, identity, local)


def _plain(placement: Any) -> Placement:
    if placement.is_partial():
        raise ValueError(f"is a DTensor whose values are not summed up yet ({placement}); redistribute it first")
    if placement.is_replicate():
        return None
    return int(placement.dim), int(getattr(placement, "split_factor", 1))


def _text(placement: Placement) -> str:
    if placement is None:
        return "R"
    dim, factor = placement
    return f"S{dim}" if factor == 1 else f"S{dim}/{factor}"


def empty_like(value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, note: tuple[str, ...]) -> torch.Tensor:
    """New memory for a tensor of that shape that lies as the DTensor `value` does, for an optimizer state.

    A shape of its own is placed as it was when it was saved (`note`) where the mesh has as many dimensions, else
    replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dtensor: Any = value
    mesh = dtensor.device_mesh
    placements = list(dtensor.placements)
    if shape != tuple(value.shape):
        placements = [Replicate()] * mesh.ndim
        if len(note) == mesh.ndim and all("/" not in text for text in note):
            placements = [Replicate() if text == "R" else Shard(int(text[1:])) for text in note]
            if any(isinstance(placement, Shard) and placement.dim >= len(shape) for placement in placements):
                placements = [Replicate()] * mesh.ndim
    coordinate = mesh.get_coordinate()
    plain = [_plain(placement) for placement in placements]
    own = (0,) if coordinate is None else local_shape(shape, tuple(mesh.shape), coordinate, plain)
    local = torch.empty(own, dtype=dtype, device=local_of(value).device)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
