"""The part of a run that plans for a device which is not there: no training, nothing measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ckptplan.batch_size import resized
from ckptplan.blocks import CheckpointableBlock
from ckptplan.config import RunConfig
from ckptplan.config.wording import config_error
from ckptplan.data import Batch
from ckptplan.devices import Calibration
from ckptplan.errors import BlockDeclarationError, ConfigError, DryRunError, UnsupportedBoundaryError
from ckptplan.estimate import Estimating, estimated_blocks, estimated_range
from ckptplan.fakes import MOST_KNOWN_ELEMENTS
from ckptplan.footprint import (
    Room,
    Row,
    StaticBytes,
    footprint,
    optimizer_step_bytes,
    room_of_absent,
    sharded,
    static_bytes,
)
from ckptplan.larger_batches import largest_batch, longest_in_room
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.record import ProfileRecord, RunResult
from ckptplan.report.tables import footprint_table
from ckptplan.run.profiling import measures_offload
from ckptplan.runtime import Runtime
from ckptplan.sequence_length import with_length
from ckptplan.simulate import simulate_plan
from ckptplan.subject import LossFn
from ckptplan.units import format_bytes, format_ms, format_percent

log = logging.getLogger(__name__)


@dataclass
class AbsentDevice:
    """A run's model on a device that is not there: its figures, and what stands beside activations."""

    config: RunConfig
    runtime: Runtime
    model: nn.Module
    batch: Batch
    loss_fn: LossFn
    static: StaticBytes
    room: Room
    blocks: tuple[CheckpointableBlock, ...]
    profile: ChainProfile

    @staticmethod
    def of(
        config: RunConfig,
        runtime: Runtime,
        model: nn.Module,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        check_stop: Callable[[], None],
    ) -> AbsentDevice:
        """Raises ``ConfigError`` where the model cannot be looked at without running it."""
        assert runtime.planned_for is not None
        paths = None if config.blocks.paths == "auto" else list(config.blocks.paths)
        start_s = time.perf_counter()
        offload = measures_offload(config, is_apart=True)
        estimating = Estimating(runtime.planned_for, calibration_of(config), check_stop, offload=offload)
        try:
            blocks = estimated_blocks(model, paths, batch, loss_fn)
            profile = estimating.profile(model, blocks, batch, loss_fn)
        except (BlockDeclarationError, UnsupportedBoundaryError, DryRunError) as error:
            raise ConfigError(f"{error}\n  see blocks.paths in docs/configuration.md") from error
        log.info("profile: %d blocks, estimated in %.1f s", len(profile), time.perf_counter() - start_s)
        static = static_bytes(model, optimizer, batch)
        static = replace(static, optimizer_step_bytes=optimizer_step_bytes(optimizer, on_cuda=True))
        if config.runtime.shards > 1:
            static = sharded(static, model, [block.module for block in blocks], config.runtime.shards)
        room = room_of_absent(runtime.planned_for)
        return AbsentDevice(config, runtime, model, batch, loss_fn, static, room, blocks, profile)

    def rows(self, plan: CheckpointPlan) -> tuple[Row, ...]:
        """All of the device's memory at the plan's peak."""
        return plan_footprint(self.room, self.static, self.profile, plan)

    def tell(self, plan: CheckpointPlan, result: RunResult, console: Console) -> None:
        """Print the rows, the range and the largest batch; put them into the result."""
        rows = self.rows(plan)
        footprint_table(self.room.title, rows, console)
        record_footprint(result, rows)
        if plan.predicted_cost is not None and plan.cost_kind == "time":
            found = estimated_range(self.profile, plan)
            low, likely, high = found.step_ms
            log.info(
                "estimate: a step of forward, backward and recomputation takes %s (%s to %s); recomputation adds %s",
                format_ms(likely),
                format_ms(low),
                format_ms(high),
                format_percent(found.overhead_ratio[1]),
            )
            result.latency.predicted_step_ms = {"low": low, "likely": likely, "high": high}
        if self.static.optimizer_step_bytes:
            log.info(
                "the optimizer's own step, when activations are gone: %s of temporaries",
                format_bytes(self.static.optimizer_step_bytes),
            )
        if plan.budget_bytes is not None and self.config.target.key == "auto":
            self._tell_largest_batch(result)
            self._tell_longest_sequence(result)

    @property
    def _room_for_batch_bytes(self) -> int:
        """For activations and the batch itself."""
        return self.room.left_bytes - ((self.static.total_bytes or 0) - self.static.batch_bytes)

    def _profile_of(self, batch: Batch) -> ChainProfile:
        assert self.runtime.planned_for is not None
        quick = Estimating(self.runtime.planned_for, calibration_of(self.config), ranged=False)
        return quick.profile(self.model, self.blocks, batch, self.loss_fn)

    def _tell_largest_batch(self, result: RunResult) -> None:
        samples = self.batch.inputs.shape[0]
        # beyond that fake tensors would not know the tokens, and models decide by them
        most = max(1, MOST_KNOWN_ELEMENTS // max(1, self.batch.inputs[0].numel()))
        found = largest_batch(
            lambda size: self._profile_of(resized(self.batch, size)),
            self._room_for_batch_bytes,
            self.static.batch_bytes // samples,
            most,
        )
        result.memory.largest_batch_samples = found.samples
        log.info("%s", found.text)

    def _tell_longest_sequence(self, result: RunResult) -> None:
        """Of token models: with as many samples as the batch has."""
        inputs, targets = self.batch.inputs, self.batch.targets
        if inputs.dim() != 2 or inputs.is_floating_point() or targets.shape != inputs.shape:
            return
        samples, own = inputs.shape
        found = longest_in_room(
            lambda length: self.profile if length == own else self._profile_of(with_length(self.batch, length)),
            self._room_for_batch_bytes,
            own,
            token_bytes=self.static.batch_bytes // own,
            most=MOST_KNOWN_ELEMENTS // samples,
        )
        result.memory.longest_sequence = found.length
        log.info("%s", found.text)


def plan_footprint(room: Room, static: StaticBytes, profile: ChainProfile, plan: CheckpointPlan) -> tuple[Row, ...]:
    """The rows of a device's memory at a plan's activation peak."""
    cost = simulate_plan(profile, plan)
    stage = cost.peak_at.rsplit(" ", 1)[0]
    before = profile.block_ids.index(stage) if stage in profile.block_ids else len(profile)
    if profile.pre is not None and stage == profile.pre.name:
        before = 0
    retained = min(sum(cost.retained_bytes[:before]), cost.peak_bytes)
    return footprint(room, static, cost.peak_bytes, retained, cost.peak_at)


def record_footprint(result: RunResult, rows: tuple[Row, ...]) -> None:
    """The rows as part of the result."""
    result.memory.rows = [{"name": row.name, "bytes": row.size_bytes, "note": row.note} for row in rows]


def calibration_of(config: RunConfig) -> Calibration | None:
    """The file of ``runtime.calibration``. Raises ``ConfigError`` for one that cannot be read."""
    path = config.runtime.calibration
    if path is None:
        return None
    try:
        return Calibration.load(path)
    except (OSError, ValueError) as error:
        problem = f"no calibration: {error}"
        raise config_error(
            "runtime.calibration", path, problem, remedy=f"python -m ckptplan.calibrate {path}"
        ) from error


def record_profile(result: RunResult, profile: ChainProfile, folder: Path, start_s: float) -> None:
    """The estimate as the run's profile."""
    profile.save(folder / "profile.json")
    result.profile = ProfileRecord("estimated", None, None)
    result.timing.profile_s = time.perf_counter() - start_s


def meta_model(make: Callable[[], Any]) -> nn.Module:
    """The model that ``make`` builds, without memory for its weights."""
    with torch.device("meta"):
        model: nn.Module = make()
    return model
