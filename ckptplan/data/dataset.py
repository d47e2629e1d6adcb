"""Samples by number, served in batches: shuffling, the last short batch, and starting in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ckptplan.data import Batch
from ckptplan.data.checks import require_int
from ckptplan.data.loading import CAN_HAVE_WORKERS, Place, read_batches
from ckptplan.data.order import epoch_order, mixed_seed
from ckptplan.data.spec import DataSpec

_EVALUATION = -1  # stands for the epoch there


@dataclass(frozen=True)
class Dataset:
    """A data source; samples 0 .. num_train_samples - 1 are for training, the next num_eval_samples for evaluation.

    Attributes:
        spec: the form of a batch.
        read: (int64 sample numbers) -> Batch of these samples, in this order. It may draw from the global random
            streams of Python, NumPy and torch: they are seeded for each batch (``loading.py``).
        batch_size: samples per micro-batch; the last one of an epoch holds what is left.
        seed: with the epoch, decides the order of the training samples.
        one_shape: no batch is larger than the first; False: not known, and a run looks at those that it will read.
        workers: processes that read batches ahead; 0: each is read in this process when it is asked for. The batches
            are the same.
    """

    spec: DataSpec
    read: Callable[[Tensor], Batch]
    num_train_samples: int
    num_eval_samples: int
    batch_size: int
    seed: int = 0
    workers: int = 0
    one_shape: bool = False

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size)
        require_int("num_train_samples", self.num_train_samples)
        require_int("num_eval_samples", self.num_eval_samples, minimum=0)
        if require_int("workers", self.workers, minimum=0) and not CAN_HAVE_WORKERS:
            raise ValueError(f"workers={self.workers}; only Linux can have processes that read: expected 0")

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches in one epoch, a last short one included."""
        return -(-self.num_train_samples // self.batch_size)

    def epoch_batches(self, epoch: int, start: int = 0, skip: int = 0) -> Iterator[Batch]:
        """The micro-batches of one epoch, from number ``start`` (0-based) on; those before it are not read.

        ``skip``: so many samples more are passed over, for an epoch that was begun with another ``batch_size``.
        """
        require_int("epoch", epoch, minimum=0)
        if require_int("start", start, minimum=0) > self.batches_per_epoch:
            raise ValueError(
                f"start={start}; an epoch has {self.batches_per_epoch} batches, expected 0 <= start <= that"
            )
        order = epoch_order(self.num_train_samples, self.seed, epoch)
        return self._batches(order, epoch, start * self.batch_size + require_int("skip", skip, minimum=0))

    def eval_batches(self) -> Iterator[Batch]:
        """All evaluation samples, always in the same order."""
        numbers = torch.arange(self.num_train_samples, self.num_train_samples + self.num_eval_samples)
        return self._batches(numbers, _EVALUATION)

    def _batches(self, order: Tensor, epoch: int, first: int = 0) -> Iterator[Batch]:
        firsts = range(first, len(order), self.batch_size)
        places = (
            Place(order[place : place + self.batch_size], mixed_seed(self.seed, epoch, place)) for place in firsts
        )
        return read_batches(self.read, places, min(self.workers, len(firsts)))
