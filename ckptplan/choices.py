"""What to keep inside a kind of block: the gate, the proposals of the search, and what each of them really costs.

Nothing at all is one of the ways: the whole block recomputed by replay, beside which ``kinds.py`` measures the same by
PyTorch's checkpoint. That one is measured for every kind; the others are where options inside blocks are asked for.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptplan.clock import now_s
from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.graph import BlockOperators, Output
from ckptplan.kinds import Kind, block_forward, settled_bytes, with_loss
from ckptplan.operators import RunBlock, trace_operators, why_not_replayed
from ckptplan.options import KeepSet, propose_keep_sets
from ckptplan.randomness import random_state_restored
from ckptplan.replay import Recorder, run_recorded, run_replayed
from ckptplan.selective import outputs_named
from ckptplan.stages import StageForward, stage_flops, time_stage, weight_copies
from ckptplan.trace import autocast_as
from ckptplan.trees import has_values, local

Synchronize = Callable[[], None]  # waits for the device
KeptParts = tuple[tuple[str, ...], ...]  # outputs to keep, as a plan names them

_MOST_OPTIONS = 12  # per kind of block; a planner's work grows with them
_CHOSEN_BY_TIME = 3  # of these


@dataclass
class Choice:
    """One measured way to keep part of a kind of block."""

    kind: Kind
    saved_ops: tuple[str, ...]
    cost: StageCost
    flops: int
    rebuilding_ms: list[float] = field(default_factory=list)  # in the backward, one per trial

    @property
    def outputs(self) -> list[Output]:
        return [Output.of(name) for name in self.saved_ops]

    @property
    def retained_bytes(self) -> int:
        """The block's own output included, where the block itself holds it."""
        kind, flags = self.kind, self.cost.keeps_output
        outputs = zip(kind.output_bytes, kind.output_is_input, flags, strict=True)
        return self.cost.saved_bytes + sum(size for size, is_input, kept in outputs if kept and is_input is None)


@dataclass
class Choices:
    """All ways of one kind; ``refused`` says why there are none."""

    sequence_hash: str = ""
    found: list[Choice] = field(default_factory=list)
    refused: str | None = None
    recording_ms: list[float] = field(default_factory=list)  # in the forward: the same for all ways, shared

    def options(self) -> tuple[SelectiveOption, ...]:
        recording_ms = max(0.0, statistics.median(self.recording_ms)) if self.recording_ms else 0.0
        return tuple(
            SelectiveOption(
                saved_ops=choice.saved_ops,
                cost=choice.cost,
                time_ms=recording_ms + statistics.median(choice.rebuilding_ms) if choice.rebuilding_ms else None,
                flops=choice.flops,
                sequence_hash=self.sequence_hash,
            )
            for choice in self.found
        )


@dataclass(frozen=True)
class Measuring:
    """How stages are measured; ``held_bytes`` (the loss and its gradient) stand in every backward.

    ``with_parts``: also ways to keep part of a block; else only the whole block, replayed. ``given``: outputs to keep,
    by their names as in a plan's text, that are measured whatever the search proposes.
    """

    device: torch.device
    memory: str
    synchronize: Synchronize
    held_bytes: int = 0
    with_parts: bool = True
    given: KeptParts = ()


