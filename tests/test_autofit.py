"""``fit``: one call measures, plans, patches and checks; leaving it gives the model back."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan.autofit import fit, parse_budget
from ckptplan.errors import InfeasibleTargetError, LargerBatchWarning, StepMismatchError
from ckptplan.proof import prove_model
from ckptplan.subject import Trials
from tests.run_models import WrongGradients

WIDTH = 16


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, WIDTH)) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(3, (size,))


def planned(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(("planner", "budget"), [("dp", 0.6), ("all", 1.0), ("none", 1.0), ("uniform", 0.6)])
def test_what_runs_again_is_what_the_plan_and_its_summary_say(planner: str, budget: float) -> None:
    """B27: counted inside each block, where a recomputation runs; and nowhere is it decided by something else."""
    model, batch = Net(), batch_of(64)
    runs = [0] * len(model.layers)

    def count(index: int) -> Any:
        def ran(*_: Any) -> None:
            runs[index] += 1

        return ran

    for index, layer in enumerate(model.layers):
        layer[0].register_forward_pre_hook(count(index))
    with fit(model, batch, loss_fn, budget, planner=planner, say=None) as fitted:
        loss_fn(model, batch).backward()
        assert [1 + decision.checkpointed for decision in fitted.plan.decisions] == runs
        assert fitted.summary.startswith(f"{sum(runs) - len(runs)} of {len(runs)} blocks recomputed")
    assert (planner == "all") == (sum(runs) == 2 * len(runs))
    loss_fn(model, batch).backward()
    assert [n - 1 for n in runs] == [1 + decision.checkpointed for decision in fitted.plan.decisions]


class TestOneCall:
    def test_the_step_is_the_plain_one_and_its_peak_is_the_predicted_one_within_the_budget(self) -> None:
        model, batch = Net(), batch_of(64)
        plain = copy.deepcopy(model)
        fitted = fit(model, batch, loss_fn, 0.6, say=None)
        assert fitted.plan.recomputed > 0
        assert planned(model) == [d.block_id for d in fitted.plan.decisions if d.checkpointed]
        assert fitted.equality is not None
        assert (fitted.equality.checked, fitted.equality.bitwise_equal) == (True, True)
        for one in (model, plain):
            torch.manual_seed(1)
            loss_fn(one, batch).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        proof = prove_model(plain, fitted.plan, batch, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
        assert proof.peak_bytes == fitted.plan.predicted_peak_bytes <= 0.6 * proof.no_checkpoint_peak_bytes

    def test_leaving_gives_the_model_back(self) -> None:
        model, batch = Net(), batch_of(64)
        keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
        with fit(model, batch, loss_fn, 0.6, say=None) as fitted:
            assert planned(model)
            assert (list(model.state_dict()), [id(p) for p in model.parameters()]) == (keys, parameters)
        fitted.remove()
        assert planned(model) == []
        assert not model._forward_pre_hooks

    def test_it_says_what_it_did(self, capsys: pytest.CaptureFixture[str]) -> None:
        model, batch = Net(), batch_of(64)
        fitted = fit(model, batch, loss_fn, 0.6)
        said = capsys.readouterr().out.splitlines()
        assert said == [f"ckptplan: {line}" for line in fitted.summary.splitlines()]
        assert f"{fitted.plan.recomputed} of 4 blocks recomputed: {fitted.plan.text}" in said[0]
        assert "checked: a planned step equals the unplanned step (bitwise)" in said[-1]

    def test_a_fitted_model_copies_and_pickles_and_so_does_its_watch(self) -> None:
        model, batch = Net(), batch_of(64)
        fit(model, batch, loss_fn, 0.6, say=None)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert planned(twin)
            with pytest.warns(LargerBatchWarning):
                loss_fn(twin, batch_of(65)).backward()

    def test_without_gradients_it_is_the_plain_model(self) -> None:
        model, batch = Net().eval(), batch_of(64)
        fit(model, batch, loss_fn, 0.6, say=None)
        with torch.no_grad():
            expected = copy.deepcopy(model)(batch[0])
            assert torch.equal(model(batch[0]), expected)


class TestBudget:
    def test_a_size_is_everything_on_the_device(self) -> None:
        model, batch = Net(), batch_of(256)
        optimizer = torch.optim.AdamW(model.parameters())
        free = fit(model, batch, loss_fn, "1GiB", optimizer=optimizer, say=None, check=False)
        free.remove()
        static = free.static_bytes
        weights = sum(p.numel() * 4 for p in model.parameters())
        assert (static.weights_bytes, static.gradients_bytes) == (weights, weights)
        # two moments for each weight, and one step count for each parameter
        assert static.optimizer_bytes == 2 * weights + 4 * len(list(model.parameters()))
        size = static.total_bytes + free.plan.no_checkpoint_peak_bytes
        tight = fit(model, batch, loss_fn, size - 1, optimizer=optimizer, say=None, check=False)
        tight.remove()
        assert (free.plan.recomputed, tight.plan.recomputed) == (0, 1)
        assert fit(model, batch, loss_fn, size, optimizer=optimizer, say=None, check=False).plan.recomputed == 0

    def test_without_an_optimizer_its_state_is_said_to_be_missing(self) -> None:
        fitted = fit(Net(), batch_of(8), loss_fn, "1GiB", say=None)
        assert fitted.static_bytes.optimizer_bytes is None
        assert "optimizer's state is not counted (give optimizer=...)" in fitted.summary

    @pytest.mark.parametrize("budget", ["2KiB", "50KiB", 0.001])
    def test_what_cannot_fit_is_an_error_and_the_model_stays_as_it_was(self, budget: Any) -> None:
        model = Net()
        with pytest.raises(InfeasibleTargetError):
            fit(model, batch_of(64), loss_fn, budget)
        assert planned(model) == []
        assert not model._forward_pre_hooks

    def test_weights_above_the_budget_are_told_in_parts(self) -> None:
        with pytest.raises(InfeasibleTargetError, match=r"weights 33\.\d+ KiB, gradients 33\.\d+ KiB and batch"):
            fit(Net(), batch_of(8), loss_fn, "2KiB")

    @pytest.mark.parametrize(
        ("budget", "meant"), [(0.5, 0.5), (1.0, 1.0), (7, 7), ("12GiB", 12 * 2**30), ("5 MB", 5 * 10**6)]
    )
    def test_a_float_is_a_share_and_anything_else_a_size(self, budget: Any, meant: float) -> None:
        kind, value = parse_budget(budget)
        assert value == meant
        assert kind == ("activation_budget_fraction" if isinstance(budget, float) else "device_budget_bytes")

    @pytest.mark.parametrize("budget", [0.0, 1.5, -1, 0, "half", float("nan"), float("inf"), True, None, [1]])
    def test_other_values_are_refused_naming_budget(self, budget: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="budget="):
            fit(Net(), batch_of(8), loss_fn, budget)


class TestBatches:
    def test_smaller_ones_run_and_a_larger_one_is_told_once(self) -> None:
        model = Net()
        fit(model, batch_of(64), loss_fn, 0.6, say=None)
        for size in (64, 7, 1):
            loss_fn(model, batch_of(size)).backward()
        with torch.no_grad():
            loss_fn(model, batch_of(128))
        with pytest.warns(LargerBatchWarning, match=r"\[65,16\], larger than those that were measured \(\[64,16\]\)"):
            loss_fn(model, batch_of(65)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_fn(model, batch_of(65)).backward()


class TestTheGate:
    def test_a_wrong_gradient_leaves_the_model_unpatched_and_names_the_block(self) -> None:
        model = WrongGradients(layers=4, width=16, heads=2, sequence_length=8, vocab_size=16)
        tokens = torch.randint(16, (2, 8))

        def loss(net: nn.Module, given: Tensor) -> Tensor:
            return nn.functional.cross_entropy(net(given).flatten(0, 1), given.flatten())

        with pytest.raises(StepMismatchError, match=r"first in block 'layers\.0'"):
            fit(model, tokens, loss, 0.4, say=None)
        assert planned(model) == []
        fit(model, tokens, loss, 0.4, say=None, check=False).remove()


def test_fit_is_public() -> None:
    assert ckptplan.fit is fit
