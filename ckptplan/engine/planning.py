"""One plan for all ranks; under FSDP2 what is gathered at once depends on the plan, which is planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptplan.budget import PlannedRun
from ckptplan.engine.gathered import Sharding, with_gathered
from ckptplan.engine.parallel import sharding_units
from ckptplan.engine.ranks import Ranks
from ckptplan.errors import CkptplanError, InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.simulate import no_checkpoint_peak, simulate_plan

_MOST_ATTEMPTS = 12


def block_by_block(profile: ChainProfile) -> tuple[tuple[str, ...], ...]:
    """The units of a plan without segments."""
    return tuple((name,) for name in dict.fromkeys(modules_of(profile.block_ids)))


def plan_sharded(
    plain: ChainProfile, sharding: Sharding, make_plan: Callable[[ChainProfile, int], PlannedRun]
) -> tuple[PlannedRun, ChainProfile]:
    """A plan that keeps to the budget with all that it gathers, and the profile that its figures are from.

    Block by block the gathered bytes do not depend on the plan, so the planner counts them exactly. A segment is
    gathered as a whole: where a plan has one that its budget does not cover, it is made again with so much less.

    Args:
        plain: measured on the plain model.
        make_plan: a plan from a profile that leaves so many bytes of the budget alone.

    Raises ``InfeasibleTargetError`` as ``make_plan`` does.
    """
    flat = with_gathered(plain, sharding, block_by_block(plain))
    reserve_bytes, over_bytes = 0, 0
    for _ in range(_MOST_ATTEMPTS):
        planned = make_plan(flat, reserve_bytes)
        units = sharding_units(planned.plan)
        if all(len(unit) == 1 for unit in units):
            return _without_reserve(planned, reserve_bytes), flat
        gathered = with_gathered(plain, sharding, units)
        cost = simulate_plan(gathered, planned.plan)
        allowed_bytes = planned.plan.budget_bytes
        over_bytes = 0 if allowed_bytes is None else cost.peak_bytes - allowed_bytes - reserve_bytes
        if over_bytes <= 0 or not planned.plan.feasible:
            plan = replace(
                planned.plan,
                predicted_peak_bytes=cost.peak_bytes,
                predicted_peak_at=cost.peak_at,
                no_checkpoint_peak_bytes=no_checkpoint_peak(gathered),
            )
            return _without_reserve(replace(planned, plan=plan), reserve_bytes), gathered
        reserve_bytes += over_bytes
    raise InfeasibleTargetError(
        f"no plan with segments was found that fits with the weights that it gathers: the last one is {over_bytes:,} "
        "bytes above the budget. Raise the budget, or use a planner that recomputes block by block (planner=dp)",
        budget_bytes=planned.budget_bytes,
        smallest_reachable_bytes=cost.peak_bytes,
    )


def _without_reserve(planned: PlannedRun, reserve_bytes: int) -> PlannedRun:
    """What was set aside while planning is no margin: the plan's own figures count it now."""
    if not reserve_bytes or planned.plan.budget_bytes is None:
        return planned
    plan = replace(planned.plan, budget_bytes=planned.plan.budget_bytes + reserve_bytes)
    return replace(planned, plan=plan, margin_bytes=planned.margin_bytes - reserve_bytes)


def same_plan(ranks: Ranks, make: Callable[[], PlannedRun]) -> PlannedRun:
    """What rank 0 makes, on every rank: handed on as JSON, and its digest compared on all.

    Raises on all ranks what ``make`` raises.
    """
    if ranks.size == 1:
        return make()

    def made() -> tuple[PlannedRun, str]:
        planned = make()
        return planned, planned.plan.to_json()

    planned, text = ranks.from_first(made)
    plan = CheckpointPlan.from_json(text, "the plan of rank 0")
    digests = ranks.gather(plan.digest)
    if len(set(digests)) > 1:
        raise CkptplanError(f"the ranks read different plans from the same text: digests {', '.join(digests)}")
    return replace(planned, plan=plan)
