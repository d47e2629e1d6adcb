"""How the ranks of a run come to be: started here by torch's elastic agent, or by torchrun or srun, which we join.

Rank 0 alone reads the command line and makes the folder of the run; it hands the whole job to the others as JSON.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.config
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ckptplan import launched
from ckptplan.config import RunConfig
from ckptplan.config.checks import check_batch_divides, check_mesh
from ckptplan.config.loading import load_config
from ckptplan.config.wording import config_error
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.tensor import can_cut, with_meshes
from ckptplan.jobs import LAUNCHER_VARIABLE
from ckptplan.record import ErrorRecord, RunResult, load_result, write_atomic
from ckptplan.run import run_job
from ckptplan.runs import point_latest_at
from ckptplan.telling import EXIT_FAILED, exit_code_of

log = logging.getLogger(__name__)

_JOB, _SEEN = "ckptplan/job", "ckptplan/seen"
_SEEN_WITHIN_S = 30.0
_HANDLED_BY_AGENT = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))
_STARTED_WITHIN = datetime.timedelta(minutes=30)  # between the first and the last rank of a job


@dataclass(frozen=True)
class RankJob:
    """What every rank is told.

    Attributes:
        resolved: the configuration as plain values; ``planner_path`` is the file of its plan, links followed.
        log_config: for rank 0, as of ``logging.config.dictConfig``; None: it logs already.
        exit_code_path: where rank 0 writes the exit code, for the process that has started the ranks.
    """

    resolved: dict[str, Any]
    planner_path: str | None
    folder: str
    overrides: list[str]
    log_config: dict[str, Any] | None = None
    exit_code_path: str | None = None

    def config(self) -> RunConfig:
        loaded = load_config(self.resolved)
        return replace(loaded, planner=replace(loaded.planner, path=self.planner_path))


def run_on_ranks(
    config: RunConfig, resolved: dict[str, Any], folder: Path, overrides: list[str], log_config: dict[str, Any]
) -> int:
    """Run the job on all its ranks; returns the exit code of the run.

    Raises ``ConfigError`` where their number is not known or does not share the batch, or torch has no such engine.
    """
    _require_sharding(config)
    _require_cutting(config)
    job = RankJob(resolved, config.planner.path, str(folder), overrides)
    if launched.world_size() > 1:
        check_mesh(config.engine, launched.world_size())
        return _lead(job, config)
    num_ranks = config.engine.num_processes or torch.cuda.device_count()
    if num_ranks < 1:
        problem = "there is no CUDA device here to take one process each"
        raise config_error("engine.nproc", None, problem, remedy="engine.nproc=2")
    check_mesh(config.engine, num_ranks)
    if config.engine.nproc is None and isinstance(config.data.get("batch_size"), int):
        check_batch_divides(config.data["batch_size"], num_ranks // config.engine.tp)
    return _start(replace(job, log_config=log_config), num_ranks)


def _require_sharding(config: RunConfig) -> None:
    """FSDP2 of torch 2.6 asks a CPU for what only later releases give it."""
    on_cuda = config.runtime.device != "cpu" and torch.cuda.is_available()
    if config.engine.kind == "fsdp2" and not on_cuda and not hasattr(torch.cpu.Stream, "record_event"):
        problem = f"torch {torch.__version__} shards over CUDA devices only"
        raise config_error("engine", "fsdp2", problem, remedy="engine=ddp, or a newer torch")


def _require_cutting(config: RunConfig) -> None:
    """Older releases send every matrix around to cut it, though each rank has it."""
    if config.engine.tp > 1 and not can_cut():
        problem = f"torch {torch.__version__} has no parallelize_module(..., src_data_rank=None)"
        raise config_error("engine.tp", config.engine.tp, problem, remedy="engine.tp=1, or a newer torch")


# --- started by us ---


def _start(job: RankJob, num_ranks: int) -> int:
    """torch's elastic agent in this process; the ranks in sessions of their own, so that only it gets Ctrl-C."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.WARNING)
    started_s = time.time()
    with tempfile.TemporaryDirectory(prefix="ckptplan-ranks-") as private:
        job = replace(job, exit_code_path=str(Path(private, "exit_code")))
        path = Path(private, "job.json")
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
        )
        failures: list[tuple[int, int, str]] = []
        number = None
        handlers = {signal_number: signal.getsignal(signal_number) for signal_number in _HANDLED_BY_AGENT}
        try:
            elastic_launch(agent, sys.executable)("-m", "ckptplan.engine.worker", str(path))
        except ChildFailedError as error:
            by_time = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
            failures = [(rank, failed.exitcode, str(failed.message)) for rank, failed in by_time]
        except SignalException as error:
            number = int(error.sigval)
        finally:
            os.environ.pop(LAUNCHER_VARIABLE, None)
            if threading.current_thread() is threading.main_thread():
                for signal_number, handler in handlers.items():  # the agent leaves its own there
                    signal.signal(signal_number, handler)
        written = Path(job.exit_code_path or "")
        if written.is_file():
            return int(written.read_text())
    return _tell_failure(Path(job.folder), started_s, failures, number)


