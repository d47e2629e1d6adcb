"""``batch=auto`` and ``batch=largest``: the micro-batch of a run, its global batch kept."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn

from ckptplan.batch_size import Maximized, Search, resized
from ckptplan.blocks import CheckpointableBlock
from ckptplan.budget import budget_at_any_size
from ckptplan.config import BUDGET_KEYS, RunConfig
from ckptplan.config.wording import config_error
from ckptplan.data import Batch
from ckptplan.footprint import StaticBytes
from ckptplan.record import RunResult
from ckptplan.resuming import Stored
from ckptplan.subject import LossFn

SHARES = ("budget_frac", "saving_frac")  # budgets that are shares of the peak of a batch

log = logging.getLogger(__name__)


def choose_batch(
    config: RunConfig,
    result: RunResult,
    model: nn.Module,
    blocks: tuple[CheckpointableBlock, ...],
    batch: Batch,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    static: StaticBytes,
    device: torch.device,
) -> RunConfig:
    """``config`` with the micro-batch and the accumulation that were chosen; ``data.batch_size`` is the global batch.

    Raises ``InfeasibleTargetError`` where not even one sample fits.
    """
    samples = _global_batch(config)
    search = Search(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        budget=budget_at_any_size(config, static, device),
        objective="throughput" if config.batch == "auto" else "batch",
        global_batch=samples,
        most=None,
        resize=resized,
        blocks=blocks,
        optimizer=optimizer,
        planner=config.planner.name,
        device=device,
        cost=config.cost,
        margin_frac=config.margin_frac,
    )
    found = search.run(confirm=True)
    for line in found.text.splitlines():
        log.info("%s", line)
    _record(result, found)
    return with_micro_batch(config, found.chosen.batch_size, search.share_bytes)


def with_micro_batch(config: RunConfig, size: int, share_bytes: int | None) -> RunConfig:
    """``config`` with micro-batches of ``size`` samples and as many samples in a step as before.

    ``share_bytes`` takes the place of a budget that is a share of the peak of the batch as it was.
    """
    if config.target.key in SHARES:
        config = replace(config, budget_frac=None, saving_frac=None, budget_bytes=share_bytes)
    samples = _global_batch(config)
    if samples % size:
        problem = f"the run was trained in micro-batches of {size} samples, which do not make up {samples}"
        raise config_error("data.batch_size", config.data["batch_size"], problem, remedy="batch=fixed")
    return replace(config, data={**config.data, "batch_size": size}, accumulate=samples // size)


def is_budget_of(config: RunConfig, stored: Stored) -> bool:
    """Whether the micro-batch of a stored run was chosen for what is asked for now."""
    asked = {key: getattr(config, key) for key in (*BUDGET_KEYS, "margin_frac", "batch", "accumulate")}
    same = all(stored.config.get(key) == value for key, value in asked.items())
    same &= stored.config["data"].get("batch_size") == config.data["batch_size"]
    return same and stored.batch_size is not None


def _global_batch(config: RunConfig) -> int:
    return int(config.data["batch_size"]) * config.accumulate


def _record(result: RunResult, found: Maximized) -> None:
    record = result.batch
    record.largest, record.fastest = found.largest.batch_size, found.fastest.batch_size
    record.largest_samples_per_s = found.largest.samples_per_s
    record.fastest_samples_per_s = found.fastest.samples_per_s
    result.notes += found.notes
