"""Whether the peak of training's own steps is what was predicted: watched while it trains, and told where it drifts.

    watch = PeakWatch(model, profile, lambda: recovery.plan, batch, device=device, every=100)
    watch.gradients(recovery.gradients)  # in place of recovery.gradients
    watch.figures()                      # of the step just done: {"peak_drift": 0.0}

A training step begins without gradients, while plans are made and proven with gradients that stand before it. So what
is expected is a range: at each stage of the backward, gradients of the stages behind it are there, and its own may be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from ckptplan.data import Batch
from ckptplan.engine.parallel import Parallel
from ckptplan.errors import CkptplanError
from ckptplan.memory import CpuAllocatorMeter
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.simulate import simulate_plan
from ckptplan.training import GradientsOf, TrainSettings
from ckptplan.units import format_bytes

log = logging.getLogger(__name__)

TOLD_FROM = 0.01  # of what was expected: the promise of predictions
_ROUNDING_BYTES = 512  # of an allocation on CUDA

Gradients = Sequence[tuple[str, int]]  # name of the parameter and bytes, in the order in which they come


@dataclass(frozen=True)
class WatchedPeak:
    """One step that was measured, above what stood before it, with its gradients."""

    step: int
    measured_bytes: int
    low_bytes: int
    high_bytes: int

    @property
    def drift(self) -> float:
        """How far it is outside of what was expected, as a share of the nearer end; 0.0: within."""
        nearest = min(max(self.measured_bytes, self.low_bytes), self.high_bytes)
        return (self.measured_bytes - nearest) / max(nearest, 1)

    @property
    def text(self) -> str:
        """In one line."""
        low, high = format_bytes(self.low_bytes), format_bytes(self.high_bytes)
        return (
            f"step {self.step}: its peak with gradients is {format_bytes(self.measured_bytes)}, expected were {low} to "
            f"{high} ({self.drift:+.1%})"
        )


def expected_peak(
    profile: ChainProfile, plan: CheckpointPlan, gradients: Gradients, num_micro_batches: int, rounding_bytes: int = 0
) -> tuple[int, int]:
    """Least and most peak in bytes of a training step that begins without gradients, above what stands before it."""
    modules = dict(zip(profile.block_ids, modules_of(profile.block_ids), strict=True))
    left = list(profile.block_ids)  # whose backward has not run
    low = high = came = 0
    sizes = [size + rounding_bytes for _, size in gradients]
    for stage, phase, level_bytes in simulate_plan(profile, plan).timeline:
        if phase == "forward":
            low, high = max(low, level_bytes), max(high, level_bytes)
            continue
        first = stage.partition("..")[0]
        own: list[str] = []
        if first in left:
            own, left = left[left.index(first) :], left[: left.index(first)]
        reached = came
        if own:
            places = [i for i, (name, _) in enumerate(gradients) if _is_of(name, [modules[block] for block in own])]
            reached = max([came, *(place + 1 for place in places)])
        else:  # a region: all that comes before the first gradient of the blocks that are left
            ahead = [i for i, (name, _) in enumerate(gradients) if _is_of(name, [modules[block] for block in left])]
            reached = max(came, min(ahead, default=len(sizes)))
        low = max(low, level_bytes + sum(size for _, size in gradients[:came]))
        high = max(high, level_bytes + sum(sizes[:reached]))
        came = reached
    if num_micro_batches > 1:  # from the second one on all gradients stand
        peak = simulate_plan(profile, plan).peak_bytes
        low, high = max(low, peak + sum(size for _, size in gradients)), max(high, peak + sum(sizes))
    return low, high


def _is_of(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


class PeakWatch:
    """Measures steps of a training, on CUDA by the allocator's statistics, on a CPU by its events.

    Args:
        model: its parameters get the gradients.
        plan_of: the plan that is active now.
        planned: the batch that was measured and planned for; only steps of its shape are compared.
        start_step: steps that were done before.
        every: the first step and each of so many are measured; 0: none.

    Attributes:
        worst: of those measured, the one furthest above what was expected; None: none was measured.
        num_measured: how many.
    """

    def __init__(
        self,
        model: nn.Module,
        profile: ChainProfile,
        plan_of: Callable[[], CheckpointPlan],
        planned: Batch,
        *,
        device: torch.device,
        every: int,
        start_step: int = 0,
    ) -> None:
        self.model, self.profile, self.plan_of, self.planned = model, profile, plan_of, planned
        self.device, self.every, self.start_step = device, every, start_step
        self.worst: WatchedPeak | None = None
        self.num_measured = self._steps = 0
        self._latest: WatchedPeak | None = None
        self._gradients: list[tuple[str, int]] = []

    def gradients(self, inner: GradientsOf) -> GradientsOf:
        """``inner``, measured where it is time to."""

        def watched(
            model: nn.Module | Parallel,
            window: list[Batch],
            settings: TrainSettings,
            scaler: torch.amp.GradScaler | None,
        ) -> float | None:
            self._latest = None
            self._steps += 1
            is_due = self.every and (self._steps - 1) % self.every == 0
            plan = self.plan_of()
            if not is_due or plan.compiled or not self._is_as_planned(window):
                return inner(model, window, settings, scaler)
            with ExitStack() as stack:
                if not self._gradients:
                    self._note_order(stack)
                measured = self._measuring(stack)
                loss = inner(model, window, settings, scaler)
            if self.plan_of() is plan:  # else the step was run again, after memory ran out
                self._compare(plan, measured(), len(window))
            return loss

        return watched

    def figures(self) -> dict[str, float]:
        """What the line of metrics of the step just done has of it; empty: it was not measured."""
        return {} if self._latest is None else {"peak_drift": self._latest.drift}

    def _is_as_planned(self, window: list[Batch]) -> bool:
        shapes = {(batch.inputs.shape, batch.targets.shape) for batch in window}
        return shapes == {(self.planned.inputs.shape, self.planned.targets.shape)}

    def _note_order(self, stack: ExitStack) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:

                def note(given: torch.Tensor, name: str = name) -> None:
                    if all(name != earlier for earlier, _ in self._gradients):
                        self._gradients.append((name, given.numel() * given.element_size()))

                stack.callback(parameter.register_post_accumulate_grad_hook(note).remove)

    def _measuring(self, stack: ExitStack) -> Callable[[], int]:
        """What gives the peak above the level of now, once ``stack`` is closed."""
        if self.device.type == "cuda":  # the loop has reset the statistics, and reads them itself after the step
            level_bytes = torch.cuda.memory_allocated(self.device)
            found: list[int] = []
            stack.callback(lambda: found.append(torch.cuda.max_memory_allocated(self.device) - level_bytes))
            return lambda: found[0] - self._batch_bytes()
        meter = stack.enter_context(CpuAllocatorMeter())
        meter.mark("start")
        stack.callback(meter.mark, "end")
        return lambda: meter.peak("start", "end") - meter.level("start")

    def _batch_bytes(self) -> int:
        """Of a micro-batch, which a step brings to the device; planned figures have it stand before."""
        tensors = (self.planned.inputs, self.planned.targets)
        return sum(-(-t.nbytes // _ROUNDING_BYTES) * _ROUNDING_BYTES for t in tensors)

    def _compare(self, plan: CheckpointPlan, measured_bytes: int, num_micro_batches: int) -> None:
        rounding_bytes = _ROUNDING_BYTES if self.device.type == "cuda" else 0
        try:
            expected = expected_peak(self.profile, plan, self._gradients, num_micro_batches, rounding_bytes)
        except (CkptplanError, ValueError) as error:  # figures of the profile are missing: nothing was predicted
            log.info("the peak of training is not watched: %s", error)
            self.every = 0
            return
        self._latest = found = WatchedPeak(self.start_step + self._steps, measured_bytes, *expected)
        self.num_measured += 1
        before = 0.0 if self.worst is None else self.worst.drift
        if found.drift > max(before, 0.0) + TOLD_FROM:
            log.warning("%s: more than was planned for; a larger margin_frac leaves room for it", found.text)
        elif found.drift < -TOLD_FROM and self.worst is None:
            log.info("%s: less than was planned for", found.text)
        if self.worst is None or found.drift > self.worst.drift:
            self.worst = found
