"""The manifest of a checkpoint: read with suspicion, so that everything after it can rely on it.

It is JSON with one last line, the digest of all bytes before it. `parse_manifest` checks the digest, the form of every
field, that every span lies within its file and no two overlap, and that every tensor lies within its span.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptplan.errors import DamagedCheckpointError, UnsupportedStateVersionError
from ckptplan.state.attempt import checksum, split_digest
from ckptplan.state.ids import is_file_name, is_name
from ckptplan.units import GIB, MIB

FORMAT = "ckptplan-state"
VERSION = 1
MOST_MANIFEST_BYTES = GIB
_DIGITS_PER_CHUNK = 32
_BIG = 2**62

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
# Names of the safetensors format for the dtypes that every reader of it knows; the others are stored as their bytes.
_FORMAT_NAME = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_AS_PAIRS = {"complex128": "F64", "complex32": "F16"}  # a complex number as its two parts
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSUmM])([0-9]{1,9})(\[[0-9]{0,6}[A-Za-z]{1,2}\])?")


@dataclass(frozen=True)
class View:
    """How a tensor looks at its span: dtype, shape, offset in bytes, strides in elements (None: dense, all of it)."""

    dtype: str
    shape: tuple[int, ...]
    span: int
    offset_bytes: int = 0
    stride: tuple[int, ...] | None = None
    is_parameter: bool = False
    requires_grad: bool = False
    shard: tuple[int, tuple[int, ...]] | None = None  # a part of that sharded tensor, which begins at these offsets

    def to_json(self) -> dict[str, Any]:
        """The entry in the manifest; what is usual is left out."""
        entry: dict[str, Any] = {"dtype": self.dtype, "shape": self.shape, "span": self.span}
        if self.stride is not None:
            entry |= {"offset": self.offset_bytes, "stride": self.stride}
        if self.is_parameter or self.requires_grad:
            entry |= {"parameter": self.is_parameter, "requires_grad": self.requires_grad}
        if self.shard is not None:
            entry["shard"] = self.shard
        return entry


@dataclass(frozen=True)
class StoredSpan:
    """Where a span lies, and the checksums of its chunks (16 bytes each)."""

    file: int
    name: str
    offset_bytes: int
    size_bytes: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint; `checksum` is that of its first `header_bytes` bytes."""

    name: str
    item: str
    size_bytes: int
    header_bytes: int
    checksum: str


@dataclass(frozen=True)
class StoredItem:
    """An item: its scope ("global" or "per_rank") and its tree of typed JSON."""

    scope: str
    tree: Any


@dataclass(frozen=True)
class RankPart:
    """What one rank has written."""

    rank: int
    chunk_bytes: int
    files: tuple[StoredFile, ...]
    spans: tuple[StoredSpan, ...]
    tensors: tuple[View, ...]
    items: Mapping[str, StoredItem]


@dataclass(frozen=True)
class Manifest:
    """A finished checkpoint. `sequence` grows with every save of the folder; `time_unix_s` is for people only."""

    checkpoint_id: str
    attempt: str
    sequence: int
    time_unix_s: float
    world_size: int
    resumed_from: str | None
    libraries: Mapping[str, str]
    metrics: Mapping[str, float]
    ranks: tuple[RankPart, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(file.size_bytes for part in self.ranks for file in part.files)

    def item_names(self) -> list[str]:
        """The items, in the order of saving."""
        return list(dict.fromkeys(name for part in self.ranks for name in part.items))


def parse_manifest(content: bytes, checkpoint_id: str) -> Manifest:
    """The manifest in these bytes. Raises DamagedCheckpointError or UnsupportedStateVersionError."""
    document = _document(content, checkpoint_id, pairs_hook=_no_duplicates)
    try:
        return _manifest(document)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _damaged(checkpoint_id, f"manifest.json: {error}") from None


def _document(
    content: bytes, checkpoint_id: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None
) -> dict[str, Any]:
    body, digest = split_digest(content)
    if digest != checksum(body + b"\n"):
        what = "has no digest in its last line: it is cut off" if not digest else "does not match its own digest"
        raise _damaged(checkpoint_id, f"manifest.json {what}")
    try:
        document = json.loads(body, object_pairs_hook=pairs_hook, parse_constant=_no_constant)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"this is not a manifest of the format {FORMAT}")
    except (ValueError, RecursionError) as error:
        raise _damaged(checkpoint_id, f"manifest.json: {error}") from None
    if document.get("version") != VERSION:
        found = document.get("version")
        message = (
            f"checkpoint {checkpoint_id!r} has format version {found!r:.20}; this ckptplan reads version {VERSION}; "
            "load it with the version that saved it"
        )
        raise UnsupportedStateVersionError(message)
    return document


