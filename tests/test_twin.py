"""The twin to measure on: same numbers, same memory of weights, and nothing else of the caller's model."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ckptplan.errors import BlockDeclarationError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import prove_model
from ckptplan.randomness import random_state_restored, seed_everything
from ckptplan.subject import Trials
from ckptplan.twin import make_twin, own_written_weights


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


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("blocks", [None, "layers.*"])
def test_a_loss_that_needs_what_a_users_hook_collects_is_refused_by_name(blocks: str | None) -> None:
    model, collected = Wide(), {}
    model.layers[1].register_forward_hook(lambda module, args, output: collected.update(hidden=output))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() + collected["hidden"].mean()

    said = r"\(KeyError: 'hidden'\).*no hooks of yours \(they are on layers.1\)"
    with pytest.raises(BlockDeclarationError, match=said):
        profile_model(model, blocks, torch.ones(2, 8), loss_fn, num_warmup=0, num_trials=1)


def test_an_error_of_a_model_without_hooks_stays_its_own() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        profile_model(Wide(), None, torch.ones(2, 8), loss_fn, num_warmup=0, num_trials=1)


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


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("start", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-0.01, 0.01)
        if self.start is None:
            self.start = x.detach().mean(0)
        return self.second(self.first(x)) + self.start


@pytest.mark.parametrize("find", [True, False])
def test_weights_that_a_forward_writes_to_stay_the_callers_through_profile_and_proof(find: bool) -> None:
    model = nn.Sequential(Clamps(), *(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(32, 4)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    paths = None if find else "*"
    profile = profile_model(model, paths, batch, loss_fn, num_warmup=0, num_trials=1)
    plan = CheckpointPlan.from_text("K0 R(1) K2 K3", profile)
    proof = prove_model(model, plan, batch, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
    assert proof.gradients.bitwise_equal
    assert "writes to its parameter '0.first.weight'" in (profile[0].exclusion_reason or "")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


def test_only_weights_that_are_written_get_memory_of_their_own() -> None:
    model = Clamps()
    (twin,) = make_twin([model])
    own_written_weights(model, twin, lambda trial: trial(torch.ones(2, 4)), torch.device("cpu"))
    assert twin.first.weight.data_ptr() != model.first.weight.data_ptr()
    assert torch.equal(twin.first.weight, model.first.weight)
    assert twin.second.weight.data_ptr() == model.second.weight.data_ptr()
