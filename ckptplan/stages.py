"""Running one stage of a chain alone, as it runs inside the whole step: its bytes, its time, its FLOPs.

A stage is a block (kept, or recomputed), what runs before the first block, or what runs after the last
one. Alone it behaves as in the chain because its inputs are owned by nobody but the stage, its output
handles are dropped before the backward, and the incoming gradient is freshly allocated and owned by the
autograd engine (knowledge: docs/design.md, section 4).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_memory.py
from torch.utils.flop_counter import FlopCounterMode

from ckptplan.clock import now_s
from ckptplan.costs import InputsLetGo, StageCost
from ckptplan.memory import MemoryMeter
from ckptplan.trees import distinct_storages, storage_key, tensors_in

Mark = Callable[[str], None]


@dataclass(frozen=True)
class SharedGradient:
    """A gradient that does not fill a storage of its own: a slice of a concatenation's, one expanded number.

    Attributes:
        storage: gradients of equal number lie in one storage.
    """

    storage: int
    storage_bytes: int
    stride: tuple[int, ...]
    offset: int


# Per position among a boundary's tensors how its gradient lies in memory as the next stage hands it back: None
# for a storage of its own, a missing position where no gradient comes.
GradientLayout = dict[int, SharedGradient | None]


@dataclass
class StageRun:
    """What a stage's forward gives back. Emptied by whoever measures, so that nothing outlives its owner.

    Attributes:
        inputs: boundary tensors that came in.
        output: what goes out; for the last stage the loss.
        arriving: how the gradients of the output's tensors come in; None: each on a storage of its own.
        pinned: positions of those that somebody else holds to the end.
        waiting: weights for which a part of the gradient has come from later stages already.
        inputs_waiting: the same for tensors of the boundary, by position.
        handed_back: filled by the backward, for the tensors of the boundary that came in.
        beside: what the model may hold meanwhile without it being the stage's; kept to the end, so that it cancels out.
        standing: memory that stands before the step and after it (weights, the batch, views of them), by
            ``storage_key``, in which inputs and outputs may lie.
    """

    inputs: list[torch.Tensor]
    output: Any
    is_loss: bool = False
    arriving: GradientLayout | None = None
    pinned: tuple[int, ...] = ()
    waiting: list[torch.Tensor] = field(default_factory=list)
    inputs_waiting: GradientLayout = field(default_factory=dict)
    handed_back: GradientLayout = field(default_factory=dict)
    beside: Any = None
    standing: frozenset[int] = frozenset()


# A stage as a function: it makes its inputs, calls mark("start") before and mark("ready") after
# that, and runs its forward.
StageForward = Callable[[Mark], StageRun]

Bases = dict[int, torch.Tensor]  # copied storages, by ``storage_key`` of the original


class OwnedCopies(torch.autograd.Function):
    """Copies that belong to the graph alone: non-leaf tensors whose gradients are dropped on arrival.

    One node for all of them: the gradients wait for each other as they do in front of a block. How they
    arrived is noted by position in ``handed_back``.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, bases: Bases, handed_back: GradientLayout, *sources: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.handed_back = handed_back
        return tuple(None if source is None else copy_of(source, bases) for source in sources)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.handed_back.update(layout_of(gradients))
        return (None,) * (len(gradients) + 3)


def layout_of(gradients: Sequence[torch.Tensor | None]) -> GradientLayout:
    """Per position of a gradient that is there how it lies in memory."""
    present = {i: g for i, g in enumerate(gradients) if g is not None}
    keys = [storage_key(g) for g in present.values()]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    layout: GradientLayout = {}
    for (position, gradient), key in zip(present.items(), keys, strict=True):
        size = gradient.untyped_storage().nbytes()
        is_own = keys.count(key) == 1 and size == gradient.numel() * gradient.element_size()
        shared = SharedGradient(numbers[key], size, gradient.stride(), int(gradient.storage_offset()))
        layout[position] = None if is_own else shared
    return layout


