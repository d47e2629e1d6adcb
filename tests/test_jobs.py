"""What the kernel counts, and a job that it kills for memory."""

from __future__ import annotations

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
