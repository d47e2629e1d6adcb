"""Epochs: every sample once, an order of seed and epoch alone, the short batch, starting in the middle (B63-B66)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptplan.data import Batch, DataSpec
from ckptplan.data.dataset import Dataset
from ckptplan.data.digits import handwritten_digits
from ckptplan.data.images import labelled_images
from ckptplan.data.text import stdlib_text
from ckptplan.data.tokens import synthetic_tokens

sizes = st.integers(1, 60)
seeds = st.integers(-(2**40), 2**40)


def numbered(num_samples: int, batch_size: int, seed: int = 0, log: list[list[int]] | None = None) -> Dataset:
    """A data source whose samples are their own numbers; ``log`` gets what was read."""

    def read(numbers: Tensor) -> Batch:
        if log is not None:
            log.append(numbers.tolist())
        return Batch(inputs=numbers[:, None], targets=numbers)

    return Dataset(DataSpec("tokens", vocab_size=100, sequence_length=1), read, num_samples, 5, batch_size, seed)


def numbers_of(data: Dataset, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch.targets.tolist() for batch in data.epoch_batches(epoch, start)]


@given(sizes, sizes, seeds, st.integers(0, 1000))
def test_each_sample_is_seen_exactly_once_per_epoch_in_full_batches_and_one_short_one(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    data = numbered(num_samples, batch_size, seed)
    batches = numbers_of(data, epoch)
    assert sorted(number for batch in batches for number in batch) == list(range(num_samples))
    full, rest = divmod(num_samples, batch_size)
    assert [len(batch) for batch in batches] == [batch_size] * full + [rest] * (rest > 0)
    assert data.batches_per_epoch == len(batches)


@given(sizes, sizes, seeds, st.integers(0, 5), st.data())
def test_starting_at_a_batch_gives_the_rest_of_the_same_epoch_and_reads_nothing_before_it(
    num_samples: int, batch_size: int, seed: int, epoch: int, draw: st.DataObject
) -> None:
    whole = numbers_of(numbered(num_samples, batch_size, seed), epoch)
    start = draw.draw(st.integers(0, len(whole)))
    log: list[list[int]] = []
    assert numbers_of(numbered(num_samples, batch_size, seed, log), epoch, start) == whole[start:]
    assert log == whole[start:]


def test_batches_are_read_one_at_a_time_as_they_are_asked_for() -> None:
    log: list[list[int]] = []
    batches = numbered(10, 4, log=log).epoch_batches(0)
    assert log == []
    next(batches)
    assert len(log) == 1


def test_the_order_is_a_function_of_seed_and_epoch_whatever_was_asked_before() -> None:
    fresh = numbers_of(numbered(103, 4), 3)
    used = numbered(103, 4)
    for epoch in (0, 3, 1):
        numbers_of(used, epoch)
    assert numbers_of(used, 3) == fresh


def test_epochs_and_seeds_shuffle_differently_and_seed_plus_epoch_is_not_what_counts() -> None:
    grid = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = {(seed, epoch): tuple(map(tuple, numbers_of(numbered(103, 4, seed), epoch))) for seed, epoch in grid}
    assert len(set(orders.values())) == 9
    in_order = tuple(range(103))
    assert all(tuple(number for batch in order for number in batch) != in_order for order in orders.values())


def test_the_order_is_pinned_so_that_a_stored_position_means_the_same_in_every_version() -> None:
    assert numbers_of(numbered(10, 4, seed=0), 0) == [[2, 3, 7, 4], [5, 6, 9, 8], [1, 0]]


def test_a_first_batch_is_a_fair_draw() -> None:
    first = [numbers_of(numbered(4, 1, seed), epoch)[0][0] for seed in range(20) for epoch in range(20)]
    counts = np.bincount(first, minlength=4)
    # 400 draws of 4 equally likely numbers; chi-square with 3 degrees of freedom is above 16.3 once in a thousand
    assert ((counts - 100) ** 2 / 100).sum() < 16.3


def test_evaluation_reads_the_samples_after_the_training_ones_in_order_every_time() -> None:
    data = numbered(10, 2)
    for _ in range(2):
        assert [batch.targets.tolist() for batch in data.eval_batches()] == [[10, 11], [12, 13], [14]]


@pytest.mark.parametrize(
    ("epoch", "start", "message"),
    [
        (0, 4, "start=4; an epoch has 3 batches"),
        (0, -1, "start=-1 is too small"),
        (-1, 0, "epoch=-1 is too small"),
    ],
)
def test_a_position_outside_the_epoch_is_refused_at_once(epoch: int, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbered(10, 4).epoch_batches(epoch, start)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_an_impossible_batch_size_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} is too small"):
        numbered(10, batch_size)


SOURCES = {
    "stdlib_text": lambda: stdlib_text(sequence_length=16, batch_size=4, max_bytes=5000),
    "synthetic_tokens": lambda: synthetic_tokens(vocab_size=20, sequence_length=16, batch_size=4, num_samples=30),
    "labelled_images": lambda: labelled_images(channels=3, image_size=8, classes=5, batch_size=4, num_samples=30),
    "digits": lambda: handwritten_digits(image_size=8, batch_size=4),
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_source_draws_from_a_global_generator_or_listens_to_it(name: str) -> None:
    def read_all() -> list[Tensor]:
        data = SOURCES[name]()
        batches = [*data.epoch_batches(1), *data.eval_batches()]
        return [tensor for batch in batches for tensor in (batch.inputs, batch.targets)]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002 - the global generators are what is tested
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    first = read_all()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    random.seed(2), np.random.seed(2), torch.manual_seed(2)  # noqa: NPY002
    assert all(torch.equal(one, other) for one, other in zip(first, read_all(), strict=True))


@pytest.mark.parametrize("name", SOURCES)
def test_batches_have_the_shapes_types_and_ranges_that_the_spec_says(name: str) -> None:
    data = SOURCES[name]()
    spec = data.spec
    for batch in [*data.epoch_batches(0), *data.eval_batches()]:
        count = len(batch.inputs)
        assert batch.targets.dtype == torch.int64
        assert batch.inputs.is_contiguous()
        if spec.kind == "tokens":
            assert batch.inputs.shape == batch.targets.shape == (count, spec.sequence_length)
            assert batch.inputs.dtype == torch.int64
            assert 0 <= batch.inputs.min() <= batch.inputs.max() < spec.vocab_size
        else:
            assert batch.inputs.shape == (count, spec.channels, spec.image_size, spec.image_size)
            assert batch.inputs.dtype == torch.float32
            assert batch.targets.shape == (count,)
            assert 0 <= batch.targets.min() <= batch.targets.max() < spec.classes
    assert sum(len(batch.inputs) for batch in data.epoch_batches(0)) == data.num_train_samples
    assert sum(len(batch.inputs) for batch in data.eval_batches()) == data.num_eval_samples > 0
