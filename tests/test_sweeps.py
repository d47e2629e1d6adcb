"""Many runs: every job leaves a result whatever becomes of it, and the others go on."""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from ckptplan import cli, sweeps
from ckptplan.config import SweepConfig
from ckptplan.config.loading import load_config
from ckptplan.config.wording import shell_override
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.jobs import Job, RunningJob, run_in_process
from ckptplan.record import BudgetRecord, MemoryRecord, RunRecorder, RunResult, load_result
from ckptplan.sweep_table import describe, table_row
from ckptplan.sweeps import finished_jobs, newest_sweep, run_jobs, set_aside, sole_sweep

Compose = Callable[..., DictConfig]
REPOSITORY = Path(cli.__file__).resolve().parent.parent

WRITE_RESULT = """
import sys
from ckptplan.record import RunRecorder, RunResult
with RunRecorder(sys.argv[1]) as recorder:
    recorder.write_result(RunResult(status="ok", planner="dp", seed=1))
"""

TORN_RESULT = "import sys; open(sys.argv[1] + '/result.json', 'w').write('{')"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def make_job(folder: Path, program: str, index: int = 0) -> Job:
    """A job whose process runs ``program`` with the job's folder as its argument."""
    job_folder = folder / f"{index:03d}_dp_0.5_00000000"
    command = (sys.executable, "-c", textwrap.dedent(program), str(job_folder))
    known = RunResult(planner="dp", seed=index, config_hash="ab" * 32, budget=BudgetRecord("budget_frac", 0.5))
    return Job(index, (f"seed={index}",), job_folder, command, known)


@pytest.mark.parametrize(
    ("program", "status", "kind", "message", "signal_name"),
    [
        ("import os; os.kill(os.getpid(), 9)", "failed", "SIGKILL", "out of memory", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", "failed", "SIGSEGV", "ended by SIGSEGV", "SIGSEGV"),
        ("raise RuntimeError('boom')", "failed", "exit code 1", "RuntimeError: boom", None),
        ("import sys; sys.exit('error: stpes=5')", "failed", "exit code 1", "error: stpes=5", None),
        ("import sys; print('error: x=1'); sys.exit(2)", "failed", "ConfigError", "error: x=1", None),
        ("pass", "failed", "exit code 0", "no output", None),
        (
            "import sys; open(sys.argv[1] + '/result.json', 'w').write('{')",
            "failed",
            "no result",
            "not valid JSON",
            None,
        ),
        (WRITE_RESULT + "import os; os.kill(os.getpid(), 9)", "failed", "SIGKILL", "ended by SIGKILL", "SIGKILL"),
    ],
    ids=["killed", "segfault", "raised", "exit text", "bad config", "silent", "torn", "killed after its result"],
)
def test_a_job_that_ends_badly_leaves_a_whole_result(
    tmp_path: Path, program: str, status: str, kind: str, message: str, signal_name: str | None
) -> None:
    job = make_job(tmp_path, program)
    result = run_in_process(job)
    assert result == load_result(job.folder)
    assert result["status"] == status
    assert result["error"]["type"] == kind
    assert message in result["error"]["message"]
    assert result["error"]["signal"] == signal_name
    assert (result["planner"], result["memory"]["measured_peak_bytes"]) == ("dp", None)


def test_the_result_that_a_job_wrote_is_taken_as_it_is(tmp_path: Path) -> None:
    job = make_job(tmp_path, WRITE_RESULT + "print('done')")
    assert run_in_process(job) == RunResult(status="ok", planner="dp", seed=1).to_dict()
    assert (job.folder / "console.log").read_text() == "done\n"


def test_a_job_over_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    program = """
    import subprocess, sys, pathlib, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
    time.sleep(60)
    """
    job = make_job(tmp_path, program)
    result = run_in_process(job, timeout_s=2.0)
    assert result["status"] == "timeout"
    assert "2 s" in result["error"]["message"]
    child = int((job.folder / "child").read_text())
    assert _is_gone(child)


def _is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # dead, and waiting for whoever adopted it
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_the_others_go_on_after_a_failure_and_the_sweep_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    jobs = [make_job(tmp_path, WRITE_RESULT, 0), make_job(tmp_path, "1/0", 1), make_job(tmp_path, WRITE_RESULT, 2)]
    with pytest.raises(CkptplanError, match=r"1 of 3 jobs failed: 001_dp_0\.5_00000000"):
        run_jobs(jobs, tmp_path)
    assert [load_result(job.folder)["status"] for job in jobs] == ["ok", "failed", "ok"]
    text = caplog.text
    first_job = text.index("[1/3] seed=0")
    assert all(text.index(f"{index}  seed={index}") < first_job for index in range(3))  # the list stands before
    assert text.index("ZeroDivisionError") < text.index("[3/3] seed=2")  # a failure is shown when it happens
    table = capsys.readouterr().out
    assert [line.split()[1] for line in table.splitlines()[1:4]] == ["ok", "failed", "ok"]


def test_the_table_grows_as_jobs_end(tmp_path: Path) -> None:
    look = (
        WRITE_RESULT
        + f"""
from pathlib import Path
Path(sys.argv[1], "seen").write_text(Path({str(tmp_path)!r}, "results.jsonl").read_text())
"""
    )
    jobs = [make_job(tmp_path, WRITE_RESULT, 0), make_job(tmp_path, look, 1)]
    run_jobs(jobs, tmp_path)
    assert len((jobs[1].folder / "seen").read_text().splitlines()) == 1


def test_fail_fast_stops_at_the_first_failure(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, "1/0", 0), make_job(tmp_path, WRITE_RESULT, 1)]
    with pytest.raises(CkptplanError, match="1 of 2 jobs failed"):
        run_jobs(jobs, tmp_path, SweepConfig(fail_fast=True))
    assert not jobs[1].folder.exists()


