"""What a step costs: bytes, FLOPs, gradients, time. Nothing here knows whose step it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ckptplan.memory import CpuAllocatorMeter
from tests.benchmarks.race.subjects import SEED

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class StepFigures:
    """One step above what stands before it. ``flops`` is None where a compiler hides the operators."""

    peak_bytes: int
    kept_bytes: int  # at the end of the forward
    flops: int | None
    gradients: tuple[Tensor, ...]


def measure(step: Step, model: nn.Module, *, is_eager: bool) -> StepFigures:
    """A step for gradients and FLOPs, which also warms up; then one under the meter."""
    flops, gradients = _run_counted(step, model, is_eager)
    torch.manual_seed(SEED)
    meter = CpuAllocatorMeter()
    with meter:
        meter.mark("start")
        loss = step()
        meter.mark("forward")
        loss.backward()
        meter.mark("end")
    start = meter.level("start")
    return StepFigures(meter.peak("start", "end") - start, meter.level("forward") - start, flops, gradients)


def _run_counted(step: Step, model: nn.Module, is_eager: bool) -> tuple[int | None, tuple[Tensor, ...]]:
    parameters = list(model.parameters())
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    torch.manual_seed(SEED)
    counter = flop_counter() if is_eager else None
    if counter is None:
        step().backward()
    else:
        with counter:
            step().backward()
    flops = None if counter is None else counter.get_total_flops()
    return flops, tuple(p.grad.clone() for p in parameters if p.grad is not None)


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter; it leaves out the CPU's fused attention, which is added by PyTorch's own formulas."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        },
    )


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def max_relative_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Largest over parameters: the largest difference as a share of the parameter's largest gradient."""
    return max(
        float((left.double() - right.double()).abs().max() / right.double().abs().max().clamp_min(1e-30))
        for left, right in zip(found, expected, strict=True)
    )


def bitwise_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@dataclass(frozen=True)
class StepTimes:
    """Processor seconds of one thread; what others do on the machine matters least to the minimum."""

    minimum_s: float
    spread: float  # (median - minimum) / minimum
    rounds: int


def interleaved_times(steps: Sequence[Step], rounds: int) -> list[StepTimes]:
    """Each round runs every step once, starting from another one; the first round is not counted."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(-1, rounds):
        for offset in range(len(steps)):
            index = (offset + number) % len(steps)
            elapsed_s = _processor_s(steps[index])
            if number >= 0:
                times[index].append(elapsed_s)
    return [StepTimes(min(t), statistics.median(t) / min(t) - 1, len(t)) for t in times]


def _processor_s(step: Step) -> float:
    start_s = time.process_time()
    step().backward()
    return time.process_time() - start_s
