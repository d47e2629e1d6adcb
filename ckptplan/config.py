"""The typed run description: schema, conversion from Hydra's config, every check that needs no model. Torch-free.

Checks come cheapest first: Hydra composes against the schema below (keys and types), ``load_config`` checks ranges
and what belongs together; ``targets.py`` then compares the open nodes with what they name. Every fault of the user
ends as a ``ConfigError`` that gives the key, the value, the nearest right one, what is allowed and what to type.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ckptplan.devices import DEVICES
from ckptplan.errors import ConfigError
from ckptplan.units import parse_bytes

# Config name -> name in plan_checkpoints. "text" and "file" read a plan instead of making one.
PLANNER_NAMES = {
    "none": "no_checkpoint",
    "all": "checkpoint_all",
    "uniform": "uniform",
    "greedy": "greedy",
    "dp": "dynamic_programming",
    "optimal": "optimal",
    "ilp": "ilp",
    "compile": "compile_budget",
}
PLAN_SOURCES = ("text", "file")

# Config key -> target_kind of plan_checkpoints; `budget=auto` stands beside them.
BUDGET_KINDS = {
    "budget_frac": "activation_budget_fraction",
    "budget_bytes": "activation_budget_bytes",
    "device_budget_bytes": "device_budget_bytes",
    "saving_frac": "activation_saving_fraction",
    "max_slowdown": "max_slowdown",
}
BUDGET_KEYS = (*BUDGET_KINDS, "budget")
DEFAULT_BUDGET_FRAC = 0.5

# Keys that do not change what a run computes: they stay out of the config hash.
UNHASHED_KEYS = tuple(
    "hydra logger resume state name output_dir sweep log_every data_workers report push_dashboard "
    "watch_peak_every".split()
)
UNHASHED_PROFILE_KEYS = ("cache", "options")

ENGINES = ("single", "ddp", "fsdp2")

# Groups that leave no key of their own in the composed config.
WHOLE_RUN_GROUPS = ("experiment", "debug")


class DType(str, enum.Enum):
    """Number format of the training step; ``*_mixed`` is autocast over float32 weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    bf16_mixed = "bf16_mixed"
    fp16_mixed = "fp16_mixed"

    def __str__(self) -> str:
        return self.value


PLANNERS_FOR_ANY_SIZE = ("dp", "dynamic_programming", "optimal", "ilp", "greedy", "uniform")  # that batch=auto can ask


@dataclass(frozen=True)
class BlocksConfig:
    """``paths`` is "auto", or a list of module paths and globs such as ``[layers.*]``."""

    paths: Any = "auto"


@dataclass(frozen=True)
class RuntimeConfig:
    """``device``: auto, cpu, cuda, cuda:N, or one of the table of devices, which is planned for without being there.

    ``threads``: CPU threads, None leaves torch's own choice. For a device that is not there: ``calibration``, a file of
    ``python -m ckptplan.calibrate`` that replaces the data sheet, and ``shards``, processes over which FSDP shards.
    """

    device: str = "auto"
    dtype: DType = DType.float32
    deterministic: bool = True
    threads: int | None = None
    calibration: str | None = None
    shards: int = 1


@dataclass(frozen=True)
class PlannerConfig:
    """``text`` and ``path`` belong to the planners of those names (text, file); ``options`` go to the planner."""

    name: str = "dp"
    text: str | None = None
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerConfig:
    """``kind``: constant, cosine or linear. ``final_factor``: last learning rate as a share of the highest.

    ``warmup_steps``: optimizer steps; None: a tenth of ``steps``.
    """

    kind: str = "cosine"
    warmup_steps: int | None = None
    final_factor: float = 0.1


@dataclass(frozen=True)
class LoggerConfig:
    """``kind``: none, csv, tensorboard, trackio or wandb.

    ``mode`` (W&B): offline, auto (online where a key is found), online, disabled.
    """

    kind: str = "wandb"
    project: str = "ckptplan"
    mode: str = "offline"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ProfileConfig:
    """Untimed and timed runs of each kind of block.

    ``cache``: folder of profiles that runs share; None: every run measures. ``options``: measure options inside blocks
    whatever the planner; None: for planners that choose them.
    """

    num_warmup: int = 2
    num_trials: int = 5
    cache: str | None = None
    options: bool | None = None


@dataclass(frozen=True)
class ProofConfig:
    """``latency_trials``: timed pairs of a planned and an unplanned step, interleaved (0: none)."""

    latency_trials: int = 5
    latency_warmup: int = 1
    check_gradients: bool = True


