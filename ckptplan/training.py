"""The training loop. It takes any model; a plan, if one is applied, is none of its business.

One optimizer step is one *window* of ``accumulate`` micro-batches. Windows never cross an epoch; the last,
shorter window of an epoch is applied like any other. The loss of a window is the sum of its cross entropies
divided by the number of its targets that are not to be ignored, so gradients equal those of the whole window
in one batch however unevenly the targets are spread. A window without any such target gives zero gradients.
With several ranks all this is over all of them: each has its share of every micro-batch.

Steps are counted from 1. The learning rate is a function of the step alone, the position in the data is counted in
samples (``Position``), and evaluation, logging and saving restore or never touch the random streams, so none of them
changes the training.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

from ckptplan.data import IGNORE_INDEX, Batch
from ckptplan.engine.parallel import Parallel, alone
from ckptplan.engine.shares import num_samples
from ckptplan.errors import ConfigError, NonFiniteError
from ckptplan.optim import set_learning_rate
from ckptplan.randomness import random_state_restored
from ckptplan.record import RunRecorder
from ckptplan.stopping import StopFlag
from ckptplan.tracking import Tracker
from ckptplan.trees import whole
from ckptplan.units import format_seconds

log = logging.getLogger(__name__)


class TrainingData(Protocol):
    """What the loop asks of a data set."""

    @property
    def spec(self) -> Any: ...
    @property
    def batches_per_epoch(self) -> int: ...
    def epoch_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...
    def eval_batches(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        steps: optimizer steps in total, those before ``start_step`` included.
        accumulate: micro-batches per optimizer step.
        clip_norm: gradients are scaled down to this 2-norm over all parameters; None: not clipped.
        eval_every: evaluate every so many steps and after the last one; None: never.
        log_every: without a terminal, a log line every so many steps.
        autocast_dtype: ``torch.bfloat16``, ``torch.float16`` (with a loss scaler) or None.
        device: where the model is and the batches go.
        max_bad_steps: so many updates in a row with NaN or infinite values end the run.
    """

    steps: int
    accumulate: int = 1
    clip_norm: float | None = 1.0
    eval_every: int | None = None
    log_every: int = 10
    autocast_dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"
    max_bad_steps: int = 5

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "max_bad_steps"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("eval_every", self.eval_every, self.eval_every is None or self.eval_every >= 1, "at least 1, or null")
        _require("clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "above 0, or null")
        allowed = (None, torch.bfloat16, torch.float16)
        _require("autocast_dtype", self.autocast_dtype, self.autocast_dtype in allowed, "bfloat16, float16 or None")


def _require(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value!r}; expected {expected}")


@dataclass(frozen=True)
class Position:
    """Where a training stands after ``step`` optimizer steps; a training that goes on starts from it.

    Attributes:
        epoch: the epoch of the last step.
        samples: samples of that epoch that have been trained on.
        batches: whole micro-batches of the present size that these are; None where they are not.
        skipped_updates, bad_in_a_row: updates left out so far, and without a good one since.
        evaluation_is_due: the evaluation that belongs to ``step`` was cut short.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    batches: int | None = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    evaluation_is_due: bool = False


@dataclass(frozen=True)
class TrainSummary:
    """What came of it.

    Attributes:
        steps: the last optimizer step done, counted from 1 over the whole training.
        first_loss, last_loss: mean training loss over the first and the last tenth of the steps (at least one step
            each), earlier ones of a training that went on included; None without any finite loss.
        samples_per_s, tokens_per_s: over the time spent in steps, evaluations excluded; tokens for token data only.
        skipped_updates: updates left out because of NaN or infinite values.
        peak_bytes: most bytes allocated on the device in any step; None on CPU.
        eval_loss: of the last evaluation, else None.
        signal: name of the signal that interrupted it.
        position: where it stands.
    """

    steps: int
    ended: Literal["completed", "interrupted"]
    first_loss: float | None
    last_loss: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    train_s: float
    skipped_updates: int = 0
    peak_bytes: int | None = None
    eval_loss: float | None = None
    signal: str | None = None
    position: Position = Position()


# --- the loss: shared with the code that measures, so that what is measured is what is trained ---


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The autocast context of training and measuring alike; does nothing for ``dtype`` None.

    The weight cache is off: it keeps a low-precision copy of every weight until the context ends, also of
    the weights of recomputed blocks, which is most of what recomputing them would save. It is off for
    unplanned steps too, because a weight used twice accumulates its gradient in low precision with the cache
    and in float32 without, and the two runs have to agree.
    """
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def micro_batch_loss(model: nn.Module, batch: Batch, autocast_dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
    """Cross entropy summed over the targets that are not ``IGNORE_INDEX`` (a scalar), and their number.

    ``model(inputs)`` gives logits (..., classes); ``batch.targets`` has their shape without the last axis.
    The batch is on the model's device.
    """
    return summed_loss(model, batch, autocast_dtype), count_targets(batch)


def summed_loss(model: nn.Module, batch: Batch, autocast_dtype: torch.dtype | None = None) -> Tensor:
    """The first of ``micro_batch_loss``, which needs no value of a tensor."""
    with autocast(batch.inputs.device, autocast_dtype):
        logits = model(batch.inputs)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()  # a sum over thousands of tokens needs more than 8 bits of mantissa
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
        )


def count_targets(batch: Batch) -> int:
    """How many targets of the batch count towards the loss."""
    return int((batch.targets != IGNORE_INDEX).sum())


def loss_of(model: nn.Module, batch: Batch, autocast_dtype: torch.dtype | None = None) -> Tensor:
    """The scalar mean loss of one batch: what a training step with ``accumulate=1`` runs backward from."""
    loss_sum, count = micro_batch_loss(model, batch, autocast_dtype)
    return loss_sum / max(count, 1)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    return replace(batch, inputs=batch.inputs.to(device), targets=batch.targets.to(device))


def accumulate_gradients(
    model: nn.Module | Parallel,
    window: list[Batch],
    settings: TrainSettings,
    scaler: torch.amp.GradScaler | None = None,
) -> float | None:
    """Add the gradients of the window's mean loss to the parameters; returns that loss (None: no targets).

    The divisor is known before the first backward, from the targets alone, so each micro-batch's graph is
    freed before the next one is built: the peak does not depend on their number.
    """
    parallel = model if isinstance(model, Parallel) else alone(model)
    ranks = parallel.ranks
    (count,) = ranks.sums(sum(count_targets(batch) for batch in window))
    losses = []
    for position, batch in enumerate(window):
        with parallel.accumulating(is_last=position == len(window) - 1):
            losses.append(_backward(parallel, batch, max(count, 1), settings, scaler))
    (loss,) = ranks.sums(float(torch.stack(losses).sum()))
    return loss if count else None


def _backward(
    parallel: Parallel, batch: Batch, divisor: float, settings: TrainSettings, scaler: torch.amp.GradScaler | None
) -> Tensor:
    """The loss of this rank's part. The engines average gradients over shares, so it is scaled to make that a sum."""
    loss_sum, _ = micro_batch_loss(parallel.module, to_device(batch, settings.device), settings.autocast_dtype)
    loss = loss_sum / divisor
    scaled = loss * parallel.ranks.data_size if parallel.ranks.data_size > 1 else loss
    torch.autograd.backward(scaler.scale(scaled) if scaler else scaled)
    return loss.detach()


GradientsOf = Callable[[nn.Module | Parallel, list[Batch], TrainSettings, torch.amp.GradScaler | None], float | None]


# --- evaluation ---


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each has its own earlier flag back (frozen norms stay frozen)."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in flags:
            module.training = was_training


def evaluate(
    model: nn.Module | Parallel, data: TrainingData, settings: TrainSettings, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean loss over all targets of ``data.eval_batches()``; None if there are none or ``stop`` cut it short."""
    parallel = model if isinstance(model, Parallel) else alone(model)
    module = parallel.module
    total, count = 0.0, 0
    with random_state_restored(torch.device(settings.device)), evaluation_mode(module), torch.no_grad():
        for batch in data.eval_batches():
            if stop():
                return None
            loss_sum, batch_count = micro_batch_loss(module, to_device(batch, settings.device), settings.autocast_dtype)
            total += float(loss_sum)
            count += batch_count
    sum_of_all, count_of_all = parallel.ranks.sums(total, count)
    return sum_of_all / count_of_all if count_of_all else None


# --- one step, and all of them ---


@dataclass(frozen=True)
class _Step:
    loss: float | None
    grad_norm: float
    was_applied: bool
    scaler_backed_off: bool


def _optimizer_step(
    model: Parallel,
    window: list[Batch],
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    scaler: torch.amp.GradScaler | None,
    gradients_of: GradientsOf,
) -> _Step:
    loss = gradients_of(model, window, settings, scaler)
    if scaler:
        scaler.unscale_(optimizer)
    grad_norm = clip(optimizer, settings.clip_norm)
    loss_is_finite = loss is None or math.isfinite(loss)
    is_finite = loss_is_finite and math.isfinite(grad_norm)
    if is_finite:
        update_weights(optimizer, scaler)
    if scaler:
        scaler.update()
    optimizer.zero_grad(set_to_none=not model.keeps_gradients)
    model.share_buffers()
    # With a scaler, overflowing gradients of a finite loss are how it finds its scale, until the scale is gone.
    backed_off = scaler is not None and loss_is_finite and not is_finite and scaler.get_scale() >= 1.0
    return _Step(loss, grad_norm, is_finite, backed_off)


def update_weights(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """The optimizer's own step. What fails in it leaves weights behind of which some are updated."""
    scaler.step(optimizer) if scaler else optimizer.step()


def clip(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> float:
    """The gradients' 2-norm over all parameters, before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    if len(by_mesh) > 1:  # tensor parallelism: some are spread over more ranks than others
        return _clip_over_meshes(by_mesh.values(), clip_norm)
    if clip_norm is None:
        return float(whole(nn.utils.get_total_norm(gradients)))
    return float(whole(nn.utils.clip_grad_norm_(parameters, clip_norm)))


def _clip_over_meshes(groups: Iterable[list[Tensor]], clip_norm: float | None) -> float:
    """As ``clip_grad_norm_``, which wants all gradients on one mesh."""
    groups = list(groups)
    norm = math.hypot(*(float(whole(nn.utils.get_total_norm(group))) for group in groups))
    if clip_norm is not None and not norm + 1e-6 <= clip_norm:
        for gradient in chain.from_iterable(groups):
            gradient.mul_(clip_norm / (norm + 1e-6))
    return norm


def windows(
    data: TrainingData, accumulate: int, start: Position = Position()
) -> Generator[tuple[int, list[Batch]], None, None]:
    """The endless sequence of (epoch, micro-batches of one optimizer step), from where ``start`` stands.

    Nothing that was trained on before is read again. Micro-batches of another size than before start at the same
    sample; only then ``epoch_batches`` is called with ``skip``: samples to pass over behind the first ``start``
    batches. Raises ``ConfigError`` where the data set cannot do that.
    """
    windows_per_epoch(data, accumulate)  # refuses an empty data set
    batches = _rest_of_epoch(data, start)
    epoch = start.epoch
    while True:
        for window in iter(lambda: list(islice(batches, accumulate)), []):  # noqa: B023 (used before the next loop)
            yield epoch, window
        epoch += 1
        batches = iter(data.epoch_batches(epoch, start=0))


def _rest_of_epoch(data: TrainingData, start: Position) -> Iterator[Batch]:
    if start.batches is not None:
        if start.batches >= data.batches_per_epoch:
            return iter(())
        return iter(data.epoch_batches(start.epoch, start=start.batches))
    size = getattr(data, "batch_size", None)
    done = f"data.batch_size: {start.samples} samples of epoch {start.epoch} are done, no whole number of micro-batches"
    if not isinstance(size, int):
        raise ConfigError(
            f"{done}, and {type(data).__name__} has no batch_size; go on with the micro-batches of before"
        )
    first, skip = divmod(start.samples, size)
    if skip == 0:
        return iter(data.epoch_batches(start.epoch, start=first))
    try:
        return iter(data.epoch_batches(start.epoch, start=first, skip=skip))  # type: ignore[call-arg]  # only some datasets have it
    except TypeError as error:
        raise ConfigError(
            f"{done} of {size}, and {type(data).__name__}.epoch_batches takes no skip=: {error}"
        ) from error


def windows_per_epoch(data: TrainingData, accumulate: int) -> int:
    """Optimizer steps per epoch: the last window may be short."""
    if data.batches_per_epoch < 1:
        raise ValueError("the training data is empty: no batch in an epoch")
    return math.ceil(data.batches_per_epoch / accumulate)


def train(
    model: nn.Module | Parallel,
    data: TrainingData,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate_at: Callable[[int], float],
    settings: TrainSettings,
    recorder: RunRecorder | None = None,
    tracker: Tracker | None = None,
    stop: StopFlag | None = None,
    start: Position = Position(),
    earlier_losses: Sequence[float] = (),
    scaler: torch.amp.GradScaler | None = None,
    after_step: Callable[[Position, dict[str, float]], None] = lambda position, figures: None,
    console: Console | None = None,
    gradients_of: GradientsOf = accumulate_gradients,
    further_figures: Callable[[], dict[str, float]] = dict,
) -> TrainSummary:
    """Train until ``settings.steps``, or until ``stop`` is set, which ends it after the step in hand.

    With several ranks each calls this with its share of the data; ``stop`` then has to be one that they agree on.

    A training that goes on is given where it stood (``start``), the losses of its earlier steps for the summary, and
    its ``scaler`` (default: a new one where fp16 needs it). ``after_step`` is called after each step and its
    evaluation, with ``train/loss`` and, where evaluated, ``eval/loss``. ``gradients_of`` computes a step's gradients:
    that of a ``Recovery`` survives running out of memory. ``further_figures`` gives more for the line of a step.

    Raises ``NonFiniteError`` after ``settings.max_bad_steps`` updates in a row with NaN or infinite loss or
    gradients. Such an update is left out (its step is counted, so data and schedule go on), said once in the
    log and counted. A model that keeps statistics in its forward (BatchNorm) has seen the bad batch all the same.
    """
    parallel = model if isinstance(model, Parallel) else alone(model)
    run = _Run(parallel, data, optimizer, learning_rate_at, settings, recorder, tracker, stop or StopFlag())
    run.scaler = scaler or make_scaler(settings)
    run.gradients_of, run.further_figures = gradients_of, further_figures
    run.start_at(start, earlier_losses)
    if not parallel.module.training:  # else leave the flags alone: a user may have frozen single modules with eval()
        parallel.module.train()
    optimizer.zero_grad(set_to_none=True)
    if start.evaluation_is_due:
        run.evaluate()
    with (
        _progress(console or Console(stderr=True), settings, start.step) as report,
        closing(windows(data, settings.accumulate, start)) as reading,  # processes that read end before the last save
    ):
        while run.step < settings.steps and not run.stop():
            row = run.do_step(reading)
            report(run.step, row)
            if run.is_evaluation_due():
                run.evaluate()
            after_step(run.position(), run.figures())
    return run.summary()


def make_scaler(settings: TrainSettings) -> torch.amp.GradScaler | None:
    """The loss scaler that fp16 autocast needs; None for every other number format."""
    if settings.autocast_dtype != torch.float16:
        return None
    return torch.amp.GradScaler(torch.device(settings.device).type)


class _Run:
    """The state of one call of ``train``."""

    def __init__(
        self,
        model: Parallel,
        data: TrainingData,
        optimizer: torch.optim.Optimizer,
        learning_rate_at: Callable[[int], float],
        settings: TrainSettings,
        recorder: RunRecorder | None,
        tracker: Tracker | None,
        stop: StopFlag,
    ) -> None:
        self.model, self.data, self.optimizer, self.learning_rate_at = model, data, optimizer, learning_rate_at
        self.settings, self.recorder, self.tracker, self.stop = settings, recorder, tracker, stop
        self.device = torch.device(settings.device)
        self.scaler: torch.amp.GradScaler | None = None
        self.gradients_of: GradientsOf = accumulate_gradients
        self.further_figures: Callable[[], dict[str, float]] = dict
        self.step = 0
        self.epoch = 0
        self.samples_in_epoch = 0
        self.batches_in_epoch: int | None = 0
        self.losses: list[float] = []
        self.last_loss: float | None = None
        self.samples = self.tokens = 0
        self.train_s = 0.0
        self.skipped = self.bad_in_a_row = 0
        self.has_told = False
        self.peak_bytes: int | None = None
        self.eval_loss: float | None = None
        self.evaluated_step: int | None = None

    def start_at(self, start: Position, earlier_losses: Sequence[float]) -> None:
        self.step, self.epoch = start.step, start.epoch
        self.samples_in_epoch, self.batches_in_epoch = start.samples, start.batches
        self.skipped, self.bad_in_a_row = start.skipped_updates, start.bad_in_a_row
        self.losses = list(earlier_losses)

    def position(self) -> Position:
        due = self.is_evaluation_due() and self.evaluated_step != self.step
        return Position(
            self.step, self.epoch, self.samples_in_epoch, self.batches_in_epoch, self.skipped, self.bad_in_a_row, due
        )

    def figures(self) -> dict[str, float]:
        """What the state after this step may be chosen by."""
        found = {
            "train/loss": self.last_loss,
            "eval/loss": self.eval_loss if self.evaluated_step == self.step else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def do_step(self, reading: Iterator[tuple[int, list[Batch]]]) -> dict[str, float | int | None]:
        """One optimizer step; returns its line of metrics."""
        started = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        epoch, window = next(reading)
        if epoch != self.epoch:
            self.epoch, self.samples_in_epoch, self.batches_in_epoch = epoch, 0, 0
        rate = self.learning_rate_at(self.step + 1)
        set_learning_rate(self.optimizer, rate)
        done = _optimizer_step(self.model, window, self.optimizer, self.settings, self.scaler, self.gradients_of)
        self.step += 1
        step_s = time.perf_counter() - started  # reading the loss has waited for the device
        self._count(window, step_s, done)
        row: dict[str, float | int | None] = {
            "step": self.step, "epoch": self.epoch, "train/loss": done.loss, "lr": rate,
            "grad_norm": done.grad_norm, "step_s": step_s, "peak_bytes": self._device_peak(),
        }  # fmt: skip
        row.update(self.further_figures())
        if not done.was_applied:
            row["skipped_updates"] = self.skipped
        self._write(row)
        self._give_up_if_hopeless()
        return row

    def _count(self, window: list[Batch], step_s: float, done: _Step) -> None:
        self.train_s += step_s
        sums = self.model.ranks.sums(
            sum(num_samples(batch) for batch in window),
            sum(batch.targets.numel() for batch in window if num_samples(batch)),
        )
        samples, tokens = map(int, sums)
        self.samples += samples
        self.samples_in_epoch += samples
        if self.batches_in_epoch is not None:
            self.batches_in_epoch += len(window)
        self.last_loss = done.loss if done.loss is not None and math.isfinite(done.loss) else None
        self.tokens += tokens
        if done.loss is not None and math.isfinite(done.loss):
            self.losses.append(done.loss)
        if done.was_applied:
            self.bad_in_a_row = 0
            return
        self.skipped += 1
        if done.scaler_backed_off:
            return
        self.bad_in_a_row += 1
        if not self.has_told:
            self.has_told = True
            log.warning(
                "step %d: loss %s, gradient norm %s: this update is skipped. Further ones are counted, not told; "
                "%d in a row end the run. Try a lower learning rate, warm-up, or float32.",
                self.step, done.loss, done.grad_norm, self.settings.max_bad_steps,
            )  # fmt: skip

    def _give_up_if_hopeless(self) -> None:
        if self.bad_in_a_row >= self.settings.max_bad_steps:
            raise NonFiniteError(
                f"{self.bad_in_a_row} updates in a row had NaN or infinite loss or gradients, the last at step "
                f"{self.step}; the weights are those of the last good update. Try a lower optimizer.lr, "
                "scheduler.warmup_steps, a smaller clip_norm, or runtime.dtype=float32",
                step=self.step,
                consecutive=self.bad_in_a_row,
            )

    def _device_peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(self.peak_bytes or 0, peak_bytes)
        return peak_bytes

    def is_evaluation_due(self) -> bool:
        every = self.settings.eval_every
        return every is not None and (self.step % every == 0 or self.step == self.settings.steps)

    def evaluate(self) -> None:
        started = time.perf_counter()
        loss = evaluate(self.model, self.data, self.settings, self.stop)
        if loss is None:
            if not self.stop():
                self.evaluated_step = self.step  # there is nothing to evaluate on
            return
        self.evaluated_step = self.step
        self.eval_loss = loss if math.isfinite(loss) else None
        eval_s = time.perf_counter() - started
        self._write({"step": self.step, "epoch": self.epoch, "eval/loss": loss, "eval_s": eval_s})
        log.info("step %d: evaluation loss %.4f (%s)", self.step, loss, format_seconds(eval_s))

    def _write(self, row: dict[str, float | int | None]) -> None:
        if self.recorder:
            self.recorder.log(row)
        if self.tracker:
            self.tracker.log(row)

    def summary(self) -> TrainSummary:
        if self.skipped:
            log.warning("%d of the updates were skipped because of NaN or infinite values", self.skipped)
        is_text = getattr(self.data.spec, "kind", None) == "tokens"
        tenth = max(1, len(self.losses) // 10)
        return TrainSummary(
            steps=self.step,
            ended="completed" if self.step >= self.settings.steps else "interrupted",
            first_loss=_mean(self.losses[:tenth]),
            last_loss=_mean(self.losses[-tenth:]),
            samples_per_s=self.samples / self.train_s if self.train_s else None,
            tokens_per_s=self.tokens / self.train_s if self.train_s and is_text else None,
            train_s=self.train_s,
            skipped_updates=self.skipped,
            peak_bytes=self.peak_bytes,
            eval_loss=self.eval_loss,
            signal=self.stop.signal_name,
            position=self.position(),
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- progress ---

Report = Callable[[int, dict[str, float | int | None]], None]


@contextmanager
def _progress(console: Console, settings: TrainSettings, start_step: int) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a log line every ``log_every`` steps and for the first and last one."""
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("training", total=settings.steps, completed=start_step, note="")
            yield lambda step, row: bar.update(task, completed=step, note=_describe(row))
        return

    def log_line(step: int, row: dict[str, float | int | None]) -> None:
        if step % settings.log_every == 0 or step in (start_step + 1, settings.steps):
            log.info("step %d/%d  %s", step, settings.steps, _describe(row))

    yield log_line


def _describe(row: dict[str, float | int | None]) -> str:
    loss = "none" if row["train/loss"] is None else f"{row['train/loss']:.4f}"
    return f"loss {loss}  lr {row['lr']:.3g}  gradient norm {row['grad_norm']:.3g}  {format_seconds(row['step_s'])}"
