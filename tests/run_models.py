"""Models that runs of the tests meet something with: named by ``model._target_``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ckptplan.data import IGNORE_INDEX, Batch
from ckptplan.data.dataset import Dataset
from ckptplan.data.order import epoch_order, private_generator
from ckptplan.data.spec import DataSpec
from ckptplan.models import GPT


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _WrongWhenRecomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.tensor(2.0 if inside_backward() else 1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class WrongGradients(GPT):
    """Its first block's gradient is doubled if the block is recomputed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[0] = nn.Sequential(self.layers[0], _Wrong())


class _Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _WrongWhenRecomputed.apply(x)


class NanLoss(GPT):
    """Its logits are NaN."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float("nan")


class Breaks(GPT):
    """Its forward fails on every batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("the user's own fault")


class BreaksLater(GPT):
    """Its forward fails where gradients are wanted: not at the first look at it."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("the user's own fault")
        return super().forward(inputs)


class _Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.2, training=True)


class NoisyNet(nn.Module):
    """Blocks with dropout, which stays on in evaluation: that draws from the global stream too."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        wide = 16 * width  # so that a block keeps more than the random state that recomputing it needs
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), nn.Tanh(), nn.Linear(wide, width), _Dropped()) for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs.flatten(1))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


SEEN: list[int] = []
"""The numbers of all samples that were read, in order."""


class OwnLoader:
    """The same samples by a ``DataLoader`` of the user's, with two processes."""

    def __init__(self, batch_size: int = 4, num_samples: int = 103, seed: int = 0) -> None:
        self.source = noisy_samples(batch_size, num_samples, seed)
        self.spec, self.batch_size = self.source.spec, batch_size
        self.batches_per_epoch = self.source.batches_per_epoch

    def epoch_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return self._load(
            epoch_order(self.source.num_train_samples, self.source.seed, epoch)[start * self.batch_size :]
        )

    def eval_batches(self) -> Iterator[Batch]:
        return self._load(self.source.num_train_samples + torch.arange(self.source.num_eval_samples))

    def _load(self, numbers: Tensor) -> Iterator[Batch]:
        return iter(
            DataLoader(
                _Quiet(),
                batch_sampler=numbers.split(self.batch_size),
                collate_fn=_join,
                num_workers=2,
                generator=torch.Generator(),  # else each epoch draws from the global stream, and a resumed one again
            )
        )


class _Quiet(torch.utils.data.Dataset):
    def __getitem__(self, number: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(16, generator=private_generator(int(number)))
        return (torch.sin(number + torch.arange(16)) + 0.1 * noise).view(1, 4, 4), number % 3


def _join(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    inputs, targets = zip(*samples, strict=True)
    return Batch(torch.stack(inputs), torch.stack(targets))


def noisy_samples(batch_size: int = 4, num_samples: int = 103, seed: int = 0) -> Dataset:
    """Samples to which each read adds noise from the global streams of torch, NumPy and Python."""

    def read(numbers: Tensor) -> Batch:
        SEEN.extend(numbers.tolist())
        base = torch.sin(numbers.float()[:, None] + torch.arange(16)).reshape(-1, 1, 4, 4)
        shift = random.random() + np.random.random()  # noqa: NPY002 (the global streams are the point)
        return Batch(base + 0.1 * torch.randn(base.shape) + 0.1 * shift, numbers % 3)

    spec = DataSpec("images", channels=1, image_size=4, classes=3)
    return Dataset(spec, read, num_samples, 12, batch_size, seed, one_shape=True)


def texts_of_many_lengths(
    *, vocab_size: int, sequence_length: int, batch_size: int, seed: int = 0, **further: Any
) -> Dataset:
    """Texts of 2 to ``sequence_length`` tokens, padded to the longest of their batch; only the last one is as long."""
    num_samples = 64
    generator = private_generator(seed)
    lengths = torch.randint(2, sequence_length // 2, (num_samples + 8,), generator=generator)
    lengths[num_samples - 1] = sequence_length

    def read(numbers: Tensor) -> Batch:
        most = int(lengths[numbers].max())
        tokens = (numbers[:, None] + torch.arange(most + 1)) % vocab_size
        padded = torch.arange(most) >= lengths[numbers][:, None]
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].masked_fill(padded, IGNORE_INDEX))

    spec = DataSpec("tokens", vocab_size=vocab_size, sequence_length=sequence_length)
    return Dataset(spec, read, num_samples, 8, batch_size, seed)
