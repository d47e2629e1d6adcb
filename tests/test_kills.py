"""`kill -9` of whole runs at random moments, and resuming each: nothing is lost, and the end is the same to the bit.

python -m pytest -m slow tests/test_kills.py                                        50 kills
CKPTPLAN_KILLS=200 python -m pytest -s -m slow tests/test_kills.py -k killed        as many as you like
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptplan.record import load_metrics, load_result
from ckptplan.state import CheckpointManager
from tests.test_resuming import NOISY, TRAINED, assert_same

REPOSITORY = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("CKPTPLAN_KILLS", "50"))
SETTINGS = (*NOISY, "steps=400", "state.every=1", "proof.check_gradients=false", "report=false", "eval_every=50")


def start(folder: Path, *more: str, limits: str = "") -> subprocess.Popen[bytes]:
    arguments = [f"hydra.run.dir={folder}", f"output_dir={folder.parent}", *SETTINGS, *more]
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    if limits:
        command = ["bash", "-c", f'{limits}; exec "$@"', "run", *command]
    with (folder.parent / "console.log").open("ab") as console:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=console, stderr=console, start_new_session=True)


def rows(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "epoch", "train/loss", "lr", "grad_norm")
    return [tuple(row[key] for key in keys) for row in load_metrics(folder) if "train/loss" in row]


def state(folder: Path, step: int) -> dict[str, Any]:
    with CheckpointManager(folder / "state", mode="sync") as states:
        return states.load(f"step-{step}")


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_nothing_lost(folder: Path) -> None:
    """Every state is whole, and the newest is at most the one before the last that was asked for."""
    with CheckpointManager(folder / "state", mode="sync") as states:
        states.claim()  # waits for the writer of the killed run, which may still be committing
        steps = {info.step: info.checkpoint_id for info in states.list()}
        assert {step: faults for step, name in steps.items() if (faults := states.verify(name))} == {}
    trained = rows(folder)
    if trained:
        assert max(steps, default=0) >= trained[-1][0] - 2


def assert_same_end(folder: Path, whole: Path) -> None:
    assert rows(folder) == rows(whole)
    mine, right = state(folder, 400), state(whole, 400)
    for item in TRAINED:
        assert_same(mine[item], right[item], item)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_killed_at_random_end_as_if_they_had_never_been(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert start(whole).wait(600) == 0
    moments = random.Random(5)
    kills = runs = trained = saving = 0
    while kills < KILLS:
        folder, runs = tmp_path / f"run{runs}", runs + 1
        process = start(folder)
        while True:
            before, began_s = lines(folder), time.monotonic()
            while process.poll() is None and lines(folder) <= before and time.monotonic() - began_s < 120:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.25))
            if process.poll() is not None or kills >= KILLS:
                break
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            trained += lines(folder) > before
            saving += any((folder / "state").glob(".attempt-*"))
            assert_nothing_lost(folder)
            process = start(folder, "resume=auto")
        assert process.wait(600) == 0, (tmp_path / "console.log").read_text()[-3000:]
        assert load_result(folder)["status"] == "ok"
        assert_same_end(folder, whole)
    print(
        f"{kills} kills, {trained} of them while training, {saving} of them while a state was being written, "
        f"over {runs} runs: no state lost or damaged, every end the same to the bit"
    )
    assert trained > KILLS // 2


@pytest.mark.slow
def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert start(folder, "steps=30", limits="ulimit -n 64").wait(300) == 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["state"]["step"], result["state"]["saved"], result["notes"]) == (30, 30, [])
