"""How faults of a configuration are told: the key, the value, the nearest right one, what is allowed, what to type."""

from __future__ import annotations

import difflib
import enum
import shlex
import types
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from ckptplan.config import RunConfig
from ckptplan.errors import ConfigError


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that ``word`` was probably meant to be, or None."""
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def hydra_text(text: str) -> str:
    """``text`` quoted for Hydra's grammar: it arrives as this very text, whatever characters it holds."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text.replace("${", "\\${"), quote=Quote.double).with_quotes()


def shell_override(key: str, text: str) -> str:
    """``key=text`` as typed in bash or zsh: double quotes for Hydra inside single quotes for the shell."""
    return shlex.quote(f"{key}={hydra_text(text)}")


NOT_GIVEN = object()


def config_error(
    key: str,
    value: object,
    problem: str,
    *,
    meant: str | None = None,
    allowed: Iterable[str] = (),
    remedy: str | None = None,
) -> ConfigError:
    """One message with key, value, what is wrong, the nearest right one, what is allowed and what to type."""
    allowed = tuple(allowed)
    shown = "" if value is NOT_GIVEN else "=null" if value is None else f"={value}"
    lines = [f"{key}{shown}: {problem}"]
    lines += [f"  did you mean: {meant}"] if meant else []
    lines += [f"  allowed: {', '.join(allowed)}"] if allowed else []
    lines += [f"  type: {remedy}"] if remedy else []
    return ConfigError("\n".join(lines))


def check_choice(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ``ConfigError`` with the nearest of ``allowed`` unless ``value`` is one of them."""
    allowed = tuple(allowed)
    if value not in allowed:
        meant = nearest(value, allowed)
        remedy = f"{key}={meant or allowed[0]}"
        raise config_error(key, value, "there is no such choice", meant=meant, allowed=allowed, remedy=remedy)


_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}


def expected_words(key: str) -> str | None:
    """What the schema wants at a dotted key, in words; None where the key is no single value of the schema."""
    hint: Any = RunConfig
    for part in key.split("."):
        if not is_dataclass(hint):
            return None
        hint = typing.get_type_hints(hint).get(part)
    if key in ("budget_bytes", "device_budget_bytes"):
        return 'a size such as "6GiB" or a whole number of bytes'
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(hint.__members__)
    if typing.get_origin(hint) is list:
        return "a list such as [first, second]"
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(_TYPE_WORDS[member] for member in members if member in _TYPE_WORDS) or None