@pytest.mark.parametrize("status", ["ok", "infeasible", "over_budget", "oom"])
def test_an_answer_that_is_not_ok_does_not_fail_the_sweep(tmp_path: Path, status: str) -> None:
    run_jobs([make_job(tmp_path, WRITE_RESULT.replace('"ok"', f'"{status}"'))], tmp_path)


@pytest.mark.parametrize("status", ["failed", "mismatch", "timeout", "interrupted"])
def test_any_other_status_fails_the_sweep(tmp_path: Path, status: str) -> None:
    with pytest.raises(CkptplanError, match="1 of 1 jobs failed"):
        run_jobs([make_job(tmp_path, WRITE_RESULT.replace('"ok"', f'"{status}"'))], tmp_path)


def test_the_table_holds_a_row_per_job_with_seed_and_hash(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, WRITE_RESULT, 0), make_job(tmp_path, "1/0", 1)]
    with pytest.raises(CkptplanError):
        run_jobs(jobs, tmp_path)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["ok", "failed"]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["index"], row["status"], row["seed"]) for row in rows] == [("0", "ok", "1"), ("1", "failed", "1")]
    assert rows[1]["config_hash"] == "ab" * 32
    markdown = (tmp_path / "results.md").read_text().splitlines()
    assert len(markdown) == 4
    assert len({line.count("|") for line in markdown}) == 1


