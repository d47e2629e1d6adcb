"""What OmegaConf finds wrong, in this package's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ckptplan.config import WHOLE_RUN_GROUPS, schema
from ckptplan.config.checks import RANGES
from ckptplan.config.wording import NOT_GIVEN, config_error, expected_words, nearest
from ckptplan.errors import ConfigError


def _example(key: str) -> object:
    """A good value for a key of the schema."""
    if key in RANGES:
        return RANGES[key][2]
    default = OmegaConf.select(schema(), key)
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else default


def _dotted_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        child = node._get_node(key)
        yield f"{prefix}{key}"
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _dotted_keys(child, f"{prefix}{key}.")


def unknown_key(config: DictConfig, key: str, value: object = NOT_GIVEN) -> ConfigError:
    """The error for a key that ``config`` does not have: the nearest sibling, else the same name elsewhere."""
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    own_keys = [name for name in _dotted_keys(config) if name.partition(".")[0] != "hydra"]
    if not isinstance(node, DictConfig):
        meant = nearest(key, own_keys)
        remedy = f"{meant}={value}" if meant else None
        return config_error(key, value, f"there is no key {parent}", meant=meant, remedy=remedy)
    prefix = f"{parent}." if parent else ""
    siblings = [f"{prefix}{name}" for name in map(str, node) if name != "hydra"]
    siblings += WHOLE_RUN_GROUPS if not parent else ()
    elsewhere = [name for name in own_keys if name.endswith(f".{last}")]
    close = nearest(last, [name.removeprefix(prefix) for name in siblings])
    meant = elsewhere[0] if elsewhere and not parent else close and f"{prefix}{close}"
    typed = "..." if value is NOT_GIVEN else value
    remedies = [f"{meant}={typed}"] if meant else []
    if "_target_" in node:
        remedies.append(f"+{key}={typed} if {node['_target_']} takes it")
    remedy = ", or ".join(remedies)
    return config_error(key, value, "there is no such key", meant=meant, allowed=siblings, remedy=remedy)


def explain_omegaconf(
    error: OmegaConfBaseException, config: DictConfig | None = None, typed: Mapping[str, str] | None = None
) -> ConfigError:
    """Our message for an error of OmegaConf.

    ``config`` is where the nearest key is looked for; ``typed`` holds the values of the command line as typed.
    """
    key = error.full_key or str(error.key or "")
    key = next((longer for longer in typed or () if longer.startswith(f"{key}.")), key)
    value: object = (typed or {}).get(key, NOT_GIVEN if error.value is None else error.value)
    if isinstance(error, MissingMandatoryValue):
        return config_error(key, NOT_GIVEN, "a value has to be given", remedy=f"{key}=...")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and config is not None:
        return unknown_key(config, key, value)
    if isinstance(error, InterpolationKeyError):
        return _broken_reference(error, key, config)
    expected = expected_words(key)
    if isinstance(error, ValidationError) and expected:
        problem = f"{'empty' if value == '' else 'not valid'}; expected {expected}"
        return config_error(key, value, problem, remedy=f"{key}={_example(key)}")
    first_line = str(error).strip().partition("\n")[0]
    return ConfigError(f"{key}: {first_line}" if key else first_line)


def _broken_reference(error: InterpolationKeyError, key: str, config: DictConfig | None) -> ConfigError:
    """A value that is taken from another key, which this run does not have: mostly a model and data that do not fit."""
    wanted = re.search(r"'([^']+)'", str(error))
    source = wanted[1] if wanted else "another key"
    problem = f"it is taken from {source}, which this run does not have"
    targets = {name: config and OmegaConf.select(config, f"{name}._target_") for name in ("model", "data")}
    if source.startswith("data.") and all(targets.values()):
        problem += f"; the data {targets['data']} does not fit the model {targets['model']}"
        return config_error(key, NOT_GIVEN, problem, remedy=f"data=<one that has {source[5:]}>, or {key}=<a value>")
    return config_error(key, NOT_GIVEN, problem, remedy=f"{key}=<a value>")
