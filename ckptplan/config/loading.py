"""From Hydra's config to the typed run description, and what names a configuration."""

from __future__ import annotations

import hashlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    OmegaConfBaseException,
)

from ckptplan.config import (
    BUDGET_KEYS,
    DEFAULT_BUDGET_FRAC,
    UNHASHED_KEYS,
    UNHASHED_PROFILE_KEYS,
    BlocksConfig,
    RunConfig,
    schema,
)
from ckptplan.config.checks import check_budget, check_choices, check_nodes, check_ranges
from ckptplan.config.explaining import explain_omegaconf


def resolve(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The run's config as plain data: no interpolations, no ``hydra``, enums as text, the default budget filled in.

    Raises ``ConfigError`` for a missing mandatory value, an interpolation that leads nowhere, an unknown key or a
    value of the wrong type.
    """
    try:
        resolved = OmegaConf.to_container(_typed(config), resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        known = config if isinstance(error, InterpolationKeyError) and isinstance(config, DictConfig) else schema()
        raise explain_omegaconf(error, known) from error
    assert isinstance(resolved, dict)
    if all(resolved[key] is None for key in BUDGET_KEYS):
        resolved["budget_frac"] = DEFAULT_BUDGET_FRAC
    return typing.cast("dict[str, Any]", resolved)


def _typed(config: DictConfig | Mapping[str, Any]) -> DictConfig:
    """``config`` without ``hydra`` over the schema. A plain mapping is taken as resolved: its text is literal."""
    given = config if isinstance(config, DictConfig) else OmegaConf.create(_literal(dict(config)))
    merged = OmegaConf.merge(schema(), OmegaConf.masked_copy(given, [key for key in map(str, given) if key != "hydra"]))
    assert isinstance(merged, DictConfig)
    return merged


def _literal(value: Any) -> Any:
    """``value`` with ``${`` escaped in every text, so that OmegaConf reads none of it as an interpolation."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literal(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def load_config(config: DictConfig | Mapping[str, Any]) -> RunConfig:
    """The typed run description, ranges and combinations checked; raises ``ConfigError``."""
    loaded = OmegaConf.to_object(_typed(resolve(config)))
    assert isinstance(loaded, RunConfig)
    paths = loaded.blocks.paths
    if isinstance(paths, str) and paths != "auto":
        loaded = replace(loaded, blocks=BlocksConfig(paths=[paths]))
    check_budget(loaded)
    check_ranges(loaded)
    check_choices(loaded)
    check_nodes(loaded)
    return loaded


def config_yaml(resolved: Mapping[str, Any]) -> str:
    """The resolved config as YAML that reads back to the same values, text with ``${`` in it included."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(dict(resolved))))


def config_hash(resolved: Mapping[str, Any]) -> str:
    """64 hex digits over what a run computes: the resolved config without ``UNHASHED_KEYS``."""
    hashed = {key: value for key, value in resolved.items() if key not in UNHASHED_KEYS}
    if isinstance(hashed.get("profile"), Mapping):
        hashed["profile"] = {k: v for k, v in hashed["profile"].items() if k not in UNHASHED_PROFILE_KEYS}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def job_folder_name(index: int, config: RunConfig, resolved: Mapping[str, Any]) -> str:
    """``003_dp_0.5_1f3a9c2e``: number, planner, budget, hash; only characters that no shell wants quoted."""
    target = config.target
    value = "" if target.value is None else f"{target.value:g}" if isinstance(target.value, float) else target.value
    short = {"budget_frac": "", "budget_bytes": "", "device_budget_bytes": "device", "saving_frac": "save"}
    budget = f"{short.get(target.key, target.key)}{value}"
    parts = (f"{index:03d}", config.planner.name, budget, config_hash(resolved)[:8])
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part) for part in parts)
