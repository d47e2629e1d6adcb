"""What lies at a location: the finished checkpoints, their order, and which of them may go."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptplan.errors import CheckpointNotFoundError, DamagedCheckpointError, StateError
from ckptplan.state import reading
from ckptplan.state.ids import MANIFEST, is_name, step_of
from ckptplan.state.manifest import MOST_MANIFEST_BYTES, Manifest, parse_manifest, parse_summary, sequence_in_damaged
from ckptplan.state.parallel import run_all
from ckptplan.state.storage import Storage
from ckptplan.state.stored import sharding_faults


@dataclass(frozen=True)
class CheckpointInfo:
    """A finished checkpoint as it is listed.

    Attributes:
        sequence: place in the order of saving; None where the manifest is too damaged to tell.
        step: the number at the end of the id, None without one.
        size_bytes: of its tensor files.
        damage: why it cannot be used, as far as the manifest and the sizes of the files tell; "" for none.
    """

    checkpoint_id: str
    sequence: int | None
    step: int | None
    time_unix_s: float
    size_bytes: int
    world_size: int
    items: tuple[str, ...]
    metrics: dict[str, float]
    damage: str = ""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay; the union of all that is set, everything if nothing is.

    Attributes:
        keep_last: the newest so many.
        keep_best: (metric, "min" or "max", how many).
        keep_every: those whose step is a multiple of this.
    """

    keep_last: int | None = None
    keep_best: tuple[str, str, int] | None = None
    keep_every: int | None = None

    @classmethod
    def make(
        cls,
        keep_last: int | None,
        keep_best: tuple[str, str] | tuple[str, str, int] | None,
        keep_every: int | None,
    ) -> Retention:
        """Checks the settings as they come from the user."""
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1, or None")
        if keep_best is not None:
            metric, mode, *rest = keep_best
            count = rest[0] if rest else 1
            if not isinstance(metric, str) or mode not in ("min", "max") or not isinstance(count, int) or count < 1:
                raise ValueError(f'keep_best={keep_best!r}: expected (metric, "min" or "max") and perhaps how many')
            return cls(keep_last, (metric, mode, count), keep_every)
        return cls(keep_last, None, keep_every)

    def needless(self, infos: Sequence[CheckpointInfo]) -> list[str]:
        """Ids that may go, of checkpoints in the order of saving; the newest never goes."""
        if self.keep_last is None and self.keep_best is None and self.keep_every is None:
            return []
        keep = {infos[-1].checkpoint_id} if infos else set()
        if self.keep_last is not None:
            keep |= {info.checkpoint_id for info in infos[-self.keep_last :]}
        if self.keep_best is not None:
            keep |= {info.checkpoint_id for info in best_of(infos, *self.keep_best)}
        if self.keep_every is not None:
            keep |= {info.checkpoint_id for info in infos if info.step is not None and info.step % self.keep_every == 0}
        return [info.checkpoint_id for info in infos if info.checkpoint_id not in keep]


