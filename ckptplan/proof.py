"""Proving a plan by real steps, with it and without it: peak, latency, gradients.

Both kinds of step run on one twin of the model in one process, interleaved, so that they share
weights, inputs, random state and the machine's moods; the caller's model is left as it was. A step is forward,
loss and backward with the gradients allocated beforehand; the optimizer is no part of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.attributes import AttributeValues, KeptAttributes
from ckptplan.blocks import no_hooks_on_all_modules
from ckptplan.errors import PlanIncompatibleError
from ckptplan.memory import CudaAllocatorMeter, MemoryMeter, make_meter
from ckptplan.plan import CheckpointPlan
from ckptplan.randomness import GlobalStreams, library_state, random_state_restored, torch_state
from ckptplan.subject import LossFn, Trials, private_batch
from ckptplan.trees import local, tensors_in
from ckptplan.twin import make_twin, missing_hooks_told, own_written_weights
from ckptplan.units import require_amount
from ckptplan.wrappers import no_parallel_calls, parallel_fault, sharding_fault


@dataclass(frozen=True)
class GradientCheck:
    """Gradients, buffers and random streams of a planned step against an unplanned one.

    Attributes:
        max_abs_diff: largest absolute difference of any gradient element; None where one is missing or not finite.
        max_rel_diff: largest, over parameters, of the difference divided by the parameter's largest gradient.
        faults: what differs, by parameter or buffer name.
    """

    reference: str
    passed: bool
    bitwise_equal: bool
    max_abs_diff: float | None
    max_rel_diff: float | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepProof:
    """What real steps showed. Peaks are above what stands before a step; None: not measured."""

    peak_bytes: int | None
    no_checkpoint_peak_bytes: int | None
    step_ms: tuple[float, ...]
    no_checkpoint_step_ms: tuple[float, ...]
    gradients: GradientCheck | None
    gradients_note: str | None = None  # why there is no check
    device_peak_bytes: int | None = None
    device_reserved_bytes: int | None = None
    static_bytes: int = 0  # parameters, buffers, gradients and inputs of the twin
    out_of_memory: str | None = None  # which step did not fit

    @property
    def overhead_ratio(self) -> float | None:
        """Share of a step's time that the plan adds: the median over pairs of neighbouring steps.

        Pair by pair, a slow spell of the machine hits both steps and cancels out.
        """
        pairs = list(zip(self.step_ms, self.no_checkpoint_step_ms, strict=False))
        return statistics.median(planned / plain for planned, plain in pairs) - 1 if pairs else None


class OwnBatch:
    """The batch that a step gets: a copy for each, so that what a step changes in it reaches no other step."""

    def __init__(self, batch: Any) -> None:
        self._original = batch
        self.now = private_batch(batch)

    def renew(self) -> None:
        self.now = None  # two copies at once would stand beside the step in a caching allocator
        self.now = private_batch(self._original)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.now)


@dataclass(frozen=True)
class Engine:
    """How a model is called under an engine of several ranks; ``settled`` and ``peak_trials`` as in ``StepPair``."""

    wrap: Callable[[nn.Module], nn.Module]
    settled: Callable[[], AbstractContextManager[None]] = nullcontext
    peak_trials: int = 1


@dataclass
class StepPair:
    """A planned and an unplanned step over the same twin; each step runs on ``batch.now``.

    ``is_alone``: no other rank takes part in the steps, so one that does not fit the device ends nothing. ``settled``
    is entered around steps whose peak is measured, of ``peak_trials`` the least.
    """

    planned: Callable[[], torch.Tensor]
    plain: Callable[[], torch.Tensor]
    twin: nn.Module
    batch: OwnBatch
    device: torch.device
    is_alone: bool = True
    settled: Callable[[], AbstractContextManager[None]] = nullcontext
    peak_trials: int = 1

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.twin.named_parameters() if p.requires_grad}

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.twin.named_buffers())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def prove_model(
    model: nn.Module,
    plan: CheckpointPlan,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: torch.device,
    trials: Trials,
    check_gradients: bool = True,
    time_steps: bool = True,
    rtol: float = 1e-5,
    atol: float = 0.0,
    check_stop: Callable[[], None] = lambda: None,
    under: Engine | None = None,
    run_plain: bool = True,
) -> StepProof:
    """Measure steps of ``loss_fn(model, batch)`` with the model patched by ``plan`` and as it is.

    ``under``: the engine of several ranks, each of which measures; gradients are compared as they lie on this one.
    ``run_plain``: False where the unplanned step is known not to fit.
    """
    require_amount("rtol", rtol)  # before anything is built
    require_amount("atol", atol)
    return prove(
        pair_of_model(model, plan, batch, loss_fn, device, under),
        trials,
        check_gradients=check_gradients,
        time_steps=time_steps,
        rtol=rtol,
        atol=atol,
        check_stop=check_stop,
        run_plain=run_plain,
    )


def pair_of_model(
    model: nn.Module,
    plan: CheckpointPlan,
    batch: Any,
    loss_fn: LossFn,
    device: torch.device,
    under: Engine | None = None,
) -> StepPair:
    """The two steps of ``loss_fn(model, batch)``, on a twin of the model, put under an engine if there is one.

    Raises ``PlanIncompatibleError`` for a model that copies, or steps, of which would talk to other processes.
    """
    sharding = sharding_fault(model) if under is None else None  # else all ranks run the same steps
    faults = [fault for fault in (parallel_fault(model), sharding) if fault is not None]
    if faults:
        raise PlanIncompatibleError(faults)
    (twin,) = make_twin([model])
    try:
        with no_hooks_on_all_modules(), no_parallel_calls(), missing_hooks_told(model):
            own_written_weights(model, twin, lambda trial: loss_fn(trial, private_batch(batch)), device)
    except Exception as error:
        if not is_out_of_memory(error):  # whether the steps fit is found later
            raise
    own = OwnBatch(batch)
    patch = checkpointed(twin, plan)  # checked once, not in every timed step
    called = twin if under is None else under.wrap(twin)

    def planned() -> torch.Tensor:
        with patch:
            return loss_fn(called, own.now)

    pair = StepPair(planned, lambda: loss_fn(called, own.now), twin, own, device)
    if under is None:
        return pair
    return replace(pair, is_alone=False, settled=under.settled, peak_trials=under.peak_trials)


def peak_of_planned_step(pair: StepPair) -> int | None:
    """Activation peak of a planned step alone, in bytes; None: it does not fit the device."""
    with no_hooks_on_all_modules(), random_state_restored(pair.device), torch.enable_grad():
        _allocate_gradients(pair)
        return _peak_or_none(pair, pair.planned)[0]


def prove(
    pair: StepPair,
    trials: Trials,
    *,
    check_gradients: bool,
    time_steps: bool = True,
    rtol: float,
    atol: float,
    check_stop: Callable[[], None] = lambda: None,
    run_plain: bool = True,
) -> StepProof:
    """Gradients, then peaks, then times; a step that does not fit the device leaves its figures None.

    Raises ``TypeError`` or ``ValueError`` for a tolerance that is no finite number, 0 or more.
    """
    require_amount("rtol", rtol)
    require_amount("atol", atol)
    check: GradientCheck | None = None
    note: str | None = None if check_gradients else "not asked for"
    with no_hooks_on_all_modules(), random_state_restored(pair.device), torch.enable_grad():
        if check_gradients and not run_plain:
            note = "the unplanned step does not fit the device"
        elif check_gradients:
            check, note = check_gradients_of(pair, rtol, atol)
        _allocate_gradients(pair)
        peak, device_peak, reserved = _peak_or_none(pair, pair.planned)
        plain_peak = _peak_or_none(pair, pair.plain)[0] if run_plain else None
        step_ms: list[float] = []
        plain_ms: list[float] = []
        if time_steps:
            fits = peak is not None, plain_peak is not None
            step_ms, plain_ms = _interleaved_times(pair, trials, *fits, check_stop)
    return StepProof(
        peak_bytes=peak,
        no_checkpoint_peak_bytes=plain_peak,
        step_ms=tuple(step_ms),
        no_checkpoint_step_ms=tuple(plain_ms),
        gradients=check,
        gradients_note=note,
        device_peak_bytes=device_peak,
        device_reserved_bytes=reserved,
        static_bytes=_static_bytes(pair),
        out_of_memory="planned" if peak is None else "no_checkpoint" if plain_peak is None else None,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of the device or of the host, said that it has no memory left."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    # torch's CPU allocator: "can't allocate memory" on Linux and macOS, "not enough memory" on Windows
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)


# --- gradients ---


def check_gradients_of(pair: StepPair, rtol: float, atol: float) -> tuple[GradientCheck | None, str | None]:
    """The comparison of one planned and one unplanned step; None with the reason where one of them does not fit."""
    start = _Start.of(pair)
    try:
        found = _outcome(pair, pair.planned, start)
    except Exception as error:
        if pair.is_alone and is_out_of_memory(error):
            return None, "the planned step does not fit the device"
        raise
    reference = "the unplanned step"
    try:
        expected = _outcome(pair, pair.plain, start)
    except Exception as error:
        if not (pair.is_alone and is_out_of_memory(error)):
            raise
        reference = "the unplanned step with its saved tensors held on the host"
        try:
            expected = _outcome(pair, lambda: _saved_on_host(pair.plain), start)
        except Exception as second:
            if is_out_of_memory(second):
                return None, "the unplanned step fits neither the device nor the host's memory"
            raise
    return compare_outcomes(found, expected, reference, rtol, atol), None


def check_repeat(pair: StepPair, rtol: float, atol: float) -> GradientCheck:
    """Two unplanned steps from the same state: what differs is not deterministic by itself."""
    start = _Start.of(pair)
    first, second = (_outcome(pair, pair.plain, start) for _ in range(2))
    return compare_outcomes(second, first, "the same step again", rtol, atol)


def _saved_on_host(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return step()


@dataclass
class _Start:
    """State that both steps start from."""

    buffers: dict[str, torch.Tensor]
    streams: GlobalStreams
    attributes: KeptAttributes | None  # None under an engine, which has state of its own in those of the model

    @staticmethod
    def of(pair: StepPair) -> _Start:
        buffers = {name: b.detach().clone() for name, b in pair.buffers().items()}
        attributes = KeptAttributes.of(pair.twin) if pair.is_alone else None
        return _Start(buffers, GlobalStreams.now(pair.device), attributes)

    def restore(self, pair: StepPair) -> None:
        with torch.no_grad():
            for name, buffer in pair.buffers().items():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
                else:  # it was None before a forward made it
                    owner, _, last = name.rpartition(".")
                    setattr(pair.twin.get_submodule(owner), last, None)
        if self.attributes is not None:
            self.attributes.put_back(pair.twin)
        self.streams.put_back(pair.device)
        pair.batch.renew()


@dataclass(frozen=True)
class StepOutcome:
    """All that a step leaves behind, on the host: loss, gradients (None: missing), buffers, streams, attributes."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    random_states: Sequence[torch.Tensor] = ()
    library_states: tuple[Any, ...] = ()  # of Python's and NumPy's streams
    attributes: AttributeValues = field(default_factory=lambda: AttributeValues({}, {}))


