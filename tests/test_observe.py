"""What a block's forward does besides computing, as seen by running it; and which blocks may be recomputed."""

from __future__ import annotations

import collections
import random
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.measure import profile_blocks, profile_model
from ckptplan.observe import attribute_state
from ckptplan.profiles import BlockProfile
from tests.chains import declared, mean_square


class Block(nn.Module):
    """A linear layer around which subclasses do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.log: list[int] = []
        self.nested = {"inner": [0]}
        self.generator = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("fixed", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.fixed


class FunctionalDropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Ema(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.ema


class ReplacedBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.ema = self.ema + y.detach().mean(0)
        return y - self.ema


class PythonRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if random.random() < 0.5 else 1.0)


class NumpyRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(np.random.rand())  # noqa: NPY002


class Counter(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class ListAppend(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return self.linear(x)


class NestedState(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.nested["inner"][0] += 1
        return self.linear(x)


class PrivateTorch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(8, generator=self.generator)


class PrivatePython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.python.random()


class PrivateNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.numpy.random())


class InPlaceInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x += 1
        return self.linear(x)


ELSEWHERE = iter(range(10**9))


class Elsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + next(ELSEWHERE)


class LazyCache(Block):
    """Its first call makes a cache; all others only read it."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.cache = torch.full((8,), 2.0)
        return self.linear(x) * self.cache


def seen(module: nn.Module) -> BlockProfile:
    """The profile of the second of two blocks, whose input is an inner tensor."""
    torch.manual_seed(0)
    blocks = declared([nn.Linear(8, 8), module])
    return profile_blocks(blocks, (torch.randn(16, 8),), device="cpu", num_warmup=0, num_trials=1, memory="live")[1]


@pytest.mark.parametrize(
    ("module", "stochastic", "buffers"),
    [
        (nn.Linear(8, 8), False, ()),
        (Block(), False, ()),
        (LazyCache(), False, ()),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), True, ()),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval(), False, ()),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), False, ()),
        (FunctionalDropout(), True, ()),
        (nn.Sequential(nn.Linear(8, 8), nn.RReLU()), True, ()),
        (nn.BatchNorm1d(8), False, ("num_batches_tracked", "running_mean", "running_var")),
        (nn.BatchNorm1d(8).eval(), False, ()),
        (nn.BatchNorm1d(8, momentum=None), False, ("num_batches_tracked", "running_mean", "running_var")),
        (Ema(), False, ("ema",)),
        (ReplacedBuffer(), False, ("ema",)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), False, "some"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_recomputation_can_make_exact_is_eligible(module: nn.Module, stochastic: bool, buffers) -> None:
    profile = seen(module)
    assert profile.exclusion_reason is None
    assert profile.eligible_for_checkpoint
    assert profile.is_stochastic is stochastic
    assert profile.is_stateful is bool(buffers)
    if buffers == "some":
        assert len(profile.mutated_buffers) == 2  # u and v of the power iteration
    else:
        assert tuple(sorted(profile.mutated_buffers)) == buffers


def test_the_older_spectral_norm_is_eligible_with_its_buffers_guarded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.utils.spectral_norm(nn.Linear(8, 8))
    profile = seen(module)
    assert profile.exclusion_reason is None
    assert "weight_u" in profile.mutated_buffers


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (PythonRandom(), "Python's or NumPy's global random stream"),
        (NumpyRandom(), "Python's or NumPy's global random stream"),
        (Counter(), "changes the Python attribute 'calls'"),
        (ListAppend(), "changes the Python attribute 'log'"),
        (NestedState(), "changes the Python attribute 'nested'"),
        (PrivateTorch(), "changes the Python attribute 'generator'"),
        (PrivatePython(), "changes the Python attribute 'python'"),
        (PrivateNumpy(), "changes the Python attribute 'numpy'"),
        (InPlaceInput(), "changes its own input in place"),
        (Elsewhere(), "two runs from the same state give different outputs"),
        (nn.Sequential(nn.Linear(8, 8), Counter()), "changes the Python attribute '1.calls'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_a_recomputation_would_get_wrong_is_excluded_with_the_reason(module: nn.Module, reason: str) -> None:
    profile = seen(module)
    assert not profile.eligible_for_checkpoint
    assert reason in (profile.exclusion_reason or "")
    assert profile.recompute is None
    assert profile.keep is not None


def test_a_block_without_a_gradient_saves_nothing_and_is_excluded() -> None:
    class Labels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    blocks = declared([nn.Linear(8, 8), Labels(), nn.Linear(8, 8)])
    profile = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1, memory="live")
    assert "no gradient flows through its output" in (profile[1].exclusion_reason or "")


def test_observing_leaves_the_callers_block_as_it_was() -> None:
    for module in (Counter(), ListAppend(), NestedState(), Ema(), PrivateTorch(), nn.BatchNorm1d(8)):
        state = {name: b.clone() for name, b in module.named_buffers()}
        drawn = module.generator.get_state() if hasattr(module, "generator") else None
        seen(module)
        assert all(torch.equal(b, state[name]) for name, b in module.named_buffers())
        if drawn is not None:
            assert (module.calls, module.log, module.nested) == (0, [], {"inner": [0]})
            assert torch.equal(module.generator.get_state(), drawn)


