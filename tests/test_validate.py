"""Whether a plan belongs to a live model: every fault is named, and nothing is run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckptplan.apply import apply_plan, checkpointed
from ckptplan.blocks import declare_blocks
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_blocks
from ckptplan.plan import CheckpointPlan
from ckptplan.validate import validate_plan
from tests.chains import declared


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)),
    )


def blocks_of(model: nn.Sequential):
    return declare_blocks(model, [(str(i), m) for i, m in enumerate(model)])


@pytest.fixture
def model() -> nn.Sequential:
    return chain()


@pytest.fixture
def plan(model: nn.Sequential) -> CheckpointPlan:
    profile = profile_blocks(
        blocks_of(model), (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1, memory="off"
    )
    return CheckpointPlan.from_text("R(0) R(1) K2", profile)


def test_a_plan_of_the_same_model_passes_also_for_another_instance_and_after_json(model, plan) -> None:
    validate_plan(plan, blocks_of(model), (torch.randn(4, 8),))
    validate_plan(CheckpointPlan.from_json(plan.to_json()), blocks_of(chain()))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].__setitem__(1, nn.ReLU()),
        lambda m: m[0][0].weight.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: setattr(m[2][1], "p", 0.5),
        lambda m: m.double(),
    ],
    ids=["GELU to ReLU", "frozen", "eval", "dropout", "dtype"],
)
def test_a_changed_model_is_refused(model, plan, change: Callable[[nn.Module], object]) -> None:
    change(model)
    with pytest.raises(PlanIncompatibleError, match="not the one that was profiled"):
        validate_plan(plan, blocks_of(model))
    with pytest.raises(PlanIncompatibleError, match="not the one that was profiled"):
        apply_plan(blocks_of(model), plan, (torch.randn(4, 8),))
    with pytest.raises(PlanIncompatibleError, match="not the one that was profiled"):
        checkpointed(model, plan)


def test_a_model_in_eval_mode_is_told_what_to_do(model, plan) -> None:
    model.eval()
    with pytest.raises(
        PlanIncompatibleError, match=r"in eval mode: .* call model\.train\(\) before the plan is put on"
    ):
        checkpointed(model, plan)
    model.train()
    with checkpointed(model, plan):
        model.eval()
        model(torch.randn(4, 8)).sum().backward()


def test_other_blocks_and_another_order_are_refused(model, plan) -> None:
    other = declare_blocks(model, [("0", model[1]), ("2", model[0]), ("1", model[2])])
    with pytest.raises(
        PlanIncompatibleError, match=r"the plan is for the blocks \[0, 1, 2\] \(3\), given are \[0, 2, 1\]"
    ):
        validate_plan(plan, other)


def test_all_faults_are_told_at_once(model, plan) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model[0] = checkpoint_wrapper(model[0])
    with pytest.raises(PlanIncompatibleError) as caught:
        validate_plan(plan, blocks_of(model), [torch.randn(4, 8)])  # type: ignore[arg-type]
    faults = caught.value.faults
    assert len(faults) == 3
    assert "not the one that was profiled" in faults[0]
    assert "0: a CheckpointWrapper (torch)" in faults[1]
    assert "example_inputs is a list; expected a tuple" in faults[2]
    assert all(fault in str(caught.value) for fault in faults)


def test_a_keyword_that_no_block_takes_is_named(model, plan) -> None:
    with pytest.raises(PlanIncompatibleError, match="no block takes the keyword argument 'mask'"):
        validate_plan(plan, blocks_of(model), (torch.randn(4, 8),), {"mask": None})


def test_a_guarded_buffer_that_is_not_there_is_named() -> None:
    blocks = declared([nn.Linear(8, 8), nn.BatchNorm1d(8)])
    profile = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1, memory="off")
    plan = CheckpointPlan.from_text("K0 R(1)", profile)
    other = declared([nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)])
    with pytest.raises(
        PlanIncompatibleError, match=r"guards the buffer b1.running_mean, which the model does not have"
    ):
        validate_plan(plan, other)


def test_nothing_is_run_and_no_state_is_changed(model, plan) -> None:
    ran = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *args: ran.append(1))
    state = torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    validate_plan(plan, blocks_of(model), (torch.randn(4, 8),))
    torch.set_rng_state(state)
    assert ran == []
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def test_arguments_of_another_type_are_named(model, plan) -> None:
    with pytest.raises(TypeError, match=r"plan is a str; expected a CheckpointPlan; CheckpointPlan.from_text"):
        validate_plan("R(0)", blocks_of(model))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plan is a NoneType; expected a CheckpointPlan$"):
        validate_plan(None, blocks_of(model))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"blocks is a Sequential; expected what declare_blocks"):
        validate_plan(plan, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"blocks\[0\] is a Sequential; expected what declare_blocks"):
        validate_plan(plan, list(model))  # type: ignore[arg-type]