@dataclass(frozen=True)
class Summary:
    """What a listing needs of a manifest; not enough is checked here to read tensors by it."""

    head: Manifest  # without ranks
    files: tuple[StoredFile, ...]
    items: tuple[str, ...]


def parse_summary(content: bytes, checkpoint_id: str) -> Summary:
    """Digest, version, head, files and item names of a manifest. Raises as `parse_manifest` does."""
    document = _document(content, checkpoint_id, pairs_hook=None)
    try:
        ranks = _list(document, "ranks", "manifest")
        head = _head(document)
        files, items = [], []
        for rank, entry in enumerate(ranks):
            where = f"manifest.ranks.{rank}"
            files += [_file(file, f"{where}.files") for file in _list(entry, "files", where)]
            items += list(_field(entry, "items", where, lambda value: isinstance(value, dict), "an object"))
    except (ValueError, OverflowError) as error:
        raise _damaged(checkpoint_id, f"manifest.json: {error}") from None
    return Summary(head, tuple(files), tuple(dict.fromkeys(items)))


def sequence_in_damaged(content: bytes) -> int | None:
    """The sequence number that a manifest which cannot be trusted seems to carry."""
    match = re.search(rb'"sequence":([0-9]{1,18})[,}]', content[:65536])
    return int(match[1]) if match else None


