"""How long a sequence fits a budget, with the batch as it is: the model measured at each length that is looked at.

Unlike samples, tokens meet each other (attention), so that no straight line leads from one length to all others: the
search goes along lines between the lengths that it has seen, and ends where one fits and the next does not, both
measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckptplan.autofit import allowed_bytes, parse_budget, static_of
from ckptplan.batch_size import Budget, batch_bytes, measured_or_refused, with_dimension
from ckptplan.blocks import CheckpointableBlock
from ckptplan.budget import least_peak_of
from ckptplan.errors import InfeasibleTargetError, SizeRefusedError
from ckptplan.footprint import StaticBytes, available_host_bytes
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import no_checkpoint_peak, plan_checkpoints
from ckptplan.planners.budgets import step_cost
from ckptplan.profiles import ChainProfile
from ckptplan.proof import pair_of_model, peak_of_planned_step
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.scaling import largest_within
from ckptplan.smaller_batches import profile_or_scale
from ckptplan.subject import LossFn, default_device
from ckptplan.trees import tensors_in
from ckptplan.units import format_bytes, format_percent

MOST_TOKENS = 2**20  # looked at where no limit is given

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LengthPoint:
    """One length under the cheapest plan that fits.

    Attributes:
        predicted_peak_bytes, budget_bytes: activation peak of a step, and what it may be.
        recompute_flops_ratio: recomputed FLOPs as a share of those of the step without; None: not counted.
    """

    length: int
    plan: CheckpointPlan
    predicted_peak_bytes: int
    budget_bytes: int
    recompute_flops_ratio: float | None


@dataclass(frozen=True)
class Longest:
    """What ``longest_sequence`` found.

    Attributes:
        length: tokens in a sequence.
        plan: the cheapest one that fits there; ``checkpointed(model, plan)`` runs it.
        points: every length that was looked at and fits, in rising order; the last is the answer.
        measured_peak_bytes: of a real step of the answer; None: none was run.
        notes: what ended the search, and what was confirmed.
    """

    points: tuple[LengthPoint, ...]
    measured_peak_bytes: int | None
    notes: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.points[-1].length

    @property
    def plan(self) -> CheckpointPlan:
        return self.points[-1].plan

    @property
    def text(self) -> str:
        """A line for each length, then what was confirmed."""
        lines = ["length  peak        of          more FLOPs  plan"]
        for p in self.points:
            plan = p.plan.text if len(p.plan.text) <= 40 else f"{p.plan.text[:37]}..."
            more = "-" if p.recompute_flops_ratio is None else format_percent(p.recompute_flops_ratio)
            peak, budget = format_bytes(p.predicted_peak_bytes), format_bytes(p.budget_bytes)
            lines.append(f"{p.length:>6}  {peak:<10}  {budget:<10}  {more:>10}  {plan}")
        return "\n".join([*lines, f"longest sequence that fits: {self.length}", *self.notes])


def longest_sequence(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    budget: int | float | str,
    *,
    most: int | None = None,
    multiple_of: int = 1,
    resize: Callable[[Any, int], Any] | None = None,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "optimal",
    confirm: bool = True,
    device: str | torch.device | None = None,
    say: Callable[[str], object] | None = print,
) -> Longest:
    """The longest sequence that trains within ``budget``, with as many samples as ``batch`` has, and the plan for it.

    A length fits where the least peak that the planner reaches on the model's blocks, measured at that length, is
    within the budget (options inside blocks are left out). Peaks are taken to rise with the length. A length at which
    the model itself fails (a table of positions that ends) counts as one that does not fit, and is told.

    Args:
        batch: one batch; dimension 1 of its tensors is the sequence (1-dimensional tensors stay as they are).
        budget: as in ``fit``: a size of everything on the device, or a share of the activation peak that ``batch`` has
            without checkpointing.
        most: the longest sequence to look at.
        multiple_of: only lengths that are multiples of it.
        resize: ``resize(batch, n)`` -> the batch with sequences of n; default: tokens are repeated or left out.
        blocks, optimizer, planner: as in ``fit``.
        confirm: False: no real step of the answer is run.

    Raises:
        InfeasibleTargetError: not even the shortest length fits.
        ValueError, TypeError: a bad argument, named.
    """
    for name, value in (("most", most), ("multiple_of", multiple_of)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}; expected a whole number of tokens, 1 or more")
    if most is not None and most < multiple_of:
        raise ValueError(f"most={most} is less than multiple_of={multiple_of}; expected at least one length to look at")
    search = _Lengths(
        model, batch, loss_fn, parse_budget(budget), most or MOST_TOKENS, multiple_of, resize or with_length, blocks,
        optimizer, planner, torch.device(device) if device is not None else default_device(model, batch),
    )  # fmt: skip
    found = search.run(confirm)
    if say is not None:
        for line in found.text.splitlines():
            say(f"ckptplan: {line}")
    return found


def length_of(batch: Any) -> int:
    """Dimension 1, which the tensors of a batch share. Raises ``ValueError`` where they share none."""
    sizes = {tensor.shape[1] for tensor in tensors_in(batch) if tensor.dim() > 1}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"batch: dimension 1 of its tensors is {sorted(sizes) or 'missing'}; expected one length of sequence in "
            "all of them, or resize=, a function that makes the batch with sequences of n"
        )
    return sizes.pop()


def with_length(batch: Any, length: int) -> Any:
    """The batch with sequences of ``length``: their tokens, again from the first one where there are not enough."""
    return with_dimension(batch, 1, length_of(batch), length)


def budget_is_above(budget: Budget, size_bytes: int) -> bool:
    kind, amount = budget
    return not kind.endswith("fraction") and amount > size_bytes


@dataclass
class _Lengths:
    model: nn.Module
    batch: Any
    loss_fn: LossFn
    budget: Budget
    most: int
    multiple_of: int
    resize: Callable[[Any, int], Any]
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None
    optimizer: torch.optim.Optimizer | None
    planner: str
    device: torch.device
    profiles: dict[int, ChainProfile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, confirm: bool) -> Longest:
        own = max(1, min(self.most, self.own_length) // self.multiple_of)
        count = largest_within(self.over_budget, self.most // self.multiple_of, start=(max(1, own // 4), own), growth=2)
        if not count:
            self._refuse()
        length = count * self.multiple_of
        points = [self.point(n) for n in sorted(self.profiles) if n <= length]
        peak = self._confirmed(points[-1]) if confirm else None
        return Longest(tuple(points), peak, tuple(dict.fromkeys(self.notes)))

    @cached_property
    def own_length(self) -> int:
        return length_of(self.batch) if self.resize is with_length else next(
            tensor.shape[1] for tensor in tensors_in(self.batch) if tensor.dim() > 1
        )  # fmt: skip

    def over_budget(self, count: int) -> int | None:
        """Bytes above the budget, below zero where it fits; None: the model does not run at this length."""
        length = count * self.multiple_of
        try:
            profile = self.profile(length)
        except SizeRefusedError as error:
            self.notes.append(str(error))
            return None
        return least_peak_of(self.planner, profile)[0] - self.allowed(length)

    def profile(self, length: int) -> ChainProfile:
        if length not in self.profiles:
            log.info("measuring at a sequence of %d ...", length)
            batch = self.resize(self.batch, length)
            found = {tensor.shape[1] for tensor in tensors_in(batch) if tensor.dim() > 1}
            if length not in found:
                raise ValueError(f"resize(batch, {length}) gave tensors of lengths {sorted(found)}; expected {length}")
            self.profiles[length] = measured_or_refused(
                lambda: self._measured(batch, length), f"sequences of {length}", is_own=length == self.own_length
            )
        return self.profiles[length]

    def _measured(self, batch: Any, length: int) -> ChainProfile:

        def measure(given: Any) -> ChainProfile:
            return profile_model(
                self.model, self.blocks, given, self.loss_fn, device=self.device, num_warmup=0, num_trials=1
            )

        made = profile_or_scale(measure, batch)
        if made.note is not None:
            self.notes.append(f"{length}: {made.note}")
        return made.profile

    @cached_property
    def standing(self) -> StaticBytes:
        return static_of(self.model, self.optimizer, ())

    def allowed(self, length: int) -> int:
        """Bytes that the activations of a step may take."""
        kind, amount = self.budget
        static = replace(self.standing, batch_bytes=batch_bytes(self.resize(self.batch, length)))
        own_peak = no_checkpoint_peak(self.profile(self.own_length)) if kind.endswith("fraction") else 0
        allowed = allowed_bytes(kind, amount, own_peak, static, self.device)
        return allowed if self.cap_bytes is None else min(allowed, self.cap_bytes)

    @cached_property
    def cap_bytes(self) -> int | None:
        """On a CPU half of what is free: no allocator says no there, and a guess may take more than the budget."""
        if self.device.type != "cpu":
            return None
        cap = available_host_bytes() // 2
        if budget_is_above(self.budget, cap):
            self.notes.append(
                f"looked for within {format_bytes(cap)}, half of what this machine has free: the budget is more"
            )
        return cap

    def point(self, length: int) -> LengthPoint:
        profile, allowed = self.profile(length), self.allowed(length)
        plan = plan_checkpoints(
            profile, target_kind="activation_budget_bytes", target_value=allowed, planner=self.planner, cost="flops"
        )
        assert plan.predicted_peak_bytes is not None
        step = step_cost(profile, "flops")
        ratio = plan_recompute_cost(profile, plan.nodes, "flops") / step if step else None
        return LengthPoint(length, plan, plan.predicted_peak_bytes, allowed, ratio)

    def _confirmed(self, point: LengthPoint) -> int | None:
        """The peak of a real step, where this machine has the memory for one."""
        if self.device.type == "cpu" and point.predicted_peak_bytes > available_host_bytes():
            self.notes.append("no real step was run: this machine has not as much memory free")
            return None
        batch = self.resize(self.batch, point.length)
        peak = peak_of_planned_step(pair_of_model(self.model, point.plan, batch, self.loss_fn, self.device))
        told = "ran out of memory" if peak is None else f"took {format_bytes(peak)}"
        self.notes.append(f"a real step of {point.length} {told}, {format_bytes(point.budget_bytes)} allowed")
        return peak

    def _refuse(self) -> None:
        length = self.multiple_of
        if length not in self.profiles:
            raise InfeasibleTargetError(f"not even the shortest length can be run: {'; '.join(self.notes)}")
        allowed, (least, at) = self.allowed(length), least_peak_of(self.planner, self.profiles[length])
        raise InfeasibleTargetError(
            f"not even sequences of {length} fit: their least activation peak is {format_bytes(least)}, set by {at}, "
            f"and the budget leaves {format_bytes(allowed)} for activations; give more, fewer samples, or a smaller "
            "model",
            budget_bytes=allowed,
            smallest_reachable_bytes=least,
            limited_by=at,
        )
