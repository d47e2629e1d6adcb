"""A plan stays the plan of its model after training steps that change attributes, and of no other model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import checkpointed
from ckptplan.blocks import changed_settings, settings_of
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan


class Config:
    def __init__(self) -> None:
        self.slope, self.kind = 0.1, None


class Counting(nn.Module):
    """Counts its calls, and notes in its configuration what it found out, as transformers' classifiers do."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear, self.config, self.calls = nn.Linear(8, 8), config, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.config.kind = self.config.kind or "found out"
        return nn.functional.leaky_relu(self.linear(x), self.config.slope)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList([Counting(self.config), nn.Linear(8, 8), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


def planned(model: nn.Module) -> CheckpointPlan:
    profile = profile_model(model, "layers.*", torch.randn(16, 8), loss_fn, num_warmup=0, num_trials=1)
    return CheckpointPlan.from_json(CheckpointPlan.from_text("K0 R(1) K2", profile).to_json())


def test_a_context_in_each_step_of_a_loop_is_the_same_model() -> None:
    model = Net()
    plan = planned(model)
    for _ in range(3):
        with checkpointed(model, plan):
            loss_fn(model, torch.randn(16, 8)).backward()
    assert (model.layers[0].calls, model.config.kind) == (3, "found out")
    with checkpointed(Net(), plan):  # as in a new process, before any step
        pass


def test_a_plan_made_after_some_steps_is_that_of_the_model_after_more() -> None:
    model = Net()
    loss_fn(model, torch.randn(16, 8)).backward()
    plan = planned(model)
    for _ in range(2):
        with checkpointed(model, plan):
            loss_fn(model, torch.randn(16, 8)).backward()


@pytest.mark.parametrize("steps", [0, 2])
def test_another_setting_is_another_model_before_and_after_steps(steps: int) -> None:
    model = Net()
    plan = planned(model)
    for _ in range(steps):
        loss_fn(model, torch.randn(16, 8)).backward()
    model.config.slope = 0.2
    with pytest.raises(PlanIncompatibleError, match="is not the one that was profiled"):
        checkpointed(model, plan)


def test_changes_are_named_by_attribute_also_within_an_object() -> None:
    module = nn.Module()
    module.calls, module.held, module.same = 1, SimpleNamespace(a=1, b=2), "x"
    before = settings_of(module)
    module.calls, module.held.b, module.new = 2, 3, 0
    assert changed_settings(before, settings_of(module)) == {"calls", "held.b", "new"}
