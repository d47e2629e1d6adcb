"""The plan: a tree over the chain of blocks, its text and its JSON. Torch-free.

Planners make it, the simulator walks it, the referee checks it, ``apply.py`` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union


@dataclass(frozen=True)
class Keep:
    """Run block ``block`` and keep what autograd saves. Text: ``K3``."""

    block: int


@dataclass(frozen=True)
class Recompute:
    """Keep the first child's input only; run the children again in backward. Text: ``R(4 5)``, ``R(4 R(5 6))``.

    Children are Keep or Recompute nodes over consecutive blocks. A child written as a bare number is ``Keep``.
    """

    children: tuple[PlanNode, ...]


PlanNode = Union[Keep, Recompute]


@dataclass(frozen=True)
class CheckpointDecision:
    """What the plan does with one block, and why. Bytes are what the block retains until its backward."""

    block_id: str
    checkpointed: bool
    eligible_for_checkpoint: bool = True
    exclusion_reason: str | None = None
    retained_bytes: int | None = None
    recompute_time_ms: float | None = None
    recompute_flops: int | None = None
    preserve_rng_state: bool = True
    mutated_buffers: tuple[str, ...] | None = None  # None: unknown, so every buffer is guarded
    reason: str = ""


@dataclass(frozen=True)
class CheckpointPlan:
    """An immutable plan with what it promises; made by ``plan_checkpoints`` or ``from_text``."""

    nodes: tuple[PlanNode, ...]
    decisions: tuple[CheckpointDecision, ...]
    planner: str = "text"
    target_kind: str | None = None
    target_value: float | int | None = None
    budget_bytes: int | None = None
    memory_model: str = "peak"
    cost_kind: str = "time"
    predicted_peak_bytes: int | None = None
    predicted_peak_at: str | None = None
    no_checkpoint_peak_bytes: int | None = None
    predicted_cost: float | None = None  # ms or FLOPs added per step, by cost_kind
    optimality_gap: float | None = None  # relative; 0.0 proved optimal; None: a heuristic, nothing is known
    feasible: bool = True
    fingerprint: str = ""
    environment: dict[str, Any] | None = None
