"""The first stages of a run: runtime, data, model and blocks, before anything is measured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import BlockSelection, select_blocks
from ckptplan.compiling import require_compiler
from ckptplan.config.wording import config_error
from ckptplan.data import Batch
from ckptplan.data.dataset import Dataset
from ckptplan.data.loading import CAN_HAVE_WORKERS
from ckptplan.data.spec import explain_mismatch
from ckptplan.discovery import find_blocks
from ckptplan.engine.parallel import gradient_order, shards
from ckptplan.engine.shares import SharedData
from ckptplan.engine.tensor import cut_model
from ckptplan.errors import (
    MODEL_ERRORS,
    BlockDeclarationError,
    CompilerMissingError,
    ConfigError,
    PlanIncompatibleError,
)
from ckptplan.footprint import StaticBytes, optimizer_step_bytes, static_bytes
from ckptplan.largest_shapes import LargestShapes, find_largest
from ckptplan.nodes import Selective, nodes_text, parse_plan_text
from ckptplan.optim import learning_rate_schedule
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import is_out_of_memory
from ckptplan.randomness import random_state_restored
from ckptplan.resuming import Trained
from ckptplan.run.batch import choose_batch, is_budget_of, with_micro_batch
from ckptplan.run.profiling import compiled_budgets
from ckptplan.run.progress import Prepared, RunInProgress, loss_fn
from ckptplan.run.records import short_name
from ckptplan.runtime import Runtime, choose_runtime
from ckptplan.targets import call_partial, instantiate
from ckptplan.training import TrainSettings, make_scaler, to_device
from ckptplan.twin import make_twin

log = logging.getLogger(__name__)


def prepare(run: RunInProgress) -> Prepared:
    """Everything that stands before blocks are measured, with the micro-batch that the run asks for."""
    if run.config.batch != "fixed" and run.stored is not None and is_budget_of(run.config, run.stored):
        assert run.stored.batch_size is not None
        run.config = with_micro_batch(run.config, run.stored.batch_size, run.stored.plan["budget_bytes"])
        made = prepare_as_it_is(run)
    else:
        made = prepare_as_it_is(run)
        if run.config.batch != "fixed":
            log.info("looking for the micro-batch (batch=%s) ...", run.config.batch)
            run.config = choose_batch(
                run.config, run.result, made.trained.model, made.selection.blocks, made.batch,
                loss_fn(made.runtime), made.trained.optimizer, made.static, made.runtime.device,
            )  # fmt: skip
            made = prepare_as_it_is(run)
    run.result.batch.size, run.result.batch.accumulate = made.trained.batch_size, run.config.accumulate
    return made


def prepare_as_it_is(run: RunInProgress) -> Prepared:
    """Told to the user where parts do not fit together."""
    runtime = runtime_of_run(run)
    data = build_data(run)
    if run.ranks.size > 1:
        data = SharedData(data, run.ranks)
    model = build_model(run, data, runtime)
    shapes = find_shapes(run, data)
    batch = to_device(shapes.batch, runtime.device)
    require_fit(run, model, batch, runtime)
    cut = None
    if run.ranks.tensor_size > 1:
        cut = cut_model(model, run.config.engine.tp_plan, run.ranks, batch, loss_fn(runtime))
    measured = model if cut is None else cut.silent
    selection = blocks_of_run(run, measured, batch, runtime)
    check_given_plan(run, selection)
    make_optimizer = instantiate(run.config.optimizer, "optimizer")
    optimizer = call_partial(make_optimizer, run.config.optimizer, "optimizer", model.parameters())
    order: tuple[str, ...] = ()
    if run.config.engine.kind != "single":
        order = gradient_order(measured, lambda twin: loss_fn(runtime)(twin, batch), runtime.device)
    static = count_static_bytes(run, model, optimizer, batch)
    settings = train_settings(run, runtime)
    if run.config.data_workers:
        workers = run.config.data_workers  # one batch to measure with needs none
        data = data.with_workers(workers) if isinstance(data, SharedData) else replace(data, workers=workers)
    trained = Trained(model, optimizer, make_scaler(settings), data, runtime.device, is_sharded=cut is not None)
    return Prepared(
        runtime=runtime,
        batch=batch,
        shapes=shapes,
        selection=selection,
        make_optimizer=make_optimizer,
        trained=trained,
        static=static,
        schedule=learning_rates(run, optimizer),
        settings=settings,
        engine=run.config.engine.kind,
        gradient_order=order,
        is_sharded=shards(run.config.engine.kind, run.ranks),
        cut=cut,
    )


def runtime_of_run(run: RunInProgress) -> Runtime:
    config = run.config.runtime
    if run.ranks.size > 1 and config.device != "cpu" and torch.cuda.is_available():
        config = replace(config, device=f"cuda:{run.ranks.local_rank}")
    runtime = choose_runtime(config, run.config.seed)
    absent = runtime.planned_for
    run.result.device = str(runtime.device) if absent is None else absent.name
    run.result.dtype = str(run.config.runtime.dtype)
    run.result.torch = torch.__version__
    run.result.environment["device"] = runtime.device_name
    log.info("runtime: %s; seed %d", runtime.explanation, run.config.seed)
    if any(compiled_budgets(run.config.planner)):
        try:
            require_compiler(runtime.device)
        except CompilerMissingError as error:
            raise ConfigError(f"planner={run.config.planner.name}: {error}") from error
    return runtime


def build_data(run: RunInProgress) -> Any:
    data, workers = instantiate(run.config.data, "data"), run.config.data_workers
    if workers and not isinstance(data, Dataset):
        problem = f"{type(data).__name__} reads its batches by itself, it is no ckptplan.data.dataset.Dataset"
        raise config_error("data_workers", workers, problem, remedy="data_workers=0, and workers inside your data")
    if workers and not CAN_HAVE_WORKERS:
        raise config_error("data_workers", workers, "only Linux can have processes that read", remedy="data_workers=0")
    return data


def find_shapes(run: RunInProgress, data: Any) -> LargestShapes:
    """The batch to measure and to plan for: the largest that training reads."""
    config, record = run.config, run.result.batch
    shapes = find_largest(
        data, steps=config.steps, accumulate=config.accumulate, limit_s=config.shape_scan_s,
        check_stop=run.stop.check,
    )  # fmt: skip
    record.planned_shape, record.shapes_read = list(shapes.batch.inputs.shape), shapes.num_read
    if shapes.has_several:
        log.info("%s", shapes.text)
    return shapes


def build_model(run: RunInProgress, data: Any, runtime: Runtime) -> nn.Module:
    is_absent = runtime.planned_for is not None
    with torch.device("meta") if is_absent else contextlib.nullcontext():  # shapes are all that is looked at
        model: nn.Module = instantiate(run.config.model, "model")
    run.result.model = str(getattr(model, "title", short_name(run.config.model)))
    run.result.data = short_name(run.config.data)
    expects = getattr(model, "expects", None)
    if expects is not None:
        mismatch = explain_mismatch(run.result.model, expects, run.result.data, data.spec)
        if mismatch:
            raise ConfigError(mismatch)
    model.to(device=None if is_absent else runtime.device, dtype=runtime.parameter_dtype)
    count = sum(p.numel() for p in model.parameters())
    log.info("model: %s, %s parameters; data: %s", run.result.model, f"{count:,}", run.result.data)
    return model


def require_fit(run: RunInProgress, model: nn.Module, batch: Batch, runtime: Runtime) -> None:
    """One forward, so that a model and data that do not fit are told before anything is measured."""
    (twin,) = make_twin([model])
    try:
        with random_state_restored(runtime.device), torch.no_grad():
            loss_fn(runtime)(twin, batch)
    except MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        shape = ", ".join(map(str, batch.inputs.shape))
        dtype = str(batch.inputs.dtype).removeprefix("torch.")
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {run.result.model} failed on a batch of {run.result.data} ({dtype}[{shape}]): {reason}\n"
            "  type: data=<data that fits it>, or change the model's arguments; the log has the traceback"
        ) from error


def blocks_of_run(run: RunInProgress, model: nn.Module, batch: Batch, runtime: Runtime) -> BlockSelection:
    paths = run.config.blocks.paths
    try:
        selection = select_blocks(model, None if paths == "auto" else list(paths))
        if selection is None:
            selection = find_blocks(model, batch, loss_fn(runtime), runtime.device)
    except BlockDeclarationError as error:
        raise ConfigError(str(error)) from error
    left = f"; left as they are: {', '.join(selection.left_out)}" if selection.left_out else ""
    log.info("blocks: %d, from %s%s", len(selection.blocks), selection.source, left)
    return selection


def check_given_plan(run: RunInProgress, selection: BlockSelection) -> None:
    """A plan that the user wrote speaks of other blocks: told before anything is measured."""
    text = run.config.planner.text
    if text is None:
        return
    nodes = parse_plan_text(text)  # names inside blocks are known when these are measured
    bare = [replace(node, saved_ops=()) if isinstance(node, Selective) else node for node in nodes]
    try:
        CheckpointPlan.from_text(nodes_text(bare), [block.block_id for block in selection.blocks])
    except PlanIncompatibleError as error:
        raise config_error("planner.text", text, str(error)) from error


def count_static_bytes(
    run: RunInProgress, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> StaticBytes:
    num_shards = run.ranks.data_size if shards(run.config.engine.kind, run.ranks) else 1
    static = static_bytes(model, optimizer, batch, num_shards)
    if num_shards == 1:
        step_bytes = optimizer_step_bytes(optimizer, on_cuda=batch.inputs.is_cuda)
        static = replace(static, optimizer_step_bytes=step_bytes)
    note_static_bytes(run, static)
    if run.config.engine.kind == "ddp":
        run.result.engine.gradient_buckets_bytes = static.gradients_bytes
    return static


def note_static_bytes(run: RunInProgress, static: StaticBytes) -> None:
    run.result.memory.weights_bytes = static.weights_bytes
    run.result.memory.gradients_bytes = static.gradients_bytes
    run.result.memory.optimizer_bytes = static.optimizer_bytes


def learning_rates(run: RunInProgress, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
    """The learning rate of each step; ``optimizer`` is as it was made, with the highest rate."""
    config, warmup = run.config, run.config.scheduler.warmup_steps
    return learning_rate_schedule(
        config.scheduler.kind,  # type: ignore[arg-type]  # checked by load_config
        optimizer.param_groups[0]["lr"],
        config.steps,
        warmup_steps=config.steps // 10 if warmup is None else warmup,
        final_factor=config.scheduler.final_factor,
    )


def train_settings(run: RunInProgress, runtime: Runtime) -> TrainSettings:
    config = run.config
    return TrainSettings(
        steps=config.steps,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        eval_every=config.eval_every or config.steps,
        log_every=config.log_every,
        autocast_dtype=runtime.autocast_dtype,
        device=runtime.device,
    )
