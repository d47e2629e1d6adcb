"""Event files read back with TensorBoard's own reader: exact figures, nothing for the unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    pytest.importorskip("tensorboard")
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
