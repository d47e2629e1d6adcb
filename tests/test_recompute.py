"""One recomputed call against the same call kept: numbers, random streams, buffers, forward counts."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.errors import PlanIncompatibleError
from ckptplan.recompute import Guards, buffer_slots, run_recomputed
from ckptplan.trees import map_tensors, split_tensors, tensors_in
from tests.tracker import LiveBytes

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    text: str


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def test_a_call_runs_again_once_per_backward_and_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    block = Counting(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    block(x).square().sum().backward()
    expected = [p.grad.clone() for p in (*block.parameters(), x)]
    for p in (*block.parameters(), x):
        p.grad = None
    block.calls = 0
    run_recomputed(block, Guards(), x).square().sum().backward()
    assert block.calls == 2
    assert all(torch.equal(p.grad, e) for p, e in zip((*block.parameters(), x), expected, strict=True))


def test_without_gradients_it_is_a_plain_call() -> None:
    block = Counting(nn.BatchNorm1d(8))
    with torch.no_grad():
        y = run_recomputed(block, Guards(buffer_slots(block)), torch.randn(4, 8))
    assert block.calls == 1
    assert block.inner.num_batches_tracked == 1
    assert not y.requires_grad


def test_random_draws_are_the_same_and_the_stream_ends_where_the_plain_one_does() -> None:
    x = torch.randn(64, requires_grad=True)
    drop = nn.Dropout(0.5)
    torch.manual_seed(1)
    y = run_recomputed(lambda t: drop(t * t) * t, Guards(), x)
    drawn = torch.rand(3)
    y.sum().backward()
    torch.manual_seed(1)
    x2 = x.detach().clone().requires_grad_()
    (drop(x2 * x2) * x2).sum().backward()
    assert torch.equal(x.grad, x2.grad)
    torch.manual_seed(1)
    drop(x2)
    assert torch.equal(torch.rand(3), drawn)  # the stream after the forward is the plain one's


def test_buffers_are_changed_once_and_keep_their_identity() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    plain.load_state_dict(block.state_dict())
    mean = block[1].running_mean
    for step in range(3):
        x = torch.randn(16, 8) + step
        run_recomputed(block, Guards(buffer_slots(block)), x).square().sum().backward()
        plain(x).square().sum().backward()
    assert block[1].running_mean is mean
    assert block[1].num_batches_tracked == 3
    assert all(torch.equal(a, b) for a, b in zip(block.buffers(), plain.buffers(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(block.parameters(), plain.parameters(), strict=True))


def test_a_buffer_that_feeds_the_result_is_recomputed_from_where_the_forward_started() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("ema", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return torch.tanh(y - self.ema) * y

    torch.manual_seed(0)
    block, x = Ema(), torch.randn(16, 8)
    gradients = []
    for recomputed in (False, True):
        block.ema.zero_()
        block.zero_grad()
        y = run_recomputed(block, Guards(buffer_slots(block, ["ema"])), x) if recomputed else block(x)
        y.square().sum().backward()
        gradients.append((block.linear.weight.grad.clone(), block.ema.clone()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(3), 2.0), {}),
        (((torch.ones(3), torch.ones(3)),), {}),
        (([torch.ones(3)], {"a": torch.ones(3), "b": "text"}), {}),
        ((Pair(torch.ones(3), None), Box(torch.ones(3), "t")), {}),
        ((), {"debug": torch.ones(3), "context_fn": 5, "use_reentrant": True, "preserve_rng_state": None}),
        ((None,), {"determinism_check": Pair(1, torch.ones(3)), "early_stop": 1, "call": 2, "guards": 3}),
    ],
)
def test_arguments_of_any_shape_and_name_arrive_as_they_were(args: tuple, kwargs: dict[str, Any]) -> None:
    args, kwargs = map_tensors((args, kwargs), lambda t: t.clone().requires_grad_())
    seen = []

    class Takes(nn.Module):
        def forward(self, *a: Any, **k: Any) -> Tensor:
            seen.append((a, k))
            return sum((t * t).sum() for t in tensors_in((a, k)))

    run_recomputed(Takes(), Guards(), *args, **kwargs).backward()
    assert len(seen) == 2
    for got in seen:
        assert repr(got) == repr((args, kwargs))
        assert [type(item) for item in got[0]] == [type(item) for item in args]
    assert all(torch.equal(t.grad, torch.full((3,), 2.0)) for t in tensors_in((args, kwargs)))


def test_an_inner_recomputation_of_several_tensors_does_not_keep_them_in_the_outer_one() -> None:
    alive: list[weakref.ref] = []

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        pair = x.sin(), x.cos()
        alive.extend(weakref.ref(t.untyped_storage()) for t in pair)
        return pair

    def outer(x: Tensor) -> Tensor:
        return run_recomputed(lambda pair: (pair[0] * pair[1]).exp(), Guards(), first(x))

    x = torch.randn(8, requires_grad=True)
    y = run_recomputed(outer, Guards(), x)
    assert [ref() is None for ref in alive] == [True, True]
    y.sum().backward()
    expected = torch.autograd.grad((x.sin() * x.cos()).exp().sum(), x)[0]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("nest", [1, 2, 3])
def test_second_order_gradients_and_a_second_backward_work_through_nests(nest: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 5).double()

    def block(x: Tensor) -> Tensor:
        return torch.tanh(linear(x)) * x

    call: Callable[[Tensor], Tensor] = block
    for _ in range(nest):
        call = lambda x, inner=call: run_recomputed(inner, Guards(), x)  # noqa: E731
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))
    y = call(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)


def test_the_autocast_of_the_forward_is_in_force_in_the_recomputation() -> None:
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return (x @ x).float().exp()

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run_recomputed(call, Guards(), x)
    y.sum().backward()
    assert seen == [(True, torch.bfloat16)] * 2


def test_autocasts_copies_of_the_weights_do_not_outlive_a_recomputed_call() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(4, 64)
    gradients, kept = [], []
    for recomputed in (False, True):
        linear.zero_grad()
        tracker = LiveBytes()
        with tracker, torch.autocast("cpu", dtype=torch.bfloat16):
            y = run_recomputed(linear, Guards(), x) if recomputed else linear(x)
            kept.append(tracker.now)
        y.float().square().sum().backward()
        gradients.append(linear.weight.grad.clone())
    assert torch.equal(*gradients)
    assert kept[0] > 64 * 64 * 2  # the cast weight, saved for backward
    assert kept[1] == 4 * 64 * 2  # the output


def test_an_error_in_the_recomputation_puts_the_buffers_back() -> None:
    block = nn.BatchNorm1d(4)
    mean = block.running_mean
    calls = []

    def call(x: Tensor) -> Tensor:
        calls.append(0)
        y = block(x * x)
        if len(calls) == 2:
            raise RuntimeError("second time")
        return y * y

    x = torch.randn(8, 4, requires_grad=True)
    y = run_recomputed(call, Guards(buffer_slots(block)), x)
    after = {name: b.clone() for name, b in block.named_buffers()}
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert block.running_mean is mean
    assert all(torch.equal(b, after[name]) for name, b in block.named_buffers())


def test_buffer_slots_name_the_submodule_that_holds_each_buffer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert buffer_slots(model, ["1.running_mean"]) == ((model[1], "running_mean"),)
    assert len(buffer_slots(model)) == 3
    assert buffer_slots(model, []) == ()


def test_a_value_taken_apart_holds_no_tensor_and_is_put_together_again() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    tensors, put_back = split_tensors((Pair(a, b), {"k": [a, 3]}, Box(b, "t")))
    assert [t is u for t, u in zip(tensors, (a, b), strict=True)] == [True, True]
    c, d = torch.full((1,), 5.0), torch.full((1,), 6.0)
    pair, entry, box = put_back([c, d])
    assert [found is tensor for found, tensor in ((pair.left, c), (pair.right, d), (box.tensor, d))] == [True] * 3
    assert entry == {"k": [c, 3]}
    refs = [weakref.ref(t) for t in tensors]
    del a, b, tensors, pair, entry, box
    assert [r() is None for r in refs] == [True, True]


class Gated(nn.Module):
    """Draws only once its gate opens: after it was profiled, say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(8, 8), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x).tanh(), self.rate) if self.rate else self.linear(x).tanh()


