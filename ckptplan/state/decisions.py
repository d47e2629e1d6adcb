"""What rank 0 decides about one save: its attempt's name, its place in the order, what goes away afterwards."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import torch

from ckptplan.errors import DuplicateCheckpointError
from ckptplan.state.folder import CheckpointInfo, Folder, Retention
from ckptplan.state.ids import ATTEMPT_PREFIX, TAKEN, step_of
from ckptplan.state.manifest import FORMAT, VERSION
from ckptplan.state.saving import Job
from ckptplan.state.snapshot import Snapshot


def decide(
    name: str,
    folder: Folder,
    *,
    resumed: CheckpointInfo | None,
    pending: list[Job],
    retention: Retention,
    metrics: Mapping[str, float],
    world_size: int,
) -> dict[str, Any]:
    """What rank 0 decides for all: the attempt's name, the place in the order, what goes away afterwards."""
    unfinished = [job.info for job in pending]
    infos = folder.infos()
    newer = _newer_than(infos, resumed)
    kept = [info for info in infos if info not in newer]
    taken = {info.checkpoint_id for info in (*kept, *unfinished)}
    if name in taken or (folder.exists(name) and name not in {info.checkpoint_id for info in newer}):
        raise DuplicateCheckpointError(f"checkpoint {name!r} {TAKEN}")
    sequence = 1 + max((info.sequence or 0 for info in (*infos, *unfinished)), default=0)
    attempt = f"{ATTEMPT_PREFIX}{name}-{os.urandom(8).hex()}"
    head = {
        "format": FORMAT,
        "version": VERSION,
        "id": name,
        "attempt": attempt,
        "sequence": sequence,
        "time_unix_s": time.time(),
        "world_size": world_size,
        "resumed_from": resumed.checkpoint_id if resumed is not None else None,
        "libraries": {"torch": torch.__version__, "python": platform.python_version()},
        "metrics": {key: float(value).hex() for key, value in metrics.items()},
    }
    good = [info for info in kept if not info.damage]
    new = CheckpointInfo(name, sequence, step_of(name), 0.0, 0, world_size, (), dict(metrics))
    pending_attempts = [job.attempt.rpartition("-")[2] for job in pending]  # unique; part of every name that they use
    return {
        "id": name,
        "attempt": attempt,
        "head": head,
        "supersede": [*(info.checkpoint_id for info in newer), *_half_deleted(name, folder)],
        "delete": retention.needless([*good, new]),
        "clean_up": [left for left in folder.left_overs() if not any(part in left for part in pending_attempts)],
    }


def _half_deleted(name: str, folder: Folder) -> list[str]:
    """The id, where a folder or file without a manifest has it: no checkpoint, and in the way of this one."""
    location = folder.storage.local_path
    in_the_way = location is not None and os.path.lexists(location / name) and not folder.exists(name)
    return [name] if in_the_way else []


def _newer_than(infos: list[CheckpointInfo], resumed: CheckpointInfo | None) -> list[CheckpointInfo]:
    """Those saved after the one that this run has gone back to; the ones too damaged to be placed count as newer."""
    if resumed is None or resumed.sequence is None:
        return []
    return [info for info in infos if info.sequence is None or info.sequence > resumed.sequence]


def info_of(head: Mapping[str, Any], metrics: Mapping[str, float], snapshot: Snapshot) -> CheckpointInfo:
    """The checkpoint as this rank will see it; `size_bytes` is of this rank's files."""
    name = head["id"]
    return CheckpointInfo(
        checkpoint_id=name,
        sequence=head["sequence"],
        step=step_of(name),
        time_unix_s=head["time_unix_s"],
        size_bytes=snapshot.total_bytes,
        world_size=head["world_size"],
        items=snapshot.names,
        metrics=dict(metrics),
    )
