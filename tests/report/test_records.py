"""Records are read back as far as they go; what is torn, missing or of another version is named, not fatal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ckptplan.errors import CkptplanError
from ckptplan.record import load_result
from ckptplan.report.page import write_report
from ckptplan.report.records import is_job_of_sweep, read_records
from tests.report_folders import write_run, write_sweep


def test_a_run_folder_gives_its_run(tmp_path: Path) -> None:
    result = write_run(tmp_path / "run")
    records = read_records(tmp_path / "run")
    (run,) = records.runs
    assert not records.is_sweep
    assert records.faults == ()
    assert run.result == result
    assert run.figure("memory/measured_peak_bytes") == result["memory"]["measured_peak_bytes"]
    assert run.figure("memory/no such") is None
    assert run.plan is not None
    assert run.plan.text == result["plan"]["text"]
    assert run.profile is not None
    assert len(run.profile) == 6
    assert len(run.metrics) == 21


def test_a_sweep_folder_gives_every_job_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    records = read_records(tmp_path)
    assert records.is_sweep
    assert [run.name for run in records.runs] == [result["job"] for result in results]
    assert [run.figure("status") for run in records.runs] == [result["status"] for result in results]


def test_a_sweep_is_read_from_its_jobs_without_the_table_and_from_the_table_without_them(
    tmp_path: Path,
) -> None:
    results = write_sweep(tmp_path / "jobs")
    write_sweep(tmp_path / "table")
    (tmp_path / "jobs" / "results.jsonl").unlink()
    for path in (tmp_path / "table").glob("*/result.json"):
        path.unlink()
    expected = [(result["job"], result["plan"]["text"]) for result in results]
    for name in ("jobs", "table"):
        assert [(r.name, r.figure("plan/text")) for r in read_records(tmp_path / name).runs] == expected


def test_a_job_that_still_runs_is_named(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    gone = next(tmp_path.glob("004_*"))
    (gone / "result.json").unlink()
    records = read_records(tmp_path)
    assert len(records.runs) == 8
    (fault,) = records.faults
    assert fault.startswith(f"{gone.name}: no result.json")


@pytest.mark.parametrize("file", ["profile.json", "plan.json", "config.yaml", "curve.json", ".hydra/overrides.yaml"])
def test_a_torn_file_costs_its_own_figures_only(tmp_path: Path, file: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / file).write_text("{ torn")
    records = read_records(tmp_path / "run")
    assert records.runs[0].figure("status") == "ok"
    assert [fault.startswith(f"{file} of run could not be read") for fault in records.faults] == [True]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("file", ["profile.json", "plan.json", "curve.json", "metrics.jsonl"])
def test_a_file_nested_deeper_than_can_be_read_costs_its_own_figures_only(tmp_path: Path, file: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / file).write_text(DEEP + "\n")
    records = read_records(tmp_path / "run")
    assert records.runs[0].figure("status") == "ok"
    assert [fault.startswith(f"{file} of run could not be read") for fault in records.faults] == [True]


def test_a_result_nested_deeper_than_can_be_read_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(DEEP)
    with pytest.raises(CkptplanError, match=r"run/result\.json could not be read"):
        read_records(tmp_path / "run")
    with pytest.raises(CkptplanError, match="is not valid JSON"):
        load_result(tmp_path / "run")


def test_a_figure_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    """Somebody's tool may have written NaN; the page holds JSON, which has none."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    result["latency"]["planned_step_ms"] = float("nan")
    path.write_text(json.dumps(result))
    assert read_records(tmp_path / "run").runs[0].figure("latency/planned_step_ms") is None
    assert write_report(tmp_path / "run").is_file()


def test_one_reason_for_many_jobs_is_one_line(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    profiles = sorted(tmp_path.glob("*/profile.json"))
    for path in profiles:
        path.write_text('{"schema": "ckptplan.profile/0"}')
    (fault,) = read_records(tmp_path).faults
    assert fault.startswith(f"profile.json of {', '.join(r['job'] for r in results[:4])} and 4 more could not be read")
    assert str(tmp_path) not in fault


def test_a_result_with_other_keys_is_read_and_one_of_another_schema_is_named(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    first, second = (tmp_path / results[number]["job"] / "result.json" for number in (0, 1))
    first.write_text(json.dumps(json.loads(first.read_text()) | {"news": 1}))
    second.write_text(json.dumps({"schema": "ckptplan.result/9"}))
    records = read_records(tmp_path)
    assert results[0]["job"] in [run.name for run in records.runs]
    assert any("ckptplan.result/9" in fault for fault in records.faults)


@pytest.mark.parametrize("made", ["nothing", "empty folder", "torn result"])
def test_a_folder_without_records_is_an_error_that_names_it(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "some"
    if made != "nothing":
        folder.mkdir()
    if made == "torn result":
        (folder / "result.json").write_text("{")
    with pytest.raises(CkptplanError, match="some"):
        read_records(folder)


def test_the_command_repeats_the_run_alone_with_each_word_quoted(tmp_path: Path) -> None:
    typed = ["planner=dp", 'name="a b"', "blocks.paths=[layers.*]", "sweep=default", "+sweep.timeout_s=3"]
    added = ['profile.cache="x"', "profile.options=true", 'logger.group="g"', "hydra.job.num=3"]
    write_run(tmp_path / "run", overrides=[*typed, *added])
    command = read_records(tmp_path / "run").runs[0].command
    assert command is not None
    assert shlex.split(command) == ["python", "train.py", *typed[:3]]


def test_a_job_of_a_sweep_knows_it(tmp_path: Path) -> None:
    results = write_sweep(tmp_path / "sweep")
    write_run(tmp_path / "alone")
    assert is_job_of_sweep(tmp_path / "sweep" / results[0]["job"])
    assert not is_job_of_sweep(tmp_path / "alone")
