"""The stage that proves a plan by real steps, on every rank of the run."""

from __future__ import annotations

import logging
import platform
import time
from dataclasses import replace

import torch
from torch import nn

from ckptplan.budget import PlannedRun
from ckptplan.certificate import Certificate
from ckptplan.engine.parallel import Parallel, make_parallel, measured_under
from ckptplan.equality import RTOL_COMPILED, mismatch_error
from ckptplan.errors import StepMismatchError
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.proof import StepProof, is_out_of_memory, pair_of_model, prove_model
from ckptplan.record import LatencyRecord, RankRecord
from ckptplan.recovery import Tightened, tighter_plan
from ckptplan.run.ending import MOST_ERROR_ON_RANKS
from ckptplan.run.planning import certify_if_eager, keep_plan
from ckptplan.run.progress import Prepared, RunInProgress, loss_fn, rtol_of
from ckptplan.run.records import gradients_record, step_times
from ckptplan.runtime import Runtime
from ckptplan.smaller_batches import let_go
from ckptplan.subject import Trials

log = logging.getLogger(__name__)

NOISY_SPREAD = 0.1  # standard deviation over median of step times, above which a note is written


def prove_or_tighten(
    run: RunInProgress, made: Prepared, planned: PlannedRun, profile: ChainProfile, certificate: Certificate | None
) -> tuple[PlannedRun, StepProof, Certificate | None]:
    """The proof of the plan, or of a tighter one where its step runs out of memory, as in training."""
    tries = run.config.oom_retries if made.engine == "single" else 0
    while True:
        try:
            return planned, prove(run, made, planned.plan), certificate
        except Exception as error:
            tighter = tighter_plan(profile, planned.plan) if tries and is_out_of_memory(error) else None
            if tighter is None:
                raise
            tries -= 1
            change = Tightened("the proof", planned.plan, tighter, str(error).partition("\n")[0])
            let_go(error)
        log.warning("%s", change.text)
        run.result.notes.append(change.text)
        planned = replace(planned, plan=tighter, note=None)
        keep_plan(run, planned, profile, time.perf_counter())
        certificate = certify_if_eager(run, made, tighter, profile)


def prove(run: RunInProgress, made: Prepared, plan: CheckpointPlan) -> StepProof:
    model, batch, runtime = made.trained.model, made.batch, made.runtime
    log.info("proving the plan by real steps, with and without it ...")
    rtol = max(rtol_of(runtime), RTOL_COMPILED if plan.compiled else 0.0)
    proof = prove_model(
        model,
        plan,
        batch,
        loss_fn(runtime),
        device=runtime.device,
        trials=Trials(run.config.proof.latency_warmup, max(1, run.config.proof.latency_trials)),
        time_steps=run.config.proof.latency_trials > 0,
        check_gradients=run.config.proof.check_gradients,
        rtol=rtol,
        check_stop=run.agreed_stop.check,
        under=None if made.engine == "single" else measured_under(lambda twin: under_engine(run, made, twin, plan)),
        run_plain=plain_step_fits(run, made),
    )
    memory, latency = run.result.memory, run.result.latency
    peaks = peaks_of_ranks(run, proof, plan, runtime)
    memory.measured_peak_bytes = max(peaks) if peaks else proof.peak_bytes
    memory.no_checkpoint_measured_peak_bytes = proof.no_checkpoint_peak_bytes
    memory.device_peak_bytes, memory.device_reserved_bytes = proof.device_peak_bytes, proof.device_reserved_bytes
    measured_bytes, budget_bytes = memory.measured_peak_bytes, run.result.budget.bytes
    if measured_bytes and plan.predicted_peak_bytes is not None:
        memory.prediction_error = (plan.predicted_peak_bytes - measured_bytes) / measured_bytes
    if measured_bytes is not None and budget_bytes is not None:
        memory.within_budget = measured_bytes <= budget_bytes
    latency.step_ms, latency.no_checkpoint_step_ms = (
        step_times(proof.step_ms),
        step_times(proof.no_checkpoint_step_ms),
    )
    latency.overhead_ratio = proof.overhead_ratio
    _note_noise(run, latency)
    run.result.gradients = gradients_record(proof.gradients, proof.gradients_note)
    if proof.out_of_memory == "planned":
        raise torch.cuda.OutOfMemoryError("the planned step does not fit the device")
    run.ranks.together(lambda: require_equal_gradients(run, made, plan, proof, rtol))
    return proof


def require_equal_gradients(
    run: RunInProgress, made: Prepared, plan: CheckpointPlan, proof: StepProof, rtol: float
) -> None:
    if proof.gradients is None or proof.gradients.passed:
        return
    if run.ranks.size > 1:  # to find the block takes steps, in which the others have no part
        faults = proof.gradients.faults
        message = f"rank {run.ranks.rank}: the planned step differs from the unplanned one: {'; '.join(faults[:5])}"
        raise StepMismatchError(message, faults=faults)
    model, runtime = made.trained.model, made.runtime
    pair = pair_of_model(model, plan, made.batch, loss_fn(runtime), runtime.device)
    raise mismatch_error(pair, plan, proof.gradients, rtol, 0.0)


def under_engine(run: RunInProgress, made: Prepared, model: nn.Module, plan: CheckpointPlan) -> Parallel:
    """``model`` under the engine of the run."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and name not in made.gradient_order]
    return make_parallel(made.engine, model, plan, run.ranks, unused)


def plain_step_fits(run: RunInProgress, made: Prepared) -> bool:
    """Whether the step without the plan is run: with several ranks it must not fail on one of them."""
    if run.ranks.size == 1 or made.runtime.device.type != "cuda":
        return True
    needed_bytes = run.ranks.largest(run.result.memory.no_checkpoint_predicted_peak_bytes or 0)
    free_bytes = -run.ranks.largest(-torch.cuda.mem_get_info(made.runtime.device)[0])
    return needed_bytes * (1 + MOST_ERROR_ON_RANKS) + (made.static.total_bytes or 0) < free_bytes


def peaks_of_ranks(run: RunInProgress, proof: StepProof, plan: CheckpointPlan, runtime: Runtime) -> list[int]:
    """The measured peak of each rank, recorded with its prediction; none with one process."""
    if run.ranks.size == 1:
        return []
    predicted, budget_bytes = plan.predicted_peak_bytes, plan.budget_bytes
    found = run.ranks.gather((proof.peak_bytes, platform.node(), str(runtime.device)))
    for rank, (measured, host, device) in enumerate(found):
        error = (predicted - measured) / measured if measured and predicted is not None else None
        fits = None if measured is None or budget_bytes is None else measured <= budget_bytes
        run.result.engine.per_rank.append(RankRecord(rank, host, device, predicted, measured, error, fits))
    return [measured for measured, _, _ in found if measured is not None]


def _note_noise(run: RunInProgress, latency: LatencyRecord) -> None:
    spreads = [t.std / t.p50 for t in (latency.step_ms, latency.no_checkpoint_step_ms) if t.std and t.p50]
    if spreads and max(spreads) > NOISY_SPREAD:
        run.result.notes.append(
            f"step times scatter by {max(spreads):.0%}: the machine is busy, take the time added with care "
            "(proof.latency_trials=20 helps)"
        )
