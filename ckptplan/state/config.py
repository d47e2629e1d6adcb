"""What a manager is made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ckptplan.state.coordinator import Coordinator
from ckptplan.state.folder import Retention
from ckptplan.state.items import ItemSpec
from ckptplan.state.storage import LocalStorage, Storage, StorageConfig


@dataclass(frozen=True)
class ManagerConfig:
    """Everything that a manager is made from.

    Attributes:
        location: folder or URL of the checkpoints; None: each id is a path of its own.
        items, default: how items are saved; `default=None` refuses items that are not declared.
        mode: "async" or "sync".
        keep_last: how many of the newest stay.
        keep_best: (metric, "min" or "max", how many: 1); the best stay.
        keep_every: those whose step (the number at the end of the id) is a multiple of this stay. What any of the three
            wants stays; with none of them everything does. The newest always stays.
        storage: instead of `location`, for options of a file system, or a storage of one's own.
        timeout_s: the longest that a save, a wait for one, or a close may take.
        max_pending: saves that may be unfinished at once; each takes memory of the size of the state.
        coordinator: how ranks agree; None: torch.distributed once it is initialised.
    """

    location: str | os.PathLike[str] | None = None
    items: Mapping[str, ItemSpec] = field(default_factory=dict)
    default: ItemSpec | None = field(default_factory=ItemSpec)
    mode: str = "async"
    keep_last: int | None = None
    keep_best: tuple[str, str] | tuple[str, str, int] | None = None
    keep_every: int | None = None
    storage: StorageConfig | Storage | None = None
    timeout_s: float = 600.0
    max_pending: int = 1
    coordinator: Coordinator | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("async", "sync"):
            raise ValueError(f'mode={self.mode!r}: expected "async" or "sync"')
        for name in self.items if isinstance(self.items, Mapping) else [self.items]:
            if not isinstance(name, str) or not isinstance(self.items[name], ItemSpec):
                raise TypeError(f"items={self.items!r:.80}: expected names with ItemSpec(...) each")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, Real) or not 0 < self.timeout_s < 10**6:
            raise ValueError(f"timeout_s={self.timeout_s!r}: expected seconds above 0 and below a million")
        if type(self.max_pending) is not int or not 1 <= self.max_pending <= 8:
            raise ValueError(f"max_pending={self.max_pending!r}: expected 1 to 8")
        if self.location is not None and self.storage is not None:
            raise ValueError("give location= or storage=, not both")
        if self.retention != Retention() and self.location is None and self.storage is None:
            raise ValueError("keep_last, keep_best and keep_every need a location")

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return Retention.make(self.keep_last, self.keep_best, self.keep_every)

    def open_storage(self) -> Storage | None:
        """The live storage; None where each id is a path of its own."""
        if isinstance(self.storage, Storage):
            return self.storage
        if self.storage is not None:
            return self.storage.open(self.timeout_s)
        return None if self.location is None else open_location(self.location, self.timeout_s)

    @classmethod
    def with_async_save(cls, **settings: Any) -> ManagerConfig:
        """A config whose saves go on in the background."""
        return cls(mode="async", **settings)

    @classmethod
    def with_sync_save(cls, **settings: Any) -> ManagerConfig:
        """A config whose saves are finished when they return."""
        return cls(mode="sync", **settings)


def open_location(location: str | os.PathLike[str], timeout_s: float = 600.0) -> Storage:
    """The storage of a folder or URL."""
    if isinstance(location, str):
        return StorageConfig(location).open(timeout_s)
    return LocalStorage(location)
