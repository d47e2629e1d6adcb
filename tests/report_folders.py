"""Run and sweep folders as runs leave them, written in milliseconds: their figures are made up, their form is real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptplan.costs import StageCost
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.record import (
    BudgetRecord,
    ErrorRecord,
    GradientsRecord,
    LatencyRecord,
    MemoryRecord,
    PlanRecord,
    RunRecorder,
    RunResult,
    StepTimes,
    TrainingRecord,
)
from ckptplan.simulate import simulate_plan

MIB = 1 << 20
STEP_MS = 80.0  # of a step with nothing recomputed
BLOCK_MS = 4.0  # of one recomputation
NAMES = {"dynamic_programming": "dp", "checkpoint_all": "all", "no_checkpoint": "none"}


def make_profile(count: int = 6) -> ChainProfile:
    """Blocks of two sizes between a region before and the head: 8 MiB and 2 MiB kept, 1 MiB handed on."""
    blocks = []
    for i in range(count):
        kept = (8 if i % 2 == 0 else 2) * MIB
        blocks.append(
            BlockProfile(
                f"layers.{i}",
                i,
                kind=f"kind{i % 2}",
                activation_bytes_estimate=kept,
                output_bytes=(MIB,),
                output_is_input=(None,),
                output_gradient_bytes=MIB,
                keep=StageCost(kept, kept + MIB, kept + 3 * MIB),
                recompute=StageCost(0, kept + MIB, kept + 3 * MIB),
                forward_time_ms=BLOCK_MS,
                backward_time_ms=2 * BLOCK_MS,
                recompute_time_ms=BLOCK_MS,
                forward_flops=1000,
                backward_flops=2000,
                recompute_flops=1000,
            )
        )
    times: dict[str, Any] = {"forward_time_ms": 1.0, "backward_time_ms": 2.0, "forward_flops": 10, "backward_flops": 20}
    pre = RegionProfile("pre", StageCost(MIB, 2 * MIB, 3 * MIB), (MIB,), (None,), **times)
    post = RegionProfile("post", StageCost(MIB, 2 * MIB, 4 * MIB), (), (), **times)
    return ChainProfile(tuple(blocks), pre, post, loss_region="measured", meter="cpu")


def write_run(
    folder: Path,
    *,
    planner: str = "dynamic_programming",
    fraction: float = 0.5,
    status: str = "ok",
    seed: int = 0,
    count: int = 6,
    overrides: Sequence[str] | None = None,
    error: str | None = None,
    config: str = "cost: time\n",
) -> dict[str, Any]:
    """A run's folder; with a status of failure it holds what a run had written until then. Returns ``result.json``."""
    (folder / ".hydra").mkdir(parents=True)
    name = NAMES.get(planner, planner)
    typed = [f"planner={name}", f"budget_frac={fraction}"] if overrides is None else list(overrides)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {json.dumps(word)}\n" for word in typed))
    (folder / "config.yaml").write_text(config)
    result = RunResult(
        status=status,
        planner=name,
        seed=seed,
        model="GPT",
        data="stdlib_text",
        device="cpu",
        dtype="float32",
        config_hash=f"{hash_of(folder.name)}{'0' * 56}",
        budget=BudgetRecord("budget_frac", fraction),
        error=None if error is None else ErrorRecord("Error", error),
    )
    result.environment = {"overrides": " ".join(typed)}
    profile = make_profile(count)
    plan = None
    if status != "failed":
        profile.save(folder / "profile.json")
        kept = simulate_plan(profile, CheckpointPlan.from_text(" ".join(f"K{i}" for i in range(count))).nodes)
        result.budget.bytes, result.budget.margin_bytes = int(kept.peak_bytes * fraction), 0
        result.memory.smallest_reachable_bytes = 17 * MIB
    if status not in ("failed", "infeasible"):
        plan = plan_checkpoints(
            profile,
            target_kind="activation_budget_fraction",
            target_value=fraction,
            planner=planner,
            on_infeasible="best_effort",
        )
        plan.save(folder / "plan.json")
        _fill(result, plan, profile, is_measured=status not in ("oom", "timeout"))
    with RunRecorder(folder) as recorder:
        if result.training.steps:
            for step in range(1, result.training.steps + 1):
                recorder.log({"step": step, "epoch": 0, "train/loss": 5.0 / step + seed, "lr": 0.1})
            recorder.log({"step": result.training.steps, "eval/loss": 2.5 + seed})
        return dict(json.loads(recorder.write_result(result).read_text()))


