"""Models that are no plain chain: what is predicted is what is measured, and gradients are the plain model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import checkpointed
from ckptplan.errors import BlockDeclarationError, PlanIncompatibleError, UnsupportedBoundaryError
from ckptplan.measure import profile_model
from ckptplan.nodes import blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import StepProof, prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.chains import flat_texts
from tests.flow_models import (
    CASES,
    Case,
    Decoder,
    EncoderDecoder,
    KeepsHidden,
    LearnedScale,
    Residual,
    Stack,
    UNet,
    square_loss,
)
from tests.tracker import step_peak

CPU = torch.device("cpu")


def made(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def profiled(case: Case, memory: str = "auto", **options: bool) -> ChainProfile:
    return profile_model(
        case.model, case.paths, case.batch, case.loss, num_warmup=0, num_trials=1, memory=memory, **options
    )


def proved(case: Case, plan: CheckpointPlan) -> StepProof:
    return prove_model(case.model, plan, case.batch, case.loss, device=CPU, trials=Trials(0, 1), time_steps=False)


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_measured_and_gradients_are_bitwise_equal(name: str) -> None:
    case = made(name)
    profile = profiled(case)
    texts = [*flat_texts(len(profile))[:: 1 if len(profile) <= 3 else 5]]
    if any(not block.eligible_for_checkpoint for block in profile):
        texts = ["K0 K1 K2", "K0 R(1) R(2)"]
    for text in texts:
        plan = CheckpointPlan.from_text(text, profile)
        proof = proved(case, plan)
        assert simulate_plan(profile, plan).peak_bytes == proof.peak_bytes, text
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal, (text, proof.gradients.faults)


@pytest.mark.parametrize("planner", ["dp", "optimal", "greedy", "uniform"])
@pytest.mark.parametrize("name", ["Residual", "Rotary", "LearnedScale", "UNet", "EncoderDecoder"])
def test_plans_for_half_of_what_can_be_saved_fit_and_are_exact(name: str, planner: str) -> None:
    case = made(name)
    profile = profiled(case, selective=planner == "optimal")
    most, least = (simulate_plan(profile, CheckpointPlan.from_text(t, profile)).peak_bytes for t in _ends(profile))
    budget = (most + least) // 2
    plan = plan_checkpoints(profile, target_kind="activation_budget_bytes", target_value=budget, planner=planner)
    proof = proved(case, plan)
    assert proof.peak_bytes is not None
    assert proof.peak_bytes <= budget
    is_flat = all(len(blocks_of((node,))) == 1 for node in plan.nodes)
    assert plan.predicted_peak_bytes == pytest.approx(proof.peak_bytes, rel=0 if is_flat else 1e-3)
    assert proof.gradients is not None
    assert proof.gradients.bitwise_equal


def _ends(profile: ChainProfile) -> tuple[str, str]:
    texts = flat_texts(len(profile))
    return texts[0], texts[-1]


@pytest.mark.parametrize("name", ["Residual", "LearnedScale", "UNet"])
def test_the_peak_is_what_a_tracker_of_its_own_counts(name: str) -> None:
    """Live storages by the tests' tracker: forward, loss and backward, gradients allocated before."""
    case = made(name)
    profile = profiled(case, memory="live")
    for text in _ends(profile):
        with checkpointed(case.model, CheckpointPlan.from_text(text, profile)):
            peak = step_peak(lambda: case.loss(case.model, case.batch), list(case.model.parameters()))
        assert simulate_plan(profile, CheckpointPlan.from_text(text, profile)).peak_bytes == peak


def test_what_runs_without_gradients_is_kept_with_the_reason() -> None:
    first = profiled(made("FrozenExtractor"))[0]
    assert first.exclusion_reason == "no gradient flows through its output, so it saves nothing"
    assert first.keep is not None
    assert first.keep.saved_bytes == 0


def test_a_plain_chain_beside_which_the_model_holds_something_is_measured_with_it() -> None:
    """Blocks follow each other directly, and the model's variable keeps what the first one returned."""

    class Holds(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](self.embed(x))
            largest = float(first.detach().abs().max())
            x = self.layers[2](torch.relu(self.layers[1](first)))
            return self.head(x) / (1 + 0 * largest)

    torch.manual_seed(0)
    case = Case(Holds(), ["layers.*"], torch.randn(128, 8), square_loss)
    profile = profiled(case)
    for text in flat_texts(3):
        plan = CheckpointPlan.from_text(text, profile)
        assert simulate_plan(profile, plan).peak_bytes == proved(case, plan).peak_bytes


def test_what_a_step_frees_of_the_step_before_is_not_taken_off() -> None:
    """In the first step it is not there yet, so the prediction is by that much above later steps' peaks."""
    torch.manual_seed(0)
    case = Case(KeepsHidden(), ["layers.*"], torch.randn(128, 8), square_loss)
    profile = profiled(case)
    for text in _ends(profile):
        plan = CheckpointPlan.from_text(text, profile)
        proof = proved(case, plan)
        assert proof.peak_bytes is not None
        assert simulate_plan(profile, plan).peak_bytes >= proof.peak_bytes + 128 * 32 * 4
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal


