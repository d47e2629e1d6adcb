"""Dry runs on fake tensors, against a tracker of live bytes over the real planned step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import ckptplan
from ckptplan.apply import checkpointed
from ckptplan.data import Batch
from ckptplan.dry_run import verify_plan
from ckptplan.errors import DryRunError, PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.simulate import simulate_plan
from tests.test_promises import MODELS, batch_for
from tests.tracker import step_peak


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


PLANS = {
    "gpt": ("K0 K1 K2 K3", "R(0) R(1) K2 K3", "R(0 1) R(2 3)", "R(0 R(1 2)) K3"),
    "gpt dropout": ("K0 K1 K2", "R(0) R(1) R(2)", "R(0 R(1 2))"),
    "vit": ("R(0) K1 R(2) K3", "R(0 1 2) K3"),
    "resnet": ("K0 K1 K2 K3", "R(0) R(1) R(2) K3", "R(0 1) R(2 3)", "R(R(0) R(1)) K2 K3"),
    "unet": ("K0 K1 K2 K3 K4", "R(0) R(1) R(2) R(3) R(4)"),
    "mlp": ("K0 K1 R(2) K3 K4", "R(0 1 2 3 4)"),
}


@pytest.mark.parametrize("name", list(PLANS))
def test_the_peak_is_that_of_the_real_step_and_of_a_profile_of_live_bytes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = batch_for(model)
    profile = profile_model(model, None, batch, _cross_entropy, num_warmup=0, num_trials=1, memory="live")
    found = {}
    for text in PLANS[name]:
        plan = CheckpointPlan.from_text(text, profile)
        found[text] = verify_plan(model, plan, batch, _cross_entropy)
        with checkpointed(model, plan):
            real = step_peak(lambda: _cross_entropy(model, batch), model.parameters())
        assert found[text].peak_bytes == real, text
        assert found[text].peak_bytes == pytest.approx(simulate_plan(profile, plan).peak_bytes, rel=0.01)
        assert found[text].operator.startswith("aten.")
        assert found[text].block in {*profile.block_ids, "head and loss", "before the blocks"}


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


NORMS = {
    "layer": lambda: nn.LayerNorm((1, 1)),
    "group": lambda: nn.GroupNorm(8, 8),
    "batch": lambda: nn.BatchNorm2d(8),
}


@pytest.mark.parametrize("kind", list(NORMS))
def test_norms_under_autocast_keep_their_statistics_as_a_real_step_does(kind: str) -> None:
    """Torch's fake kernels take them for half as large."""
    model = nn.Sequential(*(_Normed(NORMS[kind]()) for _ in range(3)))
    batch = torch.randn(64, 8, 1, 1)

    def loss_fn(module: nn.Module, given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(given).float().square().mean()

    profile = profile_model(model, None, batch, loss_fn, num_warmup=0, num_trials=1, memory="live")
    for text in ("K0 K1 K2", "R(0) R(1) K2"):
        plan = CheckpointPlan.from_text(text, profile)
        with checkpointed(model, plan):
            real = step_peak(lambda: loss_fn(model, batch), model.parameters())
        assert verify_plan(model, plan, batch, loss_fn).peak_bytes == real, text


class Wide(nn.Module):
    """Narrow blocks around a wide one."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 1024, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, w), nn.Tanh(), nn.Linear(w, 16), nn.Tanh()) for w in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


@pytest.mark.parametrize(
    ("text", "phases"), [("K0 K1 K2", {"backward"}), ("K0 R(1) K2", {"backward", "recomputation"})]
)
def test_it_names_the_wide_block_and_its_matrix_product(text: str, phases: set[str]) -> None:
    model, batch = Wide(), torch.randn(64, 16)
    names = [f"layers.{i}" for i in range(3)]
    found = verify_plan(model, CheckpointPlan.from_text(text, names), batch, _loss)
    assert (found.block, found.phase in phases) == ("layers.1", True)
    assert found.operator.startswith("aten.")
    assert found.text.startswith("peak ")
    assert "in layers.1" in found.text


def test_model_gradients_and_random_streams_are_left_as_they_were() -> None:
    model = MODELS["resnet"]()
    batch = batch_for(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    state = torch.get_rng_state()
    names = [f"layers.{i}" for i in range(4)]
    verify_plan(model, CheckpointPlan.from_text("R(0 1) R(2) K3", names), batch, _cross_entropy)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


class Selecting(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x[x[:, 0] > 0])


@pytest.mark.parametrize("kind", [Deciding, Selecting])
def test_a_step_that_decides_by_values_is_refused_with_the_operator(kind: type[Deciding]) -> None:
    plan = CheckpointPlan.from_text("K0 K1", ["layers.0", "layers.1"])
    with pytest.raises(DryRunError, match=r"stops in layers\.0.*aten\..*by the values of tensors.*real step"):
        verify_plan(kind(), plan, torch.randn(8, 4), _loss)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanIncompatibleError, match=r"layers\.9"):
        verify_plan(Deciding(), CheckpointPlan.from_text("K0", ["layers.9"]), torch.randn(8, 4), _loss)


def test_it_is_public() -> None:
    assert ckptplan.verify_plan is verify_plan


class Masking(nn.Module):
    """Takes a mask only where something is padded, and never asks that of fake tensors, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        padded, place = tokens == 0, torch.ones(tokens.shape).cumsum(1)
        needs_mask = isinstance(tokens, FakeTensor) or isinstance(place, FakeTensor) or bool(padded.any())
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x).tanh() * place[..., None]
            if needs_mask:
                x = torch.where(padded[..., None], torch.zeros_like(x), x)
        return x


