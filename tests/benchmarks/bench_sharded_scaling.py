"""What sharded state costs with 8 to 1,024 ranks, without any: python tests/benchmarks/bench_sharded_scaling.py

The state is that of an 8-billion-parameter decoder under FSDP (rows over all ranks): float32 weights and the two
moments of AdamW, tensors without memory (the meta device). The manifest is written and read in its real form with
made-up checksums; no byte of a tensor exists. Times are of the processor, so that other work does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ckptplan.state.attempt import with_digest
from ckptplan.state.boxes import local_boxes
from ckptplan.state.coordinator import StoreCoordinator
from ckptplan.state.manifest import FORMAT, VERSION, View, parse_manifest
from ckptplan.state.resharder import Piece, Sharded
from ckptplan.state.slicing import Slices
from ckptplan.state.snapshot import _chunk_bytes_for_slices, parts_to_write
from ckptplan.state.storage import LocalStorage
from ckptplan.state.stored import ShardedTensors
from ckptplan.state.values import Leaf, ShardedLeaf, sharded_node


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the decoder: 32 layers, width 4096, 8 of 32 heads for keys and values."""
    yield "embedding.weight", (128256, 4096)
    for layer in range(32):
        for name, shape in (("q", (4096, 4096)), ("k", (1024, 4096)), ("v", (1024, 4096)), ("o", (4096, 4096))):
            yield f"layers.{layer}.attention.{name}.weight", shape
        for name, shape in (("gate", (14336, 4096)), ("up", (14336, 4096)), ("down", (4096, 14336))):
            yield f"layers.{layer}.mlp.{name}.weight", shape
        yield f"layers.{layer}.attention_norm.weight", (4096,)
        yield f"layers.{layer}.mlp_norm.weight", (4096,)
    yield "norm.weight", (4096,)
    yield "head.weight", (128256, 4096)


def tensors() -> list[tuple[str, str, tuple[int, ...]]]:
    """(item, name, shape) of weights and moments."""
    named = list(parameters())
    found = [("model", name, shape) for name, shape in named]
    return found + [("optimizer", f"state.{n}.{m}", s) for n, s in named for m in ("exp_avg", "exp_avg_sq")]


def sharded(rank: int, world: int) -> list[ShardedLeaf]:
    """What one rank holds."""
    leaves = []
    for item, name, shape in tensors():
        boxes = local_boxes(shape, (world,), (rank,), ((0, 1),))
        pieces = tuple(Piece(box.offsets, torch.empty(box.sizes, device="meta")) for box in boxes)
        leaves.append(ShardedLeaf(item, name, torch.float32, Sharded(shape, pieces, note=((world,), ("S0",)))))
    return leaves


def part_of(rank: int, leaves: list[Leaf], chunk_bytes: int) -> str:
    """A rank's part of the manifest; the checksums are random, so that they compress as real ones do."""
    files, spans, views = [], [], []
    for number, item in enumerate(("model", "optimizer")):
        position = 4096
        for leaf in leaves:
            if leaf.item == item:
                size = leaf.value.nbytes
                chunks = os.urandom(16 * -(-size // chunk_bytes)).hex()
                spans.append({"file": number, "name": leaf.name, "offset": position, "size": size, "chunks": chunks})
                views.append(View("float32", tuple(leaf.value.shape), len(views), shard=leaf.shard).to_json())
                position += size
        name = f"{item}.{rank}.safetensors"
        files.append({"name": name, "item": item, "size": position, "header": 4096, "checksum": "0" * 32})
    part: dict[str, Any] = {"rank": rank, "chunk_bytes": chunk_bytes, "files": files, "spans": spans, "tensors": views}
    return json.dumps({**part, "items": {}}, separators=(",", ":"))


def manifest_of(world: int) -> tuple[bytes, list[int], int]:
    """The manifest, the bytes that each rank writes, and the size of a chunk."""
    parts, sizes = [], []
    chunk_bytes = 0
    for rank in range(world):
        leaves = parts_to_write(sharded(rank, world), rank, [[()]] * world)
        chunk_bytes = _chunk_bytes_for_slices(leaves, world)
        sizes.append(sum(leaf.value.nbytes for leaf in leaves))
        parts.append(part_of(rank, leaves, chunk_bytes))
    head = {"format": FORMAT, "version": VERSION, "id": "a", "attempt": "x", "sequence": 1, "time_unix_s": 0.0}
    head |= {"world_size": world, "resumed_from": None, "libraries": {}, "metrics": {}}
    text = json.dumps(head, separators=(",", ":"))[:-1] + ',"ranks":[' + ",".join(parts) + "]}"
    return with_digest(text.encode()), sizes, chunk_bytes


def cpu_s(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def load_plan(manifest: Any, world: int, target: int) -> tuple[float, float]:
    """CPU seconds until rank 1 of `target` ranks knows its bytes, and chunk bytes to be read per wanted byte."""
    started = time.process_time()
    stored, slices = ShardedTensors(manifest), Slices(LocalStorage("."), "a")
    wanted = 0
    for number, leaf in enumerate(sharded(1, target)):
        node = sharded_node(number, leaf.dtype, leaf.sharded, False, False)["sharded"]
        slices.add(stored.of(node, leaf.name), leaf.sharded.pieces)
        wanted += sum(piece.tensor.nbytes for piece in leaf.sharded.pieces)
    taken_s = time.process_time() - started
    read = 0
    for part, by_span in slices.wanted().values():
        step = part.chunk_bytes
        for span, ranges in by_span.items():
            chunks = {chunk for first, last in ranges for chunk in range(first // step, -(-last // step))}
            read += sum(min(step, part.spans[span].size_bytes - chunk * step) for chunk in chunks)
    return taken_s, read / wanted


def exchange_s(world: int) -> float:
    """CPU seconds that rank 0 takes for one exchange when all others have spoken, in a store in this process."""
    store = dist.HashStore()
    ranks = [StoreCoordinator(store, rank, world, timeout_s=10, name=f"scaling-{world}") for rank in range(world)]
    said = {
        "error": "",
        "names": ["model", "optimizer"],
        "digests": {},
        "sharded": {"model": "0" * 32},
        "holders": [[0]],
    }
    for coordinator in ranks[1:]:
        coordinator._put(coordinator._post(0, coordinator.rank), zlib.compress(json.dumps(said).encode(), 1))
    return cpu_s(lambda: ranks[0].all_gather(said))


def main() -> None:
    """One row for each number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256, 1024])
    total = sum(4 * prod(shape) for _, _, shape in tensors())
    print(f"{len(tensors())} tensors, {total / 1e9:.1f} GB")
    print("ranks | GB per rank (least, most) | plan of a save s | chunk KiB | manifest MB | parse s | plan of a load "
          "by half the ranks s, read/wanted | exchange on rank 0 ms")  # fmt: skip
    for world in parser.parse_args().ranks:
        save_s = cpu_s(lambda world=world: parts_to_write(sharded(0, world), 0, [[()]] * world))  # type: ignore[misc]
        content, sizes, chunk_bytes = manifest_of(world)
        started = time.process_time()
        manifest = parse_manifest(content, "a")
        parse_s = time.process_time() - started
        plan_s, ratio = load_plan(manifest, world, world // 2)
        print(f"{world} | {min(sizes) / 1e9:.3f}, {max(sizes) / 1e9:.3f} | {save_s:.3f} | {chunk_bytes // 1024} | "
              f"{len(content) / 1e6:.0f} | {parse_s:.2f} | {plan_s:.2f}, {ratio:.3f} | "
              f"{1000 * exchange_s(world):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
