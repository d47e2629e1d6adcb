"""How the ranks of one job agree: the seam for launchers other than torch.distributed.

Everything that passes is JSON, and every call is made by the trainer's thread, in the same order on all ranks. The
writers agree among themselves through files in the attempt's folder.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Coordinator(Protocol):
    """What the state engine needs from a launcher."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes save and load together."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value (JSON) of every rank, by rank; a barrier as well."""


class OneProcess:
    """A job of one process."""

    rank = 0
    world_size = 1

    def all_gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]


class TorchDistributed:
    """The default process group (or `group`) of torch.distributed, with any backend."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Size of the group."""
        return dist.get_world_size(self._group)

    def all_gather(self, value: Any) -> list[Any]:
        """By two collectives: the lengths, then the bytes."""
        # nccl moves memory of the device only.
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: mine.numel()] = mine
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=self._group)
        return [json.loads(bytes(part[: int(size)].cpu().tolist())) for part, size in zip(parts, sizes, strict=True)]


def current_coordinator() -> Coordinator:
    """That of torch.distributed if it has been set up by now, else one process.

    Asked at every save and load: a manager that was made before `init_process_group` must not think it is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed()
    return OneProcess()
