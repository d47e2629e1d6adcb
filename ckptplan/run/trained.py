"""The stage that trains under the plan, and what it records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptplan.budget import PlannedRun
from ckptplan.peak_watch import TOLD_FROM, PeakWatch
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.randomness import seed_everything, seed_of_rank
from ckptplan.record import TrainingRecord, load_metrics
from ckptplan.recovery import Recovery, tighter_plan
from ckptplan.resuming import restore_random, stored_form
from ckptplan.run.progress import Prepared, RunInProgress
from ckptplan.run.proving import under_engine
from ckptplan.run.records import plan_record
from ckptplan.targets import call_partial
from ckptplan.training import Position, TrainSummary, train

log = logging.getLogger(__name__)

WATCHED_ON_CPU = 100  # steps of which the peak of one is measured, which takes that step a multiple of its time


def train_planned(
    run: RunInProgress,
    made: Prepared,
    planned: PlannedRun,
    profile: ChainProfile,
    made_for: dict[str, Any],
    streams: dict[str, Any] | None,
) -> TrainSummary:
    start_s = time.perf_counter()
    trained = made.trained
    recovery = Recovery(
        trained.model,
        planned.plan,
        lambda plan: tighter_plan(profile, plan),
        device=trained.device,
        tries=run.config.oom_retries if made.engine == "single" else 0,  # an engine's state cannot be stepped back
        on_taken=lambda plan: keep_taken(run, replace(planned, plan=plan), made_for),
    )
    parallel = under_engine(run, made, trained.model, planned.plan)
    if made.is_sharded:
        parameters = trained.model.parameters()  # shards now
        optimizer = call_partial(made.make_optimizer, run.config.optimizer, "optimizer", parameters)
        trained = replace(trained, optimizer=optimizer, is_sharded=True)
        streams = run.go_on(trained)
    run.states.begin(trained, stored_form(planned, made_for), run.resolved)
    run.result.timing.apply_s = time.perf_counter() - start_s
    start = Position() if run.stored is None else run.stored.start(trained.batch_size)
    watch = watch_of(run, made, profile, lambda: recovery.plan, start.step)
    losses = [row["train/loss"] for row in load_metrics(run.folder) if row.get("train/loss") is not None]
    if run.ranks.data_rank or (run.stored is not None and streams is None):
        seed_everything(seed_of_rank(run.config.seed, run.ranks.data_rank, start.step))
    if streams is not None:  # last, so that nothing draws or seeds after it
        restore_random(streams, trained.device, run.result.notes)
    try:
        summary = train(
            parallel,
            trained.data,
            trained.optimizer,
            learning_rate_at=made.schedule,
            settings=made.settings,
            recorder=run.recorder,
            tracker=run.tracker,
            stop=run.agreed_stop,
            start=start,
            earlier_losses=losses,
            scaler=trained.scaler,
            after_step=run.states.after_step,
            console=run.console,
            gradients_of=watch.gradients(recovery.gradients),
            further_figures=watch.figures,
        )
    finally:
        recovery.remove()
        note_peak(run, watch)
        run.result.training.oom_recoveries = len(recovery.tightened)
        run.result.notes += [each.text for each in recovery.tightened]
    run.result.timing.train_s = summary.train_s
    run.result.training = TrainingRecord(
        summary.steps,
        summary.first_loss,
        summary.last_loss,
        summary.samples_per_s,
        summary.tokens_per_s,
        oom_recoveries=len(recovery.tightened),
    )
    run.states.at_end(summary.position)
    return summary


def watch_of(
    run: RunInProgress, made: Prepared, profile: ChainProfile, plan_of: Callable[[], CheckpointPlan], start_step: int
) -> PeakWatch:
    """What measures steps of this training; an engine holds more than a plan knows of: there none is."""
    device, every = made.runtime.device, run.config.watch_peak_every
    if every is None:
        every = 1 if device.type == "cuda" else WATCHED_ON_CPU
    if made.engine != "single":
        every = 0
    return PeakWatch(
        made.trained.model, profile, plan_of, made.batch, device=device, every=every, start_step=start_step
    )


def note_peak(run: RunInProgress, watch: PeakWatch) -> None:
    if watch.worst is None:
        return
    memory, worst = run.result.memory, watch.worst
    memory.training_peak_bytes, memory.training_drift = worst.measured_bytes, worst.drift
    memory.training_expected_bytes = [worst.low_bytes, worst.high_bytes]
    steps = "1 step" if watch.num_measured == 1 else f"{watch.num_measured} steps"
    log.info("%s of training measured; furthest from the plan: %s", steps, worst.text)
    if worst.drift > TOLD_FROM:
        run.result.notes.append(worst.text)


def keep_taken(run: RunInProgress, planned: PlannedRun, made_for: dict[str, Any]) -> None:
    """The tighter plan that training goes on with; measured figures stay those of the plan that was proven."""
    run.states.replan(stored_form(planned, made_for))
    run.result.plan = plan_record(planned)
    planned.plan.save(run.folder / "plan.json")
