"""Seeded synthetic tokens with a pattern that a language model can learn."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptplan.data import Batch
from ckptplan.data.checks import require_int, require_number
from ckptplan.data.dataset import Dataset
from ckptplan.data.order import private_generator
from ckptplan.data.spec import DataSpec


def synthetic_tokens(
    *,
    vocab_size: int,
    sequence_length: int,
    batch_size: int,
    num_samples: int = 2048,
    num_eval_samples: int = 64,
    noise: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Sequences in which every token has one fixed successor, except that a fraction ``noise`` of tokens is random.

    The successors are a random permutation of the vocabulary. A model that knows it reaches a loss of
    about ``noise * ln(vocab_size)`` plus the entropy of the noise itself. Samples depend on ``seed`` alone.
    """
    require_int("vocab_size", vocab_size, minimum=2)
    require_int("sequence_length", sequence_length)
    num_all = require_int("num_samples", num_samples) + require_int("num_eval_samples", num_eval_samples, minimum=0)
    require_number("noise", noise, maximum=1)
    generator = private_generator(seed)
    successor = torch.randperm(vocab_size, generator=generator)
    shape = (num_all, sequence_length + 1)
    tokens = torch.randint(vocab_size, shape, generator=generator)  # what stays random: the first token and the noise
    is_noise = torch.rand(shape, generator=generator) < noise
    for position in range(1, sequence_length + 1):
        following = successor[tokens[:, position - 1]]
        tokens[:, position] = torch.where(is_noise[:, position], tokens[:, position], following)

    def read(numbers: Tensor) -> Batch:
        samples = tokens[numbers]  # (B, T + 1)
        return Batch(inputs=samples[:, :-1].contiguous(), targets=samples[:, 1:].contiguous())

    spec = DataSpec("tokens", vocab_size=vocab_size, sequence_length=sequence_length)
    return Dataset(spec, read, num_samples, num_eval_samples, batch_size, seed, one_shape=True)
