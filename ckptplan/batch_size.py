"""How large a batch fits a budget, and which batch trains fastest: two answers, and the curve between them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ckptplan.autofit import allowed_bytes, has_host_apart, parse_budget, static_of
from ckptplan.blocks import CheckpointableBlock
from ckptplan.budget import least_peak_of
from ckptplan.dry_run import verify_plan
from ckptplan.errors import MODEL_ERRORS, CkptplanError, DryRunError, InfeasibleTargetError, SizeRefusedError
from ckptplan.footprint import StaticBytes, available_host_bytes
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import PLANNERS_WITH_OPTIONS, no_checkpoint_peak, plan_checkpoints
from ckptplan.planners.budgets import budget_for, step_cost
from ckptplan.profiles import ChainProfile
from ckptplan.proof import is_out_of_memory, pair_of_model, peak_of_planned_step
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.scaling import AffineProfile, largest
from ckptplan.subject import LossFn, default_device
from ckptplan.trees import distinct_storages, map_tensors, tensors_in
from ckptplan.units import format_bytes, format_ms, format_percent

MOST_SAMPLES = 2**20  # looked at where no limit is given
MOST_TRIALS = 3  # real steps
_STEPS_OF_CURVE = 24  # sizes that are planned for when the global batch is free

Objective = Literal["throughput", "batch"]
_Measured = TypeVar("_Measured")
Budget = tuple[str, int | float]  # kind of target and value, as plan_checkpoints takes them


@dataclass(frozen=True)
class BatchPoint:
    """One size of micro-batch under the cheapest plan that fits.

    Attributes:
        batch_size: samples in a micro-batch.
        accumulate: micro-batches in a step of the global batch; None where no global batch was given.
        predicted_peak_bytes, budget_bytes: activation peak of a micro-batch, and what it may be.
        step_ms: forward, backward and recomputation of one micro-batch, by the measured times of its stages.
        samples_per_s: by ``step_ms``; the optimizer's step is not in it.
    """

    batch_size: int
    accumulate: int | None
    plan: CheckpointPlan
    predicted_peak_bytes: int
    budget_bytes: int
    step_ms: float
    samples_per_s: float


@dataclass(frozen=True)
class Maximized:
    """What ``maximize`` found.

    Attributes:
        chosen: the answer to the objective.
        largest: the largest batch that fits.
        fastest: the most samples per second among the sizes of ``points``.
        points: sizes in rising order, each with the cheapest plan that fits.
        profile_at: predicted profile at any size.
        measured_peak_bytes: of real steps of ``chosen``; None: none was run.
        notes: what was confirmed, and what could not be.
    """

    chosen: BatchPoint
    largest: BatchPoint
    fastest: BatchPoint
    points: tuple[BatchPoint, ...]
    profile_at: Callable[[int], ChainProfile]
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A line for each size, then the two answers and what was confirmed."""
        lines = [" batch  accumulate  peak        of          step     samples/s  plan"]
        for p in self.points:
            names = [name for name, point in (("largest", self.largest), ("fastest", self.fastest)) if point is p]
            plan = p.plan.text if len(p.plan.text) <= 40 else f"{p.plan.text[:37]}..."
            lines.append(
                f"{p.batch_size:>6}  {p.accumulate or '-':>10}  {format_bytes(p.predicted_peak_bytes):<10}  "
                f"{format_bytes(p.budget_bytes):<10}  {format_ms(p.step_ms):<7}  {p.samples_per_s:>9.1f}  {plan}"
                + (f"  <- {', '.join(names)}" if names else "")
            )
        gain = self.fastest.samples_per_s / self.largest.samples_per_s - 1
        lines.append(
            f"largest batch that fits: {self.largest.batch_size}; fastest: {self.fastest.batch_size} "
            f"({format_percent(gain)} samples per second beside the largest)"
        )
        return "\n".join([*lines, *self.notes])


