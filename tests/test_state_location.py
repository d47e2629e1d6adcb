"""Runs whose states lie outside their folder: ``state.location``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptplan import cli
from ckptplan.record import load_result
from ckptplan.state import CheckpointManager
from tests.test_sweep_end_to_end import TINY

Run = Callable[..., int]


@pytest.fixture
def run(start_folder: Path) -> Run:
    def start(folder: str, *overrides: str, code: int = 0) -> None:
        common = [*TINY, "logger=none", "report=false", "proof.latency_trials=0", "steps=4", "state.every=2"]
        common += ["state.mode=async"]  # debug=fast saves nothing
        assert cli.main([*common, f"hydra.run.dir={folder}", *overrides]) == code

    return start


def losses(folder: str) -> dict[int, float]:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_a_run_goes_on_from_its_location_in_another_folder_and_another_takes_no_place_there(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine that has nothing but the store; the losses are those of the run that was never stopped."""
    where = f"memory://{tmp_path.name}/run"
    run("one", f"state.location={where}", "state.keep_last=null")
    assert load_result(Path("one"))["state"]["path"] == f"{where}/step-4"
    assert not Path("one", "state").exists()
    with CheckpointManager(where) as states:
        assert states.steps() == [2, 4]
        states.delete("step-4")
    run("new", f"state.location={where}", code=2)
    assert "the states of a run lie there already, the newest is step-2" in capsys.readouterr().err
    run("two", f"state.location={where}", "resume=auto")
    assert losses("two") == {step: loss for step, loss in losses("one").items() if step > 2}
    assert load_result(Path("two"))["state"]["resumed_from"] == f"{where}/step-2"
    with CheckpointManager(where) as states:
        states.delete("step-4")
    assert cli.main(["resume=one"]) == 0, "what was typed for the run says where its states are"
    assert load_result(Path("one"))["state"]["resumed_step"] == 2


def test_what_cannot_be_a_location_is_said_before_the_run_begins(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("a", "state.location=s4://bucket/run", code=2)
    assert "state.location=s4://bucket/run: s4://bucket/run: Protocol not known: s4" in capsys.readouterr().err
    run("b", "state.location='ftp://me:hidden@host/run'", code=2)
    error = capsys.readouterr().err
    assert "state.location: a URL with a password in it" in error
    assert "hidden" not in error
    assert not Path("b").exists()


def test_the_jobs_of_a_sweep_have_no_common_place(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("c", "hydra.job.num=1", "state.location=memory://x/y", code=2)
    assert "state.location=memory://x/y: the jobs of a sweep would save into one place" in capsys.readouterr().err
