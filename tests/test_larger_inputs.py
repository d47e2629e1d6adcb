"""A forward on more than was measured is told, by a plan from a file as by ``fit``."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import checkpointed
from ckptplan.errors import LargerBatchWarning
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints

BATCH, LENGTH, WIDTH = 8, 6, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in "123")

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if scale is None else x * scale


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


def planned(model: nn.Module) -> CheckpointPlan:
    profile = profile_model(model, "layers.*", torch.randn(BATCH, LENGTH, WIDTH), loss_fn, num_warmup=0, num_trials=1)
    return plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.9, cost="flops")


def step(model: nn.Module, *shape: int) -> None:
    loss_fn(model, torch.randn(shape)).backward()


def is_told(model: nn.Module, *shape: int) -> bool:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(model, *shape)
    return any(isinstance(warning.message, LargerBatchWarning) for warning in told)


def test_a_plan_from_a_file_tells_of_more_than_was_measured_and_nothing_once_it_is_off(tmp_path: Path) -> None:
    model = Net()
    planned(model).save(tmp_path / "plan.json")
    with checkpointed(model, CheckpointPlan.load(tmp_path / "plan.json")):
        assert not is_told(model, BATCH, LENGTH, WIDTH)
        with torch.no_grad():
            model(torch.randn(2 * BATCH, LENGTH, WIDTH))
        message = r"inputs \[9,6,16\], larger than those that were measured \(\[8,6,16\]\)"
        with pytest.warns(LargerBatchWarning, match=message):
            step(model, BATCH + 1, LENGTH, WIDTH)
        assert not is_told(model, BATCH + 1, LENGTH, WIDTH)
        assert is_told(model, BATCH + 2, LENGTH, WIDTH)
    assert not is_told(model, 5 * BATCH, LENGTH, WIDTH)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("batch", "length", "told"),
    [(BATCH, LENGTH, False), (1, LENGTH, False), (BATCH // 2, 2 * LENGTH, True), (1, 2 * LENGTH, False)],
)
def test_as_many_elements_in_longer_inputs_are_larger(batch: int, length: int, told: bool) -> None:
    model = Net()
    with checkpointed(model, planned(model)):
        assert is_told(model, batch, length, WIDTH) == told


def test_copies_of_the_model_tell_too() -> None:
    model = Net()
    patch = checkpointed(model, planned(model)).permanent()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    patch.remove()
    assert [is_told(each, BATCH + 1, LENGTH, WIDTH) for each in (model, *copies)] == [False, True, True]


def test_a_plan_written_by_hand_tells_nothing() -> None:
    model = Net()
    with checkpointed(model, CheckpointPlan.from_text("R(0) K1 K2", [f"layers.{i}" for i in range(3)])):
        assert not is_told(model, 5 * BATCH, LENGTH, WIDTH)


def test_it_is_told_at_the_users_line_before_anything_runs() -> None:
    model, ran = Net(), []
    with checkpointed(model, planned(model)):
        model.layers[0].register_forward_pre_hook(lambda *_: ran.append("block"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", LargerBatchWarning)
            with pytest.raises(LargerBatchWarning):
                step(model, BATCH + 1, LENGTH, WIDTH)
        assert ran == []
        with pytest.warns(LargerBatchWarning) as told:
            model(torch.randn(BATCH + 2, LENGTH, WIDTH))
    assert told[0].filename == __file__
