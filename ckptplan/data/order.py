"""The order of samples: a function of seed and epoch, drawn from a generator of its own."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def private_generator(*numbers: int) -> torch.Generator:
    """A CPU generator seeded from all ``numbers`` together; torch's global generator is not touched."""
    return torch.Generator().manual_seed(mixed_seed(*numbers))


def mixed_seed(*numbers: int) -> int:
    """One seed (0 .. 2**64 - 1) of all ``numbers`` together.

    They are hashed and not added: with a sum, epoch 1 of seed 0 would be epoch 0 of seed 1.
    """
    digest = hashlib.blake2b(",".join(str(int(number)) for number in numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The numbers 0 .. num_samples - 1, each once, int64, shuffled for this epoch (counted from 0)."""
    return torch.randperm(num_samples, generator=private_generator(seed, epoch))