@dataclass(frozen=True)
class StateConfig:
    """Saving the training state.

    Attributes:
        mode: "async" (in the background), "sync", "off", or "auto": async in a single run, off in the jobs of a sweep.
        every: optimizer steps between saves; None: only when the run ends. It always saves then.
        keep_last: how many of the newest stay; None: all.
        keep_best: so many of the best stay too, by ``best_metric``, the least or the greatest (``best_mode``).
        location: where they lie, a folder or a URL (s3://bucket/run); None: ``state/`` in the run's folder.
        cache: folder for copies of what is read from a URL.
    """

    mode: str = "auto"
    every: int | None = None
    keep_last: int | None = 2
    keep_best: int | None = None
    best_metric: str = "eval/loss"
    best_mode: str = "min"
    location: str | None = None
    cache: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How many processes train one model. ``kind``: single, ddp or fsdp2.

    ``nproc``: processes to start on this machine; None: one for each CUDA device. Where torchrun or srun has started
    the ranks it stays None. ``tp``: ranks that share each matrix product; only 1.
    """

    kind: str = "single"
    nproc: int | None = None
    tp: int = 1


@dataclass(frozen=True)
class SweepConfig:
    """How the jobs of a multirun are run.

    ``fail_fast``: start no more jobs after one that failed. ``timeout_s``: seconds a job may take, None for no limit.
    ``parallel``: jobs at once. ``devices``: CUDA devices for jobs to take in turn, one job on each.
    ``resume``: true, or a sweep's folder: run only what is missing or failed there.
    """

    fail_fast: bool = False
    timeout_s: float | None = None
    parallel: int = 1
    devices: list[int] = field(default_factory=list)
    resume: Any = False


@dataclass(frozen=True)
class Budget:
    """The one budget of a run: ``key`` as in the config ("budget_frac", ..., "auto"), sizes in bytes."""

    key: str
    value: int | float | None

    @property
    def target_kind(self) -> str:
        """The ``target_kind`` of ``plan_checkpoints`` ("auto" stays "auto")."""
        return BUDGET_KINDS.get(self.key, self.key)


@dataclass(frozen=True)
class RunConfig:
    """One run. ``data``, ``model`` and ``optimizer`` are open: ``_target_`` and the arguments of what it names.

    Attributes:
        steps: optimizer steps, of ``accumulate`` micro-batches each.
        batch: "fixed": micro-batches of ``data.batch_size``; "auto": the fastest that fits, "largest": the largest;
            a step has ``data.batch_size`` times ``accumulate`` samples with all three.
        clip_norm: largest norm of the gradient, None for no clipping.
        oom_retries: how many tighter plans a step may try after running out of memory; 0: the run ends at once.
        eval_every, log_every: in optimizer steps; ``eval_every`` None evaluates at the end only.
        data_workers: processes that read batches ahead, 0: none.
        watch_peak_every: training steps of which one is measured, 0: none; None: each on CUDA, one of 100 on a CPU.
        shape_scan_s: seconds for which batches are read to find the largest, 0: the first is taken.
        margin_frac: share of the budget that is not planned for; None: 0 on a CPU, 0.01 on CUDA.
        report: write report.html at the end.
        cost: what the planner minimises, "time" (measured) or "flops" (exact counts).
        resume: a run folder, a state in one, the name of a run, "latest" or "auto"; None begins a new run.
    """

    name: str | None = None
    seed: int = 0
    output_dir: str = "outputs"
    steps: int = 60
    accumulate: int = 1
    batch: str = "fixed"
    clip_norm: float | None = 1.0
    oom_retries: int = 5
    eval_every: int | None = None
    log_every: int = 10
    data_workers: int = 0
    shape_scan_s: float = 10.0
    watch_peak_every: int | None = None
    budget: str | None = None
    budget_frac: float | None = None
    budget_bytes: int | float | str | None = None
    device_budget_bytes: int | float | str | None = None
    saving_frac: float | None = None
    max_slowdown: float | None = None
    margin_frac: float | None = None
    cost: str = "time"
    plan_only: bool = False
    report: bool = True
    resume: str | None = None
    push_dashboard: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    state: StateConfig = field(default_factory=StateConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def target(self) -> Budget:
        """The budget of the run."""
        if self.budget is not None:
            return Budget("auto", None)
        for key in BUDGET_KINDS:
            value = getattr(self, key)
            if value is not None:
                return Budget(key, parse_bytes(value, key) if key.endswith("_bytes") else value)
        return Budget("budget_frac", DEFAULT_BUDGET_FRAC)


# --- messages -------------------------------------------------------------------------------------------------------


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


def _example(key: str) -> object:
    """A good value for a key of the schema."""
    if key in _RANGES:
        return _RANGES[key][2]
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


# --- from Hydra's config to RunConfig --------------------------------------------------------------------------------


def schema() -> DictConfig:
    """``RunConfig`` as a config node that overrides can still change (OmegaConf locks frozen dataclasses)."""
    node: DictConfig = OmegaConf.structured(RunConfig)
    _unlock(node)
    return node


def _unlock(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _unlock(child)


def register_schema() -> None:
    """Make the schema known to Hydra as ``run_schema``, the first entry of the defaults list."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="run_schema", node=schema(), provider="ckptplan")


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
    _check_budget(loaded)
    _check_ranges(loaded)
    _check_choices(loaded)
    _check_nodes(loaded)
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


