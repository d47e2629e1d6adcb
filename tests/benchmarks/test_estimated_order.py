"""Plans in the order of their estimated times, against real steps: ``python -m pytest -m slow`` on a quiet machine.

The machine is calibrated first. Steps of all plans are taken in turn, round by round, and each has its least time;
pairs that the estimate holds at least 2 % apart have to be ordered as measured. What the rounds scatter is printed.
"""

from __future__ import annotations

import itertools
import statistics
import time

import pytest
import torch

from ckptplan.apply import checkpointed
from ckptplan.calibrate import calibrate
from ckptplan.data import Batch
from ckptplan.estimate import estimate_profile
from ckptplan.models.gpt import GPT
from ckptplan.planners import plan_checkpoints
from ckptplan.planners.budgets import step_cost
from ckptplan.simulate import simulate_plan
from ckptplan.training import loss_of

NUM_ROUNDS = 15
APART = 0.02


@pytest.mark.slow
def test_plans_two_percent_apart_are_ordered_as_measured() -> None:
    calibration = calibrate(torch.device("cpu"), say=lambda line: None)
    model = GPT(layers=8, width=256, heads=4, sequence_length=256)
    drawn = torch.randint(256, (4, 256))
    batch = Batch(drawn, drawn)
    profile = estimate_profile(model, None, batch, loss_of, device="cpu", calibration=calibration)
    plans = [
        plan_checkpoints(
            profile,
            target_kind="activation_budget_bytes",
            target_value=2**60,
            planner="text",
            text=" ".join(f"K{i}" if i >= again else f"R({i})" for i in range(8)),
            on_infeasible="best_effort",
        )
        for again in (0, 2, 4, 6, 8)
    ]
    plain_ms = step_cost(profile, "time")
    estimated = [plain_ms + (simulate_plan(profile, plan).recompute_time_ms or 0.0) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for _, (number, plan) in itertools.product(range(NUM_ROUNDS), enumerate(plans)):
        with checkpointed(model, plan):
            start_s = time.perf_counter()
            loss_of(model, batch).backward()
            times[number].append((time.perf_counter() - start_s) * 1e3)
    least = [min(of_plan) for of_plan in times]
    spread = max(statistics.median(of_plan) / min(of_plan) - 1 for of_plan in times)
    for plan, guess, found in zip(plans, estimated, least, strict=True):
        print(f"{plan.text}: estimated {guess:.1f} ms, least of {NUM_ROUNDS} {found:.1f} ms")
    print(f"medians lie up to {spread:.1%} above the least; calibration scatters by {calibration.spread:.1%}")
    for one, other in itertools.combinations(range(len(plans)), 2):
        if estimated[other] >= estimated[one] * (1 + APART):
            assert least[other] > least[one], (plans[one].text, plans[other].text)
