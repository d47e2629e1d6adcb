"""Compiled blocks: what is refused before work is spent; and, slowly, a real compiler: bytes, gradients, graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import apply_plan, checkpointed
from ckptplan.autofit import fit
from ckptplan.blocks import declare_blocks
from ckptplan.compiling import CompiledBlock, called_as
from ckptplan.dry_run import verify_plan
from ckptplan.errors import CompilerMissingError, DryRunError, PlanIncompatibleError
from ckptplan.measure import profile_blocks, profile_model
from ckptplan.models import GPT
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.chains import mean_square

CPU = torch.device("cpu")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


# Without a compiler --------------------------------------------------------------------------------------------------


def test_a_machine_without_a_compiler_is_told_so_before_anything_is_measured() -> None:
    from torch._inductor import config

    model = mlp()
    with (
        config.patch({"cpp.cxx": ("/nonexistent/c++",)}),
        pytest.raises(CompilerMissingError, match="C\\+\\+ compiler"),
    ):
        profile_model(model, ["0", "1", "2"], torch.randn(2, 8), mean_loss, compiled_budgets=(1.0,))


@pytest.mark.parametrize(
    ("budgets", "memory", "said"),
    [
        ((1.5,), "auto", "has 1.5; expected numbers from 0 to 1"),
        ((True,), "auto", "has True"),
        (("0.5",), "auto", "has '0.5'"),
        ((0.5,), "live", "runs eagerly where tensors are watched"),
    ],
)
def test_bad_budgets_are_refused_by_name(budgets: Any, memory: str, said: str) -> None:
    blocks = declare_blocks(model := mlp(), list(model.named_children()))
    with pytest.raises(ValueError, match=said):
        profile_blocks(blocks, (torch.randn(2, 8),), device="cpu", memory=memory, compiled_budgets=budgets)


def test_without_gradients_a_compiled_block_runs_as_it_is_and_its_forward_is_given_back() -> None:
    block = mlp()[0]
    compiled = CompiledBlock(block, 0.5)
    inputs = torch.randn(2, 8)
    seen: list[str] = []
    block.register_forward_hook(lambda *_: seen.append("hook"))
    with torch.no_grad(), called_as(compiled):
        output = block(inputs)
    assert seen == ["hook"]
    assert torch.equal(output, block(inputs))
    assert "forward" not in vars(block)
    assert compiled._run is None


def test_a_model_patched_with_compiled_blocks_copies_and_pickles() -> None:
    model = mlp()
    checkpointed(model, CheckpointPlan.from_text("C0[0.5] K1 C2[1]", ["0", "1", "2"])).permanent()
    with torch.no_grad():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            inputs = torch.randn(2, 8)
            assert torch.equal(other(inputs), model(inputs))


def test_a_model_compiled_as_one_graph_runs_as_it_is_without_gradients_copies_pickles_and_is_given_back() -> None:
    model, inputs = mlp(), torch.randn(2, 8)
    plan = CheckpointPlan.from_text("C0-2[0.5]", ["0", "1", "2"])
    patch = checkpointed(model, plan).permanent()
    with pytest.raises(PlanIncompatibleError, match="a plan is active on the model already"):
        checkpointed(model, plan)
    with torch.no_grad():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(inputs), model(inputs))
    patch.remove()
    assert "forward" not in vars(model)
    blocks = declare_blocks(model, list(model.named_children()))
    with pytest.raises(PlanIncompatibleError, match=r"only checkpointed\(model, plan\) runs it"):
        apply_plan(blocks, plan, (inputs,))


def test_the_model_as_one_graph_is_measured_beside_compiled_blocks_only() -> None:
    with pytest.raises(ValueError, match="compiled_model_budgets without compiled_budgets"):
        profile_model(mlp(), ["0", "1", "2"], torch.randn(2, 8), mean_loss, compiled_model_budgets=(1.0,))
    with pytest.raises(ValueError, match="compiled_model_budgets has 2; expected numbers from 0 to 1"):
        profile_model(mlp(), ["0"], torch.randn(2, 8), mean_loss, compiled_budgets=(1.0,), compiled_model_budgets=(2,))


def test_a_dry_run_of_a_compiled_plan_is_refused() -> None:
    plan = CheckpointPlan.from_text("C0[0.5] K1 K2", ["0", "1", "2"])
    with pytest.raises(DryRunError, match="1 of the plan's blocks run compiled"):
        verify_plan(mlp(), plan, torch.randn(2, 8), mean_loss)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model(batch))


# With one ------------------------------------------------------------------------------------------------------------


def gpt(layers: int = 3, **changes: Any) -> tuple[GPT, Tensor]:
    torch.manual_seed(0)
    model = GPT(layers=layers, width=32, heads=2, sequence_length=32, **changes)
    return model, torch.randint(256, (2, 32))


def token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def proved(model: nn.Module, plan: CheckpointPlan, batch: Any, loss: Any) -> Any:
    return prove_model(model, plan, batch, loss, device=CPU, trials=Trials(0, 1), time_steps=False, rtol=1e-4)


@pytest.mark.slow
def test_peaks_of_compiled_plans_are_predicted_and_kept_and_equal_blocks_are_compiled_once_per_budget() -> None:
    model, batch = gpt()
    before = num_graphs()
    profile = profile_model(model, None, batch, token_loss, num_warmup=0, num_trials=1, compiled_budgets=(0.0, 1.0))
    assert num_graphs() - before == 2
    least, most = profile[0].compiled
    assert (least.budget, most.budget) == (0.0, 1.0)
    assert least.cost.saved_bytes < 0.1 * most.cost.saved_bytes
    plans = [
        plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=f, planner="compile")
        for f in (0.6, 0.8, 1.0)
    ]
    plans += [
        CheckpointPlan.from_text(text, profile) for text in ("C0[0] C1[1] C2[0]", "C0[1] R(1) C2[0]", "K0 C1[0] K2")
    ]
    assert len({plan.text for plan in plans}) == len(plans)
    for plan in plans:
        proof = proved(model, plan, batch, token_loss)
        assert simulate_plan(profile, plan).peak_bytes == pytest.approx(proof.peak_bytes, rel=0.01)
        assert plan.budget_bytes is None or proof.peak_bytes <= plan.budget_bytes
        assert proof.gradients.passed, proof.gradients.faults
    assert num_graphs() - before == 2


@pytest.mark.slow
def test_a_container_runs_compiled_blocks_with_their_hooks() -> None:
    model = mlp()
    blocks = declare_blocks(model, list(model.named_children()))
    inputs = (torch.randn(4, 8, requires_grad=True),)
    plan = CheckpointPlan.from_text("C0[1] K1 C2[0]", ["0", "1", "2"])
    seen: list[nn.Module] = []
    model[2].register_forward_hook(lambda module, *_: seen.append(module))
    expected = torch.autograd.grad(mean_square(model(*inputs)), list(model.parameters()))
    seen.clear()
    found = torch.autograd.grad(mean_square(apply_plan(blocks, plan, inputs)(*inputs)), list(model.parameters()))
    assert seen == [model[2]]
    torch.testing.assert_close(found, expected)


class Splits(nn.Module):
    """Its graph breaks: it decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.detach().abs().max() > 0 else x


