"""The loop against plain torch: gradients, clipping, rates, windows, evaluation, bad numbers."""

from __future__ import annotations

import io
import logging
import math
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ckptplan.data import Batch
from ckptplan.errors import NonFiniteError
from ckptplan.optim import learning_rate_schedule
from ckptplan.record import RunRecorder, load_metrics
from ckptplan.stopping import StopFlag
from ckptplan.tracking import NoTracker
from ckptplan.training import (
    Position,
    TrainSettings,
    TrainSummary,
    accumulate_gradients,
    autocast,
    evaluate,
    loss_of,
    micro_batch_loss,
    train,
    windows,
)


@dataclass
class ListData:
    """The same micro-batches every epoch, unless ``shuffled``; records what was asked of it."""

    batches: Sequence[Batch]
    evaluation: Sequence[Batch] = ()
    kind: str = "images"
    shuffled: bool = False
    served: list[tuple[int, int]] = field(default_factory=list)

    @property
    def spec(self) -> Any:
        return SimpleNamespace(kind=self.kind)

    @property
    def batches_per_epoch(self) -> int:
        return len(self.batches)

    def epoch_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = list(range(len(self.batches)))
        if self.shuffled:
            random.Random(epoch).shuffle(order)
        for index in order[start:]:
            self.served.append((epoch, index))
            yield self.batches[index]

    def eval_batches(self) -> Iterator[Batch]:
        return iter(self.evaluation)


def make_batches(sizes: Sequence[int], width: int = 4, classes: int = 3, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.randn(n, width, generator=generator), torch.randint(classes, (n,), generator=generator))
        for n in sizes
    ]


def constant_rate(rate: float = 0.1) -> Any:
    return lambda step: rate


def train_plainly(model: nn.Module, data: ListData, settings: TrainSettings, **options: Any) -> TrainSummary:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, data, optimizer, learning_rate_at=constant_rate(), settings=settings, **options)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class DropoutNet(nn.Module):
    """Draws from the global stream in training and, with ``noisy_eval``, in evaluation too."""

    def __init__(self, noisy_eval: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.head, self.noisy_eval = nn.Linear(4, 16), nn.Linear(16, 3), noisy_eval

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.inner(x)), 0.5, self.training or self.noisy_eval)
        if self.noisy_eval and not self.training:
            random.random()
            np.random.random()  # noqa: NPY002 (the global stream is the point)
        return self.head(hidden)


# --- C23: accumulation ---


@pytest.mark.parametrize("ignored", ["none", "some", "a whole micro-batch"])
def test_gradients_of_uneven_micro_batches_equal_those_of_all_samples_at_once(ignored: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    window = make_batches([2, 10, 3])
    for batch in window:
        if ignored == "some":
            batch.targets[::2] = -100
    if ignored == "a whole micro-batch":
        window[0].targets[:] = -100
    inputs, targets = torch.cat([b.inputs for b in window]), torch.cat([b.targets for b in window])
    nn.functional.cross_entropy(model(inputs), targets, ignore_index=-100).backward()
    expected = gradients(model)
    model.zero_grad()

    loss = accumulate_gradients(model, window, TrainSettings(steps=1))

    right_loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=-100).item()
    assert loss == pytest.approx(right_loss, abs=1e-6)
    for found, right in zip(gradients(model), expected, strict=True):
        assert (found - right).abs().max() <= 1e-6


def test_the_mean_of_means_would_fail_the_test_above() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    window = make_batches([2, 10, 3])
    accumulate_gradients(model, window, TrainSettings(steps=1))
    right = gradients(model)
    model.zero_grad()
    for batch in window:
        (loss_of(model, batch) / 3).backward()
    assert max((a - b).abs().max() for a, b in zip(gradients(model), right, strict=True)) > 0.01


def test_a_window_with_only_ignored_labels_gives_zero_gradients() -> None:
    model = nn.Linear(4, 3)
    window = make_batches([2, 2])
    for batch in window:
        batch.targets[:] = -100
    assert accumulate_gradients(model, window, TrainSettings(steps=1)) is None
    assert [float(g.abs().max()) for g in gradients(model)] == [0.0, 0.0]
    assert loss_of(model, window[0]).item() == 0.0


