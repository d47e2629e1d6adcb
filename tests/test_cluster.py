"""Sweeps in a queue: submitit's local executor for real, and Slurm's commands played by scripts (there is no Slurm)."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptplan import cli, sweeps
from ckptplan.cluster import Queue
from ckptplan.config import SweepConfig
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.jobs import Job
from ckptplan.record import load_result
from ckptplan.sweeps import run_jobs
from tests.test_sweeps import WRITE_RESULT, make_job

# Trains until it is told to end, then saves; with resume= it ends well.
PREEMPTED = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
calls = folder / "calls.jsonl"
calls.open("a").write(json.dumps(sys.argv[2:]) + chr(10))
if len(sys.argv) > 2:
    from ckptplan.record import RunRecorder, RunResult
    with RunRecorder(folder) as recorder:
        recorder.write_result(RunResult(status="ok", planner="dp", seed=1))
    sys.exit()
def save(number, frame):
    if STATE:
        (folder / "state" / "step-3").mkdir(parents=True)
        (folder / "state" / "step-3" / "manifest.json").write_text("{}")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "begun").touch()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def local_queue(tmp_path: Path, **settings: Any) -> Queue:
    return Queue("local", tmp_path / ".submitit" / "%j", {"timeout_min": 60}, SweepConfig(**settings))


def wait_for(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def submitted(queue: Queue, job: Job) -> psutil.Process:
    """The process that submitit has started for a job: the parent of the job's own."""
    controller = psutil.Process(int(queue._open[job.index][1].job_id))
    wait_for(lambda: len(controller.children()) == 1)
    return controller.children()[0]


