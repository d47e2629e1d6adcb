"""TensorBoard's files read back with its own reader, trackio's store as the database it is: exact figures."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptplan.other_trackers import TRACKIO_NAME_FILE
from ckptplan.record import RunResult
from ckptplan.tracking import open_tracker, tracking

# what the reader of the event files says about its own protocol buffers and NumPy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """(scalars, texts) of a run, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    for name in events.Tags()["tensors"]:
        found: list[Any] = [(event.step, make_ndarray(event.tensor_proto).item(0)) for event in events.Tensors(name)]
        if isinstance(found[0][1], bytes):
            texts[name.removesuffix("/text_summary")] = found[0][1].decode()
        else:
            scalars[name] = found
    return scalars, texts


def test_figures_are_exact_and_the_unknown_has_none(tmp_path: Path) -> None:
    result = RunResult(status="ok", planner="dp")
    result.memory.measured_peak_bytes, result.gradients.bitwise_equal = 2**40 + 1, True
    with tracking(open_tracker("tensorboard", tmp_path), {"seed": 3}, "job", "sweep") as tracker:
        for step in (1, 2):
            tracker.log({"step": step, "epoch": 0, "train/loss": 0.1 / step, "lr": 0.1, "peak_bytes": None})
        tracker.log({"step": 2, "eval/loss": 2.25, "eval_s": 0.5})
        tracker.table("plan", ("block", "why"), [("layers.0", "a | b"), ("layers.1", None)])
        tracker.curve("memory_over_step", ("stage", "MiB"), [(0, 1.5)])
        tracker.curves("peaks", ("x", "y"), {"dp": [(1, 2)]})
        tracker.summary(result.to_dict())
    scalars, texts = read(tmp_path)
    assert scalars["train/loss"] == [(1, 0.1), (2, 0.05)]
    assert scalars["eval/loss"] == [(2, 2.25)]
    assert "train/peak_bytes" not in scalars
    assert scalars["result/memory/measured_peak_bytes"] == [(0, 2**40 + 1)]
    assert scalars["result/gradients/bitwise_equal"] == [(0, 1.0)]
    assert "result/memory/predicted_peak_bytes" not in scalars
    assert '"seed": 3' in texts["config"]
    assert texts["plan"].splitlines() == [
        "| block | why |", "| --- | --- |", "| layers.0 | a \\| b |", "| layers.1 |  |",
    ]  # fmt: skip
    assert texts["memory_over_step"].splitlines()[2] == "| 0 | 1.5 |"
    assert texts["peaks"].splitlines()[2] == "| dp | 1 | 2 |"
    assert texts["status"] == "ok"


def test_without_tensorboard_there_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with tracking(open_tracker("tensorboard", tmp_path), {}) as tracker:
        tracker.log({"step": 1, "train/loss": 2.5})
    [message] = [record.getMessage() for record in caplog.records if record.name == "ckptplan.tracking"]
    assert "TensorBoardTracker could not start: import of torch.utils.tensorboard halted" in message


def test_trackio_holds_the_figures_and_a_resumed_run_goes_on_in_its_own(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    program = f"""
from pathlib import Path
from ckptplan.record import RunResult
from ckptplan.tracking import open_tracker, tracking

result = RunResult(status="ok", planner="dp")
result.memory.measured_peak_bytes = 2**40 + 1
for folder, steps in (("a", (1, 2)), ("b", (1,)), ("a", (3,))):  # equal jobs, and one that goes on
    where = Path({str(tmp_path)!r}) / folder
    where.mkdir(exist_ok=True)
    with tracking(open_tracker("trackio", where, project="mine"), {{"seed": 3}}, "job", "sweep") as tracker:
        for step in steps:
            tracker.log({{"step": step, "epoch": 0, "train/loss": 0.1 / step, "lr": 0.1, "peak_bytes": None}})
        tracker.table("plan", ("block", "why"), [("layers.0", "a"), ("layers.1", None)])
        tracker.summary(result.to_dict())
"""
    environment = os.environ | {"TRACKIO_DIR": str(store), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    with contextlib.closing(sqlite3.connect(store / "mine.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = database.execute("SELECT run_name, config FROM configs").fetchall()
    logged = [(name, step, json.loads(text)) for name, step, text in rows]
    names = {(tmp_path / folder / TRACKIO_NAME_FILE).read_text().strip(): folder for folder in ("a", "b")}
    losses = [(names[name], step, row["train/loss"]) for name, step, row in logged if "train/loss" in row]
    assert losses == [("a", 1, 0.1), ("a", 2, 0.05), ("b", 1, 0.1), ("a", 3, 0.1 / 3)]
    assert all("train/peak_bytes" not in row for _, _, row in logged)
    peaks = [
        row["result/memory/measured_peak_bytes"] for _, _, row in logged if "result/memory/measured_peak_bytes" in row
    ]
    assert peaks == [2**40 + 1] * 3
    assert any(row.get("plan", {}).get("_value") == [
        {"block": "layers.0", "why": "a"}, {"block": "layers.1", "why": None},
    ] for _, _, row in logged)  # fmt: skip
    assert {name for name, _ in configs} == set(names)
    assert all(json.loads(config)["seed"] == 3 for _, config in configs)
