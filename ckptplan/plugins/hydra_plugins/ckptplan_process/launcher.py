"""The launcher of a multirun: hydra/launcher=process, each job in a process of its own, one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from ckptplan.config import RunConfig, config_hash, hydra_text, job_folder_name, load_config, resolve


class ProcessLauncher(Launcher):
    """Composes every job first (a fault in one stops all before the first starts), then runs them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from ckptplan.record import BudgetRecord, RunResult
        from ckptplan.sweeps import Job, run_jobs

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        jobs: list[Job] = []
        configs: list[RunConfig] = []
        checked: set[str] = set()
        for index, overrides in enumerate(job_overrides, start=initial_job_idx):
            config = self._compose(list(overrides), index)
            loaded, resolved = load_config(config), resolve(config)
            self._check_targets_once(loaded, config, checked)
            job_folder = _free(folder / job_folder_name(index, loaded, resolved))
            result = RunResult(
                config_hash=config_hash(resolved),
                name=loaded.name,
                planner=loaded.planner.name,
                seed=loaded.seed,
                budget=BudgetRecord(loaded.target.key, loaded.target.value),
            )
            command = self._command(list(overrides), index, job_folder, loaded)
            jobs.append(Job(index, tuple(overrides), job_folder, command, result))
            configs.append(loaded)
        settings = configs[0].sweep
        run_jobs(jobs, folder, fail_fast=settings.fail_fast, timeout_s=settings.timeout_s)
        return [_done(job.overrides) for job in jobs]

    def _compose(self, overrides: list[str], index: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(index)
            config.hydra.job.num = index
        HydraConfig.instance().set_config(config)
        return config

    def _check_targets_once(self, loaded: RunConfig, config: DictConfig, checked: set[str]) -> None:
        from ckptplan.targets import check_targets

        key = json.dumps([loaded.data, loaded.model, loaded.optimizer], sort_keys=True, default=str)
        if key not in checked:
            checked.add(key)
            check_targets(loaded, config.hydra.runtime.choices)

    def _command(self, overrides: list[str], index: int, folder: Path, loaded: RunConfig) -> tuple[str, ...]:
        hydra_config = self._config.hydra
        inherited = [text for text in hydra_config.overrides.hydra if not text.startswith("hydra.mode=")]
        added = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
        own = [f"hydra.run.dir={hydra_text(str(folder))}", "hydra.mode=RUN", f"hydra.job.num={index}"]
        if loaded.logger.group is None:  # the jobs of one sweep stand together in W&B
            own.append(f"logger.group={hydra_text('-'.join(folder.parent.parts[-2:]))}")
        flags = ["--config-name", str(hydra_config.job.config_name)]
        flags += ["--config-dir", added[0]] if added else []
        return (sys.executable, "-m", "ckptplan", *flags, *inherited, *overrides, *own)


def _free(folder: Path) -> Path:
    """``folder``, or the next free name where a sweep with a folder given by hand was here before."""
    taken, count = folder, 1
    while folder.exists():
        count += 1
        folder = taken.with_name(f"{taken.name}_{count}")
    return folder


def _done(overrides: Sequence[str]) -> JobReturn:
    return JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