def hash_of(name: str) -> str:
    return f"{sum(name.encode()) * 2654435761 % 2**32:08x}"


def _fill(result: RunResult, plan: CheckpointPlan, profile: ChainProfile, *, is_measured: bool) -> None:
    ratio = (plan.predicted_cost or 0.0) / STEP_MS
    result.plan = PlanRecord(
        plan.text, plan.digest, 0.001, plan.kept, plan.recomputed, plan.selective, plan.optimality_gap
    )
    assert plan.predicted_peak_bytes is not None
    result.memory = MemoryRecord(
        no_checkpoint_predicted_peak_bytes=plan.no_checkpoint_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        smallest_reachable_bytes=17 * MIB,
        peak_at=plan.predicted_peak_at,
    )
    result.latency.predicted_overhead_ratio = ratio
    result.latency.recompute_flops_ratio = ratio / 2
    if not is_measured:
        return
    measured = plan.predicted_peak_bytes + 512
    result.memory.measured_peak_bytes = measured
    result.memory.no_checkpoint_measured_peak_bytes = plan.no_checkpoint_peak_bytes
    result.memory.prediction_error = (plan.predicted_peak_bytes - measured) / measured
    result.memory.within_budget = plan.feasible
    step_ms = STEP_MS * (1 + ratio) + 0.125
    result.latency = LatencyRecord(
        StepTimes(step_ms, step_ms, step_ms + 1, 0.5, 5),
        StepTimes(STEP_MS, STEP_MS, STEP_MS + 1, 0.5, 5),
        ratio + 0.01,
        ratio,
        ratio / 2,
    )
    result.gradients = GradientsRecord(True, "the unplanned step", 0.0, 0.0, True, True)
    result.training = TrainingRecord(20, 5.0, 0.25, 70.0, 9000.0)


def write_sweep(folder: Path) -> list[dict[str, Any]]:
    """Three planners at three budgets: one has no plan, one is over it, one ran out of memory, one died at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    results = []
    endings: dict[tuple[str, float], tuple[str, str | None]] = {
        ("dynamic_programming", 0.3): ("infeasible", "no plan fits <b>0.3</b> & more"),
        ("greedy", 0.3): ("over_budget", None),
        ("uniform", 0.5): ("oom", "out of memory"),
        ("uniform", 0.3): ("failed", "boom </script> <!-- x"),
    }
    jobs = [(planner, f) for planner in ("dynamic_programming", "greedy", "uniform") for f in (0.9, 0.5, 0.3)]
    for index, (planner, fraction) in enumerate(jobs):
        status, error = endings.get((planner, fraction), ("ok", None))
        name = f"{index:03d}_{NAMES.get(planner, planner)}_{fraction}_{hash_of(str(index))}"
        result = write_run(folder / name, planner=planner, fraction=fraction, status=status, error=error)
        results.append({"job": name, "index": index, **result})
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return results


def write_big_sweep(folder: Path, runs: int = 500, count: int = 24) -> None:
    """Four planners at many budgets, each with a figure of its own; one job in five still has its folder."""
    write_run(folder / "one", count=count)
    files = {path.name: path.read_text() for path in (folder / "one").glob("*.json*")}
    for path in sorted((folder / "one").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "one").rmdir()
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    lines = []
    for index in range(runs):
        name = f"{index:03d}_dp_0.5_{index:08x}"
        result = json.loads(files["result.json"])
        result |= {"planner": ("dp", "greedy", "uniform", "all")[index % 4], "seed": index, "job": name, "index": index}
        result["memory"]["measured_peak_bytes"] += index * 4099
        result["memory"]["predicted_peak_bytes"] += index * 4096
        result["latency"]["overhead_ratio"] += index % 37 / 100
        lines.append(json.dumps(result))
        if index % 5 == 0:
            (folder / name).mkdir()
            for file in ("profile.json", "plan.json", "metrics.jsonl"):
                (folder / name / file).write_text(files[file])
    (folder / "results.jsonl").write_text("\n".join(lines))
