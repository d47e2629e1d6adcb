"""The launcher of a multirun: hydra/launcher=process, each job in a process of its own."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from ckptplan.config import RunConfig
from ckptplan.config.loading import config_hash, job_folder_name, load_config, resolve
from ckptplan.config.wording import config_error, hydra_text
from ckptplan.errors import ConfigError
from ckptplan.runs import AUTO, find_run, find_same, overrides_to_resume, typed_value, without

if TYPE_CHECKING:
    from ckptplan.config import SweepConfig
    from ckptplan.record import RunResult
    from ckptplan.sweeps import Runner


log = logging.getLogger(__name__)

PROFILES = "profiles"  # folder of a sweep, below it the profiles that its jobs share


class ProcessLauncher(Launcher):
    """Composes every job first (a fault in one stops all before the first starts), then runs them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._checked: set[str] = set()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from ckptplan.sweeps import sole_sweep

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        composed = [
            self._load(list(overrides), index) for index, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        if not composed:
            raise ConfigError("no values to run: a list of values on the command line is empty")
        with sole_sweep(folder) as held:
            return self._run(composed, folder, held)

    def _run(self, composed: Sequence[_Composed], folder: Path, held: Sequence[int]) -> Sequence[JobReturn]:
        from ckptplan.dashboards import push_dashboards, require_dashboards
        from ckptplan.report.page import show_report
        from ckptplan.sweep_tracking import track_sweep
        from ckptplan.sweeps import Job, finished_jobs, run_jobs, set_aside

        settings = composed[0].config.sweep
        shared = {
            "profile.cache": hydra_text(str(folder / PROFILES)),
            "logger.group": hydra_text("-".join(folder.parts[-2:])),  # the jobs of one sweep stand together in W&B
            "profile.options": "true" if any(one.wants_options for one in composed) else "null",
        }
        jobs: list[Job] = []
        for one in composed:
            job_folder = folder / job_folder_name(one.index, one.config, one.resolved)
            job_folder = one.run or (job_folder if settings.resume else _free(job_folder))
            result = _known_result(one)
            jobs.append(Job(one.index, one.overrides, job_folder, self._command(one, job_folder, shared), result))
        logger, group = composed[0].config.logger, str(composed[0].config.logger.group or "-".join(folder.parts[-2:]))
        command = list(self._config.hydra.overrides.task)
        pushes = composed[0].config.push_dashboard
        if pushes:
            require_dashboards(logger)
        done: dict[int, dict[str, Any]] = {}
        if settings.resume:
            found = finished_jobs(jobs, _require_sweep(settings.resume, folder))
            jobs = [replace(job, folder=found[job.index][0]) if job.index in found else job for job in jobs]
            done = {index: result for index, (_, result) in found.items()}
            for job in jobs:
                if job.index not in done:
                    set_aside(job.folder)

        def at_end(pairs: Sequence[tuple[Job, dict[str, Any]]]) -> None:
            track_sweep(pairs, folder, logger, group, command)
            if pushes:
                push_dashboards(logger)

        try:
            run_jobs(jobs, folder, settings, done, at_end=at_end, held=held, runner=self._runner(settings, folder))
        finally:
            if composed[0].config.report:
                show_report(folder)
        return [_done(job.overrides) for job in jobs]

    def _runner(self, settings: SweepConfig, folder: Path) -> Runner | None:
        """Who runs the jobs; None: processes of this machine."""
        return None

    def _load(self, overrides: list[str], index: int) -> _Composed:
        overrides, run = self._resumed(overrides, index)
        config = self._compose(overrides, index)
        one = _Composed(index, tuple(overrides), load_config(config), resolve(config), run)
        self._check_targets_once(one.config, config)
        return one

    def _resumed(self, overrides: list[str], index: int) -> tuple[list[str], Path | None]:
        """The overrides of a job that goes on with an earlier run, and that run; the job itself finds it again."""
        wanted, output_dir = typed_value("resume", overrides), Path(str(self._config.output_dir))
        if wanted is None:
            return overrides, None
        if wanted == AUTO:
            same = find_same(resolve(self._compose(overrides, index)), output_dir, None)
            return overrides, None if same is None else same.folder
        found = find_run(wanted, output_dir)
        now = without(("resume",), overrides)
        return overrides_to_resume(found, now, lambda texts: resolve(self._compose(texts, index))), found.folder

    def _compose(self, overrides: list[str], index: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(index)
            config.hydra.job.num = index
        HydraConfig.instance().set_config(config)
        return config

    def _check_targets_once(self, loaded: RunConfig, config: DictConfig) -> None:
        """A wrong name or argument stops the sweep; code of the user's that raises when imported fails its own job."""
        from ckptplan.errors import TargetImportError
        from ckptplan.targets import check_targets

        key = json.dumps([loaded.data, loaded.model, loaded.optimizer, loaded.planner], sort_keys=True, default=str)
        if key not in self._checked:
            self._checked.add(key)
            try:
                check_targets(loaded, config.hydra.runtime.choices)
            except TargetImportError as error:
                log.warning("%s\n  the jobs that need it will fail; the others are run", error)

    def _command(self, one: _Composed, folder: Path, shared: Mapping[str, str]) -> tuple[str, ...]:
        hydra_config = self._config.hydra
        inherited = [text for text in hydra_config.overrides.hydra if not text.startswith("hydra.mode=")]
        added = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
        own = [f"hydra.run.dir={hydra_text(str(folder))}", "hydra.mode=RUN", f"hydra.job.num={one.index}"]
        given = {"profile.cache": one.config.profile.cache, "profile.options": one.config.profile.options}
        given["logger.group"] = one.config.logger.group
        own += [f"{key}={text}" for key, text in shared.items() if given[key] is None and text != "null"]
        flags = ["--config-name", str(hydra_config.job.config_name)]
        flags += ["--config-dir", added[0]] if added else []
        return (sys.executable, "-m", "ckptplan", *flags, *inherited, *one.overrides, *own)


class SubmititLauncher(ProcessLauncher):
    """The same jobs in the queue of a cluster, through the package submitit; the parameters are its own."""

    CLUSTER = ""

    def __init__(self, submitit_folder: str, **parameters: Any) -> None:
        self._submitit_folder, self._parameters = submitit_folder, parameters

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from ckptplan.cluster import require_submitit

        require_submitit(self.CLUSTER)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def _runner(self, settings: SweepConfig, folder: Path) -> Runner:
        from ckptplan.cluster import Queue

        plain = {
            name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for name, value in self._parameters.items()
        }
        return Queue(self.CLUSTER, Path(self._submitit_folder).absolute(), plain, settings)


class SlurmLauncher(SubmititLauncher):
    """hydra/launcher=submitit_slurm."""

    CLUSTER = "slurm"


class LocalLauncher(SubmititLauncher):
    """hydra/launcher=submitit_local."""

    CLUSTER = "local"


class _Composed(NamedTuple):  # no dataclass: Hydra executes this module without entering it in sys.modules
    """The configuration of one job."""

    index: int
    overrides: tuple[str, ...]
    config: RunConfig
    resolved: dict[str, Any]
    run: Path | None = None  # the folder of the earlier run that the job goes on with

    @property
    def wants_options(self) -> bool:
        """Options inside blocks are measured once for all jobs if one of them needs them."""
        from ckptplan.planners import PLANNERS_WITH_OPTIONS

        return self.config.planner.name in PLANNERS_WITH_OPTIONS


def _known_result(one: _Composed) -> RunResult:
    from ckptplan.record import BudgetRecord, RunResult

    loaded = one.config
    return RunResult(
        config_hash=config_hash(one.resolved),
        name=loaded.name,
        planner=loaded.planner.name,
        seed=loaded.seed,
        budget=BudgetRecord(loaded.target.key, loaded.target.value),
    )


def _require_sweep(resume: bool | str, folder: Path) -> Path:
    """The folder to go on in; a name that leads to none is an error."""
    named = Path(resume).absolute() if isinstance(resume, str) else None
    if named is not None and not (folder.is_dir() and folder.name == named.name):
        problem = "there is no such sweep"
        raise config_error("sweep.resume", resume, problem, remedy="sweep.resume=<the folder of a sweep>")
    return folder


def _free(folder: Path) -> Path:
    """``folder``, or the next free name where a sweep with a folder given by hand was here before."""
    taken, count = folder, 1
    while folder.exists():
        count += 1
        folder = taken.with_name(f"{taken.name}_{count}")
    return folder


def _done(overrides: Sequence[str]) -> JobReturn:
    return JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