def test_seven_micro_batches_by_three_are_three_updates_an_epoch_and_never_cross_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    data = ListData(make_batches([2, 2, 2, 2, 2, 2, 5]))
    found = [(epoch, len(window)) for epoch, window in islice(windows(data, 3), 6)]
    assert found == [(0, 3), (0, 3), (0, 1), (1, 3), (1, 3), (1, 1)]

    rates = []
    steps: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: rates.append(opt.param_groups[0]["lr"]))

    def rate_at(step: int) -> float:
        steps.append(step)
        return 0.1 / step

    with RunRecorder(tmp_path) as recorder:
        summary = train(
            model, data, optimizer, learning_rate_at=rate_at, settings=TrainSettings(6, 3), recorder=recorder
        )
    assert steps == [1, 2, 3, 4, 5, 6]
    assert rates == [0.1 / step for step in steps]
    assert summary.steps == 6
    assert data.served[-14:] == [(epoch, index) for epoch in (0, 1) for index in range(7)]
    assert [(row["step"], row["epoch"]) for row in load_metrics(tmp_path)] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
        (5, 1),
        (6, 1),
    ]


def test_the_short_last_window_is_divided_by_its_own_count() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batches = make_batches([2, 2, 2, 2, 2, 2, 5])
    start = [p.detach().clone() for p in model.parameters()]
    data = ListData(batches)
    settings = TrainSettings(steps=3, accumulate=3, clip_norm=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, data, optimizer, learning_rate_at=lambda step: 1.0 if step == 3 else 0.0, settings=settings)
    moved = [old - p.detach() for p, old in zip(model.parameters(), start, strict=True)]
    reference = nn.Linear(4, 3)
    reference.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
    nn.functional.cross_entropy(reference(batches[6].inputs), batches[6].targets).backward()
    for found, right in zip(moved, gradients(reference), strict=True):
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0)


