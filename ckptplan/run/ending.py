"""How a run ends: its status, and the error that says why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ckptplan.config import RunConfig
from ckptplan.config.wording import config_error, shell_override
from ckptplan.engine.ranks import Ranks
from ckptplan.errors import InfeasibleTargetError, RankFailedError, RunInterruptedError, StepMismatchError
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import is_out_of_memory
from ckptplan.record import ErrorRecord, RunResult
from ckptplan.recovery import phase_of
from ckptplan.resuming import RunStates, Stored
from ckptplan.run.progress import RunInProgress
from ckptplan.stopping import StopFlag
from ckptplan.training import TrainSummary
from ckptplan.units import format_bytes

log = logging.getLogger(__name__)

MOST_PREDICTION_ERROR = 0.01  # the promise: predicted and measured peak differ by at most 1 %
MOST_ERROR_ON_RANKS = 0.02  # the same on each of several ranks, with what the engine holds


def is_finished(config: RunConfig, stored: Stored) -> bool:
    """Whether the state is that of the last step, its evaluation included. Raises ``ConfigError`` if it is past it."""
    step = stored.position.step
    if step > config.steps:
        problem = f"the state to go on from is that of step {step}, past it"
        raise config_error("steps", config.steps, problem, remedy=f"steps=<more than {step}>")
    return step == config.steps and not stored.position.evaluation_is_due


@contextlib.contextmanager
def ended(result: RunResult, stop: StopFlag, states: RunStates, ranks: Ranks) -> Iterator[None]:
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
            log.error("%s", out_of_memory_report(result, phase_of(error), states.newest()))
            return
        result.status, result.error = "failed", ErrorRecord(type(error).__name__, str(error))
        raise


def out_of_memory_report(result: RunResult, phase: str, newest: str | None) -> str:
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


def final_status(run: RunInProgress, plan: CheckpointPlan, summary: TrainSummary) -> str:
    error = run.result.memory.prediction_error
    if summary.ended == "interrupted":
        run.result.error = ErrorRecord("RunInterruptedError", f"ended after step {summary.steps}", summary.signal)
        return "interrupted"
    most = MOST_PREDICTION_ERROR if run.ranks.size == 1 else MOST_ERROR_ON_RANKS
    errors = [error, *(record.prediction_error for record in run.result.engine.per_rank)]
    worst = max((found for found in errors if found is not None), key=abs, default=None)
    if worst is not None and abs(worst) > most:
        run.result.error = ErrorRecord(
            "PredictionMismatch", f"predicted and measured peak differ by {worst:+.2%}, more than {most:.0%}"
        )
        return "mismatch"
    if not plan.feasible or run.result.memory.within_budget is False:
        return "over_budget"
    return "ok"