def test_a_row_takes_its_figures_from_the_result(tmp_path: Path) -> None:
    result = RunResult(status="ok", planner="dp", memory=MemoryRecord(measured_peak_bytes=3 * 2**20)).to_dict()
    result["latency"]["overhead_ratio"] = 0.08
    row = table_row(result, make_job(tmp_path, ""))
    assert (row["job"], row["planner"], row["measured_peak_bytes"]) == ("000_dp_0.5_00000000", "dp", 3 * 2**20)
    assert (row["overhead_ratio"], row["last_loss"]) == (0.08, None)
    assert describe(result) == "ok, peak 3.00 MiB, step time +8.0 %"


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["ctrl-c", "sigterm", "sighup"]
)
def test_a_stopped_sweep_keeps_what_there_is(tmp_path: Path, signal_number: int) -> None:
    """The sweep in a process of its own: one job done, one stopped, one never begun."""
    program = f"""
    import sys
    from pathlib import Path
    from tests.test_sweeps import WRITE_RESULT, make_job
    from ckptplan.sweeps import SweepTerminated, run_jobs
    folder = Path({str(tmp_path)!r})
    sleep = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'begun').touch(); time.sleep(60)"
    jobs = [make_job(folder, WRITE_RESULT, 0), make_job(folder, sleep, 1), make_job(folder, WRITE_RESULT, 2)]
    try:
        run_jobs(jobs, folder)
    except SweepTerminated as error:
        sys.exit(128 + error.signal_number)
    except KeyboardInterrupt:
        sys.exit(130)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    folders = [tmp_path / f"{index:03d}_dp_0.5_00000000" for index in range(3)]
    for _ in range(300):
        if (folders[1] / "begun").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal_number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal_number
    assert load_result(folders[0])["status"] == "ok"
    stopped = load_result(folders[1])
    assert (stopped["status"], stopped["error"]["signal"]) == ("interrupted", signal.Signals(signal_number).name)
    assert not folders[2].exists()
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


# --- several at once --------------------------------------------------------------------------------------------------

MEET = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.joinpath("begun").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
deadline = time.monotonic() + 30
while len(list(folder.parent.glob("*/begun"))) < 2:  # ends only beside another
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def test_jobs_at_once_run_beside_each_other_and_the_table_keeps_their_order(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, MEET + WRITE_RESULT, index) for index in range(3)]
    found = run_jobs(jobs, tmp_path, SweepConfig(parallel=2))
    assert [job.index for job, _ in found] == [0, 1, 2]
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


def test_each_device_has_one_job_at_a_time(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, MEET + WRITE_RESULT, index) for index in range(4)]
    run_jobs(jobs, tmp_path, SweepConfig(devices=[5, 3]))
    seen = [(job.folder / "begun").read_text() for job in jobs]
    assert seen[:2] == ["5", "3"]
    assert set(seen[2:]) <= {"5", "3"}


def test_devices_are_counted_among_those_that_the_sweep_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue gives a job its share of a node so, by number or by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7a")
    jobs = [make_job(tmp_path, MEET + WRITE_RESULT, index) for index in range(2)]
    run_jobs(jobs, tmp_path, SweepConfig(devices=[0, 1]))
    assert [(job.folder / "begun").read_text() for job in jobs] == ["6", "GPU-7a"]
    with pytest.raises(ConfigError, match=r"sweep\.devices=2: CUDA_VISIBLE_DEVICES=6,GPU-7a leaves 2"):
        run_jobs([make_job(tmp_path, WRITE_RESULT, 9)], tmp_path, SweepConfig(devices=[2]))


def test_a_job_that_hangs_beside_others_ends_alone(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, "import time; time.sleep(60)", 0), make_job(tmp_path, WRITE_RESULT, 1)]
    with pytest.raises(CkptplanError, match=r"1 of 2 jobs failed: 000_dp_0\.5_00000000"):
        run_jobs(jobs, tmp_path, SweepConfig(parallel=2, timeout_s=3.0))
    assert [load_result(job.folder)["status"] for job in jobs] == ["timeout", "ok"]


def test_a_fault_of_the_sweep_itself_leaves_no_job_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(rows: list[Any], results: list[Any], folder: Path) -> None:
        if len(results) == 1 and results[0]["status"] == "ok":
            raise OSError(28, "No space left on device", "results.jsonl")

    monkeypatch.setattr(sweeps, "write_table", full)
    sleep = """
    import os, pathlib, sys, time
    pathlib.Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    time.sleep(60)
    """
    wait = """
    import pathlib, sys, time
    while not list(pathlib.Path(sys.argv[1]).parent.glob("*/pid")):
        time.sleep(0.02)
    """
    jobs = [make_job(tmp_path, textwrap.dedent(wait) + WRITE_RESULT, 0), make_job(tmp_path, sleep, 1)]
    with pytest.raises(OSError, match="No space left"):
        run_jobs(jobs, tmp_path, SweepConfig(parallel=2))
    assert _is_gone(int((jobs[1].folder / "pid").read_text()))
    assert load_result(jobs[1].folder)["status"] == "interrupted"


# --- going on ---------------------------------------------------------------------------------------------------------


def with_hash(job: Job, config_hash: str, status: str | None = None) -> Job:
    """The job under another hash, with a result of this status in its folder if one is given."""
    job = dataclasses.replace(job, result=dataclasses.replace(job.result, config_hash=config_hash))
    if status is not None:
        job.folder.mkdir()
        with RunRecorder(job.folder) as recorder:
            recorder.write_result(dataclasses.replace(job.result, status=status))
    return job


def test_a_sweep_waits_for_the_job_that_a_killed_one_has_left_and_no_other_enters_meanwhile(tmp_path: Path) -> None:
    job = make_job(tmp_path, "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'on').touch(); time.sleep(60)")
    with sole_sweep(tmp_path) as held:
        running = RunningJob(job, held=held)
        with pytest.raises(ConfigError, match="is still running in this folder"), sole_sweep(tmp_path, wait_s=0.2):
            pass
    try:  # the sweep is gone, its job is not
        while not (job.folder / "on").exists():
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="is still running in this folder"), sole_sweep(tmp_path, wait_s=0.2):
            pass
    finally:
        running.process.kill()
        running.process.wait()
    with sole_sweep(tmp_path, wait_s=0.2):
        assert sorted(path.name for path in tmp_path.iterdir()) == [job.folder.name]


def test_what_gave_an_answer_is_done_and_each_folder_stands_for_one_job(tmp_path: Path) -> None:
    statuses = ["ok", "failed", "infeasible", "oom", "over_budget", "timeout", "interrupted", "mismatch"]
    jobs = [with_hash(make_job(tmp_path, "", i), f"{i}" * 64, status) for i, status in enumerate(statuses)]
    twin = with_hash(make_job(tmp_path, "", 8), "0" * 64)
    found = finished_jobs([*jobs, twin], tmp_path)
    assert {index: result["status"] for index, (_, result) in found.items()} == {
        0: "ok",
        2: "infeasible",
        3: "oom",
        4: "over_budget",
    }
    assert found[0][0] == jobs[0].folder
    (jobs[0].folder / "result.json").write_text("{")
    assert 0 not in finished_jobs(jobs, tmp_path)


def test_a_done_job_is_not_run_and_stands_in_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    jobs = [with_hash(make_job(tmp_path, "1/0", 0), "a" * 64, "ok"), make_job(tmp_path, WRITE_RESULT, 1)]
    done = {index: result for index, (_, result) in finished_jobs(jobs, tmp_path).items()}
    found = run_jobs(jobs, tmp_path, done=done)
    assert [result["status"] for _, result in found] == ["ok", "ok"]
    assert not (jobs[0].folder / "console.log").exists()
    assert "0  seed=0  (done: ok)" in caplog.text
    assert "[1/1] seed=1" in caplog.text
    with (tmp_path / "results.csv").open(newline="") as file:
        assert [row["index"] for row in csv.DictReader(file)] == ["0", "1"]


def test_writing_the_table_again_changes_nothing(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, WRITE_RESULT, index) for index in range(2)]
    done = {job.index: result for job, result in run_jobs(jobs, tmp_path)}
    before = {path.name: path.read_text() for path in tmp_path.glob("results.*")}
    run_jobs(jobs, tmp_path, done=done)
    assert len(before) == 3
    assert {path.name: path.read_text() for path in tmp_path.glob("results.*")} == before


def test_an_earlier_attempt_is_kept_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "000_dp_0.5_aa"
    for text in ("first", "second"):
        folder.mkdir()
        (folder / "result.json").write_text(text)
        set_aside(folder)
        assert not folder.exists()
    set_aside(folder)
    kept = sorted((tmp_path / "earlier").glob("*/result.json"))
    assert [(path.parent.name, path.read_text()) for path in kept] == [
        ("000_dp_0.5_aa", "first"),
        ("000_dp_0.5_aa_2", "second"),
    ]


# --- from the command line to the jobs --------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """``-m`` up to the point where the first job would start: the jobs that it would run."""
    jobs: list[Job] = []

    def record(
        found: list[Job], folder: Path, settings: SweepConfig, done: dict[int, dict[str, Any]], **_: Any
    ) -> None:
        assert (settings, done) == (SweepConfig(), {})
        jobs.extend(found)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "run_jobs", record)
    return jobs


def config_of(job: Job, compose: Compose) -> DictConfig:
    """What the job's own command line composes to."""
    assert job.command[1:5] == ("-m", "ckptplan", "--config-name", "train")
    return compose(*job.command[5:])


