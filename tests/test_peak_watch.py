"""The peak of training's own steps beside what was predicted: within it as a rule, told where not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.config.loading import load_config, resolve
from ckptplan.data import Batch
from ckptplan.measure import profile_model
from ckptplan.peak_watch import PeakWatch, WatchedPeak
from ckptplan.planners import plan_checkpoints
from ckptplan.record import load_metrics, load_result
from ckptplan.recovery import Recovery
from ckptplan.run import run_job
from ckptplan.training import TrainSettings, loss_of, train
from tests.test_run import TINY
from tests.test_training import ListData

BLOCKS = [f"layers.{i}" for i in range(4)]


class Net(nn.Module):
    """Weights as large as activations; ``more`` adds activations that no profile has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.head = nn.Linear(32, 3)
        self.more = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.more):
            x = x + torch.tanh(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch_of(samples: int) -> Batch:
    return Batch(torch.randn(samples, 16), torch.randint(3, (samples,)))


def watched(
    share: float, *, accumulate: int = 1, more: int = 0, samples: int = 256, every: int = 1
) -> tuple[PeakWatch, list[dict[str, float]]]:
    model, batch = Net(), batch_of(256)
    profile = profile_model(model, BLOCKS, batch, loss_of, num_warmup=0, num_trials=1)
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=share, cost="flops")
    recovery = Recovery(model, plan, lambda plan: None, device="cpu", tries=0)
    watch = PeakWatch(model, profile, lambda: recovery.plan, batch, device=torch.device("cpu"), every=every)
    figures: list[dict[str, float]] = []

    def noted() -> dict[str, float]:
        figures.append(watch.figures())
        model.more = more  # from the second step on
        return {}

    train(
        model, ListData([batch_of(samples) for _ in range(4 * accumulate)]), torch.optim.SGD(model.parameters(), 0.1),
        learning_rate_at=lambda step: 0.1, settings=TrainSettings(steps=3, accumulate=accumulate),
        gradients_of=watch.gradients(recovery.gradients), further_figures=noted,
    )  # fmt: skip
    recovery.remove()
    return watch, figures


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.45])
def test_the_measured_peak_of_a_step_is_within_what_was_expected(share: float, accumulate: int) -> None:
    watch, figures = watched(share, accumulate=accumulate)
    assert watch.num_measured == 3
    assert watch.worst is not None
    assert [abs(each["peak_drift"]) <= 0.01 for each in figures] == [True] * 3, watch.worst.text
    gradients = sum(p.nbytes for p in watch.model.parameters())
    assert watch.worst.high_bytes - watch.worst.low_bytes <= gradients / 3, "the range tells something"


def test_a_step_that_takes_more_than_was_planned_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch, figures = watched(1.0, more=8)
    assert abs(figures[0]["peak_drift"]) <= 0.01
    assert figures[1]["peak_drift"] == figures[2]["peak_drift"] > 0.05
    assert watch.worst is not None
    assert watch.worst.step == 2
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step 2"]


def test_only_steps_of_the_planned_shape_are_compared_and_only_so_often() -> None:
    assert watched(1.0, samples=128)[0].worst is None
    _, figures = watched(1.0, every=2)
    assert [bool(each) for each in figures] == [True, False, True]
    assert watched(1.0, every=0)[0].num_measured == 0


def test_drift_is_the_share_outside_of_the_range() -> None:
    assert [WatchedPeak(1, peak, 100, 200).drift for peak in (50, 100, 150, 200, 220)] == [-0.5, 0, 0, 0, 0.1]


def test_a_run_records_what_its_training_took(compose: Any, tmp_path: Path) -> None:
    composed = compose(*TINY, "planner=dp", "state=off", "steps=4", "watch_peak_every=3")
    assert run_job(load_config(composed), resolved=resolve(composed), folder=tmp_path, overrides=[]) == 0
    memory = load_result(tmp_path)["memory"]
    low, high = memory["training_expected_bytes"]
    assert memory["predicted_peak_bytes"] <= low <= high
    assert abs(memory["training_drift"]) <= 0.01
    assert ["peak_drift" in row for row in load_metrics(tmp_path) if "train/loss" in row] == [True, False, False, True]
