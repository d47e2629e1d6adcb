"""Whole runs on two ranks that are killed while they load, or save into an object store; each goes on afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ckptplan.record import load_result
from ckptplan.state import CheckpointManager
from tests.engine.test_runs_on_ranks import ENDS_WITHIN_S, SAVES, losses, run, start, wait_for_step, worker
from tests.state.conftest import Bucket

# Python imports it when it starts: the rank that is named kills itself when it reads the weights of a state.
DIES_WHILE_LOADING = """
import os, signal, sys

def look(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        name, flags = os.path.basename(os.fsdecode(arguments[0])), arguments[2] or 0
        if name.startswith("model.") and name.endswith(".safetensors") and flags & os.O_ACCMODE == os.O_RDONLY:
            open(os.environ["DIED"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == os.environ.get("RANK_THAT_DIES"):
    sys.addaudithook(look)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_loads_ends_all_and_the_same_state_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    folder = tmp_path / "run"
    on_two = ("engine=fsdp2", "engine.nproc=2", *SAVES)
    code, told = run(folder, *on_two, "steps=4")
    assert code == 0, told
    (tmp_path / "dies").mkdir()
    (tmp_path / "dies" / "sitecustomize.py").write_text(DIES_WHILE_LOADING)
    with monkeypatch.context() as patch:
        patch.setenv("RANK_THAT_DIES", str(rank))
        patch.setenv("PYTHONPATH", str(tmp_path / "dies"))
        patch.setenv("DIED", str(tmp_path / "died"))
        code, told = run(folder, *on_two, "steps=7", f"resume={folder}")
    assert time.time() - (tmp_path / "died").stat().st_mtime < ENDS_WITHIN_S
    result = load_result(folder)
    assert (code, result["status"]) == (1, "failed"), told
    assert result["error"]["signal"] == "SIGKILL"
    assert f"rank {rank} was ended by SIGKILL" in result["error"]["message"]
    with CheckpointManager(folder / "state", mode="sync") as states:
        assert states.steps()[-1] == 4
        assert states.verify("step-4") == []
    code, told = run(folder, *on_two, "steps=7", f"resume={folder}")
    assert code == 0, told
    assert load_result(folder)["state"]["resumed_step"] == 4
    code, told = run(tmp_path / "alone", "steps=7", "state=off")
    assert code == 0, told
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def steps_in(bucket: Bucket) -> list[int]:
    with CheckpointManager(bucket.url) as states:
        return [step for step in states.steps() if states.verify(f"step-{step}") == []]


def wait_for_state(bucket: Bucket, step: int) -> None:
    deadline_s = time.monotonic() + 200
    while time.monotonic() < deadline_s:
        if any(f"/step-{step}/manifest.json" in f"/{key}" for key in bucket.objects()):
            return
        time.sleep(0.1)
    raise AssertionError(f"no state of step {step} in {bucket.objects()}")


@pytest.mark.slow
def test_a_run_killed_while_it_saves_into_a_bucket_goes_on_in_another_folder(tmp_path: Path, bucket: Bucket) -> None:
    """`kill -9` between two requests of a save; what the bucket holds is all that the second machine has."""
    where = (f"state.location={bucket.url}", "state=async", "state.every=1", "state.keep_last=null")
    process = start(tmp_path / "first", "steps=100000", *where)
    wait_for_state(bucket, 3)
    process.kill()
    process.communicate(timeout=60)
    done = max(steps_in(bucket))
    code, told = run(
        tmp_path / "second", f"steps={done + 3}", *where, "resume=auto", f"hydra.run.dir={tmp_path / 'second'}"
    )
    assert code == 0, told
    assert load_result(tmp_path / "second")["state"]["resumed_step"] == done
    assert steps_in(bucket)[-3:] == [done + 1, done + 2, done + 3]
    code, told = run(tmp_path / "alone", f"steps={done + 3}", "state=off")
    assert code == 0, told
    assert losses(tmp_path / "second") == losses(tmp_path / "alone")[done:]


@pytest.mark.slow
def test_two_ranks_save_their_shards_into_a_bucket_and_one_killed_there_loses_nothing(
    tmp_path: Path, bucket: Bucket
) -> None:
    on_two = ("engine=fsdp2", "engine.nproc=2", f"state.location={bucket.url}", *SAVES, "state.keep_last=null")
    process = start(tmp_path / "first", "steps=100000", *on_two)
    wait_for_step(process, tmp_path / "first", 3)
    os.kill(worker(process, 1).pid, signal.SIGKILL)
    started_s = time.monotonic()
    told, _ = process.communicate(timeout=120)
    assert time.monotonic() - started_s < ENDS_WITHIN_S
    assert "rank 1 was ended by SIGKILL" in told
    done = max(steps_in(bucket))
    assert any(f"/step-{done}/" in key and "/model.1." in key for key in bucket.objects()), "each rank its shards"
    code, told = run(
        tmp_path / "second", f"steps={done + 2}", *on_two, "resume=auto", f"hydra.run.dir={tmp_path / 'second'}"
    )
    assert code == 0, told
    assert load_result(tmp_path / "second")["state"]["resumed_step"] == done
    code, told = run(tmp_path / "alone", f"steps={done + 2}", "state=off")
    assert code == 0, told
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "alone")[done:], rel=1e-4)