def test_every_job_composes_to_its_own_run(planned: list[Job], compose: Compose, tmp_path: Path) -> None:
    assert cli.main(["-m", "planner=dp,greedy", "budget_frac=0.3,0.5", "name=x"]) == 0
    loaded = [load_config(config_of(job, compose)) for job in planned]
    assert [(run.planner.name, run.budget_frac, run.name) for run in loaded] == [
        ("dp", 0.3, "x"),
        ("dp", 0.5, "x"),
        ("greedy", 0.3, "x"),
        ("greedy", 0.5, "x"),
    ]
    for index, job in enumerate(planned):
        composed = config_of(job, compose)
        assert job.folder.name.startswith(f"{index:03d}_{'dp' if index < 2 else 'greedy'}_0.{'35'[index % 2]}_")
        assert job.folder.parent.parent.parent == tmp_path / "outputs" / "multirun"
        assert Path(composed.hydra.run.dir) == job.folder
        assert str(composed.hydra.mode) == "RunMode.RUN"
        assert composed.hydra.job.num == index
        # what the job would write itself and what the launcher writes for it name the same run
        assert job.folder.name.endswith(job.result.config_hash[:8])
    assert len({run.logger.group for run in loaded}) == 1
    assert loaded[0].logger.group


def test_an_awkward_value_reaches_every_job_as_the_same_text(planned: list[Job], compose: Compose) -> None:
    for text in ("a=b, {c} #1", "~/x", "007", "it's", "größe", "${seed}"):
        planned.clear()
        assert cli.main(["-m", *shlex.split(shell_override("name", text)), "seed=1,2"]) == 0
        assert [load_config(config_of(job, compose)).name for job in planned] == [text, text]


