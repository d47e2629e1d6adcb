"""How the processes of one run agree. With one process everything here is the thing itself."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ckptplan.errors import CkptplanError, RankFailedError
from ckptplan.record import ErrorRecord
from ckptplan.stopping import StopFlag

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_FIRST_ERROR = "ckptplan/first_error"


@dataclass
class Ranks:
    """The processes of a run, seen from one of them.

    Attributes:
        rank, size: number of this process, from 0, and how many there are.
        local_rank: number of this process on its machine.
        store: where the first error is put, for rank 0 to tell; None with one process.
        has_shared_error: whether the run ended by an error that all ranks raised.
        failed_alone: whether this rank, or one that it waited for, failed while others went on.
        tensor_size: ranks that share each matrix product; they read the same samples. Ranks that follow each other do.
        mesh: with such ranks, all of them as (dp, tp); ``silent_mesh``: those that share matrices with this one, to
            measure on (engine/tensor.py).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: Store | None = None
    has_shared_error: bool = False
    failed_alone: bool = False
    tensor_size: int = 1
    mesh: DeviceMesh | None = None
    silent_mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process owns the files of the run and speaks for it."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Among how many a batch is shared."""
        return self.size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """Whose share of a batch this rank reads; those that share matrices read the same."""
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """The number of this rank among those that share matrices."""
        return self.rank % self.tensor_size

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def together(self, stage: Callable[[], T]) -> T:
        """What ``stage``, which must not communicate, gives here; what it raises on one rank, all raise.

        So no rank waits for one that has given up. The error of the lowest rank is raised everywhere.
        """
        if self.size == 1:
            return stage()
        error: Exception | None = None
        try:
            value = stage()
        except Exception as raised:
            error = raised
        failed = self.gather(None if error is None else as_seen_elsewhere(error, self.rank))
        first = next((number for number, found in enumerate(failed) if found is not None), None)
        if first is None:
            return value
        told = failed[first]
        assert told is not None
        self.has_shared_error = True
        raise error if first == self.rank and error is not None else told

    def from_first(self, stage: Callable[[], T]) -> T:
        """What ``stage`` gives on rank 0, on every rank; what it raises there, all raise."""
        own = self.together(lambda: stage() if self.is_first else None)
        return self.gather(own)[0]  # type: ignore[return-value]  # that of rank 0, which has one

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all shares of a batch, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        if self.tensor_rank:  # the same share as the first of these ranks
            total.zero_()
        dist.all_reduce(total)
        return [float(value) for value in total]

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def agreed(self, stop: StopFlag) -> StopFlag:
        """``stop`` as a question to all ranks: a signal to one of them stops all at the same place."""
        return stop if self.size == 1 else AgreedStop(self, stop)

    def note_error(self, error: BaseException) -> ErrorRecord | None:
        """Remember that ``error`` ends the run here; returns that of another rank which came before it."""
        if self.size == 1 or self.has_shared_error:
            return None
        self.failed_alone = True
        get_error_handler().record_exception(error)  # for the agent that has started the ranks
        if self.store is None:
            return None
        told = json.dumps([type(error).__name__, str(error).strip(), self.rank])
        name, message, rank = json.loads(self.store.compare_set(_FIRST_ERROR, "", told))
        return None if rank == self.rank else ErrorRecord(name, f"rank {rank}: {message}")


class AgreedStop(StopFlag):
    """A stop flag that every rank asks at the same places; each question is one small collective."""

    def __init__(self, ranks: Ranks, own: StopFlag) -> None:
        super().__init__()
        self._ranks, self._own = ranks, own

    def __call__(self) -> bool:
        """Whether any rank was asked to end."""
        number = self._ranks.largest(self._own.signal_number or 0)
        if number:
            self._own.request(number)
            self.request(number)
        return bool(number)

    def check(self) -> None:
        """Raise ``RunInterruptedError`` on all ranks if any was asked to end."""
        self()
        super().check()


def as_seen_elsewhere(error: Exception, rank: int) -> Exception:
    """``error`` as the other ranks raise it: itself where it is one of ours, else its name and text."""
    if isinstance(error, (CkptplanError, torch.cuda.OutOfMemoryError)):
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):  # some cannot be made again
            pickle.loads(pickle.dumps(error))
            return error
    return RankFailedError(f"rank {rank}: {type(error).__name__}: {error}", rank=rank)
