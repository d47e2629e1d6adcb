"""Recomputation that a model brings along, compiled parts and wrappers are found and told by name."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint as renamed
from torch.utils.checkpoint import checkpoint_sequential

from ckptplan.apply import checkpointed
from ckptplan.autofit import fit
from ckptplan.errors import BlockDeclarationError, PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.wrappers import compiled_part, foreign_checkpoints, watched_calls


class Layer(nn.Module):
    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        return renamed(self.inner, x, use_reentrant=False) if self.calls else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CallsAround(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = renamed(layer, x, use_reentrant=False)
        return x


class CallsSequential(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def wrapped() -> nn.Module:
    model = Net()
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: type(m) is Layer)
    return model


def switched(name: str) -> nn.Module:
    model = Net()
    for layer in model.layers:
        setattr(layer, name, True)
    return model


PLAN = CheckpointPlan.from_text("R(0) R(1) K2", [f"layers.{i}" for i in range(3)])
FOREIGN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "CheckpointWrapper": (
        wrapped,
        r"layers\.0: a CheckpointWrapper \(torch\); use the module that it wraps \(and 2 more",
    ),
    "Hugging Face": (
        lambda: switched("gradient_checkpointing"),
        r"layers\.0: its switch gradient_checkpointing is on; call model\.gradient_checkpointing_disable\(\)",
    ),
    "timm": (
        lambda: switched("grad_checkpointing"),
        r"grad_checkpointing is on; call model\.set_grad_checkpointing\(False",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_recomputes_already_is_refused_by_name(name: str) -> None:
    make, message = FOREIGN[name]
    with pytest.raises(BlockDeclarationError, match=message):
        profile_model(make(), "layers.*", torch.randn(4, 8), loss_fn)
    with pytest.raises(PlanIncompatibleError, match=message):
        checkpointed(make(), PLAN)


@pytest.mark.parametrize(
    ("model", "caller"),
    [
        (Net(calls=True), "layers.0, layers.1, layers.2"),
        (CallsAround(), "the model's own forward"),
        (CallsSequential(), "the model's own forward"),
    ],
)
def test_calls_under_whatever_name_are_refused_with_the_caller(model: nn.Module, caller: str) -> None:
    with pytest.raises(BlockDeclarationError, match=f"torch.utils.checkpoint is called by {caller}; take the call out"):
        profile_model(model, "layers.*", torch.randn(4, 8), loss_fn)


def test_a_plain_model_calls_none_and_a_listening_profiler_is_left_alone() -> None:
    model = Net(calls=True)
    with watched_calls(model) as found:
        Net()(torch.randn(2, 8))
    assert found == []
    sys.setprofile(listener := lambda *_: None)
    try:
        with watched_calls(model) as found:
            model(torch.randn(2, 8))
        assert sys.getprofile() is listener
    finally:
        sys.setprofile(None)
    assert found == []


def test_fit_takes_the_place_of_a_switch_and_gives_it_back() -> None:
    model = switched("gradient_checkpointing")
    model.layers[1].gradient_checkpointing = False  # every second layer only
    said: list[str] = []
    fitted = fit(model, torch.randn(64, 8), loss_fn, 0.9, say=said.append)
    assert foreign_checkpoints(model) == []
    assert said[0] == "ckptplan: the model's own gradient checkpointing is switched off: the plan takes its place"
    fitted.remove()
    assert [layer.gradient_checkpointing for layer in model.layers] == [True, False, True]


def test_fit_gives_a_switch_back_where_it_fails() -> None:
    model = switched("gradient_checkpointing")
    with pytest.raises(BlockDeclarationError, match="names no module"):
        fit(model, torch.randn(64, 8), loss_fn, 0.9, blocks="blocks.*", say=None)
    assert all(layer.gradient_checkpointing for layer in model.layers)


class TestCompiled:
    """Order: the plan first, then torch.compile."""

    @staticmethod
    def compiled_before(how: str) -> nn.Module:
        model = Net()
        if how == "whole":
            return torch.compile(model, backend="eager")
        if how == "in place":
            model.compile(backend="eager")
        elif how == "block":
            model.layers[1] = torch.compile(model.layers[1], backend="eager")
        else:
            model.layers[1].compile(backend="eager")
        return model

    @pytest.mark.parametrize(
        ("how", "part"), [("whole", ""), ("in place", ""), ("block", "layers.1"), ("part", "layers.1")]
    )
    def test_compiled_before_is_refused_by_name(self, how: str, part: str) -> None:
        model = self.compiled_before(how)
        assert compiled_part(model) == part
        message = f"{part or 'the model'} is compiled already"
        with pytest.raises(BlockDeclarationError, match=message):
            profile_model(model, "layers.*", torch.randn(4, 8), loss_fn)
        with pytest.raises(PlanIncompatibleError, match=message):
            checkpointed(model, PLAN)

    # the compiler itself looks at the gradient of a tensor that is no leaf, where compiled code begins after a block
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
    @pytest.mark.parametrize("how", ["whole", "in place", "each block"])
    def test_compiled_afterwards_it_is_the_same_training(self, how: str) -> None:
        """B24: the stated order is the plan first; compiled code stops at planned blocks, which run as they are."""
        plain, batch = Net(), torch.randn(4, 8)
        planned = copy.deepcopy(plain)
        with checkpointed(planned, PLAN):
            run: nn.Module = planned
            if how == "whole":
                run = torch.compile(planned, backend="eager")
            elif how == "in place":
                planned.compile(backend="eager")
            else:
                for layer in planned.layers:
                    layer.compile(backend="eager")
            for _ in range(2):
                losses = [loss_fn(one, batch) for one in (run, plain)]
                for loss in losses:
                    loss.backward()
                assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(planned.parameters(), plain.parameters(), strict=True))


def test_a_data_parallel_wrapper_is_refused_with_the_remedy() -> None:
    model = nn.DataParallel(Net())
    with pytest.raises(BlockDeclarationError, match=r"wrapped in DataParallel: give model\.module"):
        profile_model(model, "layers.*", torch.randn(4, 8), loss_fn)
    with pytest.raises(PlanIncompatibleError, match=r"wrapped in DataParallel: give model\.module"):
        checkpointed(model, PLAN)
    profile_model(model.module, "layers.*", torch.randn(4, 8), loss_fn, num_warmup=0, num_trials=1)
