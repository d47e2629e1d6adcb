"""The largest batch and the fastest one, against trying every size."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan import batch_size
from ckptplan.batch_size import BatchPoint, resized, samples_in
from ckptplan.errors import InfeasibleTargetError, PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.planners import least_nested_peak, no_checkpoint_peak, smallest_reachable
from ckptplan.proof import pair_of_model, peak_of_planned_step
from ckptplan.selective import find_option
from ckptplan.simulate import simulate_plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(size: int) -> Tensor:
    return torch.randn(size, 8, 16, generator=torch.Generator().manual_seed(1))


def really(size: int) -> Any:
    return profile_model(Net(), ["layers.*"], batch_of(size), loss_fn, num_warmup=0, num_trials=1)


BUDGETS = (0.3, 0.6, 1.0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("planner", "least"), [("optimal", least_nested_peak), ("dp", smallest_reachable)])
def test_the_largest_batch_is_that_of_trying_every_size(budget: float, planner: str, least: Any) -> None:
    found = ckptplan.maximize(Net(), batch_of(16), loss_fn, budget, "batch", planner=planner, say=None)
    allowed = int(no_checkpoint_peak(really(16)) * budget)
    if planner == "dp":  # whole blocks: what a measured profile without options says, size by size
        fits = [size for size in range(found.largest.batch_size - 1, found.largest.batch_size + 3)
                if least(really(size))[0] <= allowed]  # fmt: skip
        assert found.largest.batch_size == max(fits)
    assert found.chosen is found.largest
    assert found.chosen.predicted_peak_bytes == found.measured_peak_bytes
    assert found.measured_peak_bytes <= found.chosen.budget_bytes == allowed
    size = found.largest.batch_size
    assert f"dry runs: with the plan of least peak {size} samples fit and {size + 1} do not" in found.notes


def test_the_fastest_is_the_best_of_all_sizes_by_the_measured_costs() -> None:
    found = ckptplan.maximize(Net(), batch_of(16), loss_fn, 0.6, global_batch=48, planner="dp", say=None)
    sizes = [size for size in range(1, found.largest.batch_size + 1) if 48 % size == 0]
    assert [point.batch_size for point in found.points] == sizes
    assert [point.accumulate for point in found.points] == [48 // size for size in sizes]

    def samples_per_s(point: BatchPoint) -> float:
        profile = found.profile_at(point.batch_size)
        stages = [*profile, *profile.regions]
        step = sum((stage.forward_time_ms or 0) + (stage.backward_time_ms or 0) for stage in stages)
        return 1e3 * point.batch_size / (step + (simulate_plan(profile, point.plan.nodes).recompute_time_ms or 0))

    assert [point.samples_per_s for point in found.points] == pytest.approx([samples_per_s(p) for p in found.points])
    assert found.chosen.samples_per_s == pytest.approx(max(samples_per_s(point) for point in found.points))


class Uneven(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))
            for hidden in (128, 32, 96)
        )


@pytest.mark.slow
@pytest.mark.parametrize("limit_kib", [200, 400, 800])
def test_every_size_under_every_plan_is_run_and_none_that_fits_is_larger_or_faster(
    limit_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are those of real steps; each block is kept or recomputed by either way; a limit on all that stands."""
    trials = []

    def counted(pair: Any) -> int | None:
        trials.append(pair)
        return peak_of_planned_step(pair)

    monkeypatch.setattr(batch_size, "peak_of_planned_step", counted)
    model = Uneven()
    found = ckptplan.maximize(
        model, batch_of(8), loss_fn, f"{limit_kib}KiB", global_batch=48, planner="dp", blocks="layers.*", say=None
    )
    assert 1 <= len(trials) <= 3
    weights_and_gradients = 2 * sum(4 * p.numel() for p in model.parameters())
    fitting: dict[int, float] = {}  # size: most samples per second
    for size in (size for size in range(1, 49) if 48 % size == 0):
        allowed = limit_kib * 2**10 - weights_and_gradients - size * 8 * 16 * 4
        profile = found.profile_at(size)
        stages = [*profile, *profile.regions]
        plain_ms = sum((stage.forward_time_ms or 0) + (stage.backward_time_ms or 0) for stage in stages)
        costs = [
            {f"K{i}": 0.0, f"R({i})": block.recompute_time_ms or 0, f"S{i}[]": find_option(block, ()).time_ms or 0}
            for i, block in enumerate(profile)
        ]
        for texts in itertools.product(*costs):
            plan = ckptplan.CheckpointPlan.from_text(" ".join(texts), profile)
            peak = peak_of_planned_step(pair_of_model(model, plan, batch_of(size), loss_fn, torch.device("cpu")))
            assert peak is not None
            if peak <= allowed:
                step_ms = plain_ms + sum(of[text] for of, text in zip(costs, texts, strict=True))
                fitting[size] = max(fitting.get(size, 0), 1e3 * size / step_ms)
    assert found.largest.batch_size == max(fitting)
    assert [point.batch_size for point in found.points] == sorted(fitting)
    assert [p.samples_per_s for p in found.points] == pytest.approx([fitting[p.batch_size] for p in found.points])
    assert found.chosen.samples_per_s == pytest.approx(max(fitting.values()))
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.chosen.budget_bytes