class KeepsItsMask(Block):
    """Sets an attribute anew at every call, to what the call computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.rand_like(x) < 0.5
        return self.linear(x) * self.mask


class Toggles(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.is_odd = not getattr(self, "is_odd", False)
        return self.linear(x)


def test_an_attribute_that_a_recomputation_sets_to_the_same_value_is_no_obstacle() -> None:
    profile = seen(KeepsItsMask())
    assert profile.exclusion_reason is None
    assert profile.is_stochastic
    assert "'is_odd'" in (seen(Toggles()).exclusion_reason or "")


def test_an_in_place_activation_on_the_input_is_seen_even_where_it_changes_no_value() -> None:
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    blocks = declared([nn.Sequential(nn.Linear(8, 8)), block, nn.Linear(8, 8)])
    profile = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1, memory="live")
    assert "changes its own input in place" in (profile[1].exclusion_reason or "")


def test_a_buffer_that_is_written_without_a_change_is_seen() -> None:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.fixed.clamp_(0, 1)
            return self.linear(x) * self.fixed

    assert seen(Clamps()).mutated_buffers == ("fixed",)


def test_torch_counts_the_writes_to_a_tensor() -> None:
    tensor = torch.zeros(3)
    before = tensor._version
    tensor.add_(0)
    assert tensor._version == before + 1


def test_an_in_place_activation_on_the_example_input_is_seen() -> None:
    blocks = declared([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Linear(8, 8)])
    x = torch.randn(4, 8)
    before = x.clone()
    profile = profile_blocks(blocks, (x,), device="cpu", num_warmup=0, num_trials=1)
    assert "changes its own input in place" in (profile[0].exclusion_reason or "")
    assert torch.equal(x, before)


# --- what a forward does only once, or to what is not its own ---


class InitialisesOnce(Block):
    """As a codebook that is set up from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.is_ready:
            self.ema.copy_(y.detach().mean(0))
            self.is_ready.fill_(True)
        return y - self.ema


class EmaOnceReady(InitialisesOnce):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.is_ready:
            self.ema.mul_(0.9)
        self.is_ready.fill_(True)
        return y - self.ema


def test_buffers_that_only_the_first_run_or_only_later_runs_change_are_guarded() -> None:
    once, later = seen(InitialisesOnce()), seen(EmaOnceReady())
    assert once.mutated_buffers == ("ema", "is_ready")
    assert later.mutated_buffers == ("ema", "is_ready")
    assert once.exclusion_reason is None
    assert later.exclusion_reason is None


class MakesABuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = torch.ones(8)
        return self.linear(x) * self.made


class FlipsAFlag(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.calls:
            self.calls = 1
            return y * 2
        return y


class DequeAppend(Block):
    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[int] = collections.deque(maxlen=10**6)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1)
        return self.linear(x)


class ArrayInPlace(Block):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        return self.linear(x)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class SlotsObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def forward(self, x: Tensor) -> Tensor:
        self.slots.count += 1
        return self.linear(x)


class Scaler:
    def __init__(self) -> None:
        self.used = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.used += 1
        return x


class CallableWithState(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaler(self.linear(x))


class LargeTensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.zeros(200_000)

    def forward(self, x: Tensor) -> Tensor:
        self.large[-1] += 1
        return self.linear(x)


class HiddenModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.BatchNorm1d(8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.linear(x))


class ClassCounter(Block):
    used: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.used.append(1)
        return self.linear(x)


class KeepsALoss(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.auxiliary = y.square().mean()
        return y


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MakesABuffer, "makes the buffer 'made'"),
        (FlipsAFlag, "its first run gives another output"),
        (DequeAppend, "attribute 'recent'"),
        (ArrayInPlace, "attribute 'counts'"),
        (SlotsObject, "attribute 'slots'"),
        (CallableWithState, "attribute 'scaler'"),
        (LargeTensor, "attribute 'large'"),
        (HiddenModule, "attribute 'hidden'"),
        (ClassCounter, "attribute 'ClassCounter.used'"),
        (KeepsALoss, "with its graph in the attribute 'auxiliary'"),
    ],
)
def test_side_effects_of_every_kind_exclude_the_block(kind: type[Block], reason: str) -> None:
    assert reason in (seen(kind()).exclusion_reason or "")


