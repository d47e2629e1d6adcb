"""Out of memory while gradients are computed: undo the step, take a tighter plan, and run the same step again.

    recovery = Recovery(model, plan, lambda plan: tighter_plan(profile, plan), device=device, tries=5)
    loss = recovery.gradients(model, window, settings)  # in place of training.accumulate_gradients

Nothing that a forward changes is left of a step that was undone: gradients, buffers, the random streams, and plain
attributes of modules stand where they stood before it. Weights, optimizer and data have not been touched at that point.
As a plan changes no gradient, training goes on as if the tighter plan had been there from the start.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.attributes import KeptAttributes
from ckptplan.data import Batch
from ckptplan.engine.parallel import Parallel
from ckptplan.errors import InfeasibleTargetError
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import is_out_of_memory
from ckptplan.randomness import GlobalStreams
from ckptplan.smaller_batches import let_go
from ckptplan.training import TrainSettings, accumulate_gradients, update_weights
from ckptplan.units import format_bytes

log = logging.getLogger(__name__)

SHRINK = 0.9  # of the peak of the plan that did not fit: what the next one may take


def tighter_plan(profile: ChainProfile, plan: CheckpointPlan) -> CheckpointPlan | None:
    """The cheapest plan of any shape with at most ``SHRINK`` of this plan's predicted peak; None if there is none.

    Where the least reachable peak lies between the two it is that plan. Of a plan with compiled blocks it is again one
    by planner ``compile``: an eager one would train with other rounding.
    """
    peak_bytes = plan.predicted_peak_bytes
    if peak_bytes is None:
        return None

    def made(budget_bytes: int) -> CheckpointPlan:
        return plan_checkpoints(
            profile,
            target_kind="activation_budget_bytes",
            target_value=budget_bytes,
            planner="compile" if plan.compiled else "optimal",
            cost="flops" if plan.cost_kind == "flops" else "time",
        )

    try:
        return made(int(peak_bytes * SHRINK))
    except InfeasibleTargetError as error:
        least = error.smallest_reachable_bytes
        return made(least) if least is not None and least < peak_bytes else None


@dataclass(frozen=True)
class Tightened:
    """One out-of-memory that training went on from."""

    phase: str  # "forward" or "backward" (recomputation is part of it)
    refused: CheckpointPlan
    taken: CheckpointPlan
    reason: str  # what the allocator said, in one line

    @property
    def text(self) -> str:
        peaks = [format_bytes(plan.predicted_peak_bytes) for plan in (self.taken, self.refused)]
        return (
            f"out of memory in {self.phase} ({self.reason}): the step was undone and run again with a plan of peak "
            f"{peaks[0]} instead of {peaks[1]}: {self.taken.text}"
        )


class Recovery:
    """A patched model whose plan gets tighter when a step runs out of memory.

    Args:
        model, plan: as for ``checkpointed``, which is applied at once.
        tighter: the plan to take where this one does not fit; None: there is none.
        device: whose random streams are put back.
        tries: how many tighter plans are tried in one step; 0: the first out-of-memory is raised.
        on_taken: called with each tighter plan once it is applied.

    Attributes:
        plan: the one that is applied now.
        tightened: every change of plan so far.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: CheckpointPlan,
        tighter: Callable[[CheckpointPlan], CheckpointPlan | None],
        *,
        device: torch.device | str,
        tries: int,
        on_taken: Callable[[CheckpointPlan], None] = lambda plan: None,
    ) -> None:
        self.model, self.plan, self.tries = model, plan, tries
        self.tightened: list[Tightened] = []
        self._tighter, self._on_taken, self._device = tighter, on_taken, torch.device(device)
        self._before = StepUndo(model, self._device)
        self._patch = checkpointed(model, plan).permanent()

    def remove(self) -> None:
        """Give the model its own forwards back."""
        self._patch.remove()

    def gradients(
        self,
        model: nn.Module | Parallel,
        window: list[Batch],
        settings: TrainSettings,
        scaler: torch.amp.GradScaler | None = None,
    ) -> float | None:
        """``accumulate_gradients``, again under tighter plans where memory runs out.

        Raises what the allocator raised last, with a note of what was tried, where no plan fits.
        """
        for _ in range(self.tries):
            self._before.remember(window)
            try:
                loss = accumulate_gradients(model, window, settings, scaler)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                taken = self._instead_of(self.plan, error)
                let_go(error)
            else:
                self._before.learn()
                return loss
            self._take(taken)
        try:
            return accumulate_gradients(model, window, settings, scaler)
        except Exception as error:
            if is_out_of_memory(error) and self.tries:
                _note(error, self.tightened)
            raise

    def _instead_of(self, plan: CheckpointPlan, error: Exception) -> Tightened:
        """What to take instead. Raises ``error`` again, with the reason, where there is nothing."""
        fault = self._before.fault()
        tighter = self._tighter(plan) if fault is None else None
        if tighter is None:
            _note(error, self.tightened, fault or "no plan takes less")
            raise error
        return Tightened(phase_of(error), plan, tighter, str(error).partition("\n")[0])

    def _take(self, change: Tightened) -> None:
        self._patch.remove()
        self._before.put_back()
        gc.collect()  # what a failed forward left in cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning("%s", change.text)
        self.tightened.append(change)
        self.plan = change.taken
        self._patch = checkpointed(self.model, self.plan).permanent()
        self._on_taken(self.plan)