def test_a_coupled_sweep_is_two_jobs(planned: list[Job], compose: Compose) -> None:
    """A second key that follows the first, given by interpolation, adds no jobs."""
    arguments = ["-m", "optimizer.lr=0.1,0.2", "optimizer.weight_decay=${optimizer.lr}"]
    assert cli.main(arguments) == 0
    loaded = [load_config(config_of(job, compose)).optimizer for job in planned]
    assert [(run["lr"], run["weight_decay"]) for run in loaded] == [(0.1, 0.1), (0.2, 0.2)]


def test_equal_jobs_keep_folders_of_their_own(planned: list[Job]) -> None:
    assert cli.main(["-m", "seed=1,1,2"]) == 0
    assert len({job.folder for job in planned}) == 3
    assert planned[0].result.config_hash == planned[1].result.config_hash != planned[2].result.config_hash


def test_two_sweeps_of_the_same_second_share_nothing(planned: list[Job]) -> None:
    for _ in range(2):
        assert cli.main(["-m", "seed=1,2"]) == 0
    assert len({job.folder.parent for job in planned}) == 2


def test_a_sweep_into_an_old_folder_takes_other_names(planned: list[Job], tmp_path: Path) -> None:
    for _ in range(2):
        assert cli.main(["-m", "seed=1,2", "hydra.sweep.dir=mine"]) == 0
        for job in planned:
            job.folder.mkdir(exist_ok=True)
    assert len({job.folder for job in planned}) == 4
    assert {job.folder.parent for job in planned} == {tmp_path / "mine"}


def test_a_key_of_a_swept_group_is_checked_against_each_member(planned: list[Job], compose: Compose) -> None:
    assert cli.main(["-m", "model=resnet,vit", "data.image_size=64"]) == 0
    assert [load_config(config_of(job, compose)).data["image_size"] for job in planned] == [64, 64]