def find_choices(kind: Kind, how: Measuring) -> Choices:
    """The options of a kind whose kept run was measured: those that no other one beats in bytes and in FLOPs, and
    those that are given.
    """
    if not kind.differentiable:
        return Choices(refused="no gradient flows through its output, so it saves nothing")
    if not all(has_values(t) for t in (*kind.call.boundary, *kind.module.parameters())):
        return Choices(refused="only a run with values tells whether a replay gives what the block gave")
    if any(local(p) is not p for p in kind.module.parameters()):
        return Choices(refused="ranks share its matrices, and what is kept of a tensor that is spread is all of it")
    if kind.call.first.graph_kept_in is not None:
        name = kind.call.first.graph_kept_in
        return Choices(refused=f"it keeps a tensor with its graph in {name!r}, which lives on beside what is measured")
    for name, other in kind.call.first.shared_with.items():
        return Choices(refused=f"its buffer {name!r} is changed while block {other!r} holds it too")
    if not how.with_parts and kind.exclusion_reason is not None:
        return Choices()  # which executor recomputes a block is asked of blocks that may be recomputed
    run_block = _run_block(kind, how.device)
    with random_state_restored(how.device):
        refused = why_not_replayed(kind.module, run_block)
        if refused is not None:
            return Choices(refused=refused)
        if not how.with_parts:
            whole = _measured(kind, (), how)
            return Choices(found=[whole] if _saves_bytes(whole, kind) else [])
        operators = trace_operators(kind.module, run_block, how.synchronize)
    proposed = propose_keep_sets(operators)
    names = [tuple(operators.name_of(v) for v in keep_set.kept) for keep_set in proposed]
    measured = [(_measured(kind, n, how), s) for n, s in zip(names, proposed, strict=True)]
    measured = [pair for pair in measured if _saves_bytes(pair[0], kind)]
    chosen = _spread([pair for pair in measured if not _is_beaten(pair, measured)])
    found = [choice for choice, _ in chosen]
    there = {choice.saved_ops for choice in found}
    found += [_measured(kind, names, how) for names in _given_here(operators, how.given) if names not in there]
    return Choices(operators.sequence_hash, found)


def _given_here(operators: BlockOperators, given: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The given outputs by their full names, where this kind of block has them."""
    keepable = [v for v, value in enumerate(operators.values) if value.keepable]
    saved = [operators.name_of(v) for v in keepable if v in operators.needed]
    known = [operators.name_of(v) for v in keepable]
    found = (outputs_named(names, saved) or outputs_named(names, known) for names in given)
    return list(dict.fromkeys(names for names in found if names))


def time_choices(choices: Choices, kept_forward_ms: float, device: torch.device, synchronize: Synchronize) -> None:
    """One trial of each way; ``kept_forward_ms`` is what the forward took just now without a record."""
    for choice in choices.found:
        watch = _Stopwatch(choice.outputs, synchronize)
        forward = block_forward(choice.kind, device, None, _under(watch, choice.kind))
        forward_ms, _ = time_stage(forward, synchronize)
        choice.rebuilding_ms.append(watch.total_ms)
        choices.recording_ms.append(forward_ms - kept_forward_ms)


class _Stopwatch(Recorder):
    """Times what backward spends on rebuilding."""

    def __init__(self, keep: Sequence[Output], synchronize: Synchronize) -> None:
        super().__init__(keep)
        self.synchronize = synchronize
        self.total_ms = 0.0

    def unpack(self, saved: Any) -> torch.Tensor:
        self.synchronize()
        start_s = now_s()
        tensor = super().unpack(saved)
        self.synchronize()
        self.total_ms += (now_s() - start_s) * 1e3
        return tensor


def _under(recorder: Recorder, kind: Kind) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_recorded(recorder, kind.module, args, kwargs)


def _run_block(kind: Kind, device: torch.device) -> RunBlock:
    start = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    def run(call: Callable[..., Any]) -> Any:
        if device.type == "cpu":
            torch.set_rng_state(start)
        else:
            torch.cuda.set_rng_state(start, device)
        _, args, kwargs = kind.call.fresh()
        with autocast_as(device, kind.call.autocast):
            return call(*args, **kwargs)

    return run


def same_choices(kind: Kind, other: Choices, how: Measuring) -> Choices:
    """The ways of another kind that computes the same (the first block of a chain, whose input wants no gradient).

    Their bytes and FLOPs are this kind's own; their times are shared.
    """
    if not kind.differentiable:
        return Choices(refused="no gradient flows through its output, so it saves nothing")
    found = [_measured(kind, choice.saved_ops, how) for choice in other.found]
    for choice, timed in zip(found, other.found, strict=True):
        choice.rebuilding_ms = timed.rebuilding_ms
    return Choices(other.sequence_hash, found, other.refused, other.recording_ms)


def _measured(kind: Kind, saved_ops: tuple[str, ...], how: Measuring) -> Choice:
    forward = option_forward(kind, saved_ops, how.device)
    cost = settled_bytes(forward, how.device, how.memory)
    copied_bytes = weight_copies(forward).saved_bytes if kind.copied_weights else 0
    cost = replace(cost, weight_copies_bytes=copied_bytes)
    assert kind.backward_flops is not None, "a kind's own FLOPs are measured before its options"
    return Choice(kind, saved_ops, with_loss(cost, how.held_bytes), stage_flops(forward)[1] - kind.backward_flops)


def option_forward(kind: Kind, saved_ops: Sequence[str], device: torch.device) -> StageForward:
    """The kind's block with these outputs kept inside it, as a stage."""
    kept = [Output.of(name) for name in saved_ops]
    return block_forward(kind, device, None, functools.partial(run_replayed, kind.module, kept))


def _saves_bytes(choice: Choice, kind: Kind) -> bool:
    """Whether it holds or peaks at less than keeping everything."""
    kept = kind.keep
    assert kept is not None, "a kind's kept run is measured before its options"
    everything = Choice(kind, (), kept, 0)
    return (
        choice.retained_bytes < everything.retained_bytes
        or choice.cost.backward_peak_bytes < kept.backward_peak_bytes
        or sum(choice.cost.keeps_input) < sum(kept.keeps_input)
    )


def _figures(pair: tuple[Choice, KeepSet]) -> tuple[float, ...]:
    choice, keep_set = pair
    held = (choice.retained_bytes, choice.cost.backward_peak_bytes, choice.cost.forward_peak_bytes)
    flags = (sum(choice.cost.keeps_input), sum(choice.cost.keeps_output))
    return (*held, *flags, choice.flops, keep_set.time_ms)


def _is_beaten(pair: tuple[Choice, KeepSet], others: Sequence[tuple[Choice, KeepSet]], *, timed: bool = True) -> bool:
    last = None if timed else -1
    mine = _figures(pair)[:last]
    return any(
        theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True))
        for theirs in (_figures(other)[:last] for other in others)
    )


