"""The stages that measure the blocks of a run, plan them, and certify the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from ckptplan.budget import PlannedRun, plan_for_budget
from ckptplan.certificate import Certificate, certify
from ckptplan.curve import plan_curve
from ckptplan.data import Batch
from ckptplan.dry_run import verify_plan
from ckptplan.engine.parallel import sharding_of, sharding_units
from ckptplan.engine.planning import plan_sharded, same_plan
from ckptplan.engine.worst import worst_profile
from ckptplan.errors import DryRunError, InfeasibleTargetError
from ckptplan.footprint import room_of
from ckptplan.largest_shapes import named_in, plan_for_all
from ckptplan.nodes import Compiled, CompiledModel, blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.record import CertificateRecord
from ckptplan.report.tables import footprint_table, plan_table
from ckptplan.run.estimate import plan_footprint, record_footprint
from ckptplan.run.profiling import profile_blocks_of_run, stored_profile
from ckptplan.run.progress import Prepared, RunInProgress, loss_fn, loss_fn_without_values
from ckptplan.run.records import decision_word, plan_record, predicted_overhead_ratio, recompute_flops_ratio
from ckptplan.simulate import PlanCost, no_checkpoint_peak, simulate_plan
from ckptplan.training import to_device

log = logging.getLogger(__name__)


def tell_rows(run: RunInProgress, made: Prepared, planned: PlannedRun, profile: ChainProfile) -> None:
    """With ``budget=auto``: all of the device's memory, row by row."""
    if run.config.target.key != "auto" or made.is_sharded or not run.ranks.is_first:
        return
    room = room_of(made.runtime.device, made.static.weights_bytes + made.static.batch_bytes)
    rows = plan_footprint(room, made.static, profile, planned.plan)
    record_footprint(run.result, rows)
    footprint_table(room.title, rows, run.console)


def profile_and_plan(run: RunInProgress, made: Prepared, made_for: dict[str, Any]) -> tuple[PlannedRun, ChainProfile]:
    """The plan of all ranks and the profile that its figures are from: what was stored, or measured now."""
    stored = None if run.stored is None else run.stored.planned(made_for)
    profile = run.ranks.from_first(lambda: stored_profile(run.folder, stored, made.selection, run.result))
    if profile is not None and stored is not None and stored.plan.fingerprint == profile.fingerprint:
        planned, plain = stored, profile
    else:  # the figures of the stored plan are not those of another measurement
        planned = None
        measured = run.ranks.together(lambda: profile_of_run(run, made))
        plain = worst_profile([ChainProfile.from_json(text) for text in run.ranks.gather(measured.to_json())])
        plain.save(run.folder / "profile.json")  # it took time, and stays also where no plan fits
    found: list[ChainProfile] = []

    def plan() -> PlannedRun:
        made_now, used = plan_with_figures(run, made, plain, planned)
        found.append(used)
        return made_now

    agreed = same_plan(run.ranks, plan)
    profile = run.ranks.gather(found[0] if found else plain)[0]
    profile.save(run.folder / "profile.json")
    return agreed, profile


def profile_of_run(run: RunInProgress, made: Prepared) -> ChainProfile:
    return profile_blocks_of_run(
        run.config,
        run.result,
        made.measured,
        made.selection,
        made.batch,
        made.runtime,
        loss_fn(made.runtime),
        run.stop.check,
        is_sharded=made.is_sharded,
    )


def plan_with_figures(
    run: RunInProgress, made: Prepared, profile: ChainProfile, stored: PlannedRun | None
) -> tuple[PlannedRun, ChainProfile]:
    """The plan, and the profile its figures are from: with what an engine holds beside activations."""
    start_s = time.perf_counter()
    run.result.memory.no_checkpoint_predicted_peak_bytes = no_checkpoint_peak(profile)

    def make(seen: ChainProfile, reserve_bytes: int) -> PlannedRun:
        device = torch.device(run.result.device or "cpu")
        return plan_for_budget(seen, run.config, made.static, device, reserve_bytes)

    if stored is not None:
        planned = stored
    elif made.is_sharded:
        names = dict.fromkeys(modules_of(profile.block_ids))
        sharding = sharding_of(made.trained.model, list(names), made.gradient_order, run.ranks.data_size)
        planned, profile = plan_sharded(profile, sharding, make)
        units = sharding_units(planned.plan)
        run.result.engine.gathered_weights_bytes = sharding.most_gathered_bytes(units)
    elif made.cut is not None:
        planned = make(profile, 0)
    else:
        planned = plan_for_shapes(run, made, lambda reserve_bytes: make(profile, reserve_bytes))
    keep_plan(run, planned, profile, start_s)
    return planned, profile


