"""How several ranks come to the same answer: all save or none, all load or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def agree_on_faults(coordinator: Coordinator, *lists: list[str]) -> list[list[str]]:
    """The faults of all ranks, list by list; with the rank where there are several."""
    if coordinator.world_size == 1:
        return list(lists)
    gathered = coordinator.all_gather(lists)
    return [
        [f"rank {rank}: {fault}" for rank, found in enumerate(gathered) for fault in found[number]]
        for number in range(len(lists))
    ]


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


@dataclass(frozen=True)
class Agreed:
    """What all ranks save: "global" or "per_rank" by item, and by rank the sets of ranks that hold sharded tensors."""

    scopes: dict[str, str]
    holders: list[list[tuple[int, ...]]]


def agree_on_contents(
    coordinator: Coordinator, specs: Mapping[str, ItemSpec], encoded: Encoded, error: Exception | None
) -> Agreed:
    """What is saved, and by whom; raises on all ranks if one cannot save or they hold different things."""
    names = list(specs)
    scopes = {name: "per_rank" if specs[name].scope == "per_rank" else "global" for name in names}
    if coordinator.world_size == 1:
        if error is not None:
            raise error
        return Agreed(scopes, [encoded.holders()])
    automatic = [name for name in names if specs[name].scope == "auto"]
    digests = {} if error is not None else {name: encoded.digest(name) for name in automatic}
    report: dict[str, Any] = {"error": str(error) if error else "", "names": names, "digests": digests}
    report |= {"sharded": encoded.digests_of_sharded(), "holders": [_packed(ranks) for ranks in encoded.holders()]}
    reports = coordinator.all_gather(report)
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
    sharded = sorted({item for report in reports for item in report["sharded"]})
    differing = [item for item in sharded if len({report["sharded"].get(item) for report in reports}) > 1]
    if differing:
        raise SaveFailedError(
            "items whose sharded tensors differ between ranks in name, shape, dtype or placement: "
            + ", ".join(differing)
        )
    holders = [[_unpacked(ranks) for ranks in report["holders"]] for report in reports]
    _require_apart(holders)
    return Agreed(scopes, holders)


def _packed(ranks: tuple[int, ...]) -> list[int]:
    """Ranks as runs of neighbours (start, length, ...): the mesh of a thousand ranks is two numbers."""
    runs: list[int] = []
    for rank in ranks:
        if runs and runs[-2] + runs[-1] == rank:
            runs[-1] += 1
        else:
            runs += [rank, 1]
    return runs


def _unpacked(runs: list[int]) -> tuple[int, ...]:
    return tuple(
        rank for start, length in zip(runs[::2], runs[1::2], strict=True) for rank in range(start, start + length)
    )


def _require_apart(holders: list[list[tuple[int, ...]]]) -> None:
    """Sets of ranks that hold one tensor each, once more, must be equal or have no rank in common."""
    for groups in {tuple(sorted(set(groups))) for groups in zip(*holders, strict=True)}:
        ranks = [rank for group in groups for rank in group]
        if len(ranks) != len(set(ranks)):
            raise SaveFailedError(f"a tensor is sharded over meshes that overlap: {', '.join(map(str, groups))}")