def test_dropout_switched_on_later_is_exact_too() -> None:
    block, x = Gated(), torch.randn(16, 8)
    block.rate = 0.5
    gradients = []
    for run in (lambda: run_recomputed(block, Guards(modules=(block,)), x), lambda: block(x)):
        torch.manual_seed(3)
        block.zero_grad()
        run().square().sum().backward()
        gradients.append((block.linear.weight.grad.clone(), torch.rand(2)))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_a_buffer_that_nobody_guards_may_not_change() -> None:
    norm = nn.BatchNorm1d(8)
    with pytest.raises(
        PlanIncompatibleError, match=r"BatchNorm1d changes its buffer '\w+', which the plan does not guard"
    ):
        run_recomputed(norm, Guards(modules=(norm,)), torch.randn(4, 8, requires_grad=True))
    norm.eval()
    run_recomputed(norm, Guards(modules=(norm,)), torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_weights_and_modes_may_not_change_between_forward_and_backward() -> None:
    block, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    y = run_recomputed(block, Guards(modules=(block,)), x)
    with torch.no_grad():
        block[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="the weight 'weight' of Linear was changed between forward and backward"):
        y.sum().backward()
    other = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    y = torch.func.functional_call(_Recomputed(block), {f"block.{n}": p for n, p in other.items()}, (x,))
    with pytest.raises(RuntimeError, match="was changed between forward and backward"):
        y.sum().backward()
    y = run_recomputed(block, Guards(modules=(block,)), x)
    block.eval()
    with pytest.raises(RuntimeError, match="was switched to eval mode between forward and backward"):
        y.sum().backward()


class _Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_recomputed(self.block, Guards(modules=(self.block,)), x)


def test_what_the_code_writes_into_its_arguments_is_seen_outside_once() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def call(t: torch.Tensor, notes: dict[str, int], names: list[str]) -> torch.Tensor:
        notes["calls"] = notes.get("calls", 0) + 1
        names.append("x")
        return (linear(t) * notes["calls"]).tanh()

    notes, names = {"calls": 1}, []
    y = run_recomputed(call, Guards(modules=(linear,)), x, notes, names)
    y.sum().backward()
    assert (notes, names) == ({"calls": 2}, ["x"])
    expected = nn.Linear(8, 8)
    expected.load_state_dict(linear.state_dict())
    (expected(x) * 2).tanh().sum().backward()
    assert torch.equal(linear.weight.grad, expected.weight.grad)


def test_a_functional_call_with_other_weights_is_refused_by_name() -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return run_recomputed(lambda y: self.linear(y).tanh(), Guards((), (self.linear,)), x)

    model = Recomputing()
    weights = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, weights, torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match=r"weight 'weight' of Linear.*functional_call: take the plan off"):
        loss.backward()