def phase_of(error: BaseException) -> str:
    """ "backward" where the error came out of autograd's engine, "optimizer step" out of that, else "forward"."""
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "_engine_run_backward" in names:
        return "backward"
    return "optimizer step" if update_weights.__name__ in names else "forward"


def _note(error: BaseException, tightened: list[Tightened], *more: str) -> None:
    tried = [f"{format_bytes(each.refused.predicted_peak_bytes)} ({each.phase})" for each in tightened]
    told = [f"plans that did not fit before: {', '.join(tried)}"] if tried else []
    error.args = ("; ".join([str(error).partition("\n")[0], *told, *more]),)


# --- what a step changes before its update ---


class StepUndo:
    """What forward and backward of a step may change, so that it can be put back: ``remember``, then ``put_back``.

    The first step is remembered whole. From then on only those buffers are copied that a step has changed so far; one
    that changes for the first time in a step that fails cannot be put back, and ``fault`` says so.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._changing: set[str] | None = None  # names of buffers; None: not known yet
        self._attributes: KeptAttributes | None = None

    def remember(self, window: list[Batch]) -> None:
        self._streams = GlobalStreams.now(self.device)
        self._window = [(batch.inputs, batch.inputs._version) for batch in window]
        self._buffers = {name: (owner, last, tensor, _version(tensor)) for name, owner, last, tensor in self._slots()}
        kept = self._buffers if self._changing is None else self._buffers.keys() & self._changing
        self._copies = {
            name: tensor.detach().clone() for name in kept if (tensor := self._buffers[name][2]) is not None
        }
        self._attributes = KeptAttributes.of(self.model)
        for held in (self._attributes.values, self._attributes.state):  # "forward" is where the plan is
            for name in [name for name in held if name.rpartition(".")[2] == "forward"]:
                del held[name]

    def _slots(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
        for path, module in self.model.named_modules():
            for last, tensor in module._buffers.items():
                yield f"{path}.{last}", module, last, tensor

    def _changed(self) -> set[str]:
        return {
            name
            for name, owner, last, tensor in self._slots()
            if name not in self._buffers
            or tensor is not self._buffers[name][2]
            or _version(tensor) != self._buffers[name][3]
        }

    def learn(self) -> None:
        """The step went well: what it changed is what the next one may change."""
        changed = self._changed()
        if self._changing is None:  # by value: the kernels of batch norm write without counting it as a change
            changed |= {
                name
                for name, copied in self._copies.items()
                if (tensor := self._buffers[name][2]) is not None and not torch.equal(tensor, copied)
            }
        self._changing = (self._changing or set()) | changed
        self._buffers, self._copies, self._attributes, self._window = {}, {}, None, []

    def fault(self) -> str | None:
        """Why the step that was remembered cannot be undone; None: it can."""
        lost = sorted(
            name
            for name in self._changed()
            if name in self._buffers and self._buffers[name][2] is not None and name not in self._copies
        )
        if lost:
            return f"the step cannot be undone: it changed the buffer {lost[0]!r} for the first time"
        if any(tensor._version != version for tensor, version in self._window):
            return "the step cannot be undone: the model changes its inputs in place"
        return None

    def put_back(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for name, owner, last, _ in list(self._slots()):
            if name not in self._buffers:
                del owner._buffers[last]
        with torch.no_grad():
            for name, (owner, last, tensor, _) in self._buffers.items():
                owner._buffers[last] = tensor
                if tensor is not None and name in self._copies:
                    tensor.copy_(self._copies[name])
        if self._attributes is not None:
            self._attributes.put_back(self.model)
        self._streams.put_back(self.device)


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor._version
