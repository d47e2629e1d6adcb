"""Measuring a model whose blocks form no plain chain: side tensors, code between blocks, skips, blocks called twice.

Each distinct kind of block is measured alone as in a plain chain. What the model itself does before, between and after
its blocks is measured in one step in which stand-ins take the place of the blocks (``skeleton.py``), and so are the
gradients that wait in the autograd engine while a block runs its backward. A boundary has all that the model's own
variables hold there, passed on through the stages that do not touch it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ckptplan.assembly import (
    Ways,
    block_profile,
    environment_of,
    find_choices_of_kinds,
    measure_times,
    require_gradient,
    timed_kinds,
    with_choices,
    without_needless_replay,
)
from ckptplan.choices import Measuring
from ckptplan.clock import now_s
from ckptplan.compiled_choices import Compiling, measure_compiled, time_compiled, with_compiled
from ckptplan.costs import InputsLetGo, StageCost
from ckptplan.kinds import Kind, examine, kind_key, measure_bytes_and_flops, observe_block, time_key, with_loss
from ckptplan.later_uses import LaterUses, ignore, leaves
from ckptplan.memory import MemoryMeter, make_meter
from ckptplan.offload_choices import measure_offloads, time_offloads, with_offload
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.skeleton import Anatomy, Arrival, Holding, Skeleton, find_anatomy
from ckptplan.stages import HEAD, GradientLayout, Letting, count_flops, inputs_let_go
from ckptplan.subject import Subject, Trials
from ckptplan.tied import SharedWeights, require_copies_of_their_own, used_by_block
from ckptplan.trace import BlockCall, trace_subject
from ckptplan.trees import storage_key


def measure_any(
    subject: Subject,
    trials: Trials,
    memory: str,
    check_stop: Callable[[], None],
    ways: Ways,
) -> ChainProfile:
    """The profile of a model as it is.

    Raises:
        BlockDeclarationError: a block that does not run, or calls that differ from forward to forward.
        UnsupportedBoundaryError: a block whose output does not reach the loss.
        NoDifferentiableOutputError: no block has an output that a gradient flows through.
    """
    trace = trace_subject(subject, linked=False)
    subject = subject.of_calls([call.block for call in trace.calls])
    skeleton = Skeleton(subject, trace.calls, {storage_key(t) for t in subject.standing_tensors()})
    arrivals = skeleton.forward(ignore).backward()
    kinds, keys = _examine_calls(skeleton, arrivals, LaterUses.of(skeleton))
    require_gradient(kinds, subject.names)
    skeleton.handed_back = [kinds[key].handed_back for key in keys]
    skeleton.weights = _weights_used_elsewhere(skeleton)
    for kind in kinds.values():
        check_stop()
        measure_bytes_and_flops(kind, subject.device, memory)
    require_copies_of_their_own(subject, trace.calls, [kinds[key] for key in keys])
    time_keys = [time_key(m, c) for m, c in zip(subject.modules, trace.calls, strict=True)]
    timed = timed_kinds(kinds, keys, time_keys)
    time_of = dict(zip(keys, time_keys, strict=True))
    choices = find_choices_of_kinds(kinds, time_of, timed, subject, memory, parts=ways.parts)
    of_timed = {name: choices[key] for name, kind in timed.items() for key in choices if kinds[key] is kind}
    watch = _RegionWatch(skeleton)
    how = Compiling(ways.budgets, subject.device, memory, check_stop=check_stop)
    compiled = measure_compiled(kinds, time_of, timed, how) if ways.budgets else {}
    on_host = Measuring(subject.device, memory, subject.synchronize)
    offloads = measure_offloads(kinds, time_of, on_host) if ways.offload else {}

    def also(is_counted: bool) -> None:
        watch.trial(is_counted)
        time_compiled(compiled, subject.device, subject.synchronize, is_counted=is_counted)
        time_offloads(offloads, subject.device, subject.synchronize, is_counted=is_counted)

    clocks = measure_times(timed, {}, of_timed, subject, trials, check_stop, also)
    shared = SharedWeights.of_calls(subject, trace, [kinds[key] for key in keys], memory)
    blocks = []
    for order, key in enumerate(keys):
        block = block_profile(subject, order, key, kinds[key], clocks[time_keys[order]], trials, memory)
        own_choices = choices.get(key)
        block = with_choices(block, own_choices, clocks[time_keys[order]])
        block = with_offload(with_compiled(block, compiled.get(key)), offloads.get(key))
        block = shared.block_beside(block, kinds[key], own_choices, with_waiting=False)
        blocks.append(without_needless_replay(block))
    accounts = None if memory == "off" else Accounts.of(skeleton, memory)
    regions = watch.regions(accounts)
    if accounts is not None:
        counted = [shared.ended_bytes(i + 1) + _waiting_inputs_bytes(kinds[key]) for i, key in enumerate(keys)]
        blocks = [accounts.block(order, block, counted[order]) for order, block in enumerate(blocks)]
    blocks = [
        block if not order or _is_link(subject, accounts, order) else replace(block, before=region)
        for order, (block, region) in enumerate(zip(blocks, regions, strict=False))
    ]
    return ChainProfile(
        blocks=tuple(blocks),
        pre=regions[0],
        post=regions[-1],
        input_bytes=(),
        loss_region="measured",
        loss_bytes=0 if accounts is None else accounts.loss_bytes,
        meter="off" if memory == "off" else make_meter(subject.device, memory).name,
        fingerprint=subject.fingerprint,
        environment=environment_of(subject, trace.calls[0]),
    )


def _is_link(subject: Subject, accounts: Accounts | None, order: int) -> bool:
    """Whether a segment may run over a call and the one before it."""
    return accounts is not None and accounts.is_plain_link(order) and not subject.hooks_before(order)


def holds_more(subject: Subject) -> bool:
    """Whether, while blocks of a plain chain run, the model's variables hold more than what it hands them."""
    trace = trace_subject(subject, linked=False)
    skeleton = Skeleton(subject, trace.calls, {storage_key(t) for t in subject.standing_tensors()})
    anatomy = find_anatomy(skeleton)
    return any(
        holding not in taken for number, taken in enumerate(anatomy.taken) for holding in anatomy.behind[2 * number]
    )