def best_of(infos: Sequence[CheckpointInfo], metric: str, mode: str, count: int = 1) -> list[CheckpointInfo]:
    """The best first; of equal ones the newer. Those without the metric, or with NaN, are never the best."""
    known = [info for info in infos if not math.isnan(info.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return sorted(known, key=lambda info: (sign * info.metrics[metric], -(info.sequence or 0)))[:count]


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of the checkpoint in this folder (its id, or "superseded/<id>")."""
    checkpoint_id = folder.rpartition("/")[2]
    content = _manifest_bytes(storage, folder)
    manifest = parse_manifest(content, checkpoint_id)
    if not _may_be_called(checkpoint_id, manifest.checkpoint_id):
        fault = f"manifest.json is that of checkpoint {manifest.checkpoint_id!r}"
        raise DamagedCheckpointError(f"checkpoint {checkpoint_id!r} is damaged", [fault], checkpoint_id=checkpoint_id)
    return manifest


def _may_be_called(name: str, checkpoint_id: str) -> bool:
    """Its own id, or what `superseded/` calls it where that was taken."""
    return name == checkpoint_id or re.fullmatch(re.escape(checkpoint_id) + r"\.[0-9]+", name) is not None


def _manifest_bytes(storage: Storage, folder: str) -> bytes:
    path = f"{folder}/{MANIFEST}"
    try:
        size = storage.size_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(storage, folder) from None
    if size > MOST_MANIFEST_BYTES:
        fault = f"manifest.json has {size} bytes; at most {MOST_MANIFEST_BYTES} are read"
        raise DamagedCheckpointError(f"checkpoint {folder!r} is damaged", [fault], checkpoint_id=folder)
    content = bytearray(size)
    try:
        with storage.reader(path) as read_into:
            read_into(0, memoryview(content))
        return bytes(content)
    except OSError as error:  # such as a folder that is a link
        fault = f"manifest.json cannot be read: {error}"
        raise DamagedCheckpointError(f"checkpoint {folder!r} is damaged", [fault], checkpoint_id=folder) from error


def not_found(storage: Storage, checkpoint_id: str) -> CheckpointNotFoundError:
    """The error for an id that names no checkpoint, with the newest of those that are there."""
    there = [info.checkpoint_id for info in Folder(storage).infos()]
    newest = f"; there are: {', '.join(there[-5:])}" if there else "; there is none at this location"
    more = f" and {len(there) - 5} older ones" if len(there) > 5 else ""
    return CheckpointNotFoundError(f"there is no checkpoint {checkpoint_id!r}{newest}{more}")


class Folder:
    """The checkpoints at one location. Manifests do not change, so each is read once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._known: dict[tuple[str, int], CheckpointInfo] = {}

    def infos(self) -> list[CheckpointInfo]:
        """All finished checkpoints in the order of saving; those that are too damaged to be placed stand last."""
        found: list[CheckpointInfo | None] = []
        threads = reading.FAR_THREADS if self.storage.is_far else 1
        run_all(lambda name: found.append(self._info(name)), self._candidates(), threads)
        good = [info for info in found if info is not None]
        return sorted(good, key=lambda info: (info.sequence is None, info.sequence or 0, info.time_unix_s))

    def left_overs(self) -> list[str]:
        """Of attempts that never became checkpoints, and half-deleted ones."""
        return self.storage.left_overs()

    def exists(self, checkpoint_id: str) -> bool:
        """Whether the id is taken, by a good checkpoint or a damaged one."""
        return MANIFEST in self.storage.names(checkpoint_id)

    def latest(self) -> CheckpointInfo:
        """The newest by sequence, damaged or not. Raises CheckpointNotFoundError."""
        infos = self.infos()
        if not infos:
            raise CheckpointNotFoundError("there is no checkpoint yet")
        return infos[-1]

    def next_good(self, before: str) -> str | None:
        """The newest checkpoint older than `before` that passes every check."""
        infos = self.infos()
        names = [info.checkpoint_id for info in infos]
        older = infos[: names.index(before)] if before in names else infos
        for info in reversed(older):
            if not info.damage and not self.faults(info.checkpoint_id):
                return info.checkpoint_id
        return None

    def faults(self, checkpoint_id: str) -> list[str]:
        """Everything that is wrong with a checkpoint; reads all of it. Raises CheckpointNotFoundError."""
        try:
            manifest = read_manifest(self.storage, checkpoint_id)
        except CheckpointNotFoundError:
            raise
        except StateError as error:
            return list(error.faults)
        return [
            *sharding_faults(manifest),
            *reading.check_everything(self.storage.origin, checkpoint_id, manifest.ranks),
        ]

    def _candidates(self) -> Iterator[str]:
        return (name for name in self.storage.names() if is_name(name) and name != "superseded")

    def learn(self, info: CheckpointInfo) -> None:
        """Remembers a checkpoint that has just been saved, so that its manifest need not be read."""
        self._known[info.checkpoint_id, self.storage.size_bytes(f"{info.checkpoint_id}/{MANIFEST}")] = info

    def _info(self, name: str) -> CheckpointInfo | None:
        try:
            key = name, self.storage.size_bytes(f"{name}/{MANIFEST}")
        except OSError:
            return None  # some other folder or file
        if key not in self._known:
            self._known[key] = self._read_info(name)
        return self._known[key]

    def _read_info(self, name: str) -> CheckpointInfo:
        try:
            summary = parse_summary(_manifest_bytes(self.storage, name), name)
            head = summary.head
            if not _may_be_called(name, head.checkpoint_id):
                return self._damaged(name, f"manifest.json is that of checkpoint {head.checkpoint_id!r}")
            faults = reading.check_sizes(self.storage, name, summary.files)
        except (StateError, OSError) as error:
            return self._damaged(name, "; ".join(getattr(error, "faults", (str(error),))))
        return CheckpointInfo(
            checkpoint_id=name,
            sequence=head.sequence,
            step=step_of(name),
            time_unix_s=head.time_unix_s,
            size_bytes=sum(file.size_bytes for file in summary.files),
            world_size=head.world_size,
            items=summary.items,
            metrics=dict(head.metrics),
            damage="; ".join(faults),
        )

    def _damaged(self, name: str, damage: str) -> CheckpointInfo:
        try:
            sequence = sequence_in_damaged(self.storage.read(f"{name}/{MANIFEST}"))
        except OSError:
            sequence = None
        return CheckpointInfo(name, sequence, step_of(name), 0.0, 0, 0, (), {}, damage)
