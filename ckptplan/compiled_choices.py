"""What a kind of block costs compiled, one memory budget after the other: measured like everything else.

The first call of each compiled block, which compiles it, stands outside every figure; a training run pays it once.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptplan.compiling import CompiledBlock, called_as
from ckptplan.costs import CompiledOption, StageCost
from ckptplan.kinds import Kind, block_forward, settled_bytes, with_loss
from ckptplan.profiles import BlockProfile
from ckptplan.stages import StageForward, time_stage

log = logging.getLogger(__name__)

COMPILED_BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)  # what planners choose from unless told otherwise


@dataclass
class _Trials:
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    @property
    def medians_ms(self) -> tuple[float | None, float | None]:
        """Of forward and backward."""
        if not self.forward_ms:
            return None, None
        return statistics.median(self.forward_ms), statistics.median(self.backward_ms)


@dataclass
class CompiledChoices:
    """The budgets of one kind of block; ``refused`` says why there are none.

    Attributes:
        costs: bytes by budget.
        trials: times by budget; kinds that do the same work share them, and so do budgets of equal bytes, which are
            one graph.
    """

    kind: Kind
    costs: dict[float, StageCost] = field(default_factory=dict)
    trials: dict[float, _Trials] = field(default_factory=dict)
    refused: str | None = None

    def options(self, kept_ms: float | None) -> tuple[CompiledOption, ...]:
        """With their times beside the fastest way of all; ``kept_ms``: of the block as it is."""
        times = {budget: self.trials[budget].medians_ms for budget in self.costs}
        steps_ms = {b: forward + backward for b, (forward, backward) in times.items() if forward and backward}
        least_ms = min((*steps_ms.values(), *([] if kept_ms is None else [kept_ms])), default=0.0)
        return tuple(
            CompiledOption(
                budget=budget,
                cost=cost,
                forward_time_ms=times[budget][0],
                backward_time_ms=times[budget][1],
                time_ms=steps_ms[budget] - least_ms if budget in steps_ms else None,
            )
            for budget, cost in self.costs.items()
        )


@dataclass(frozen=True)
class Compiling:
    """How compiled blocks are measured; ``held_bytes`` (the loss and its gradient) stand in every backward."""

    budgets: tuple[float, ...]
    device: torch.device
    memory: str
    held_bytes: int = 0
    check_stop: Callable[[], None] = lambda: None


def measure_compiled(
    kinds: dict[str, Kind], time_keys: dict[str, str], timed: dict[str, Kind], how: Compiling
) -> dict[str, CompiledChoices]:
    """Each kind compiled and measured under each budget, by its key; kinds that share their times share them here."""
    found: dict[str, CompiledChoices] = {}
    for number, time_of in enumerate(timed, start=1):
        log.info("compiling kind %d of %d under %d memory budgets ...", number, len(timed), len(how.budgets))
        keys = [key for key in kinds if time_keys[key] == time_of]
        group = [_measured(kinds[key], how) for key in keys]
        refused = next((choices.refused for choices in group if choices.refused is not None), None)
        if refused is None:
            trials = _shared_trials(how.budgets, group)
            group = [replace(choices, trials=trials) for choices in group]
        else:
            group = [CompiledChoices(choices.kind, refused=refused) for choices in group]
        found.update(zip(keys, group, strict=True))
    return found


def time_compiled(
    choices: dict[str, CompiledChoices], device: torch.device, synchronize: Callable[[], None], *, is_counted: bool
) -> None:
    """One trial of everything that has times of its own."""
    done: set[int] = set()
    for one in choices.values():
        for budget, trials in one.trials.items():
            if id(trials) in done:
                continue
            done.add(id(trials))
            forward_ms, backward_ms = time_stage(compiled_forward(one.kind, budget, device), synchronize)
            if is_counted:
                trials.forward_ms.append(forward_ms)
                trials.backward_ms.append(backward_ms)


def compiled_forward(kind: Kind, budget: float, device: torch.device) -> StageForward:
    """The block as a stage, compiled with this budget."""
    compiled = CompiledBlock(kind.module, budget)

    def call(*args: Any, **kwargs: Any) -> Any:
        with called_as(compiled):
            return kind.module(*args, **kwargs)

    return block_forward(kind, device, None, call)


def with_compiled(block: BlockProfile, choices: CompiledChoices | None) -> BlockProfile:
    """The block with its compiled options, or a warning that says why it has none."""
    if choices is None:
        return block
    refused = () if choices.refused is None else (f"not compiled: {choices.refused}",)
    forward_ms, backward_ms = block.forward_time_ms, block.backward_time_ms
    kept_ms = None if forward_ms is None or backward_ms is None else forward_ms + backward_ms
    return replace(block, compiled=choices.options(kept_ms), warnings=(*block.warnings, *refused))


def _measured(kind: Kind, how: Compiling) -> CompiledChoices:
    from torch._dynamo.exc import TorchDynamoException  # seconds; who does not compile goes without

    refused = _why_not(kind)
    costs: dict[float, StageCost] = {}
    for budget in how.budgets if refused is None else ():
        how.check_stop()
        try:
            cost = settled_bytes(compiled_forward(kind, budget, how.device), how.device, how.memory)
        except TorchDynamoException as error:
            refused = f"torch.compile says: {first_line(error)}"
            break
        costs[budget] = with_loss(cost, how.held_bytes)
    return CompiledChoices(kind, {} if refused else costs, refused=refused)


def _why_not(kind: Kind) -> str | None:
    if kind.exclusion_reason is not None:
        return kind.exclusion_reason
    if kind.observation.draws_random:
        return (
            "it draws random numbers (dropout in train mode?), and compiled it would draw others than the plain model"
        )
    if kind.call.first.graph_kept_in is not None:
        return f"it keeps a tensor with its graph in {kind.call.first.graph_kept_in!r}"
    return None


def first_line(error: Exception) -> str:
    """Of the error's message, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _shared_trials(budgets: Sequence[float], group: Sequence[CompiledChoices]) -> dict[float, _Trials]:
    """One list of times for all budgets whose bytes are equal in every kind of the group."""
    by_costs: dict[tuple[StageCost, ...], _Trials] = {}
    return {b: by_costs.setdefault(tuple(choices.costs[b] for choices in group), _Trials()) for b in budgets}
