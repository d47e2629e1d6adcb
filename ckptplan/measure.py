"""Running the blocks of a model to find out what they cost.

Every distinct kind of block is measured once, alone (see ``stages.py``), on a twin of the model, so that
parameters, gradients, buffers, random streams, attributes and hooks of the caller's model are left as
they were. Memory and time are taken in separate runs.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import CheckpointableBlock, call_block, describe_module, model_fingerprint, select_blocks
from ckptplan.discovery import find_blocks
from ckptplan.errors import NoDifferentiableOutputError
from ckptplan.memory import make_meter
from ckptplan.observe import Observation, observe
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile, StageCost
from ckptplan.randomness import random_state_restored
from ckptplan.recompute import Guards, buffer_slots, run_recomputed
from ckptplan.stages import Mark, StageForward, StageRun, own_copies, stage_bytes, stage_flops, time_stage
from ckptplan.trace import (
    BlockCall,
    ChainTrace,
    StopAtFirstBlock,
    autocast_as,
    exchanged_forwards,
    trace_chain,
    value_signature,
)
from ckptplan.trees import distinct_storages, map_tensors, storage_key, tensors_in
from ckptplan.twin import make_twin

LossFn = Callable[[nn.Module, Any], torch.Tensor]


class PlainChain(nn.Module):
    """Blocks run one after the other, all kept."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        value: Any = inputs
        for module in self.blocks:
            value = call_block(module, value, kwargs)
        return value


