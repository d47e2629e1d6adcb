"""Whole runs in this process, on a tiny GPT: how they end, what they write, and that both agree."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan import choices
from ckptplan.config.loading import config_hash, load_config, resolve
from ckptplan.curve import PlanCurve
from ckptplan.errors import ConfigError, NonFiniteError
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.record import RunResult, load_metrics, load_result
from ckptplan.run import profiling, proving, run_job, trained
from ckptplan.state import CheckpointManager
from ckptplan.training import accumulate_gradients

TINY = (
    "debug=fast",
    "data=synthetic_tokens",
    "data.sequence_length=16",
    "data.vocab_size=32",
    "data.batch_size=4",
    "data.num_samples=64",
    "data.num_eval_samples=8",
    "model.layers=4",
    "model.width=16",
    "model.heads=2",
    "runtime=cpu",
    "runtime.threads=1",
    "logger=none",
    "cost=flops",
    "report=false",
)


@pytest.fixture
def run(compose, tmp_path: Path):
    """``code, result, folder = run("planner=dp", ...)``; ``target`` names a class of tests/run_models.py."""
    runs = iter(range(100))

    def call(*overrides: str, target: str | None = None) -> tuple[int, dict[str, Any], Path]:
        composed = compose(*TINY, *overrides)
        loaded = load_config(composed)
        if target is not None:
            loaded = replace(loaded, model=loaded.model | {"_target_": f"tests.run_models.{target}"})
        folder = tmp_path / f"run{next(runs)}"
        folder.mkdir()
        call.folder = folder
        code = run_job(loaded, resolved=resolve(composed), folder=folder, overrides=list(overrides))
        return code, load_result(folder), folder

    return call


def test_a_run_writes_its_page_unless_it_is_a_job_of_a_sweep(run, tmp_path: Path) -> None:
    code, _, folder = run("plan_only=true", "report=true")
    assert code == 0
    assert json.loads((folder / "result.json").read_text())["config_hash"][:8] in (folder / "report.html").read_text()
    (tmp_path / "multirun.yaml").write_text("")
    _, _, folder = run("plan_only=true", "report=true")
    assert not (folder / "report.html").exists()


def test_a_page_that_fails_does_not_fail_its_run(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.report.page.make_figures", lambda _: 1 / 0)
    code, result, folder = run("plan_only=true", "report=true")
    assert (code, result["status"]) == (0, "ok")
    assert not (folder / "report.html").exists()


def test_a_plan_made_under_another_autocast_is_noted(run) -> None:
    _, _, folder = run("planner=all", "budget_frac=1", "plan_only=true")
    stored = f"planner.path={folder / 'plan.json'}"
    code, result, _ = run("planner=file", stored, "budget_frac=1", "runtime.dtype=bf16_mixed", "steps=1")
    note = f"{folder / 'plan.json'} was made under autocast off, this run has torch.bfloat16"
    assert [text.partition(", cache")[0] for text in result["notes"]] == [note]
    assert (code, abs(result["memory"]["prediction_error"]) <= 0.01) == (0, True)
    assert run("planner=file", stored, "budget_frac=1", "plan_only=true")[1]["notes"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"betas": [1, 2]}, "Invalid beta parameter at index 0: 1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ],
)
def test_what_the_optimizer_refuses_is_an_error_of_the_configuration(run, monkeypatch, change, message) -> None:
    monkeypatch.setattr(profiling, "profile_model", lambda *_, **__: pytest.fail("profiled all the same"))
    overrides = [f"optimizer.{key}={value}".replace(" ", "") for key, value in change.items()]
    with pytest.raises(ConfigError, match=rf"optimizer: torch\.optim\.\w+ refuses its arguments: {re.escape(message)}"):
        run("optimizer=adamw", *overrides)


def keys_of(record: Any, path: str = "") -> set[str]:
    if not isinstance(record, dict):
        return {path}
    return {key for name, item in record.items() for key in keys_of(item, f"{path}/{name}")}


class TestEnds:
    def test_ok_is_what_the_promises_say(self, run) -> None:
        code, result, _folder = run("planner=dp", "budget_frac=0.6", "steps=4")
        memory = result["memory"]
        assert (code, result["status"], result["error"]) == (0, "ok", None)
        assert memory["measured_peak_bytes"] <= result["budget"]["bytes"]
        assert abs(memory["prediction_error"]) <= 0.01
        assert memory["within_budget"] is True
        assert memory["no_checkpoint_predicted_peak_bytes"] == memory["no_checkpoint_measured_peak_bytes"]
        assert result["budget"] == {
            "kind": "budget_frac",
            "value": 0.6,
            "bytes": int(0.6 * memory["no_checkpoint_predicted_peak_bytes"]),
            "margin_bytes": 0,
        }
        assert result["gradients"] == {
            "checked": True,
            "reference": "the unplanned step",
            "max_abs_diff": 0.0,
            "max_rel_diff": 0.0,
            "bitwise_equal": True,
            "passed": True,
        }
        assert result["plan"]["kept"] + result["plan"]["recomputed"] == 4
        assert result["plan"]["optimality_gap"] == 0.0
        assert 0 < result["latency"]["recompute_flops_ratio"] < 0.34
        assert result["latency"]["step_ms"]["n"] == 1
        assert result["training"]["steps"] == 4

    def test_the_files_belong_together(self, run) -> None:
        code, result, folder = run("planner=dp", "budget_frac=0.6", "steps=4", "name='a=b, c'")
        assert sorted(p.name for p in folder.iterdir()) == [
            "certificate.json",
            "config.yaml",
            "curve.json",
            "metrics.jsonl",
            "plan.json",
            "profile.json",
            "result.json",
        ]
        plan, profile = CheckpointPlan.load(folder / "plan.json"), ChainProfile.load(folder / "profile.json")
        assert (plan.text, plan.digest) == (result["plan"]["text"], result["plan"]["digest"])
        assert plan.predicted_peak_bytes == result["memory"]["predicted_peak_bytes"]
        assert plan.fingerprint == profile.fingerprint
        assert profile.block_ids == ("layers.0", "layers.1", "layers.2", "layers.3")
        steps = [line["step"] for line in load_metrics(folder) if "train/loss" in line]
        assert steps == [1, 2, 3, 4]
        assert result["name"] == "a=b, c"
        assert "layers: 4" in (folder / "config.yaml").read_text(encoding="utf-8")
        assert "hydra" not in (folder / "config.yaml").read_text(encoding="utf-8")
        assert keys_of(result) >= keys_of(RunResult().to_dict()) - {"/error", "/environment"}
        json.dumps(result, allow_nan=False)
        assert code == 0

    def test_every_run_has_a_certificate_with_its_dry_run_and_the_whole_trade_off(self, run) -> None:
        _, result, folder = run("planner=dp", "budget_frac=0.6", "steps=1")
        certificate = json.loads((folder / "certificate.json").read_text())
        found = result["certificate"]
        assert {key: certificate[key] for key in found} == found
        assert certificate["plan_digest"] == result["plan"]["digest"]
        assert certificate["measured_peak_bytes"] == result["memory"]["measured_peak_bytes"]
        assert found["cross_check"] == "agrees"
        assert 0 <= found["lower_bound"] <= found["flat_lower_bound"] <= found["cost"]
        assert found["operator"].startswith("aten.")
        assert 0 < found["dry_run_peak_bytes"] <= result["memory"]["measured_peak_bytes"]
        curve = PlanCurve.load(folder / "curve.json")
        assert curve.at(result["budget"]["bytes"]).cost <= found["cost"] * (1 + 1e-9)

    def test_the_weights_counted_are_those_of_the_model(self, run) -> None:
        _, result, _ = run("plan_only=true")
        # tokens, positions, head; per block 2 norms, qkv, proj, fc, out; the last norm
        width, vocab, length = 16, 32, 16
        block = 2 * 2 * width + (width * 3 * width + 3 * width) + (width * width + width)
        block += (width * 4 * width + 4 * width) + (4 * width * width + width)
        parameters = 2 * vocab * width + length * width + 4 * block + 2 * width
        assert result["memory"]["weights_bytes"] == result["memory"]["gradients_bytes"] == parameters * 4
        assert parameters * 8 <= result["memory"]["optimizer_bytes"] <= parameters * 8 + 1000  # AdamW's two moments

    def test_plan_only_trains_nothing(self, run) -> None:
        code, result, folder = run("plan_only=true", "budget_frac=0.6")
        assert (code, result["status"]) == (0, "ok")
        assert result["training"]["steps"] is None
        assert result["memory"]["measured_peak_bytes"] is None
        assert result["memory"]["predicted_peak_bytes"] > 0
        assert load_metrics(folder) == []

    def test_infeasible_is_refused_with_the_least_that_can_be_reached(self, run) -> None:
        code, result, folder = run("budget_bytes=1000")
        assert (code, result["status"]) == (3, "infeasible")
        assert ChainProfile.load(folder / "profile.json").block_ids[0] == "layers.0", "it took time, and stays"
        assert result["error"]["type"] == "InfeasibleTargetError"
        least = result["memory"]["smallest_reachable_bytes"]
        assert str(least) in result["error"]["message"]
        assert result["training"]["steps"] is None
        assert result["budget"]["bytes"] == 1000
        assert result["memory"]["no_checkpoint_predicted_peak_bytes"] > least
        code, result, _ = run(f"budget_bytes={least}")
        assert (code, result["memory"]["predicted_peak_bytes"]) == (0, least)

    def test_a_reference_above_the_budget_runs_and_says_so(self, run) -> None:
        code, result, _ = run("planner=none", "budget_frac=0.5")
        assert (code, result["status"]) == (4, "over_budget")
        assert result["memory"]["within_budget"] is False
        assert result["plan"]["recomputed"] == 0
        assert result["training"]["steps"] == 3

    def test_a_wrong_gradient_is_a_mismatch_and_nothing_is_trained(self, run) -> None:
        code, result, _ = run("planner=all", "budget_frac=1.0", target="WrongGradients")
        assert (code, result["status"]) == (6, "mismatch")
        assert result["error"]["type"] == "GradientMismatch"
        assert "gradient differs by" in result["error"]["message"]
        assert "first in block 'layers.0'" in result["error"]["message"]
        assert result["gradients"]["passed"] is False
        assert result["training"]["steps"] is None

    def test_a_wrong_prediction_is_a_mismatch(self, run, monkeypatch) -> None:
        def half(*args: Any, **kwargs: Any) -> Any:
            proof = prove_model(*args, **kwargs)
            return replace(proof, peak_bytes=int(proof.peak_bytes * 0.98))

        monkeypatch.setattr(proving, "prove_model", half)
        code, result, _ = run("planner=dp")
        assert (code, result["status"], result["error"]["type"]) == (6, "mismatch", "PredictionMismatch")
        assert result["memory"]["prediction_error"] == pytest.approx(0.0204, abs=0.001)

    def test_a_planned_step_that_does_not_fit_ends_as_out_of_memory(self, run, monkeypatch, caplog) -> None:
        def full(model: Any, plan: Any, batch: Any, loss_fn: Any, **options: Any) -> Any:
            def loss_or_error(module: Any, given: Any) -> Any:
                if "forward" in vars(module.layers[0]):
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
                return loss_fn(module, given)

            return prove_model(model, plan, batch, loss_or_error, **options)

        monkeypatch.setattr(proving, "prove_model", full)
        code, result, _ = run("planner=all", "budget_frac=1.0")
        assert (code, result["status"]) == (5, "oom")
        assert result["error"]["type"] == "OutOfMemoryError"
        assert result["memory"]["measured_peak_bytes"] is None
        assert result["memory"]["no_checkpoint_measured_peak_bytes"] > 0
        assert result["gradients"]["reference"] == "the planned step does not fit the device"
        assert "was predicted as" in caplog.text
        assert "and never measured; weights" in caplog.text

    def test_training_that_does_not_fit_compares_the_plan_with_the_measured_peak(
        self, run, monkeypatch, caplog
    ) -> None:
        """B43."""

        def full(*args: Any, **options: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99999 bytes")

        monkeypatch.setattr(trained, "train", full)
        code, result, _ = run("planner=dp")
        assert (code, result["status"], result["error"]["type"]) == (5, "oom", "RuntimeError")
        assert result["memory"]["measured_peak_bytes"] > 0
        assert "optimizer state" in caplog.text
        assert "Use a smaller budget or data.batch_size" in caplog.text

    @pytest.mark.parametrize(("batch", "answer"), [("auto", "fastest"), ("largest", "largest")])
    def test_the_micro_batch_is_chosen_and_the_samples_of_a_step_stay(self, run, batch, answer) -> None:
        code, fixed, _ = run("planner=dp", "state=sync", "data.batch_size=8")
        code, result, _ = run("planner=dp", "state=sync", "data.batch_size=8", f"batch={batch}", "budget_frac=0.3")
        assert (code, result["status"]) == (0, "ok")
        found = result["batch"]
        assert found["size"] == found[answer]
        assert found["size"] * found["accumulate"] == 8
        assert found["largest"] < 8, "not all of them at once"
        assert (result["budget"]["kind"], result["budget"]["value"]) == ("budget_frac", 0.3), "as it was typed"
        assert result["memory"]["within_budget"]
        assert result["training"]["last_loss"] == pytest.approx(fixed["training"]["last_loss"], rel=1e-3)

    def test_out_of_memory_in_training_costs_a_tighter_plan_and_no_weight(self, run, monkeypatch, caplog) -> None:
        code, plain, folder = run("planner=dp", "state=sync")
        weights = read_state(folder)
        fail_in_step(monkeypatch, 2)
        code, result, folder = run("planner=dp", "state=sync")
        assert (code, result["status"], result["training"]["oom_recoveries"]) == (0, "ok", 1)
        assert plain["training"]["oom_recoveries"] == 0
        assert result["training"]["last_loss"] == plain["training"]["last_loss"]
        (note,) = [note for note in result["notes"] if note.startswith("out of memory in forward")]
        assert note in caplog.text
        found = read_state(folder)
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in weights["model"].items())
        taken = CheckpointPlan.from_json(found["plan"]["json"])
        assert taken.predicted_peak_bytes <= 0.9 * result["memory"]["predicted_peak_bytes"], "what resumes has it too"
        assert note.endswith(taken.text)
        assert result["plan"]["text"] == CheckpointPlan.load(folder / "plan.json").text == taken.text

    def test_without_retries_out_of_memory_ends_the_run(self, run, monkeypatch) -> None:
        fail_in_step(monkeypatch, 2)
        code, result, _ = run("planner=dp", "oom_retries=0", "state=sync")
        assert (code, result["status"], result["error"]["type"]) == (5, "oom", "OutOfMemoryError")

    def test_a_model_that_fails_on_its_data_is_told_with_both_names_before_anything_is_measured(self, run) -> None:
        with pytest.raises(ConfigError, match=r"Breaks failed on a batch of synthetic_tokens \(int64\[4, 16\]\): "):
            run("planner=dp", target="Breaks")
        assert not (run.folder / "profile.json").exists()

    def test_a_fault_of_the_users_model_is_a_failed_run_and_raised(self, run) -> None:
        with pytest.raises(RuntimeError, match="the user's own fault"):
            run("planner=dp", target="BreaksLater")
        result = load_result(run.folder)
        assert result["status"] == "failed"
        assert result["error"] == {"type": "RuntimeError", "message": "the user's own fault", "signal": None}

    def test_a_loss_that_is_never_finite_ends_the_run_and_leaves_no_nan_in_the_records(self, run) -> None:
        code, result, _ = run("planner=dp", "steps=200", target="NanLoss")
        assert (code, result["status"], result["training"]["steps"]) == (6, "mismatch", None)
        assert "The unplanned step is not finite either" in result["error"]["message"]
        with pytest.raises(NonFiniteError):
            run("planner=dp", "steps=200", "proof.check_gradients=false", target="NanLoss")
        result = load_result(run.folder)
        assert (result["status"], result["error"]["type"]) == ("failed", "NonFiniteError")

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        for line in [
            (run.folder / "result.json").read_text(),
            *(run.folder / "metrics.jsonl").read_text().splitlines(),
        ]:
            json.loads(line, parse_constant=refuse)
        assert all(line["train/loss"] is None for line in load_metrics(run.folder))

    def test_a_bad_configuration_found_late_names_the_key(self, run) -> None:
        with pytest.raises(ConfigError, match="device_budget_bytes"):
            run("device_budget_bytes=1000")
        with pytest.raises(ConfigError, match=r"'layer.\*' names no module"):
            run("blocks.paths=[layer.*]")
        assert load_result(run.folder)["error"]["type"] == "ConfigError"

    def test_a_plan_of_other_blocks_is_refused_before_anything_is_measured(self, run, monkeypatch) -> None:
        monkeypatch.setattr(profiling, "profile_model", lambda *_, **__: pytest.fail("profiled all the same"))
        with pytest.raises(ConfigError, match=r"planner\.text=R\(7\): "):
            run("planner=text", "planner.text='R(7)'")

    def test_a_run_begins_once_its_configuration_is_known_to_describe_one(self, compose, tmp_path: Path) -> None:
        begun: list[str] = []
        for overrides in (("planner=text", "planner.text='R(7)'"), ("plan_only=true",)):
            composed = compose(*TINY, *overrides)
            folder = tmp_path / str(len(overrides))
            folder.mkdir()
            arguments = {"resolved": resolve(composed), "folder": folder, "overrides": []}
            with contextlib.suppress(ConfigError):
                run_job(load_config(composed), on_begin=lambda told=overrides: begun.append(told[0]), **arguments)
        assert begun == ["plan_only=true"]

    def test_it_says_what_it_is_at_and_calls_the_planner_as_it_was_typed(self, run, caplog, capsys) -> None:
        caplog.set_level(logging.INFO)
        run("planner=dp", "steps=1")
        assert "profiling 4 blocks ..." in caplog.text
        assert "proving the plan by real steps" in caplog.text
        assert "plan by dp: predicted peak" in capsys.readouterr().out


class TestSharedProfile:
    def test_it_is_measured_once_and_both_runs_say_where_it_came_from(self, run, tmp_path, caplog) -> None:
        caplog.set_level(logging.INFO)
        cache = f"profile.cache={tmp_path / 'shared'}"
        alone = run("planner=dp", "plan_only=true")[1]["profile"]
        first = run("planner=dp", "plan_only=true", cache, "seed=1")
        second = run("planner=greedy", "plan_only=true", cache, "seed=2", "budget_frac=0.7")
        assert (alone["source"], alone["file"]) == ("measured", None)
        assert [result["profile"]["source"] for _, result, _ in (first, second)] == ["measured", "shared"]
        [file] = (tmp_path / "shared").glob("*.json")
        assert {result["profile"]["file"] for _, result, _ in (first, second)} == {str(file)}
        assert first[1]["profile"]["measured_s"] == second[1]["profile"]["measured_s"] > 0
        assert (first[2] / "profile.json").read_text() == (second[2] / "profile.json").read_text()
        assert f"4 blocks of 1 kind read from {file}" in caplog.text

    @pytest.mark.parametrize(
        "other", ["data.batch_size=2", "model.width=32", "profile.num_trials=2", "runtime.dtype=bf16_mixed"]
    )
    def test_another_model_batch_or_number_format_is_measured_again(self, run, tmp_path, other: str) -> None:
        cache = f"profile.cache={tmp_path / 'shared'}"
        run("plan_only=true", cache)
        assert run("plan_only=true", cache, other)[1]["profile"]["source"] == "measured"
        assert run("plan_only=true", cache)[1]["profile"]["source"] == "shared"

    def test_a_damaged_file_is_a_note_in_the_result(self, run, tmp_path) -> None:
        cache = f"profile.cache={tmp_path / 'shared'}"
        run("plan_only=true", cache)
        [file] = (tmp_path / "shared").glob("*.json")
        file.write_text("{")
        code, result, _ = run("plan_only=true", cache)
        assert (code, result["profile"]["source"]) == (0, "measured")
        assert f"{file} is not used" in result["notes"][0]

    def test_where_and_what_is_shared_does_not_change_what_a_run_is(self, compose) -> None:
        plain = config_hash(resolve(compose(*TINY)))
        assert config_hash(resolve(compose(*TINY, "profile.cache=/x", "profile.options=true"))) == plain
        assert config_hash(resolve(compose(*TINY, "profile.num_trials=3"))) != plain


class TestOnTheHost:
    def test_a_plan_in_text_is_measured_proven_and_recorded(self, run) -> None:
        code, result, folder = run("planner=text", "planner.text='K0 O1 R(2) O3'", "budget_frac=1.0", "steps=2")
        assert (code, result["status"]) == (0, "ok")
        plan = result["plan"]
        assert (plan["kept"], plan["recomputed"], plan["offloaded"]) == (1, 1, 2)
        assert result["memory"]["prediction_error"] == 0
        assert result["gradients"]["bitwise_equal"]
        assert json.loads((folder / "plan.json").read_text())["decisions"][1]["executor"] == "offload"

    @pytest.mark.parametrize(("wanted", "is_measured"), [("auto", False), ("always", True), ("never", False)])
    def test_on_a_cpu_it_is_a_choice_only_where_that_is_asked_for(self, run, wanted: str, is_measured: bool) -> None:
        _, _, folder = run("planner=optimal", "plan_only=true", f"profile.offload={wanted}")
        blocks = json.loads((folder / "profile.json").read_text())["blocks"]
        assert all(bool(block["offload"]) == is_measured for block in blocks)


class TestSignals:
    @pytest.mark.parametrize(
        ("module", "phase"), [(profiling, "profile_model"), (proving, "prove_model"), (trained, "train")]
    )
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_one_signal_ends_each_phase_with_its_code(self, run, monkeypatch, module, phase, number, code) -> None:
        original = getattr(module, phase)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, phase, interrupted)
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        found, result, _ = run("planner=dp", "steps=10000")
        assert (found, result["status"]) == (code, "interrupted")
        assert result["error"]["signal"] == number.name
        assert (result["training"]["steps"] or 0) <= 1
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers

    def test_a_process_ends_soon_after_sigterm_with_its_records_whole(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        command = [sys.executable, "train.py", *TINY, "steps=100000", f"hydra.run.dir={folder}"]
        process = subprocess.Popen(
            [*command, f"output_dir={tmp_path}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
        )
        try:
            metrics = folder / "metrics.jsonl"
            deadline = time.monotonic() + 120
            while not (metrics.exists() and metrics.read_text().count("\n") > 2):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 143
        finally:
            process.kill()
        result = load_result(folder)
        assert result["status"] == "interrupted"
        assert result["training"]["steps"] == max(line["step"] for line in load_metrics(folder))


class TestChoices:
    def test_a_forced_plan_with_a_segment_runs(self, run) -> None:
        code, result, _ = run("planner=text", 'planner.text="R(0 1) R(2) K3"', "budget_frac=1.0")
        assert (code, result["plan"]["text"]) == (0, "R(0 1) R(2) K3")
        assert result["gradients"]["bitwise_equal"]
        assert abs(result["memory"]["prediction_error"]) <= 0.01

    def test_a_stored_plan_is_replayed(self, run) -> None:
        _, first, folder = run("planner=dp", "budget_frac=0.6")
        code, second, _ = run("planner=file", f"planner.path={folder / 'plan.json'}", "budget_frac=0.6")
        assert code == 0
        assert second["plan"]["text"] == first["plan"]["text"]
        assert second["memory"]["measured_peak_bytes"] == first["memory"]["measured_peak_bytes"]

    def test_optimal_measures_options_inside_blocks_and_keeps_parts(self, run, monkeypatch) -> None:
        code, flat, _ = run("planner=dp", "budget_frac=0.6", "steps=2")
        code, result, folder = run("planner=optimal", "budget_frac=0.6", "steps=2")
        assert (code, result["status"]) == (0, "ok")
        plan = result["plan"]
        assert plan["selective"] > 0
        assert plan["kept"] + plan["recomputed"] + plan["selective"] == 4
        assert abs(result["memory"]["prediction_error"]) <= 0.01
        assert result["memory"]["within_budget"] is True
        assert result["gradients"]["bitwise_equal"] is True
        assert result["latency"]["recompute_flops_ratio"] < flat["latency"]["recompute_flops_ratio"]
        monkeypatch.setattr(choices, "propose_keep_sets", lambda operators: [])  # as if times had been others
        stored, typed = f"planner.path={folder / 'plan.json'}", f"planner.text='{plan['text']}'"
        for given in (("planner=file", stored), ("planner=text", typed)):
            _, again, _ = run(*given, "budget_frac=0.6", "steps=2")
            assert (again["status"], again["plan"]["text"]) == ("ok", plan["text"])
        _, typed, _ = run("planner=text", "planner.text='K0 S1[] K2 K3'", "budget_frac=1.0", "steps=2")
        assert (typed["status"], typed["plan"]["recomputed"]) == ("ok", 1)

    def test_without_scipy_optimal_plans_with_whole_blocks_and_says_what_is_missing(self, run, monkeypatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else find(name))
        code, result, _ = run("planner=optimal", "budget_frac=0.6", "plan_only=true")
        assert (code, result["plan"]["selective"]) == (0, 0)
        assert any("pip install -e '.[solvers]'" in note for note in result["notes"])

    def test_losses_do_not_depend_on_the_plan(self, run) -> None:
        losses = []
        for overrides in (
            ["planner=none", "budget_frac=1.0"],
            ["planner=dp"],
            ["planner=text", 'planner.text="R(0-3)"'],
        ):
            _, _, folder = run(*overrides, "steps=4", "model.dropout=0.1")
            losses.append([line["train/loss"] for line in load_metrics(folder) if "train/loss" in line])
        assert losses[0] == losses[1] == losses[2]
        assert len(set(losses[0])) == 4

    @pytest.mark.parametrize(
        ("override", "kind"),
        [
            ("budget_bytes=10MiB", "budget_bytes"),
            ("saving_frac=0.3", "saving_frac"),
            ("max_slowdown=1.2", "max_slowdown"),
            ("budget=auto", "auto"),
        ],
    )
    def test_every_kind_of_budget_plans(self, run, override: str, kind: str) -> None:
        code, result, _ = run(override, "plan_only=true", "profile.num_trials=2")
        assert (code, result["budget"]["kind"]) == (0, kind)
        if kind == "max_slowdown":
            assert result["budget"]["bytes"] is None
            assert 0 <= result["latency"]["recompute_flops_ratio"] <= 0.2
        else:
            assert result["memory"]["predicted_peak_bytes"] <= result["budget"]["bytes"]

    def test_a_device_budget_has_room_for_what_stands_beside_activations(self, run) -> None:
        _, plain, _ = run("plan_only=true", "budget_frac=1.0")
        memory = plain["memory"]
        batch = 4 * 16 * 2 * 8  # tokens and targets, int64
        static = memory["weights_bytes"] + memory["gradients_bytes"] + memory["optimizer_bytes"] + batch
        half = memory["no_checkpoint_predicted_peak_bytes"] * 6 // 10
        code, result, _ = run("plan_only=true", f"device_budget_bytes={static + half}")
        assert (code, result["budget"]["bytes"]) == (0, half)
        assert result["memory"]["predicted_peak_bytes"] <= half

    def test_mixed_precision_runs(self, run) -> None:
        code, result, _ = run("runtime.dtype=bf16_mixed", "planner=dp", "budget_frac=0.7")
        assert (code, result["dtype"]) == (0, "bf16_mixed")
        assert abs(result["memory"]["prediction_error"]) <= 0.01

    def test_a_csv_logger_writes_its_files(self, run) -> None:
        code, _, folder = run("logger.kind=csv", "planner=dp")
        assert code == 0
        assert (folder / "metrics.csv").read_text(encoding="utf-8").count("\n") >= 4
        assert (folder / "plan.csv").read_text(encoding="utf-8").count("layers.") == 4

    def test_wandb_offline_writes_one_run(self, run, monkeypatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        code, result, folder = run("logger.kind=wandb", "planner=dp")
        assert (code, result["status"]) == (0, "ok")
        assert len(list((folder / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("planner=compile", "budget_frac=0.6"), None),
        (("planner=text", "planner.text='C0[1] R(1) C2[0] K3'", "budget_frac=1.0"), "C0[1.0] R(1) C2[0.0] K3"),
        (("planner=text", "planner.text='C0-3[0.5]'", "budget_frac=1.0"), "C0-3[0.5]"),
    ],
)
def test_a_run_with_compiled_blocks_is_proved_and_trains(run, overrides: tuple[str, ...], text: str | None) -> None:
    code, result, folder = run(*overrides, "cost=time", "proof.check_gradients=true")
    assert (code, result["status"]) == (0, "ok")
    plan = CheckpointPlan.load(folder / "plan.json")
    assert plan.text == text if text else plan.compiled > 0
    assert result["plan"]["compiled"] == plan.compiled
    assert abs(result["memory"]["prediction_error"]) <= 0.01
    assert result["memory"]["within_budget"]
    assert result["gradients"]["passed"]
    assert result["latency"]["predicted_overhead_ratio"] is None
    assert any("no certificate and no trade-off curve" in note for note in result["notes"])
    assert not (folder / "certificate.json").exists()


def fail_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The allocator says no when the gradients of this step are asked for, once."""
    calls = iter(range(1, 10**6))

    def gradients(*args: Any) -> float | None:
        if next(calls) == step:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return accumulate_gradients(*args)

    monkeypatch.setattr("ckptplan.recovery.accumulate_gradients", gradients)


def read_state(folder: Path) -> dict[str, Any]:
    with CheckpointManager(folder / "state") as states:
        return states.load("latest")
