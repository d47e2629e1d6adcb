"""Activations on the host: nothing of a step changes, and of the device's memory what was said."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan.apply import checkpointed
from ckptplan.data import Batch
from ckptplan.dry_run import verify_plan
from ckptplan.errors import BlockDeclarationError, PlanIncompatibleError, UnsupportedBoundaryError
from ckptplan.measure import profile_model
from ckptplan.memory import LiveStorages
from ckptplan.models.gpt import GPT
from ckptplan.offload import Mover, run_moved, run_offloaded
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import prove_model
from ckptplan.subject import Trials
from ckptplan.training import loss_of
from tests.block_kinds import KINDS, make_block
from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.examine import CPU, differences, made, trained
from tests.zoo.transformers_models import TRANSFORMERS


def first_tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def step(module: nn.Module, inputs: list[Tensor], *, on_host: bool) -> dict[str, Any]:
    """Output, gradients of inputs and weights, buffers and the random stream after a step from one start."""
    module, inputs = copy.deepcopy(module), [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(3)
    given = [x * 1 for x in inputs]
    output = run_offloaded(module, module, *given) if on_host else module(*given)
    first_tensor(output).square().mean().backward()
    left = {"output": first_tensor(output).detach(), "stream": torch.get_rng_state()}
    left |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}
    left |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return left | {f"buffer {name}": b for name, b in module.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_every_kind_of_block_is_the_same_to_the_bit(kind: str) -> None:
    module, inputs = make_block(kind)
    assert differences(step(module, inputs, on_host=True), step(module, inputs, on_host=False)) == []


@pytest.mark.parametrize("kind", ["gpt", "encoder_dropout", "resnet", "llama"])
def test_what_a_block_saves_is_on_the_host_alone_between_its_forward_and_its_backward(kind: str) -> None:
    module, inputs = make_block(kind, scale=2)
    levels: dict[bool, int] = {}
    mover = Mover()
    for on_host in (False, True):
        given = [x.clone().requires_grad_() for x in inputs]
        with LiveStorages() as live:
            output = run_moved(mover, module, module, tuple(given), {}) if on_host else module(*given)
            levels[on_host] = live.level_bytes
            first_tensor(output).sum().backward()
    output_bytes = first_tensor(output).untyped_storage().nbytes()  # which the next block holds
    assert mover.host_bytes >= levels[False] - levels[True]
    assert 0 <= levels[True] - output_bytes < 0.05 * levels[False]


def test_second_order_gradients_and_a_graph_that_is_kept_are_those_of_the_plain_block() -> None:
    x = torch.randn(8, 32)
    smooth = nn.Sequential(nn.Linear(x.shape[-1], 48), nn.Tanh(), nn.Linear(48, x.shape[-1]), nn.Softplus())
    found = []
    for on_host in (False, True):
        given = x.clone().requires_grad_()
        output = run_offloaded(smooth, smooth, given) if on_host else smooth(given)
        (first,) = torch.autograd.grad(output.square().mean(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given, retain_graph=True)
        (again,) = torch.autograd.grad(output.sum(), given, retain_graph=True)
        found.append((first, second, again, *torch.autograd.grad(output.sum(), list(smooth.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_noise_that_is_saved_before_it_is_filled_is_copied_when_it_is() -> None:
    """rrelu saves its noise, then fills it."""
    module = nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 16), nn.RReLU())
    assert (
        differences(
            step(module, [torch.randn(64, 16)], on_host=True), step(module, [torch.randn(64, 16)], on_host=True)
        )
        != []
    )  # other inputs: the comparison sees a difference
    x = [torch.randn(64, 16)]
    assert differences(step(module, x, on_host=True), step(module, x, on_host=False)) == []


def test_a_backward_inside_the_forward_reads_what_is_still_there() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return x - force

    x = [torch.randn(16, 32)]
    assert differences(step(Inner(), x, on_host=True), step(Inner(), x, on_host=True)) != []
    module = Inner()
    assert differences(step(module, x, on_host=True), step(module, x, on_host=False)) == []


def test_a_storage_that_several_saved_tensors_lie_in_is_moved_once() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()  # saves its result
            a, b = y.chunk(2, -1)
            return a * b  # saves both halves

    mover = Mover()
    given = torch.randn(32, 64, requires_grad=True)
    run_moved(mover, Halves(), Halves(), (given * 1,), {}).sum().backward()
    assert mover.host_bytes == 32 * 64 * 4


def test_inputs_and_weights_stay_and_a_change_in_place_after_the_forward_is_told() -> None:
    linear = nn.Linear(32, 32)
    x = torch.randn(64, 32, requires_grad=True)
    given = x * 1
    mover = Mover()
    output = run_moved(mover, linear, linear, (given,), {})
    assert mover.host_bytes == 0
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place after its forward: \(64, 32\) of torch.float32"):
        output.sum().backward()


def test_nothing_is_moved_without_gradients_and_nothing_stays_when_the_graph_is_gone() -> None:
    module, (x,) = make_block("gpt")
    with torch.no_grad():
        assert torch.equal(run_offloaded(module, module, x), module(x))
    mover = Mover()
    output = run_moved(mover, module, module, (x.clone().requires_grad_(),), {})
    hosts = [weakref.ref(moved.host) for moved in mover._all]
    assert hosts
    assert all(host() is not None for host in hosts)
    del output, mover
    gc.collect()
    assert all(host() is None for host in hosts)


# --- in plans ---


def gpt() -> tuple[GPT, Batch]:
    torch.manual_seed(0)
    model = GPT(layers=4, width=32, heads=2, sequence_length=32, vocab_size=50)
    tokens = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(1))
    return model, Batch(tokens, tokens)


@pytest.mark.parametrize("text", ["O0 O1 O2 O3", "K0 O1 R(2) O3", "O0 R(1 2) O3", "R(0 1) O2 K3"])
def test_a_plan_peaks_where_it_says_and_its_gradients_are_the_plain_ones(text: str) -> None:
    model, batch = gpt()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1, offload=True)
    plan = ckptplan.plan_checkpoints(
        profile, target_kind="activation_budget_fraction", target_value=1.0, planner="text", text=text
    )
    proof = prove_model(model, plan, batch, loss_of, device=CPU, trials=Trials(0, 1), time_steps=False)
    assert proof.peak_bytes == plan.predicted_peak_bytes
    assert proof.gradients is not None
    assert proof.gradients.bitwise_equal
    assert verify_plan(model, plan, batch, loss_of).peak_bytes == plan.predicted_peak_bytes


def test_all_blocks_on_the_host_keep_less_than_all_recomputed_one_by_one_peak_at() -> None:
    model, batch = gpt()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1, offload=True)
    (option,) = profile[1].offload
    assert option.host_bytes > 0.9 * profile[1].keep.saved_bytes  # type: ignore[union-attr]
    assert option.cost.saved_bytes < 0.1 * profile[1].keep.saved_bytes  # type: ignore[union-attr]
    assert option.cost.backward_peak_bytes <= profile[1].keep.backward_peak_bytes  # type: ignore[union-attr]
    assert option.time_ms is not None


def test_state_dict_hooks_copies_and_evaluation_are_untouched() -> None:
    model, batch = gpt()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1, offload=True)
    plan = CheckpointPlan.from_text("O0 O1 K2 O3", profile)
    keys, seen = list(model.state_dict()), []
    model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    with torch.no_grad():
        plain = loss_of(model, batch)
    seen.clear()
    with checkpointed(model, replace(plan, fingerprint="")):
        assert list(model.state_dict()) == keys
        loss = loss_of(copy.deepcopy(model), batch)
        assert torch.equal(loss.detach(), plain)
        loss.backward()
    assert seen == ["forward"]


def test_a_plan_needs_the_figures_and_names_what_is_missing() -> None:
    model, batch = gpt()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1)
    with pytest.raises(PlanIncompatibleError, match=r"'layers\.0' was not measured with its activations on the host"):
        ckptplan.plan_checkpoints(
            profile, target_kind="activation_budget_fraction", target_value=1.0, planner="text", text="O0 K1 K2 K3"
        )
    with pytest.raises(PlanIncompatibleError, match=r"O1 stands inside a recomputation; it may at the top only"):
        CheckpointPlan(
            (ckptplan.Recompute((ckptplan.Keep(0), ckptplan.Offload(1))),),
            CheckpointPlan.from_text("K0 K1").decisions,
        )


def test_a_profile_with_it_comes_back_from_json() -> None:
    model, batch = gpt()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1, offload=True)
    assert ckptplan.ChainProfile.from_json(profile.to_json()) == profile
    plan = CheckpointPlan.from_text("O0 R(1 2) O3", profile)
    assert CheckpointPlan.from_json(plan.to_json()) == plan
    assert (plan.text, plan.offloaded, plan.recomputed, plan.kept) == ("O0 R(1 2) O3", 2, 2, 0)
    assert [decision.executor for decision in plan.decisions] == ["offload", "checkpoint", "checkpoint", "offload"]


def test_where_a_device_has_memory_of_its_own_fit_and_maximize_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ckptplan.autofit", "ckptplan.batch_size"):
        monkeypatch.setattr(f"{module}.has_host_apart", lambda device: True)
    monkeypatch.setattr("ckptplan.offload.LEAST_BYTES", 1)  # or what is too small at one size is moved at another
    model, batch = gpt()
    fitted = ckptplan.fit(model, batch, loss_of, budget=0.6, planner="optimal", say=None)
    assert all(block.offload for block in fitted.profile)
    fitted.remove()
    assert not any(block.offload for block in ckptplan.fit(model, batch, loss_of, budget=0.6, say=None).profile)
    found = ckptplan.maximize(gpt()[0], batch, loss_of, 0.6, most=8, say=None)
    at_6 = found.profile_at(6)
    assert at_6[1].offload[0].host_bytes == 6 * found.profile_at(1)[1].offload[0].host_bytes
    assert found.measured_peak_bytes == found.chosen.predicted_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("entry", [*ENTRIES, *TRANSFORMERS], ids=lambda entry: entry.name)
def test_every_model_of_the_zoo_trains_the_same_with_all_it_can_on_the_host(entry: Entry) -> None:
    model, batch = made(entry)
    loss_fn = entry.profile_loss_fn or entry.loss_fn
    try:
        profile = profile_model(model, entry.blocks, batch, loss_fn, num_warmup=0, num_trials=1, offload=True)
    except (BlockDeclarationError, UnsupportedBoundaryError):
        return  # refused by name, with or without a host
    text = " ".join(f"O{i}" if block.offload else f"K{i}" for i, block in enumerate(profile))
    plan = ckptplan.plan_checkpoints(
        profile, target_kind="activation_budget_fraction", target_value=1.0, planner="text", text=text,
        on_infeasible="best_effort", cost="flops",
    )  # fmt: skip
    assert differences(trained(entry, plan), trained(entry, None)) == []
    model, batch = made(entry)
    proof = prove_model(
        model, plan, batch, loss_fn, device=CPU, trials=Trials(0, 1), time_steps=False, check_gradients=False
    )
    assert plan.predicted_peak_bytes == pytest.approx(proof.peak_bytes, rel=0.01)