@pytest.mark.slow
def test_blocks_that_cannot_be_compiled_or_draw_random_numbers_are_kept_and_say_why() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()), Splits(), nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    )
    batch = torch.randn(4, 8)
    profile: ChainProfile = profile_model(
        model, ["0", "1", "2"], batch, mean_loss, num_warmup=0, num_trials=1, compiled_budgets=(1.0,)
    )
    assert [len(block.compiled) for block in profile] == [1, 0, 0]
    assert "not compiled: torch.compile says: " in profile[1].warnings[-1]
    assert "draws random numbers" in profile[2].warnings[-1]
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=1.0, planner="compile")
    assert plan.text in ("C0[1.0] K1 K2", "K0 K1 K2")  # whichever way of the first block was faster
    plan = CheckpointPlan.from_text("C0[1] K1 K2", profile)
    assert proved(model, plan, batch, mean_loss).gradients.passed


@pytest.mark.slow
def test_weights_that_blocks_share_and_code_between_blocks_are_predicted_too() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
            self.blocks[2][0].weight = self.blocks[0][0].weight

        def forward(self, x: Tensor) -> Tensor:
            first = x
            for block in self.blocks:
                x = block(x) + first
            return x

    torch.manual_seed(0)
    model, batch = Shared(), torch.randn(32, 64)
    profile = profile_model(
        model, ["blocks.*"], batch, mean_loss, num_warmup=0, num_trials=1, compiled_budgets=(0.0, 1.0)
    )
    for text in ("C0[1] C1[0] C2[1] C3[0]", "C0[0] K1 C2[0] C3[1]"):
        plan = CheckpointPlan.from_text(text, profile)
        proof = proved(model, plan, batch, mean_loss)
        assert simulate_plan(profile, plan).peak_bytes == pytest.approx(proof.peak_bytes, rel=0.01)
        assert proof.gradients.passed, proof.gradients.faults