def between(earlier: str, later: str) -> str:
    """The name of what runs between two blocks."""
    return f"between {earlier} and {later}"


def _examine_calls(
    skeleton: Skeleton, arrivals: Sequence[Arrival], later: LaterUses
) -> tuple[dict[str, Kind], list[str]]:
    """Distinct kinds by key, and the key of each call; from the last one, as gradients come from later calls."""
    subject = skeleton.subject
    kinds: dict[str, Kind] = {}
    keys: list[str] = []
    handed_back: dict[int, GradientLayout] = {}
    for number in reversed(range(len(skeleton.calls))):
        module, call, arrival = subject.modules[number], skeleton.calls[number], arrivals[number]
        observation = observe_block(module, call, subject.device)
        layout = dict(arrival.layout) or None
        waiting: GradientLayout = {}
        for position in range(len(call.boundary) if layout else 0):
            place = number, position
            parts = [handed_back[n][p] for n, p in later.by_calls[place] if p in handed_back[n]]
            of_model = len(later.by_model.get(place, ()))
            if parts or of_model:  # one part lies as it was sent; several have been added up in memory of their own
                waiting[position] = None
                if len(parts) + of_model == 1:
                    assert layout is not None
                    waiting[position] = parts[0] if parts else later.waiting_at(place, layout, call)
        also_waiting = {g.storage for g in waiting.values() if g} & {g.storage for g in (layout or {}).values() if g}
        pinned = tuple(
            p
            for p in arrival.pinned
            if p in later.held.get(number, ()) or not (layout and (g := layout[p]) and g.storage in also_waiting)
        )
        key = kind_key(module, call, layout, observation, pinned, waiting)
        if key not in kinds:
            kinds[key] = examine(module, call, observation, subject.device, layout, pinned, waiting)
        handed_back[number] = kinds[key].handed_back
        keys.insert(0, key)
    return kinds, keys


def _waiting_inputs_bytes(kind: Kind) -> int:
    """Of what has come for the inputs' gradients already: it stands in the kind's own figures."""
    boundary = kind.call.boundary
    own = sum(boundary[p].numel() * boundary[p].element_size() for p, g in kind.waiting.items() if g is None)
    arriving = {g.storage for g in (kind.arriving or {}).values() if g is not None}  # counted as what comes in
    shared = {g.storage: g.storage_bytes for g in kind.waiting.values() if g is not None}
    return own + sum(size for storage, size in shared.items() if storage not in arriving)


