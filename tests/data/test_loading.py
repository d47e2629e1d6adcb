"""Worker processes that read batches: the same batches to the bit, and no process that outlives its work (C25)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptplan.data import Batch, DataSpec, dataset
from ckptplan.data.dataset import Dataset
from ckptplan.randomness import library_state

# Python 3.12 says that a fork beside threads may hang; a worker does nothing but read.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def samples(read: Callable[[Tensor], Batch], workers: int = 0) -> Dataset:
    return Dataset(DataSpec("images", channels=1, image_size=1, classes=103), read, 103, 10, 4, 7, workers)


def noisy(numbers: Tensor) -> Batch:
    """Draws from every global stream."""
    shift = random.random() + np.random.random()  # noqa: NPY002 (the global streams are the point)
    return Batch(torch.randn(len(numbers), 1, 1, 1) + shift, numbers)


def marked(numbers: Tensor) -> Batch:
    """Says which process has read it."""
    return Batch(torch.full((len(numbers), 1, 1, 1), float(os.getpid())), numbers)


def everything(data: Dataset) -> list[Tensor]:
    batches = [*data.epoch_batches(0), *data.epoch_batches(1, start=20), *data.epoch_batches(2, 3, skip=2)]
    return [tensor for batch in [*batches, *data.eval_batches()] for tensor in (batch.inputs, batch.targets)]


def children() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_the_same_whoever_reads_them_also_where_reading_draws_random_numbers(workers: int) -> None:
    here = everything(samples(noisy))
    there = everything(samples(noisy, workers))
    assert len(here) == 2 * (26 + 6 + 23 + 3)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    read_by = {int(pid) for batch in samples(marked, workers).epoch_batches(0) for pid in batch.inputs.flatten()}
    assert len(read_by) == workers
    assert os.getpid() not in read_by


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_global_streams_alone_and_does_not_listen_to_them(workers: int) -> None:
    data = samples(noisy, workers)
    torch.manual_seed(3)
    before = library_state(), torch.get_rng_state()
    first = everything(data)
    assert library_state() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.manual_seed(4), random.seed(4), np.random.seed(4)  # noqa: NPY002
    assert all(torch.equal(one, other) for one, other in zip(first, everything(data), strict=True))


def test_noise_differs_from_batch_to_batch_and_from_epoch_to_epoch() -> None:
    data = samples(noisy)
    first = [float(batch.inputs[0]) for epoch in range(2) for batch in data.epoch_batches(epoch)]
    first += [float(batch.inputs[0]) for batch in data.eval_batches()]
    assert len(set(first)) == len(first) == 2 * 26 + 3


def test_workers_end_with_the_iterator() -> None:
    before = children()
    batches = samples(marked, 2).epoch_batches(0)
    assert children() == before  # none before the first batch is asked for
    next(batches)
    assert len(children() - before) == 2
    batches.close()
    assert children() == before
    assert len(list(samples(marked, 2).epoch_batches(0))) == 26
    assert children() == before


def test_no_more_workers_than_batches() -> None:
    (batch,) = samples(marked, 2).epoch_batches(0, start=25)
    assert len(batch.inputs) == 3
    assert list(samples(marked, 2).epoch_batches(0, start=26)) == []


@pytest.mark.parametrize("sent", ["INT", "TERM", "HUP"])
def test_a_signal_to_every_process_ends_no_worker(sent: str) -> None:
    """A terminal and a batch system send to all; the step in hand is to be finished."""
    before = children()
    batches = samples(marked, 2).epoch_batches(0)
    read = [next(batches)]
    subprocess.run(["kill", f"-{sent}", *map(str, children() - before)], check=True)  # not by us, their parent
    assert len([*read, *batches]) == 26
    assert children() == before


def test_a_worker_that_reads_for_too_long_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import _utils

    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # how long DataLoader waits before it ends a worker

    def slow(numbers: Tensor) -> Batch:
        if 10 in numbers:  # the third, which is asked for when the first is taken
            time.sleep(60)
        return marked(numbers)

    before = children()
    batches = Dataset(DataSpec("images", channels=1, image_size=1, classes=9), slow, 8, 8, 1, 7, 1).eval_batches()
    for _ in range(2):
        next(batches)
    began_s = time.monotonic()
    del batches
    while children() != before:
        assert time.monotonic() - began_s < 20
        time.sleep(0.01)


MOUNTS = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
SMALL = """
import sys, torch
from ckptplan.data import Batch, DataSpec
from ckptplan.data.dataset import Dataset
whole = torch.arange(1000.0).repeat(1000, 1)
def read(numbers):
    first = int(numbers[0])
    return Batch(whole[first : first + len(numbers)], numbers)  # a view
data = Dataset(DataSpec("images", channels=1, image_size=1, classes=9), read, 8, 992, 100, 0, 2)
for number, batch in enumerate(data.eval_batches()):
    assert batch.targets[0] == 8 + 100 * number
    assert torch.equal(batch.inputs, whole[: len(batch.targets)])
print(number)
"""


@pytest.mark.parametrize("size", ["256k", "64m"])
def test_no_batch_is_lost_where_shared_memory_is_small(size: str) -> None:
    """A batch of 400 kB from 4 MB. ``DataLoader`` loses it in a thread of the worker and waits for it for ever."""
    command = f'exec {sys.executable} -c "$CODE"'
    if MOUNTS:
        command = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && {command}"
    ended = subprocess.run(
        [*(["unshare", "-m"] if MOUNTS else []), "sh", "-c", command],
        env={**os.environ, "CODE": SMALL}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "9\n"), ended.stderr


def test_an_error_while_reading_keeps_its_type_and_names_its_place() -> None:
    def broken(numbers: Tensor) -> Batch:
        raise KeyError(f"no sample {int(numbers[0])}")

    with pytest.raises(KeyError, match=r"(?s)no sample.*in broken|in broken.*no sample"):
        next(samples(broken, 1).epoch_batches(0))


PROGRAM = """
import os, time
import torch
from ckptplan.data import Batch, DataSpec
from ckptplan.data.dataset import Dataset
def read(numbers):
    return Batch(torch.full((len(numbers), 1), float(os.getpid())), numbers)
batches = Dataset(DataSpec("images", channels=1, image_size=1, classes=9), read, 1000, 0, 4, 0, 2).epoch_batches(0)
print(int(next(batches).inputs[0]), int(next(batches).inputs[0]), flush=True)
time.sleep(60)
"""


def test_workers_of_a_killed_trainer_end_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(word) for word in trainer.stdout.readline().split()]
        assert len(set(workers)) == 2
        trainer.kill()
    deadline_s = time.monotonic() + 3  # DataLoader's own look at its parent comes every 5 s
    for worker in workers:
        while Path(f"/proc/{worker}").exists() and "\nState:\tZ" not in Path(f"/proc/{worker}/status").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_system_that_cannot_have_workers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "CAN_HAVE_WORKERS", False)
    with pytest.raises(ValueError, match="workers=2; only Linux can have"):
        samples(marked, 2)
    assert replace(samples(marked), workers=0).workers == 0
    with pytest.raises(ValueError, match="workers=-1 is too small"):
        samples(marked, -1)