def test_a_size_counts_what_stands_beside_activations_and_the_batch_itself() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(p.numel() * 4 for p in model.parameters())
    found = ckptplan.maximize(model, batch_of(4), loss_fn, "1MiB", "batch", optimizer=optimizer, planner="dp", say=None)
    for point in found.points:
        batch_bytes = point.batch_size * 8 * 16 * 4
        steps = 4 * len(list(model.parameters()))
        assert point.budget_bytes == 2**20 - 4 * parameters - steps - batch_bytes


def test_the_plan_of_the_answer_trains_within_the_budget_and_is_not_told_of_as_larger() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ckptplan.maximize(model, batch_of(8), loss_fn, 0.8, "batch", say=None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert found.chosen.batch_size > 8
    with warnings.catch_warnings(), ckptplan.checkpointed(model, found.chosen.plan):
        warnings.simplefilter("error")
        loss_fn(model, batch_of(found.chosen.batch_size)).backward()
        with pytest.raises(ckptplan.LargerBatchWarning):
            loss_fn(model, batch_of(found.chosen.batch_size + 1))


def test_both_answers_are_told_with_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    found = ckptplan.maximize(Net(), batch_of(8), loss_fn, 0.5, planner="dp")
    said = capsys.readouterr().out
    assert said.splitlines() == [f"ckptplan: {line}" for line in found.text.splitlines()]
    assert f"largest batch that fits: {found.largest.batch_size}; fastest: {found.fastest.batch_size}" in said
    assert said.count("<- ") == len({found.largest.batch_size, found.fastest.batch_size})


def test_a_limit_is_kept_and_nothing_is_run_without_confirmation() -> None:
    found = ckptplan.maximize(Net(), batch_of(8), loss_fn, 1.0, "batch", most=3, planner="dp", confirm=False, say=None)
    assert (found.largest.batch_size, found.measured_peak_bytes, found.notes) == (3, None, ())


def test_a_budget_below_one_sample_is_infeasible_with_the_least() -> None:
    with pytest.raises(InfeasibleTargetError, match="not even one sample fits: its least activation peak is") as caught:
        ckptplan.maximize(Net(), batch_of(8), loss_fn, 0.01, planner="dp", say=None)
    assert caught.value.smallest_reachable_bytes == smallest_reachable(really(1))[0]


class LargeBatchesTakeAnotherWay(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) < 8 else super().forward(torch.cat([x, x]))[: len(x)].sin().sin()


def test_a_model_that_computes_otherwise_at_another_size_is_refused() -> None:
    with pytest.raises(PlanIncompatibleError, match=r"at one batch size and .* at the other; it cannot be scaled"):
        ckptplan.maximize(LargeBatchesTakeAnotherWay(), batch_of(8), loss_fn, 0.5, "batch", say=None)


def test_a_step_that_cannot_be_run_dry_is_confirmed_by_a_real_one_only() -> None:
    class Decides(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > -1e9 else x

    found = ckptplan.maximize(Decides(), batch_of(8), loss_fn, 0.5, "batch", blocks="layers.*", planner="dp", say=None)
    assert found.notes[0].startswith("the largest batch is not confirmed: the dry run stops in")
    assert found.measured_peak_bytes == found.chosen.predicted_peak_bytes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"objective": "speed"}, "objective='speed'; expected 'throughput' or 'batch'"),
        ({"global_batch": 0}, "global_batch=0; expected a whole number of samples, 1 or more"),
        ({"most": 2.5}, "most=2.5; expected a whole number of samples, 1 or more"),
        ({"budget": 1.5}, "budget=1.5; expected a size"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(options: dict[str, Any], told: str) -> None:
    def never(model: nn.Module, batch: Tensor) -> Tensor:
        raise AssertionError("measured")

    with pytest.raises(ValueError, match=told):
        ckptplan.maximize(Net(), batch_of(4), never, **{"budget": 0.5, **options}, say=None)


def test_batches_of_any_form_are_resized_and_those_without_one_number_of_samples_refused() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "masks": [torch.ones(3), None], "scale": torch.tensor(2.0)}
    larger = resized(batch, 5)
    assert larger["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert (len(larger["masks"][0]), larger["masks"][1], larger["scale"].item()) == (5, None, 2.0)
    assert samples_in(resized(batch, 2)) == 2
    with pytest.raises(ValueError, match=r"first dimensions \[2, 3\]; expected one number of samples"):
        samples_in((torch.ones(2), torch.ones(3)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_share_is_one_of_the_batch_that_was_given_however_small(count: int) -> None:
    found = ckptplan.maximize(Net(), batch_of(count), loss_fn, 1.0, "batch", planner="uniform", confirm=False, say=None)
    assert found.chosen.budget_bytes == no_checkpoint_peak(really(count))


def test_only_sizes_that_make_up_the_global_batch_are_run() -> None:
    class OfFour(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) % 4 == 0, f"multiple of 4, got {len(x)}"
            return super().forward(x)

    found = ckptplan.maximize(OfFour(), batch_of(16), loss_fn, 0.4, "batch", global_batch=32, planner="dp", say=None)
    assert found.largest.batch_size == 16
    assert "dry runs: with the plan of least peak 16 samples fit and 32 do not" in found.notes


def test_a_resize_that_makes_another_size_is_told() -> None:
    with pytest.raises(ValueError, match=r"resize\(batch, 2\) gave tensors of first dimensions \[8\]; expected 2"):
        ckptplan.maximize(Net(), batch_of(8), loss_fn, 0.5, resize=lambda batch, n: batch, say=None)