def test_a_fault_in_one_job_stops_all_before_the_first(planned: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "budget_frac=0.5,2"]) == 2
    assert "budget_frac=2.0" in capsys.readouterr().err
    assert planned == []
    assert not list(Path.cwd().rglob("multirun.yaml"))


def test_an_empty_list_of_values_is_told(planned: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "seed=range(0,0)"]) == 2
    assert capsys.readouterr().err.startswith("error: no values to run")
    assert planned == []
    assert not list(Path.cwd().rglob("multirun.yaml"))


def test_a_folder_of_the_users_own_configs_reaches_the_jobs(planned: list[Job], tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "good.yaml").write_text("# @package _global_\nsteps: 7\n")
    assert cli.main(["-m", "--config-dir", "mine", "experiment=good", "seed=1,2"]) == 0
    position = planned[0].command.index("--config-dir")
    assert Path(planned[0].command[position + 1]) == tmp_path / "mine"


def test_sweep_py_is_four_planners_at_five_budgets(
    planned: list[Job],
    compose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", "logger=none"])
    with pytest.raises(SystemExit) as ended:
        cli.sweep_main()
    assert ended.value.code == 0
    loaded = [load_config(config_of(job, compose)) for job in planned[::7]]
    assert len(planned) == 20
    assert {run.logger.kind for run in loaded} == {"none"}
    assert len({job.result.config_hash for job in planned}) == 20


# --- sweep.resume -----------------------------------------------------------------------------------------------------

Again = list[tuple[list[Job], Path, dict[int, dict[str, Any]]]]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Again:
    """Sweeps in which job 1 fails the first time: what each was asked to run, where, and what it found done."""
    calls: Again = []

    def record(jobs: list[Job], folder: Path, settings: SweepConfig, done: dict[int, dict[str, Any]], **_: Any) -> None:
        calls.append((jobs, folder, done))
        for job in jobs:
            if job.index not in done:
                job.folder.mkdir(parents=True)
                with RunRecorder(job.folder) as recorder:
                    status = "failed" if job.index == 1 and len(calls) == 1 else "ok"
                    recorder.write_result(dataclasses.replace(job.result, status=status))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "run_jobs", record)
    return calls


@pytest.mark.parametrize("where", ["true", "path", "name"])
def test_a_second_call_runs_only_what_failed_or_is_missing(again: Again, where: str) -> None:
    assert cli.main(["-m", "seed=1,2,3"]) == 0
    [(first, folder, _)] = again
    shutil.rmtree(first[2].folder)
    resume = {"true": "true", "path": str(folder), "name": "/".join(folder.parts[-2:])}[where]
    assert cli.main(["-m", "seed=1,2,3", f"sweep.resume={resume}"]) == 0
    jobs, second_folder, done = again[1]
    assert second_folder == folder
    assert {index: result["status"] for index, result in done.items()} == {0: "ok"}
    assert [job.folder for job in jobs] == [job.folder for job in first]
    assert load_result(folder / "earlier" / first[1].folder.name)["status"] == "failed"
    assert cli.main(["-m", "seed=1,2,3", f"sweep.resume={resume}"]) == 0
    assert list(again[2][2]) == [0, 1, 2]
    assert len(list((folder.parent.parent).glob("*/*"))) == 1


def test_more_values_run_only_the_new_jobs(again: Again) -> None:
    assert cli.main(["-m", "seed=1,3"]) == 0
    folder = again[0][1]
    assert cli.main(["-m", "seed=1,2,3", f"sweep.resume={folder}"]) == 0
    jobs, _, done = again[1]
    assert list(done) == [0]  # job 1 was the one that failed
    assert len({job.folder for job in jobs}) == 3


def test_another_sweep_is_not_gone_on_with_by_itself(again: Again, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["-m", "seed=1,2"]) == 0
    assert cli.main(["-m", "seed=1,2", "steps=7", "sweep.resume=true"]) == 0
    assert again[1][1] != again[0][1]
    assert again[1][2] == {}
    assert cli.main(["-m", "seed=1,2", "sweep.fail_fast=true", "logger=none", "sweep.resume=true"]) == 0
    assert again[2][1] == again[0][1]