def _damaged(checkpoint_id: str, fault: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {checkpoint_id!r} is damaged", [fault], checkpoint_id=checkpoint_id)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# --- the fields ---


def _require(condition: bool, where: str, expected: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"{where}: expected {expected}, found {found!r:.80}")


def _field(entry: Any, key: str, where: str, check: Callable[[Any], bool], expected: str) -> Any:
    _require(isinstance(entry, dict), where, "an object", entry)
    value = entry.get(key)
    _require(key in entry and check(value), f"{where}.{key}", expected, value)
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _BIG


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _count(entry: Any, key: str, where: str) -> int:
    return int(_field(entry, key, where, _is_count, "a whole number >= 0"))


def _list(entry: Any, key: str, where: str) -> list[Any]:
    return list(_field(entry, key, where, lambda value: isinstance(value, list), "a list"))


def _manifest(document: dict[str, Any]) -> Manifest:
    head = _head(document)
    parts = tuple(_part(entry, rank) for rank, entry in enumerate(document["ranks"]))
    names = [file.name for part in parts for file in part.files]
    _require(len(names) == len(set(names)), "manifest.ranks", "file names that occur once", names)
    return replace(head, ranks=parts)


def _head(document: dict[str, Any]) -> Manifest:
    where = "manifest"
    checkpoint_id = _field(document, "id", where, lambda value: _is_text(value) and is_name(value), "a name")
    ranks, world_size = _list(document, "ranks", where), _count(document, "world_size", where)
    _require(len(ranks) == world_size > 0, "manifest.ranks", f"{world_size} parts", len(ranks))
    time_unix_s = _field(document, "time_unix_s", where, lambda value: type(value) in (int, float), "a number")
    resumed_from = document.get("resumed_from")
    _require(resumed_from is None or _is_text(resumed_from), "manifest.resumed_from", "a name or null", resumed_from)
    metrics = _text_to(document, "metrics", _is_text, "text")
    return Manifest(
        checkpoint_id=checkpoint_id,
        attempt=_field(document, "attempt", where, _is_text, "text"),
        sequence=_count(document, "sequence", where),
        time_unix_s=float(time_unix_s),
        world_size=world_size,
        resumed_from=resumed_from,
        libraries=_text_to(document, "libraries", _is_text, "text"),
        metrics={name: float.fromhex(value) for name, value in metrics.items()},
    )


def _text_to(document: Any, key: str, check: Callable[[Any], bool], expected: str) -> dict[str, Any]:
    entries = _field(document, key, "manifest", lambda value: isinstance(value, dict), "an object")
    for name, value in entries.items():
        _require(check(value), f"manifest.{key}.{name}", expected, value)
    return dict(entries)


def _part(entry: Any, rank: int) -> RankPart:
    where = f"manifest.ranks.{rank}"
    _require(_count(entry, "rank", where) == rank, f"{where}.rank", str(rank), entry.get("rank"))
    chunk_bytes = _count(entry, "chunk_bytes", where)
    _require(0 < chunk_bytes <= 64 * MIB, f"{where}.chunk_bytes", "1 byte to 64 MiB", chunk_bytes)
    files = tuple(_file(file, f"{where}.files.{index}") for index, file in enumerate(_list(entry, "files", where)))
    entries = enumerate(_list(entry, "spans", where))
    spans = tuple(_span(span, f"{where}.spans", index, files, chunk_bytes) for index, span in entries)
    _require_full_cover(files, spans, where)
    entries = enumerate(_list(entry, "tensors", where))
    tensors = tuple(_view(view, f"{where}.tensors", index, spans) for index, view in entries)
    items = _field(entry, "items", where, lambda value: isinstance(value, dict), "an object")
    return RankPart(rank, chunk_bytes, files, spans, tensors, {name: _item(name, item) for name, item in items.items()})


def _file(entry: Any, where: str) -> StoredFile:
    name = _field(entry, "name", where, is_file_name, "the name of a file in the checkpoint")
    item = _field(entry, "item", where, lambda value: _is_text(value) and is_name(value), "the name of an item")
    size_bytes, header_bytes = _count(entry, "size", where), _count(entry, "header", where)
    _require(8 <= header_bytes <= size_bytes, f"{where}.header", "8 bytes to the size of the file", header_bytes)
    digest = _field(entry, "checksum", where, _is_hex, "hexadecimal digits")
    return StoredFile(name, item, size_bytes, header_bytes, digest)


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]*", value) is not None