class EngineOwnedGradients(torch.autograd.Function):
    """A root whose backward allocates the gradients of the outputs anew, as the next stage would."""

    @staticmethod
    def forward(
        ctx: Any, layout: Sequence[SharedGradient | None], pinned: Sequence[bool], *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.specs = [(g, o.shape, o.new_empty(0)) for g, o in zip(layout, outputs, strict=True)]
        ctx.pinned = pinned
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = allocate_gradients(ctx.specs)
        ctx.held = [gradient for gradient, is_pinned in zip(made, ctx.pinned, strict=True) if is_pinned]
        return (None, None, *made)


# How it lies in memory, its shape, and an empty tensor of its dtype and device (a fake one where gradients are fake).
GradientSpec = tuple[SharedGradient | None, torch.Size, torch.Tensor]


def allocate_gradients(specs: Sequence[GradientSpec]) -> list[torch.Tensor]:
    """Gradients that lie in memory as ``specs`` say."""
    bases: dict[int, torch.Tensor] = {}
    made = []
    for gradient, shape, like in specs:
        if gradient is None:
            made.append(like.new_full(shape, 1e-3))
            continue
        if gradient.storage not in bases:
            size = gradient.storage_bytes // like.element_size()
            bases[gradient.storage] = like.new_full((size,), 1e-3)
        made.append(bases[gradient.storage].as_strided(shape, gradient.stride, gradient.offset))
    return made


def copy_of(tensor: torch.Tensor, bases: Bases) -> torch.Tensor:
    """A copy with the same strides on a copy of the whole storage (a slice keeps its whole base alive).

    ``bases`` holds the storages copied so far, so that tensors that share memory still do. The copy is no
    view for autograd, so that a block may change it in place as it may change an inner value.
    """
    key = storage_key(tensor)
    if key not in bases:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        base = tensor.new_empty(size)
        bases[key] = base.copy_(tensor.detach().as_strided((size,), (1,), 0))
    base = bases[key]
    copied = tensor.new_empty(0)
    copied.data = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return copied


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies without a graph, with the gradient flags of ``tensors``; what shares memory still does."""
    bases: Bases = {}
    return [copy_of(t, bases).requires_grad_(t.requires_grad) for t in tensors]


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, flat; no view for autograd."""
    storage = tensor.untyped_storage()
    flat = tensor.new_empty(0)
    flat.data = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
    return flat


def own_copies(
    tensors: Sequence[torch.Tensor],
    handed_back: GradientLayout | None = None,
    standing: Collection[int] = (),
) -> list[torch.Tensor]:
    """Copies of ``tensors``; those that require gradients are non-leaf tensors.

    Args:
        handed_back: takes how the gradients of the copies lie in memory when they arrive.
        standing: memory, by ``storage_key``, that is not copied: the copies lie in it too.
    """
    bases: Bases = {storage_key(t): base_of(t) for t in tensors if storage_key(t) in standing}
    made: Sequence[torch.Tensor | None] = [None] * len(tensors)
    if any(t.requires_grad for t in tensors):
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
        noted = {} if handed_back is None else handed_back
        made = OwnedCopies.apply(anchor, bases, noted, *(t.detach() if t.requires_grad else None for t in tensors))
    return [copy_of(t, bases) if own is None else own for t, own in zip(tensors, made, strict=True)]


HEAD = "gradient of the output"


@contextmanager
def output_gradient_marked(model: nn.Module, mark: Mark) -> Iterator[None]:
    """Marks ``HEAD`` when the backward of a forward inside comes to what ``model`` returned."""

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        seen: list[bool] = []

        def arrived(gradient: torch.Tensor) -> None:
            if not seen:
                seen.append(True)
                mark(HEAD)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(arrived)

    handle = model.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def head_backward_peak(forward: StageForward, meter: MemoryMeter, cost: StageCost) -> int | None:
    """Of head and loss, measured as ``cost`` is: the backward peak behind ``HEAD``; None: it was not seen.

    What stands beside the stage in ``cost``, and not in this measurement, is taken to stand there throughout.
    """
    plain = stage_bytes(forward, meter)
    if HEAD not in meter.marks("saved", "done"):
        return None
    behind = meter.peak(HEAD, "done") - meter.peak("saved", "done")
    return max(0, plain.backward_peak_bytes + behind + cost.backward_peak_bytes - plain.backward_peak_bytes)


def stage_bytes(forward: StageForward, meter: MemoryMeter) -> StageCost:
    """Bytes of one stage by one forward and one backward under ``meter`` (see ``StageCost``)."""
    with meter:
        run = forward(meter.mark)
        meter.mark("forward")
        in_sizes, in_alive = _watch(run.inputs, run.standing)
        own_outputs = [] if run.is_loss else tensors_in(run.output)
        passed = {id(t.untyped_storage()) for t in run.inputs}
        out_sizes, out_alive = _watch(own_outputs, run.standing)
        is_own = [id(t.untyped_storage()) not in passed for t in distinct_storages(own_outputs)]
        root = _root(run)
        del own_outputs
        run.inputs.clear()
        run.output = None
        keeps_input = tuple(ref() is not None for ref in in_alive)
        keeps_output = tuple(ref() is not None for ref in out_alive)
        letting = _watch_kept(in_alive, meter)
        meter.mark("saved")
        _backward(root)
        meter.mark("done")
    kept_input_bytes = sum(size for size, kept in zip(in_sizes, keeps_input, strict=True) if kept)
    kept_output_bytes = sum(
        size for size, kept, own in zip(out_sizes, keeps_output, is_own, strict=True) if kept and own
    )
    start = meter.level("start")
    base_bytes = start + kept_input_bytes
    backward_peak_bytes = max(0, meter.peak("saved", "done") - base_bytes)
    gone = [(mark, index, in_sizes[index]) for mark, index in letting.gone]
    return StageCost(
        saved_bytes=max(0, meter.level("saved") - start - kept_input_bytes - kept_output_bytes),
        forward_peak_bytes=meter.peak("ready", "forward") - meter.level("ready"),
        backward_peak_bytes=backward_peak_bytes,
        keeps_input=keeps_input,
        keeps_output=keeps_output,
        inputs_let_go=inputs_let_go(meter, gone, "done", base_bytes, backward_peak_bytes),
    )


def _watch_kept(inputs: Sequence[weakref.ref[torch.UntypedStorage]], meter: MemoryMeter) -> Letting:
    """The inputs that are still there, watched; in a function of its own, as a name for one would keep it there."""
    letting = Letting(meter.mark)
    for index, ref in enumerate(inputs):
        storage = ref()
        if storage is not None:
            letting.watch(storage, index)
    return letting


@dataclass(frozen=True)
class WeightCopies:
    """Copies of weights in a narrower type, as autocast makes them.

    Attributes:
        weights: of which the forward makes copies, each once.
        saved_bytes: of the copies that the stage's graph holds until its backward.
    """

    weights: tuple[nn.Parameter, ...]
    saved_bytes: int


def weight_copies(forward: StageForward) -> WeightCopies:
    """Those of a stage, by one forward."""
    with CopyWatch() as watch:
        run = forward(lambda name: None)
    root = _root(run)  # holds the graph, and nothing else does
    run.inputs.clear()
    run.output = None
    alive = {id(storage): storage.nbytes() for _, ref in watch.found if (storage := ref()) is not None}
    del root
    return WeightCopies(tuple({id(w): w for w, _ in watch.found}.values()), sum(alive.values()))


class CopyWatch(TorchDispatchMode):
    """Notes the copies of weights in narrower types that are made while it is active, with their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[nn.Parameter, weakref.ref[torch.UntypedStorage]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_weight_copy(func, args, output):
            self.found.append((args[0], weakref.ref(output.untyped_storage())))
        return output


def is_weight_copy(func: Any, args: Any, output: Any) -> bool:
    """Whether an operator's call made a copy of a weight in a narrower type."""
    if func is not torch.ops.aten._to_copy.default or not isinstance(args[0], nn.Parameter):
        return False
    return bool(output.element_size() < args[0].element_size())


class Letting:
    """Marks a meter each time that a storage goes.

    A mark may be made while the memory is being freed, before that or behind it, so that only what rises afterwards
    is read.
    """

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.gone: list[tuple[str, Any]] = []  # the mark, and what stands for the storage
        self._refs: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(self, storage: torch.UntypedStorage, stands_for: Any) -> None:
        def note(_: weakref.ref[torch.UntypedStorage]) -> None:
            name = f"let go {len(self.gone)}"
            self.mark(name)
            self.gone.append((name, stands_for))

        self._refs.append(weakref.ref(storage, note))


def inputs_let_go(
    meter: MemoryMeter, gone: Sequence[tuple[str, int, int]], end: str, base_bytes: int, backward_peak_bytes: int
) -> tuple[InputsLetGo, ...]:
    """``StageCost.inputs_let_go`` from the marks of a backward; those that can never raise its peak are left out.

    Args:
        gone: per input in the order in which they went: the mark, which input, its bytes.
        end: the mark behind the backward.
        base_bytes: what ``backward_peak_bytes`` is counted from.
    """
    found: list[InputsLetGo] = []
    waiting: list[int] = []
    freed_bytes = 0
    for number, (mark, index, size_bytes) in enumerate(gone, start=1):
        waiting.append(index)
        freed_bytes += size_bytes
        risen_bytes = meter.rise(mark, gone[number][0] if number < len(gone) else end)
        if risen_bytes is not None and risen_bytes - base_bytes + freed_bytes > backward_peak_bytes:
            found.append(InputsLetGo(tuple(waiting), risen_bytes - base_bytes + freed_bytes))
            waiting = []
    return tuple(found)


def _watch(
    tensors: Sequence[torch.Tensor], standing: Collection[int]
) -> tuple[list[int], list[weakref.ref[torch.UntypedStorage]]]:
    distinct = distinct_storages(tensors)
    sizes = [0 if storage_key(t) in standing else t.untyped_storage().nbytes() for t in distinct]
    return sizes, [weakref.ref(t.untyped_storage()) for t in distinct]


def _root(run: StageRun) -> torch.Tensor | None:
    if run.is_loss:
        return run.output if run.output.requires_grad else None
    outputs = list({id(t): t for t in tensors_in(run.output)}.values())
    arriving = run.arriving or dict.fromkeys(range(len(outputs)))
    chosen = [(arriving[i], i in run.pinned, t) for i, t in enumerate(outputs) if t.requires_grad and i in arriving]
    chosen += [(None, False, weight) for weight in run.waiting]
    chosen += [(gradient, False, run.inputs[i]) for i, gradient in run.inputs_waiting.items()]
    if not chosen:
        return None
    layout, pinned, tensors = zip(*chosen, strict=True)
    return EngineOwnedGradients.apply(layout, pinned, *tensors)


def _backward(root: torch.Tensor | None) -> None:
    """The backward runs outside autocast, as in a training step."""
    if root is not None:
        with torch.autocast(root.device.type, enabled=False):
            root.backward(torch.ones_like(root))


def time_stage(forward: StageForward, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of one forward (from "ready") and one backward, the device waited for around each."""
    ready_s = 0.0

    def mark(name: str) -> None:
        nonlocal ready_s
        synchronize()
        ready_s = now_s()

    run = forward(mark)
    synchronize()
    forward_s = now_s() - ready_s
    root = _root(run)
    run.inputs.clear()
    run.output = None
    synchronize()
    start_s = now_s()
    _backward(root)
    synchronize()
    return forward_s * 1e3, (now_s() - start_s) * 1e3


def stage_flops(forward: StageForward) -> tuple[int, int]:
    """Floating-point operations of matrix products, convolutions and attention: (forward, backward)."""
    with count_flops() as forward_counter:
        run = forward(lambda name: None)
    root = _root(run)
    run.inputs.clear()
    run.output = None
    with count_flops() as backward_counter:
        _backward(root)
    return forward_counter.get_total_flops(), backward_counter.get_total_flops()


def gradients_handed_back(forward: StageForward) -> GradientLayout:
    """How the gradients of a stage's inputs lie in memory, by one forward and backward."""
    return stage_backward(forward).handed_back


def stage_backward(forward: StageForward, mark: Mark = lambda name: None) -> StageRun:
    """One forward and backward; returns the emptied run."""
    run = forward(mark)
    root = _root(run)
    run.inputs.clear()
    run.output = None
    _backward(root)
    return run


def count_flops() -> FlopCounterMode:
    """torch's counter, with the CPU's fused attention and recurrent layers added, which it does not know."""
    return FlopCounterMode(display=False, custom_mapping=CPU_FLOPS)


def _attention_forward_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two products: scores = Q K^T and output = scores V; shapes (batch, heads, length, width)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Five products: the scores again, and the gradients of V, of the scores, of Q and of K."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


def _rnn_layer_flops(inputs: Any, input_weight: Any, hidden_weight: Any, *args: Any, **kwargs: Any) -> int:
    """One layer in one direction: two products a step, with all gates; shapes (length, batch, width)."""
    length, batch, _ = inputs
    return 2 * length * batch * (math.prod(input_weight) + math.prod(hidden_weight))


def _rnn_layer_backward_flops(inputs: Any, input_weight: Any, hidden_weight: Any, *args: Any, **kwargs: Any) -> int:
    """Two products for each of the forward's: the gradients of what comes in and of the weights."""
    return 2 * _rnn_layer_flops(inputs, input_weight, hidden_weight)


# By operator, from shapes.
CPU_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _rnn_layer_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _rnn_layer_backward_flops,
}