@dataclass(frozen=True)
class Trials:
    """How often to run for the times: ``num_warmup`` not counted, then ``num_trials``."""

    num_warmup: int = 3
    num_trials: int = 10

    def __post_init__(self) -> None:
        for name, least in (("num_warmup", 0), ("num_trials", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number")
            if value < least:
                raise ValueError(f"{name}={value} is too small; expected at least {least}")


def profile_blocks(
    blocks: Sequence[CheckpointableBlock],
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    num_warmup: int = 3,
    num_trials: int = 10,
    memory: str = "auto",
    make_target: Callable[[Any], torch.Tensor] | None = None,
) -> ChainProfile:
    """What each block of a plain chain costs, in bytes, milliseconds and FLOPs.

    Args:
        blocks: what ``declare_blocks`` gave.
        example_inputs: positional arguments of the first block; a tensor that requires a gradient gets one.
        example_kwargs: keyword arguments for every block that takes them by name.
        device: where the blocks and inputs are; nothing is moved.
        dtype: if given, the floating-point dtype that every parameter must have.
        num_warmup, num_trials: runs for the times.
        memory: "auto" (the device's allocator), "cpu", "cuda", "live" (tensors only) or "off".
        make_target: output of the chain -> scalar loss. Measured where given, else the loss is assumed to
            cost the gradient of the output only.

    Raises:
        ValueError, TypeError: no blocks, wrong device or dtype, bad counts.
        BlockDeclarationError, UnsupportedBoundaryError: the blocks do not form a chain.
        NoDifferentiableOutputError: no block has an output that a gradient flows through.
    """
    if not blocks:
        raise ValueError("blocks is empty; declare at least one block")
    if not isinstance(example_inputs, tuple):
        raise TypeError(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple of arguments")
    kwargs = dict(example_kwargs or {})
    target = make_target

    def step(model: nn.Module, batch: Any) -> Any:
        output = model(*batch[0], **batch[1])
        return output if target is None else target(output)

    chain = PlainChain([b.module for b in blocks])
    return _profile(
        chain,
        blocks,
        (example_inputs, kwargs),
        step,
        device=torch.device(device),
        dtype=dtype,
        trials=Trials(num_warmup, num_trials),
        memory=memory,
        has_loss=make_target is not None,
    )


def profile_model(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | torch.device | None = None,
    num_warmup: int = 3,
    num_trials: int = 10,
    memory: str = "auto",
    check_stop: Callable[[], None] = lambda: None,
) -> ChainProfile:
    """What each block of ``model`` costs, and what the model runs before and after them.

    Args:
        model: any module that runs its blocks once, in order, each on what the previous one returned.
        blocks: declared blocks, or their module paths or globs (``"layers.*"``); None: those that
            ``model.declared_blocks()`` gives, else found by one forward.
        batch: handed to ``loss_fn``; its tensors stand before the step and are not counted.
        loss_fn: ``loss_fn(model, batch)`` -> scalar loss.
        device: default: where the model's parameters are.
        check_stop: called between trials; may raise to end the profiling.

    Raises: as ``profile_blocks``.
    """
    where = torch.device(device) if device is not None else next(model.parameters()).device
    declared = _resolve_blocks(model, blocks, batch, loss_fn, where)
    if not declared:
        raise ValueError("blocks is empty; declare at least one block")
    return _profile(
        model,
        declared,
        batch,
        loss_fn,
        device=where,
        dtype=None,
        trials=Trials(num_warmup, num_trials),
        memory=memory,
        has_loss=True,
        check_stop=check_stop,
    )


def _resolve_blocks(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
    batch: Any,
    loss_fn: LossFn,
    device: torch.device,
) -> tuple[CheckpointableBlock, ...]:
    given = [blocks] if isinstance(blocks, str) else list(blocks or ())
    declared = [block for block in given if isinstance(block, CheckpointableBlock)]
    if declared and len(declared) == len(given):
        return tuple(declared)
    paths = [path for path in given if isinstance(path, str)]
    if len(paths) < len(given):
        raise TypeError(f"blocks={blocks!r}; expected what declare_blocks gave, or module paths, or None")
    selection = None if blocks is not None and not given else select_blocks(model, paths or None)
    if selection is None and blocks is None:
        selection = find_blocks(model, batch, loss_fn, device)
    return selection.blocks if selection else ()


def _profile(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock],
    batch: Any,
    step: Callable[[nn.Module, Any], Any],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    trials: Trials,
    memory: str,
    has_loss: bool,
    check_stop: Callable[[], None] = lambda: None,
) -> ChainProfile:
    require_placement(blocks, batch, device, dtype)
    if memory != "off":
        make_meter(device, memory)  # a wrong meter is told before work is spent
    with ExitStack() as stack:
        stack.enter_context(random_state_restored(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        subject = _Subject.of(model, blocks, batch, step, device, has_loss)
        return _measure(subject, trials, memory, check_stop)


def require_placement(
    blocks: Sequence[CheckpointableBlock], batch: Any, device: torch.device, dtype: torch.dtype | None
) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device='cuda' was asked for, but this PyTorch sees no CUDA device; use device='cpu'")
    for block in blocks:
        for name, tensor in (*block.module.named_parameters(), *block.module.named_buffers()):
            if isinstance(tensor, nn.parameter.UninitializedParameter):
                raise ValueError(f"{block.block_id}.{name} has no shape yet; run the model once before profiling it")
            if tensor.device.type != device.type:
                raise ValueError(
                    f"{block.block_id}.{name} is on {tensor.device}, device={str(device)!r} was asked for; "
                    "move the model first (model.to(device))"
                )
            is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            if dtype is not None and is_weight and tensor.dtype != dtype:
                raise ValueError(f"{block.block_id}.{name} is {tensor.dtype}, dtype={dtype} was asked for")
    for tensor in tensors_in(batch):
        if tensor.device.type != device.type:
            raise ValueError(
                f"an example input of shape {tuple(tensor.shape)} is on {tensor.device}, "
                f"device={str(device)!r} was asked for; move it first"
            )


@dataclass
class _Subject:
    """The twin that is measured, and how to run it."""

    names: list[str]
    modules: list[nn.Module]
    run_step: Callable[[], Any]
    outside: list[torch.Tensor]
    device: torch.device
    has_loss: bool
    fingerprint: str

    @staticmethod
    def of(
        model: nn.Module,
        blocks: Sequence[CheckpointableBlock],
        batch: Any,
        step: Callable[[nn.Module, Any], Any],
        device: torch.device,
        has_loss: bool,
    ) -> _Subject:
        twin, *modules = make_twin([model, *(b.module for b in blocks)])
        for parameter in twin.parameters():  # gradients stand before the step, so they count nothing
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        own_batch = private_batch(batch)
        return _Subject(
            names=[b.block_id for b in blocks],
            modules=list(modules),
            run_step=lambda: step(twin, own_batch),
            outside=tensors_in(own_batch),
            device=device,
            has_loss=has_loss,
            fingerprint=model_fingerprint(blocks),
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def private_batch(batch: Any) -> Any:
    """The batch on memory of its own, so that in-place operations do not reach the caller's."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if own.requires_grad:
            own.grad = torch.zeros_like(own)
        return own

    return map_tensors(batch, copied)


@dataclass
class _Kind:
    """One distinct kind of block: an example of it and everything measured on it."""

    module: nn.Module
    call: BlockCall
    observation: Observation
    output_bytes: tuple[int, ...]
    output_is_input: tuple[int | None, ...]
    output_gradient_bytes: int
    differentiable: bool
    keep: StageCost | None = None
    recompute: StageCost | None = None
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
        return Guards(self.observation.draws_random, buffer_slots(self.module, names) if names else ())


@dataclass
class _Clock:
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


def _measure(subject: _Subject, trials: Trials, memory: str, check_stop: Callable[[], None]) -> ChainProfile:
    trace = trace_chain(subject.names, subject.modules, subject.run_step, subject.outside, subject.device)
    keys = [_kind_key(m, c) for m, c in zip(subject.modules, trace.calls, strict=True)]
    time_keys = dict(
        zip(keys, (_time_key(m, c) for m, c in zip(subject.modules, trace.calls, strict=True)), strict=True)
    )
    kinds: dict[str, _Kind] = {}
    for key, module, call in zip(keys, subject.modules, trace.calls, strict=True):
        if key not in kinds:
            kinds[key] = _examine(module, call, subject.device)
    if not any(kind.differentiable for kind in kinds.values()):
        raise NoDifferentiableOutputError(
            f"no block has an output that a gradient flows through ({', '.join(subject.names)}): nothing is saved "
            "for backward, so there is nothing to plan. Are all parameters frozen?",
            subject.names,
        )
    regions = _regions(subject, trace)
    costs = _region_bytes(regions, subject, memory)
    for kind in kinds.values():
        check_stop()
        _measure_bytes_and_flops(kind, subject.device, memory)
    held = _loss_bytes(regions) if memory != "off" else 0
    for kind in kinds.values():
        kind.keep, kind.recompute = _with_loss(kind.keep, held), _with_loss(kind.recompute, held)
    if "pre" in costs:
        costs["pre"] = replace(costs["pre"], backward_peak_bytes=costs["pre"].backward_peak_bytes + held)
    timed: dict[str, _Kind] = {}
    for key, kind in kinds.items():
        if time_keys[key] not in timed or kind.exclusion_reason is None:
            timed[time_keys[key]] = kind
    clocks = _measure_times(timed, regions, subject, trials, check_stop)
    blocks = tuple(
        _block_profile(subject, order, key, kinds[key], clocks[time_keys[key]], trials, memory)
        for order, key in enumerate(keys)
    )
    first = trace.calls[0]
    return ChainProfile(
        blocks=blocks,
        pre=_region_profile("before the blocks", "pre", regions, costs, clocks, first.boundary),
        post=_region_profile("head and loss", "post", regions, costs, clocks, ()),
        input_bytes=() if trace.has_pre else (0,) * len(first.boundary),
        loss_region="measured" if subject.has_loss else "assumed",
        meter="off" if memory == "off" else make_meter(subject.device, memory).name,
        fingerprint=subject.fingerprint,
        environment=_environment(subject.device, first),
    )


def _loss_bytes(regions: dict[str, StageForward]) -> int:
    """The loss and its gradient, which stand until the last backward; ``post`` has them in its own figures."""
    if "post" not in regions:
        return 0
    loss = regions["post"](lambda name: None).output
    return 2 * int(loss.untyped_storage().nbytes())


def _with_loss(cost: StageCost | None, held_bytes: int) -> StageCost | None:
    return None if cost is None else replace(cost, backward_peak_bytes=cost.backward_peak_bytes + held_bytes)


def _kind_key(module: nn.Module, call: BlockCall) -> str:
    text = f"{describe_module(module, exact=True)}|{call.signature}|{call.autocast}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _time_key(module: nn.Module, call: BlockCall) -> str:
    """Equal for blocks that compute the same on the same shapes, whether or not their input wants a gradient.

    They share one measured time, so that noise cannot prefer the first block of a chain to the others.
    """
    text = f"{describe_module(module, exact=True)}|{value_signature((call.args, call.kwargs))}|{call.autocast}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _examine(module: nn.Module, call: BlockCall, device: torch.device) -> _Kind:
    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast_as(device, call.autocast):
            return module(*args, **kwargs)

    observation = observe(module, call, run, device)
    copies, args, kwargs = call.fresh()
    outputs = tensors_in(run(*args, **kwargs))
    inputs = [storage_key(t) for t in distinct_storages(copies)]
    storages = distinct_storages(outputs)
    outside = {storage_key(t) for t in (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers())}
    is_input = tuple(inputs.index(storage_key(t)) if storage_key(t) in inputs else None for t in storages)
    own = [i is None and storage_key(t) not in outside for i, t in zip(is_input, storages, strict=True)]
    with_gradient = {id(t): t.numel() * t.element_size() for t in outputs if t.requires_grad}
    return _Kind(
        module=module,
        call=call,
        observation=observation,
        output_bytes=tuple(t.untyped_storage().nbytes() if o else 0 for t, o in zip(storages, own, strict=True)),
        output_is_input=is_input,
        output_gradient_bytes=sum(with_gradient.values()),
        differentiable=bool(with_gradient),
    )


def _block_forward(kind: _Kind, device: torch.device, guards: Guards | None, call: Any = None) -> StageForward:
    module = kind.module if call is None else call

    def forward(mark: Mark) -> StageRun:
        mark("start")
        copies, args, kwargs = kind.call.fresh()
        mark("ready")
        with autocast_as(device, kind.call.autocast):
            if guards is None:
                output = module(*args, **kwargs)
            else:
                output = run_recomputed(module, guards, *args, **kwargs)
        return StageRun(copies, output)

    return forward


def _regions(subject: _Subject, trace: ChainTrace) -> dict[str, StageForward]:
    regions: dict[str, StageForward] = {}
    if trace.has_pre:
        regions["pre"] = _pre_forward(subject, len(trace.calls[0].boundary))
    if subject.has_loss:
        regions["post"] = _post_forward(subject, trace)
    return regions


def _pre_forward(subject: _Subject, count: int) -> StageForward:
    """Everything until the first block is called; its boundary tensors are the output."""
    standing = {storage_key(t) for t in subject.outside}

    def stop(*args: Any, **kwargs: Any) -> Any:
        given = {id(t): t for t in tensors_in((args, kwargs)) if storage_key(t) not in standing}
        raise StopAtFirstBlock(list(given.values())[:count])

    def forward(mark: Mark) -> StageRun:
        mark("start")
        mark("ready")
        try:
            with exchanged_forwards(subject.modules[:1], [stop]):
                subject.run_step()
        except StopAtFirstBlock as reached:
            boundary = reached.boundary
        return StageRun([], boundary)

    return forward


def _post_forward(subject: _Subject, trace: ChainTrace) -> StageForward:
    """Everything after the last block, whose place is taken by copies of its output; the loss is the output."""

    def forward(mark: Mark) -> StageRun:
        made: list[torch.Tensor] = []

        def last(*args: Any, **kwargs: Any) -> Any:
            output = trace.calls[-1].output
            sources = list({id(t): t for t in tensors_in(output)}.values())
            mark("start")
            made.extend(own_copies(sources))
            mark("ready")
            by_id = {id(old): new for old, new in zip(sources, made, strict=True)}
            return map_tensors(output, lambda t: by_id[id(t)])

        stands: list[Callable[..., Any]] = [_answer(call) for call in trace.calls[:-1]]
        with exchanged_forwards(subject.modules, [*stands, last]):
            loss = subject.run_step()
        _require_scalar(loss)
        return StageRun(made, loss, is_loss=True)

    return forward


def _answer(call: BlockCall) -> Callable[..., Any]:
    return lambda *args, **kwargs: call.output


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is {found}; expected a tensor with one element")


def _region_bytes(regions: dict[str, StageForward], subject: _Subject, memory: str) -> dict[str, StageCost]:
    return {name: _bytes(forward, subject.device, memory) for name, forward in regions.items() if memory != "off"}


def _bytes(forward: StageForward, device: torch.device, memory: str) -> StageCost:
    time_stage(forward, lambda: None)  # lazily made workspaces are there afterwards
    return stage_bytes(forward, make_meter(device, memory))


def _measure_bytes_and_flops(kind: _Kind, device: torch.device, memory: str) -> None:
    kept = _block_forward(kind, device, None)
    kind.forward_flops, kind.backward_flops = stage_flops(kept)
    if memory != "off":
        kind.keep = _bytes(kept, device, memory)
    if kind.exclusion_reason is None:
        again = _block_forward(kind, device, kind.guards)
        kind.recompute_flops = stage_flops(again)[1] - kind.backward_flops
        if memory != "off":
            kind.recompute = _bytes(again, device, memory)


def _measure_times(
    kinds: dict[str, _Kind],
    regions: dict[str, StageForward],
    subject: _Subject,
    trials: Trials,
    check_stop: Callable[[], None],
) -> dict[str, _Clock]:
    """All stages in turn, round by round, so that a slow moment of the machine hits all of them."""
    clocks = {name: _Clock([], [], []) for name in (*kinds, *regions)}
    for trial in range(-trials.num_warmup, trials.num_trials):
        for name, clock in clocks.items():
            check_stop()
            forward = regions[name] if name in regions else _block_forward(kinds[name], subject.device, None)
            forward_ms, backward_ms = time_stage(forward, subject.synchronize)
            again_ms = _time_again(kinds[name], subject) if name in kinds else None
            if trial >= 0:
                clock.forward_ms.append(forward_ms)
                clock.backward_ms.append(backward_ms)
                if again_ms is not None:
                    clock.again_ms.append(again_ms)
    return clocks


def _time_again(kind: _Kind, subject: _Subject) -> float | None:
    """Milliseconds of the recomputation inside one backward; it ends where PyTorch's early stop ends it."""
    if kind.exclusion_reason is not None:
        return None
    stopwatch = _Stopwatch(kind.module, subject.synchronize)
    time_stage(_block_forward(kind, subject.device, kind.guards, stopwatch), subject.synchronize)
    return stopwatch.again_ms


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
        start_s = time.perf_counter()
        try:
            return self.module(*args, **kwargs)
        finally:  # early stop leaves by an exception
            self.synchronize()
            self.again_ms += (time.perf_counter() - start_s) * 1e3


def _block_profile(
    subject: _Subject, order: int, key: str, kind: _Kind, clock: _Clock, trials: Trials, memory: str
) -> BlockProfile:
    module = subject.modules[order]
    parameters = list(module.parameters())
    return BlockProfile(
        block_id=subject.names[order],
        order=order,
        kind=key,
        activation_bytes_estimate=_estimate(kind),
        activation_bytes_method=None if kind.keep is None else "storages alive after the forward, by the allocator",
        timing_only=memory == "off",
        output_bytes=kind.output_bytes,
        output_is_input=kind.output_is_input,
        output_gradient_bytes=kind.output_gradient_bytes,
        keep=kind.keep,
        recompute=kind.recompute,
        forward_time_ms=_Clock.p50(clock.forward_ms),
        forward_time_ms_mean=_Clock.mean(clock.forward_ms),
        forward_time_ms_std=_Clock.std(clock.forward_ms),
        backward_time_ms=_Clock.p50(clock.backward_ms),
        recompute_time_ms=_Clock.p50(clock.again_ms),
        recompute_time_upper_bound_ms_mean=_Clock.mean(clock.forward_ms),
        recompute_time_ms_std=_Clock.std(clock.again_ms),
        forward_flops=kind.forward_flops,
        backward_flops=kind.backward_flops,
        recompute_flops=kind.recompute_flops,
        eligible_for_checkpoint=kind.exclusion_reason is None,
        exclusion_reason=kind.exclusion_reason,
        is_stochastic=kind.observation.draws_random,
        is_stateful=bool(kind.observation.mutated_buffers),
        mutated_buffers=kind.observation.mutated_buffers,
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


def _estimate(kind: _Kind) -> int | None:
    if kind.keep is None:
        return None
    kept = zip(kind.output_bytes, kind.output_is_input, kind.keep.keeps_output, strict=True)
    return kind.keep.saved_bytes + sum(size for size, is_input, keeps in kept if keeps and is_input is None)


def _dtype_of(parameters: Sequence[nn.Parameter]) -> str:
    return ",".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _region_profile(
    title: str,
    name: str,
    regions: dict[str, StageForward],
    costs: dict[str, StageCost],
    clocks: dict[str, _Clock],
    boundary: Sequence[torch.Tensor],
) -> RegionProfile | None:
    if name not in regions or name not in costs:
        return None
    forward_flops, backward_flops = stage_flops(regions[name])
    storages = distinct_storages(boundary)
    return RegionProfile(
        name=title,
        cost=costs[name],
        output_bytes=tuple(t.untyped_storage().nbytes() for t in storages),
        output_is_input=(None,) * len(storages),
        forward_time_ms=_Clock.p50(clocks[name].forward_ms),
        backward_time_ms=_Clock.p50(clocks[name].backward_ms),
        forward_flops=forward_flops,
        backward_flops=backward_flops,
    )


def _environment(device: torch.device, first: BlockCall) -> dict[str, Any]:
    enabled, dtype, cached = first.autocast
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "autocast": f"{dtype}, cache {'on' if cached else 'off'}" if enabled else "off",
    }
