"""Running out of memory in a step: it is undone, a tighter plan is taken, and nothing of it is left in the training.

The oracle is the same training without an error; memory runs out at a chosen operator, by a dispatch mode that raises
what the allocator would.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.data import Batch
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.recovery import Recovery, tighter_plan
from ckptplan.training import TrainSettings, accumulate_gradients, loss_of, train
from tests.test_training import ListData

NAMES = [f"layers.{i}" for i in range(4)]
STEPS = 4


class Net(nn.Module):
    """Dropout, BatchNorm, a counter, a list that grows, and draws from Python's and NumPy's streams outside blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))
            for _ in range(4)
        )
        self.head = nn.Linear(16, 3)
        self.calls = 0
        self.seen: list[int] = []
        self.drift, self.nested, self.queue = torch.ones(1), {"a": [0.0]}, deque([0.0], maxlen=4)
        self.helper = SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.drift.add_(0.01)  # all of these reach the weights, through the output
        self.nested["a"][0] += 0.01
        self.queue.append(self.queue[-1] + 0.01)
        self.helper.scale += 0.01
        x = x * (float(self.drift) + self.nested["a"][0] + self.queue[-1] + self.helper.scale)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * (1 + 0.01 * random.random() + 0.01 * float(np.random.random()))  # noqa: NPY002


class NoMemory(TorchDispatchMode):
    """Raises at the operators with these numbers, counted over everything that runs inside."""

    def __init__(self, *fail_at: int, error: type[Exception] = torch.cuda.OutOfMemoryError) -> None:
        super().__init__()
        self.fail_at, self.error, self.count = set(fail_at), error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.fail_at:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 MiB\nmore lines that nobody reads")
        return func(*args, **(kwargs or {}))


@contextmanager
def limited(mode: NoMemory) -> Iterator[None]:
    """Forwards and backwards of steps run inside the mode."""

    def gradients(*args: Any) -> float | None:
        with mode:
            return accumulate_gradients(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptplan.recovery.accumulate_gradients", gradients)
        yield


def batches(count: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        Batch(torch.randn(128, 16, generator=generator), torch.randint(3, (128,), generator=generator))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def profile() -> ChainProfile:
    return profile_model(Net(), NAMES, batches(1)[0], loss_of)


@pytest.fixture(scope="module")
def loose(profile: ChainProfile) -> CheckpointPlan:
    return plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=1.0)


@dataclass
class Trained:
    model: Net
    optimizer: torch.optim.Optimizer
    recovery: Recovery
    num_operators: int
    streams: tuple[Any, ...]

    def everything(self) -> list[Tensor]:
        held = self.optimizer.state_dict()["state"].values()
        moments = [value for state in held for value in state.values() if torch.is_tensor(value)]
        return [*self.model.state_dict().values(), *moments]


def trained(profile: ChainProfile, plan: CheckpointPlan, mode: NoMemory, tries: int = 5) -> Trained:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recovery = Recovery(model, plan, lambda p: tighter_plan(profile, p), device="cpu", tries=tries)
    with limited(mode):
        train(
            model,
            ListData(batches()),
            optimizer,
            learning_rate_at=lambda step: 0.01,
            settings=TrainSettings(steps=STEPS, accumulate=2),
            gradients_of=recovery.gradients,
        )
    recovery.remove()
    streams = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    return Trained(model, optimizer, recovery, mode.count, streams)


def assert_equal(found: Trained, expected: Trained) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found.everything(), expected.everything(), strict=True))
    assert found.streams == expected.streams
    assert (found.model.calls, found.model.seen) == (expected.model.calls, expected.model.seen)
    assert all("forward" not in vars(module) for module in found.model.modules())


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.23, 0.3, 0.37, 0.5, 0.61, 0.75, 0.88, 0.97, 1.0])
def test_training_goes_on_as_if_nothing_had_happened_wherever_memory_runs_out(
    profile: ChainProfile, loose: CheckpointPlan, share: float
) -> None:
    """At operators of forward, backward and recomputation, of first and later micro-batches and steps."""
    expected = trained(profile, loose, NoMemory())
    found = trained(profile, loose, NoMemory(max(1, int(share * expected.num_operators))))
    (change,) = found.recovery.tightened
    assert change.taken.predicted_peak_bytes <= 0.9 * loose.predicted_peak_bytes
    assert_equal(found, expected)


