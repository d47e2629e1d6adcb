"""The options of a block and their names: ``S3[qkv,attention,fc]``. Torch-free.

In full an output is called ``<submodule path>.<operator>#<n-th call>:<output>``. In the text of a plan it is called
by the shortest form that stands for results of one operator call only, among all that the block's options keep:
a submodule's name, an operator's, both, with the call's number, at last in full. A form without ``:<output>``
stands for all results of that call that the option keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ckptplan.costs import CompiledModelOption, CompiledOption, OffloadOption, SelectiveOption
from ckptplan.errors import PlanIncompatibleError
from ckptplan.graph import Output
from ckptplan.profiles import BlockProfile, ChainProfile


def find_option(block: BlockProfile, names: Sequence[str]) -> SelectiveOption:
    """The block's option that keeps exactly the outputs called ``names``, in full or in short.

    Raises ``PlanIncompatibleError`` saying which name stands for nothing or for two calls, or that no option (or
    more than one) keeps these.
    """
    if not any(option.saved_ops or not names for option in block.selective):
        raise PlanIncompatibleError(
            f"block {block.block_id!r} has no selective options in its profile; profile with selective=True"
            + "".join(f" ({warning})" for warning in block.warnings)
        )
    known = _known_outputs(block)
    faults = [fault for name in names for fault in _name_faults(name, known, block)]
    if faults:
        raise PlanIncompatibleError(faults)
    matching = [option for option in block.selective if names_outputs(names, option.saved_ops)]
    if len(matching) != 1:
        listed = ", ".join(f"[{','.join(short_names(block, option))}]" for option in block.selective)
        how_many = "no option" if not matching else "more than one option"
        raise PlanIncompatibleError(
            f"block {block.block_id!r} has {how_many} that keeps exactly [{','.join(names)}]; its options: {listed}"
        )
    return matching[0]


def outputs_named(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...] | None:
    """Those of the ``known`` outputs that ``names`` stand for; None where one stands for none, or for two calls."""
    for name in names:
        if len({_call(output) for output in known if name in _forms(output)}) != 1:
            return None
    return tuple(output for output in known if any(name in _forms(output) for name in names))


def find_offload(block: BlockProfile) -> OffloadOption:
    """The block's measured way with its activations on the host; raises ``PlanIncompatibleError``."""
    if block.offload:
        return block.offload[0]
    raise PlanIncompatibleError(
        f"block {block.block_id!r} was not measured with its activations on the host; profile with offload=True"
        + "".join(f" ({warning})" for warning in block.warnings)
    )


def find_compiled(block: BlockProfile, budget: float) -> CompiledOption:
    """The block's measured option of this budget; raises ``PlanIncompatibleError`` listing those that there are."""
    for option in block.compiled:
        if option.budget == budget:
            return option
    known = (
        ", ".join(f"{option.budget:g}" for option in block.compiled)
        or "none (profile with compiled_budgets=(0.0, 0.5, 1.0))"
    )
    raise PlanIncompatibleError(
        f"block {block.block_id!r} was not measured compiled with the budget {budget:g}; measured: {known}"
        + "".join(f" ({warning})" for warning in block.warnings)
    )


def find_compiled_model(profile: ChainProfile, budget: float) -> CompiledModelOption:
    """The compiled model's measured option of this budget; ``PlanIncompatibleError`` lists those that there are."""
    for option in profile.compiled_model:
        if option.budget == budget:
            return option
    known = (
        ", ".join(f"{option.budget:g}" for option in profile.compiled_model)
        or "none (profile with compiled_model_budgets=(0.5, 1.0))"
    )
    raise PlanIncompatibleError(
        f"the model was not measured compiled as one graph with the budget {budget:g}; measured: {known}"
        + "".join(f" ({warning})" for warning in profile.warnings)
    )


def fastest_compiled_step_ms(profile: ChainProfile) -> float:
    """Of a step with each block in its fastest way, or of the model as one graph; 0 where neither was timed."""
    steps_ms = (profile.compiled_blocks_step_ms, *(option.step_time_ms for option in profile.compiled_model))
    return min((step_ms for step_ms in steps_ms if step_ms is not None), default=0.0)


def compiled_blocks_base_ms(profile: ChainProfile) -> float:
    """What a step of compiled blocks, each in its fastest way, takes beside the fastest compiled step of any kind."""
    blocks_ms = profile.compiled_blocks_step_ms
    return 0.0 if blocks_ms is None else blocks_ms - fastest_compiled_step_ms(profile)


def compiled_model_ms(profile: ChainProfile, budget: float) -> float | None:
    """What a step of the compiled model takes beside the fastest compiled step of any kind; None: not timed."""
    step_ms, blocks_ms = find_compiled_model(profile, budget).step_time_ms, profile.compiled_blocks_step_ms
    return None if step_ms is None or blocks_ms is None else step_ms - fastest_compiled_step_ms(profile)


def short_names(block: BlockProfile, option: SelectiveOption) -> tuple[str, ...]:
    """What the option keeps, each operator call by its shortest unambiguous form, in the order of the block."""
    known = _known_outputs(block)
    names = tuple(dict.fromkeys(_shortest(saved, known) for saved in option.saved_ops))
    alike = [other for other in block.selective if names_outputs(names, other.saved_ops)]
    return names if len(alike) == 1 else option.saved_ops


def _known_outputs(block: BlockProfile) -> list[str]:
    return list(dict.fromkeys(saved for option in block.selective for saved in option.saved_ops))


def names_outputs(names: Sequence[str], saved_ops: Sequence[str]) -> bool:
    """Whether each name stands for some of the outputs (called in full), and all of them are named."""
    forms = [_forms(saved) for saved in saved_ops]
    return all(any(name in f for f in forms) for name in names) and all(any(n in f for n in names) for f in forms)


def _name_faults(name: str, known: Sequence[str], block: BlockProfile) -> list[str]:
    calls = {_call(saved) for saved in known if name in _forms(saved)}
    if not calls:
        return [f"block {block.block_id!r}: {name!r} names nothing that an option keeps; known: {', '.join(known)}"]
    if len(calls) > 1:
        return [f"block {block.block_id!r}: {name!r} may be {' or '.join(sorted(calls))}; write one of them"]
    return []


def _call(saved: str) -> str:
    return saved.rpartition(":")[0]


def _shortest(saved: str, known: Sequence[str]) -> str:
    candidates = sorted((f for f in _forms(saved) if ":" not in f.replace("::", "")), key=lambda f: (len(f), f))
    for form in candidates:
        if {_call(other) for other in known if form in _forms(other)} == {_call(saved)}:
            return form
    return saved


@functools.lru_cache(maxsize=4096)
def _forms(saved: str) -> frozenset[str]:
    """Every way to call an output: the end of its path, its operator, both, with numbers."""
    output = Output.of(saved)
    path = saved[: -len(str(output))].rstrip(".")
    parts = path.split(".") if path else []
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    operators = [output.operator, f"{output.operator}#{output.nth}", str(output)]
    if "scaled_dot_product" in output.operator:  # one operator, many kernels
        operators += ["attention", f"attention#{output.nth}"]
    return frozenset({*ends, *operators, *(f"{end}.{operator}" for end in ends for operator in operators)})
