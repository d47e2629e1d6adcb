"""What the state engine is measured against: plain copies, `dd`, and other libraries that save training state."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

Times = dict[str, list[float]]
Payload = dict[str, Any]


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Sends what libraries and their processes print to a file; shows it when something fails."""
    with tempfile.TemporaryFile() as chatter:
        kept = os.dup(1), os.dup(2)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(chatter.fileno(), 1)
        os.dup2(chatter.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            if failed:
                chatter.seek(0)
                sys.stderr.buffer.write(chatter.read())


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def evict(path: Path) -> None:
    """Takes a file, or all files below a folder, out of the page cache."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# --- copies ---


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize)


def copy_to_fresh_pages(sources: list[torch.Tensor]) -> float:
    """Into memory that the system has just given: an allocator's "new" tensors lie in pages that were used before."""
    memory = mmap.mmap(-1, sum(source.nbytes for source in sources), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    targets = list(whole.split([source.nbytes for source in sources]))
    return timed(lambda: copy_each(targets, sources))


def copies(payload: Payload, targets: Payload, times: Times) -> None:
    sources, warm = list(payload["model"].values()), list(targets["model"].values())
    copy_each(warm, sources)
    for _ in range(3):
        times["memcpy, warm"].append(timed(lambda: copy_each(warm, sources)))
    times["memcpy, fresh pages"].append(copy_to_fresh_pages(sources))
    new = [torch.empty_like(source) for source in sources]
    times["memcpy, new tensors of the allocator"].append(timed(lambda: copy_each(new, sources)))


def dd(folder: Path, size_bytes: int, times: Times) -> None:
    size_mib = size_bytes // 2**20
    for name, flags in (("dd conv=fsync", ["bs=1M"]), ("dd oflag=direct", ["bs=16M", "oflag=direct"])):
        blocks = size_mib if "bs=1M" in flags else size_mib // 16
        command = ["dd", "if=/dev/zero", f"of={folder}/dd", f"count={blocks}", "conv=fsync", *flags]
        os.sync()
        times[name].append(timed(lambda command=command: subprocess.run(command, check=True, capture_output=True)))
        (folder / "dd").unlink()


# --- training time ---


def lost(save: Callable[[], Any], threads: int) -> float:
    """Training time lost by one save: wall time until it is over, less iterations at the undisturbed rate.

    The trainer multiplies matrices in `threads` threads. `save` returns something with `done()`, or None when the save
    was over on return.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = 192 if threads == 1 else 768
    matrix = torch.randn(size, size)

    def iterate(until: Callable[[], bool]) -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        while not until():
            matrix @ matrix
            count += 1
        return count, time.perf_counter() - start

    try:
        end = time.perf_counter() + 0.5
        count, seconds = iterate(lambda: time.perf_counter() > end)
        rate = count / seconds
        start = time.perf_counter()
        pending = save()
        end = time.perf_counter() + 0.8
        count, _ = iterate(lambda: time.perf_counter() > end and (pending is None or pending.done()))
        return time.perf_counter() - start - count / rate
    finally:
        torch.set_num_threads(before)


def note_lost(name: str, save: Callable[[], Any], times: Times) -> None:
    cores = len(os.sched_getaffinity(0))
    os.sync()
    if cores > 1:
        times[f"{name}: training time lost, one core free"].append(lost(save, cores - 1))
    os.sync()
    times[f"{name}: training time lost, no core free"].append(lost(save, cores))


# --- other libraries ---


def torch_save(folder: Path, payload: Payload, times: Times, *, with_loss: bool) -> None:
    path = folder / "torch"

    def save() -> None:
        torch.save(payload, path)
        fsync(path)

    os.sync()
    times["torch.save + fsync"].append(timed(save))
    if with_loss:
        note_lost("torch.save + fsync", save, times)
    path.unlink()


def safetensors_file(folder: Path, payload: Payload, targets: Payload, times: Times, *, with_loss: bool) -> None:
    path = folder / "safetensors"

    def save() -> None:
        safetensors.torch.save_file(payload["model"], path)
        fsync(path)

    def load() -> None:
        for name, tensor in safetensors.torch.load_file(path).items():
            targets["model"][name].copy_(tensor)

    os.sync()
    times["safetensors save_file + fsync"].append(timed(save))
    times["safetensors load_file + copy_, warm"] += [timed(load) for _ in range(3)]
    evict(path)
    times["safetensors load_file + copy_, cold"].append(timed(load))
    if with_loss:
        note_lost("safetensors save_file + fsync", save, times)
    path.unlink()


def distributed_checkpoint(folder: Path, payload: Payload, targets: Payload, times: Times, *, with_loss: bool) -> None:
    os.sync()
    times["dcp.save"].append(timed(lambda: dcp.save(payload, checkpoint_id=folder / "dcp")))
    times["dcp.load in place"].append(timed(lambda: dcp.load(targets, checkpoint_id=folder / "dcp")))
    for kind in ("thread", "process"):
        numbers = iter(range(10))

        def save(kind: str = kind, numbers: Iterator[int] = numbers) -> Any:
            place = folder / f"dcp-{kind}-{next(numbers)}"
            return dcp.async_save(payload, checkpoint_id=place, async_checkpointer_type=AsyncCheckpointerType(kind))

        name = f"dcp.async_save, {kind}"
        two_saves(name, save, times)
        if with_loss:
            note_lost(name, save, times)
    for path in folder.glob("dcp*"):
        shutil.rmtree(path)


def predecessor(folder: Path, payload: Payload, targets: Payload, times: Times) -> None:
    """torch_checkpointing, where it is installed; without direct I/O, which fails on ext4. It never calls fsync."""
    try:
        import torch_checkpointing
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    except ImportError:
        return
    config = torch_checkpointing.CheckpointManager.Config.with_async_save()
    config = dataclasses.replace(config, storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    states = torch_checkpointing.CheckpointManager(config)
    numbers = iter(range(10))

    def save() -> Any:
        return states.save(str(folder / f"old-{next(numbers)}"), payload)

    two_saves("torch_checkpointing", save, times)
    times["torch_checkpointing load"].append(timed(lambda: states.load(str(folder / "old-1"), into=targets)))
    note_lost("torch_checkpointing", save, times)
    states.close()
    for path in folder.glob("old-*"):
        shutil.rmtree(path)


def two_saves(name: str, save: Callable[[], Any], times: Times) -> None:
    """The first pays for the start of the writer."""
    for kind in ("first", "later"):
        os.sync()
        start = time.perf_counter()
        pending = save()
        times[f"{name}, {kind}: stall"].append(time.perf_counter() - start)
        pending.result()
        times[f"{name}, {kind}: done"].append(time.perf_counter() - start)
