"""The compiled league: torch.compile and its ``activation_memory_budget``, whole or block by block; and our planner."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from ckptplan.measure import profile_model
from ckptplan.profiles import ChainProfile
from tests.benchmarks.race.eager import Checkpointed, Entrant, plan_for, plan_text, planned_step, steps_between
from tests.benchmarks.race.judging import OUR_COMPILED
from tests.benchmarks.race.measuring import Step
from tests.benchmarks.race.subjects import Subject, loss_of

# Each is compiled anew, whole models for a minute: 1 is the default, between 1 and 0.7 lies a plateau.
WHOLE_BUDGETS = (1.0, 0.5, 0.25, 0.0)
BLOCK_BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
TRIALS = {"num_warmup": 1, "num_trials": 5}  # the times that our plans are made from


@functools.cache
def backend(budget: float) -> Callable[..., Any]:
    """Inductor with this memory budget; one function per budget, so that Dynamo never takes another one's graph."""

    from torch._inductor.compile_fx import compile_fx  # seconds; the eager league does without

    def compile_with_budget(graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compile_with_budget


def allow_many_graphs() -> None:
    """All blocks of a kind share their code, and each budget is a graph more for it."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096


def compiled_block(block: nn.Module, budget: float) -> nn.Module:
    return torch.compile(block, backend=backend(budget), dynamic=False, fullgraph=True)  # type: ignore[return-value]


def compiled_blocks(subject: Subject, budgets: Sequence[float]) -> Step:
    """A step with each block compiled under a budget of its own; what is around them runs eagerly."""
    layers = [compiled_block(block, budget) for block, budget in zip(subject.blocks, budgets, strict=True)]
    return lambda: subject.step_with(layers)


def whole_model(subject: Subject) -> Iterator[Entrant]:
    """One graph for the model; its loss outside."""
    for budget in WHOLE_BUDGETS:
        model = torch.compile(subject.model, backend=backend(budget), dynamic=False)
        yield Entrant(
            "compile, whole model",
            f"activation_memory_budget={budget}",
            lambda model=model: loss_of(model, subject.batch),
        )


def per_block(subject: Subject) -> Iterator[Entrant]:
    """The same budget for every block."""
    for budget in BLOCK_BUDGETS:
        step = compiled_blocks(subject, [budget] * len(subject.blocks))
        yield Entrant("compile, per block", f"activation_memory_budget={budget}", step)


def every_kth_compiled(subject: Subject) -> Iterator[Entrant]:
    """Compiled blocks, every k-th of them under PyTorch's checkpoint."""
    count = len(subject.blocks)
    blocks = [compiled_block(block, 1.0) for block in subject.blocks]
    for k in steps_between(count):
        chosen = range(0, count, k)
        layers = [Checkpointed(block) if i in chosen else block for i, block in enumerate(blocks)]
        yield Entrant(
            "compile, every k-th",
            f"k={k}: {plan_text(chosen, count)}",
            lambda layers=layers: subject.step_with(layers),
        )


def our_profile(subject: Subject) -> ChainProfile:
    """Measured under the memory budgets that the rivals have."""
    return profile_model(
        subject.model,
        None,
        subject.batch,
        loss_of,
        compiled_budgets=BLOCK_BUDGETS,
        compiled_model_budgets=WHOLE_BUDGETS,
        **TRIALS,
    )


def ours(subject: Subject, profile: ChainProfile, budgets_bytes: Sequence[int]) -> Iterator[Entrant]:
    """Planner ``compile``: a plan for each budget that has one."""
    for budget_bytes in budgets_bytes:
        start_s = time.perf_counter()
        plan = plan_for(profile, "compile", "time", budget_bytes)
        if plan is not None:
            yield Entrant(
                OUR_COMPILED,
                plan.text,
                planned_step(subject, plan),
                asked_bytes=budget_bytes,
                predicted_peak_bytes=plan.predicted_peak_bytes,
                solve_s=time.perf_counter() - start_s,
            )


RIVALS: tuple[Callable[[Subject], Iterator[Entrant]], ...] = (whole_model, per_block, every_kth_compiled)
