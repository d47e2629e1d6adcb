"""What every test gets: one thread, a fixed seed, no network for trackers, and ``compose`` for configs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

# Before torch is imported, for this process and the ones it starts: many small tests on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

Compose = Callable[..., DictConfig]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    if "torch" in sys.modules:  # tests of the torch-free parts do not pay for the import
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_logging: None) -> Path:
    """An empty folder to start in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """Hydra configures the root logger; it is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def compose() -> Iterator[Compose]:
    """``compose("planner=dp", ...)``: the config of one run, ``compose(..., multirun=True)``: of a multirun's job."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from ckptplan.hydra_folders import CONFIG_NAME, config_folder, prepare_hydra

    prepare_hydra(reserve_folders=False)

    def make(*overrides: str, multirun: bool = False) -> DictConfig:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            if not multirun:
                config = hydra.compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True)
            else:
                loader = GlobalHydra.instance().config_loader()
                master = loader.load_configuration(CONFIG_NAME, list(overrides), RunMode.MULTIRUN)
                config = loader.load_sweep_config(master, list(overrides))
                config.hydra.job.num = 0
        HydraConfig.instance().set_config(config)
        return config

    yield make
    HydraConfig.instance().cfg = None