def test_memory_that_runs_out_in_a_recomputation_counts_as_backward(profile: ChainProfile) -> None:
    tight = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.6)
    assert tight.recomputed > 0
    expected = trained(profile, tight, NoMemory())
    phases = set()
    of_a_step = expected.num_operators // STEPS
    for number in range(of_a_step // 12, of_a_step, of_a_step // 6):
        found = trained(profile, tight, NoMemory(number))
        phases |= {change.phase for change in found.recovery.tightened}
        assert_equal(found, expected)
    assert phases == {"forward", "backward"}


def test_each_error_takes_a_tighter_plan_and_it_stays(profile: ChainProfile, loose: CheckpointPlan) -> None:
    expected = trained(profile, loose, NoMemory())
    found = trained(profile, loose, NoMemory(10, 40))
    peaks = [loose.predicted_peak_bytes, *(c.taken.predicted_peak_bytes for c in found.recovery.tightened)]
    assert len(peaks) == 3
    assert peaks == sorted(peaks, reverse=True)
    assert found.recovery.plan is found.recovery.tightened[-1].taken
    assert_equal(found, expected)


@pytest.mark.parametrize("tries", [0, 2])
def test_after_the_last_try_the_error_is_raised_with_what_was_tried(
    profile: ChainProfile, loose: CheckpointPlan, tries: int
) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        trained(profile, loose, NoMemory(*range(5, 100_000)), tries=tries)
    told = str(caught.value)
    assert told.startswith("CUDA out of memory. Tried to allocate 20.00 MiB")
    assert ("plans that did not fit before" in told) == (tries > 0)
    assert told.count("(forward)") == tries


def test_a_plan_of_least_peak_is_the_last_one(profile: ChainProfile, loose: CheckpointPlan) -> None:
    plan: CheckpointPlan | None = loose
    peaks = []
    while plan is not None:
        peaks.append(plan.predicted_peak_bytes)
        plan = tighter_plan(profile, plan)
    assert peaks == sorted(set(peaks), reverse=True)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no plan takes less"):
        trained(profile, loose, NoMemory(*range(5, 100_000)), tries=len(peaks) + 1)


def test_other_errors_are_raised_as_they_are(profile: ChainProfile, loose: CheckpointPlan) -> None:
    with pytest.raises(KeyError, match="Tried to allocate"):
        trained(profile, loose, NoMemory(20, error=KeyError))


def test_an_error_of_the_cpu_allocator_is_out_of_memory_too(profile: ChainProfile, loose: CheckpointPlan) -> None:
    class OfTheCpu(RuntimeError):
        def __init__(self, _: str) -> None:
            super().__init__("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes")

    found = trained(profile, loose, NoMemory(20, error=OfTheCpu))
    assert_equal(found, trained(profile, loose, NoMemory()))


def test_fifty_of_them_leave_no_tensor_behind(profile: ChainProfile, loose: CheckpointPlan) -> None:
    model, window = Net(), batches(1)
    plans = iter([loose] * 100)
    recovery = Recovery(model, loose, lambda _: next(plans), device="cpu", tries=1)
    operators = NoMemory()
    with limited(operators):
        recovery.gradients(model, window, TrainSettings(steps=1))

    def one(number: int) -> int:
        with limited(NoMemory(1 + number * (operators.count - 1) // 50)):
            recovery.gradients(model, window, TrainSettings(steps=1))
        model.zero_grad(set_to_none=True)
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))

    gc.freeze()  # what other tests have made need not be searched each time
    try:
        counts = [one(number) for number in range(1, 51)]
    finally:
        gc.unfreeze()
    assert len(recovery.tightened) == 50
    assert max(counts[2:]) <= counts[1]


def test_nothing_is_kept_of_a_step_once_it_is_done(profile: ChainProfile, loose: CheckpointPlan) -> None:
    model, window = Net(), batches(2)
    recovery = Recovery(model, loose, lambda plan: None, device="cpu", tries=1)
    recovery.gradients(model, window, TrainSettings(steps=1))
    alone = copy.deepcopy(model)
    recovery.remove()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), alone.state_dict().values(), strict=True))


class ChangesItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(x.mean()))


class ChangesABufferLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= 2:
            self.late.add_(1)
        return super().forward(x)


def test_a_step_that_cannot_be_undone_says_why(profile: ChainProfile, loose: CheckpointPlan) -> None:
    for kind, told in ((ChangesItsInput, "changes its inputs in place"), (ChangesABufferLate, "the buffer '.late'")):
        model = kind()
        recovery = Recovery(model, loose, lambda p: tighter_plan(profile, p), device="cpu", tries=3)
        settings = TrainSettings(steps=1)
        if kind is ChangesABufferLate:
            for _ in range(2):
                recovery.gradients(model, batches(1), settings)
        with limited(NoMemory(60)), pytest.raises(torch.cuda.OutOfMemoryError, match=told):
            recovery.gradients(model, batches(1), settings)


def test_without_an_error_it_is_the_plain_accumulation(profile: ChainProfile, loose: CheckpointPlan) -> None:
    window, settings = batches(3), TrainSettings(steps=1)
    plain, patched = Net(), Net()
    recovery = Recovery(patched, loose, lambda plan: None, device="cpu", tries=3)
    losses = []
    for gradients, model in ((accumulate_gradients, plain), (recovery.gradients, patched)):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        losses.append(gradients(model, window, settings))
    assert losses[0] == losses[1]
    for a, b in zip(plain.parameters(), patched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