@pytest.mark.parametrize("least", [0, 1])
def test_it_decides_by_token_ids_and_constants_as_the_real_step_does(least: int) -> None:
    torch.manual_seed(0)
    model, batch = Masking(), torch.randint(1, 16, (8, 32))
    batch[0, 0] = least
    plan = CheckpointPlan.from_text("R(0) K1", ["layers.0", "layers.1"])
    with checkpointed(model, plan):
        real = step_peak(lambda: _loss(model, batch), model.parameters())
    assert verify_plan(model, plan, batch, _loss).peak_bytes == real


def test_what_is_overwritten_with_unknown_values_is_unknown() -> None:
    class Summing(Deciding):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(4)
            total += self.layers[0](x).sum(0)
            return self.layers[1](x) if total.sum() > 0 else x * total

    plan = CheckpointPlan.from_text("K0 K1", ["layers.0", "layers.1"])
    with pytest.raises(DryRunError, match=r"by the values of tensors"):
        verify_plan(Summing(), plan, torch.randn(8, 4), _loss)


def test_an_operator_of_which_no_fake_kernel_knows_the_workspace_is_refused() -> None:
    class Recurrent(Deciding):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.lstm(self.layers[0](x))[0])

    plan = CheckpointPlan.from_text("K0 K1", ["layers.0", "layers.1"])
    if torch.backends.mkldnn.is_available():
        with pytest.raises(DryRunError, match=r"mkldnn_rnn_layer.*workspace.*real step"):
            verify_plan(Recurrent(), plan, torch.randn(2, 8, 4), _loss)
    else:
        assert verify_plan(Recurrent(), plan, torch.randn(2, 8, 4), _loss).peak_bytes > 0


def test_a_step_that_fails_on_fake_tensors_only_is_refused() -> None:
    class Raising(Deciding):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                raise RuntimeError("expected inputs of another type")
            return super().forward(x)

    plan = CheckpointPlan.from_text("K0 K1", ["layers.0", "layers.1"])
    with pytest.raises(DryRunError, match=r"before the blocks.*another type.*real step"):
        verify_plan(Raising(), plan, torch.randn(8, 4), _loss)