def _weights_used_elsewhere(skeleton: Skeleton) -> list[list[torch.Tensor]]:
    """Per call the weights (its own, and those that it is handed) that another call, or the model's own code, uses."""
    pairs = zip(skeleton.subject.modules, skeleton.calls, strict=True)
    own = [{id(weight): weight for weight in used_by_block(module, call)} for module, call in pairs]
    step = skeleton.forward(ignore)
    around = {id(leaf) for leaf in leaves(step.loss)}
    step.loss = None
    return [
        [p for key, p in mine.items() if key in around or any(key in o for j, o in enumerate(own) if j != i)]
        for i, mine in enumerate(own)
    ]


# Bytes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accounts:
    """The bytes of a metered skeleton step, booked to who holds them. Stages are numbered as in ``Holding``."""

    calls: Sequence[BlockCall]
    anatomy: Anatomy
    meter: MemoryMeter
    arrivals: list[Arrival]
    loss_bytes: int  # with its gradient
    saved: list[int]  # by region: kept by its graph alone
    gone: list[tuple[str, Holding]]  # of what blocks take or give: the mark at which it went

    @staticmethod
    def of(skeleton: Skeleton, memory: str) -> Accounts:
        anatomy = find_anatomy(skeleton)
        skeleton.forward(ignore).backward()  # lazily made workspaces are there afterwards
        meter = make_meter(skeleton.subject.device, memory)
        letting = Letting(meter.mark)
        with meter:
            step = skeleton.forward(meter.mark, anatomy.watched_by(letting))
            loss_bytes = 2 * int(step.loss.untyped_storage().nbytes())
            arrivals = step.backward()
        accounts = Accounts(skeleton.calls, anatomy, meter, arrivals, loss_bytes, [], letting.gone)
        for region in range(accounts.num_calls + 1):
            accounts.saved.append(accounts._saved_by(region))
        return accounts

    @property
    def num_calls(self) -> int:
        return len(self.arrivals)

    def _level(self, mark: str) -> int:
        return self.meter.level(mark) - self.meter.level("start")

    def _peak(self, start: str, end: str) -> int:
        return self.meter.peak(start, end) - self.meter.level("start")

    def _passed_on(self, holding: Holding) -> bool:
        """Whether it is a boundary's: the model's variables hold it when the stage that made it is over."""
        behind = self.anatomy.behind
        return holding.made_at < len(behind) and holding in behind[holding.made_at]

    def _boundary_bytes(self, made_before: int, saved_until: int, alive: Sequence[Holding] = ()) -> int:
        """Of all boundaries: made before a stage, and alive or saved by a region up to one."""
        return sum(
            h.size_bytes
            for h in self.anatomy.holdings
            if h.made_at < made_before
            and self._passed_on(h)
            and (h in alive or any(stage <= saved_until for stage in h.saved_by))
        )

    def _saved_by(self, region: int) -> int:
        stage = 2 * region
        if region == self.num_calls:
            level = self._level("forward") - self._boundary_bytes(stage, stage)
        else:
            level = self._level(f"enter {region}") - self._boundary_bytes(stage + 1, stage, self.anatomy.behind[stage])
        return max(0, level - sum(self.saved))

    # regions

    def is_plain_link(self, order: int) -> bool:
        """Whether the call takes exactly what the one before returned, returns the like, and nobody else has a use."""
        if not (self.anatomy.is_empty[order] and self.calls[order].is_alike):
            return False
        later = self.anatomy.behind[2 * order + 1]
        passed_on = self.anatomy.given[order]
        return not any(h in later and h not in passed_on for h in self.anatomy.given[order - 1] if h is not None)

    def region_cost(self, region: int) -> StageCost:
        stage, last = 2 * region, self.num_calls
        inputs = self.anatomy.behind[stage - 1] if region else []
        outputs = self.anatomy.behind[stage] if region < last else []
        before = sum(self.saved[:region])
        forward = (f"leave {region - 1}" if region else "start", f"enter {region}" if region < last else "forward")
        start, end = self._backward_of_region(region)
        is_empty = self.anatomy.is_empty[region]
        copies = [h for h in self.anatomy.holdings if h.is_weight_copy]
        entering = before + self._boundary_bytes(stage, stage - 1, inputs)
        base = self.meter.level("start") + before + self._boundary_bytes(stage, stage)
        peak = max(0, self.meter.peak(start, end) - base)
        return StageCost(
            saved_bytes=self.saved[region],
            forward_peak_bytes=0 if is_empty else max(0, self._forward_peak(region, forward, inputs) - entering),
            backward_peak_bytes=peak,
            keeps_input=tuple(stage in h.saved_by for h in inputs),
            keeps_output=tuple(h.made_at == stage and stage in h.saved_by for h in outputs),
            weight_copies_bytes=sum(h.size_bytes for h in copies if stage == min(h.saved_by, default=None)),
            inputs_let_go=inputs_let_go(self.meter, self._gone_in(region, inputs), end, base, peak),
        )

    def head_peak(self, region: int) -> int | None:
        """Of what runs after the last call: the backward peak behind the loss's own."""
        start, end = self._backward_of_region(region)
        if region < self.num_calls or HEAD not in self.meter.marks(start, end):
            return None
        peak = self.region_cost(region).backward_peak_bytes
        return max(0, peak + self.meter.peak(HEAD, end) - self.meter.peak(start, end))

    def _forward_peak(self, region: int, forward: tuple[str, str], inputs: Sequence[Holding]) -> int:
        """As if what the model's variables drop in the midst of it stayed: a block may hold that in the real step."""
        marks = self.meter.marks(*forward)
        dropped = [
            (mark, holding.size_bytes)
            for mark, holding in self.gone
            if mark in marks and holding in inputs and 2 * region not in holding.saved_by
        ]
        peaks, dropped_bytes = [self._peak(*forward)], 0
        for number, (mark, size_bytes) in enumerate(dropped, start=1):
            dropped_bytes += size_bytes
            risen_bytes = self.meter.rise(mark, dropped[number][0] if number < len(dropped) else forward[1])
            if risen_bytes is not None:
                peaks.append(risen_bytes - self.meter.level("start") + dropped_bytes)
        return max(peaks)

    def _gone_in(self, region: int, inputs: Sequence[Holding]) -> list[tuple[str, int, int]]:
        """Of what a region takes and keeps for backward, what goes within its backward."""
        marks = self.meter.marks(*self._backward_of_region(region))
        return [
            (mark, inputs.index(holding), holding.size_bytes)
            for mark, holding in self.gone
            if mark in marks and holding in inputs and 2 * region in holding.saved_by
        ]

    def _backward_of_region(self, region: int) -> tuple[str, str]:
        return backward_marks(region, [bool(arrival.layout) for arrival in self.arrivals])

    def boundary(self, region: int) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Bytes of what the region hands on, and which of its inputs each is."""
        if region == self.num_calls:
            return (), ()
        return self._handed_on(2 * region)

    def _handed_on(self, stage: int) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        inputs = self.anatomy.behind[stage - 1] if stage else []
        outputs = self.anatomy.behind[stage]
        return (
            tuple(h.size_bytes for h in outputs),
            tuple(inputs.index(h) if h in inputs else None for h in outputs),
        )

    # blocks

    def block(self, order: int, block: BlockProfile, counted_bytes: int) -> BlockProfile:
        """A block measured alone, in the place where it runs; so much of what waits is in its figures already."""
        output_bytes, output_is_input = self._handed_on(2 * order + 1)
        waiting = max(0, self._waiting_bytes(order) - counted_bytes)
        replayed = block.replayed_backward_peak_bytes
        return replace(
            block,
            output_bytes=output_bytes,
            output_is_input=output_is_input,
            output_gradient_bytes=(block.output_gradient_bytes or 0)
            + max(0, waiting + counted_bytes - self.loss_bytes),
            replayed_backward_peak_bytes=None if replayed is None else replayed + waiting,
            keep=block.keep and self._placed(order, block.keep, waiting),
            recompute=block.recompute and self._placed(order, block.recompute, waiting),
            selective=tuple(replace(o, cost=self._placed(order, o.cost, waiting)) for o in block.selective),
            compiled=tuple(replace(o, cost=self._placed(order, o.cost, waiting)) for o in block.compiled),
            offload=tuple(replace(o, cost=self._placed(order, o.cost, waiting)) for o in block.offload),
        )

    def _waiting_bytes(self, order: int) -> int:
        """Gradients that wait in the engine beside the block's backward, the loss, and its gradient."""
        if not self.arrivals[order].layout:
            return 0
        held = sum(self.saved[: order + 1]) + self._boundary_bytes(2 * order + 1, 2 * order)
        return max(0, self._level(f"freed {order}") - held - self.arrivals[order].pinned_bytes)

    def _placed(self, order: int, cost: StageCost, waiting: int) -> StageCost:
        stage = 2 * order + 1
        inputs, outputs = self.anatomy.behind[stage - 1], self.anatomy.behind[stage]
        held: set[int] = set()
        lost_bytes = 0  # of outputs that the model drops at once though the block holds them
        for holdings, flags in (
            (self.anatomy.taken[order], cost.keeps_input),
            (self.anatomy.given[order], cost.keeps_output),
        ):
            for holding, kept in zip(holdings, flags, strict=True):
                if holding is not None and kept:
                    held.add(id(holding))
                    lost_bytes += 0 if holding in inputs or holding in outputs else holding.size_bytes
        placed = replace(
            cost,
            saved_bytes=cost.saved_bytes + lost_bytes,
            keeps_input=tuple(id(h) in held for h in inputs),
            keeps_output=tuple(id(h) in held and h not in inputs for h in outputs),
            inputs_let_go=self._lettings_placed(order, cost.inputs_let_go),
        )
        return with_loss(placed, waiting)

    def _lettings_placed(self, order: int, lettings: Sequence[InputsLetGo]) -> tuple[InputsLetGo, ...]:
        """By the storages at hand where the call is made; others stand outside the step, so that nothing is freed."""
        taken, at_hand = self.anatomy.taken[order], self.anatomy.behind[2 * order]
        return tuple(
            replace(letting, inputs=tuple(at_hand.index(h) for i in letting.inputs if (h := taken[i]) in at_hand))
            for letting in lettings
        )


