"""Trackers read back with W&B's own offline reader; nothing they do stops a run or leaves the machine."""

from __future__ import annotations

import csv
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from ckptplan.other_trackers import tracked_names
from ckptplan.record import RunResult
from ckptplan.tracking import (
    CsvTracker,
    GuardedTracker,
    NoTracker,
    WandbTracker,
    open_tracker,
    resolve_mode,
    stored_run_id,
    tracking,
)

STEP = {"step": 1, "epoch": 0, "train/loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.01, "peak_bytes": None}
WANDB = Path(sys.executable).parent / "wandb"


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A home without settings, whatever the machine that runs the tests has."""
    home = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


class Listener:
    """A server on loopback that counts connections and hangs up."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.connections = 0
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener()
    monkeypatch.setenv("WANDB_BASE_URL", listener.address)
    wandb.teardown()  # it reads the address once in a process
    yield listener
    wandb.teardown()
    listener.close()


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """What we logged; W&B's own notes go to its debug.log."""
    ours = [record for record in caplog.records if record.name == "ckptplan.tracking"]
    return [record.getMessage() for record in ours if record.levelno >= level]


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def inspect(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of an offline run by kind, as ``wandb leet inspect`` reads them."""
    done = subprocess.run(
        [str(WANDB), "leet", "inspect", "--json", str(run)], capture_output=True, text=True, check=True
    )
    records: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


def merged(updates: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for update in updates for key, value in update.get("update", {}).items()}


def test_three_jobs_in_one_process_are_three_runs_each_with_its_own_config(tmp_path: Path, server: Listener) -> None:
    started = time.monotonic()
    for job, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(job)
        folder.mkdir()
        random.seed(seed)
        tracker = open_tracker("wandb", folder, project="p", entity="team", tags=["a", "b"])
        tracker.start({"seed": seed, "model": {"_target_": "gpt", "layers": 2}}, name=f"job{job}", group="sweep")
        for step in range(1, 6):
            tracker.log({**STEP, "step": step})
        if job != 1:  # job 1 forgets to finish, as a crashed one does
            tracker.finish("ok")
    assert time.monotonic() - started < 10
    runs = [offline_runs(tmp_path / str(job)) for job in range(3)]
    assert [len(found) for found in runs] == [1, 1, 1]
    records = [inspect(found[0]) for found in runs]
    ids = [record["run"][0]["run_id"] for record in records]
    assert len(set(ids)) == 3
    assert ids == [(tmp_path / str(job) / "wandb" / "run_id.txt").read_text().strip() for job in range(3)]
    for record, seed in zip(records, (1, 1, 2), strict=True):
        config = record["run"][0]["config"]["update"]
        assert {key: config[key] for key in ("seed", "model")} == {
            "seed": seed, "model": {"_target_": "gpt", "layers": 2},
        }  # fmt: skip
        assert [row["item"]["train/step"] for row in record["history"]] == [1, 2, 3, 4, 5]
    kept = {key: records[2]["run"][0][key] for key in ("run_group", "display_name", "project", "entity", "tags")}
    assert kept == {
        "run_group": "sweep", "display_name": "job2", "project": "p", "entity": "team", "tags": ["a", "b"],
    }  # fmt: skip
    assert server.connections == 0


def test_figures_tables_and_curves_are_in_the_offline_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = RunResult(status="ok")
    result.memory.measured_peak_bytes = 123
    with caplog.at_level(logging.INFO), tracking(open_tracker("wandb", tmp_path), {"seed": 0}) as tracker:
        tracker.log(STEP)
        tracker.log({"step": 1, "epoch": 0, "eval/loss": 2.25, "eval_s": 0.5})
        tracker.table(
            "plan", ("block", "decision", "retained_bytes"), [("layers.0", "keep", 7), ("layers.1", "R", None)]
        )
        tracker.curve("memory/timeline", ("event", "bytes"), [(0, 0), (1, 10)])
        tracker.summary(result.to_dict())
    (run,) = offline_runs(tmp_path)
    records = inspect(run)
    history = [row["item"] for row in records["history"]]
    assert {key: value for key, value in history[0].items() if not key.startswith("_")} == {
        "train/step": 1, "train/epoch": 0, "train/loss": 2.5, "train/lr": 0.1, "train/grad_norm": 1.0,
        "train/step_s": 0.01, "train/peak_bytes": None,
    }  # fmt: skip
    assert history[1]["eval/loss"] == 2.25
    assert history[1]["train/step"] == 1
    summary = merged(records["summary"])
    assert summary["memory/measured_peak_bytes"] == 123
    assert summary["memory/predicted_peak_bytes"] is None
    assert summary["status"] == "ok"
    assert {metric.get("glob_name") for metric in records["metric"]} >= {"train/*", "eval/*"}
    (table,) = (run / "files" / "media" / "table").glob("plan_*.json")
    assert json.loads(table.read_text())["data"] == [["layers.0", "keep", 7], ["layers.1", "R", None]]
    assert list((run / "files" / "media" / "table" / "memory").glob("timeline*.json"))
    assert records["exit"] == [{}] or records["exit"][0].get("exit_code", 0) == 0
    assert messages(caplog, logging.INFO) == [f"to upload this run: wandb sync {run}"]


def test_an_exception_marks_the_run_failed_and_passes_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tracking(open_tracker("wandb", tmp_path), {}) as tracker:  # noqa: PT012
        tracker.log(STEP)
        raise ZeroDivisionError
    (run,) = offline_runs(tmp_path)
    assert inspect(run)["exit"] == [{"exit_code": 1}]


def test_everything_stays_in_the_run_folder_and_the_environment_as_it_was(tmp_path: Path) -> None:
    environment, state = dict(os.environ), random.getstate()
    with tracking(open_tracker("wandb", tmp_path), {}) as tracker:
        tracker.table("plan", ("block",), [("layers.0",)])
    assert dict(os.environ) == environment
    assert random.getstate() == state
    assert list(Path(os.environ["HOME"]).rglob("*.json")) == []


def test_a_resumed_run_goes_on_under_its_id(tmp_path: Path) -> None:
    first = stored_run_id(tmp_path)
    assert stored_run_id(tmp_path) == first
    (tmp_path / "other").mkdir()
    random.seed(0)
    other = stored_run_id(tmp_path / "other")
    random.seed(0)
    shutil.rmtree(tmp_path / "other" / "wandb")
    assert len({first, other, stored_run_id(tmp_path / "other")}) == 3  # a seed does not repeat an id


def test_a_server_that_refuses_costs_a_warning_and_the_run_is_recorded_offline(
    tmp_path: Path, server: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr("ckptplan.tracking.ONLINE_TIMEOUT_S", 2.0)
    started = time.monotonic()
    with tracking(open_tracker("wandb", tmp_path, mode="online"), {"seed": 0}) as tracker:
        tracker.log(STEP)
    assert time.monotonic() - started < 20
    assert server.connections > 0
    (message,) = messages(caplog)
    assert "this run is recorded offline" in message
    (run,) = offline_runs(tmp_path)
    assert len(inspect(run)["history"]) == 1


def test_online_without_a_key_is_recorded_offline_and_asks_nobody(
    tmp_path: Path, server: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with tracking(open_tracker("wandb", tmp_path, mode="online"), {}) as tracker:
        tracker.log(STEP)
    (message,) = messages(caplog)
    assert "W&B has no key for 127.0.0.1: this run is recorded offline" in message
    assert len(offline_runs(tmp_path)) == 1
    assert server.connections == 0


def test_disabled_records_nothing(tmp_path: Path) -> None:
    with tracking(open_tracker("wandb", tmp_path, mode="disabled"), {}) as tracker:
        tracker.log(STEP)
    assert offline_runs(tmp_path) == []


def test_auto_is_what_the_environment_says_else_online_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_mode("auto") == "offline"
    Path(os.environ["NETRC"]).write_text("machine example.org login user password secret\n")
    assert resolve_mode("auto") == "offline"
    Path(os.environ["NETRC"]).write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_mode("auto") == "online"
    Path(os.environ["NETRC"]).unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    for said, mode in (("offline", "offline"), ("dryrun", "offline"), ("run", "online"), ("disabled", "disabled")):
        monkeypatch.setenv("WANDB_MODE", said)
        assert resolve_mode("auto") == mode


@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_what_wandb_does_not_know_in_the_environment_is_told_and_taken_as_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    monkeypatch.setenv("WANDB_MODE", "garbage")
    with tracking(open_tracker("wandb", tmp_path, mode=mode), {}) as tracker:
        tracker.log(STEP)
    assert len(offline_runs(tmp_path)) == 1
    told = "WANDB_MODE='garbage' is unknown (expected online, offline, disabled, dryrun, run): it is taken as not set"
    assert messages(caplog) == ([told] if mode == "auto" else [])
    assert os.environ["WANDB_MODE"] == "garbage"


def test_without_wandb_there_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python keeps for a module that cannot be imported
    with tracking(open_tracker("wandb", tmp_path), {}) as tracker:
        tracker.log(STEP)
        tracker.summary({"status": "ok"})
        tracker.table("plan", ("block",), [("layers.0",)])
    (message,) = messages(caplog)
    assert "WandbTracker could not start: import of wandb halted" in message


def test_a_wandb_that_ends_the_process_on_import_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "wandb.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    with tracking(open_tracker("wandb", tmp_path), {}) as tracker:
        tracker.log(STEP)
    (message,) = messages(caplog)
    assert "WandbTracker could not start: no licence" in message


class Failing(NoTracker):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, row: Any) -> None:
        self.calls.append("log")
        raise OSError("disk full")

    def finish(self, status: str) -> None:
        self.calls.append(status)
        raise RuntimeError


def test_a_tracker_that_fails_is_told_once_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    with tracking(GuardedTracker(failing), {}) as tracker:
        tracker.log(STEP)
        tracker.log(STEP)
        tracker.finish("over_budget")
    assert failing.calls == ["log", "log", "over_budget"]
    assert messages(caplog) == [
        "Failing could not log metrics: disk full. The run goes on; metrics.jsonl has every figure."
    ]


def test_ctrl_c_passes_through_a_guarded_tracker() -> None:
    class Interrupted(NoTracker):
        def log(self, row: Any) -> None:
            raise KeyboardInterrupt

    tracker = GuardedTracker(Interrupted())
    tracker.start({})
    with pytest.raises(KeyboardInterrupt):
        tracker.log(STEP)


def test_csv_files_have_a_column_per_metric_and_empty_cells_for_the_unknown(tmp_path: Path) -> None:
    with tracking(open_tracker("csv", tmp_path), {}) as tracker:
        tracker.log(STEP)
        tracker.log({"step": 1, "epoch": 0, "eval/loss": 2.25})
        tracker.summary(RunResult(status="ok").to_dict())
        tracker.curve("memory/timeline", ("event", "bytes"), [(0, 5)])
    CsvTracker(tmp_path).start({})  # a resumed run writes no second header
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["train/loss"], row["eval/loss"], row["peak_bytes"]) for row in rows] == [
        ("1", "2.5", "", ""), ("1", "", "2.25", ""),
    ]  # fmt: skip
    with (tmp_path / "summary.csv").open(newline="") as file:
        summary = dict(csv.reader(file))
    assert summary["status"] == "ok"
    assert summary["memory/peak_at"] == ""
    assert (tmp_path / "memory_timeline.csv").read_text().split() == ["event,bytes", "0,5"]


def test_csv_metrics_of_a_run_that_goes_on_are_those_up_to_its_state(tmp_path: Path) -> None:
    with tracking(open_tracker("csv", tmp_path), {}) as tracker:
        tracker.log({"step": 1, "train/loss": 2.5})
        tracker.log({"step": 2, "train/loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    tracker = CsvTracker(tmp_path)
    tracker.start({})
    tracker.log({"step": 2, "train/loss": 1.75})
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [(row["step"], row["train/loss"]) for row in csv.DictReader(file)] == [("1", "2.5"), ("2", "1.75")]


def test_no_tracker_writes_nothing_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    with tracking(open_tracker("none", tmp_path), {}) as tracker:
        tracker.log(STEP)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        ValueError, match=r"logger\.kind='wand' is unknown; expected none, csv, tensorboard, trackio, wandb"
    ):
        open_tracker("wand", tmp_path)  # type: ignore[arg-type]


def test_wandb_is_imported_only_when_a_run_starts(tmp_path: Path) -> None:
    code = "import sys, ckptplan.tracking as t; t.open_tracker('wandb', '.'); print('wandb' in sys.modules)"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"
    assert WandbTracker(tmp_path).mode == "offline"


def test_metrics_get_the_step_that_they_are_plotted_over() -> None:
    assert tracked_names({"step": 3, "eval/loss": 1.0, "epoch": 0, "eval_s": 2.0}) == {
        "train/step": 3, "eval/loss": 1.0, "eval/seconds": 2.0,
    }  # fmt: skip
