"""Whole runs on several ranks, as a user starts them: against one process, killed, gone on with, joined."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptplan.record import STATUS_EXIT_CODES, load_metrics, load_result
from ckptplan.state import CheckpointManager

REPOSITORY = Path(__file__).parents[2]
TINY = (
    "debug=fast data=synthetic_tokens data.sequence_length=16 data.vocab_size=32 data.batch_size=8 data.num_samples=60 "
    "data.num_eval_samples=8 model.layers=2 model.width=16 model.heads=2 runtime=cpu logger=none cost=flops "
    "report=false planner=all budget_frac=1 proof.latency_trials=0 profile.num_trials=1 "
    "scheduler=constant scheduler.warmup_steps=0"
).split()
SAVES = ("state=sync", "state.every=1")
ENDS_WITHIN_S = 60


def start(folder: Path, *overrides: str, by: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    where = () if any(text.startswith("resume=") for text in overrides) else (f"hydra.run.dir={folder}",)
    return subprocess.Popen(
        [sys.executable, *by, str(REPOSITORY / "train.py"), *TINY, *where, *overrides],
        cwd=folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(folder: Path, *overrides: str, by: tuple[str, ...] = ()) -> tuple[int, str]:
    process = start(folder, *overrides, by=by)
    told, _ = process.communicate(timeout=300)
    return process.returncode, told


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in load_metrics(folder) if "train/loss" in row]


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank: a child of the run's own."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + 200
    while time.monotonic() < deadline_s and process.poll() is None:
        if (folder / "metrics.jsonl").is_file() and len(losses(folder)) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} never came: {process.communicate()[0]}")


def test_a_killed_rank_ends_all_and_the_run_goes_on_as_one_process_would(tmp_path: Path) -> None:
    """The shards of two ranks are saved after each step; epochs end with a short batch of 4."""
    folder = tmp_path / "sharded"
    process = start(folder, "engine=fsdp2", "engine.nproc=2", "steps=100000", *SAVES)
    wait_for_step(process, folder, 9)
    worker(process, 1).kill()
    started_s = time.monotonic()
    told, _ = process.communicate(timeout=120)
    assert time.monotonic() - started_s < ENDS_WITHIN_S
    result = load_result(folder)
    assert (process.returncode, result["status"]) == (1, "failed")
    assert result["error"]["signal"] == "SIGKILL"
    assert "rank 1 was ended by SIGKILL" in result["error"]["message"]
    assert "rank 1 was ended by SIGKILL" in told
    with CheckpointManager(folder / "state", mode="sync") as states:
        states.claim()  # waits for the writers of the killed run, which finish what they were handed
        done = max(states.steps())
    code, told = run(folder, "engine=fsdp2", "engine.nproc=2", f"steps={done + 3}", *SAVES, f"resume={folder}")
    assert code == 0, told
    resumed = load_result(folder)
    assert resumed["state"]["resumed_step"] == done
    code, told = run(tmp_path / "alone", f"steps={done + 3}", "state=off")
    assert code == 0, told
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert len(losses(folder)) == done + 3
    assert [row["rank"] for row in resumed["engine"]["per_rank"]] == [0, 1]
    for row in resumed["engine"]["per_rank"]:
        assert abs(row["prediction_error"]) <= 0.02


@pytest.mark.slow
def test_a_peak_of_head_and_loss_over_shards_is_not_predicted_too_high(tmp_path: Path) -> None:
    """The loss's own backward is over before the last block's weights are gathered.

    On a busy machine a step on gloo was seen to take up to 2.3 % more, in one of seven runs; else it is exact.
    """
    settings = ("data.vocab_size=4000", "model.layers=4", "model.width=64", "model.heads=4", "planner=none", "steps=1")
    code, told = run(tmp_path / "run", "engine=fsdp2", "engine.nproc=2", *settings)
    assert code in (0, STATUS_EXIT_CODES["mismatch"]), told
    result = load_result(tmp_path / "run")
    assert result["memory"]["peak_at"] == "head and loss backward"
    assert all(-0.03 < rank["prediction_error"] <= 0 for rank in result["engine"]["per_rank"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_saved_on_four_ranks_it_goes_on_on_two(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "run"
    for steps, ranks, resume in ((4, 4, ()), (7, 2, (f"resume={folder}",))):
        code, told = run(folder, f"engine={engine}", f"engine.nproc={ranks}", f"steps={steps}", *SAVES, *resume)
        assert code == 0, told
    code, told = run(tmp_path / "alone", "steps=7", "state=off")
    assert code == 0, told
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


@pytest.mark.slow
def test_cut_over_four_ranks_it_goes_on_on_other_meshes(tmp_path: Path) -> None:
    """Two share each matrix, two such pairs a batch: then four share a batch, two the matrices, one has it all."""
    clipped = ("model.separate_qkv=true", "clip_norm=1.0")
    first = tmp_path / "first"
    code, told = run(first, "engine=fsdp2", "engine.dp=2", "engine.tp=2", "steps=3", *clipped, *SAVES)
    assert code == 0, told
    engine = load_result(first)["engine"]
    assert (engine["ranks"], engine["tensor_ranks"], len(engine["per_rank"])) == (4, 2, 4)
    for row in engine["per_rank"]:
        assert abs(row["prediction_error"]) <= 0.02
    code, told = run(tmp_path / "alone", "steps=6", "state=off", *clipped)
    assert code == 0, told
    for name, mesh in (
        ("shared", ("engine=fsdp2", "engine.nproc=4")),
        ("cut", ("engine=fsdp2", "engine.dp=1", "engine.tp=2")),
        ("one", ("engine=fsdp2", "engine.nproc=1")),
    ):
        folder = tmp_path / name
        shutil.copytree(first, folder)
        code, told = run(folder, *mesh, "steps=6", *clipped, *SAVES, f"resume={folder}")
        assert code == 0, told
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_engine_on_one_rank_is_predicted_and_trains_as_one_process(tmp_path: Path, engine: str) -> None:
    code, told = run(tmp_path / "run", f"engine={engine}", "engine.nproc=1", "steps=4", *SAVES)
    assert code == 0, told
    assert f"{engine} on 1 rank, cpu float32" in told
    assert abs(load_result(tmp_path / "run")["memory"]["prediction_error"]) <= 0.01
    code, told = run(tmp_path / "alone", "steps=4", "state=off")
    assert code == 0, told
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_with_processes_that_read_and_a_shared_profile_train_the_same(tmp_path: Path, engine: str) -> None:
    """The second run takes its profile from the first one's; one of its ranks measures for both in the first."""
    shared = (f"engine={engine}", "engine.nproc=2", "steps=9", "state=off", f"profile.cache={tmp_path / 'profiles'}")
    for name, more in (("first", ()), ("second", ("data_workers=1",))):
        code, told = run(tmp_path / name, *shared, *more)
        assert code == 0, told
    assert load_result(tmp_path / "second")["profile"]["source"] == "shared"
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 1
    assert losses(tmp_path / "second") == losses(tmp_path / "first")
    plans = [(tmp_path / name / "plan.json").read_bytes() for name in ("first", "second")]
    assert plans[0] == plans[1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_compiled_blocks_on_ranks(tmp_path: Path, engine: str) -> None:
    """Order: plan, then compile, then sharding."""
    wanted = ("planner=text", "planner.text='C0[0.5] C1[1.0]'", "cost=time")
    code, told = run(tmp_path / "run", f"engine={engine}", "engine.nproc=2", "steps=2", "state=off", *wanted)
    assert code == 0, told
    result = load_result(tmp_path / "run")
    assert result["plan"]["text"] == "C0[0.5] C1[1.0]"
    assert result["gradients"]["passed"]
    assert abs(result["memory"]["prediction_error"]) <= 0.02


@pytest.mark.slow
def test_ranks_of_torchrun_make_one_folder_and_a_signal_to_one_stops_all_at_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "joined"
    by = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0")
    process = start(folder, "engine=ddp", "steps=100000", "state=sync", by=(*by, "--rdzv-backend", "c10d"))
    wait_for_step(process, folder, 3)
    worker(process, 1).send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    result = load_result(folder)
    assert result["status"] == "interrupted"
    assert result["state"]["step"] == len(losses(folder))
    assert result["engine"]["ranks"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine=ddp", "engine.nproc=3"), "data.batch_size=8: it is the size over all ranks"),
        (
            ("engine=ddp", "engine.nproc=2", "engine.tp=2"),
            "engine.tp=2: cut matrices are trained by engine=fsdp2",
        ),
        (("engine=fsdp2", "engine.nproc=3", "engine.tp=2"), "engine.tp=2: 3 ranks are no multiple of it"),
        (("engine=fsdp2", "engine.nproc=4", "engine.dp=4", "engine.tp=2"), "engine.dp=4: 4 ranks, 2 to each matrix"),
        (
            ("engine=fsdp2", "engine.dp=3", "engine.tp=2"),
            "data.batch_size=8: it is the size over all ranks, and 3 ranks",
        ),
        (("engine=fsdp2", "engine.nproc=2", "engine.tp_plan={head: colwise}"), "nothing is cut with engine.tp=1"),
        (("engine=fsdp2", "engine.tp=2", "engine.tp_plan=[head]"), "expected module paths or patterns, and how"),
        (
            ("engine=fsdp2", "engine.tp=2", "+optimizer.foreach=true"),
            "optimizer.foreach=True: engine.tp spreads weights",
        ),
        (("engine.nproc=2",), "engine.nproc=2: engine=single is one process"),
        (("engine=fsdp2", "engine.nproc=2", "runtime.dtype=fp16_mixed"), "no loss scaling over shards"),
        (("engine=dpp",), "engine=dpp: there is no such option"),
    ],
)
def test_what_no_ranks_can_run_is_refused_before_any_is_started(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from ckptplan import cli

    monkeypatch.chdir(tmp_path)
    assert cli.main([*TINY, *overrides]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sharding_that_this_torch_cannot_do_on_a_cpu_is_refused(
    tmp_path: Path, monkeypatch: Any, capsys: Any, quiet_logging: None
) -> None:
    """As torch 2.6 is."""
    import torch

    from ckptplan import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    assert cli.main([*TINY, "engine=fsdp2", "engine.nproc=2"]) == 2
    assert "shards over CUDA devices only\n  type: engine=ddp, or a newer torch" in capsys.readouterr().err


def test_one_process_is_not_run_many_times_by_a_launcher(
    tmp_path: Path, monkeypatch: Any, capsys: Any, quiet_logging: None
) -> None:
    from ckptplan import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([*TINY]) == 2
    assert "a launcher started 4 processes" in capsys.readouterr().err


def test_slurm_is_read_as_torchrun(monkeypatch: Any) -> None:
    from ckptplan import launched

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "x")  # so that it is taken away again afterwards
        monkeypatch.delenv(name)
    for name, value in {
        "PROCID": "5", "STEP_NUM_TASKS": "8", "LOCALID": "1", "STEP_TASKS_PER_NODE": "4(x2)", "JOB_ID": "123456",
        "STEP_NODELIST": "node[07-08]",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    launched.name_slurm_ranks_as_torchrun()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["5", "8", "1", "4", "node07", "23456"]
    assert [launched.first_host(text) for text in ("a", "a,b", "gpu[1,3-4],x")] == ["a", "a", "gpu1"]
