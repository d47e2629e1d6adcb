"""One item of a checkpoint as a Hugging Face style set of safetensors files: shards of a bounded size and an index.

Needs no torch: the bytes are copied, checked against their checksums.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckptplan.errors import CheckpointNotFoundError, DamagedCheckpointError, StateError
from ckptplan.state import reading
from ckptplan.state.disk import fsync_folder, new_file
from ckptplan.state.folder import read_manifest
from ckptplan.state.manifest import RankPart, View, dtype_bytes, format_of
from ckptplan.state.storage import Storage
from ckptplan.state.stored import ShardedTensors, StoredTensor, stored_tensor
from ckptplan.state.tree import BadValueError, leaves_of

DEFAULT_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Export:
    """What was written: the files (the index last, where there is one), and the leaves that are no tensors."""

    files: tuple[str, ...]
    skipped: tuple[str, ...]


def export_item(
    storage: Storage, checkpoint_id: str, item: str, target: Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Export:
    """Writes the tensors of an item into the new or empty folder `target`; each name gets its own bytes, tied or not.

    Raises StateError for names that collide, DamagedCheckpointError, CheckpointNotFoundError.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes!r}: expected at least 1")
    manifest = read_manifest(storage, checkpoint_id)
    part = manifest.ranks[0]
    if item not in part.items:
        raise CheckpointNotFoundError(f"{checkpoint_id!r} has no item {item!r}; it has {', '.join(part.items)}")
    tensors, skipped = _tensors(part, item, ShardedTensors(manifest))
    if not tensors:
        raise StateError(f"item {item!r} of {checkpoint_id!r} holds no tensors; its items: {', '.join(part.items)}")
    if target.exists() and any(target.iterdir()):
        raise StateError(f"{target} is not empty")
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        names = _write_set(storage, checkpoint_id, tensors, target, shard_bytes)
    except BaseException:  # half a set would look like a whole one
        for path in target.iterdir():
            path.unlink()
        if is_new:
            target.rmdir()
        raise
    return Export(tuple(names), tuple(skipped))


def _write_set(
    storage: Storage, checkpoint_id: str, tensors: dict[str, StoredTensor], target: Path, shard_bytes: int
) -> list[str]:
    """Writes the files into the empty folder `target`; their names."""
    shards = _shards(tensors, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(storage, checkpoint_id, shard, target / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(_size(tensor) for tensor in tensors.values())
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        with new_file(str(target / _INDEX)) as descriptor, open(descriptor, "w", closefd=False) as file:
            file.write(index)
        names.append(_INDEX)
    fsync_folder(str(target))
    return names


def _tensors(part: RankPart, item: str, sharded: ShardedTensors) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors by dotted name, and the names of what is no tensor."""
    tensors: dict[str, StoredTensor] = {}
    skipped = []
    try:
        for path, node in leaves_of(part.items[item].tree, ""):
            name = path or item
            tensor = stored_tensor(part, node, sharded, name)
            if tensor is None or (isinstance(node, dict) and "array" in node):
                skipped.append(path)
                continue
            if name == "__metadata__":
                raise BadValueError(f"{name}: cannot be exported")
            if name in tensors:
                raise StateError(f"two tensors of {item!r} would have the name {name!r} in the export")
            tensors[name] = tensor
    except BadValueError as error:
        raise StateError(f"item {item!r} is not what this version writes: {error}") from None
    return tensors, skipped


def _shards(tensors: dict[str, StoredTensor], shard_bytes: int) -> list[dict[str, StoredTensor]]:
    shards: list[dict[str, StoredTensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + _size(tensor) > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += _size(tensor)
    return shards


def _size(view: View | StoredTensor) -> int:
    return prod(view.shape) * dtype_bytes(view.dtype)


def _write_shard(storage: Storage, folder: str, shard: dict[str, StoredTensor], path: Path) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # Wider elements first: aligned without holes, which the format does not allow.
    ordered = sorted(shard, key=lambda name: -dtype_bytes(shard[name].dtype))
    for name in ordered:
        dtype, shape = format_of(shard[name].dtype, shard[name].shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, position + _size(shard[name]))}
        position += _size(shard[name])
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with new_file(str(path)) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in ordered:
            file.write(dense_bytes(storage, folder, shard[name]))


def dense_bytes(storage: Storage, folder: str, tensor: StoredTensor) -> memoryview:
    """The bytes of a whole tensor, read, checked and put together. Raises DamagedCheckpointError."""
    if len(tensor.parts) == 1 and tensor.parts[0].view.shape == tensor.shape:
        return _dense_part(storage, folder, tensor.parts[0].part, tensor.parts[0].view)
    item_bytes = dtype_bytes(tensor.dtype)
    whole = np.empty((*tensor.shape, item_bytes), np.uint8)
    for part, view, offsets in tensor.parts:
        bytes_of_part = np.frombuffer(_dense_part(storage, folder, part, view), np.uint8)
        ranges = zip(offsets, view.shape, strict=True)
        box = tuple(slice(start, start + size) for start, size in ranges)
        whole[box] = bytes_of_part.reshape(*view.shape, item_bytes)
    return memoryview(whole.tobytes())


def _dense_part(storage: Storage, folder: str, part: RankPart, view: View) -> memoryview:
    buffer = memoryview(bytearray(part.spans[view.span].size_bytes))
    faults = reading.read_spans(storage, folder, part, [view.span], target=lambda span: buffer)
    if faults:
        raise DamagedCheckpointError(f"checkpoint {folder!r} is damaged", faults, checkpoint_id=folder)
    if view.stride is None or _size(view) == 0:
        return buffer[: _size(view)]
    item_bytes = dtype_bytes(view.dtype)
    flat = np.frombuffer(buffer, np.uint8)[view.offset_bytes :]
    strides = [step * item_bytes for step in view.stride] + [1]
    strided = np.lib.stride_tricks.as_strided(flat, [*view.shape, item_bytes], strides, writeable=False)
    return memoryview(strided.tobytes())
