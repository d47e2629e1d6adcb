"""Training state: saved in the background, committed whole, brought back exactly.

    from ckptplan.state import CheckpointManager

    with CheckpointManager("outputs/run/state", keep_last=3, keep_best=("loss", "min")) as states:
        pending = states.save("step-100", {"model": model, "optimizer": optimizer, "step": 100}, metrics={"loss": 2.1})
        ...                                   # training goes on; tensors may be changed at once
        pending.result()                      # only where the bytes must be durable
        restored = states.load("latest", into={"model": model, "optimizer": optimizer, "step": 0})

The public names load on first use, so that the command line needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptplan.state.config import ManagerConfig
    from ckptplan.state.coordinator import Coordinator
    from ckptplan.state.folder import CheckpointInfo
    from ckptplan.state.future import Future, Progress
    from ckptplan.state.items import ItemSpec, Layout
    from ckptplan.state.manager import CheckpointManager
    from ckptplan.state.named import OptimizerByName
    from ckptplan.state.progress import DataProgress, DataProgressResharder
    from ckptplan.state.resharder import DefaultResharder, Piece, Resharder, Sharded
    from ckptplan.state.storage import LocalStorage, Storage, StorageConfig

_MODULE_OF_NAME = {
    "CheckpointManager": "manager",
    "ManagerConfig": "config",
    "ItemSpec": "items",
    "Layout": "items",
    "OptimizerByName": "named",
    "Resharder": "resharder",
    "DefaultResharder": "resharder",
    "Sharded": "resharder",
    "Piece": "resharder",
    "DataProgress": "progress",
    "DataProgressResharder": "progress",
    "Future": "future",
    "Progress": "future",
    "CheckpointInfo": "folder",
    "Coordinator": "coordinator",
    "Storage": "storage",
    "StorageConfig": "storage",
    "LocalStorage": "storage",
}

__all__ = [  # noqa: RUF022 - in the order of use
    "CheckpointManager",
    "ManagerConfig",
    "ItemSpec",
    "Layout",
    "OptimizerByName",
    "Resharder",
    "DefaultResharder",
    "Sharded",
    "Piece",
    "DataProgress",
    "DataProgressResharder",
    "Future",
    "Progress",
    "CheckpointInfo",
    "Coordinator",
    "Storage",
    "StorageConfig",
    "LocalStorage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'ckptplan.state' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"ckptplan.state.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