@pytest.mark.slow
def test_more_shapes_than_dynamo_keeps_graphs_for_are_refused_with_a_remedy() -> None:
    from torch._dynamo import config

    block = CompiledBlock(nn.Linear(7, 7), 1.0)
    with config.patch(recompile_limit=1):
        block(torch.randn(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match="a planned Linear was called with more different shapes"):
            block(torch.randn(3, 7))


@pytest.mark.slow
def test_fit_compiles_blocks_and_takes_the_plan_off_again() -> None:
    model, batch = gpt()
    fitted = fit(model, batch, token_loss, 0.6, planner="compile")
    assert fitted.plan.compiled == 3
    assert "above the fastest compiled step" in fitted.summary
    assert "gradients off by at most" in fitted.summary
    fitted.remove()
    assert not any("forward" in vars(block) for block in model.layers)


@pytest.mark.slow
def test_the_peak_of_a_model_compiled_as_one_graph_is_measured_and_kept() -> None:
    model, batch = gpt()
    profile = profile_model(
        model,
        None,
        batch,
        token_loss,
        num_warmup=0,
        num_trials=1,
        compiled_budgets=(1.0,),
        compiled_model_budgets=(0.5, 1),
    )
    assert profile.warnings == ()
    assert [option.budget for option in profile.compiled_model] == [0.5, 1.0]
    assert [step.budget for step in profile.compiled_steps] == [1.0]  # the only one that blocks were measured with
    least, most = (option.cost.saved_bytes for option in profile.compiled_model)
    assert least < 0.6 * most
    for text in ("C0-2[0.5]", "C0-2[1]"):
        plan = CheckpointPlan.from_text(text, profile)
        proof = proved(model, plan, batch, token_loss)
        assert simulate_plan(profile, plan).peak_bytes == pytest.approx(proof.peak_bytes, rel=0.01)
        assert proof.gradients.passed, proof.gradients.faults


class Counts(nn.Module):
    """Its own forward, not a block's, changes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.blocks(x)


class Draws(nn.Module):
    """What it runs before its blocks draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.blocks = nn.Dropout(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.drop(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Draws(), mean_loss, "it draws random numbers"),
        (Counts(), mean_loss, "its forward changes the Python attribute 'calls'"),
        (nn.Sequential(Splits(), mlp()), mean_loss, "block '0' cannot be compiled: torch.compile says: "),
        (
            Draws(),
            lambda model, batch: mean_square(model.blocks(batch)),
            "the loss calls methods or parts of the model",
        ),
    ],
)
def test_a_model_that_cannot_be_one_graph_says_why_and_its_blocks_are_compiled_all_the_same(
    model: nn.Module, loss: Any, said: str
) -> None:
    paths = ["0", "1"] if isinstance(model, nn.Sequential) else ["blocks.*"]
    profile = profile_model(
        model,
        paths,
        torch.randn(4, 8),
        loss,
        num_warmup=0,
        num_trials=1,
        compiled_budgets=(1.0,),
        compiled_model_budgets=(1.0,),
    )
    assert profile.compiled_model == ()
    assert said in profile.warnings[-1]
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=1.0, planner="compile")
    assert plan.compiled_model is None
