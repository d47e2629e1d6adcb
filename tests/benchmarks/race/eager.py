"""The eager league: each rival is a function from a subject to the steps that it offers, ours among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptplan.apply import checkpointed
from ckptplan.errors import InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from tests.benchmarks.race.measuring import Step
from tests.benchmarks.race.subjects import Subject

OURS = ("dp", "optimal")


@dataclass(frozen=True)
class Entrant:
    """One configuration of one rival, ready to run.

    Attributes:
        plan: as text; entrants of a league with equal rival and plan are the same step.
        asked_bytes: the budget that it was made for; None: it was made for none.
        added_flops: what its maker says that recomputation adds.
    """

    rival: str
    plan: str
    step: Step
    asked_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    added_flops: int | None = None
    solve_s: float | None = None


class Checkpointed(nn.Module):
    """A block under PyTorch's checkpoint."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False, **self.options)


def with_checkpoints(subject: Subject, chosen: Sequence[int], options: dict[int, dict[str, Any]] | None = None) -> Step:
    """A step with these blocks under PyTorch's checkpoint, each with options of its own."""
    layers = [
        Checkpointed(block, **(options or {}).get(index, {})) if index in chosen else block
        for index, block in enumerate(subject.blocks)
    ]
    return lambda: subject.step_with(layers)


def plan_text(chosen: Sequence[int], count: int) -> str:
    return " ".join(f"R({i})" if i in chosen else f"K{i}" for i in range(count))


# Rivals without a budget ---------------------------------------------------------------------------------------------


def no_checkpointing(subject: Subject) -> Iterator[Entrant]:
    yield Entrant("no checkpointing", plan_text((), len(subject.blocks)), subject.step)


def every_kth(subject: Subject) -> Iterator[Entrant]:
    """Every block, every second, and so on, counted from the first block: the last is the worst to recompute."""
    count = len(subject.blocks)
    for k in steps_between(count):
        chosen = range(0, count, k)
        rival = "every block" if k == 1 else "every k-th"
        yield Entrant(rival, f"k={k}: {plan_text(chosen, count)}", with_checkpoints(subject, chosen))


def steps_between(count: int) -> list[int]:
    """Every k worth trying: up to half of the blocks, and all of them (the first block alone)."""
    return [*range(1, count // 2 + 1), count]


class _Spread(nn.Module):
    """``checkpoint_sequential`` hands on one value; a block that takes several gets them from a tuple."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Any) -> Any:
        return self.block(*value) if isinstance(value, tuple) else self.block(value)


class _Segments(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = nn.Sequential(*map(_Spread, blocks)), segments

    def forward(self, x: Tensor) -> Any:
        return checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)


def sequential(subject: Subject) -> Iterator[Entrant]:
    """``checkpoint_sequential`` with every number of segments."""
    for segments in range(2, len(subject.blocks) + 1):
        layers = [_Segments(subject.blocks, segments)]
        yield Entrant("checkpoint_sequential", f"segments={segments}", lambda layers=layers: subject.step_with(layers))


# Ours ----------------------------------------------------------------------------------------------------------------


def ours(subject: Subject, profile: ChainProfile, budgets_bytes: Sequence[int], cost: str) -> Iterator[Entrant]:
    """A plan for every planner and budget; none where there is none."""
    for planner in OURS:
        for budget_bytes in budgets_bytes:
            entrant = ours_for(subject, profile, planner, cost, budget_bytes)
            if entrant is not None:
                yield entrant


def ours_for(subject: Subject, profile: ChainProfile, planner: str, cost: str, budget_bytes: int) -> Entrant | None:
    start_s = time.perf_counter()
    plan = plan_for(profile, planner, cost, budget_bytes)
    solve_s = time.perf_counter() - start_s
    if plan is None:
        return None
    return Entrant(
        our_name(planner, cost),
        plan.text,
        planned_step(subject, plan),
        asked_bytes=budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        added_flops=int(plan.predicted_cost) if cost == "flops" and plan.predicted_cost is not None else None,
        solve_s=solve_s,
    )


def planned_step(subject: Subject, plan: CheckpointPlan) -> Step:
    """A step of the subject under one of our plans."""
    patch = checkpointed(subject.model, plan)

    def step() -> Tensor:
        with patch:
            return subject.step()

    return step


def plan_for(profile: ChainProfile, planner: str, cost: str, budget_bytes: int) -> CheckpointPlan | None:
    """Our plan; None where there is none within the budget."""
    try:
        return plan_checkpoints(
            profile,
            target_kind="activation_budget_bytes",
            target_value=budget_bytes,
            planner=planner,
            cost=cost,  # type: ignore[arg-type]
        )
    except InfeasibleTargetError:
        return None


def our_name(planner: str, cost: str) -> str:
    return f"ckptplan {planner}, cost={cost}"


Rival = Callable[[Subject], Iterator[Entrant]]
WITHOUT_BUDGET: tuple[Rival, ...] = (no_checkpointing, every_kth, sequential)
