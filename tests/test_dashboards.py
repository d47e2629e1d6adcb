"""Dashboards reach a server that speaks W&B's protocol; uploaded runs hold what the panels ask for."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptplan import cli, dashboards
from ckptplan.config import LoggerConfig
from ckptplan.dashboards import CHART_FIELDS, push_dashboards, require_dashboards
from ckptplan.errors import ConfigError
from ckptplan.record import RunResult, flatten
from ckptplan.sweep_tracking import CHARTS
from ckptplan.tracking import open_tracker, tracking
from tests.test_tracking import WANDB, no_account, offline_runs
from tests.wandb_server import WandbServer

__all__ = ["no_account"]  # a fixture for every test here


@pytest.fixture
def server(no_account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    import wandb

    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    wandb.teardown()
    yield server
    wandb.teardown()
    server.close()


def a_run(folder: Path, mode: Any = "offline") -> dict[str, Any]:
    """A run with everything that a panel shows; its result."""
    result = RunResult(status="ok", planner="dp")
    result.memory.measured_peak_bytes, result.memory.predicted_peak_bytes = 123, 122
    result.memory.prediction_error, result.gradients.max_abs_diff = -0.01, 0.0
    result.latency.step_ms.p50, result.latency.overhead_ratio = 5.5, 0.25
    tracker = open_tracker("wandb", folder, mode=mode, tags=["dp", "GPT"], job_type="train")
    with tracking(tracker, {"planner": {"name": "dp"}}, "job", "sweep"):
        for step in (1, 2):
            tracker.log({"step": step, "train/loss": 2.5 / step})
        tracker.log({"step": 2, "eval/loss": 2.0})
        for key in set(CHART_FIELDS) - set(CHARTS):
            fields = CHART_FIELDS[key]
            tracker.curve(key, (fields["x"], fields["y"]), [(0.0, 1.0), (1.0, 2.0)])
        for key in set(CHART_FIELDS) & set(CHARTS):
            tracker.curves(key, CHARTS[key], {"dp": [(0.0, 1.0), (1.0, 0.5)], "greedy": [(0.0, 2.0)]})
        tracker.summary(result.to_dict())
    return result.to_dict()


def test_a_synchronised_run_arrives_whole(tmp_path: Path, server: WandbServer) -> None:
    result = a_run(tmp_path)
    assert server.operations == []
    [run] = offline_runs(tmp_path)
    done = subprocess.run([str(WANDB), "sync", str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb" / "run_id.txt").read_text().strip()
    [bucket] = {json.dumps(sent, sort_keys=True) for sent in server.named("UpsertBucket") if sent.get("groupName")}
    sent = json.loads(bucket)
    assert (sent["name"], sent["groupName"], sent["jobType"], sent["tags"]) == (run_id, "sweep", "train", ["dp", "GPT"])
    assert json.loads(sent["config"])["planner"] == {"value": {"name": "dp"}}
    losses = [(row["train/step"], row["train/loss"]) for row in server.history(run_id) if "train/loss" in row]
    assert losses == [(1, 2.5), (2, 1.25)]
    summary = server.summary(run_id)
    known = {key: value for key, value in flatten(result).items() if value is not None}
    assert {key: summary[key] for key in known} == known
    for key, fields in CHART_FIELDS.items():
        [table] = [data for path, data in server.files.items() if f"/{key}_table" in path]
        assert sorted(json.loads(table)["columns"]) == sorted(fields.values())


def test_an_online_run_goes_to_the_server_and_a_resumed_one_goes_on_there(tmp_path: Path, server: WandbServer) -> None:
    for _ in range(2):
        a_run(tmp_path, mode="online")
    assert offline_runs(tmp_path) == []
    assert {sent["name"] for sent in server.named("UpsertBucket")} == {
        (tmp_path / "wandb" / "run_id.txt").read_text().strip()
    }


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # wandb-workspaces' own
def test_workspace_and_report_are_saved_with_every_panel(server: WandbServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    addresses = push_dashboards(LoggerConfig(project="mine"))
    assert len(addresses) == 2
    assert all(address.startswith(f"{server.address}/team/mine") for address in addresses)
    assert all(f"dashboard: {address}" in caplog.text for address in addresses)
    saved = [sent for name, sent in server.operations if name.lower().startswith("upsertview")]
    assert [(sent["entityName"], sent["projectName"], sent["type"]) for sent in saved] == [
        ("team", "mine", "project-view"),
        ("team", "mine", "runs"),
    ]
    for sent in saved:
        json.loads(sent["spec"])
        for word in ("memory/measured_peak_bytes", "latency/step_ms/p50", "train/loss", "planner.value.name"):
            assert word in sent["spec"], word
        for key in CHART_FIELDS:
            assert f"{key}_table" in sent["spec"]


def test_a_server_that_is_not_there_costs_a_warning(
    server: WandbServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(entity: str, project: str) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(dashboards, "workspace", refused)
    assert push_dashboards(LoggerConfig()) == []
    assert "the dashboards were not pushed: no route to host" in caplog.text


@pytest.mark.parametrize(
    ("installed", "kind", "key", "remedy"),
    [
        (False, "wandb", True, "pip install -e '.[workspaces]'"),
        (True, "csv", True, "logger=wandb"),
        (True, "wandb", False, "wandb login"),
    ],
)
def test_what_cannot_work_is_refused_before_any_job(
    no_account: None, monkeypatch: pytest.MonkeyPatch, installed: bool, kind: str, key: bool, remedy: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with pytest.raises(ConfigError) as refused:
        require_dashboards(LoggerConfig(kind=kind))
    assert f"type: {remedy}" in str(refused.value)


def test_the_sweep_asks_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", "seed=1,2", "logger=none", "push_dashboard=true"]) == 2
    assert "push_dashboard=True: " in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))
