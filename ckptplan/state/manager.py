"""`CheckpointManager`: save in the background, load exactly, keep what is wanted.

A save goes: wait for room, encode and plan (`snapshot`), copy and hand over (`saving`), return. A load goes: choose,
compare, read and check, write (`loading`). This module keeps the books and makes the ranks agree.
"""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from types import TracebackType
from typing import Any, ClassVar

import torch

from ckptplan.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    SaveFailedError,
    StateError,
    StateMismatchError,
)
from ckptplan.state.agreement import agree_on_contents, agree_on_faults, as_state_error, raise_first
from ckptplan.state.attempt import pack_job
from ckptplan.state.config import ManagerConfig, open_location
from ckptplan.state.coordinator import Coordinator, current_coordinator
from ckptplan.state.decisions import decide, info_of
from ckptplan.state.folder import CheckpointInfo, Folder, best_of, not_found, read_manifest
from ckptplan.state.future import Future
from ckptplan.state.ids import check_id
from ckptplan.state.items import ItemSpec, resolve_specs
from ckptplan.state.loading import Load
from ckptplan.state.lock import FolderLock
from ckptplan.state.memory import no_collection
from ckptplan.state.saving import Job, Saver, as_save_failure
from ckptplan.state.snapshot import Encoded, Snapshots, encode_items
from ckptplan.state.storage import Storage, delete_checkpoint

_log = logging.getLogger(__name__)
_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


@dataclass
class _Place:
    """A location in use: what lies there, its lock, and the checkpoint that this run has gone back to."""

    storage: Storage
    folder: Folder
    lock: FolderLock | None = None
    resumed: CheckpointInfo | None = None