class Chain(nn.Module):
    """An own kind of call for each block: ``run(layer, x, extra)``."""

    def __init__(self, layers: list[nn.Module], run: Callable[[nn.Module, Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = self.run(layer, x, batch["extra"])
        return x


def chain_profile(model: nn.Module, extra: Any = None) -> list[str | None]:
    batch = {"x": torch.randn(4, 8), "extra": extra}
    found = profile_model(
        model, "layers.*", batch, lambda m, b: mean_square(m(b)), num_warmup=0, num_trials=1, memory="live"
    )
    return [block.exclusion_reason for block in found]


class Collects(Block):
    def forward(self, x: Tensor, found: Any) -> Tensor:
        if isinstance(found, dict):
            found[len(found)] = 1
        elif isinstance(found, list):
            found.append(1)
        else:
            found.count += 1
        return self.linear(x)


@pytest.mark.parametrize("make", [list, dict, Slots])
def test_an_argument_that_is_no_tensor_and_changes_excludes_the_block(make: Callable[[], Any]) -> None:
    extra = make()
    reasons = chain_profile(Chain([Collects(), Collects()], lambda layer, x, found: layer(x, found)), extra)
    assert all(f"changes its argument 1 (a {make.__name__})" in (reason or "") for reason in reasons)
    assert extra.count == 0 if isinstance(extra, Slots) else not extra


def test_a_buffer_that_one_block_changes_excludes_every_block_that_shares_it() -> None:
    layers: list[nn.Module] = [Ema(), Block(), Block()]
    layers[1].fixed = layers[0].ema
    reasons = chain_profile(Chain(layers, lambda layer, x, extra: layer(x)))
    assert "'ema' is shared with block 'layers.1'" in (reasons[0] or "")
    assert "'fixed' is shared with block 'layers.0'" in (reasons[1] or "")
    assert reasons[2] is None


def test_an_auxiliary_loss_that_blocks_keep_and_the_loss_adds_is_measured() -> None:
    model = Chain([Block(), KeepsALoss(), Block()], lambda layer, x, extra: layer(x))

    def loss_fn(m: Chain, batch: dict[str, Any]) -> Tensor:
        return mean_square(m(batch)) + m.layers[1].auxiliary

    found = profile_model(model, "layers.*", {"x": torch.randn(4, 8), "extra": None}, loss_fn, num_trials=2)
    assert [block.eligible_for_checkpoint for block in found] == [True, False, True]


# --- blocks that look alike ---


class DropsRows(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("share", torch.tensor(share))

    def forward(self, x: Tensor) -> Tensor:
        if self.share > 0:
            x = x * (torch.rand(len(x), 1) >= self.share)
        return self.linear(x)


def test_the_values_of_buffers_and_what_functions_hold_make_a_block_another_kind() -> None:
    blocks = declared([nn.Linear(8, 8), DropsRows(0.5), DropsRows(0.5), DropsRows(0.0)])
    found = profile_blocks(blocks, (torch.randn(8, 8, requires_grad=True),), device="cpu", num_warmup=0, num_trials=1)
    assert [block.is_stochastic for block in found] == [False, True, True, False]
    assert found[1].kind == found[2].kind != found[3].kind


def test_a_function_over_another_value_makes_a_block_another_kind() -> None:
    class Applies(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.function = lambda x: F.dropout(x, share) if share else x

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.linear(x))

    blocks = declared([nn.Linear(8, 8), Applies(0.5), Applies(0.5), Applies(0.0)])
    found = profile_blocks(blocks, (torch.randn(8, 8, requires_grad=True),), device="cpu", num_warmup=0, num_trials=1)
    assert [block.is_stochastic for block in found] == [False, True, True, False]
    assert found[1].kind == found[2].kind != found[3].kind


GLOBAL_ORDER = ["plain", "random", "plain"]


def test_blocks_that_look_alike_but_behave_differently_are_observed_each() -> None:
    class ByGlobal(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x)) if WHO.get(id(self.linear.weight)) == "random" else self.linear(x)

    WHO: dict[int, str] = {}
    layers = [ByGlobal(), ByGlobal(), ByGlobal()]
    model = Chain(layers, lambda layer, x, extra: layer(x))

    def loss_fn(m: Chain, batch: dict[str, Any]) -> Tensor:
        WHO.update({id(layer.linear.weight): who for layer, who in zip(m.layers, GLOBAL_ORDER, strict=True)})
        return mean_square(m(batch))

    x = torch.randn(4, 8, requires_grad=True)
    found = profile_model(model, "layers.*", {"x": x, "extra": None}, loss_fn, num_warmup=0, num_trials=1)
    assert [block.is_stochastic for block in found] == [False, True, False]


def test_blocks_with_trained_statistics_are_one_kind() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)]
    for layer in layers:
        layer[1].running_mean.normal_()
    blocks = declared(layers)
    found = profile_blocks(blocks, (torch.randn(8, 8, requires_grad=True),), device="cpu", num_warmup=0, num_trials=1)
    assert len({block.kind for block in found[1:]}) == 1  # the first one's input comes from outside


class HoldsEntropy(nn.Module):
    stream = random.SystemRandom()  # which has no state to compare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def test_a_source_of_entropy_in_a_class_is_no_obstacle() -> None:
    assert attribute_state(HoldsEntropy()) == attribute_state(HoldsEntropy())
