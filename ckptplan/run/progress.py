"""What the stages of a run share: the run in progress, and what it has before its blocks are measured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ckptplan.blocks import BlockSelection
from ckptplan.config import RunConfig
from ckptplan.config.loading import config_yaml
from ckptplan.data import Batch
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.tensor import CutModel
from ckptplan.equality import RTOL_FLOAT32, RTOL_HALF
from ckptplan.footprint import StaticBytes
from ckptplan.largest_shapes import LargestShapes
from ckptplan.record import RunRecorder, RunResult, write_atomic
from ckptplan.resuming import RunStates, Stored, Trained
from ckptplan.runs import describe_changes, remember_typed, without
from ckptplan.runtime import Runtime
from ckptplan.stopping import StopFlag
from ckptplan.subject import LossFn
from ckptplan.tracking import Tracker
from ckptplan.training import TrainSettings, count_targets, loss_of, summed_loss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What a run has before its blocks are measured.

    Attributes:
        batch: the largest of the data, on the device.
        gradient_order: names of the parameters in the order of their gradients; empty with one process.
        is_sharded: whether each rank holds a part of the weights only, which are gathered block by block.
        cut: with tensor parallelism, the model to measure on; else None.
    """

    runtime: Runtime
    batch: Batch
    shapes: LargestShapes
    selection: BlockSelection
    make_optimizer: Any
    trained: Trained
    static: StaticBytes
    schedule: Callable[[int], float]
    settings: TrainSettings
    engine: str
    gradient_order: tuple[str, ...]
    is_sharded: bool
    cut: CutModel | None

    @property
    def measured(self) -> nn.Module:
        """What blocks are measured on, by each rank alone."""
        return self.trained.model if self.cut is None else self.cut.silent


@dataclass
class RunInProgress:
    """A run in progress: what every stage of the data path reads, and the result of which each fills its part."""

    config: RunConfig
    resolved: dict[str, Any]
    folder: Path
    overrides: list[str]
    result: RunResult
    recorder: RunRecorder
    tracker: Tracker
    stop: StopFlag
    states: RunStates
    stored: Stored | None
    on_begin: Callable[[], None]
    ranks: Ranks

    def __post_init__(self) -> None:
        self.console = Console(quiet=not self.ranks.is_first)
        self.agreed_stop = self.ranks.agreed(self.stop)
        self.is_started = self.is_accepted = False

    def accept(self) -> None:
        """From here on the run is this one: what its folder says of an earlier part of it is set aside."""
        self.is_accepted = True
        step = 0 if self.stored is None else self.stored.position.step
        if self.stored is not None:
            log.info("going on from %s (resume=%s)", self.result.state.resumed_from, self.config.resume)
            for change in changes_since(self.stored, self.resolved):
                log.info("changed since step %d: %s", step, change)
            remember_typed(self.folder, without(("resume",), self.overrides))
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "result.json").replace(self.folder / "result.earlier.json")
        write_atomic(self.folder / "config.yaml", config_yaml(self.resolved))
        discarded = self.recorder.go_back_to(step)
        if discarded:
            log.info("%d lines of metrics past step %d are now in metrics.discarded.jsonl", discarded, step)

    def go_on(self, trained: Trained) -> dict[str, Any] | None:
        """Take the stored state in; returns its random streams (None: a new run)."""
        if self.stored is None:
            return None
        self.stored, streams = self.states.restore(self.stored, trained, self.config)
        self.accept()
        return streams


def changes_since(stored: Stored, resolved: dict[str, Any]) -> list[str]:
    return describe_changes(stored.config, {**resolved, "resume": stored.config["resume"]})


def rtol_of(runtime: Runtime) -> float:
    """How far losses and gradients of two ways to run the same model may differ, each beside its size."""
    is_half = runtime.autocast_dtype is not None or runtime.parameter_dtype is not torch.float32
    return RTOL_HALF if is_half else RTOL_FLOAT32


def loss_fn(runtime: Runtime) -> LossFn:
    return lambda model, batch: loss_of(model, batch, runtime.autocast_dtype)


def loss_fn_without_values(runtime: Runtime, batch: Batch) -> LossFn:
    """The loss of ``batch`` for a dry run: how many targets count is a value, which that has none of."""
    count = max(count_targets(batch), 1)
    return lambda model, given: summed_loss(model, given, runtime.autocast_dtype) / count