def _check_budget(config: RunConfig) -> None:
    given = {key: getattr(config, key) for key in BUDGET_KEYS if getattr(config, key) is not None}
    if len(given) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in given.items())
        keep = next(iter(given))
        unset = " ".join(f"{key}=null" for key in list(given)[1:])
        raise ConfigError(
            f"{shown}: two budgets; a run has exactly one\n  allowed: one of {', '.join(BUDGET_KEYS)}\n"
            f"  type: {keep}={given[keep]} {unset}"
        )
    if config.budget is not None:
        check_choice("budget", config.budget, ("auto",))
    for key in ("budget_bytes", "device_budget_bytes"):
        value = getattr(config, key)
        if value is not None:
            _check_size(key, value)


def _check_size(key: str, value: object) -> None:
    try:
        fits = value != "" and parse_bytes(value, key) > 0  # type: ignore[arg-type]
    except (ValueError, TypeError):
        fits = False
    if not fits:
        problem = "empty" if value == "" else "not a size above 0"
        raise config_error(key, value, f"{problem}; expected {expected_words(key)}", remedy=f"{key}=6GiB")


_MOST_THREADS = 4 * (os.cpu_count() or 1)  # more only get into each other's way, until the system refuses them

# Dotted key -> (fits, what is expected in words, an example). None always fits: it switches the thing off.
_RANGES: dict[str, tuple[Callable[[Any], bool], str, object]] = {
    "budget_frac": (lambda f: 0 < f <= 1, "0 < f <= 1, a share of the peak without checkpointing", 0.5),
    "saving_frac": (lambda f: 0 < f < 1, "0 < f < 1, the share of the peak without checkpointing to save", 0.5),
    "margin_frac": (lambda f: 0 <= f < 1, "0 <= f < 1, a share of the budget, or null", 0.05),
    "max_slowdown": (lambda ratio: ratio >= 1, "a ratio of 1 or more", 1.2),
    "seed": (lambda n: 0 <= n < 2**32, "0 to 2**32 - 1", 0),
    "steps": (lambda n: n >= 1, "1 or more", 60),
    "accumulate": (lambda n: n >= 1, "1 or more", 1),
    "oom_retries": (lambda n: n >= 0, "0 or more", 5),
    "log_every": (lambda n: n >= 1, "1 or more", 10),
    "data_workers": (lambda n: 0 <= n <= _MOST_THREADS, f"0 to {_MOST_THREADS}", 2),
    "watch_peak_every": (lambda n: n >= 0, "0 or more, or null", 100),
    "shape_scan_s": (lambda s: 0 <= s < float("inf"), "seconds, 0 or more", 10),
    "eval_every": (lambda n: n >= 1, "1 or more, or null", 20),
    "clip_norm": (lambda norm: norm > 0, "a norm above 0, or null for no clipping", 1.0),
    "runtime.threads": (
        lambda n: 1 <= n <= _MOST_THREADS,
        f"1 to {_MOST_THREADS} (4 for each of the machine's cores), or null",
        os.cpu_count() or 1,
    ),
    "runtime.shards": (lambda n: n >= 1, "1 or more", 8),
    "scheduler.warmup_steps": (lambda n: n >= 0, "0 or more, or null", 10),
    "scheduler.final_factor": (lambda factor: 0 <= factor <= 1, "0 to 1, a share of the highest rate", 0.1),
    "profile.num_warmup": (lambda n: n >= 0, "0 or more", 2),
    "profile.num_trials": (lambda n: n >= 1, "1 or more", 5),
    "proof.latency_trials": (lambda n: n >= 0, "0 or more", 5),
    "proof.latency_warmup": (lambda n: n >= 0, "0 or more", 1),
    "engine.nproc": (lambda n: n >= 1, "1 or more, or null", 2),
    "sweep.parallel": (lambda n: n >= 1, "1 or more", 1),
    "state.every": (lambda n: n >= 1, "1 or more, or null", 100),
    "state.keep_last": (lambda n: n >= 1, "1 or more, or null for all", 2),
    "state.keep_best": (lambda n: n >= 1, "1 or more, or null", 1),
    "sweep.timeout_s": (lambda seconds: seconds > 0, "seconds above 0, or null for no limit", 600),
}


