"""The twin to measure on: same numbers, same memory of weights, and nothing else of the caller's model."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ckptplan.randomness import random_state_restored, seed_everything
from ckptplan.twin import make_twin


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: list[float] = []
        self.extra = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        self.extra += 1
        return self.norm(self.linear(x))


def test_weights_share_memory_but_not_gradients_or_objects() -> None:
    model = Stateful()
    (twin,) = make_twin([model])
    assert twin.linear.weight is not model.linear.weight
    assert twin.linear.weight.data_ptr() == model.linear.weight.data_ptr()
    twin(torch.ones(2, 4)).sum().backward()
    assert twin.linear.weight.grad is not None
    assert model.linear.weight.grad is None


def test_buffers_attributes_and_tensors_in_attributes_are_the_twins_own() -> None:
    model = Stateful()
    (twin,) = make_twin([model])
    twin(torch.ones(2, 4))
    assert (model.calls, model.seen) == (0, [])
    assert torch.equal(model.extra, torch.ones(3))
    assert model.norm.num_batches_tracked == 0
    assert twin.norm.num_batches_tracked == 1


def test_one_parameter_used_twice_is_one_in_the_twin_and_modules_named_apart_stay_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    twin, block = make_twin([model, model[1]])
    assert twin[0].weight is twin[1].weight
    assert block is twin[1]


def test_frozen_parameters_stay_frozen() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    (twin,) = make_twin([model])
    assert (twin.weight.requires_grad, twin.bias.requires_grad) == (True, False)


def test_no_hook_of_the_users_fires() -> None:
    fired = []
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *a: fired.append("forward"))
    model[0].register_forward_pre_hook(lambda *a: fired.append("pre"))
    model[0].register_forward_pre_hook(lambda m, a, k: fired.append("pre kw"), with_kwargs=True)
    model[0].register_full_backward_hook(lambda *a: fired.append("backward"))
    model[0].weight.register_hook(lambda g: fired.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    (twin,) = make_twin([model])
    twin(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert fired == []
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert sorted(fired) == ["accumulated", "backward", "forward", "gradient", "pre", "pre kw"]


@pytest.mark.parametrize("norm", ["old spectral", "spectral", "old weight", "weight"])
def test_hooks_that_compute_weights_are_kept(norm: str) -> None:
    linear = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older forms say that they are the older forms
        model = {
            "old spectral": nn.utils.spectral_norm,
            "spectral": nn.utils.parametrizations.spectral_norm,
            "old weight": nn.utils.weight_norm,
            "weight": nn.utils.parametrizations.weight_norm,
        }[norm](linear)
    model.eval()
    x = torch.randn(3, 4)
    (twin,) = make_twin([model])
    assert torch.equal(twin(x), model(x))
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_copied_is_shared_and_the_rest_copied() -> None:
    model = Stateful()
    model.lock = threading.Lock()
    (twin,) = make_twin([model])
    assert twin.lock is model.lock
    assert twin.seen is not model.seen
    assert twin.linear.weight.data_ptr() == model.linear.weight.data_ptr()


def test_a_tensor_with_history_in_an_attribute_does_not_stop_the_twin() -> None:
    model = Stateful()
    model.last = model(torch.ones(2, 4))  # not a leaf: torch refuses to copy it
    (twin,) = make_twin([model])
    assert twin.linear.weight is not model.linear.weight
    assert twin(torch.ones(2, 4)).shape == (2, 4)


def test_random_streams_are_put_back_also_after_an_error() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    def draw_and_fail() -> None:
        draws()
        raise KeyError("midway")

    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with pytest.raises(KeyError, match="midway"), random_state_restored(torch.device("cpu")):
        draw_and_fail()
    assert draws() == expected