def test_no_segment_is_planned_over_an_output_that_the_model_keeps() -> None:
    """A segment would hand the model its last block's output in the place of each one's."""
    profile = profiled(made("UNet"))
    with pytest.raises(PlanIncompatibleError, match=r"between down\.0 and down\.1"):
        simulate_plan(profile, CheckpointPlan.from_text("R(0 1) K2 K3 K4", profile))


def test_what_runs_between_blocks_is_measured_and_named() -> None:
    profile = profiled(made("Residual"))
    assert [block.block_id for block in profile] == ["layers.0", "layers.1", "layers.2"]
    between = profile[1].before
    assert between is not None
    assert between.name == "between layers.0 and layers.1"
    # x + y: both come in, their sum goes out; the frame lets go of both
    rows = 128 * 32 * 4
    assert between.output_bytes == (rows,)
    assert between.output_is_input == (None,)
    assert between.cost.forward_peak_bytes == rows
    assert between.cost.saved_bytes == 0
    assert between.cost.keeps_input == (False, False)
    assert profile[0].before is None


def test_a_mask_is_one_storage_that_passes_through_all_blocks() -> None:
    profile = profiled(made("Decoder"))
    mask = 20 * 20 * 4
    for block in profile:
        where = block.output_bytes.index(mask)
        assert block.output_is_input[where] is not None
    assert profile.pre is not None
    assert mask in profile.pre.output_bytes
    # nothing runs between the blocks, but a segment would have to know what the later ones are called with
    for block in profile[1:]:
        assert block.before is not None
        assert (block.before.cost.saved_bytes, block.before.cost.forward_peak_bytes) == (0, 0)


def test_a_gradient_that_adds_up_stands_from_its_last_consumer_to_its_maker() -> None:
    torch.manual_seed(0)
    profile = profiled(made("LearnedScale"))
    scale = 3 * 20 * 32 * 4
    first, last = profile[0], profile[2]
    assert first.output_gradient_bytes is not None
    assert last.output_gradient_bytes is not None
    assert first.output_gradient_bytes - last.output_gradient_bytes == scale


def test_blocks_are_in_the_order_in_which_they_run_whatever_the_order_they_are_named_in() -> None:
    class Backwards(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in reversed(self.layers):
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    case = Case(Backwards(), ["layers.*"], torch.randn(128, 8), square_loss)
    profile = profiled(case)
    assert profile.block_ids == ("layers.2", "layers.1", "layers.0")
    plan = CheckpointPlan.from_text("R(0) K1 R(2)", profile)
    proof = proved(case, plan)
    assert proof.peak_bytes == simulate_plan(profile, plan).peak_bytes
    assert proof.gradients is not None
    assert proof.gradients.bitwise_equal


def test_a_block_whose_output_does_not_reach_the_loss_is_told() -> None:
    class Unused(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            self.layers[1](x)
            return self.head(self.layers[2](self.layers[0](x)))

    case = Case(Unused(), ["layers.*"], torch.randn(128, 8), square_loss)
    with pytest.raises(UnsupportedBoundaryError, match=r"no gradient comes back to block 'layers.1'.*Leave it out"):
        profiled(case)


def test_blocks_that_are_skipped_by_chance_are_told() -> None:
    class LayerDrop(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            self.runs = getattr(self, "runs", 0) + 1
            for layer in self.layers if self.runs % 2 else [self.layers[0], self.layers[2]]:
                x = x + layer(x)
            return self.head(x)

    case = Case(LayerDrop(), ["layers.*"], torch.randn(128, 8), square_loss)
    with pytest.raises(BlockDeclarationError, match="left to chance"):
        profiled(case)


@pytest.mark.parametrize("kind", [Residual, LearnedScale, Decoder, UNet, EncoderDecoder])
def test_profiling_leaves_the_model_as_it_was(kind: type[nn.Module]) -> None:
    case = made(kind.__name__)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    stream = torch.get_rng_state()
    profiled(case)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)
    assert not any("forward" in vars(module) for module in case.model.modules())


@pytest.mark.parametrize("name", ["Residual", "Rotary", "EncoderDecoder"])
def test_two_profiles_give_the_same_bytes(name: str) -> None:
    case = made(name)
    one, two = profiled(case), profiled(case)
    assert [(b.keep, b.recompute, b.output_bytes, b.before and b.before.cost) for b in one] == [
        (b.keep, b.recompute, b.output_bytes, b.before and b.before.cost) for b in two
    ]
    assert ChainProfile.from_json(one.to_json()) == one


@pytest.mark.parametrize("name", ["Residual", "Decoder", "EncoderDecoder"])
def test_a_smaller_batch_runs_under_the_plan(name: str) -> None:
    """P10, the last batch of an epoch."""
    case = made(name)
    profile = profiled(case)
    plan = CheckpointPlan.from_text(_ends(profile)[1], profile)
    small = case.batch[:2]
    plain = torch.autograd.grad(case.loss(case.model, small), list(case.model.parameters()), allow_unused=True)
    with checkpointed(case.model, plan):
        planned = torch.autograd.grad(case.loss(case.model, small), list(case.model.parameters()), allow_unused=True)
    assert all(a is b or torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
