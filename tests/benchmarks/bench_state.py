"""Speed of the state engine beside its yardsticks, interleaved in one run; the last line is one JSON document.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_state.py [--folder DIR] [--gb 1.0] [--rounds 5]

A state of float32 in 200 equal tensors. Yardsticks: memcpy tensor by tensor into warm and into fresh memory, `dd` with
conv=fsync and with oflag=direct, torch.save + fsync, safetensors, torch.distributed.checkpoint (sync, and async by
thread and by process) and torch_checkpointing where it is installed (its times include no fsync). GB is 10**9 bytes;
every figure is a minimum / median in seconds. It states how many cores may be used, but cannot know how many are free:
on a shared machine compare within one run, and minima first.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from ckptplan.state import CheckpointManager

Times = dict[str, list[float]]
NUM_TENSORS = 200


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def lost_per_save(states: CheckpointManager, payload: dict[str, Any], name: str) -> float:
    """Training time lost by one save: wall time less iterations at the undisturbed rate."""
    matrix = torch.randn(192, 192)

    def iterate(until: Callable[[int], bool]) -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        while not until(count):
            matrix @ matrix
            count += 1
        return count, time.perf_counter() - start

    end = time.perf_counter() + 0.5
    count, seconds = iterate(lambda count: time.perf_counter() > end)
    rate = count / seconds
    start = time.perf_counter()
    future = states.save(name, payload)
    deadline = time.perf_counter() + 1.0
    count, _ = iterate(lambda count: time.perf_counter() > deadline and future.done())
    return time.perf_counter() - start - count / rate


def engine_round(folder: Path, payload: dict[str, Any], targets: dict[str, Any], times: Times, number: int) -> None:
    location = folder / f"engine-{number}"
    with CheckpointManager(location, keep_last=1) as states:
        states._saver.wait_for_writer(5)
        for save in range(3):
            os.sync()
            start = time.perf_counter()
            future = states.save(f"s-{save}", payload)
            kind = "first" if save == 0 else "warm"
            times[f"{kind} save: stall"].append(time.perf_counter() - start)
            future.result()
            times[f"{kind} save: durable"].append(time.perf_counter() - start)
            states.wait()
            time.sleep(0.3)
        times["training time lost"].append(lost_per_save(states, payload, "lost"))
        states.wait()
        # Written past the page cache: the first load comes from the disk, the second from memory as the yardsticks do.
        for kind in ("cold", "warm"):
            seconds = timed(lambda: states.load("latest", into=targets))
            times[f"load, verified, in place, {kind}"].append(seconds)
        assert torch.equal(targets["model"]["t7"], payload["model"]["t7"])
    with CheckpointManager(location, keep_last=1, mode="sync") as states:
        times["sync save: durable"].append(timed(lambda: states.save("sync", payload).result()))
    shutil.rmtree(location)


def yardstick_round(folder: Path, payload: dict[str, Any], targets: dict[str, Any], times: Times) -> None:
    import safetensors.torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    sources, warm = list(payload["model"].values()), list(targets["model"].values())
    copy_each(warm, sources)
    times["memcpy, warm"].append(timed(lambda: copy_each(warm, sources)))
    fresh = [torch.empty_like(source) for source in sources]
    times["memcpy, fresh"].append(timed(lambda: copy_each(fresh, sources)))
    fresh.clear()
    size_mib = sum(source.numel() * 4 for source in sources) // 2**20
    for name, flags in (("dd conv=fsync", ["bs=1M"]), ("dd oflag=direct", ["bs=16M", "oflag=direct"])):
        blocks = size_mib if "bs=1M" in flags else size_mib // 16
        command = ["dd", "if=/dev/zero", f"of={folder}/dd", f"count={blocks}", "conv=fsync", *flags]
        os.sync()
        times[name].append(timed(lambda command=command: subprocess.run(command, check=True, capture_output=True)))
        (folder / "dd").unlink()
    path = folder / "yardstick"
    for name, save in (
        ("torch.save + fsync", lambda: torch.save(payload, path)),
        ("safetensors save_file + fsync", lambda: safetensors.torch.save_file(payload["model"], path)),
    ):
        os.sync()
        times[name].append(timed(lambda save=save: (save(), fsync(path))))
    times["safetensors load_file + copy_"].append(timed(lambda: load_safetensors(path, targets["model"])))
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.sync()
        times["dcp.save"].append(timed(lambda: dcp.save(payload, checkpoint_id=folder / "dcp")))
        times["dcp.load in place"].append(timed(lambda: dcp.load(targets, checkpoint_id=folder / "dcp")))
        for kind in ("thread", "process"):
            asynchronous(
                f"dcp.async_save, {kind}",
                lambda number, kind=kind: dcp.async_save(
                    payload,
                    checkpoint_id=folder / f"dcp-{kind}-{number}",
                    async_checkpointer_type=AsyncCheckpointerType(kind),
                ),
                times,
            )
    for path in folder.glob("dcp*"):
        shutil.rmtree(path)


def predecessor_round(folder: Path, payload: dict[str, Any], targets: dict[str, Any], times: Times) -> None:
    """torch_checkpointing, where it is installed; without direct I/O, which fails on ext4."""
    try:
        import torch_checkpointing as predecessor
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    except ImportError:
        return
    config = predecessor.CheckpointManager.Config.with_async_save()
    config = dataclasses.replace(config, storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    states = predecessor.CheckpointManager(config)
    asynchronous("torch_checkpointing", lambda number: states.save(str(folder / f"old-{number}"), payload), times)
    times["torch_checkpointing load"].append(timed(lambda: states.load(str(folder / "old-1"), into=targets)))
    states.close()
    for path in folder.glob("old-*"):
        shutil.rmtree(path)


def asynchronous(name: str, save: Callable[[int], Any], times: Times) -> None:
    """Two saves: the first pays for the start of the writer."""
    for number, kind in enumerate(("first", "later")):
        os.sync()
        start = time.perf_counter()
        pending = save(number)
        times[f"{name}, {kind}: stall"].append(time.perf_counter() - start)
        pending.result()
        times[f"{name}, {kind}: done"].append(time.perf_counter() - start)


def load_safetensors(path: Path, targets: dict[str, torch.Tensor]) -> None:
    import safetensors.torch

    for name, tensor in safetensors.torch.load_file(path).items():
        targets[name].copy_(tensor)


def many_small(folder: Path, times: Times) -> None:
    """10,000 tensors of 300 floats."""
    payload = {"model": {f"t{index}": torch.randn(300) for index in range(10_000)}}
    targets = {"model": {name: torch.zeros(300) for name in payload["model"]}}
    with CheckpointManager(folder / "small", keep_last=1) as states:
        states._saver.wait_for_writer(5)
        for save in range(5):
            start = time.perf_counter()
            future = states.save(f"s-{save}", payload)
            kind = "10,000 small, first" if save == 0 else "10,000 small, warm"
            times[f"{kind}: stall"].append(time.perf_counter() - start)
            future.result()
            times[f"{kind}: durable"].append(time.perf_counter() - start)
        states.wait()
        times["10,000 small: load"].append(timed(lambda: states.load("latest", into=targets)))
    shutil.rmtree(folder / "small")


def memory_of_saves(folder: Path, gb: float) -> dict[str, float]:
    """Of both processes after the third and after the twentieth save, as shares of the state (private + arena once)."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from ckptplan.state import CheckpointManager
