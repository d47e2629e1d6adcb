"""What the patch itself costs: a plan that keeps every block allocates nothing more and takes no time."""

from __future__ import annotations

import copy
import time

import pytest
from torch import Tensor, nn

from ckptplan.autofit import fit
from ckptplan.memory import CpuAllocatorMeter
from tests.test_autofit import Net, batch_of, loss_fn
from tests.tracker import step_peak

TRIALS = 60
MOST_RATIO = 1.05  # of the fastest steps; the noise of a busy machine only ever slows a step


def fitted() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model, batch = Net(), batch_of(256)
    plain = copy.deepcopy(model)
    plan = fit(model, batch, loss_fn, 1.0, say=None).plan
    assert (plan.recomputed, plan.selective) == (0, 0)
    return model, plain, batch


def test_an_all_kept_plan_allocates_nothing_more() -> None:
    model, plain, batch = fitted()
    peaks = []
    for one in (model, plain):
        loss_fn(one, batch).backward()
        peaks.append(step_peak(lambda one=one: loss_fn(one, batch), one.parameters()))
    assert peaks[0] == peaks[1]
    allocated = []
    for one in (model, plain):
        with CpuAllocatorMeter() as meter:
            meter.mark("start")
            loss_fn(one, batch).backward()
            meter.mark("end")
        allocated.append(meter.peak("start", "end") - meter.level("start"))
    assert allocated[0] == allocated[1]


@pytest.mark.slow
def test_an_all_kept_plan_takes_no_time() -> None:
    model, plain, batch = fitted()
    fastest = [float("inf"), float("inf")]
    for trial in range(TRIALS):
        for index in (0, 1) if trial % 2 else (1, 0):
            start_s = time.perf_counter()
            loss_fn((model, plain)[index], batch).backward()
            fastest[index] = min(fastest[index], time.perf_counter() - start_s)
    assert fastest[0] <= MOST_RATIO * fastest[1], fastest
