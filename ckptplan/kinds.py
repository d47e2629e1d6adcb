"""Distinct kinds of blocks: what makes two blocks alike, and the bytes, FLOPs and times of one of a kind."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import describe_module
from ckptplan.clock import now_s
from ckptplan.costs import StageCost
from ckptplan.memory import MemoryMeter, make_meter
from ckptplan.observe import Observation, observe
from ckptplan.randomness import torch_state
from ckptplan.recompute import Guards, buffer_slots, run_on_copies, run_recomputed
from ckptplan.signatures import value_signature
from ckptplan.stages import (
    GradientLayout,
    Mark,
    StageForward,
    StageRun,
    gradients_handed_back,
    stage_backward,
    stage_bytes,
    stage_flops,
    time_stage,
    weight_copies,
)
from ckptplan.trace import BlockCall, autocast_as, forget_graphs
from ckptplan.trees import array_hash, distinct_storages, storage_key, tensors_in


@dataclass
class Kind:
    """One distinct kind of block: an example of it and everything measured on it."""

    module: nn.Module
    call: BlockCall
    observation: Observation
    output_bytes: tuple[int, ...]
    output_is_input: tuple[int | None, ...]
    output_gradient_bytes: int
    differentiable: bool
    arriving: GradientLayout | None = None  # how the next stage hands back the gradients of the output
    pinned: tuple[int, ...] = ()  # positions of those that somebody else holds on to
    waiting: GradientLayout = field(default_factory=dict)  # parts of its inputs' gradients that have come already
    handed_back: GradientLayout = field(default_factory=dict)
    copied_weights: tuple[nn.Parameter, ...] = ()  # of which autocast makes copies
    keep: StageCost | None = None
    recompute: StageCost | None = None
    guard_bytes: int = 0
    replay_copy_bytes: int = 0
    random_state_bytes: int = 0
    stopped_forward_peak_bytes: int | None = None
    replayed_backward_peak_bytes: int | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None
    recompute_flops: int | None = None

    @property
    def exclusion_reason(self) -> str | None:
        if not self.differentiable:
            return "no gradient flows through its output, so it saves nothing"
        return self.observation.exclusion_reason

    @property
    def guards(self) -> Guards:
        names = self.observation.mutated_buffers
        return Guards(buffer_slots(self.module, names) if names else (), (self.module,))


def kind_key(
    module: nn.Module,
    call: BlockCall,
    arriving: GradientLayout | None,
    observation: Observation,
    pinned: tuple[int, ...] = (),
    waiting: GradientLayout | None = None,
) -> str:
    """Equal for blocks that do the same with the same memory; gradients that fill storages of their own are usual."""
    count = len({id(t) for t in tensors_in(call.output) if t.requires_grad})
    is_usual = arriving is None or (len(arriving) == count and not any(arriving.values()))
    gradients = "" if is_usual else repr(sorted((arriving or {}).items()))
    gradients += f" pinned {pinned}" if pinned else ""
    gradients += f" waiting {sorted(waiting.items())}" if waiting else ""
    return _hash(
        _computation(module, call),
        call.signature,
        str(call.autocast),
        str(call.with_gradients),
        gradients,
        repr(observation),
    )


def time_key(module: nn.Module, call: BlockCall) -> str:
    """Equal for blocks that compute the same on the same shapes, whether or not their input wants a gradient.

    They share one measured time, so that noise cannot prefer the first block of a chain to the others.
    """
    return _hash(_computation(module, call), value_signature((call.args, call.kwargs)), str(call.autocast))


# Settings that say where a block stands; what a block does by them, beyond numbers, shows in the operators it runs.
PLACE_IN_MODEL = ("layer_idx",)


def _computation(module: nn.Module, call: BlockCall) -> str:
    """What a block computes with, its buffers' first values included: a flag among them may decide what it does.

    Statistics of normalization layers decide nothing but values.
    """
    lines = [describe_module(module, exact=True, without=PLACE_IN_MODEL), call.operators]
    for name, buffer in call.first.buffers.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.modules.batchnorm._NormBase):
            lines.append(f"{name}:{array_hash(buffer)}")
    return "\n".join(lines)


def _hash(*texts: str) -> str:
    return hashlib.sha256("|".join(texts).encode()).hexdigest()[:16]


def observe_block(module: nn.Module, call: BlockCall, device: torch.device) -> Observation:
    """``observe`` under the autocast that the block ran in."""
    return observe(module, call, _under_autocast(module, call, device), device)


def _under_autocast(module: nn.Module, call: BlockCall, device: torch.device) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast_as(device, call.autocast), torch.set_grad_enabled(call.with_gradients):
            return module(*args, **kwargs)

    return run


def examine(
    module: nn.Module,
    call: BlockCall,
    observation: Observation,
    device: torch.device,
    arriving: GradientLayout | None,
    pinned: tuple[int, ...] = (),
    waiting: GradientLayout | None = None,
) -> Kind:
    copies, args, kwargs = call.fresh()
    outputs = tensors_in(_under_autocast(module, call, device)(*args, **kwargs))
    inputs = [storage_key(t) for t in distinct_storages(copies)]
    storages = distinct_storages(outputs)
    outside = {storage_key(t) for t in (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers())}
    is_input = tuple(inputs.index(storage_key(t)) if storage_key(t) in inputs else None for t in storages)
    own = [i is None and storage_key(t) not in outside for i, t in zip(is_input, storages, strict=True)]
    kind = Kind(
        module=module,
        call=call,
        observation=observation,
        output_bytes=tuple(t.untyped_storage().nbytes() if o else 0 for t, o in zip(storages, own, strict=True)),
        output_is_input=is_input,
        output_gradient_bytes=_gradient_bytes(outputs, arriving),
        differentiable=any(t.requires_grad for t in outputs),
        arriving=arriving,
        pinned=pinned,
        waiting=waiting or {},
    )
    kind.handed_back = gradients_handed_back(block_forward(kind, device, None))
    return kind


def _gradient_bytes(outputs: list[torch.Tensor], arriving: GradientLayout | None) -> int:
    distinct = list({id(t): t for t in outputs}.values())
    layout = arriving or dict.fromkeys(range(len(distinct)))
    present = [(layout[i], t) for i, t in enumerate(distinct) if t.requires_grad and i in layout]
    shared = {g.storage: g.storage_bytes for g, _ in present if g is not None}
    return sum(shared.values()) + sum(t.numel() * t.element_size() for g, t in present if g is None)


def block_forward(kind: Kind, device: torch.device, guards: Guards | None, call: Any = None) -> StageForward:
    module = kind.module if call is None else call

    def forward(mark: Mark) -> StageRun:
        if kind.call.first.graph_kept_in is not None:
            forget_graphs(kind.module)  # of the run before, which a step does not find either
        mark("start")
        handed_back: GradientLayout = {}
        copies, args, kwargs = kind.call.fresh(handed_back)
        standing = kind.call.standing | _memory_outside(kind, copies, args, kwargs)
        mark("ready")
        with autocast_as(device, kind.call.autocast), torch.set_grad_enabled(kind.call.with_gradients):
            if guards is None:
                output = module(*args, **kwargs)
            else:
                output = run_recomputed(module, guards, *args, **kwargs)
        return StageRun(
            copies,
            output,
            arriving=kind.arriving,
            pinned=kind.pinned,
            inputs_waiting=kind.waiting,
            handed_back=handed_back,
            standing=standing,
        )

    return forward


def _memory_outside(kind: Kind, copies: Sequence[torch.Tensor], args: Any, kwargs: Any) -> frozenset[int]:
    """By ``storage_key``: weights, buffers and what the step does not make (the batch); a block may hand that on."""
    made = {storage_key(t) for t in copies}
    outside = (*tensors_in((args, kwargs)), *kind.module.parameters(), *kind.module.buffers())
    return frozenset(storage_key(t) for t in outside) - made


def settled_bytes(forward: StageForward, device: torch.device, memory: str) -> StageCost:
    time_stage(forward, lambda: None)  # lazily made workspaces are there afterwards
    return stage_bytes(forward, make_meter(device, memory))


def measure_bytes_and_flops(kind: Kind, device: torch.device, memory: str) -> None:
    kept = block_forward(kind, device, None)
    kind.forward_flops, kind.backward_flops = stage_flops(kept)
    if memory != "off":
        copies = weight_copies(kept)
        kind.copied_weights = copies.weights
        kind.keep = replace(settled_bytes(kept, device, memory), weight_copies_bytes=copies.saved_bytes)
    if kind.exclusion_reason is None:
        again = block_forward(kind, device, kind.guards)
        kind.recompute_flops = stage_flops(again)[1] - kind.backward_flops
        if memory != "off":
            kind.recompute = replace(settled_bytes(again, device, memory), weight_copies_bytes=0)
            _measure_guards(kind, device, memory)


def _measure_guards(kind: Kind, device: torch.device, memory: str) -> None:
    """What of a recomputation's saved bytes is not each block's own where several are recomputed together."""
    assert kind.keep is not None
    slots = kind.guards.buffers
    meter = make_meter(device, memory)
    with meter:
        meter.mark("start")
        starts = [getattr(owner, name).detach().clone() for owner, name in slots]
        meter.mark("copied")
        states = torch_state(device) if kind.observation.draws_random else []
        meter.mark("noted")
    del states
    kind.guard_bytes = meter.level("copied") - meter.level("start")
    kind.random_state_bytes = meter.level("noted") - meter.level("copied")
    _measure_run_in_backward(kind, device, make_meter(device, memory))
    if slots:
        on_copies = functools.partial(run_on_copies, kind.module, slots, starts)
        forward = block_forward(kind, device, None, on_copies)
        on_copies_bytes = stage_bytes(forward, make_meter(device, memory)).saved_bytes
        # A block that replaces its buffer holds the new one after a plain run, and none after a run on copies.
        kind.replay_copy_bytes = max(0, on_copies_bytes - kind.keep.saved_bytes)


def _measure_run_in_backward(kind: Kind, device: torch.device, meter: MemoryMeter) -> None:
    """Peaks of a recomputation's two parts: the run in backward, and the backward behind it."""
    assert kind.recompute is not None
    num_calls = 0

    def marked(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return kind.module(*args, **kwargs)
        meter.mark("again")
        try:
            return kind.module(*args, **kwargs)
        finally:  # early stop leaves by an exception
            meter.mark("stopped")

    forward = block_forward(kind, device, kind.guards, marked)
    with meter:
        run = stage_backward(forward, meter.mark)
        meter.mark("done")
    if num_calls < 2:
        return  # backward needed nothing
    kept_input_bytes = sum(
        tensor.untyped_storage().nbytes()
        for tensor, kept in zip(distinct_storages(kind.call.boundary), kind.recompute.keeps_input, strict=True)
        if kept and storage_key(tensor) not in kind.call.standing
    )
    held_bytes = meter.level("start") + kept_input_bytes + kind.recompute.saved_bytes
    kind.stopped_forward_peak_bytes = meter.peak("again", "stopped") - meter.level("again")
    kind.replayed_backward_peak_bytes = max(0, meter.peak("stopped", "done") - held_bytes)
    del run


def with_loss(cost: StageCost, held_bytes: int) -> StageCost:
    """The stage where so many bytes stand all through its backward."""
    return cost.with_backward_peaks(lambda peak_bytes: peak_bytes + held_bytes)


def time_again(
    kind: Kind, device: torch.device, synchronize: Callable[[], None], kept_forward_ms: float
) -> float | None:
    """Milliseconds that PyTorch's checkpoint adds to a step; None where the block is not recomputed.

    The recomputation inside one backward, which ends where the early stop ends it, and what the forward takes longer
    than ``kept_forward_ms``, its time just now without a checkpoint: what a replay is charged with too.
    """
    if kind.exclusion_reason is not None:
        return None
    stopwatch = _Stopwatch(kind.module, synchronize)
    forward_ms, _ = time_stage(block_forward(kind, device, kind.guards, stopwatch), synchronize)
    return max(0.0, stopwatch.again_ms + forward_ms - kept_forward_ms)


class _Stopwatch:
    """Calls a module and times its second call."""

    def __init__(self, module: nn.Module, synchronize: Callable[[], None]) -> None:
        self.module, self.synchronize = module, synchronize
        self.calls = 0
        self.again_ms = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.module(*args, **kwargs)
        self.synchronize()
        start_s = now_s()
        try:
            return self.module(*args, **kwargs)
        finally:  # early stop leaves by an exception
            self.synchronize()
            self.again_ms += (now_s() - start_s) * 1e3


def activation_bytes(kind: Kind) -> int | None:
    if kind.keep is None:
        return None
    kept = zip(kind.output_bytes, kind.output_is_input, kind.keep.keeps_output, strict=True)
    return kind.keep.saved_bytes + sum(size for size, is_input, keeps in kept if keeps and is_input is None)