def pss(pid):
    text = Path(f"/proc/{{pid}}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
state = {{f"t{{i}}": torch.ones(int({gb} * 1e9 / 4 / {NUM_TENSORS})) for i in range({NUM_TENSORS})}}
size = sum(t.numel() * 4 for t in state.values())
before = pss("self")
with CheckpointManager({str(folder / "memory")!r}, keep_last=1) as states:
    found = {{}}
    for k in range(20):
        states.save(f"s{{k}}", state).result()
        states.wait()
        if k in (2, 19):
            found[k] = (pss("self") + pss(states.writer_pid) - before) / size
print(found[2], found[19])
"""
    third, last = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    shutil.rmtree(folder / "memory")
    return {"extra memory after 3 saves / state": float(third), "after 20 saves / state": float(last)}


def writer_start() -> float:
    start = time.perf_counter()
    states = CheckpointManager(tempfile.mkdtemp())
    states._saver.wait_for_writer(5)
    seconds = time.perf_counter() - start
    states.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-state-", dir=arguments.folder))
    elements = int(arguments.gb * 1e9 / 4 / NUM_TENSORS)
    payload = {"model": {f"t{index}": torch.randn(elements) for index in range(NUM_TENSORS)}}
    targets = {"model": {name: torch.zeros(elements) for name in payload["model"]}}
    times: Times = defaultdict(list)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        for number in range(arguments.rounds):
            yardstick_round(folder, payload, targets, times)
            engine_round(folder, payload, targets, times, number)
            if number == 0:  # slow: one round tells enough
                predecessor_round(folder, payload, targets, times)
            many_small(folder, times)
            times["writer ready"].append(writer_start())
        memory = memory_of_saves(folder, min(arguments.gb, 0.25))
    finally:
        torch.distributed.destroy_process_group()
        shutil.rmtree(folder)
    report = {name: {"min_s": min(values), "median_s": statistics.median(values)} for name, values in times.items()}
    for name, figures in report.items():
        print(f"{name:34} {figures['min_s']:8.3f} {figures['median_s']:8.3f}")
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"gb": arguments.gb, "cores": cores, "load": os.getloadavg()[0], **memory, "times": report}))


if __name__ == "__main__":
    main()
