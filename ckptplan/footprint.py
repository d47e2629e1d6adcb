"""Who takes the memory of a device during training: rows that add up to all of it.

A device has two high moments in a step: the activation peak, and the optimizer's own step, which runs when activations
are gone and makes temporaries of its own. Memory is planned for the first and checked for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptplan.devices import Device
from ckptplan.memory import LiveStorages
from ckptplan.optim import meta_twin, optimizer_state_bytes
from ckptplan.trees import distinct_storages, sharded_bytes, tensors_in

# Share of what is free that budget=auto leaves alone: what the allocator cannot use between blocks of memory in use
# (fragmentation), and what its statistics do not show.
FREE_SHARE_LEFT = 0.10
# The same of a device that is not there, of all its memory.
ABSENT_SHARE_LEFT = 0.04


class Row(NamedTuple):
    """Bytes under a name; ``note`` says where the figure is from."""

    name: str
    size_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Room:
    """A device's memory, and what of it is gone whatever is trained.

    Attributes:
        taken: other processes, libraries, margins.
    """

    title: str
    total_bytes: int
    taken: tuple[Row, ...]

    @property
    def left_bytes(self) -> int:
        """For weights, gradients, optimizer state, batch and activations."""
        return max(0, self.total_bytes - sum(row.size_bytes for row in self.taken))


def room_of_absent(device: Device) -> Room:
    """By the table of devices, for a process that has the device for itself."""
    margin = Row(
        "margin", int(device.memory_bytes * ABSENT_SHARE_LEFT), f"fragmentation, {ABSENT_SHARE_LEFT:.0%} of all"
    )
    context = Row("CUDA context", device.context_bytes, "outside PyTorch's allocator; stated, not measured")
    workspaces = Row("cuBLAS workspaces", device.workspace_bytes, "allocated once and kept")
    return Room(device.title, device.memory_bytes, (context, workspaces, margin))


def room_of(device: torch.device, own_bytes: int) -> Room:
    """What ``device`` has now. ``own_bytes``: what this process holds there already of what is to be counted."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += max(0, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))  # ours to use again
        title, others = torch.cuda.get_device_name(device), "other processes and CUDA context"
    else:
        free, total = available_host_bytes(), _host_bytes()
        title, others = "host memory", "other processes and this program"
    margin = Row("margin", int(free * FREE_SHARE_LEFT), f"{FREE_SHARE_LEFT:.0%} of what is free")
    return Room(title, total, (Row(others, max(0, total - free - own_bytes), "measured now"), margin))


def available_host_bytes() -> int:
    """Memory of the machine that a process can still get without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


# What a training step needs beside activations ---------------------------------------------------------------------


@dataclass(frozen=True)
class StaticBytes:
    """What stands on the device during a step beside activations; None: not known.

    Attributes:
        optimizer_bytes: its state from the first step on.
        optimizer_step_bytes: temporaries of its own step, when no activations stand.
        gathered_bytes: weights and gradients that a sharded model holds whole for a while.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int | None
    batch_bytes: int = 0
    optimizer_step_bytes: int | None = 0
    gathered_bytes: int = 0
    shards: int = 1

    @property
    def total_bytes(self) -> int | None:
        if self.optimizer_bytes is None:
            return None
        held = self.weights_bytes + self.gradients_bytes + self.batch_bytes + self.gathered_bytes
        return held + self.optimizer_bytes


def static_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any = (), num_shards: int = 1
) -> StaticBytes:
    """Parameters and buffers, gradients, the batch, and the optimizer state that the first step will bring.

    ``num_shards``: over so many ranks FSDP2 shares parameters, gradients and state; the largest share is counted.
    """
    buffers = {id(t): t for t in model.buffers()}
    return StaticBytes(
        weights_bytes=sum(sharded_bytes(p, num_shards) for p in model.parameters())
        + sum(t.numel() * t.element_size() for t in buffers.values()),
        gradients_bytes=sum(sharded_bytes(p, num_shards) for p in model.parameters() if p.requires_grad),
        optimizer_bytes=optimizer_state_bytes(optimizer, num_shards),
        batch_bytes=sum(t.untyped_storage().nbytes() for t in distinct_storages(tensors_in(batch))),
    )


def optimizer_step_bytes(optimizer: torch.optim.Optimizer, *, on_cuda: bool) -> int | None:
    """Most bytes of temporaries alive in one step, found on parameters without memory; None where that cannot run.

    On CUDA PyTorch's optimizers go over all parameters at once (``foreach``) unless told otherwise, so that AdamW's
    denominators exist for all of them at the same time; on a CPU one after the other.
    """
    try:
        twin = meta_twin(optimizer, foreach=on_cuda)
        twin.step()  # makes the state
        with LiveStorages() as watch:
            twin.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return 0 if is_fused else watch.peak_bytes


def sharded(static: StaticBytes, model: nn.Module, blocks: Sequence[nn.Module], shards: int) -> StaticBytes:
    """One process's share under FSDP: everything divided by ``shards``, and what is whole for a while.

    Whole at a time: what lies outside the blocks (the root's own weights stay gathered until its backward), the block
    that runs and the one fetched ahead, and the gradients of one block until they are scattered.
    """
    of_blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    of_all = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(of_blocks, default=0)
    gathered = max(0, of_all - sum(of_blocks)) + 3 * largest
    optimizer, step = static.optimizer_bytes, static.optimizer_step_bytes
    return replace(
        static,
        weights_bytes=-(-static.weights_bytes // shards),
        gradients_bytes=-(-static.gradients_bytes // shards),
        optimizer_bytes=None if optimizer is None else -(-optimizer // shards),
        optimizer_step_bytes=None if step is None else -(-step // shards),
        gathered_bytes=gathered,
        shards=shards,
    )


def footprint(room: Room, static: StaticBytes, peak_bytes: int, retained_bytes: int, peak_at: str) -> tuple[Row, ...]:
    """All of a device's memory at a plan's activation peak; the rows add up to ``room.total_bytes``.

    The last row is what is left; negative: so much is missing.

    Args:
        retained_bytes: of the peak, what blocks that ran before hold for their backward.
        peak_at: where the peak is, as in ``CheckpointPlan.predicted_peak_at``.
    """
    of = f"1 of {static.shards} shards" if static.shards > 1 else ""
    rows = [
        *room.taken,
        Row("weights", static.weights_bytes, of),
        Row("gradients", static.gradients_bytes, of or "all of them, as from the second micro-batch on"),
        Row("optimizer state", static.optimizer_bytes or 0, of or "from its first step on"),
        Row("batch", static.batch_bytes),
        Row("activations kept", retained_bytes, "by blocks, until their backward"),
        Row("working memory", peak_bytes - retained_bytes, f"{peak_at}: its activations, casts and workspaces"),
    ]
    if static.gathered_bytes:
        rows.append(Row("gathered", static.gathered_bytes, "outside blocks, 2 blocks' weights, 1 block's gradients"))
    rows.append(Row("left", room.total_bytes - sum(row.size_bytes for row in rows)))
    return tuple(rows)
