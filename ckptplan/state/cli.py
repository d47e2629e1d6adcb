"""The command line: `python -m ckptplan.state ls|verify|show|diff|rm|export LOCATION ...`. Needs no torch.

Exit code 0: done; 1: damage or a difference was found; 2: it could not be done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptplan.errors import CheckpointNotFoundError, StateError
from ckptplan.state.export import DEFAULT_SHARD_BYTES, dense_bytes, export_item
from ckptplan.state.folder import Folder, read_manifest
from ckptplan.state.ids import check_id
from ckptplan.state.lock import FolderLock
from ckptplan.state.manifest import Manifest, RankPart
from ckptplan.state.storage import StorageConfig, delete_checkpoint
from ckptplan.state.stored import ShardedTensors, StoredTensor, stored_tensor
from ckptplan.state.tree import BadValueError, Json, leaves_of
from ckptplan.units import format_bytes, parse_bytes

_LOCK_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except BrokenPipeError:  # `| head -1`: whoever reads it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes to at the end
        return 0
    except (StateError, ValueError, OSError, ImportError) as error:  # the last: fsspec lacks a package for the URL
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckptplan.state", description="Looks after checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="ls|verify|show|diff|rm|export")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("location", help="folder or URL of the checkpoints")
        added.set_defaults(run=run)
        return added

    listing = command("ls", _ls, "Lists the checkpoints in the order of saving.")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    verify = command("verify", _verify, "Reads everything and tells what is wrong; exit code 1 if anything is.")
    verify.add_argument("ids", nargs="*", help="default: all")
    show = command("show", _show, "Shows what a checkpoint holds.")
    show.add_argument("id", nargs="?", default="latest")
    diff = command("diff", _diff, "Compares two checkpoints; exit code 1 if they differ.")
    diff.add_argument("first")
    diff.add_argument("second")
    remove = command("rm", _rm, "Deletes checkpoints.")
    remove.add_argument("ids", nargs="+")
    export = command("export", _export, "Writes one item as a Hugging Face style safetensors set.")
    export.add_argument("id")
    export.add_argument("target", type=Path, help="a new folder")
    export.add_argument("--item", default="model", help="default: model")
    export.add_argument("--shard-size", default=str(DEFAULT_SHARD_BYTES), help='such as "5GB"')
    return parser


def _open(parsed: argparse.Namespace) -> Folder:
    return Folder(StorageConfig(parsed.location).open())


def _id(folder: Folder, name: str) -> str:
    return folder.latest().checkpoint_id if name == "latest" else check_id(name)


def _ls(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    infos = folder.infos()
    if not infos:
        _require_states(folder, parsed.location)
    if parsed.json:
        for info in infos:
            print(json.dumps(asdict(info)))
        return 0
    rows = [("id", "sequence", "saved (UTC)", "size", "ranks", "metrics")]
    for info in infos:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(info.time_unix_s)) if info.time_unix_s else "?"
        metrics = " ".join(f"{name}={value:g}" for name, value in info.metrics.items())
        sequence = "?" if info.sequence is None else str(info.sequence)
        last = f"DAMAGED: {info.damage}" if info.damage else metrics
        rows.append((info.checkpoint_id, sequence, saved, format_bytes(info.size_bytes), str(info.world_size), last))
    _print_table(rows)
    for name in folder.left_overs():
        print(f"left by an interrupted save: {name}")
    return 0


def _require_states(folder: Folder, location: str) -> None:
    """A run, or one checkpoint, given for the folder of its checkpoints is told, and so is what is not there."""
    if folder.storage.local_path is None:
        return
    local = Path(folder.storage.local_path)
    if not local.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {location!r}")
    meant = local.parent if (local / "manifest.json").is_file() else local / "state"
    if any(meant.glob("*/manifest.json")):
        raise CheckpointNotFoundError(f"{location} is no folder of checkpoints; it is {meant}")


def _verify(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    names = [_id(folder, name) for name in parsed.ids] or [info.checkpoint_id for info in folder.infos()]
    if not names:
        _require_states(folder, parsed.location)
        raise CheckpointNotFoundError(f"there is no checkpoint in {parsed.location}")
    damaged = False
    for name in names:
        faults = folder.faults(name)
        damaged |= bool(faults)
        print(f"{name}: {'whole' if not faults else 'DAMAGED'}")
        for fault in faults:
            print(f"  {fault}")
    return int(damaged)


def _show(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    manifest = read_manifest(folder.storage, _id(folder, parsed.id))
    print(f"{manifest.checkpoint_id}: sequence {manifest.sequence}, {manifest.world_size} rank(s)", end="")
    print(f", {format_bytes(manifest.size_bytes)}", end="")
    print(f", resumed from {manifest.resumed_from}" if manifest.resumed_from else "")
    print("made with " + ", ".join(f"{name} {version}" for name, version in manifest.libraries.items()))
    for name, value in manifest.metrics.items():
        print(f"metric {name} = {value:g}")
    for part in manifest.ranks:
        for name, item in part.items.items():
            where = f" (rank {part.rank})" if item.scope == "per_rank" else ""
            print(f"\n{name}{where}")
            _print_table([(path or name, _describe(part, node)) for path, node in _leaves(part, name)], indent="  ")
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    manifests = [read_manifest(folder.storage, _id(folder, name)) for name in (parsed.first, parsed.second)]
    first, second = (_contents(manifest) for manifest in manifests)
    differences = [f"- {path}: only in {manifests[0].checkpoint_id}" for path in first if path not in second]
    differences += [f"+ {path}: only in {manifests[1].checkpoint_id}" for path in second if path not in first]
    names = [manifest.checkpoint_id for manifest in manifests]
    for path in first:
        if path in second and not _is_same(folder, names, first[path], second[path]):
            before, after = first[path].description, second[path].description
            differences.append(
                f"~ {path}: {before} -> {after}" if before != after else f"~ {path}: {before}, other values"
            )
    for line in differences:
        print(line)
    print(f"{len(differences)} differences in {len(first.keys() | second.keys())} values")
    return int(bool(differences))


def _rm(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    names = [check_id(name) for name in parsed.ids]
    missing = [name for name in names if not folder.exists(name)]
    if missing:
        raise CheckpointNotFoundError(f"there is no checkpoint {', '.join(missing)}; nothing was deleted")
    location = folder.storage.local_path
    lock = FolderLock.take(location, _LOCK_TIMEOUT_S) if location is not None else None
    try:
        for name in names:
            delete_checkpoint(folder.storage, name)
            print(f"deleted {name}")
    finally:
        if lock is not None:
            lock.release()
    return 0


def _export(parsed: argparse.Namespace) -> int:
    folder = _open(parsed)
    shard_bytes = parse_bytes(parsed.shard_size, "--shard-size")
    made = export_item(folder.storage, _id(folder, parsed.id), parsed.item, parsed.target, shard_bytes=shard_bytes)
    for name in made.files:
        print(parsed.target / name)
    if made.skipped:
        print(f"not tensors, left out: {', '.join(made.skipped)}")
    return 0


def _leaves(part: RankPart, item: str) -> list[tuple[str, Json]]:
    try:
        return list(leaves_of(part.items[item].tree, ""))
    except BadValueError as error:
        raise StateError(f"item {item!r} is not what this version writes: {error}") from None


@dataclass(frozen=True)
class _Value:
    """A value of a checkpoint; `tensor` where it has bytes in the files."""

    description: str
    text: str
    tensor: StoredTensor | None


def _contents(manifest: Manifest) -> dict[str, _Value]:
    """Every value by its path."""
    found = {}
    sharded = ShardedTensors(manifest)
    for part in manifest.ranks:
        for name, item in part.items.items():
            start = name if item.scope == "global" else f"{name}[rank {part.rank}]"
            for path, node in _leaves(part, name):
                full = f"{start}.{path}" if path else start
                tensor = stored_tensor(part, node, sharded, full)
                if tensor is None:
                    found[full] = _Value(_describe(part, node), json.dumps(node), None)
                else:
                    found[full] = _Value(f"{tensor.dtype} {list(tensor.shape)}", "", tensor)
    return found


def _is_same(folder: Folder, names: Sequence[str], first: _Value, second: _Value) -> bool:
    """By the checksums where both lie alike; by reading them where they do not, such as on other ranks."""
    if first.tensor is None or second.tensor is None or first.description != second.description:
        return first == second
    (layout, checksums), (other_layout, other_checksums) = _layout(first.tensor), _layout(second.tensor)
    if layout == other_layout:
        return checksums == other_checksums
    before, after = (
        dense_bytes(folder.storage, name, tensor)
        for name, tensor in zip(names, (first.tensor, second.tensor), strict=True)
    )
    return before == after


def _layout(tensor: StoredTensor) -> tuple[Any, Any]:
    """How a tensor lies, and the checksums of its parts."""
    parts = sorted(tensor.parts, key=lambda part: part.offsets)
    layout = [(p.offsets, p.view.shape, p.view.offset_bytes, p.view.stride, p.part.chunk_bytes) for p in parts]
    return layout, [p.part.spans[p.view.span].chunks for p in parts]


def _describe(part: RankPart, node: Json) -> str:
    number = _leaf_number(part, node)
    if number is not None:
        view = part.tensors[number]
        return f"{view.dtype} {list(view.shape)}"
    if isinstance(node, dict):
        tag, content = next(iter(node.items()))
        if tag == "sharded":
            placed = (
                f"{', '.join(content['placements'])} on a mesh of {content['mesh']}" if content["mesh"] else "sharded"
            )
            return f"{content['dtype']} {content['shape']}, {placed}"
        return f"{tag} {json.dumps(content):.60}" if content else f"empty {tag}"
    return "empty list" if node == [] else f"{json.dumps(node):.60}"


def _leaf_number(part: RankPart, node: Json) -> int | None:
    if not isinstance(node, dict):
        return None
    number = node.get("tensor", node.get("array"))
    return number if type(number) is int and number < len(part.tensors) else None


def _print_table(rows: Sequence[tuple[str, ...]], indent: str = "") -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        print(indent + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
