"""How several ranks come to the same answer: all save or none, all load or none."""

from __future__ import annotations

from collections.abc import Mapping

from ckptplan.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    SaveFailedError,
    StateError,
    StateMismatchError,
    UnsupportedStateVersionError,
)
from ckptplan.state.coordinator import Coordinator
from ckptplan.state.items import ItemSpec
from ckptplan.state.snapshot import Encoded


def agree_on_faults(coordinator: Coordinator, faults: list[str]) -> list[str]:
    """The faults of all ranks; with the rank where there are several."""
    if coordinator.world_size == 1:
        return faults
    gathered = coordinator.all_gather(faults)
    return [f"rank {rank}: {fault}" for rank, found in enumerate(gathered) for fault in found]


def raise_first(coordinator: Coordinator, own: StateError | None) -> None:
    """Raises on every rank if one has an error: its own where it has one, else the like of the first that has."""
    reports = coordinator.all_gather({"kind": type(own).__name__, "text": str(own)} if own is not None else None)
    if own is not None:
        raise own
    for rank, report in enumerate(reports):
        if report is not None:
            raise _KINDS.get(report["kind"], StateError)(f"rank {rank}: {report['text']}")


_KINDS = {
    kind.__name__: kind
    for kind in (CheckpointNotFoundError, DamagedCheckpointError, StateMismatchError, UnsupportedStateVersionError)
}


def as_state_error(error: StateError | OSError) -> StateError:
    return error if isinstance(error, StateError) else StateError(f"the checkpoint cannot be read: {error}")


def agree_on_scopes(
    coordinator: Coordinator, specs: Mapping[str, ItemSpec], encoded: Encoded, error: Exception | None
) -> dict[str, str]:
    """Global or per rank, for each item; raises on all ranks if one cannot save or they hold different things."""
    names = list(specs)
    if coordinator.world_size == 1:
        if error is not None:
            raise error
        return {name: "per_rank" if specs[name].scope == "per_rank" else "global" for name in names}
    automatic = [name for name in names if specs[name].scope == "auto"]
    digests = {} if error is not None else {name: encoded.digest(name) for name in automatic}
    reports = coordinator.all_gather(
        {"error": str(error) if error else "", "kind": type(error).__name__, "names": names, "digests": digests}
    )
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report["error"]:
            raise SaveFailedError(f"rank {rank}: {report['error']}")
        if report["names"] != reports[0]["names"]:
            raise SaveFailedError(f"rank {rank} saves {report['names']}, rank 0 saves {reports[0]['names']}")
    differing = sorted(name for name in automatic if len({report["digests"][name] for report in reports}) > 1)
    if differing:
        raise SaveFailedError(
            f"items that differ between ranks: {', '.join(differing)}; "
            'declare each with ItemSpec(scope="per_rank") or ItemSpec(scope="global")'
        )
    return {name: "per_rank" if specs[name].scope == "per_rank" else "global" for name in names}
