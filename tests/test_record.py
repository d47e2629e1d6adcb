"""metrics.jsonl and result.json: valid JSON whatever happens, and read back as written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ckptplan.errors import CkptplanError
from ckptplan.record import (
    STATUS_EXIT_CODES,
    ErrorRecord,
    RunRecorder,
    RunResult,
    environment,
    exit_code,
    flatten,
    load_metrics,
    load_result,
    write_atomic,
)

# The keys of section 7 of the design, written out a second time on purpose.
DESIGN_KEYS = {
    "": "schema status error config_hash name planner profile plan certificate model data device dtype seed torch "
    "budget memory engine latency gradients batch training state timing environment notes",
    "profile": "source file measured_s",
    "plan": "text digest solve_s kept recomputed selective offloaded compiled optimality_gap",
    "certificate": "cost cost_kind lower_bound flat_lower_bound gap cross_check weight_copies_bytes dry_run_peak_bytes "
    "operator block phase",
    "budget": "kind value bytes margin_bytes",
    "memory": "no_checkpoint_predicted_peak_bytes no_checkpoint_measured_peak_bytes predicted_peak_bytes "
    "measured_peak_bytes prediction_error within_budget smallest_reachable_bytes peak_at weights_bytes gradients_bytes "
    "optimizer_bytes device_peak_bytes device_reserved_bytes training_peak_bytes "
    "training_expected_bytes training_drift rows "
    "largest_batch_samples longest_sequence",
    "engine": "kind ranks tensor_ranks gathered_weights_bytes gradient_buckets_bytes per_rank",
    "latency": "step_ms no_checkpoint_step_ms overhead_ratio predicted_overhead_ratio predicted_step_ms "
    "recompute_flops_ratio",
    "gradients": "checked reference max_abs_diff max_rel_diff bitwise_equal passed",
    "training": "steps first_loss last_loss samples_per_s tokens_per_s oom_recoveries",
    "batch": "size accumulate planned_shape shapes_read largest fastest largest_samples_per_s fastest_samples_per_s",
    "state": "path step saved stall_s resumed_from resumed_step",
    "timing": "profile_s plan_s apply_s train_s total_s",
}


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_result_has_exactly_the_keys_of_the_design() -> None:
    found = RunResult().to_dict()
    assert set(found) == set(DESIGN_KEYS[""].split())
    for section in set(DESIGN_KEYS) - {""}:
        assert list(found[section]) == DESIGN_KEYS[section].split()
    assert list(found["latency"]["step_ms"]) == ["mean", "p50", "p95", "std", "n"]
    assert found["schema"] == "ckptplan.result/1"


def test_an_unknown_figure_is_null_and_never_zero() -> None:
    flat = flatten(RunResult().to_dict())
    known = {key: value for key, value in flat.items() if value is not None}
    assert known == {
        "schema": "ckptplan.result/1",
        "status": "failed",
        "gradients/checked": False,
        "engine/per_rank": [],
        "notes": [],
    }


def test_a_result_comes_back_as_written(tmp_path: Path) -> None:
    result = RunResult(status="ok", name="naïve = 1", environment={"cpu_count": 2})
    result.memory.measured_peak_bytes = 2**40 + 1
    result.latency.step_ms.p50 = 0.1
    result.error = ErrorRecord("ValueError", "no")
    with RunRecorder(tmp_path) as recorder:
        path = recorder.write_result(result)
    assert path == tmp_path / "result.json"
    assert load_result(path) == load_result(tmp_path) == result.to_dict()
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".jsonl"] == ["result.json"]  # nothing temporary left


def test_nan_and_infinity_become_null_with_a_note(tmp_path: Path) -> None:
    result = RunResult(status="failed")
    result.training.last_loss = math.nan
    result.latency.step_ms.std = math.inf
    with RunRecorder(tmp_path) as recorder:
        path = recorder.write_result(result)
    found = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert found["training"]["last_loss"] is None
    assert found["latency"]["step_ms"]["std"] is None
    assert found["notes"] == [
        "latency/step_ms/std came out as inf, so it is unknown",
        "training/last_loss came out as nan, so it is unknown",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema="ckptplan.result/9"), "ckptplan.result/9"),
        (lambda r: r["memory"].update(peak=1), "unknown key memory/peak"),
        (lambda r: r["latency"]["step_ms"].pop("p95"), "missing key latency/step_ms/p95"),
        (lambda r: r.update(budget=3), "budget is not an object"),
    ],
)
def test_a_result_of_another_shape_is_refused_with_the_key_named(tmp_path: Path, change, message: str) -> None:
    plain = RunResult(status="ok").to_dict()
    change(plain)
    (tmp_path / "result.json").write_text(json.dumps(plain))
    with pytest.raises(CkptplanError, match=message):
        load_result(tmp_path)


def test_a_cut_off_result_is_refused_with_the_file_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"schema": "ckptplan.res')
    with pytest.raises(CkptplanError, match=r"result\.json is not valid JSON"):
        load_result(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_misspelt_field_or_status_is_refused() -> None:
    with pytest.raises(AttributeError):
        RunResult().memory.peak_bytes = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="status='fine' is unknown; expected one of ok"):
        RunResult(status="fine").to_dict()


def test_each_metrics_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.log({"step": 1, "train/loss": 0.1, "lr": 1e-3, "grad_norm": math.inf, "peak_bytes": None})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse_constant) == {
        "step": 1, "train/loss": 0.1, "lr": 1e-3, "grad_norm": None, "peak_bytes": None,
    }  # fmt: skip
    recorder.log({"step": 2, "train/loss": math.nan})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train')  # killed here
    assert [row["step"] for row in load_metrics(tmp_path)] == [1, 2]


def test_an_unknown_metric_is_refused_by_name(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder, pytest.raises(ValueError, match=r"\['loss'\] are unknown"):
        recorder.log({"step": 1, "loss": 0.5})


def test_exit_codes_are_those_of_the_design() -> None:
    assert STATUS_EXIT_CODES == {
        "ok": 0, "failed": 1, "infeasible": 3, "over_budget": 4, "oom": 5, "mismatch": 6, "timeout": 124,
        "interrupted": 130,
    }  # fmt: skip
    assert exit_code("interrupted", 15) == 143
    assert exit_code("interrupted", 2) == exit_code("interrupted") == 130
    with pytest.raises(ValueError, match="status='done'"):
        exit_code("done")


def test_the_environment_names_versions_machine_and_the_commit_of_a_checkout(tmp_path: Path) -> None:
    found = environment("cpu")
    assert found["device"] == "cpu"
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cpu_count"] >= 1
    json.dumps(found, allow_nan=False)
    root = Path(__file__).parent.parent
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert found["git_commit"] == head.stdout.strip()


def test_records_and_tables_load_no_torch() -> None:
    names = "ckptplan.record, ckptplan.tracking, ckptplan.stopping, ckptplan.report.tables"
    code = f"import {names}, sys; print('torch' in sys.modules)"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


def test_going_back_moves_damaged_lines_aside_and_keeps_the_others_to_the_byte(tmp_path: Path) -> None:
    good = [f'{{"step": {step}, "train/loss": {step / 3}}}\n'.encode() for step in (1, 2, 3)]
    bad = [b"\xff\xfe\x00\n", b"[]\n", b'{"step": "two"}\n', b"{}\n", b"\n"]
    (tmp_path / "metrics.jsonl").write_bytes(good[0] + b"".join(bad) + good[1] + good[2] + b'{"step": 4, "tr')
    with RunRecorder(tmp_path) as recorder:
        assert recorder.go_back_to(2) == len(bad) + 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == good[0] + good[1]
    assert (tmp_path / "metrics.discarded.jsonl").read_bytes() == b"".join(bad) + good[2]
