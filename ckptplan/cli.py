"""The entry points: ``train_main`` and ``sweep_main``. Hydra at the edge, one clear message for every user error.

No torch at import: ``--help``, ``--cfg job``, tab completion and a mistyped override answer at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckptplan import launched
from ckptplan.config import RunConfig, register_schema
from ckptplan.config.explaining import explain_omegaconf
from ckptplan.config.loading import job_folder_name, load_config, resolve
from ckptplan.config.wording import config_error, hydra_text, nearest, shell_override
from ckptplan.console import lasting_output
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.jobs import EXIT_BAD_CONFIG, end_with_launcher
from ckptplan.runs import AUTO, find_run, find_same, overrides_to_resume, point_latest_at, typed_value, without
from ckptplan.sweeps import SweepTerminated, newest_sweep
from ckptplan.telling import EXIT_FAILED, exit_code_of, file_message

CONFIG_NAME = "train"
EXIT_INTERRUPTED = 130
_FOLDER_KEYS = {  # with an example of each
    "output_dir": "outputs",
    "hydra.run.dir": "outputs/mine",
    "hydra.sweep.dir": "outputs/mine",
    "hydra.sweep.subdir": "'${hydra.job.num}'",
}
FINE_IN_A_SWEEP = (0, 3, 4, 5)  # exit codes that are an answer: ok, infeasible, over_budget, oom

log = logging.getLogger(__name__)
_Error = TypeVar("_Error", bound=BaseException)


def train_main() -> NoReturn:
    """``python train.py``: one run, or with ``-m`` one run per job."""
    end_with_launcher()
    _leave(_with_other_ranks(lambda: main(sys.argv[1:])))


def sweep_main() -> NoReturn:
    """``python sweep.py``: the sweep of conf/sweep/default.yaml unless another ``sweep=`` is named."""
    if len(sys.argv) == 1:
        print("four planners at five budgets on the small GPT: under 10 minutes on two CPU cores", file=sys.stderr)
    _leave(_with_other_ranks(lambda: main(sweep_arguments(sys.argv[1:]))))


def _leave(code: int) -> NoReturn:
    """End with ``code``. After a Ctrl-C all is recorded: another one must not make a traceback of Python's own end."""
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _with_other_ranks(run: Callable[[], int]) -> int:
    """The exit code of ``run``. Of ranks that torchrun or srun has started only the first reads the command line."""
    if launched.world_size() == 1:
        return run()
    from ckptplan.engine.launch import follow, release

    if launched.rank() > 0:
        register_schema()
        return follow()
    code = run()
    release(code)
    return code


def sweep_arguments(arguments: Sequence[str]) -> list[str]:
    """Those of ``python train.py`` for the same sweep: with ``-m``, so that lists of values can be typed."""
    named = any(argument.startswith("sweep=") for argument in arguments)
    options, _ = _hydra_parser().parse_known_args(list(arguments))
    flags = [] if _only_asks(options) or options.multirun else ["-m"]
    return [*flags, *([] if named else ["sweep=default"]), *arguments]


