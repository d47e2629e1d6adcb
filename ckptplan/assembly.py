"""From measured kinds of blocks to a profile: trials in turn, options, one record per block."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import CHANGED_SETTINGS
from ckptplan.choices import Choices, KeptParts, Measuring, find_choices, same_choices, time_choices
from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.errors import NoDifferentiableOutputError
from ckptplan.kinds import Kind, activation_bytes, block_forward, time_again
from ckptplan.profiles import NOT_REPLAYED, BlockProfile
from ckptplan.signatures import value_signature
from ckptplan.stages import StageForward, time_stage
from ckptplan.subject import Subject, Trials
from ckptplan.trace import BlockCall

_FEWEST_TRIALS = 5
_WORTH = 0.05  # of a block's bytes or time; less is no reason to leave PyTorch's checkpoint for a replay


@dataclass(frozen=True)
class Ways:
    """What is measured of each kind of block beside keeping and recomputing it.

    Attributes:
        parts: options inside the block; or such as a plan names, with those.
        budgets: of compiled blocks.
        offload: the block with its activations on the host.
    """

    parts: bool | KeptParts = False
    budgets: tuple[float, ...] = ()
    offload: bool = False


@dataclass
class Clock:
    """Trial times of one stage, in milliseconds."""

    forward_ms: list[float]
    backward_ms: list[float]
    again_ms: list[float]

    @staticmethod
    def p50(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    @staticmethod
    def mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    @staticmethod
    def std(values: Sequence[float]) -> float | None:
        return statistics.stdev(values) if len(values) > 1 else None


def require_gradient(kinds: dict[str, Kind], names: Sequence[str]) -> None:
    if not any(kind.differentiable for kind in kinds.values()):
        raise NoDifferentiableOutputError(
            f"no block has an output that a gradient flows through ({', '.join(names)}): nothing is saved "
            "for backward, so there is nothing to plan. Are all parameters frozen?",
            names,
        )


def timed_kinds(kinds: dict[str, Kind], keys: Sequence[str], time_keys: Sequence[str]) -> dict[str, Kind]:
    """One kind for each distinct time, one that can be recomputed if there is such."""
    timed: dict[str, Kind] = {}
    for key, name in zip(keys, time_keys, strict=True):
        if name not in timed or kinds[key].exclusion_reason is None:
            timed[name] = kinds[key]
    return timed


def find_choices_of_kinds(
    kinds: dict[str, Kind],
    time_keys: dict[str, str],
    timed: dict[str, Kind],
    subject: Subject,
    memory: str,
    held_bytes: int = 0,
    *,
    parts: bool | KeptParts,
) -> dict[str, Choices]:
    """Ways to replay each kind: the whole of it, and what to keep inside it where ``parts`` asks for that.

    Kinds that share their times share their options. ``held_bytes`` stand in every backward. Nothing where no bytes
    are measured.
    """
    if memory == "off":
        return {}
    given = () if isinstance(parts, bool) else parts
    how = Measuring(subject.device, memory, subject.synchronize, held_bytes, bool(parts), given)
    found: dict[str, Choices] = {}
    for time_of, example in timed.items():
        first = find_choices(example, how)
        for key, kind in kinds.items():
            if time_keys[key] == time_of:
                found[key] = first if kind is example else same_choices(kind, first, how)
    return found


def with_choices(block: BlockProfile, choices: Choices | None, clock: Clock) -> BlockProfile:
    """The block with its options.

    A replay of the whole block that is not clearly faster than the checkpoint, timed by ``clock``, counts as slower by
    ``_WORTH`` at least: noise must not choose between the two, bytes may.
    """
    if choices is None:
        return block
    refused = () if choices.refused is None else (f"{NOT_REPLAYED}{choices.refused}",)
    options = choices.options()
    by_checkpoint_ms = block.recompute_time_ms
    for position, (option, choice) in enumerate(zip(options, choices.found, strict=True)):
        if option.saved_ops or option.time_ms is None or by_checkpoint_ms is None:
            continue
        trials_ms = [option.time_ms + ms - statistics.median(choice.rebuilding_ms) for ms in choice.rebuilding_ms]
        if not _is_clearly_less(trials_ms, clock.again_ms):
            counted = replace(option, time_ms=max(option.time_ms, (1 + _WORTH) * by_checkpoint_ms))
            options = (*options[:position], counted, *options[position + 1 :])
    return replace(block, selective=options, warnings=(*block.warnings, *refused))


def _is_clearly_less(times: Sequence[float], others: Sequence[float]) -> bool:
    """By ``_WORTH``, and the middle halves of both do not meet; a few trials make nothing clear."""
    if min(len(times), len(others)) < _FEWEST_TRIALS:
        return False
    upper, lower = sorted(times)[(3 * len(times)) // 4], sorted(others)[(len(others) - 1) // 4]
    return upper < lower and statistics.median(times) < (1 - _WORTH) * statistics.median(others)


def without_needless_replay(block: BlockProfile) -> BlockProfile:
    """Without the replay of the whole block where a checkpoint does the same, so that noise chooses no executor.

    It does the same where a replay needs as many FLOPs and as much time (see ``with_choices``) and spares less than
    ``_WORTH`` of the bytes that the block holds or peaks at.
    """
    kept, again = block.keep, block.recompute
    if kept is None or again is None or any(option.saved_ops for option in block.selective):
        return block
    return replace(block, selective=tuple(o for o in block.selective if _is_worth_it(block, kept, again, o)))


def _is_worth_it(block: BlockProfile, kept: StageCost, again: StageCost, replay: SelectiveOption) -> bool:
    spared = [
        (again.backward_peak_bytes - replay.cost.backward_peak_bytes, kept.backward_peak_bytes),
        (again.forward_peak_bytes - replay.cost.forward_peak_bytes, kept.forward_peak_bytes),
        (again.saved_bytes - replay.cost.saved_bytes, kept.saved_bytes),
        (sum(again.keeps_input) - sum(replay.cost.keeps_input), 0),
    ]
    if any(less > _WORTH * whole for less, whole in spared):
        return True
    if replay.flops is not None and block.recompute_flops is not None and replay.flops < block.recompute_flops:
        return True
    if replay.time_ms is None or block.recompute_time_ms is None:
        return False
    return replay.time_ms < block.recompute_time_ms


def measure_times(
    kinds: dict[str, Kind],
    regions: dict[str, StageForward],
    choices: dict[str, Choices],
    subject: Subject,
    trials: Trials,
    check_stop: Callable[[], None],
    also: Callable[[bool], None] = lambda is_counted: None,
) -> dict[str, Clock]:
    """All stages in turn, round by round, so that a slow moment of the machine hits all of them.

    ``also`` is called once a round, with whether it counts.
    """
    clocks = {name: Clock([], [], []) for name in (*kinds, *regions)}
    for trial in range(-trials.num_warmup, trials.num_trials):
        also(trial >= 0)
        for name, clock in clocks.items():
            check_stop()
            forward = regions[name] if name in regions else block_forward(kinds[name], subject.device, None)
            forward_ms, backward_ms = time_stage(forward, subject.synchronize)
            again_ms = None
            if name in kinds:
                again_ms = time_again(kinds[name], subject.device, subject.synchronize, forward_ms)
            if name in choices and trial >= 0:
                time_choices(choices[name], forward_ms, subject.device, subject.synchronize)
            if trial >= 0:
                clock.forward_ms.append(forward_ms)
                clock.backward_ms.append(backward_ms)
                if again_ms is not None:
                    clock.again_ms.append(again_ms)
    return clocks


def block_profile(
    subject: Subject, order: int, key: str, kind: Kind, clock: Clock, trials: Trials, memory: str
) -> BlockProfile:
    module = subject.modules[order]
    parameters = list(module.parameters())
    return BlockProfile(
        block_id=subject.names[order],
        order=order,
        kind=key,
        activation_bytes_estimate=activation_bytes(kind),
        activation_bytes_method=None if kind.keep is None else "storages alive after the forward, by the allocator",
        timing_only=memory == "off",
        output_bytes=kind.output_bytes,
        output_is_input=kind.output_is_input,
        output_gradient_bytes=kind.output_gradient_bytes,
        keep=kind.keep,
        recompute=kind.recompute,
        forward_time_ms=Clock.p50(clock.forward_ms),
        forward_time_ms_mean=Clock.mean(clock.forward_ms),
        forward_time_ms_std=Clock.std(clock.forward_ms),
        backward_time_ms=Clock.p50(clock.backward_ms),
        recompute_time_ms=Clock.p50(clock.again_ms),
        recompute_time_upper_bound_ms_mean=Clock.mean(clock.forward_ms),
        recompute_time_ms_std=Clock.std(clock.again_ms),
        forward_flops=kind.forward_flops,
        backward_flops=kind.backward_flops,
        recompute_flops=kind.recompute_flops,
        eligible_for_checkpoint=kind.exclusion_reason is None,
        exclusion_reason=kind.exclusion_reason,
        is_stochastic=kind.observation.draws_random,
        is_stateful=bool(kind.observation.mutated_buffers),
        mutated_buffers=kind.observation.mutated_buffers,
        guard_bytes=kind.guard_bytes,
        replay_copy_bytes=kind.replay_copy_bytes,
        random_state_bytes=kind.random_state_bytes,
        stopped_forward_peak_bytes=kind.stopped_forward_peak_bytes,
        replayed_backward_peak_bytes=kind.replayed_backward_peak_bytes,
        module_class=type(module).__name__,
        device=str(subject.device),
        dtype=_dtype_of(parameters),
        input_shape_signature=value_signature((kind.call.args, kind.call.kwargs)),
        output_shape_signature=value_signature(kind.call.output),
        param_count=sum(p.numel() for p in parameters),
        trainable_param_count=sum(p.numel() for p in parameters if p.requires_grad),
        num_warmup=trials.num_warmup,
        num_trials=trials.num_trials,
    )


def _dtype_of(parameters: Sequence[nn.Parameter]) -> str:
    return ",".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def environment_of(subject: Subject, first: BlockCall) -> dict[str, Any]:
    device = subject.device
    enabled, dtype, cached = first.autocast
    changed = {CHANGED_SETTINGS: sorted(subject.changed_settings)} if subject.changed_settings else {}
    return changed | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "autocast": f"{dtype}, cache {'on' if cached else 'off'}" if enabled else "off",
    }
