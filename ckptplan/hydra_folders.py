"""Where configs are read and runs are written: what Hydra must know of this package."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ckptplan.config import register_schema
from ckptplan.config.loading import job_folder_name, load_config, resolve
from ckptplan.config.wording import config_error
from ckptplan.sweeps import newest_sweep

CONFIG_NAME = "train"


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
