"""What a config points to: the classes of data, model and optimizer, a plan as text or in a file.

``_target_`` is found, its arguments are checked, and it is built, here and nowhere else. Importing a target may
import torch; this module itself does not.
"""

from __future__ import annotations

import importlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.config import PlannerConfig, RunConfig
from ckptplan.config.wording import config_error, nearest
from ckptplan.errors import CkptplanError, ConfigError, TargetImportError
from ckptplan.nodes import Compiled, CompiledModel, PlanNode, nodes_text, parse_plan_text
from ckptplan.plan import CheckpointPlan

OPEN_NODES = ("data", "model", "optimizer")
_HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def check_targets(config: RunConfig, choices: Mapping[str, str] | None = None) -> None:
    """Read the given plan, compare every open node with the signature of what it names; raises ``ConfigError``.

    Nothing is built. ``choices`` maps groups to the options taken ("model" -> "gpt"); with it a message can name
    the file.
    """
    check_plan_source(config.planner, config.cost)
    for key in OPEN_NODES:
        choice = (choices or {}).get(key)
        check_node(key, getattr(config, key), source=f"{key}/{choice}.yaml" if choice else None)


def check_plan_source(planner: PlannerConfig, cost: str) -> None:
    """A plan given as text or file can be read and costed (whether it fits the model shows later)."""
    nodes: tuple[PlanNode, ...] = ()
    if planner.text:
        try:
            nodes = parse_plan_text(planner.text)
        except ValueError as error:
            raise config_error("planner.text", planner.text, str(error)) from error
    if planner.path:
        path = Path(planner.path)
        if not path.is_file():
            beside = [str(found) for found in path.parent.glob("*.json")] if path.parent.is_dir() else []
            meant = nearest(str(path), beside)
            remedy = f"planner.path={meant}" if meant else None
            problem = f"no such file (relative paths start at {Path.cwd()})"
            raise config_error("planner.path", planner.path, problem, meant=meant, remedy=remedy)
        try:
            nodes = CheckpointPlan.load(path).nodes
        except CkptplanError as error:
            raise ConfigError(f"planner.path={planner.path}: {error}") from error
    compiled = next((node for node in nodes if isinstance(node, Compiled | CompiledModel)), None)
    if cost == "flops" and compiled is not None:
        problem = f"the plan compiles ({nodes_text([compiled])}), and nobody counts the FLOPs of compiled code"
        raise config_error("cost", cost, problem, remedy="cost=time")


def check_node(key: str, node: Mapping[str, Any], source: str | None = None) -> None:
    """The same for one node; ``source`` is the config file that it came from, for the message."""
    target = locate(node["_target_"], f"{key}._target_", source)
    if not callable(target):
        raise config_error(f"{key}._target_", node["_target_"], f"a {type(target).__name__}, not a class or function")
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a builtin without a signature: its own error has to do
        return
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {name: value for name, value in node.items() if name not in _HYDRA_KEYS}
    where = f"{node['_target_']}{f' (from {source})' if source else ''}"
    hints = _type_hints(target)
    for name, value in given.items():
        if name not in named and not takes_any:
            meant = nearest(name, named)
            raise config_error(
                f"{key}.{name}",
                value,
                f"{where} has no such argument",
                meant=f"{key}.{meant}" if meant else None,
                allowed=[f"{key}.{n}" for n in named],
                remedy=f"{key}.{meant}={value}" if meant else None,
            )
        if not value_fits(value, hints.get(name, Any)):
            expected = inspect.formatannotation(hints[name])
            raise config_error(f"{key}.{name}", value, f"{where} expects {expected}, got {type(value).__name__}")
    if node.get("_partial_") or node.get("_args_"):
        return
    missing = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in given]
    if missing:
        raise ConfigError(
            f"{key}: {where} needs {', '.join(missing)}\n  type: {' '.join(f'+{key}.{name}=...' for name in missing)}"
        )


def locate(path: str, key: str, source: str | None = None) -> Any:
    """What a dotted name stands for; the ``ConfigError`` names key, file and the real cause."""
    where = f" (from {source})" if source else ""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module_name == missing or module_name.startswith(f"{missing}."):
                continue  # a shorter name may be the module
            problem = f"importing {module_name} failed: {error}{where}"
            raise TargetImportError(str(config_error(key, path, problem))) from error
        except (Exception, SystemExit) as error:  # whatever user code raises while it is imported
            problem = f"importing {module_name} failed: {type(error).__name__}: {error}{where}"
            raise TargetImportError(str(config_error(key, path, problem))) from error
        for depth, part in enumerate(parts[count:], start=count):
            if not hasattr(found, part):
                owner = ".".join(parts[:depth])
                meant = nearest(part, [name for name in dir(found) if not name.startswith("_")])
                full = ".".join((owner, meant, *parts[depth + 1 :])) if meant else None
                remedy = f"{key}={full}" if full else None
                raise config_error(key, path, f"{owner} has no {part}{where}", meant=full, remedy=remedy)
            found = getattr(found, part)
        return found
    problem = f"no module named {parts[0]!r}{where}; is it installed, or in the folder you start in?"
    raise config_error(key, path, problem)


def instantiate(node: Mapping[str, Any], key: str, **extra: Any) -> Any:
    """Build what ``node`` describes. ``extra`` are arguments known only at run time.

    Values that the class refuses (ValueError, TypeError, a file that is not there) become ``ConfigError`` naming
    ``key``; any other exception comes out as it is, without Hydra's wrapping.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        return hydra_instantiate(dict(node), _convert_="all", **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, (ValueError, TypeError, OSError)):
            raise ConfigError(f"{key}: {node.get('_target_')} refuses its arguments: {cause}") from cause
        if isinstance(cause, InstantiationException):
            raise ConfigError(f"{key}: {str(cause).partition(chr(10))[0]}") from cause
        raise cause from None


def call_partial(partial: Callable[..., Any], node: Mapping[str, Any], key: str, *arguments: Any) -> Any:
    """Complete what ``instantiate`` gave for a node with ``_partial_: true``; what it refuses is a ``ConfigError``."""
    try:
        return partial(*arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {node.get('_target_')} refuses its arguments: {error}") from error


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # annotations that cannot be resolved say nothing
        return {}


def value_fits(value: Any, hint: Any) -> bool:
    """Whether a plain config value can be what ``hint`` asks for; a hint that we do not know fits everything."""
    if hint is Any or isinstance(hint, (str, typing.TypeVar)) or (isinstance(value, dict) and "_target_" in value):
        return True
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(value_fits(value, member) for member in members)
    if origin is typing.Literal:
        return value in members
    if origin is typing.Annotated:
        return value_fits(value, members[0])
    if hint in (None, types.NoneType):
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint in (int, float):
        return isinstance(value, (int,) if hint is int else (int, float)) and not isinstance(value, bool)
    container = origin or hint
    if container in (list, tuple, Sequence, Iterable):
        return isinstance(value, (list, tuple)) and _elements_fit(value, container, members)
    if container in (dict, Mapping):
        return isinstance(value, dict)
    if container in (Path, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    # A tensor is never a config value, so `float | Tensor` means float here.
    return getattr(hint, "__name__", "") != "Tensor"


def _elements_fit(values: Sequence[Any], container: Any, members: tuple[Any, ...]) -> bool:
    if container is tuple and members and members[-1] is not Ellipsis:
        return len(values) == len(members) and all(map(value_fits, values, members))
    return not members or all(value_fits(value, members[0]) for value in values)