def _check_ranges(config: RunConfig) -> None:
    for key, (fits, expected, example) in _RANGES.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not (math.isfinite(value) and fits(value)):
            raise config_error(key, value, f"out of range; expected {expected}", remedy=f"{key}={example}")
    warmup = config.scheduler.warmup_steps
    if warmup is not None and warmup > config.steps:
        remedy = f"scheduler.warmup_steps={config.steps // 10}"
        raise config_error("scheduler.warmup_steps", warmup, f"more than steps={config.steps}", remedy=remedy)


def _check_choices(config: RunConfig) -> None:
    if not config.output_dir.strip():
        raise config_error("output_dir", config.output_dir, "empty; expected a folder", remedy="output_dir=outputs")
    _check_device(config)
    check_choice("cost", config.cost, ("time", "flops"))
    _check_batch(config)
    check_choice("scheduler.kind", config.scheduler.kind, ("constant", "cosine", "linear"))
    check_choice("logger.kind", config.logger.kind, ("none", "csv", "tensorboard", "trackio", "wandb"))
    _check_engine(config)
    _check_sweep(config.sweep)
    check_choice("logger.mode", config.logger.mode, ("offline", "auto", "online", "disabled"))
    check_choice("state.mode", config.state.mode, ("auto", "async", "sync", "off"))
    check_choice("state.best_metric", config.state.best_metric, ("eval/loss", "train/loss"))
    check_choice("state.best_mode", config.state.best_mode, ("min", "max"))
    if re.search(r"://[^/]*:[^/]*@", config.state.location or ""):  # it would stand in config.yaml and in every log
        problem = "a URL with a password in it"
        raise config_error("state.location", NOT_GIVEN, problem, remedy="the URL alone; credentials in the environment")
    if config.resume == "":
        raise config_error("resume", "", "empty; expected a run folder, a name, latest or auto", remedy="resume=latest")
    planner = config.planner
    check_choice("planner.name", planner.name, (*PLANNER_NAMES, *PLAN_SOURCES))
    if planner.name == "ilp" and importlib.util.find_spec("scipy") is None:
        problem = "planner=ilp needs scipy, which is not installed; dp and optimal need none"
        raise config_error("planner", "ilp", problem, remedy="pip install -e '.[solvers]'")
    if planner.name == "compile" and config.cost == "flops":
        problem = "planner=compile goes by measured time: nobody counts the FLOPs of compiled code"
        raise config_error("cost", "flops", problem, remedy="planner=compile cost=time")
    if planner.name == "compile" and config.max_slowdown is not None:
        problem = "planner=compile counts time beside its own fastest step, not beside the eager one"
        raise config_error("max_slowdown", config.max_slowdown, problem, remedy="planner=compile budget_frac=0.5")
    for name, key, value, example in (
        ("text", "planner.text", planner.text, shell_override("planner.text", "K0 R(1)")),
        ("file", "planner.path", planner.path, "planner.path=plan.json"),
    ):
        if planner.name == name and not value:
            raise config_error(key, value, f"planner={name} needs it", remedy=f"planner={name} {example}")
        if planner.name != name and value:
            raise config_error(key, value, f"only planner={name} reads it", remedy=f"planner={name} {example}")


def _check_batch(config: RunConfig) -> None:
    check_choice("batch", config.batch, ("fixed", "auto", "largest"))
    if config.batch == "fixed":
        return
    if config.runtime.device in DEVICES:
        problem = "the largest batch of a device that is not there is told with budget=auto; none is chosen"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed budget=auto")
    if config.engine.kind != "single":
        problem = "the micro-batch is chosen for one process"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed, or engine=single")
    if config.planner.name not in PLANNERS_FOR_ANY_SIZE:
        problem = f"planner={config.planner.name} does not plan for a budget at each size"
        raise config_error("batch", config.batch, problem, remedy="planner=dp, or batch=fixed")
    if not isinstance(config.data.get("batch_size"), int):
        problem = "the data has no data.batch_size, samples in a step, of which micro-batches are parts"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed")


