"""The stage of a run that finds out what its blocks cost: measured, shared with other runs, or from before."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ckptplan.autofit import has_host_apart
from ckptplan.blocks import BlockSelection, model_fingerprint
from ckptplan.budget import PlannedRun
from ckptplan.check import check_plan
from ckptplan.compiled_choices import COMPILED_BUDGETS
from ckptplan.compiled_model import COMPILED_MODEL_BUDGETS
from ckptplan.config import PlannerConfig, RunConfig
from ckptplan.data import Batch
from ckptplan.errors import BlockDeclarationError, CkptplanError, ConfigError, UnsupportedBoundaryError
from ckptplan.measure import profile_model
from ckptplan.nodes import Compiled, Offload, PlanNode, Selective, compiled_model, parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import PLANNERS_THAT_COMPILE, PLANNERS_WITH_OPTIONS
from ckptplan.profile_cache import SharedProfile, profile_key, shared_profile
from ckptplan.profiles import ChainProfile, name_some
from ckptplan.record import ProfileRecord, RunResult
from ckptplan.runtime import Runtime
from ckptplan.smaller_batches import profile_or_scale
from ckptplan.subject import LossFn

log = logging.getLogger(__name__)


def profile_blocks_of_run(
    config: RunConfig,
    result: RunResult,
    model: nn.Module,
    selection: BlockSelection,
    batch: Batch,
    runtime: Runtime,
    loss_fn: LossFn,
    check_stop: Callable[[], None],
    *,
    is_sharded: bool = False,
) -> ChainProfile:
    """What the blocks of the run cost on this rank; fills ``result.profile`` and its time.

    ``is_sharded``: parameter gradients come anew in each step, as under FSDP2.

    Raises ``ConfigError`` where the blocks cannot be profiled.
    """
    start_s = time.perf_counter()
    with_options, given = _measures_options(config, result), given_parts(config.planner)
    budgets, model_budgets = compiled_budgets(config.planner)
    offload = measures_offload(config, is_apart=has_host_apart(runtime.device))
    if model_budgets and config.engine.kind != "single":
        if config.planner.name not in PLANNERS_THAT_COMPILE:
            raise ConfigError(
                f"engine={config.engine.kind}: a model compiled as one graph runs under engine=single alone; plan "
                "block by block (C0[0.5] C1[0.5] ...), or leave engine out"
            )
        model_budgets = ()  # it would make all gradients, or gather all weights, at once

    def measure() -> ChainProfile:
        found = profile_or_scale(measure_batch, batch)
        if found.note is not None:
            result.notes.append(found.note)
        return found.profile

    def measure_batch(batch: Batch) -> ChainProfile:
        told = ", each kind compiled in several ways, which can take minutes" if budgets else ""
        log.info("profiling %d blocks%s ...", len(selection.blocks), told)
        return profile_model(
            model,
            selection.blocks,
            batch,
            loss_fn,
            device=runtime.device,
            num_warmup=config.profile.num_warmup,
            num_trials=config.profile.num_trials,
            selective=given if with_options and given else with_options,
            compiled_budgets=budgets,
            compiled_model_budgets=model_budgets,
            check_stop=check_stop,
            offload=offload,
            gradients_stand=not is_sharded,
        )

    try:
        if config.profile.cache is None:
            profile = measure()
            result.profile = ProfileRecord("measured", None, time.perf_counter() - start_s)
        else:
            shared = shared_profile(
                Path(config.profile.cache),
                _profile_key(
                    config,
                    model,
                    batch,
                    runtime,
                    [*budgets, "model", *model_budgets] if budgets else [],
                    given,
                    offload,
                    is_sharded,
                ),
                measure,
                with_options=with_options,
                fingerprint=model_fingerprint(selection.blocks),
                check_stop=check_stop,
            )
            profile = _take_shared(shared, result)
    except (BlockDeclarationError, UnsupportedBoundaryError) as error:
        raise ConfigError(f"{error}\n  see blocks.paths in docs/configuration.md") from error
    result.notes += _left_eager(profile) if budgets else []
    result.timing.profile_s = time.perf_counter() - start_s
    kinds = len({block.kind for block in profile})
    of_kinds = f"{kinds} kind" if kinds == 1 else f"{kinds} kinds"
    how = "measured" if result.profile.source == "measured" else f"read from {result.profile.file}"
    log.info("profile: %d blocks of %s %s in %.1f s", len(profile), of_kinds, how, result.timing.profile_s)
    return profile


def stored_profile(
    folder: Path, planned: PlannedRun | None, selection: BlockSelection, result: RunResult
) -> ChainProfile | None:
    """The profile that the stored plan was made from, if it still is one of these blocks."""
    if planned is None or planned.plan.fingerprint != model_fingerprint(selection.blocks):
        return None
    try:
        profile = ChainProfile.load(folder / "profile.json")
        check_plan(profile, planned.plan)  # a part of the run that saved no state may have measured since
    except (OSError, ValueError, RecursionError, CkptplanError) as error:  # damaged, or of another version
        log.warning("the blocks are measured again and the plan is made anew: %s", error)
        return None
    if profile.fingerprint != planned.plan.fingerprint:
        return None
    result.profile = ProfileRecord("resumed", str(folder / "profile.json"), None)
    log.info("profile and plan: those of before")
    return profile


def _profile_key(
    config: RunConfig,
    model: nn.Module,
    batch: Batch,
    runtime: Runtime,
    compiled: list[float | str],
    given: tuple[tuple[str, ...], ...],
    offload: bool,
    is_sharded: bool,
) -> str:
    settings: dict[str, Any] = {
        "model": config.model,
        "data": {key: value for key, value in config.data.items() if key != "seed"},
        "blocks": config.blocks.paths,
        "dtype": str(config.runtime.dtype),
        "trials": [config.profile.num_warmup, config.profile.num_trials],
    }
    if is_sharded:
        settings["gradients"] = "fresh"
    if config.engine.tp > 1:
        settings["tensor_parallel"] = [config.engine.tp, config.engine.tp_plan]
    if compiled:
        settings["compiled_budgets"] = compiled
    if given:
        settings["given_parts"] = given
    if offload:
        settings["offload"] = True
    return profile_key(model, (batch.inputs, batch.targets), settings, runtime.device_name)


def _take_shared(shared: SharedProfile, result: RunResult) -> ChainProfile:
    for note in shared.notes:
        log.warning("%s", note)
        result.notes.append(note)
    source = "measured" if shared.is_new else "shared"
    result.profile = ProfileRecord(source, None if shared.path is None else str(shared.path), shared.measured_s)
    return shared.profile


def _left_eager(profile: ChainProfile) -> list[str]:
    """Why blocks, or the model as one graph, were not compiled though that was asked for."""
    by_reason: dict[str, list[str]] = {}
    for block in profile:
        for warning in block.warnings:
            if warning.startswith("not compiled"):
                by_reason.setdefault(warning, []).append(block.block_id)
    return [f"{name_some(ids)}: {warning}" for warning, ids in by_reason.items()] + list(profile.warnings)


def _measures_options(config: RunConfig, result: RunResult) -> bool:
    """Whether options inside blocks are found and measured: for planners that choose them, and plans that do."""
    wants = _wants_options(config.planner)
    if not (wants or config.profile.options):
        return False
    if importlib.util.find_spec("scipy") is None:
        if wants:
            result.notes.append(
                "options inside blocks were left out: finding them needs scipy (pip install -e '.[solvers]')"
            )
        return False
    return True


def measures_offload(config: RunConfig, *, is_apart: bool) -> bool:
    """Whether blocks are also measured with their activations on the host: where a planner or plan may use that.

    ``is_apart``: the device has memory of its own.
    """
    planner, wanted = config.planner, config.profile.offload
    is_given = any(isinstance(node, Offload) for node in _given_nodes(planner))
    if config.engine.kind != "single" or config.runtime.shards > 1:
        if is_given or wanted == "always":
            where = "engine=fsdp2" if config.engine.kind == "single" else f"engine={config.engine.kind}"
            raise ConfigError(
                f"{where}: activations go to the host under engine=single alone\n"
                "  type: profile.offload=never, and a plan without O nodes"
            )
        return False
    if is_given or wanted == "always":
        return True
    return wanted == "auto" and is_apart and planner.name in PLANNERS_WITH_OPTIONS and config.cost == "time"


def _wants_options(planner: PlannerConfig) -> bool:
    """A plan that is given in text or in a file wants them where it keeps part of a block."""
    if planner.text is None and planner.path is None:
        return planner.name in PLANNERS_WITH_OPTIONS
    return bool(given_parts(planner))


def given_parts(planner: PlannerConfig) -> tuple[tuple[str, ...], ...]:
    """What a plan in text or in a file keeps inside its blocks.

    It is measured whatever the search finds: times differ from one measuring to the next, and with them the options.
    """
    nodes = _given_nodes(planner)
    return tuple(sorted({node.saved_ops for node in nodes if isinstance(node, Selective) and node.saved_ops}))


def _given_nodes(planner: PlannerConfig) -> tuple[PlanNode, ...]:
    try:
        if planner.text is not None:
            return parse_plan_text(planner.text)
        if planner.path is not None:
            return CheckpointPlan.load(planner.path).nodes
    except (OSError, ValueError, CkptplanError):  # the planner tells what is wrong with it
        pass
    return ()


def compiled_budgets(planner: PlannerConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Budgets with which blocks, and the model as one graph, are compiled.

    Those that the planner chooses among, or that a given plan names.
    """
    if planner.name in PLANNERS_THAT_COMPILE:
        return COMPILED_BUDGETS, COMPILED_MODEL_BUDGETS
    nodes = _given_nodes(planner)
    whole = compiled_model(nodes)
    if whole is not None:
        return (1.0,), (whole.budget,)  # it is measured beside compiled blocks
    return tuple(sorted({node.budget for node in nodes if isinstance(node, Compiled)})), ()
