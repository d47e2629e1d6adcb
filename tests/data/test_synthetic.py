"""Synthetic tokens and images, and the digits: what is in them, and that it can be learnt."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from ckptplan.data.digits import handwritten_digits
from ckptplan.data.images import labelled_images
from ckptplan.data.tokens import synthetic_tokens


def token_pairs(noise: float, seed: int = 0) -> np.ndarray:
    """How often token b follows token a, (20, 20)."""
    data = synthetic_tokens(vocab_size=20, sequence_length=50, batch_size=400, num_samples=400, noise=noise, seed=seed)
    (batch,) = data.epoch_batches(0)
    pairs = np.zeros((20, 20), dtype=int)
    np.add.at(pairs, (batch.inputs.flatten().numpy(), batch.targets.flatten().numpy()), 1)
    return pairs


def test_without_noise_each_token_has_one_successor_and_no_two_share_it() -> None:
    pairs = token_pairs(noise=0.0)
    assert ((pairs > 0).sum(axis=1) == 1).all()
    assert ((pairs > 0).sum(axis=0) == 1).all()


def test_noise_replaces_the_stated_fraction_of_successors() -> None:
    pairs = token_pairs(noise=0.2)
    follows = pairs.max(axis=1).sum() / pairs.sum()
    # a fifth is redrawn from 20 tokens, one of which is the successor; 20,000 pairs, standard deviation 0.003
    assert follows == pytest.approx(0.8 + 0.2 / 20, abs=0.012)


def test_the_seed_decides_the_successors() -> None:
    assert (token_pairs(0.0, seed=0) == token_pairs(0.0, seed=0)).all()
    assert (token_pairs(0.0, seed=0) != token_pairs(0.0, seed=1)).any()


def test_inputs_and_targets_overlap_by_all_but_one_token() -> None:
    data = synthetic_tokens(vocab_size=20, sequence_length=9, batch_size=30, num_samples=30)
    (batch,) = data.epoch_batches(0)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_images_of_one_class_share_a_pattern_under_noise_of_the_stated_size() -> None:
    data = labelled_images(channels=2, image_size=8, classes=4, batch_size=400, num_samples=400, noise_std=0.5)
    (batch,) = data.epoch_batches(0)
    assert torch.bincount(batch.targets).tolist() == [100] * 4
    means = torch.stack([batch.inputs[batch.targets == label].mean(0) for label in range(4)])
    residual = batch.inputs - means[batch.targets]
    assert residual.std().item() == pytest.approx(0.5, rel=0.02)
    # each 2 x 2 cell of a pattern is one value; the mean of 100 images still has noise of 0.05
    cells = means.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    assert cells.std(dim=-1).mean().item() == pytest.approx(0.05, rel=0.3)
    assert torch.pdist(means.flatten(1)).min() > 5  # 128 pixels of standard deviation 1 each


def test_an_image_is_the_same_whenever_it_is_read_and_without_noise_it_is_the_pattern() -> None:
    data = labelled_images(channels=1, image_size=8, classes=3, batch_size=7, num_samples=20, noise_std=1.0)
    one_by_one = torch.cat([data.read(torch.tensor([number])).inputs for number in range(20)])
    assert torch.equal(data.read(torch.arange(20)).inputs, one_by_one)
    plain = labelled_images(channels=1, image_size=8, classes=3, batch_size=7, num_samples=20, noise_std=0.0)
    images = plain.read(torch.arange(6)).inputs
    assert torch.equal(images[:3], images[3:])


def test_evaluation_images_are_not_training_images() -> None:
    data = labelled_images(channels=1, image_size=8, classes=3, batch_size=30, num_samples=30, num_eval_samples=30)
    (train,), (evaluation,) = data.epoch_batches(0), data.eval_batches()
    assert torch.cdist(train.inputs.flatten(1), evaluation.inputs.flatten(1)).min() > 1


def test_digits_are_those_of_scikit_learn_all_of_them_once() -> None:
    from sklearn.datasets import load_digits

    collection = load_digits()
    data = handwritten_digits(image_size=8, batch_size=100, channels=2)
    assert (data.num_train_samples, data.num_eval_samples) == (1797 - 359, 359)
    batch = data.read(torch.arange(1797))
    assert batch.targets.tolist() == collection.target.tolist()
    for channel in range(2):
        np.testing.assert_allclose(batch.inputs[:, channel].numpy(), collection.images / 8 - 1, atol=1e-6)


def test_digits_can_be_scaled_and_some_left_out() -> None:
    data = handwritten_digits(image_size=16, batch_size=100, classes=3)
    (spec,) = {data.spec}
    assert (spec.channels, spec.image_size, spec.classes) == (1, 16, 3)
    labels = torch.cat([batch.targets for batch in [*data.epoch_batches(0), *data.eval_batches()]])
    assert torch.bincount(labels).tolist() == [178, 182, 177]  # as scikit-learn documents the collection


def test_digits_without_scikit_learn_say_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ModuleNotFoundError, match=re.escape("type pip install -e '.[digits]', or data=labelled_images")
    ):
        handwritten_digits(image_size=8, batch_size=4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: synthetic_tokens(vocab_size=1, sequence_length=4, batch_size=1), ValueError, "vocab_size=1"),
        (lambda: synthetic_tokens(vocab_size=9, sequence_length=4, batch_size=1, noise=1.5), ValueError, "noise=1.5"),
        (lambda: synthetic_tokens(vocab_size=9, sequence_length=4.0, batch_size=1), TypeError, "sequence_length=4.0"),
        (lambda: labelled_images(channels=1, image_size=8, classes=1, batch_size=1), ValueError, "classes=1"),
        (
            lambda: labelled_images(channels=1, image_size=8, classes=2, batch_size=1, noise_std=float("nan")),
            ValueError,
            "noise_std=nan",
        ),
        (
            lambda: handwritten_digits(image_size=8, batch_size=1, classes=11),
            ValueError,
            "classes=11; expected 2 to 10",
        ),
        (lambda: handwritten_digits(image_size=8, batch_size=1, eval_fraction=1), ValueError, "eval_fraction=1"),
    ],
)
def test_impossible_arguments_are_refused_by_name_and_value(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()