def maximize(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    budget: int | float | str,
    objective: Objective = "throughput",
    *,
    global_batch: int | None = None,
    most: int | None = None,
    resize: Callable[[Any, int], Any] | None = None,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "optimal",
    confirm: bool = True,
    device: str | torch.device | None = None,
    say: Callable[[str], object] | None = print,
) -> Maximized:
    """Micro-batch, plan and accumulation together: the largest batch that fits, and the fastest.

    The model is measured at two sizes of batch. Bytes, FLOPs and times of each of its stages are
    affine in the size, and the peak of a step is simulated from them at any other. What is found is confirmed by dry
    runs, at the largest batch and one above it, and by real steps of the answer, at most three. The model is left as it
    was: apply ``result.chosen.plan`` with ``checkpointed``, or call ``fit`` with a batch of that size.

    Args:
        batch: one batch; the first dimension of its tensors is the samples.
        budget: as in ``fit``: a size of everything on the device, or a share of the activation peak that ``batch`` has
            without checkpointing.
        objective: which of the two is ``chosen``: ``"throughput"`` (samples per second, by the measured times) or
            ``"batch"`` (the largest that fits).
        global_batch: samples of one optimizer step; micro-batches are its divisors, and ``accumulate`` makes it up.
        most: the largest batch to look at.
        resize: ``resize(batch, n)`` -> a batch of n samples; default: samples are repeated or left out.
        blocks, optimizer, planner: as in ``fit``.
        confirm: False: neither dry runs nor real steps.

    Raises:
        InfeasibleTargetError: not even one sample fits.
        PlanIncompatibleError: the model takes other ways at another size, so that nothing can be said of a third.
        ValueError, TypeError: a bad argument, named.
    """
    search = Search(
        model, batch, loss_fn, parse_budget(budget), _checked(objective), global_batch, most, resize or resized,
        blocks, optimizer, planner, torch.device(device) if device is not None else default_device(model, batch),
    )  # fmt: skip
    found = search.run(confirm)
    if say is not None:
        for line in found.text.splitlines():
            say(f"ckptplan: {line}")
    return found


def _checked(objective: str) -> Objective:
    if objective not in ("throughput", "batch"):
        raise ValueError(f"objective={objective!r}; expected 'throughput' or 'batch'")
    return objective  # type: ignore[return-value]  # one of the two by now


def samples_in(batch: Any) -> int:
    """The first dimension that the tensors of a batch share. Raises ``ValueError`` where they share none."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(batch)}
    common = sizes - {0}
    if len(common) != 1:
        raise ValueError(
            f"batch: its tensors have first dimensions {sorted(sizes) or 'none'}; expected one number of samples in "
            "all of them, or resize=, a function that makes a batch of n samples"
        )
    return common.pop()


def resized(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples out of those of ``batch``, again from the first one where there are not enough."""
    return with_dimension(batch, 0, samples_in(batch), size)


def with_dimension(batch: Any, dimension: int, count: int, size: int) -> Any:
    """``batch`` with ``size`` places along a dimension of ``count``; tensors without that dimension as they are."""

    def places(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() <= dimension:
            return tensor
        taken = tensor.detach().index_select(dimension, torch.arange(size, device=tensor.device) % count)
        return taken.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, places)


def batch_bytes(batch: Any) -> int:
    """Of the storages of a batch, each counted once."""
    return sum(t.untyped_storage().nbytes() for t in distinct_storages(tensors_in(batch)))


def measured_or_refused(measure: Callable[[], _Measured], what: str, *, is_own: bool) -> _Measured:
    """``measure()``; an error of the model's own at a size that was made up is one that names the size.

    Args:
        what: the size, in words.
        is_own: the size is that of the batch that was given: the model's error is raised as it is.

    Raises ``SizeRefusedError``.
    """
    try:
        return measure()
    except MODEL_ERRORS as error:
        if is_own or isinstance(error, CkptplanError) or is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SizeRefusedError(f"the model does not run with {what}: {type(error).__name__}: {reason}") from error