def _span(entry: Any, where: str, index: int, files: tuple[StoredFile, ...], chunk_bytes: int) -> StoredSpan:
    # There may be many: the sentence of a fault is made only when there is one.
    file, name, offset_bytes, size_bytes, chunks = _fields(
        entry, where, index, "file", "name", "offset", "size", "chunks"
    )
    if not (_is_count(file) and _is_count(offset_bytes) and _is_count(size_bytes) and file < len(files)):
        _require(False, f"{where}.{index}", "numbers of a file and of bytes", (file, offset_bytes, size_bytes))
    if not files[file].header_bytes <= offset_bytes <= files[file].size_bytes - size_bytes:
        _require(False, f"{where}.{index}", f"a place within {files[file].name}", (offset_bytes, size_bytes))
    count = -(-size_bytes // chunk_bytes)
    if not (isinstance(name, str) and _is_hex(chunks) and len(chunks) == count * _DIGITS_PER_CHUNK):
        _require(False, f"{where}.{index}", f"a name and {count} checksums", (name, chunks))
    digests = bytes.fromhex(chunks)
    parts = (digests,) if count == 1 else tuple(digests[16 * part : 16 * part + 16] for part in range(count))
    return StoredSpan(file, name, offset_bytes, size_bytes, parts)


def _fields(entry: Any, where: str, index: int, *keys: str) -> list[Any]:
    try:
        return [entry[key] for key in keys]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{where}.{index}: expected an object with {', '.join(keys)}, found {entry!r:.80}") from None


def _require_full_cover(files: tuple[StoredFile, ...], spans: tuple[StoredSpan, ...], where: str) -> None:
    """Every byte of every file is in its header or in exactly one span, so every byte has a checksum."""
    ends = [file.header_bytes for file in files]
    for span in sorted(spans, key=lambda span: (span.file, span.offset_bytes, span.size_bytes)):
        if span.offset_bytes != ends[span.file]:
            _require(False, where, f"spans that follow each other (at {span.name!r:.60})", span.offset_bytes)
        ends[span.file] += span.size_bytes
    for file, end in zip(files, ends, strict=True):
        _require(end == file.size_bytes, where, f"spans that fill {file.name}", (end, file.size_bytes))


def _view(entry: Any, where: str, index: int, spans: tuple[StoredSpan, ...]) -> View:
    dtype, shape, span = _fields(entry, where, index, "dtype", "shape", "span")
    item_bytes = _dtype_bytes_or_0(dtype)
    if item_bytes == 0 or not _is_count(span) or span >= len(spans) or not _are_counts(shape):
        _require(False, f"{where}.{index}", "a dtype of this format, a shape and a span", (dtype, shape, span))
    needed = prod(shape) * item_bytes
    size_bytes = spans[span].size_bytes
    if len(entry) == 3:
        if needed != size_bytes:
            _require(False, f"{where}.{index}", f"a span of {needed} bytes", size_bytes)
        return View(dtype, tuple(shape), span)
    flags = [entry.get(key, False) for key in ("parameter", "requires_grad")]
    if not all(isinstance(flag, bool) for flag in flags):
        _require(False, f"{where}.{index}", "flags", flags)
    shard = _shard(entry["shard"], f"{where}.{index}.shard", len(shape)) if "shard" in entry else None
    if "stride" not in entry:
        if needed != size_bytes:
            _require(False, f"{where}.{index}", f"a span of {needed} bytes", size_bytes)
        return View(dtype, tuple(shape), span, 0, None, flags[0], flags[1], shard)
    offset_bytes, stride = _fields(entry, where, index, "offset", "stride")
    if not _are_counts(stride) or len(stride) != len(shape) or not _is_count(offset_bytes) or offset_bytes % item_bytes:
        _require(False, f"{where}.{index}", f"{len(shape)} strides and an even offset", (stride, offset_bytes))
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and offset_bytes + (1 + last) * item_bytes > size_bytes:
        _require(False, f"{where}.{index}", f"a tensor within its span of {size_bytes} bytes", (offset_bytes, stride))
    return View(dtype, tuple(shape), span, offset_bytes, tuple(stride), flags[0], flags[1], shard)


def _shard(value: Any, where: str, dims: int) -> tuple[int, tuple[int, ...]]:
    is_pair = isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _are_counts(value[1])
    if not is_pair or len(value[1]) != dims:
        _require(False, where, f"a number and {dims} offsets", value)
    return value[0], tuple(value[1])


def _dtype_bytes_or_0(dtype: Any) -> int:
    return dtype_bytes(dtype) if isinstance(dtype, str) else 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(map(_is_count, value))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a torch dtype by name, or of a NumPy dtype such as "<f4"; 0 for neither."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    match = _NUMPY_DTYPE.fullmatch(dtype)
    if match is None:
        return 0
    return int(match[2]) * (4 if match[1] == "U" else 1)


def format_of(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype name and shape of a tensor in the safetensors format."""
    if dtype in _AS_PAIRS:
        return _AS_PAIRS[dtype], (*shape, 2)
    if dtype in _FORMAT_NAME:
        return _FORMAT_NAME[dtype], shape
    item_bytes = dtype_bytes(dtype)
    return "U8", shape if item_bytes == 1 else (*shape, item_bytes)


def _item(name: str, entry: Any) -> StoredItem:
    where = f"manifest.items.{name:.80}"
    _require(is_name(name), where, "the name of an item", name)
    scope = _field(entry, "scope", where, lambda value: value in ("global", "per_rank"), "global or per_rank")
    _require("tree" in entry, f"{where}.tree", "a tree", None)
    return StoredItem(scope, entry["tree"])
