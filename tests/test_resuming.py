"""Runs that are cut and go on, in this process: they are the run that was never cut, to the bit (case C14)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptplan.run as run_module
from ckptplan import resuming
from ckptplan.config import load_config, resolve
from ckptplan.record import load_metrics, load_result
from ckptplan.run import run_job
from ckptplan.state import CheckpointManager
from tests import run_models

NOISY = (
    "~model",
    "+model._target_=tests.run_models.NoisyNet",
    "~data",
    "+data._target_=tests.run_models.noisy_samples",
    "+data.batch_size=4",
    "runtime=cpu",
    "runtime.threads=1",
    "logger=none",
    "cost=flops",
    "budget_frac=0.95",
    "steps=40",
    "accumulate=2",
    "scheduler.warmup_steps=5",
    "clip_norm=0.5",
    "eval_every=3",
    "profile.num_warmup=0",
    "profile.num_trials=1",
    "proof.latency_trials=0",
    "state=async",
)
SAMPLES = 103


@dataclass
class Ran:
    """One call of ``run_job``: its exit code, what it left, and the weights and sample numbers of its training."""

    code: int
    folder: Path
    weights: dict[str, torch.Tensor]
    seen: list[int]

    @property
    def result(self) -> dict[str, Any]:
        return load_result(self.folder)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        keys = ("step", "epoch", "train/loss", "lr", "grad_norm")
        return [tuple(row[key] for key in keys) for row in load_metrics(self.folder) if "train/loss" in row]

    def state(self, step: int) -> dict[str, Any]:
        with CheckpointManager(self.folder / "state", mode="sync") as states:
            return states.load(f"step-{step}")


Run = Callable[..., Ran]


@pytest.fixture
def run(compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """``run("steps=4", stop_at=2)``; with ``resume=ran.folder`` it goes on. The streams are spoilt before each."""
    numbers = iter(range(100))
    whole, after_step = run_module.train, resuming.RunStates.after_step
    made: dict[str, Any] = {}

    def train(model: Any, *arguments: Any, **options: Any) -> Any:
        run_models.SEEN.clear()
        try:
            return whole(model, *arguments, **options)
        finally:
            made["weights"] = {name: value.clone() for name, value in model.state_dict().items()}

    def stopping(self: Any, position: Any, figures: Any) -> None:
        after_step(self, position, figures)
        if position.step == made["stop_at"]:
            os.kill(os.getpid(), made["signal"])

    monkeypatch.setattr(run_module, "train", train)
    monkeypatch.setattr(resuming.RunStates, "after_step", stopping)

    def call(
        *overrides: str, resume: Path | str | None = None, folder: Path | None = None, stop_at: int | None = None,
        sent: int = signal.SIGTERM, base: tuple[str, ...] = NOISY,
    ) -> Ran:  # fmt: skip
        if folder is None:
            folder = Path(resume) if isinstance(resume, Path) else tmp_path / f"run{next(numbers)}"
        folder.mkdir(exist_ok=True)
        typed = [*base, *overrides, *([] if resume is None else [f"resume='{resume}'"])]
        config = compose(*typed)
        made.update(weights={}, stop_at=stop_at, signal=sent)
        random.seed(99)
        np.random.seed(99)  # noqa: NPY002
        torch.manual_seed(99)
        code = run_job(load_config(config), resolved=resolve(config), folder=folder, overrides=typed)
        return Ran(code, folder, made["weights"], [n for n in run_models.SEEN if n < SAMPLES])

    yield call
    run_models.SEEN.clear()


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Equal to the bit, types included."""
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), path
    elif isinstance(left, np.ndarray):
        assert left.tobytes() == right.tobytes(), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}.{index}")
    else:
        assert left == right, path


TRAINED = ("model", "optimizer", "random", "position")


class TestTheSameRun:
    """C14."""

    def test_wherever_it_is_cut_it_goes_on_to_the_bit(self, run: Run) -> None:
        whole = run()
        assert whole.code == 0
        assert whole.result["plan"]["recomputed"] > 0
        for epoch in range(3):
            assert sorted(whole.seen[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES))
        assert whole.seen[:SAMPLES] != whole.seen[SAMPLES : 2 * SAMPLES]
        for cuts in ((1,), (7,), (13,), (5, 9, 20)):
            part = run(stop_at=cuts[0])
            seen = list(part.seen)
            for cut in (*cuts[1:], None):
                assert part.code == 143
                part = run(resume=part.folder, stop_at=cut)
                seen += part.seen
            assert part.code == 0
            assert part.rows == whole.rows
            assert seen == whole.seen
            assert_same(part.weights, whole.weights)
            mine, right = part.state(40), whole.state(40)
            for item in TRAINED:
                assert_same(mine[item], right[item], item)
            assert part.result["state"]["resumed_step"] == cuts[-1]
            assert part.result["training"]["first_loss"] == whole.result["training"]["first_loss"]
            assert part.result["training"]["last_loss"] == whole.result["training"]["last_loss"]

    @pytest.mark.parametrize(
        "changed",
        [("eval_every=7", "log_every=1"), ("state=off",), ("state.every=1", "state=sync"), ("state.every=3",)],
    )
    def test_how_often_one_evaluates_logs_or_saves_changes_nothing(self, run: Run, changed: tuple[str, ...]) -> None:
        whole, other = run("steps=16"), run("steps=16", *changed)
        assert other.rows == whole.rows
        assert_same(other.weights, whole.weights)
