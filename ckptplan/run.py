"""One run, from the typed configuration to ``result.json``: the data path in order.

runtime -> data -> model -> blocks -> profile -> plan -> proof by real steps -> training -> record

A run that goes on (``resume=``) takes its state in after the model, and leaves its folder as it was until then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ckptplan.blocks import BlockSelection, select_blocks
from ckptplan.budget import PlannedRun, plan_for_budget
from ckptplan.certificate import Certificate, certify
from ckptplan.compiling import require_compiler
from ckptplan.config import RunConfig, config_error, config_hash, config_yaml, shell_override
from ckptplan.curve import plan_curve
from ckptplan.data import Batch
from ckptplan.data.dataset import Dataset
from ckptplan.data.loading import CAN_HAVE_WORKERS
from ckptplan.data.spec import explain_mismatch
from ckptplan.devices import DEVICES
from ckptplan.discovery import find_blocks
from ckptplan.dry_run import verify_plan
from ckptplan.engine.parallel import (
    Parallel,
    gradient_order,
    make_parallel,
    measured_under,
    sharding_of,
    sharding_units,
)
from ckptplan.engine.planning import plan_sharded, same_plan
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.shares import SharedData
from ckptplan.engine.worst import worst_profile
from ckptplan.equality import RTOL_COMPILED, RTOL_FLOAT32, RTOL_HALF, mismatch_error
from ckptplan.errors import (
    BlockDeclarationError,
    CompilerMissingError,
    ConfigError,
    DryRunError,
    InfeasibleTargetError,
    PlanIncompatibleError,
    RankFailedError,
    RunInterruptedError,
    StepMismatchError,
)
from ckptplan.footprint import StaticBytes, optimizer_step_bytes, room_of, static_bytes
from ckptplan.largest_shapes import LargestShapes, find_largest, named_in, plan_for_all
from ckptplan.nodes import Compiled, CompiledModel, Selective, blocks_of, nodes_text, parse_plan_text
from ckptplan.optim import learning_rate_schedule
from ckptplan.peak_watch import TOLD_FROM, PeakWatch
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.proof import StepProof, is_out_of_memory, pair_of_model, prove_model
from ckptplan.randomness import random_state_restored, seed_everything, seed_of_rank
from ckptplan.record import (
    BudgetRecord,
    CertificateRecord,
    EngineRecord,
    ErrorRecord,
    LatencyRecord,
    RankRecord,
    RunRecorder,
    RunResult,
    TrainingRecord,
    environment,
    exit_code,
    load_metrics,
    write_atomic,
)
from ckptplan.recovery import Recovery, Tightened, phase_of, tighter_plan
from ckptplan.report.page import try_write_report
from ckptplan.report.records import is_job_of_sweep
from ckptplan.report.tables import footprint_table, plan_table, result_table
from ckptplan.resuming import RunStates, Stored, Trained, plan_made_for, restore_random, stored_form
from ckptplan.run_batch import choose_batch, is_budget_of, with_micro_batch
from ckptplan.run_estimate import AbsentDevice, plan_footprint, record_footprint, record_profile
from ckptplan.run_profile import compiled_budgets, profile_blocks_of_run, stored_profile
from ckptplan.run_records import (
    decision_word,
    gradients_record,
    plan_record,
    predicted_overhead_ratio,
    recompute_flops_ratio,
    short_name,
    step_times,
)
from ckptplan.runs import describe_changes, remember_typed, without
from ckptplan.runtime import Runtime, choose_runtime
from ckptplan.simulate import PlanCost, no_checkpoint_peak, simulate_plan
from ckptplan.smaller_batches import let_go
from ckptplan.stopping import StopFlag
from ckptplan.subject import LossFn, Trials
from ckptplan.targets import call_partial, instantiate
from ckptplan.tracking import Tracker, open_tracker
from ckptplan.training import (
    Position,
    TrainSettings,
    TrainSummary,
    count_targets,
    loss_of,
    make_scaler,
    summed_loss,
    to_device,
    train,
)
from ckptplan.twin import make_twin
from ckptplan.units import format_bytes

log = logging.getLogger(__name__)

NOISY_SPREAD = 0.1  # standard deviation over median of step times, above which a note is written
WATCHED_ON_CPU = 100  # steps of which the peak of one is measured, which takes that step a multiple of its time
MOST_PREDICTION_ERROR = 0.01  # the promise: predicted and measured peak differ by at most 1 %
MOST_ERROR_ON_RANKS = 0.02  # the same on each of several ranks, with what the engine holds


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
    result.engine = EngineRecord(config.engine.kind, ranks.size)
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
                for change in _changes_since(stored, resolved):
                    log.info("without effect: %s", change)
                return 0
        with RunRecorder(own_folder) as recorder:
            run = _Run(
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
                with _ended(result, stop, states, ranks):
                    run.all_stages()
            finally:
                result.timing.total_s = time.perf_counter() - start_s
                run.finish()
    return exit_code(result.status, stop.signal_number)


@contextlib.contextmanager
def _own_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Where this rank's records go: rank 0 writes those of the run, the others' are thrown away."""
    if ranks.is_first:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f"ckptplan-rank{ranks.rank}-") as own:
        yield Path(own)


