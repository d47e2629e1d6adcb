"""Time that is computed: a clock that every operator moves on by what it would take on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_memory.py
from torch.utils.flop_counter import flop_registry, shape_wrapper

from ckptplan.devices import ATTENTION, CONVOLUTION, MATRIX, NORM, POINTWISE, TRANSCENDENTAL, Rates
from ckptplan.stages import CPU_FLOPS
from ckptplan.trees import storage_key, tensors_in

aten = torch.ops.aten

_TICK_S = 2.0**-40  # a picosecond; sums of whole ticks are exact, so that equal work takes equal times at any moment
_OF_CPU = {packet: shape_wrapper(flops) for packet, flops in CPU_FLOPS.items()}
# Operators that read only the part of a table that is asked for, so that its size does not count.
_LOOK_UPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward})
_NO_WORK = frozenset({aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided})
_KINDS = {
    ATTENTION: ("scaled_dot_product", "attention"),
    CONVOLUTION: ("conv",),
    NORM: ("norm",),
    TRANSCENDENTAL: (
        *("softmax", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "erf", "sin", "cos", "mish", "elu", "softplus"),
        *("native_dropout", "bernoulli", "pow", "rsqrt", "sqrt"),
    ),
}


def kind_of_work(func: Any) -> str:
    """By the operator's name; what has FLOPs and none of these names is a matrix product."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_")
    for kind, parts in _KINDS.items():
        if any(part in name for part in parts):
            return kind
    return MATRIX if _flops_of(func) is not None else POINTWISE


def _flops_of(func: Any) -> Callable[..., int] | None:
    packet = func.overloadpacket
    return _OF_CPU.get(packet) or flop_registry.get(packet)


class ComputedClock(TorchDispatchMode):
    """``now_s`` moves on by each operator's time at ``rates``; operators that only make views take none.

    To be entered outside everything else that watches operators, so that it sees what really runs.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.elapsed_s = 0.0

    def now_s(self) -> float:
        return self.elapsed_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.elapsed_s += self._seconds(func, args, kwargs, out)
        return out

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        outputs = tensors_in(out)
        if not outputs or func.overloadpacket in _NO_WORK:
            return 0.0
        inputs = tensors_in((args, kwargs))
        known = {storage_key(t) for t in inputs}
        if not func._schema.is_mutable and all(storage_key(t) in known for t in outputs):
            return 0.0  # a view
        count = _flops_of(func)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        if kind_of_work(func) == ATTENTION and _is_causal(func, args, kwargs):
            flops //= 2  # the kernels skip what is masked, the counter does not
        kind = kind_of_work(func)
        if flops == 0 and kind in (MATRIX, ATTENTION, CONVOLUTION):
            kind = POINTWISE
        moved = 2 * _bytes(outputs) if func.overloadpacket in _LOOK_UPS else _bytes(inputs) + _bytes(outputs)
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        return round(self.rates.seconds(kind, dtype, flops, moved) / _TICK_S) * _TICK_S


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
