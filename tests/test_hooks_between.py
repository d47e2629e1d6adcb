"""Hooks on blocks see what they see without a plan, or are refused: a segment hands its output through its members."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from ckptplan.apply import checkpointed
from ckptplan.dry_run import verify_plan
from ckptplan.equality import check_equality
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.nodes import blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_nested_peak, plan_checkpoints

WIDTH = 16
NAMES = [f"layers.{i}" for i in range(3)]
Register = Callable[[nn.Module, Callable[[Tensor], None]], object]


class Net(nn.Module):
    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in "123")
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](x) + (x if self.beside else 0.0)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


# Where a hook is, and whether it sees the inside of a segment from its first to its last block.
HOOKS: dict[str, Register] = {
    "forward": lambda m, see: m.register_forward_hook(lambda _, args, out: see(out)),
    "forward pre": lambda m, see: m.register_forward_pre_hook(lambda _, args: see(args[0])),
    "full backward": lambda m, see: m.register_full_backward_hook(lambda _, given, out: see(given[0])),
    "full backward pre": lambda m, see: m.register_full_backward_pre_hook(lambda _, out: see(out[0])),
}
OUTSIDE = {("forward", 2), ("forward pre", 0)}


def seen(model: Net, kind: str, block: int, plan: CheckpointPlan | None, batch: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    handle = HOOKS[kind](model.layers[block], lambda t: found.append(t.detach().clone()))
    try:
        if plan is None:
            loss_fn(model, batch).backward()
        else:
            with checkpointed(model, plan):
                loss_fn(model, batch).backward()
    finally:
        handle.remove()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_sees_the_same_or_is_refused_by_name(kind: str, block: int) -> None:
    model, batch = Net(), torch.randn(4, WIDTH, requires_grad=True)
    plain = seen(model, kind, block, None, batch)
    for text in ("R(0) R(1) R(2)", "R(0 1 2)"):
        plan = CheckpointPlan.from_text(text, NAMES)
        if text == "R(0 1 2)" and (kind, block) not in OUTSIDE:
            with pytest.raises(PlanIncompatibleError, match=r"hooks look at what 'layers\.\d' hands to 'layers\.\d'"):
                seen(model, kind, block, plan, batch)
        else:
            assert all(map(torch.equal, seen(model, kind, block, plan, batch), plain)), text
    assert len(plain) == 1


@pytest.mark.parametrize("beside", [False, True])
def test_no_segment_is_planned_over_hooks_that_are_there_when_profiled(beside: bool) -> None:
    model, batch = Net(beside), torch.randn(64, WIDTH)
    model.layers[0].register_forward_hook(lambda *_: None)
    profile = profile_model(model, "layers.*", batch, loss_fn, num_warmup=0, num_trials=1)
    assert [block.before is None for block in profile] == [True, False, not beside]
    plan = plan_checkpoints(
        profile,
        target_kind="activation_budget_bytes",
        target_value=least_nested_peak(profile)[0],
        planner="optimal",
        cost="flops",
    )
    assert not any(len(blocks_of([node])) > 1 and 0 in blocks_of([node]) for node in plan.nodes)


class TestHooksOnAllModules:
    """``torch.nn.modules.module.register_module_forward_hook`` and the like."""

    def test_measuring_and_checking_do_not_reach_them(self) -> None:
        model, batch, fired = Net(), torch.randn(8, WIDTH), []
        handle = register_module_forward_hook(lambda *_: fired.append("forward"))
        try:
            profile = profile_model(model, None, batch, loss_fn, num_warmup=0, num_trials=1)
            plan = CheckpointPlan.from_text("R(0) K1 K2", profile)
            check_equality(model, plan, batch, loss_fn)
            verify_plan(model, plan, batch, loss_fn)
            assert fired == []
            model(batch)
            assert fired  # and it is there afterwards
        finally:
            handle.remove()
        assert not nn.modules.module._global_forward_hooks

    def test_no_segment_runs_over_what_they_see(self) -> None:
        model, batch = Net(), torch.randn(8, WIDTH)
        without = profile_model(model, "layers.*", batch, loss_fn, num_warmup=0, num_trials=1)
        assert [block.before for block in without] == [None] * 3
        handle = register_module_forward_hook(lambda *_: None)
        try:
            profile = profile_model(model, "layers.*", batch, loss_fn, num_warmup=0, num_trials=1)
            assert [block.before is None for block in profile] == [True, False, False]
            patch = checkpointed(model, CheckpointPlan.from_text("R(0 1) K2", NAMES))
            with patch, pytest.raises(PlanIncompatibleError, match=r"hooks look at what 'layers\.0' hands to"):
                model(batch)
        finally:
            handle.remove()
        with checkpointed(model, CheckpointPlan.from_text("R(0 1) K2", NAMES)):
            loss_fn(model, batch).backward()

    def test_those_of_torch_are_none(self) -> None:
        model, batch = Net(), torch.randn(8, WIDTH)
        with (
            checkpointed(model, CheckpointPlan.from_text("R(0 1) K2", NAMES)),
            FlopCounterMode(display=False) as counter,
        ):
            loss_fn(model, batch).backward()
        product = 2 * 8 * WIDTH * 32
        # forward, and again but for the segment's last product, which backward does not need; two more in backward,
        # but for the gradient of the batch
        assert counter.get_total_flops() == (6 + 3 + 2 * 6 - 1) * product
