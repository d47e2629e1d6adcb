"""The gate: a planned step has to be the unplanned one; where not, the error says where and whose fault it is."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan import proof as proof_module
from ckptplan.equality import check_equality, origin_of
from ckptplan.errors import StepMismatchError
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import StepOutcome, compare_outcomes
from tests.run_models import _Wrong as WrongWhenRecomputed


class Net(nn.Module):
    def __init__(self, strange: nn.Module | None = None, at: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3))
        if strange is not None:
            self.layers[at].append(strange)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Noise(nn.Module):
    """Other gradients in every run: it draws from a stream that nobody restores."""

    stream = random.SystemRandom()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.stream.random()


class AddsNan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


def plan_of(text: str) -> CheckpointPlan:
    return CheckpointPlan.from_text(text, [f"layers.{i}" for i in range(3)])


def test_equal_steps_pass_and_leave_the_model_as_it_was() -> None:
    model, batch = Net(), torch.randn(16, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    model.eval()  # a plan written by hand does not know of the buffers that a norm changes in training
    check = check_equality(model, plan_of("R(0) K1 R(2)"), batch, loss_fn)
    assert (check.checked, check.bitwise_equal, check.max_rel_diff) == (True, True, 0.0)
    assert check.reference == "the unplanned step"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(stream, torch.get_rng_state())


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_block_where_it_begins_is_named_and_the_plan_is_at_fault(at: int) -> None:
    model = Net(WrongWhenRecomputed(), at).eval()
    with pytest.raises(StepMismatchError) as caught:
        check_equality(model, plan_of("R(0) R(1) R(2)"), torch.randn(16, 8), loss_fn)
    assert caught.value.block_id == f"layers.{at}"
    assert caught.value.is_deterministic
    assert f"first in block 'layers.{at}': layers.{at}.0.weight: gradient differs by" in str(caught.value)
    assert "it is the plan that changes it" in str(caught.value)


def test_a_block_that_differs_by_itself_is_said_to() -> None:
    model = Net(Noise()).eval()
    with pytest.raises(StepMismatchError, match="not deterministic by itself") as caught:
        check_equality(model, plan_of("K0 K1 K2"), torch.randn(16, 8), loss_fn)
    assert not caught.value.is_deterministic


def test_nan_is_a_fault_even_where_both_steps_have_it() -> None:
    model = Net(AddsNan(), at=2).eval()
    with pytest.raises(StepMismatchError, match="the loss is nan under the plan, nan without it") as caught:
        check_equality(model, plan_of("K0 K1 K2"), torch.randn(16, 8), loss_fn)
    assert "The unplanned step is not finite either" in str(caught.value)
    assert any("gradient is not finite" in fault for fault in caught.value.faults)


def test_a_loss_that_differs_is_a_fault_though_all_gradients_agree() -> None:
    outcomes = [StepOutcome(torch.tensor(loss), {"w": torch.ones(1)}) for loss in (1.0, 1.1)]
    check = compare_outcomes(*outcomes, "r", 1e-5, 0.0)
    assert check.faults == ("the loss is 1.0 under the plan, 1.100000023841858 without it",)
    assert compare_outcomes(outcomes[0], outcomes[0], "r", 0.0, 0.0).passed


def test_where_the_unplanned_step_does_not_fit_saved_tensors_are_held_on_the_host() -> None:
    model, batch = Net().eval(), torch.randn(16, 8)
    held: list[bool] = []

    def fits_on_the_host_only(net: nn.Module, given: Tensor) -> Tensor:
        loss = loss_fn(net, given)
        if not any("forward" in vars(layer) for layer in net.layers):  # the unplanned one
            held.append(hooks_active())
            if not held[-1]:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return loss

    check = check_equality(model, plan_of("R(0) R(1) K2"), batch, fits_on_the_host_only)
    assert check.checked
    assert check.reference == "the unplanned step with its saved tensors held on the host"
    assert check.bitwise_equal


def hooks_active() -> bool:
    """Whether a tensor that autograd saves now goes through somebody's hooks."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("asked only"):
            return False
    except RuntimeError:
        return True