@dataclass(frozen=True)
class Prepared:
    """What a run has before its blocks are measured.

    Attributes:
        batch: the largest of the data, on the device.
        gradient_order: names of the parameters in the order of their gradients; empty with one process.
    """

    runtime: Runtime
    batch: Batch
    shapes: LargestShapes
    selection: BlockSelection
    make_optimizer: Any
    trained: Trained
    static: StaticBytes
    schedule: Callable[[int], float]
    settings: TrainSettings
    engine: str
    gradient_order: tuple[str, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights only."""
        return self.engine == "fsdp2"


def _changes_since(stored: Stored, resolved: dict[str, Any]) -> list[str]:
    return describe_changes(stored.config, {**resolved, "resume": stored.config["resume"]})


def is_finished(config: RunConfig, stored: Stored) -> bool:
    """Whether the state is that of the last step, its evaluation included. Raises ``ConfigError`` if it is past it."""
    step = stored.position.step
    if step > config.steps:
        problem = f"the state to go on from is that of step {step}, past it"
        raise config_error("steps", config.steps, problem, remedy=f"steps=<more than {step}>")
    return step == config.steps and not stored.position.evaluation_is_due


@contextlib.contextmanager
def _ended(result: RunResult, stop: StopFlag, states: RunStates, ranks: Ranks) -> Iterator[None]:
    """Put into the result how the run ended; what is an answer goes no further, the rest is raised on."""
    try:
        yield
    except InfeasibleTargetError as error:
        result.status, result.error = "infeasible", ErrorRecord(type(error).__name__, str(error))
        result.memory.smallest_reachable_bytes = error.smallest_reachable_bytes
        result.budget.bytes = error.budget_bytes
        say = log.error if ranks.is_first else log.debug  # all ranks end with this one
        say("no plan fits: %s", error)
        if error.smallest_reachable_bytes is not None:
            say("the least budget that works here: budget_bytes=%d", error.smallest_reachable_bytes)
    except (RunInterruptedError, KeyboardInterrupt) as error:
        if stop.signal_number is None:
            stop.request(2)
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: at once
            states.abandon()
        result.status = "interrupted"
        result.error = ErrorRecord(type(error).__name__, "ended by a signal", stop.signal_name)
        newest = result.state.path
        told = "there was no update: nothing to save" if newest is None else f"the newest state is {newest}"
        (log.warning if ranks.is_first else log.debug)("interrupted (%s); %s", stop.signal_name, told)
    except StepMismatchError as error:
        result.status, result.error = "mismatch", ErrorRecord("GradientMismatch", str(error))
        log.error("nothing is trained: %s", error)
    except Exception as error:
        earlier = ranks.note_error(error)
        if earlier is not None:  # this rank only lost the one that failed
            is_oom = earlier.type in ("OutOfMemoryError", "MemoryError")
            result.status, result.error = "oom" if is_oom else "failed", earlier
            raise RankFailedError(earlier.message) from error
        if is_out_of_memory(error):
            result.status, result.error = "oom", ErrorRecord(type(error).__name__, str(error).partition("\n")[0])
            log.error("%s", _out_of_memory_report(result, phase_of(error), states.newest()))
            return
        result.status, result.error = "failed", ErrorRecord(type(error).__name__, str(error))
        raise


def _out_of_memory_report(result: RunResult, phase: str, newest: str | None) -> str:
    memory = result.memory
    go_on = (
        "" if newest is None else f". The newest state is whole; to go on from it: {shell_override('resume', newest)}"
    )
    if phase == "optimizer step":
        return (
            "out of memory in the optimizer's own step, in which some weights may have been updated already, so that "
            f"no tighter plan helps: its temporaries stand beside weights {format_bytes(memory.weights_bytes)}, "
            f"gradients {format_bytes(memory.gradients_bytes)} and its state "
            f"{format_bytes(memory.optimizer_bytes)}. Use an optimizer with less state, or fused=true{go_on}"
        )
    if memory.predicted_peak_bytes is None:
        return (
            "out of memory while the blocks were measured, before there was a plan: measuring holds a second set of "
            f"weights ({format_bytes(memory.weights_bytes)}) and gradients. Use a smaller data.batch_size with more "
            "accumulate, or a half precision format (runtime.dtype=bfloat16); runtime=h200 plan_only=true, or another "
            "device there, tells what would fit without one"
        )
    measured = "never measured"
    if memory.measured_peak_bytes is not None:
        measured = f"measured as {format_bytes(memory.measured_peak_bytes)}"
    return (
        f"out of memory: the plan's activation peak was predicted as {format_bytes(memory.predicted_peak_bytes)} and "
        f"{measured}; weights {format_bytes(memory.weights_bytes)}, gradients "
        f"{format_bytes(memory.gradients_bytes)} and optimizer state {format_bytes(memory.optimizer_bytes)} stand "
        f"beside it. Use a smaller budget or data.batch_size{go_on}"
    )


@dataclass
class _Run:
    """A run in progress; each method is one stage of the data path and fills its part of the result."""

    config: RunConfig
    resolved: dict[str, Any]
    folder: Path
    overrides: list[str]
    result: RunResult
    recorder: RunRecorder
    tracker: Tracker
    stop: StopFlag
    states: RunStates
    stored: Stored | None
    on_begin: Callable[[], None]
    ranks: Ranks

    def __post_init__(self) -> None:
        self.console = Console(quiet=not self.ranks.is_first)
        self.agreed_stop = self.ranks.agreed(self.stop)
        self.is_started = self.is_accepted = False

    def accept(self) -> None:
        """From here on the run is this one: what its folder says of an earlier part of it is set aside."""
        self.is_accepted = True
        step = 0 if self.stored is None else self.stored.position.step
        if self.stored is not None:
            log.info("going on from %s (resume=%s)", self.result.state.resumed_from, self.config.resume)
            for change in _changes_since(self.stored, self.resolved):
                log.info("changed since step %d: %s", step, change)
            remember_typed(self.folder, without(("resume",), self.overrides))
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "result.json").replace(self.folder / "result.earlier.json")
        write_atomic(self.folder / "config.yaml", config_yaml(self.resolved))
        discarded = self.recorder.go_back_to(step)
        if discarded:
            log.info("%d lines of metrics past step %d are now in metrics.discarded.jsonl", discarded, step)

    def all_stages(self) -> None:
        if self.config.runtime.device in DEVICES:
            self.plan_for_absent()
            return
        made = self.ranks.together(self.prepare)
        runtime, batch = made.runtime, made.batch
        streams = None
        if not made.is_sharded:  # a sharded model is filled when there are shards
            streams = self.go_on(made.trained)
        if self.ranks.is_first:
            self.on_begin()
        self.tracker.start(self.resolved, self.config.name or self.folder.name, self.config.logger.group)
        self.is_started = True
        made_for = plan_made_for(self.config, batch, runtime.device_name, self.ranks.size)
        planned, profile = self.profile_and_plan(made, made_for)
        self.tell_rows(made, planned, profile)
        certificate = self.ranks.together(lambda: self.certify_if_eager(made, planned.plan, profile))
        if self.config.plan_only:
            self.result.status = "ok" if planned.plan.feasible else "over_budget"
            return
        planned, proof, certificate = self.prove_or_tighten(made, planned, profile, certificate)
        if certificate is not None:
            replace(certificate, measured_peak_bytes=proof.peak_bytes).save(self.folder / "certificate.json")
        summary = self.train(made, planned, profile, made_for, streams)
        self.result.status = self.final_status(planned.plan, summary)

    def plan_for_absent(self) -> None:
        """All stages of a run whose device is not there: nothing is measured, nothing trained."""
        start_s = time.perf_counter()
        runtime = self.choose_runtime()
        data = self.build_data()
        model = self.build_model(data, runtime)
        batch = self.find_shapes(data).batch
        make_optimizer = instantiate(self.config.optimizer, "optimizer")
        optimizer = call_partial(make_optimizer, self.config.optimizer, "optimizer", model.parameters())
        self.on_begin()
        self.tracker.start(self.resolved, self.config.name or self.folder.name, self.config.logger.group)
        self.is_started = True
        check_stop = self.stop.check
        absent = AbsentDevice.of(self.config, runtime, model, batch, optimizer, _loss_fn(runtime), check_stop)
        record_profile(self.result, absent.profile, self.folder, start_s)
        self.note_static_bytes(absent.static)
        start_s = time.perf_counter()
        self.result.memory.no_checkpoint_predicted_peak_bytes = no_checkpoint_peak(absent.profile)
        planned = plan_for_budget(absent.profile, self.config, absent.static, torch.device("cuda"), room=absent.room)
        self.keep_plan(planned, absent.profile, start_s)
        self.keep_certificate(certify(absent.profile, planned.plan), absent.profile)
        absent.tell(planned.plan, self.result, self.console)
        self.result.status = "ok" if planned.plan.feasible else "over_budget"

    def tell_rows(self, made: Prepared, planned: PlannedRun, profile: ChainProfile) -> None:
        """With ``budget=auto``: all of the device's memory, row by row."""
        if self.config.target.key != "auto" or made.is_sharded or not self.ranks.is_first:
            return
        room = room_of(made.runtime.device, made.static.weights_bytes + made.static.batch_bytes)
        rows = plan_footprint(room, made.static, profile, planned.plan)
        record_footprint(self.result, rows)
        footprint_table(room.title, rows, self.console)

    def prepare(self) -> Prepared:
        """Everything that stands before blocks are measured, with the micro-batch that the run asks for."""
        if self.config.batch != "fixed" and self.stored is not None and is_budget_of(self.config, self.stored):
            assert self.stored.batch_size is not None
            self.config = with_micro_batch(self.config, self.stored.batch_size, self.stored.plan["budget_bytes"])
            made = self.prepare_as_it_is()
        else:
            made = self.prepare_as_it_is()
            if self.config.batch != "fixed":
                log.info("looking for the micro-batch (batch=%s) ...", self.config.batch)
                self.config = choose_batch(
                    self.config, self.result, made.trained.model, made.selection.blocks, made.batch,
                    _loss_fn(made.runtime), made.trained.optimizer, made.static, made.runtime.device,
                )  # fmt: skip
                made = self.prepare_as_it_is()
        self.result.batch.size, self.result.batch.accumulate = made.trained.batch_size, self.config.accumulate
        return made

    def prepare_as_it_is(self) -> Prepared:
        """Told to the user where parts do not fit together."""
        runtime = self.choose_runtime()
        data = self.build_data()
        if self.ranks.size > 1:
            data = SharedData(data, self.ranks)
        model = self.build_model(data, runtime)
        shapes = self.find_shapes(data)
        batch = to_device(shapes.batch, runtime.device)
        self.require_fit(model, batch, runtime)
        selection = self.select_blocks(model, batch, runtime)
        self.check_given_plan(selection)
        make_optimizer = instantiate(self.config.optimizer, "optimizer")
        optimizer = call_partial(make_optimizer, self.config.optimizer, "optimizer", model.parameters())
        order: tuple[str, ...] = ()
        if self.config.engine.kind != "single":
            order = gradient_order(model, lambda twin: _loss_fn(runtime)(twin, batch), runtime.device)
        static = self.count_static_bytes(model, optimizer, batch)
        settings = self.settings(runtime)
        if self.config.data_workers:
            workers = self.config.data_workers  # one batch to measure with needs none
            data = data.with_workers(workers) if isinstance(data, SharedData) else replace(data, workers=workers)
        trained = Trained(model, optimizer, make_scaler(settings), data, runtime.device)
        return Prepared(
            runtime=runtime,
            batch=batch,
            shapes=shapes,
            selection=selection,
            make_optimizer=make_optimizer,
            trained=trained,
            static=static,
            schedule=self.schedule(optimizer),
            settings=settings,
            engine=self.config.engine.kind,
            gradient_order=order,
        )

    def profile_and_plan(self, made: Prepared, made_for: dict[str, Any]) -> tuple[PlannedRun, ChainProfile]:
        """The plan of all ranks and the profile that its figures are from: what was stored, or measured now."""
        stored = None if self.stored is None else self.stored.planned(made_for)
        profile = self.ranks.from_first(lambda: stored_profile(self.folder, stored, made.selection, self.result))
        if profile is not None and stored is not None and stored.plan.fingerprint == profile.fingerprint:
            planned, plain = stored, profile
        else:  # the figures of the stored plan are not those of another measurement
            planned = None
            measured = self.ranks.together(lambda: self.profile(made))
            plain = worst_profile([ChainProfile.from_json(text) for text in self.ranks.gather(measured.to_json())])
            plain.save(self.folder / "profile.json")  # it took time, and stays also where no plan fits
        found: list[ChainProfile] = []

        def plan() -> PlannedRun:
            made_now, used = self.plan(made, plain, planned)
            found.append(used)
            return made_now

        agreed = same_plan(self.ranks, plan)
        profile = self.ranks.gather(found[0] if found else plain)[0]
        profile.save(self.folder / "profile.json")
        return agreed, profile

    def go_on(self, trained: Trained) -> dict[str, Any] | None:
        """Take the stored state in; returns its random streams (None: a new run)."""
        if self.stored is None:
            return None
        self.stored, streams = self.states.restore(self.stored, trained, self.config)
        self.accept()
        return streams

    # --- what is run ---

    def choose_runtime(self) -> Runtime:
        config = self.config.runtime
        if self.ranks.size > 1 and config.device != "cpu" and torch.cuda.is_available():
            config = replace(config, device=f"cuda:{self.ranks.local_rank}")
        runtime = choose_runtime(config, self.config.seed)
        absent = runtime.planned_for
        self.result.device = str(runtime.device) if absent is None else absent.name
        self.result.dtype = str(self.config.runtime.dtype)
        self.result.torch = torch.__version__
        self.result.environment["device"] = runtime.device_name
        log.info("runtime: %s; seed %d", runtime.explanation, self.config.seed)
        if any(compiled_budgets(self.config.planner)):
            try:
                require_compiler(runtime.device)
            except CompilerMissingError as error:
                raise ConfigError(f"planner={self.config.planner.name}: {error}") from error
        return runtime

    def build_data(self) -> Any:
        data, workers = instantiate(self.config.data, "data"), self.config.data_workers
        if workers and not isinstance(data, Dataset):
            problem = f"{type(data).__name__} reads its batches by itself, it is no ckptplan.data.dataset.Dataset"
            raise config_error("data_workers", workers, problem, remedy="data_workers=0, and workers inside your data")
        if workers and not CAN_HAVE_WORKERS:
            raise config_error(
                "data_workers", workers, "only Linux can have processes that read", remedy="data_workers=0"
            )
        return data

    def find_shapes(self, data: Any) -> LargestShapes:
        """The batch to measure and to plan for: the largest that training reads."""
        config, record = self.config, self.result.batch
        shapes = find_largest(
            data, steps=config.steps, accumulate=config.accumulate, limit_s=config.shape_scan_s,
            check_stop=self.stop.check,
        )  # fmt: skip
        record.planned_shape, record.shapes_read = list(shapes.batch.inputs.shape), shapes.num_read
        if shapes.has_several:
            log.info("%s", shapes.text)
        return shapes

    def build_model(self, data: Any, runtime: Runtime) -> nn.Module:
        is_absent = runtime.planned_for is not None
        with torch.device("meta") if is_absent else contextlib.nullcontext():  # shapes are all that is looked at
            model: nn.Module = instantiate(self.config.model, "model")
        self.result.model = str(getattr(model, "title", short_name(self.config.model)))
        self.result.data = short_name(self.config.data)
        expects = getattr(model, "expects", None)
        if expects is not None:
            mismatch = explain_mismatch(self.result.model, expects, self.result.data, data.spec)
            if mismatch:
                raise ConfigError(mismatch)
        model.to(device=None if is_absent else runtime.device, dtype=runtime.parameter_dtype)
        count = sum(p.numel() for p in model.parameters())
        log.info("model: %s, %s parameters; data: %s", self.result.model, f"{count:,}", self.result.data)
        return model

    def require_fit(self, model: nn.Module, batch: Batch, runtime: Runtime) -> None:
        """One forward, so that a model and data that do not fit are told before anything is measured."""
        (twin,) = make_twin([model])
        try:
            with random_state_restored(runtime.device), torch.no_grad():
                _loss_fn(runtime)(twin, batch)
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            shape = ", ".join(map(str, batch.inputs.shape))
            dtype = str(batch.inputs.dtype).removeprefix("torch.")
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"model {self.result.model} failed on a batch of {self.result.data} ({dtype}[{shape}]): {reason}\n"
                "  type: data=<data that fits it>, or change the model's arguments; the log has the traceback"
            ) from error

    def select_blocks(self, model: nn.Module, batch: Batch, runtime: Runtime) -> BlockSelection:
        paths = self.config.blocks.paths
        try:
            selection = select_blocks(model, None if paths == "auto" else list(paths))
            if selection is None:
                selection = find_blocks(model, batch, _loss_fn(runtime), runtime.device)
        except BlockDeclarationError as error:
            raise ConfigError(str(error)) from error
        left = f"; left as they are: {', '.join(selection.left_out)}" if selection.left_out else ""
        log.info("blocks: %d, from %s%s", len(selection.blocks), selection.source, left)
        return selection

    def check_given_plan(self, selection: BlockSelection) -> None:
        """A plan that the user wrote speaks of other blocks: told before anything is measured."""
        text = self.config.planner.text
        if text is None:
            return
        nodes = parse_plan_text(text)  # names inside blocks are known when these are measured
        bare = [replace(node, saved_ops=()) if isinstance(node, Selective) else node for node in nodes]
        try:
            CheckpointPlan.from_text(nodes_text(bare), [block.block_id for block in selection.blocks])
        except PlanIncompatibleError as error:
            raise config_error("planner.text", text, str(error)) from error

    def count_static_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> StaticBytes:
        num_shards = self.ranks.size if self.config.engine.kind == "fsdp2" else 1
        static = static_bytes(model, optimizer, batch, num_shards)
        if num_shards == 1:
            step_bytes = optimizer_step_bytes(optimizer, on_cuda=batch.inputs.is_cuda)
            static = replace(static, optimizer_step_bytes=step_bytes)
        self.note_static_bytes(static)
        if self.config.engine.kind == "ddp":
            self.result.engine.gradient_buckets_bytes = static.gradients_bytes
        return static

    def note_static_bytes(self, static: StaticBytes) -> None:
        self.result.memory.weights_bytes = static.weights_bytes
        self.result.memory.gradients_bytes = static.gradients_bytes
        self.result.memory.optimizer_bytes = static.optimizer_bytes

    # --- measure, plan, prove ---

    def profile(self, made: Prepared) -> ChainProfile:
        return profile_blocks_of_run(
            self.config,
            self.result,
            made.trained.model,
            made.selection,
            made.batch,
            made.runtime,
            _loss_fn(made.runtime),
            self.stop.check,
        )

    def plan(self, made: Prepared, profile: ChainProfile, stored: PlannedRun | None) -> tuple[PlannedRun, ChainProfile]:
        """The plan, and the profile that its figures are from: with what an engine holds beside activations."""
        start_s = time.perf_counter()
        self.result.memory.no_checkpoint_predicted_peak_bytes = no_checkpoint_peak(profile)

        def make(seen: ChainProfile, reserve_bytes: int) -> PlannedRun:
            device = torch.device(self.result.device or "cpu")
            return plan_for_budget(seen, self.config, made.static, device, reserve_bytes)

        if stored is not None:
            planned = stored
        elif made.is_sharded:
            names = dict.fromkeys(modules_of(profile.block_ids))
            sharding = sharding_of(made.trained.model, list(names), made.gradient_order, self.ranks.size)
            planned, profile = plan_sharded(profile, sharding, make)
            units = sharding_units(planned.plan)
            self.result.engine.gathered_weights_bytes = sharding.most_gathered_bytes(units)
        else:
            planned = self.plan_for_shapes(made, lambda reserve_bytes: make(profile, reserve_bytes))
        self.keep_plan(planned, profile, start_s)
        return planned, profile

    def plan_for_shapes(self, made: Prepared, make: Callable[[int], PlannedRun]) -> PlannedRun:
        """A plan for the largest batch of the data, and for others that are large in another way."""
        runtime, notes = made.runtime, list[str]()

        def peak_of(plan: CheckpointPlan, batch: Batch) -> int:
            own = to_device(batch, runtime.device)
            return verify_plan(made.trained.model, plan, own, _loss_fn_without_values(runtime, own)).peak_bytes

        try:
            planned = plan_for_all(made.shapes, make, peak_of, notes)
        except InfeasibleTargetError as error:
            raise named_in(error, made.shapes) from None
        for note in notes:
            log.info("%s", note)
        self.result.notes += notes
        return planned

    def keep_plan(self, planned: PlannedRun, profile: ChainProfile, start_s: float) -> None:
        """The plan into the result, the run folder, the console and the tracker."""
        plan, memory = planned.plan, self.result.memory
        if planned.note is not None:
            log.warning("%s", planned.note)
            self.result.notes.append(planned.note)
        self.result.timing.plan_s = time.perf_counter() - start_s
        self.result.budget.bytes, self.result.budget.margin_bytes = planned.budget_bytes, planned.margin_bytes
        memory.no_checkpoint_predicted_peak_bytes = plan.no_checkpoint_peak_bytes
        memory.predicted_peak_bytes, memory.peak_at = plan.predicted_peak_bytes, plan.predicted_peak_at
        memory.smallest_reachable_bytes = planned.smallest_reachable_bytes
        self.result.plan = plan_record(planned)
        cost = simulate_plan(profile, plan)
        self.result.latency.predicted_overhead_ratio = predicted_overhead_ratio(profile, cost)
        self.result.latency.recompute_flops_ratio = recompute_flops_ratio(profile, cost)
        plan.save(self.folder / "plan.json")
        plan_table(profile, plan, self.console, planner=self.config.planner.name)
        self._track_plan(profile, plan, cost)

    def keep_taken(self, planned: PlannedRun, made_for: dict[str, Any]) -> None:
        """The tighter plan that training goes on with; measured figures stay those of the plan that was proven."""
        self.states.replan(stored_form(planned, made_for))
        self.result.plan = plan_record(planned)
        planned.plan.save(self.folder / "plan.json")

    def certify_if_eager(self, made: Prepared, plan: CheckpointPlan, profile: ChainProfile) -> Certificate | None:
        if not self.ranks.is_first:
            return None
        if plan.compiled:
            self.result.notes.append(
                "no certificate and no trade-off curve: they compare eager plans, and blocks of this one run compiled"
            )
            return None
        return self.certify(made, plan, profile)

    def certify(self, made: Prepared, plan: CheckpointPlan, profile: ChainProfile) -> Certificate:
        """How good the plan is, by solvers and by a dry run; and the whole trade-off that it is a point of."""
        certificate = certify(profile, plan)
        batch = made.batch
        try:
            if made.is_sharded:
                raise DryRunError("it would not see the weights that are gathered")
            found = verify_plan(made.trained.model, plan, batch, _loss_fn_without_values(made.runtime, batch))
            certificate = replace(
                certificate,
                dry_run_peak_bytes=found.peak_bytes,
                operator=found.operator,
                block=found.block,
                phase=found.phase,
            )
        except DryRunError as error:
            self.result.notes.append(f"no dry run: {error}")
        self.keep_certificate(certificate, profile)
        return certificate

    def keep_certificate(self, certificate: Certificate, profile: ChainProfile) -> None:
        certificate.save(self.folder / "certificate.json")
        known = {field.name: getattr(certificate, field.name) for field in fields(CertificateRecord)}
        self.result.certificate = CertificateRecord(**known)
        log.info("certificate: %s", certificate.text)
        curve = plan_curve(profile, cost=certificate.cost_kind)  # type: ignore[arg-type]  # a plan is read strictly
        curve.save(self.folder / "curve.json")
        log.info("trade-off: %s", curve.text)

    def _track_plan(self, profile: ChainProfile, plan: CheckpointPlan, cost: PlanCost) -> None:
        compiled = set(blocks_of([node for node in plan.nodes if isinstance(node, (Compiled, CompiledModel))]))
        rows = [
            (d.block_id, decision_word(d, is_compiled=i in compiled), d.retained_bytes, d.recompute_time_ms, d.reason)
            for i, d in enumerate(plan.decisions)
        ]
        self.tracker.table("plan", ("block", "decision", "retained_bytes", "recompute_time_ms", "why"), rows)
        levels = [(float(i), level_bytes / 2**20) for i, (_, _, level_bytes) in enumerate(cost.timeline)]
        self.tracker.curve("memory_over_step", ("stage", "MiB"), levels)
        kept = [(float(i), (d.retained_bytes or 0) / 2**20) for i, d in enumerate(plan.decisions)]
        self.tracker.curve("plan_strip", ("block", "MiB kept"), kept)
        if self.config.logger.kind != "none":
            curve = plan_curve(profile, nested=False, cost=self.config.cost)  # type: ignore[arg-type]  # checked by load_config
            points = [(point.peak_bytes / 2**20, float(point.cost)) for point in curve.points]
            self.tracker.curve("tradeoff", ("peak MiB", "added"), points)

    def prove_or_tighten(
        self, made: Prepared, planned: PlannedRun, profile: ChainProfile, certificate: Certificate | None
    ) -> tuple[PlannedRun, StepProof, Certificate | None]:
        """The proof of the plan, or of a tighter one where its step runs out of memory, as in training."""
        tries = self.config.oom_retries if made.engine == "single" else 0
        while True:
            try:
                return planned, self.prove(made, planned.plan), certificate
            except Exception as error:
                tighter = tighter_plan(profile, planned.plan) if tries and is_out_of_memory(error) else None
                if tighter is None:
                    raise
                tries -= 1
                change = Tightened("the proof", planned.plan, tighter, str(error).partition("\n")[0])
                let_go(error)
            log.warning("%s", change.text)
            self.result.notes.append(change.text)
            planned = replace(planned, plan=tighter, note=None)
            self.keep_plan(planned, profile, time.perf_counter())
            certificate = self.certify_if_eager(made, tighter, profile)

    def prove(self, made: Prepared, plan: CheckpointPlan) -> StepProof:
        model, batch, runtime = made.trained.model, made.batch, made.runtime
        log.info("proving the plan by real steps, with and without it ...")
        is_half = runtime.autocast_dtype is not None or runtime.parameter_dtype is not torch.float32
        rtol = RTOL_HALF if is_half else RTOL_COMPILED if plan.compiled else RTOL_FLOAT32
        proof = prove_model(
            model,
            plan,
            batch,
            _loss_fn(runtime),
            device=runtime.device,
            trials=Trials(self.config.proof.latency_warmup, max(1, self.config.proof.latency_trials)),
            time_steps=self.config.proof.latency_trials > 0,
            check_gradients=self.config.proof.check_gradients,
            rtol=rtol,
            check_stop=self.agreed_stop.check,
            under=None if made.engine == "single" else measured_under(lambda twin: self.parallel(made, twin, plan)),
            run_plain=self.plain_step_fits(made),
        )
        memory, latency = self.result.memory, self.result.latency
        peaks = self.peaks_of_ranks(proof, plan, runtime)
        memory.measured_peak_bytes = max(peaks) if peaks else proof.peak_bytes
        memory.no_checkpoint_measured_peak_bytes = proof.no_checkpoint_peak_bytes
        memory.device_peak_bytes, memory.device_reserved_bytes = proof.device_peak_bytes, proof.device_reserved_bytes
        measured_bytes, budget_bytes = memory.measured_peak_bytes, self.result.budget.bytes
        if measured_bytes and plan.predicted_peak_bytes is not None:
            memory.prediction_error = (plan.predicted_peak_bytes - measured_bytes) / measured_bytes
        if measured_bytes is not None and budget_bytes is not None:
            memory.within_budget = measured_bytes <= budget_bytes
        latency.step_ms, latency.no_checkpoint_step_ms = (
            step_times(proof.step_ms),
            step_times(proof.no_checkpoint_step_ms),
        )
        latency.overhead_ratio = proof.overhead_ratio
        self._note_noise(latency)
        self.result.gradients = gradients_record(proof.gradients, proof.gradients_note)
        if proof.out_of_memory == "planned":
            raise torch.cuda.OutOfMemoryError("the planned step does not fit the device")
        self.ranks.together(lambda: self.require_equal_gradients(made, plan, proof, rtol))
        return proof

    def require_equal_gradients(self, made: Prepared, plan: CheckpointPlan, proof: StepProof, rtol: float) -> None:
        if proof.gradients is None or proof.gradients.passed:
            return
        if self.ranks.size > 1:  # to find the block takes steps, in which the others have no part
            faults = proof.gradients.faults
            message = (
                f"rank {self.ranks.rank}: the planned step differs from the unplanned one: {'; '.join(faults[:5])}"
            )
            raise StepMismatchError(message, faults=faults)
        model, runtime = made.trained.model, made.runtime
        pair = pair_of_model(model, plan, made.batch, _loss_fn(runtime), runtime.device)
        raise mismatch_error(pair, plan, proof.gradients, rtol, 0.0)

    def parallel(self, made: Prepared, model: nn.Module, plan: CheckpointPlan) -> Parallel:
        """``model`` under the engine of the run."""
        unused = [name for name, p in model.named_parameters() if p.requires_grad and name not in made.gradient_order]
        return make_parallel(made.engine, model, plan, self.ranks, unused)

    def plain_step_fits(self, made: Prepared) -> bool:
        """Whether the step without the plan is run: with several ranks it must not fail on one of them."""
        if self.ranks.size == 1 or made.runtime.device.type != "cuda":
            return True
        needed_bytes = self.ranks.largest(self.result.memory.no_checkpoint_predicted_peak_bytes or 0)
        free_bytes = -self.ranks.largest(-torch.cuda.mem_get_info(made.runtime.device)[0])
        return needed_bytes * (1 + MOST_ERROR_ON_RANKS) + (made.static.total_bytes or 0) < free_bytes

    def peaks_of_ranks(self, proof: StepProof, plan: CheckpointPlan, runtime: Runtime) -> list[int]:
        """The measured peak of each rank, recorded with its prediction; none with one process."""
        if self.ranks.size == 1:
            return []
        predicted, budget_bytes = plan.predicted_peak_bytes, plan.budget_bytes
        found = self.ranks.gather((proof.peak_bytes, platform.node(), str(runtime.device)))
        for rank, (measured, host, device) in enumerate(found):
            error = (predicted - measured) / measured if measured and predicted is not None else None
            fits = None if measured is None or budget_bytes is None else measured <= budget_bytes
            self.result.engine.per_rank.append(RankRecord(rank, host, device, predicted, measured, error, fits))
        return [measured for measured, _, _ in found if measured is not None]

    def _note_noise(self, latency: LatencyRecord) -> None:
        spreads = [t.std / t.p50 for t in (latency.step_ms, latency.no_checkpoint_step_ms) if t.std and t.p50]
        if spreads and max(spreads) > NOISY_SPREAD:
            self.result.notes.append(
                f"step times scatter by {max(spreads):.0%}: the machine is busy, take the time added with care "
                "(proof.latency_trials=20 helps)"
            )

    # --- train ---

    def schedule(self, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
        """The learning rate of each step; ``optimizer`` is as it was made, with the highest rate."""
        config, warmup = self.config, self.config.scheduler.warmup_steps
        return learning_rate_schedule(
            config.scheduler.kind,  # type: ignore[arg-type]  # checked by load_config
            optimizer.param_groups[0]["lr"],
            config.steps,
            warmup_steps=config.steps // 10 if warmup is None else warmup,
            final_factor=config.scheduler.final_factor,
        )

    def settings(self, runtime: Runtime) -> TrainSettings:
        config = self.config
        return TrainSettings(
            steps=config.steps,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
            eval_every=config.eval_every or config.steps,
            log_every=config.log_every,
            autocast_dtype=runtime.autocast_dtype,
            device=runtime.device,
        )

    def train(
        self,
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
            tries=self.config.oom_retries if made.engine == "single" else 0,  # an engine's state cannot be stepped back
            on_taken=lambda plan: self.keep_taken(replace(planned, plan=plan), made_for),
        )
        parallel = self.parallel(made, trained.model, planned.plan)
        if made.is_sharded:
            parameters = trained.model.parameters()  # shards now
            optimizer = call_partial(made.make_optimizer, self.config.optimizer, "optimizer", parameters)
            trained = replace(trained, optimizer=optimizer, is_sharded=True)
            streams = self.go_on(trained)
        self.states.begin(trained, stored_form(planned, made_for), self.resolved)
        self.result.timing.apply_s = time.perf_counter() - start_s
        start = Position() if self.stored is None else self.stored.start(trained.batch_size)
        watch = self.watch_of(made, profile, lambda: recovery.plan, start.step)
        losses = [row["train/loss"] for row in load_metrics(self.folder) if row.get("train/loss") is not None]
        if self.ranks.rank or (self.stored is not None and streams is None):
            seed_everything(seed_of_rank(self.config.seed, self.ranks.rank, start.step))
        if streams is not None:  # last, so that nothing draws or seeds after it
            restore_random(streams, trained.device, self.result.notes)
        try:
            summary = train(
                parallel,
                trained.data,
                trained.optimizer,
                learning_rate_at=made.schedule,
                settings=made.settings,
                recorder=self.recorder,
                tracker=self.tracker,
                stop=self.agreed_stop,
                start=start,
                earlier_losses=losses,
                scaler=trained.scaler,
                after_step=self.states.after_step,
                console=self.console,
                gradients_of=watch.gradients(recovery.gradients),
                further_figures=watch.figures,
            )
        finally:
            recovery.remove()
            self.note_peak(watch)
            self.result.training.oom_recoveries = len(recovery.tightened)
            self.result.notes += [each.text for each in recovery.tightened]
        self.result.timing.train_s = summary.train_s
        self.result.training = TrainingRecord(
            summary.steps,
            summary.first_loss,
            summary.last_loss,
            summary.samples_per_s,
            summary.tokens_per_s,
            oom_recoveries=len(recovery.tightened),
        )
        self.states.at_end(summary.position)
        return summary

    def watch_of(
        self, made: Prepared, profile: ChainProfile, plan_of: Callable[[], CheckpointPlan], start_step: int
    ) -> PeakWatch:
        """What measures steps of this training; an engine holds more than a plan knows of: there none is."""
        device, every = made.runtime.device, self.config.watch_peak_every
        if every is None:
            every = 1 if device.type == "cuda" else WATCHED_ON_CPU
        if made.engine != "single":
            every = 0
        return PeakWatch(
            made.trained.model, profile, plan_of, made.batch, device=device, every=every, start_step=start_step
        )

    def note_peak(self, watch: PeakWatch) -> None:
        if watch.worst is None:
            return
        memory, worst = self.result.memory, watch.worst
        memory.training_peak_bytes, memory.training_drift = worst.measured_bytes, worst.drift
        memory.training_expected_bytes = [worst.low_bytes, worst.high_bytes]
        log.info("%d steps of training measured; furthest from the plan: %s", watch.num_measured, worst.text)
        if worst.drift > TOLD_FROM:
            self.result.notes.append(worst.text)

    def final_status(self, plan: CheckpointPlan, summary: TrainSummary) -> str:
        error = self.result.memory.prediction_error
        if summary.ended == "interrupted":
            self.result.error = ErrorRecord("RunInterruptedError", f"ended after step {summary.steps}", summary.signal)
            return "interrupted"
        most = MOST_PREDICTION_ERROR if self.ranks.size == 1 else MOST_ERROR_ON_RANKS
        errors = [error, *(record.prediction_error for record in self.result.engine.per_rank)]
        worst = max((found for found in errors if found is not None), key=abs, default=None)
        if worst is not None and abs(worst) > most:
            self.result.error = ErrorRecord(
                "PredictionMismatch", f"predicted and measured peak differ by {worst:+.2%}, more than {most:.0%}"
            )
            return "mismatch"
        if not plan.feasible or self.result.memory.within_budget is False:
            return "over_budget"
        return "ok"

    # --- record ---

    def finish(self) -> None:
        """Write the result, show it, and end the tracker, whatever happened. A run not gone on with stays as it was."""
        if not self.is_accepted:
            return
        path = self.recorder.write_result(self.result)
        plain = json.loads(path.read_text(encoding="utf-8"))
        if self.is_started:
            self.tracker.summary(plain)
            self.tracker.finish(self.result.status)
        page = None
        if (
            self.config.report and self.ranks.is_first and not is_job_of_sweep(self.folder)
        ):  # a sweep writes one page for all its jobs
            page = try_write_report(self.folder)
        if self.result.memory.predicted_peak_bytes is not None:
            files = {"run folder": str(self.folder), "result": str(path), "plan": str(self.folder / "plan.json")}
            if self.result.state.path is not None:
                files["state"] = self.result.state.path
            result_table(plain, self.console, files if page is None else {**files, "page": str(page)})


def _loss_fn(runtime: Runtime) -> LossFn:
    return lambda model, batch: loss_of(model, batch, runtime.autocast_dtype)


def _loss_fn_without_values(runtime: Runtime, batch: Batch) -> LossFn:
    """The loss of ``batch`` for a dry run: how many targets count is a value, which that has none of."""
    count = max(count_targets(batch), 1)
    return lambda model, given: summed_loss(model, given, runtime.autocast_dtype) / count