@dataclass(frozen=True)
class Search:
    """What is asked of ``maximize``, and how it is found."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn
    budget: Budget
    objective: Objective
    global_batch: int | None
    most: int | None
    resize: Callable[[Any, int], Any]
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None
    optimizer: torch.optim.Optimizer | None
    planner: str
    device: torch.device
    cost: str = "time"
    margin_frac: float | None = None  # of the budget; None: what ``fit`` takes off on this device

    def __post_init__(self) -> None:
        for name in ("global_batch", "most"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r}; expected a whole number of samples, 1 or more")

    # --- what is known at any size ---

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The two that are measured: that of the batch, and a quarter of it.

        Not one sample: a dimension of one is contiguous however it lies, so copies are left out that others need.
        """
        count = self.count
        return (max(2, count // 4), count) if count > 2 else (2, 4)

    @cached_property
    def count(self) -> int:
        """Samples of the batch that was given."""
        return samples_in(self.batch) if self.resize is resized else len(tensors_in(self.batch)[0])

    @cached_property
    def profile_at(self) -> AffineProfile:
        low, high = (self.measured(size) for size in self.sizes)
        return AffineProfile(low, self.sizes[0], high, self.sizes[1])

    def profile(self, size: int) -> ChainProfile:
        """One sample is measured only where it has to be: its figures on the line are a little too large."""
        return self.profile_of_one if size == 1 and not self._fits_by(self.profile_at(1), 1) else self.profile_at(size)

    @cached_property
    def profile_of_one(self) -> ChainProfile:
        return self.measured(1)

    def of_size(self, size: int) -> Any:
        """A batch of this many samples. Raises ``ValueError`` where ``resize`` made another."""
        batch = self.resize(self.batch, size)
        found = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
        if size not in found:
            raise ValueError(f"resize(batch, {size}) gave tensors of first dimensions {sorted(found)}; expected {size}")
        return batch

    def measured(self, size: int) -> ChainProfile:
        with_options = self.planner in PLANNERS_WITH_OPTIONS and importlib.util.find_spec("scipy") is not None
        batch = self.of_size(size)

        def measure() -> ChainProfile:
            return profile_model(
                self.model,
                self.blocks,
                batch,
                self.loss_fn,
                device=self.device,
                selective=with_options,
                offload=has_host_apart(self.device) and self.planner in PLANNERS_WITH_OPTIONS and self.cost == "time",
            )

        return measured_or_refused(measure, f"a batch of {size}", is_own=size == self.count)

    @cached_property
    def standing(self) -> StaticBytes:
        return static_of(self.model, self.optimizer, ())

    @property
    def share_bytes(self) -> int:
        """What a share of the batch's own peak without checkpointing is in bytes; of a size, the size."""
        return budget_for(*self.budget, self._own_peak)

    @cached_property
    def _own_peak(self) -> int:
        """Of the batch that was given, without checkpointing."""
        return no_checkpoint_peak(self.profile_of_one if self.count == 1 else self.profile_at(self.count))

    def allowed(self, size: int) -> int:
        """Bytes that the activations of a micro-batch of this size may take."""
        kind, amount = self.budget
        static = replace(self.standing, batch_bytes=self._batch_bytes_at(size))
        return allowed_bytes(kind, amount, self._own_peak, static, self.device, self.margin_frac)

    def _batch_bytes_at(self, size: int) -> int:
        low, high = self._bytes_of_batches
        row = (high - low) // (self.sizes[1] - self.sizes[0])
        return high + (size - self.sizes[1]) * row

    @cached_property
    def _bytes_of_batches(self) -> tuple[int, int]:
        low, high = (batch_bytes(self.resize(self.batch, n)) for n in self.sizes)
        return low, high

    def fits(self, size: int) -> bool:
        try:
            return self._fits_by(self.profile(size), size)
        except (
            SizeRefusedError
        ):  # one sample, as norms over the batch refuse it; what does not fit is the smallest then
            return False

    def _fits_by(self, profile: ChainProfile, size: int) -> bool:
        return least_peak_of(self.planner, profile)[0] <= self.allowed(size)

    def point(self, size: int) -> BatchPoint:
        profile, allowed = self.profile(size), self.allowed(size)
        plan = self._plan(profile, allowed)
        assert plan.predicted_peak_bytes is not None
        step_ms = step_cost(profile, "time") + plan_recompute_cost(profile, plan.nodes, "time")
        accumulate = None if self.global_batch is None else self.global_batch // size
        return BatchPoint(
            size, accumulate, plan, plan.predicted_peak_bytes, allowed, step_ms, size / max(step_ms, 1e-9) * 1e3
        )

    def _plan(self, profile: ChainProfile, budget_bytes: int) -> CheckpointPlan:
        return plan_checkpoints(
            profile,
            target_kind="activation_budget_bytes",
            target_value=budget_bytes,
            planner=self.planner,
            cost=self.cost,  # type: ignore[arg-type]  # checked by the planner
        )

    # --- the search ---

    def run(self, confirm: bool) -> Maximized:
        limit = min(self.global_batch or MOST_SAMPLES, self.most or MOST_SAMPLES)
        ladder: Sequence[int] = range(1, limit + 1)
        if self.global_batch is not None:  # micro-batches that make it up
            ladder = [n for n in ladder if self.global_batch % n == 0]
        size = self._largest_on(ladder)
        notes: list[str] = []
        if size and confirm:
            size = self._confirmed_by_dry_runs(size, ladder, notes)
        if not size:
            self._refuse()
        points = [self.point(n) for n in self._candidates(size)]
        biggest, fastest = points[-1], max(points, key=lambda point: point.samples_per_s)
        peak = None
        if confirm:
            points, peak = self._confirmed_by_real_steps(points, notes)
            biggest, fastest = points[-1], max(points, key=lambda point: point.samples_per_s)
        chosen = fastest if self.objective == "throughput" else biggest
        return Maximized(chosen, biggest, fastest, tuple(points), self.profile, peak, tuple(notes))

    def _largest_on(self, ladder: Sequence[int]) -> int:
        count = largest(lambda place: self.fits(ladder[place - 1]), len(ladder))
        return ladder[count - 1] if count else 0

    def _candidates(self, size: int) -> list[int]:
        if self.global_batch is not None:
            return [n for n in range(1, size + 1) if self.global_batch % n == 0]
        ladder = {1, size}
        ladder |= {max(1, round(size ** (i / _STEPS_OF_CURVE))) for i in range(_STEPS_OF_CURVE)}
        return sorted(ladder)

    def _refuse(self) -> None:
        allowed = self.allowed(1)
        try:
            profile = self.profile(1)
        except SizeRefusedError:
            profile = self.profile_at(1)
        least, at = least_peak_of(self.planner, profile)
        raise InfeasibleTargetError(
            f"not even one sample fits: its least activation peak is {format_bytes(least)}, set by {at}, and "
            f"the budget leaves {format_bytes(allowed)} for activations; give more, or take a smaller model",
            budget_bytes=allowed,
            smallest_reachable_bytes=least,
            limited_by=at,
        )

    def _confirmed_by_dry_runs(self, size: int, ladder: Sequence[int], notes: list[str]) -> int:
        """The size itself where the plan for it is seen to fit there and not at the next; else the next that does."""
        place = ladder.index(size)
        if self._is_beyond_this_machine(self._batch_bytes_at(size)):
            notes.append("the largest batch is not confirmed: this machine has no memory free for such a batch")
            return size
        try:
            while place >= 0 and self._dry_peak(ladder[place]) > self.allowed(ladder[place]):
                notes.append(f"a batch of {ladder[place]} was predicted to fit and does not, by its dry run")
                place -= 1
            while place + 1 < len(ladder) and self._fits_dry(ladder[place + 1]):
                place += 1
        except DryRunError as error:
            notes.append(f"the largest batch is not confirmed: {error}")
            return size
        if place < 0:
            return 0
        above = f" and {ladder[place + 1]} do not" if place + 1 < len(ladder) else ""
        notes.append(f"dry runs: with the plan of least peak {ladder[place]} samples fit{above}")
        return ladder[place]

    def _fits_dry(self, size: int) -> bool:
        return self.fits(size) and self._dry_peak(size) <= self.allowed(size)

    def _dry_peak(self, size: int) -> int:
        """Of the plan of least peak, on fake tensors; workspaces of kernels, which these do not have, are added."""
        profile = self.profile(size)
        least, _ = least_peak_of(self.planner, profile)
        plan = self._plan(profile, least)
        dry = verify_plan(self.model, plan, self.of_size(size), self.loss_fn).peak_bytes
        return max(dry, least)

    def _confirmed_by_real_steps(
        self, points: list[BatchPoint], notes: list[str]
    ) -> tuple[list[BatchPoint], int | None]:
        """Sizes without those that a real step shows not to fit, and the measured peak of the answer."""
        for _ in range(MOST_TRIALS):
            chosen = points[-1] if self.objective == "batch" else max(points, key=lambda p: p.samples_per_s)
            if self._is_beyond_this_machine(chosen.predicted_peak_bytes):
                notes.append(f"no real step of {chosen.batch_size} was run: this machine has not as much memory free")
                return points, None
            told, peak = self._real_step(chosen)
            notes.append(f"a real step of {chosen.batch_size} {told}, {format_bytes(chosen.budget_bytes)} allowed")
            if peak is not None and peak <= chosen.budget_bytes:
                return points, peak
            if len(points) == 1:
                break
            points = [point for point in points if point.batch_size < chosen.batch_size]
            if not points:
                break
        raise InfeasibleTargetError(f"no batch was seen to fit by a real step: {'; '.join(notes)}")

    def _real_step(self, point: BatchPoint) -> tuple[str, int | None]:
        """What became of a step, in words, and its activation peak; None: it was not finished."""
        batch = self.of_size(point.batch_size)

        def run() -> int | None:
            return peak_of_planned_step(pair_of_model(self.model, point.plan, batch, self.loss_fn, self.device))

        try:
            peak = measured_or_refused(run, f"a batch of {point.batch_size}", is_own=point.batch_size == self.count)
        except SizeRefusedError as error:
            return f"failed ({error})", None
        return ("ran out of memory" if peak is None else f"took {format_bytes(peak)}"), peak

    def _is_beyond_this_machine(self, peak_bytes: int) -> bool:
        """A CPU has no allocator that says no: the system would end this process, or others."""
        return self.device.type == "cpu" and peak_bytes > available_host_bytes()
