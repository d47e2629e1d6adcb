"""Faults, injected and survived: killed trainers and writers, full and read-only disks, few descriptors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan.errors import FolderInUseError, SaveFailedError, WriterDiedError
from ckptplan.state import CheckpointManager, attempt, disk

AS_ROOT = os.geteuid() == 0

# Saves s-1, s-2, ... for ever; every value of a checkpoint tells its step.
TRAINER = """
import sys, torch
from ckptplan.state import CheckpointManager
location, mode, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
states = CheckpointManager(location, mode=mode, keep_last=3)
tensors = {f"t{i}": torch.zeros(150_000) for i in range(6)}
moments = {f"m{i}": torch.zeros(1000) for i in range(30)}
step = first
if first > 1:
    into = {"model": tensors, "moments": moments, "step": 0}
    states.load("latest", into=into)
    step = into["step"] + 1
print("ready", flush=True)
while True:
    for tensor in (*tensors.values(), *moments.values()):
        tensor.fill_(step)
    states.save(f"s-{step}", {"model": tensors, "moments": moments, "step": step})
    for tensor in (*tensors.values(), *moments.values()):
        tensor.fill_(-1)
    print(step, flush=True)
    step += 1
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start_trainer(location: Path, mode: str, first: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAINER, str(location), mode, str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_all(location: Path) -> int:
    """Every checkpoint there is whole, unmixed and loadable; returns the newest step (0: none yet)."""
    newest = 0
    with CheckpointManager(location, mode="sync") as states:
        for info in states.list():
            assert info.damage == ""
            assert states.verify(info.checkpoint_id) == []
            loaded = states.load(info.checkpoint_id)
            values = {float(tensor.min()) for part in ("model", "moments") for tensor in loaded[part].values()}
            values |= {float(tensor.max()) for part in ("model", "moments") for tensor in loaded[part].values()}
            assert values == {float(loaded["step"])} == {float(info.step or 0)}, "no mixture of two saves"
            newest = max(newest, loaded["step"])
    return newest


def wait_for_writers(location: Path) -> None:
    """Until the writer that lost its trainer has let go of the folder."""
    with CheckpointManager(location, mode="sync", timeout_s=30) as states:
        states.save(f"probe-{time.monotonic_ns()}", {"model": {}, "moments": {}, "step": 0})
        for info in states.list():
            if info.checkpoint_id.startswith("probe"):
                states.delete(info.checkpoint_id)


def kill_trainers(location: Path, mode: str, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    newest = 0
    for _ in range(kills):
        trainer = start_trainer(location, mode, 1 if newest == 0 else 2)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0, 0.25))
        trainer.kill()
        done = [int(line) for line in trainer.communicate()[0].split()]
        wait_for_writers(location)
        now = check_all(location)
        assert now >= newest, "nothing that was committed is lost"
        if mode == "sync" and done:
            assert now >= done[-1]
        if mode == "async" and len(done) > 1:
            assert now >= done[-2], "a save that was followed by another had been committed"
        newest = now


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_trainer_killed_at_a_random_moment_loses_nothing(tmp_path: Path, mode: str) -> None:
    kill_trainers(tmp_path / "s", mode, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_hundred_killed_trainers_lose_nothing(tmp_path: Path, mode: str) -> None:
    kill_trainers(tmp_path / "s", mode, kills=100, seed=2)


def kill_writers(location: Path, kills: int, seed: int) -> None:
    """Kills the writer at random moments of saves: that save fails or is committed, the next works."""
    draw = random.Random(seed)
    tensor = torch.zeros(1_500_000)
    committed = set()
    with CheckpointManager(location) as states:
        for step in range(kills):
            tensor.fill_(step)
            future = states.save(f"k-{step}", {"w": tensor, "step": step})
            tensor.fill_(-1)
            time.sleep(draw.uniform(0, 0.012))
            pid = states.writer_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            error = future.exception(timeout=20)
            assert error is None or isinstance(error, WriterDiedError), repr(error)
            if error is None:
                committed.add(f"k-{step}")
            else:
                assert f"pid {pid}" in str(error)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.001)  # a save that is handed to a dying writer would fail as well
            tensor.fill_(step + 0.5)
            states.save(f"good-{step}", {"w": tensor, "step": step}).result(timeout=20)
        states.wait()
        there = {info.checkpoint_id for info in states.list()}
        assert there == committed | {f"good-{step}" for step in range(kills)}, "the future tells the truth"
        for name in there:
            assert states.verify(name) == []
            step = int(name.partition("-")[2])
            expected = step if name in committed else step + 0.5
            assert states.load(name)["w"].unique().tolist() == [expected]
        assert [name for name in names_in(location) if name.startswith((".attempt", ".trash"))] == []