def main(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments`` (without the program) and return the exit code."""
    with lasting_output():
        return _run_told(arguments)


def _run_told(arguments: Sequence[str]) -> int:
    """The exit code, errors told in one message each."""
    try:
        return _run_hydra(list(arguments))
    except OSError as error:  # of files that Hydra or a launcher wants; a run tells its own
        print(f"error: {file_message(error)}", file=sys.stderr)
        return EXIT_FAILED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except CkptplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except SweepTerminated as error:
        return 128 + error.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def config_folder() -> Path:
    """conf/ of the repository, or ckptplan/conf of an installed wheel."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def prepare_hydra(*, reserve_folders: bool) -> RunFolders:
    """Make our schema, resolvers and launcher known to Hydra.

    ``reserve_folders``: whether resolving ``run_folder`` creates the folder (a run does, ``--cfg`` does not).
    """
    plugins = str(Path(__file__).resolve().parent / "plugins")
    if Path(plugins).is_dir() and plugins not in sys.path:
        sys.path.append(plugins)  # in the wheel the plugin stands at the top level
    register_schema()
    # Where Hydra's own plugin for submitit is installed too, it would look at our files of the same names.
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/submitit_\w+' is validated against ConfigStore")
    folders = RunFolders(reserve_folders)
    OmegaConf.register_new_resolver("run_folder", folders, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", folders.of_sweep, replace=True)
    OmegaConf.register_new_resolver("job_folder", _job_folder, replace=True)
    return folders


class RunFolders:
    """The resolver ``run_folder``: <root>/<date>/<time>, a name of its own per process and root.

    The folder is created exclusively, so two runs started in the same second never share one.
    """

    def __init__(self, reserve: bool) -> None:
        self._reserve = reserve
        self._by_root: dict[str, str] = {}
        self._resumed: dict[str, str] = {}  # folders of earlier sweeps, which are not ours to remove

    def __call__(self, root: str) -> str:
        if root not in self._by_root:
            self._by_root[root] = str(fresh_folder(Path(root), create=self._reserve))
        return self._by_root[root]

    def of_sweep(self, root: str, *, _root_: DictConfig) -> str:
        """The resolver ``sweep_folder``: a fresh one, or with ``sweep.resume`` that of the sweep to go on with.

        A name that leads nowhere gets a fresh one too; the launcher says so.
        """
        if root not in self._by_root | self._resumed:
            resume = OmegaConf.select(_root_, "sweep.resume")
            found = None
            if isinstance(resume, str):
                found = next((path for path in (Path(resume), Path(root) / resume) if path.is_dir()), None)
            elif resume is True:
                found = newest_sweep(Path(root), OmegaConf.select(_root_, "hydra.overrides.task") or ())
            if found is None:
                return self(root)
            self._resumed[root] = str(found.absolute())
        return (self._by_root | self._resumed)[root]

    def remove_unused(self) -> None:
        """Take away the folders of runs that never began: they hold nothing, or only Hydra's multirun.yaml."""
        for folder in map(Path, self._by_root.values()):
            if self._reserve and folder.is_dir() and {path.name for path in folder.iterdir()} <= {"multirun.yaml"}:
                (folder / "multirun.yaml").unlink(missing_ok=True)
                folder.rmdir()


def fresh_folder(root: Path, *, create: bool = True) -> Path:
    """A new folder ``root/<date>/<time>``, ``<time>_2`` and so on where that is taken; raises ``ConfigError``."""
    import datetime

    now = datetime.datetime.now()
    day = root.absolute() / now.strftime("%Y-%m-%d")
    try:
        if create:
            day.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            folder = day / (now.strftime("%H-%M-%S") + (f"_{attempt}" if attempt > 1 else ""))
            if not create and not folder.exists():
                return folder
            with contextlib.suppress(FileExistsError):
                if create:
                    folder.mkdir()
                    return folder
    except OSError as error:
        problem = f"the run folder cannot be made: {error}"
        raise config_error("output_dir", root, problem, remedy="output_dir=<a folder you can write to>") from error
    raise config_error("output_dir", root, f"no free folder name in {day}")


def _job_folder(*, _root_: DictConfig) -> str:
    resolved = resolve(_root_)
    number = OmegaConf.select(_root_, "hydra.job.num", default=None, throw_on_missing=False)
    return job_folder_name(int(number or 0), load_config(_root_), resolved)


# --- Hydra, with its errors in our words ------------------------------------------------------------------------------


def _run_hydra(arguments: list[str]) -> int:
    import hydra

    if "--version" in arguments:  # Hydra's own flag would print Hydra's version
        from ckptplan import __version__

        print(f"ckptplan {__version__}")
        return 0
    arguments = overrides_together(arguments)
    options = parse_arguments(arguments)
    is_run = not _only_asks(options)
    folders = prepare_hydra(reserve_folders=is_run)
    start_folder = str(Path.cwd())
    if start_folder not in sys.path:
        sys.path.append(start_folder)  # a model of the user's own lies where they start
    exit_codes: list[int] = []
    if is_run:
        _check_folders_are_named(options.overrides)
    if options.multirun and launched.world_size() > 1:
        problem = f"each of {launched.world_size()} processes that a launcher started would run the sweep"
        raise config_error("engine", "", problem, remedy="python train.py -m engine=ddp engine.nproc=2 ..., without it")

    def job(config: DictConfig) -> None:
        exit_codes.append(_job(config))

    try:
        with _own_messages(options.overrides):
            is_multirun = options.multirun or _is_multirun_by_config(options)
            if is_run and not is_multirun:
                arguments = _with_resumed_run(arguments, options)
                options = parse_arguments(arguments)
                _check_single_run(options)
            with _hydra_environment(open_swept_groups(arguments) if is_multirun else arguments):
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIG_NAME)(job)()
    except ConfigError:
        folders.remove_unused()
        raise
    if len(exit_codes) > 1:  # jobs of a multirun in this process (hydra/launcher=basic)
        return EXIT_FAILED if any(code not in FINE_IN_A_SWEEP for code in exit_codes) else 0
    return exit_codes[0] if exit_codes else 0


def _hydra_parser() -> ArgumentParser:
    from hydra._internal.utils import get_args_parser  # the parser that hydra.main uses; pinned by a test

    return get_args_parser()


def _only_asks(options: Namespace) -> bool:
    """Whether the command line wants an answer instead of a run."""
    return bool(options.help or options.hydra_help or options.cfg or options.info or options.shell_completion)


def overrides_together(arguments: Sequence[str]) -> list[str]:
    """``steps=5 -m seed=1,2`` as ``-m steps=5 seed=1,2``: Hydra's parser reads overrides in one row only."""
    options, unknown = _hydra_parser().parse_known_args(list(arguments))
    apart = [text for text in unknown if not text.startswith("-")]
    overrides = {*options.overrides, *apart} if apart else set()
    return sorted(arguments, key=overrides.__contains__)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Hydra's own command line; a flag that it does not have is a ``ConfigError``."""
    options, unknown = _hydra_parser().parse_known_args(list(arguments))
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
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
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
def _own_messages(overrides: Sequence[str]) -> Iterator[None]:
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


def _is_multirun_by_config(options: Namespace) -> bool:
    """Whether a config file makes it a sweep (``hydra.mode: MULTIRUN``), where lists were typed without ``-m``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    swept = {override.input_line for override in OverridesParser.create().parse_overrides(options.overrides)
             if override.is_sweep_override()}  # fmt: skip
    if not swept:
        return False
    with _composed(options, [text for text in options.overrides if text not in swept]) as config:
        return str(config.hydra.mode) == "RunMode.MULTIRUN"


def _check_single_run(options: Namespace) -> None:
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


def _with_resumed_run(arguments: list[str], options: Namespace) -> list[str]:
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


def _check_folders_are_named(overrides: Sequence[str]) -> None:
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


# --- one run ----------------------------------------------------------------------------------------------------------


def _job(config: DictConfig) -> int:
    """One run in the folder that Hydra made; returns the exit code of the run."""
    from hydra.core.hydra_config import HydraConfig

    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    os.chdir(hydra_config.runtime.cwd)  # inputs are relative to the start folder, whatever hydra.job.chdir says
    logging.captureWarnings(True)
    try:
        return exit_code_of(lambda: _run(config, hydra_config, folder), folder)
    finally:
        logging.captureWarnings(False)


def _run(config: DictConfig, hydra_config: Any, folder: Path) -> int:
    loaded, resolved = load_config(config), resolve(config)
    loaded, resolved = _with_state_mode(loaded, resolved, hydra_config)
    if loaded.planner.path is not None:  # it may lead through "latest", which is about to point here
        path = str(Path(loaded.planner.path).resolve())
        loaded = replace(loaded, planner=replace(loaded.planner, path=path))
    overrides = list(hydra_config.overrides.task)
    if loaded.engine.kind != "single":
        from ckptplan.engine.launch import run_on_ranks

        log_config = OmegaConf.to_container(hydra_config.job_logging, resolve=True)
        return run_on_ranks(loaded, resolved, folder, overrides, cast("dict[str, Any]", log_config))
    _require_one_process()
    from ckptplan.run import run_job

    # A run that turns out to be none leaves "latest" where it was.
    return run_job(
        loaded,
        resolved=resolved,
        folder=folder,
        overrides=overrides,
        on_begin=lambda: point_latest_at(folder, Path(loaded.output_dir)),
    )


def _require_one_process() -> None:
    num_ranks = launched.world_size()
    if num_ranks > 1:
        problem = f"a launcher started {num_ranks} processes, which would each do the same run"
        raise config_error("engine", "single", problem, remedy="engine=ddp or engine=fsdp2, or start one process")


def _with_state_mode(
    loaded: RunConfig, resolved: dict[str, Any], hydra_config: Any
) -> tuple[RunConfig, dict[str, Any]]:
    """``state.mode=auto`` made into what it is here: a job of a sweep saves nothing unless it goes on with a run."""
    in_sweep = OmegaConf.select(hydra_config, "job.num", throw_on_missing=False) is not None
    if loaded.resume is not None and "MULTIRUN" in str(hydra_config.mode):
        raise config_error("resume", loaded.resume, "jobs in one process cannot go on", remedy="hydra/launcher=process")
    if in_sweep and loaded.state.location is not None:
        problem = "the jobs of a sweep would save into one place; each has its own folder"
        raise config_error("state.location", loaded.state.location, problem, remedy="state.location=null")
    if loaded.state.mode != "auto":
        return loaded, resolved
    mode = "off" if in_sweep and loaded.resume is None else "async"
    state = replace(loaded.state, mode=mode)
    return replace(loaded, state=state), {**resolved, "state": {**resolved["state"], "mode": mode}}
