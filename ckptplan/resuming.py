"""The training state of a run: what is in it, when it is saved, and how a run goes on from it.

``ckptplan.state`` does the saving and loading; here is what a run has to do with it. The states of a run lie in its
folder, ``state/step-<N>``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.budget import PlannedRun
from ckptplan.config import BUDGET_KEYS, RunConfig, StateConfig
from ckptplan.config.wording import config_error, shell_override
from ckptplan.data import Batch
from ckptplan.engine.ranks import Ranks
from ckptplan.errors import (
    DamagedCheckpointError,
    FolderInUseError,
    PlanIncompatibleError,
    SaveFailedError,
    StateError,
    StateMismatchError,
    UnsupportedPlanVersionError,
)
from ckptplan.plan import CheckpointPlan
from ckptplan.randomness import put_back_streams, streams_to_save
from ckptplan.record import StateRecord
from ckptplan.runs import AUTO, STATE_FOLDER, describe_changes
from ckptplan.state import CheckpointManager, Future, ItemSpec, OptimizerByName, Storage, StorageConfig
from ckptplan.training import Position

log = logging.getLogger(__name__)

_MISMATCH = "the state is of another model or optimizer; nothing has been changed"
_SMALL_ITEMS = ("position", "plan", "config")


@dataclass(frozen=True)
class Stored:
    """A state that a run goes on from, as far as it is known before there is a model.

    Attributes:
        batch_size: samples of a micro-batch when it was saved; None: the data set does not say.
        plan: the plan in JSON, its budget, and ``made_for``: what it was made for.
        config: the resolved configuration of the run then.
        num_ranks: processes that trained then; ``tensor_size``: how many of them shared each matrix product.
    """

    checkpoint_id: str
    position: Position
    batch_size: int | None
    plan: dict[str, Any]
    config: dict[str, Any]
    num_ranks: int = 1
    tensor_size: int = 1

    def start(self, batch_size: int | None) -> Position:
        """Where training goes on, counted in micro-batches of ``batch_size`` samples where that is exact."""
        if batch_size == self.batch_size or batch_size is None or self.batch_size is None:
            return self.position
        whole, rest = divmod(self.position.samples, batch_size)
        return Position(**{**asdict(self.position), "batches": None if rest else whole})

    def planned(self, made_for: Mapping[str, Any]) -> PlannedRun | None:
        """The stored plan; None, with the reason in the log, where it was made for something else."""
        then = self.plan["made_for"]
        changed = sorted(key for key in {*then, *made_for} if then.get(key) != made_for.get(key))
        if changed:
            log.info("the stored plan is not used: changed since then: %s", ", ".join(changed))
            return None
        try:
            plan = CheckpointPlan.from_json(self.plan["json"], f"the plan in {self.checkpoint_id}")
        except (PlanIncompatibleError, UnsupportedPlanVersionError, ValueError) as error:
            log.warning("the stored plan is not used: %s", error)
            return None
        figures = {
            key: self.plan[key] for key in ("budget_bytes", "margin_bytes", "smallest_reachable_bytes", "solve_s")
        }
        return PlannedRun(plan, **figures)


@dataclass(frozen=True)
class Trained:
    """What a state holds of the training itself; ``is_sharded``: each rank holds a part of model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    data: Any
    device: torch.device
    is_sharded: bool = False

    @property
    def optimizer_item(self) -> Any:
        """The optimizer as it is saved: of shards by the names of parameters, for any number of ranks."""
        return OptimizerByName(self.model, self.optimizer) if self.is_sharded else self.optimizer

    @property
    def batch_size(self) -> int | None:
        """Samples of a micro-batch, where the data set says."""
        size = getattr(self.data, "batch_size", None)
        return size if isinstance(size, int) else None


def plan_made_for(config: RunConfig, batch: Batch, device_name: str, ranks: Ranks) -> dict[str, Any]:
    """Everything that a plan depends on; a run that goes on with other values is planned anew."""
    tensors = (batch.inputs, batch.targets)
    engine = {"engine": f"{config.engine.kind} on {ranks.size} ranks"} if config.engine.kind != "single" else {}
    if ranks.tensor_size > 1:
        engine["tensor_parallel"] = f"{ranks.tensor_size} ranks, cut by {config.engine.tp_plan or 'the model'}"
    return {
        **engine,
        "planner": asdict(config.planner),
        "budget": {key: getattr(config, key) for key in (*BUDGET_KEYS, "margin_frac", "cost")},
        "model": config.model,
        "blocks": config.blocks.paths,
        "batch": [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors],
        "device": device_name,
        "dtype": str(config.runtime.dtype),
        "torch": str(torch.__version__),
    }


