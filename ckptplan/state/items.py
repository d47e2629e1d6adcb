"""How an item is saved, bound once; the values come with each save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptplan.state.ids import ALLOWED, is_name

if TYPE_CHECKING:
    from ckptplan.state.resharder import Resharder

SCOPES = ("auto", "global", "per_rank")


@dataclass(frozen=True)
class Layout:
    """How an item lies on disk.

    Attributes:
        split_bytes: begin another file of the item beyond this size; None: 64 MiB, or a sixteenth of the state if
            that is more.
    """

    split_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"split_bytes={self.split_bytes!r}: expected at least 1, or None")


@dataclass(frozen=True)
class ItemSpec:
    """How one item is saved.

    Attributes:
        required: a save without this item fails (declared items only); a load may leave it out.
        scope: with several ranks, "global" (the same everywhere: rank 0 writes it, all read it) or "per_rank" (each
            writes and reads its own). "auto" is global after comparing names, shapes, plain values and small tensors
            of all ranks; a difference fails the save and asks for a decision.
        layout: how it lies on disk.
        resharder: for tensors that are sharded in another way than DTensors, and for `per_rank` items that another
            number of ranks loads than saved them.
        requires_copy: the value is copied before ``save`` returns. False: it is copied while training goes on, and must
            not be changed until the save is done (``future.result()``); a change before that can reach the checkpoint.
    """

    required: bool = True
    scope: str = "auto"
    layout: Layout | None = None
    requires_copy: bool = True
    resharder: Resharder | None = None

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope={self.scope!r}: expected one of {', '.join(SCOPES)}")


def resolve_specs(
    names: Iterable[object], declared: Mapping[str, ItemSpec], default: ItemSpec | None
) -> dict[str, ItemSpec]:
    """The spec of each item. Raises TypeError or ValueError for keys that cannot be items, all at once."""
    names = list(names)
    if not names:
        raise ValueError("the payload is empty: there is nothing to save")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"payload key {name!r:.80} is a {type(name).__name__}; expected the name of an item")
    bad = sorted(str(name) for name in names if not is_name(str(name)))
    if bad:
        raise ValueError(f"not names of items: {', '.join(repr(name) for name in bad)}; allowed are {ALLOWED}")
    unknown = sorted(str(name) for name in names if name not in declared)
    if unknown and default is None:
        known = ", ".join(sorted(declared)) or "none"
        raise ValueError(f"items that are not declared: {', '.join(unknown)} (declared: {known}); add them to items=")
    missing = sorted(name for name, spec in declared.items() if spec.required and name not in names)
    if missing:
        raise ValueError(f"required items are missing: {', '.join(missing)}; give them, or declare required=False")
    return {str(name): declared.get(str(name)) or default or ItemSpec() for name in names}
