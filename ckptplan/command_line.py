"""The command line as Hydra reads it, and all that can be wrong with it before a run exists.

What Hydra and OmegaConf raise about it is told in this package's own words.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckptplan.config.explaining import explain_omegaconf
from ckptplan.config.loading import load_config, resolve
from ckptplan.config.wording import config_error, hydra_text, nearest, shell_override
from ckptplan.errors import ConfigError
from ckptplan.hydra_folders import CONFIG_NAME, config_folder
from ckptplan.runs import AUTO, find_run, find_same, overrides_to_resume, typed_value, without

_FOLDER_KEYS = {  # with an example of each
    "output_dir": "outputs",
    "hydra.run.dir": "outputs/mine",
    "hydra.sweep.dir": "outputs/mine",
    "hydra.sweep.subdir": "'${hydra.job.num}'",
}

_Error = TypeVar("_Error", bound=BaseException)


def hydra_parser() -> ArgumentParser:
    from hydra._internal.utils import get_args_parser  # the parser that hydra.main uses; pinned by a test

    return get_args_parser()


def only_asks(options: Namespace) -> bool:
    """Whether the command line wants an answer instead of a run."""
    return bool(options.help or options.hydra_help or options.cfg or options.info or options.shell_completion)


def overrides_together(arguments: Sequence[str]) -> list[str]:
    """``steps=5 -m seed=1,2`` as ``-m steps=5 seed=1,2``: Hydra's parser reads overrides in one row only."""
    options, unknown = hydra_parser().parse_known_args(list(arguments))
    apart = [text for text in unknown if not text.startswith("-")]
    overrides = {*options.overrides, *apart} if apart else set()
    return sorted(arguments, key=overrides.__contains__)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Hydra's own command line; a flag that it does not have is a ``ConfigError``."""
    options, unknown = hydra_parser().parse_known_args(list(arguments))
    if unknown:
        flag = unknown[0]
        name = flag.lstrip("-")
        remedy = f"{name if '=' in name else f'{name}=...'} for a value of the config; --help lists what there is"
        raise ConfigError(f"{flag}: there is no such flag\n  type: {remedy}")
    return options


def open_swept_groups(arguments: Sequence[str]) -> list[str]:
    """Arguments of a multirun in which ``model.width=64`` beside ``model=gpt,vit`` becomes ``++model.width=64``.

    Hydra checks such a key against the default member of the group, which may not have it, before it composes the
    jobs. Our own check against each job's class follows, so a mistyped key is still found before the first job.
    """
    swept = {group for group, _, value in (text.partition("=") for text in arguments) if "," in value}
    opened = {group for group in ("data", "model", "optimizer") if group in swept}
    opened |= {"data"} if "model" in swept else set()  # a model may name its own data
    return [f"++{text}" if text.partition(".")[0] in opened and "=" in text else text for text in arguments]


@contextlib.contextmanager
def hydra_environment(arguments: list[str]) -> Iterator[None]:
    """hydra.main reads sys.argv, and hands us its exceptions instead of printing them under HYDRA_FULL_ERROR."""
    old_argv, old_full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = old_argv
        if old_full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_full_error


