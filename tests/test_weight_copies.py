"""Autocast's copies of weights are a row of every prediction: counted by hooks that share no code with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan.apply import checkpointed
from ckptplan.certificate import certify
from ckptplan.errors import BlockDeclarationError
from ckptplan.explanation import explain
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import simulate_plan
from tests.flow_models import Feed, Residual, Stack

LossFn = Callable[[nn.Module, Any], Tensor]


def under_autocast(*, cache: bool) -> LossFn:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            return model(batch).float().square().mean()

    return loss_fn


def profiled(model: nn.Module, loss_fn: LossFn, **options: Any) -> ChainProfile:
    return profile_model(model, "layers.*", torch.randn(32, 8), loss_fn, num_warmup=0, num_trials=1, **options)


def copies_held(model: nn.Module, plan: CheckpointPlan, loss_fn: LossFn) -> int:
    """Bytes of what autograd saves in a planned forward and holds the values of a weight in bfloat16."""
    rounded = [p.detach().bfloat16() for p in model.parameters()]
    held: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        values = [w for w in rounded if w.numel() == saved.numel() and saved.dtype == w.dtype]
        if any(torch.equal(saved.flatten().sort()[0], w.flatten().sort()[0]) for w in values):
            held[saved.untyped_storage().data_ptr()] = saved
        return saved

    with checkpointed(model, plan), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = loss_fn(model, torch.randn(32, 8))
    assert loss.requires_grad
    return sum(saved.untyped_storage().nbytes() for saved in held.values())


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("kind", [Stack, Residual])
def test_the_row_is_the_bytes_of_the_copies_that_backward_holds(kind: type[Stack], cache: bool) -> None:
    torch.manual_seed(0)
    model, loss_fn = kind(), under_autocast(cache=cache)
    profile = profiled(model, loss_fn, selective=True)
    rows = {}
    for text in ("K0 K1 K2", "R(0) K1 R(2)", "S0[] K1 K2", "R(0) R(1) R(2)"):
        plan = CheckpointPlan.from_text(text, profile)
        rows[text] = simulate_plan(profile, plan).weight_copies_bytes
        assert rows[text] == copies_held(model, plan, loss_fn), text
    weights = [2 * weight.numel() for layer in model.layers for weight in (layer.inner.weight, layer.outer.weight)]
    assert rows["K0 K1 K2"] == sum(weights) + 2 * model.head.weight.numel()  # the embedding's input wants no gradient
    assert rows["R(0) R(1) R(2)"] == 2 * model.head.weight.numel()


def test_of_frozen_weights_too_and_none_without_autocast() -> None:
    torch.manual_seed(0)
    model = Stack()
    plain = profiled(model, lambda m, batch: m(batch).square().mean())
    assert simulate_plan(plain, CheckpointPlan.from_text("K0 K1 K2", plain)).weight_copies_bytes == 0
    model.layers[1].requires_grad_(False)
    loss_fn = under_autocast(cache=True)
    profile = profiled(model, loss_fn)
    plan = CheckpointPlan.from_text("R(0) K1 R(2)", profile)
    frozen = 2 * sum(model.layers[1].get_parameter(name).numel() for name in ("inner.weight", "outer.weight"))
    row = simulate_plan(profile, plan).weight_copies_bytes
    assert row == copies_held(model, plan, loss_fn) == frozen + 2 * model.head.weight.numel()


def test_it_is_told_by_fit_the_explanation_and_the_certificate() -> None:
    torch.manual_seed(0)
    model, loss_fn = Stack(), under_autocast(cache=True)
    profile = profiled(model, loss_fn)
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=1.0)
    row = simulate_plan(profile, plan).weight_copies_bytes
    told = "low-precision copies of weights (autocast) take"
    assert row
    assert explain(profile, plan).weight_copies_bytes == certify(profile, plan).weight_copies_bytes == row
    assert told in explain(profile, plan).text
    assert told in certify(profile, plan).text
    with ckptplan.fit(model, torch.randn(32, 8), loss_fn, 1.0, say=None) as fitted:
        assert told in fitted.summary
    plain = profiled(model, lambda m, batch: m(batch).square().mean())
    assert told not in explain(plain, CheckpointPlan.from_text("K0 K1 K2", plain)).text


def test_what_was_not_measured_is_not_known() -> None:
    profile = profiled(Stack(), under_autocast(cache=True))
    block = profile[1]
    assert block.keep is not None
    unknown = replace(block, keep=replace(block.keep, weight_copies_bytes=None))
    by_hand = replace(profile, blocks=(profile[0], unknown, profile[2]))
    assert simulate_plan(by_hand, CheckpointPlan.from_text("K0 K1 K2", by_hand)).weight_copies_bytes is None
    known = simulate_plan(by_hand, CheckpointPlan.from_text("K0 R(1) K2", by_hand)).weight_copies_bytes
    assert known is not None


class Twice(Stack):
    """Its first block runs two times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[0](self.embed(x)))
        return self.head(self.layers[2](self.layers[1](x)))


def shares_a_weight() -> Stack:
    model = Stack()
    model.layers[2] = Feed(64)
    model.layers[2].inner.weight = model.layers[0].inner.weight
    return model


@pytest.mark.parametrize("make", [Twice, shares_a_weight])
def test_calls_that_share_a_cached_copy_are_refused_with_the_remedy(make: Callable[[], nn.Module]) -> None:
    """What one takes depends on the other: predicted peaks would be up to 46 % too high."""
    torch.manual_seed(0)
    with pytest.raises(BlockDeclarationError, match=r"compute with one weight .*cache_enabled=False"):
        profiled(make(), under_autocast(cache=True))
    profile = profiled(make(), under_autocast(cache=False))
    assert profile[0].keep is not None
    assert profile[0].keep.weight_copies_bytes