def test_a_sweep_that_is_not_there_is_told_before_a_job_starts(
    again: Again, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", "seed=1,2", "sweep.resume=outputs/nowhere"]) == 2
    assert "sweep.resume=outputs/nowhere: there is no such sweep" in capsys.readouterr().err
    assert again == []
    assert not list(Path.cwd().rglob("multirun.yaml"))


def test_a_multirun_yaml_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    for name, text in (("1", "hydra: {overrides: {task: [seed=1]}}"), ("2", "{"), ("3", "[]"), ("4", "x: 1")):
        (tmp_path / "day" / name).mkdir(parents=True)
        (tmp_path / "day" / name / "multirun.yaml").write_text(text)
    assert newest_sweep(tmp_path, ["seed=1", "sweep.resume=true"]) == tmp_path / "day" / "1"
    assert newest_sweep(tmp_path, ["seed=2"]) is None


# --- one profile for all ----------------------------------------------------------------------------------------------


def test_the_jobs_share_the_profiles_of_their_sweep(planned: list[Job], compose: Compose) -> None:
    assert cli.main(["-m", "planner=dp,greedy"]) == 0
    loaded = [load_config(config_of(job, compose)).profile for job in planned]
    assert {run.cache for run in loaded} == {str(planned[0].folder.parent / "profiles")}
    assert {run.options for run in loaded} == {None}


def test_options_are_measured_for_all_if_one_planner_needs_them(planned: list[Job], compose: Compose) -> None:
    assert cli.main(["-m", "planner=dp,optimal", "profile.cache=mine"]) == 0
    loaded = [load_config(config_of(job, compose)).profile for job in planned]
    assert [(run.cache, run.options) for run in loaded] == [("mine", True), ("mine", True)]


def test_code_that_raises_at_import_fails_its_job_and_a_typo_stops_the_sweep(
    planned: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raises_at_import.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    other = "model._target_=ckptplan.models.GPT,"
    assert cli.main(["-m", f"{other}raises_at_import.Net"]) == 0
    assert len(planned) == 2
    assert "importing raises_at_import failed: SystemExit: no licence" in capsys.readouterr().err
    planned.clear()
    assert cli.main(["-m", f"{other}ckptplan.models.GTP"]) == 2
    assert planned == []


@pytest.mark.slow
def test_joblibs_workers_run_jobs_as_they_are(tmp_path: Path) -> None:
    """Hydra's plugin, beside our own launcher; devices are tested in test_runtime.py."""
    arguments = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2", "debug=fast", "steps=3"]
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments, "logger=none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [sweep] = (tmp_path / "outputs" / "multirun").glob("*/*")
    found = [load_result(folder) for folder in sorted(sweep.glob("0*"))]
    assert [(result["seed"], result["status"]) for result in found] == [(1, "ok"), (2, "ok")]


@pytest.mark.slow
def test_three_seeds_on_the_command_line_are_three_runs(tmp_path: Path) -> None:
    """Case C19, for real: a folder, a W&B run and a config for each job; equal seeds with equal losses."""
    arguments = ["-m", "seed=1,1,2", "debug=fast", "logger.kind=wandb", "steps=5", "model.layers=2", "model.width=32"]
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [sweep] = (tmp_path / "outputs" / "multirun").glob("*/*")
    folders = sorted(sweep.glob("0*"))  # beside them: the shared profiles, the sweep's own W&B run
    losses = []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["train/loss"] for line in lines if line.get("train/loss") is not None])
    assert [len(steps) for steps in losses] == [5, 5, 5]
    assert losses[0] == losses[1] != losses[2]
    assert [load_result(folder)["seed"] for folder in folders] == [1, 1, 2]
    assert [OmegaConf.load(folder / "config.yaml").seed for folder in folders] == [1, 1, 2]
    wandb_runs = [path.name for folder in folders for path in (folder / "wandb").glob("offline-run-*")]
    assert len({name.rpartition("-")[2] for name in wandb_runs}) == len(wandb_runs) == 3