def test_a_killed_writer_fails_that_save_and_the_next_works(tmp_path: Path) -> None:
    kill_writers(tmp_path, kills=8, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_killed_writers_lose_nothing(tmp_path: Path) -> None:
    kill_writers(tmp_path, kills=200, seed=4)


def test_a_writer_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        states.save("a", {"w": torch.ones(10)}).result()
        os.kill(states.writer_pid or 0, signal.SIGKILL)
        time.sleep(0.2)
        states.save("b", {"w": torch.ones(10)}).result()


def test_a_stopped_writer_is_given_up_after_the_time_out(tmp_path: Path) -> None:
    states = CheckpointManager(tmp_path, timeout_s=1)
    states.save("a", {"w": torch.ones(10)}).result()
    pid = states.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    states.save("b", {"w": torch.ones(10)})
    started = time.monotonic()
    with pytest.raises(SaveFailedError, match=r"'b' has not ended after 1 s"):
        states.close()
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_control_c_to_the_whole_group_does_not_lose_the_pending_save(tmp_path: Path) -> None:
    code = f"""
import os, signal, time, torch
from ckptplan.state import CheckpointManager
with CheckpointManager({str(tmp_path)!r}) as states:
    states.save("a", {{"w": torch.zeros(8_000_000)}})
    os.killpg(0, signal.SIGINT)
    time.sleep(5)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    with CheckpointManager(tmp_path) as states:
        assert states.verify("a") == []


def test_the_next_manager_waits_for_a_writer_that_lost_its_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"""
import os, signal, torch
from ckptplan.state import CheckpointManager
states = CheckpointManager({str(tmp_path)!r})
states.save("first", {{"w": torch.zeros(10)}}).result()
os.kill(states.writer_pid, signal.SIGSTOP)
states.save("a", {{"w": torch.zeros(10)}})
print(states.writer_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    writer = int(trainer.stdout)
    with CheckpointManager(tmp_path) as states:
        states.save("b", {"w": torch.zeros(10)}).result()
        assert [info.checkpoint_id for info in states.list()] == ["first", "a", "b"], (
            "what was handed over was finished"
        )
        assert caplog.text.count("waiting for the writer of an ended run") <= 1
    for _ in range(100):
        if not Path(f"/proc/{writer}").exists():
            return
        time.sleep(0.02)
    pytest.fail("the writer did not end")


def test_what_was_handed_over_is_finished_though_the_trainer_died_with_unread_replies(tmp_path: Path) -> None:
    """The system then tells the writer of a broken connection before it gives out the messages that still wait."""
    code = f"""
import os, signal, time, torch
from ckptplan.state import CheckpointManager
states = CheckpointManager({str(tmp_path)!r}, max_pending=4)
states.save("s-0", {{"w": torch.zeros(10)}}).result()
os.kill(states.writer_pid, signal.SIGSTOP)
for step in range(1, 5):
    states.save(f"s-{{step}}", {{"w": torch.full((2_000_000,), float(step))}})
states._saver._writer._lock.acquire()  # the thread that reads replies stops at the first one
os.kill(states.writer_pid, signal.SIGCONT)
while not os.path.isdir({str(tmp_path / "s-1")!r}):
    time.sleep(0.0005)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    with CheckpointManager(tmp_path) as states:
        states.save("after", {"x": 1}).result()
        assert [info.checkpoint_id for info in states.list()] == ["s-0", "s-1", "s-2", "s-3", "s-4", "after"]
        assert states.load("s-4")["w"].unique().tolist() == [4]


def test_a_folder_that_stays_locked_is_given_up_after_the_time_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with (tmp_path / ".lock").open("w") as held:
        json.dump({"pid": gone.pid, "host": socket.gethostname()}, held)
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with CheckpointManager(tmp_path, timeout_s=0.3) as states:
            with pytest.raises(FolderInUseError, match="still being written by the writer of an ended run"):
                states.save("a", {"x": 1}).result()
            assert caplog.text.count("waiting for the writer of an ended run") == 1
            fcntl.flock(held, fcntl.LOCK_UN)
            states.save("a", {"x": 1}).result()


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.fail(f"this test mounts a small file system and needs to be root: {mounted.stderr!r}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(
    not AS_ROOT, reason="mounting a small file system needs root; the injected failure runs for everyone"
)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_full_disk_fails_that_save_and_the_next_works(small_disk: Path, mode: str) -> None:
    with CheckpointManager(small_disk / "s", mode=mode, keep_last=1) as states:
        states.save("a", {"w": torch.ones(500_000)}).result()
        error = states.save("b", {"w": torch.ones(1_500_000)}).exception()
        assert isinstance(error, SaveFailedError)
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC
        assert "No space left" in str(error)
        assert names_in(small_disk / "s") == [".lock", "a"], "nothing is left behind"
        assert states.verify("a") == []
        states.save("c", {"w": torch.ones(500_000)}).result()
        states.wait()
        assert [info.checkpoint_id for info in states.list()] == ["c"]


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "mkdir", "close"])
def test_an_error_of_the_disk_at_any_step_fails_that_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a", {"w": torch.ones(10)}).result()
        original: Any = getattr(os, operation)
        calls = 0

        def failing(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            is_ours = sys._getframe(1).f_code.co_filename in (attempt.__file__, disk.__file__)
            calls += is_ours
            if is_ours and calls == 1:
                if operation == "close":
                    original(*arguments)
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return original(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(f"os.{operation}", failing)
            error = states.save("b", {"w": torch.ones(10)}).exception()
        assert calls >= 1
        assert isinstance(error, SaveFailedError)
        assert error.errno == errno.EDQUOT
        states.save("b", {"w": torch.ones(10)}).result()
        assert states.verify("b") == []


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path, mode: str) -> None:
    location = Path("/proc/1/nowhere") if AS_ROOT else tmp_path / "locked" / "s"
    if not AS_ROOT:
        (tmp_path / "locked").mkdir(mode=0o500)
    with CheckpointManager(location, mode=mode) as states:
        error = states.save("a", {"x": 1}).exception()
        assert isinstance(error, SaveFailedError)
        assert error.errno in (errno.EACCES, errno.ENOENT, errno.EPERM)


# --- scarce things ---


def run_limited(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_where_no_thread_and_no_process_can_be_started_it_goes_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def no_thread(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    def no_process(*arguments: Any, **named: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("threading.Thread.start", no_thread)
    for is_process_possible in (True, False):
        if not is_process_possible:
            monkeypatch.setattr("subprocess.Popen", no_process)
        with CheckpointManager(tmp_path / str(is_process_possible), mode=mode) as states:
            states.save("a", {"w": torch.ones(5_000_000), "n": {f"t{i}": torch.ones(3) for i in range(50)}}).result()
            target = torch.zeros(5_000_000)
            states.load("a", into={"w": target})
            assert target.sum() == 5_000_000
            assert states.verify("a") == []


def test_ten_thousand_tensors_need_few_descriptors(tmp_path: Path) -> None:
    run_limited(f"""
import os, resource, torch
from ckptplan.state import CheckpointManager
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = len(os.listdir("/proc/self/fd"))
state = {{f"i{{i}}": {{f"t{{j}}": torch.full((300,), float(j)) for j in range(100)}} for i in range(100)}}
with CheckpointManager({str(tmp_path)!r}) as states:
    for k in range(3):
        states.save(f"s{{k}}", state).result()
    assert len(os.listdir("/proc/self/fd")) - before <= 30, os.listdir("/proc/self/fd")
    assert len(os.listdir(f"/proc/{{states.writer_pid}}/fd")) <= 30
    loaded = states.load("latest")
    assert all(bool((loaded["i7"][f"t{{j}}"] == j).all()) for j in range(100))
""")


@pytest.mark.skipif(not AS_ROOT, reason="a private /dev/shm needs root")
def test_a_small_shared_memory_file_system_is_no_limit(tmp_path: Path) -> None:
    code = f"""
import torch
from ckptplan.state import CheckpointManager
with CheckpointManager({str(tmp_path)!r}) as states:
    for k in range(2):
        states.save(f"s{{k}}", {{"w": torch.full((10_000_000,), float(k))}}).result()
    assert states.load("s1")["w"].unique().tolist() == [1]
"""
    script = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec " + f'{sys.executable} -c "$CODE"'
    subprocess.run(["unshare", "-m", "sh", "-c", script], env={**os.environ, "CODE": code}, check=True, timeout=60)


def test_the_writer_is_ready_fast_and_loads_no_torch(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        started = time.monotonic()
        states.prewarm({"x": 1})
        assert time.monotonic() - started < 2
        maps = Path(f"/proc/{states.writer_pid}/maps").read_text()
        assert "_xxhash" in maps
        assert "torch" not in maps
        assert "numpy" not in maps
        status = Path(f"/proc/{states.writer_pid}/fd")
        assert {str((status / str(number)).readlink()) for number in (0, 1, 2)} == {"/dev/null"}, "no inherited output"


def test_twenty_saves_do_not_grow_the_process(tmp_path: Path) -> None:
    """B58."""
    run_limited(f"""
import torch
from pathlib import Path
from ckptplan.state import CheckpointManager
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
state = {{f"t{{i}}": torch.randn(100_000) for i in range(40)}}
with CheckpointManager({str(tmp_path)!r}, keep_last=1) as states:
    for k in range(20):
        states.save(f"s{{k}}", state).result()
        if k == 2:
            third = resident()
    assert resident() <= third * 1.02, (third, resident())
""")
