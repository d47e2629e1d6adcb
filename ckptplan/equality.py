"""Whether a planned step is the unplanned one: one call, and an error that says where they part.

The gate of a run and of ``fit``; anybody's own loop can call it before its first step. Both steps run on a
twin of the model, from one state, on copies of one batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import no_hooks_on_all_modules
from ckptplan.errors import StepMismatchError
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import GradientCheck, StepPair, check_gradients_of, check_repeat, pair_of_model
from ckptplan.randomness import random_state_restored
from ckptplan.subject import LossFn, default_device
from ckptplan.units import require_amount

# Allowed difference relative to a parameter's largest gradient: kernels that add up in another order each time
# differ by so much; a deterministic CPU gives the same bits.
RTOL_FLOAT32 = 1e-5
RTOL_HALF = 2e-2
RTOL_COMPILED = 1e-4  # a compiler fuses, and so rounds elsewhere and adds up in another order

_NOT_FINITE = "gradient is not finite"
_CAUSE_PLAN = (
    "Two unplanned steps are equal there, so it is the plan that changes it: name the other blocks only when "
    "profiling (blocks=[...]), so that this one stays as it is"
)
_CAUSE_BLOCK = (
    "Two unplanned steps from one state differ there too, so it is not deterministic by itself: try "
    "torch.use_deterministic_algorithms(True), draw from torch's random stream only, or allow the difference (rtol)"
)
_CAUSE_NOT_FINITE = (
    "The unplanned step is not finite either, so nothing can be compared: look at the data, the loss or its scale"
)


@dataclass(frozen=True)
class EqualityCheck:
    """What the comparison of one planned with one unplanned step gave.

    Attributes:
        checked: False where the steps do not fit, on the device or with the unplanned step's saved tensors on the host.
        reference: what the planned step was compared with; where nothing was, why.
        bitwise_equal, max_rel_diff: as in ``GradientCheck``; None where nothing was compared.
    """

    checked: bool
    reference: str
    bitwise_equal: bool | None = None
    max_rel_diff: float | None = None


def check_equality(
    model: nn.Module,
    plan: CheckpointPlan,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | torch.device | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
) -> EqualityCheck:
    """Run ``loss_fn(model, batch)`` and its backward with ``plan`` and without, and compare what they leave.

    Compared are the loss, the gradient of each parameter relative to its own largest element, buffers, the model's
    Python attributes, and where the random streams stand afterwards; NaN, infinities and missing gradients are
    faults. Where the unplanned step does not fit the device its saved tensors are held on the host. The model is left
    as it was.

    Args:
        device: default: where the model's parameters are.
        rtol: allowed difference, relative; None: 1e-5, 1e-4 with compiled blocks, 2e-2 with half precision or autocast.
        atol: allowed absolute difference on top.

    Raises:
        StepMismatchError: they differ. The message names block and parameter, and says whether the block gives
            different gradients by itself.
        PlanIncompatibleError: the plan is not one for this model.
    """
    tolerance = default_rtol(model, plan) if rtol is None else rtol
    require_amount("rtol", tolerance)
    require_amount("atol", atol)
    where = torch.device(device) if device is not None else default_device(model, batch)
    pair = pair_of_model(model, plan, batch, loss_fn, where)
    with no_hooks_on_all_modules(), random_state_restored(where), torch.inference_mode(False), torch.enable_grad():
        check, note = check_gradients_of(pair, tolerance, atol)
        if check is not None and not check.passed:
            raise mismatch_error(pair, plan, check, tolerance, atol)
    if check is None:
        return EqualityCheck(False, note or "not compared")
    return EqualityCheck(True, check.reference, check.bitwise_equal, check.max_rel_diff)


def default_rtol(model: nn.Module, plan: CheckpointPlan) -> float:
    """1e-5, 1e-4 with compiled blocks, or 2e-2 where the step computes in half precision."""
    is_half = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    autocast = (plan.environment or {}).get("autocast", "off") != "off"
    return RTOL_HALF if is_half or autocast else RTOL_COMPILED if plan.compiled else RTOL_FLOAT32


def mismatch_error(
    pair: StepPair, plan: CheckpointPlan, check: GradientCheck, rtol: float, atol: float
) -> StepMismatchError:
    """What a failed comparison means; runs the unplanned step twice more to tell whose fault it is."""
    block = origin_of(check.faults, [decision.block_id for decision in plan.decisions])
    alone = check_repeat(pair, rtol, atol)
    own = {_subject(fault) for fault in alone.faults}
    here = [f for f in check.faults if _is_of(f, block)] if block is not None else list(check.faults)
    is_deterministic = not any(_subject(fault) in own for fault in here)
    if any(_NOT_FINITE in fault for fault in alone.faults):
        is_deterministic, cause = True, _CAUSE_NOT_FINITE
    else:
        cause = _CAUSE_PLAN if is_deterministic else _CAUSE_BLOCK
    shown = [f for f in check.faults if f.startswith("the loss")] + here
    more = len(check.faults) - min(3, len(shown))
    told = "; ".join(shown[:3]) + (f"; and {more} more" if more > 0 else "")
    where = f"block {block!r}" if block is not None else "code outside the blocks"
    message = f"the planned step is not the unplanned one ({check.reference}), first in {where}: {told}. {cause}"
    return StepMismatchError(message, faults=check.faults, block_id=block, is_deterministic=is_deterministic)


def origin_of(faults: Iterable[str], names: list[str]) -> str | None:
    """The last block with a fault: gradients flow from the last to the first, and take the fault along."""
    told = list(faults)
    return next((name for name in reversed(names) if any(_is_of(fault, name) for fault in told)), None)


def _subject(fault: str) -> str:
    """What a fault is about: the name of a parameter, a buffer or an attribute, or its whole text."""
    text = fault.removeprefix("buffer ").removeprefix("attribute ")
    name, separator, _ = text.partition(": " if ": " in fault else " differs")
    return name if separator else fault


def _is_of(fault: str, block: str) -> bool:
    return _subject(fault).startswith(f"{block}.")