def plan_for_shapes(run: RunInProgress, made: Prepared, make: Callable[[int], PlannedRun]) -> PlannedRun:
    """A plan for the largest batch of the data, and for others that are large in another way."""
    runtime, notes = made.runtime, list[str]()

    def peak_of(plan: CheckpointPlan, batch: Batch) -> int:
        own = to_device(batch, runtime.device)
        return verify_plan(made.trained.model, plan, own, loss_fn_without_values(runtime, own)).peak_bytes

    try:
        planned = plan_for_all(made.shapes, make, peak_of, notes)
    except InfeasibleTargetError as error:
        raise named_in(error, made.shapes) from None
    for note in notes:
        log.info("%s", note)
    run.result.notes += notes
    return planned


def keep_plan(run: RunInProgress, planned: PlannedRun, profile: ChainProfile, start_s: float) -> None:
    """The plan into the result, the run folder, the console and the tracker."""
    plan, memory = planned.plan, run.result.memory
    if planned.note is not None:
        log.warning("%s", planned.note)
        run.result.notes.append(planned.note)
    run.result.timing.plan_s = time.perf_counter() - start_s
    run.result.budget.bytes, run.result.budget.margin_bytes = planned.budget_bytes, planned.margin_bytes
    memory.no_checkpoint_predicted_peak_bytes = plan.no_checkpoint_peak_bytes
    memory.predicted_peak_bytes, memory.peak_at = plan.predicted_peak_bytes, plan.predicted_peak_at
    memory.smallest_reachable_bytes = planned.smallest_reachable_bytes
    run.result.plan = plan_record(planned)
    cost = simulate_plan(profile, plan)
    run.result.latency.predicted_overhead_ratio = predicted_overhead_ratio(profile, cost)
    run.result.latency.recompute_flops_ratio = recompute_flops_ratio(profile, cost)
    plan.save(run.folder / "plan.json")
    plan_table(profile, plan, run.console, planner=run.config.planner.name)
    _track_plan(run, profile, plan, cost)


def certify_if_eager(
    run: RunInProgress, made: Prepared, plan: CheckpointPlan, profile: ChainProfile
) -> Certificate | None:
    if not run.ranks.is_first:
        return None
    if plan.compiled:
        run.result.notes.append(
            "no certificate and no trade-off curve: they compare eager plans, and blocks of this one run compiled"
        )
        return None
    return certify_plan(run, made, plan, profile)


def certify_plan(run: RunInProgress, made: Prepared, plan: CheckpointPlan, profile: ChainProfile) -> Certificate:
    """How good the plan is, by solvers and by a dry run; and the whole trade-off that it is a point of."""
    certificate = certify(profile, plan)
    batch = made.batch
    try:
        if made.is_sharded:
            raise DryRunError("it would not see the weights that are gathered")
        if made.cut is not None:
            raise DryRunError("it does not run over a mesh of ranks")
        found = verify_plan(made.trained.model, plan, batch, loss_fn_without_values(made.runtime, batch))
        certificate = replace(
            certificate,
            dry_run_peak_bytes=found.peak_bytes,
            operator=found.operator,
            block=found.block,
            phase=found.phase,
        )
    except DryRunError as error:
        run.result.notes.append(f"no dry run: {error}")
    keep_certificate(run, certificate, profile)
    return certificate


def keep_certificate(run: RunInProgress, certificate: Certificate, profile: ChainProfile) -> None:
    certificate.save(run.folder / "certificate.json")
    known = {field.name: getattr(certificate, field.name) for field in fields(CertificateRecord)}
    run.result.certificate = CertificateRecord(**known)
    log.info("certificate: %s", certificate.text)
    curve = plan_curve(profile, cost=certificate.cost_kind)  # type: ignore[arg-type]  # a plan is read strictly
    curve.save(run.folder / "curve.json")
    log.info("trade-off: %s", curve.text)


def _track_plan(run: RunInProgress, profile: ChainProfile, plan: CheckpointPlan, cost: PlanCost) -> None:
    compiled = set(blocks_of([node for node in plan.nodes if isinstance(node, (Compiled, CompiledModel))]))
    rows = [
        (d.block_id, decision_word(d, is_compiled=i in compiled), d.retained_bytes, d.recompute_time_ms, d.reason)
        for i, d in enumerate(plan.decisions)
    ]
    run.tracker.table("plan", ("block", "decision", "retained_bytes", "recompute_time_ms", "why"), rows)
    levels = [(float(i), level_bytes / 2**20) for i, (_, _, level_bytes) in enumerate(cost.timeline)]
    run.tracker.curve("memory_over_step", ("stage", "MiB"), levels)
    kept = [(float(i), (d.retained_bytes or 0) / 2**20) for i, d in enumerate(plan.decisions)]
    run.tracker.curve("plan_strip", ("block", "MiB kept"), kept)
    if run.config.logger.kind != "none":
        curve = plan_curve(profile, nested=False, cost=run.config.cost)  # type: ignore[arg-type]  # checked by load_config
        points = [(point.peak_bytes / 2**20, float(point.cost)) for point in curve.points]
        run.tracker.curve("tradeoff", ("peak MiB", "added"), points)
