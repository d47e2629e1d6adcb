"""The largest batch of the data is found before training, and the plan is made for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan.budget import PlannedRun
from ckptplan.config.loading import load_config, resolve
from ckptplan.data import Batch
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.shares import SharedData
from ckptplan.errors import DryRunError, InfeasibleTargetError
from ckptplan.largest_shapes import LargestShapes, batches_of_training, find_largest, plan_for_all, shape_text
from ckptplan.plan import CheckpointPlan
from ckptplan.record import load_result
from ckptplan.run import run_job
from ckptplan.training import windows
from tests.test_run import TINY


def batch_of(*shape: int) -> Batch:
    return Batch(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))


@dataclass
class Shapes:
    """Batches of these shapes in each epoch; notes which were read."""

    shapes: list[tuple[int, ...]]
    read: list[int] = field(default_factory=list)
    spec: Any = None
    batch_size: int = 4

    @property
    def batches_per_epoch(self) -> int:
        return len(self.shapes)

    def epoch_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for number in range(start, len(self.shapes)):
            self.read.append(number)
            random.random()
            torch.rand(1)
            yield batch_of(*self.shapes[number])

    def eval_batches(self) -> Iterator[Batch]:
        return iter(())


def found_in(*shapes: tuple[int, ...], steps: int = 100, accumulate: int = 1, limit_s: float = 10) -> LargestShapes:
    return find_largest(Shapes(list(shapes)), steps=steps, accumulate=accumulate, limit_s=limit_s)


def test_the_batch_with_the_most_elements_is_found_wherever_it_stands() -> None:
    found = found_in((4, 8), (4, 30), (4, 31), (2, 31), (4, 9))
    assert (found.batch.inputs.shape, found.number, found.others, found.has_several) == ((4, 31), 3, (), True)
    assert found.text == ("largest batch of the data: int64[4, 31], number 3 of 100 that were looked at")
    assert not found_in((4, 8), (4, 8), (3, 8), (4, 7)).has_several


def test_batches_that_are_large_in_another_way_are_kept_beside_it() -> None:
    found = found_in((8, 8), (2, 30), (1, 40), (2, 29), (4, 9), (1, 32))
    assert found.batch.inputs.shape == (8, 8)
    assert {tuple(other.inputs.shape) for other in found.others} == {(2, 30), (1, 40), (4, 9)}
    assert found.others[0].inputs.shape == (2, 30), "60 elements, 30 long"


def test_only_what_training_reads_is_looked_at() -> None:
    data = Shapes([(4, 8), (4, 9), (4, 10), (4, 50)])
    found = find_largest(data, steps=3, accumulate=1, limit_s=10)
    assert (found.batch.inputs.shape, found.num_read, found.num_trained) == ((4, 10), 3, 3)
    assert 3 not in data.read


@pytest.mark.parametrize(("steps", "accumulate"), [(1, 1), (3, 2), (4, 3), (9, 2), (10, 5)])
def test_the_batches_of_a_training_are_those_of_its_windows(steps: int, accumulate: int) -> None:
    data, reading = Shapes([(1, 1)] * 5), windows(Shapes([(1, 1)] * 5), accumulate)
    assert batches_of_training(data, steps, accumulate) == sum(len(next(reading)[1]) for _ in range(steps))


def test_a_search_that_ends_before_the_data_says_so() -> None:
    found = found_in((4, 8), (4, 9), (4, 10), steps=50, limit_s=1e-9)
    assert (found.num_read, found.num_trained) == (1, 50)
    assert "number 1 of 1 that were looked at (the training reads 50; shape_scan_s" in found.text


def test_data_that_says_what_is_largest_is_not_searched() -> None:
    data = Shapes([(4, 8), (4, 9)])
    data.one_shape = True  # type: ignore[attr-defined]  # as a user's data says it
    assert find_largest(data, steps=9, accumulate=1, limit_s=10).batch.inputs.shape == (4, 8)
    data.largest_batch = lambda: batch_of(4, 64)  # type: ignore[attr-defined]
    found = find_largest(data, steps=9, accumulate=1, limit_s=10)
    assert (found.text, data.read) == ("largest batch of the data: int64[4, 64], by its own largest_batch()", [0, 0])
    share = SharedData(data, Ranks(rank=1, size=2))
    assert find_largest(share, steps=9, accumulate=1, limit_s=10).batch.inputs.shape == (2, 64)


def test_the_search_draws_from_nobodys_random_streams() -> None:
    data = Shapes([(4, 8)] * 3)
    next(iter(data.epoch_batches(0)))
    torch.manual_seed(1)
    random.seed(1)
    first = torch.rand(2), random.random(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    find_largest(data, steps=30, accumulate=1, limit_s=10)
    assert (torch.rand(1), random.random()) == (first[0][1], first[2]), "the first batch is read as it always was"


# --- plans ---


def planned(budget_bytes: int, reserve_bytes: int, is_feasible: bool = True) -> PlannedRun:
    plan = CheckpointPlan.from_text("K0 R(1)", ["a", "b"])
    peak = budget_bytes - reserve_bytes
    plan = replace(plan, budget_bytes=peak, predicted_peak_bytes=peak, feasible=is_feasible)
    return PlannedRun(plan, budget_bytes, reserve_bytes, 10, 0.0)


SHAPES = LargestShapes(batch_of(8, 8), (batch_of(2, 30),), (8, 8), 1, 2, 2)


def test_a_plan_that_a_longer_batch_exceeds_is_made_tighter_by_as_much() -> None:
    """A dry run sees 10 bytes less than the meter; with the longer batch it takes 25 more."""
    notes: list[str] = []
    reserves: list[int] = []

    def make(reserve_bytes: int) -> PlannedRun:
        reserves.append(reserve_bytes)
        return planned(1000, reserve_bytes)

    def peak_of(plan: CheckpointPlan, batch: Batch) -> int:
        assert plan.predicted_peak_bytes is not None
        return plan.predicted_peak_bytes - 10 + (25 if batch is SHAPES.others[0] else 0)

    found = plan_for_all(SHAPES, make, peak_of, notes)
    assert (reserves, found.plan.predicted_peak_bytes) == ([0, 25], 975)
    assert notes == ["the peak with int64[2, 30] is 1000 B by a dry run; 25 B of the budget are left alone for it"]


def test_where_no_plan_keeps_to_the_budget_with_all_shapes_it_is_refused_by_name() -> None:
    reserves: list[int] = []

    def make(reserve_bytes: int) -> PlannedRun:
        reserves.append(reserve_bytes)
        if reserve_bytes > 400:
            raise InfeasibleTargetError("least is 600")
        return planned(1000, reserve_bytes)

    def peak_of(plan: CheckpointPlan, batch: Batch) -> int:
        return 1300 if batch is SHAPES.others[0] else plan.predicted_peak_bytes or 0

    with pytest.raises(InfeasibleTargetError, match=r"keeps to 1000 B with batches of int64\[2, 30\] too") as told:
        plan_for_all(SHAPES, make, peak_of, [])
    assert (reserves, told.value.smallest_reachable_bytes) == ([0, 300, 600], 1300)
    assert (
        plan_for_all(SHAPES, lambda reserve: planned(1000, reserve, is_feasible=False), peak_of, []).plan.feasible
        is False
    )


def test_a_model_that_has_no_dry_run_keeps_its_plan_with_a_note() -> None:
    def refuse(plan: CheckpointPlan, batch: Batch) -> int:
        raise DryRunError("it needs values")

    notes: list[str] = []
    assert plan_for_all(SHAPES, lambda reserve: planned(1000, reserve), refuse, notes).margin_bytes == 0
    assert notes == ["the plan is not checked with int64[2, 30]: it needs values"]


# --- whole runs ---

RAGGED = (*TINY, "data._target_=tests.run_models.texts_of_many_lengths", "steps=16")


def run(compose: Any, folder: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    composed = compose(*RAGGED, *overrides)
    code = run_job(load_config(composed), resolved=resolve(composed), folder=folder, overrides=list(overrides))
    return code, load_result(folder)


def test_a_run_plans_for_the_longest_texts_and_trains_within_its_budget(compose: Any, tmp_path: Path) -> None:
    code, result = run(compose, tmp_path, "planner=dp", "budget_frac=0.6", "state=off")
    assert (code, result["status"]) == (0, "ok")
    assert (result["batch"]["planned_shape"], result["batch"]["shapes_read"]) == ([4, 16], 16)
    assert abs(result["memory"]["prediction_error"]) <= 0.01, "measured at that shape"


def test_a_refusal_names_the_shape(compose: Any, tmp_path: Path) -> None:
    code, result = run(compose, tmp_path, "planner=dp", "budget_bytes=10kB", "plan_only=true")
    assert (code, result["status"]) == (3, "infeasible")
    assert "this is for the largest batch of the data: int64[4, 16], number " in result["error"]["message"]


def test_shape_text_names_dtype_and_shape() -> None:
    assert shape_text(Batch(torch.zeros(2, 3), torch.zeros(2))) == "float32[2, 3]"
