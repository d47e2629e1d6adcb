"""Public reports that no other file has a test for (docs/reports.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from ckptplan.config.loading import load_config, resolve
from ckptplan.data.text import stdlib_text
from ckptplan.data.tokens import synthetic_tokens
from ckptplan.run import profiling, run_job, trained

Compose = Callable[..., DictConfig]
TINY = (
    "model.layers=2 model.width=16 model.heads=2 data.sequence_length=16 data.batch_size=2 data.max_bytes=20kB "
    "budget_frac=1 steps=2 logger=none profile.num_warmup=0 profile.num_trials=1 proof.latency_trials=0"
).split()


@pytest.fixture(autouse=True)
def _deterministic_flag_put_back() -> Iterator[None]:
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn)


@pytest.mark.parametrize(
    ("module", "stage", "words"),
    [
        (profiling, "profile_model", "before there was a plan: measuring holds a second set of weights"),
        (trained, "train", "predicted as"),
    ],
)
def test_running_out_of_host_memory_has_no_message_and_is_told_all_the_same(
    compose: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: ModuleType,
    stage: str,
    words: str,
) -> None:
    """B43, B118: Python's own MemoryError is empty."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(module, stage, refuse)
    config = compose(*TINY)
    with caplog.at_level(logging.ERROR):
        code = run_job(load_config(config), resolved=resolve(config), folder=tmp_path, overrides=[])
    result = json.loads((tmp_path / "result.json").read_text())
    assert (code, result["status"], result["error"]["type"]) == (5, "oom", "MemoryError")
    assert words in caplog.text


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_the_batch_that_is_measured_is_the_largest_of_every_epoch(epoch: int) -> None:
    """B44."""
    for data in (
        synthetic_tokens(vocab_size=16, sequence_length=8, batch_size=4, num_samples=10),
        stdlib_text(sequence_length=8, batch_size=5, max_bytes="1kB"),
    ):
        measured = next(iter(data.epoch_batches(0))).inputs.shape
        shapes = [batch.inputs.shape for batch in data.epoch_batches(epoch)]
        assert all(shape[0] <= measured[0] and shape[1:] == measured[1:] for shape in shapes)
        assert shapes[0] == measured
