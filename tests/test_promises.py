"""The promises, measured: plans fit, predictions hold, gradients are equal, what cannot be done is refused.

Peaks in C08, C11, P7 and P8 are measured by the tests' own tracker; the matrix uses the CPU allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import apply_plan
from ckptplan.benchmark import run_benchmark
from ckptplan.blocks import CheckpointableBlock, select_blocks
from ckptplan.data import Batch
from ckptplan.errors import InfeasibleTargetError
from ckptplan.measure import Trials, profile_blocks, profile_model
from ckptplan.models import GPT, MLP, ChainModel, ResNet, UNet, ViT
from ckptplan.nodes import parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import StepProof, prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.training import loss_of
from ckptplan.trees import tensors_in
from tests.chains import declared, flat_texts, mean_square, residual_chain
from tests.tracker import step_peak

MIB = 2**20
CPU = torch.device("cpu")


class Chain(NamedTuple):
    blocks: tuple[CheckpointableBlock, ...]
    x: Tensor
    profile: ChainProfile

    def measured(self, text: str) -> int:
        """Peak by the tracker, in bytes."""
        ids = [b.block_id for b in self.blocks]
        container = apply_plan(self.blocks, CheckpointPlan.from_text(text, ids), (self.x,))
        return step_peak(lambda: mean_square(container(self.x)), [*container.parameters(), self.x])


@cache
def chain(hidden: tuple[int, ...]) -> Chain:
    return small_chain(hidden, batch=512)


def small_chain(hidden: tuple[int, ...], batch: int = 64) -> Chain:
    model, x = residual_chain(*hidden, batch=batch)
    blocks = declared(list(model))
    profile = profile_blocks(
        blocks, (x,), device="cpu", num_warmup=0, num_trials=1, memory="live", make_target=mean_square
    )
    return Chain(blocks, x, profile)


def planned(profile: ChainProfile, budget: float, planner: str = "dp", cost: str = "flops") -> CheckpointPlan:
    return plan_checkpoints(
        profile, target_kind="activation_budget_bytes", target_value=int(budget), planner=planner, cost=cost
    )


class TestPositionCounts:
    """C08: six equal blocks."""

    SIX = (256,) * 6

    @pytest.mark.parametrize(("budget_mib", "blocks"), [(10.0, 1), (8.5, 2), (7.0, 3), (5.5, 4), (4.0, 5)])
    def test_the_fewest_blocks_are_recomputed_never_the_last_and_the_peak_is_met(
        self, budget_mib: float, blocks: int
    ) -> None:
        six = chain(self.SIX)
        plan = planned(six.profile, budget_mib * MIB)
        measured = six.measured(plan.text)
        assert plan.recomputed == blocks
        assert not plan.decisions[-1].checkpointed
        assert measured <= budget_mib * MIB
        assert plan.predicted_peak_bytes == measured

    def test_the_peaks_are_those_of_the_case(self) -> None:
        six = chain(self.SIX)
        peaks = {
            "K0 K1 K2 K3 K4 K5": 10.75,
            "R(0) K1 K2 K3 K4 K5": 9.25,
            "K0 K1 K2 K3 K4 R(5)": 10.75,
            "R(0) R(1) R(2) K3 K4 K5": 6.25,
            "K0 K1 K2 R(3) R(4) R(5)": 7.75,
            "R(0) R(1) R(2) R(3) R(4) K5": 3.25,
            "R(0) R(1) R(2) R(3) R(4) R(5)": 3.25,
        }
        for text, mib in peaks.items():
            assert six.measured(text) == pytest.approx(mib * MIB, abs=100)
            assert simulate_plan(six.profile, CheckpointPlan.from_text(text, six.profile)).peak_bytes == six.measured(
                text
            )


class TestBudgetSweep:
    """C11: an uneven chain; the plans that the case's brute force found, and the peaks that they measured."""

    HIDDEN = (64, 384, 128, 256, 96, 512, 160, 64)
    BUDGETS_MIB = (11, 10, 9, 8, 7.5, 7, 6.5, 6)
    SHARES = (0.013, 0.062, 0.165, 0.319, 0.343, 0.420, 0.447, 0.471)

    def share(self, text: str) -> float:
        """Recomputed share of a forward pass by multiplications of the blocks' matrices, all of them counted."""
        work = [64 * h + h * h + h * h + h * 64 for h in self.HIDDEN]
        again = [f"R({i})" in text or f"S{i}[]" in text for i in range(len(work))]
        return sum(w for w, is_again in zip(work, again, strict=True) if is_again) / sum(work)

    @pytest.mark.parametrize("budget_mib", [20, 12])
    def test_an_ample_budget_gives_the_empty_plan(self, budget_mib: float) -> None:
        plans = [planned(chain(self.HIDDEN).profile, budget_mib * MIB, name) for name in ("dp", "greedy", "uniform")]
        assert [plan.recomputed for plan in plans] == [0, 0, 0]
        assert plans[0].predicted_peak_bytes == pytest.approx(11.25 * MIB, rel=1e-4)

    @pytest.mark.parametrize(("budget_mib", "listed"), list(zip(BUDGETS_MIB, SHARES, strict=True)))
    def test_the_plan_fits_and_recomputes_the_listed_share(self, budget_mib: float, listed: float) -> None:
        plan = planned(chain(self.HIDDEN).profile, budget_mib * MIB)
        assert chain(self.HIDDEN).measured(plan.text) == plan.predicted_peak_bytes <= budget_mib * MIB
        assert self.share(plan.text) == pytest.approx(listed, abs=0.005)

    def test_a_smaller_budget_never_recomputes_less_nor_peaks_higher(self) -> None:
        plans = [planned(chain(self.HIDDEN).profile, b * MIB) for b in self.BUDGETS_MIB]
        costs = [plan.predicted_cost for plan in plans]
        peaks = [plan.predicted_peak_bytes for plan in plans]
        assert costs == sorted(costs)
        assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(peaks))

    def test_what_no_plan_reaches_is_refused_with_the_least(self) -> None:
        with pytest.raises(InfeasibleTargetError) as caught:
            planned(chain(self.HIDDEN).profile, 5.5 * MIB)
        assert caught.value.smallest_reachable_bytes == pytest.approx(5.75 * MIB, rel=1e-3)

    @pytest.mark.slow
    def test_all_256_peaks_are_predicted_and_no_plan_that_fits_costs_less(self) -> None:
        require_the_cheapest(chain(self.HIDDEN), [b * MIB for b in self.BUDGETS_MIB])


