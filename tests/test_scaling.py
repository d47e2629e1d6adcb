"""Figures at a third batch size from those at two; the oracle is the model measured there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ckptplan.errors import PlanIncompatibleError
from ckptplan.larger_inputs import INPUTS_KEY
from ckptplan.measure import profile_model
from ckptplan.models.gpt import GPT
from ckptplan.planners import least_nested_peak, no_checkpoint_peak
from ckptplan.profiles import ChainProfile
from ckptplan.scaling import AffineProfile, largest


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def transformer(size: int) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(size, 16, 32)


def gpt(size: int) -> tuple[nn.Module, Tensor]:
    return GPT(layers=3, width=32, heads=2, sequence_length=16, vocab_size=50), torch.randint(50, (size, 16))


def convolutions(size: int) -> tuple[nn.Module, Tensor]:
    stages = (nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3))
    return nn.Sequential(*stages), torch.randn(size, 8, 6, 6)


def measured(kind: object, size: int) -> ChainProfile:
    model, batch = kind(size)  # type: ignore[operator]
    return profile_model(model, None, batch, loss_fn, num_warmup=0, num_trials=1, memory="live")


@pytest.mark.parametrize("kind", [transformer, gpt, convolutions])
def test_the_peaks_at_any_size_are_those_measured_there(kind: object) -> None:
    at = AffineProfile(measured(kind, 2), 2, measured(kind, 6), 6)
    for size in (3, 9, 17):
        there = measured(kind, size)
        assert no_checkpoint_peak(at(size)) == no_checkpoint_peak(there), size
        assert least_nested_peak(at(size)) == least_nested_peak(there), size
        for found, real in zip(at(size), there, strict=True):
            assert found.forward_flops == real.forward_flops
            assert found.recompute_flops == real.recompute_flops
        assert at(size).environment.get(INPUTS_KEY) == there.environment.get(INPUTS_KEY)


def test_the_sizes_that_were_measured_give_what_was_measured() -> None:
    low, high = measured(gpt, 2), measured(gpt, 6)
    at = AffineProfile(low, 2, high, 6)
    assert no_checkpoint_peak(at(2)) == no_checkpoint_peak(low)
    assert no_checkpoint_peak(at(6)) == no_checkpoint_peak(high)


@pytest.mark.parametrize(
    ("low_ms", "high_ms", "size", "expected_ms"),
    [
        (2.0, 4.0, 16, 8.0),  # 0 fixed and 0.5 a sample
        (3.0, 4.0, 16, 6.0),  # 2 fixed and 0.25 a sample
        (5.0, 4.0, 16, 4.0),  # noise: more samples are not faster
        (1.0, 4.0, 16, 8.0),  # noise: no fixed part below zero
        (1.0, 4.0, 2, 1.0),
    ],
)
def test_times_have_a_fixed_part_and_a_part_for_each_sample_and_neither_is_negative(
    low_ms: float, high_ms: float, size: int, expected_ms: float
) -> None:
    low, high = measured(gpt, 4), measured(gpt, 8)
    low = replace(low, blocks=tuple(replace(block, forward_time_ms=low_ms) for block in low))
    high = replace(high, blocks=tuple(replace(block, forward_time_ms=high_ms) for block in high))
    assert AffineProfile(low, 4, high, 8)(size)[0].forward_time_ms == pytest.approx(expected_ms)


def test_profiles_of_other_chains_are_refused() -> None:
    low, high = measured(gpt, 2), measured(transformer, 6)
    with pytest.raises(PlanIncompatibleError, match="cannot be scaled"):
        AffineProfile(low, 2, high, 6)
    with pytest.raises(PlanIncompatibleError, match="cannot be scaled"):
        AffineProfile(low, 2, replace(low, blocks=low.blocks[:2]), 6)
    with pytest.raises(ValueError, match="low_size=6, high_size=2; expected 0 < low_size < high_size"):
        AffineProfile(low, 6, low, 2)


def test_the_largest_that_fits_is_found_as_by_trying_all() -> None:
    for limit in range(12):
        for most in range(1, 12):
            fits = [size for size in range(1, most + 1) if size <= limit]
            assert largest(lambda size: size <= limit, most) == max(fits, default=0)  # noqa: B023
