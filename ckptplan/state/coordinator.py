"""How the ranks of one job agree: the seam for launchers other than torch.distributed.

Everything that passes is JSON, and every call is made by the trainer's thread, in the same order on all ranks. The
writers agree among themselves through files in the attempt's folder.
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from ckptplan.errors import StateError

_PIECE_BYTES = 4 * 2**20  # of one value in a store; some take no more than 8 MiB
_rounds: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""By the name of the group; never begun anew, since what earlier rounds left may still be in the store."""
_outcomes: dict[str, list[str]] = defaultdict(list)
"""By the name of the group: keys of the last round, which rank 0 deletes when all have come to the next."""


class Coordinator(Protocol):
    """What the state engine needs from a launcher."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes save and load together."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value (JSON) of every rank, by rank; a barrier as well.

        On all ranks the same list, or an error on all. Raises StateError that names the rank when one does not answer
        in a bounded time, after which the next call works again.
        """


class OneProcess:
    """A job of one process."""

    rank = 0
    world_size = 1

    def all_gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]


class StoreCoordinator:
    """Ranks that meet in a store of torch.distributed: rank 0 collects what each has put there and puts back the whole.

    No collective of the process group is used: a rank that hangs or is gone would block one for as long as the group
    allows, and with nccl on the device's stream; afterwards the group could not be used again.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, timeout_s: float, name: str) -> None:
        """`store`: of torch.distributed; `name`: of the group in it, the same on all ranks and no other group's."""
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout_s, self._name = store, timeout_s, name
        self._done_with = _outcomes[name]

    def all_gather(self, value: Any) -> list[Any]:
        """Two exchanges with the store on each rank, as many as there are ranks on rank 0."""
        number = next(_rounds[self._name])
        with self._store_errors():
            self._put(self._post(number, self.rank), zlib.compress(json.dumps(value).encode(), 1))
            outcome = self._collect(number) if self.rank == 0 else self._await_outcome(number)
            if outcome.startswith("failed: "):
                raise StateError(outcome.removeprefix("failed: "))
            gathered: list[Any] = json.loads(zlib.decompress(self._get(f"{self._key(number)}/all", int(outcome))))
            return gathered

    def _collect(self, number: int) -> str:
        """On rank 0: waits for all others, publishes what they said, or who did not; returns what all ranks hear."""
        deadline = time.monotonic() + self._timeout_s
        said, done_with = [], list(self._done_with)
        for rank in range(self.world_size):
            key = self._post(number, rank)
            if not self._wait(key, deadline):
                return self._decide(number, self._failure(number))
            pieces = int(self._store.get(key))
            said.append(zlib.decompress(self._get(key, pieces)).decode())
            done_with += [key, *(f"{key}/{index}" for index in range(pieces))]
        whole = zlib.compress(f"[{','.join(said)}]".encode(), 1)
        key = f"{self._key(number)}/all"
        pieces = self._put_pieces(key, whole)
        outcome = self._decide(number, str(pieces))
        # All are here, so nobody looks back: this round's posts have been read, and the round before is over.
        for old in done_with:
            self._store.delete_key(old)
        self._done_with[:] = [f"{self._key(number)}/outcome", *(f"{key}/{index}" for index in range(pieces))]
        return outcome

    def _await_outcome(self, number: int) -> str:
        """On the others. Who gives up makes that the outcome for all, unless there is one by then."""
        key = f"{self._key(number)}/outcome"
        if self._wait(key, time.monotonic() + self._timeout_s):
            return str(self._store.get(key).decode())
        return self._decide(number, self._failure(number))

    def _decide(self, number: int, outcome: str) -> str:
        return str(self._store.compare_set(f"{self._key(number)}/outcome", "", outcome).decode())

    def _failure(self, number: int) -> str:
        silent = [rank for rank in range(self.world_size) if not self._store.check([self._post(number, rank)])]
        names = ", ".join(map(str, silent or [0]))  # all have spoken, and rank 0 has not put it together
        who = f"ranks {names} have" if len(silent) > 1 else f"rank {names} has"
        return f"failed: {who} not answered in {self._timeout_s:g} s: ended, hanging, or doing something else"

    def _key(self, number: int) -> str:
        return f"ckptplan.state/{self._name}/{number}"

    def _post(self, number: int, rank: int) -> str:
        return f"{self._key(number)}/{rank}"

    def _wait(self, key: str, deadline: float) -> bool:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            self._store.wait([key], datetime.timedelta(seconds=left_s))
        except RuntimeError:  # of stores of all kinds when the time is up
            return bool(self._store.check([key]))
        return True

    def _put(self, key: str, data: bytes) -> None:
        """The number of pieces comes last: as soon as it is there, so is everything."""
        self._store.set(key, str(self._put_pieces(key, data)))

    def _put_pieces(self, key: str, data: bytes) -> int:
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            self._store.set(f"{key}/{index}", piece)
        return len(pieces)

    def _get(self, key: str, pieces: int) -> bytes:
        return b"".join(self._store.get(f"{key}/{index}") for index in range(pieces))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistNetworkError and others: the process that holds the store is gone
            message = f"rank {self.rank} has lost the store in which the ranks meet; has rank 0 or the launcher ended?"
            raise StateError(f"{message} ({str(error).splitlines()[0][:200]})") from error


class TorchDistributed(StoreCoordinator):
    """The default process group of torch.distributed (or `group`), whatever its backend."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        store = dist.distributed_c10d._get_default_store()  # torch's own name for it has no public form
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(store, rank, world_size, timeout_s=timeout_s, name=str(chosen.group_name))


def current_coordinator(timeout_s: float) -> Coordinator:
    """That of torch.distributed if it has been set up by now, else one process.

    Asked at every save and load: a manager that was made before `init_process_group` must not think it is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed(timeout_s=timeout_s) if dist.get_world_size() > 1 else OneProcess()
    return OneProcess()
