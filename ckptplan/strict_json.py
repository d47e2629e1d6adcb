"""JSON, read strictly into frozen dataclasses: an error says where something is not of its form. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from ckptplan.console import naming
from ckptplan.errors import CkptplanError, UnsupportedPlanVersionError

_D = TypeVar("_D")


def canonical_json(data: Any) -> str:
    """The one text of ``data``: sorted keys, no NaN. Floats keep every digit."""
    return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """A JSON object without NaN, infinities and repeated keys; raises ``ValueError`` naming ``source``."""

    def no_constant(name: str) -> Any:
        raise ValueError(f"{source}: holds {name}, which is no number")

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{source}: key {next(n for n in names if names.count(n) > 1)!r} stands twice")
        return result

    try:
        data = json.loads(text, parse_constant=no_constant, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{source}: holds a {type(data).__name__}; expected an object")
    return data


def require_schema(data: dict[str, Any], expected: str, source: str) -> None:
    """Takes the key ``schema`` off ``data``; raises ``UnsupportedPlanVersionError`` unless it is ``expected``."""
    found = data.pop("schema", None)
    if found != expected:
        raise UnsupportedPlanVersionError(
            f"{source}: schema is {found!r}; this version reads {expected!r}; "
            "make it again with this version, or install the one that wrote it"
        )


def decode_dataclass(cls: type[_D], data: Any, where: str) -> _D:
    """An instance of dataclass ``cls`` from its JSON form: exactly its fields, each of its declared type.

    Raises ``ValueError`` naming the place for an unknown or missing key and for a value of another type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: is {data!r}; expected an object")
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # only dataclasses come here
    unknown, missing = sorted(data.keys() - fields), sorted(fields - data.keys())
    if unknown or missing:
        parts = [f"{what} {', '.join(keys)}" for what, keys in (("unknown", unknown), ("missing", missing)) if keys]
        raise ValueError(f"{where}: keys {'; '.join(parts)}")
    values = {name: decode_value(hints[name], data[name], f"{where}: {name}") for name in fields}
    try:
        return cls(**values)
    except (CkptplanError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def decode_value(hint: Any, value: Any, where: str) -> Any:
    """``value`` from JSON as the annotated type ``hint``; raises ``ValueError`` naming the place."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        hint = type(value) if type(value) in options else options[0]
        return decode_value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r}; expected a list")
        return tuple(decode_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}; expected one of {', '.join(map(repr, arguments))}")
        return value
    if dataclasses.is_dataclass(hint):
        return decode_dataclass(typing.cast(type, hint), value, where)
    if hint is Any:
        return value
    expected = dict if origin is dict else hint
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} is {value!r}, a {type(value).__name__}; expected {expected.__name__}")
    return value


def write_text_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes beside ``path`` and renames, so that a reader never sees half a file."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with naming(target):
            beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