class LiveBytes(TorchDispatchMode):
    """The peak tracker of the cases (appendix): most bytes of storages alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: Any = weakref.WeakKeyDictionary()

    def _release(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_iter((args, kwargs or {})) if isinstance(t, Tensor)]
        given = {t.untyped_storage()._cdata for t in tensors}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in given or storage in self.known:
                continue
            self.known[storage] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, storage.nbytes())
        return out


class ChainBlock(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(64, inner), nn.Linear(inner, inner), nn.Linear(inner, inner), nn.Linear(inner, 64)]
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for part in self.parts[:3]:
            hidden = torch.tanh(part(hidden))
        return x + self.parts[3](hidden)


def test_the_peak_does_not_depend_on_the_number_of_micro_batches() -> None:
    model = nn.Sequential(ChainBlock(128), ChainBlock(128))
    peaks = {}
    for accumulate in (1, 2, 8):
        window = make_batches([512] * accumulate, width=64, classes=64)
        settings = TrainSettings(steps=1, accumulate=accumulate)
        accumulate_gradients(model, window, settings)  # gradients exist from here on
        with LiveBytes() as tracker:
            accumulate_gradients(model, window, settings)
        peaks[accumulate] = tracker.peak
    with LiveBytes() as careless:  # one graph for the whole window
        window = make_batches([512] * 8, width=64, classes=64)
        sum((micro_batch_loss(model, batch)[0] for batch in window), torch.tensor(0.0)).backward()
    assert peaks[8] == pytest.approx(peaks[2], rel=0.02)
    assert peaks[8] == pytest.approx(peaks[1], rel=0.02)
    assert careless.peak > 4 * peaks[8]


# --- the step itself ---


@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e6])
def test_training_equals_a_hand_written_torch_loop_bit_for_bit(clip_norm: float | None, tmp_path: Path) -> None:
    batches = make_batches([8, 8, 8, 3])
    rate_at = learning_rate_schedule("cosine", 0.05, 6, warmup_steps=2)
    model, reference = DropoutNet(), DropoutNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(5)
    with RunRecorder(tmp_path) as recorder:
        settings = TrainSettings(steps=6, clip_norm=clip_norm)
        train(model, ListData(batches), optimizer, learning_rate_at=rate_at, settings=settings, recorder=recorder)

    torch.manual_seed(5)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05)
    norms = []
    for step in range(1, 7):
        batch = batches[(step - 1) % 4]
        plain.param_groups[0]["lr"] = rate_at(step)
        plain.zero_grad()
        (
            nn.functional.cross_entropy(reference(batch.inputs), batch.targets, reduction="sum") / len(batch.targets)
        ).backward()
        norms.append(float(torch.sqrt(sum(((p.grad**2).sum() for p in reference.parameters()), torch.tensor(0.0)))))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        plain.step()
    for found, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, right)
    rows = load_metrics(tmp_path)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    assert [row["lr"] for row in rows] == [rate_at(step) for step in range(1, 7)]
    assert list(rows[0]) == ["step", "epoch", "train/loss", "lr", "grad_norm", "step_s", "peak_bytes"]
    assert rows[0]["peak_bytes"] is None
    assert rows[0]["step_s"] > 0


def test_starting_at_a_later_step_goes_on_in_the_middle_of_the_epoch() -> None:
    data = ListData(make_batches([2] * 7), shuffled=True)
    whole = [[id(batch) for batch in window] for _, window in islice(windows(data, 2), 10)]
    for step in (0, 1, 3, 4, 6):
        start = Position(step, epoch=step // 4, samples=4 * (step % 4), batches=2 * (step % 4))
        rest = [[id(batch) for batch in window] for _, window in islice(windows(data, 2, start), 10 - step)]
        assert rest == whole[step:]
    data.served.clear()
    next(windows(data, 2, Position(6, epoch=1, samples=8, batches=4)))
    assert len(data.served) == 2  # skipped batches are not read


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="training data is empty"):
        next(windows(ListData([]), 1))


@pytest.mark.parametrize(("every", "log_every"), [(None, 1), (1, 7), (3, 10), (100, 3)])
def test_how_often_one_evaluates_or_logs_does_not_change_the_training(every: int | None, log_every: int) -> None:
    def final_state(settings: TrainSettings) -> tuple[dict[str, Tensor], list[float]]:
        model = DropoutNet(noisy_eval=True)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        data = ListData(make_batches([4] * 5), evaluation=make_batches([4, 2], seed=9), shuffled=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, data, optimizer, learning_rate_at=constant_rate(0.01), settings=settings)
        draws = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
        return model.state_dict(), draws

    state, draws = final_state(TrainSettings(steps=12, eval_every=every, log_every=log_every))
    expected_state, expected_draws = final_state(TrainSettings(steps=12, eval_every=2))
    assert draws == expected_draws
    for name, value in state.items():
        assert torch.equal(value, expected_state[name]), name


def test_evaluation_is_the_mean_over_all_targets_and_leaves_train_flags_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()  # frozen on purpose by its user
    batches = make_batches([4, 1, 7])
    flags = [module.training for module in model.modules()]
    found = evaluate(model, ListData([], evaluation=batches), TrainSettings(steps=1))
    assert [module.training for module in model.modules()] == flags
    model.eval()
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    assert found == pytest.approx(nn.functional.cross_entropy(model(inputs), targets).item(), rel=1e-6)


def test_evaluation_lines_have_the_step_and_the_last_step_is_evaluated(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    data = ListData(make_batches([4]), evaluation=make_batches([4]))
    with RunRecorder(tmp_path) as recorder:
        settings = TrainSettings(steps=5, eval_every=2)
        summary = train_plainly(model, data, settings, recorder=recorder)
    rows = [row for row in load_metrics(tmp_path) if "eval/loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert summary.eval_loss == rows[-1]["eval/loss"]


def test_training_starts_in_train_mode_but_leaves_frozen_modules_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    train_plainly(model, ListData(make_batches([4])), TrainSettings(steps=1))
    assert [module.training for module in model] == [True, False, True]
    model.eval()
    train_plainly(model, ListData(make_batches([4])), TrainSettings(steps=1))
    assert [module.training for module in model] == [True, True, True]


def test_the_summary_averages_the_first_and_the_last_tenth(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    data = ListData([Batch(torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64))], kind="tokens")
    with RunRecorder(tmp_path) as recorder:
        summary = train_plainly(
            model,
            data,
            TrainSettings(steps=25),
            recorder=recorder,
        )
    rows = load_metrics(tmp_path)
    losses = [row["train/loss"] for row in rows]
    assert summary.first_loss == pytest.approx(sum(losses[:2]) / 2)
    assert summary.last_loss == pytest.approx(sum(losses[-2:]) / 2)
    assert summary.ended == "completed"
    seconds = sum(row["step_s"] for row in rows)
    assert summary.samples_per_s == pytest.approx(25 * 2 / seconds)
    assert summary.tokens_per_s == pytest.approx(25 * 10 / seconds)


# --- numbers that are none ---


class Poisoned(nn.Module):
    """NaN logits in the given training calls (counted from 1)."""

    def __init__(self, bad_calls: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bad_calls, self.calls = nn.Linear(4, 3), bad_calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (math.nan if self.calls in self.bad_calls else 1.0)


def test_an_update_with_nan_is_left_out_told_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Poisoned(bad_calls=[2, 4])
    with RunRecorder(tmp_path) as recorder, caplog.at_level(logging.WARNING):
        data = ListData(make_batches([4]))
        summary = train_plainly(model, data, TrainSettings(steps=5), recorder=recorder)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert summary.skipped_updates == 2
    rows = load_metrics(tmp_path)
    assert [row.get("skipped_updates") for row in rows] == [None, 1, None, 2, None]
    assert [row["train/loss"] is None for row in rows] == [False, True, False, True, False]
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if message.startswith("step 2: loss nan")]
    assert messages[-1] == "2 of the updates were skipped because of NaN or infinite values"
    assert len(messages) == 2


def test_five_bad_updates_in_a_row_end_the_run_with_the_last_good_weights() -> None:
    model = Poisoned(bad_calls=range(3, 100))
    with pytest.raises(NonFiniteError, match=r"5 updates in a row .* the last at step 7") as caught:
        train_plainly(model, ListData(make_batches([4])), TrainSettings(steps=50))
    assert (caught.value.step, caught.value.consecutive) == (7, 5)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_bad_updates_with_good_ones_between_do_not_end_the_run() -> None:
    bad = [*range(2, 6), *range(7, 11)]  # twice four in a row
    summary = train_plainly(Poisoned(bad), ListData(make_batches([4])), TrainSettings(steps=12))
    assert (summary.steps, summary.skipped_updates) == (12, 8)


class InfiniteGradient(nn.Module):
    """A finite loss whose gradient overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.training:
            out.register_hook(lambda gradient: gradient * math.inf)
        return out