class CheckpointManager:
    """Saves training state in the background and brings it back exactly.

        with CheckpointManager("outputs/run/state", keep_last=3) as states:
            states.save("step-100", {"model": model, "optimizer": optimizer, "step": 100})
            restored = states.load("latest", into={"model": model, "optimizer": optimizer, "step": 0})

    One thread at a time may use it. In a forked child it refuses to work.
    """

    Config: ClassVar[type[ManagerConfig]] = ManagerConfig

    def __init__(self, location: str | os.PathLike[str] | ManagerConfig | None = None, **settings: Any) -> None:
        """Takes a location and settings by name (see `ManagerConfig`), or one `ManagerConfig`."""
        if isinstance(location, ManagerConfig):
            self.config = replace(location, **settings) if settings else location
        else:
            self.config = ManagerConfig(location=location, **settings)
        self._retention = self.config.retention
        self._storage = self.config.open_storage()
        self._places: dict[str, _Place] = {}
        self._pending: list[Job] = []
        self._cleaning: list[Job] = []
        self._unseen: list[Future] = []  # whose outcome nobody has looked at yet
        self._snapshots = Snapshots()
        self._saver = Saver(self.config.mode)
        self._state = "open"
        if self._storage is None or self._storage.local_path is not None:
            self._saver.start_writer()
        _managers.add(self)
        # A manager that is dropped without `close` lets go of the folder all the same.
        self._finalizer = weakref.finalize(self, _let_go, self._saver, self._places, self.config.timeout_s)
        self._finalizer.atexit = False

    # --- saving ---

    def save(
        self,
        checkpoint_id: str | os.PathLike[str],
        payload: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Future:
        """Takes a snapshot of the payload and returns; the checkpoint is durable when the future is done.

        Args:
            checkpoint_id: a name within the location (a path, without a location).
            payload: values by item name: tensors, plain Python values, dicts and lists of them, and objects with
                `state_dict` and `load_state_dict`.
            metrics: numbers to choose the best by.

        Raises what an earlier save failed with, if nobody has looked at its future; nothing is saved then. What goes
        wrong with this save is raised by its future. TypeError and ValueError for arguments that make no sense.
        """
        self._require_usable()
        place, name = self._place_of(checkpoint_id)
        specs = resolve_specs(payload, self.config.items, self.config.default)
        figures = _check_metrics(metrics)
        coordinator = self._coordinator()
        unseen = self._raise_unseen(coordinator)
        future = Future(name)
        started = time.monotonic()
        problem = self._wait_for_jobs(self.config.max_pending - 1)
        waited = time.monotonic()
        future.note(wait_s=waited - started)
        try:
            with no_collection():
                self._save(coordinator, place, name, payload, specs, figures, future, problem or unseen)
        except Exception as error:
            if not future.done():
                future.fail(as_save_failure(error, name))
        future.note(copy_s=time.monotonic() - waited)
        self._unseen.append(future)
        return future

    def prewarm(self, payload: Mapping[str, Any]) -> None:
        """Takes the memory for snapshots of such a payload and waits for the writer, so that the first save is fast."""
        self._require_usable()
        specs = resolve_specs(payload, self.config.items, self.config.default)
        if self.config.mode != "async" or self._storage is None:
            return
        problem = self._wait_for_jobs(0)
        if problem is not None:
            raise problem
        scopes = {name: "per_rank" if spec.scope == "per_rank" else "global" for name, spec in specs.items()}
        encoded, coordinator = encode_items(payload, specs), self._coordinator()
        holders = [encoded.holders()] * coordinator.world_size  # nobody is asked: it is about the size only
        snapshot = self._snapshots.plan(encoded, specs, scopes, coordinator.rank, coordinator.world_size, holders)
        self._saver.prewarm(self._storage, snapshot)
        self._saver.wait_for_writer(self.config.timeout_s)

    def wait(self) -> None:
        """Waits until no save is pending and what they made needless is deleted.

        Raises what failed, if nobody has looked at its future.
        """
        self._require_usable()
        problem = self._wait_for_jobs(0)
        for job in self._cleaning:
            job.cleaned.wait(self.config.timeout_s)
        self._raise_unseen()
        if problem is not None:
            raise problem

    # --- loading ---

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        map_location: str | torch.device | None = None,
    ) -> dict[str, Any]:
        """Brings a checkpoint back; waits for pending saves first.

        Args:
            checkpoint_id: "latest", "best" or an id.
            into: templates by item name, filled and returned; items that it does not name are skipped. None: what is
                stored, as new values.
            strict: inside an item, missing and unexpected names are errors. False: only what both have is loaded.
            map_location: device of new tensors (default: CPU); a template's device is the template's own.

        Raises StateMismatchError that lists everything that does not fit, or DamagedCheckpointError; nothing has been
        changed then. CheckpointNotFoundError when there is none.
        """
        self._require_usable()
        if into is not None and not isinstance(into, dict):
            raise TypeError(f"into={type(into).__name__}: expected a dict of templates by item name, or None")
        if checkpoint_id == "best" and self._retention.keep_best is None:
            raise ValueError('load("best") needs a manager with keep_best=; or load(states.best(metric, mode))')
        device = torch.device("cpu" if map_location is None else map_location)
        coordinator = self._coordinator()
        unseen = self._raise_unseen(coordinator)
        problem = self._wait_for_jobs(0) or unseen
        place, name = self._choose(coordinator, checkpoint_id, problem)
        with no_collection():
            loaded = self._load(coordinator, place, name, into, strict, device)
        if coordinator.rank == 0:
            place.resumed = next((info for info in place.folder.infos() if info.checkpoint_id == name), None)
        if into is None:
            return loaded
        into.update(loaded)
        return into

    # --- the folder ---

    def list(self) -> list[CheckpointInfo]:
        """All finished checkpoints in the order of saving."""
        return self._own_place().folder.infos()

    def steps(self) -> builtins.list[int]:
        """The numbers at the end of the ids, in the order of saving; ids without one are left out."""
        return [info.step for info in self.list() if info.step is not None]

    def latest(self) -> str | None:
        """Id of the newest checkpoint by sequence; None when there is none."""
        infos = self.list()
        return infos[-1].checkpoint_id if infos else None

    def best(self, metric: str | None = None, mode: str | None = None) -> str | None:
        """Id of the best checkpoint, by `keep_best` unless told otherwise; None when none has the metric."""
        if metric is None or mode is None:
            if self._retention.keep_best is None:
                raise ValueError("best() needs a metric and a mode, or a manager with keep_best=")
            metric, mode, _ = self._retention.keep_best
        if mode not in ("min", "max"):
            raise ValueError(f'mode={mode!r}: expected "min" or "max"')
        found = best_of([info for info in self.list() if not info.damage], metric, mode)
        return found[0].checkpoint_id if found else None

    def verify(self, checkpoint_id: str | os.PathLike[str]) -> builtins.list[str]:
        """Everything that is wrong with a checkpoint, one sentence each; reads all of it. Empty: it is whole."""
        self._require_usable()
        place, name = self._place_of(checkpoint_id)
        return place.folder.faults(name)

    def delete(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint; with several ranks call it on one. Raises CheckpointNotFoundError."""
        self._require_usable()
        place, name = self._place_of(checkpoint_id)
        problem = self._wait_for_jobs(0)
        if problem is not None:
            raise problem
        if not place.folder.exists(name):
            raise not_found(place.storage, name)
        self._lock(place)
        delete_checkpoint(place.storage, name)

    def next_good(self, checkpoint_id: str) -> str | None:
        """Id of the newest checkpoint older than this one that passes every check; reads all of what it looks at."""
        return self._own_place().folder.next_good(check_id(checkpoint_id))

    def claim(self) -> None:
        """Takes the location for this manager now, and not with its first save.

        Waits for the writer of a run that has ended. Raises FolderInUseError where another manager writes there, and
        OSError where a storage that is far cannot be reached or written to.
        """
        place = self._own_place()
        self._lock(place)
        if place.storage.is_far:
            place.storage.check_access()

    # --- the end ---

    def close(self) -> None:
        """Waits for pending saves (bounded by `timeout_s`), ends the writer, gives up the folder. Twice is fine.

        Raises what failed, if nobody has looked at its future.
        """
        if self._state != "open":
            return
        self._state = "closed"
        problem = self._wait_for_jobs(0)
        self._finalizer.detach()
        _let_go(self._saver, self._places, 1.0 if problem is not None else self.config.timeout_s)
        if problem is not None:
            raise problem
        self._raise_unseen()

    def abandon(self) -> None:
        """Ends without waiting: what was handed to the writer wholly it still finishes, by itself; the rest goes."""
        if self._state != "open":
            return
        self._state = "closed"
        self._finalizer.detach()
        self._saver.let_go()
        _release(self._places)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # The exception of training is the one to be seen.
            _log.error("while leaving after %s: %s", type(error).__name__, failure)

    @property
    def writer_pid(self) -> int | None:
        """Of the process that writes; None in mode "sync", and where a thread of this process writes."""
        return self._saver.writer_pid

    # --- inside ---

    def _require_usable(self) -> None:
        if self._state == "forked":
            raise StateError("this manager belongs to the process that was forked; make one in this process")
        if self._state == "closed":
            raise StateError("this manager is closed; make a new CheckpointManager of the same location")

    def _coordinator(self) -> Coordinator:
        return self.config.coordinator or current_coordinator(self.config.timeout_s)

    def _own_place(self) -> _Place:
        self._require_usable()
        if self._storage is None:
            raise StateError("a manager without a location cannot tell which checkpoints there are; give location=")
        return self._place_at("", self._storage)

    def _place_of(self, checkpoint_id: str | os.PathLike[str]) -> tuple[_Place, str]:
        if self._storage is not None:
            return self._own_place(), check_id(checkpoint_id)
        folder, _, name = os.fspath(checkpoint_id).rpartition("/")
        check_id(name)
        return self._place_at(folder, None), name

    def _place_at(self, key: str, storage: Storage | None) -> _Place:
        if key not in self._places:
            opened = storage if storage is not None else open_location(key or ".")
            self._places[key] = _Place(opened, Folder(opened))
        return self._places[key]

    def _lock(self, place: _Place) -> int | None:
        """Takes the folder's lock, once; names what earlier runs have left. None where there is nothing to lock."""
        location = place.storage.local_path
        if location is None:
            return None
        if place.lock is None:
            place.lock = FolderLock.take(location, self.config.timeout_s)
            left = place.folder.left_overs()
            if left:
                _log.warning(
                    "left by interrupted saves, ignored, deleted after the next good save: %s", ", ".join(left)
                )
        return place.lock.descriptor

    def _raise_unseen(self, coordinator: Coordinator | None = None) -> StateError | None:
        """Raises the failure that nobody has looked at; among several ranks returns it, for all to agree on."""
        self._unseen = [future for future in self._unseen if not future.is_reported]
        for future in self._unseen:
            if future.done() and (error := future.exception()) is not None:
                if coordinator is not None and coordinator.world_size > 1:
                    return SaveFailedError(f"an earlier save failed: {error}")
                raise error
        self._unseen = [future for future in self._unseen if not future.done()]
        return None

    def _wait_for_jobs(self, allowed: int) -> SaveFailedError | None:
        """Waits until at most so many saves are pending; what stands in the way, if they take too long."""
        deadline = time.monotonic() + self.config.timeout_s
        self._cleaning = [job for job in self._cleaning if not job.cleaned.is_set()]
        self._cleaning += [job for job in self._pending if job.done.is_set()]
        self._pending = [job for job in self._pending if not job.done.is_set()]
        while len(self._pending) > allowed:
            job = self._pending[0]
            if not job.done.wait(max(0.0, deadline - time.monotonic())):
                name = job.info.checkpoint_id
                return SaveFailedError(f"saving {name!r} has not ended after {self.config.timeout_s} s")
            self._cleaning.append(self._pending.pop(0))
        return None

    def _save(
        self,
        coordinator: Coordinator,
        place: _Place,
        name: str,
        payload: Mapping[str, Any],
        specs: Mapping[str, ItemSpec],
        metrics: Mapping[str, float],
        future: Future,
        problem: StateError | None,
    ) -> None:
        error: Exception | None = problem
        encoded, decision, lock = Encoded({}, []), None, None
        try:
            if error is None:
                encoded = encode_items(payload, specs)
                if coordinator.rank == 0:
                    lock = self._lock(place)
                    decision = decide(
                        name,
                        place.folder,
                        resumed=place.resumed,
                        pending=[job for job in self._pending if job.storage is place.storage],
                        retention=self._retention,
                        metrics=metrics,
                        world_size=coordinator.world_size,
                    )
        except Exception as caught:
            error = as_save_failure(caught, name)
        agreed = agree_on_contents(coordinator, specs, encoded, error)
        decision = coordinator.all_gather(decision)[0]
        snapshot = self._snapshots.plan(
            encoded, specs, agreed.scopes, coordinator.rank, coordinator.world_size, agreed.holders
        )
        info = info_of(decision["head"], metrics, snapshot)
        location = str(place.storage.local_path or "")
        job = Job(
            place.storage, future, info, decision["attempt"], self.config.timeout_s, lambda: _has_saved(place, info)
        )
        block = pack_job(
            {
                **decision,
                "location": location,
                "rank": coordinator.rank,
                "world_size": coordinator.world_size,
                "chunk_bytes": snapshot.chunk_bytes,
                "timeout_s": self.config.timeout_s,
            },
            snapshot.files,
            snapshot.tensors,
            snapshot.items,
        )
        self._pending.append(job)
        try:
            self._saver.run(job, snapshot, block, lock)
        except BaseException:
            self._pending.remove(job)
            raise

    def _choose(
        self, coordinator: Coordinator, checkpoint_id: str | os.PathLike[str], problem: StateError | None
    ) -> tuple[_Place, str]:
        """The checkpoint that rank 0 finds under this name; on every rank the same, or the same error."""
        error = problem
        name = ""
        place = self._own_place() if checkpoint_id in ("latest", "best") else self._place_of(checkpoint_id)[0]
        try:
            if error is None and checkpoint_id not in ("latest", "best"):
                name = self._place_of(checkpoint_id)[1]
            elif error is None and coordinator.rank == 0:  # others may still see an older state of a network folder
                name = place.folder.latest().checkpoint_id if checkpoint_id == "latest" else self.best() or ""
                if not name:
                    raise CheckpointNotFoundError("no checkpoint has the metric that the best is chosen by")
        except (StateError, OSError) as caught:
            error = as_state_error(caught)
        raise_first(coordinator, error)
        return place, coordinator.all_gather(name)[0]

    def _load(
        self,
        coordinator: Coordinator,
        place: _Place,
        name: str,
        into: dict[str, Any] | None,
        strict: bool,
        device: torch.device,
    ) -> dict[str, Any]:
        """Plan and manifest are gone on return: the collection of garbage that comes due would look through them."""
        load = self._plan_load(coordinator, place, name, into, strict, device)
        own_damage = load.check()
        own_faults = [] if own_damage else load.redistribute()
        damage, faults = agree_on_faults(coordinator, own_damage, own_faults)
        if damage:
            next_good = place.folder.next_good(name) if coordinator.rank == 0 else None
            raise _damaged(name, damage, coordinator.all_gather(next_good)[0])
        if faults:
            raise StateMismatchError(f"checkpoint {name!r} does not fit; nothing has been changed", faults)
        for note in load.notes if coordinator.rank == 0 else ():
            _log.warning("%s", note)
        return load.finish()

    def _plan_load(
        self,
        coordinator: Coordinator,
        place: _Place,
        name: str,
        into: dict[str, Any] | None,
        strict: bool,
        device: torch.device,
    ) -> Load:
        error: StateError | None = None
        load = None
        try:
            manifest = read_manifest(place.storage, name)
            load = Load(
                place.storage,
                name,
                manifest,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                strict=strict,
                device=device,
            )
            templates = dict.fromkeys(manifest.item_names()) if into is None else into
            for item, template in templates.items():
                spec = self.config.items.get(item) or self.config.default
                load.want(item, template, spec.resharder if spec is not None else None)
            load.compare_memory()
            if load.faults:
                message = f"checkpoint {name!r} does not fit; nothing has been changed"
                error = StateMismatchError(message, load.faults)
        except DamagedCheckpointError as caught:
            next_good = place.folder.next_good(name)
            error = _damaged(name, list(caught.faults), next_good)
        except (StateError, OSError) as caught:
            error = as_state_error(caught)
        raise_first(coordinator, error)
        assert load is not None
        return load

    def _leave_at_exit(self) -> None:
        try:
            self.close()
        except Exception as error:
            _log.error("at exit: %s", error)

    def _leave_in_child(self) -> None:
        """The parent goes on; its socket and its lock must not live on in a child."""
        if self._state != "open":
            return
        self._state = "forked"
        self._finalizer.detach()
        self._saver.leave()
        _release(self._places)


def _let_go(saver: Saver, places: dict[str, _Place], timeout_s: float) -> None:
    """The writer finishes what it has been handed and ends; then the folders are free."""
    saver.close(timeout_s)
    _release(places)


def _release(places: dict[str, _Place]) -> None:
    for place in places.values():
        if place.lock is not None:
            place.lock.release()
            place.lock = None


def _has_saved(place: _Place, info: CheckpointInfo) -> None:
    place.resumed = None  # everything newer has been moved aside
    if info.world_size == 1:  # else only the manifest knows all files
        with suppress(OSError):  # then its manifest is read when it is asked for
            place.folder.learn(info)


def _check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    for key, value in (metrics or {}).items():
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"metrics[{key!r}]={value!r:.80}: expected a name and a number, such as float(loss)")
    return {key: float(value) for key, value in (metrics or {}).items()}


def _damaged(name: str, faults: list[str], next_good: str | None) -> DamagedCheckpointError:
    advice = f"the next older good one is {next_good!r}: load that" if next_good else "no older good one was found"
    message = f"checkpoint {name!r} is damaged; nothing has been changed; {advice}"
    return DamagedCheckpointError(message, faults, checkpoint_id=name, next_good=next_good)


def _at_exit() -> None:
    for manager in builtins.list(_managers):
        manager._leave_at_exit()


def _after_fork() -> None:
    for manager in builtins.list(_managers):
        manager._leave_in_child()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