def require_the_cheapest(subject: Chain, budgets: Sequence[float]) -> None:
    """Brute force over all flat plans, each one measured."""
    peaks = {text: subject.measured(text) for text in flat_texts(len(subject.blocks))}
    predicted = {t: simulate_plan(subject.profile, CheckpointPlan.from_text(t, subject.profile)) for t in peaks}
    assert {t: p.peak_bytes for t, p in predicted.items()} == peaks
    for budget in budgets:
        best = min(predicted[text].recompute_flops for text, peak in peaks.items() if peak <= budget)
        assert planned(subject.profile, budget).predicted_cost == best
    with pytest.raises(InfeasibleTargetError) as caught:
        planned(subject.profile, min(peaks.values()) - 1)
    assert caught.value.smallest_reachable_bytes == min(peaks.values())


def test_all_64_peaks_of_a_smaller_chain_are_predicted_and_no_plan_that_fits_costs_less() -> None:
    small = small_chain((16, 96, 32, 64, 24, 128))
    peaks = [simulate_plan(small.profile, parse_plan_text(text)).peak_bytes for text in flat_texts(6)]
    least, most = min(peaks), max(peaks)
    require_the_cheapest(small, [least + (most - least) * share / 10 for share in range(11)])


class PreNorm(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def pre_norm_chain(hidden: Sequence[int]) -> Chain:
    torch.manual_seed(0)
    blocks = declared([PreNorm(64, h) for h in hidden])
    x = torch.randn(1024, 64)
    profile = profile_blocks(
        blocks, (x,), device="cpu", num_warmup=0, num_trials=1, memory="live", make_target=mean_square
    )
    return Chain(blocks, x, profile)


def test_a_dominating_block_is_named_as_what_sets_the_least_peak() -> None:
    """P7."""
    narrow = pre_norm_chain([64, 64, 1024, 64, 64])
    least = min(narrow.measured(text) for text in flat_texts(5))
    with pytest.raises(InfeasibleTargetError, match="b2") as caught:
        planned(narrow.profile, 3 * MIB)
    assert caught.value.smallest_reachable_bytes == least
    assert least > 10 * MIB
    assert caught.value.limited_by == "b2 backward"


def test_growing_blocks_fit_and_the_last_one_saves_nothing() -> None:
    """P8."""
    growing = pre_norm_chain([32, 64, 128, 256, 512, 1024])
    plain = simulate_plan(growing.profile, CheckpointPlan.from_text("K0 K1 K2 K3 K4 K5", growing.profile)).peak_bytes
    last = simulate_plan(growing.profile, CheckpointPlan.from_text("K0 K1 K2 K3 K4 R(5)", growing.profile)).peak_bytes
    assert plain - 1024 < last <= plain
    with pytest.raises(InfeasibleTargetError) as caught:
        planned(growing.profile, 0)
    least = caught.value.smallest_reachable_bytes
    for budget in range(least, plain, (plain - least) // 4):
        plan = planned(growing.profile, budget)
        assert growing.measured(plan.text) == plan.predicted_peak_bytes
        assert plan.predicted_peak_bytes <= budget


# The matrix: five families of models, planners, budgets ---------------------------------------------------------------

FRACTIONS = (0.9, 0.7, 0.5, 0.3)
MODELS: dict[str, Callable[[], ChainModel]] = {
    "gpt": lambda: GPT(layers=4, width=32, heads=2, sequence_length=32, vocab_size=64),
    "gpt dropout": lambda: GPT(layers=3, width=32, heads=2, sequence_length=32, vocab_size=64, dropout=0.1),
    "vit": lambda: ViT(layers=4, width=32, heads=2, patch_size=4, image_size=16, channels=3, classes=10),
    "resnet": lambda: ResNet(blocks=[2, 2], widths=[8, 16], channels=3, classes=10),
    "unet": lambda: UNet(widths=[8, 16, 32], image_size=16, channels=3, classes=10),
    "mlp": lambda: MLP(width=32, hidden_widths=[32, 192, 64, 128, 48], image_size=8, channels=3, classes=10),
}

LARGER: dict[str, Callable[[], ChainModel]] = {
    "gpt 8": lambda: GPT(layers=8, width=64, heads=4, sequence_length=64),
    "vit 8": lambda: ViT(layers=8, width=64, heads=4, patch_size=4, image_size=32, channels=3, classes=10, dropout=0.1),
    "resnet 6": lambda: ResNet(blocks=[2, 2, 2], widths=[16, 32, 64], channels=3, classes=10),
    "unet 7": lambda: UNet(widths=[8, 16, 32, 64], image_size=32, channels=3, classes=10),
    "mlp 8": lambda: MLP(
        width=64, hidden_widths=[64, 384, 128, 256, 96, 512, 160, 64], image_size=8, channels=3, classes=10
    ),
}


def batch_for(model: ChainModel, size: int = 8) -> Batch:
    spec = model.expects
    if spec.kind == "tokens":
        tokens = torch.randint(0, spec.vocab_size, (size, spec.sequence_length + 1))
        return Batch(tokens[:, :-1], tokens[:, 1:].contiguous())
    side = spec.image_size or 16
    return Batch(torch.randn(size, spec.channels, side, side), torch.randint(0, spec.classes, (size,)))


class Case(NamedTuple):
    model: ChainModel
    batch: Batch
    loss_fn: Callable[[nn.Module, Any], Tensor]
    profile: ChainProfile

    def prove(self, plan: CheckpointPlan, gradients: bool = True) -> StepProof:
        return prove_model(
            self.model,
            plan,
            self.batch,
            self.loss_fn,
            device=CPU,
            trials=Trials(0, 1),
            time_steps=False,
            check_gradients=gradients,
        )


@cache
def case(name: str, autocast: bool, selective: bool = False) -> Case:
    torch.manual_seed(0)
    model = (MODELS | LARGER)[name]()
    batch = batch_for(model)
    loss_fn = lambda m, b: loss_of(m, b, torch.bfloat16 if autocast else None)  # noqa: E731
    blocks = select_blocks(model).blocks
    profile = profile_model(model, blocks, batch, loss_fn, num_warmup=0, num_trials=1, selective=selective)
    return Case(model, batch, loss_fn, profile)


def plans_of(profile: ChainProfile, fractions: Sequence[float]) -> list[CheckpointPlan]:
    """One plan for each distinct tree that the planners make over the budgets; the infeasible are left out."""
    found: dict[str, CheckpointPlan] = {}
    for planner in ("none", "all", "uniform", "greedy", "dp"):
        for fraction in fractions:
            plan = plan_checkpoints(
                profile,
                target_kind="activation_budget_fraction",
                target_value=fraction,
                planner=planner,
                cost="flops",
                on_infeasible="best_effort",
            )
            if plan.feasible or planner in ("none", "all"):
                found.setdefault(f"{planner} {plan.text} {plan.budget_bytes}", plan)
    return list(found.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_planners_plan_fits_is_predicted_and_gives_the_same_gradients(name: str, autocast: bool) -> None:
    subject = case(name, autocast)
    plans = plans_of(subject.profile, FRACTIONS)
    assert len(plans) >= 8
    require_kept_promises(subject, plans, autocast)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", list(LARGER))
def test_larger_models_and_more_budgets_too(name: str, autocast: bool) -> None:
    subject = case(name, autocast)
    require_kept_promises(subject, plans_of(subject.profile, [f / 20 for f in range(6, 20)]), autocast)


@pytest.mark.parametrize("name", list(MODELS))
def test_plans_with_options_inside_blocks_keep_the_promises_and_are_never_dearer_than_flat_ones(name: str) -> None:
    subject = case(name, autocast=False, selective=True)
    plans: list[CheckpointPlan] = []
    cheaper = 0
    for fraction, cost in itertools.product((0.9, 0.7, 0.5, 0.4), ("flops", "time")):
        found = {
            planner: plan_checkpoints(
                subject.profile,
                target_kind="activation_budget_fraction",
                target_value=fraction,
                planner=planner,
                cost=cost,
                on_infeasible="best_effort",
            )
            for planner in ("dp", "ilp", "optimal")
        }
        if found["dp"].feasible:
            assert found["ilp"].predicted_cost == pytest.approx(found["optimal"].predicted_cost, rel=1e-6) or (
                found["optimal"].predicted_cost < found["ilp"].predicted_cost
            )
            assert found["optimal"].predicted_cost <= found["dp"].predicted_cost
            cheaper += found["optimal"].predicted_cost < found["dp"].predicted_cost
        plans += [plan for plan in (found["ilp"], found["optimal"]) if plan.feasible]
    assert cheaper
    assert any(plan.selective for plan in plans)
    require_kept_promises(subject, plans, autocast=False)


def require_kept_promises(subject: Case, plans: list[CheckpointPlan], autocast: bool) -> None:
    proofs: dict[str, StepProof] = {}
    over, off, unequal = [], [], []
    for plan in plans:
        if plan.text not in proofs:
            proofs[plan.text] = subject.prove(plan)
        proof = proofs[plan.text]
        where = f"{plan.planner} {plan.text} {plan.budget_bytes}"
        if (
            plan.planner not in ("none", "all", "no_checkpoint", "checkpoint_all")
            and proof.peak_bytes > plan.budget_bytes
        ):
            over.append(f"{where}: {proof.peak_bytes}")
        if abs(plan.predicted_peak_bytes - proof.peak_bytes) > 0.01 * proof.peak_bytes:
            off.append(f"{where}: predicted {plan.predicted_peak_bytes}, measured {proof.peak_bytes}")
        if not proof.gradients.passed or (not autocast and not proof.gradients.bitwise_equal):
            unequal.append(f"{where}: {proof.gradients.faults}")
    worst = max(abs(p.predicted_peak_bytes / proofs[p.text].peak_bytes - 1) for p in plans)
    print(f"{len(plans)} plans, {len(proofs)} measured, worst prediction {worst:.4%}")
    assert (over, off, unequal) == ([], [], []), f"of {len(plans)} plans ({len(proofs)} measured)"


@pytest.mark.parametrize("name", ["gpt", "unet", "mlp"])
def test_the_least_reachable_peak_is_that_of_brute_force_over_measured_plans(name: str) -> None:
    subject = case(name, False)
    texts = flat_texts(len(subject.profile))
    measured = {
        t: subject.prove(CheckpointPlan.from_text(t, subject.profile), gradients=False).peak_bytes for t in texts
    }
    least = min(measured.values())
    by_checkpoint = replace(subject.profile, blocks=tuple(replace(b, selective=()) for b in subject.profile))
    with pytest.raises(InfeasibleTargetError) as caught:
        planned(by_checkpoint, least // 2)
    assert caught.value.smallest_reachable_bytes == pytest.approx(least, rel=0.01)
    assert caught.value.smallest_reachable_any_bytes <= least * 1.01  # segments and nests may go lower
    plan = planned(by_checkpoint, caught.value.smallest_reachable_bytes)
    assert measured[plan.text] == pytest.approx(least, rel=0.01)
    with pytest.raises(InfeasibleTargetError) as caught:
        planned(subject.profile, least // 2)
    assert caught.value.smallest_reachable_bytes <= least * 1.01  # a replay may go lower
    plan = planned(subject.profile, caught.value.smallest_reachable_bytes)
    assert subject.prove(plan).peak_bytes == pytest.approx(caught.value.smallest_reachable_bytes, rel=0.01)


@pytest.mark.parametrize("cache", [True, False])
def test_a_users_own_autocast_is_predicted_with_and_without_its_cache(cache: bool) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    batch = batch_for(model)

    def loss_fn(module: nn.Module, given: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            return nn.functional.cross_entropy(module(given.inputs).flatten(0, 1), given.targets.flatten())

    profile = profile_model(model, select_blocks(model).blocks, batch, loss_fn, num_warmup=0, num_trials=1)
    own = Case(model, batch, loss_fn, profile)
    for text in ("K0 K1 K2 K3", "R(0) R(1) R(2) K3", "R(0) R(1) R(2) R(3)", "R(0 1) R(2 3)"):
        proof = own.prove(CheckpointPlan.from_text(text, profile))
        assert simulate_plan(profile, parse_plan_text(text)).peak_bytes == pytest.approx(proof.peak_bytes, rel=0.001)
        assert proof.gradients.bitwise_equal


SEGMENTS = (
    "R(0 1) K2 K3",
    "R(0 1 2 3)",
    "K0 R(1 R(2 3))",
    "R(R(0 1) 2) R(3)",
    "R(0 R(1 R(2))) K3",
    "R(R(0) R(1) R(2) R(3))",
)


@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "vit", "resnet", "unet", "mlp"])
def test_segments_and_nests_are_predicted_too(name: str) -> None:
    subject = case(name, False)
    count = len(subject.profile)
    off, unequal = [], []
    for text in SEGMENTS:
        tail = " ".join(f"R({i})" for i in range(4, count))
        text = (
            f"{text} {tail}".strip() if count >= 4 else text.replace(" K3", "").replace(" R(3)", "").replace(" 3", "")
        )
        plan = CheckpointPlan.from_text(text, subject.profile)
        proof = subject.prove(plan)
        predicted = simulate_plan(subject.profile, plan).peak_bytes
        if predicted != proof.peak_bytes:
            off.append(f"{text}: predicted {predicted}, measured {proof.peak_bytes}")
        if not proof.gradients.bitwise_equal:
            unequal.append(f"{text}: {proof.gradients.faults}")
    assert (off, unequal) == ([], [])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Halves(nn.Module):
    """Hands on two slices of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.inner(x if other is None else torch.cat((x, other), -1)).chunk(2, -1)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).relu()


ODD: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "recurrent": (lambda: [Recurrent() for _ in range(3)], (8, 32, 16)),
    "halves": (lambda: [Halves() for _ in range(3)], (256, 16)),
    "transposed": (lambda: [Transposed() for _ in range(3)], (32, 16, 16)),
    "in place": (lambda: [nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.GELU()], (256, 16)),
    "one-dimensional": (lambda: [nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.MaxPool1d(2)], (4, 8, 128)),
}


@pytest.mark.parametrize("loss", [mean_square, lambda out: sum(t.sum() for t in tensors_in(out))], ids=["mean", "sum"])
@pytest.mark.parametrize("name", list(ODD))
def test_odd_chains_are_predicted_too(name: str, loss: Callable[[Any], Tensor]) -> None:
    make, shape = ODD[name]
    torch.manual_seed(0)
    blocks, x = declared(make()), torch.randn(shape)
    target = (lambda out: loss(torch.cat(out, -1))) if name == "halves" else loss
    profile = profile_blocks(blocks, (x,), device="cpu", num_warmup=0, num_trials=1, make_target=target)
    all_that_can = " ".join(f"R({i})" if b.eligible_for_checkpoint else f"K{i}" for i, b in enumerate(profile))
    for text in {flat_texts(len(blocks))[0], all_that_can}:
        result = run_benchmark(
            blocks,
            CheckpointPlan.from_text(text, profile),
            (x,),
            None,
            target,
            device="cpu",
            num_warmup=0,
            num_trials=1,
        )
        predicted = simulate_plan(profile, parse_plan_text(text)).peak_bytes
        assert predicted == pytest.approx(result.activation_peak_bytes, abs=8)
        assert result.bitwise_equal


def test_a_block_with_dropout_is_replayed_for_fewer_flops_as_predicted_and_bit_equal() -> None:
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=2, sequence_length=32, dropout=0.1)
    tokens = torch.randint(0, 256, (2, 33))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss_fn(module: nn.Module, given: Any) -> Tensor:
        return nn.functional.cross_entropy(module(given[0]).flatten(0, 1), given[1].flatten())

    profile = profile_model(model, None, batch, loss_fn, device="cpu", num_warmup=0, num_trials=1)
    by_checkpoint = replace(profile, blocks=tuple(replace(b, selective=()) for b in profile))
    plans = [
        plan_checkpoints(p, target_kind="activation_budget_fraction", target_value=0.6, cost="flops")
        for p in (profile, by_checkpoint)
    ]
    assert "S0[]" in plans[0].text
    assert {d.executor for d in plans[0].decisions if d.checkpointed} == {"replay"}
    assert {d.executor for d in plans[1].decisions if d.checkpointed} == {"checkpoint"}
    assert plans[0].predicted_cost < 0.8 * plans[1].predicted_cost
    for plan in plans:
        proof = prove_model(model, plan, batch, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal
        assert abs(plan.predicted_peak_bytes - proof.peak_bytes) <= 0.01 * proof.peak_bytes
        assert proof.peak_bytes <= plan.budget_bytes