def test_an_infinite_gradient_of_a_finite_loss_is_caught_too() -> None:
    model = InfiniteGradient()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError):
        train_plainly(model, ListData(make_batches([4])), TrainSettings(steps=9))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_loss_scaler_may_back_off_many_times_before_the_run_is_given_up() -> None:
    model = InfiniteGradient()
    settings = TrainSettings(steps=100, autocast_dtype=torch.float16)
    with pytest.raises(NonFiniteError) as caught:
        train_plainly(model, ListData(make_batches([4])), settings)
    # 65536 halves 16 times down to 1; from the 17th on the scale is below 1 and five more end it
    assert caught.value.step == 16 + 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_close_to_float32(dtype: torch.dtype) -> None:
    def final(settings: TrainSettings) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        summary = train_plainly(model, ListData(make_batches([8, 8])), settings)
        assert summary.skipped_updates == 0
        return [p.detach() for p in model.parameters()]

    low, full = final(TrainSettings(10, autocast_dtype=dtype)), final(TrainSettings(10))
    assert any(not torch.equal(a, b) for a, b in zip(low, full, strict=True))
    for found, right in zip(low, full, strict=True):
        torch.testing.assert_close(found, right, atol=0.02, rtol=0.02)


def test_autocast_keeps_no_copies_of_weights_and_is_off_without_a_dtype() -> None:
    with autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
    with autocast("cpu", None):
        assert not torch.is_autocast_enabled("cpu")


def test_a_low_precision_model_still_sums_its_loss_in_float32() -> None:
    model = nn.Linear(4, 3).to(torch.bfloat16)
    batch = make_batches([4000])[0]
    batch = Batch(batch.inputs.to(torch.bfloat16), batch.targets)
    loss_sum, count = micro_batch_loss(model, batch)
    assert (loss_sum.dtype, count) == (torch.float32, 4000)
    right = nn.functional.cross_entropy(model(batch.inputs).double(), batch.targets, reduction="sum")
    assert loss_sum.item() == pytest.approx(right.item(), rel=1e-6)


