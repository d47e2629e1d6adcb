"""Does a plan belong to this live model? Nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptplan.blocks import (
    CHANGED_SETTINGS,
    SETTLED_FINGERPRINT,
    CheckpointableBlock,
    model_fingerprint,
    require_blocks,
    takes_keyword,
)
from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import modules_of
from ckptplan.wrappers import foreign_checkpoints


def validate_plan(
    plan: CheckpointPlan,
    blocks: Sequence[CheckpointableBlock],
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise with every fault at once if ``plan`` is not a plan for ``blocks``.

    Checked: block ids and their order, the tree, the fingerprint (classes, settings, shapes, dtypes,
    ``requires_grad``, train mode), buffers that the plan guards, checkpoint wrappers already there, and that
    every keyword argument is taken by some block.

    Raises:
        PlanIncompatibleError: with ``.faults``.
        TypeError: ``plan`` is no plan, or ``blocks`` are not what ``declare_blocks`` gives.
    """
    require_plan(plan)
    require_blocks(blocks)
    faults = _block_faults(plan, blocks)
    if not faults:
        faults += _buffer_faults(plan, blocks)
        if plan.fingerprint and not _is_profiled(plan, blocks):
            faults.append(
                "the model is not the one that was profiled (a class, setting, shape, dtype, requires_grad flag or "
                f"train mode differs); {_mode_remedy(blocks)}profile it again and make a new plan"
            )
    faults += _wrapper_faults(blocks)
    if example_inputs is not None and not isinstance(example_inputs, tuple):
        faults.append(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple of arguments")
    for name in example_kwargs or {}:
        if not any(takes_keyword(block.module, name) for block in blocks):
            faults.append(f"no block takes the keyword argument {name!r}")
    if faults:
        raise PlanIncompatibleError(faults)


def _mode_remedy(blocks: Sequence[CheckpointableBlock]) -> str:
    """The likely reason first: a plan is put on before ``model.train()``."""
    if any(block.module.training for block in blocks):
        return ""
    return (
        "it is in eval mode: if it was profiled in train mode, call model.train() before the plan is put on (switching "
        "to eval afterwards keeps the plan); else "
    )


def _is_profiled(plan: CheckpointPlan, blocks: Sequence[CheckpointableBlock]) -> bool:
    """Whether the plan was made for these blocks, before their first forward or after any."""
    if plan.fingerprint == model_fingerprint(blocks):
        return True
    environment = plan.environment or {}
    changed: list[str] = environment.get(CHANGED_SETTINGS) or []
    return bool(changed) and environment.get(SETTLED_FINGERPRINT) == model_fingerprint(blocks, changed)


def require_plan(plan: object) -> None:
    """Raise ``TypeError`` unless ``plan`` is a ``CheckpointPlan``."""
    if not isinstance(plan, CheckpointPlan):
        hint = "; CheckpointPlan.from_text(text, profile) makes one" if isinstance(plan, str) else ""
        raise TypeError(f"plan is a {type(plan).__name__}; expected a CheckpointPlan{hint}")


def _block_faults(plan: CheckpointPlan, blocks: Sequence[CheckpointableBlock]) -> list[str]:
    planned = list(dict.fromkeys(modules_of(plan.block_ids)))
    given = [block.block_id for block in blocks]
    if planned != given:
        return [f"the plan is for the blocks {_listed(planned)}, given are {_listed(given)}"]
    if list(blocks_of(plan.nodes)) != list(range(len(plan.decisions))):
        return [f"the plan's tree {plan.text!r} does not cover blocks 0 to {len(plan.decisions) - 1} in order"]
    return []


def _listed(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return f"[{shown}{', ...' if len(names) > most else ''}] ({len(names)})"


def _buffer_faults(plan: CheckpointPlan, blocks: Sequence[CheckpointableBlock]) -> list[str]:
    faults = []
    by_id = {block.block_id: block for block in blocks}
    for decision, block_id in zip(plan.decisions, modules_of(plan.block_ids), strict=True):
        block = by_id[block_id]
        there = {name for name, _ in block.module.named_buffers(remove_duplicate=False)}
        for name in decision.mutated_buffers or ():
            if name not in there:
                faults.append(f"the plan guards the buffer {block.block_id}.{name}, which the model does not have")
    return faults


def _wrapper_faults(blocks: Sequence[CheckpointableBlock]) -> list[str]:
    found = [(block.block_id, place) for block in blocks for place in foreign_checkpoints(block.module)[:1]]
    places = [replace(place, path=f"{name}.{place.path}".rstrip(".")) for name, place in found]
    return [f"something else recomputes in the model already: {place}" for place in places]
