"""The public benchmark of a plain chain, and results side by side."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptplan.apply import CheckpointedSequential
from ckptplan.blocks import CheckpointableBlock
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import OwnBatch, StepPair, StepProof, prove
from ckptplan.subject import PlainChain, Trials, require_placement
from ckptplan.twin import make_twin
from ckptplan.units import require_amount
from ckptplan.validate import validate_plan


@dataclass(frozen=True)
class BenchmarkResult:
    """What ``run_benchmark`` measured. Bytes are ints; None: not measured.

    Attributes:
        peak_allocated_bytes: allocator peak with weights and gradients in it.
        activation_peak_bytes: the same above what stands before the step; what a budget bounds.
        peak_reserved_bytes: what CUDA's caching allocator held; None on a CPU.
        step_latency_ms: one figure per trial of forward, loss and backward.
        throughput_samples_per_sec: first dimension of the first input, by the mean latency.
    """

    config_name: str
    peak_allocated_bytes: int | None
    activation_peak_bytes: int | None
    predicted_peak_bytes: int | None
    peak_reserved_bytes: int | None
    step_latency_ms: tuple[float, ...]
    no_checkpoint_activation_peak_bytes: int | None
    no_checkpoint_step_latency_ms: tuple[float, ...]
    batch_shape: str
    dtype: str
    correctness_checked: bool
    correctness_reference: str | None
    correctness_passed: bool | None
    correctness_faults: tuple[str, ...]
    bitwise_equal: bool | None
    max_grad_diff: float | None
    oom: bool = False
    error_message: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def step_latency_ms_mean(self) -> float | None:
        return statistics.fmean(self.step_latency_ms) if self.step_latency_ms else None

    @property
    def step_latency_ms_p50(self) -> float | None:
        return percentile(self.step_latency_ms, 50)

    @property
    def step_latency_ms_p95(self) -> float | None:
        return percentile(self.step_latency_ms, 95)

    @property
    def throughput_samples_per_sec(self) -> float | None:
        mean_ms = self.step_latency_ms_mean
        size = self.batch_shape.partition("[")[2].partition(",")[0].rstrip("]")
        return int(size) * 1e3 / mean_ms if mean_ms and size else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which ``percent`` of ``values`` lie, interpolated; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def run_benchmark(
    blocks: Sequence[CheckpointableBlock],
    plan: CheckpointPlan,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None,
    make_target: Callable[[Any], torch.Tensor],
    *,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    num_warmup: int = 5,
    num_trials: int = 20,
    check_correctness: bool = True,
    correctness_rtol: float = 1e-5,
    correctness_atol: float = 0.0,
) -> BenchmarkResult:
    """Peak, latency and gradients of real steps of a plain chain under ``plan``.

    Args:
        make_target: output of the chain -> scalar loss.
        correctness_rtol: allowed difference of a gradient, relative to the largest element of that parameter's.
        correctness_atol: allowed absolute difference on top.

    Raises:
        PlanIncompatibleError: the plan is not one for these blocks.
        ValueError, TypeError: wrong device or dtype, bad counts or tolerances, arguments of another type.
    """
    require_amount("correctness_rtol", correctness_rtol)
    require_amount("correctness_atol", correctness_atol)
    where, kwargs = torch.device(device), dict(example_kwargs or {})
    trials = Trials(num_warmup, num_trials)
    validate_plan(plan, blocks, example_inputs, example_kwargs)
    require_placement(blocks, (example_inputs, kwargs), where, dtype)
    modules = make_twin([block.module for block in blocks])
    own = OwnBatch((example_inputs, kwargs))
    plain = PlainChain(modules)
    planned = CheckpointedSequential(
        [CheckpointableBlock(b.block_id, b.order, m) for b, m in zip(blocks, modules, strict=True)], plan
    )
    pair = StepPair(
        planned=lambda: make_target(planned(*own.now[0], **own.now[1])),
        plain=lambda: make_target(plain(*own.now[0], **own.now[1])),
        twin=plain,
        batch=own,
        device=where,
    )
    proof = prove(pair, trials, check_gradients=check_correctness, rtol=correctness_rtol, atol=correctness_atol)
    return _benchmark_result(plan, pair, proof)


def _benchmark_result(plan: CheckpointPlan, pair: StepPair, proof: StepProof) -> BenchmarkResult:
    allocated = proof.device_peak_bytes
    if allocated is None and proof.peak_bytes is not None:
        allocated = proof.static_bytes + proof.peak_bytes
    first = next(iter(pair.batch.tensors), None)
    check = proof.gradients
    return BenchmarkResult(
        config_name=plan.planner,
        peak_allocated_bytes=allocated,
        activation_peak_bytes=proof.peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        peak_reserved_bytes=proof.device_reserved_bytes,
        step_latency_ms=proof.step_ms,
        no_checkpoint_activation_peak_bytes=proof.no_checkpoint_peak_bytes,
        no_checkpoint_step_latency_ms=proof.no_checkpoint_step_ms,
        batch_shape="" if first is None else f"[{','.join(map(str, first.shape))}]",
        dtype=",".join(sorted({str(p.dtype).removeprefix("torch.") for p in pair.twin.parameters()})),
        correctness_checked=check is not None,
        correctness_reference=check.reference if check else proof.gradients_note,
        correctness_passed=check.passed if check else None,
        correctness_faults=check.faults if check else (),
        bitwise_equal=check.bitwise_equal if check else None,
        max_grad_diff=check.max_abs_diff if check else None,
        oom=proof.out_of_memory == "planned",
        error_message="the planned step does not fit the device" if proof.out_of_memory == "planned" else None,
        environment={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        },
    )


@dataclass(frozen=True)
class ConfigComparison:
    """One result beside the reference; ratios are result / reference, None where either is not measured."""

    config_name: str
    reference_name: str
    activation_peak_ratio: float | None
    peak_allocated_ratio: float | None
    latency_ratio: float | None
    latency_p95_ratio: float | None
    throughput_ratio: float | None
    prediction_error: float | None  # (predicted - measured) / measured activation peak
    correctness_passed: bool | None


def compare_results(
    results: Sequence[BenchmarkResult], reference: BenchmarkResult | str
) -> tuple[ConfigComparison, ...]:
    """Each result against ``reference``, a result or the ``config_name`` of one of them.

    Raises:
        ValueError: no result of that name, or two.
    """
    if isinstance(reference, str):
        named = [r for r in results if r.config_name == reference]
        if len(named) != 1:
            names = ", ".join(r.config_name for r in results)
            raise ValueError(f"reference={reference!r} names {len(named)} results; expected one of: {names}")
        reference = named[0]
    return tuple(_comparison(result, reference) for result in results)


def _comparison(result: BenchmarkResult, reference: BenchmarkResult) -> ConfigComparison:
    predicted, measured = result.predicted_peak_bytes, result.activation_peak_bytes
    return ConfigComparison(
        config_name=result.config_name,
        reference_name=reference.config_name,
        activation_peak_ratio=_ratio(measured, reference.activation_peak_bytes),
        peak_allocated_ratio=_ratio(result.peak_allocated_bytes, reference.peak_allocated_bytes),
        latency_ratio=_ratio(result.step_latency_ms_p50, reference.step_latency_ms_p50),
        latency_p95_ratio=_ratio(result.step_latency_ms_p95, reference.step_latency_ms_p95),
        throughput_ratio=_ratio(result.throughput_samples_per_sec, reference.throughput_samples_per_sec),
        prediction_error=None if predicted is None or not measured else (predicted - measured) / measured,
        correctness_passed=result.correctness_passed,
    )


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference
