"""A sweep for real in which most jobs come to grief: every result is there, and a second call runs only what failed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptplan import cli
from ckptplan.record import flatten, load_result
from tests.test_tracking import inspect, merged

REPOSITORY = Path(cli.__file__).resolve().parent.parent

TINY = (
    "debug=fast data=synthetic_tokens data.sequence_length=16 data.vocab_size=32 data.batch_size=4 data.num_samples=64 "
    "data.num_eval_samples=8 model.layers=4 model.width=16 model.heads=2 runtime=cpu runtime.threads=1 cost=flops"
).split()

TROUBLE = """
import os, resource, signal, time
import torch
from ckptplan.models import GPT

class Trouble(GPT):
    def __init__(self, what, **options):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        if what == "memory":
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, resource.RLIM_INFINITY))
            torch.empty(2**30, dtype=torch.uint8)
        super().__init__(**options)
"""

HEALED = """
from ckptplan.models import GPT

class Trouble(GPT):
    def __init__(self, what, **options):
        super().__init__(**options)
"""

JOBS = {
    "a_good": ("budget_frac: 0.6", "none", "ok"),
    "b_kill": ("budget_frac: 0.6", "kill", "failed"),
    "c_tight": ("budget_bytes: 1000", "none", "infeasible"),
    "d_memory": ("budget_frac: 0.6", "memory", "oom"),
    "e_hang": ("budget_frac: 0.6", "hang", "timeout"),
    "f_import": ("budget_frac: 0.6", "none", "failed"),
    "g_good": ("budget_frac: 0.7", "none", "ok"),
}


def sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config-dir", "mine", "-m", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def write_jobs(folder: Path) -> None:
    (folder / "mine" / "experiment").mkdir(parents=True)
    for name, (budget, what, _) in JOBS.items():
        target = "raises_at_import.Net" if name == "f_import" else "trouble.Trouble"
        text = f"# @package _global_\n{budget}\nmodel: {{_target_: {target}, what: {what}}}\n"
        (folder / "mine" / "experiment" / f"{name}.yaml").write_text(text)
    (folder / "trouble.py").write_text(TROUBLE)
    (folder / "raises_at_import.py").write_text("raise RuntimeError('no licence')\n")


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return dict(zip(JOBS, rows, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trouble_of_every_kind_stays_with_its_job_and_a_second_call_runs_only_what_failed(tmp_path: Path) -> None:
    write_jobs(tmp_path)
    arguments = [f"experiment={','.join(JOBS)}", *TINY, "sweep.timeout_s=60", "proof.latency_trials=0"]
    first = sweep(tmp_path, *arguments)
    assert first.returncode == 1, first.stderr
    assert "3 of 7 jobs failed" in first.stderr
    [folder] = (tmp_path / "outputs" / "multirun").glob("*/*")
    found = results_of(folder)
    assert [result["status"] for result in found.values()] == [status for _, _, status in JOBS.values()]
    assert found["b_kill"]["error"]["signal"] == "SIGKILL"
    assert "no licence" in found["f_import"]["error"]["message"]
    assert "still running after 60 s" in found["e_hang"]["error"]["message"]
    assert found["c_tight"]["memory"]["smallest_reachable_bytes"] > 1000
    assert found["a_good"]["memory"]["within_budget"] is True
    sources = [found[name]["profile"]["source"] for name in ("a_good", "c_tight", "g_good")]
    assert sources == ["measured", "shared", "shared"]
    for path in folder.glob("0*"):
        load_result(path)

    (tmp_path / "trouble.py").write_text(HEALED)
    (tmp_path / "raises_at_import.py").write_text("from trouble import Trouble as Net\n")
    second = sweep(tmp_path, *arguments, "sweep.resume=true")
    assert second.returncode == 0, second.stderr
    assert "4 are done already, 3 are left" in second.stderr
    assert "[3/3]" in second.stderr
    assert [path.name for path in (tmp_path / "outputs" / "multirun").glob("*/*")] == [folder.name]
    healed = results_of(folder)
    assert [healed[name]["status"] for name in JOBS] == ["ok", "ok", "infeasible", "oom", "ok", "ok", "ok"]
    assert {name: healed[name] for name in ("a_good", "c_tight", "d_memory", "g_good")} == {
        name: found[name] for name in ("a_good", "c_tight", "d_memory", "g_good")
    }
    assert len(list((folder / "earlier").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_wandb_holds_is_what_the_results_say_for_every_job(tmp_path: Path) -> None:
    write_jobs(tmp_path)
    names = ["a_good", "c_tight", "g_good"]
    arguments = [f"experiment={','.join(names)}", *TINY, "logger.kind=wandb", "logger.tags=[mine]"]
    done = sweep(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "outputs" / "multirun").glob("*/*")
    groups, ids = set(), set()
    for path in sorted(folder.glob("0*")):
        [run] = (path / "wandb").glob("offline-run-*")
        records = inspect(run)
        start = records["run"][0]
        result = load_result(path)
        summary = merged(records["summary"])
        assert {key: summary[key] for key in flatten(result)} == flatten(result)
        groups.add(start["run_group"])
        ids.add(start["run_id"])
        assert (start["job_type"], start["tags"]) == ("train", ["mine", "dp", "Trouble"])
        assert start["display_name"] == path.name
    assert groups == {"-".join(folder.parts[-2:])}
    [run] = (folder / "wandb").glob("offline-run-*")
    records = inspect(run)
    assert (records["run"][0]["job_type"], records["run"][0]["run_group"]) == ("sweep", groups.pop())
    assert len(ids | {records["run"][0]["run_id"]}) == 4
    [table] = (run / "files" / "media" / "table").glob("jobs_*.json")
    data = json.loads(table.read_text())
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    as_text = [["" if cell is None else str(cell) for cell in row] for row in data["data"]]
    assert as_text == [list(row.values()) for row in rows]
    assert data["columns"] == list(rows[0])
    assert merged(records["summary"])["jobs/count"] == 3
    assert f"wandb sync {folder}/wandb/offline-run-* {folder}/*/wandb/offline-run-*" in done.stderr
