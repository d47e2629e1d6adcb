"""What the kernel counts, and a job that it kills for memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ckptplan import jobs
from ckptplan.jobs import oom_kills, run_in_process
from ckptplan.record import load_result
from tests.test_sweeps import make_job


@pytest.mark.parametrize(
    ("membership", "file", "text", "count"),
    [
        ("0::/user/job\n", "user/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("0::/../elsewhere\n", "memory.events", "oom_kill 4\n", 4),
        ("5:memory:/a\n3:cpu,cpuacct:/a\n", "memory/a/memory.oom_control", "under_oom 0\noom_kill 1\n", 1),
        ("3:cpu,cpuacct:/a\n", "memory/a/memory.oom_control", "oom_kill 1\n", None),
        ("0::/\n", "unrelated", "", None),
        ("0::/\n", "memory.events", "low 0\n", None),
    ],
)
def test_the_kernels_count_is_read_wherever_it_stands(
    tmp_path: Path, membership: str, file: str, text: str, count: int | None
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    counter = tmp_path / "mount" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path / "mount") == count
    assert oom_kills(tmp_path / "nowhere", tmp_path / "mount") is None


@pytest.mark.parametrize(
    ("counts", "status", "message"),
    [
        ((7, 8), "oom", "killed by the system, out of memory"),
        ((7, 7), "failed", "ended by SIGKILL; often the system, out of memory"),
        ((None, None), "failed", "ended by SIGKILL; often the system, out of memory"),
    ],
)
def test_a_killed_job_is_out_of_memory_only_where_the_kernel_counted_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    status: str,
    message: str,
) -> None:
    told = iter(counts)
    monkeypatch.setattr(jobs, "oom_kills", lambda: next(told))
    job = make_job(tmp_path, "import os; os.kill(os.getpid(), 9)")
    result = run_in_process(job)
    assert result == load_result(job.folder)
    assert (result["status"], result["error"]["message"], result["error"]["signal"]) == (status, message, "SIGKILL")


def test_what_a_killed_job_leaves_behind_is_ended(tmp_path: Path) -> None:
    from tests.test_sweeps import _is_gone

    program = """
    import os, pathlib, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
    os.kill(os.getpid(), 9)
    """
    job = make_job(tmp_path, program)
    run_in_process(job)
    assert _is_gone(int((job.folder / "child").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
@pytest.mark.parametrize("is_early", [True, False])
def test_a_job_ends_when_its_launcher_is_killed(tmp_path: Path, is_early: bool) -> None:
    """Whether the launcher dies before or after the job has asked to be told."""
    from tests.test_sweeps import _is_gone

    job = """
    import os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[1])
    (folder / "pid").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.01)
    from ckptplan.jobs import end_with_launcher
    end_with_launcher()
    (folder / "asked").touch()
    time.sleep(60)
    """
    launcher = f"""
    import pathlib
    from ckptplan.jobs import run_in_process
    from tests.test_sweeps import make_job
    run_in_process(make_job(pathlib.Path({str(tmp_path)!r}), {job!r}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)])
    try:
        folder = make_job(tmp_path, job).folder
        _wait_for(folder / "pid")
        if not is_early:
            (folder / "go").touch()
            _wait_for(folder / "asked")
    finally:
        process.kill()
        process.wait()
    (folder / "go").touch()
    deadline_s = time.monotonic() + 20
    while not _is_gone(int((folder / "pid").read_text())):
        assert time.monotonic() < deadline_s, "the job goes on without its launcher"
        time.sleep(0.02)
    assert (folder / "asked").exists() != is_early


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20
    while not (path.exists() and (path.name != "pid" or path.read_text())):
        assert time.monotonic() < deadline_s, path
        time.sleep(0.02)
