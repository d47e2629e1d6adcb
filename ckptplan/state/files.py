"""Where each span lies: in which file, at which offset. The files are in the safetensors format.

One item makes one file, or several when it is big. The header of a file is padded with spaces so that the data start at
a multiple of 4096; wider dtypes come first, so that every tensor is aligned without holes (the format allows none).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ckptplan.state.spans import Span
from ckptplan.units import MIB

PAGE_BYTES = 4096
CHUNK_BYTES = MIB  # of one checksum, counted from the start of a span
_LEAST_SPLIT_BYTES = 64 * MIB
_MOST_FILES = 16  # about; per rank


@dataclass(frozen=True)
class FilePlan:
    """One file to be: its header, and the spans in it with their offsets in bytes from the start of the file."""

    name: str
    item: str
    header: bytes
    spans: tuple[int, ...]
    offsets: tuple[int, ...]
    size_bytes: int


def plan_files(spans: list[Span], rank: int, splits: Mapping[str, int | None] = MappingProxyType({})) -> list[FilePlan]:
    """The files for these spans, item by item; `splits`: size in bytes beyond which an item begins another file."""
    total = sum(span.size_bytes for span in spans)
    usual = max(_LEAST_SPLIT_BYTES, total // _MOST_FILES)
    by_item: dict[str, list[int]] = {}
    for index, span in enumerate(spans):
        by_item.setdefault(span.item, []).append(index)
    plans = []
    for item, indices in by_item.items():
        parts = list(_split(spans, indices, splits.get(item) or usual))
        for number, part in enumerate(parts):
            suffix = f".{number:03d}" if len(parts) > 1 else ""
            plans.append(_plan_file(f"{item}.{rank}{suffix}.safetensors", item, spans, part))
    return plans


def _split(spans: list[Span], indices: list[int], split_bytes: int) -> Iterable[list[int]]:
    part: list[int] = []
    part_bytes = 0
    for index in indices:
        if part and part_bytes + spans[index].size_bytes > split_bytes:
            yield part
            part, part_bytes = [], 0
        part.append(index)
        part_bytes += spans[index].size_bytes
    if part:
        yield part


def _plan_file(name: str, item: str, spans: list[Span], part: list[int]) -> FilePlan:
    ordered = sorted(part, key=lambda index: -spans[index].item_bytes)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    relative, position = [], 0
    for index in ordered:
        span = spans[index]
        entries[_free_name(span.name, entries)] = {
            "dtype": span.format_dtype,
            "shape": span.format_shape,
            "data_offsets": (position, position + span.size_bytes),
        }
        relative.append(position)
        position += span.size_bytes
    header = _padded(json.dumps(entries, ensure_ascii=True, separators=(",", ":")).encode("ascii"))
    offsets = tuple(len(header) + offset for offset in relative)
    return FilePlan(name, item, header, tuple(ordered), offsets, len(header) + position)


def _free_name(name: str, taken: dict[str, Any]) -> str:
    # Half of a surrogate pair is legal in a Python string and in no file of the format.
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def _padded(entries: bytes) -> bytes:
    size = -(-(8 + len(entries)) // PAGE_BYTES) * PAGE_BYTES
    return (size - 8).to_bytes(8, "little") + entries.ljust(size - 8, b" ")


def entry_names(plan: FilePlan) -> list[str]:
    """The names of the spans within the file, in the order of `plan.spans`."""
    return [name for name in json.loads(plan.header[8:]) if name != "__metadata__"]