def stored_form(planned: PlannedRun, made_for: dict[str, Any]) -> dict[str, Any]:
    """The item ``plan`` of a state."""
    return {
        "json": planned.plan.to_json(),
        "made_for": made_for,
        "budget_bytes": planned.budget_bytes,
        "margin_bytes": planned.margin_bytes,
        "smallest_reachable_bytes": planned.smallest_reachable_bytes,
        "solve_s": planned.solve_s,
    }


class RunStates:
    """The states of one run: found, loaded, saved. Used in a ``with`` block, which waits for what is being saved.

    A save that fails while training goes on costs a warning and a note; the next one is tried all the same.
    """

    def __init__(
        self, folder: Path, config: StateConfig, record: StateRecord, notes: list[str], ranks: Ranks | None = None
    ) -> None:
        self.location = str(folder / STATE_FOLDER) if config.location is None else config.location.rstrip("/")
        self.config, self.record, self.notes = config, record, notes
        self.is_on = config.mode != "off"
        self._folder = folder
        self._ranks = ranks or Ranks()
        self._may_fall_back = False
        self._manager: CheckpointManager | None = None
        self._pending: Future | None = None
        self._figures: dict[str, float] = {}
        self._contents: Callable[[Position], dict[str, Any]] | None = None

    @property
    def manager(self) -> CheckpointManager:
        """Made when it is needed first."""
        if self._manager is None:
            config = self.config
            best = (config.best_metric, config.best_mode, config.keep_best or 1)
            # Nothing goes on beside a state that is saved when the run ends: no need for a copy of it in memory.
            is_background = config.mode in ("async", "auto") and config.every is not None
            self._manager = CheckpointManager(
                storage=self._storage(),
                mode="async" if is_background else "sync",
                items={"random": ItemSpec(scope="per_rank")} if self._ranks.size > 1 else {},
                keep_last=config.keep_last,
                keep_best=best if config.keep_best and config.keep_last else None,
            )
        return self._manager

    def _storage(self) -> Storage:
        try:
            return StorageConfig(self.location, cache=self.config.cache).open()
        except (ImportError, ValueError) as error:
            raise config_error("state.location", self.location, str(error)) from error

    def __enter__(self) -> RunStates:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._manager is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self.abandon()
            return
        try:
            self._settle()
        except KeyboardInterrupt:
            self.abandon()
            raise
        self._manager.__exit__(kind, error, None)

    def _at(self, checkpoint_id: str) -> str:
        return f"{self.location}/{checkpoint_id}"

    def abandon(self) -> None:
        """Wait for nothing: what is committed stays, what the writer has been handed wholly it finishes by itself."""
        self._pending = None
        if self._manager is not None:
            self._manager.abandon()

    # --- going on ---

    def find(self, resume: str | None) -> Stored | None:
        """The state to go on from, its small parts read and checked; None for a new run.

        ``resume="auto"`` takes the newest good one, anything else the one it names, or the newest.
        Raises ``ConfigError`` where that is damaged or of another format.
        """
        if self.is_on:
            self._ranks.from_first(lambda: self._require_place(is_new=resume is None))
        if resume is None:
            return None
        self._may_fall_back = resume == AUTO
        wanted = self._ranks.from_first(lambda: self._claimed(resume))
        if wanted is None:
            if resume != AUTO and self.config.location is not None:
                problem = f"state.location={self.location} holds no state of the run to go on from"
                raise config_error("resume", resume, problem, remedy="resume=auto begins a new run where there is none")
            log.info("resume=%s: no state to go on from; a new run begins", resume)
            return None
        return self._small_items(wanted)

    def _require_place(self, is_new: bool) -> None:
        """The place is taken before anything is trained: one that is not there, or is another run's, is told now."""
        key, other = "state.location", "another location"
        if self.config.location is None:
            key, other = "hydra.run.dir", "hydra.run.dir=<a new folder>"
        try:
            self.manager.claim()
            there = self.manager.latest() if is_new else None
        except FolderInUseError as error:
            remedy = f"the same command when it has ended, or {other}"
            raise config_error(key, self.location, str(error), remedy=remedy) from error
        except (OSError, StateError) as error:
            raise config_error(key, self.location, str(error)) from error
        if there is not None:
            problem = f"the states of a run lie there already, the newest is {there}"
            raise config_error(key, self.location, problem, remedy=f"resume=auto to go on with it, or {other}")

    def _claimed(self, resume: str) -> str | None:
        """The name of the state that ``resume`` means, the folder taken for this run."""
        try:
            self.manager.claim()
        except (FolderInUseError, OSError) as error:
            raise config_error(
                "resume", self._folder, str(error), remedy="the same command when it has ended"
            ) from error
        return Path(resume).name if Path(resume).parent.name == STATE_FOLDER else self.manager.latest()

    def checked(self, stored: Stored) -> Stored:
        """``stored`` after reading all of it; an older state where it is damaged and ``resume="auto"`` allows that."""
        name = stored.checkpoint_id
        faults = self._ranks.from_first(lambda: self.manager.verify(name))
        if not faults:
            return stored
        return self._older(name, faults, self._ranks.from_first(lambda: self.manager.next_good(name)))

    def _small_items(self, checkpoint_id: str) -> Stored:
        where = self._at(checkpoint_id)
        try:
            items = self.manager.load(checkpoint_id, into=dict.fromkeys(_SMALL_ITEMS))
            position = dict(items["position"])
            batch_size, num_ranks = position.pop("batch_size"), position.pop("num_ranks", 1)
            sizes = (num_ranks, position.pop("tensor_size", 1))
            return Stored(checkpoint_id, Position(**position), batch_size, items["plan"], items["config"], *sizes)
        except DamagedCheckpointError as error:
            return self._older(checkpoint_id, error.faults, error.next_good)
        except (StateError, KeyError, TypeError) as error:
            raise config_error("resume", where, f"this is no state of a run of this version: {error}") from error

    def _older(self, damaged: str, faults: Sequence[str], good: str | None) -> Stored:
        where = self._at(damaged)
        if good is None or not self._may_fall_back:
            remedy = "the command without resume=, for a new run"
            if good is not None:
                remedy = f"{shell_override('resume', self._at(good))}, the newest good state, or resume=auto"
            raise config_error("resume", where, f"damaged: {'; '.join(faults[:5])}", remedy=remedy)
        log.warning("%s is damaged (%s): the newest good state, %s, is taken", where, faults[0], good)
        self.notes.append(f"went on from {good}, because {damaged} is damaged: {faults[0]}")
        return self._small_items(good)

    def restore(self, stored: Stored, trained: Trained, config: RunConfig) -> tuple[Stored, dict[str, Any] | None]:
        """Put the state into the live objects, all or nothing.

        Arguments of the optimizer that were changed since the state was saved are those of now.
        Returns the state that was taken (an older one where it is damaged) and the random streams, for
        ``restore_random`` (None where another number of ranks saved it). Raises ``ConfigError`` that lists everything
        in which model or optimizer differ.
        """
        into: dict[str, Any] = {"model": trained.model, "optimizer": trained.optimizer_item, "random": None}
        then, now = (
            f"{size} rank{'s' * (size > 1)}" if shared == 1 else f"{size} ranks ({shared} to each matrix product)"
            for size, shared in (
                (stored.num_ranks, stored.tensor_size),
                (self._ranks.size, self._ranks.tensor_size),
            )
        )
        if then != now:
            del into["random"]
            self.notes.append(
                f"saved on {then}, gone on with on {now}: the random streams start anew, from seed, rank and step"
            )
        if trained.scaler is not None:
            if "scaler" in self._items_of(stored):
                into["scaler"] = trained.scaler
            else:
                self.notes.append(
                    "the state holds no loss scale (it was saved in another number format): it starts anew"
                )
        fresh = [dict(group) for group in trained.optimizer.param_groups]
        where = self._at(stored.checkpoint_id)
        try:
            loaded = self.manager.load(stored.checkpoint_id, into=into)
        except StateMismatchError as error:
            changes = describe_changes(stored.config, asdict(config), ("model", "optimizer"))
            raise config_error(
                "resume", where, "\n".join([_MISMATCH, *(f"  - {line}" for line in [*changes, *error.faults])])
            ) from error
        except DamagedCheckpointError as error:
            return self.restore(self._older(stored.checkpoint_id, error.faults, error.next_good), trained, config)
        changed = _changed(stored.config.get("optimizer", {}), config.optimizer)
        for group, given in zip(trained.optimizer.param_groups, fresh, strict=True):
            group.update({key: given[key] for key in changed if key in given and key not in ("params", "lr")})
        self.record.resumed_from, self.record.resumed_step = str(where), stored.position.step
        self.record.path, self.record.step = str(where), stored.position.step
        return stored, loaded.get("random")

    def _items_of(self, stored: Stored) -> tuple[str, ...]:
        return next(info.items for info in self.manager.list() if info.checkpoint_id == stored.checkpoint_id)

    # --- saving ---

    def begin(self, trained: Trained, plan: dict[str, Any], resolved: dict[str, Any]) -> None:
        """What the states of this run hold from now on; before it nothing is saved."""

        optimizer_item = trained.optimizer_item

        def contents(position: Position) -> dict[str, Any]:
            scaler = {} if trained.scaler is None else {"scaler": trained.scaler}
            return {
                "model": trained.model,
                "optimizer": optimizer_item,
                **scaler,
                "random": streams_to_save(trained.device),
                "position": {
                    **asdict(position),
                    "batch_size": trained.batch_size,
                    "num_ranks": self._ranks.size,
                    "tensor_size": self._ranks.tensor_size,
                },
                "plan": self._plan,
                "config": resolved,
            }

        self._plan = plan
        self._contents = contents
        self.record.saved = 0 if self.is_on else None

    def replan(self, plan: dict[str, Any]) -> None:
        """States hold this plan from now on."""
        self._plan = plan

    def newest(self) -> str | None:
        """Where the newest state is that is durable, that which is being saved waited for; None: there is none."""
        self._settle()
        return self.record.path

    def after_step(self, position: Position, figures: dict[str, float]) -> None:
        """Save, if it is time to."""
        self._figures = figures
        if self.is_on and self.config.every is not None and position.step % self.config.every == 0:
            self._save(position, figures)

    def at_end(self, position: Position) -> None:
        """Save the last step if it is not saved yet, and wait until it is durable. Raises what went wrong."""
        if not self.is_on or self._contents is None:
            return
        if position.step == 0:
            log.info("there was no update: nothing to save")
            return
        self._settle()
        if self.record.step != position.step:
            self._save(position, self._figures)
            if self._settle() is not None:
                raise SaveFailedError(f"the last state could not be saved: {self.notes[-1]}")

    def _save(self, position: Position, figures: dict[str, float]) -> None:
        assert self._contents is not None
        started = time.perf_counter()
        self._settle()
        checkpoint_id = f"step-{position.step}"
        self._pending = self.manager.save(checkpoint_id, self._contents(position), metrics=figures)
        self.record.stall_s = (self.record.stall_s or 0.0) + time.perf_counter() - started

    def _settle(self) -> BaseException | None:
        """Wait for the save that is under way, take note of how it ended; returns what made it fail."""
        if self._pending is None:
            return None
        pending = self._pending
        error = pending.exception()
        self._pending = None
        if error is not None:
            told = f"{pending.checkpoint_id} was not saved: {' '.join(str(error).splitlines())}"
            log.warning("%s (earlier states are as they were)", told)
            self.notes.append(told)
            return error
        self.record.path = self._at(pending.checkpoint_id)
        self.record.step = pending.result().step
        self.record.saved = (self.record.saved or 0) + 1
        return None


def restore_random(stored: dict[str, Any], device: torch.device, notes: list[str]) -> None:
    """Put the random streams back, as the last thing before training goes on."""
    if not put_back_streams(stored, device):
        notes.append(
            f"the state holds no random stream of {device.type} (it was saved elsewhere): it starts from the seed"
        )


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
