"""Blocks that cannot be measured at the batch's own size are measured at smaller ones; whole runs that meet it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptplan.training as training
from ckptplan.config.loading import load_config, resolve
from ckptplan.config.wording import shell_override
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import no_checkpoint_peak, plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.record import load_result
from ckptplan.run import profiling, proving, run_job
from ckptplan.simulate import simulate_plan
from ckptplan.smaller_batches import profile_or_scale
from tests.test_run import TINY, read_state


def no_memory() -> torch.cuda.OutOfMemoryError:
    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore lines")


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(block() for _ in range(4)))


def block() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))


def measured(batch: torch.Tensor) -> ChainProfile:
    return profile_model(
        net(), [str(i) for i in range(4)], batch, lambda m, b: m(b).square().mean(), num_warmup=0, num_trials=1
    )


def limited(most: int, sizes: list[int]) -> Any:
    def measure(batch: torch.Tensor) -> ChainProfile:
        sizes.append(len(batch))
        if len(batch) > most:
            raise no_memory()
        return measured(batch)

    return measure


def test_figures_scaled_from_smaller_batches_are_those_of_the_batch() -> None:
    """The oracle is the profile that was measured at its size."""
    sizes: list[int] = []
    found = profile_or_scale(limited(20, sizes), torch.randn(64, 8))
    assert sizes == [64, 32, 16, 8]
    own = measured(torch.randn(64, 8))
    assert no_checkpoint_peak(found.profile) == no_checkpoint_peak(own)
    plan = plan_checkpoints(own, target_kind="activation_budget_fraction", target_value=0.6, cost="flops")
    assert simulate_plan(found.profile, plan).peak_bytes == simulate_plan(own, plan).peak_bytes
    assert found.note == (
        "memory ran out while the blocks were measured with 64 samples: their figures are scaled from 8 and 16 samples"
    )


def test_where_no_size_can_be_measured_the_first_error_is_raised_with_what_was_tried() -> None:
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"20.00 GiB; nor could blocks be measured with fewer of the 8"
    ):
        profile_or_scale(limited(0, []), torch.randn(8, 8))
    with pytest.raises(ZeroDivisionError):
        profile_or_scale(lambda batch: 1 // 0, torch.randn(8, 8))  # type: ignore[arg-type,return-value]


def test_a_model_whose_figures_do_not_scale_says_so() -> None:
    def measure(batch: torch.Tensor) -> ChainProfile:
        if len(batch) == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        if len(batch) == 2:
            raise PlanIncompatibleError("the model has other blocks at another batch size")
        return measured(batch)

    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"cannot be scaled from smaller batches: .*other blocks"):
        profile_or_scale(measure, torch.randn(8, 8))


# --- whole runs ---


def run(compose: Any, folder: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    composed = compose(*TINY, "planner=dp", *overrides)
    code = run_job(load_config(composed), resolved=resolve(composed), folder=folder, overrides=list(overrides))
    return code, load_result(folder)


def test_a_run_whose_batch_cannot_be_measured_plans_from_smaller_ones(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(model: Any, blocks: Any, batch: Any, *args: Any, **options: Any) -> ChainProfile:
        if len(batch.inputs) > 6:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return profile_model(model, blocks, batch, *args, **options)

    monkeypatch.setattr(profiling, "profile_model", measure)
    code, result = run(compose, tmp_path, "data.batch_size=12", "state=off")
    assert (code, result["status"]) == (0, "ok")
    assert abs(result["memory"]["prediction_error"]) <= 0.01, "proven by a real step of 12 samples"
    assert any("scaled from 3 and 6 samples" in note for note in result["notes"])


def test_a_plan_whose_proof_runs_out_of_memory_is_made_tighter_and_trained(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def prove(model: Any, plan: Any, *args: Any, **options: Any) -> Any:
        if len(refused) < 2:
            refused.append(plan.predicted_peak_bytes)
            raise no_memory()
        return prove_model(model, plan, *args, **options)

    monkeypatch.setattr(proving, "prove_model", prove)
    code, result = run(compose, tmp_path, "budget_frac=0.9", "state=off")
    assert (code, result["status"]) == (0, "ok")
    taken = result["memory"]["predicted_peak_bytes"]
    assert taken <= 0.9 * refused[1]
    assert refused[1] <= 0.9 * refused[0]
    assert CheckpointPlan.load(tmp_path / "plan.json").text == result["plan"]["text"]
    assert [note.startswith("out of memory in the proof (CUDA out of memory.") for note in result["notes"][:2]] == [
        True
    ] * 2
    assert abs(result["memory"]["prediction_error"]) <= 0.01, "both figures are of the plan that was taken"


def test_memory_that_runs_out_in_the_optimizers_step_ends_the_run_and_its_newest_state_goes_on(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oracle is a run in which memory never ran out."""
    folders = [tmp_path / name for name in ("whole", "broken")]
    for folder in folders:
        folder.mkdir()
    settings = ("steps=4", "state=sync", "state.every=1")
    run(compose, folders[0], *settings)
    update, calls = training.update_weights, []

    def update_weights(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            next(iter(optimizer.param_groups[0]["params"])).data.zero_()
            raise no_memory()
        update(optimizer, scaler)

    monkeypatch.setattr(training, "update_weights", update_weights)
    code, result = run(compose, folders[1], *settings)
    assert (code, result["status"], result["state"]["step"]) == (5, "oom", 2)
    assert "out of memory in the optimizer's own step" in caplog.text
    assert f"to go on from it: {shell_override('resume', str(folders[1] / 'state' / 'step-2'))}" in caplog.text
    code, result = run(compose, folders[1], *settings, f"resume={folders[1]}")
    assert (code, result["status"]) == (0, "ok")
    whole, resumed = (read_state(folder) for folder in folders)
    assert all(torch.equal(resumed["model"][name], tensor) for name, tensor in whole["model"].items())