class InBackground(threading.Thread):
    """``run_jobs`` while the test plays the cluster."""

    def __init__(self, jobs: list[Job], folder: Path, queue: Queue) -> None:
        super().__init__(daemon=True)
        self._call = lambda: run_jobs(jobs, folder, runner=queue)
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = [result["status"] for _, result in self._call()]
        except CkptplanError as error:
            self.outcome = error

    def ended(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        return self.outcome


# --- submitit's local executor ---


def test_whatever_happens_to_a_job_the_others_go_on_and_all_stand_in_the_table(tmp_path: Path) -> None:
    programs = [WRITE_RESULT, "1/0", "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)", WRITE_RESULT]
    jobs = [make_job(tmp_path, program, index) for index, program in enumerate(programs)]
    with pytest.raises(CkptplanError, match="3 of 5 jobs failed"):
        run_jobs(jobs, tmp_path, runner=local_queue(tmp_path, timeout_s=3.0))
    statuses = ["ok", "failed", "failed", "timeout", "ok"]
    assert [load_result(job.folder)["status"] for job in jobs] == statuses
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == statuses
    assert "ZeroDivisionError" in load_result(jobs[1].folder)["error"]["message"]


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_job_that_is_put_back_saves_first_and_goes_on_in_its_folder(tmp_path: Path, has_saved: bool) -> None:
    job = make_job(tmp_path, f"STATE = {has_saved}" + PREEMPTED)
    queue = local_queue(tmp_path)
    sweep = InBackground([job], tmp_path, queue)
    wait_for(lambda: (job.folder / "begun").exists())
    (job.folder / "begun").unlink()
    submitted(queue, job).send_signal(signal.SIGUSR2)  # what Slurm sends before it takes a job off its node
    if not has_saved:
        wait_for(lambda: (job.folder / "begun").exists())  # from the start, as nothing was saved
        (job.folder / "state" / "step-3").mkdir(parents=True)
        (job.folder / "state" / "step-3" / "manifest.json").write_text("{}")
        submitted(queue, job).send_signal(signal.SIGUSR2)
    assert sweep.ended() == ["ok"]
    calls = [json.loads(line) for line in (job.folder / "calls.jsonl").read_text().splitlines()]
    resumed = [f'resume="{job.folder}"']
    assert calls == [[], resumed] if has_saved else [[], [], resumed]


@pytest.mark.slow  # submitit waits a while for the result of a task that was killed
def test_a_job_that_the_queue_ends_saves_and_tells_no_result_of_its_own(tmp_path: Path) -> None:
    """It may be put back without a word to submitit; a result would end it for good."""
    job = make_job(tmp_path, "STATE = True" + PREEMPTED)
    queue = local_queue(tmp_path)
    sweep = InBackground([job], tmp_path, queue)
    wait_for(lambda: (job.folder / "begun").exists())
    task = submitted(queue, job)
    trainer = task.children()[0]
    task.send_signal(signal.SIGTERM)
    wait_for(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE)
    assert (job.folder / "state" / "step-3" / "manifest.json").exists()
    time.sleep(1.0)
    assert sweep.is_alive(), "still under way, as far as anybody knows"
    task.kill()
    assert isinstance(sweep.ended(), CkptplanError)
    assert load_result(job.folder)["status"] == "failed"


def test_a_stopped_sweep_takes_its_jobs_back(tmp_path: Path) -> None:
    job = make_job(tmp_path, "STATE = True" + PREEMPTED)
    queue = local_queue(tmp_path)
    found = queue.each([job], ())
    threading.Thread(target=lambda: list(found), daemon=True).start()
    wait_for(lambda: (job.folder / "begun").exists())
    trainer = submitted(queue, job).children()[0]
    [(stopped, result)] = queue.stop(signal.SIGINT)
    assert (stopped, result["status"]) == (job, "interrupted")
    wait_for(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE)


# --- Slurm's commands, played ---

SBATCH = r"""#!/bin/bash
# Keeps the script, and runs each task of the array as Slurm would, with its output where the script wants it.
cp "$1" "$FAKE/script.sh"
count=$(sed -n 's/#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$1")
for task in $(seq 0 "$count"); do
  (export SLURM_JOB_ID=$((100 + task)) SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$task SLURM_NTASKS=1
   export SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=here
   bash "$FAKE/script.sh"; echo "77_$task|COMPLETED|here" >> "$FAKE/ended") > /dev/null 2>&1 &
done
echo "Submitted batch job 77"
"""
SRUN = r"""#!/bin/bash
if [ "$1" = --version ]; then echo "slurm 23.02.6"; exit; fi
while [[ "$1" == -* ]]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
"""
SACCT = r"""#!/bin/bash
echo "JobID|State|NodeList"; cat "$FAKE/ended" 2> /dev/null || true
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT), ("scancel", "#!/bin/bash\n")):
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def test_jobs_go_through_sbatch_as_one_array_with_what_the_user_asked_for(slurm: Path, tmp_path: Path) -> None:
    asked = {
        "timeout_min": 90, "partition": "gpu", "gpus_per_node": 1, "cpus_per_task": 8, "mem_gb": 32, "qos": None,
        "signal_delay_s": 120, "array_parallelism": 4, "max_num_timeout": 10, "nodes": 1, "tasks_per_node": 1,
        "additional_parameters": {"mail-type": "END"}, "setup": ["export FROM_SETUP=1"], "name": "train",
    }  # fmt: skip
    queue = Queue("slurm", tmp_path / ".submitit" / "%j", asked, SweepConfig())
    jobs = [make_job(tmp_path, WRITE_RESULT, 0), make_job(tmp_path, "1/0", 1)]
    with pytest.raises(CkptplanError, match="1 of 2 jobs failed"):
        run_jobs(jobs, tmp_path, runner=queue)
    assert [load_result(job.folder)["status"] for job in jobs] == ["ok", "failed"]
    script = (slurm / "script.sh").read_text()
    for line in (
        "--array=0-1%2", "--partition=gpu", "--gpus-per-node=1", "--cpus-per-task=8", "--mem=32GB", "--time=90",
        "--signal=USR2@120", "--mail-type=END", "--job-name=train", "--nodes=1",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script, line
    assert "export FROM_SETUP=1" in script
    assert "qos" not in script


def test_where_there_is_no_slurm_it_is_said_before_anything_is_queued(
    start_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(start_folder))
    assert cli.main(["-m", "hydra/launcher=submitit_slurm", "logger=none", "seed=1,2"]) == 2
    assert 'hydra/launcher=submitit_slurm: Could not detect "srun"' in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_missing_package_is_named_with_what_to_type(
    start_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    monkeypatch.setattr("ckptplan.cluster.importlib.util.find_spec", lambda name: None)
    assert cli.main(["-m", f"hydra/launcher=submitit_{cluster}", "seed=1,2"]) == 2
    error = capsys.readouterr().err
    assert f"hydra/launcher=submitit_{cluster}: it needs the package submitit" in error
    assert "pip install -e '.[slurm]'" in error


@pytest.mark.parametrize(
    ("settings", "parameters", "told"),
    [
        ({"devices": [0, 1]}, {}, "sweep.devices=.*hydra.launcher.gpus_per_node=1"),
        ({"parallel": 2}, {}, "sweep.parallel=2: .*hydra.launcher.array_parallelism=4"),
        ({}, {"nodes": 2}, "hydra.launcher.nodes=2: .*docs/slurm.md"),
        ({}, {"tasks_per_node": 4}, "hydra.launcher.tasks_per_node=4: .*docs/slurm.md"),
    ],
)
def test_what_a_queue_cannot_do_is_said_at_once(
    tmp_path: Path, settings: dict[str, Any], parameters: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        Queue("slurm", tmp_path, parameters, SweepConfig(**settings))


def test_the_slurm_experiment_is_the_default_sweep_with_states(
    start_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def record(jobs: list[Job], folder: Path, *rest: Any, runner: Queue, **_: Any) -> None:
        found.extend((jobs, runner))

    monkeypatch.setattr(sweeps, "run_jobs", record)
    asked_for = ["planner=dp,greedy", "budget_frac=0.5", "hydra.launcher.partition=gpu", "logger=none", "report=false"]
    assert cli.main(["experiment=slurm_sweep", *asked_for]) == 0
    jobs, runner = found
    assert len(jobs) == 2
    assert (runner._cluster, runner._parameters["partition"], runner._parameters["gpus_per_node"]) == (
        "slurm",
        "gpu",
        1,
    )
    assert runner._parameters["max_num_timeout"] == 10
    assert str(runner._folder).endswith("/.submitit/%j")


# --- the whole thing ---


@pytest.mark.slow
def test_a_sweep_by_submitit_leaves_what_any_sweep_leaves(
    start_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (start_folder / "mine.py").write_text("import torch\nclass Broken(torch.nn.Module):\n    def __init__(self): 1/0\n")
    command = [
        "-m",
        "hydra/launcher=submitit_local",
        "debug=fast",
        "report=true",
        "runtime.threads=1",
        "planner=dp,greedy",
    ]
    assert cli.main(command) == 0
    [sweep] = (start_folder / "outputs" / "multirun").glob("*/*")
    assert sorted(path.name for path in sweep.glob("res*")) == ["results.csv", "results.jsonl", "results.md"]
    assert (sweep / "report.html").exists()
    assert [load_result(path)["status"] for path in sorted(sweep.glob("0*"))] == ["ok", "ok"]
    assert "000_dp_0.5_" in capsys.readouterr().out
    assert cli.main([*command, "sweep.resume=true"]) == 0  # nothing is left to do
    assert len(list((sweep / ".submitit").glob("[0-9]*"))) == 2  # beside an empty folder of the pattern's own name