@contextlib.contextmanager
def own_messages(overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise about the user's overrides and files into ``ConfigError``."""
    from hydra.errors import HydraException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_hydra(error, overrides) from error
    except (ValueError, TypeError, AssertionError) as error:  # what Hydra's composition raises on odd overrides
        if isinstance(error.__cause__, OSError):  # the log file cannot be opened
            raise error.__cause__ from error
        if not _raised_in_hydra(error):
            raise
        raise ConfigError(f"{' '.join(overrides)}: {error}\n  type: group=option or key=value, see --help") from error


def _raised_in_hydra(error: Exception) -> bool:
    last = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(last.f_globals.get("__name__")).partition(".")[0] == "hydra"


def explain_hydra(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Our message for an error of Hydra: key, value, the nearest right one, what is allowed, what to type."""
    from hydra.errors import MissingConfigException, OverrideParseException

    own = _first_in_chain(error, ConfigError)  # raised by one of our resolvers
    if own is not None:
        return own
    if isinstance(error, OverrideParseException):
        return _unreadable_override(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        meant = nearest(option, error.options)
        remedy = f"{group}={meant or error.options[0]}"
        return config_error(group, option, "there is no such option", meant=meant, allowed=error.options, remedy=remedy)
    cause = _omegaconf_cause(error)
    if cause is not None:
        root = cause.parent_node._get_root() if cause.parent_node is not None else None
        typed = {key.lstrip("+~"): value for key, _, value in (text.partition("=") for text in overrides)}
        return explain_omegaconf(cause, root if isinstance(root, DictConfig) else None, typed)
    message = str(error).strip()
    if message.startswith("Ambiguous value"):
        override = next((text for text in overrides if f"'{text}'" in message), "")
        key, _, value = override.partition("=")
        remedy = f"-m {override} for one run each, or {shell_override(key, value)} for text"
        return config_error(key, value, "several values", remedy=remedy)
    for text in overrides:
        if message.startswith(f"Multiple values for {text.lstrip('+').partition('=')[0]}."):
            return ConfigError(f"{text}: it has a value already\n  type: {text.lstrip('+')}")
    return ConfigError(message)


def _unreadable_override(override: str) -> ConfigError:
    key, equals, value = override.partition("=")
    if not equals:
        return ConfigError(f"{override}: expected key=value\n  type: {key}=...")
    return config_error(key, value, "these characters need quotes", remedy=shell_override(key, value))


def _first_in_chain(error: BaseException | None, kind: type[_Error]) -> _Error | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    """The error of OmegaConf behind one of Hydra: the innermost that knows its key."""
    found = None
    while error is not None:
        if isinstance(error, OmegaConfBaseException) and error.full_key:
            found = error
        error = error.__cause__ or error.__context__
    return found


@contextlib.contextmanager
def _composed(options: Namespace, overrides: Sequence[str]) -> Iterator[DictConfig]:
    """The config of these overrides under the flags of the command line."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    overrides = list(overrides)
    if options.config_dir:
        folder = Path(options.config_dir).absolute()
        overrides.append(f"hydra.searchpath=[{hydra_text(f'file://{folder}')}]")
    conf = str(Path(options.config_path).absolute() if options.config_path else config_folder())
    with hydra.initialize_config_dir(version_base="1.3", config_dir=conf):
        config = hydra.compose(options.config_name or CONFIG_NAME, overrides=overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        yield config


def is_multirun_by_config(options: Namespace) -> bool:
    """Whether a config file makes it a sweep (``hydra.mode: MULTIRUN``), where lists were typed without ``-m``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    swept = {override.input_line for override in OverridesParser.create().parse_overrides(options.overrides)
             if override.is_sweep_override()}  # fmt: skip
    if not swept:
        return False
    with _composed(options, [text for text in options.overrides if text not in swept]) as config:
        return str(config.hydra.mode) == "RunMode.MULTIRUN"


def check_single_run(options: Namespace) -> None:
    """Everything that can be wrong before a run exists, before its folder is made."""
    with _composed(options, options.overrides) as config:
        if str(config.hydra.mode) == "RunMode.MULTIRUN":
            return
        _check_data_fits(config)
        loaded = load_config(config)
        if loaded.resume is None:
            _check_folder_is_free(options.overrides)
        from ckptplan.targets import check_targets

        check_targets(loaded, config.hydra.runtime.choices)


def with_resumed_run(arguments: list[str], options: Namespace) -> list[str]:
    """``resume=`` as Hydra has to know it: the run's folder and, unless it is "auto", what was typed for it before."""
    typed: list[str] = options.overrides
    few = [text for key in ("output_dir", "hydra.mode") for text in typed if text.startswith(f"{key}=")]
    with _composed(options, few) as config:
        wanted = typed_value("resume", typed) or config.resume
        if wanted is None or str(config.hydra.mode) == "RunMode.MULTIRUN":
            return arguments
        output_dir = Path(config.output_dir)
    if wanted == AUTO:
        with _composed(options, typed) as config:
            own = typed_value("hydra.run.dir", typed)
            found = find_same(resolve(config), output_dir, None if own is None else Path(own).absolute())
        overrides = typed
    else:
        found = find_run(wanted, output_dir)

        def resolved_for(overrides: Sequence[str]) -> dict[str, Any]:
            with _composed(options, overrides) as config:
                return resolve(config)

        overrides = overrides_to_resume(found, without(("resume",), typed), resolved_for)
    if found is None:
        return arguments
    overrides = without(("hydra.run.dir", "hydra.output_subdir"), overrides)
    overrides += [f"hydra.run.dir={hydra_text(str(found.folder))}", "hydra.output_subdir=null"]
    return [*(text for text in arguments if text not in typed), *overrides]


def _check_data_fits(config: DictConfig) -> None:
    """Name both model and data where one lacks what the other takes from it, before the broken reference is met."""
    from ckptplan.data.spec import explain_missing_data_keys

    if not (isinstance(config.model, DictConfig) and isinstance(config.data, DictConfig)):
        return  # load_config says what is wrong
    choices = config.hydra.runtime.choices
    model, data = (
        cast("dict[str, object]", OmegaConf.to_container(node, resolve=False)) for node in (config.model, config.data)
    )
    message = explain_missing_data_keys(str(choices.get("model")), model, str(choices.get("data")), data)
    if message:
        raise ConfigError(message)


def check_folders_are_named(overrides: Sequence[str]) -> None:
    """``output_dir=`` would be the root of the disk, ``hydra.run.dir=`` the folder in which the command is typed."""
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if key in _FOLDER_KEYS and equals and not value.strip(" \"'"):
            raise config_error(key, "", "empty; expected a folder", remedy=f"{key}={_FOLDER_KEYS[key]}, or without it")


def _check_folder_is_free(overrides: Sequence[str]) -> None:
    """A run that was killed, or is going on, has no result yet: its folder is no less its own."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "hydra.run.dir" and any(
            Path(value.strip("\"'"), name).exists() for name in ("result.json", "config.yaml")
        ):
            remedy = f"{key}=<a new folder>, or resume=auto beside it to go on with that run"
            raise config_error(key, value, "this folder holds a run already", remedy=remedy)
