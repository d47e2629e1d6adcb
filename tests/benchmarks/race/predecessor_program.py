"""The process in which ``ckptplan`` is the predecessor: a request on standard input, plans on standard output."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import torch


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    sys.path.insert(0, request["folder"])
    import ckptplan

    if ckptplan.__version__ != "0.1.0rc1":
        raise SystemExit(f"{ckptplan.__file__} is version {ckptplan.__version__}; expected 0.1.0rc1")
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in request["blocks"]))
    blocks = ckptplan.declare_blocks(model, [(str(i), block) for i, block in enumerate(model)])
    profiled = ckptplan.profile_blocks(blocks, (torch.ones(1, 1),), device="cpu", num_warmup=0, num_trials=1)
    profiles = [
        dataclasses.replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=int(given["activation_bytes"]),
            activation_bytes_method="isolated_forward_delta",
            recompute_time_upper_bound_ms_mean=given["cost"],
        )
        for profile, given in zip(profiled, request["blocks"], strict=True)
    ]
    found = []
    for planner in request["planners"]:
        for bucket_bytes in request["buckets_bytes"]:
            for budget_bytes in request["budgets_bytes"]:
                start_s = time.perf_counter()
                try:
                    plan = ckptplan.plan_checkpoints(  # type: ignore[call-arg]
                        profiles,
                        blocks,
                        target_kind="activation_budget_bytes",
                        target_value=budget_bytes,
                        planner=planner,
                        activation_bucket_bytes=bucket_bytes,
                    )
                except ckptplan.InfeasibleTargetError:
                    continue
                chosen = [i for i, decision in enumerate(plan.decisions) if decision.checkpointed]
                solve_s = time.perf_counter() - start_s
                found.append({"recomputed": chosen, "budget_bytes": budget_bytes, "solve_s": solve_s})
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
