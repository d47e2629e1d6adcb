"""Public reports that no other file has a test for (docs/reports.md): what a device holds, out of memory, margins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from ckptplan import run as run_module
from ckptplan.budget import CUDA_MARGIN, plan_for_budget, static_bytes
from ckptplan.config import RunConfig, load_config, resolve
from ckptplan.data.text import stdlib_text
from ckptplan.data.tokens import synthetic_tokens
from ckptplan.errors import ConfigError
from ckptplan.profiles import BlockProfile, ChainProfile, StageCost

Compose = Callable[..., DictConfig]
TINY = (
    "model.layers=2 model.width=16 model.heads=2 data.sequence_length=16 data.batch_size=2 data.max_bytes=20kB "
    "budget_frac=1 steps=2 logger=none profile.num_warmup=0 profile.num_trials=1 proof.latency_trials=0"
).split()


@pytest.fixture(autouse=True)
def _deterministic_flag_put_back() -> Iterator[None]:
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


@pytest.fixture
def start(compose: Compose, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*overrides: str) -> tuple[int, dict[str, Any]]:
        config = compose(*TINY, *overrides)
        folder = tmp_path / "run"
        folder.mkdir()
        code = run_module.run_job(load_config(config), resolved=resolve(config), folder=folder, overrides=[])
        return code, json.loads((folder / "result.json").read_text())

    return run


# B43, B118


def refuse(*_: Any, **__: Any) -> Any:
    raise torch.cuda.OutOfMemoryError("no memory for 2.00 GiB\nand a long table of the allocator")


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory for 2.00 GiB\nand a table"), MemoryError()])
def test_out_of_memory_ends_with_5_and_sets_the_plan_beside_what_was_measured(
    start: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(run_module, "train", train)
    with caplog.at_level(logging.ERROR):
        code, result = start()
    assert (code, result["status"], result["error"]["type"]) == (5, "oom", type(error).__name__)
    assert "\n" not in result["error"]["message"]
    assert result["memory"]["predicted_peak_bytes"] == result["memory"]["measured_peak_bytes"] > 0
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    for word in ("predicted as", "measured as", "weights", "gradients", "optimizer state", "smaller budget"):
        assert word in message


def test_out_of_memory_before_there_is_a_plan_says_so(
    start: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "profile_model", refuse)
    code, result = start()
    assert (code, result["status"]) == (5, "oom")
    assert result["memory"]["predicted_peak_bytes"] is None
    assert "smaller data.batch_size" in caplog.text


# B37


def small_profile() -> ChainProfile:
    """Two equal blocks; kept: 320 bytes at the peak, both recomputed: 210."""
    cost = {"keep": StageCost(100, 110, 200), "recompute": StageCost(0, 110, 200)}
    blocks = (
        BlockProfile(f"b{i}", output_bytes=(10,), output_gradient_bytes=10, recompute_time_ms=1.0, **cost)  # type: ignore[arg-type]
        for i in range(2)
    )
    return ChainProfile(tuple(blocks))


@pytest.mark.parametrize(("optimizer", "state_bytes"), [(torch.optim.AdamW, 2 * 4 * 110 + 2 * 4), (torch.optim.SGD, 0)])
def test_a_device_budget_counts_the_optimizers_state_before_its_first_step(
    optimizer: Callable[..., torch.optim.Optimizer], state_bytes: int
) -> None:
    model = torch.nn.Linear(10, 10)
    static = static_bytes(model, optimizer(model.parameters(), lr=0.1))
    assert (static.weights_bytes, static.gradients_bytes, static.optimizer_bytes) == (440, 440, state_bytes)
    least = 880 + state_bytes
    cpu = torch.device("cpu")
    planned = plan_for_budget(small_profile(), RunConfig(device_budget_bytes=least + 250), static, cpu)
    assert planned.budget_bytes == 250
    assert planned.plan.predicted_peak_bytes is not None
    assert planned.plan.predicted_peak_bytes <= 250
    with pytest.raises(ConfigError, match=f"alone take {least:,} bytes"):
        plan_for_budget(small_profile(), RunConfig(device_budget_bytes=least), static, cpu)


# B43


def test_a_margin_is_taken_off_on_cuda_and_stated() -> None:
    model = torch.nn.Linear(2, 2)
    static = static_bytes(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for device, margin in (("cpu", 0), ("cuda", int(1000 * CUDA_MARGIN))):
        planned = plan_for_budget(small_profile(), RunConfig(budget_bytes=1000), static, torch.device(device))
        assert (planned.margin_bytes, planned.budget_bytes, planned.plan.budget_bytes) == (margin, 1000, 1000 - margin)


# B44


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_batch_that_is_measured_is_the_largest_of_the_epoch(epoch: int) -> None:
    for data in (
        synthetic_tokens(vocab_size=16, sequence_length=8, batch_size=4, num_samples=10),
        stdlib_text(sequence_length=8, batch_size=5, max_bytes="1kB"),
    ):
        measured = next(iter(data.epoch_batches(0))).inputs.shape
        shapes = [batch.inputs.shape for batch in data.epoch_batches(epoch)]
        assert all(shape[0] <= measured[0] and shape[1:] == measured[1:] for shape in shapes)
        assert shapes[0] == measured
