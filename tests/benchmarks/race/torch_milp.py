"""PyTorch's own planner of selective checkpointing (``torch.distributed._tools``), made to run on a CPU.

It needs the packages pulp and pwlf. Its roofline reads CUDA's properties; here one takes its place that knows a FLOP
rate and a memory bandwidth. A first MILP gives every block the share of its activations to drop, a second one per
block the operators whose outputs stay; nothing in PyTorch applies the answer, so the policies are made here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.benchmarks.race.eager import Entrant, with_checkpoints
from tests.benchmarks.race.measuring import flop_counter
from tests.benchmarks.race.subjects import Subject, loss_of

RIVAL = "torch SAC MILP"
FLOPS_PER_MS, BYTES_PER_MS = 5e7, 1e7  # of one core, roughly: 50 GFLOP/s and 10 GB/s


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("pulp", "pwlf"))


def torch_milp(subject: Subject, budgets_bytes: Sequence[int]) -> Iterator[Entrant]:
    """Its plan for each budget that it thinks feasible. The budget that it wants holds weights and gradients too."""
    stats = _collect(subject)
    static_bytes = 2 * sum(p.numel() * p.element_size() for p in subject.model.parameters())
    for budget_bytes in budgets_bytes:
        start_s = time.perf_counter()
        plan = _solve(stats, budget_bytes + static_bytes)
        solve_s = time.perf_counter() - start_s
        if plan is None:
            continue
        options = {
            index: {"context_fn": functools.partial(_contexts, tuple(saved))} for index, saved in plan.saved.items()
        }
        text = " ".join(
            f"S{index}[{sum(saved)}/{len(saved)}:{''.join(map(str, saved))}]" for index, saved in plan.saved.items()
        )
        yield Entrant(
            RIVAL,
            text or "nothing",
            with_checkpoints(subject, sorted(plan.saved), options),
            asked_bytes=budget_bytes,
            predicted_peak_bytes=plan.peak_bytes - static_bytes,
            solve_s=solve_s,
        )


@dataclass(frozen=True)
class _Stats:
    graph: Any
    per_module: dict[str, Any]
    units: list[str]  # names of the blocks, as its trackers call them


@dataclass(frozen=True)
class _Plan:
    saved: dict[int, list[int]]  # block -> 1 for each operator whose output stays
    peak_bytes: int


def _collect(subject: Subject) -> _Stats:
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    roofline = mock.patch.object(RuntimeEstimator, "_roofline_estimate", _cpu_roofline)
    with roofline, FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model, batch = subject.make()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        memory = MemTracker()
        memory.track_external(model)
        with memory:
            loss_of(model, batch).backward()
        runtime = RuntimeEstimator()
        with runtime("operator-level-cost-model"):
            loss_of(model, batch).backward()
        selective = SACEstimator()
        with selective("operator-level-cost-model"):
            loss_of(model, batch)
        info = aggregate_stats(model, memory, runtime, selective, torch.device("cpu"))
    for names in info["mod_order"].values():  # it cannot take a module that runs twice, as a dropout
        names[:] = dict.fromkeys(names)
    root = type(model).__name__
    units = [f"{root}.layers.{index}" for index in range(len(model.layers))]
    return _Stats(parse_module_info(info), selective.sac_mod_stats, units)


def _cpu_roofline(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """An operator's result, and the longer of what its FLOPs and its bytes would take, in milliseconds."""
    with flop_counter() as counter:
        out = func(*args, **(kwargs or {}))
    if func.is_view:
        return out, 0.0
    tensors = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, torch.Tensor)]
    moved_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return out, max(counter.get_total_flops() / FLOPS_PER_MS, moved_bytes / BYTES_PER_MS)


def _solve(stats: _Stats, budget_bytes: int) -> _Plan | None:
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch calls what later versions of pulp take back
        dropped, _, peak_bytes = sac_milp(stats.graph, budget_bytes / 2**30, ac_units=stats.units)
        if peak_bytes < 0:
            return None
        saved = {}
        for name, share in dropped.items():
            policy = get_optimal_checkpointing_policy_per_module(stats.per_module[name], max(0.0, 1 - share))
            if policy:
                saved[stats.units.index(name)] = policy
    return _Plan(saved, peak_bytes)


def _contexts(saved: Sequence[int]) -> Any:
    """Contexts that keep the operators' outputs by their place in the block's sequence of operators."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    places = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = places[context.is_recompute]
        places[context.is_recompute] = place + 1
        return CheckpointPolicy.MUST_SAVE if saved[place] else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
