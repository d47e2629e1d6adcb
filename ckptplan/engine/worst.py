"""One profile from those of all ranks: the largest bytes and the slowest times that any measured. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from ckptplan.costs import CompiledOption, SelectiveOption
from ckptplan.errors import CkptplanError
from ckptplan.profiles import ChainProfile

T = TypeVar("T")


def worst_profile(profiles: Sequence[ChainProfile]) -> ChainProfile:
    """The profile that no rank exceeds; texts, flags of what a block is and notes are those of rank 0.

    Ways to keep part of a block are those that every rank found, matched by name.

    Raises ``CkptplanError`` where ranks measured other blocks.
    """
    for rank, profile in enumerate(profiles):
        if (profile.fingerprint, profile.block_ids) != (profiles[0].fingerprint, profiles[0].block_ids):
            raise CkptplanError(
                f"rank {rank} has another model than rank 0 (fingerprint {profile.fingerprint[:12]} beside "
                f"{profiles[0].fingerprint[:12]}): every rank has to build the same one; look for code that asks for "
                "the rank, the host or an unseeded random number"
            )
    return profiles[0] if len(profiles) == 1 else _worst(list(profiles))


def _worst(values: list[T]) -> T:
    first: Any = values[0]
    if _is_record(first) and all(type(value) is type(first) for value in values):
        changed = {
            field.name: _worst([getattr(value, field.name) for value in values])
            for field in dataclasses.fields(first)
            if field.name not in ("order", "environment")
        }
        return dataclasses.replace(first, **changed)
    if isinstance(first, tuple):
        return _worst_of_tuples(values)  # type: ignore[arg-type, return-value]  # tuples by now
    if isinstance(first, bool):
        return any(values)  # type: ignore[return-value]  # flags by now
    if isinstance(first, (int, float)) and all(isinstance(value, (int, float)) for value in values):
        return max(values)  # type: ignore[type-var]  # numbers by now
    return first


def _worst_of_tuples(values: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    if any(isinstance(entry, (SelectiveOption, CompiledOption)) for value in values for entry in value):
        named = [{_name_of(entry): entry for entry in value} for value in values]
        return tuple(_worst([by[name] for by in named]) for name in named[0] if all(name in by for by in named))
    if len({len(value) for value in values}) > 1:
        return values[0]
    return tuple(_worst(list(entries)) for entries in zip(*values, strict=True))


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _name_of(option: SelectiveOption | CompiledOption) -> Any:
    if isinstance(option, CompiledOption):
        return option.budget
    return option.saved_ops, option.sequence_hash
