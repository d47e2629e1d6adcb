"""What the model costs compiled as one graph, blocks and all that it runs around them: whole steps, measured.

Beside it steps of compiled blocks, each block in its fastest measured way and all with one budget, so that the ways to
compile can be compared by what was timed in turn. Times of blocks by themselves do not add up to a step's: a compiled
convolution may hand its output on in another layout, which costs or saves its neighbours something.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckptplan.compiled_choices import Compiling, first_line
from ckptplan.compiling import CompiledBlock, called_as
from ckptplan.costs import CompiledModelOption, CompiledStep, StageCost
from ckptplan.kinds import settled_bytes
from ckptplan.observe import attribute_state
from ckptplan.profiles import BlockProfile, ChainProfile, modules_of
from ckptplan.randomness import torch_state
from ckptplan.stages import Mark, StageForward, StageRun, time_stage
from ckptplan.subject import Subject, Trials
from ckptplan.trees import same

log = logging.getLogger(__name__)

COMPILED_MODEL_BUDGETS = (0.5, 1.0)  # what planners choose from unless told otherwise


def with_compiled_model(profile: ChainProfile, subject: Subject, how: Compiling, trials: Trials) -> ChainProfile:
    """The profile with the model's compiled options, or a warning that says why it has none."""
    from torch._dynamo.exc import TorchDynamoException  # seconds; who does not compile goes without

    refused = _why_not(profile, subject)
    if refused is None:
        log.info("compiling the model as one graph under %d memory budgets ...", len(how.budgets))
    costs: dict[float, StageCost] = {}
    for budget in how.budgets if refused is None else ():
        how.check_stop()
        compiled = CompiledBlock(subject.twin, budget)
        try:
            costs[budget] = settled_bytes(_model_forward(subject, compiled), how.device, how.memory)
        except TorchDynamoException as error:
            refused = f"torch.compile says: {first_line(error)}"
            break
        if not compiled.was_called:
            refused = "the loss calls methods or parts of the model, not the model itself"
            break
    if refused is not None:
        return replace(profile, warnings=(*profile.warnings, f"not compiled as one graph: {refused}"))
    distinct = {cost: budget for budget, cost in costs.items()}  # equal bytes are one graph
    models = [_model_forward(subject, CompiledBlock(subject.twin, budget)) for budget in distinct.values()]
    uniform = _distinct_budgets(profile)
    ways: list[list[float | None]] = [[_fastest(block) for block in profile]]
    ways += [[budget] * len(profile) for budget in uniform]
    log.info("timing %d kinds of compiled steps in turn ...", len(ways) + len(models))
    forwards = [*(_blocks_forward(subject, profile, way) for way in ways), *models]
    blocks_ms, *others_ms = _step_times_ms(forwards, subject, how, trials)
    uniform_ms, models_ms = others_ms[: len(uniform)], others_ms[len(uniform) :]
    times = dict(zip(distinct, models_ms, strict=True))
    options = tuple(CompiledModelOption(budget, cost, times[cost]) for budget, cost in costs.items())
    steps = tuple(CompiledStep(budget, step_ms) for budget, step_ms in zip(uniform, uniform_ms, strict=True))
    return replace(profile, compiled_model=options, compiled_blocks_step_ms=blocks_ms, compiled_steps=steps)


def _distinct_budgets(profile: ChainProfile) -> list[float]:
    """Budgets with which all blocks were measured, one of those that give the same bytes everywhere."""
    costs = {b: [{o.budget: o.cost for o in block.compiled}.get(b) for block in profile] for b in _budgets(profile)}
    return list({tuple(found): budget for budget, found in costs.items() if None not in found}.values())


def _budgets(profile: ChainProfile) -> list[float]:
    return sorted({option.budget for block in profile for option in block.compiled})


def _why_not(profile: ChainProfile, subject: Subject) -> str | None:
    for block in profile:
        if not block.compiled:
            told = next((w.removeprefix("not compiled: ") for w in block.warnings if w.startswith("not compiled")), "")
            return f"block {block.block_id!r} cannot be compiled{f': {told}' if told else ''}"
    _plain_step(subject)  # what a forward does only once is done
    attributes, streams = attribute_state(subject.twin), torch_state(subject.device)
    _plain_step(subject)
    if not all(same(a, b) for a, b in zip(streams, torch_state(subject.device), strict=True)):
        return (
            "it draws random numbers (dropout in train mode?), and compiled it would draw others than the plain model"
        )
    after = attribute_state(subject.twin)
    changed = sorted(name for name in {*attributes, *after} if attributes.get(name) != after.get(name))
    return f"its forward changes the Python attribute {changed[0]!r}" if changed else None


def _plain_step(subject: Subject) -> None:
    subject.run_step().backward()


def _model_forward(subject: Subject, compiled: CompiledBlock) -> StageForward:
    def forward(mark: Mark) -> StageRun:
        mark("start")
        mark("ready")
        with called_as(compiled):
            return StageRun([], subject.run_step(), is_loss=True)

    return forward


def _blocks_forward(subject: Subject, profile: ChainProfile, budgets: Sequence[float | None]) -> StageForward:
    """A step with each block compiled with its budget; None: as it is."""
    budget_of = dict(zip(modules_of(profile.block_ids), budgets, strict=True))
    chosen = [
        CompiledBlock(module, budget)
        for name, module in zip(subject.names, subject.modules, strict=True)
        if (budget := budget_of.get(name)) is not None
    ]

    def forward(mark: Mark) -> StageRun:
        mark("start")
        mark("ready")
        with _all_called_as(chosen):
            return StageRun([], subject.run_step(), is_loss=True)

    return forward


def _fastest(block: BlockProfile) -> float | None:
    """The budget of the block's fastest option; None: it is faster as it is."""
    times = {option.budget: option.time_ms for option in block.compiled if option.time_ms is not None}
    return next((budget for budget in sorted(times, reverse=True) if times[budget] == 0), None)


@contextmanager
def _all_called_as(compiled: Sequence[CompiledBlock]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in compiled:
            stack.enter_context(called_as(block))
        yield


def _step_times_ms(forwards: Sequence[StageForward], subject: Subject, how: Compiling, trials: Trials) -> list[float]:
    """The least of each, all in turn, so that a slow moment of the machine hits all of them.

    Noise only adds. Of two graphs of a U-Net 3 % apart, medians of five steps took the slower one for the faster in 16
    of 100 cases, the least of five in none; twice as many steps as blocks have trials make that sure at little cost.
    """
    found: list[list[float]] = [[] for _ in forwards]
    for trial in range(-max(1, trials.num_warmup), 2 * trials.num_trials):
        for times, forward in zip(found, forwards, strict=True):
            how.check_stop()
            step_ms = sum(time_stage(forward, subject.synchronize))
            if trial >= 0:
                times.append(step_ms)
    return [min(times) for times in found]
