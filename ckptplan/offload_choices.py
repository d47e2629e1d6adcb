"""What a kind of block costs with its activations on the host: measured like everything else."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptplan.choices import Measuring
from ckptplan.costs import OffloadOption, StageCost
from ckptplan.kinds import Kind, block_forward, settled_bytes, with_loss
from ckptplan.observe import CHANGES_INPUT
from ckptplan.offload import Mover, run_moved
from ckptplan.profiles import BlockProfile
from ckptplan.stages import StageForward, time_stage, weight_copies


@dataclass
class OffloadChoice:
    """One kind of block on the host; ``step_ms``: forward and backward of each trial, shared by kinds alike in time."""

    kind: Kind
    cost: StageCost
    host_bytes: int
    step_ms: list[float] = field(default_factory=list)


def measure_offloads(kinds: dict[str, Kind], time_keys: dict[str, str], how: Measuring) -> dict[str, OffloadChoice]:
    """Each kind through which a gradient flows and that saves anything which can be moved, by its key."""
    found: dict[str, OffloadChoice] = {}
    shared: dict[str, list[float]] = {}
    for key, kind in kinds.items():
        if not kind.differentiable or kind.call.first.graph_kept_in is not None:
            continue
        if (kind.exclusion_reason or "").startswith(CHANGES_INPUT):  # whose memory it is depends on who else holds it
            continue
        host: list[int] = []
        forward = offload_forward(kind, how.device, host)
        cost = settled_bytes(forward, how.device, how.memory)
        if host[-1]:
            copied_bytes = weight_copies(forward).saved_bytes if kind.copied_weights else 0
            cost = with_loss(replace(cost, weight_copies_bytes=copied_bytes), how.held_bytes)
            found[key] = OffloadChoice(kind, cost, host[-1], shared.setdefault(time_keys[key], []))
    return found


def offload_forward(kind: Kind, device: torch.device, host: list[int] | None = None) -> StageForward:
    """The kind's block with its activations on the host, as a stage; each run adds its bytes there to ``host``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        mover = Mover()
        output = run_moved(mover, kind.module, kind.module, args, kwargs)
        if host is not None:
            host.append(mover.host_bytes)
        return output

    return block_forward(kind, device, None, call)


def time_offloads(
    choices: dict[str, OffloadChoice], device: torch.device, synchronize: Callable[[], None], *, is_counted: bool
) -> None:
    """One trial of each that has times of its own."""
    done: set[int] = set()
    for choice in choices.values():
        if id(choice.step_ms) not in done:
            done.add(id(choice.step_ms))
            forward_ms, backward_ms = time_stage(offload_forward(choice.kind, device), synchronize)
            if is_counted:
                choice.step_ms.append(forward_ms + backward_ms)


def with_offload(block: BlockProfile, choice: OffloadChoice | None) -> BlockProfile:
    """The block with what it costs on the host, beside its forward and backward as it is."""
    if choice is None:
        return block
    added_ms = None
    if choice.step_ms and block.forward_time_ms is not None and block.backward_time_ms is not None:
        added_ms = max(0.0, statistics.median(choice.step_ms) - block.forward_time_ms - block.backward_time_ms)
    return replace(block, offload=(OffloadOption(choice.cost, choice.host_bytes, added_ms),))
