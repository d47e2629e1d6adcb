"""One run, from the typed configuration to ``result.json``: the data path in order.

runtime -> data -> model -> blocks -> profile -> plan -> proof by real steps -> training -> record

A run that goes on (``resume=``) takes its state in after the model, and leaves its folder as it was until then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptplan.budget import plan_for_budget
from ckptplan.certificate import certify
from ckptplan.config import RunConfig
from ckptplan.config.loading import config_hash
from ckptplan.devices import DEVICES
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.tensor import require_same
from ckptplan.record import BudgetRecord, EngineRecord, RunRecorder, RunResult, environment, exit_code
from ckptplan.report.page import try_write_report
from ckptplan.report.records import is_job_of_sweep
from ckptplan.report.tables import result_table
from ckptplan.resuming import RunStates, plan_made_for
from ckptplan.run.ending import ended, final_status, is_finished
from ckptplan.run.estimate import AbsentDevice, record_profile
from ckptplan.run.planning import certify_if_eager, keep_certificate, keep_plan, profile_and_plan, tell_rows
from ckptplan.run.preparing import build_data, build_model, find_shapes, note_static_bytes, prepare, runtime_of_run
from ckptplan.run.progress import RunInProgress, changes_since, loss_fn, rtol_of
from ckptplan.run.proving import prove_or_tighten
from ckptplan.run.records import short_name
from ckptplan.run.trained import train_planned
from ckptplan.simulate import no_checkpoint_peak
from ckptplan.stopping import StopFlag
from ckptplan.targets import call_partial, instantiate
from ckptplan.tracking import open_tracker

log = logging.getLogger(__name__)


def run_job(
    config: RunConfig,
    *,
    resolved: dict[str, Any],
    folder: Path,
    overrides: list[str],
    on_begin: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> int:
    """Do everything a run does and return its exit code (docs/design.md, section 7).

    Args:
        config, resolved: the run, typed and as plain resolved values.
        folder: a folder that exists; all files of the run go there. Empty, or that of the run to go on with.
        overrides: what was typed, for the record.
        on_begin: called once the configuration is known to describe a run, before anything is measured.
        ranks: the processes that do it together, each of which calls this; rank 0 writes the files.

    Raises:
        ConfigError: the configuration does not describe a run.
        Exception: anything unexpected. Either way ``result.json`` says "failed" and why.
    """
    ranks = ranks or Ranks()
    result = RunResult(
        name=config.name, config_hash=config_hash(resolved), planner=config.planner.name, seed=config.seed
    )
    result.budget = BudgetRecord(config.target.key, config.target.value)
    result.environment = {**environment(), "overrides": " ".join(overrides)}
    result.engine = EngineRecord(config.engine.kind, ranks.size, ranks.tensor_size)
    logger = config.logger
    tracker = open_tracker(
        logger.kind if ranks.is_first else "none",  # type: ignore[arg-type]  # checked by load_config
        folder,
        project=logger.project,
        mode=logger.mode,  # type: ignore[arg-type]  # checked by load_config
        entity=logger.entity,
        tags=[*logger.tags, config.planner.name, short_name(config.model)],
        job_type="plan" if config.plan_only else "train",
    )
    start_s = time.perf_counter()
    with (
        StopFlag() as stop,
        RunStates(folder, config.state, result.state, result.notes, ranks) as states,
        _own_folder(folder, ranks) as own_folder,
    ):
        stored = states.find(config.resume)
        if stored is not None and stored.position.step >= config.steps:
            stored = states.checked(stored)
            if is_finished(config, stored):
                log.info("%s is finished: step %d. To train on: steps=<more than that>", folder, stored.position.step)
                for change in changes_since(stored, resolved):
                    log.info("without effect: %s", change)
                return 0
        with RunRecorder(own_folder) as recorder:
            run = RunInProgress(
                config,
                resolved,
                own_folder,
                overrides,
                result,
                recorder,
                tracker,
                stop,
                states,
                stored,
                on_begin,
                ranks,
            )
            if stored is None:
                run.accept()
            try:
                with ended(result, stop, states, ranks):
                    _all_stages(run)
            finally:
                result.timing.total_s = time.perf_counter() - start_s
                _finish(run)
    return exit_code(result.status, stop.signal_number)


@contextlib.contextmanager
def _own_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Where this rank's records go: rank 0 writes those of the run, the others' are thrown away."""
    if ranks.is_first:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f"ckptplan-rank{ranks.rank}-") as own:
        yield Path(own)