def test_where_nothing_fits_it_is_said_and_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(proof_module, "_outcome", full)
    check = check_equality(Net().eval(), plan_of("R(0) K1 K2"), torch.randn(4, 8), loss_fn)
    assert not check.checked
    assert (check.bitwise_equal, check.max_rel_diff) == (None, None)
    assert check.reference == "the planned step does not fit the device"


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, False), (torch.bfloat16, True)])
def test_half_precision_may_differ_by_more(dtype: torch.dtype, passes: bool) -> None:
    class SlightlyOff(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _OffByAShare.apply(x)

    model = Net(SlightlyOff()).eval().to(dtype)
    plan, batch = plan_of("R(0) R(1) K2"), torch.randn(16, 8, dtype=dtype)
    if passes:
        assert not check_equality(model, plan, batch, loss_fn).bitwise_equal
    else:
        with pytest.raises(StepMismatchError):
            check_equality(model, plan, batch, loss_fn)
        assert check_equality(model, plan, batch, loss_fn, rtol=0.05).checked


class _OffByAShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.tensor(1.01 if torch._C._current_graph_task_id() != -1 else 1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def test_the_last_block_with_a_fault_is_where_it_begins() -> None:
    faults = ["layers.0.weight: gradient differs", "buffer layers.1.mean differs after the step", "layers.10.weight: x"]
    names = ["layers.0", "layers.1", "layers.10", "layers.2"]
    assert origin_of(faults, names) == "layers.10"
    assert origin_of(faults[:2], names) == "layers.1"
    assert origin_of(["head.weight: gradient differs", "the random stream stands elsewhere"], names) is None


class Counts(nn.Module):
    """How often it ran decides what it computes; a list and a tensor of its own tell of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.last = 0, [], torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.last + x.detach().mean(0)
        return x * self.calls


def test_both_steps_begin_with_the_same_attributes() -> None:
    model = Net(Counts())
    model.layers[1][-1].calls = 4
    model.layers[1][-1].seen = [1, 2]
    check = check_equality(model, plan_of("K0 K1 K2"), torch.randn(16, 8), loss_fn)  # the counting block is kept
    assert check.bitwise_equal
    assert (model.layers[1][-1].calls, model.layers[1][-1].seen) == (4, [1, 2])


class CountsAside(Counts):
    """What it counts does not reach the loss."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return torch.tanh(x)


def test_an_attribute_that_is_changed_twice_is_named() -> None:
    told = r"first in block 'layers\.1': attribute layers\.1\.3\.calls differs"
    with pytest.raises(StepMismatchError, match=told) as e:
        check_equality(Net(CountsAside()), plan_of("K0 R(1) K2"), torch.randn(16, 8), loss_fn)
    assert e.value.is_deterministic
    assert {fault.split()[1] for fault in e.value.faults} == {f"layers.1.3.{n}" for n in ("calls", "seen", "last")}


def test_objects_that_nobody_can_look_into_are_no_difference() -> None:
    model = Net(Counts())
    model.lock, model.anything, model.steps = threading.Lock(), object(), iter(range(3))
    assert check_equality(model, plan_of("K0 K1 K2"), torch.randn(16, 8), loss_fn).bitwise_equal


def test_complex_gradients_are_compared_whole() -> None:
    """The real parts are the same."""
    found, expected = (outcome_with(torch.tensor([1 + imaginary * 1j])) for imaginary in (1.0, 2.0))
    assert compare_outcomes(expected, expected, "", 1e-5, 0.0).passed
    check = compare_outcomes(found, expected, "", 1e-5, 0.0)
    assert check.faults == ("w: gradient differs by 1, its largest element is 2",)


def outcome_with(gradient: Tensor) -> StepOutcome:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.cfloat))
    weight.grad = gradient
    return StepOutcome(torch.tensor(1.0), {"w": proof_module._on_host(weight.grad)})