# --- being stopped, and being watched ---


def test_a_stop_during_a_step_ends_the_run_after_that_step() -> None:
    stop = StopFlag()
    model = Poisoned(bad_calls=[])
    model.register_forward_hook(lambda module, args, out: stop.request(15) if module.calls == 5 else None)
    settings = TrainSettings(steps=50, accumulate=2)
    data = ListData(make_batches([4] * 4))
    summary = train_plainly(model, data, settings, stop=stop)
    assert (summary.steps, summary.ended, summary.signal) == (3, "interrupted", "SIGTERM")
    assert model.calls == 6  # the window in hand was finished


def test_a_stop_during_evaluation_ends_it_at_the_next_batch_and_reports_no_loss() -> None:
    stop = StopFlag()
    model = Poisoned(bad_calls=[])
    model.register_forward_hook(lambda module, args, out: None if module.training else stop.request(2))
    data = ListData(make_batches([4]), evaluation=make_batches([4] * 10))
    settings = TrainSettings(steps=50, eval_every=1)
    summary = train_plainly(model, data, settings, stop=stop)
    assert (summary.steps, summary.ended, summary.signal, summary.eval_loss) == (1, "interrupted", "SIGINT", None)
    assert model.calls == 2


def test_a_tracker_sees_the_lines_of_the_metrics_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []

    class Listening(NoTracker):
        def log(self, row: Any) -> None:
            rows.append(dict(row))

    data = ListData(make_batches([4]), evaluation=make_batches([4]))
    with RunRecorder(tmp_path) as recorder:
        settings = TrainSettings(steps=3, eval_every=2)
        train_plainly(nn.Linear(4, 3), data, settings, recorder=recorder, tracker=Listening())
    assert rows == load_metrics(tmp_path)
    assert len(rows) == 5


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_on_cuda_each_step_has_its_peak_and_evaluation_leaves_the_device_stream_alone(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    def final_state(folder: Path, eval_every: int | None) -> list[Tensor]:
        folder.mkdir()
        model = DropoutNet(noisy_eval=True).cuda()
        torch.manual_seed(3)
        data = ListData(make_batches([64, 8]), evaluation=make_batches([4]))
        settings = TrainSettings(steps=6, eval_every=eval_every, autocast_dtype=dtype, device="cuda")
        with RunRecorder(folder) as recorder:
            summary = train_plainly(model, data, settings, recorder=recorder)
        peaks = [row["peak_bytes"] for row in load_metrics(folder) if "train/loss" in row]
        assert min(peaks) > 0
        assert summary.peak_bytes == max(peaks)
        return [p.detach().cpu() for p in model.parameters()]

    often, never = final_state(tmp_path / "often", 1), final_state(tmp_path / "never", None)
    assert all(torch.equal(a, b) for a, b in zip(often, never, strict=True))


def test_without_a_terminal_a_line_is_logged_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)
    with caplog.at_level(logging.INFO):
        settings = TrainSettings(steps=23, log_every=10)
        train_plainly(model, ListData(make_batches([4])), settings)
    assert [record.getMessage().split("  ")[0] for record in caplog.records] == [
        "step 1/23", "step 10/23", "step 20/23", "step 23/23",
    ]  # fmt: skip
    assert "lr 0.1" in caplog.records[0].getMessage()


def test_the_terminal_gets_a_bar_and_no_colour_if_it_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {}
    for no_color in (False, True):
        monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=100, color_system="standard")
        model = nn.Linear(4, 3)
        settings = TrainSettings(steps=4)
        train_plainly(
            model,
            ListData(make_batches([4])),
            settings,
            console=console,
        )
        outputs[no_color] = stream.getvalue()
    assert "4/4" in outputs[True]
    assert "\x1b[3" in outputs[False]  # a foreground colour
    assert "\x1b[3" not in outputs[True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0; expected at least 1"),
        ({"steps": 1, "accumulate": 0}, "accumulate=0; expected at least 1"),
        ({"steps": 1, "clip_norm": 0.0}, "clip_norm=0.0; expected above 0, or null"),
        ({"steps": 1, "eval_every": 0}, "eval_every=0; expected at least 1, or null"),
        ({"steps": 1, "autocast_dtype": torch.float64}, "autocast_dtype=torch.float64; expected bfloat16"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**arguments)