def backward_marks(region: int, differentiable: Sequence[bool]) -> tuple[str, str]:
    """Between which marks of a step the backward of a region lies; blocks that no gradient comes to leave none."""
    later = [k for k in range(region, len(differentiable)) if differentiable[k]]
    earlier = [k for k in range(region) if differentiable[k]]
    return f"handed {later[0]}" if later else "forward", f"arrive {earlier[-1]}" if earlier else "end"


# Times and FLOPs -----------------------------------------------------------------------------------------------------


class _RegionWatch:
    """Times and FLOPs of the regions, from marks of skeleton steps."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.times_s: list[dict[str, float]] = []
        self.differentiable: list[bool] = []
        counter = count_flops()
        self.flops: dict[str, int] = {}

        def mark(name: str) -> None:
            self.flops[name] = counter.get_total_flops()

        with counter:
            arrivals = skeleton.forward(mark).backward()
        self.differentiable = [bool(arrival.layout) for arrival in arrivals]

    def trial(self, is_counted: bool) -> None:
        """One step, timed."""
        times: dict[str, float] = {}

        def mark(name: str) -> None:
            self.skeleton.subject.synchronize()
            times[name] = now_s()

        self.skeleton.forward(mark).backward()
        if is_counted:
            self.times_s.append(times)

    def regions(self, accounts: Accounts | None) -> list[RegionProfile | None]:
        """What runs before each call, and after the last; without bytes there is none."""
        if accounts is None:
            return [None] * (len(self.skeleton.calls) + 1)
        return [self._region(region, accounts) for region in range(len(self.skeleton.calls) + 1)]

    def _region(self, region: int, accounts: Accounts) -> RegionProfile:
        last, names = len(self.skeleton.calls), self.skeleton.subject.names
        forward = (f"leave {region - 1}" if region else "start", f"enter {region}" if region < last else "forward")
        backward = backward_marks(region, self.differentiable)
        output_bytes, output_is_input = accounts.boundary(region)
        name = between(names[region - 1], names[region]) if 0 < region < last else ""
        return RegionProfile(
            name=name or ("before the blocks" if region == 0 else "head and loss"),
            cost=accounts.region_cost(region),
            output_bytes=output_bytes,
            output_is_input=output_is_input,
            forward_time_ms=self._p50_ms(*forward),
            backward_time_ms=self._p50_ms(*backward),
            forward_flops=self.flops[forward[1]] - self.flops[forward[0]],
            backward_flops=self.flops[backward[1]] - self.flops[backward[0]],
            head_backward_peak_bytes=accounts.head_peak(region),
        )

    def _p50_ms(self, start: str, end: str) -> float:
        return statistics.median((times[end] - times[start]) * 1e3 for times in self.times_s)