def _tell_failure(folder: Path, started_s: float, failures: list[tuple[int, int, str]], number: int | None) -> int:
    """Complete the result of a run whose ranks did not end together."""
    path = folder / "result.json"
    is_new = path.is_file() and path.stat().st_mtime >= started_s
    result = load_result(path) if is_new else RunResult().to_dict()
    killed = next(((rank, -code) for rank, code, _ in failures if code < 0 and -code != signal.SIGTERM), None)
    if killed is not None:
        name = signal.Signals(killed[1]).name
        hint = "; often the system, out of memory" if killed[1] == signal.SIGKILL else ""
        error = ErrorRecord(name, f"rank {killed[0]} was ended by {name}{hint}", signal=name)
    elif is_new and result["error"] is not None:
        log.error("%s: %s", result["error"]["type"], result["error"]["message"])
        return 5 if result["status"] == "oom" else EXIT_FAILED
    elif number is not None:
        error = ErrorRecord("RunInterruptedError", "ended by a signal before the ranks had begun")
    else:
        rank, code, message = failures[0] if failures else (0, 1, "no rank said why")
        error = ErrorRecord("RankFailedError", f"rank {rank} ended with exit code {code}: {message}")
    log.error("%s", error.message)
    result |= {"status": "failed" if number is None else "interrupted", "error": asdict(error)}
    write_atomic(path, json.dumps(result, indent=2) + "\n")
    return EXIT_FAILED if number is None else 128 + number


# --- started by torchrun or srun ---


def _lead(job: RankJob, config: RunConfig) -> int:
    """Rank 0: hand the job to the others and run it with them."""
    here = launched.local_world_size()
    if config.engine.nproc not in (None, here):
        problem = f"a launcher has started {here} processes on this machine"
        raise config_error("engine.nproc", config.engine.nproc, problem, remedy="leave engine.nproc out")
    store, _, _ = _meet()
    store.set(_JOB, json.dumps(asdict(job)))
    return run_rank(job, join(config, store))


def follow() -> int:
    """Every other rank: wait for what rank 0 says, and do it."""
    store, _, _ = _meet()
    told = json.loads(store.get(_JOB))
    store.add(_SEEN, 1)
    if "exit_code" in told:
        return int(told["exit_code"])
    job = RankJob(**told)
    return run_rank(job, join(job.config(), store))


def release(exit_code: int) -> None:
    """Rank 0 has ended: the others, if they still wait for a job, end as well."""
    if dist.is_initialized() or (_met is None and exit_code == 0 and "MASTER_ADDR" not in os.environ):
        return
    store, _, size = _meet()
    if store.check([_JOB]):
        return
    store.set(_JOB, json.dumps({"exit_code": exit_code}))
    deadline_s = time.monotonic() + _SEEN_WITHIN_S
    while store.add(_SEEN, 0) < size - 1 and time.monotonic() < deadline_s:
        time.sleep(0.05)


_met: tuple[Store, int, int] | None = None


def _meet() -> tuple[Store, int, int]:
    """The store of all ranks, the number of this one, and how many there are; once per process."""
    global _met
    if _met is None:
        launched.name_slurm_ranks_as_torchrun()
        _met = next(rendezvous("env://", timeout=_STARTED_WITHIN))
    return _met


# --- every rank ---


def join(config: RunConfig, store: Store | None = None) -> Ranks:
    """Become one of the ranks; returns the view of them from here."""
    if store is None:
        store, rank, size = _meet()
    else:
        rank, size = launched.rank(), launched.world_size()
    local_rank = launched.local_rank()
    on_cuda = config.runtime.device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        if local_rank >= torch.cuda.device_count():
            problem = (
                f"rank {rank} finds {torch.cuda.device_count()} CUDA devices for {launched.local_world_size()} ranks"
            )
            raise config_error(
                "engine.nproc", launched.local_world_size(), problem, remedy="runtime=cpu, or fewer ranks"
            )
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] == "":
        torch.set_num_threads(max(1, torch.get_num_threads() // launched.local_world_size()))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=PrefixStore("ckptplan/group", store),
        rank=rank,
        world_size=size,
    )
    ranks = Ranks(rank, size, local_rank, PrefixStore("ckptplan/run", store), tensor_size=config.engine.tp)
    return with_meshes(ranks, "cuda" if on_cuda else "cpu")


def run_rank(job: RankJob, ranks: Ranks) -> int:
    """The run as this rank does it; returns the exit code, after all ranks have done theirs where they agree."""
    folder = Path(job.folder)
    if not ranks.is_first:
        _log_warnings_only(ranks.rank)
    elif job.log_config is not None:
        logging.config.dictConfig(job.log_config)
    logging.captureWarnings(True)
    config = job.config()

    def run() -> int:
        return run_job(
            config,
            resolved=job.resolved,
            folder=folder,
            overrides=job.overrides,
            on_begin=lambda: point_latest_at(folder, Path(config.output_dir)),
            ranks=ranks,
        )

    code = exit_code_of(run, folder, tell=lambda: ranks.is_first or not ranks.has_shared_error)
    if not ranks.failed_alone:
        if ranks.is_first and job.exit_code_path is not None:
            Path(job.exit_code_path).write_text(str(code))
        dist.barrier()
        dist.destroy_process_group()
        return 0 if job.exit_code_path is not None else code
    return code


def _log_warnings_only(rank: int) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank}] %(message)s", stream=sys.stderr, force=True)
