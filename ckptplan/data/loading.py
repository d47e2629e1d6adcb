"""Batches one after the other, read here or ahead by worker processes: to the bit the same batches.

Whatever reading a batch draws from the global random streams is a function of seed, epoch and place in the epoch: the
streams are seeded for each batch, and here put back after it. So neither the number of workers, nor where an epoch was
begun, nor what else draws changes a batch; and reading changes nobody else's random numbers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ckptplan.data import Batch
from ckptplan.processes import end_with_parent
from ckptplan.randomness import random_state_restored, seed_without_devices

CAN_HAVE_WORKERS = "fork" in multiprocessing.get_all_start_methods() and hasattr(signal, "sigwaitinfo")
"""Workers are forks, as a function that reads samples may be a closure, which cannot be sent to another process; they
tell signals of their parent from others. Linux can do both, Windows and macOS cannot."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """A batch to read.

    Attributes:
        numbers: of its samples, int64.
        seed: of whatever reading it draws from the global streams.
    """

    numbers: Tensor
    seed: int


@dataclass(frozen=True)
class _Reader:
    """What ``DataLoader`` takes for a data set in a worker: its "samples" are whole batches, ready to be sent."""

    read: Callable[[Tensor], Batch]

    def __call__(self, place: Place) -> Batch:
        with random_state_restored(_CPU):
            seed_without_devices(place.seed)
            return self.read(place.numbers)

    def __getitem__(self, place: Place) -> bytes:
        return _packed(self(place))


def read_batches(read: Callable[[Tensor], Batch], places: Iterable[Place], workers: int) -> Iterator[Batch]:
    """The batches at ``places``, in this order; each is read when it is asked for, or ahead by ``workers`` processes.

    The workers begin with the first batch that is asked for, and end with the iterator, or with this process. Signals
    are the business of this process: Ctrl-C, SIGTERM and SIGHUP do not end a worker, whoever is sent them.
    """
    reader = _Reader(read)
    return _read_ahead(reader, places, workers) if workers else map(reader, places)


def _read_ahead(reader: _Reader, places: Iterable[Place], workers: int) -> Iterator[Batch]:
    parent = os.getpid()
    loader: DataLoader[bytes] = DataLoader(
        reader,  # type: ignore[arg-type]  # any object with __getitem__ does
        sampler=places,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,  # type: ignore[arg-type]  # without batch_size it is called with what __getitem__ gives
        worker_init_fn=lambda _: _begin_worker(parent),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else each epoch would draw from the global stream
    )
    with _signals_held():
        packed = iter(loader)
    yield from map(pickle.loads, packed)


def _packed(batch: Batch) -> bytes:
    """The tensors go through shared memory where there is room for them, else within these bytes.

    Left to ``DataLoader``, one for which there is no room is lost in a thread of the worker, and waited for for ever.
    """
    own = replace(batch, inputs=_with_own_memory(batch.inputs), targets=_with_own_memory(batch.targets))
    try:
        return bytes(ForkingPickler.dumps(own))
    except (OSError, RuntimeError):
        return pickle.dumps(own)


def _with_own_memory(tensor: Tensor) -> Tensor:
    """Of a view, all that it is a view of would be shared."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _unchanged(packed: bytes) -> bytes:
    return packed


_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait: one that came while a worker begins would meet the handlers of its parent there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(parent: int) -> None:
    """In a new worker, which has all of ``_SIGNALS`` blocked: only its parent can end it.

    The step in hand is finished with the workers that it has. A terminal sends Ctrl-C to all of them, a batch system
    SIGTERM, and ``DataLoader`` would make a worker's end an error in the middle of that step.
    """
    end_with_parent(parent, signal.SIGKILL)
    threading.Thread(target=_end_when_told, args=(parent,), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while True:
        info = signal.sigwaitinfo(_SIGNALS)
        if (
            info.si_signo == signal.SIGTERM and info.si_pid == parent
        ):  # DataLoader's, to one that does not end by itself
            os._exit(0)