def _outcome(pair: StepPair, step: Callable[[], torch.Tensor], start: _Start) -> StepOutcome:
    start.restore(pair)
    inputs = pair.batch.tensors
    for tensor in (*pair.twin.parameters(), *inputs):
        tensor.grad = None  # so that a gradient that never comes shows as missing, not as zero
    loss = step()
    loss.backward()
    gradients = {n: None if p.grad is None else _on_host(p.grad) for n, p in pair.parameters().items()}
    for i, tensor in enumerate(inputs):
        if tensor.requires_grad:
            gradients[f"input {i}"] = None if tensor.grad is None else _on_host(tensor.grad)
    buffers = {name: _on_host(buffer) for name, buffer in pair.buffers().items()}
    attributes = AttributeValues.of(pair.twin) if pair.is_alone else AttributeValues({}, {})
    outcome = StepOutcome(_on_host(loss), gradients, buffers, torch_state(pair.device), library_state(), attributes)
    for tensor in (*pair.twin.parameters(), *inputs):
        tensor.grad = None
    return outcome


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for comparison, of a sharded tensor of this rank's part.

    Sparse gradients are made dense, complex numbers pairs of real ones.
    """
    copied = local(tensor.detach()).to("cpu", copy=True).to_dense()
    return torch.view_as_real(copied.resolve_conj()) if copied.is_complex() else copied


def compare_outcomes(
    found: StepOutcome, expected: StepOutcome, reference: str, rtol: float, atol: float
) -> GradientCheck:
    """Judge each parameter relative to its own largest gradient; NaN, missing gradients, changed buffers fail.

    So do Python attributes of the model with other values.
    """
    faults: list[str] = []
    largest_abs = largest_rel = 0.0
    bitwise = torch.equal(found.loss, expected.loss)
    left_loss, right_loss = float(found.loss), float(expected.loss)
    if not abs(left_loss - right_loss) <= rtol * abs(right_loss) + atol:  # NaN fails too
        faults.append(f"the loss is {left_loss!r} under the plan, {right_loss!r} without it")
    for name, right in expected.gradients.items():
        left = found.gradients.get(name)
        if left is None or right is None:
            if left is not right:
                faults.append(f"{name}: gradient missing {'under the plan' if left is None else 'without the plan'}")
            continue
        bitwise &= torch.equal(left, right)
        if not right.numel():
            continue
        difference, size = float((left.double() - right.double()).abs().max()), float(right.double().abs().max())
        if not (math.isfinite(difference) and math.isfinite(size)):
            faults.append(f"{name}: gradient is not finite")
            continue
        largest_abs = max(largest_abs, difference)
        largest_rel = max(largest_rel, difference / size if size else (math.inf if difference else 0.0))
        if not difference <= rtol * size + atol:
            faults.append(f"{name}: gradient differs by {difference:.3g}, its largest element is {size:.3g}")
    faults += [
        f"buffer {name} differs after the step"
        for name, right in expected.buffers.items()
        if name not in found.buffers or not _close(found.buffers[name], right, rtol, atol)
    ]
    faults += [
        f"attribute {name} differs after the step"
        for name in _differing_attributes(found.attributes, expected.attributes, rtol, atol)
    ]
    states = zip(found.random_states, expected.random_states, strict=True)
    if not all(torch.equal(left, right) for left, right in states):
        faults.append("the random stream stands elsewhere after the step")
    if found.library_states != expected.library_states:
        faults.append("the random stream of Python or NumPy stands elsewhere after the step")
    known = not any("not finite" in fault or "missing" in fault for fault in faults)
    return GradientCheck(
        reference=reference,
        passed=not faults,
        bitwise_equal=bitwise and not faults,
        max_abs_diff=largest_abs if known else None,
        max_rel_diff=largest_rel if known and math.isfinite(largest_rel) else None,
        faults=tuple(faults),
    )


def _differing_attributes(found: AttributeValues, expected: AttributeValues, rtol: float, atol: float) -> Iterator[str]:
    for name in sorted(found.plain.keys() | expected.plain.keys()):
        is_same = found.plain.get(name) == expected.plain.get(name)
        tensors = zip(found.tensors[name], expected.tensors[name], strict=True) if is_same else ()
        if not is_same or not all(_close(left, right, rtol, atol) for left, right in tensors):
            yield name


def _close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    same_shape = found.shape == expected.shape
    return same_shape and torch.allclose(found.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


# --- peaks and times ---


def _allocate_gradients(pair: StepPair) -> None:
    for tensor in pair.parameters().values():
        tensor.grad = torch.zeros_like(tensor)
    pair.batch.renew()  # brings the gradients of its tensors


def _peak_or_none(pair: StepPair, step: Callable[[], torch.Tensor]) -> tuple[int | None, int | None, int | None]:
    """(peak above what stands before the step, device's allocated peak, device's reserved peak)."""
    try:
        pair.batch.renew()
        step().backward()  # lazily made workspaces are there afterwards
        with pair.settled():
            meters = [_metered(pair, step) for _ in range(pair.peak_trials)]
    except Exception as error:
        if pair.is_alone and is_out_of_memory(error):
            return None, None, None
        raise
    meter = min(meters, key=_peak_above_start)
    peak = _peak_above_start(meter)
    if isinstance(meter, CudaAllocatorMeter):
        return peak, torch.cuda.memory_allocated(pair.device) + peak, meter.reserved_peak_bytes
    return peak, None, None


def _metered(pair: StepPair, step: Callable[[], torch.Tensor]) -> MemoryMeter:
    pair.batch.renew()
    meter = make_meter(pair.device)
    with meter:
        meter.mark("start")
        loss = step()
        loss.backward()
        meter.mark("end")
    return meter


def _peak_above_start(meter: MemoryMeter) -> int:
    return meter.peak("start", "end") - meter.level("start")


def _interleaved_times(
    pair: StepPair, trials: Trials, planned_fits: bool, plain_fits: bool, check_stop: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Milliseconds of both steps in turn; which goes first changes from trial to trial."""
    times: tuple[list[float], list[float]] = ([], [])
    steps = [(pair.planned, times[0], planned_fits), (pair.plain, times[1], plain_fits)]
    for trial in range(-trials.num_warmup, trials.num_trials):
        check_stop()
        for step, collected, fits in steps if trial % 2 else reversed(steps):
            if fits:
                elapsed_ms = _time(pair, step)
                if trial >= 0:
                    collected.append(elapsed_ms)
    return times


def _time(pair: StepPair, step: Callable[[], torch.Tensor]) -> float:
    pair.batch.renew()
    pair.synchronize()
    start_s = time.perf_counter()
    step().backward()
    pair.synchronize()
    return (time.perf_counter() - start_s) * 1e3


def _static_bytes(pair: StepPair) -> int:
    tensors = [*pair.twin.parameters(), *pair.twin.buffers(), *pair.batch.tensors]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
