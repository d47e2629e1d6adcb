"""The entry points: ``train_main`` and ``sweep_main``. Hydra at the edge, one clear message for every user error.

No torch at import: ``--help``, ``--cfg job``, tab completion and a mistyped override answer at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf

from ckptplan import launched
from ckptplan.command_line import (
    check_folders_are_named,
    check_single_run,
    hydra_environment,
    hydra_parser,
    is_multirun_by_config,
    only_asks,
    open_swept_groups,
    overrides_together,
    own_messages,
    parse_arguments,
    with_resumed_run,
)
from ckptplan.config import RunConfig, register_schema
from ckptplan.config.loading import load_config, resolve
from ckptplan.config.wording import config_error
from ckptplan.console import lasting_output
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.hydra_folders import CONFIG_NAME, config_folder, prepare_hydra
from ckptplan.jobs import EXIT_BAD_CONFIG, end_with_launcher
from ckptplan.runs import point_latest_at
from ckptplan.sweeps import SweepTerminated
from ckptplan.telling import EXIT_FAILED, exit_code_of, file_message

EXIT_INTERRUPTED = 130
FINE_IN_A_SWEEP = (0, 3, 4, 5)  # exit codes that are an answer: ok, infeasible, over_budget, oom

log = logging.getLogger(__name__)


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
    options, _ = hydra_parser().parse_known_args(list(arguments))
    flags = [] if only_asks(options) or options.multirun else ["-m"]
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


def _run_hydra(arguments: list[str]) -> int:
    import hydra

    if "--version" in arguments:  # Hydra's own flag would print Hydra's version
        from ckptplan import __version__

        print(f"ckptplan {__version__}")
        return 0
    arguments = overrides_together(arguments)
    options = parse_arguments(arguments)
    is_run = not only_asks(options)
    folders = prepare_hydra(reserve_folders=is_run)
    start_folder = str(Path.cwd())
    if start_folder not in sys.path:
        sys.path.append(start_folder)  # a model of the user's own lies where they start
    exit_codes: list[int] = []
    if is_run:
        check_folders_are_named(options.overrides)
    if options.multirun and launched.world_size() > 1:
        problem = f"each of {launched.world_size()} processes that a launcher started would run the sweep"
        raise config_error("engine", "", problem, remedy="python train.py -m engine=ddp engine.nproc=2 ..., without it")

    def job(config: DictConfig) -> None:
        exit_codes.append(_job(config))

    try:
        with own_messages(options.overrides):
            is_multirun = options.multirun or is_multirun_by_config(options)
            if is_run and not is_multirun:
                arguments = with_resumed_run(arguments, options)
                options = parse_arguments(arguments)
                check_single_run(options)
            with hydra_environment(open_swept_groups(arguments) if is_multirun else arguments):
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIG_NAME)(job)()
    except ConfigError:
        folders.remove_unused()
        raise
    if len(exit_codes) > 1:  # jobs of a multirun in this process (hydra/launcher=basic)
        return EXIT_FAILED if any(code not in FINE_IN_A_SWEEP for code in exit_codes) else 0
    return exit_codes[0] if exit_codes else 0


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