def _spread(pairs: list[tuple[Choice, KeepSet]]) -> list[tuple[Choice, KeepSet]]:
    """At most ``_MOST_OPTIONS``: the ends, the fewest bytes without FLOPs, the lowest backward peak of all and of those
    with the fewest FLOPs, and the widest apart of the others.

    Most are chosen by counts alone, among those that none beats in counts; times, which differ from run to run, choose
    the last few.
    """
    pairs = sorted(pairs, key=lambda pair: (pair[0].retained_bytes, pair[1].time_ms))
    if len(pairs) <= _MOST_OPTIONS:
        return pairs
    free = next((i for i, (choice, _) in enumerate(pairs) if choice.flops == 0), len(pairs) - 1)
    lowest = min(range(len(pairs)), key=lambda i: (pairs[i][0].cost.backward_peak_bytes, pairs[i][0].flops))
    fewest = min(range(len(pairs)), key=lambda i: (pairs[i][0].flops, pairs[i][0].cost.backward_peak_bytes))
    chosen = {0, free, lowest, fewest, len(pairs) - 1}
    by_counts = {i for i, pair in enumerate(pairs) if not _is_beaten(pair, pairs, timed=False)}
    _add_widest_apart(chosen, by_counts, _columns(pairs)[:-1], _MOST_OPTIONS - _CHOSEN_BY_TIME)
    _add_widest_apart(chosen, set(range(len(pairs))), _columns(pairs), _MOST_OPTIONS)
    return [pairs[i] for i in sorted(chosen)]


def _columns(pairs: Sequence[tuple[Choice, KeepSet]]) -> list[list[float]]:
    """Bytes, peak, FLOPs and time of all ways, each as a share of the most that any of them has."""
    columns = [
        [float(choice.retained_bytes) for choice, _ in pairs],
        [float(choice.cost.backward_peak_bytes) for choice, _ in pairs],
        [float(choice.flops) for choice, _ in pairs],
        [keep_set.time_ms for _, keep_set in pairs],
    ]
    return [[figure / (max(column) or 1.0) for figure in column] for column in columns]


def _add_widest_apart(chosen: set[int], among: set[int], columns: Sequence[Sequence[float]], most: int) -> None:
    """To those chosen, one by one, the way that is farthest from the nearest of them."""

    def distance(i: int) -> float:
        return min(sum(abs(column[i] - column[j]) for column in columns) for j in chosen)

    while len(chosen) < most and among - chosen:
        chosen.add(max(sorted(among - chosen), key=distance))