def _all_stages(run: RunInProgress) -> None:
    if run.config.runtime.device in DEVICES:
        _plan_for_absent(run)
        return
    made = run.ranks.together(lambda: prepare(run))
    if made.cut is not None:
        require_same(made.trained.model, made.cut, run.ranks, rtol_of(made.runtime))
    runtime, batch = made.runtime, made.batch
    streams = None
    if not made.is_sharded:  # a sharded model is filled when there are shards
        streams = run.go_on(made.trained)
    if run.ranks.is_first:
        run.on_begin()
    run.tracker.start(run.resolved, run.config.name or run.folder.name, run.config.logger.group)
    run.is_started = True
    made_for = plan_made_for(run.config, batch, runtime.device_name, run.ranks)
    planned, profile = profile_and_plan(run, made, made_for)
    tell_rows(run, made, planned, profile)
    certificate = run.ranks.together(lambda: certify_if_eager(run, made, planned.plan, profile))
    if run.config.plan_only:
        run.result.status = "ok" if planned.plan.feasible else "over_budget"
        return
    planned, proof, certificate = prove_or_tighten(run, made, planned, profile, certificate)
    if certificate is not None:
        replace(certificate, measured_peak_bytes=proof.peak_bytes).save(run.folder / "certificate.json")
    summary = train_planned(run, made, planned, profile, made_for, streams)
    run.result.status = final_status(run, planned.plan, summary)


def _plan_for_absent(run: RunInProgress) -> None:
    """All stages of a run whose device is not there: nothing is measured, nothing trained."""
    start_s = time.perf_counter()
    runtime = runtime_of_run(run)
    data = build_data(run)
    model = build_model(run, data, runtime)
    batch = find_shapes(run, data).batch
    make_optimizer = instantiate(run.config.optimizer, "optimizer")
    optimizer = call_partial(make_optimizer, run.config.optimizer, "optimizer", model.parameters())
    run.on_begin()
    run.tracker.start(run.resolved, run.config.name or run.folder.name, run.config.logger.group)
    run.is_started = True
    check_stop = run.stop.check
    absent = AbsentDevice.of(run.config, runtime, model, batch, optimizer, loss_fn(runtime), check_stop)
    record_profile(run.result, absent.profile, run.folder, start_s)
    note_static_bytes(run, absent.static)
    start_s = time.perf_counter()
    run.result.memory.no_checkpoint_predicted_peak_bytes = no_checkpoint_peak(absent.profile)
    planned = plan_for_budget(absent.profile, run.config, absent.static, torch.device("cuda"), room=absent.room)
    keep_plan(run, planned, absent.profile, start_s)
    keep_certificate(run, certify(absent.profile, planned.plan), absent.profile)
    absent.tell(planned.plan, run.result, run.console)
    run.result.status = "ok" if planned.plan.feasible else "over_budget"


def _finish(run: RunInProgress) -> None:
    """Write the result, show it, and end the tracker, whatever happened. A run not gone on with stays as it was."""
    if not run.is_accepted:
        return
    path = run.recorder.write_result(run.result)
    plain = json.loads(path.read_text(encoding="utf-8"))
    if run.is_started:
        run.tracker.summary(plain)
        run.tracker.finish(run.result.status)
    page = None
    if (
        run.config.report and run.ranks.is_first and not is_job_of_sweep(run.folder)
    ):  # a sweep writes one page for all its jobs
        page = try_write_report(run.folder)
    if run.result.memory.predicted_peak_bytes is not None:
        files = {"run folder": str(run.folder), "result": str(path), "plan": str(run.folder / "plan.json")}
        if run.result.state.path is not None:
            files["state"] = run.result.state.path
        result_table(plain, run.console, files if page is None else {**files, "page": str(page)})
