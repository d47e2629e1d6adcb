"""Each rank's share of every global batch, so that many processes train on the same batches as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ckptplan.config.checks import check_batch_divides
from ckptplan.data import IGNORE_INDEX, Batch
from ckptplan.data.dataset import Dataset
from ckptplan.engine.ranks import Ranks
from ckptplan.errors import ConfigError


@dataclass(frozen=True)
class EmptyShare(Batch):
    """One sample that nothing is to be learnt from: for the rank that has no share of a short last batch.

    It runs the step all the same, because the others wait for it in every collective.
    """


def num_samples(batch: Batch) -> int:
    """Samples of the batch that count."""
    return 0 if isinstance(batch, EmptyShare) else len(batch.targets)


def bounds(num: int, rank: int, size: int) -> tuple[int, int]:
    """(first, behind the last) of the ``num`` samples that rank takes; sizes differ by one at most."""
    whole, rest = divmod(num, size)
    first = rank * whole + min(rank, rest)
    return first, first + whole + (rank < rest)


class SharedData:
    """A data set of which every batch is shared among the ranks.

    ``batch_size``, ``batches_per_epoch`` and positions are those of the whole: global. Sources of ours read only their
    share; any other is read whole and cut.
    """

    def __init__(self, data: Any, ranks: Ranks) -> None:
        size = getattr(data, "batch_size", None)
        if not isinstance(size, int):
            raise ConfigError(
                f"data: {type(data).__name__} has no batch_size, which {ranks.data_size} ranks have to share evenly; "
                "give it one, or use engine=single"
            )
        check_batch_divides(size, ranks.data_size)
        self.whole, self.ranks, self.batch_size, self.spec = data, ranks, size, data.spec
        self._reads_share = isinstance(data, Dataset)
        self.one_shape = bool(getattr(data, "one_shape", False))
        self._data = replace(data, read=self._read_share) if isinstance(data, Dataset) else data

    def with_workers(self, workers: int) -> SharedData:
        """The same, read by so many processes on each rank; for a ``Dataset``."""
        return SharedData(replace(self.whole, workers=workers), self.ranks)

    @property
    def batches_per_epoch(self) -> int:
        """Global micro-batches in an epoch."""
        return int(self.whole.batches_per_epoch)

    def epoch_batches(self, epoch: int, start: int = 0, **further: int) -> Iterator[Batch]:
        """This rank's share of each micro-batch of the epoch, from number ``start`` on."""
        return self._shares(self._data.epoch_batches(epoch, start=start, **further))

    def largest_batch(self) -> Batch | None:
        """This rank's share of the largest one, where the data says which that is."""
        own = getattr(self.whole, "largest_batch", None)
        batch = own() if callable(own) else None
        return None if batch is None else _cut(batch, *self._bounds(len(batch.targets)))

    def eval_batches(self) -> Iterator[Batch]:
        """This rank's share of each evaluation batch."""
        return self._shares(self._data.eval_batches())

    def _bounds(self, num: int) -> tuple[int, int]:
        return bounds(num, self.ranks.data_rank, self.ranks.data_size)

    def _shares(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._reads_share:
            return iter(batches)
        return (_cut(batch, *self._bounds(len(batch.targets))) for batch in batches)

    def _read_share(self, numbers: Tensor) -> Batch:
        first, end = self._bounds(len(numbers))
        if first == end:
            return _nothing_of(self.whole.read(numbers[:1]))
        batch: Batch = self.whole.read(numbers[first:end])
        return batch


def _cut(batch: Batch, first: int, end: int) -> Batch:
    if first == end:
        return _nothing_of(replace(batch, inputs=batch.inputs[:1], targets=batch.targets[:1]))
    return replace(batch, inputs=batch.inputs[first:end], targets=batch.targets[first:end])


def _nothing_of(batch: Batch) -> Batch:
    return EmptyShare(batch.inputs, torch.full_like(batch.targets, IGNORE_INDEX))