def _check_engine(config: RunConfig) -> None:
    engine, batch_size = config.engine, config.data.get("batch_size")
    check_choice("engine.kind", engine.kind, ENGINES)
    if engine.tp != 1:
        problem = "runs have no tensor parallel meshes; a loop of your own can: docs/distributed.md"
        raise config_error("engine.tp", engine.tp, problem, remedy="engine=fsdp2 engine.tp=1")
    if engine.kind == "single":
        if engine.nproc not in (None, 1):
            problem = "engine=single is one process"
            raise config_error("engine.nproc", engine.nproc, problem, remedy=f"engine=ddp engine.nproc={engine.nproc}")
        return
    if engine.nproc is not None and isinstance(batch_size, int):
        check_batch_divides(batch_size, engine.nproc)
    if engine.kind == "fsdp2" and str(config.runtime.dtype) == "fp16_mixed":
        problem = "engine=fsdp2 has no loss scaling over shards"
        raise config_error("runtime.dtype", "fp16_mixed", problem, remedy="runtime.dtype=bf16_mixed, or engine=ddp")
    if not re.fullmatch(r"auto|cpu|cuda", config.runtime.device):
        problem = "each rank takes the device of its number"
        raise config_error("runtime.device", config.runtime.device, problem, remedy="runtime.device=cuda")


def check_batch_divides(batch_size: int, num_ranks: int) -> None:
    """Raise ``ConfigError`` unless every rank gets as many samples of a batch."""
    if batch_size % num_ranks:
        fits = max(1, round(batch_size / num_ranks)) * num_ranks
        problem = f"it is the size over all ranks, and {num_ranks} ranks do not share it evenly"
        raise config_error("data.batch_size", batch_size, problem, remedy=f"data.batch_size={fits}")


def _check_device(config: RunConfig) -> None:
    runtime = config.runtime
    if runtime.device in DEVICES:
        if not config.plan_only:
            problem = "this device is planned for by its data sheet; nothing can be trained on it here"
            remedy = f"runtime={runtime.device} plan_only=true, or runtime=cuda where there is one"
            raise config_error("runtime.device", runtime.device, problem, remedy=remedy)
        if config.planner.name == "compile":
            problem = "what a compiled block takes is only known by compiling it on the device"
            raise config_error("planner", "compile", problem, remedy="planner=optimal")
        return
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", runtime.device):
        check_choice("runtime.device", runtime.device, ("auto", "cpu", "cuda", *DEVICES))
    for key, given in (("calibration", runtime.calibration), ("shards", runtime.shards > 1)):
        if given:
            problem = f"only for a device that is not there ({', '.join(DEVICES)}); here the blocks are measured"
            raise config_error(f"runtime.{key}", getattr(runtime, key), problem, remedy="runtime=h100 plan_only=true")


def _check_sweep(sweep: SweepConfig) -> None:
    if not (sweep.resume is None or (isinstance(sweep.resume, (bool, str)) and sweep.resume != "")):
        problem = "expected true, false or the folder of a sweep"
        raise config_error("sweep.resume", sweep.resume, problem, remedy="sweep.resume=true")
    if len(set(sweep.devices)) < len(sweep.devices) or any(number < 0 for number in sweep.devices):
        problem = "expected numbers of CUDA devices, each once"
        raise config_error("sweep.devices", sweep.devices, problem, remedy="'sweep.devices=[0,1]'")
    if sweep.devices and sweep.parallel not in (1, len(sweep.devices)):
        problem = f"{len(sweep.devices)} devices run {len(sweep.devices)} jobs at once"
        raise config_error("sweep.parallel", sweep.parallel, problem, remedy="leave sweep.parallel out")


def _check_nodes(config: RunConfig) -> None:
    paths = config.blocks.paths
    good = paths == "auto" or (isinstance(paths, list) and paths and all(isinstance(p, str) and p for p in paths))
    if not good:
        problem = "expected auto or a list of module paths and globs"
        raise config_error("blocks.paths", paths, problem, remedy="'blocks.paths=[layers.*]'")
    for key in ("data", "model", "optimizer"):
        target = getattr(config, key).get("_target_")
        if not isinstance(target, str) or not target:
            raise config_error(f"{key}._target_", target, "expected the dotted name of a class or function")
